"""Shared by the tests: the repository on the path, and a tiny rollout to build messages from."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples" / "tiny")]
# Roles, engines and helpers started by a test find the modules as well.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
torch.set_num_threads(1)

from config import Config, presets  # noqa: E402


def changed(cfg: Config, **changes) -> Config:
    """`changed(cfg, steps=3, train=dict(lr=1e-4))`: a config with fields replaced, one level deep."""
    return dataclasses.replace(
        cfg,
        **{
            key: dataclasses.replace(getattr(cfg, key), **value) if isinstance(value, dict) else value
            for key, value in changes.items()
        },
    )


@pytest.fixture
def tiny() -> Config:
    return presets()["tiny"]()
