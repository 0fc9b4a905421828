"""Checkpoints and resumes: a run that is stopped or killed goes on as if nothing had happened."""

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import Future

import pytest
import torch
from conftest import changed
from test_preprocess import preprocessor, scored
from test_queues import make_queue
from test_runs import START_S, Run
from test_train import CPU, TINY, groups, trainer

import train
from bench.report import read_lines, summary
from config import ConfigError, PromptConfig, Start
from preprocess import make_step_batches
from queues import Report, StepBatch
from record import Record, checkpoints, resolved, resume

# ---------------------------------------------------------------- the trainer's part


def batch(step: int, rank: int = 0, ranks: int = 1) -> StepBatch:
    cfg = changed(TINY, trainers=ranks, preprocess=dict(max_tokens_per_microbatch=150))
    made = make_step_batches(cfg, step, groups(seed=step), ranks, {}, {"next_group": 4 * step, "unfinished": []})[rank]
    return StepBatch(**(vars(made) | {"step": step}))


def record(cfg) -> Record:
    cfg.run_dir.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (cfg.run_dir / name).touch()
    return Record(cfg)


def reporter(queue):
    return lambda kind, values: queue.put(Report(kind, values))


def ranks_train(rank: int, ranks: int, cfg, first: int, last: int, weights) -> None:
    """Steps first … last - 1, from the newest checkpoint if there is one, and a checkpoint at the end."""
    cfg = changed(cfg, trainers=ranks)
    train.init_process_group(cfg, rank, CPU)
    one, reports = trainer(cfg, rank), make_queue()
    if first:
        one.load_checkpoint(checkpoints(cfg)[-1])
    for step in range(first, last):
        one.step(batch(step, rank, ranks))
    one.write_checkpoint(batch(last - 1, rank, ranks), reporter(reports))
    one.checkpoint_written.wait()
    whole = {name: tensor.clone() for name, tensor in one.weights()}
    if rank == 0:
        report = reports.get(timeout_s=60)
        assert report.kind == "checkpoint", report
        record(cfg).take("checkpoint", report.values)
        torch.save(whole, weights)


def train_with(ranks: int, cfg, first: int, last: int) -> dict:
    context, weights = multiprocessing.get_context("spawn"), cfg.runs_dir / "weights"
    (cfg.run_dir / "trainers.rendezvous").unlink(missing_ok=True)  # as the launcher does at a resume
    arguments = [(rank, ranks, cfg, first, last, weights) for rank in range(ranks)]
    processes = [context.Process(target=ranks_train, args=each) for each in arguments]
    if ranks == 1:  # no need of a process of its own
        ranks_train(*arguments[0])
        return torch.load(weights)
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0] * ranks
    return torch.load(weights)


@pytest.mark.parametrize("before, after", [(1, 1), (2, 1), (1, 2)])
def test_four_steps_equal_two_and_two_from_a_checkpoint_whatever_the_ranks(tmp_path, before, after):
    """On fixed batches: Adam's moments, the step and the learning rate all go on."""
    cfg = changed(TINY, runs_dir=tmp_path, name="run", steps=8, train=dict(lr=1e-3, warmup_steps=2))
    (tmp_path / "run").mkdir()
    torch.manual_seed(0)
    one = trainer(cfg)
    start = {name: tensor.clone() for name, tensor in one.weights()}
    for step in range(4):
        one.step(batch(step))
    train_with(before, cfg, 0, 2)
    resumed = train_with(after, cfg, 2, 4)
    assert [folder.name for folder in checkpoints(cfg)] == ["step-2", "step-4"]
    for name, tensor in one.weights():
        assert torch.allclose(tensor, resumed[name], atol=1e-6), name
    assert max((tensor - start[name]).abs().max() for name, tensor in one.weights()) > 1e-3


def test_settings_of_the_optimizer_are_the_new_run_s_and_its_memory_is_the_old_one_s(tmp_path):
    cfg = changed(TINY, runs_dir=tmp_path, name="run", train=dict(weight_decay=0.1))
    old, reports = trainer(cfg), make_queue()
    old.step(batch(0))
    old.skipped_steps = 3
    old.write_checkpoint(batch(0), reporter(reports))
    new = trainer(changed(cfg, train=dict(weight_decay=0.2, adam_betas=(0.5, 0.6))))
    record(cfg).take("checkpoint", reports.get(timeout_s=60).values)
    new.load_checkpoint(checkpoints(cfg)[-1])
    assert new.skipped_steps == 3
    assert [group["weight_decay"] for group in new.optimizer.param_groups] == [0.2, 0.0]
    assert all(group["betas"] == (0.5, 0.6) for group in new.optimizer.param_groups)
    for a, b in zip(old.policy.parameters(), new.policy.parameters(), strict=True):
        assert torch.equal(old.optimizer.state[a]["exp_avg"], new.optimizer.state[b]["exp_avg"])
        assert old.optimizer.state[a]["step"] == new.optimizer.state[b]["step"] == 1


