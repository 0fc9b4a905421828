"""Whatever a verifier does, it does to its worker: the run goes on, and *failed* stays apart from *wrong*."""

import os
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import changed
from test_queues import example, make_queue

from config import ConfigError, RewardConfig, presets
from queues import Channels, Prompt, Rollout, RolloutGroup
from reward import Pool, Scorer, Verdict, load_verifier, verdict

TIMEOUT_S = 2.0


def by_order(text: str, row: dict):
    """A verifier that does what the row tells it to."""
    import ctypes
    import signal
    import subprocess
    import sys
    import threading

    what = row["do"]
    if what == "hang":
        return 9**9**9**9  # in C: no signal handler and no thread switch gets a turn
    if what == "sleep":
        time.sleep(60)
    if what == "exit":
        sys.exit(0)
    if what == "hard exit":
        os._exit(3)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "output":
        while True:
            print("x" * 10_000)
    if what == "memory":
        return len([bytearray(2**20) for _ in range(4096)])
    if what == "alarm":
        signal.alarm(1)  # nobody catches it: the process dies
        time.sleep(60)
    if what == "alarm in a thread":
        thread = threading.Thread(target=lambda: (signal.setitimer(signal.ITIMER_REAL, 0.1), time.sleep(60)))
        thread.start()
        thread.join()
    if what == "late alarm":
        signal.setitimer(signal.ITIMER_REAL, 0.3)  # and forgotten
    if what == "child":
        subprocess.run(["sleep", "4321"])
    if what == "raise":
        raise ZeroDivisionError("of the verifier")
    if what == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    if what == "half a character":
        raise ValueError("\ud800")
    if what == "last words":
        os.write(1, b"this is what I was doing")
        os._exit(3)
    if what == "wait":
        time.sleep(0.5)
    return row.get("value", 1.0)


@pytest.fixture
def pool(tmp_path):
    pool = Pool(by_order, RewardConfig(workers=2, timeout_s=TIMEOUT_S, memory_gib=0.5), tmp_path)
    yield pool
    pool.close()


def verdicts(pool: Pool, *calls: dict) -> list[Verdict]:
    for key, row in enumerate(calls):
        pool.submit(key, "text", row)
    found, deadline = {}, time.monotonic() + 30
    while len(found) < len(calls):
        assert time.monotonic() < deadline, found
        for key, answer in pool.collect(wait_s=0.1):
            assert key not in found, "a call is answered once"
            found[key] = answer
    return [found[key] for key in range(len(calls))]


@pytest.mark.parametrize(
    "what, failure",
    [
        ("hang", "timeout"),
        ("sleep", "timeout"),
        ("ignore", "timeout"),
        ("child", "timeout"),
        ("exit", "crash"),
        ("hard exit", "crash"),
        ("segfault", "crash"),
        ("alarm", "crash"),
        ("alarm in a thread", "crash"),
        ("memory", "memory"),
        ("output", "output"),
        ("raise", "error"),
        ("half a character", "error"),
    ],
)
def test_call_that_fails_says_how_and_neither_its_neighbours_nor_the_next_ones_notice(pool, what, failure):
    start, good = time.monotonic(), {"do": ""}
    found = verdicts(pool, good, good, {"do": what}, good, good)
    assert found[2].failure == failure and found[2].reward is None, found[2]
    assert all(found[i] == Verdict(reward=1.0) for i in (0, 1, 3, 4))
    assert time.monotonic() - start < TIMEOUT_S + 3
    assert verdicts(pool, good, good, good) == [Verdict(reward=1.0)] * 3, "a new worker is in its place"
    assert pool.done[f"failed_{failure}"] == 1


def test_what_a_verifier_started_ends_with_it_and_workers_end_with_the_pool(tmp_path):
    pool = Pool(by_order, RewardConfig(workers=2, timeout_s=TIMEOUT_S), tmp_path)
    verdicts(pool, {"do": "child"}, {"do": ""})
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "4321"]]
    workers = [psutil.Process(worker.process.pid) for worker in pool.workers]
    pool.submit("hangs", "", {"do": "hang"})
    pool.collect(0.0)
    pool.close()
    assert not any(worker.is_running() and worker.status() != "zombie" for worker in workers)


