"""The comparison of the schedules and the divergence against lag, in their quick forms: real runs, real vLLM."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from bench.report import read_lines


def test_process_of_an_engine_ends_with_a_command_that_is_killed():
    """Only when all that hold its output have ended does this return."""
    script = """
import multiprocessing, os, signal, time
from bench.runs import end_with_parent

def child(ready):
    end_with_parent()
    ready.set()
    time.sleep(600)

context = multiprocessing.get_context("fork")
ready = context.Event()
context.Process(target=child, args=(ready,), daemon=True).start()
ready.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == -9, done.stderr.decode()


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    argv = ["bench/figures.py", "--quick", "--runs-dir", str(folder / "runs"), "--out", str(folder / "out")]
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (folder / "stdout").write_text(done.stdout)
    return folder


def run_of(compared: Path, name: str) -> tuple[list[dict], list[dict], list[dict]]:
    folder = compared / "runs" / f"tiny-{name}-16-0"
    return tuple(read_lines(folder / f"{kind}.jsonl") for kind in ("metrics", "rollouts", "actors"))


@pytest.mark.parametrize("name, most", [("conventional-G=4", 3), ("async-G=4", 7)])
def test_phases_of_a_real_run_have_one_version_and_the_lag_that_they_should(compared, name, most):
    steps, rollouts, _ = run_of(compared, name)
    assert [line["step"] for line in steps] == list(range(1, 17))
    assert sorted(group for line in steps for group in line["group_ids"]) == list(range(16 * 16))
    assert [line["group_ids"] for line in steps] != sorted(line["group_ids"] for line in steps), "shuffled in a phase"
    versions = [set(rollout["versions"]) for rollout in rollouts]
    assert all(len(seen) == 1 and seen <= {0, 4, 8, 12} for seen in versions)
    assert max(line["lag_max"] for line in steps) == most and min(line["lag_min"] for line in steps) == 0
    assert all(line["ess"] > 0.9 and line["kl_behaviour"] < 0.05 for line in steps), "log μ is of the right version"


def test_engines_of_a_conventional_run_stand_idle_while_it_trains(compared):
    """And both have their share of what is generated."""
    steps, _, actors = run_of(compared, "conventional-G=4")
    since = [line for line in actors if line["time_s"] > steps[0]["time_s"] - steps[0]["train_s"]]
    trained = sum(line["train_s"] for line in steps[:-1])
    for index in (0, 1):
        own = [line for line in since if line["actor"] == index]
        assert sum(line.get("idle_s", 0.0) for line in own) > 0.6 * trained
        tokens = [sum(n.get("generated_tokens", 0) for n in actors if n["actor"] == i) for i in (index, 1 - index)]
        assert tokens[0] > 0.7 * tokens[1]


def test_table_has_every_system_with_what_was_expected_of_it_and_the_figures_are_drawn(compared):
    text = (compared / "stdout").read_text()
    assert (compared / "out" / "tiny.md").read_text() in text
    for name in ("pipeline", "async G=4", "conventional G=4"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        measured, predicted = float(re.match(r"\d+", cells[1]).group()), float(cells[2])
        assert measured > 0 and predicted > 0
        assert 0.4 < measured / predicted < 2.5, "a few steps on a busy machine: only that it is no nonsense"
        if name != "async G=4":  # its last phase is trained while nothing is generated, and here that is half of it
            assert 0.4 < float(cells[4]) < 2.5, "by the formulas too"
    (row,) = [line for line in text.splitlines() if line.startswith("| 32 |")]
    number = r"([\d.]+|nan)"
    assert re.match(rf"\| 32 \| \d+, \d+ \| [\d.]+ / [0-4] \| {number} \| {number}; {number} \| ", row), "virtual time"
    (row,) = [line for line in text.splitlines() if line.startswith("| U(h) by decoding")]
    u = [float(cell) for cell in row.strip("|").split("|")[1:]]
    assert max(u) == 1.0 and u == sorted(u), "a larger batch makes more tokens a second"
    for name in ("learning", "lag", "batch", "virtual"):
        assert (compared / "out" / f"tiny_{name}.png").stat().st_size > 10_000


def test_divergence_is_nothing_on_policy_and_a_rollout_is_drawn_token_by_token(compared):
    found = json.loads((compared / "out" / "tiny_kl.json").read_text())
    assert found.pop("lags")[0] == 0 and len(found) == 3
    for curves in found.values():
        assert set(curves) == {"conventional", "kept", "recomputed"}
        for values in curves.values():
            assert max(map(abs, (values[0], min(values)))) < 1e-6, "sampled by the very weights it is held against"
        assert curves["conventional"][-1] > 10 * abs(curves["conventional"][0]), "other weights are another policy"
    page = (compared / "out" / "tiny_rollout.html").read_text()
    (rollout,) = [
        line for line in read_lines(compared / "runs" / "tiny-pipeline-16-0" / "rollouts.jsonl")
        if f"trained at step {line['step']}<" in page and repr(line["prompt"]).strip("'") in page
    ]  # fmt: skip
    cells = re.findall(r"<td.*?<b>(.*?)</b><br>v(\d+)<br>lag (-?\d+)<br>([\d.]+)</td>", page)
    assert [int(version) for _, version, _, _ in cells] == rollout["versions"]
    assert [int(lag) for _, _, lag, _ in cells] == [rollout["step"] - 1 - version for version in rollout["versions"]]
    assert all(0.2 < float(ratio) < 5 for *_, ratio in cells)
    assert (compared / "out" / "tiny_rollout.png").stat().st_size > 5_000
    assert (compared / "out" / "tiny_kl.png").stat().st_size > 10_000
