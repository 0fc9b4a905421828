"""What travels between the roles, and how.

    prompts ─▶ actor ─completions▶ reward ─rollouts▶ preprocess ─batches▶ train
                 ▲                                                          │
                 └─────────────── weights, version v ◀──────────────────────┘

Messages are frozen dataclasses of tensors and plain values; on the wire they are safetensors bytes whose metadata holds
the plain values as JSON (no pickle). `SharedMemoryQueue` carries them between the processes of one machine, bounded, in
order; `SharedMemoryWeights` carries the weights, newest version only. Token ids go from the engine to the trainer
untouched. A *version* is the number of optimizer steps that made the weights: 0 is the initial model.
"""

import contextlib
import fcntl
import json
import math
import mmap
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import safetensors
import torch
from safetensors import torch as safetensors_torch


@dataclass(frozen=True)
class Prompt:
    """Leave to sample one group, given by the preprocessor's `Admission`. P = prompt length in tokens.

    >>> Prompt(group_id=7, version=3, samples=8, prompt_ids=torch.tensor([7, 10, 5, 12]), row={"answer": "12"})
    """

    group_id: int  # training groups count up from 0; evaluation prompts count down from -1
    version: int  # no token of the group may be sampled by weights older than this
    samples: int
    prompt_ids: torch.Tensor  # (P,) int64
    row: dict  # the dataset row, for the verifier

    def __post_init__(self):
        assert len(self.prompt_ids) > 0, "a prompt needs at least one token: the first completion token is its label"

    @property
    def is_eval(self) -> bool:
        return self.group_id < 0


@dataclass(frozen=True)
class Rollout:
    """One sampled completion of C tokens, its end-of-sequence token included.

    >>> Rollout(
    ...     completion_ids=torch.tensor([1, 2, 14]), logprobs=torch.tensor([-0.1, -0.7, 0.0]),
    ...     versions=torch.tensor([3, 3, 4]),  # the weights changed before the third token
    ...     finish_reason="stop", reward=1.0)
    """

    completion_ids: torch.Tensor  # (C,) int64
    logprobs: torch.Tensor  # (C,) float32, log μ of each token as it was sampled: temperature applied
    versions: torch.Tensor  # (C,) int64, the version whose forward pass produced each token
    finish_reason: str  # "stop" (end-of-sequence) or "length" (truncated)
    reward: float | None = None  # None until a verifier has seen it

    def __post_init__(self):
        assert len(self.completion_ids) == len(self.logprobs) == len(self.versions) > 0
        versions = self.versions.tolist()  # lists: for a few numbers they are ten times as fast as tensors
        assert math.isfinite(sum(self.logprobs.tolist())), f"log-probs from the engine are not finite: {self.logprobs}"
        assert versions == sorted(versions), f"versions run backwards: {versions}"


