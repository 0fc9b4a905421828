"""Launch: `python launch.py tiny` starts every role on this machine, watches over them and shows what they do.

consumes  reports: "step" lines of the trainer, what the actors did since their last, evaluations, one rollout a step
emits     runs/<name>/: config.json, reward.png; model/ (train.py); logs/ (every role); all else by record.py

    check the configuration, plan cores and GPUs, start the roles
    while trainers and preprocessor run: show reports; if any role dies, end everything
    tell all roles to stop; wait for the model to be saved; kill what is left; sum up

Exit code 0 when the run is complete, 2 for bad input, 1 when a role failed, 130 or 143 when interrupted (Ctrl-C, TERM).
"""

import ctypes
import dataclasses
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

from bench.report import draw, read_lines, summary
from checks import check
from config import Config, ConfigError, Start, model_folder, presets
from record import Record, checkpoints, resolved

SHUTDOWN_S = 6.0  # for roles to end by themselves when one has died, the model to be saved; then they are killed
# glibc gives large blocks back to the kernel at once, to get them again page by page: a fifth of a CPU trainer's time.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
SAVE_S = 600.0  # the same when all is well, or after Ctrl-C; a second Ctrl-C ends it


def parse(argv: list[str]) -> Config:
    """`tiny --train.lr 1e-4` -> the preset with that field changed. Exits with code 2 on an unknown preset or field."""
    import tyro

    known = presets()
    only_eval, argv = argv[:1] == ["eval"], argv[1:] if argv[:1] == ["eval"] else argv
    if only_eval and (not argv or argv[0].startswith("--")):
        argv = ["", *argv]  # of no preset
    preset, args = (argv[0], argv[1:]) if argv and argv[0] not in ("-h", "--help") else ("tiny", ["--help"])
    if preset not in known and not (only_eval and not preset):
        raise ConfigError(f"unknown preset {preset!r}: the first argument is one of {', '.join(known)} (see --help)")
    default = known[preset]() if preset else Config()
    if only_eval:
        name, once = time.strftime("eval-%Y%m%d-%H%M%S"), dataclasses.replace(default.eval, every=1, keep_best=False)
        default = dataclasses.replace(default, name=name, data=default.eval.data, eval=once, steps=0, trainers=0)
    names = "\n".join(f"  {name:8s} {function.__doc__}" for name, function in known.items())
    names += "\n  eval     [preset] --model FOLDER --data ROWS: only evaluate"
    description = f"PipelineRL, minimal and hackable.\n\npresets:\n{names}\n\nfields, with the values of `{preset}`:"
    cfg = tyro.cli(Config, default=default, args=args, prog="launch.py PRESET", description=description)
    if only_eval:
        data = cfg.data if cfg.eval.data == default.eval.data else cfg.eval.data  # either name of the option will do
        cfg = dataclasses.replace(cfg, data=data, eval=dataclasses.replace(cfg.eval, data=data, every=1))
    return dataclasses.replace(cfg, model=model_folder(cfg.model))


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
    """Role -> place. Trainers first on the GPUs, actors after them; without GPUs each gets cores of its own. The light
    roles share the trainers' cores: the decode loop must not be disturbed. Raises ConfigError if there are not the GPUs
    that `device` asks for."""
    names = [f"train-{i}" for i in range(cfg.trainers)] + [f"actor-{i}" for i in range(cfg.actors)]
    use_gpus = cfg.device == "cuda" or (cfg.device == "auto" and len(gpus) >= len(names))
    if use_gpus and len(gpus) < len(names):
        raise ConfigError(f"device cuda: trainers and actors need {len(names)} GPUs, there are {len(gpus)}")
    places, share = {}, len(cores) // len(names)
    for i, name in enumerate(names):  # actors take the first cores; what is left over goes to train-0
        begin = share * (len(names) - 1 - i)
        own = tuple(cores[begin : begin + share] if i else cores[begin:]) if share else tuple(cores)
        device, gpu = ("cuda:0", gpus[i]) if use_gpus else ("cpu", "")
        places[name] = Place(device, own, len(own) if share else 1, gpu)
    light = tuple(sorted({core for name in names[: cfg.trainers or None] for core in places[name].cores}))
    reference = places.get("train-0", Place("cpu", light, 1))
    places["preprocess"] = Place(reference.device, light, 1, reference.gpu)
    return places | {"reward": Place("cpu", light, 1)}


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
    try:
        importlib.import_module(role).main(cfg, channels, start, int(index or 0), place.device)
    except Stopped:
        pass
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # do not wait for the threads of a role that failed


