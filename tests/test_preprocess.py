"""Advantages, packing, and the preprocessor without its neighbours."""

import dataclasses
import itertools
import multiprocessing
import random

import pytest
import torch
from conftest import changed
from test_queues import make_queue
from test_train import groups

from config import Start, presets
from life import ActorState
from packing import Sequence, make_micro_batch, pack
from preprocess import Preprocessor, batch_metrics, group_advantages, has_no_variance, length_penalty, make_step_batches
from queues import Channels, Prompt, Rollout, RolloutGroup
from transport import make_channels

TINY = presets()["tiny"]()

# ---------------------------------------------------------------- advantages


def test_leave_one_out_by_hand():
    # 1 - (0 + 0)/2 = 1;  0 - (1 + 0)/2 = -0.5
    assert group_advantages([1.0, 0.0, 0.0], "leave_one_out", False) == [1.0, -0.5, -0.5]


def test_mean_baseline_by_hand_and_its_ratio_to_leave_one_out():
    mean = group_advantages([1.0, 0.0, 0.0], "mean", False)
    assert mean == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert group_advantages([1.0, 0.0, 0.0], "leave_one_out", False) == pytest.approx([a * 3 / 2 for a in mean])


def test_division_by_the_standard_deviation_by_hand():
    # rewards 1, 0: mean 0.5, std 0.5
    assert group_advantages([1.0, 0.0], "mean", True) == pytest.approx([1.0, -1.0], rel=1e-5)


def test_equal_rewards_give_exactly_zero_even_with_rounding():
    rewards = [0.1 + 0.2, 0.3, 0.15 + 0.15]  # differ in the last bit
    assert len(set(rewards)) > 1 and has_no_variance(rewards)
    assert group_advantages(rewards, "leave_one_out", True) == [0.0, 0.0, 0.0]
    assert not has_no_variance([0.0, 1e-3])


# ---------------------------------------------------------------- packing


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_packing_keeps_every_sequence_once_within_budget_and_ranks_equal(seed, ranks):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 90) for _ in range(rng.randint(1, 60))]
    dealt = pack(lengths, 200, ranks)
    assert len({len(micro_batches) for micro_batches in dealt}) == 1
    flat = [i for micro_batches in dealt for micro_batch in micro_batches for i in micro_batch]
    assert sorted(flat) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in mb) <= 200 for mbs in dealt for mb in mbs)
    if len(lengths) >= 20 * ranks:
        tokens = [sum(lengths[i] for mb in mbs for i in mb) for mbs in dealt]
        assert max(tokens) <= 1.1 * sum(tokens) / ranks


@pytest.mark.parametrize("samples, ranks, max_tokens", [(128, 8, 8192), (512, 32, 16384), (1024, 80, 16384)])
def test_slowest_rank_has_at_most_five_percent_more_tokens_than_the_mean(samples, ranks, max_tokens):
    """Lengths as reasoning has them: log-normal, median 735, mean 1,000, 1% above 4,700, cut at 8,192; 20 draws.
    (1,024 samples on 80 ranks are the paper's. No split helps where one sequence is longer than a rank's share.)"""
    for seed in range(20):
        rng = random.Random(seed)
        lengths = [min(8192, max(16, int(rng.lognormvariate(6.6, 0.8)))) for _ in range(samples)]
        totals = [sum(lengths[i] for m in rank for i in m) for rank in pack(lengths, max_tokens, ranks)]
        assert max(totals) <= 1.05 * sum(totals) / ranks


def test_sequence_over_the_budget_has_a_micro_batch_to_itself():
    dealt = pack([500, 10, 10], 100, 1)
    assert sorted(map(sorted, dealt[0])) == [[0], [1, 2]]