def write_for_ever(cfg) -> None:
    torch.set_num_threads(1)
    one, reports, book = trainer(cfg), make_queue(), record(cfg)
    for step in range(10_000):
        one.write_checkpoint(batch(step), reporter(reports))
        book.take("checkpoint", reports.get(timeout_s=60).values)


def test_optimizer_that_has_not_stepped_is_saved_with_no_step():
    moments = trainer(TINY).state()["optimizer"]["state"].values()
    assert moments and all(m["step"] == 0 for m in moments)


def test_next_checkpoint_waits_until_a_failed_one_is_cleared_away(tmp_path, monkeypatch):
    """Else there would be no room for it on a disk that is full."""
    cfg, cleared = changed(TINY, runs_dir=tmp_path, name="run"), []
    one, reports = trainer(cfg), make_queue()
    cfg.run_dir.mkdir()
    written = Future()
    monkeypatch.setattr(train.dcp, "async_save", lambda *_, **__: written)
    monkeypatch.setattr(train.shutil, "rmtree", lambda folder, **_: (time.sleep(0.3), cleared.append(folder.name)))
    one.write_checkpoint(batch(0), reporter(reports))
    threading.Thread(target=written.set_exception, args=(OSError("No space left"),)).start()
    assert one.checkpoint_written.wait(5) and cleared == ["step-1.unfinished"]
    assert re.search(
        r"step 1 was not written: No space left \([\d,]+ MiB free\)$", reports.get(timeout_s=5).values["what"]
    )


def test_kill_at_any_moment_of_writing_leaves_a_checkpoint_that_loads(tmp_path):
    cfg = changed(TINY, runs_dir=tmp_path, name="run", steps=100_000)
    rng, half_written = random.Random(0), 0
    for _ in range(3):
        shutil.rmtree(cfg.run_dir, ignore_errors=True)
        cfg.run_dir.mkdir()
        (cfg.run_dir / "config.json").write_text(json.dumps(resolved(cfg)))
        process = multiprocessing.get_context("spawn").Process(target=write_for_ever, args=(cfg,))
        process.start()
        deadline = time.monotonic() + 60
        while not checkpoints(cfg):
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        process.kill()
        process.join()
        half_written += len(list((cfg.run_dir / "checkpoints").glob("*.unfinished")))
        start = resume(changed(cfg, resume=True))
        one = trainer(cfg)
        one.load_checkpoint(start.folder)
        one.step(batch(start.step))
        assert not list((cfg.run_dir / "checkpoints").glob("*.unfinished"))
    assert half_written, "no kill fell into the middle of a checkpoint: the test shows nothing"


def test_checkpoint_that_cannot_be_written_is_reported_and_training_goes_on(tmp_path):
    """A file lies where its folder should be. What becomes of a whole run then, the full disk below shows."""
    cfg = changed(TINY, runs_dir=tmp_path, name="run")
    record(cfg)
    (cfg.run_dir / "checkpoints").write_text("where the folder should be\n")
    one, reports = trainer(cfg, 0), make_queue()
    for step in (0, 1):
        one.step(batch(step, 0, 1))
        one.write_checkpoint(batch(step, 0, 1), reporter(reports))
        report = reports.get(timeout_s=30)
        assert (
            report.kind == "trouble" and f"the checkpoint of step {step + 1} was not written" in report.values["what"]
        )
    assert one.checkpoint_written.wait(5)


# ---------------------------------------------------------------- the preprocessor's part


