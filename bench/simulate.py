"""A run as a discrete-event simulation: the schedules of schedule.py with engines and trainer that only take time.

It checks the formulas of bench/model.py and takes over where they are too coarse: lengths that come in bursts, groups,
finite queues, updates that stall. One event is a sequence that finishes, a group that has been scored, or a step that
is done; between two of them every sequence of an engine grows at the same pace.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from schedule import Schedule


@dataclass(frozen=True)
class Machine:
    """Times in any unit, the same everywhere."""

    engines: int
    sequences: int  # H: at most, in each
    decode: Callable[[int], float]  # time of a decode step of h sequences
    train: Callable[[int], float]  # time of an optimizer step on so many tokens
    start: float = 0.0  # what each sequence takes of its engine's time beside its decode steps: prefill, bookkeeping
    stall: float = 0.0  # of an engine, when weights come in
    publish: float = 0.0  # from the end of a step until its weights can come in
    score: float = 0.0  # from the last sequence of a group until the schedule knows of it
    queued: int = 4  # groups that wait at an engine


@dataclass
class Trace:
    """What happened. `running`: (time, engine, sequences in flight) at every change."""

    step_ends: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    lags: list[np.ndarray] = field(default_factory=list)  # a step: of all its tokens
    running: list[tuple[float, int, int]] = field(default_factory=list)

    def tokens_per_time(self, skip: int = 0) -> float:
        """Trained tokens, from the end of step `skip` (0: from the start)."""
        begin = self.step_ends[skip - 1] if skip else 0.0
        return sum(self.step_tokens[skip:]) / (self.step_ends[-1] - begin)


class _Engine:
    def __init__(self, machine: Machine):
        self.machine = machine
        self.running: list[tuple[int, int, int]] = []  # heap of (progress at its end, sequence, group)
        self.waiting: deque[tuple[int, int, int]] = deque()  # (group, oldest version, length), a sequence each
        self.progress, self.at, self.pace = 0.0, 0.0, 0.0  # decode steps made up to time `at`, time of one
        self.loads = [(0, 0)]  # (progress, version loaded)
        self.events = 0  # older events of this engine are void

    @property
    def version(self) -> int:
        return self.loads[-1][1]

    def advance(self, now: float) -> None:
        if self.running:
            self.progress += max(0.0, now - self.at) / self.pace
        self.at = max(self.at, now)

    def complete_step(self) -> None:
        """Make the decode step that has begun to its end: weights and sequences come in between two."""
        whole = float(np.ceil(self.progress - 1e-9))
        self.at += max(0.0, whole - self.progress) * self.pace
        self.progress = whole

    def versions(self, begin: int, end: int) -> np.ndarray:
        """Of the tokens that decode steps begin + 1 .. end made."""
        steps = np.arange(begin, end)
        at = np.searchsorted([progress for progress, _ in self.loads], steps, side="right") - 1
        return np.array([version for _, version in self.loads])[at]


class Simulation:
    """A run of `schedule` to the end of its steps. `lengths`: of one sequence after the other, group by group, without
    end; `may_load`(sequences in flight, version, version that the next sequence asks for)."""

    def __init__(
        self,
        schedule: Schedule,
        machine: Machine,
        lengths: Iterator[int],
        group_size: int,
        steps: int,
        publishes: Callable[[int], bool],
        may_load: Callable[[int, int, int], bool],
        drains: bool = False,
    ):
        self.schedule, self.machine, self.lengths, self.group_size = schedule, machine, lengths, group_size
        self.steps, self.publishes, self.may_load, self.drains = steps, publishes, may_load, drains
        self.trace, self.engines = Trace(), [_Engine(machine) for _ in range(machine.engines)]
        self.events: list[tuple[float, int, Callable, tuple]] = []  # heap of (time, number, what happens, to what)
        self.numbers, self.ids = itertools.count(), itertools.count()
        self.left: dict[int, int] = {}  # group -> sequences not finished
        self.versions: dict[int, list[np.ndarray]] = {}  # group -> of its tokens
        self.began: dict[int, int] = {}  # sequence -> the engine's progress
        self.owner: dict[int, int] = {}  # group -> engine, of those issued and not back
        self.load = [0] * len(self.engines)  # how many those are
        self.finished: set[int] = set()
        self.batches: deque[list[int]] = deque()
        self.newest, self.trained, self.training = 0, 0, False
        self.groups_left = steps * schedule.n

    def run(self) -> Trace:
        self.issue(0.0)
        while self.trained < self.steps:
            if not self.events:
                raise RuntimeError(f"the schedule stands still after step {self.trained}")
            now, _, happen, what = heapq.heappop(self.events)
            happen(now, *what)
        return self.trace

    def at(self, time: float, happen: Callable, *what) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), happen, what))

    def issue(self, now: float) -> None:
        """Groups start while the schedule allows and an engine has room for one to wait: at the one with the fewest,
        each of which holds `queued` beyond what is in flight."""
        touched, most = set(), self.machine.queued * self.group_size
        while self.groups_left and self.schedule.may_start(self.newest):
            room = [i for i, engine in enumerate(self.engines) if len(engine.waiting) < most]
            if not room:
                break
            index, group = min(room, key=lambda i: self.load[i]), next(self.ids)
            oldest, lengths = self.schedule.oldest(self.newest), itertools.islice(self.lengths, self.group_size)
            self.engines[index].waiting.extend((group, oldest, length) for length in lengths)
            self.schedule.start(group, self.newest)
            self.left[group], self.versions[group], self.owner[group] = self.group_size, [], index
            self.load[index] += 1
            self.groups_left -= 1
            touched.add(index)
            if len(self.engines[index].waiting) >= most:
                self.refill(index, now)
        for index in touched:
            self.refill(index, now)

    def refill(self, index: int, now: float) -> None:
        """Load weights that may come in, start what waits, and say when the next sequence ends."""
        engine = self.engines[index]
        engine.advance(now)
        before = len(engine.running)
        for _ in range(2):  # again once the drained engine has loaded
            wanted = engine.waiting[0][1] if engine.waiting else 0
            if self.newest > engine.version and self.may_load(len(engine.running), engine.version, wanted):
                engine.complete_step()
                engine.loads.append((int(engine.progress), self.newest))
                engine.at += self.machine.stall
            hold = self.drains and self.newest > engine.version
            while engine.waiting and len(engine.running) < self.machine.sequences and not hold:
                group, oldest, length = engine.waiting[0]
                if oldest > engine.version:
                    break
                engine.waiting.popleft()
                engine.complete_step()
                engine.at, sequence = engine.at + self.machine.start, next(self.ids)
                self.began[sequence] = int(engine.progress)
                heapq.heappush(engine.running, (int(engine.progress) + length, sequence, group))
        if len(engine.running) != before:
            self.trace.running.append((now, index, len(engine.running)))
        engine.events += 1
        if engine.running:
            engine.pace = self.machine.decode(len(engine.running))
            end = engine.at + (engine.running[0][0] - engine.progress) * engine.pace
            self.at(end, self.sequence_ends, index, engine.events)

    def sequence_ends(self, now: float, index: int, event: int) -> None:
        engine = self.engines[index]
        if event != engine.events:
            return
        engine.advance(now)
        engine.progress = float(engine.running[0][0])
        while engine.running and engine.running[0][0] <= engine.progress:
            end, sequence, group = heapq.heappop(engine.running)
            self.versions[group].append(engine.versions(self.began.pop(sequence), end))
            self.left[group] -= 1
            if not self.left[group]:
                self.at(now + self.machine.score, self.group_is_scored, group)
        self.trace.running.append((now, index, len(engine.running)))
        self.refill(index, now)

    def group_is_scored(self, now: float, group: int) -> None:
        self.load[self.owner.pop(group)] -= 1
        self.finished.add(group)
        while (batch := self.schedule.next_batch(self.finished)) is not None:
            self.finished.difference_update(batch)
            self.batches.append(batch)
        self.issue(now)
        self.train(now)

    def train(self, now: float) -> None:
        """Begin a step, if there is a batch and none is in training."""
        if not self.training and self.batches:
            self.training = True
            tokens = [array for group in self.batches.popleft() for array in self.versions.pop(group)]
            self.trace.lags.append(self.trained - np.concatenate(tokens))
            self.trace.step_tokens.append(len(self.trace.lags[-1]))
            self.at(now + self.machine.train(self.trace.step_tokens[-1]), self.step_ends)

    def step_ends(self, now: float) -> None:
        self.trained, self.training = self.trained + 1, False
        self.trace.step_ends.append(now)
        if self.publishes(self.trained):
            self.at(now + self.machine.publish, self.weights_are_out, self.trained)
        self.train(now)

    def weights_are_out(self, now: float, version: int) -> None:
        self.newest = version
        for index in range(len(self.engines)):
            self.refill(index, now)
        self.issue(now)
