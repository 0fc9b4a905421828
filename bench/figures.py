"""The paper's comparison on this machine: pipeline, async and conventional RL, real runs of `launch.py` with real vLLM.

    python bench/figures.py [--preset tiny] [--seeds 3] [--steps 100] [--g 1 4 8 16 32] [--quick]
    python bench/figures.py --preset tail --steps 80 --g 1 4 16 32 --target 0.75 --lag 48      # a long tail of lengths

Pipeline and async take one core for generation and one for training; conventional takes both for each in turn (two
engines, two trainer ranks). All see the same prompts, model, optimizer and number of steps. Runs go to --runs-dir and
are kept: a second call only draws. Tables and PNGs go to --out. Time counts from when every engine decodes.

The prediction beside each throughput is bench/simulate.py's, from the lengths of the run, its own time to train on a
token, and two measurements made before and after each run, on both cores at once, for a shared machine is not every
minute the same: the time of a decode step against its batch, and what a sequence takes beside. "Formula" is what the
equations of bench/model.py alone make of the same.

bench/kl.py, which this calls too, draws the divergence against lag and one rollout token by token.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from bench import model  # noqa: E402
from bench.model import Split, best_split, finish, pyplot  # noqa: E402
from bench.runs import SMOOTH, Decoders, Decoding, Finished, System, evaluate, make_run, matmul_table  # noqa: E402
from bench.simulate import Machine, Simulation, Trace  # noqa: E402
from config import Config, presets  # noqa: E402
from schedule import drains, make_schedule, may_load_weights, publishes  # noqa: E402

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # of a decode step


# ---------------------------------------------------------------- what the model expects


def seconds_per_token(runs: list[Finished]) -> float:
    """To train on a completion token, with the prompts and all else that training takes."""
    steps = [line for run in runs for line in run.steps]
    return sum(line["train_s"] for line in steps) / sum(line["tokens"] for line in steps)


def changed(cfg: Config, of: Finished, args) -> Config:
    """The preset as that run had it."""
    import tyro

    return tyro.cli(Config, default=cfg, args=[*of.system.argv(cfg), "--steps", str(args.steps)])


def by_formula(cfg: Config, of: Finished, args) -> float:
    """Tokens/s by the equations of bench/model.py, from what `predict` has too, as if no phase were cut short. Async
    is half of each: it generates as conventional does and trains as the pipeline, on one core each."""
    made = changed(cfg, of, args)
    cores = Cores(of.decode, made.trainers * seconds_per_token([of]), of.lengths)
    best, u = cores.utilisation()  # a flash is 1 / best
    table, tau = ((0, 0.0), *u.items()), cores.per_token * best
    if of.system.schedule == "pipeline":
        return best * model.pipeline(2, made.actor.sequences, 1, cfg.batch_size, table=table, tau=tau).r
    phase = cfg.batch_size, of.system.g, model.survivors_of(of.lengths), table, tau
    rate = model.conventional(made.actors, *phase)
    return best * (rate.r if of.system.schedule == "conventional" else min(rate.r_gen, rate.r_train))


def predict(cfg: Config, of: Finished, args) -> Trace:
    """The run as bench/simulate.py sees it: its lengths, its time to train on a token, the machine's decode steps."""
    made = changed(cfg, of, args)
    per_token = seconds_per_token([of])
    publish = statistics.fmean(line["publish_s"] for line in of.steps)
    train = lambda tokens: tokens * per_token + publish  # noqa: E731
    queued = 4 if made.schedule == "pipeline" else made.phase_steps * made.groups_per_batch
    machine = Machine(made.actors, made.actor.sequences, of.decode, train, start=of.decode.beside, queued=queued)
    return simulated(made, machine, of.lengths)


def simulated(cfg: Config, machine: Machine, lengths: list[int]) -> Trace:
    schedule, draw, out = make_schedule(cfg, 0), itertools.cycle(lengths), functools.partial(publishes, cfg)
    load = functools.partial(may_load_weights, cfg)
    return Simulation(schedule, machine, draw, cfg.group_size, cfg.steps, out, load, drains(cfg)).run()


# ---------------------------------------------------------------- more accelerators than there are