def test_groups_that_had_started_and_not_been_trained_start_again_and_no_other_does():
    cfg = changed(TINY, batch_size=8, group_size=4, steps=5, max_lag=3, eval=dict(every=0))
    cfg = changed(cfg, preprocess=dict(zero_variance="drop"))
    one = preprocessor(cfg)
    one.issue_prompts()
    prompts = [one.channels.prompts[0].get() for _ in range(len(one.channels.prompts[0]))]
    assert [prompt.group_id for prompt in prompts] == list(range(8))
    one.take(scored(prompts[1], [1.0] * 4, 0))  # dropped
    for prompt in (prompts[0], prompts[3], prompts[2]):
        one.take(scored(prompt, [1.0, 0.0, 0.0, 0.0], 0))
    one.send_batches()
    sent = one.channels.batches[0].get()
    assert sent.metrics["group_ids"] == [0, 2]
    assert sent.stream == {
        "next_group": 8,
        "unfinished": [3, 4, 5, 6, 7],
        "dropped": dict(zero_variance=1, verifier_failed=0, repeated=0, prompt_too_long=0, malformed=0, held_out=0),
    }
    again = preprocessor(cfg, start=Start(step=1, **sent.stream))
    again.channels.weights.version = 1
    again.issue_prompts()
    issued = [again.channels.prompts[0].get() for _ in range(len(again.channels.prompts[0]))]
    again.channels.weights.version = 0
    assert [prompt.group_id for prompt in issued] == [3, 4, 5, 6, 7, 8, 9, 10], "8 in all: four steps of two"
    assert [prompt.row for prompt in issued[:5]] == [prompt.row for prompt in prompts[3:]]
    assert all(prompt.version == 1 for prompt in issued) and again.dropped["zero_variance"] == 1
    # Before the old ones have all started again, a stop must not lose those that have not.
    partly = preprocessor(changed(cfg, max_lag=0), start=Start(step=1, **sent.stream))
    partly.channels.weights.version = 1
    partly.issue_prompts()
    partly.channels.weights.version = 0
    assert len(partly.channels.prompts[0]) == 2
    for prompt in (partly.channels.prompts[0].get() for _ in range(2)):
        partly.take(scored(prompt, [1.0, 0.0, 0.0, 0.0], 1))
    partly.send_batches()
    assert partly.channels.batches[0].get().stream == sent.stream | {"unfinished": [5, 6, 7]}


def test_evaluation_that_was_due_at_the_start_is_made_first():
    cfg = changed(TINY, batch_size=8, group_size=4, steps=100, eval=dict(every=10, prompts=3))
    for next_eval, issued in ((0, 3), (10, 0)):
        one = preprocessor(cfg, start=Start(step=7, next_eval=next_eval))
        one.channels.weights.version = 7
        one.issue_eval()
        one.channels.weights.version = 0
        assert len(one.channels.eval_prompts) == issued


# ---------------------------------------------------------------- the launcher's part


def step_report(step: int, **values) -> dict:
    times = dict(wait_s=0.1, train_s=0.1, tokens=100, samples=8, lag_mean=1.0, lag_max=2, ess=0.5, reward=0.5)
    shown = dict(loss=0.1, grad_norm=1.0, completion_tokens_mean=9.0)
    return times | shown | dict(step=step, version=step) | values


def test_summary_survives_steps_that_were_skipped(tmp_path):
    book = record(changed(TINY, runs_dir=tmp_path, name="run", steps=3, eval=dict(every=0)))
    for step, ess in enumerate((0.5, None, 1.0), start=1):
        book.take("step", step_report(step, ess=ess, grad_norm=None if ess is None else 1.0))
    (tmp_path / "run" / "config.json").write_text(json.dumps(resolved(book.cfg)))
    assert "ESS               mean 0.750, min 0.500" in summary(tmp_path / "run")


def test_what_actors_did_is_summed_once_over_actors_and_steps(tmp_path):
    book = record(changed(TINY, runs_dir=tmp_path, name="run", steps=3, actors=2, eval=dict(every=0)))
    (tmp_path / "run" / "config.json").write_text(json.dumps(resolved(book.cfg)))

    def actor(index: int, **done):
        book.take("actor", {"actor": index, "in_flight": 10 + index, "running_s": 2.0} | done)

    actor(0, generated_tokens=100, idle_s=1.0)
    actor(1, generated_tokens=300)
    book.take("step", step_report(1))
    actor(1, generated_tokens=50, update_stall_s=0.5)
    book.take("step", step_report(2))
    book.take("step", step_report(3))  # nobody has reported since
    # 400 tokens in 4 s of two actors: 200 a second together; then 50 in 2 s of one of two; then the rate stays
    assert [step["generated_tokens_per_s"] for step in book.steps] == [200.0, 50.0, 50.0]
    assert [step["in_flight"] for step in book.steps] == [21, 21, 21]
    assert [step["actor_idle_s"] for step in book.steps] == [1.0, 0, 0]
    reports = [json.loads(line) for line in (tmp_path / "run" / "actors.jsonl").read_text().splitlines()]
    assert [(line["actor"], line["step"], line["in_flight"]) for line in reports] == [
        (0, 0, 10),
        (1, 0, 11),
        (1, 1, 11),
    ]
    # 1 s idle and 0.5 s of stall in 6 s
    text = summary(tmp_path / "run")
    assert "idle              actors 16.7%" in text and "update stall      8.33%" in text


