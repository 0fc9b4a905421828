"""The paper's comparison on this machine: pipeline, async and conventional RL, real runs of `launch.py` with real vLLM.

    python bench/figures.py [--preset tiny] [--seeds 3] [--steps 100] [--g 1 4 8 16 32] [--quick]

Pipeline and async take one core for generation and one for training; conventional takes both for each in turn (two
engines, two trainer ranks). All see the same prompts, model, optimizer and number of steps. Runs go to --runs-dir and
are kept: a second call only draws. Tables and PNGs go to --out. Time counts from when every engine decodes.

The prediction beside each throughput is bench/simulate.py's, from three measurements: the time of a decode step against
its batch and what a sequence takes beside, made here while the other core decodes too; and the run's own time to train
on a token.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from bench.model import Split, best_split, finish, pyplot  # noqa: E402
from bench.report import read_lines  # noqa: E402
from bench.simulate import Machine, Simulation, Trace  # noqa: E402
from config import Config, presets  # noqa: E402
from placement import Place  # noqa: E402
from schedule import drains, make_schedule, may_load_weights, publishes  # noqa: E402

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # of a decode step
SMOOTH = 10  # optimizer steps over which a reward is averaged


@dataclasses.dataclass(frozen=True)
class System:
    """One of those compared."""

    schedule: str
    g: int = 1
    in_flight: int = 0  # 0: the preset's

    @property
    def name(self) -> str:
        if self.schedule == "pipeline":
            return f"pipeline H={self.in_flight}" if self.in_flight else "pipeline"
        return f"{self.schedule} G={self.g}"

    def begin(self, steps: int) -> int:
        """Steps that throughput leaves out, for all are slow at first: whole phases, and not all of them."""
        return min(-(-10 // self.g) * self.g, (steps - 1) // self.g * self.g)

    def argv(self, cfg: Config) -> list[str]:
        """What makes it of a preset, on two cores."""
        if self.schedule == "pipeline":
            return ["--actor.sequences", str(self.in_flight)] if self.in_flight else []
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
    steps: list[dict]
    actors: list[dict]
    rollouts: list[dict]

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


def run(system: System, seed: int, cfg: Config, args) -> Finished:
    """Start it, unless it is there already."""
    name = f"{args.preset}-{system.name.replace(' ', '-')}-{args.steps}-{seed}"
    folder = args.runs_dir / name
    if len(read_lines(folder / "metrics.jsonl")) < args.steps:
        argv = ["--runs-dir", str(args.runs_dir), "--name", name, "--overwrite", "--seed", str(seed)]
        argv += ["--steps", str(args.steps), "--eval.every", "0", "--show-every", "0", "--log", "none"]
        command = [sys.executable, "launch.py", args.preset, *argv, *system.argv(cfg)]
        start = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{done.stdout[-3000:]}")
        print(f"{system.name}, seed {seed}: {time.monotonic() - start:.0f} s", flush=True)
    return Finished(system, seed, *(read_lines(folder / f"{name}.jsonl") for name in ("metrics", "actors", "rollouts")))


# ---------------------------------------------------------------- what the machine can do


def measure_decode(cfg: Config, batches: tuple[int, ...], core: int, results) -> None:
    """Seconds of a decode step against its batch, and under 0 what a sequence takes beside; in a process of its own."""
    Place("cpu", (core,), 1).enter()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from actor import Engine

    wide = dataclasses.replace(cfg, actor=dataclasses.replace(cfg.actor, sequences=max(batches)))
    engine, seconds, beside = Engine(wide, seed=0, device="cpu"), {}, []
    engine.sampling = functools.partial(engine.sampling, ignore_eos=True, stop_token_ids=[])
    rng = random.Random(0)
    for batch in batches:
        times, begin = [], time.monotonic()
        while len(times) < 100 and time.monotonic() < begin + 3.0:
            whole, steps = time.monotonic(), []
            for _ in range(batch):
                engine.submit([rng.randint(1, 10) for _ in range(10)], 1.0)
            while engine.engine.has_unfinished_requests():
                step = time.monotonic()
                engine.step()
                steps.append(time.monotonic() - step)
            times += steps[1:-1]
            beside.append((batch, (time.monotonic() - whole - len(steps) * statistics.median(steps)) / batch))
        seconds[batch] = statistics.median(times)
    of_many = [each for batch, each in beside if batch >= 32]
    results.put({0: max(0.0, statistics.median(of_many))} | seconds)


def decode_table(cfg: Config, args) -> dict[int, float]:
    """Batch -> seconds of a decode step, and 0 -> what a sequence takes beside its steps, while the other core decodes
    too. Kept beside the runs."""
    path = args.runs_dir / f"{args.preset}-decode-{len(args.batches)}.json"
    if not path.exists():
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        cores = sorted(os.sched_getaffinity(0))[:2]
        processes = [context.Process(target=measure_decode, args=(cfg, args.batches, c, results)) for c in cores]
        for process in processes:
            process.start()
        both = [results.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({batch: statistics.fmean(t[batch] for t in both) for batch in both[0]}))
    return {int(batch): seconds for batch, seconds in json.loads(path.read_text()).items()}


def decode_seconds(table: dict[int, float], h: int) -> float:
    """Of a decode step, linear between what was measured."""
    return float(np.interp(h, list(table), list(table.values())))


# ---------------------------------------------------------------- what the model expects


def lengths_of(runs: list[Finished]) -> list[int]:
    return [len(line["tokens"]) for run in runs for line in run.rollouts]


def seconds_per_token(runs: list[Finished]) -> float:
    """To train on a completion token, with the prompts and all else that training takes."""
    steps = [line for run in runs for line in run.steps]
    return sum(line["train_s"] for line in steps) / sum(line["tokens"] for line in steps)


def predict(system: System, cfg: Config, table: dict[int, float], beside: float, of: Finished, args) -> Trace:
    """The run as bench/simulate.py sees it: its lengths, its time to train on a token, the machine's decode steps."""
    import tyro

    made = tyro.cli(Config, default=cfg, args=[*system.argv(cfg), "--steps", str(args.steps)])
    per_token = seconds_per_token([of])
    publish = statistics.fmean(line["publish_s"] for line in of.steps)
    decode = functools.partial(decode_seconds, table)
    machine = Machine(made.actors, made.actor.sequences, decode, lambda n: n * per_token + publish, start=beside)
    return simulated(made, machine, lengths_of([of]))


