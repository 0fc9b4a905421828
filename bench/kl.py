"""How far from on-policy is data that several policies have written? And a picture of one rollout, token by token.

    python bench/kl.py [--preset tiny] [--steps 90] [--g-max 16] [--run FOLDER] [--quick]

First a run of the preset that keeps a checkpoint of every version (or --run, one that has). Then, at three stages v of
its training and for lags g up to g-max, an engine samples the same prompts
    conventional   by version v alone
    kept           in flight: from v on towards v + g, a version every L/g-max tokens (the first after two of those, so
                   that the last two hardly sample), with the KV cache that older versions have left
    recomputed     the same, with the cache of running sequences computed again at every update
and π of version v + g gives the KL divergence of what was sampled from the policy that would train on it, as the paper
does in its figure 7 (arXiv 2509.19128, section 4). L is the longest completion. Per token, with d = log π - log μ, the
estimate is e^d - 1 - d: its mean is the divergence, and it is never negative.
"""

import argparse
import html
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from bench.model import finish, pyplot  # noqa: E402
from bench.report import read_lines  # noqa: E402
from config import Config, presets  # noqa: E402
from model_files import load_tokenizer  # noqa: E402
from placement import Place  # noqa: E402

WAYS = ("conventional", "kept", "recomputed")


def train(cfg: Config, folder: Path, steps: int, preset: str) -> None:
    """A run with a checkpoint of every step, unless it is there."""
    if len(read_lines(folder / "metrics.jsonl")) >= steps:
        return
    argv = ["--runs-dir", str(folder.parent), "--name", folder.name, "--overwrite", "--steps", str(steps)]
    argv += ["--checkpoint-every", "1", "--keep-checkpoints", str(steps), "--eval.every", "0", "--log", "none"]
    done = subprocess.run([sys.executable, "launch.py", preset, *argv], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the run ended with exit code {done.returncode}:\n{done.stdout[-3000:]}")


class Versions:
    """The policy at every version of a run."""

    def __init__(self, cfg: Config, folder: Path):
        import torch

        from policy import load_policy

        self.cfg, self.folder, self.at = cfg, folder, 0
        self.policy = load_policy(cfg.model, torch.float32, torch.device("cpu"))
        self.initial = {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}

    def load(self, version: int):
        """The policy of that version (one object for all)."""
        import torch.distributed.checkpoint as dcp

        state = {"model": self.policy.state_dict()}
        if version == 0:
            self.policy.load_state_dict(self.initial)
        elif version != self.at:
            dcp.load(state, checkpoint_id=self.folder / "checkpoints" / f"step-{version}", no_dist=True)
            self.policy.load_state_dict(state["model"])
        self.at = version
        return self.policy

    def logprobs(self, version: int, prompts: list[list[int]], rollouts: list) -> Iterator:
        """Log π and log μ of every completion token: pairs of tensors, a micro-batch each."""
        import torch

        from packing import Sequence, make_micro_batch, pack

        policy = self.load(version)
        pairs = zip(prompts, rollouts, strict=True)
        sequences = [Sequence(torch.tensor(prompt), rollout, 0.0, 1.0) for prompt, rollout in pairs]
        for indices in pack([len(s) for s in sequences], 2048, ranks=1)[0]:
            micro_batch = make_micro_batch([sequences[i] for i in indices])
            with torch.no_grad():
                yield policy(micro_batch, self.cfg.actor.temperature)[0], micro_batch.logprobs[micro_batch.mask]


@dataclass
class Sampler:
    """An engine whose weights we change."""

    cfg: Config
    versions: Versions

    def __post_init__(self):
        from actor import Engine
        from model_files import model_layout
        from weights import SharedMemoryWeights

        self.layout = model_layout(self.cfg.model)
        self.weights, self.published = SharedMemoryWeights(self.layout, "float32"), 0
        self.engine = Engine(self.cfg, seed=0, device="cpu")
        self.engine.join_weight_channel(self.weights)

    def use(self, version: int) -> None:
        """The weights of a version, in the middle of whatever the engine is doing."""
        named = dict(self.versions.load(version).lm.named_parameters(remove_duplicate=False))
        self.published += 1
        self.weights.publish(self.published, ((name, named[name].detach()) for name in self.layout))
        while self.engine.staged < self.published:
            self.engine.look_for_weights()
            self.engine.stage_weights()
        self.engine.load_weights()

    def sample(self, prompts: list[list[int]], first: int, last: int, every: float, kv: str) -> list:
        """Completions, with log μ, of prompts that all start at version `first`; in flight up to `last`."""
        self.engine.kv = "keep"
        self.use(first)
        self.engine.kv, requests, done, tokens, version = kv, {}, {}, 0, first
        for i, prompt in enumerate(prompts):
            requests[self.engine.submit(prompt, self.cfg.actor.temperature)] = i
        while len(done) < len(prompts):
            done |= {requests[request]: rollout for request, rollout in self.engine.step().items()}
            tokens += 1
            if version < last and tokens >= (version - first + 2) * every:
                version += 1
                self.use(version)
        return [done[i] for i in range(len(prompts))]


def divergence(versions: Versions, version: int, prompts: list[list[int]], rollouts: list) -> float:
    """KL of what was sampled from the policy of `version`, a token."""
    estimates = []
    for pi, mu in versions.logprobs(version, prompts, rollouts):
        d = pi - mu
        estimates += (d.exp() - 1 - d).tolist()
    return statistics.fmean(estimates)


def measure(cfg: Config, folder: Path, args) -> dict[str, dict[str, list[float]]]:
    """Stage -> way -> KL at every lag of `args.lags`."""
    from data import encoded_prompts

    tokenizer, versions = load_tokenizer(cfg.model), Versions(cfg, folder)
    rows = encoded_prompts(cfg, cfg.data, tokenizer, Counter(), seed=12345)
    prompts = [prompt_ids for _, prompt_ids, _ in itertools.islice(rows, args.prompts)]
    wide = replace(cfg, actor=replace(cfg.actor, sequences=args.prompts))
    sampler, found, every = Sampler(wide, versions), {}, cfg.actor.max_completion_tokens / args.g_max
    for stage in args.stages:
        found[str(stage)] = curves = {way: [] for way in WAYS}
        alone = sampler.sample(prompts, stage, stage, every, "keep")
        for lag in args.lags:
            curves["conventional"].append(divergence(versions, stage + lag, prompts, alone))
            for way, kv in (("kept", "keep"), ("recomputed", "recompute")):
                mixed = sampler.sample(prompts, stage, stage + lag, every, kv)
                curves[way].append(divergence(versions, stage + lag, prompts, mixed))
            print(stage, lag, *(f"{curves[way][-1]:.5f}" for way in WAYS), flush=True)
    return found


def draw(found: dict, args, path: Path) -> None:
    figure, axes = pyplot().subplots(1, len(found), figsize=(5 * len(found), 4), sharey=True)
    for ax, (stage, curves) in zip(axes, found.items(), strict=True):
        for way, values in curves.items():
            ax.plot(args.lags, values, "o-", ms=3, label=way)
        ax.set(xlabel="lag of the oldest tokens (optimizer steps)", title=f"from version {stage}")
    axes[0].set(ylabel="KL a token, sampled from current policy", yscale="log")
    finish(figure, axes, path)


# ---------------------------------------------------------------- one rollout


def most_versions(rollouts: list[dict]) -> dict:
    """The rollout that most versions have written, and of those the longest; one that fits a screen, if there is."""
    fit = [line for line in rollouts if len(line["tokens"]) <= 128]
    return max(fit or rollouts, key=lambda line: (len(set(line["versions"])), len(line["tokens"])))


def with_ratios(cfg: Config, folder: Path, rollout: dict) -> dict:
    """`rollout` and, a token, its lag and its ratio π/μ, π being the policy of the step that trained on it."""
    import torch

    from data import encoded_prompts
    from queues import Rollout

    tokenizer = load_tokenizer(cfg.model)
    rows = encoded_prompts(cfg, cfg.data, tokenizer, Counter(), seed=cfg.seed)
    prompt_ids = next(ids for number, ids, _ in rows if number == rollout["group_id"])
    current = rollout["step"] - 1
    kept = Rollout(*(torch.tensor(rollout[key]) for key in ("token_ids", "logprobs", "versions")), "stop")
    ((pi, mu),) = Versions(cfg, folder).logprobs(current, [prompt_ids], [kept])
    ratios = (pi - mu).exp().tolist()
    return rollout | {"lags": [current - version for version in rollout["versions"]], "ratios": ratios}


def colors_of(rollout: dict) -> dict[int, str]:
    from matplotlib.colors import to_hex

    known = sorted(set(rollout["versions"]))
    shades = pyplot().cm.viridis([0.2 + 0.75 * i / max(1, len(known) - 1) for i in range(len(known))])
    shades = 0.55 * shades + 0.45  # paler: black text is to be read on all of them
    return {version: to_hex(shade) for version, shade in zip(known, shades, strict=True)}


def rollout_html(rollout: dict) -> str:
    """A page of its own: every token on the colour of the version that sampled it; its numbers below."""
    colors, cells = colors_of(rollout), []
    for token, version, lag, ratio in zip(*(rollout[k] for k in ("tokens", "versions", "lags", "ratios")), strict=True):
        numbers = f"v{version}<br>lag {lag}<br>{ratio:.3f}"
        cells.append(f'<td style="background:{colors[version]}"><b>{html.escape(token)}</b><br>{numbers}</td>')
    rows = "".join(f"<tr>{''.join(cells[i : i + 16])}</tr>" for i in range(0, len(cells), 16))
    about = f"prompt {rollout['prompt']!r}, answer {rollout['answer']!r}, reward {rollout['reward']}, "
    about += f"trained at step {rollout['step']}"
    style = "body{font-family:sans-serif}td{padding:4px 7px;text-align:center;font-size:11px}b{font:15px monospace}"
    what = "Each token stands on the colour of the version that sampled it, above its lag and its ratio π/μ."
    head = f'<!doctype html><meta charset="utf-8"><title>One rollout</title><style>{style}</style>'
    return f"{head}<p>{html.escape(about)}</p><table>{rows}</table><p>{what}</p>\n"


def draw_rollout(rollout: dict, path: Path) -> None:
    plt, colors, per_row = pyplot(), colors_of(rollout), 16
    count = len(rollout["tokens"])
    rows = -(-count // per_row)
    figure, ax = plt.subplots(figsize=(0.75 * per_row, 0.95 * rows + 0.5))
    for i, token in enumerate(rollout["tokens"]):
        x, y = i % per_row, -(i // per_row)
        version = rollout["versions"][i]
        ax.add_patch(plt.Rectangle((x, y - 0.9), 0.96, 0.86, color=colors[version]))
        ax.text(x + 0.48, y - 0.25, token, ha="center", va="center", family="monospace", weight="bold")
        numbers = f"v{version}, lag {rollout['lags'][i]}\n{rollout['ratios'][i]:.3f}"
        ax.text(x + 0.48, y - 0.62, numbers, ha="center", va="center", fontsize=7)
    about = f"{rollout['prompt']}…  answer {rollout['answer']}, reward {rollout['reward']}, step {rollout['step']}: "
    ax.set(xlim=(0, per_row), ylim=(-rows, 0.05))
    ax.set_title(about + "version that sampled it, lag, ratio π/μ", fontsize=9)
    ax.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--g-max", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/figures"))
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--run", type=Path, help="folder of a run of the preset that kept the checkpoint of every step")
    parser.add_argument("--quick", action="store_true", help="few steps and lags: shows that all of it works")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.g_max, args.prompts = 12, 4, 32
    if args.run:
        args.steps = len(read_lines(args.run / "metrics.jsonl"))
    most = args.steps - args.g_max
    args.stages = sorted({most // 8, most // 2, most})
    args.lags = sorted({0, 1, *range(2, args.g_max, max(1, args.g_max // 8)), args.g_max})
    args.runs_dir = args.runs_dir.resolve()
    cfg, folder = presets()[args.preset](), args.run or args.runs_dir / f"{args.preset}-versions-{args.steps}"
    train(cfg, folder, args.steps, args.preset)
    Place("cpu", tuple(sorted(os.sched_getaffinity(0))[:1]), 1).enter()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    args.out.mkdir(parents=True, exist_ok=True)
    rollout = with_ratios(cfg, folder, most_versions(read_lines(folder / "rollouts.jsonl")))
    (args.out / f"{args.preset}_rollout.html").write_text(rollout_html(rollout))
    draw_rollout(rollout, args.out / f"{args.preset}_rollout.png")
    kept = folder / f"kl-{args.g_max}-{args.prompts}.json"  # a second call only draws
    if not kept.exists():
        kept.write_text(json.dumps({"lags": args.lags} | measure(cfg, folder, args)) + "\n")
    shutil.copy(kept, args.out / f"{args.preset}_kl.json")
    found = json.loads(kept.read_text())
    del found["lags"]
    draw(found, args, args.out / f"{args.preset}_kl.png")


if __name__ == "__main__":
    main()
