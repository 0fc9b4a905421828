"""The paper's model of throughput at equal lag (arXiv 2509.19128, appendix A), as pure functions.

    python bench/model.py               # the case study, throughput against g_max, where it stops helping; PNGs
    python bench/model.py --measure     # U(h) of this machine as the paper measures it, and the case study with it

A *flash* is the least time in which an accelerator can make one token's forward pass: FLOPs a token / its peak FLOP/s.
Rates are in tokens a flash. H is the number of sequences in flight on each of the I accelerators that generate; the
other N - I train. U(h) is the share of its peak that an accelerator reaches when it decodes a batch of h, τ the time to
train on a token. B samples make a batch, S = B·G a phase of conventional RL; K tokens are in a phase, h(l) of them the
l-th of their sequence; L is the longest length, L̄ the mean. The equations, numbered here:

    conventional  (1) r_gen = K / Σ_l [(h(l)/N) / U(h(l)/N)]  (2) r_train = N/τ  (3) r = 1 / (1/r_gen + 1/r_train)
                  (4) lag ≤ G - 1
    pipeline      (5) r_gen = U(H)·I  (6) r_train = (N - I)/τ  (7) r = min(r_gen, r_train)
                  (8) lag ≤ g_max = ceil(H·I·L / (L̄·B))
    at equal lag  (9) the highest r of (7) over all (H, I) whose (8) is at most (4)

Lengths are given as `survivors`: the share of sequences that are longer than 0, 1, 2 .. tokens.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"

H100_FLOPS_PER_S = 989e12  # bfloat16, dense
TRAIN_FLASHES = 4.92  # τ, from the figures that the paper prints for its case study: 128 / 26.02 = 84 / 17.08

# U(h) of an H100. The paper gives no table. Its case study prints U(192) = 0.384 and, of conventional RL whose batches
# shrink from 134 to 0, a rate of 18.3, which is h / U(h) = 469 below 134. From there on it is filled in: linear as long
# as reading the weights takes longer than multiplying by them, then flat.
U_H100 = ((0, 0.0), (134, 0.286), (192, 0.384), (330, 0.62), (512, 0.68), (1024, 0.7))


def utilisation(h: np.ndarray, table=U_H100) -> np.ndarray:
    """U(h), linear between the points of the table and flat after them."""
    points, values = zip(*table, strict=True)
    return np.interp(h, points, values)


def uniform(longest: int) -> np.ndarray:
    """Survivors of lengths uniform on 1..L, the case study's: (L, L - 1 .. 1) / L."""
    return np.arange(longest, 0, -1) / longest


def equal(length: int) -> np.ndarray:
    return np.ones(length)


def long_tailed(longest: int, mean: float) -> np.ndarray:
    """Lengths geometric, cut at L: most are short, a few go on to the limit. `mean` is that before the cut."""
    return (1 - 1 / mean) ** np.arange(longest)


def survivors_of(lengths) -> np.ndarray:
    """Measured lengths -> the share that is longer than 0, 1, 2 .. tokens."""
    counts = np.bincount(np.asarray(lengths))
    return 1 - np.cumsum(counts)[:-1] / counts.sum()


@dataclass(frozen=True)
class Rate:
    """Rates in tokens a flash."""

    r_gen: float
    r_train: float
    r: float
    max_lag: int  # of a token, in optimizer steps


@dataclass(frozen=True)
class Split(Rate):
    """I of N accelerators generate, H sequences at a time each. `max_lag` is g_max."""

    sequences: int  # H
    generating: int  # I


def conventional(n: int, batch: int, g: int, survivors: np.ndarray, table=U_H100, tau=TRAIN_FLASHES) -> Rate:
    """Equations (1) to (4): S = B·G sequences begin together on N accelerators, h(l) are unfinished after l steps."""
    h = batch * g * survivors / n  # (L,) a batch of an accelerator; below 1: some have none, and none is faster for it
    h = h[h > 0]
    r_gen = n * h.sum() / decode_flashes(h, table).sum()
    r_train = n / tau
    return Rate(float(r_gen), r_train, float(1 / (1 / r_gen + 1 / r_train)), g - 1)


def decode_flashes(h: np.ndarray, table=U_H100) -> np.ndarray:
    """Flashes of one decode step of h sequences: h / U(h)."""
    h = np.maximum(h, 1)  # a step of less than one sequence does not exist
    return h / utilisation(h, table)


def pipeline(n: int, h: int, i: int, batch: int, longest_over_mean=2.0, table=U_H100, tau=TRAIN_FLASHES) -> Split:
    """Equations (5) to (8). L/L̄ = 2 for uniform lengths."""
    g_max = int(np.ceil(h * i * longest_over_mean / batch))
    r_gen, r_train = float(utilisation(h, table) * i), (n - i) / tau
    return Split(r_gen, r_train, min(r_gen, r_train), g_max, h, i)


def best_split(
    n: int, batch: int, lag: float, longest_over_mean=2.0, table=U_H100, tau=TRAIN_FLASHES, most: int = 1024
) -> Split | None:
    """Equation (9): the (H, I) of the highest rate with g_max ≤ lag. All I < N and H ≤ `most` are tried. None if there
    is none."""
    best, u = (-1.0, 0, 0), utilisation(np.arange(1, most + 1), table)
    h = np.arange(1, most + 1)
    for first in range(1, n, 1024):  # so many I at a time: 16,384 accelerators would take gigabytes at once
        i = np.arange(first, min(n, first + 1024))[:, None]
        rates = np.minimum(u * i, (n - i) / tau)  # (I, H)
        rates[np.ceil(h * i * longest_over_mean / batch) > lag] = -1.0
        at = rates.argmax()
        best = max(best, (float(rates.flat[at]), *(int(x) for x in np.unravel_index(at, rates.shape)), first))
    if best[0] < 0:
        return None
    _, row, column, first = best
    return pipeline(n, column + 1, first + row, batch, longest_over_mean, table, tau)


