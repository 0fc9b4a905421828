"""Pipeline efficiency, stall and idle shares of preset `tiny` on this machine, as ratios measured in one run.

    python bench/throughput.py [--rounds 3] [--seconds 40]

Each round measures, one after the other:
  apart     actor and trainer at the same time, each on the core(s) it has in the pipeline, but decoupled: the actor
            is fed prompts and its completions are thrown away, the trainer is fed the same ready-made batches over
            and over. So each is alone in its work while the other keeps its core busy. For the rate of generation
            the trainer gets a batch when as many samples have been generated, so that it is as busy as it is in the
            pipeline; for the rate of training it gets one whenever it can take one.
  pipeline  `launch.py tiny` without evaluations.
The learning rate is next to nothing, so that lengths, and with them the work, are the same throughout. Efficiency is
the pipeline's trained tokens/s over the smaller of the two rates apart; "tokens" are completion tokens.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import launch  # noqa: E402
from config import PRESETS, Config  # noqa: E402


def bench_config(folder: Path, steps: int) -> Config:
    cfg = PRESETS["tiny"][1]
    return dataclasses.replace(
        cfg,
        runs_dir=folder,
        name="bench",
        overwrite=True,
        steps=steps,
        show_every=0,
        train=dataclasses.replace(cfg.train, lr=1e-12, warmup_steps=0),
        eval=dataclasses.replace(cfg.eval, every=0),
    )


def apart(cfg: Config, seconds: float) -> dict:
    """Generated and trained tokens/s of actor and trainer that run side by side without touching each other."""
    from transformers import AutoTokenizer

    from preprocess import make_step_batches, rows
    from queues import Prompt
    from reward import load_verifier, score

    context = multiprocessing.get_context("spawn")
    places = launch.plan(cfg, sorted(os.sched_getaffinity(0)), [])
    launch.prepare_run_dir(cfg)
    channels = launch.make_channels(cfg, context)
    heavy = {name: place for name, place in places.items() if name.startswith(("actor", "train"))}
    roles, all_cores = launch.Roles(cfg, channels, heavy, context), os.sched_getaffinity(0)
    os.sched_setaffinity(0, places["preprocess"].cores)  # where the light roles of the pipeline run

    import torch

    tokenizer, verify = AutoTokenizer.from_pretrained(cfg.model), load_verifier(cfg.reward.function)
    dataset, groups, drained = rows(cfg.data, cfg.seed), [], 0
    going, paced = threading.Event(), threading.Event()
    going.set()
    paced.set()

    def feed_actor() -> None:
        for group_id in itertools.count():
            row = next(dataset)
            prompt = Prompt(group_id, 0, cfg.group_size, torch.tensor(tokenizer.encode(row["prompt"])), row)
            while going.is_set() and not channels.prompts.try_put(prompt):
                time.sleep(0.005)
            if not going.is_set():
                return

    def drain_actor() -> None:
        nonlocal drained
        while going.is_set():
            group = channels.completions.try_get(wait_s=0.05)
            drained += group is not None
            if group is not None and len(groups) < 20 * cfg.groups_per_batch:
                groups.append(group)

    threads = [threading.Thread(target=feed_actor, daemon=True), threading.Thread(target=drain_actor, daemon=True)]
    for thread in threads:
        thread.start()
    while len(groups) < 20 * cfg.groups_per_batch:
        assert roles.dead(()) is None, roles.obituary(roles.dead(()))
        time.sleep(0.1)
    scored = [score(group, verify, lambda ids: tokenizer.decode(ids, skip_special_tokens=True)) for group in groups]
    cut = [scored[i : i + cfg.groups_per_batch] for i in range(0, len(scored), cfg.groups_per_batch)]
    batches = [make_step_batches(cfg, 0, part, 1, {})[0] for part in cut]

    start = drained

    def feed_trainer() -> None:
        for step in range(cfg.steps):
            while going.is_set() and paced.is_set() and drained - start < step * cfg.groups_per_batch:
                time.sleep(0.005)
            batch = dataclasses.replace(batches[step % len(batches)], step=step)
            while going.is_set() and not channels.batches[0].try_put(batch):
                time.sleep(0.005)
            if not going.is_set():
                return

    def watch(seconds: float) -> tuple[list, list]:
        steps, actor, deadline = [], [], time.monotonic() + seconds
        while time.monotonic() < deadline:
            report = channels.reports.try_get(wait_s=0.05)
            if report is not None:
                (steps if report.kind == "step" else actor).append((time.monotonic(), report.values))
        return steps, actor

    threads.append(threading.Thread(target=feed_trainer, daemon=True))
    threads[-1].start()
    watch(10)  # warm-up
    _, actor = watch(seconds)
    paced.clear()
    watch(3)
    steps, _ = watch(seconds / 2)
    going.clear()
    roles.stop(5.0, [])
    os.sched_setaffinity(0, all_cores)
    for thread in threads:
        thread.join()
    (t0, _), (t1, _) = steps[0], steps[-1]
    first, last = actor[0][1], actor[-1][1]
    return {
        "train": sum(values["tokens"] for _, values in steps[1:]) / (t1 - t0),
        "generate": (last["generated_tokens"] - first["generated_tokens"]) / (last["running_s"] - first["running_s"]),
    }


def pipeline(cfg: Config, warmup: int = 20) -> dict:
    """The same rates, and the shares of wall time, of the running pipeline after `warmup` steps."""
    command = [sys.executable, str(ROOT / "bench" / "throughput.py"), "--pipeline", str(cfg.runs_dir), str(cfg.steps)]
    if os.spawnv(os.P_WAIT, sys.executable, command):
        raise SystemExit("the pipeline failed")
    lines = [json.loads(line) for line in (cfg.run_dir / "metrics.jsonl").read_text().splitlines()]
    start, lines = lines[warmup], lines[warmup + 1 :]
    seconds = lines[-1]["time_s"] - start["time_s"]
    return {
        "train": sum(line["tokens"] for line in lines) / seconds,
        "generate": statistics.fmean(line["generated_tokens_per_s"] for line in lines),
        "stall": sum(line["update_stall_s"] for line in lines) / seconds,
        "stall_ms": 1000 * statistics.fmean(line["update_stall_s"] for line in lines),
        "trainer_idle": sum(line["wait_s"] for line in lines) / seconds,
        "actor_idle": sum(line["actor_idle_s"] for line in lines) / seconds,
        "ess": statistics.fmean(line["ess"] for line in lines),
    }


def memory_copy_ms(cfg: Config) -> float:
    """A plain copy of the model's weights, one flat tensor, on one thread."""
    import torch

    from config import model_layout

    torch.set_num_threads(1)
    size = sum(torch.Size(shape).numel() for shape in model_layout(cfg.model).values())
    source, target = torch.rand(size), torch.empty(size)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--pipeline", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pipeline:
        sys.exit(launch.run(bench_config(Path(args.pipeline[0]), int(args.pipeline[1]))))

    folder = Path(tempfile.mkdtemp())
    rounds = []
    for _ in range(args.rounds):
        alone = apart(bench_config(folder, 100_000), args.seconds)
        steps = 25 + int(1.2 * args.seconds * min(alone.values()) / 3500)
        rounds.append((alone, pipeline(bench_config(folder, steps))))
    shutil.rmtree(folder)

    def row(name: str, values: list[float], form: str) -> str:
        low, middle, high = min(values), statistics.median(values), max(values)
        return f"| {name} | {middle:{form}} | {low:{form}} – {high:{form}} |"

    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {args.rounds} rounds of {args.seconds:g} s")
    print("| | median | range |\n|---|---|---|")
    print(row("generation alone, tokens/s", [a["generate"] for a, _ in rounds], ".0f"))
    print(row("training alone, tokens/s", [a["train"] for a, _ in rounds], ".0f"))
    print(row("pipeline, trained tokens/s", [p["train"] for _, p in rounds], ".0f"))
    print(row("**pipeline efficiency**", [p["train"] / min(a.values()) for a, p in rounds], ".3f"))
    print(row("**stall**, share of wall time", [p["stall"] for _, p in rounds], ".2%"))
    print(row("swap of the weights, ms", [p["stall_ms"] for _, p in rounds], ".2f"))
    copy_ms = memory_copy_ms(bench_config(folder, 1))
    print(row("swap ÷ plain memory copy", [p["stall_ms"] / copy_ms for _, p in rounds], ".1f"))
    print(row("trainer idle, share of wall time", [p["trainer_idle"] for _, p in rounds], ".1%"))
    print(row("actor idle, share of wall time", [p["actor_idle"] for _, p in rounds], ".1%"))


if __name__ == "__main__":
    main()
