"""The loss is the paper's, and the gradient does not depend on how the batch was cut."""

import functools
import math
import multiprocessing
import random

import pytest
import torch
import torch.distributed as dist
from conftest import changed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from bench.flops import training_flops
from config import presets
from model_files import model_layout
from packing import Sequence, make_micro_batch
from policy import HeadLogprobs, Policy, load_policy
from preprocess import make_step_batches
from queues import MicroBatch, Prompt, Rollout, RolloutGroup, StepBatch
from train import Trainer, full, learning_rate, policy_loss, step_metrics
from weights import Flat, SharedMemoryWeights, gathered

CPU = torch.device("cpu")
TINY = presets()["tiny"]()


def three_tokens(**changes) -> MicroBatch:
    """One prompt token and three completion tokens, with μ = 0.5, 0.02, 0.6."""
    values = dict(
        input_ids=torch.tensor([1, 2, 3, 4]),
        position_ids=torch.arange(4),
        mask=torch.tensor([False, True, True, True]),
        logprobs=torch.tensor([0.0, math.log(0.5), math.log(0.02), math.log(0.6)]),
        versions=torch.tensor([0, 1, 1, 2]),
        advantages=torch.tensor([0.0, 1.0, 1.0, -0.5]),
        weights=torch.tensor([0.0, 1.0, 1.0, 1.0]),
        ref_logprobs=None,
    )
    return MicroBatch(**(values | changes))


PI = torch.tensor([0.5, 0.2, 0.9]).log()  # ratios 1, 10 and 1.5


def test_loss_of_three_tokens_by_hand():
    loss, ratio = policy_loss(PI, three_tokens(), clamp=5.0)
    # - 1·1·ln 0.5 - 5·1·ln 0.2 - 1.5·(-0.5)·ln 0.9 = 0.693147 + 8.047190 - 0.079020
    assert loss.item() == pytest.approx(8.661317, abs=1e-5)
    assert ratio.tolist() == pytest.approx([1.0, 10.0, 1.5], rel=1e-5), "ratios are returned unclamped"


def test_gradient_is_the_clamped_ratio_times_the_advantage():
    logprobs = PI.clone().requires_grad_()
    policy_loss(logprobs, three_tokens(), clamp=5.0)[0].backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.0, -5.0, 0.75], rel=1e-5)  # no gradient through the ratio


def test_weights_scale_tokens():
    loss, _ = policy_loss(PI, three_tokens(weights=torch.tensor([0.0, 0.0, 0.0, 2.0])), clamp=5.0)
    assert loss.item() == pytest.approx(2 * 0.75 * math.log(0.9), rel=1e-5)


def test_kl_penalty_by_hand_and_zero_for_the_reference_itself():
    same = three_tokens(ref_logprobs=torch.cat([torch.zeros(1), PI]))
    assert policy_loss(PI, same, 5.0, kl_coef=3.0)[0].item() == pytest.approx(8.661317, abs=1e-5)
    other = three_tokens(ref_logprobs=torch.cat([torch.zeros(1), torch.tensor([1.0, 0.2, 0.9]).log()]))
    # first token: ref / π = 2, so 3 · (2 - ln 2 - 1) = 0.920558
    assert policy_loss(PI, other, 5.0, kl_coef=3.0)[0].item() == pytest.approx(8.661317 + 0.920558, abs=1e-5)


def test_what_stands_at_masked_positions_never_matters():
    poison = three_tokens(
        logprobs=torch.cat([torch.tensor([-torch.inf]), three_tokens().logprobs[1:]]),
        advantages=torch.cat([torch.tensor([torch.nan]), three_tokens().advantages[1:]]),
    )
    logprobs = PI.clone().requires_grad_()
    loss, _ = policy_loss(logprobs, poison, 5.0)
    loss.backward()
    assert loss.item() == pytest.approx(8.661317, abs=1e-5) and torch.isfinite(logprobs.grad).all()


