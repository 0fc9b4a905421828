"""Bad input is refused before anything heavy starts, with exit code 2, the value and the remedy."""

import dataclasses
import json
import shutil
import subprocess
import sys
import time

import pytest
from conftest import ROOT, changed

import launch
from checks import check
from config import load_function, presets

MODEL = ROOT / "examples" / "tiny" / "model"


@pytest.fixture
def broken_model(tmp_path):
    """A copy of the tiny model from which a test takes something away."""
    return shutil.copytree(MODEL, tmp_path / "model")


def refused(capsys, *argv) -> str:
    try:
        code = launch.main(list(argv))
    except SystemExit as exit:  # tyro's own refusals
        code = exit.code
    printed = capsys.readouterr()
    assert code == 2, printed
    return " ".join((printed.err + printed.out).split())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["tinny"], "unknown preset 'tinny': the first argument is one of gsm8k, math, smol, tail, tiny (see --help)"),
        (["tiny", "--train.learning-rate", "1"], "--train.learning-rate"),
        (["tiny", "--steps", "many"], "many"),
        (["tiny", "--actor.kv", "throw-away"], "throw-away"),
        (["tiny", "--model", "/nowhere"], "model folder /nowhere: no such folder"),
        (["tiny", "--group-size", "1"], "group_size 1 leaves nothing for a leave_one_out baseline: take group_size 2"),
        (
            ["tiny", "--group-size", "1", "--preprocess.baseline", "mean"],
            "group_size 1 leaves nothing for a mean baseline",
        ),
        (["tiny", "--batch-size", "100"], "batch_size 100 is not a multiple of group_size 8: take 96"),
        (["tiny", "--batch-size", "4"], "take 8"),
        (
            ["tiny", "--actor.max-completion-tokens", "100"],
            "32 + max_completion_tokens 100 = 132 is over the model's context of 128",
        ),
        (["tiny", "--actor.top-p", "0.9"], "top_p 0.9, top_k 0: the trainer cannot mirror a truncated distribution"),
        (["tiny", "--actor.top-k", "50"], "top_p 1.0, top_k 50"),
        (["tiny", "--data", "/nowhere.jsonl"], "dataset /nowhere.jsonl: no such file"),
        (["tiny", "--data", ""], "data is empty"),
        (["tiny", "--eval.data", ""], "turn evaluation off with --eval.every 0"),
        (["tiny", "--data", "rows.csv"], "data 'rows.csv': want a .jsonl or .parquet file, hf:…"),
        (["tiny", "--reward.function", "/nowhere.py:f"], "/nowhere.py: no such file"),
        (["tiny", "--reward.function", "maths"], "function 'maths': want one of exact, number, choice, math, gym, or"),
        (["tiny", "--reward.timeout-s", "0"], "reward.timeout_s is 0.0: want more than 0"),
        (["tiny", "--reward-errors", "ignore"], "ignore"),
        (["tiny", "--reward.soft-limit-tokens", "65"], "soft_limit_tokens 65 is over actor.max_completion_tokens"),
        (["tiny", "--eval.samples", "0", "--eval.no-greedy"], "nothing to evaluate"),
        (["tiny", "--log", "tensorboard,wandbe"], "log 'wandbe': want auto, none, or some of tensorboard"),
        (["tiny", "--data", "gym:chain_sum@0"], "its weight in the mixture is 0"),
        (["eval", "tiny", "--data", "/nowhere.jsonl"], "dataset /nowhere.jsonl: no such file"),
        (["eval", "tiny", "--eval.data", "/nowhere.jsonl"], "dataset /nowhere.jsonl: no such file"),
        (
            ["eval", "--model", str(MODEL), "--actor.max-completion-tokens", "64", "--actor.max-prompt-tokens", "64"],
            "eval.data is empty: name held-out rows, with --data",
        ),
        (["tiny", "--steps", "0"], "steps is 0: want at least 1"),
        (["tiny", "--actors", "0"], "actors is 0"),
        (["tiny", "--actor.temperature", "0"], "actor.temperature is 0.0: want at least 0.01"),
        (["tiny", "--actor.temperature", "nan"], "actor.temperature is nan"),
        (["tiny", "--seed", "-1"], "seed is -1: want 0 or more"),
        (["tiny", "--max-lag", "-1"], "max_lag is -1: want 0 or more"),
        (["tiny", "--train.adam-betas", "0.9", "1.0"], "train.adam_betas"),
        (["tiny", "--actor.tp", "3"], "actor.tp 3 does not divide the model's 4 attention heads"),
        (["tiny", "--timeout", "1"], "timeout_s is 1.0: want at least 5"),
        (["tiny", "--device", "cuda", "--actors", "7000"], "need 7001 GPUs, there are"),
        (["tiny", "--G", "0"], "phase_steps is 0: want at least 1"),
        (
            ["tiny", "--schedule", "conventional", "--G", "8"],
            "schedule conventional with G = 8 has lags up to 7, over max_lag 4: take --max-lag 7, or a lower --G",
        ),
        (["tiny", "--schedule", "async", "--G", "3"], "async with G = 3 has lags up to 5, over max_lag 4"),
        (["tiny", "--schedule", "conventional", "--actors", "2"], "1 trainers, 2 actors × tp 1: take as many"),
        (["tiny", "--schedule", "async", "--actor.update", "drain"], "weights never change within a sequence"),
        (
            ["tiny", "--schedule", "async", "--G", "2", "--checkpoint-every", "5"],
            "checkpoint_every 5 is not a multiple of G = 2: take 6",
        ),
    ],
    ids=lambda value: value[1] if isinstance(value, list) and len(value) > 1 else None,
)
def test_bad_value_is_named_with_its_remedy(capsys, tmp_path, argv, said):
    assert said in refused(capsys, *argv, *(["--runs-dir", str(tmp_path)] if len(argv) > 1 else []))
    assert not list(tmp_path.iterdir()), "nothing was begun"


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no *.safetensors: save it with save_pretrained()"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_incomplete_model_folder_is_refused(capsys, broken_model, missing, said):
    (broken_model / missing).unlink()
    assert said in refused(capsys, "tiny", "--model", str(broken_model))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"prompt": "1+1=", "answer": "2"}\n{"answer": "2"}\n', 'line 2: "prompt" is missing'),
        ('{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "1+1="}\n', 'line 3: "answer" is missing'),
        ('{"prompt": "1+1=", "answer": [2]}\n', 'line 1: "answer" is missing or not a text'),
        ('{"prompt": "", "answer": "2"}\n', 'line 1: "prompt" is missing'),
        ('{"prompt": "1+1="\n', "line 1: not JSON"),
        ("[1, 2]\n", "line 1: want an object"),
    ],
)
@pytest.mark.parametrize("field", ["data", "eval.data"])
def test_bad_dataset_row_is_named_by_its_line(capsys, tmp_path, text, said, field):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    assert said in refused(capsys, "tiny", f"--{field}", str(path))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_damaged_model_file_is_refused(capsys, broken_model, file):
    (broken_model / file).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert "a file is damaged or not fetched whole" in refused(capsys, "tiny", "--model", str(broken_model))