@dataclasses.dataclass(frozen=True)
class Cores:
    """What one core does, and the lengths of what it writes: all that the clock of N of them needs."""

    decode: Decoding
    per_token: float  # seconds to train on a token
    lengths: list[int]

    def utilisation(self) -> tuple[float, dict[int, float]]:
        """Tokens/s at the best batch, and U(h): the share of it at each, a share of sequences' beginnings included."""
        mean = statistics.fmean(self.lengths)
        rates = {h: h / (seconds + self.decode.beside * h / mean) for h, seconds in self.decode.steps.items()}
        best = max(rates.values())
        return best, {h: rate / best for h, rate in rates.items()}

    def split(self, cfg: Config, n: int, lag: int) -> Split:
        """The best (H, I) of N by bench/model.py, with this core's U(h) and τ."""
        best, u = self.utilisation()  # a flash is 1 / best
        longest_over_mean = max(self.lengths) / statistics.fmean(self.lengths)
        return best_split(n, cfg.batch_size, lag, longest_over_mean, ((0, 0.0), *u.items()), self.per_token * best)

    def trace(self, system: System, cfg: Config, n: int, steps: int) -> Trace:
        """A run on N cores. For both: communication takes no time, training splits evenly, samples are spread over the
        engines one by one (a group of 8 on one engine would leave most of 128 idle)."""
        cfg = dataclasses.replace(cfg, group_size=1, steps=steps)
        if system.schedule == "pipeline":
            split = self.split(cfg, n, system.max_lag)
            made = dataclasses.replace(cfg, max_lag=system.max_lag)
            engines, sequences, trainers = split.generating, split.sequences, n - split.generating
        else:
            made = dataclasses.replace(cfg, schedule="conventional", phase_steps=system.g, max_lag=None)
            engines, sequences, trainers = n, max(self.decode.steps), n
        train = lambda tokens: tokens * self.per_token / trainers  # noqa: E731
        machine = Machine(engines, sequences, self.decode, train, start=self.decode.beside)
        return simulated(made, machine, self.lengths)


def virtual(runs: dict[System, list[Finished]], cores: Cores, cfg: Config, args) -> list[str]:
    """The headline on N cores: the learning is that of the real runs, step for step, the pipeline's with as much in
    flight and the same bound on its lag as on N cores; the clock is bench/simulate.py's."""
    wide, *others = runs
    figure, axes = pyplot().subplots(1, len(args.n), figsize=(5 * len(args.n), 4.2), sharey=True)
    heads = [f"G={system.g}, s; × as long" for system in others]
    lines = ["| virtual cores | pipeline: H, I | its lag, mean / max | s | " + " | ".join(heads) + " | best as good |"]
    lines.append("|---" * (5 + len(others)) + "|")
    for ax, n in zip(np.atleast_1d(axes), args.n, strict=True):
        times, traces = {}, {system: cores.trace(system, cfg, n, args.steps) for system in runs}
        for system, color in colors(runs).items():
            clock, rewards = traces[system].step_ends, np.median([run.reward for run in runs[system]], axis=0)
            ax.plot(clock, rewards, color=color, label=system.name)
            at = np.flatnonzero(rewards[SMOOTH - 1 :] >= args.target)
            times[system] = clock[SMOOTH - 1 + at[0]] if len(at) else np.nan
        ax.set(xlabel="virtual seconds", ylabel="reward", title=f"N = {n}")
        split, lags = cores.split(cfg, n, wide.max_lag), np.concatenate(traces[wide].lags)
        cells = [f"{n}", f"{split.sequences}, {split.generating}", f"{lags.mean():.1f} / {lags.max()}"]
        cells.append(f"{times[wide]:.1f}")
        cells += [f"{times[system]:.1f}; {times[system] / times[wide]:.2f}" for system in others]
        lines.append("| " + " | ".join([*cells, best_as_good(runs, times)]) + " |")
    finish(figure, axes, args.out / f"{args.preset}_virtual.png")
    about = f"The runs behind the pipeline's reward: {wide.in_flight} in flight, max_lag {wide.max_lag}, mean lag "
    about += f"{median(run.mean('lag_mean') for run in runs[wide]):.1f}, held-out success "
    return [*lines, "", about + spread([run.success for run in runs[wide]], ".3f")]


def best_as_good(runs: dict[System, list[Finished]], times: dict[System, float]) -> str:
    """Of the conventional ones whose held-out success is at most 0.03 lower than the first's, the quickest: its time
    over the first's."""
    first = next(iter(runs))
    success = {system: median(run.success for run in found) for system, found in runs.items()}
    good = [s for s in runs if s.schedule == "conventional" and success[s] >= success[first] - 0.03]
    best = min((s for s in good if np.isfinite(times[s])), key=times.get, default=None)
    return "none" if best is None else f"**{times[best] / times[first]:.2f}** (G={best.g})"


