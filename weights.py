"""Weights: how version v comes from the trainer to where the engine computes, while both go on working.

    one machine:      publish(v) ─▶ double buffer in shared memory ─▶ engine worker: stage_weights(); swap_weights()
    several machines: publish(v) ─▶ a copy, broadcast bucket by bucket ─▶ the same

A *version* is the number of optimizer steps that made the weights: 0 is the initial model. Both channels have the same
interface: `publish` for trainer rank 0; `version`, the newest that every actor can have without waiting; and for an
engine worker `join`, `offered`, the newest that it can pull, and `pull`.
"""

import bisect
import contextlib
import datetime
import functools
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from memory import SharedMemory

BUCKET_BYTES = 64 * 2**20
NO_MORE = -1  # announced after the last version
GRACE_S = 2.0  # until all have been told to stop, if that is why a connection was lost
A_DAY = datetime.timedelta(days=1)  # a transfer takes as long as the link needs; the launchers see who is lost


class Flat:
    """All weights of one version, one after the other, cut into buckets of at least `bucket_bytes` (but the last).

    layout: name -> shape of every tensor that travels, under the names of the checkpoint (a tied head is not there).
    allocate: number of elements -> memory for them. one_bucket: memory for one bucket alone, used for each in turn.
    """

    def __init__(self, layout: dict, allocate: Callable[[int], torch.Tensor], bucket_bytes: int = BUCKET_BYTES,
                 one_bucket: bool = False):  # fmt: skip
        numbers = {name: torch.Size(shape).numel() for name, shape in layout.items()}
        in_bucket, sizes, itemsize = {}, [0], allocate(0).itemsize
        for name, number in numbers.items():
            if sizes[-1] * itemsize >= bucket_bytes:
                sizes.append(0)
            sizes[-1] += number
            in_bucket[name] = len(sizes) - 1
        self.memory = allocate(max(sizes) if one_bucket else sum(sizes))
        self.buckets = [self.memory[:n] for n in sizes] if one_bucket else list(self.memory.split(sizes))
        self.tensors: dict[str, torch.Tensor] = {}  # views
        for i, bucket in enumerate(self.buckets):
            names = [name for name, place in in_bucket.items() if place == i]
            parts = bucket.split([numbers[name] for name in names])
            self.tensors |= {name: part.view(layout[name]) for name, part in zip(names, parts, strict=True)}
        last = {place: name for name, place in in_bucket.items()}  # the last name stays
        self._last = {name: self.buckets[place] for place, name in last.items()}

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
        """Copy tensors in, cast; yields every bucket as soon as it is full. Raises ValueError unless their names are
        exactly those of the layout, in its order."""
        due = iter(self.tensors.items())
        for name, tensor in tensors:
            expected, place = next(due, ("nothing more", None))
            if name != expected:
                raise ValueError(f"weight {name!r} was published where {expected!r} was due")
            place.copy_(tensor)
            if name in self._last:
                yield self._last[name]
        if missing := [name for name, _ in due]:
            raise ValueError(f"{len(missing)} weights were not published: {missing[:5]}")


class Background(threading.Thread):
    """One call in a thread that nobody has to wait for, not even at the end of the process."""

    def __init__(self, call: Callable[[], Any]):
        super().__init__(daemon=True)
        self._call, self._result, self.error = call, None, None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._call()
        except Exception as error:  # raised again where the result is asked for
            self.error = error

    def result(self) -> Any:
        """What the call returned, or raises what it raised; waits for it."""
        self.join()
        if self.error:
            raise self.error
        return self._result


