"""Pipeline efficiency, stall and idle shares of preset `tiny` on this machine, as ratios measured in one run.

    python bench/throughput.py [--rounds 3] [--turns 10] [--turn-s 4]

Each round starts two sets of processes, both with actor and trainer on the cores they have in the pipeline:
  pipeline  `launch.py tiny` without evaluations
  apart     an engine that generates, and a trainer that goes through the same ready-made batches over and over, both as
            fast as they can and with nothing between them: each alone in its work while the other core is kept busy
The two take turns of a few seconds, one running while the other is stopped (SIGSTOP), so that whatever else happens on
the machine happens to both. Work cut by the end of a turn goes on in the next; clocks count the turns only.

The learning rate is next to nothing, so that lengths, and with them the work, stay the same. Efficiency is the
pipeline's trained tokens/s over the smaller of the two rates apart; "tokens" are completion tokens.
"""

import argparse
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import launch  # noqa: E402
import record  # noqa: E402
from config import Config, presets  # noqa: E402
from model_files import load_tokenizer, model_layout  # noqa: E402
from transport import make_channels  # noqa: E402

BATCHES = 20  # that training alone goes through


def bench_config(folder: Path) -> Config:
    cfg = presets()["tiny"]()
    return dataclasses.replace(
        cfg,
        runs_dir=folder,
        name="pipeline",
        steps=100_000,
        show_every=0,
        train=dataclasses.replace(cfg.train, lr=1e-12, warmup_steps=0),
        eval=dataclasses.replace(cfg.eval, every=0),
    )


def generate_alone(cfg: Config, channels, path: Path) -> None:
    """H sequences in flight and nothing else; the first that finish become the batches of `train_alone`."""
    import torch

    from actor import Engine
    from data import encoded_prompts
    from packing import Sequence, make_micro_batch, pack
    from queues import StepBatch

    engine, tokenizer = Engine(cfg, seed=cfg.seed, device="cpu"), load_tokenizer(cfg.model)
    prompts = encoded_prompts(cfg, cfg.data, tokenizer, Counter(), seed=cfg.seed)
    in_flight, waiting, sequences, batches = {}, [], [], 0
    with path.open("w", buffering=1) as file:
        while True:
            while len(in_flight) < cfg.actor.sequences:
                waiting = waiting or [next(prompts)[1]] * cfg.group_size
                prompt_ids = waiting.pop()
                in_flight[engine.submit(prompt_ids, cfg.actor.temperature)] = prompt_ids
            tokens = len(in_flight)  # a step makes one for each
            for request_id, rollout in engine.step().items():
                prompt_ids = in_flight.pop(request_id)
                if batches < BATCHES:
                    ids, advantage = torch.tensor(prompt_ids), (-1.0) ** len(sequences)
                    sequences.append(Sequence(ids, rollout, advantage, weight=1.0))
            if len(sequences) >= cfg.batch_size:
                batch, sequences = sequences[: cfg.batch_size], []
                dealt = pack([len(s) for s in batch], cfg.preprocess.max_tokens_per_microbatch, ranks=1)[0]
                micro_batches = [make_micro_batch([batch[i] for i in indices]) for indices in dealt]
                normaliser = sum(len(s.rollout.completion_ids) for s in batch)
                channels.batches[0].put(StepBatch(0, micro_batches, normaliser, metrics={}))
                batches += 1
            file.write(json.dumps({"time_s": time.monotonic(), "tokens": tokens}) + "\n")


def train_alone(cfg: Config, channels, path: Path) -> None:
    """Optimizer steps, one after the other, on batches that are there already."""
    import torch

    from train import Trainer

    trainer = Trainer(cfg, channels.weights.layout, 0, torch.device("cpu"))
    batches = [channels.batches[0].get() for _ in range(BATCHES)]
    with path.open("w", buffering=1) as file:
        for step in range(cfg.steps):
            metrics = trainer.step(dataclasses.replace(batches[step % BATCHES], step=step))
            file.write(json.dumps({"time_s": time.monotonic(), "tokens": metrics["tokens"]}) + "\n")


def run_apart(cfg: Config) -> None:
    """Generation and training alone, until killed."""
    context = multiprocessing.get_context("spawn")
    places, channels = launch.plan(cfg, sorted(os.sched_getaffinity(0)), []), make_channels(cfg, context)
    processes = []
    for target, role in ((generate_alone, "actor-0"), (train_alone, "train-0")):
        places[role].enter()
        path = cfg.runs_dir / f"{target.__name__}.jsonl"
        processes.append(context.Process(target=target, args=(cfg, channels, path), daemon=True))
        processes[-1].start()
    multiprocessing.connection.wait([process.sentinel for process in processes])


def run_pipeline(cfg: Config) -> None:
    record.START = 0.0  # so that `time_s` is the clock of the other files
    launch.run(cfg)


