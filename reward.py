"""Reward: verifiers in worker processes, between actor and preprocessor, so that decoding never waits for one.

consumes  completions: `RolloutGroup`s without rewards
emits     rollouts: the same groups, every sample with a reward or the reason why its verifier failed

    while True:
        hand samples to the workers that are free: verify(text of the completion, dataset row)
        a worker that is done: its answer; one that died or is over its time: another in its place, the call has failed
        every sample of a group back: the group goes on

The paper scores inside the actor. Here whatever a verifier does, it does to its worker: a hang, a crash, `sys.exit`,
endless output or memory ends that process alone. *Failed* is not *wrong*: a failed sample has no reward at all and has
no part in its group's baseline or in the loss. Text exists for the verifier only: token ids travel on untouched and are
never made from text again.
"""

import contextlib
import ctypes
import dataclasses
import errno
import importlib
import math
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import msgspec

from config import Config, RewardConfig, load_function
from model_files import load_tokenizer
from queues import Channels, Report, Rollout, RolloutGroup
from verify import PACKAGES, VERIFIERS

MOST_FAILED = 64  # calls in a row: then it is the verifier, not the completions
OUTPUT_BYTES = 2**26  # of what a worker prints, and of any file it writes; over it, writing raises OSError


@dataclass(frozen=True)
class Verdict:
    """What came of one call. A failure is "timeout", "crash" (the worker died), "memory", "output" (both are limited)
    or "error" (the function raised, or did not return a number)."""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    detail: str = ""  # of a failure: a traceback, or what was returned


def load_verifier(spec: str) -> Callable[[str, dict], Any]:
    """A name of verify.py or `python:file.py:function` -> the function. Raises ConfigError if there is none."""
    if spec in PACKAGES:
        importlib.import_module(PACKAGES[spec])  # once, for all the workers that are forked after it
    return VERIFIERS[spec] if spec in VERIFIERS else load_function(spec)


def text_of(error: str) -> str:
    """What a message can carry: no half characters."""
    return error[-4000:].encode(errors="replace").decode()


def verdict(value: Any) -> Verdict:
    """What a verifier returned: a finite number, or a dict of such with one named `reward`. Otherwise a failure.

    >>> verdict({"reward": True, "digits": 3})
    Verdict(reward=1.0, metrics={"digits": 3.0}, failure="", detail="")
    """
    named = value if isinstance(value, dict) else {"reward": value}
    if "reward" in named and len(named) <= 33 and all(_is_name(name) for name in named):
        try:  # numpy's and torch's numbers count as well, as long as they are one
            numbers = {name: math.nan if isinstance(x, str) else float(x) for name, x in named.items()}
        except (TypeError, ValueError, RuntimeError):
            numbers = {"reward": math.nan}
        if all(map(math.isfinite, numbers.values())):
            return Verdict(numbers.pop("reward"), numbers)
    want = 'a finite number, or {"reward": number, up to 32 more names: numbers}'
    return Verdict(failure="error", detail=text_of(f"it returned {value!r:.500}, want {want}"))


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= 64 and name.isprintable()


def guard(pids: int) -> None:
    """Outlives a role that is killed, and then kills what its verifiers had started, which the kernel does not."""
    groups = []
    while pid := os.read(pids, 4):
        groups.append(int.from_bytes(pid, "little"))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def serve(pipe: connection.Connection, verify: Callable, memory_gib: float, log: Path, role: int, pids: int) -> None:
    """A worker's life: calls come in, verdicts go out. It is forked, so what the verifier needs is loaded already."""
    os.setsid()  # so that what a verifier starts can be killed with it
    os.write(pids, os.getpid().to_bytes(4, "little"))
    os.close(pids)  # the guard is to see when the role is gone, not when the last worker is
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not survive the role
    libc.prctl(15, log.stem.encode())  # PR_SET_NAME: what `top` and `ps` show
    if os.getppid() != role:
        os._exit(1)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    data_bytes = int(status["VmData"].split()[0]) * 1024 + int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_BYTES, OUTPUT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        text, row = msgspec.msgpack.decode(pipe.recv_bytes())
        if os.fstat(file).st_size > OUTPUT_BYTES // 64:
            os.ftruncate(file, 0)
        try:
            answer = verdict(verify(text, row))
        except MemoryError:
            answer = Verdict(failure="memory", detail=f"it took more than {memory_gib} GiB")
        except Exception as error:
            endless = isinstance(error, OSError) and error.errno == errno.EFBIG
            answer = Verdict(failure="output" if endless else "error", detail=text_of(traceback.format_exc(limit=-8)))
        signal.setitimer(signal.ITIMER_REAL, 0)  # a timer that it has left running is not to hit the next call
        pipe.send_bytes(msgspec.msgpack.encode(answer))