def test_worker_that_dies_is_quoted(pool):
    assert "code 3\nthis is what I was doing" in verdicts(pool, {"do": "last words"})[0].detail


def test_alarm_that_one_call_forgets_does_not_hit_the_next(tmp_path):
    pool = Pool(by_order, RewardConfig(workers=1, timeout_s=TIMEOUT_S), tmp_path)
    assert verdicts(pool, {"do": "late alarm"}, {"do": "wait"}) == [Verdict(reward=1.0)] * 2
    pool.close()


def test_worker_that_was_killed_while_idle_costs_no_call(pool):
    assert verdicts(pool, {"do": ""}, {"do": ""}) == [Verdict(reward=1.0)] * 2
    for worker in pool.workers:
        os.kill(worker.process.pid, 9)
        worker.process.join()
    assert verdicts(pool, {"do": ""}, {"do": ""}) == [Verdict(reward=1.0)] * 2


def test_endless_output_does_not_fill_the_disk(pool, tmp_path):
    verdicts(pool, {"do": "output"})
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * 2**26


def test_workers_work_at_the_same_time(pool):
    start = time.monotonic()
    verdicts(pool, *[{"do": "wait"}] * 4)
    assert 0.9 < time.monotonic() - start < 1.8, "four calls of half a second, two at a time"


@pytest.mark.parametrize(
    "value, reward, metrics",
    [
        (0.5, 0.5, {}),
        (1, 1.0, {}),
        (True, 1.0, {}),
        (torch.tensor(0.25), 0.25, {}),
        ({"reward": 1, "digits": 3}, 1.0, {"digits": 3.0}),
    ],
)
def test_number_or_dict_of_numbers_is_a_reward(value, reward, metrics):
    assert verdict(value) == Verdict(reward, metrics)


@pytest.mark.parametrize(
    "value",
    [
        None,
        float("nan"),
        float("inf"),
        "1",
        [1.0],
        [1.0, 0.0],
        torch.ones(2),
        {},
        {"score": 1.0},
        {"reward": None},
        {"reward": 1.0, "digits": float("nan")},
        {"reward": 1.0, 7: 1.0},
        {"reward": 1.0, "\ud800": 1.0},
        {"reward": 1.0} | {f"m{i}": 0.0 for i in range(40)},
        1j,
    ],
)
def test_anything_else_is_an_error_that_shows_it(value):
    found = verdict(value)
    assert found.failure == "error" and found.reward is None
    assert f"it returned {value!r}"[:500] in found.detail and "want a finite number" in found.detail


# ---------------------------------------------------------------- groups


def make_scorer(tmp_path, do: list[str], **config) -> Scorer:
    """A scorer with one group in its queue, whose samples do as they are told in turn."""
    cfg = changed(presets()["tiny"](), reward=dict(function="mine.py:by_order", timeout_s=TIMEOUT_S) | config)
    queues = {name: make_queue(slots=8) for name in ("completions", "rollouts", "reports")}
    channels = Channels(**queues, prompts=None, eval_prompts=None, batches=[], weights=None, stop=None, actors=[])
    texts = iter(do)
    pool = Pool(lambda text, row: by_order(text, {"do": text}), cfg.reward, tmp_path)
    channels.completions.put(RolloutGroup(example(Prompt), [example(Rollout) for _ in do]))
    return Scorer(cfg, channels, pool, decode=lambda ids: next(texts, "again"))


def run(scorer: Scorer) -> RolloutGroup:
    deadline = time.monotonic() + 20
    try:
        while time.monotonic() < deadline:
            scorer.step()
            if (group := scorer.channels.rollouts.get(timeout_s=0)) is not None:
                return group
    finally:
        scorer.pool.close()
    raise AssertionError("the group never came back")


