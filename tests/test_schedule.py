"""Schedules: no token is trained too late, no group is lost, nothing stands still, whatever the lengths and speeds."""

import random

import pytest
from conftest import changed

from config import presets
from schedule import Phases, Pipeline, drains, make_schedule, may_load_weights, publishes

TINY = presets()["tiny"]()


class World:
    """Actors, filter and trainer as loosely coupled as in a run, with every speed random."""

    def __init__(self, seed: int, begin: int = 0, most_steps: int = 12, order: str = "started", **changes):
        self.rng = rng = random.Random(seed)
        self.n = rng.randint(1, 4)  # groups a batch
        self.steps = begin + rng.randint(1, most_steps)
        self.begin = begin
        changes = {"batch_size": 8 * self.n, "steps": self.steps, "max_lag": None, **changes}
        ready = dict(ready_batches=rng.choice([1, 3, 10**6]), order=order)
        self.cfg = changed(TINY, **changes, preprocess=ready)
        self.schedule = make_schedule(self.cfg, begin)
        self.trained_steps = self.version = begin  # `version`: the newest that went out
        self.slots = [[] for _ in range(rng.randint(1, 3))]  # actor -> running groups [id, ticks left]
        self.loaded = [begin] * len(self.slots)
        self.capacity = rng.randint(1, 6)
        self.tickets: list[tuple[int, int]] = []
        self.finished: dict[int, list[int]] = {}  # group -> versions of its tokens
        self.batches: list[list[int]] = []
        self.drop_rate = rng.choice([0.0, 0.3, 0.8])
        self.longest = rng.choice([1, 5, 60])
        self.trainer_speed, self.update_speed = rng.choice([0.05, 0.5, 1.0]), rng.choice([0.05, 0.5, 1.0])
        self.lags: list[int] = []
        self.issued, self.trained, self.dropped = 0, 0, 0
        self.versions: dict[int, list[int]] = {}
        self.overlap = 0  # ticks in which generation ran while a batch waited or was trained
        self.order: list[int] = []  # groups as they were trained

    def update(self, actor: int, wanted: int = 0) -> None:
        if may_load_weights(self.cfg, len(self.slots[actor]), self.loaded[actor], wanted):
            self.loaded[actor] = self.version

    def tick(self) -> None:
        rng, schedule = self.rng, self.schedule
        while (
            len(self.tickets) < 2
            and self.issued - self.dropped < (self.steps - self.begin) * self.n
            and schedule.may_start(self.version)
        ):
            self.tickets.append((self.issued, schedule.oldest(self.version)))
            schedule.start(self.issued, self.version)
            self.issued += 1
        for actor, running in enumerate(self.slots):
            if rng.random() < self.update_speed:
                self.update(actor)
            while self.tickets and len(running) < self.capacity:
                if drains(self.cfg) and self.version > self.loaded[actor]:
                    break
                group_id, version = self.tickets[0]
                if version > self.loaded[actor]:  # a prompt names the oldest weights it allows
                    self.update(actor, version)
                if version > self.loaded[actor]:
                    break
                self.tickets.pop(0)
                length = rng.randint(1, self.longest) if rng.random() < 0.9 else self.longest
                running.append([group_id, length])
                self.versions[group_id] = []
            self.overlap += bool(running and self.batches)
            for group in list(running):
                self.versions[group[0]].append(self.loaded[actor])
                group[1] -= 1
                if group[1] == 0:
                    running.remove(group)
                    self._finish(group[0])
        while (batch := schedule.next_batch(self.finished)) is not None:
            self.batches.append([self.finished.pop(group_id) and group_id for group_id in batch])
        if self.batches and rng.random() < self.trainer_speed:
            for group_id in self.batches.pop(0):
                self.lags += [self.trained_steps - version for version in self.versions[group_id]]
                self.order.append(group_id)
                self.trained += 1
            self.trained_steps += 1
            if publishes(self.cfg, self.trained_steps):
                self.version = self.trained_steps

    def _finish(self, group_id: int) -> None:
        if self.rng.random() < self.drop_rate:
            self.schedule.drop(group_id)
            self.dropped += 1
        else:
            self.finished[group_id] = [group_id + 1]

    def run(self, seed: int) -> "World":
        for _ in range(200_000):
            self.tick()
            if self.trained_steps == self.steps:
                break
        assert self.trained_steps == self.steps, f"seed {seed}: stands still after step {self.trained_steps}"
        assert min(self.lags) >= 0
        assert self.trained + self.dropped == self.issued and not self.schedule.outstanding
        assert self.trained == (self.steps - self.begin) * self.n
        return self