def test_file_that_cannot_be_imported_is_refused(capsys, tmp_path):
    (tmp_path / "mine.py").write_text("def reward(text row):\n")
    assert "cannot be imported: SyntaxError" in refused(
        capsys, "tiny", "--reward.function", f"{tmp_path}/mine.py:reward"
    )


def test_folder_that_holds_a_run_needs_overwrite(capsys, tmp_path):
    run = tmp_path / "mine"
    run.mkdir()
    (run / "config.json").write_text("{}")
    argv = ["tiny", "--runs-dir", str(tmp_path), "--name", "mine"]
    assert "already holds a run: give --overwrite" in refused(capsys, *argv)
    (run / "config.json").rename(run / "thesis.tex")
    assert "not empty and not a run" in refused(capsys, *argv, "--overwrite")
    assert (run / "thesis.tex").exists()


def test_refusal_comes_from_the_command_line_in_seconds_with_exit_code_2():
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "launch.py", "tiny", "--actor.top-p", "0.5"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "top_p 0.5" in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - start < 10


def test_help_lists_presets_and_every_field_with_a_help_line():
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "launch.py", "--help"], cwd=ROOT, capture_output=True, text=True, env=_one_column()
    )
    seconds = time.monotonic() - start
    assert done.returncode == 0 and "chain sums" in done.stdout
    assert seconds < 8, "no role module may be imported for --help"  # 0.5 s on a quiet machine

    def fields(value, prefix=""):
        for name, item in vars(value).items():
            if hasattr(item, "__dataclass_fields__"):
                yield from fields(item, f"{prefix}{name}.")
            else:
                yield f"--{prefix}{name}".replace("_", "-")

    lines = done.stdout.splitlines()
    for field in fields(presets()["tiny"]()):
        at = next(i for i, line in enumerate(lines) if f" {field}" in line)
        entry = " ".join(lines[at : at + 3]).split(field)[1]
        assert len([word for word in entry.split("(default")[0].split() if word.isalpha()]) >= 2, field


