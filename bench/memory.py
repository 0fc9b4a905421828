"""Resident memory of every role over a long run of preset `tiny`: is it flat once the run is warm?

    python bench/memory.py [--steps 500] [--warm-up 100]

Prints, for each role, MiB at the end of the warm-up, the largest after it, and their ratio.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--warm-up", type=int, default=100, help="optimizer steps")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "launch.py", "tiny", "--runs-dir", folder, "--steps", str(args.steps)]
        command += ["--show-every", "0", "--checkpoint-every", "50"]
        run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        launcher, metrics = psutil.Process(run.pid), Path(folder) / "tiny" / "metrics.jsonl"
        samples: list[tuple[int, dict[str, float]]] = []  # step, role -> MiB
        while run.poll() is None:
            time.sleep(1.0)
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            step = json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0
            try:
                roles = {child.name(): child.memory_info().rss / 2**20 for child in launcher.children()}
                samples.append((step, roles | {"launcher": launcher.memory_info().rss / 2**20}))
            except psutil.NoSuchProcess:  # the run is ending
                pass
        assert run.returncode == 0, "the run failed"
    warm = next(roles for step, roles in samples if step >= args.warm_up)
    print(f"{args.steps} optimizer steps, a checkpoint every 50")
    print(f"| role | MiB at step {args.warm_up} | largest after | ratio |")
    print("|---|---|---|---|")
    for role in ("actor-0", "reward-0", "preprocess", "train-0", "launcher"):
        later = [roles[role] for step, roles in samples if args.warm_up <= step < args.steps and role in roles]
        print(f"| {role} | {warm[role]:.0f} | {max(later):.0f} | {max(later) / warm[role]:.3f} |")


if __name__ == "__main__":
    main()
