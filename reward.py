"""Reward: verifiers in processes of their own, between actor and preprocessor, so that decoding never waits for one.

consumes  completions: `RolloutGroup`s without rewards (any of the `reward.workers` processes takes the next)
emits     rollouts: the same groups, scored

    while True:
        group = completions.get()
        for each rollout: reward = verify(text of the completion, dataset row)

The paper scores inside the actor; here a verifier that computes for a second costs the decode loop nothing. Text exists
for the verifier only: token ids travel on untouched and are never made from text again.
"""

import dataclasses
import math
from collections.abc import Callable

from config import Config, load_function
from queues import Channels, RolloutGroup


def exact(completion: str, row: dict) -> float:
    """1.0 if the completion is the row's answer, white space around either aside: (' 9', {'answer': '9'}) -> 1.0."""
    return float(completion.strip() == row["answer"].strip())


def load_verifier(spec: str) -> Callable[[str, dict], float]:
    """`exact` or `file.py:function` -> the function. Raises ConfigError if there is none."""
    return exact if spec == "exact" else load_function(spec)


def score(group: RolloutGroup, verify: Callable, decode: Callable[[list[int]], str]) -> RolloutGroup:
    """The group with all rewards filled in. Raises ValueError, with the row, if one is not a finite number."""
    rollouts = []
    for rollout in group.rollouts:
        text = decode(rollout.completion_ids.tolist())
        value = verify(text, group.prompt.row)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"the reward of {text!r} is {value!r}, want a finite number; row: {group.prompt.row}")
        rollouts.append(dataclasses.replace(rollout, reward=float(value)))
    return RolloutGroup(group.prompt, rollouts)


def main(cfg: Config, channels: Channels, *_) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    verify = load_verifier(cfg.reward.function)
    while True:
        group = channels.completions.get()
        channels.rollouts.put(score(group, verify, lambda ids: tokenizer.decode(ids, skip_special_tokens=True)))