class Roles:
    """The processes of a run."""

    FINISHING = ("train", "preprocess")  # when these have done their work, the run is complete

    def __init__(self, cfg: Config, channels, start: Start, places: dict[str, Place], context):
        self.channels, self.logs, self.processes = channels, cfg.run_dir / "logs", {}
        self.logs.mkdir(parents=True, exist_ok=True)
        all_cores = os.sched_getaffinity(0)
        for name, place in sorted(places.items()):  # actors first: they take longest to start
            place.enter()
            arguments = (name, cfg, channels, start, place, self.logs / f"{name}.log", os.getpid())
            self.processes[name] = context.Process(target=run_role, args=arguments, name=name)
            self.processes[name].start()
        os.sched_setaffinity(0, all_cores)

    def dead(self) -> str | None:
        """A role that ended and should not have: badly, or one of those that only end when they are told to."""
        ended = {name: p.exitcode for name, p in self.processes.items() if p.exitcode is not None}
        return next((name for name, code in ended.items() if code or not name.startswith(self.FINISHING)), None)

    def finished(self) -> bool:
        return all(p.exitcode == 0 for name, p in self.processes.items() if name.startswith(self.FINISHING))

    def stop(self, patience_s: float, interrupted: list[int], record: "Record") -> None:
        """Ask all roles to end, taking their last reports; kill those that have not after `patience_s` or a Ctrl-C."""
        self.channels.stop.value = 1
        deadline, signals = time.monotonic() + patience_s, max(1, len(interrupted))
        while any(p.exitcode is None for p in self.processes.values()):
            if time.monotonic() > deadline or len(interrupted) > signals:
                break
            drain(self.channels.reports, record, wait_s=0.02)
        for process in self.processes.values():
            process.kill()  # nothing happens to one that has ended
            process.join()

    def obituary(self, name: str) -> str:
        """How a role ended and what it said last."""
        code = self.processes[name].exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        log = self.logs / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
        return "\n".join([f"{name} {how}; the last lines of {log}:", *(f"  {name} | {line}" for line in lines)])


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
    for name, key in (("metrics", "step"), ("rollouts", "step"), *of_evals):
        path, cut = cfg.run_dir / f"{name}.jsonl", cfg.run_dir / f"{name}.cut"
        cut.write_text("".join(json.dumps(line) + "\n" for line in read_lines(path) if line[key] <= start.step))
        cut.rename(path)
    (cfg.run_dir / "trainers.rendezvous").unlink(missing_ok=True)
    print(f"launch.py: going on from {start.folder}")
    return start


def prepare_run_dir(cfg: Config) -> Start:
    """Raises ConfigError if the run folder cannot be written, or holds what is not to be replaced."""
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


def drain(reports, record: Record, wait_s: float = 0.0) -> None:
    """Show and write what roles have reported; wait for a first report only."""
    report = reports.get(timeout_s=wait_s)
    while report is not None:
        record.take(report.kind, report.values)
        report = reports.get(timeout_s=0)


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
    from queues import make_channels

    places = plan(cfg, sorted(os.sched_getaffinity(0)), [] if cfg.device == "cpu" else gpus())
    if cfg.actor.dtype == "auto":
        dtype = "float32" if places["actor-0"].device == "cpu" else "bfloat16"
        cfg = dataclasses.replace(cfg, actor=dataclasses.replace(cfg.actor, dtype=dtype))
    start = prepare_run_dir(cfg)
    interrupted: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: interrupted.append(number))
    context = multiprocessing.get_context("spawn")
    channels = make_channels(cfg, context)
    record, dead = Record(cfg), None
    roles = Roles(cfg, channels, start, places, context)
    os.sched_setaffinity(0, places["preprocess"].cores)
    try:
        dead = supervise(roles, record, interrupted)
    finally:
        roles.stop(SHUTDOWN_S if dead else SAVE_S, interrupted, record)
        drain(channels.reports, record)
        record.close()
    outcome = f"failed ({dead})" if dead else "interrupted" if interrupted else "complete"
    outcome += "" if (cfg.run_dir / "model").exists() or not cfg.trainers else ", model not saved"
    outcome += f", {record.troubles} troubles" if record.troubles else ""
    steps = f"{len(record.steps)} of {cfg.steps} optimizer steps"
    print(f"{cfg.name}: {outcome} after {steps}, {record.time_s:.0f} s", summary(cfg.run_dir), sep="\n")
    if dead:
        print(roles.obituary(dead))
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