def _one_column() -> dict:
    import os

    return os.environ | {"COLUMNS": "110"}


def test_lists_and_short_names_are_read_as_the_readme_writes_them():
    cfg = launch.parse(["tiny", "--reward-errors", "count", "--data", "a.jsonl@3", "gym:leg_counting@1"])
    assert cfg.reward.errors == "count" and cfg.data == ("a.jsonl@3", "gym:leg_counting@1")
    cfg = launch.parse(["eval", "--model", str(MODEL), "--data", "a.jsonl", "--reward.function", "math"])
    assert cfg.eval.data == ("a.jsonl",) and (cfg.steps, cfg.trainers, cfg.reward.function) == (0, 0, "math")


def test_override_reaches_the_config_and_the_saved_one_is_whole(tmp_path):
    cfg = launch.parse(["tiny", "--train.lr", "1e-4", "--max-lag", "None"])
    assert cfg.train.lr == 1e-4 and cfg.max_lag is None
    launch.prepare_run_dir(dataclasses.replace(cfg, runs_dir=tmp_path))
    assert json.loads((tmp_path / "tiny" / "config.json").read_text())["train"]["lr"] == 1e-4


def test_preset_tiny_passes_the_checks(tmp_path):
    check(changed(presets()["tiny"](), runs_dir=tmp_path))


# ---------------------------------------------------------------- where roles run


def places(cores, gpus=(), **changes):
    return launch.plan(changed(presets()["tiny"](), **changes), list(cores), list(gpus))


def test_actor_and_trainer_have_a_core_each_on_two_cores():
    plan = places(range(2))
    assert plan["actor-0"].cores == (0,) and plan["train-0"].cores == (1,)
    assert plan["actor-0"].threads == plan["train-0"].threads == 1
    assert plan["preprocess"].cores == plan["reward"].cores == (1,), "the decode loop has its core to itself"


def test_cores_are_shared_out_without_overlap_and_none_is_left():
    plan = places(range(8), actors=2, trainers=1)
    heavy = [plan[name].cores for name in ("actor-0", "actor-1", "train-0")]
    assert sorted(core for cores in heavy for core in cores) == list(range(8))
    assert plan["train-0"].threads == 4


def test_everybody_shares_when_there_are_too_few_cores():
    plan = places([3], actors=2, trainers=2)
    assert all(place.cores == (3,) and place.threads == 1 for place in plan.values())


def test_gpus_go_to_trainers_first():
    plan = places(range(8), gpus=["4", "5", "6"], trainers=1, actors=2)
    assert [plan[name].gpu for name in ("train-0", "actor-0", "actor-1", "preprocess", "reward")] == [
        "4",
        "5",
        "6",
        "4",
        "",
    ]
    assert plan["actor-1"].device == "cuda:0" and plan["reward"].device == "cpu"
    assert places(range(8), gpus=["0"], trainers=1, actors=2)["train-0"].device == "cpu", "auto: not enough GPUs"


def test_file_of_the_user_may_have_the_name_of_one_of_ours_and_pickle_what_it_defines(tmp_path):
    """A verifier with a process pool of its own sends its functions by name."""
    import pickle

    (tmp_path / "train.py").write_text("def reward(text, row):\n    return 0.5\n")
    before = sys.modules.get("train")
    reward = load_function(f"{tmp_path}/train.py:reward")
    assert pickle.loads(pickle.dumps(reward))("", {}) == 0.5
    assert sys.modules.get("train") is before
