"""The repeated additions of preset `tail`, and the base model shipped for them."""

import importlib.util
import itertools
import random
import statistics

import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import presets

FOLDER = ROOT / "examples" / "tail"
spec = importlib.util.spec_from_file_location("tail_task", FOLDER / "task.py")
task = importlib.util.module_from_spec(spec)
spec.loader.exec_module(task)


def test_demonstration_counts_down_writes_totals_and_the_answer():
    assert task.prompt_text((37, 6, 4)) == "37+6*4="
    assert task.demonstration((37, 6, 4), random.Random(0)) == "+6=3:3+6=9:2+6=5:1+6=1:0#1"
    assert task.reward("+6=3:1+6=9:0#9", {"answer": "9"}) == 1.0
    assert task.reward("+6=3:1+6=9:0#3", {"answer": "9"}) == task.reward("", {"answer": "9"}) == 0.0
    wrong = task.demonstration((0, 1, 60), random.Random(0), error_rate=1.0)
    assert wrong.count(":") == 60 and not wrong.startswith("+1=1:")
    row = next(task.train_rows(0))
    start, term, times = problem_of(row)
    assert row["answer"] == str((start + term * times) % 10)


def problem_of(row: dict) -> tuple[int, int, int]:
    """{'prompt': '37+6*4=', ..} -> (37, 6, 4)"""
    return tuple(map(int, row["prompt"].strip("=").replace("*", "+").split("+")))


def test_longest_completion_has_ten_times_the_mean_and_fits():
    rng, tokenizer, cfg = random.Random(0), AutoTokenizer.from_pretrained(FOLDER / "model"), presets()["tail"]()
    problems = [problem_of(row) for row in itertools.islice(task.train_rows(0), 5000)]
    assert 30 < sum(times == task.MOST_TERMS for _, _, times in problems) < 90, "one in 85: 59 with a spread of 8"
    texts = [task.demonstration(problem, rng, task.ERROR_RATE) for problem in problems]
    assert max(map(len, texts)) > 10 * statistics.fmean(map(len, texts))
    longest = max(texts, key=len)
    assert tokenizer.decode(tokenizer.encode(longest)) == longest
    assert len(tokenizer.encode(longest)) == len(longest) < cfg.actor.max_completion_tokens
    assert cfg.actor.max_prompt_tokens + cfg.actor.max_completion_tokens <= task.CONTEXT_TOKENS


def test_rows_follow_from_the_seed_and_held_out_prompts_are_never_training_prompts():
    first, second, other = (list(itertools.islice(task.train_rows(seed), 50)) for seed in (1, 1, 2))
    assert first == second != other
    train, held_out = (
        {row["prompt"] for row in itertools.islice(rows(5), 5_000)} for rows in (task.train_rows, task.held_out_rows)
    )
    assert not train & held_out


def test_base_model_knows_how_and_yet_often_fails():
    """500 held-out prompts of at most 8 terms, T = 1, plain transformers: standard error 2 points."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "model").eval()
    short = (row for row in task.held_out_rows(0) if problem_of(row)[2] <= 8)
    rows = list(itertools.islice(short, 500))
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    sampled = model.generate(**inputs, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=80)
    texts = tokenizer.batch_decode(sampled[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    success = statistics.fmean(task.reward(text, row) for text, row in zip(texts, rows, strict=True))
    assert 0.3 <= success <= 0.6, success
