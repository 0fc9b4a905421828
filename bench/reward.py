"""What a slow verifier costs the decode loop: generation with a verifier that sleeps a second a call, and with one that
does not, in turns of the same run.

    python bench/reward.py [--workers 512] [--turns 6] [--turn-s 12]

The real actor (on its core, as in the pipeline) and the real reward role with its worker processes, preset `tiny`; in
the place of preprocessor and trainer stands a loop that issues prompts for ever and takes what comes back. The dataset
row says how long its verifier sleeps, so the two kinds of turn differ in nothing else. Tokens are counted as their
samples come back verified, in the last two thirds of each turn: at its start the samples of the turn before come in.
"""

import argparse
import dataclasses
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

SLEEP_S = 1.0


def verifier(completion: str, row: dict) -> float:
    time.sleep(row["sleep_s"])
    return 0.0


def main() -> None:
    import torch

    import launch
    from config import Start, presets
    from queues import Prompt
    from transport import make_channels

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=512, help="at least the samples that are decoded in a second")
    parser.add_argument("--turns", type=int, default=6, help="of each kind")
    parser.add_argument("--turn-s", type=float, default=12.0)
    args = parser.parse_args()
    cfg, folder = presets()["tiny"](), Path(tempfile.mkdtemp())
    reward = dataclasses.replace(cfg.reward, function=f"{__file__}:verifier", workers=args.workers)
    cfg = dataclasses.replace(cfg, runs_dir=folder, reward=reward, eval=dataclasses.replace(cfg.eval, every=0))
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    channels, places = make_channels(cfg, context), launch.plan(cfg, cores, [])
    roles = {name: place for name, place in places.items() if name in ("actor-0", "reward")}
    running = launch.Roles(cfg, channels, Start(), roles, context)
    os.sched_setaffinity(0, places["reward"].cores)

    def turn(seconds: float, sleep_s: float) -> tuple[int, int]:
        """Tokens and samples that came back in its last two thirds."""
        nonlocal group_id
        tokens = samples = 0
        begin = time.monotonic()
        while (now := time.monotonic()) < begin + seconds:
            row = {"prompt": "", "answer": "", "sleep_s": sleep_s}
            while channels.prompts[0].put(Prompt(group_id, 0, cfg.group_size, PROMPTS[group_id % 4], row), timeout_s=0):
                group_id += 1
            group = channels.rollouts.get(timeout_s=0.005)
            if group is not None and now > begin + seconds / 3:
                tokens += sum(len(rollout.completion_ids) for rollout in group.rollouts)
                samples += len(group.rollouts)
            while channels.reports.get(timeout_s=0) is not None:
                pass
            if dead := running.dead():
                raise SystemExit(running.obituary(dead))
        return tokens, samples

    # 3+4=  7+5-3=  1+2+3+4=  9-5+2-1+7=
    PROMPTS = [[3, 10, 4, 12], [7, 10, 5, 11, 3, 12], [1, 10, 2, 10, 3, 10, 4, 12], [9, 11, 5, 10, 2, 11, 1, 10, 7, 12]]
    PROMPTS, group_id, rates = [torch.tensor(ids) for ids in PROMPTS], 0, {0.0: [], SLEEP_S: []}
    try:
        turn(60.0, 0.0)  # vLLM starts
        for _ in range(args.turns):
            for sleep_s, found in rates.items():
                tokens, samples = turn(args.turn_s, sleep_s)
                found.append((tokens / args.turn_s * 1.5, samples / args.turn_s * 1.5))
    finally:
        for process in running.processes.values():
            process.kill()
        shutil.rmtree(folder)
    (alone, samples), (slow, _) = (map(statistics.median, zip(*found, strict=True)) for found in rates.values())
    ratios = [b[0] / a[0] for a, b in zip(rates[0.0], rates[SLEEP_S], strict=True)]
    print(f"{platform.machine()}, {len(cores)} cores, {args.turns} turns of each, {args.turn_s:g} s")
    print(f"verifier at once: {alone:.0f} tokens/s, {samples:.0f} samples/s\nverifier sleeps {SLEEP_S:g} s: {slow:.0f}")
    print(f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} – {max(ratios):.3f})")


if __name__ == "__main__":
    main()
