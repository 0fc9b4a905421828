"""Launch: `python launch.py tiny` starts every role on this machine, watches over them and shows what they do.

consumes  reports: "step" lines of the trainer, totals of the actors, evaluations, one rollout a step
emits     runs/<name>/: config.json, metrics.jsonl, rollouts.jsonl, logs/, model/, reward.png

    check the configuration, plan cores and GPUs, start the roles
    while trainers and preprocessor run: show reports; if any role dies, end everything
    tell all roles to stop; wait for the model to be saved; kill what is left; sum up

Exit code 0 when the run is complete, 2 for bad input, 1 when a role failed, 130 or 143 when interrupted (Ctrl-C, TERM).
"""

import time

START = time.monotonic()

import contextlib  # noqa: E402 (START is the launch)
import ctypes  # noqa: E402
import dataclasses  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402

from config import PRESETS, Config, ConfigError, check, model_layout  # noqa: E402

SHUTDOWN_S = 8.0  # for roles to end by themselves, the model to be saved; then they are killed

# ---------------------------------------------------------------- command line


def parse(argv: list[str]) -> Config:
    """`tiny --train.lr 1e-4` -> the preset with that field changed. Exits with code 2 on an unknown preset or field."""
    import tyro

    names = "\n".join(f"  {name:8s} {text}" for name, (text, _) in PRESETS.items())
    asked_for_help = not argv or argv[0] in ("-h", "--help")
    if not asked_for_help and argv[0] not in PRESETS:
        raise ConfigError(f"unknown preset {argv[0]!r}: the first argument is one of {', '.join(PRESETS)} (see --help)")
    preset = next(iter(PRESETS)) if asked_for_help else argv[0]
    description = f"PipelineRL, minimal and hackable.\n\npresets:\n{names}\n\nfields, with the values of `{preset}`:"
    prog = f"launch.py {'PRESET' if asked_for_help else preset}"
    args = ["--help"] if asked_for_help else argv[1:]
    return tyro.cli(Config, default=PRESETS[preset][1], args=args, prog=prog, description=description)


# ---------------------------------------------------------------- plan


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a role runs."""

    device: str  # torch device as the role sees it
    cores: tuple[int, ...]
    gpu: str = ""  # CUDA_VISIBLE_DEVICES


def plan(cfg: Config, cores: list[int], gpus: list[str]) -> dict[str, Place]:
    """Role -> place. Trainers first on the GPUs, actors after them; without GPUs each gets cores of its own.

    The light roles (preprocess, reward, the launcher) share the trainers' cores: the decode loop is the one that must
    not be disturbed. Raises ConfigError if `device` asks for GPUs that are not there.
    """
    names = [f"train-{i}" for i in range(cfg.trainers)] + [f"actor-{i}" for i in range(cfg.actors)]
    use_gpus = cfg.device == "cuda" or (cfg.device == "auto" and len(gpus) >= len(names))
    if use_gpus and len(gpus) < len(names):
        raise ConfigError(f"device cuda: {cfg.trainers} trainers + {cfg.actors} actors need {len(names)} GPUs, there are {len(gpus)}")
    share = len(cores) // len(names)
    places, taken = {}, 0
    for i, name in reversed(list(enumerate(names))):  # actors take the first cores; what is left over goes to train-0
        own = cores[taken : taken + share] if i else cores[taken:]
        taken += share
        places[name] = Place("cuda" if use_gpus else "cpu", tuple(own if share else cores), gpus[i] if use_gpus else "")
    light = tuple(sorted({core for name in names if name.startswith("train") for core in places[name].cores}))
    places["preprocess"] = Place(places["train-0"].device, light, places["train-0"].gpu)
    places |= {f"reward-{i}": Place("cpu", light) for i in range(cfg.reward.workers)}
    return places


def make_channels(cfg: Config, context):
    """All queues, sized so that the largest message the configuration allows fits; memory is taken when used."""
    from queues import Channels, SharedMemoryQueue, SharedMemoryWeights

    stop = context.Value("b", 0, lock=False)
    prompt_tokens, completion_tokens = cfg.actor.max_prompt_tokens, cfg.actor.max_completion_tokens
    row_bytes = 2**18
    group_bytes = row_bytes + 8 * prompt_tokens + cfg.group_size * (24 * completion_tokens + 1024)
    batch_bytes = row_bytes + cfg.batch_size * (44 * (prompt_tokens + completion_tokens) + 1024)

    def queue(name: str, slots: int, slot_bytes: int) -> SharedMemoryQueue:
        return SharedMemoryQueue(name, slots, slot_bytes, context, stop)

    return Channels(
        prompts=queue("prompts", 4 * cfg.actors, group_bytes),
        eval_prompts=queue("held-out prompts", cfg.eval.prompts, group_bytes),
        completions=queue("completions", 64, group_bytes),
        rollouts=queue("rollouts", 64, group_bytes),
        batches=[queue(f"batches for trainer {i}", cfg.preprocess.ready_batches + 1, batch_bytes) for i in range(cfg.trainers)],
        weights=SharedMemoryWeights(model_layout(cfg.model), cfg.actor.dtype, context),
        reports=queue("reports", 256, group_bytes),
        stop=stop,
    )


# ---------------------------------------------------------------- roles as processes


def run_role(name: str, cfg: Config, channels, place: Place, log: Path, launcher: int) -> None:
    """First thing in a role's process: die with the launcher, log to a file, then the role's own `main`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the launcher decides
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing survives the launcher
    if os.getppid() != launcher:
        os._exit(1)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from queues import Stopped

    role, _, index = name.partition("-")
    arguments = {"actor": (int(index or 0), place.device), "train": (int(index or 0), place.device)}
    arguments |= {"preprocess": (place.device,), "reward": ()}
    try:
        importlib.import_module(role).main(cfg, channels, *arguments[role])
    except Stopped:
        pass
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # do not wait for threads of a role that failed


