"""When the actor admits and when weights may change. The engine is a stand-in; the real one is in test_engine."""

import torch
from conftest import changed
from test_queues import make_queue

from actor import Actor
from config import presets
from queues import Channels, Prompt, Report, Rollout

LENGTH = 3  # tokens of every completion


class StandInEngine:
    """Finishes every sequence after LENGTH steps; newer weights are staged when the test says so."""

    def __init__(self, weights):
        self.weights, self.version, self.running, self.requests = weights, 0, {}, 0
        self.offered = self.staged = 0
        self.arrived = True  # what is on its way to the staging copy
        self.saved = []

    def submit(self, prompt_ids, temperature):
        self.requests += 1
        self.running[str(self.requests)] = []
        return str(self.requests)

    def look_for_weights(self):
        self.offered = self.weights.version
        if self.staged < 0 and self.arrived:
            self.staged = self.pulled

    def stage_weights(self):
        if 0 <= self.staged < self.offered:
            self.staged, self.pulled = -1, self.offered

    def load_weights(self):
        self.version = self.staged
        return 0.0

    def save_weights(self, folder):
        self.saved.append((self.version, folder.name))

    def saved_weights(self):
        return ""

    def step(self):
        for versions in self.running.values():
            versions.append(self.version)
        done = {request: versions for request, versions in self.running.items() if len(versions) == LENGTH}
        for request in done:
            del self.running[request]
        ones = torch.ones(LENGTH)
        return {request: Rollout(ones.long(), -ones, torch.tensor(v), "stop") for request, v in done.items()}


class Weights:
    version = 0


def make_actor(sequences=4, update="inflight") -> Actor:
    cfg = changed(presets()["tiny"](), actor=dict(sequences=sequences, update=update))
    queues = {name: make_queue(slots=50) for name in ("eval_prompts", "completions", "rollouts", "reports")}
    channels = Channels(**queues, prompts=[make_queue(slots=50)], batches=[], weights=Weights(), stop=None, actors=[0])
    return Actor(cfg, channels, StandInEngine(channels.weights), index=0)


def put(actor: Actor, group_id: int, version: int, samples: int = 2, evals: int = 0) -> None:
    """`evals`: samples of the evaluation that the prompt is part of."""
    queue = actor.channels.eval_prompts if evals else actor.channels.prompts[0]
    queue.put(Prompt(group_id, version, samples, torch.tensor([1]), {}, eval_samples=evals))


def tick(actor: Actor) -> None:
    """One turn of the actor's main loop."""
    actor.update()
    actor.admit()
    actor.step()


def test_finished_sequences_are_replaced_at_once_and_groups_leave_whole():
    actor = make_actor(sequences=4)
    for group_id in range(6):
        put(actor, group_id, 0)
    in_flight = []
    for _ in range(9):
        actor.admit()
        in_flight.append(len(actor.in_flight))
        actor.step()
    assert in_flight == [4] * 9
    actor.report()
    assert actor.channels.reports.get().values["in_flight"] == 4
    groups = [actor.channels.completions.get() for _ in range(6)]
    assert [group.prompt.group_id for group in groups] == list(range(6))
    assert all(len(group.rollouts) == 2 for group in groups) and not actor.groups


def test_prompt_is_never_sampled_by_older_weights_than_it_names_and_decoding_goes_on_meanwhile():
    actor = make_actor(sequences=8)
    put(actor, 0, 0)
    tick(actor)
    actor.channels.weights.version, actor.engine.arrived = 2, False  # published, but still on its way
    put(actor, 1, 2)
    tick(actor)
    assert len(actor.in_flight) == 2, "group 1 has to wait"
    tick(actor)
    assert actor.channels.completions.get().prompt.group_id == 0, "group 0 was not held up"
    actor.engine.arrived = True
    for _ in range(LENGTH):
        tick(actor)
    group = actor.channels.completions.get()
    assert all(min(rollout.versions) >= 2 for rollout in group.rollouts)


def test_weights_published_again_while_a_prompt_waits_do_not_let_it_through_early():
    """The staged version may be older than the one the prompt names: look again after the update."""
    actor = make_actor()
    put(actor, 0, 2)
    actor.channels.weights.version = 2
    actor.engine.staged = 1
    actor.admit()
    assert actor.engine.version == 1 and not actor.in_flight


def test_evaluation_goes_first_and_the_weights_stand_still_until_it_is_done():
    actor = make_actor(sequences=4)
    put(actor, 0, 0, samples=8)
    tick(actor)
    for group_id in (-1, -2):
        put(actor, group_id, 0, samples=1, evals=2)
    tick(actor)
    tick(actor)
    tick(actor)  # the first four are done, both evaluation prompts are in before the rest of group 0
    assert sum(prompt.is_eval for prompt in actor.in_flight.values()) == 2
    actor.channels.weights.version = 5
    tick(actor)
    assert actor.engine.version == 0 and actor.evals_left
    tick(actor)
    assert actor.evals_left == 0
    tick(actor)
    assert actor.engine.version == 5
    assert actor.engine.saved == [(0, "evaluated-0.unfinished")], "those that were evaluated, not the newest"
    assert actor.channels.reports.get().values == {"version": 0}
    evals = [group for group in (actor.channels.completions.get() for _ in range(2)) if group.prompt.is_eval]
    assert len(evals) == 2 and all(set(group.rollouts[0].versions.tolist()) == {0} for group in evals)


def test_drain_does_not_wait_for_ever_for_an_evaluation_that_is_half_submitted():
    actor = make_actor(sequences=2, update="drain")
    for group_id in range(-1, -4, -1):
        put(actor, group_id, 0, samples=2, evals=6)
    tick(actor)
    actor.channels.weights.version = 1
    for _ in range(50):
        tick(actor)
    assert actor.evals_left == 0 and actor.engine.version == 1
    groups = [actor.channels.completions.get() for _ in range(3)]
    assert all(set(r.versions.tolist()) == {0} for group in groups for r in group.rollouts)


def test_report_for_which_there_is_no_room_joins_the_next():
    actor = make_actor()
    while actor.channels.reports.put(Report("other", {}), timeout_s=0):
        pass
    actor.done["generated_tokens"] += 5
    actor.report()
    while actor.channels.reports.get(timeout_s=0):
        pass
    actor.done["generated_tokens"] += 2
    actor.report()
    assert actor.channels.reports.get().values["generated_tokens"] == 7 and not actor.done


def test_newer_weights_are_staged_while_they_must_not_be_loaded():
    """Else a trainer that sends them could not go on while an actor evaluates."""
    actor = make_actor(sequences=4)
    put(actor, -1, 0, samples=1, evals=1)
    tick(actor)
    for version in (1, 2):
        actor.channels.weights.version = version
        actor.update()
        actor.update()
        assert actor.evals_left and actor.engine.version == 0 and actor.engine.staged == version


def test_drain_lets_everything_in_flight_finish_before_the_newest_weights_come_in():
    actor = make_actor(sequences=2, update="drain")
    for group_id in range(3):
        put(actor, group_id, 0)
    tick(actor)
    actor.channels.weights.version = 1
    tick(actor)
    actor.channels.weights.version = 3
    tick(actor)
    assert not actor.in_flight and actor.engine.version == 0
    for _ in range(2 * LENGTH):
        tick(actor)
    versions = [set(r.versions.tolist()) for _ in range(3) for r in actor.channels.completions.get().rollouts]
    assert versions == [{0}] * 2 + [{3}] * 4
