"""Whole runs of `launch.py` with real vLLM: they learn, they leave what they should, and they end as they should."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

START_S = 240  # for the first optimizer step, vLLM's cold start on a busy machine included


class Run:
    """`python launch.py tiny …` as a user starts it, in a session of its own."""

    def __init__(self, runs_dir: Path, *argv: str, name: str = "run", preset: tuple[str, ...] = ("tiny",),
                 command: tuple[str, ...] = (sys.executable, "launch.py")):  # fmt: skip
        self.folder = runs_dir / name
        self.shared_memory_before = set(os.listdir("/dev/shm"))
        command = [*command, *preset, "--runs-dir", str(runs_dir), "--name", name, *argv]
        self.output = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=self.output, stderr=self.output, start_new_session=True
        )
        self.launcher = psutil.Process(self.process.pid)

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def lines(self, file: str) -> list[dict]:
        path = self.folder / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + START_S
        while len(self.lines("metrics.jsonl")) < step:
            assert self.process.poll() is None, f"ended early:\n{self.text()}"
            assert time.monotonic() < deadline, f"no step {step} within {START_S} s:\n{self.text()}"
            time.sleep(0.1)

    def family(self) -> list[psutil.Process]:
        return self.launcher.children(recursive=True)

    def role(self, name: str) -> psutil.Process:
        return next(process for process in self.family() if process.name() == name)

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"still running after {timeout_s} s:\n{self.text()}") from None

    def assert_nothing_left(self, family: list[psutil.Process], within_s: float = 10.0) -> None:
        _, alive = psutil.wait_procs(family, timeout=within_s)
        assert not alive, alive
        deadline = time.monotonic() + 5  # the interpreter's resource tracker cleans up after a killed launcher
        while (left := set(os.listdir("/dev/shm")) - self.shared_memory_before) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, left


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Run:
    """A short run of the preset, to its end."""
    run = Run(
        tmp_path_factory.mktemp("runs"),
        "--steps",
        "80",
        "--eval.every",
        "40",
        "--show-every",
        "20",
        "--train.lr-schedule",
        "constant",
        "--train.lr",
        "1e-4",
    )
    assert run.wait(START_S + 240) == 0, run.text()
    return run


def test_held_out_success_rises_by_fifteen_points_in_eighty_steps(finished):
    """From about 40%; what chance alone moves 256 samples by is 3 points."""
    evals = [(line["eval_version"], line["eval_accuracy"]) for line in finished.lines("evals.jsonl")]
    assert [version for version, _ in evals][0] == 0 and evals[-1][0] == 80 and len(evals) == 3
    assert evals[-1][1] >= evals[0][1] + 0.15, evals


def test_metrics_have_a_line_for_every_step_with_every_key(finished):
    lines = finished.lines("metrics.jsonl")
    assert [line["step"] for line in lines] == [line["version"] for line in lines] == list(range(1, 81))
    keys = "step version time_s samples tokens reward reward_std loss grad_norm lr ess ratio_max clamp_fraction "
    keys += "kl_behaviour entropy lag_mean lag_max lag_min completion_tokens_mean truncated_fraction queue_rollouts "
    keys += "dropped_zero_variance dropped_prompt_too_long queue_batches wait_s generated_tokens_per_s "
    keys += "trained_tokens_per_s update_stall_s in_flight actor_idle_s actor_running_s train_s publish_s "
    keys += "no_variance_groups group_ids completion_tokens failed_samples length_penalty dropped_verifier_failed "
    keys += "dropped_malformed dropped_held_out verifier_calls verifier_calls_failed verifier_mean_s verifier_max_s "
    keys += "verifier_busy"
    keys = keys.split()
    for line in lines:
        assert set(keys) <= set(line), set(keys) - set(line)
        assert all(line[key] is not None and line[key] == line[key] for key in keys), line
    assert all(a["time_s"] <= b["time_s"] for a, b in zip(lines, lines[1:], strict=False))
    assert sum(line["verifier_calls"] for line in lines) >= 70 * 128
    assert not any(line["failed_samples"] for line in lines)


def test_tensorboard_has_every_metric_at_every_step_and_evaluations_at_their_version(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished.folder / "tensorboard"))
    events.Reload()
    lines, evals = finished.lines("metrics.jsonl"), finished.lines("evals.jsonl")
    for key in ("reward", "loss", "ess", "lag_max", "verifier_calls"):
        assert [(e.step, pytest.approx(e.value)) for e in events.Scalars(key)] == [(n["step"], n[key]) for n in lines]
    found = [(event.step, pytest.approx(event.value)) for event in events.Scalars("eval_accuracy")]
    assert found == [(line["eval_version"], line["eval_accuracy"]) for line in evals]


def test_best_of_the_evaluated_weights_are_kept_and_evaluate_as_they_did(finished, tmp_path):
    """They are those of the version that the evaluation reported, though newer ones came out while it ran."""
    evals = finished.lines("evals.jsonl")
    best = max(evals, key=lambda line: line["eval_accuracy"])
    kept = json.loads((finished.folder / "best" / "eval.json").read_text())
    assert kept == best and not list(finished.folder.glob("*.unfinished"))
    version = {0: ROOT / "examples" / "tiny" / "model", 80: finished.folder / "model"}.get(best["eval_version"])
    if version is not None:  # not the one in between, whose weights nobody else keeps
        weights, expected = (load_file(f / "model.safetensors") for f in (finished.folder / "best", version))
        assert weights.keys() == expected.keys() and all(torch.equal(weights[n], expected[n]) for n in expected)
    task = ROOT / "examples" / "tiny" / "task.py"
    again = Run(
        tmp_path, "--model", str(finished.folder / "best"), "--data", f"{task}:held_out_rows",
        "--reward.function", f"python:{task}:reward", "--actor.max-prompt-tokens", "32",
        "--actor.max-completion-tokens", "64", "--actor.kv-cache-gib", "1", "--actor.enforce-eager", preset=("eval",),
    )  # fmt: skip
    assert again.wait(START_S) == 0, again.text()
    (line,) = again.lines("evals.jsonl")
    assert line["eval_version"] == 0 and line["eval_prompts"] == 256
    assert abs(line["eval_accuracy"] - best["eval_accuracy"]) < 0.12, "256 samples: 3 standard errors of a difference"
    samples = again.lines("eval_rollouts.jsonl")
    assert len(samples) == 256 and sum(n["reward"] for n in samples) / 256 == pytest.approx(line["eval_greedy"])
    assert "held-out success" in again.text() and not (again.folder / "model").exists()


def test_lag_is_never_negative_nor_over_the_bound_and_weights_do_change_in_flight(finished):
    lines = finished.lines("metrics.jsonl")
    assert min(line["lag_min"] for line in lines) >= 0
    assert 1 <= max(line["lag_max"] for line in lines) <= 4
    assert all(0 < line["ess"] <= 1 + 1e-9 for line in lines)
    rollouts = finished.lines("rollouts.jsonl")
    assert len(rollouts) == 80
    assert any(len(set(rollout["versions"])) > 1 for rollout in rollouts), "no sequence saw an update in its middle"


def test_screen_shows_steps_a_rollout_with_versions_and_a_summary(finished):
    text = finished.text()
    assert "held-out" in text and "trained at step 21" in text and "v0[" in text
    assert "complete after 80 of 80 optimizer steps" in text
    for words in ("held-out success", "samples/s", "lag", "ESS", "update stall", "idle"):
        assert words in text
    assert (finished.folder / "reward.png").stat().st_size > 10_000
    assert json.loads((finished.folder / "config.json").read_text())["steps"] == 80


def test_final_model_answers_the_same_greedily_in_transformers_and_vllm(finished):
    script = ROOT / "tests" / "greedy.py"
    done = subprocess.run(
        [sys.executable, str(script), str(finished.folder / "model")], capture_output=True, text=True, timeout=300
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line, (done.stdout + done.stderr)[-3000:]
    found = json.loads(line.removeprefix("RESULT "))
    assert found["vllm"] == found["transformers"] and len(found["vllm"]) == 64
    assert len(set(map(tuple, found["vllm"]))) > 40


def test_readme_s_own_task_of_under_twenty_lines_runs_as_it_stands_there(tmp_path):
    blocks = (ROOT / "README.md").read_text().split("```python\n")
    code = blocks[1].split("```")[0]
    assert len(blocks) == 2 and len([line for line in code.splitlines() if line.strip()]) < 20
    (tmp_path / "mine.py").write_text(code)
    command = code.splitlines()[0].removeprefix("# python launch.py tiny ").replace("mine.py", f"{tmp_path}/mine.py")
    run = Run(tmp_path, *command.split(), "--steps", "3", "--batch-size", "64")
    assert run.wait(START_S) == 0, run.text()
    lines = run.lines("metrics.jsonl")
    assert len(lines) == 3 and all(line["verifier/length"] >= 1 for line in lines)
    assert "the first prompt as the engine sees it: '" in run.text()


def test_run_folder_is_not_overwritten_unasked(finished):
    again = Run(finished.folder.parent, "--steps", "60")
    assert again.wait(30) == 2 and "already holds a run: give --overwrite" in again.text()


def test_two_runs_side_by_side_every_option_of_the_schedule_and_several_processes_a_role(tmp_path):
    """Both on the same cores. One: two actors, drain, KV recomputed, a KL penalty. Other: conventional, G = 2, with two
    actors and two trainers."""
    short = (
        "--steps",
        "4",
        "--batch-size",
        "32",
        "--actor.sequences",
        "32",
        "--eval.every",
        "2",
        "--eval.prompts",
        "16",
    )
    drain = ("--actors", "2", "--actor.update", "drain", "--actor.kv", "recompute", "--train.kl-coef", "0.01")
    turns = ("--schedule", "conventional", "--G", "2", "--actors", "2", "--trainers", "2")
    turns += ("--reward.workers", "2", "--train.normaliser", "sequence")
    one, two = Run(tmp_path, *short, *drain, name="one"), Run(tmp_path, *short, *turns, name="two")
    assert (one.wait(2 * START_S), two.wait(2 * START_S)) == (0, 0), one.text() + two.text()
    for run in (one, two):
        assert len(run.lines("metrics.jsonl")) == 4
        assert run.lines("evals.jsonl")[-1]["eval_version"] == 4
        assert (run.folder / "model" / "model.safetensors").exists()
    assert all(len(set(rollout["versions"])) == 1 for rollout in one.lines("rollouts.jsonl")), (
        "drain: one policy a sequence"
    )
    lines = two.lines("metrics.jsonl")
    assert [(line["lag_min"], line["lag_max"]) for line in lines] == [(0, 0), (1, 1)] * 2, "the weights of a phase"
    for line in lines[::2]:  # exactly on-policy: what vLLM recorded is what the trainer computes
        assert line["ess"] > 0.99999 and line["ratio_max"] < 1.001
    assert sorted(group for line in lines for group in line["group_ids"]) == list(range(16))
    assert {version for rollout in two.lines("rollouts.jsonl") for version in rollout["versions"]} <= {0, 2}


LONG = ("--steps", "100000", "--show-every", "0")


def assert_ends_in_ten_seconds_naming(run: Run, name: str, family: list[psutil.Process]) -> None:
    start = time.monotonic()
    assert run.wait(20) == 1
    assert time.monotonic() - start <= 10
    assert f"failed ({name})" in run.text()
    if name != "train-0":
        assert (run.folder / "model" / "model.safetensors").exists(), "what can be saved is saved"
    run.assert_nothing_left(family)


@pytest.mark.parametrize("name", ["reward", "train-0"])
def test_killing_a_role_ends_the_run_in_ten_seconds_naming_it(tmp_path, name):
    run = Run(tmp_path, *LONG)
    run.wait_for_step(2)
    family = run.family()
    run.role(name).send_signal(signal.SIGKILL)
    assert_ends_in_ten_seconds_naming(run, name, family)
    assert f"{name} was killed by SIGKILL; the last lines of " in run.text()


def test_actor_that_dies_is_started_again_and_no_group_is_lost_but_not_for_ever(tmp_path):
    """Killed in the middle of an evaluation and of training groups; then, no restart being left, it stops answering."""
    argv = ("--max-actor-restarts", "1", "--timeout", "10", "--eval.every", "3", "--eval.prompts", "64")
    run = Run(tmp_path, *LONG, *argv)
    run.wait_for_step(4)
    run.role("actor-0").send_signal(signal.SIGKILL)
    killed_after = len(run.lines("metrics.jsonl"))
    run.wait_for_step(killed_after + 8)
    lines = run.lines("metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert [group for line in lines for group in line["group_ids"]] == list(range(16 * len(lines))), (
        "in order, each once"
    )
    assert lines[-1]["actor_restarts"] == 1 and all(0 <= n["lag_min"] and n["lag_max"] <= 4 for n in lines)
    assert all(line["ess"] > 0.9 for line in lines), "it went on with the current weights"
    versions = [line["eval_version"] for line in run.lines("evals.jsonl")]
    assert versions == sorted(set(versions)) and versions[-1] > killed_after - 4, versions
    text = run.text()
    assert "actor-0 was killed by SIGKILL; the last lines of " in text and "actor-0 | " in text, "its last lines"
    assert "actor-0 is started again (1 of at most 1)" in text
    family = run.family()
    run.role("actor-0").send_signal(signal.SIGSTOP)
    assert_ends_in_ten_seconds_naming(run, "actor-0", family)
    assert "actor-0 has stopped answering" in run.text()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Run:
    """By Ctrl-C, after 15 steps in which groups could always start, however slow the trainer."""
    free = ("--max-lag", "None", "--preprocess.ready-batches", "100", "--eval.every", "0")
    run = Run(tmp_path_factory.mktemp("interrupted"), *LONG, *free, "--checkpoint-every", "1000")
    run.wait_for_step(15)
    run.had = run.family()
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    run.interrupted = time.monotonic()
    return run


def test_ctrl_c_saves_the_model_and_a_checkpoint_of_where_it_was_and_leaves_nothing(interrupted):
    run = interrupted
    assert run.wait(20) == 130
    assert time.monotonic() - run.interrupted <= 10
    assert "interrupted after" in run.text() and (run.folder / "model" / "model.safetensors").exists()
    done = len(run.lines("metrics.jsonl"))
    assert [folder.name for folder in (run.folder / "checkpoints").iterdir()] == [f"step-{done}"]
    run.assert_nothing_left(run.had)


def test_the_decode_batch_stays_at_its_size_while_the_weights_change(interrupted):
    """H = 128 sequences in flight all the time, no drain at updates."""
    steps = interrupted.lines("metrics.jsonl")
    first, last = steps[0]["time_s"], steps[-1]["time_s"]
    reports = [line for line in interrupted.lines("actors.jsonl") if first < line["time_s"] < last]
    in_flight = [line["in_flight"] for line in reports]  # mean of half a second
    assert len(in_flight) >= 10 and sum("update_stall_s" in line for line in reports) >= 5, "updates in flight"
    assert sum(n >= 0.8 * 128 for n in in_flight) >= 0.9 * len(in_flight), in_flight


def test_verifier_that_raises_is_shown_with_its_name_and_the_row(tmp_path):
    """A verifier that raises at the first completion: the run ends, and says where."""
    verifier = tmp_path / "verifier.py"
    verifier.write_text("def judge(text, row):\n    raise KeyError('no opinion on ' + row['prompt'])\n")
    run = Run(tmp_path, "--reward.function", f"python:{verifier}:judge")
    assert run.wait(START_S) == 1
    text = run.text()
    assert "reward ended with exit code 1" in text and "KeyError: 'no opinion on " in text
    assert f"verifier python:{verifier}:judge: error" in text and "| row: {'answer': '" in text
