"""Packing: the sequences of one optimizer step, of every length, into micro-batches of one row of tokens each.

Balanced over the trainer ranks first, then over as few micro-batches as hold them: every rank has the same number of
micro-batches and nearly the same number of tokens.
"""

import heapq
import itertools
from dataclasses import dataclass

import torch

from queues import MicroBatch, Rollout


@dataclass
class Sequence:
    """A rollout on its way into a micro-batch."""

    prompt_ids: torch.Tensor  # (P,)
    rollout: Rollout  # C completion tokens
    advantage: float
    weight: float  # of each of its completion tokens in the loss

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.rollout.completion_ids)


def balance(indices: list[int], lengths: list[int], parts: int) -> list[list[int]]:
    """Split sequences into parts of nearly equal tokens: the longest first, each to the part that has least."""
    heap = [(0, part) for part in range(parts)]  # tokens, part
    split: list[list[int]] = [[] for _ in heap]
    for i in sorted(indices, key=lambda i: -lengths[i]):
        tokens, part = heap[0]
        split[part].append(i)
        heapq.heapreplace(heap, (tokens + lengths[i], part))
    return split


def pack(lengths: list[int], max_tokens: int, ranks: int) -> list[list[list[int]]]:
    """Indices of sequences -> [rank][micro-batch][index], every rank with the same number of micro-batches.

    Sequences are balanced over the ranks, then each rank's over as few micro-batches as hold them all. A sequence over
    `max_tokens` has a micro-batch to itself; micro-batches may be empty.
    """
    by_rank = balance(range(len(lengths)), lengths, ranks)
    least = max(-(-sum(min(lengths[i], max_tokens) for i in rank) // max_tokens) for rank in by_rank)
    for count in itertools.count(max(1, least)):
        dealt = [balance(rank, lengths, count) for rank in by_rank]
        if all(len(m) <= 1 or sum(lengths[i] for i in m) <= max_tokens for rank in dealt for m in rank):
            return dealt


def make_micro_batch(sequences: list[Sequence]) -> MicroBatch:
    """Sequences end to end in one row of T tokens; for none, one unmasked token, so that every rank has work."""
    if not sequences:
        ids, values = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
        return MicroBatch(ids, ids, ids.bool(), values, ids, values, values, ref_logprobs=None)
    lengths = torch.tensor([[len(s.prompt_ids), len(s.rollout.completion_ids)] for s in sequences])  # (S, 2): P, C
    mask = torch.tensor([False, True]).repeat(len(sequences)).repeat_interleave(lengths.flatten())  # (T,)

    def at_completions(values: list[torch.Tensor] | list[float]) -> torch.Tensor:
        """(C,) or a number for each sequence -> (T,)"""
        numbers = isinstance(values[0], float)
        values = torch.tensor(values).repeat_interleave(lengths[:, 1]) if numbers else torch.cat(values)
        return values.new_zeros(len(mask)).masked_scatter_(mask, values)

    return MicroBatch(
        input_ids=torch.cat([ids for s in sequences for ids in (s.prompt_ids, s.rollout.completion_ids)]),
        position_ids=torch.cat([torch.arange(n) for n in lengths.sum(dim=1).tolist()]),
        mask=mask,
        logprobs=at_completions([s.rollout.logprobs for s in sequences]),
        versions=at_completions([s.rollout.versions for s in sequences]),
        advantages=at_completions([s.advantage for s in sequences]),
        weights=at_completions([s.weight for s in sequences]),
        ref_logprobs=None,
    )
