"""Launch: `python launch.py tiny` starts every role on this machine, watches over them and shows what they do.

consumes  reports: "step" lines of the trainer, totals of the actors, evaluations, one rollout a step
emits     runs/<name>/: config.json, metrics.jsonl, rollouts.jsonl, logs/, model/, reward.png

    check the configuration, plan cores and GPUs, start the roles
    while trainers and preprocessor run: show reports; if any role dies, end everything
    tell all roles to stop; wait for the model to be saved; kill what is left; sum up

Exit code 0 when the run is complete, 2 for bad input, 1 when a role failed, 130 or 143 when interrupted (Ctrl-C, TERM).
"""

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path

from bench.curve import draw
from config import PRESETS, Config, ConfigError, Start, check, checkpoint_folder, model_layout

START = time.monotonic()
SHUTDOWN_S = 6.0  # for roles to end by themselves when one has died, the model to be saved; then they are killed
# glibc gives large blocks back to the kernel at once, to get them again page by page: a fifth of a CPU trainer's time.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
SAVE_S = 600.0  # the same after Ctrl-C; a second Ctrl-C ends it


def parse(argv: list[str]) -> Config:
    """`tiny --train.lr 1e-4` -> the preset with that field changed. Exits with code 2 on an unknown preset or field."""
    import tyro

    names = "\n".join(f"  {name:8s} {text}" for name, (text, _) in PRESETS.items())
    asked_for_help = not argv or argv[0] in ("-h", "--help")
    if not asked_for_help and argv[0] not in PRESETS:
        raise ConfigError(f"unknown preset {argv[0]!r}: the first argument is one of {', '.join(PRESETS)} (see --help)")
    preset = next(iter(PRESETS)) if asked_for_help else argv[0]
    description = f"PipelineRL, minimal and hackable.\n\npresets:\n{names}\n\nfields, with the values of `{preset}`:"
    prog, args = ("launch.py PRESET", ["--help"]) if asked_for_help else (f"launch.py {preset}", argv[1:])
    return tyro.cli(Config, default=PRESETS[preset][1], args=args, prog=prog, description=description)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a role runs."""

    device: str  # torch device as the role sees it
    cores: tuple[int, ...]
    threads: int
    gpu: str = ""  # CUDA_VISIBLE_DEVICES

    def enter(self) -> None:
        """For the processes started from here on: what one has at its start it has in all its threads."""
        os.sched_setaffinity(0, self.cores)
        os.environ |= {
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.cores)),
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",  # models are folders
        } | ({"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu else KEEP_MEMORY)


def plan(cfg: Config, cores: list[int], gpus: list[str]) -> dict[str, Place]:
    """Role -> place. Trainers first on the GPUs, actors after them; without GPUs each gets cores of its own.

    The light roles (preprocess, reward, the launcher) share the trainers' cores: the decode loop must not be disturbed.
    Raises ConfigError if `device` asks for GPUs that are not there.
    """
    names = [f"train-{i}" for i in range(cfg.trainers)] + [f"actor-{i}" for i in range(cfg.actors)]
    use_gpus = cfg.device == "cuda" or (cfg.device == "auto" and len(gpus) >= len(names))
    if use_gpus and len(gpus) < len(names):
        raise ConfigError(f"device cuda: trainers and actors need {len(names)} GPUs, there are {len(gpus)}")
    share = len(cores) // len(names)
    places, taken = {}, 0
    for i, name in reversed(list(enumerate(names))):  # actors take the first cores; what is left over goes to train-0
        own = cores[taken : taken + share] if i else cores[taken:]
        taken += share
        own = tuple(own if share else cores)
        places[name] = Place(
            "cuda:0" if use_gpus else "cpu", own, len(own) if share else 1, gpus[i] if use_gpus else ""
        )
    light = tuple(sorted({core for name in names[: cfg.trainers] for core in places[name].cores}))
    places["preprocess"] = Place(places["train-0"].device, light, 1, places["train-0"].gpu)
    return places | {f"reward-{i}": Place("cpu", light, 1) for i in range(cfg.reward.workers)}


def make_channels(cfg: Config, context):
    """All queues, sized so that the largest message the configuration allows fits; memory is taken when used."""
    from queues import Channels, SharedMemoryQueue, SharedMemoryWeights

    stop, row_bytes = context.Value("b", 0, lock=False), 2**18
    prompt_tokens, completion_tokens = cfg.actor.max_prompt_tokens, cfg.actor.max_completion_tokens
    group_bytes = row_bytes + 8 * prompt_tokens + cfg.group_size * (24 * completion_tokens + 1024)
    batch_bytes = row_bytes + cfg.batch_size * (44 * (prompt_tokens + completion_tokens) + 1024)

    queue = functools.partial(SharedMemoryQueue, context=context, stop=stop)
    return Channels(
        prompts=queue("prompts", 4 * cfg.actors, group_bytes),
        eval_prompts=queue("held-out prompts", cfg.eval.prompts, group_bytes),
        completions=queue("completions", 64, group_bytes),
        rollouts=queue("rollouts", 64, group_bytes),
        batches=[queue("batches", cfg.preprocess.ready_batches + 1, batch_bytes) for _ in range(cfg.trainers)],
        weights=SharedMemoryWeights(model_layout(cfg.model), cfg.actor.dtype, context),
        reports=queue("reports", 256, group_bytes),
        stop=stop,
    )


def run_role(name: str, cfg: Config, channels, start: Start, place: Place, log: Path, launcher: int) -> None:
    """First thing in a role's process: die with the launcher, log to a file, then the role's own `main`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the launcher decides
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing survives the launcher
    libc.prctl(15, name.encode())  # PR_SET_NAME: what `top` and `ps` show
    if os.getppid() != launcher:
        os._exit(1)
    from queues import Stopped

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    role, _, index = name.partition("-")
    arguments = {"actor": (int(index or 0), place.device), "train": (int(index or 0), place.device)}
    arguments |= {"preprocess": (place.device,), "reward": ()}
    try:
        importlib.import_module(role).main(cfg, channels, start, *arguments[role])
    except Stopped:
        pass
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # do not wait for the threads of a role that failed


