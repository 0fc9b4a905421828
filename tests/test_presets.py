"""Presets for machines that are not here, as far as a CPU can tell: config, plan, data, template and reward."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, changed
from test_data import model  # noqa: F401  a tokenizer with a chat template

import launch
from checks import check
from config import ConfigError, load_function, presets
from data import checked_row, prompt_encoder, raw_rows
from model_files import load_tokenizer
from verify import VERIFIERS


@pytest.fixture
def large(model, tmp_path) -> Path:  # noqa: F811
    """The same with the context of a large model."""
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    return folder


def hub_dataset(folder: Path, splits: dict[str, list[dict]]) -> str:
    """A folder that `hf:` reads as it does a dataset of the hub."""
    folder.mkdir()
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"hf:{folder}"


def first_prompt(cfg) -> tuple[str, dict]:
    tokenizer = load_tokenizer(cfg.model)
    where, raw = next(raw_rows(cfg.data, 0, None))
    row = checked_row(raw, where, cfg)
    return tokenizer.decode(prompt_encoder(cfg, tokenizer)(row, where)), row


def test_gsm8k_asks_in_chat_and_compares_the_last_numbers(large, tmp_path):
    rows = [{"question": "Ann has 3 boxes of 24 eggs. How many eggs?", "answer": "3 boxes of 24 are 3*24=72.\n#### 72"}]
    hub = hub_dataset(tmp_path / "gsm8k", {"train": rows, "test": rows})
    cfg = presets()["gsm8k"]()
    assert cfg.data == ("hf:openai/gsm8k/main:train",) and cfg.eval.data == ("hf:openai/gsm8k/main:test",)
    cfg = changed(cfg, model=large, data=(f"{hub}:train",), runs_dir=tmp_path, eval=dict(data=(f"{hub}:test",)))
    check(cfg)
    prompt, row = first_prompt(cfg)
    end = "Reason step by step, and end with a line `#### ` and the answer alone.\n<assistant>"
    assert prompt == f"<s><user>{rows[0]['question']}\n{end}"
    verify = VERIFIERS[cfg.reward.function]
    right = ["24+24+24 = 72\n#### 72", "#### 72.0", "so the answer is $72.", "#### 72 eggs"]
    wrong = ["#### 27", "72 or 73", "#### -72", "", "#### 172"]
    assert [verify(text, row) for text in right + wrong] == [1.0] * len(right) + [0.0] * len(wrong)
    places = launch.plan(cfg, list(range(64)), [str(i) for i in range(8)])
    assert [places[f"train-{i}"].gpu for i in range(4)] + [places[f"actor-{i}"].gpu for i in range(4)] == list(
        "01234567"
    )


def test_math_has_the_settings_of_the_paper_and_reads_open_reasoner_zero(large, tmp_path):
    cfg = presets()["math"]()
    assert (cfg.steps, cfg.batch_size, cfg.train.lr, cfg.train.clamp) == (1000, 1024, 1e-6, 5.0)
    assert (cfg.actor.sequences, cfg.actors, cfg.trainers) == (64, 48, 80)
    conversations = [
        [{"from": "human", "value": f"What is $\\frac{{1}}{{2}} + {i}$?"},
         {"from": "assistant", "ground_truth": {"value": f"\\frac{{{2 * i + 1}}}{{2}}"}}]
        for i in range(3)
    ]  # fmt: skip
    rows = load_function(f"{ROOT}/examples/math/make_data.py:rows")
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(conversations)))
    hub = hub_dataset(tmp_path / "MATH-500", {"test": [{"problem": "1+1", "solution": "It is 2.", "answer": "2"}]})
    cfg = changed(cfg, model=large, data=(str(file),), runs_dir=tmp_path, eval=dict(data=(f"{hub}:test",)))
    check(cfg)
    prompt, row = first_prompt(cfg)
    assert prompt.startswith(f"<s>Question: {row['problem']}\nReason step by step") and prompt.endswith("\nAnswer:")
    verify, half = VERIFIERS[cfg.reward.function], 2 * int(row["problem"][-3]) + 1
    assert verify(f"so it is \\boxed{{\\frac{{{half}}}{{2}}}}.", row) == verify(f"\\boxed{{{half / 2}}}", row) == 1.0
    assert verify(f"\\boxed{{\\frac{{{half + 2}}}{{2}}}}", row) == verify("I do not know.", row) == 0.0
    with pytest.raises(ConfigError, match="need 128 GPUs, there are 8"):
        launch.plan(cfg, list(range(64)), [str(i) for i in range(8)])  # and not all on the CPU
    places = launch.plan(cfg, list(range(128)), [str(i) for i in range(128)])
    assert len({place.gpu for name, place in places.items() if place.gpu and name != "preprocess"}) == 128