@contextlib.contextmanager
def environment(place: Place):
    """What a role's process inherits at its start: cores, thread counts, the GPU."""
    variables = {
        "OMP_NUM_THREADS": str(len(place.cores)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, place.cores)),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # models are folders
    }
    if place.gpu:
        variables["CUDA_VISIBLE_DEVICES"] = place.gpu
    saved, cores = dict(os.environ), os.sched_getaffinity(0)
    os.environ.update(variables)
    os.sched_setaffinity(0, place.cores)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
        os.sched_setaffinity(0, cores)


class Roles:
    """The processes of a run."""

    def __init__(self, cfg: Config, channels, places: dict[str, Place], context):
        self.channels, self.logs = channels, cfg.run_dir / "logs"
        self.logs.mkdir(parents=True)
        self.processes = {}
        for name in sorted(places, key=lambda name: not name.startswith("actor")):  # the slowest to start goes first
            arguments = (name, cfg, channels, places[name], self.logs / f"{name}.log", os.getpid())
            self.processes[name] = context.Process(target=run_role, args=arguments, name=name)
            with environment(places[name]):
                self.processes[name].start()

    def dead(self, finishing: tuple[str, ...] = ("train", "preprocess")) -> str | None:
        """A role that ended and should not have: badly, or too early for its kind."""
        for name, process in self.processes.items():
            if process.exitcode is not None and (process.exitcode or not name.startswith(finishing)):
                return name
        return None

    def finished(self) -> bool:
        return all(p.exitcode == 0 for name, p in self.processes.items() if name.startswith(("train", "preprocess")))

    def stop(self, deadline: float) -> None:
        """Ask all roles to end, keep the report queue flowing meanwhile, kill those that have not by the deadline."""
        self.channels.stop.value = 1
        while any(p.exitcode is None for p in self.processes.values()) and time.monotonic() < deadline:
            time.sleep(0.02)
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


# ---------------------------------------------------------------- what a run shows and leaves