class Roles:
    """The processes of a run."""

    def __init__(self, cfg: Config, channels, start: Start, places: dict[str, Place], context):
        self.channels, self.logs, self.processes = channels, cfg.run_dir / "logs", {}
        self.logs.mkdir(parents=True, exist_ok=True)
        all_cores = os.sched_getaffinity(0)
        for name in sorted(places, key=lambda name: not name.startswith("actor")):  # the slowest to start goes first
            place = places[name]
            place.enter()
            arguments = (name, cfg, channels, start, place, self.logs / f"{name}.log", os.getpid())
            self.processes[name] = context.Process(target=run_role, args=arguments, name=name)
            self.processes[name].start()
        os.sched_setaffinity(0, all_cores)

    def dead(self, finishing: tuple[str, ...] = ("train", "preprocess")) -> str | None:
        """A role that ended and should not have: badly, or too early for its kind."""
        for name, process in self.processes.items():
            if process.exitcode is not None and (process.exitcode or not name.startswith(finishing)):
                return name
        return None

    def finished(self) -> bool:
        return all(p.exitcode == 0 for name, p in self.processes.items() if name.startswith(("train", "preprocess")))

    def stop(self, patience_s: float, interrupted: list[int], record: "Record") -> None:
        """Ask all roles to end, taking their last reports; kill those that have not ended within `patience_s` or by
        another Ctrl-C."""
        self.channels.stop.value = 1
        deadline, signals = time.monotonic() + patience_s, max(1, len(interrupted))
        while any(p.exitcode is None for p in self.processes.values()) and len(interrupted) <= signals:
            if time.monotonic() > deadline:
                break
            drain(self.channels.reports, record, wait_s=0.02)
        for process in self.processes.values():
            if process.exitcode is None:
                process.kill()
            process.join()

    def obituary(self, name: str) -> str:
        """How a role ended and what it said last."""
        code = self.processes[name].exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        log = self.logs / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
        return "\n".join([f"{name} {how}; the last lines of {log}:", *(f"  {name} | {line}" for line in lines)])