def test_micro_batch_restarts_positions_and_masks_prompts():
    prompt_a, prompt_b = torch.tensor([5]), torch.tensor([6, 7])
    group = groups(1, 2)[0]
    a, b = group.rollouts
    micro_batch = make_micro_batch([Sequence(prompt_a, a, 0.5, 1.0), Sequence(prompt_b, b, -0.5, 0.25)])
    na, nb = len(a.completion_ids), len(b.completion_ids)
    assert micro_batch.position_ids.tolist() == [*range(1 + na), *range(2 + nb)]
    assert micro_batch.mask.tolist() == [False] + [True] * na + [False] * 2 + [True] * nb
    assert micro_batch.input_ids[micro_batch.mask].tolist() == [*a.completion_ids.tolist(), *b.completion_ids.tolist()]
    assert micro_batch.versions[micro_batch.mask].tolist() == [*a.versions.tolist(), *b.versions.tolist()]
    assert torch.equal(micro_batch.logprobs[micro_batch.mask], torch.cat([a.logprobs, b.logprobs]))
    assert micro_batch.advantages[micro_batch.mask].unique().tolist() == [-0.5, 0.5]
    assert micro_batch.weights[-1] == 0.25 and micro_batch.weights[na] == 1.0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_normalisers_are_those_of_the_whole_step_on_every_rank(ranks):
    batch_groups = groups()
    tokens = sum(len(r.completion_ids) for g in batch_groups for r in g.rollouts)
    for normaliser, expected in (("token", tokens), ("sequence", 16)):
        cfg = changed(TINY, train=dict(normaliser=normaliser), preprocess=dict(max_tokens_per_microbatch=100))
        batches = make_step_batches(cfg, 3, batch_groups, ranks, {})
        assert [batch.normaliser for batch in batches] == [expected] * ranks
        weights = sum(m.weights[m.mask].sum().item() for batch in batches for m in batch.micro_batches)
        assert weights == pytest.approx(expected, rel=1e-5)


def test_reward_metric_counts_dropped_groups_too():
    own = [rollout.reward for group in groups(2, 4) for rollout in group.rollouts]
    all_right = one_group(*[(1.0, 3, "stop", {"digits": 2.0})] * 8, row={"task": "sums"})
    metrics = batch_metrics(TINY, groups(2, 4), dropped=[all_right])
    assert metrics["reward"] == (sum(own) + 8) / 16 and metrics["samples"] == 8
    assert metrics["task/sums"] == 1.0 and metrics["verifier/digits"] == 2.0


# ---------------------------------------------------------------- what the verifier could not say, and what is cut


def one_group(*samples: tuple, row: dict | None = None) -> RolloutGroup:
    """Samples of (reward or the failure's name, completion tokens, and perhaps finish reason and metrics)."""
    rollouts = []
    for reward, n, *more in samples:
        reason, metrics = more[0] if more else "stop", more[1] if len(more) > 1 else {}
        told = {"failure": reward} if isinstance(reward, str) else {"reward": reward, "metrics": metrics}
        rollouts.append(Rollout(torch.arange(n), -torch.ones(n), torch.zeros(n, dtype=torch.int64), reason, **told))
    return RolloutGroup(Prompt(0, 0, len(samples), torch.tensor([1, 2]), row or {}), rollouts)


def trained(cfg, group: RolloutGroup) -> tuple[dict[int, float], int]:
    """Completion length -> advantage of the samples that enter the loss, and the normaliser."""
    (batch,) = make_step_batches(cfg, 0, [group], 1, {})
    found = {}
    for micro_batch in batch.micro_batches:
        starts = [*(micro_batch.position_ids == 0).nonzero().flatten().tolist(), len(micro_batch.mask)]
        for a, b in itertools.pairwise(starts):
            if micro_batch.mask[a:b].any():
                found[int(micro_batch.mask[a:b].sum())] = micro_batch.advantages[b - 1].item()
    return found, batch.normaliser


def test_failed_sample_has_no_part_in_baseline_loss_or_normaliser():
    # without it, of [1, 0, 0] as of [1, -, 0, 0]: 1 - 0, 0 - 1/2, 0 - 1/2
    group = one_group((1.0, 3), ("timeout", 9), (0.0, 4), (0.0, 5))
    assert trained(TINY, group) == ({3: 1.0, 4: -0.5, 5: -0.5}, 12)
    assert trained(TINY, one_group(("crash", 3), (1.0, 4), (0.0, 5)))[0] == {4: 1.0, 5: -1.0}
    metrics = batch_metrics(TINY, [group], [])
    assert metrics["reward"] == pytest.approx(1 / 3) and metrics["samples"] == 3 and metrics["failed_samples"] == 1