def test_ess_is_of_the_unclamped_ratios():
    metrics = step_metrics(0.0, torch.tensor([1.0, 10.0, 1.5]), torch.ones(3), torch.tensor([2, 2, 1]), 5.0, CPU)
    # (1 + 10 + 1.5)² / (3 · (1 + 100 + 2.25)) = 156.25 / 309.75
    assert metrics["ess"] == pytest.approx(156.25 / 309.75)
    assert metrics["clamp_fraction"] == pytest.approx(1 / 3) and metrics["ratio_max"] == 10.0
    assert (metrics["lag_mean"], metrics["lag_max"], metrics["lag_min"]) == (pytest.approx(5 / 3), 2, 1)
    # KL(μ‖π) estimate r - 1 - ln r: (0 + 9 - ln 10 + 0.5 - ln 1.5) / 3
    assert metrics["kl_behaviour"] == pytest.approx((9.5 - math.log(10) - math.log(1.5)) / 3)


# ---------------------------------------------------------------- with a model


def groups(count=4, samples=4, seed=0) -> list[RolloutGroup]:
    """Random token ids of unequal lengths, with log-probs near the tiny model's."""
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)

    def ids(n):
        return torch.randint(0, 14, (n,), generator=torch_rng)

    def rollout():
        n = rng.randint(1, 40)
        logprobs = -3 * torch.rand(n, generator=torch_rng)
        versions = torch.tensor(sorted(rng.randint(0, 3) for _ in range(n)))
        return Rollout(ids(n), logprobs, versions, "stop", float(rng.random() < 0.5))

    def prompt(i):
        return Prompt(i, 0, samples, ids(rng.randint(1, 12)), {})

    return [RolloutGroup(prompt(i), [rollout() for _ in range(samples)]) for i in range(count)]


def trainer(cfg=TINY, rank=0) -> Trainer:
    return Trainer(cfg, model_layout(cfg.model), rank, CPU)


def gradient(trainer: Trainer, batch: StepBatch) -> tuple[dict, dict]:
    trainer.policy.lm.zero_grad()
    metrics = trainer.backward(batch)
    return {name: full(p.grad).clone() for name, p in trainer.policy.lm.named_parameters()}, metrics


def cut(max_tokens: int, ranks: int = 1, cfg=TINY) -> list[StepBatch]:
    cfg = changed(cfg, trainers=ranks, preprocess=dict(max_tokens_per_microbatch=max_tokens))
    return make_step_batches(cfg, 5, groups(), ranks, {})


