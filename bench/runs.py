"""Runs of `launch.py` that bench/figures.py compares, and what the machine could do around each of them.

A `System` is one of those compared, make_run makes a run of it, `Finished` is what that left in its folder. `Decoders`
keep an engine on each core that measures decode steps between runs; matmul_table measures U(h) as the paper does.
"""

import dataclasses
import functools
import json
import multiprocessing
import os
import queue
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bench.report import read_lines
from config import Config
from placement import Place

ROOT = Path(__file__).parent.parent
SMOOTH = 10  # optimizer steps over which a reward is averaged


@dataclasses.dataclass(frozen=True)
class System:
    """One of those compared."""

    schedule: str
    g: int = 1
    in_flight: int = 0  # pipeline
    max_lag: int = 0  # pipeline
    wide: bool = False  # pipeline: as much in flight as more cores have

    @property
    def name(self) -> str:
        if self.schedule == "pipeline":
            return f"pipeline H={self.in_flight} lag={self.max_lag}" if self.wide else "pipeline"
        return f"{self.schedule} G={self.g}"

    def begin(self, steps: int) -> int:
        """Steps that throughput leaves out, for all are slow at first: whole phases, and no more than half of them."""
        return min(-(-10 // self.g) * self.g, steps // 2 // self.g * self.g)

    def argv(self, cfg: Config) -> list[str]:
        """What makes it of a preset, on two cores."""
        if self.schedule == "pipeline":
            return ["--actor.sequences", str(self.in_flight), "--max-lag", str(self.max_lag)]
        n = 2 if self.schedule == "conventional" else 1
        phase = cfg.batch_size * self.g
        argv = ["--schedule", self.schedule, "--G", str(self.g), "--max-lag", "None"]
        argv += ["--actor.sequences", str(min(1024, phase // n))]  # all that an engine has of a phase at once
        return argv + ["--actors", str(n), "--trainers", str(n)]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run that is complete."""

    system: System
    seed: int
    folder: Path
    steps: list[dict]
    actors: list[dict]
    rollouts: list[dict]
    decode: "Decoding | None"  # around it

    @property
    def up_s(self) -> float:
        """When the last engine began to decode, to half a second. One that began before has a head start."""
        first: dict[int, float] = {}
        for line in self.actors:
            if line.get("decode_steps"):
                first.setdefault(line["actor"], line["time_s"] - line["running_s"])
        return max(first.values())

    @functools.cached_property
    def time_s(self) -> np.ndarray:
        """Of the end of each step, from when all engines were up."""
        return np.array([line["time_s"] for line in self.steps]) - self.up_s

    @functools.cached_property
    def reward(self) -> np.ndarray:
        """Mean over the last steps up to each."""
        rewards = [line["reward"] for line in self.steps]
        return np.array([statistics.fmean(rewards[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(rewards))])

    def first(self, target: float) -> float:
        """Time at which the reward first is that; nan if it never is."""
        at = np.flatnonzero(self.reward[SMOOTH - 1 :] >= target)
        return float(self.time_s[SMOOTH - 1 + at[0]]) if len(at) else np.nan

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Of all completions, in the order of the prompts."""
        groups = {}
        for line in self.steps:
            groups |= dict(zip(line["group_ids"], line["completion_tokens"], strict=True))
        return [length for _, lengths in sorted(groups.items()) for length in lengths]

    @property
    def evaluation(self) -> Path:
        """Folder of the evaluation of its last weights."""
        return self.folder.parent / f"held-out-{self.folder.name}"

    @functools.cached_property
    def success(self) -> float:
        """Held-out, sampled, of its last weights."""
        return read_lines(self.evaluation / "evals.jsonl")[-1]["eval_accuracy"]

    @property
    def hand_over_s(self) -> float:
        """Conventional: what is left of the time after generating (of the engine that has most to do in all) and
        training. So it has in it what the engines wait for each other."""
        last_s, busy = self.steps[-1]["time_s"], {}
        for line in self.actors:
            if self.up_s < line["time_s"] <= last_s:
                seconds = line["running_s"] - line.get("idle_s", 0.0) if line.get("decode_steps") else 0.0
                busy[line["actor"]] = busy.get(line["actor"], 0.0) + seconds
        trained = sum(line["train_s"] + line["publish_s"] for line in self.steps)
        return max(0.0, float(self.time_s[-1]) - trained - max(busy.values()))

    @property
    def tokens_per_s(self) -> float:
        skip = self.system.begin(len(self.steps))
        begin_s = self.time_s[skip - 1] if skip else 0.0
        return sum(line["tokens"] for line in self.steps[skip:]) / float(self.time_s[-1] - begin_s)

    def mean(self, key: str) -> float:
        return statistics.fmean(line[key] for line in self.steps if line[key] is not None)


def make_run(system: System, seed: int, cfg: Config, decoders: "Decoders | None", args) -> Finished:
    """Start it, unless it is there already; what the machine can do is measured before and after, if it is asked."""
    name = f"{args.preset}-{system.name.replace(' ', '-')}-{args.steps}-{seed}"
    folder, measured = args.runs_dir / name, args.runs_dir / f"{name}-decode-{len(args.batches)}.json"
    known = measured.exists() or not decoders
    if known and len(read_lines(folder / "metrics.jsonl")) >= args.steps:
        if decoders:
            decoders.last = None  # whatever was measured was measured before a pause
    else:
        before = decoders and (decoders.last or decoders.measure())
        shutil.rmtree(args.runs_dir / f"held-out-{name}", ignore_errors=True)  # it is of other weights
        argv = ["--runs-dir", str(args.runs_dir), "--name", name, "--overwrite", "--seed", str(seed)]
        argv += ["--steps", str(args.steps), "--eval.every", "0", "--show-every", "0", "--log", "none"]
        if args.quick and system.schedule == "pipeline":  # bench/kl.py takes this run, and makes none of its own
            argv += ["--checkpoint-every", "1", "--keep-checkpoints", str(args.steps)]
        command = [sys.executable, "launch.py", args.preset, *argv, *system.argv(cfg)]
        start = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{done.stdout[-3000:]}")
        print(f"{system.name}, seed {seed}: {time.monotonic() - start:.0f} s", flush=True)
        if decoders:
            Decoding.mean([before, decoders.measure()]).write(measured)
    lines = [read_lines(folder / f"{name}.jsonl") for name in ("metrics", "actors", "rollouts")]
    return Finished(system, seed, folder, *lines, Decoding.read(measured) if decoders else None)


def evaluate(runs: list[Finished], args) -> None:
    """The last weights of each on held-out prompts, one run a core at a time; unless it is known."""

    def one(of: Finished) -> None:
        core = cores.get()
        argv = ["--model", str(of.folder / "model"), "--runs-dir", str(args.runs_dir), "--name", of.evaluation.name]
        argv += ["--overwrite", "--eval.prompts", str(args.prompts), "--eval.samples", "4"]
        argv += ["--actor.sequences", "128", "--log", "none"]
        command = ["taskset", "-c", str(core), sys.executable, "launch.py", "eval", args.preset, *argv]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        cores.put(core)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{done.stdout[-3000:]}")

    cores: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)
    with ThreadPoolExecutor(cores.qsize()) as pool:
        list(pool.map(one, [of for of in runs if not read_lines(of.evaluation / "evals.jsonl")]))


# ---------------------------------------------------------------- what the machine can do


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Of one engine on one core."""

    steps: dict[int, float]  # batch -> seconds of a decode step
    beside: float  # seconds a sequence takes beside its steps: prefill, bookkeeping

    def __call__(self, h: int) -> float:
        """Seconds of a decode step, linear between what was measured."""
        return float(np.interp(h, list(self.steps), list(self.steps.values())))

    @classmethod
    def mean(cls, of: "list[Decoding]") -> "Decoding":
        steps = {batch: statistics.fmean(one.steps[batch] for one in of) for batch in of[0].steps}
        return cls(steps, statistics.fmean(one.beside for one in of))

    @classmethod
    def read(cls, path: Path) -> "Decoding":
        values = json.loads(path.read_text())
        return cls({int(batch): seconds for batch, seconds in values["steps"].items()}, values["beside"])

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))


def measure_decode(engine, batches: tuple[int, ...]) -> Decoding:
    """With completions of 32 tokens; half a second a batch, or one round of it: three of a small one, for a median."""
    seconds, beside, rng = {}, [], random.Random(0)
    for batch in batches:
        times, rounds, begin = [], 0, time.monotonic()
        while rounds < (3 if batch <= 128 else 1) or time.monotonic() < begin + 0.5:
            whole, steps, rounds = time.monotonic(), [], rounds + 1
            for _ in range(batch):
                engine.submit([rng.randint(1, 10) for _ in range(10)], 1.0)
            while engine.engine.has_unfinished_requests():
                step = time.monotonic()
                engine.step()
                steps.append(time.monotonic() - step)
            times += steps[1:-1]
            beside.append((batch, (time.monotonic() - whole - len(steps) * statistics.median(steps)) / batch))
        seconds[batch] = statistics.median(times)
    of_one_prefill = [each for batch, each in beside if 32 <= batch <= 128]  # of more, not all begin in the same step
    return Decoding(seconds, max(0.0, statistics.median(of_one_prefill)))


def end_with_parent() -> None:
    """However it ends: else this process would wait for its orders for ever."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def keep_engine(cfg: Config, batches: tuple[int, ...], core: int, orders, results) -> None:
    """A process of its own: an engine, a measurement for every order."""
    end_with_parent()
    Place("cpu", (core,), 1).enter()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from actor import Engine

    engine = Engine(dataclasses.replace(cfg, actor=dataclasses.replace(cfg.actor, sequences=max(batches))), 0, "cpu")
    engine.sampling = functools.partial(engine.sampling, ignore_eos=True, stop_token_ids=[], max_tokens=32)
    while orders.get():
        results.put(measure_decode(engine, batches))


class Decoders:
    """An engine on each of two cores; both measure at once, and take 1% of their cores in between. Started when
    needed."""

    def __init__(self, cfg: Config, batches: tuple[int, ...]):
        self.cfg, self.batches, self.context = cfg, batches, multiprocessing.get_context("spawn")
        self.orders, self.results = [], self.context.Queue()
        self.last: Decoding | None = None

    def measure(self) -> Decoding:
        if not self.orders:
            for core in sorted(os.sched_getaffinity(0))[:2]:
                self.orders.append(self.context.Queue())
                what = (self.cfg, self.batches, core, self.orders[-1], self.results)
                self.context.Process(target=keep_engine, args=what, daemon=True).start()
        for orders in self.orders:
            orders.put(True)
        self.last = Decoding.mean([self.results.get(timeout=300) for _ in self.orders])
        return self.last

    def close(self) -> None:
        for orders in self.orders:
            orders.put(False)


def matmul_table(args) -> dict[int, float]:
    """U(h) as the paper measures it, on one core. Kept beside the runs."""
    path = args.runs_dir / f"matmul-{len(args.batches)}.json"
    if not path.exists():
        core, batches = min(os.sched_getaffinity(0)), args.batches[:2] if args.quick else args.batches[::2]
        call = f"import json; from bench.flops import utilisation; print(json.dumps(utilisation({list(batches)})))"
        command = ["taskset", "-c", str(core), sys.executable, "-c", call]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        path.write_text(done.stdout)
    return {int(batch): u for batch, u in json.loads(path.read_text()).items()}