def test_group_with_less_than_two_verified_samples_is_dropped_and_counted():
    one = preprocessor(changed(TINY, **SMALL, eval=dict(every=0)))
    one.issue_prompts()
    prompt = one.channels.prompts[0].get()
    group = scored(prompt, [1.0, 0.0, 0.0, 0.0], 0)
    failed = [dataclasses.replace(r, reward=None, failure="timeout") for r in group.rollouts[1:]]
    one.take(RolloutGroup(prompt, group.rollouts[:1] + failed))
    assert one.dropped["verifier_failed"] == 1 and len(one.dropped_groups) == 1 and not one.finished
    assert prompt.group_id not in one.schedule.outstanding
    with pytest.raises(RuntimeError, match=r"the verifier failed \(it did in \d+ groups so far\)"):
        for _ in range(250):
            one.issue_prompts()
            prompt = one.channels.prompts[0].get()
            one.take(RolloutGroup(prompt, failed))


def test_soft_length_penalty_is_linear_over_the_last_tokens_and_counts_in_the_advantage_not_in_the_reward():
    cfg = changed(TINY, reward=dict(soft_limit_tokens=16))  # of 64: nothing up to 48, 1/2 at 56, 1 at 64
    group = one_group((1.0, 48), (1.0, 56), (1.0, 64))
    assert [length_penalty(cfg, rollout) for rollout in group.rollouts] == [0.0, 0.5, 1.0]
    # 1, 0.5, 0: minus the mean of the other two
    assert trained(cfg, group)[0] == {48: 0.75, 56: 0.0, 64: -0.75}
    assert trained(TINY, group)[0] == {48: 0.0, 56: 0.0, 64: 0.0}
    metrics = batch_metrics(cfg, [group], [])
    assert metrics["reward"] == 1.0 and metrics["length_penalty"] == 0.5


def test_truncated_samples_can_be_kept_out_of_the_loss_their_reward_still_counts_for_the_others():
    group = one_group((1.0, 3), (0.0, 64, "length"), (0.0, 5))
    masked = changed(TINY, preprocess=dict(truncated="mask"))
    assert trained(masked, group) == ({3: 1.0, 5: -0.5}, 8)
    assert trained(TINY, group) == ({3: 1.0, 64: -0.5, 5: -0.5}, 72)
    assert trained(masked, one_group((1.0, 64, "length"), (0.0, 64, "length"))) == ({}, 0), "an empty step is no error"


def test_what_else_a_verifier_says_is_averaged_by_name_and_the_reward_by_task():
    first = one_group((1.0, 3, "stop", {"digits": 2.0}), (0.0, 3, "stop", {"digits": 4.0, "sign": 1.0}))
    sums = one_group((1.0, 3), (1.0, 3), ("crash", 3), row={"task": "sums"})
    metrics = batch_metrics(TINY, [first, sums], [])
    assert metrics["verifier/digits"] == 3.0 and metrics["verifier/sign"] == 1.0 and metrics["task/sums"] == 1.0
    assert metrics["reward"] == 0.75


# ---------------------------------------------------------------- the preprocessor, without its neighbours


class FakeWeights:
    version = 0


def preprocessor(cfg, slots=300, start=None) -> Preprocessor:
    class Characters:
        bos_token_id = None

        def encode(self, text):
            return [1] * len(text)

        def decode(self, ids):
            return "x"

    queues = {name: make_queue(slots=slots) for name in ("eval_prompts", "completions", "rollouts", "reports")}
    queues |= {"prompts": [make_queue(slots=slots) for _ in range(cfg.actors)]}
    queues |= {"batches": [make_queue(slots=8, slot_bytes=1 << 20)], "actors": [ActorState.UP] * cfg.actors}
    channels = Channels(**queues, weights=FakeWeights(), stop=None)
    return Preprocessor(cfg, channels, start or Start(), Characters(), lambda micro_batch: micro_batch)