class Record:
    """Turns reports into metrics.jsonl, rollouts.jsonl, the screen and the summary."""

    COLUMNS = (
        ("step", "step", "{:d}", 5), ("time", "time_s", "{:.0f}s", 6), ("reward", "reward", "{:.3f}", 7),
        ("held-out", "eval_accuracy", "{:.3f}", 9), ("loss", "loss", "{:.4f}", 8), ("grad", "grad_norm", "{:.3f}", 7),
        ("ESS", "ess", "{:.3f}", 6), ("lag", "lag_mean", "{:.1f}", 5), ("max", "lag_max", "{:d}", 4),
        ("length", "completion_tokens_mean", "{:.1f}", 7), ("gen tok/s", "generated_tokens_per_s", "{:.0f}", 10),
        ("train tok/s", "trained_tokens_per_s", "{:.0f}", 12), ("wait", "wait_s", "{:.2f}s", 8),
    )  # fmt: skip

    def __init__(self, cfg: Config, model: dict[str, str]):
        from tqdm import tqdm

        self.cfg, self.model, self.troubles = cfg, model, 0
        self.metrics, self.rollouts = cfg.run_dir / "metrics.jsonl", cfg.run_dir / "rollouts.jsonl"
        self.steps = read_lines(self.metrics)  # those before a resume
        self.evals = [line for line in self.steps if "eval_version" in line]
        self.first_step = len(self.steps) + 1
        self.time_before_s = self.steps[-1]["time_s"] if self.steps else 0.0
        self.actors: dict[int, dict] = {}  # index -> its newest totals
        self.totals = dict.fromkeys(("generated_tokens", "update_stall_s", "idle_s", "running_s"), 0)  # all actors'
        self.pending_eval: dict = {}  # joins the line of the next step
        self.held_back: dict | None = None  # the last step's line waits for the last evaluation
        self.written: list[dict] = []  # checkpoints to complete once the line of their step is written
        options = {"total": cfg.steps, "initial": len(self.steps), "unit": "step", "desc": "starting"}
        self.bar = tqdm(**options, dynamic_ncols=True, disable=None)

    def take(self, kind: str, values: dict) -> None:
        if kind == "actor":
            self.actors[values["actor"]] = values
        elif kind == "rollout":
            self.append(self.rollouts, values)
            if self.cfg.show_every and (values["step"] - 1) % self.cfg.show_every == 0:
                self.bar.write(show_rollout(values))
        elif kind == "eval":
            self.evals.append(values)
            self.pending_eval = values
            if self.held_back and values["eval_version"] == self.cfg.steps:
                self.close_step()
        elif kind == "checkpoint":
            self.written.append(values)
            self.complete_checkpoints()
        elif kind == "trouble":
            self.trouble(values["what"])
        elif kind == "step":
            self.held_back = self.step_line(values)
            if values["step"] < self.cfg.steps or not self.cfg.eval.every:
                self.close_step()

    def trouble(self, what: str) -> None:
        """Something that the run survives, but that its exit code must tell of."""
        self.troubles += 1
        self.bar.write(f"launch.py: trouble: {what}")

    def append(self, path: Path, line: dict) -> None:
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self.trouble(f"a line of {path} was not written: {error}")
            with contextlib.suppress(OSError):  # the file may not be there
                os.truncate(path, size)  # no half line

    def complete_checkpoints(self) -> None:
        """All ranks have written theirs: flush what belongs to it, give it its name, delete the oldest."""
        while self.written and self.held_back is None:
            step, stream = self.written[0]["step"], self.written.pop(0)["stream"]
            folder = checkpoint_folder(self.cfg, step)
            try:
                (folder / "start.json").write_text(json.dumps({"step": step, "model": self.model} | stream))
                for path in filter(Path.exists, (self.metrics, self.rollouts, folder / "start.json", folder)):
                    flush(path)
                shutil.rmtree(folder.with_suffix(""), ignore_errors=True)
                folder.rename(folder.with_suffix(""))
                flush(folder.parent)
            except OSError as error:
                self.trouble(f"the checkpoint of step {step} was not completed: {error}")
                shutil.rmtree(folder, ignore_errors=True)
            for old in checkpoints(self.cfg)[: -self.cfg.keep_checkpoints]:
                shutil.rmtree(old, ignore_errors=True)

    def step_line(self, metrics: dict) -> dict:
        """The trainer's metrics with what only the launcher knows: the time, and what the actors did since the last."""
        now, before = time.monotonic() - START + self.time_before_s, self.totals
        self.totals = {key: sum(actor[key] for actor in self.actors.values()) for key in before}
        done = {key: self.totals[key] - before[key] for key in before}
        last = self.steps[-1] if self.steps else {"time_s": now - metrics["wait_s"] - metrics["train_s"]}
        rate = last.get("generated_tokens_per_s", 0.0)  # an actor reports when it has new weights: not for every step
        if done["running_s"]:
            rate = done["generated_tokens"] / done["running_s"] * len(self.actors)
        head = {"step": metrics["step"], "version": metrics["version"], "time_s": now}
        return head | metrics | {
            "generated_tokens_per_s": rate,
            "trained_tokens_per_s": metrics["tokens"] / (now - last["time_s"]),
            "update_stall_s": done["update_stall_s"],
            "actor_idle_s": done["idle_s"],
            "in_flight": sum(actor["in_flight"] for actor in self.actors.values()),
        }  # fmt: skip

    def close_step(self) -> None:
        """Write the line of a step, with the evaluation that came in since the last one, if any."""
        if self.held_back is None:
            return
        line = self.held_back | self.pending_eval
        self.held_back, self.pending_eval = None, {}
        self.steps.append(line)
        self.append(self.metrics, line)
        if (line["step"] - self.first_step) % 25 == 0:
            self.bar.write("".join(f"{title:>{width}}" for title, _, _, width in self.COLUMNS))
        known = {key for key, value in line.items() if value is not None}
        cells = ((form.format(line[key]) if key in known else "", width) for _, key, form, width in self.COLUMNS)
        self.bar.write("".join(f"{cell:>{width}}" for cell, width in cells))
        self.bar.set_description(f"reward {line['reward']:.2f}", refresh=False)
        self.bar.update()
        self.complete_checkpoints()

    def summary(self, outcome: str) -> str:
        """The run in a few lines."""
        steps, evals, seconds = self.steps, self.evals, time.monotonic() - START + self.time_before_s
        lines = [f"{self.cfg.name}: {outcome} after {len(steps)} of {self.cfg.steps} optimizer steps, {seconds:.0f} s"]
        if evals:
            start, end = (f"{e['eval_accuracy']:.1%} (version {e['eval_version']})" for e in (evals[0], evals[-1]))
            lines.append(f"  held-out success  {start} -> {end}, {self.cfg.eval.prompts} prompts")
        if len(steps) > 1:
            ess = [step["ess"] for step in steps if step["ess"] is not None] or [math.nan]  # None: a skipped step
            mean_lag = statistics.fmean(step["lag_mean"] for step in steps)
            total = {key: sum(step[key] for step in steps[1:]) for key in ("samples", "wait_s")}
            training_s, actors_s = steps[-1]["time_s"] - steps[0]["time_s"], self.totals["running_s"] or 1.0
            stall_s, idle = self.totals["update_stall_s"], self.totals["idle_s"] / actors_s
            lines += [
                f"  reward            {steps[0]['reward']:.3f} -> {steps[-1]['reward']:.3f}",
                f"  speed             {total['samples'] / training_s:.0f} samples/s",
                f"  lag               mean {mean_lag:.2f}, max {max(step['lag_max'] for step in steps)} steps",
                f"  ESS               mean {statistics.fmean(ess):.3f}, min {min(ess):.3f}",
                f"  update stall      {stall_s / actors_s:.2%} of the actors' time ({1000 * stall_s:.0f} ms in all)",
                f"  idle              actors {idle:.1%}, trainer {total['wait_s'] / training_s:.1%}",
            ]
        return "\n".join([*lines, f"  everything is in  {self.cfg.run_dir}"])