def assert_close(a: dict, b: dict, tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() <= tolerance * max(1.0, a[name].abs().max()), name


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("normaliser", ["token", "sequence"])
def test_gradient_equals_autograd_of_the_plain_formula(normaliser, temperature):
    """Sequence by sequence, unpacked, whole logits: Σ_t -min(5, π/μ)·A·log π over tokens, or mean over sequences."""
    cfg = changed(TINY, train=dict(normaliser=normaliser), actor=dict(temperature=temperature))
    packed, _ = gradient(trainer(cfg), cut(10_000, cfg=cfg)[0])
    model = AutoModelForCausalLM.from_pretrained(TINY.model).eval()
    terms, tokens = [], 0
    for group in groups():
        rewards = [r.reward for r in group.rollouts]
        for i, rollout in enumerate(group.rollouts):
            advantage = rewards[i] - (sum(rewards) - rewards[i]) / (len(rewards) - 1)
            row = torch.cat([group.prompt.prompt_ids, rollout.completion_ids])
            logits = model(input_ids=row[None]).logits[0].float() / temperature
            n = len(rollout.completion_ids)
            logprobs = logits[-n - 1 : -1].log_softmax(-1)[torch.arange(n), rollout.completion_ids]
            ratio = (logprobs.detach() - rollout.logprobs).exp().clamp(max=5.0)
            token_losses = -ratio * advantage * logprobs
            terms.append(token_losses.sum() if normaliser == "token" else token_losses.mean())
            tokens += n
    (sum(terms) / (tokens if normaliser == "token" else len(terms))).backward()
    assert_close({n: p.grad for n, p in model.named_parameters()}, packed, 1e-5)


def test_gradient_is_the_same_for_one_micro_batch_and_many():
    whole, pieces = cut(10_000)[0], cut(150)[0]
    assert len(whole.micro_batches) == 1 and len(pieces.micro_batches) >= 4
    one = trainer()
    (g1, m1), (g4, m4) = gradient(one, whole), gradient(one, pieces)
    assert_close(g1, g4, 1e-5)
    assert m1 == pytest.approx(m4, rel=1e-5)
    assert (m1["lag_max"], m1["lag_min"]) == (5, 2), "versions 0 to 3, trained at step 5"
    assert max(g.abs().max() for g in g1.values()) > 1e-3, "a gradient of zeros would pass every comparison"


def five_steps(one: Trainer, ranks: int) -> list[dict]:
    """Different batches, several micro-batches each; what a step returns but its speed."""
    found = []
    for step in range(5):
        cfg = changed(TINY, trainers=ranks, preprocess=dict(max_tokens_per_microbatch=150))
        batch = make_step_batches(cfg, step, groups(seed=step), ranks, {})[one.rank]
        metrics = one.step(StepBatch(**(vars(batch) | {"step": step + 3})))  # its versions are 0 to 3
        found.append({k: v for k, v in metrics.items() if k not in ("train_s", "rank_tokens_per_s", "mfu")})
    return found


def test_publish_that_fails_leaves_no_rank_waiting_for_another():
    """To gather the weights is a collective: rank 0 goes through with it though it cannot send them."""

    class Lost:
        def publish(self, version, weights):
            raise ConnectionError("lost")

    one, seen = trainer(TINY), []
    one.weights = lambda dtype: (seen.append(name) or (name, None) for name in one.layout)
    with pytest.raises(ConnectionError):
        one.publish(Lost(), 1)
    assert seen == list(one.layout)


def gather_in_buckets(monkeypatch) -> None:
    """Of one row, an even and an odd number of them: all as they were, in as few collectives as asked."""
    mesh, collectives = init_device_mesh("cpu", (2,)), []
    plain = {f"{rows} rows": torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows)) for rows in (1, 4, 5)}
    shards = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in plain.items()}
    gather = dist.all_gather_into_tensor
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda *a, **k: collectives.append(1) or gather(*a, **k))
    for bucket_bytes, count in ((1, 3), (5 * 3 * 2, 2), (2**20, 1)):
        collectives.clear()
        whole = dict(gathered(shards.items(), torch.bfloat16, bucket_bytes))
        assert list(whole) == list(plain) and len(collectives) == count
        assert all(torch.equal(whole[name], tensor.bfloat16()) for name, tensor in plain.items())


def _rank(rank: int, folder, results) -> None:
    import train

    torch.set_num_threads(1)
    cfg = changed(TINY, trainers=2, runs_dir=folder, name="two", train=dict(activation_checkpointing=True))
    train.init_process_group(cfg, rank, CPU)
    with pytest.MonkeyPatch.context() as monkeypatch:
        gather_in_buckets(monkeypatch)
    one = trainer(cfg, rank)
    grads, metrics = gradient(one, cut(150, ranks=2)[rank])
    one.policy.zero_grad()
    stepped = five_steps(one, 2)
    weights = {name: tensor.clone() for name, tensor in one.weights()}
    channel = SharedMemoryWeights(model_layout(TINY.model), "bfloat16")
    one.cfg = changed(cfg, actor=dict(dtype="bfloat16"))
    one.publish(channel, 5)
    staging = Flat(channel.layout, functools.partial(torch.empty, dtype=torch.bfloat16))
    channel.pull(staging)
    published = staging.tensors
    one.save(folder / "model")
    if rank == 0:
        torch.save((grads, metrics, stepped, weights, published), results)


