"""The chain sums of preset `tiny`, and the base model shipped for them."""

import itertools
import json
import random
import subprocess
import sys

import pytest
import task
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = ROOT / "examples" / "tiny" / "model"


def test_demonstration_copies_operands_writes_totals_and_the_answer():
    terms = [7, 5, -3]
    assert task.prompt_text(terms) == "7+5-3="
    assert task.demonstration(terms, random.Random(0)) == "7+5=12-3=9#9"
    assert task.reward("7+5=12-3=9#9", {"answer": "9"}) == 1.0
    assert task.reward("7+5=12-3=8#8", {"answer": "9"}) == 0.0
    assert task.reward("7+5=12-3=9#9#9", {"answer": "9"}) == 0.0
    assert task.reward("", {"answer": "9"}) == 0.0


def test_rows_follow_from_the_seed():
    first, second, other = (list(itertools.islice(task.train_rows(seed), 50)) for seed in (1, 1, 2))
    assert first == second != other


def test_held_out_prompts_are_never_training_prompts():
    """By construction: the set a prompt belongs to is a function of its text alone, so no pair of seeds can collide."""
    train, held_out = (
        {row["prompt"] for row in itertools.islice(rows(5), 20_000)} for rows in (task.train_rows, task.held_out_rows)
    )
    assert not train & held_out
    assert all(task.is_held_out(prompt) for prompt in held_out) and not any(map(task.is_held_out, train))


def test_completion_length_varies_at_least_five_fold():
    rng = random.Random(0)
    lengths = [len(task.demonstration(task.sample_problem(rng), rng)) + 1 for _ in range(2000)]
    assert max(lengths) >= 5 * min(lengths)


def test_tokenizer_is_one_token_a_character_and_loses_nothing():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = "7+5=12-3=9#9"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_base_model_is_small_and_tied():
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert model.num_parameters() <= 1_000_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in json.loads(_safetensors_header(MODEL / "model.safetensors"))


def _safetensors_header(path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def test_sampled_success_of_the_base_model_is_25_to_45_percent():
    """1,000 held-out prompts, T = 1, plain transformers: standard error 1.5 points."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    rows = list(itertools.islice(task.held_out_rows(0), 1000))
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    output = model.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=64,
    )
    texts = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    success = sum(task.reward(text, row) for text, row in zip(texts, rows, strict=True)) / len(rows)
    assert 0.25 <= success <= 0.45, success


@pytest.mark.parametrize("seed", [0])
def test_making_the_model_is_deterministic(tmp_path, seed):
    def make(name, seed):
        script = ROOT / "examples" / "tiny" / "make_model.py"
        command = [sys.executable, str(script), "--out", str(tmp_path / name), "--steps", "3", "--seed", str(seed)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return (tmp_path / name / "model.safetensors").read_bytes()

    first = make("a", seed)
    assert first == make("b", seed)
    assert first != make("c", seed + 1)
