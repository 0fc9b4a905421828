"""One metrics dictionary reaches every log that is asked for; one that fails does not end the run."""

import glob
import json
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, changed
from test_resume import TINY, record, step_report

# W&B and trackio keep threads and processes: in a process of their own, as in the launcher.
SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from config import presets
from record import Logs
cfg = dataclasses.replace(presets()["tiny"](), runs_dir=Path(sys.argv[2]), name="run", log="tensorboard,wandb,trackio")
cfg.run_dir.mkdir(parents=True)
troubles = []
logs = Logs(cfg, 1, troubles.append)
logs.write({"loss": 0.5, "group_ids": [1, 2], "text": "x"}, 1)
logs.write({"loss": 0.25}, 2)
logs.write({"eval_accuracy": 0.75}, 1)  # late, at the version that it is of
logs.close()
print("RESULT " + json.dumps(troubles))
"""


def test_tensorboard_wandb_and_trackio_get_the_same_numbers_at_the_same_steps(tmp_path, monkeypatch):
    for name, value in (("WANDB_MODE", "offline"), ("TRACKIO_DIR", str(tmp_path / "trackio")), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", SCRIPT, str(ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "RESULT []" in done.stdout, done.stdout + done.stderr
    expected = {("loss", 1, 0.5), ("loss", 2, 0.25), ("eval_accuracy", 1, 0.75)}

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {(key, e.step, e.value) for key in events.Tags()["scalars"] for e in events.Scalars(key)} == expected

    (database,) = [path for path in glob.glob(f"{tmp_path}/trackio/**/*.db", recursive=True)]
    rows = sqlite3.connect(database).execute("select step, metrics from metrics").fetchall()
    found = {(key, step, value) for step, text in rows for key, value in json.loads(text).items()}
    assert found == expected

    from wandb.proto import wandb_internal_pb2

    (file,) = glob.glob(f"{tmp_path}/run/wandb/offline-run-*/run-*.wandb")
    data, at, whole, found = Path(file).read_bytes(), 7, b"", set()
    while at + 7 <= len(data):  # LevelDB's log format: blocks of 32 KiB, a record in one piece (1) or several (2, 3, 4)
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        at += 32768 - at % 32768 if 32768 - at % 32768 < 7 else 0
        if kind in (1, 4):
            message, whole = wandb_internal_pb2.Record.FromString(whole), b""
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in message.history.item}
            found |= {(key, items["step"], value) for key, value in items.items() if key in ("loss", "eval_accuracy")}
    assert found == expected


def test_tensorboard_forgets_what_a_run_did_after_the_checkpoint_it_resumes(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from record import Logs

    cfg = changed(TINY, runs_dir=tmp_path, name="run", log="tensorboard")
    for first_step, steps in ((1, (1, 2, 3)), (3, (3, 4))):  # a checkpoint of step 2
        logs = Logs(cfg, first_step, print)
        for step in steps:
            logs.write({"loss": 10.0 * first_step + step}, step)
        logs.close()
    events = EventAccumulator(str(cfg.run_dir / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 11.0), (2, 12.0), (3, 33.0), (4, 34.0)]


def test_log_that_fails_is_given_up_and_counted_and_nothing_else(tmp_path, monkeypatch):
    import record as module

    def broken(values, step):
        raise ConnectionError("no route")

    monkeypatch.setitem(module.SINKS, "wandb", lambda cfg, first_step: (broken, lambda: None))
    book = record(changed(TINY, runs_dir=tmp_path, name="run", steps=3, log="wandb"))
    for step in (1, 2):
        book.take("step", step_report(step))
    assert book.troubles == 1 and len(book.steps) == 2
