"""The output head without its logits against the plain version: peak memory, time, loss and gradient.

    python bench/head.py [--tokens 8192] [--vocabulary 151936] [--width 896]

Each version runs in a process of its own; memory is what its resident set (on a GPU: the allocator) rises by between
the start of the forward pass and the end of the backward pass. Plain: log_softmax of all logits, and the entropy.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from policy import HeadLogprobs  # noqa: E402


def plain(hidden, weight, targets, temperature):
    log_softmax = torch.log_softmax(hidden @ weight.T / temperature if temperature != 1 else hidden @ weight.T, dim=-1)
    with torch.no_grad():
        entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    return log_softmax.gather(1, targets[:, None]).squeeze(1), entropy


def measure(version, tokens: int, vocabulary: int, width: int) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width).to(device).requires_grad_()
    weight = (0.03 * torch.randn(vocabulary, width)).to(device).requires_grad_()
    targets, advantages = torch.randint(0, vocabulary, (tokens,)).to(device), torch.randn(tokens).to(device)
    resident, peak, going = psutil.Process().memory_info, 0, True
    before = torch.cuda.memory_allocated() if device == "cuda" else resident().rss

    def watch() -> None:
        nonlocal peak
        while going:
            peak = max(peak, torch.cuda.max_memory_allocated() if device == "cuda" else resident().rss)
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    logprobs, entropy = version(hidden, weight, targets, 1.0)
    loss = (advantages * logprobs).sum() / tokens
    loss.backward()
    result = {"loss": loss.detach().cpu(), "entropy": entropy.mean().cpu()}
    result |= {"seconds": time.perf_counter() - start, "hidden": hidden.grad.cpu(), "weight": weight.grad.cpu()}
    going = False
    watcher.join()
    return result | {"bytes": peak - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        version = plain if args.run[0] == "plain" else HeadLogprobs.apply
        return torch.save(measure(version, args.tokens, args.vocabulary, args.width), args.run[1])
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("plain", "chunked"):
            path = f"{folder}/{name}"
            subprocess.run([sys.executable, *sys.argv, "--run", name, path], check=True)
            found[name] = torch.load(path)
    one, other = found["plain"], found["chunked"]
    print(f"{args.tokens} tokens, vocabulary {args.vocabulary}, width {args.width}, {torch.get_num_threads()} threads")
    for key, unit in (("bytes", 2**30), ("seconds", 1)):
        a, b = one[key] / unit, other[key] / unit
        print(f"{key.replace('bytes', 'GiB'):8s} plain {a:8.2f}   chunked {b:8.2f}   ratio {b / a:.3f}")
    for key in ("loss", "entropy"):
        print(f"{key:8s} plain {one[key]:.8f}   chunked {other[key]:.8f}")
    for key in ("hidden", "weight"):
        error = (one[key] - other[key]).abs().max() / one[key].abs().max()
        print(f"gradient of {key}: largest difference {error:.1e} of the largest entry")


if __name__ == "__main__":
    main()