def simulated(cfg: Config, machine: Machine, lengths: list[int]) -> Trace:
    rng = random.Random(0)
    draw, out = (rng.choice(lengths) for _ in itertools.count()), functools.partial(publishes, cfg)
    load = functools.partial(may_load_weights, cfg)
    return Simulation(make_schedule(cfg, 0), machine, draw, cfg.group_size, cfg.steps, out, load, drains(cfg)).run()


# ---------------------------------------------------------------- more accelerators than there are


@dataclasses.dataclass(frozen=True)
class Cores:
    """What one core does, and the lengths of what it writes: all that the clock of N of them needs."""

    decode: dict[int, float]  # batch -> seconds of a step
    beside: float  # seconds a sequence
    per_token: float  # seconds to train on a token
    lengths: list[int]

    def split(self, cfg: Config, n: int) -> Split | None:
        """The best (H, I) of N by bench/model.py, with this core's U(h) and τ, at the preset's max_lag."""
        mean = statistics.fmean(self.lengths)
        step = {h: seconds + self.beside * h / mean for h, seconds in self.decode.items()}  # a share of its beginnings
        best = max(h / seconds for h, seconds in step.items())  # tokens/s: the peak; a flash is 1 / best
        table = ((0, 0.0), *((h, h / seconds / best) for h, seconds in step.items()))
        return best_split(n, cfg.batch_size, cfg.max_lag, max(self.lengths) / mean, table, self.per_token * best)

    def clock(self, system: System, cfg: Config, n: int, steps: int) -> np.ndarray:
        """Seconds at the end of each step on N cores. For both: communication takes no time, training splits evenly,
        samples are spread over the engines one by one (a group of 8 on one engine would leave most of 128 idle)."""
        cfg = dataclasses.replace(cfg, group_size=1, steps=steps)
        if system.schedule == "pipeline":
            split, made = self.split(cfg, n), cfg
            engines, sequences, trainers = split.generating, split.sequences, n - split.generating
        else:
            made = dataclasses.replace(cfg, schedule="conventional", phase_steps=system.g, max_lag=None)
            engines, sequences, trainers = n, max(self.decode), n
        machine = Machine(
            engines,
            sequences,
            functools.partial(decode_seconds, self.decode),
            lambda tokens: tokens * self.per_token / trainers,
            start=self.beside,
        )
        return np.array(simulated(made, machine, self.lengths).step_ends)


