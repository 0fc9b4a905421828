"""Launch: `python launch.py tiny` starts every role on this machine, watches over them and shows what they do.

consumes  reports: "step" lines of the trainer, what the actors did since their last, evaluations, one rollout a step
emits     runs/<name>/: config.json, reward.png; model/ (train.py); logs/ (every role); all else by record.py

    check the configuration, plan cores and GPUs, start the roles
    while trainers and preprocessor run: show reports; if a role dies: start it again, if it is an actor, or end all
    tell all roles to stop; wait for the model to be saved; kill what is left; sum up

Under torchrun every rank is such a launcher, of the role that is its own (placement.py); they know of each other by
nodes.py, and rank 0 is the one that shows and writes.

Exit code 0 when the run is complete, 2 for bad input, 1 when a role failed, 130 or 143 when interrupted (Ctrl-C, TERM).
"""

import contextlib
import ctypes
import dataclasses
import importlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it comments on every peer that is lost, with its own stack

import placement
from bench.report import draw, summary
from checks import check
from config import Config, ConfigError, Start, presets
from life import ActorState, End, Life
from model_files import model_folder
from placement import Place, Ranks, plan
from record import Record, prepare_run_dir

SHUTDOWN_S = 6.0  # for roles to end by themselves when one has died, the model to be saved; then they are killed
SAVE_S = 600.0  # the same when all is well, or after Ctrl-C; a second Ctrl-C ends it
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


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
    names += "\n  PRESET --plan --nodes N --gpus-per-node M [--gpu-gib G]: only show what would run where"
    description = f"PipelineRL, minimal and hackable.\n\npresets:\n{names}\n\nfields, with the values of `{preset}`:"
    cfg = tyro.cli(Config, default=default, args=args, prog="launch.py PRESET", description=description)
    if only_eval:
        data = cfg.data if cfg.eval.data == default.eval.data else cfg.eval.data  # either name of the option will do
        cfg = dataclasses.replace(cfg, data=data, eval=dataclasses.replace(cfg.eval, data=data, every=1))
    return cfg


