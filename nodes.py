"""Nodes: the launchers of a torchrun job, one a rank, and what they know of each other.

    rank 0 prepares the run, the others say hello; all get the same start, namespace and secret
    each beats in the store; rank 0 looks whether all do; whoever knows why the run ends says so first, for all to read

torchrun's own store (in its agent on the first machine, so that it outlives rank 0) is the only meeting point: no port
is ours.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from config import Config, ConfigError, Start
from life import End
from placement import Ranks, roles
from record import resolved
from store import Link
from weights import Background

START_S = 120.0  # for the launchers to find each other: python and torch have to start


def interface_towards(host: str, port: int) -> tuple[str, str]:
    """Name and address of the network interface by which this machine reaches a host; "" for the name if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return "", ""
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))[20:24]  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(found) == address:
                return name, address
    return "", address


def fingerprint(cfg: Config) -> str:
    """Of what all ranks must agree on: the configuration, and the model by the ends of its files."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(resolved(cfg) | {"model": ""}, sort_keys=True).encode())
    for path in sorted(cfg.model.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            with path.open("rb") as file:
                digest.update(f"{path.name} {path.stat().st_size}".encode() + file.read(2**20))
                file.seek(max(0, path.stat().st_size - 2**20))
                digest.update(file.read())
    return digest.hexdigest()


class Peers:
    """The other launchers."""

    def __init__(self, cfg: Config, ranks: Ranks):
        self.cfg, self.ranks, self.end, self.beats = cfg, ranks, None, 0
        self.limit_s = cfg.timeout_s / 2  # of silence; the other half is for everybody to end
        self.meeting = Link(ranks.host, ranks.port, "pipelinerl", b"", cfg.timeout_s / 4)
        name, address = interface_towards(ranks.host, ranks.port)
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            if address.startswith("127.") and ranks.machines > 1:
                raise ConfigError(
                    f"{ranks.host} is {address} here, which other machines cannot reach: give torchrun an address, or "
                    "set GLOO_SOCKET_IFNAME to the interface that leads to them"
                )
            os.environ |= {"GLOO_SOCKET_IFNAME": name} if name else {}
        if not ranks.agent_store and ranks.rank == 0:
            import torch.distributed as dist

            self._server = dist.TCPStore(ranks.host, ranks.port, None, True, wait_for_workers=False)

    def who(self, rank: int) -> str:
        """How a rank is named: by what it does, and where."""
        names = ", ".join(roles(self.cfg, rank)) or "a part of an actor"
        return f"{names} (rank {rank} on {self.hosts.get(rank, '?')})"

    # ---- meeting

    def meet(self, prepare: Callable[[bool], Start]) -> Start:
        """Returns when all are there. prepare: again -> `Start`, called on rank 0 alone; `again` is true when torchrun
        has started the job anew."""
        self.hosts = {self.ranks.rank: socket.gethostname()}
        start = self._receive(prepare) if self.ranks.rank == 0 else self._join()
        for thread in (self._beat, self._watch):
            threading.Thread(target=thread, daemon=True).start()
        return start

    def _receive(self, prepare: Callable[[bool], Start]) -> Start:
        meeting, ours = self.meeting(), fingerprint(self.cfg)
        attempt = meeting.add("attempt", 1)
        start = prepare(attempt > 1)
        self.link = dataclasses.replace(self.meeting, namespace=f"run-{attempt}", secret=secrets.token_bytes(32))
        secret = self.cfg.run_dir / "secret"
        secret.unlink(missing_ok=True)
        with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(self.link.secret)
        welcome = json.dumps({"attempt": attempt, "start": dataclasses.asdict(start)}, default=str).encode()
        store, deadline, answered, different = self.link(), time.monotonic() + START_S, set(), []
        store.set("beat/0", "0")
        missing = set(range(1, self.ranks.size))
        while missing:
            for rank in sorted(missing):
                hello = meeting.get(f"hello/{rank}").decode() if meeting.check([f"hello/{rank}"]) else ""
                if hello and hello not in answered:  # one of an earlier attempt is answered in vain
                    answered.add(hello)
                    nonce, theirs, self.hosts[rank] = (hello.split(" ") + ["", ""])[:3]
                    answer = welcome if theirs == ours else b""
                    different += [self.hosts[rank]] * (theirs != ours)
                    meeting.set(f"welcome/{nonce}", self.link.sealed("welcome", answer))
            missing = {rank for rank in missing if not store.check([f"beat/{rank}"])}
            if time.monotonic() > deadline:
                what = f"not all have come within {START_S:g} s: no {', '.join(map(self.who, sorted(missing)))}"
                what += f"; another configuration or model: {', '.join(different)}" if different else ""
                raise ConfigError(what)
            time.sleep(0.02)
        store.set("hosts", self.link.sealed("hosts", json.dumps(self.hosts).encode()))
        return start

    def _join(self) -> Start:
        meeting, nonce, deadline = self.meeting(), secrets.token_hex(8), time.monotonic() + START_S
        meeting.set(f"hello/{self.ranks.rank}", f"{nonce} {fingerprint(self.cfg)} {socket.gethostname()}")
        while not meeting.check([f"welcome/{nonce}"]):
            if time.monotonic() > deadline:
                raise ConfigError(f"rank 0 at {self.ranks.host}:{self.ranks.port} has not answered in {START_S:g} s")
            time.sleep(0.02)
        sealed, secret = meeting.get(f"welcome/{nonce}"), self.cfg.run_dir / "secret"
        while True:  # the folder may reach this machine later than the answer
            key = secret.read_bytes() if secret.exists() else b""
            link = dataclasses.replace(self.meeting, secret=key)
            if key and (welcome := link.opened("welcome", sealed)) is not None:
                break
            if time.monotonic() > deadline:
                what = f"{socket.gethostname()} does not see what rank 0 wrote to {secret.resolve()}"
                raise ConfigError(f"{what}: --runs-dir must be on a file system that all machines share")
            time.sleep(0.1)
        if not welcome:
            what = f"{socket.gethostname()} has another configuration or model than rank 0"
            raise ConfigError(f"{what}: start all with the same command, checkout and {self.cfg.model.name}/")
        welcome = json.loads(bytes(welcome))
        self.link = dataclasses.replace(link, namespace=f"run-{welcome['attempt']}")
        store = self.link()
        store.set(f"beat/{self.ranks.rank}", "0")
        while not store.check(["hosts"]):
            if time.monotonic() > deadline:
                raise ConfigError(f"rank 0 at {self.ranks.host} has not seen all others within {START_S:g} s")
            time.sleep(0.02)
        hosts = bytes(self.link.opened("hosts", store.get("hosts")) or b"{}")
        self.hosts = {int(rank): host for rank, host in json.loads(hosts).items()}
        start = Start(**welcome["start"])
        return dataclasses.replace(start, folder=Path(start.folder) if start.folder else None)

    # ---- signs of life, and the end

    def conclude(self, end: End) -> End:
        """Say why the run ends; returns what all go by, which is what was said first."""

        def say() -> End:
            said = self.link.sealed("end", json.dumps(dataclasses.asdict(end)).encode())
            return self._read(self.link.client().compare_set("end", "", said)) or end

        if self.end is None:
            saying = Background(say)
            saying.join(self.limit_s / 4)  # of a store that is lost there is no answer: the others see that themselves
            self.end = self.end or (end if saying.is_alive() or saying.error else saying.result())
        return self.end

    def _read(self, sealed: bytes) -> End | None:
        said = self.link.opened("end", bytes(sealed))
        return End(**json.loads(bytes(said))) if said is not None else None

    def _beat(self) -> None:
        """Until the end: beat, look whether it was said, and on rank 0 whether the others beat."""
        interval_s, looked, silent_s = min(1.0, self.limit_s / 5), time.monotonic(), {}
        keys, seen = [f"beat/{rank}" for rank in range(self.ranks.size)], {}
        while self.end is None:
            try:
                store = self.link()
                store.set(keys[self.ranks.rank], str(self.beats + 1))
                if store.check(["end"]) and (end := self._read(store.get("end"))):
                    self.end = end
                    return
                found = dict(enumerate(store.multi_get(keys))) if self.ranks.rank == 0 else {}
            except (ConnectionError, RuntimeError):
                return  # the watch sees to it
            self.beats += 1
            # If this process itself stood still, the others' silence in that time says nothing.
            since, looked = min(1.0, time.monotonic() - looked), time.monotonic()
            for rank in set(found) - {0}:
                silent_s[rank] = 0.0 if seen.get(rank) != found[rank] else silent_s[rank] + since
                if silent_s[rank] > self.limit_s:
                    what = f"lost {self.who(rank)}: no sign of life for {silent_s[rank]:.0f} s"
                    self.conclude(End("failed", self.who(rank), what))
                    return
            seen = found
            time.sleep(interval_s)

    def _watch(self) -> None:
        """That the beat goes on: a call to a store that cannot be reached never comes back. Nor may the main thread's,
        then this process ends here; its roles die with it."""
        seen, silent_s = self.beats, 0.0
        while self.end is None and silent_s < self.limit_s:
            time.sleep(0.1)
            silent_s = 0.0 if self.beats != seen else silent_s + 0.1
            seen = self.beats
        where = f"{self.ranks.host}:{self.ranks.port}"
        if self.end is None:
            what = f"lost {self.who(0)}, or the way to it: its store at {where} has not answered for {silent_s:.0f} s"
            self.end = End("failed", self.who(0), what)
        if self.end.kind == "failed":
            time.sleep(self.limit_s)
            print(f"launch.py: rank {self.ranks.rank} could not end in order: {self.end.what}", flush=True)
            os._exit(1)