class Record:
    """Turns reports into metrics.jsonl, rollouts.jsonl, the screen, the summary and reward.png."""

    COLUMNS = (
        ("step", "step", "{:d}", 5), ("time", "time_s", "{:.0f}s", 6), ("reward", "reward", "{:.3f}", 7),
        ("held-out", "eval_accuracy", "{:.3f}", 9), ("loss", "loss", "{:.4f}", 8), ("grad", "grad_norm", "{:.3f}", 7),
        ("ESS", "ess", "{:.3f}", 6), ("lag", "lag_mean", "{:.1f}", 5), ("max", "lag_max", "{:d}", 4),
        ("length", "completion_tokens_mean", "{:.1f}", 7), ("gen tok/s", "generated_tokens_per_s", "{:.0f}", 10),
        ("train tok/s", "trained_tokens_per_s", "{:.0f}", 12), ("wait", "wait_s", "{:.2f}s", 6),
    )  # fmt: skip

    def __init__(self, cfg: Config):
        from tqdm import tqdm

        self.cfg, self.steps, self.evals = cfg, [], []
        self.actors: dict[int, tuple[dict, dict]] = {}  # index -> totals at the last step line, totals now
        self.last_step_time: float | None = None
        self.held_back: dict | None = None  # the last step's line waits for the last evaluation
        self.pending_eval: dict = {}
        self.metrics_file = (cfg.run_dir / "metrics.jsonl").open("a")
        self.rollouts_file = (cfg.run_dir / "rollouts.jsonl").open("a")
        self.bar = tqdm(total=cfg.steps, unit="step", dynamic_ncols=True, disable=None, smoothing=0.1)
        self.bar.set_description("starting")

    def write(self, text: str) -> None:
        self.bar.write(text, file=sys.stdout)
        sys.stdout.flush()

    def take(self, kind: str, values: dict) -> None:
        getattr(self, f"_take_{kind}")(values)

    def _take_actor(self, totals: dict) -> None:
        before, _ = self.actors.get(totals["actor"], (dict.fromkeys(totals, 0), totals))
        self.actors[totals["actor"]] = (before, totals)

    def _take_eval(self, values: dict) -> None:
        self.evals.append(values | {"time_s": time.monotonic() - START})
        self.pending_eval = values
        if self.held_back is not None and values["eval_version"] == self.cfg.steps:
            self.close_step()

    def _take_step(self, metrics: dict) -> None:
        now = time.monotonic()
        per_s = rates(self.actors)
        if per_s:
            self.actors = {index: (totals, totals) for index, (_, totals) in self.actors.items()}
        elif self.steps:
            per_s = {"generated_tokens_per_s": self.steps[-1]["generated_tokens_per_s"], "update_stall_s": 0.0}
        step_s = now - self.last_step_time if self.last_step_time else metrics["wait_s"] + metrics["train_s"]
        self.last_step_time = now
        head = {"step": metrics["step"], "version": metrics["version"], "time_s": now - START}
        rate = {"generated_tokens_per_s": 0.0, "update_stall_s": 0.0} | per_s
        self.held_back = head | metrics | rate | {"trained_tokens_per_s": metrics["tokens"] / step_s}
        if metrics["step"] < self.cfg.steps or not self.cfg.eval.every:
            self.close_step()

    def close_step(self) -> None:
        """Write the line of a step, with the evaluation that came in since the last one, if any."""
        if self.held_back is None:
            return
        line = self.held_back | self.pending_eval
        self.held_back, self.pending_eval = None, {}
        self.steps.append(line)
        self.metrics_file.write(json.dumps(line) + "\n")
        self.metrics_file.flush()
        if len(self.steps) % 25 == 1:
            self.write("".join(f"{title:>{width}}" for title, _, _, width in self.COLUMNS))
        cells = (f.format(line[key]) if line.get(key) is not None else "" for _, key, f, _ in self.COLUMNS)
        self.write("".join(f"{cell:>{column[3]}}" for cell, column in zip(cells, self.COLUMNS, strict=True)))
        self.bar.set_description(f"reward {line['reward']:.2f}")
        self.bar.update(line["step"] - self.bar.n)

    def _take_rollout(self, rollout: dict) -> None:
        self.rollouts_file.write(json.dumps(rollout) + "\n")
        self.rollouts_file.flush()
        if self.cfg.show_every and rollout["step"] % self.cfg.show_every == 1 % self.cfg.show_every:
            self.write(show_rollout(rollout))

    def summary(self, outcome: str) -> str:
        """The run in a few lines."""
        steps, seconds = self.steps, time.monotonic() - START
        lines = [f"{self.cfg.name}: {outcome} after {len(steps)} of {self.cfg.steps} optimizer steps, {seconds:.0f} s"]
        if self.evals:
            first, last = self.evals[0], self.evals[-1]
            lines.append(
                f"  held-out success  {first['eval_accuracy']:.1%} (version {first['eval_version']}) -> "
                f"{last['eval_accuracy']:.1%} (version {last['eval_version']}), {self.cfg.eval.prompts} prompts"
            )
        if len(steps) > 1:
            training_s = steps[-1]["time_s"] - steps[0]["time_s"]
            samples = sum(step["samples"] for step in steps[1:])
            running_s = sum(now["running_s"] for _, now in self.actors.values()) or 1.0
            stall_s, idle_s = (sum(now[k] for _, now in self.actors.values()) for k in ("update_stall_s", "idle_s"))
            lag, ess = (statistics.fmean(step[key] for step in steps) for key in ("lag_mean", "ess"))
            lines += [
                f"  reward            {steps[0]['reward']:.3f} -> {steps[-1]['reward']:.3f}",
                f"  speed             {samples / training_s:.0f} samples/s, {len(steps) / training_s:.2f} steps/s",
                f"  lag               mean {lag:.2f}, max {max(step['lag_max'] for step in steps)} optimizer steps",
                f"  ESS               mean {ess:.3f}, min {min(step['ess'] for step in steps):.3f}",
                f"  update stall      {stall_s / running_s:.2%} of the actors' time ({1000 * stall_s:.0f} ms in all)",
                f"  idle              actors {idle_s / running_s:.1%}, trainer "
                f"{sum(step['wait_s'] for step in steps[1:]) / training_s:.1%}",
            ]
        return "\n".join([*lines, f"  everything is in  {self.cfg.run_dir}"])

    def draw(self) -> None:
        """reward.png: reward and held-out success against wall time, lag and ESS below."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        seconds = [step["time_s"] for step in self.steps]
        figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2))
        top.plot(seconds, [step["reward"] for step in self.steps], color="tab:blue", alpha=0.5, label="reward of the batch")
        top.plot(
            [e["time_s"] for e in self.evals], [e["eval_accuracy"] for e in self.evals], "o-", color="tab:red",
            label="held-out success, sampled",
        )  # fmt: skip
        top.set(ylabel="success rate", ylim=(0, 1.02), title=f"{self.cfg.name}: {len(self.steps)} optimizer steps, seed {self.cfg.seed}")
        top.legend(loc="lower right")
        for key, style in (("lag_max", ":"), ("lag_mean", "-")):
            bottom.plot(seconds, [step[key] for step in self.steps], style, color="tab:green", label=key.replace("_", " "))
        bottom.set(xlabel="seconds since the launch", ylabel="lag (optimizer steps)", ylim=(0, None))
        right = bottom.twinx()
        right.plot(seconds, [step["ess"] for step in self.steps], color="tab:orange", label="ESS")
        right.set(ylabel="ESS", ylim=(0, 1.05))
        bottom.legend(*(a + b for a, b in zip(bottom.get_legend_handles_labels(), right.get_legend_handles_labels(), strict=True)))
        for axes in (top, bottom):
            axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(self.cfg.run_dir / "reward.png", dpi=120)
        plt.close(figure)


def rates(actors: dict[int, tuple[dict, dict]]) -> dict:
    """Tokens/s and stall of all actors between their totals at the last step line and now; {} if one has none newer."""
    per_s, stall = 0.0, 0.0
    for before, now in actors.values():
        seconds = now["running_s"] - before["running_s"]
        if not seconds:
            return {}
        per_s += (now["generated_tokens"] - before["generated_tokens"]) / seconds
        stall += now["update_stall_s"] - before["update_stall_s"]
    return {"generated_tokens_per_s": per_s, "update_stall_s": stall} if actors else {}


def show_rollout(rollout: dict) -> str:
    """A rollout in which every token stands under the version of the weights that sampled it: v3[7+5=12] v4[-3=9#9]."""
    runs: list[tuple[int, str]] = []
    for token, version in zip(rollout["tokens"], rollout["versions"], strict=True):
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + token)
        else:
            runs.append((version, token))
    text = " ".join(f"v{version}[{part}]" for version, part in runs)
    return (
        f"  ┌ trained at step {rollout['step']}: {rollout['prompt']!r}, answer {rollout['answer']!r}, "
        f"reward {rollout['reward']:g}\n  └ {text}"
    )