def test_two_ranks_give_the_gradient_steps_weights_and_model_of_one(tmp_path):
    (tmp_path / "two").mkdir()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_rank, args=(rank, tmp_path, tmp_path / "results")) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    grads2, metrics2, stepped2, weights2, published2 = torch.load(tmp_path / "results")
    parts = cut(150, ranks=2)
    assert len(parts[0].micro_batches) == len(parts[1].micro_batches) > 1
    one = trainer(changed(TINY, train=dict(activation_checkpointing=False)))
    grads1, metrics1 = gradient(one, cut(10_000)[0])
    assert_close(grads1, grads2, 1e-5)
    assert metrics1 == pytest.approx(metrics2, rel=1e-5)
    one.policy.zero_grad()
    before = {name: tensor.clone() for name, tensor in one.weights()}
    for a, b in zip(five_steps(one, 1), stepped2, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    for name, tensor in one.weights():
        assert torch.allclose(tensor, weights2[name], atol=1e-5), name
        assert torch.equal(published2[name], weights2[name].bfloat16()), "what is published is cast, and nothing else"
    assert max((tensor - before[name]).abs().max() for name, tensor in one.weights()) > 1e-4, "five steps moved nothing"
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, weights2[name]), name


def test_activation_checkpointing_and_compilation_change_no_gradient():
    """The two together, as a large model has them: nothing is compiled if they are put on in the wrong order."""
    options = dict(activation_checkpointing=True, compile=True)
    plain, other = trainer(), trainer(changed(TINY, train=options))
    torch._dynamo.utils.counters.clear()
    assert_close(gradient(plain, cut(150)[0])[0], gradient(other, cut(150)[0])[0], 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert [name for name, _ in plain.weights()] == [name for name, _ in other.weights()]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_head_in_chunks_equals_the_plain_one(monkeypatch, temperature):
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 16, dtype=torch.float32), 0.5 * torch.randn(300, 16)
    targets, grad, results = torch.randint(0, 300, (50,)), torch.randn(50), []

    def plain(h, w, y, t):
        log_softmax = (h @ w.T / t).log_softmax(-1)
        return log_softmax.gather(1, y[:, None]).squeeze(1), -(log_softmax.exp() * log_softmax).sum(-1)

    monkeypatch.setattr(HeadLogprobs, "LOGITS", {"cpu": 300 * 7})  # 7 tokens at a time, the last time 1
    for version in (plain, HeadLogprobs.apply):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = version(h, w, targets, temperature)
        logprobs.backward(grad)
        results.append((logprobs.detach(), entropy.detach(), h.grad, w.grad))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-5), (a - b).abs().max()


def test_model_that_scales_its_logits_is_refused(tmp_path):
    from transformers import GraniteConfig

    small = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)
    for scaling in (1.0, 8.0):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(GraniteConfig(**small, num_key_value_heads=1, logits_scaling=scaling))
        torch.nn.init.normal_(model.lm_head.weight)
        model.save_pretrained(tmp_path / str(scaling))
    load_policy(tmp_path / "1.0", torch.float32, CPU)
    with pytest.raises(ValueError, match="does more to its logits"):
        load_policy(tmp_path / "8.0", torch.float32, CPU)


def test_step_with_a_gradient_that_is_not_finite_is_skipped_and_counted():
    one = trainer(changed(TINY, train=dict(lr=1e-3, warmup_steps=0)))
    before = {name: tensor.clone() for name, tensor in one.weights()}
    bad = cut(10_000)[0]
    bad.micro_batches[0].advantages[bad.micro_batches[0].mask.nonzero()[0]] = float("inf")
    metrics = one.step(bad)
    assert metrics["skipped_steps"] == 1 and metrics["grad_norm"] is None and metrics["loss"] is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.weights())
    assert one.step(cut(10_000)[0])["skipped_steps"] == 1
    moved = {name: tensor for name, tensor in one.weights()}
    assert any(not torch.equal(moved[name], before[name]) for name in before)
    assert all(torch.isfinite(tensor).all() for tensor in moved.values())