def gain(n: int, batch: int, lag: int, survivors: np.ndarray, table=U_H100, tau=TRAIN_FLASHES) -> float:
    """Throughput of the best pipeline over that of conventional RL with the same maximum lag; nan if there is none."""
    ours = best_split(n, batch, lag, len(survivors) / survivors.sum(), table, tau)
    return ours.r / conventional(n, batch, lag + 1, survivors, table, tau).r if ours else np.nan


# ---------------------------------------------------------------- what it says


def case_study() -> list[str]:
    """Section "case study" of the paper: N = 128, B = 128, lengths uniform; all that it prints."""
    ours, theirs = pipeline(128, 192, 44, 128), conventional(128, 128, 134, uniform(8192))
    rows = [
        ("pipeline, H = 192, I = 44: g_max", ours.max_lag, "≈ 133"),
        ("  r_gen", ours.r_gen, "16.9"),
        ("  r_train", ours.r_train, "17.08"),
        ("  r", ours.r, "16.9"),
        ("conventional, G = 134: max lag", theirs.max_lag, "133"),
        ("  r_gen", theirs.r_gen, "18.3"),
        ("  r_train", theirs.r_train, "26.02"),
        ("  r", theirs.r, "10.7"),
        ("ratio", ours.r / theirs.r, "1.57"),
    ]
    lines = ["| case study: N = 128, B = 128, lengths uniform on 1..L | here | printed |", "|---|---|---|"]
    return lines + [f"| {name} | {value:.4g} | {printed} |" for name, value, printed in rows]


def measured() -> list[str]:
    """U(h) of this machine's GPU, or its CPU, and the gain of the case study with it."""
    import torch

    from bench.flops import utilisation as measure

    u = measure([1, 4, 16, 64, 128, 256, 512], "cuda" if torch.cuda.is_available() else "cpu")
    lines = ["| h | " + " | ".join(map(str, u)) + " |", "|---" * (1 + len(u)) + "|"]
    lines += ["| U(h) | " + " | ".join(f"{share:.3f}" for share in u.values()) + " |", ""]
    ratio = gain(128, 128, 133, uniform(8192), ((0, 0.0), *u.items()))
    return [*lines, f"128 of these, B = 128, lag ≤ 133, τ = {TRAIN_FLASHES}: pipeline ÷ conventional = {ratio:.2f}"]


def draw_lag(path: Path) -> None:
    """Throughput against g_max, for the case study."""
    plt = pyplot()
    lags = np.unique(np.geomspace(4, 512, 40).astype(int))
    figure, axes = plt.subplots(figsize=(7, 4))
    ours = [best_split(128, 128, lag) for lag in lags]
    axes.plot(lags, [split.r if split else np.nan for split in ours], "o-", ms=3, label="pipeline, best (H, I)")
    theirs = [conventional(128, 128, lag + 1, uniform(8192)).r for lag in lags]
    axes.plot(lags, theirs, "o-", ms=3, label="conventional, G = g_max + 1")
    axes.set(xscale="log", xlabel="maximum lag (optimizer steps)", ylabel="tokens a flash", ylim=(0, None))
    axes.set_title("128 H100, B = 128, lengths uniform (appendix A)")
    finish(figure, axes, path)


PROFILES = {
    "equal lengths": equal(8192),
    "uniform on 1..L": uniform(8192),
    "long tail, L = 13 means": long_tailed(8192, 640),
}


def draw_limits(path: Path) -> list[str]:
    """Where it stops helping: the gain at equal lag against the number of accelerators, for three length profiles.
    B = 1,024 and lag 32 stay; so with N the batch of an accelerator shrinks."""
    plt = pyplot()
    counts = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    figure, axes = plt.subplots(figsize=(7, 4))
    lines = ["| gain at lag ≤ 32, B = 1,024 | " + " | ".join(f"N = {n:,}" for n in counts) + " |"]
    lines.append("|---|" + "---|" * len(counts))
    for name, survivors in PROFILES.items():
        gains = [gain(n, 1024, 32, survivors) for n in counts]
        axes.plot(counts, gains, "o-", ms=3, label=name)
        lines.append(f"| {name} | " + " | ".join(f"{g:.2f}" for g in gains) + " |")
    axes.axhline(1, color="gray", lw=0.8)
    axes.set(xscale="log", xlabel="accelerators", ylabel="pipeline ÷ conventional, same lag", ylim=(0, None))
    axes.set_title("where it stops helping: B = 1,024, lag ≤ 32, H100")
    finish(figure, axes, path)
    return lines


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def finish(figure, axes, path: Path) -> None:
    for one in np.atleast_1d(axes):
        one.grid(alpha=0.3)
        one.legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if "--measure" in sys.argv:
        print(*measured(), sep="\n")
        sys.exit()
    print(*case_study(), "", *draw_limits(RESULTS / "model_limits.png"), sep="\n")
    draw_lag(RESULTS / "model_lag.png")
