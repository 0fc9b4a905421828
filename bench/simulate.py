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
    train_busy: float = 0.0

    def tokens_per_time(self, skip: int = 0) -> float:
        """Trained tokens, from the end of step `skip` (0: from the start)."""
        begin = self.step_ends[skip - 1] if skip else 0.0
        return sum(self.step_tokens[skip:]) / (self.step_ends[-1] - begin)


class _Engine:
    def __init__(self, machine: Machine):
        self.machine = machine
        self.running: list[tuple[int, int, int]] = []  # heap of (progress at its end, sequence, group)
        self.waiting: deque[tuple[int, int]] = deque()  # (group, oldest version), a sequence each
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


def simulate(
    schedule: Schedule,
    machine: Machine,
    lengths: Iterator[int],
    group_size: int,
    steps: int,
    publishes: Callable[[int], bool],
    may_load: Callable[[int, int, int], bool],
    drains: bool = False,
) -> Trace:
    """Run `schedule` to the end of its steps. `lengths`: of one sequence after the other; `may_load`(sequences in
    flight, version, version that the next sequence asks for)."""
    trace, engines = Trace(), [_Engine(machine) for _ in range(machine.engines)]
    events: list[tuple[float, int, str, tuple]] = []
    number, ids = itertools.count(), itertools.count()
    left: dict[int, int] = {}  # group -> sequences not finished
    versions: dict[int, list[np.ndarray]] = {}  # group -> of its tokens
    began: dict[int, int] = {}  # sequence -> the engine's progress
    finished: set[int] = set()
    load = [0] * len(engines)  # groups issued and not back
    owner: dict[int, int] = {}
    batches: deque[list[int]] = deque()
    newest, trained, training = 0, 0, False
    groups_left = steps * schedule.n

    def at(time: float, kind: str, *what) -> None:
        heapq.heappush(events, (time, next(number), kind, what))

    def refill(index: int, now: float) -> None:
        """Load weights that may come in, start what waits, and say when the next sequence ends."""
        engine = engines[index]
        engine.advance(now)
        before = len(engine.running)
        for _ in range(2):  # again once the drained engine has loaded
            wanted = engine.waiting[0][1] if engine.waiting else 0
            if newest > engine.version and may_load(len(engine.running), engine.version, wanted):
                engine.complete_step()
                engine.loads.append((int(engine.progress), newest))
                engine.at += machine.stall
            hold = drains and newest > engine.version
            while engine.waiting and len(engine.running) < machine.sequences and not hold:
                group, oldest = engine.waiting[0]
                if oldest > engine.version:
                    break
                engine.waiting.popleft()
                engine.complete_step()
                engine.at, sequence = engine.at + machine.start, next(ids)
                began[sequence] = int(engine.progress)
                heapq.heappush(engine.running, (int(engine.progress) + next(lengths), sequence, group))
        if len(engine.running) != before:
            trace.running.append((now, index, len(engine.running)))
        engine.events += 1
        if engine.running:
            engine.pace = machine.decode(len(engine.running))
            end = engine.at + (engine.running[0][0] - engine.progress) * engine.pace
            at(end, "sequence", index, engine.events)

    def issue(now: float) -> None:
        """Groups start while the schedule allows and an engine has room for one to wait."""
        nonlocal groups_left
        touched = set()
        while groups_left and schedule.may_start(newest):
            # A group is issued to the engine with the fewest; each holds `queued` beyond what is in flight.
            room = [i for i, e in enumerate(engines) if len(e.waiting) < machine.queued * group_size]
            if not room:
                break
            index, group = min(room, key=lambda i: load[i]), next(ids)
            engines[index].waiting.extend([(group, schedule.oldest(newest))] * group_size)
            schedule.start(group, newest)
            left[group], versions[group], owner[group] = group_size, [], index
            load[index] += 1
            groups_left -= 1
            touched.add(index)
            if len(engines[index].waiting) >= machine.queued * group_size:
                refill(index, now)
        for index in touched:
            refill(index, now)

    def train(now: float) -> None:
        nonlocal training
        if not training and batches:
            training, groups = True, batches.popleft()
            tokens = [array for group in groups for array in versions.pop(group)]
            trace.lags.append(trained - np.concatenate(tokens))
            trace.step_tokens.append(len(trace.lags[-1]))
            seconds = machine.train(trace.step_tokens[-1])
            trace.train_busy += seconds
            at(now + seconds, "step")

    issue(0.0)
    while trained < steps:
        if not events:
            raise RuntimeError(f"the schedule stands still after step {trained}")
        now, _, kind, what = heapq.heappop(events)
        if kind == "sequence":
            index, event = what
            engine = engines[index]
            if event != engine.events:
                continue
            engine.advance(now)
            engine.progress = float(engine.running[0][0])
            while engine.running and engine.running[0][0] <= engine.progress:
                end, sequence, group = heapq.heappop(engine.running)
                versions[group].append(engine.versions(began.pop(sequence), end))
                left[group] -= 1
                if not left[group]:
                    at(now + machine.score, "group", group)
            trace.running.append((now, index, len(engine.running)))
            refill(index, now)
        elif kind == "group":
            (group,) = what
            load[owner.pop(group)] -= 1
            finished.add(group)
            while (batch := schedule.next_batch(finished)) is not None:
                finished.difference_update(batch)
                batches.append(batch)
            issue(now)
            train(now)
        elif kind == "step":
            trained, training = trained + 1, False
            trace.step_ends.append(now)
            if publishes(trained):
                at(now + machine.publish, "weights", trained)
            train(now)
        else:
            (newest,) = what
            for index in range(len(engines)):
                refill(index, now)
            issue(now)
    return trace
