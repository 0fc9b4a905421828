"""Record: what a run leaves behind, and how one goes on from it. Reports of the roles become files, metrics for
whatever shows them, and the screen.

consumes  reports, of the kinds that `Record.take` lists
emits     metrics, actors, evals, rollouts, eval_rollouts, each .jsonl; checkpoints and best/, complete; logs
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from bench.report import TITLES, read_lines, show_eval, show_rollout, show_step
from config import Config, ConfigError, Start
from model_files import copy_model_files

START = time.monotonic()


def tensorboard(cfg: Config, first_step: int) -> tuple[Callable[[dict, int], None], Callable[[], None]]:
    """A function that takes metrics and the step, and one that ends it; so are the others. A resume goes on at
    `first_step`: what the run did after its checkpoint is purged."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(cfg.run_dir / "tensorboard", purge_step=first_step if first_step > 1 else None)

    def log(values: dict, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def wandb(cfg: Config, _: int) -> tuple[Callable[[dict, int], None], Callable[[], None]]:
    """Account, project and mode are those of the environment (WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE)."""
    import wandb

    run = wandb.init(name=cfg.name, dir=cfg.run_dir, config=resolved(cfg))
    run.define_metric("*", step_metric="step")  # W&B's own only count up, and an evaluation comes in late
    return lambda values, step: run.log(values | {"step": step}), run.finish


def trackio(cfg: Config, _: int) -> tuple[Callable[[dict, int], None], Callable[[], None]]:
    """Shown by `trackio show`; kept where TRACKIO_DIR says."""
    import trackio

    trackio.init(project=os.environ.get("TRACKIO_PROJECT", "pipelinerl"), name=cfg.name, config=resolved(cfg))
    return lambda values, step: trackio.log(values, step=step), trackio.finish


SINKS = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}


def resolved(cfg: Config) -> dict:
    """Every field, in plain values."""
    return json.loads(json.dumps(dataclasses.asdict(cfg), default=str))


class Logs:
    """The metrics of every step and evaluation, one dictionary, to all that `cfg.log` names."""

    def __init__(self, cfg: Config, first_step: int, trouble: Callable[[str], None]):
        names = cfg.log.split(",") if cfg.log not in ("auto", "none") else []
        if cfg.log == "auto" and importlib.util.find_spec("tensorboard"):
            names = ["tensorboard"]
        self.trouble, self.sinks = trouble, {}
        for name in names:
            self._try(name, lambda name=name: self.sinks.update({name: SINKS[name](cfg, first_step)}))

    def write(self, values: dict, step: int) -> None:
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        for name, (log, _) in list(self.sinks.items()):
            self._try(name, lambda log=log: log(numbers, step))

    def close(self) -> None:
        for name, (_, close) in list(self.sinks.items()):
            self._try(name, close)

    def _try(self, name: str, action: Callable) -> None:
        """A log that fails, by whatever of its network or disk, is given up; the run goes on."""
        try:
            action()
        except Exception as error:
            self.sinks.pop(name, None)
            self.trouble(f"nothing more is logged to {name}: {error!r}")


