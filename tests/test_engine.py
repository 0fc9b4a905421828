"""The in-flight update, with real vLLM: which weights made which token, and that the log-probs say so.

One engine an architecture, in a process of its own (`engine_scenarios.py`); every claim is checked for all of them.
"""

import functools
import json
import subprocess
import sys

import pytest
from conftest import ROOT

KINDS = ("qwen2-tied", "llama-untied-tp2")  # tp2: two workers, weights by broadcast
NEW_TOKENS = 24


@functools.cache
def _result(kind: str, folder: str) -> dict:
    script = ROOT / "tests" / "engine_scenarios.py"
    done = subprocess.run([sys.executable, str(script), kind, folder], capture_output=True, text=True, timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, (done.stdout + done.stderr)[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.fixture(scope="module", params=KINDS)
def result(request, tmp_path_factory) -> dict:
    return _result(request.param, str(tmp_path_factory.getbasetemp() / request.param))


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_token_sampled_after_an_update_carries_the_new_version_and_before_it_the_old(result, kv):
    found = result[kv]
    late = found["versions"].pop(found["late"])
    # Every step samples one token of every sequence: 5 before the first update, 7 between the two, the rest after.
    assert list(found["versions"].values()) == [[0] * 5 + [1] * 7 + [2] * (NEW_TOKENS - 12)] * 6
    assert late == [1] * 7 + [2] * (NEW_TOKENS - 7)
    found["versions"][found["late"]] = late


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_recorded_log_prob_is_that_of_the_weights_that_sampled_the_token(result, kv):
    """Across two updates in mid-sequence. keep: new weights over the old ones' KV cache; recompute: over their own."""
    assert result[kv]["error"] < 1e-4
    assert result[kv]["error_if_old_weights"] > 1e-2, "the update changed nothing: the test could not fail"
    assert result[kv]["other_kv_error"] > 1e-3, (
        "both kv modes gave the same numbers: the test could not tell them apart"
    )


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_updates_neither_abort_nor_repeat_nor_lose_a_token(result, kv):
    assert result[kv]["lengths"] == [NEW_TOKENS] * 7
    assert result[kv]["finish"] == ["length"]


def test_after_an_update_every_weight_is_new(result):
    """Log-probs of fresh requests equal transformers' under the new weights; tied and untied head, Qwen2 and Llama."""
    assert result["fresh"]["error"] < 1e-4
    assert result["fresh"]["error_of_the_version_before"] > 1e-2


def test_log_probs_are_those_of_the_sampling_temperature(result):
    """T = 0.5; and the checkpoint's generation_config (top_k 2, top_p 0.3, a penalty) does not apply."""
    assert result["half"]["error"] < 1e-4


def test_new_request_never_sees_prefix_blocks_of_older_weights(result):
    assert result["prefix"]["caching"]
    assert all(error < 1e-4 for error in result["prefix"]["errors"].values()), result["prefix"]


def test_update_that_changes_no_weight_changes_no_token_whatever_becomes_of_the_kv_cache(result):
    found = result["same weights"]
    assert found["alone"] == found["keep"] == found["recompute"]
    assert [len(tokens) for tokens in found["alone"]] == [NEW_TOKENS] * 6


def test_actor_that_falls_behind_loads_the_newest_version_only(result):
    assert result["skipping"]["loaded"] == 3


def test_every_end_of_sequence_id_ends_a_completion_and_only_the_limit_truncates_one(result):
    found = result["endings"]
    whole, n = found["whole"], found["n"]
    assert len(whole) == NEW_TOKENS and n > 3
    assert found["second of two"] == [whole[:n], "stop"], "the id itself is part of the completion"
    assert found["exactly at the limit"] == [whole[:n], "stop"]
    assert found["one short of it"] == [whole[: n - 1], "length"]


def test_text_to_stop_at_ends_a_completion_with_its_token_in_it(result):
    found = result["endings"]
    assert found["text"] == [found["whole"][: found["text at"]], "stop"]


def test_weights_that_were_evaluated_can_be_written_beside_decoding_and_newer_ones_still_come_in(result):
    assert result["saved"]["same"] and result["saved"]["error_after"] < 1e-4


def test_update_that_leaves_a_weight_old_is_an_error_that_names_it(result):
    assert "leave 1 parameters old" in result["incomplete"] and "down_proj" in result["incomplete"]