@pytest.mark.parametrize("order", ["started", "finished"])
@pytest.mark.parametrize("max_lag", [0, 1, 2, 5, 50, None])
def test_no_token_is_older_than_max_lag_no_group_is_lost_and_nothing_deadlocks(max_lag, order):
    """Random lengths, actors, filters and speeds; observed lag never over the bound, and every run comes to its end."""
    reached, overtaken = 0, False
    for seed in range(150):
        world = World(seed, max_lag=max_lag, order=order).run(seed)
        assert max_lag is None or max(world.lags) <= max_lag, f"seed {seed}"
        overtaken |= world.order != sorted(world.order)
        reached = max(reached, *world.lags)
    assert max_lag in (None, 50) or reached == max_lag, f"the bound is never reached ({reached}): it is too strict"
    assert overtaken == (order == "finished" and max_lag != 0), "with bound 0 there is only one batch at a time"


@pytest.mark.parametrize("g", [1, 2, 3, 7])
def test_conventional_never_generates_while_it_trains_and_a_lag_is_at_most_g_minus_1(g):
    worlds = [World(seed, schedule="conventional", phase_steps=g).run(seed) for seed in range(100)]
    assert not any(world.overlap for world in worlds)
    assert max(max(world.lags) for world in worlds) == g - 1
    for world in worlds:
        for versions in world.versions.values():
            assert len(set(versions)) == 1 and versions[0] % g == 0, "weights are frozen in a phase"
    mixed = [world.order != sorted(world.order) for world in worlds if len(world.order) > 5]
    assert any(mixed), "groups of a phase are shuffled"


@pytest.mark.parametrize("g", [1, 2, 3, 7])
def test_async_generates_while_it_trains_and_a_lag_is_at_most_2g_minus_1(g):
    worlds = [World(seed, most_steps=4 * g, schedule="async", phase_steps=g).run(seed) for seed in range(100)]
    assert any(world.overlap for world in worlds)
    assert max(max(world.lags) for world in worlds) == 2 * g - 1
    for world in worlds:
        for versions in world.versions.values():
            assert len(set(versions)) == 1 and versions[0] % g == 0, "weights are frozen in a phase"


@pytest.mark.parametrize("schedule, g, most", [("conventional", 4, 3), ("async", 4, 7)])
@pytest.mark.parametrize("begin", [4, 5, 7])
def test_run_that_resumes_inside_a_phase_does_what_is_left_of_it(schedule, g, most, begin):
    worlds = [World(seed, begin, schedule=schedule, phase_steps=g).run(seed) for seed in range(50)]
    assert max(max(world.lags) for world in worlds) <= most
    for world in worlds:
        assert {version for versions in world.versions.values() for version in versions} <= {begin, *range(0, 30, g)}


@pytest.mark.parametrize("max_lag", [1, 5, None])
def test_drain_gives_one_version_a_sequence(max_lag):
    spread = {"drain": 0, "inflight": 0}
    for update in spread:
        for seed in range(60):
            world = World(seed, max_lag=max_lag, actor=dict(update=update)).run(seed)
            assert max_lag is None or max(world.lags) <= max_lag
            spread[update] = max(spread[update], *(len(set(versions)) for versions in world.versions.values()))
    assert spread["drain"] == 1 < spread["inflight"]


def test_weights_go_out_after_every_step_or_every_phase_and_after_the_last_step():
    def out(**changes) -> list[int]:
        return [version for version in range(1, 11) if publishes(changed(TINY, steps=10, **changes), version)]

    assert out() == list(range(1, 11))
    assert out(schedule="async", phase_steps=4) == out(schedule="conventional", phase_steps=4) == [4, 8, 10]


