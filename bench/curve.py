"""reward.png of a run: reward and held-out success against wall time, lag and ESS below.

python bench/curve.py runs/tiny
"""

import json
import sys
from pathlib import Path


def draw(run_dir: Path) -> Path | None:
    """Read `metrics.jsonl` and write `reward.png` beside it; None if the run has not made a step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not (run_dir / "metrics.jsonl").exists():
        return None
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evals = [step for step in steps if "eval_accuracy" in step]

    def line(axes, rows: list[dict], key: str, style: str, color: str, label: str) -> None:
        axes.plot([row["time_s"] for row in rows], [row[key] for row in rows], style, color=color, label=label)

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2))
    right = bottom.twinx()
    line(top, steps, "reward", "-", "lightsteelblue", "reward, sampled for training")
    line(top, evals, "eval_accuracy", "o-", "tab:red", "held-out success, sampled")
    line(bottom, steps, "lag_max", ":", "tab:green", "lag, max")
    line(bottom, steps, "lag_mean", "-", "tab:green", "lag, mean")
    line(right, steps, "ess", "-", "tab:orange", "ESS")
    top.set(ylabel="success rate", ylim=(0, 1.02), title=f"{run_dir.name}: {len(steps)} optimizer steps")
    bottom.set(xlabel="seconds since the launch", ylabel="lag (optimizer steps)", ylim=(0, None))
    right.set(ylabel="ESS", ylim=(0, 1.05))
    for axes, place in ((top, "lower right"), (bottom, "lower left"), (right, "lower right")):
        axes.legend(loc=place)
        if axes is not right:
            axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(run_dir / "reward.png", dpi=120)
    plt.close(figure)
    return run_dir / "reward.png"


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