def gathered(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, cast. If FSDP2 has sharded them, in rows, they are made whole, as many in one collective as fill a
    bucket (one each takes gloo a millisecond). All ranks iterate together."""
    bucket: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        bucket[name] = tensor
        if sum(tensor.numel() for tensor in bucket.values()) * dtype.itemsize >= bucket_bytes:
            yield from _gather(bucket, dtype)
            bucket.clear()
    if bucket:
        yield from _gather(bucket, dtype)


def _gather(bucket: dict[str, torch.Tensor], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    from torch.distributed.tensor import DTensor  # half a second that roles without weights need not wait for

    first = next(iter(bucket.values()))
    if not isinstance(first, DTensor):
        yield from ((name, tensor.to(dtype)) for name, tensor in bucket.items())
        return
    ranks, group = first.device_mesh.size(), first.device_mesh.get_group()
    sizes = [-(-len(tensor) // ranks) * tensor.shape[1:].numel() for tensor in bucket.values()]  # of a rank's rows
    mine = torch.zeros(sum(sizes), dtype=dtype, device=first.device)
    for part, tensor in zip(mine.split(sizes), bucket.values(), strict=True):
        local = tensor.to_local().flatten()  # the last ranks may have fewer rows, or none
        part[: len(local)] = local
    every = mine.new_empty(ranks * len(mine))
    dist.all_gather_into_tensor(every, mine, group=group)
    for (name, tensor), rows in zip(bucket.items(), every.view(ranks, -1).split(sizes, dim=1), strict=True):
        yield name, rows.reshape(-1, *tensor.shape[1:])[: len(tensor)]


class SharedMemoryWeights:
    """The weight channel of one machine: the trainer writes a double buffer, actors pull the newest version.

    Nobody waits: version v goes to buffer v % 2 while readers copy v - 1 from the other. A reader that was so slow that
    its buffer was written again notices and copies the newer one, so an actor that falls behind skips versions.
    """

    transfer_s = 0.0  # actors fetch them
    bucket_bytes = BUCKET_BYTES

    def __init__(self, layout: dict[str, tuple[int, ...]], dtype: str):
        self.layout, self.dtype = layout, dtype
        elements = sum(torch.Size(shape).numel() for shape in layout.values())
        self._memory = SharedMemory(64 + 2 * elements * getattr(torch, dtype).itemsize)

    @property
    def _state(self) -> memoryview:
        """[newest complete version, newest version begun]: no lock, that a killed process could take with it."""
        return memoryview(self._memory.buffer)[:16].cast("q")

    @property
    def version(self) -> int:
        return self._state[0]

    @property
    def offered(self) -> int:
        return self._state[0]

    def join(self, rank: int, device: torch.device, stop=None) -> None:
        """Nothing to do: the memory is there."""

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write tensors, in the layout's order, cast to the engine's dtype, and make them the newest version."""
        self._state[1] = version
        deque(self._flat(version).fill(tensors), maxlen=0)
        self._state[0] = version

    def pull(self, staging: Flat) -> int:
        """Copy the newest version into `staging` (on any device); returns that version."""
        while True:
            version = self.version
            staging.memory.copy_(self._flat(version).memory)
            if self._state[1] < version + 2:  # else our buffer was being written while we read it
                return version

    def close(self) -> None:
        """Nothing to do: the last version is there."""

    def _flat(self, version: int) -> Flat:
        offset = 64 + version % 2 * (self._memory.num_bytes - 64) // 2
        options = {"dtype": getattr(torch, self.dtype), "offset": offset}
        return Flat(self.layout, lambda n: torch.frombuffer(self._memory.buffer, count=n or 1, **options))


class BroadcastWeights:
    """The weight channel of several machines: trainer rank 0 broadcasts every version to all engine workers.

        sender thread                        engine worker
        announce v          ──control──▶     offered = v, seen between two decode steps
        ready               ◀─control──▶     ready: pull(), in a thread of its own
        buckets             ───data────▶     into the staging copy, while the engine decodes
        done                ◀─control──▶     done: `version` = v, for the preprocessor to issue prompts with

    The process groups are made from the store and belong to nobody else: gloo for control, nccl for data between GPUs
    (one that waited there for a version would take multiprocessors from decoding), gloo for both otherwise. The trainer
    goes on while its copy is sent and waits only if the version before is still on its way; with `overlap` off there is
    no copy of the whole, but of one bucket at a time, and the trainer waits.

    store: of this channel, picklable: calling it gives a client. size: 1 + the number of engine workers.
    """

    transfer_s = 0.0  # of the last version that has arrived

    def __init__(
        self, layout, dtype: str, store: Callable[[], dist.Store], size: int, overlap=True, bucket_bytes=BUCKET_BYTES
    ):
        self.layout, self.dtype, self.store, self.size = layout, dtype, store, size
        self.overlap, self.bucket_bytes = overlap, bucket_bytes
        self._memory = SharedMemory(8)  # the version that has arrived, between trainer and preprocessor
        self._announced, self._sending = 0, None

    @property
    def version(self) -> int:
        return memoryview(self._memory.buffer)[:8].cast("q")[0]

    def join(self, rank: int, device: torch.device, stop=None) -> None:
        """Connect to all others, in the background; an engine worker then waits there for the first version. stop: the
        shared byte that ends the trainer's waits for the engines."""
        self.rank, self.device, self._stop = rank, device, stop
        self._joined = Background(self._connect)
        if rank:
            self._listening = Background(self._listen)

    def _connect(self) -> None:
        store = self.store()
        agreed = json.dumps([self.dtype, self.bucket_bytes, list(self.layout.items())])
        if self.rank == 0:
            store.set("layout", agreed)
        self.control = dist.ProcessGroupGloo(dist.PrefixStore("control", store), self.rank, self.size, A_DAY)
        self.data = self.control
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = A_DAY
            self.data = dist.ProcessGroupNCCL(dist.PrefixStore("data", store), self.rank, self.size, options)
        if store.get("layout").decode() != agreed:
            raise ValueError("this engine's model has weights of other names, shapes or dtype than the trainer's")

    # ---- trainer rank 0

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send tensors, in the layout's order, cast to the engine's dtype, once the version before is there. Raises
        ConnectionError if that one could not be sent, or is still on its way when all are told to stop."""
        self._finish_sending()
        buckets = self._copy.fill(tensors)
        if self.overlap:
            buckets = list(buckets)
            self._sending = Background(lambda: self._send(version, buckets))
        else:
            self._send(version, buckets)

    def _finish_sending(self) -> None:
        if self._sending is None:
            return
        while self._sending.is_alive():
            if self._stop is not None and self._stop.value:  # engines that stop, or never came, take no more
                raise ConnectionError("told to stop while a version was on its way to the engines")
            self._sending.join(0.05)
        self._sending.result()

    @functools.cached_property
    def _copy(self) -> Flat:
        """What is sent: a copy of the whole, or the same memory for one bucket after the other."""
        allocate = functools.partial(torch.empty, dtype=getattr(torch, self.dtype), device=self.device)
        return Flat(self.layout, allocate, self.bucket_bytes, one_bucket=not self.overlap)

    def _send(self, version: int, buckets: Iterable[torch.Tensor]) -> None:
        self._joined.result()
        with self._named("the engines, to send them version", version):
            self.control.broadcast(torch.tensor([version]), 0).wait()
            self._all()  # ready
            began = time.monotonic()
            self._broadcast(buckets)
            self._all()  # done
        self.transfer_s = time.monotonic() - began
        memoryview(self._memory.buffer)[:8].cast("q")[0] = version

    def close(self) -> None:
        """The last version is there, and no other will come."""
        with contextlib.suppress(ConnectionError):  # the others may have been told to stop before
            self._finish_sending()
            if self._joined.is_alive():
                return  # nothing was ever sent, and there is nobody to tell
            with self._named("the engines, to end it", NO_MORE):
                self.control.broadcast(torch.tensor([NO_MORE]), 0).wait()

    # ---- engine workers

    @property
    def offered(self) -> int:
        """The newest version that `pull` can have. Raises ConnectionError if the trainer is lost."""
        if not self._listening.is_alive():
            self._listening.result()
        return self._announced

    def pull(self, staging: Flat) -> int:
        """Receive the version on offer; returns it."""
        version = self._listening.result()
        with self._named("the trainer, for version", version):
            self._all()  # ready
            self._broadcast(staging.buckets)
            self._all()  # done
        self._listening = Background(self._listen)
        return version

    def _listen(self) -> int:
        """Wait for the announcement of a version, for ever after the last one."""
        self._joined.result()
        announced = torch.zeros(1, dtype=torch.int64)
        with self._named("the trainer, for a version after", self._announced):
            self.control.broadcast(announced, 0).wait()
        if announced.item() != NO_MORE:
            self._announced = announced.item()
        return self._announced

    # ---- both

    def _all(self) -> None:
        """Wait until all have come here."""
        self.control.allreduce(torch.zeros(1)).wait()

    def _broadcast(self, buckets: Iterable[torch.Tensor]) -> None:
        if self.device.type == "cpu":
            for bucket in buckets:
                self.data.broadcast(bucket, 0).wait()
            return
        stream = torch.cuda.Stream(self.device)  # beside the decoding or training of this process
        stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(stream):
            for bucket in buckets:
                self.data.broadcast(bucket, 0).wait()
        stream.synchronize()

    @contextlib.contextmanager
    def _named(self, whom: str, version: int) -> Iterator[None]:
        """A lost connection is seen at once, but who is lost is better said by who sees it die: after a while."""
        try:
            yield
        except RuntimeError as error:
            time.sleep(GRACE_S)
            raise ConnectionError(f"waited for {whom} {version}: {str(error).splitlines()[0]}") from error


class CopyRecorder(TorchDispatchMode):
    """Notes every `target.copy_(source)` made inside it."""

    def __init__(self):
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.copies.append(args[:2])
        return func(*args, **(kwargs or {}))


class WeightReceiver:
    """What vLLM's worker learns for us (its `worker_extension_cls`): to stage new weights and to swap them in.

    vLLM's loader knows where each weight goes (fused qkv, tied head, this worker's part of a matrix), but takes ten
    times as long as the copies it makes. It is run once, on version 0, and its copies are noted: they go from views of
    the staging tensors to views of the live parameters, so to repeat them is to load what has been staged since.
    """

    def join_weight_channel(self, weights, first_rank: int) -> list[str]:
        """first_rank: of this engine's workers. Returns the weights of which this worker has no part. Raises
        RuntimeError unless the noted copies write every parameter, from whole staged weights (or, of a model that
        several workers share, from a part of each)."""
        self.weights, model, dtype = weights, self.model_runner.model, getattr(torch, weights.dtype)
        allocate = functools.partial(torch.empty, dtype=dtype, device=self.device)
        self.staging = Flat(weights.layout, allocate, weights.bucket_bytes)
        for path in Path(self.vllm_config.model_config.model).glob("*.safetensors"):
            for name in self.staging.tensors.keys() & (tensors := load_file(path)).keys():
                self.staging.tensors[name].copy_(tensors[name])
        with CopyRecorder() as recorder:
            loaded = model.load_weights(self.staging.tensors.items())
        self.copies = recorder.copies
        old = {name for name, _ in model.named_parameters()} - set(loaded or ())
        used, places = Counter(), sorted((t.data_ptr(), name) for name, t in self.staging.tensors.items())
        for _, source in self.copies:
            place = bisect.bisect_right(places, (source.data_ptr(), chr(0x10FFFF))) - 1
            used[places[max(0, place)][1]] += source.numel()
        shared = self.vllm_config.parallel_config.tensor_parallel_size > 1
        for name, tensor in self.staging.tensors.items():
            if used[name] != tensor.numel() and not (shared and used[name] < tensor.numel()):
                old.add(f"{name}: {used[name]} of {tensor.numel()} numbers")
        if old:
            raise RuntimeError(f"weight updates would leave {len(old)} parameters old, or in part: {sorted(old)[:5]}")
        self.staged, self.pulling, self.saving = 0, None, None
        weights.join(first_rank + self.rank, self.device)
        return [name for name in self.staging.tensors if not used[name]]

    def weights_state(self) -> tuple[int, int]:
        """The newest version that can be staged, and the one that lies staged: -1 while another is on its way there."""
        if self.pulling is not None and not self.pulling.is_alive():
            self.staged, self.pulling = self.pulling.result(), None
        return self.weights.offered, -1 if self.pulling else self.staged

    def stage_weights(self) -> None:
        """Copy the newest version beside the model, while the engine decodes."""

        def pull() -> int:
            version = self.weights.pull(self.staging)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return version

        self.pulling = Background(pull)

    @torch.no_grad()
    def swap_weights(self) -> None:
        """Staged weights -> the live parameters, in place."""
        assert self.pulling is None, "staged weights are swapped in while others come in over them"
        for parameter, staged in self.copies:
            parameter.copy_(staged)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # for the stall's measure, and before anything is staged again

    @torch.no_grad()
    def save_weights(self, folder: Path) -> None:
        """The live parameters -> memory now, what a swap copies the other way round; -> a file in the background."""
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        whole = Flat(self.weights.layout, lambda n: torch.full((n,), -torch.inf))
        for parameter, staged in self.copies:
            whole.memory.as_strided(staged.shape, staged.stride(), staged.storage_offset()).copy_(parameter)
        if group.world_size > 1:  # what is another's part is -inf here
            dist.all_reduce(whole.memory, dist.ReduceOp.MAX, group=group.cpu_group)
        dtype = getattr(torch, self.weights.dtype)

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({name: t.to(dtype) for name, t in whole.tensors.items()}, folder / "model.safetensors")

        self.saving = Background(write if group.rank_in_group == 0 else bool)

    def saved_weights(self) -> str | None:
        """Why the last save failed, "" if it did not; None while it is being written."""
        if self.saving.is_alive():
            return None
        try:
            self.saving.result()
        except Exception as error:  # of the disk, or of what safetensors makes of it: both are to be told
            return str(error) or repr(error)
        return ""