def test_weights_may_come_in_when_the_schedule_says_so():
    drain, phases = changed(TINY, actor=dict(update="drain")), changed(TINY, schedule="async", phase_steps=4)
    assert may_load_weights(TINY, in_flight=5, version=0, wanted=0)
    assert may_load_weights(drain, 0, 0, 0) and not may_load_weights(drain, 5, 0, 0)
    assert may_load_weights(phases, 0, 0, wanted=4), "the next phase begins"
    assert not may_load_weights(phases, 5, 0, wanted=4), "this one has not ended"
    assert not may_load_weights(phases, 0, 0, wanted=0), "an engine without work may be in the middle of one"


def test_phase_by_hand():
    """n = 1, G = 2, 3 steps: groups 0 and 1 by version 0; a third one only when both are trained."""
    schedule = Phases(1, steps=3, g=2, ahead=0, seed=0)
    schedule.start(0, 0)
    schedule.start(1, 0)
    assert not schedule.may_start(0) and not schedule.may_evaluate
    assert schedule.next_batch([0]) is None, "group 1 belongs to the phase too"
    assert sorted(schedule.next_batch([0, 1]) + schedule.next_batch([0, 1])) == [0, 1]
    assert schedule.next_batch([0, 1]) is None and schedule.may_evaluate
    assert not schedule.may_start(0) and schedule.may_start(2)
    schedule.start(2, 2)
    assert not schedule.may_start(2), "the last phase has one step"
    assert schedule.next_batch([2]) == [2]


def test_phase_of_async_keeps_the_version_it_began_with():
    schedule = Phases(1, steps=8, g=2, ahead=1, seed=0)
    for group_id in (0, 1):
        schedule.start(group_id, 0)
    schedule.next_batch([0, 1]), schedule.next_batch([0, 1])
    assert schedule.may_start(0), "while the first phase is trained"
    schedule.start(2, 0)
    assert schedule.oldest(2) == 0, "newer weights have come out in its middle"
    schedule.start(3, 2)
    assert not schedule.may_start(2)
    schedule.next_batch([2, 3]), schedule.next_batch([2, 3])
    assert not schedule.may_start(0) and schedule.may_start(2) and schedule.oldest(2) == 2


def test_groups_leave_as_they_started_and_dropped_ones_are_not_waited_for():
    schedule = Pipeline(2, None)
    for group_id in range(5):
        schedule.start(group_id, 0)
    assert schedule.next_batch([4, 1, 3]) is None, "group 0 is the first"
    schedule.drop(0)
    assert schedule.next_batch([4, 1, 3]) is None, "now group 2 is the second"
    assert schedule.next_batch([4, 1, 3, 2]) == [1, 2]


def test_finished_groups_overtake_longer_ones_as_long_as_none_of_these_gets_late():
    schedule = Pipeline(groups_per_batch=1, max_lag=2, order="finished")
    for group_id in range(3):
        schedule.start(group_id, version=0)  # step 2 at the latest
    assert schedule.next_batch([]) is None
    assert schedule.next_batch([2, 1]) == [1], "of two that have finished the older one"
    assert schedule.next_batch([2]) == [2]
    schedule.start(3, version=1)
    assert schedule.next_batch([3]) is None, "group 0 has to be in step 2"
    assert schedule.next_batch([3, 0]) == [0] and schedule.next_batch([3]) == [3]


def test_places_up_to_the_bound_are_given_out_and_no_more():
    schedule = Pipeline(groups_per_batch=2, max_lag=1)
    for group_id in range(4):
        schedule.start(group_id, version=0)  # all to be trained at step 0 or 1
    assert not schedule.may_start(0)
    assert schedule.next_batch([1, 2, 0]) == [0, 1]
    assert schedule.may_start(1) and not schedule.may_start(0)
    schedule.start(4, 1)
    schedule.start(5, 1)  # step 2 at the latest
    assert not schedule.may_start(1)
    assert schedule.next_batch([4, 5, 2]) is None, "group 3 has to be in step 1"
    assert schedule.next_batch([4, 5, 2, 3]) == [2, 3]


def test_bound_zero_is_exactly_on_policy():
    schedule = Pipeline(2, 0)
    schedule.start(0, 0)
    schedule.start(1, 0)
    assert not schedule.may_start(0)
    schedule.drop(1)
    assert schedule.may_start(0), "a dropped group makes room for another of the same version"