@dataclass
class Worker:
    """One process and the call it is busy with."""

    process: multiprocessing.Process
    pipe: connection.Connection
    log: Path
    key: Any = None  # of the call; None: it is free
    began: float = 0.0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # not a group of its own yet, or gone
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """Worker processes, each with at most one call at a time, which has `timeout_s` and no more."""

    def __init__(self, verify: Callable[[str, dict], Any], cfg: RewardConfig, logs: Path):
        self.verify, self.cfg, self.logs = verify, cfg, logs
        self.context = multiprocessing.get_context("fork")
        self.waiting: deque[tuple[Any, bytes]] = deque()  # key, the call
        self.done = Counter()  # calls, their seconds and failures since the last report
        self.longest_s = 0.0
        read, self.pids = os.pipe()
        self.guard = self.context.Process(target=self._guard, args=(read,), name="verifier-guard")
        self.guard.start()
        os.close(read)
        self.workers = [self._start(i) for i in range(cfg.workers)]

    def _guard(self, read: int) -> None:
        os.close(self.pids)
        guard(read)

    def _start(self, index: int) -> Worker:
        ours, theirs = self.context.Pipe()
        log = self.logs / f"verifier-{index}.log"
        arguments = (theirs, self.verify, self.cfg.memory_gib, log, os.getpid(), self.pids)
        process = self.context.Process(target=serve, args=arguments, name=f"verifier-{index}")
        process.start()
        theirs.close()  # ours is then told when the worker dies
        return Worker(process, ours, log)

    def submit(self, key: Any, text: str, row: dict) -> None:
        self.waiting.append((key, msgspec.msgpack.encode((text, row))))

    def collect(self, wait_s: float) -> list[tuple[Any, Verdict]]:
        """Hand out what waits; the verdicts of all calls that have ended by now, one at least unless `wait_s` are over.
        A key comes back once, whatever becomes of its worker."""
        self._hand_out()
        busy = {worker.pipe: i for i, worker in enumerate(self.workers) if worker.key is not None}
        verdicts, now = [], time.monotonic()
        deadline = min((self.workers[i].began for i in busy.values()), default=now) + self.cfg.timeout_s
        ready = connection.wait(busy, max(0.0, min(wait_s, deadline - now)))
        for pipe, i in busy.items():
            worker = self.workers[i]
            if pipe in ready:
                verdicts.append(self._ended(i, self._receive(worker)))
            elif time.monotonic() - worker.began > self.cfg.timeout_s:
                verdicts.append(self._ended(i, Verdict(failure="timeout", detail=f"over {self.cfg.timeout_s} s")))
        self._hand_out()
        return verdicts

    def _hand_out(self) -> None:
        for i, worker in enumerate(self.workers):
            if not self.waiting:
                return
            if worker.key is None:
                key, call = self.waiting.popleft()
                try:
                    worker.pipe.send_bytes(call)
                except OSError:  # it died idle: killed from outside
                    worker.kill()
                    worker = self.workers[i] = self._start(i)
                    worker.pipe.send_bytes(call)
                worker.key, worker.began = key, time.monotonic()

    @staticmethod
    def _receive(worker: Worker) -> Verdict:
        try:
            return msgspec.msgpack.decode(worker.pipe.recv_bytes(), type=Verdict)
        except (EOFError, OSError):
            worker.process.join(1.0)  # for its exit code
            said = worker.log.read_bytes()[-2000:].decode(errors="replace") if worker.log.exists() else ""
            detail = f"its worker ended with code {worker.process.exitcode}\n{said}".strip()
            return Verdict(failure="crash", detail=detail)

    def _ended(self, index: int, verdict: Verdict) -> tuple[Any, Verdict]:
        worker = self.workers[index]
        key, seconds = worker.key, time.monotonic() - worker.began
        self.done.update({"calls": 1, "busy_s": seconds})
        if verdict.failure:
            self.done[f"failed_{verdict.failure}"] += 1
        self.longest_s = max(self.longest_s, seconds)
        worker.key = None
        if verdict.failure not in ("", "error"):
            worker.kill()
            self.workers[index] = self._start(index)
        return key, verdict

    def report(self, send: Callable[[dict], bool]) -> None:
        """What was done since the last report; if there is no room for it, it joins the next."""
        if send(dict(self.done) | {"longest_s": self.longest_s}):
            self.done, self.longest_s = Counter(), 0.0

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        os.close(self.pids)
        self.guard.join()


