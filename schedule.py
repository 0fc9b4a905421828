"""Schedule: may a group start now, may the weights change now, may a step be taken now?

    pipeline      generation never stops; every step's weights come in, in the middle of sequences    (arXiv 2509.19128)
      with drain  new weights come in when what is in flight has finished: one version a sequence
    async         the next B·G samples are generated while G steps train on the last                  (arXiv 2410.18252)
    conventional  B·G samples are generated, then G steps train on them, on the same cores or GPUs, and so on in turns

B is the batch of an optimizer step and G the steps of a phase. The schedule lives in the preprocessor; the trainer asks
which weights go out, the actor when they may come in.
"""

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Container

from config import Config


class Schedule(ABC):
    """Which groups may start, and which make the next batch. Groups are trained in the order they stand in."""

    def __init__(self, groups_per_batch: int, next_step: int = 0):
        self.n, self.next_step = groups_per_batch, next_step
        self.outstanding: dict[int, int] = {}  # group id -> newest version at its start; neither trained nor dropped

    @abstractmethod
    def may_start(self, version: int) -> bool:
        """Whether one more group may start now that `version` is the newest."""

    def oldest(self, version: int) -> int:
        """The oldest version that may sample a group that starts now."""
        return version

    def start(self, group_id: int, version: int) -> None:
        assert self.may_start(version)
        self.outstanding[group_id] = version

    def drop(self, group_id: int) -> None:
        del self.outstanding[group_id]

    def next_batch(self, finished: Container[int]) -> list[int] | None:
        """The groups of the next step; None as long as it may not be taken."""
        batch = list(self.outstanding)[: self.n]
        if len(batch) < self.n or not all(group_id in finished for group_id in batch):
            return None
        self.next_step += 1
        for group_id in batch:
            del self.outstanding[group_id]
        return batch

    @property
    def may_evaluate(self) -> bool:
        """Whether an evaluation may begin, which holds an actor's weights still."""
        return True


class Pipeline(Schedule):
    """No token's lag ever exceeds `max_lag`, and no group starts while `ready_batches` are ahead of the trainer.

    A group that starts when version v is out is only sampled by v or later, and in time if it is trained at a step
    ≤ v + max_lag: in the order they start, n a step, if at most

        n · (v + max_lag + 1 - next step)

    groups are outstanding, itself included. Versions never fall, so no later group can make an earlier one late, and a
    dropped one only makes room. No deadlock: once the trainer has caught up, v is the next step and n groups may start.

    order "started": they are trained in that order, and each batch is a fair draw of prompts. "finished": those that
    have finished go before older ones that have not, as long as none of these gets late. Where one in many is ten times
    as long as the rest, all would wait for it; where lengths are alike, batches of short and of long ones take turns.
    """

    def __init__(
        self,
        groups_per_batch: int,
        max_lag: int | None,
        next_step: int = 0,
        ready_batches: float = math.inf,
        order: str = "started",
    ):
        super().__init__(groups_per_batch, next_step)
        self.max_lag = math.inf if max_lag is None else max_lag
        self.ready_batches, self.order = ready_batches, order

    def may_start(self, version: int) -> bool:
        behind = self.next_step - version >= self.ready_batches  # the trainer: of batches sent, one is in training
        return not behind and len(self.outstanding) < self.n * (version + self.max_lag + 1 - self.next_step)

    def next_batch(self, finished: Container[int]) -> list[int] | None:
        if self.order == "finished":
            batch = {group_id: v for group_id, v in self.outstanding.items() if group_id in finished}
            batch = dict(itertools.islice(batch.items(), self.n))
            left = [v for group_id, v in self.outstanding.items() if group_id not in batch]
            late = any(self.next_step + 1 + i // self.n > v + self.max_lag for i, v in enumerate(left))
            if late or len(batch) < self.n:
                return None
            self.outstanding = batch | self.outstanding  # to the front
        return super().next_batch(finished)


class Phases(Schedule):
    """Phase p generates the groups of the steps p·G to p·G + G - 1, each group by one version, at least the newest when
    the phase begins: p·G (conventional: `ahead` = 0, lag at most G - 1) or (p - 1)·G (async: 1, at most 2·G - 1).
    When all have finished they are shuffled and their steps may be taken. Groups are shuffled whole, so that a step has
    all samples of its prompts. A run that resumes inside a phase does what is left of it, with the weights it has.
    """

    def __init__(self, groups_per_batch: int, steps: int, g: int, ahead: int, seed: int, next_step: int = 0):
        super().__init__(groups_per_batch, next_step)
        self.steps, self.g, self.ahead, self.seed = steps, g, ahead, seed
        self.begins = next_step  # step at which the phase that is generated begins
        self.version: int | None = None  # that generates it
        self.ready = 0  # groups that are shuffled

    @property
    def ends(self) -> int:
        return min(self.steps, (self.begins // self.g + 1) * self.g)

    def may_start(self, version: int) -> bool:
        needed = (self.begins // self.g - self.ahead) * self.g  # of a run that resumed, all versions are newer at first
        room = len(self.outstanding) - self.ready < self.n * (self.ends - self.begins)
        return room and version >= needed

    def oldest(self, version: int) -> int:
        return version if self.version is None else self.version

    def start(self, group_id: int, version: int) -> None:
        super().start(group_id, version)
        self.version = self.oldest(version)

    def next_batch(self, finished: Container[int]) -> list[int] | None:
        new = list(self.outstanding)[self.ready :]
        if new and len(new) == self.n * (self.ends - self.begins) and all(group_id in finished for group_id in new):
            random.Random(f"{self.seed} {self.begins}").shuffle(new)
            order = list(self.outstanding)[: self.ready] + new
            self.outstanding = {group_id: self.outstanding[group_id] for group_id in order}
            self.ready, self.begins, self.version = len(self.outstanding), self.ends, None
        if not self.ready:
            return None
        self.ready -= self.n
        return super().next_batch(finished)

    @property
    def may_evaluate(self) -> bool:
        """Between two phases."""
        return not self.outstanding


def make_schedule(cfg: Config, next_step: int) -> Schedule:
    n = cfg.groups_per_batch
    if cfg.schedule == "pipeline":
        return Pipeline(n, cfg.max_lag, next_step, cfg.preprocess.ready_batches, cfg.preprocess.order)
    return Phases(n, cfg.steps, cfg.phase_steps, int(cfg.schedule == "async"), cfg.seed, next_step)


def publishes(cfg: Config, version: int) -> bool:
    """Whether these weights go to the engines."""
    return cfg.schedule == "pipeline" or version % cfg.phase_steps == 0 or version == cfg.steps


def drains(cfg: Config) -> bool:
    """Whether nothing may start while there are newer weights, so that they come in soon."""
    return cfg.schedule == "pipeline" and cfg.actor.update == "drain"


def may_load_weights(cfg: Config, in_flight: int, version: int, wanted: int) -> bool:
    """Whether newer weights than `version` may come in now; `wanted`: what the next sequence asks for, 0 if there is
    none."""
    if cfg.schedule == "pipeline":
        return not in_flight or not drains(cfg)
    return not in_flight and wanted > version
