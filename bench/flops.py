"""Model FLOPs utilisation: what a training step computes by the model's definition, and what the device could have.

The trainer puts `training_flops` / seconds / `matmul_flops_per_s` into every step's metrics as `mfu`.
"""

import math
import time
from collections.abc import Iterable

import torch

from queues import MicroBatch


def training_flops(lm: torch.nn.Module, micro_batches: list[MicroBatch]) -> float:
    """Floating-point operations that forward and backward of these micro-batches take, by the model's definition.

        6 · (N · T  +  V · D · C  +  layers · heads · D_head · Σ S²)

    Two for each multiply-add, once forward and twice backward (PaLM, arXiv 2204.02311, appendix B). N: weights of the
    blocks, met by all T tokens; V · D: the head, met by the C completion tokens; causal attention inside sequences of
    length S has S²/2 pairs of tokens, each met twice. Recomputation (checkpointed blocks, the head's backward) is left
    out: it is not the model's.
    """
    config, embedding, head = lm.config, lm.get_input_embeddings().weight, lm.get_output_embeddings().weight
    outside = {id(embedding), id(head)}
    blocks = sum(p.numel() for p in lm.parameters() if p.ndim > 1 and id(p) not in outside)
    tokens = sum(len(m.mask) for m in micro_batches)
    completion_tokens = sum(int(m.mask.sum()) for m in micro_batches)
    starts = [(m.position_ids == 0).nonzero().squeeze(1) for m in micro_batches]
    ends = [torch.cat([start, start.new_tensor([len(m.mask)])]) for start, m in zip(starts, micro_batches, strict=True)]
    pairs = sum(float((e.diff().double() ** 2).sum()) for e in ends)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * head_dim * pairs
    return 6.0 * (blocks * tokens + head.numel() * completion_tokens + attention)


def matmul_flops_per_s(device: torch.device) -> float:
    """What a large square product reaches here: bfloat16 on a GPU, float32 on a CPU. The best of a few."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    a, best = torch.randn(n, n, dtype=dtype, device=device), math.inf
    for _ in range(6):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the product
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def utilisation(batches: Iterable[int], device: torch.device | str = "cpu") -> dict[int, float]:
    """U(h) as the paper measures it (arXiv 2509.19128, appendix A): the rate of the product (4096, h) · (h, 16384), h
    padded by up to 64 where that is faster, over the highest rate of any h. bfloat16 on a GPU, float32 on a CPU."""
    device = torch.device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    out, seconds = torch.empty(4096, 16384, dtype=dtype, device=device), {}
    for h in sorted({h + padding for h in batches for padding in (0, 16, 32, 64)}):
        a, b = torch.randn(4096, h, dtype=dtype, device=device), torch.randn(h, 16384, dtype=dtype, device=device)
        seconds[h] = math.inf
        for _ in range(3):
            start = time.perf_counter()
            torch.mm(a, b, out=out)[0, 0].item()  # waits for the product
            seconds[h] = min(seconds[h], time.perf_counter() - start)
    rates = {h: h / min(seconds[h + padding] for padding in (0, 16, 32, 64)) for h in batches}
    best = max(rates.values())
    return {h: rate / best for h, rate in rates.items()}