def show_rollout(rollout: dict) -> str:
    """A rollout in which every token stands under the version of the weights that sampled it: v3[7+5=12] v4[-3=9#9]."""
    runs: list[tuple[int, str]] = []
    for token, version in zip(rollout["tokens"], rollout["versions"], strict=True):
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + token)
        else:
            runs.append((version, token))
    text = " ".join(f"v{version}[{part}]" for version, part in runs)
    about = f"{rollout['prompt']!r}, answer {rollout['answer']!r}, reward {rollout['reward']:g}"
    return f"  ┌ trained at step {rollout['step']}: {about}\n  └ {text}"


def read_lines(path: Path) -> list[dict]:
    """Of a .jsonl file that may not be there; a last line without an end is half written and left out."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def flush(path: Path) -> None:
    """To the disk, whatever happens to the machine; a folder's entries, for a folder."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def checkpoints(cfg: Config) -> list[Path]:
    """Complete ones, the oldest first."""
    folders = [folder for folder in checkpoint_folder(cfg, 0).parent.glob("step-*") if not folder.suffix]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("step-")))


def fingerprint(model: Path) -> dict[str, str]:
    """Of each file of weights: its first and last megabyte, which tell models apart wherever they lie."""
    digests = {}
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            head = file.read(2**20)
            file.seek(max(0, path.stat().st_size - 2**20))
            digests[path.name] = hashlib.sha256(head + file.read()).hexdigest()
    return digests