def scored(prompt: Prompt, rewards: list[float], version: int) -> RolloutGroup:
    template = groups(1, len(rewards))[0].rollouts
    versions = [torch.full_like(r.versions, version) for r in template]
    rollouts = [
        type(r)(**(vars(r) | {"reward": reward, "versions": v}))
        for r, reward, v in zip(template, rewards, versions, strict=True)
    ]
    return RolloutGroup(prompt, rollouts)


SMALL = dict(batch_size=8, group_size=4, steps=3)


def test_prompts_are_issued_in_an_order_of_the_seed_whatever_the_number_of_actors():
    issued = []
    for seed, actors in ((0, 1), (0, 5), (1, 1)):
        one = preprocessor(changed(TINY, **SMALL, seed=seed, actors=actors, eval=dict(every=0)))
        one.issue_prompts()
        dealt = [[queue.get() for _ in range(len(queue))] for queue in one.channels.prompts]
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1, "each actor gets its share"
        issued.append([prompt.row for prompt in sorted(sum(dealt, []), key=lambda prompt: prompt.group_id)])
    assert issued[0] == issued[1] != issued[2] and len(issued[0]) == 6


def test_groups_without_variance_are_dropped_counted_and_replaced():
    one = preprocessor(changed(TINY, **SMALL, eval=dict(every=0), preprocess=dict(zero_variance="drop")))
    one.issue_prompts()
    assert len(one.channels.prompts[0]) == one.next_prompt[0] == 6, "three steps of two groups"
    for rewards in ([1.0] * 4, [1.0, 0.0, 0.0, 0.0], [0.0] * 4, [0.0, 0.0, 1.0, 1.0]):
        one.take(scored(one.channels.prompts[0].get(), rewards, 0))
    one.send_batches()
    batch = one.channels.batches[0].get()
    assert batch.metrics["dropped_zero_variance"] == 2
    assert batch.metrics["reward"] == pytest.approx((4 + 1 + 0 + 2) / 16), "the dropped groups count in the reward"
    one.issue_prompts()
    assert one.next_prompt[0] == 8, "two more in the place of the two dropped"


def test_groups_without_variance_are_kept_by_default_with_zero_advantage():
    one = preprocessor(changed(TINY, **SMALL, eval=dict(every=0)))
    one.issue_prompts()
    for _ in range(2):
        one.take(scored(one.channels.prompts[0].get(), [1.0] * 4, 0))
    one.send_batches()
    batch = one.channels.batches[0].get()
    assert batch.metrics["no_variance_groups"] == 2 and batch.metrics["dropped_zero_variance"] == 0
    assert not any(m.advantages.any() for m in batch.micro_batches)


def test_finished_groups_overtake_and_the_samples_that_are_shown_come_from_all_places_of_a_batch():
    """In order "finished" the first place is that of the oldest group, which is often a long one."""
    one = preprocessor(changed(TINY, **SMALL, eval=dict(every=0), preprocess=dict(order="finished")))
    one.issue_prompts()
    prompts = [one.channels.prompts[0].get() for _ in range(6)]
    for i in (3, 1, 0, 2):
        one.take(scored(prompts[i], [0.0, 1.0, 0.0, 1.0], 0))
        one.send_batches()
    batches = [one.channels.batches[0].get() for _ in range(2)]
    assert [batch.metrics["group_ids"] for batch in batches] == [[1, 3], [0, 2]]
    assert [list(map(len, batch.metrics["completion_tokens"])) for batch in batches] == [[4, 4], [4, 4]]
    reports = [one.channels.reports.get() for _ in range(len(one.channels.reports))]
    assert [r.values["group_id"] for r in reports if r.kind == "rollout"] == [1, 2]


def test_run_in_which_everything_is_filtered_ends_and_says_so():
    one = preprocessor(
        changed(TINY, batch_size=4, group_size=4, eval=dict(every=0), preprocess=dict(zero_variance="drop"))
    )
    with pytest.raises(RuntimeError, match="the last 100 groups were all dropped"):
        for _ in range(101):
            one.issue_prompts()
            one.take(scored(one.channels.prompts[0].get(), [0.0] * 4, 0))


