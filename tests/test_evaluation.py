"""Evaluations: when they are due, that they are of one version, and what their numbers mean."""

import dataclasses
import json
import random
import statistics

import pytest
from conftest import changed
from test_preprocess import SMALL, TINY, preprocessor, scored
from test_resume import record

from config import ConfigError, EvalConfig
from evaluation import confidence_interval


def results(one) -> list[dict]:
    reports = []
    while (report := one.channels.reports.get(timeout_s=0)) is not None:
        reports.append(report)
    return [report.values for report in reports if report.kind == "eval"]


@pytest.mark.parametrize(
    "seen, evaluated",
    [
        ((0, 1, 2, 3, 4, 5), [0, 2, 4, 5]),
        ((0, 1, 2, 3, 5), [0, 2, 5]),  # version 4 was never seen: evaluated late, under its true version
    ],
)
def test_evaluations_are_due_at_the_start_every_n_steps_and_at_the_end(seen, evaluated):
    cfg = changed(TINY, **(SMALL | {"steps": 5}), eval=dict(every=2, prompts=3, greedy=True))
    one = preprocessor(cfg)
    for version in seen:
        one.channels.weights.version = version
        one.issue_eval()
        one.issue_eval()  # one at a time
        while (prompt := one.channels.eval_prompts.get(timeout_s=0)) is not None:
            assert prompt.version == version and prompt.samples == 1 and prompt.eval_samples == 6
            one.take_eval(scored(prompt, [1.0], version))
    assert [(result["eval_version"], result["eval_accuracy"]) for result in results(one)] == [
        (v, 1.0) for v in evaluated
    ]
    assert one.evaluation.next_version > 5


def test_evaluation_on_weights_that_changed_in_between_is_refused():
    one = preprocessor(changed(TINY, **SMALL, eval=dict(every=2, prompts=2, greedy=False)))
    one.issue_eval()
    one.take_eval(scored(one.channels.eval_prompts.get(), [1.0], 0))
    with pytest.raises(AssertionError, match=r"weights changed during an evaluation: versions \[0, 1\]"):
        one.take_eval(scored(one.channels.eval_prompts.get(), [1.0], 1))