# ---------------------------------------------------------------- the run


def prepare_run_dir(cfg: Config) -> None:
    if cfg.run_dir.is_dir() and any(cfg.run_dir.iterdir()):
        if not (cfg.run_dir / "config.json").is_file():
            raise ConfigError(f"{cfg.run_dir} is not empty and not a run: it is not replaced, choose another --name")
        shutil.rmtree(cfg.run_dir)
    cfg.run_dir.mkdir(parents=True, exist_ok=True)
    (cfg.run_dir / "config.json").write_text(cfg.to_json() + "\n")


def supervise(roles: Roles, record: Record, interrupted: list[int]) -> str | None:
    """Show reports until the run is complete, interrupted, or a role is dead: then its name."""
    while not interrupted:
        finished, dead = roles.finished(), roles.dead()  # looked at before the reports, so that none is missed
        while (report := record_next(roles, 0.0 if finished or dead else 0.1)) is not None:
            record.take(report.kind, report.values)
        if dead or finished:
            return dead
    return None


def record_next(roles: Roles, wait_s: float):
    return roles.channels.reports.try_get(wait_s=wait_s)


def gpus() -> list[str]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def run(cfg: Config) -> int:
    """A checked configuration -> exit code."""
    places = plan(cfg, sorted(os.sched_getaffinity(0)), [] if cfg.device == "cpu" else gpus())
    prepare_run_dir(cfg)
    interrupted: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: interrupted.append(number))
    context = multiprocessing.get_context("spawn")
    channels = make_channels(cfg, context)
    roles = Roles(cfg, channels, places, context)
    os.sched_setaffinity(0, places["preprocess"].cores)
    record = Record(cfg)
    dead = None
    try:
        dead = supervise(roles, record, interrupted)
    finally:
        roles.stop(time.monotonic() + SHUTDOWN_S)
        while (report := record_next(roles, 0.0)) is not None:
            record.take(report.kind, report.values)
        record.close_step()
        record.bar.close()
    if record.steps:
        record.draw()
    outcome = f"failed ({dead})" if dead else "interrupted" if interrupted else "complete"
    print(record.summary(outcome))
    if dead:
        print(roles.obituary(dead), file=sys.stderr)
    return 1 if dead else 128 + interrupted[0] if interrupted else 0


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