def test_group_comes_back_whole_in_order_with_nothing_else_changed(tmp_path):
    scorer = make_scorer(tmp_path, ["", "exit", "wait", ""], workers=3)
    group, before = run(scorer), example(Rollout)
    assert [r.reward for r in group.rollouts] == [1.0, None, 1.0, 1.0]
    assert [r.failure for r in group.rollouts] == ["", "crash", "", ""]
    for rollout in group.rollouts:
        assert torch.equal(rollout.completion_ids, before.completion_ids)
        assert torch.equal(rollout.logprobs, before.logprobs) and torch.equal(rollout.versions, before.versions)
    note = scorer.channels.reports.get().values["what"]
    assert "verifier mine.py:by_order: crash" in note and "row: {'answer': '12'}" in note


def test_group_that_comes_again_while_it_is_scored_is_scored_once(tmp_path):
    """Its actor had died after sending it, so it was issued again: the two copies have other completions."""
    scorer = make_scorer(tmp_path, ["wait", ""], workers=6)  # all three are taken at once
    for _ in range(2):
        scorer.channels.completions.put(RolloutGroup(example(Prompt), [example(Rollout)] * 2))
    begin, groups = time.monotonic(), []
    while time.monotonic() < begin + 2 or not groups:
        scorer.step()
        groups += filter(None, [scorer.channels.rollouts.get(timeout_s=0)])
    scorer.pool.close()
    assert [[rollout.reward for rollout in group.rollouts] for group in groups] == [[1.0, 1.0]]


def test_verifier_that_raises_ends_the_run_naming_itself_and_the_row(tmp_path):
    with pytest.raises(RuntimeError, match="(?s)ZeroDivisionError.*verifier mine.py:by_order: error.*row: {'answer'"):
        run(make_scorer(tmp_path, ["", "raise"]))


def test_errors_of_the_verifier_are_counted_as_failed_if_asked(tmp_path):
    group = run(make_scorer(tmp_path, ["", "raise"], errors="count"))
    assert [(r.reward, r.failure) for r in group.rollouts] == [(1.0, ""), (None, "error")]


def test_verifier_that_always_fails_ends_the_run_before_it_has_cost_a_day(tmp_path):
    scorer = make_scorer(tmp_path, ["exit"] * 100, workers=4)
    with pytest.raises(RuntimeError, match="(?s)the last 64 calls failed, the very last:.*crash.*row: {'answer'"):
        run(scorer)


def test_verifier_is_loaded_by_name_or_by_file_and_function(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def yes(text, row):\n    return 1.0\n")
    assert load_verifier(f"python:{file}:yes")("", {}) == load_verifier(f"{file}:yes")("", {}) == 1.0
    assert load_verifier("exact")(" 9\n", {"answer": "9"}) == 1.0
    with pytest.raises(ConfigError, match="has no function 'no'"):
        load_verifier(f"{file}:no")


@pytest.mark.parametrize("do", ["hang", "child"])
def test_neither_workers_nor_what_they_started_survive_a_killed_role(tmp_path, do):
    """Nobody is left to close the pool."""
    import subprocess
    import sys

    script = (
        "import sys, time; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\nfrom reward import Pool\nfrom config import RewardConfig\n"
        "from test_reward import by_order\n"
        "pool = Pool(by_order, RewardConfig(workers=2, timeout_s=1000), Path(sys.argv[1]))\n"
        f"pool.submit(0, '', {{'do': '{do}'}}); pool.collect(0.5)\n"
        "print(*[w.process.pid for w in pool.workers], flush=True); time.sleep(1000)\n"
    )
    root = Path(__file__).parent
    role = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(root), str(root.parent)], stdout=subprocess.PIPE, text=True
    )
    workers = [psutil.Process(int(pid)) for pid in role.stdout.readline().split()]
    deadline, family = time.monotonic() + 20, []
    while len(family) < 3 + (do == "child"):  # two workers, the guard, and what a worker began
        assert time.monotonic() < deadline, family
        family = psutil.Process(role.pid).children(recursive=True)
    assert len(workers) == 2
    role.kill()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
