"""What a run shows: its lines on the screen, and from the files that it leaves its summary and reward.png (reward and
held-out success against wall time, lag and ESS below).

python bench/report.py runs/tiny
"""

import itertools
import json
import math
import statistics
import sys
from collections import Counter
from pathlib import Path


def read_lines(path: Path) -> list[dict]:
    """Of a .jsonl file that may not be there; a last line without an end is half written and left out."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


TITLES = " step   time reward    loss   grad   ESS  lag max length gen tok/s train tok/s   wait"
LINE = (
    "{step:5d}{time_s:6.0f}s{reward:7.3f}{loss:8.4f}{grad_norm:7.3f}{ess:6.3f}{lag_mean:5.1f}{lag_max:4d}"
    "{completion_tokens_mean:7.1f}{generated_tokens_per_s:10.0f}{trained_tokens_per_s:12.0f}{wait_s:6.2f}s"
)


def show_step(metrics: dict) -> str:
    """One line under TITLES."""
    return LINE.format_map({key: math.nan if value is None else value for key, value in metrics.items()})


def show_eval(result: dict) -> str:
    """`held-out success 81.6% (76.4 – 85.9), greedy 90.2% (…), version 50`, the 95% intervals in brackets."""
    kinds = [(name, key) for name, key in (("", "eval_accuracy"), ("greedy ", "eval_greedy")) if key in result]
    shown = [f"{n}{result[k]:.1%} ({100 * result[k + '_low']:.1f} – {100 * result[k + '_high']:.1f})" for n, k in kinds]
    counted = [f", {result[key]} {what}" for key, what in (("eval_failed", "calls failed"),) if result.get(key)]
    return f"  held-out success {', '.join(shown) or 'unknown'}{''.join(counted)}, version {result['eval_version']}"


def show_rollout(rollout: dict) -> str:
    """A rollout in which every token stands under the version of the weights that sampled it: v3[7+5=12] v4[-3=9#9]."""
    tokens = zip(rollout["versions"], rollout["tokens"], strict=True)
    runs = itertools.groupby(tokens, key=lambda pair: pair[0])
    text = " ".join(f"v{version}[{''.join(token for _, token in run)}]" for version, run in runs)
    about = f"{rollout['prompt']!r}, answer {rollout['answer']!r}, reward {rollout['reward']}"
    return f"  ┌ trained at step {rollout['step']}: {about}\n  └ {text}"


def summary(run_dir: Path) -> str:
    """The run in a few lines. The trainer's times leave out the first step, which waits for the engine to start."""
    steps, evals = read_lines(run_dir / "metrics.jsonl"), read_lines(run_dir / "evals.jsonl")
    text = ""
    for title, key in (("held-out success", "eval_accuracy"), ("  greedy", "eval_greedy")):
        found = [
            f"{e[key]:.1%} ({100 * e[key + '_low']:.1f} – {100 * e[key + '_high']:.1f}, version {e['eval_version']})"
            for e in evals
            if key in e
        ]
        if found:
            first_and_last = " -> ".join(dict.fromkeys((found[0], found[-1])))
            text += f"  {title:17s} {first_and_last}, {evals[-1]['eval_prompts']} prompts\n"
    if len(steps) > 1:
        total = Counter()
        for step in steps[1:]:
            total.update({key: step[key] for key in ("samples", "wait_s")})
        for step in steps:
            total.update({key: step[key] for key in ("update_stall_s", "actor_idle_s", "actor_running_s")})
        ess = [step["ess"] for step in steps if step["ess"] is not None] or [math.nan]  # None: a skipped step
        training_s = steps[-1]["time_s"] - steps[0]["time_s"]
        actors_s = total["actor_running_s"] or 1.0
        lag_mean, lag_max = statistics.fmean(s["lag_mean"] for s in steps), max(step["lag_max"] for step in steps)
        stall_s, idle_s = total["update_stall_s"], total["actor_idle_s"]
        text += (
            f"  reward            {steps[0]['reward']:.3f} -> {steps[-1]['reward']:.3f}\n"
            f"  speed             {total['samples'] / training_s:.0f} samples/s\n"
            f"  lag               mean {lag_mean:.2f}, max {lag_max} steps\n"
            f"  ESS               mean {statistics.fmean(ess):.3f}, min {min(ess):.3f}\n"
            f"  update stall      {stall_s / actors_s:.2%} of the actors' time ({1000 * stall_s:.0f} ms in all)\n"
            f"  idle              actors {idle_s / actors_s:.1%}, trainer {total['wait_s'] / training_s:.1%}\n"
        )
    return text + f"  everything is in  {run_dir}"


def draw(run_dir: Path) -> None:
    """Write `reward.png`, unless the run has not made a step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps, evals = read_lines(run_dir / "metrics.jsonl"), read_lines(run_dir / "evals.jsonl")
    if not steps:
        return

    def line(axes, rows: list[dict], key: str, style: str, color: str, label: str) -> None:
        axes.plot([row["time_s"] for row in rows], [row[key] for row in rows], style, color=color, label=label)

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2))
    right = bottom.twinx()
    line(top, steps, "reward", "-", "lightsteelblue", "reward, sampled for training")
    for key, color, how in (("eval_accuracy", "tab:red", "sampled"), ("eval_greedy", "tab:purple", "greedy")):
        if not (rows := [row for row in evals if key in row]):
            continue
        line(top, rows, key, "o-", color, f"held-out success, {how}")
        x, edges = [row["time_s"] for row in rows], [[row[f"{key}_{end}"] for row in rows] for end in ("low", "high")]
        top.fill_between(x, *edges, color=color, alpha=0.15, linewidth=0)
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


if __name__ == "__main__":
    print(summary(Path(sys.argv[1])))
    draw(Path(sys.argv[1]))