def test_line_that_only_half_fits_the_disk_leaves_no_half_line(tmp_path):
    book = record(changed(TINY, runs_dir=tmp_path, name="run"))
    before = json.dumps({"text": "x" * 100_000}) + "\n"
    (book.folder / "rollouts.jsonl").write_text(before)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))  # a write stops in the middle, as there
    try:
        book.append("rollouts.jsonl", {"step": 1, "text": "y" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert book.troubles == 1 and (book.folder / "rollouts.jsonl").read_text() == before


def test_oldest_checkpoints_go_and_a_failed_one_leaves_nothing(tmp_path):
    cfg = changed(TINY, runs_dir=tmp_path, name="run", keep_checkpoints=2, eval=dict(every=0))
    book, folder = record(cfg), tmp_path / "run" / "checkpoints"
    for step in (9, 10, 11):
        (folder / f"step-{step}.unfinished").mkdir(parents=True)
        book.take("checkpoint", {"step": step})
    assert [path.name for path in checkpoints(cfg)] == ["step-10", "step-11"] and not book.troubles
    (folder / "step-12.unfinished" / "start.json").mkdir(parents=True)  # cannot be written as a file
    book.take("checkpoint", {"step": 12})
    assert sorted(path.name for path in folder.iterdir()) == ["step-10", "step-11"] and book.troubles == 1


# ---------------------------------------------------------------- whole runs

SHORT = ("--steps", "4", "--batch-size", "32", "--actor.sequences", "32", "--eval.every", "2", "--eval.prompts", "16")
SHORT += ("--checkpoint-every", "1", "--train.warmup-steps", "8")


def wait_for_checkpoint(run: Run, step: int) -> None:
    deadline = time.monotonic() + START_S
    while not (run.folder / "checkpoints" / f"step-{step}").exists():
        assert run.process.poll() is None and time.monotonic() < deadline, run.text()
        time.sleep(0.02)


def test_killed_launcher_and_resume_train_every_group_once(tmp_path):
    """Sampling differs from run to run, so the parameters of two runs cannot be compared: those are compared on fixed
    batches above. Here: the groups, the steps, the learning rates, the versions, the lag."""
    first = Run(tmp_path, *SHORT)
    wait_for_checkpoint(first, 2)
    family = first.family()
    assert {"actor-0", "train-0", "preprocess", "reward"} <= {process.name() for process in family}
    first.process.kill()
    first.assert_nothing_left(family)
    seen = len(first.lines("metrics.jsonl"))
    second = Run(tmp_path, *SHORT, "--resume")
    assert second.wait(START_S) == 0, second.text()
    lines = second.lines("metrics.jsonl")
    assert seen >= 2 and "going on from" in second.text()
    assert [line["step"] for line in lines] == [line["version"] for line in lines] == [1, 2, 3, 4]
    # 2e-4, at most an eighth more a step (warm-up), at most a quarter less a step (to 0 after the fourth)
    assert [line["lr"] for line in lines] == pytest.approx([2.5e-5, 5e-5, 7.5e-5, 5e-5])
    times = Counter(group_id for line in lines for group_id in line["group_ids"])
    assert sorted(times) == list(range(16)) and set(times.values()) == {1}
    assert all(0 <= line["lag_min"] and line["lag_max"] <= 4 for line in lines)
    resumed_at = int(second.text().split("going on from")[1].split("step-")[1].split()[0])
    assert 2 <= resumed_at < 4 and lines[resumed_at]["lag_max"] == 0, "the first batch after it is all of its version"
    assert all(a["time_s"] < b["time_s"] for a, b in zip(lines, lines[1:], strict=False))
    assert [rollout["step"] for rollout in second.lines("rollouts.jsonl")] == [1, 2, 3, 4]
    assert [line["eval_version"] for line in second.lines("evals.jsonl")] == [0, 2, 4]
    assert sorted(folder.name for folder in (second.folder / "checkpoints").iterdir()) == ["step-3", "step-4"]
    complete = Run(tmp_path, *SHORT, "--resume")
    assert complete.wait(30) == 2 and "is complete after 4 steps: give more --steps" in complete.text()


def test_full_disk_does_not_end_the_run_but_its_exit_code_tells(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        run = Run(disk, *SHORT, "--eval.every", "0", "--steps", "6")
        wait_for_checkpoint(run, 2)
        with (disk / "filler").open("wb") as filler, pytest.raises(OSError):
            while True:
                os.write(filler.fileno(), bytes(4096))
        assert run.wait(START_S) == 1, run.text()
        text = run.text()
        assert re.search(r"trouble: the checkpoint of step \d+ was not written: .* \(0 MiB free\)", text), text
        assert "complete, " in text and "after 6 of 6 optimizer steps" in text, "no role failed"
        (disk / "filler").unlink()
        again = Run(disk, *SHORT, "--eval.every", "0", "--steps", "7", "--resume")  # what was complete still is
        assert again.wait(START_S) == 0, again.text()
        groups = Counter(g for line in again.lines("metrics.jsonl") for g in line["group_ids"])
        assert set(groups.values()) == {1}
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ---------------------------------------------------------------- refusals


@pytest.fixture
def interrupted(tmp_path):
    """A run folder with a checkpoint of step 3."""
    cfg = changed(TINY, runs_dir=tmp_path, name="run", resume=True)
    book = record(cfg)
    (cfg.run_dir / "config.json").write_text(json.dumps(resolved(cfg)))
    folder = cfg.run_dir / "checkpoints" / "step-3.unfinished"
    folder.mkdir(parents=True)
    book.take("checkpoint", {"step": 3, "next_group": 9, "unfinished": [], "dropped": {}})
    return cfg


def last(value) -> object:
    """What a message can be looked for by."""
    return value[-1] if isinstance(value, tuple) else "wrap" if hasattr(value, "wrap") else value


def test_changes_that_would_not_fit_are_refused_by_name_and_others_are_not(interrupted):
    cfg = interrupted
    for change in (
        dict(batch_size=64),
        dict(group_size=4),
        dict(seed=5),
        dict(data=("other.jsonl",)),
        dict(model=cfg.model.parent),
        dict(prompt=PromptConfig(wrap="{prompt}?")),
    ):
        ((key, value),) = change.items()
        with pytest.raises(
            ConfigError, match=f"--resume: {key} is .*{last(value)}.*, the run has .*{last(getattr(cfg, key))}"
        ):
            resume(changed(cfg, **change))
    evals = cfg.run_dir / "evals.jsonl"
    assert resume(changed(cfg, steps=3)).step == 3, "its last evaluation is not in"
    evals.write_text('{"eval_version": 3}\n')
    with pytest.raises(ConfigError, match="complete after 3 steps: give more --steps"):
        resume(changed(cfg, steps=3))
    allowed = changed(cfg, max_lag=1, steps=500, train=dict(lr=1e-5))
    assert resume(allowed).step == 3


def test_nothing_to_resume_is_said(tmp_path, interrupted):
    with pytest.raises(ConfigError, match="no complete checkpoint to resume"):
        resume(changed(interrupted, name="other"))
    shutil.rmtree(interrupted.run_dir / "checkpoints")
    with pytest.raises(ConfigError, match="no complete checkpoint to resume"):
        resume(interrupted)


def test_half_written_checkpoint_is_ignored_and_said(interrupted, capsys):
    newer = interrupted.run_dir / "checkpoints" / "step-7.unfinished"
    newer.mkdir()
    (newer / "__0_0.distcp").write_bytes(b"half")
    assert resume(interrupted).step == 3
    assert "step-7.unfinished is half-written and ignored" in capsys.readouterr().out and not newer.exists()


def test_lines_after_the_checkpoint_and_half_a_line_are_cut(interrupted):
    path = interrupted.run_dir / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4)) + '{"step": 5, "los')
    resume(interrupted)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    "every, versions, kept, due",
    [
        (2, [0, 2, 4], [0, 2], 4),  # 4 is of what the run did after its checkpoint of step 3
        (2, [0], [0], 2),  # that of version 2 was running
        (2, [0, 3], [0, 3], 4),  # that of version 2 came late
        (2, [], [], 0),
        (0, [0, 2], [0, 2], 3),  # without evaluation: what there is stays
    ],
)
def test_evaluations_go_on_where_the_checkpoint_is(interrupted, every, versions, kept, due):
    path = interrupted.run_dir / "evals.jsonl"
    path.write_text("".join(json.dumps({"eval_version": version}) + "\n" for version in versions))
    start = resume(changed(interrupted, eval=dict(every=every)))
    assert [line["eval_version"] for line in read_lines(path)] == kept and start.next_eval == due