class Record:
    """Takes the roles' reports, as they come."""

    def __init__(self, cfg: Config):
        from tqdm import tqdm

        self.cfg, self.folder, self.troubles = cfg, cfg.run_dir, 0
        self.steps = read_lines(self.folder / "metrics.jsonl")  # those before a resume
        self.first_step = len(self.steps) + 1
        self.time_before_s = self.steps[-1]["time_s"] if self.steps else 0.0
        self.in_flight: dict[int, int] = {}  # actor -> sequences
        self.done = Counter()  # by the actors since the last step
        self.actor_restarts = 0
        self.verified, self.longest_call_s = Counter(), 0.0  # by the verifiers since the last step
        best, old = self.folder / "best", self.folder / "best.old"
        if old.exists() and not best.exists():
            old.rename(best)
        # The evaluation that scored best.
        self.best = json.loads((best / "eval.json").read_text()) if (best / "eval.json").is_file() else {}
        self.evaluated: dict[int, dict] = {}  # version -> what is in: its "result", its "weights"
        options = {"total": cfg.steps, "initial": len(self.steps), "unit": "step", "desc": "starting"}
        self.bar = tqdm(**options, dynamic_ncols=True, disable=None)
        self.logs = Logs(cfg, self.first_step, self.trouble)

    @property
    def time_s(self) -> float:
        return time.monotonic() - START + self.time_before_s

    def take(self, kind: str, values: dict) -> None:
        if kind == "actor":
            self.append("actors.jsonl", {"time_s": self.time_s, "step": len(self.steps)} | values)
            self.in_flight[values.pop("actor")] = values.pop("in_flight")
            self.done.update(values)
        elif kind == "step":
            self.take_step(values)
        elif kind == "reward":
            self.longest_call_s = max(self.longest_call_s, values.pop("longest_s"))
            self.verified.update(values)
        elif kind == "eval":
            line = {"time_s": self.time_s} | values
            self.append("evals.jsonl", line)
            self.logs.write(line, values["eval_version"])
            self.bar.write(show_eval(values))
            self.keep_best(values["eval_version"], result=line)
        elif kind == "evaluated":
            self.keep_best(values["version"], weights=True)
        elif kind == "eval_rollout":
            self.append("eval_rollouts.jsonl", values)
        elif kind == "note":
            self.bar.write("  " + values["what"])
        elif kind == "rollout":
            self.append("rollouts.jsonl", values)
            if self.cfg.show_every and (values["step"] - 1) % self.cfg.show_every == 0:
                self.bar.write(show_rollout(values))
        elif kind == "checkpoint":
            self.complete_checkpoint(values)
        elif kind == "trouble":
            self.trouble(values["what"])

    def lost_actor(self, index: int) -> None:
        """It died, and is started again."""
        self.actor_restarts += 1
        self.in_flight.pop(index, None)

    def trouble(self, what: str) -> None:
        """Something that the run survives, but that its exit code must tell of."""
        self.troubles += 1
        self.bar.write(f"launch.py: trouble: {what}")

    def append(self, name: str, line: dict) -> None:
        path = self.folder / name
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self.trouble(f"a line of {path} was not written: {error}")
            with contextlib.suppress(OSError):  # the file may not be there
                os.truncate(path, size)  # no half line

    def close(self) -> None:
        """Nothing more will come: an evaluation that was cut short leaves no weights."""
        for folder in self.folder.glob("evaluated-*.unfinished"):
            shutil.rmtree(folder, ignore_errors=True)
        self.logs.close()
        self.bar.close()

    def keep_best(self, version: int, **known) -> None:
        """Once an evaluation's result and its weights are both in: they become best/, unless older ones scored more."""
        found = self.evaluated[version] = self.evaluated.get(version, {}) | known
        if not self.cfg.eval.keep_best or len(found) < 2:
            return
        folder, best, old = self.cfg.evaluated_dir(version), self.folder / "best", self.folder / "best.old"
        del self.evaluated[version]
        try:
            if self.score(found["result"]) <= self.score(self.best):
                shutil.rmtree(folder)
                return
            copy_model_files(self.cfg.model, folder)
            (folder / "eval.json").write_text(json.dumps(found["result"]) + "\n")
            if best.exists():
                best.rename(old)
            folder.rename(best)  # a kill between the two leaves best.old
            shutil.rmtree(old, ignore_errors=True)
            self.best = found["result"]
        except OSError as error:
            self.trouble(f"the weights of version {version}, the best so far, were not kept: {error}")
            shutil.rmtree(folder, ignore_errors=True)

    def score(self, result: dict) -> float:
        """By which evaluations are compared: the mean over the samples, or pass@1 where there are none. None of more
        than 5% failed calls is the best: it would be that of what could be verified."""
        if result.get("eval_failed", 0) > 0.05 * result.get("eval_samples", 0):
            return -math.inf
        return result.get("eval_accuracy" if self.cfg.eval.samples else "eval_greedy", -math.inf)

    def complete_checkpoint(self, start: dict) -> None:
        """All ranks have written theirs: flush what belongs to it, give it its name, delete the oldest."""
        folder = self.cfg.checkpoint_dir(start["step"])
        try:
            (folder / "start.json").write_text(json.dumps(start))
            for path in (*self.folder.glob("*.jsonl"), folder / "start.json", folder):
                flush(path)
            shutil.rmtree(folder.with_suffix(""), ignore_errors=True)
            folder.rename(folder.with_suffix(""))
            flush(folder.parent)
        except OSError as error:
            self.trouble(f"the checkpoint of step {start['step']} was not completed: {error}")
            shutil.rmtree(folder, ignore_errors=True)
        for old in checkpoints(self.cfg)[: -self.cfg.keep_checkpoints]:
            shutil.rmtree(old, ignore_errors=True)

    def take_step(self, metrics: dict) -> None:
        """Add what only the launcher knows: the time, and what the actors did since the last step; write and show."""
        now, done, self.done = self.time_s, self.done, Counter()
        verified, self.verified, longest_s, self.longest_call_s = self.verified, Counter(), self.longest_call_s, 0.0
        last = self.steps[-1] if self.steps else {"time_s": now - metrics["wait_s"] - metrics["train_s"]}
        rate = last.get("generated_tokens_per_s", 0.0)  # an actor reports when it has new weights: not for every step
        if done["running_s"]:
            rate = done["generated_tokens"] / done["running_s"] * len(self.in_flight)
        line = {"step": metrics["step"], "version": metrics["version"], "time_s": now} | metrics | {
            "generated_tokens_per_s": rate,
            "trained_tokens_per_s": metrics["tokens"] / (now - last["time_s"]),
            "update_stall_s": done["update_stall_s"],
            "actor_idle_s": done["idle_s"],
            "actor_running_s": done["running_s"],
            "in_flight": sum(self.in_flight.values()),
            "actor_restarts": self.actor_restarts,
            "verifier_calls": verified["calls"],
            "verifier_calls_failed": sum(n for key, n in verified.items() if key.startswith("failed_")),
            "verifier_mean_s": verified["busy_s"] / max(1, verified["calls"]),
            "verifier_max_s": longest_s,
            "verifier_busy": verified["busy_s"] / (verified["running_s"] or 1.0),
        }  # fmt: skip
        self.steps.append(line)
        self.append("metrics.jsonl", line)
        self.logs.write(line, line["step"])
        if (line["step"] - self.first_step) % 25 == 0:
            self.bar.write(TITLES)
        self.bar.write(show_step(line))
        self.bar.set_description(f"reward {line['reward']:.2f}", refresh=False)
        self.bar.update()


