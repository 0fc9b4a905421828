"""Rows of every kind of source become prompts, each epoch whole, in an order of the seed; nothing is lost silently."""

import dataclasses
import itertools
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, changed
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from checks import check
from config import ConfigError, presets
from data import check_source, checked_row, encoded_prompts, prompt_encoder, prompt_text, raw_rows, split_weight
from model_files import load_tokenizer, model_folder, uses_chat_template

TINY = presets()["tiny"]()
MODEL = ROOT / "examples" / "tiny" / "model"
CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def drawn(spec: str | list[str], n: int, seed: int = 0, epochs: int | None = None, cfg=TINY) -> list[dict]:
    raw = raw_rows([spec] if isinstance(spec, str) else spec, seed, epochs)
    return [checked_row(row, where, cfg) for where, row in itertools.islice(raw, n)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The tiny model with a tokenizer that has a beginning-of-sequence token, every character, and a chat template."""
    folder = shutil.copytree(MODEL, tmp_path_factory.mktemp("chat") / "model")
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *map(chr, range(9, 127)), "é", "漢", "\u2028"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    return folder


# ---------------------------------------------------------------- sources


def test_jsonl_epochs_reshuffle_without_repeats_inside_one(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"p{i}", "answer": "1"} for i in range(10)])
    prompts = [row["prompt"] for row in drawn(path, 30)]
    epochs = [prompts[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == [f"p{i}" for i in range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert prompts == [row["prompt"] for row in drawn(path, 30)]
    assert prompts != [row["prompt"] for row in drawn(path, 30, seed=1)]


def test_finite_function_is_begun_again_and_an_empty_one_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def two(seed):\n    for i in range(2):\n        yield {'prompt': str(i), 'answer': str(seed)}\n"
        "def none(seed):\n    return iter(())\n"
        "def bad(seed):\n    yield {'prompt': 'x'}\n"
    )
    rows = drawn(f"python:{file}:two", 5, seed=1)
    assert [row["prompt"] for row in rows] == ["0", "1", "0", "1", "0"]
    assert len({row["answer"] for row in rows}) == 3, "each epoch has a seed of its own"
    with pytest.raises(ConfigError, match="is empty"):
        check_source(f"{file}:none", TINY)
    with pytest.raises(ConfigError, match="is empty"):
        drawn(f"{file}:none", 1)
    with pytest.raises(ConfigError, match='row 1: "answer" is missing'):
        check_source(f"{file}:bad", TINY)


def test_parquet_and_hub_datasets_hold_the_same_rows_as_jsonl(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"question": f"p{i}", "answer": i, "level": [i, None]} for i in range(5)]
    (tmp_path / "set").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "set" / "train.parquet")
    write_rows(tmp_path / "rows.jsonl", rows)
    cfg = changed(TINY, prompt=dict(prompt_key="question"))
    expected = drawn(str(tmp_path / "rows.jsonl"), 10, cfg=cfg)
    assert drawn(str(tmp_path / "set" / "train.parquet"), 10, cfg=cfg) == expected
    assert drawn(f"hf:{tmp_path}/set:train", 10, cfg=cfg) == expected
    assert {row["answer"] for row in expected} == set("01234") and expected[0]["level"][1] is None
    with pytest.raises(ConfigError, match="hf:.*cannot be loaded .*Unknown split"):
        check_source(f"hf:{tmp_path}/set:tests", cfg)


def test_name_of_a_hub_dataset_is_org_and_name_and_the_third_part_is_the_subset(monkeypatch):
    import datasets

    called = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: called.append((*args, options["split"])))
    for spec in ("hf:openai/gsm8k/main:test", "hf:openai/gsm8k", "hf:squad:validation"):
        with pytest.raises(TypeError):  # what it gives is no dataset
            list(raw_rows([spec], 0, 1))
    assert called == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", None, "train"), ("squad", None, "validation")]


def test_gym_problems_are_those_of_its_generator_and_carry_what_the_scorer_needs():
    import reasoning_gym

    from verify import gym

    spec = 'gym:chain_sum:{"min_terms": 2, "max_terms": 2}'
    rows = drawn(spec, 5, seed=3)
    theirs = reasoning_gym.create_dataset("chain_sum", size=5, seed=3, min_terms=2, max_terms=2)
    assert [(row["prompt"], row["answer"]) for row in rows] == [(x["question"], x["answer"]) for x in theirs]
    assert all(gym(row["answer"], row) == 1.0 and gym("no idea", row) < 1.0 for row in rows)
    assert rows != drawn(spec, 5, seed=4) and rows[0]["task"] == "chain_sum"
    epochs = drawn(spec.replace("}", ', "size": 3}'), 6)
    assert epochs[:3] != epochs[3:], "a finite one has other problems in the next epoch"
    with pytest.raises(ConfigError, match="reasoning-gym cannot make this task"):
        check_source("gym:chain_some", TINY)
    with pytest.raises(ConfigError, match="reasoning-gym cannot make this task"):
        check_source('gym:chain_sum:{"terms": 2}', TINY)


def test_mixture_draws_by_weight_and_each_source_keeps_its_epochs(tmp_path):
    a = write_rows(tmp_path / "a.jsonl", [{"prompt": f"a{i}", "answer": ""} for i in range(30)])
    b = write_rows(tmp_path / "b.jsonl", [{"prompt": f"b{i}", "answer": ""} for i in range(30)])
    prompts = [row["prompt"] for row in drawn([f"{a}@3", f"{b}@1"], 4000)]
    share = sum(prompt.startswith("a") for prompt in prompts) / 4000
    assert abs(share - 0.75) < 0.035  # 5 standard errors
    of_a = [prompt for prompt in prompts if prompt.startswith("a")]
    assert all(len(set(of_a[i : i + 30])) == 30 for i in range(0, 2970, 30)), "no repeats inside an epoch"
    assert prompts == [row["prompt"] for row in drawn([f"{a}@3", f"{b}@1"], 4000)]
    once = [row["prompt"] for row in drawn([f"{a}@3", f"{b}@1"], 10_000, epochs=1)]
    assert len(once) == len(set(once)) == 60, "with one epoch, all of both"


def test_weight_stands_at_the_end():
    assert split_weight("a@b.jsonl") == ("a@b.jsonl", 1.0) and split_weight("rows.jsonl@.5") == ("rows.jsonl", 0.5)
    assert split_weight('gym:chain_sum:{"a": 2}@3') == ('gym:chain_sum:{"a": 2}', 3.0)
    with pytest.raises(ConfigError, match="its weight in the mixture is 0"):
        split_weight("rows.jsonl@0")


@pytest.mark.parametrize(
    "package, spec", [("datasets", "hf:a/b"), ("reasoning_gym", "gym:x"), ("pyarrow", "x.parquet")]
)
def test_source_whose_package_is_not_installed_says_so(tmp_path, monkeypatch, package, spec):
    import importlib.util

    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.parquet").touch()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a))
    with pytest.raises(ConfigError, match=f"package {package} is not installed"):
        check_source(spec, TINY)


# ---------------------------------------------------------------- rows


def test_row_that_would_not_reach_the_verifier_as_it_is_is_refused():
    import decimal

    for value in (decimal.Decimal(1), {1, 2}, object(), 2**70, "\ud800", (1, 2), float("nan")):
        with pytest.raises(ConfigError, match="here: .* would not reach the verifier as it is"):
            checked_row({"prompt": "x", "answer": "y", "more": value}, "here", TINY)
    good = {"prompt": "x", "answer": "y", "more": [1, 2.5, None, {"a": True}]}
    assert checked_row(good, "here", TINY) == good


@pytest.mark.parametrize(
    "messages",
    [[], "text", [{"role": "user"}], [{"role": "user", "content": ""}], [{"role": "assistant", "content": "x"}], ["x"]],
)
def test_messages_that_are_none_are_refused(messages):
    with pytest.raises(ConfigError, match='here: "messages" is not a list of'):
        checked_row({"messages": messages, "answer": "y"}, "here", TINY)


def test_messages_beside_a_prompt_are_for_the_verifier_alone(model):
    """As in datasets for supervised training, whose messages hold the answer."""
    messages = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "It is 42"}]
    cfg = changed(TINY, model=model)
    row = checked_row({"prompt": "Q?", "messages": messages, "answer": "42"}, "here", cfg)
    assert row["messages"] == messages
    tokenizer = load_tokenizer(model)
    assert tokenizer.decode(prompt_encoder(cfg, tokenizer)(row, "here")) == "<s><user>Q?\n<assistant>"
    row = checked_row({"prompt": None, "messages": messages[:1], "answer": "42"}, "here", cfg)
    assert prompt_text(row) == "Q?" and "prompt" not in row


@pytest.mark.parametrize(
    "line, said",
    [
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": "x", "answer": NaN}', '"answer" is missing or not a text'),
        (json.dumps({"prompt": "x", "answer": "", "tests": "y" * 300_000}).encode(), "more than the 262,144 of a row"),
    ],
    ids=["brackets", "nan", "huge"],
)
def test_row_that_would_fail_later_is_refused_at_once(line, said):
    with pytest.raises(ConfigError, match=f"line 7: .*{said}"):
        checked_row(line, "line 7", TINY)


def test_function_of_rows_that_raises_is_named(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def rows(seed):\n    yield {'prompt': 'x', 'answer': ''}\n    raise KeyError('z')\ndef none(seed): pass\n"
    )
    with pytest.raises(ConfigError, match=r"mine.py:rows failed: KeyError\('z'\)"):
        drawn(f"{file}:rows", 2)
    with pytest.raises(ConfigError, match="mine.py:none failed: TypeError"):
        check_source(f"{file}:none", TINY)


def test_nothing_of_ten_thousand_rows_is_lost_silently(tmp_path, model):
    """9,800 good ones, many full of Unicode, 100 malformed in ten ways, 100 too long for the prompt."""
    rng = random.Random(0)
    alphabet = [
        "é",
        "漢",
        "字",
        "🙂",
        "\u2028",
        "\u2029",
        "\x85",
        "\x0b",
        "\x1c",
        "ẞ",
        "a\u0301",
        "\u202e",
        " ",
        "x",
        "7",
    ]
    lines, good = [], set()
    for i in range(10_000):
        prompt = f"{i}:" + "".join(rng.choices(alphabet, k=rng.randint(0, 40)))
        row = {"prompt": prompt, "answer": rng.choice(["é", str(i), i, i / 2]), "id": i}
        if i % 100 == 7:
            lines.append((
                b"{", b"[]", b"null", b'"text"', b'{"prompt": "x"}',
                b'{"answer": "x"}', b'{"prompt": "", "answer": ""}',
                b'{"prompt": "\xff", "answer": ""}', b'{"prompt": "\\ud800", "answer": ""}',
                b'{"prompt": 5, "answer": {}}',
            )[i // 100 % 10])  # fmt: skip
            continue
        if i % 100 == 50:
            row["prompt"] += "long" * 50
        else:
            good.add(i)
        lines.append(json.dumps(row, ensure_ascii=bool(i % 2)).encode())
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines) + b"\n\n")
    cfg = changed(TINY, model=model, data=(str(path),), prompt=dict(malformed="skip"), actor=dict(max_prompt_tokens=90))
    tokenizer = load_tokenizer(model)
    dropped = Counter()
    found = list(encoded_prompts(cfg, cfg.data, tokenizer, dropped, seed=0, epochs=1))
    assert {row["id"] for _, _, row in found} == good and len(found) == len(good) == 9800
    assert dropped == {"malformed": 100, "prompt_too_long": 100}
    numbers = [number for number, _, _ in found]
    assert numbers == sorted(set(numbers)) and max(numbers) < 10_000, "a number for every row, the skipped ones too"
    for _, _, row in found[:200]:
        stored = json.loads(lines[row["id"]])
        assert row == stored | {"answer": str(stored["answer"])}
    check_source(str(path), cfg)
    # Unless they are to be skipped, the first are named, with their lines, and the rest counted.
    with pytest.raises(ConfigError) as refused:
        check_source(str(path), changed(cfg, prompt=dict(malformed="stop")))
    said = str(refused.value)
    assert said.count(f"dataset {path}, line ") == 5 and "line 8: not JSON" in said and "… and 95 more" in said
    assert 'line 408: "answer" is missing' in said and "--prompt.malformed skip" in said


def test_thousand_skipped_in_a_row_are_an_error_that_says_why(tmp_path, model):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "abcdef", "answer": ""}])
    cfg = changed(TINY, model=model, actor=dict(max_prompt_tokens=4))
    tokenizer = load_tokenizer(model)
    with pytest.raises(ConfigError, match=r"1,000 rows of .*line 1\): over 4 tokens: raise max_prompt_tokens"):
        next(encoded_prompts(cfg, [path], tokenizer, Counter(), seed=0))


def test_held_out_prompts_are_never_trained_on(tmp_path, model):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": str(i), "answer": ""} for i in range(10)])
    cfg, tokenizer, dropped = changed(TINY, model=model), load_tokenizer(model), Counter()
    ids = {i: tuple(prompt_encoder(cfg, tokenizer)({"prompt": str(i)}, "")) for i in (3, 7)}
    found = list(encoded_prompts(cfg, [path], tokenizer, dropped, seed=0, epochs=2, held_out=set(ids.values())))
    assert sorted(row["prompt"] for _, _, row in found) == sorted("01245689" * 2) and dropped == {"held_out": 4}


# ---------------------------------------------------------------- what the engine sees


def encoded(model: Path, row: dict, **prompt) -> str:
    """As text, special tokens and all."""
    cfg, tokenizer = changed(TINY, model=model, prompt=prompt), load_tokenizer(model)
    return tokenizer.decode(prompt_encoder(cfg, tokenizer)(row, "here"))


def test_chat_template_is_used_when_there_is_one_with_exactly_one_bos(model):
    assert encoded(model, {"prompt": "1+1="}) == "<s><user>1+1=\n<assistant>"
    assert encoded(model, {"prompt": "1+1="}, system="Sum.") == "<s><system>Sum.\n<user>1+1=\n<assistant>"
    assert encoded(model, {"prompt": "1+1="}, wrap="{prompt} {x}") == "<s><user>1+1= {x}\n<assistant>"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert encoded(model, {"messages": messages}, system="no") == "<s><system>Be brief.\n<user>Hi\n<assistant>"


def test_plain_template_puts_the_few_shot_text_before_with_exactly_one_bos(model):
    assert encoded(model, {"prompt": "1+1="}, template="plain") == "<s>1+1="
    assert encoded(model, {"prompt": "1+1="}, template="plain", few_shot="2+2=4\n") == "<s>2+2=4\n1+1="
    assert encoded(model, {"prompt": "1+1="}, template="plain", few_shot="<s>2+2=4\n") == "<s>2+2=4\n1+1="
    assert encoded(MODEL, {"prompt": "1+1="}) == "1+1=", "no template, no bos"
    with pytest.raises(ConfigError, match="here: several messages, and no chat template"):
        encoded(MODEL, {"messages": [{"role": "user", "content": "a"}] * 2})


def test_row_that_the_chat_template_refuses_is_named(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "strict")
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match="here: the chat template refuses .*roles must alternate"):
        encoded(folder, {"prompt": "1"})


def test_tokenizer_is_that_of_the_folder_s_file_and_else_what_auto_finds(model, tmp_path):
    """transformers takes a general tokenizer beside a qwen2 model for Qwen2's own, whatever its file says."""
    text = "<s> 1 é漢\n"
    for own in (model, MODEL):
        of_file, found = Tokenizer.from_file(str(own / "tokenizer.json")), load_tokenizer(own)
        assert found.get_vocab() == of_file.get_vocab()
        assert found.encode(text) == of_file.encode(text).ids
    named = shutil.copytree(model, tmp_path / "named")
    config = json.loads((named / "tokenizer_config.json").read_text())
    (named / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Qwen2Tokenizer"}))
    assert type(load_tokenizer(named)) is type(AutoTokenizer.from_pretrained(named)) is Qwen2Tokenizer


def test_whether_there_is_a_chat_template_is_seen_in_the_files(model, tmp_path):
    cfg = changed(TINY, eval=dict(every=0))
    assert uses_chat_template(changed(cfg, model=model)) and not uses_chat_template(cfg)
    null = shutil.copytree(MODEL, tmp_path / "null")
    (null / "tokenizer_config.json").write_text('{"chat_template": null}')
    assert not uses_chat_template(changed(cfg, model=null))
    for prompt, said in (
        (dict(template="chat"), "has no chat template"),
        (dict(system="x"), "prompt.system needs a chat template"),
        (dict(wrap="x"), "has no {prompt}"),
    ):
        with pytest.raises(ConfigError, match=said):
            check(changed(cfg, prompt=prompt))
    with pytest.raises(ConfigError, match="prompt.few_shot stands before plain prompts only"):
        check(changed(cfg, model=model, prompt=dict(few_shot="x")))
    check(changed(cfg, prompt=dict(few_shot="x")))


# ---------------------------------------------------------------- hub names


def test_model_named_as_on_the_hub_is_found_in_the_cache(tmp_path, monkeypatch):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = tmp_path / "models--someone--tiny" / "snapshots" / "0123abc"
    shutil.copytree(MODEL, commit)
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text("0123abc")
    assert model_folder(Path("someone/tiny")) == commit
    with pytest.raises(ConfigError, match="model someone/else: no such folder, and the hub does not give it"):
        model_folder(Path("someone/else"))
    assert model_folder(MODEL) == MODEL and model_folder(Path("nothing")) == Path("nothing").resolve()


def test_preset_fields_that_name_sources_are_whole(tmp_path):
    cfg = dataclasses.replace(TINY, data=(f"{ROOT}/examples/tiny/task.py:train_rows@2", "gym:chain_sum@1"))
    check(changed(cfg, runs_dir=tmp_path))