class Scorer:
    """Takes groups apart for the pool and puts them together again."""

    def __init__(self, cfg: Config, channels: Channels, pool: Pool, decode: Callable[[list[int]], str]):
        self.cfg, self.channels, self.pool, self.decode = cfg, channels, pool, decode
        self.groups: dict[int, tuple[RolloutGroup, list[Rollout | None]]] = {}  # group id -> it, its scored samples
        self.outbox: deque[RolloutGroup] = deque()
        self.failures_shown, self.failed_in_a_row, self.reported = 0, 0, time.monotonic()

    def take(self, group: RolloutGroup) -> None:
        """Its samples to the pool; but not of a group that is there already, from an actor that died since."""
        group_id = group.prompt.group_id
        if group_id in self.groups:
            return
        self.groups[group_id] = group, [None] * len(group.rollouts)
        for i, rollout in enumerate(group.rollouts):
            self.pool.submit((group_id, i), self.decode(rollout.completion_ids.tolist()), group.prompt.row)

    def settle(self, key: tuple[int, int], verdict: Verdict) -> None:
        """One sample's verdict; the last one of a group sends it on. Raises RuntimeError, with the row, for a function
        that raised or returned no number, unless such calls are to be counted; and for too many failures in a row."""
        group, scored = self.groups[key[0]]
        rollout = group.rollouts[key[1]]
        self.failed_in_a_row = self.failed_in_a_row + 1 if verdict.failure else 0
        if verdict.failure:
            text, row = self.decode(rollout.completion_ids.tolist()), group.prompt.row
            what = f"{verdict.detail}\nverifier {self.cfg.reward.function}: {verdict.failure}"
            where = f"completion: {text!r:.500}\nrow: {row!r:.1000}"
            if verdict.failure == "error" and self.cfg.reward.errors == "stop":
                raise RuntimeError(f"{what}\n{where}\n(--reward-errors count goes on, with such samples left out)")
            if self.failed_in_a_row >= MOST_FAILED:
                raise RuntimeError(f"the last {MOST_FAILED} calls failed, the very last:\n{what}\n{where}")
            if self.failures_shown < 3:
                self.failures_shown += 1
                self.channels.reports.put(Report("note", {"what": f"a call failed: {what}\n{where}"}))
        scored[key[1]] = dataclasses.replace(
            rollout, reward=verdict.reward, metrics=verdict.metrics, failure=verdict.failure
        )
        if all(sample is not None for sample in scored):
            del self.groups[key[0]]
            self.outbox.append(RolloutGroup(group.prompt, scored))

    def step(self) -> None:
        """Take no more than the workers have use for, settle what has ended, send what is whole."""
        cfg = self.cfg
        while len(self.pool.waiting) < cfg.reward.workers and len(self.outbox) < 4:
            group = self.channels.completions.get(timeout_s=0 if self.groups or self.outbox else 0.1)
            if group is None:
                break
            self.take(group)
        for key, verdict in self.pool.collect(wait_s=0.005 if self.groups else 0.0):
            self.settle(key, verdict)
        while self.outbox and self.channels.rollouts.put(self.outbox[0], timeout_s=0 if self.groups else 0.05):
            self.outbox.popleft()
        if (now := time.monotonic()) - self.reported > 0.5:
            self.pool.done["running_s"] += (now - self.reported) * cfg.reward.workers
            self.reported = now
            self.pool.report(lambda values: self.channels.reports.put(Report("reward", values), timeout_s=0))


def main(cfg: Config, channels: Channels, *_) -> None:
    tokenizer = load_tokenizer(cfg.model)
    pool = Pool(load_verifier(cfg.reward.function), cfg.reward, cfg.run_dir / "logs")
    scorer = Scorer(cfg, channels, pool, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    try:
        while not channels.stop.value:
            scorer.step()
    finally:
        pool.close()