def test_greedy_samples_and_k_samples_at_a_temperature_are_apart_and_failed_ones_count_in_neither():
    one = preprocessor(changed(TINY, **SMALL, eval=dict(every=2, prompts=3, greedy=True, samples=4, temperature=0.5)))
    one.issue_eval()
    prompts = [one.channels.eval_prompts.get() for _ in range(len(one.channels.eval_prompts))]
    assert [(p.samples, p.temperature) for p in prompts] == [(1, 0.0)] * 3 + [(4, 0.5)] * 3
    assert all(p.eval_samples == 15 and p.is_eval for p in prompts) and len({p.group_id for p in prompts}) == 6
    rewards = [[1.0], [0.0], [1.0], [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    for prompt, values in zip(prompts, rewards, strict=True):
        group = scored(prompt, values, 0)
        if values == [1.0, 0.0, 0.0, 0.0]:  # two of its four could not be verified: 1/2, not 1/4
            failed = [dataclasses.replace(r, reward=None, failure="timeout") for r in group.rollouts[2:]]
            group = dataclasses.replace(group, rollouts=group.rollouts[:2] + failed)
        one.take_eval(group)
    (result,) = results(one)
    assert result["eval_greedy"] == pytest.approx(2 / 3) and result["eval_failed"] == 2
    assert result["eval_accuracy"] == pytest.approx((1 / 2 + 1 / 2 + 1) / 3)
    for key in ("eval_greedy", "eval_accuracy"):
        assert 0 <= result[f"{key}_low"] < result[key] < result[f"{key}_high"] <= 1


def test_each_held_out_prompt_is_taken_once_even_if_there_are_fewer_than_asked_for(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(5)))
    cfg = changed(TINY, eval=EvalConfig(data=(str(path),), prompts=100))
    one = preprocessor(cfg)
    assert sorted(row["prompt"] for _, _, row in one.evaluation.prompts) == [f"{i}+1=" for i in range(5)]
    other = preprocessor(changed(cfg, seed=5))
    assert [p[2] for p in one.evaluation.prompts] == [p[2] for p in other.evaluation.prompts], "whatever the seed"


def test_evaluation_without_a_prompt_is_refused_not_waited_for(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+" * 100, "answer": ""}) + "\n")
    with pytest.raises(ConfigError, match=r"no prompt of .*rows.jsonl can be used; skipped: {'prompt_too_long': 1}"):
        preprocessor(changed(TINY, eval=EvalConfig(data=(str(path),))))


# ---------------------------------------------------------------- intervals


def test_interval_of_binary_values_is_wilson_s():
    # p = 0.8, n = 10 (9.0 after the sample variance): (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    low, high = confidence_interval([1.0] * 8 + [0.0] * 2)
    n, z, p = 9.0, 1.96, 0.8
    half = z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    assert low == pytest.approx((p + z * z / (2 * n) - half) / (1 + z * z / n))
    assert high == pytest.approx((p + z * z / (2 * n) + half) / (1 + z * z / n))


def test_interval_is_not_empty_where_all_values_are_the_same():
    assert confidence_interval([1.0] * 20) == pytest.approx((20 / (20 + 1.96**2), 1.0))
    low, high = confidence_interval([0.0])
    assert low == pytest.approx(0.0) and high == pytest.approx(1.96**2 / (1 + 1.96**2))


@pytest.mark.parametrize("k", [1, 4])
def test_interval_holds_the_truth_95_times_of_100(k):
    """Prompts of their own difficulty, k samples each; and with more samples it is narrower."""
    rng, hits, widths = random.Random(k), 0, []
    for _ in range(2000):
        difficulty = [rng.betavariate(2, 1) for _ in range(60)]  # mean 2/3
        low, high = confidence_interval([sum(rng.random() < d for _ in range(k)) / k for d in difficulty])
        hits += low <= 2 / 3 <= high
        widths.append(high - low)
    assert 0.93 <= hits / 2000 <= 0.97
    assert statistics.fmean(widths) == pytest.approx(0.234 if k == 1 else 0.157, abs=0.01)


def test_interval_of_rewards_beyond_0_and_1_is_the_normal_one():
    assert confidence_interval([-1.0, 3.0]) == (1 - 1.96 * 2, 1 + 1.96 * 2)  # variance 8, of the mean 4


# ---------------------------------------------------------------- the best weights are kept


def test_best_weights_are_kept_whichever_of_result_and_weights_comes_first(tmp_path):
    cfg = changed(TINY, runs_dir=tmp_path, name="run")
    book = record(cfg)

    def weights(version: int) -> None:
        folder = cfg.evaluated_dir(version)
        folder.mkdir()
        (folder / "model.safetensors").write_text(str(version))
        book.take("evaluated", {"version": version})

    def result(version: int, accuracy: float, eval_failed: int = 0) -> None:
        interval = {f"{key}_{end}": accuracy for key in ("eval_accuracy", "eval_greedy") for end in ("low", "high")}
        counts = {"eval_failed": eval_failed, "eval_samples": 512}
        values = {"eval_version": version, "eval_accuracy": accuracy, "eval_greedy": 0.5}
        book.take("eval", values | interval | counts)

    kept = []
    for i, (version, accuracy) in enumerate([(0, 0.3), (50, 0.7), (100, 0.6), (150, 0.7), (200, 0.9)]):
        steps = [lambda v=version: weights(v), lambda v=version, a=accuracy: result(v, a)]
        for step in steps if i % 2 else reversed(steps):
            step()
        kept.append(int((cfg.run_dir / "best" / "model.safetensors").read_text()))
    assert kept == [0, 50, 50, 50, 200]
    best = cfg.run_dir / "best"
    assert json.loads((best / "eval.json").read_text())["eval_accuracy"] == 0.9
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {path.name for path in best.iterdir()}
    weights(250), result(250, 1.0, eval_failed=30)
    assert json.loads((best / "eval.json").read_text())["eval_version"] == 200, "30 of 512 could not be verified"
    assert not list(cfg.run_dir.glob("evaluated-*")) and not book.troubles
    best.rename(cfg.run_dir / "best.old")  # as a kill between two renames leaves it
    assert record(cfg).best["eval_version"] == 200 and best.is_dir(), "a resume knows it"


def test_what_an_evaluation_that_was_cut_short_has_written_goes(tmp_path):
    cfg = changed(TINY, runs_dir=tmp_path, name="run")
    book = record(cfg)
    cfg.evaluated_dir(3).mkdir()
    book.take("evaluated", {"version": 3})
    book.close()
    assert not list(cfg.run_dir.glob("evaluated-*")) and not (cfg.run_dir / "best").exists()


def test_evaluation_whose_actor_died_is_made_again_whole_and_takes_nothing_of_the_one_before():
    one = preprocessor(changed(TINY, **SMALL, eval=dict(every=2, prompts=3, greedy=False)))
    one.issue_eval()
    first = [one.channels.eval_prompts.get() for _ in range(2)]
    one.take_eval(scored(first[0], [0.0], 0))
    one.take_back(0)
    assert not len(one.channels.eval_prompts), "the third is not left for the actor that comes"
    one.channels.weights.version = 1
    one.issue_eval()
    again = [one.channels.eval_prompts.get() for _ in range(len(one.channels.eval_prompts))]
    assert len(again) == 3 and not {prompt.group_id for prompt in again} & {prompt.group_id for prompt in first}
    one.take_eval(scored(first[1], [0.0], 0))  # it was on its way
    for prompt in again:
        one.take_eval(scored(prompt, [1.0], 1))
    one.channels.weights.version = 0
    reports = []
    while (report := one.channels.reports.get(timeout_s=0)) is not None:
        reports.append(report)
    (result,) = [report.values for report in reports if report.kind == "eval"]
    assert result["eval_version"] == 1 and result["eval_accuracy"] == 1.0
    assert sum(report.kind == "eval_rollout" for report in reports) == 3, "of the whole one alone"