@dataclass(frozen=True)
class RolloutGroup:
    """All samples of one prompt: the unit of baselines, of admission and of travel."""

    prompt: Prompt
    rollouts: list[Rollout]


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed into one row of T tokens; everything but the ids is meaningful on completion tokens only.

    >>> MicroBatch(  # prompts [5] and [6, 7], completions [8, 9] and [8]
    ...     input_ids=torch.tensor([5, 8, 9, 6, 7, 8]),
    ...     position_ids=torch.tensor([0, 1, 2, 0, 1, 2]),  # a restart begins a new sequence
    ...     mask=torch.tensor([False, True, True, False, False, True]),
    ...     logprobs=torch.tensor([0, -0.2, -0.9, 0, 0, -0.1]), versions=torch.tensor([0, 3, 4, 0, 0, 4]),
    ...     advantages=torch.tensor([0, 0.5, 0.5, 0, 0, -0.5]), weights=torch.tensor([0, 1.0, 1.0, 0, 0, 1.0]),
    ...     ref_logprobs=None)
    """

    input_ids: torch.Tensor  # (T,) int64
    position_ids: torch.Tensor  # (T,) int64
    mask: torch.Tensor  # (T,) bool, True on the tokens that enter the loss
    logprobs: torch.Tensor  # (T,) float32, log μ
    versions: torch.Tensor  # (T,) int64
    advantages: torch.Tensor  # (T,) float32
    weights: torch.Tensor  # (T,) float32, a token's share of the loss before the global normaliser
    ref_logprobs: torch.Tensor | None  # (T,) float32, only with a KL penalty

    def __post_init__(self):
        assert self.position_ids[0] == 0 and not self.mask[self.position_ids == 0].any(), "a sequence begins unmasked"


@dataclass(frozen=True)
class StepBatch:
    """One trainer rank's part of one optimizer step, with the normalisers of the *whole* step.

    The gradient is Σ over ranks and micro-batches of (sum of weighted token losses) / normaliser, so it does not depend
    on how the batch was cut.
    """

    step: int  # optimizer steps before this one = the version that trains on it
    micro_batches: list[MicroBatch]  # the same number on every rank
    normaliser: int  # Σ weights over the whole batch
    metrics: dict  # what the preprocessor knows of the step: reward, lengths, drops, ...
    stream: dict = field(default_factory=dict)  # where the prompt stream stands after it, for a checkpoint (`Start`)


@dataclass(frozen=True)
class Report:
    """Something for the launcher to show or write: `kind` is "step", "actor", "eval", "rollout",
    "checkpoint" or "trouble"."""

    kind: str
    values: dict


_MESSAGES = {cls.__name__: cls for cls in (Prompt, Rollout, RolloutGroup, MicroBatch, StepBatch, Report)}


def encode(message: Any) -> bytes:
    """Message -> safetensors bytes; tensors as tensors, everything else as JSON in the metadata.

    Raises TypeError for a value that is neither a tensor nor JSON.
    """
    tensors: dict[str, torch.Tensor] = {}

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            key = str(len(tensors))
            tensors[key] = value.detach().cpu().contiguous()
            return {"__tensor__": key}
        if is_dataclass(value):
            return {"__type__": type(value).__name__} | {
                f.name: describe(getattr(value, f.name)) for f in fields(value)
            }
        if isinstance(value, list):
            return [describe(item) for item in value]
        return value

    header = json.dumps(describe(message))
    specs = {
        key: safetensors.TensorSpec(dtype=str(t.dtype)[6:], shape=t.shape, data_ptr=t.data_ptr(), data_len=t.nbytes)
        for key, t in tensors.items()
    }  # by address: safetensors.torch.save takes three times as long, and this is the decode loop's time
    return safetensors.serialize(specs, metadata={"message": header})


def decode(data: bytes) -> Any:
    """Inverse of `encode`. Raises ValueError for bytes that are not a message."""
    header_bytes = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(json.loads(data[8 : 8 + header_bytes])["__metadata__"]["message"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"not a message: {bytes(data[:40])!r}… ({error})") from None
    tensors = safetensors_torch.load(bytes(data))

    def restore(value: Any) -> Any:
        if isinstance(value, list):
            return [restore(item) for item in value]
        if isinstance(value, dict) and "__tensor__" in value:
            return tensors[value["__tensor__"]]
        if isinstance(value, dict) and "__type__" in value:
            return _MESSAGES[value["__type__"]](**{k: restore(v) for k, v in value.items() if k != "__type__"})
        return value

    return restore(header)


class Stopped(Exception):
    """The launcher asked every role to stop; raised out of a wait."""


class SharedMemory:
    """Shared memory without a name: it is gone when the last process that holds it is, however that one ends.

    Pages are allocated when first touched. Pickles as a path that other processes of the same user can open while its
    maker lives.
    """

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self._file = os.memfd_create("pipelinerl")  # kept open: the path below leads to it
        os.ftruncate(self._file, num_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.buffer = mmap.mmap(self._file, num_bytes)
        self._threads = threading.Lock()

    def __getstate__(self):
        return {"num_bytes": self.num_bytes, "path": self.path}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._file = os.open(self.path, os.O_RDWR)
        self.buffer = mmap.mmap(self._file, self.num_bytes)
        self._threads = threading.Lock()

    @contextlib.contextmanager
    def locked(self):
        """Exclusive between processes and threads; the kernel gives it up for a process that is killed inside."""
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


class SharedMemoryQueue:
    """Bounded first-in-first-out queue of messages between processes: a ring of equal slots in shared memory.

    Any number of producers and consumers. A full queue makes the producer wait, an empty one the consumer; both waits
    end with `Stopped` when the launcher says so, or with a TimeoutError that names the queue. One file descriptor a
    queue, none a message.
    """

    def __init__(self, name: str, slots: int, slot_bytes: int, context, stop):
        self.name, self.slots, self.slot_bytes, self.stop = name, slots, slot_bytes, stop
        self._memory = SharedMemory(slots * slot_bytes)
        self._free, self._filled = context.Semaphore(slots), context.Semaphore(0)
        self._counts = context.Array("Q", 2, lock=False)  # messages put, messages taken

    def put(self, message: Any, timeout_s: float = float("inf")) -> None:
        data = self._fit(encode(message))
        if not self._free.acquire(block=False):
            self._wait(self._free, timeout_s, f"room in the queue of {self.name} ({self.slots} slots)")
        self._write(data)

    def get(self, timeout_s: float = float("inf")) -> Any:
        self._wait(self._filled, timeout_s, f"{self.name} from their queue")
        return self._read()

    def try_put(self, message: Any) -> bool:
        """Put without waiting; False if the queue is full."""
        data, free = self._fit(encode(message)), self._free.acquire(block=False)
        if free:
            self._write(data)
        return free

    def try_get(self, wait_s: float = 0.0) -> Any | None:
        """Get, waiting at most `wait_s`; None if the queue stays empty."""
        return self._read() if self._filled.acquire(block=wait_s > 0, timeout=wait_s) else None

    def __len__(self) -> int:
        return self._counts[0] - self._counts[1]

    def _fit(self, data: bytes) -> bytes:
        if len(data) + 8 > self.slot_bytes:
            sizes = f"a message of {len(data):,} bytes does not fit the {self.slot_bytes:,} of a slot"
            raise ValueError(f"{sizes} in the queue of {self.name}: are there dataset rows of hundreds of kilobytes?")
        return data

    def _wait(self, semaphore, timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            if self.stop.value:
                raise Stopped
            if semaphore.acquire(timeout=0.1):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:g} s for {what}")

    def _write(self, data: bytes) -> None:
        # The copy is made under the lock: else a second producer could announce its slot before ours is written.
        with self._memory.locked():
            start = self._counts[0] % self.slots * self.slot_bytes
            self._memory.buffer[start : start + 8] = len(data).to_bytes(8, "little")
            self._memory.buffer[start + 8 : start + 8 + len(data)] = data
            self._counts[0] += 1
        self._filled.release()

    def _read(self) -> Any:
        with self._memory.locked():
            start = self._counts[1] % self.slots * self.slot_bytes
            size = int.from_bytes(self._memory.buffer[start : start + 8], "little")
            data = self._memory.buffer[start + 8 : start + 8 + size]
            self._counts[1] += 1
        self._free.release()
        return decode(data)


class SharedMemoryWeights:
    """The weight channel of one machine: the trainer writes a double buffer, actors pull the newest version.

    Nobody waits: version v goes to buffer v % 2 while readers copy v - 1 from the other. A reader that was so slow that
    its buffer was written again notices and copies the newer one, so an actor that falls behind skips versions.

    layout: name -> shape of every tensor that travels, under the names of the checkpoint (a tied head is not there).
    """

    def __init__(self, layout: dict[str, tuple[int, ...]], dtype: str, context):
        self.layout, self.dtype = layout, dtype
        self._sizes = [torch.Size(shape).numel() for shape in layout.values()]
        self._buffer_bytes = sum(self._sizes) * getattr(torch, dtype).itemsize
        self._memory = SharedMemory(2 * self._buffer_bytes)
        self._state = context.Array("q", [0, 0])  # newest complete version, newest version begun

    @property
    def version(self) -> int:
        return self._state[0]

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the named tensors, cast to the engine's dtype, one at a time, and make them the newest version.

        Raises ValueError if the names are not exactly those of the layout.
        """
        self._state[1] = version
        buffer, missing = self._views(version), set(self.layout)
        for name, tensor in tensors:
            if name not in missing:
                raise ValueError(f"weight {name!r} is not in the checkpoint's list, or was published twice")
            missing.remove(name)
            buffer[name].copy_(tensor)
        if missing:
            raise ValueError(f"{len(missing)} weights were not published: {sorted(missing)[:5]}")
        self._state[0] = version

    def pull(self, staging: dict[str, torch.Tensor]) -> int:
        """Copy the newest version into `staging` (same names and shapes, any device); returns that version."""
        while True:
            version = self.version
            for name, tensor in self._views(version).items():
                staging[name].copy_(tensor)
            if self._state[1] < version + 2:  # else our buffer was being written while we read it
                return version

    def _views(self, version: int) -> dict[str, torch.Tensor]:
        start, dtype = version % 2 * self._buffer_bytes, getattr(torch, self.dtype)
        flat = torch.frombuffer(self._memory.buffer, dtype=dtype, count=sum(self._sizes), offset=start)
        parts = zip(self.layout.items(), flat.split(self._sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}


@dataclass(frozen=True)
class Channels:
    """Every way between the roles, in the order of the data."""

    prompts: SharedMemoryQueue  # preprocess -> any actor: training prompts
    eval_prompts: SharedMemoryQueue  # preprocess -> actor 0: held-out prompts
    completions: SharedMemoryQueue  # actor -> any reward worker
    rollouts: SharedMemoryQueue  # reward worker -> preprocess
    batches: list[SharedMemoryQueue]  # preprocess -> trainer rank r
    weights: SharedMemoryWeights  # trainer rank 0 -> actors
    reports: SharedMemoryQueue  # everybody -> launcher
    stop: Any  # shared byte: 1 = every role is to stop