def virtual(runs: dict[System, list[Finished]], cores: Cores, cfg: Config, args) -> list[str]:
    """The headline on N cores: the learning is that of the real runs, step for step, with as much in flight as N cores
    would have; the clock is bench/simulate.py's."""
    wide = next(iter(runs))
    final = median(run.reward[-1] for run in runs[wide])
    figure, axes = pyplot().subplots(1, len(args.n), figsize=(5 * len(args.n), 4.2), sharey=True)
    lines = ["| virtual cores | pipeline: H, I | s to reward | conventional, s to reward; pipeline is faster by |"]
    lines.append("|---|---|---|---|")
    for ax, n in zip(np.atleast_1d(axes), args.n, strict=True):
        times = {}
        for system, color in colors(runs).items():
            clock = cores.clock(system, cfg, n, args.steps)
            rewards = np.median([run.reward for run in runs[system]], axis=0)
            ax.plot(clock, rewards, color=color, label=system.name)
            at = np.flatnonzero(rewards[SMOOTH - 1 :] >= args.target)
            times[system] = clock[SMOOTH - 1 + at[0]] if len(at) else np.nan
        ax.set(xlabel="virtual seconds", ylabel="reward", title=f"N = {n}")
        split, cells = cores.split(cfg, n), []
        for system in runs:
            if system.schedule == "conventional":
                good = median(run.reward[-1] for run in runs[system]) >= final - 0.03
                ratio = (
                    f"{times[system]:.1f}; {times[system] / times[wide]:.2f}" if np.isfinite(times[system]) else "never"
                )
                cells.append(f"G={system.g}: {ratio}" + ("" if good else " (ends lower)"))
        lines.append(f"| {n} | {split.sequences}, {split.generating} | {times[wide]:.1f} | {'; '.join(cells)} |")
    finish(figure, axes, args.out / f"{args.preset}_virtual.png")
    return lines


# ---------------------------------------------------------------- tables


def spread(values: list[float], form: str = ".0f") -> str:
    """Median (lowest – highest); `–` if it is of none."""
    known = sorted(value for value in values if not np.isnan(value))
    if len(known) < len(values):
        return "not reached" if not known else f"{len(known)} of {len(values)} reach it"
    return f"{statistics.median(known):{form}} ({known[0]:{form}} – {known[-1]:{form}})"


def median(values) -> float:
    return float(np.median(list(values)))