class Processes:
    """A set of processes that runs in turns."""

    def __init__(self, what: str, folder: Path):
        command = [sys.executable, __file__, "--run", what, str(folder)]
        self.what, self.turns = what, []
        self.leader = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)

    def signal(self, number: int) -> None:
        if self.leader.poll() is not None:
            raise SystemExit(f"bench: {self.what} ended with exit code {self.leader.returncode}")
        os.killpg(self.leader.pid, number)

    def run(self, seconds: float) -> None:
        """One turn."""
        start = time.monotonic()
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        self.signal(signal.SIGSTOP)
        self.turns.append((start, time.monotonic()))

    def wait_for(self, path: Path, lines: int) -> None:
        """Let it run, not counted, until it has written so many lines."""
        self.signal(signal.SIGCONT)
        while not path.exists() or len(path.read_text().splitlines()) < lines:
            self.signal(signal.SIGCONT)
            time.sleep(0.2)
        self.signal(signal.SIGSTOP)

    def clock(self, moment: float) -> float:
        """Seconds of its turns up to a moment."""
        return sum(max(0.0, min(moment, end) - start) for start, end in self.turns)

    def counted(self, path: Path) -> list[dict]:
        """The lines written in its turns, with `seconds` since the line before and whether they are `cut`: a stop since
        the line before the one before would count as waiting (actors report a step late)."""
        text = path.read_text()
        lines = [json.loads(line) for line in text[: text.rindex("\n")].splitlines()]
        counted = []
        for earlier, before, line in zip(lines, lines[1:], lines[2:], strict=False):
            seconds = self.clock(line["time_s"]) - self.clock(before["time_s"])
            if before["time_s"] > self.turns[0][0]:
                cut = any(earlier["time_s"] < end < line["time_s"] for _, end in self.turns)
                counted.append(line | {"seconds": seconds, "cut": cut})
        return counted


def rate(lines: list[dict]) -> float:
    return sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines)


def measure(cfg: Config, turns: int, turn_s: float) -> dict[str, float]:
    """One round."""
    files = [cfg.run_dir / "metrics.jsonl", *(cfg.runs_dir / f"{name}_alone.jsonl" for name in ("train", "generate"))]
    started = []
    try:
        for what, path in (("pipeline", files[0]), ("apart", files[1])):
            started.append(Processes(what, cfg.runs_dir))
            started[-1].wait_for(path, lines=20)
        for _ in range(turns):
            for processes in started:
                processes.run(turn_s)
        pipeline, train, generate = (p.counted(path) for p, path in zip([*started, started[1]], files, strict=True))
    finally:
        for processes in started:
            os.killpg(processes.leader.pid, signal.SIGKILL)
            processes.leader.wait()
    whole = [line for line in pipeline if not line["cut"]]  # what a stop fell into says nothing of waits
    seconds = sum(line["seconds"] for line in whole)
    share = {key: sum(line[key] for line in whole) / seconds for key in ("update_stall_s", "wait_s", "actor_idle_s")}
    return {
        "generation alone, tokens/s": rate(generate),
        "training alone, tokens/s": rate(train),
        "pipeline, trained tokens/s": rate(pipeline),
        "**pipeline efficiency**": rate(pipeline) / min(rate(generate), rate(train)),
        "**stall**, share of wall time": share["update_stall_s"],
        "swap of the weights, ms": 1000 * statistics.fmean(line["update_stall_s"] for line in whole),
        "swap ÷ plain memory copy": 1000 * statistics.fmean(line["update_stall_s"] for line in whole) / copy_ms(cfg),
        "trainer idle, share of wall time": share["wait_s"],
        "actor idle, share of wall time": share["actor_idle_s"],
        "mean ESS": statistics.fmean(line["ess"] for line in whole),
    }


def copy_ms(cfg: Config) -> float:
    """A plain copy of the model's weights, one flat tensor, on one thread."""
    import torch

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
    parser.add_argument("--turns", type=int, default=10, help="of each of the two, a round")
    parser.add_argument("--turn-s", type=float, default=4.0)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        what, folder = args.run
        return (run_pipeline if what == "pipeline" else run_apart)(bench_config(Path(folder)))

    rounds = []
    for _ in range(args.rounds):
        folder = Path(tempfile.mkdtemp())
        rounds.append(measure(bench_config(folder), args.turns, args.turn_s))
        shutil.rmtree(folder)
    about = f"{args.rounds} rounds of {args.turns} turns of {args.turn_s:g} s"
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {about}\n| | median | range |\n|---|---|---|")
    for name in rounds[0]:
        values = sorted(r[name] for r in rounds)
        form = ".2%" if "share" in name else ".0f" if "tokens/s" in name else ".3f"
        print(f"| {name} | {statistics.median(values):{form}} | {values[0]:{form}} – {values[-1]:{form}} |")


if __name__ == "__main__":
    main()