# ---------------------------------------------------------------- tables


def minutes(runs: dict[System, list[Finished]]) -> float:
    return sum(run.steps[-1]["time_s"] for found in runs.values() for run in found) / 60


def spread(values: list[float], form: str = ".0f") -> str:
    """Median (lowest – highest); `–` if it is of none."""
    known = sorted(value for value in values if not np.isnan(value))
    if len(known) < len(values):
        return "not reached" if not known else f"{len(known)} of {len(values)} reach it"
    return f"{statistics.median(known):{form}} ({known[0]:{form}} – {known[-1]:{form}})"


def median(values) -> float:
    return float(np.median(list(values)))


def table_of(
    runs: dict[System, list[Finished]], predicted: dict[System, float], formula: dict[System, float], target: float
) -> list[str]:
    """A line a system; gains are of medians, pipeline over the system in question."""
    first = next(iter(runs))
    heads = ["", "tokens/s", "predicted", "÷ predicted", "÷ formula", "pipeline's gain", "predicted", "÷ predicted"]
    heads += [f"s to reward {target:.2f}", "pipeline is faster by", "less hand-over", "hand-over, %", "held-out"]
    heads += ["lag mean / max", "ESS mean / min"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    rates = {system: median(run.tokens_per_s for run in found) for system, found in runs.items()}
    times = {system: median(run.first(target) for run in found) for system, found in runs.items()}
    for system, found in runs.items():
        hand_over = [run.hand_over_s / run.time_s[-1] if system.schedule == "conventional" else 0.0 for run in found]
        efficient = [run.first(target) * (1 - share) for run, share in zip(found, hand_over, strict=True)]
        gain, expected = rates[first] / rates[system], predicted[first] / predicted[system]
        lag_max = max(line["lag_max"] for run in found for line in run.steps)
        ess_min = min(line["ess"] for run in found for line in run.steps if line["ess"] is not None)
        cells = [
            system.name,
            spread([run.tokens_per_s for run in found]),
            f"{predicted[system]:.0f}",
            f"{rates[system] / predicted[system]:.2f}",
            f"{rates[system] / formula[system]:.2f}",
            f"{gain:.2f}",
            f"{expected:.2f}",
            f"{gain / expected:.2f}",
            spread([run.first(target) for run in found]),
            f"{times[system] / times[first]:.2f}",
            f"{median(efficient) / times[first]:.2f}",
            f"{100 * median(hand_over):.0f}" if system.schedule == "conventional" else "–",
            spread([run.success for run in found], ".3f"),
            f"{median(run.mean('lag_mean') for run in found):.2f} / {lag_max}",
            f"{median(run.mean('ess') for run in found):.3f} / {ess_min:.3f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", f"Against the quickest conventional one that ends as well: {best_as_good(runs, times)}"]


def draw_divergence(of: Finished, args) -> None:
    """bench/kl.py, in a process of its own: it has an engine. quick: of a run that is there."""
    quick = ["--quick", "--run", str(of.folder)] if args.quick else []
    command = [sys.executable, "bench/kl.py", "--preset", args.preset, *quick]
    command += ["--runs-dir", str(args.runs_dir), "--out", str(args.out.resolve())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    print(done.stdout, end="")


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


def draw_batch(runs: dict[System, list[Finished]], decode: Decoding, path: Path) -> None:
    """Decode throughput against the batch, and the sequences that run over time (figure 2)."""
    figure, axes = pyplot().subplots(1, 2, figsize=(13, 4.5))
    rates = [batch / seconds for batch, seconds in decode.steps.items()]
    axes[0].plot(list(decode.steps), rates, "o-", label="one engine, one core")
    axes[0].set(xscale="log", xlabel="sequences in a decode step", ylabel="tokens/s", ylim=(0, None))
    for system, color in colors(runs).items():
        one = runs[system][0]
        reports = [line for line in one.actors if line["actor"] == 0 and 0 < line["time_s"] - one.up_s < 40]
        share = [1 - line.get("idle_s", 0.0) / max(1e-9, line["running_s"]) for line in reports]  # of the half second
        values = [line["in_flight"] * part for line, part in zip(reports, share, strict=True)]
        axes[1].plot([line["time_s"] - one.up_s for line in reports], values, color=color, label=system.name)
    axes[1].set(xlabel="seconds", ylabel="sequences in flight, engine 0, mean of half a second", yscale="symlog")
    finish(figure, axes, path)


def rates_of(cores: Cores, matmul: dict[int, float]) -> list[str]:
    """The engine against its batch, and U(h) in both ways."""
    batches, u = list(cores.decode.steps), cores.utilisation()[1]
    rows = [["sequences in a decode step, h", *batches], ["---"] * (len(batches) + 1)]
    rows.append(["tokens/s", *(f"{h / seconds:.0f}" for h, seconds in cores.decode.steps.items())])
    rows.append(["U(h) by decoding, share of the best", *(f"{u[h]:.3f}" for h in batches)])
    rows.append(["U(h) by (4096, h) · (h, 16384)", *(f"{matmul[h]:.3f}" if h in matmul else "" for h in batches)])
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    lines += ["", f"and {1000 * cores.decode.beside:.2f} ms for each sequence beside its steps (prefill, bookkeeping)"]
    return lines


# ---------------------------------------------------------------- main


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--g", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="of conventional; async takes the second"
    )
    parser.add_argument("--target", type=float, default=0.7, help="reward whose time is compared")
    parser.add_argument("--n", type=int, nargs="+", default=[8, 32, 128], help="virtual cores")
    parser.add_argument("--lag", type=int, help="bound of the pipeline on virtual cores (default: the preset's)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/figures"))
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, G = 4: shows that all of it works")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.g, args.target = 1, 16, [4], 0.45
    args.prompts = 64 if args.quick else 512  # held out, four samples each
    args.batches = BATCHES[::5] if args.quick else BATCHES
    args.runs_dir = args.runs_dir.resolve()
    return args