def resume(cfg: Config, model: dict[str, str]) -> Start:
    """The newest complete checkpoint; what the run did after it is cut from its files.

    Raises ConfigError if there is none, or it is of a run that this configuration cannot continue.
    """
    found = checkpoints(cfg)
    if not found:
        raise ConfigError(f"{cfg.run_dir} has no complete checkpoint to resume: begin anew, with --overwrite")
    before, now = json.loads((cfg.run_dir / "config.json").read_text()), json.loads(as_json(cfg))
    for key in ("data", "seed", "batch_size", "group_size"):
        if before[key] != now[key]:
            raise ConfigError(f"--resume: {key} is {now[key]}, the run has {before[key]}: what it did would not fit")
    state = json.loads((found[-1] / "start.json").read_text())
    if (was := state.pop("model")) != model:
        changed = sorted(name for name in {**was, **model} if was.get(name) != model.get(name))
        raise ConfigError(
            f"--resume: {cfg.model} is not the model that the run began with: {', '.join(changed)} differs"
        )
    start = Start(folder=found[-1], **state)
    if start.step >= cfg.steps:
        raise ConfigError(f"--resume: {cfg.run_dir} is complete after {start.step} steps: give more --steps to go on")
    for folder in checkpoint_folder(cfg, 0).parent.glob("*.unfinished"):
        print(f"launch.py: {folder} is half-written and ignored")
        shutil.rmtree(folder)
    for path in (cfg.run_dir / "metrics.jsonl", cfg.run_dir / "rollouts.jsonl"):
        kept = [json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= start.step]
        path.with_suffix(".cut").write_text("".join(kept))
        path.with_suffix(".cut").rename(path)
    (cfg.run_dir / "trainers.rendezvous").unlink(missing_ok=True)
    print(f"launch.py: going on from {start.folder}")
    return start


def as_json(cfg: Config) -> str:
    return json.dumps(dataclasses.asdict(cfg), indent=2, default=str) + "\n"


def prepare_run_dir(cfg: Config, model: dict[str, str]) -> Start:
    """Raises ConfigError if it cannot be written, or there is something in it that is no run."""
    if cfg.run_dir.is_dir() and any(cfg.run_dir.iterdir()) and not cfg.resume:
        if not (cfg.run_dir / "config.json").is_file():
            raise ConfigError(f"{cfg.run_dir} is not empty and not a run: it is not replaced, choose another --name")
        shutil.rmtree(cfg.run_dir)
    try:
        start = resume(cfg, model) if cfg.resume else Start()
        cfg.run_dir.mkdir(parents=True, exist_ok=True)
        (cfg.run_dir / "config.json").write_text(as_json(cfg))
    except OSError as error:
        raise ConfigError(f"the run folder cannot be written: {error}; choose another --runs-dir") from None
    return start


def drain(reports, record: Record, wait_s: float = 0.0) -> None:
    """Show and write what roles have reported; wait for a first report only."""
    report = reports.try_get(wait_s=wait_s)
    while report is not None:
        record.take(report.kind, report.values)
        report = reports.try_get()


def supervise(roles: Roles, record: Record, interrupted: list[int]) -> str | None:
    """Until the run is complete, interrupted, or a role is dead: then its name."""
    while not interrupted:
        finished, dead = roles.finished(), roles.dead()  # looked at before the reports, so that none is missed
        drain(roles.channels.reports, record, wait_s=0.0 if finished or dead else 0.1)
        if dead or finished:
            return dead
    return None


def gpus() -> list[str]:
    import torch

    found = [str(i) for i in range(torch.cuda.device_count())]
    return os.environ["CUDA_VISIBLE_DEVICES"].split(",") if found and "CUDA_VISIBLE_DEVICES" in os.environ else found


def run(cfg: Config) -> int:
    """A checked configuration -> exit code."""
    places = plan(cfg, sorted(os.sched_getaffinity(0)), [] if cfg.device == "cpu" else gpus())
    model = fingerprint(cfg.model)
    start = prepare_run_dir(cfg, model)
    interrupted: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: interrupted.append(number))
    context = multiprocessing.get_context("spawn")
    channels = make_channels(cfg, context)
    record, dead = Record(cfg, model), None
    roles = Roles(cfg, channels, start, places, context)
    os.sched_setaffinity(0, places["preprocess"].cores)
    try:
        dead = supervise(roles, record, interrupted)
    finally:
        roles.stop(SAVE_S if interrupted else SHUTDOWN_S, interrupted, record)
        drain(channels.reports, record)
        record.close_step()
        record.bar.close()
    outcome = f"failed ({dead})" if dead else "interrupted" if interrupted else "complete"
    outcome += "" if (cfg.run_dir / "model").exists() else ", model not saved"
    outcome += f", {record.troubles} troubles" if record.troubles else ""
    print(record.summary(outcome), *([roles.obituary(dead)] if dead else []), sep="\n")
    try:
        draw(cfg.run_dir)
    except OSError as error:
        record.trouble(f"reward.png was not drawn: {error}")
    return 1 if dead or record.troubles else 128 + interrupted[0] if interrupted else 0


def main(argv: list[str]) -> int:
    try:
        cfg = parse(argv)
        check(cfg)
        return run(cfg)
    except ConfigError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