def run_role(
    name: str, cfg: Config, channels, start: Start, place: Place, life: Life, log: Path, launcher: int
) -> None:
    """First thing in a role's process: die with the launcher, log to a file, then the role's own `main`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the launcher decides
    libc = ctypes.CDLL(None)
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)  # nothing survives the launcher
    libc.prctl(15, name.encode())  # PR_SET_NAME: what `top` and `ps` show
    if os.getppid() != launcher:
        os._exit(1)
    from queues import Queue, Stopped

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    role, _, index = name.partition("-")
    queues = [*channels.prompts, *channels.batches, *(q for q in vars(channels).values() if isinstance(q, Queue))]
    code = 0
    try:
        module = importlib.import_module(role)
        life.begin(queues)
        module.main(cfg, channels, start, int(index or 0), place.device)
    except Stopped as waited_for:
        print(f"{name} was told to stop while it waited for {waited_for}")
    except BaseException:
        traceback.print_exc()
        code = 1
    multiprocessing.util._exit_function()  # ends child processes
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what is to be written is written: do not wait for threads, nor for process groups to be undone


class Roles:
    """The processes of this launcher."""

    FINISHING = ("train", "preprocess")  # when these have done their work, the run is complete

    def __init__(self, cfg: Config, channels, start: Start, places: dict[str, Place], context):
        self.cfg, self.channels, self.places, self.context = cfg, channels, places, context
        self.start, self.logs, self.processes, self.lives = start, cfg.run_dir / "logs", {}, {}
        self.beats: dict[str, tuple[int, float]] = {}  # the last seen, seconds since it changed
        self.looked, self.reviving = time.monotonic(), set()
        self.logs.mkdir(parents=True, exist_ok=True)
        for name in sorted(places):  # actors first: they take longest to start
            self.begin(name)

    def begin(self, name: str) -> None:
        cores, place, life = os.sched_getaffinity(0), self.places[name], Life(self.context)
        place.enter()
        arguments = (name, self.cfg, self.channels, self.start, place, life, self.logs / f"{name}.log", os.getpid())
        process = self.context.Process(target=run_role, args=arguments, name=name)
        process.start()
        os.sched_setaffinity(0, cores)
        self.processes[name], self.lives[name], self.beats[name] = process, life, (0, 0.0)

    def dead(self) -> str | None:
        """A role that ended and should not have: badly, or one of those that only end when they are told to; or that
        has given no sign of life for half the time that it has."""
        since, self.looked = time.monotonic() - self.looked, time.monotonic()
        for name, process in self.processes.items():
            beats, (seen, silent_s) = self.lives[name].beats, self.beats[name]
            # If this process itself stood still (Ctrl-Z), the others' silence in that time says nothing.
            self.beats[name] = beats, 0.0 if beats != seen or not beats else silent_s + min(since, 1.0)
            code = process.exitcode
            ended = code is not None and (code or not name.startswith(self.FINISHING))
            silent = code is None and self.beats[name][1] > self.cfg.timeout_s / 2
            if (ended or silent) and name not in self.reviving:
                return name
        return None

    def revive(self, name: str, record: Record) -> bool:
        """Whether a dead role is started again: an actor that had worked, on one machine, not too often."""
        channels, index = self.channels, int(name.partition("-")[2] or 0)
        allowed = self.start.actor_restarts < self.cfg.max_actor_restarts and channels.link is None
        if not (allowed and name.startswith("actor") and channels.actors[index] == ActorState.UP):
            return False
        self.start = dataclasses.replace(self.start, actor_restarts=self.start.actor_restarts + 1)
        times = f"{self.start.actor_restarts} of at most {self.cfg.max_actor_restarts}"
        record.take("note", {"what": f"{self.obituary(name)}\n{name} is started again ({times})"})
        record.lost_actor(index)
        self.processes[name].kill()  # it may only have stopped answering
        self.processes[name].join()
        self.reviving.add(name)
        channels.actors[index] = ActorState.DEAD
        return True

    def begin_again(self) -> None:
        """Start the actors whose groups the preprocessor has taken back."""
        for name in list(self.reviving):
            index = int(name.partition("-")[2])
            if self.channels.actors[index] == ActorState.TAKEN_BACK:
                self.channels.actors[index] = ActorState.STARTING
                self.begin(name)
                self.reviving.remove(name)

    def finished(self) -> bool:
        return all(p.exitcode == 0 for name, p in self.processes.items() if name.startswith(self.FINISHING))

    def stop(self, patience_s: float, interrupted: list[int], record: Record | None) -> None:
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
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        if code is None:
            how = f"has stopped answering ({self.beats[name][1]:.0f} s), {self.lives[name].doing}"
        log = self.logs / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
        return "\n".join([f"{name} {how}; the last lines of {log}:", *(f"  {name} | {line}" for line in lines)])


def drain(reports, record: Record | None, wait_s: float = 0.0) -> None:
    """Show and write what roles have reported; wait for a first report only."""
    if record is None:  # another rank's work
        time.sleep(wait_s)
        return
    with contextlib.suppress(ConnectionError):  # the store is lost: peers say so
        report = reports.get(timeout_s=wait_s)
        while report is not None:
            record.take(report.kind, report.values)
            report = reports.get(timeout_s=0)


def supervise(roles: Roles, record: Record | None, interrupted: list[int], peers=None) -> End:
    """Until the run is complete, interrupted, or a role is dead, here or elsewhere."""
    while True:
        # Looked at before the reports, so that none is missed. That a run is complete is rank 0's to say.
        finished, dead = record is not None and roles.finished(), roles.dead()
        drain(roles.channels.reports, record, wait_s=0.0 if finished or dead else 0.1)
        if peers and peers.end:
            return peers.end
        if dead and not roles.revive(dead, record):
            if peers and roles.processes[dead].exitcode == 1:
                time.sleep(1.0)  # if it failed because another died, that one's launcher says so before us
            end = End("failed", dead, roles.obituary(dead))
            roles.processes[dead].kill()  # one that only has stopped answering is not waited for
            return end
        if interrupted:
            return End("interrupted")
        if finished:
            return End("complete")
        roles.begin_again()


def run(cfg: Config, ranks: Ranks | None = None) -> int:
    """A checked configuration -> exit code."""
    from transport import make_channels

    cores, devices = sorted(os.sched_getaffinity(0)), [] if cfg.device == "cpu" else placement.gpus()
    places = plan(cfg, cores, devices, ranks.here if ranks else None)
    on_gpus = any(place.device != "cpu" for place in places.values())
    dtype = cfg.actor.dtype if cfg.actor.dtype != "auto" else "bfloat16" if on_gpus else "float32"
    cfg = dataclasses.replace(cfg, actor=dataclasses.replace(cfg.actor, dtype=dtype))
    if ranks:
        from nodes import Peers

        peers = Peers(dataclasses.replace(cfg, device="cuda" if on_gpus else "cpu"), ranks)
        start, link = peers.meet(lambda again: prepare_run_dir(cfg, again)), peers.link
        places = {name: places[name] for name in placement.roles(cfg, ranks.rank)}
    else:
        peers, start, link = None, prepare_run_dir(cfg), None
    interrupted: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: interrupted.append(number))
    context = multiprocessing.get_context("spawn")
    channels = make_channels(cfg, context, link)
    record = Record(cfg) if not ranks or ranks.rank == 0 else None
    roles = Roles(cfg, channels, start, places, context)
    os.sched_setaffinity(0, places["preprocess"].cores if record else cores)
    end, doing = End("interrupted"), {}
    try:
        end = supervise(roles, record, interrupted, peers)
        doing = {name: life.doing for name, life in roles.lives.items() if name != end.role}
        end = peers.conclude(end) if peers else end
    finally:
        roles.stop(min(SHUTDOWN_S, cfg.timeout_s / 4) if end.kind == "failed" else SAVE_S, interrupted, record)
        drain(channels.reports, record)
    for name, what in doing.items() if end.kind == "failed" and ranks else ():
        print(f"launch.py: rank {ranks.rank}, {name}, was {what}")
    if record is None:
        print(*[f"launch.py: rank {ranks.rank} ends: {end.what}"] if end.what else [])
        return {"complete": 0, "failed": 1}.get(end.kind, 143)
    record.close()
    return sum_up(cfg, record, end, interrupted)


def sum_up(cfg: Config, record: Record, end: End, interrupted: list[int]) -> int:
    """Say and draw what became of the run -> exit code."""
    outcome = f"failed ({end.role})" if end.kind == "failed" else end.kind
    outcome += "" if (cfg.run_dir / "model").exists() or not cfg.trainers else ", model not saved"
    outcome += f", {record.troubles} troubles" if record.troubles else ""
    steps = f"{len(record.steps)} of {cfg.steps} optimizer steps"
    print(f"{cfg.name}: {outcome} after {steps}, {record.time_s:.0f} s", summary(cfg.run_dir), sep="\n")
    if end.what:
        print(end.what)
    (cfg.run_dir / "secret").unlink(missing_ok=True)
    try:
        draw(cfg.run_dir)
    except OSError as error:
        record.trouble(f"reward.png was not drawn: {error}")
    if end.kind == "interrupted":
        return 128 + (interrupted or [signal.SIGTERM])[0]
    return 1 if end.kind == "failed" or record.troubles else 0


def main(argv: list[str]) -> int:
    ranks = placement.from_environment()
    try:
        if "--plan" in argv:
            print(placement.show(argv, parse))
            return 0
        cfg = parse(argv)
        cfg = dataclasses.replace(cfg, model=model_folder(cfg.model))
        if ranks:
            ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGTERM)  # with torchrun's agent, however that one ends
            placement.check_split(cfg, ranks.machines, ranks.local_size)
        check(cfg)
        return run(cfg, ranks)
    except ConfigError as error:
        if not ranks or ranks.local_rank == 0:
            print(f"launch.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