def test_no_group_starts_while_enough_batches_wait():
    one = preprocessor(
        changed(TINY, **(SMALL | {"steps": 50, "max_lag": None}), eval=dict(every=0), preprocess=dict(ready_batches=2)),
        slots=10,
    )
    for _ in range(4):
        one.issue_prompts()
        one.take(scored(one.channels.prompts[0].get(), [0.0, 1.0, 0.0, 1.0], 0))
        one.send_batches()
    issued = one.next_prompt[0]
    one.issue_prompts()
    assert one.next_prompt[0] == issued and len(one.channels.batches[0]) == 2
    one.channels.weights.version = 1  # the trainer has done a step
    one.issue_prompts()
    assert one.next_prompt[0] > issued


def test_truncated_fraction_counts_length_only():
    batch_groups = groups(1, 4)
    reasons = ["stop", "length", "stop", "stop"]
    rollouts = [dataclasses.replace(r, finish_reason=f) for r, f in zip(batch_groups[0].rollouts, reasons, strict=True)]
    assert batch_metrics(TINY, [RolloutGroup(batch_groups[0].prompt, rollouts)], [])["truncated_fraction"] == 0.25


def test_phase_is_issued_at_once_so_that_its_engines_begin_with_full_batches():
    phases = dict(schedule="conventional", phase_steps=4, max_lag=None, actors=2, trainers=2)
    cfg = changed(TINY, **phases, eval=dict(every=0))
    one, real = preprocessor(cfg), make_channels(cfg, multiprocessing.get_context("spawn"))
    one.channels = dataclasses.replace(one.channels, prompts=real.prompts)
    one.issue_prompts()
    assert [len(queue) for queue in one.channels.prompts] == [2 * cfg.groups_per_batch] * 2
    evaluates = preprocessor(changed(cfg, eval=dict(every=50, prompts=3)))
    evaluates.issue_eval()  # of the version that the phase has
    evaluates.issue_prompts()
    assert [len(queue) for queue in evaluates.channels.prompts] == [2 * cfg.groups_per_batch] * 2


# ---------------------------------------------------------------- actors that die


def test_groups_of_a_dead_actor_are_issued_again_and_what_it_had_sent_is_taken_once():
    one = preprocessor(changed(TINY, **SMALL, actors=2, eval=dict(every=0)))
    one.issue_prompts()
    held = [[queue.get() for _ in range(len(queue) - 1)] for queue in one.channels.prompts]  # one is left in each queue
    assert [len(prompts) for prompts in held] == [2, 2]
    in_transit = scored(held[0][0], [1.0, 0.0, 0.0, 0.0], 0)  # of actor 0: finished, and on its way
    one.channels.actors[0] = ActorState.DEAD
    one.take_back(0)
    assert one.channels.actors[0] == ActorState.TAKEN_BACK and not len(one.channels.prompts[0])
    one.take(in_transit)
    one.issue_prompts()
    issued = [one.channels.prompts[1].get() for _ in range(len(one.channels.prompts[1]))]
    again = [prompt for prompt in issued if prompt.group_id in (0, 2, 4)]
    assert [prompt.group_id for prompt in again] == [0, 2, 4], "also the one that was in its queue, and that in transit"
    assert all(prompt.version == 0 for prompt in again), "their lag is bounded from where they first started"
    for prompt in [*again, *held[1]]:
        one.take(scored(prompt, [1.0, 0.0, 0.0, 0.0], 0))
    assert one.dropped["repeated"] == 1 and sorted(one.finished) == [0, 1, 2, 3, 4]


def test_no_group_is_issued_to_an_actor_that_is_not_up_or_whose_weights_stand_still_for_an_evaluation():
    one = preprocessor(changed(TINY, **SMALL, actors=3, eval=dict(every=2, prompts=3)))
    one.channels.actors[1] = ActorState.STARTING
    one.issue_eval()  # on actor 0
    one.issue_prompts()
    assert [len(queue) for queue in one.channels.prompts] == [0, 0, 6]
    alone = preprocessor(changed(TINY, **SMALL, eval=dict(every=2, prompts=3)))
    alone.issue_eval()
    alone.issue_prompts()
    assert len(alone.channels.prompts[0]) == 6, "there is no other"
