"""Weights: how version v comes from the trainer to where the engine computes, while both go on working.

    trainer: publish(v, tensors) ─▶ double buffer ─▶ engine worker: stage_weights(), beside decoding; swap_weights()

A *version* is the number of optimizer steps that made the weights: 0 is the initial model.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from memory import SharedMemory


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
        """Write tensors, cast to the engine's dtype, and make them the newest version. Raises ValueError if their names
        are not exactly those of the layout."""
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

    vLLM's loader knows where each weight goes (fused qkv, tied head), but takes ten times as long as the copies it
    makes. It is run once, on version 0, and its copies are noted: they go from views of the staging tensors to views of
    the live parameters, so to repeat them is to load what has been staged since.
    """

    def join_weight_channel(self, weights: SharedMemoryWeights) -> None:
        """Raises RuntimeError unless the noted copies write every parameter, from whole staged weights."""
        self.weights, model, dtype = weights, self.model_runner.model, getattr(torch, weights.dtype)
        self.staging = {n: torch.empty(shape, dtype=dtype, device=self.device) for n, shape in weights.layout.items()}
        for path in Path(self.vllm_config.model_config.model).glob("*.safetensors"):
            for name in self.staging.keys() & (tensors := load_file(path)).keys():
                self.staging[name].copy_(tensors[name])
        with CopyRecorder() as recorder:
            loaded = model.load_weights(self.staging.items())
        self.copies = recorder.copies
        old = {name for name, _ in model.named_parameters()} - set(loaded or ())
        used = Counter()  # elements copied out of each staged tensor's memory
        for _, source in self.copies:
            used[source.untyped_storage().data_ptr()] += source.numel()
        sizes = {tensor.untyped_storage().data_ptr(): tensor.numel() for tensor in self.staging.values()}
        if old or any(sizes.get(memory) != count for memory, count in used.items()):
            raise RuntimeError(f"weight updates would leave {len(old)} parameters old, or in part: {sorted(old)[:5]}")

    def stage_weights(self) -> int:
        """Copy the newest version beside the model; runs in a thread while the engine decodes. Returns the version."""
        version = self.weights.pull(self.staging)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return version

    @torch.no_grad()
    def swap_weights(self) -> None:
        """Staged weights -> the live parameters, in place."""
        for parameter, staged in self.copies:
            parameter.copy_(staged)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # for the stall's measure, and before anything is staged again

    @torch.no_grad()
    def save_weights(self, folder: Path) -> None:
        """The live parameters -> a file, through the staging tensors: what a swap copies, the other way round."""
        for parameter, staged in self.copies:
            staged.copy_(parameter)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu() for name, tensor in self.staging.items()}, folder / "model.safetensors")
