"""What travels between the roles, and how.

    prompts ─▶ actor ─completions▶ reward ─rollouts▶ preprocess ─batches▶ train
                 ▲                                                          │
                 └─────────────── weights, version v ◀──────────────────────┘

Messages are frozen dataclasses of tensors and plain values, msgpack on the wire (no pickle). A `Queue` carries them,
bounded, in order: through memory between the processes of one machine (transport.py), through a store between machines
(store.py). The weights have a channel of their own (weights.py). Token ids go from the engine to the trainer untouched.
A *version* is the number of optimizer steps that made the weights: 0 is the initial model.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from weights import BroadcastWeights, SharedMemoryWeights


@dataclass(frozen=True)
class Prompt:
    """Leave to sample one group, given by the `Schedule`. P = prompt length in tokens.

    >>> Prompt(group_id=7, version=3, samples=8, prompt_ids=torch.tensor([7, 10, 5, 12]), row={"answer": "12"})
    """

    group_id: int  # training groups count up from 0; evaluation prompts count down from -1
    version: int  # no token of the group may be sampled by weights older than this
    samples: int
    prompt_ids: torch.Tensor  # (P,) int64
    row: dict  # the dataset row, for the verifier
    temperature: float = 1.0  # 0: greedy
    eval_samples: int = 0  # of the whole evaluation that the prompt is part of; 0: it is for training

    def __post_init__(self):
        assert len(self.prompt_ids) > 0, "a prompt needs at least one token: the first completion token is its label"

    @property
    def is_eval(self) -> bool:
        return self.eval_samples > 0


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
    reward: float | None = None  # None until a verifier has seen it, and if that failed
    failure: str = ""  # why the verifier failed (reward.Verdict); "" if it did not
    metrics: dict[str, float] = field(default_factory=dict)  # what else the verifier had to say

    def __post_init__(self):
        assert self.completion_ids.shape == self.logprobs.shape == self.versions.shape != (0,)
        logprobs, versions = self.logprobs.numpy(), self.versions.numpy()  # the fastest calls: at every arrival
        assert math.isfinite(logprobs.dot(logprobs)), f"log-probs from the engine are not finite: {logprobs}"
        assert not np.count_nonzero(versions[1:] < versions[:-1]), f"versions run backwards: {versions}"
        assert self.reward is None or not self.failure, "a failed call gives no reward"


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
    """One trainer rank's part of one optimizer step, with the normaliser of the *whole* step: the gradient, a sum over
    ranks and micro-batches of weighted token losses / normaliser, does not depend on how the batch was cut."""

    step: int  # optimizer steps before this one = the version that trains on it
    micro_batches: list[MicroBatch]  # the same number on every rank
    normaliser: int  # Σ weights over the whole batch
    metrics: dict  # what the preprocessor knows of the step: reward, lengths, drops, ...
    stream: dict = field(default_factory=dict)  # where the prompt stream stands after it, for a checkpoint (`Start`)


@dataclass(frozen=True)
class Report:
    """For the launcher to show or write: `kind` is one of those that `Record.take` knows."""

    kind: str
    values: dict


_MESSAGES = {cls.__name__: cls for cls in (Prompt, Rollout, RolloutGroup, MicroBatch, StepBatch, Report)}


_DTYPES = {name: getattr(torch, name) for name in ("int64", "int32", "float32", "float64", "bool")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _from_tensor(tensor: torch.Tensor) -> tuple:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{tensor!r} cannot travel: it is neither a tensor nor a plain value")
    array = tensor.detach().cpu().contiguous().numpy()
    return _NAMES[tensor.dtype], array.shape, array.data


def _to_tensor(_: type, value: tuple) -> torch.Tensor:
    dtype, shape, data = value
    flat = torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype])
    return flat if len(shape) == 1 else flat.view(shape)


_encoder, _head = msgspec.msgpack.Encoder(enc_hook=_from_tensor), msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_decoders = {name: msgspec.msgpack.Decoder(cls, dec_hook=_to_tensor) for name, cls in _MESSAGES.items()}


def encode(message: Any) -> bytes:
    """Message -> msgpack bytes. Fields are tensors, not empty, or plain values; raises TypeError for most others."""
    return _encoder.encode((type(message).__name__, message))


def decode(data: bytes) -> Any:
    """Inverse of `encode`. Raises msgspec.DecodeError or KeyError for bytes that are not a whole message."""
    name, fields = _head.decode(data)
    return _decoders[name].decode(fields)


class Stopped(Exception):
    """The launcher asked every role to stop; raised out of a wait, which it names."""


class Queue(ABC):
    """Bounded first-in-first-out queue of messages between processes, any number of them at either end.

    A full queue makes the producer wait, an empty one the consumer; a wait without a limit ends with `Stopped` when the
    launcher says so.
    """

    first_rest_s = 0.0001  # then twice as long, up to 0.1

    def __init__(self, name: str, slots: int, stop):
        self.name, self.slots, self.stop = name, slots, stop
        self.waits_for = ""  # what a call that takes long is waiting for; read by the role's `Life`

    def put(self, message: Any, timeout_s: float = math.inf) -> bool:
        """False if the queue stayed full."""
        data = encode(message)
        return self._wait(lambda: self._write(data), f"room in the queue of {self.name}", timeout_s)

    def get(self, timeout_s: float = math.inf) -> Any | None:
        """The oldest message; None if the queue stayed empty."""
        data = self._wait(self._read, f"a message in the queue of {self.name}", timeout_s)
        return decode(data) if data else None

    def _wait(self, attempt: Callable[[], Any], what: str, timeout_s: float) -> Any:
        deadline, rest_s, self.waits_for = None, self.first_rest_s, what  # before the attempt: a store may not answer
        while not (done := attempt()) and timeout_s > 0:
            deadline = deadline or time.monotonic() + timeout_s
            if (left_s := deadline - time.monotonic()) <= 0:
                break
            if timeout_s == math.inf and self.stop.value:
                raise Stopped(what)
            self._rest(attempt, min(left_s, rest_s))
            rest_s = min(2 * rest_s, 0.1)
        self.waits_for = ""
        return done

    @abstractmethod
    def _write(self, data: bytes) -> bool:
        """Put it in if there is room."""

    @abstractmethod
    def _read(self) -> bytes | None:
        """Take the oldest out if there is one."""

    @abstractmethod
    def _rest(self, attempt: Callable, seconds: float) -> None:
        """Until another attempt is worth while, or so long."""

    @abstractmethod
    def __len__(self) -> int:
        """Messages in it."""


@dataclass(frozen=True)
class Channels:
    """Every way between the roles, in the order of the data."""

    prompts: list[Queue]  # preprocess -> actor i: training prompts
    eval_prompts: Queue  # preprocess -> actor 0: held-out prompts
    completions: Queue  # actor -> reward
    rollouts: Queue  # reward -> preprocess
    batches: list[Queue]  # preprocess -> trainer rank r
    weights: SharedMemoryWeights | BroadcastWeights  # trainer rank 0 -> actors
    reports: Queue  # everybody -> launcher
    stop: Any  # shared byte: 1 = every role of this launcher is to stop
    actors: Any  # shared bytes: `ActorState`
    link: Any = None  # with several machines: a `store.Link`