def checkpoints(cfg: Config) -> list[Path]:
    """Complete ones, the oldest first."""
    folders = [folder for folder in cfg.checkpoint_dir(0).parent.glob("step-*") if not folder.suffix]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("step-")))


def resume(cfg: Config) -> Start:
    """The newest complete checkpoint; what the run did after it is cut from its files. Raises ConfigError if there is
    none, or it is of a run that this configuration cannot continue (what the model's files hold is not compared)."""
    found = checkpoints(cfg)
    if not found:
        raise ConfigError(f"{cfg.run_dir} has no complete checkpoint to resume: begin anew, with --overwrite")
    before, now = json.loads((cfg.run_dir / "config.json").read_text()), resolved(cfg)
    for key in ("model", "data", "prompt", "seed", "batch_size", "group_size"):
        if before[key] != now[key]:
            raise ConfigError(f"--resume: {key} is {now[key]}, the run has {before[key]}: what it did would not fit")
    state, every = json.loads((found[-1] / "start.json").read_text()), max(1, cfg.eval.every)
    evals = [line["eval_version"] for line in read_lines(cfg.run_dir / "evals.jsonl")]
    last_eval = max((version for version in evals if version <= state["step"]), default=-1)
    start = Start(folder=found[-1], next_eval=(last_eval // every + 1) * every, **state)
    if start.step > cfg.steps or (start.step == cfg.steps and (last_eval == cfg.steps or not cfg.eval.every)):
        raise ConfigError(f"--resume: {cfg.run_dir} is complete after {start.step} steps: give more --steps to go on")
    for folder in (*cfg.checkpoint_dir(0).parent.glob("*.unfinished"), *cfg.run_dir.glob("evaluated-*.unfinished")):
        print(f"launch.py: {folder} is half-written and ignored")
        shutil.rmtree(folder)
    of_evals = ("evals", "eval_version"), ("eval_rollouts", "eval_version")
    for name, key in (("metrics", "step"), ("rollouts", "step"), ("actors", "step"), *of_evals):
        path, cut = cfg.run_dir / f"{name}.jsonl", cfg.run_dir / f"{name}.cut"
        cut.write_text("".join(json.dumps(line) + "\n" for line in read_lines(path) if line[key] <= start.step))
        cut.rename(path)
    (cfg.run_dir / "trainers.rendezvous").unlink(missing_ok=True)
    print(f"launch.py: going on from {start.folder}")
    return start


def prepare_run_dir(cfg: Config, again: bool = False) -> Start:
    """Raises ConfigError if the run folder cannot be written, or holds what is not to be replaced. again: it is this
    same run's, which torchrun has started anew: go on from its newest checkpoint, if it has one."""
    if again:
        found = checkpoints(cfg)
        cfg = dataclasses.replace(cfg, resume=bool(found), overwrite=not found)
    if cfg.overwrite and cfg.resume:
        raise ConfigError("--overwrite would delete what --resume is to go on with: give one of them")
    folder = cfg.run_dir
    try:
        start = resume(cfg) if cfg.resume else Start()
        if not cfg.resume and folder.exists() and (folder.is_file() or any(folder.iterdir())):
            if not cfg.overwrite:
                choices = "give --overwrite to replace it, --resume to go on with it, or another --name"
                raise ConfigError(f"{folder} already holds a run: {choices}")
            if not (folder / "config.json").is_file():
                raise ConfigError(f"{folder} is not empty and not a run: it is not replaced, choose another --name")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(resolved(cfg), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"the run folder cannot be written: {error}; choose another --runs-dir") from None
    return start


def flush(path: Path) -> None:
    """To the disk, whatever happens to the machine; a folder's entries, for a folder."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