def test_weight_decay_spares_norms_and_biases():
    one = trainer(changed(TINY, train=dict(lr=0.1, warmup_steps=0, lr_schedule="constant", weight_decay=0.5)))
    before = {name: tensor.clone() for name, tensor in one.weights()}
    for parameter in one.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in one.optimizer.param_groups:
        group["lr"] = 0.1
    one.optimizer.step()
    for name, tensor in one.weights():
        expected = before[name] * (1 - 0.1 * 0.5 if before[name].ndim > 1 else 1)
        assert torch.allclose(tensor, expected), name


def test_training_flops_by_hand_and_against_a_count():
    """tiny: 3 layers, D = 128, 4 heads of 32, 2 key-value heads, inner width 256, V = 16."""
    lm = load_policy(TINY.model, torch.float32, CPU).lm
    rollout = Rollout(torch.arange(1, 31) % 15, torch.zeros(30) - 1, torch.zeros(30, dtype=torch.int64), "stop", 1.0)
    micro_batch = make_micro_batch([Sequence(torch.arange(1, 11), rollout, 1.0, 1.0)] * 2)
    block = 128 * 128 + 2 * 128 * 64 + 128 * 128 + 3 * 128 * 256
    expected = 6 * (3 * block * 80 + 16 * 128 * 60 + 3 * 4 * 32 * 2 * 40**2)
    assert lm.get_output_embeddings().weight.shape == (16, 128)
    assert training_flops(lm, [micro_batch]) == expected
    one = trainer()
    with FlopCounterMode(display=False) as counter:
        one.backward(StepBatch(0, [micro_batch], 60, {}))
    # The counter does not know the CPU's attention kernel, nor `addmm_`, which is as much as the head's recomputation.
    assert counter.get_total_flops() == 6 * (3 * block * 80 + 16 * 128 * 60)


def test_packed_log_probs_equal_those_of_each_sequence_alone():
    """For both attention paths: our own, and transformers' mask for models that need another kind of attention."""
    sequences = [Sequence(g.prompt.prompt_ids, r, 1.0, 1.0) for g in groups() for r in g.rollouts]
    for n in (1, 90, 2, 14, 40):  # of other magnitudes, out of order
        rollout = Rollout(torch.arange(n) % 10, torch.zeros(n), torch.zeros(n).long(), "stop", 1.0)
        sequences.append(Sequence(torch.tensor([7, 10, 5]), rollout, 1.0, 1.0))
    packed = make_micro_batch(sequences)
    dense = Policy(AutoModelForCausalLM.from_pretrained(TINY.model).eval())
    for model in (load_policy(TINY.model, torch.float32, CPU), dense):
        with torch.no_grad():
            together, entropy = model(packed, 0.7)
            alone = [model(make_micro_batch([s]), 0.7) for s in sequences]
        assert torch.allclose(together, torch.cat([logprobs for logprobs, _ in alone]), atol=1e-5)
        assert torch.allclose(entropy, torch.cat([e for _, e in alone]), atol=1e-5)


def test_first_completion_token_is_trained():
    """The label shift must not eat it: its log-prob comes from the logits at the last prompt token."""
    model = AutoModelForCausalLM.from_pretrained(TINY.model).eval()
    rollout = Rollout(torch.tensor([3]), torch.tensor([-1.0]), torch.tensor([0]), "stop", 1.0)
    micro_batch = make_micro_batch([Sequence(torch.tensor([7, 10, 5]), rollout, 1.0, 1.0)])
    with torch.no_grad():
        logprobs, _ = Policy(model)(micro_batch, 1.0)
        expected = model(input_ids=torch.tensor([[7, 10, 5]])).logits[0, -1].log_softmax(-1)[3]
    assert logprobs.tolist() == pytest.approx([expected.item()], abs=1e-5)


