"""A verifier's answer becomes the reward, and nothing else of the rollout changes."""

import pytest
import torch
from test_queues import example

import reward
from config import ConfigError
from queues import Prompt, Rollout, RolloutGroup


def test_exact_ignores_white_space_around_and_nothing_else():
    assert reward.exact(" 9\n", {"answer": "9"}) == 1.0
    assert reward.exact("9.", {"answer": "9"}) == 0.0
    assert reward.exact("", {"answer": "9"}) == 0.0


def test_score_gives_text_and_row_to_the_verifier_and_keeps_everything_else():
    group = RolloutGroup(example(Prompt), [example(Rollout), example(Rollout)])
    seen = []

    def verify(text, row):
        seen.append((text, row))
        return len(seen) - 0.5

    scored = reward.score(group, verify, decode=lambda ids: "-".join(map(str, ids)))
    assert seen == [("1-2-14", {"answer": "12"})] * 2
    assert [r.reward for r in scored.rollouts] == [0.5, 1.5]
    for before, after in zip(group.rollouts, scored.rollouts, strict=True):
        assert torch.equal(before.completion_ids, after.completion_ids) and before.logprobs is after.logprobs


@pytest.mark.parametrize("value", [None, float("nan"), "1", [1.0]])
def test_reward_that_is_not_a_finite_number_stops_with_the_row(value):
    group = RolloutGroup(example(Prompt), [example(Rollout)])
    with pytest.raises(ValueError, match=r"want a finite number; row: \{'answer': '12'\}"):
        reward.score(group, lambda text, row: value, decode=str)


def test_verifier_is_loaded_by_file_and_function(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def yes(text, row):\n    return 1.0\n")
    assert reward.load_verifier(f"{file}:yes")("", {}) == 1.0
    assert reward.load_verifier("exact") is reward.exact
    with pytest.raises(ConfigError, match="has no function 'no'"):
        reward.load_verifier(f"{file}:no")
