"""Evaluation: when one is due, which samples it takes, and what came of it.

A held-out prompt is sampled greedily once (pass@1) and k times at a temperature (the mean). All samples of an
evaluation come from exactly one version: actor 0, on which they run between training sequences, holds its weights still
until the last one is done. Samples that straddled an update would belong to no policy that can be kept or reported, and
if each finished on the weights it had begun with, the engine would need two copies. Holding still costs some lag, which
admission bounds as ever. One actor and not all: two would hardly ever have the same version.
"""

import itertools
import math
import statistics
from collections import Counter

import torch

from config import Config, ConfigError, Start
from data import EVAL_SEED, encoded_prompts
from queues import Prompt, Rollout, RolloutGroup

Z = 1.96  # 95%


def confidence_interval(values: list[float]) -> tuple[float, float]:
    """95% interval of the mean of independent values, one a prompt.

    Values within 0..1: Wilson's interval (1927), which is right for few values and close to 0 and 1 as well, with the
    number of zeros and ones that would have the same variance (the effective sample size of Korn and Graubard, 1998):
    a prompt's mean over k samples varies less than one sample. Otherwise the normal approximation.

    >>> confidence_interval([1.0] * 8 + [0.0] * 2)
    (0.478, 0.944)  # about
    """
    n, mean = len(values), statistics.fmean(values)
    variance = statistics.variance(values) if n > 1 else 0.0
    if min(values) < 0 or max(values) > 1:
        half = Z * math.sqrt(variance / n)
        return mean - half, mean + half
    n = mean * (1 - mean) / (variance / n) if variance else n
    middle, half = mean + Z**2 / (2 * n), Z * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    return max(0.0, (middle - half) / (1 + Z**2 / n)), min(1.0, (middle + half) / (1 + Z**2 / n))


class Evaluation:
    """The held-out prompts and the evaluation that is running, if one is."""

    def __init__(self, cfg: Config, tokenizer, start: Start):
        self.cfg, self.skipped = cfg.eval, Counter()
        self.last_step = cfg.steps
        rows = encoded_prompts(cfg, cfg.eval.data, tokenizer, self.skipped, seed=EVAL_SEED, epochs=1)
        self.prompts = list(itertools.islice(rows, cfg.eval.prompts)) if cfg.eval.every else []
        if cfg.eval.every and not self.prompts:
            raise ConfigError(f"no prompt of {' '.join(cfg.eval.data)} can be used; skipped: {dict(self.skipped)}")
        self.next_version = min(start.next_eval, cfg.steps) if cfg.eval.every else math.inf
        self.samples = len(self.prompts) * (self.cfg.greedy + self.cfg.samples)
        self.groups: list[RolloutGroup] | None = None  # of the running evaluation
        self.first_id = -1  # of its prompts, whose ids count down

    @property
    def token_ids(self) -> set[tuple[int, ...]]:
        """Prompts that are not to be trained on."""
        return {tuple(prompt_ids) for _, prompt_ids, _ in self.prompts}

    def begin(self, version: int) -> list[Prompt]:
        """The prompts of an evaluation of the newest weights, if one is due and none is running."""
        if self.groups is not None or version < self.next_version:
            return []
        self.groups, issued = [], []
        kinds = [(1, 0.0)] * self.cfg.greedy + [(self.cfg.samples, self.cfg.temperature)] * (self.cfg.samples > 0)
        for (samples, temperature), (_, prompt_ids, row) in itertools.product(kinds, self.prompts):
            ids, group_id = torch.tensor(prompt_ids), self.first_id - len(issued)
            issued.append(Prompt(group_id, version, samples, ids, row, temperature, eval_samples=self.samples))
        return issued

    def begin_again(self) -> None:
        """The actor has died: what comes of the running evaluation is no part of the next one."""
        self.first_id -= len(self.prompts) * 2
        self.groups = None

    def take(self, group: RolloutGroup) -> list[RolloutGroup] | None:
        """A scored group of the running evaluation; with the last one, all of them."""
        if self.groups is None or group.prompt.group_id > self.first_id:
            return None  # of one that was begun again
        self.groups.append(group)
        if sum(len(group.rollouts) for group in self.groups) < self.samples:
            return None
        groups, self.groups = self.groups, None
        return groups

    def result(self, groups: list[RolloutGroup]) -> dict:
        """What came of an evaluation; and when the next one is due."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        versions = {version for rollout in rollouts for version in rollout.versions.tolist()}
        assert len(versions) == 1, f"the weights changed during an evaluation: versions {sorted(versions)}"
        version = versions.pop()
        upcoming = (version // self.cfg.every + 1) * self.cfg.every
        self.next_version = upcoming if version == self.last_step else min(upcoming, self.last_step)
        greedy = [group for group in groups if group.prompt.temperature == 0]
        sampled = [group for group in groups if group.prompt.temperature > 0]
        return {"eval_version": version} | success("eval_accuracy", sampled) | success("eval_greedy", greedy) | {
            **{f"eval_verifier/{name}": value for name, value in metric_means(rollouts).items()},
            "eval_prompts": len(self.prompts),
            "eval_samples": self.samples,
            "eval_failed": sum(bool(rollout.failure) for rollout in rollouts),
            "eval_truncated": statistics.fmean(rollout.finish_reason == "length" for rollout in rollouts),
            "eval_completion_tokens": statistics.fmean(len(rollout.completion_ids) for rollout in rollouts),
            **{f"eval_skipped_{reason}": n for reason, n in self.skipped.items()},
        }  # fmt: skip


def metric_means(rollouts: list[Rollout]) -> dict[str, float]:
    """Of what verifiers said beside the reward, by name: the mean over the samples that have it."""
    named: dict[str, list[float]] = {}
    for name, value in itertools.chain.from_iterable(rollout.metrics.items() for rollout in rollouts):
        named.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in sorted(named.items())}


def success(name: str, groups: list[RolloutGroup]) -> dict:
    """Mean reward over the prompts, with its interval; a sample whose verifier failed does not count."""
    rewards = [[r.reward for r in group.rollouts if not r.failure] for group in groups]
    means = [statistics.fmean(values) for values in rewards if values]
    if not means:
        return {}
    low, high = confidence_interval(means)
    return {name: statistics.fmean(means), f"{name}_low": low, f"{name}_high": high}
