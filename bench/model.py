"""The paper's model of throughput (arXiv 2509.19128, appendix A): what a split of N accelerators can do, and its lag.

A *flash* is the least time in which an accelerator can make one token's forward pass: FLOPs a token / its peak FLOP/s.
Rates are in tokens a flash. H is the number of sequences in flight on each of the I accelerators that generate; the
other N - I train. U(h) is the share of its peak that an accelerator reaches when it decodes a batch of h.
"""

from dataclasses import dataclass

import numpy as np

H100_FLOPS_PER_S = 989e12  # bfloat16, dense
TRAIN_FLASHES = 4.92  # τ: to train on a token, from the figures that the paper prints for its case study

# U(h) of an H100. The paper gives no table. Its case study prints U(192) = 0.384 and, of conventional RL whose batches
# shrink from 134 to 0, a rate of 18.3, which is h / U(h) = 469 below 134. From there on it is filled in: linear as long
# as reading the weights takes longer than multiplying by them, then flat.
U_H100 = ((0, 0.0), (134, 0.286), (192, 0.384), (330, 0.62), (512, 0.68), (1024, 0.7))


def utilisation(h: np.ndarray, table=U_H100) -> np.ndarray:
    """U(h), linear between the points of the table and flat after them."""
    points, values = zip(*table, strict=True)
    return np.interp(h, points, values)


@dataclass(frozen=True)
class Split:
    """I of N accelerators generate, H sequences at a time each; rates in tokens a flash."""

    sequences: int  # H
    generating: int  # I
    r_gen: float
    r_train: float
    g_max: int  # largest lag of a token, in optimizer steps

    @property
    def r(self) -> float:
        return min(self.r_gen, self.r_train)


def pipeline(n: int, h: int, i: int, batch: int, longest_over_mean: float = 2.0, table=U_H100) -> Split:
    """r_gen = U(H)·I, r_train = (N − I)/τ, g_max = ceil(H·I·L / (L̄·B)). L/L̄ is 2 for lengths uniform on 1..L."""
    g_max = int(np.ceil(h * i * longest_over_mean / batch))
    return Split(h, i, float(utilisation(h, table) * i), (n - i) / TRAIN_FLASHES, g_max)


def best_split(n: int, batch: int, lag: float, longest_over_mean: float = 2.0, most: int = 1024) -> Split | None:
    """The (H, I) of the highest rate with g_max ≤ lag: all of them are tried. None if there is none."""
    i, h = np.arange(1, n)[:, None], np.arange(1, most + 1)[None, :]
    rates = np.minimum(utilisation(h) * i, (n - i) / TRAIN_FLASHES)  # (N - 1, most)
    rates = np.where(np.ceil(h * i * longest_over_mean / batch) <= lag, rates, -1.0)
    if n < 2 or rates.max() < 0:
        return None
    best_i, best_h = np.unravel_index(rates.argmax(), rates.shape)
    return pipeline(n, int(best_h) + 1, int(best_i) + 1, batch, longest_over_mean)