def main() -> None:
    args, start = arguments(), time.monotonic()
    cfg = presets()[args.preset]()
    for folder in (args.runs_dir, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    systems = [
        System("pipeline", 1, cfg.actor.sequences, cfg.max_lag),
        System("async", args.g[min(1, len(args.g) - 1)]),
    ]
    systems += [System("conventional", g) for g in args.g]
    runs, decoders = {system: [] for system in systems}, Decoders(cfg, args.batches)
    for seed in range(args.seeds):  # in turns: whatever else the machine does it does to all
        for system in systems:
            runs[system].append(make_run(system, seed, cfg, decoders, args))
    decoders.close()
    draw_divergence(runs[systems[0]][0], args)
    compared_s = time.monotonic() - start
    predicted = {
        system: median(predict(cfg, of, args).tokens_per_time(system.begin(args.steps)) for of in found)
        for system, found in runs.items()
    }
    formula = {system: median(by_formula(cfg, of, args) for of in found) for system, found in runs.items()}
    ours = runs[systems[0]]
    decode = Decoding.mean([of.decode for found in runs.values() for of in found])
    cores = Cores(decode, seconds_per_token(ours), ours[0].lengths)
    lag = args.lag or cfg.max_lag
    in_flight = max(split.sequences * split.generating for split in (cores.split(cfg, n, lag) for n in args.n))
    wide = systems[0] if args.quick else System("pipeline", 1, in_flight, lag, wide=True)  # quick: a run less
    of_many = {wide: [make_run(wide, seed, cfg, None, args) for seed in range(args.seeds)]}
    of_many |= {system: runs[system] for system in systems[2:]}
    evaluate([run for found in {**runs, **of_many}.values() for run in found], args)
    many, rates = virtual(of_many, cores, cfg, args), rates_of(cores, matmul_table(args))
    draw_learning(runs, args.out / f"{args.preset}_learning.png")
    draw_lag(runs, args.out / f"{args.preset}_lag.png")
    draw_batch(runs, cores.decode, args.out / f"{args.preset}_batch.png")
    lengths = [length for run in ours for length in run.lengths]
    about = f"`python bench/figures.py {' '.join(sys.argv[1:])}`: preset {args.preset}, {args.steps} steps, "
    about += f"{args.seeds} seeds, {platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
    about += f"{minutes(runs):.0f} minutes of runs, {minutes({wide: of_many[wide]}):.0f} more for virtual cores; "
    about += f"longest completion {max(lengths)} tokens, mean {statistics.fmean(lengths):.1f}; medians (range)"
    text = "\n".join([about, "", *table_of(runs, predicted, formula, args.target), "", *many, "", *rates, ""])
    (args.out / f"{args.preset}.md").write_text(text)
    print(text)
    took = f"this call took {(time.monotonic() - start) / 60:.1f} minutes, {compared_s / 60:.1f} of them for the runs "
    print(took + "that are compared and the divergence, the rest for held-out success and the virtual cores")


if __name__ == "__main__":
    main()