def table_of(runs: dict[System, list[Finished]], predicted: dict[System, float], target: float) -> list[str]:
    """A line a system; ratios are of medians, pipeline over the system in question."""
    ours = next(iter(runs.values()))
    lines = [
        f"| | tokens/s | predicted | ÷ predicted | pipeline makes × as many (predicted) | s to reward {target:.2f} | "
        "pipeline is faster by | less hand-over | hand-over, % | final reward | lag mean / max | ESS mean / min |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    base, most = median(run.first(target) for run in ours), median(run.tokens_per_s for run in ours)
    expected = next(iter(predicted.values()))
    for system, found in runs.items():
        rate = median(run.tokens_per_s for run in found)
        times = [run.first(target) for run in found]
        hand_over = [run.hand_over_s / run.time_s[-1] if system.schedule == "conventional" else 0.0 for run in found]
        efficient = [t * (1 - share) for t, share in zip(times, hand_over, strict=True)]
        lag_max = max(line["lag_max"] for run in found for line in run.steps)
        ess_min = min(line["ess"] for run in found for line in run.steps if line["ess"] is not None)
        cells = [
            spread([run.tokens_per_s for run in found]),
            f"{predicted[system]:.0f}",
            f"{rate / predicted[system]:.2f}",
            f"{most / rate:.2f} ({expected / predicted[system]:.2f})",
            spread(times),
            f"{median(times) / base:.2f}",
            f"{median(efficient) / base:.2f}",
            f"{100 * median(hand_over):.0f}" if system.schedule == "conventional" else "–",
            spread([run.reward[-1] for run in found], ".3f"),
            f"{median(run.mean('lag_mean') for run in found):.2f} / {lag_max}",
            f"{median(run.mean('ess') for run in found):.3f} / {ess_min:.3f}",
        ]
        lines.append(f"| {system.name} | " + " | ".join(cells) + " |")
    return lines


# ---------------------------------------------------------------- figures


def colors(runs: dict[System, list[Finished]]) -> dict[System, object]:
    plt, others = pyplot(), [system for system in runs if system.schedule == "conventional"]
    shades = plt.cm.viridis(np.linspace(0.05, 0.9, max(1, len(others))))
    return {system: "tab:red" if system.schedule == "pipeline" else "tab:orange" for system in runs} | dict(
        zip(others, shades, strict=True)
    )


def draw_learning(runs: dict[System, list[Finished]], path: Path) -> None:
    """Reward against time, reward against samples, samples against time (the paper's figures 5 and 10)."""
    figure, axes = pyplot().subplots(1, 3, figsize=(15, 4.5))
    for system, color in colors(runs).items():
        found = runs[system]
        samples = np.cumsum([line["samples"] for line in found[0].steps])
        times, rewards = (np.array([getattr(run, what) for run in found]) for what in ("time_s", "reward"))
        time_s, style = np.median(times, axis=0), {"color": color, "label": system.name}
        axes[0].plot(time_s, np.median(rewards, axis=0), **style)
        axes[0].fill_between(time_s, rewards.min(axis=0), rewards.max(axis=0), color=color, alpha=0.12, linewidth=0)
        axes[1].plot(samples, np.median(rewards, axis=0), **style)
        axes[2].plot(time_s, samples, **style)
    axes[0].set(xlabel="seconds", ylabel=f"reward, mean of {SMOOTH} steps")
    axes[1].set(xlabel="samples", ylabel="reward")
    axes[2].set(xlabel="seconds", ylabel="samples")
    finish(figure, axes, path)


def draw_lag(runs: dict[System, list[Finished]], path: Path) -> None:
    """Lag and ESS over training (figure 6), mean lag against token position (figure 3a)."""
    figure, axes = pyplot().subplots(1, 4, figsize=(19, 4.5))
    for system, color in colors(runs).items():
        found, style = runs[system], {"color": color, "label": system.name}
        steps = [line["step"] for line in found[0].steps]
        for ax, key in zip(axes, ("lag_max", "lag_mean", "ess"), strict=False):
            values = [[np.nan if line[key] is None else line[key] for line in run.steps] for run in found]
            ax.plot(steps, np.median(values, axis=0), **style)
        lags: dict[int, list[int]] = {}
        for rollout in (rollout for run in found for rollout in run.rollouts[len(run.rollouts) // 5 :]):
            for position, version in enumerate(rollout["versions"]):
                lags.setdefault(position, []).append(rollout["step"] - 1 - version)
        known = [position for position in sorted(lags) if len(lags[position]) >= 20]
        axes[3].plot(known, [statistics.fmean(lags[position]) for position in known], **style)
    for ax, label in zip(axes, ("maximum lag", "mean lag", "ESS"), strict=False):
        ax.set(xlabel="optimizer step", ylabel=label)
    axes[3].set(xlabel="token position", ylabel="mean lag (one sequence a step)")
    finish(figure, axes, path)


def draw_batch(runs: dict[System, list[Finished]], table: dict[int, float], path: Path) -> None:
    """Decode throughput against the batch, and the sequences that run over time (figure 2)."""
    figure, axes = pyplot().subplots(1, 2, figsize=(13, 4.5))
    axes[0].plot(list(table), [batch / seconds for batch, seconds in table.items()], "o-", label="one engine, one core")
    axes[0].set(xscale="log", xlabel="sequences in a decode step", ylabel="tokens/s", ylim=(0, None))
    for system, color in colors(runs).items():
        one = runs[system][0]
        reports = [line for line in one.actors if line["actor"] == 0 and 0 < line["time_s"] - one.up_s < 40]
        share = [1 - line.get("idle_s", 0.0) / max(1e-9, line["running_s"]) for line in reports]  # of the half second
        values = [line["in_flight"] * part for line, part in zip(reports, share, strict=True)]
        axes[1].plot([line["time_s"] - one.up_s for line in reports], values, color=color, label=system.name)
    axes[1].set(xlabel="seconds", ylabel="sequences in flight, engine 0, mean of half a second", yscale="symlog")
    finish(figure, axes, path)


# ---------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--g", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="of conventional; async takes the second"
    )
    parser.add_argument("--target", type=float, default=0.7, help="reward whose time is compared")
    parser.add_argument("--n", type=int, nargs="+", default=[8, 32, 128], help="virtual cores")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/figures"))
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, G = 4: shows that all of it works")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.g, args.target = 1, 16, [4], 0.45
    args.batches = BATCHES[::5] if args.quick else BATCHES
    args.runs_dir = args.runs_dir.resolve()
    cfg = presets()[args.preset]()
    systems = [System("pipeline"), System("async", args.g[min(1, len(args.g) - 1)])]
    systems += [System("conventional", g) for g in args.g]
    table = decode_table(cfg, args)
    beside = table.pop(0)
    runs: dict[System, list[Finished]] = {system: [] for system in systems}
    for seed in range(args.seeds):  # in turns: whatever else the machine does it does to all
        for system in systems:
            runs[system].append(run(system, seed, cfg, args))
    predicted = {
        system: median(
            predict(system, cfg, table, beside, of, args).tokens_per_time(system.begin(args.steps)) for of in found
        )
        for system, found in runs.items()
    }
    args.out.mkdir(parents=True, exist_ok=True)
    cores = Cores(table, beside, seconds_per_token(runs[systems[0]]), lengths_of(runs[systems[0]]))
    wide = System("pipeline", in_flight=max(s.sequences * s.generating for s in (cores.split(cfg, n) for n in args.n)))
    of_many = {wide: [run(wide, seed, cfg, args) for seed in range(args.seeds)]} | {s: runs[s] for s in systems[2:]}
    many = virtual(of_many, cores, cfg, args)
    draw_learning(runs, args.out / f"{args.preset}_learning.png")
    draw_lag(runs, args.out / f"{args.preset}_lag.png")
    draw_batch(runs, table, args.out / f"{args.preset}_batch.png")
    about = f"`python bench/figures.py {' '.join(sys.argv[1:])}`: preset {args.preset}, {args.steps} steps, "
    about += f"{args.seeds} seeds, {platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
    seconds = sum(run.steps[-1]["time_s"] for found in [*runs.values(), of_many[wide]] for run in found)
    about += f"{seconds / 60:.0f} minutes of runs; median (lowest – highest)"
    rates = ["| sequences in a decode step | " + " | ".join(map(str, table)) + " |", "|---|" + "---|" * len(table)]
    rates.append("| tokens/s | " + " | ".join(f"{b / seconds:.0f}" for b, seconds in table.items()) + " |")
    rates += ["", f"and {1000 * beside:.2f} ms for each sequence beside its steps (prefill, bookkeeping)"]
    text = "\n".join([about, "", *table_of(runs, predicted, args.target), "", *many, "", *rates, ""])
    (args.out / f"{args.preset}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