def test_identical_policies_give_ratio_one_and_ess_one():
    model = load_policy(TINY.model, torch.float32, CPU)
    for micro_batch in cut(150)[0].micro_batches:
        with torch.no_grad():
            logprobs, entropy = model(micro_batch, 1.0)
        own = torch.zeros(len(micro_batch.mask))
        own[micro_batch.mask] = logprobs
        _, ratio = policy_loss(logprobs, MicroBatch(**(vars(micro_batch) | {"logprobs": own})), 5.0)
        metrics = step_metrics(0.0, ratio, entropy, torch.zeros_like(ratio), 5.0, CPU)
        assert metrics["ess"] == pytest.approx(1.0, abs=1e-9)
        assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-6)


def test_micro_batch_in_which_no_token_counts_adds_exactly_nothing():
    """Ranks with nothing to do join in the collectives with such a one."""
    one = trainer()
    batch = cut(10_000)[0]
    expected, _ = gradient(one, batch)
    empty = make_micro_batch([])
    padded, _ = gradient(one, StepBatch(**(vars(batch) | {"micro_batches": [empty, *batch.micro_batches, empty]})))
    assert_close(expected, padded, 0.0)
    one.policy.lm.zero_grad()
    metrics = one.backward(StepBatch(0, [empty], 0, {}))
    assert metrics["loss"] == metrics["tokens"] == metrics["ess"] == metrics["lag_max"] == 0
    assert all(p.grad is None or not p.grad.any() for p in one.policy.lm.parameters())


def test_weights_travel_under_the_names_of_the_checkpoint():
    one = trainer()
    names = [name for name, _ in one.weights()]
    assert set(names) == set(model_layout(TINY.model)) and "lm_head.weight" not in names
    with pytest.raises(ValueError, match="model and checkpoint disagree"):
        Trainer(TINY, {name: shape for name, shape in model_layout(TINY.model).items() if "norm" not in name}, 0, CPU)


def test_learning_rate_warms_up_linearly():
    one = trainer(changed(TINY, train=dict(lr=1.0e-3, warmup_steps=4, lr_schedule="constant")))
    batch = cut(10_000)[0]
    lrs = [one.step(StepBatch(**(vars(batch) | {"step": step})))["lr"] for step in range(6)]
    assert lrs == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_learning_rate_falls_to_nothing_after_the_last_step():
    cfg = changed(TINY, steps=10, train=dict(lr=1.0, warmup_steps=2, lr_schedule="linear"))
    assert [learning_rate(cfg, step) for step in (0, 1, 2, 9)] == pytest.approx([0.5, 0.9, 0.8, 0.1])
    cfg = changed(cfg, train=dict(lr_schedule="cosine"))
    # (1 + cos(π · step / 10)) / 2, once the warm-up is over
    assert [learning_rate(cfg, step) for step in (0, 5, 9, 10)] == pytest.approx([0.5, 0.5, 0.0244717, 0.0], abs=1e-6)


def test_step_moves_the_policy_towards_what_was_rewarded():
    one = trainer(changed(TINY, train=dict(warmup_steps=0, lr=1e-4)))
    rollouts = [
        Rollout(torch.tensor([3, 14]), torch.tensor([-3.0, -3.0]), torch.tensor([0, 0]), "stop", 1.0),
        Rollout(torch.tensor([4, 14]), torch.tensor([-3.0, -3.0]), torch.tensor([0, 0]), "stop", 0.0),
    ]
    group = RolloutGroup(Prompt(0, 0, 2, torch.tensor([7, 10, 5, 12]), {}), rollouts)
    batch = make_step_batches(TINY, 0, [group], 1, {})[0]

    def logprobs():
        with torch.no_grad():
            return one.policy(batch.micro_batches[0], 1.0)[0]

    before = logprobs()
    one.step(batch)
    change = logprobs() - before
    assert change[0] > 0 > change[2], "first tokens 3 (rewarded) and 4 (not)"
