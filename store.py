"""Store: the way between machines. Messages go through the TCPStore that torchrun keeps.

A `Link` is what a process needs to take part: address, namespace and the secret of the run. `StoreQueue` has the
interface of the one-machine queue. Messages are sealed: one that nobody who knows the secret has sent is dropped and
counted, and never decoded. The store itself neither encrypts nor asks who is there: its network has to be private.
"""

import datetime
import functools
import hmac
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from config import Config
from queues import Queue
from weights import BroadcastWeights

FRAME_BYTES = 4 * 2**20  # a payload over 8 MiB is refused by the store, and the connection closed
SHORTEST_REST_S, LONGEST_REST_S = 0.001, 0.01  # between two looks into the store
NONCE_BYTES, TAG_BYTES = 12, 16  # of a seal
HEAD_BYTES = 4 + NONCE_BYTES + TAG_BYTES  # number of other frames, seal

_clients = threading.local()  # of this thread: a store's client is not for several


@dataclass(frozen=True)
class Link:
    """The way to the store, and the seal of the run. Picklable; every thread that uses it has its own connection."""

    host: str
    port: int
    namespace: str
    secret: bytes
    timeout_s: float  # for an answer of the store

    def __call__(self) -> dist.Store:
        """This thread's client. Raises ConnectionError if the store cannot be reached."""
        known, key = _clients.__dict__, (os.getpid(), self.host, self.port, self.namespace)
        if key not in known:
            known[key] = self.client()
        return known[key]

    def client(self) -> dist.Store:
        """A new client, in the namespace."""
        try:
            store = dist.TCPStore(self.host, self.port, None, False, datetime.timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise self.lost("a connection") from error
        return dist.PrefixStore(self.namespace, store)

    def lost(self, waited_for: str) -> ConnectionError:
        """The store has not answered in time, or closed the connection."""
        where = f"the store at {self.host}:{self.port}, beside rank 0,"
        return ConnectionError(f"{where} has not answered within {self.timeout_s:g} s; waited for {waited_for}")

    def seal(self, name: str, data: bytes) -> bytes:
        """What only the run's secret makes of data for the place `name`: a nonce, and the tag of AES-GCM (GMAC)."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + cipher(self.secret, name).encrypt(nonce, b"", data)

    def sealed(self, name: str, data: bytes) -> bytes:
        return self.seal(name, data) + data

    def opened(self, name: str, sealed: bytes) -> memoryview | None:
        """Inverse of `sealed`; None if it was sealed for another place, with another secret, or not at all."""
        view = memoryview(sealed)
        nonce, tag = view[:NONCE_BYTES], view[NONCE_BYTES : NONCE_BYTES + TAG_BYTES]
        data = view[NONCE_BYTES + TAG_BYTES :]
        try:
            cipher(self.secret, name).decrypt(nonce, tag, data)
        except (InvalidTag, ValueError):  # ValueError: too short to hold a seal
            return None
        return data

    def foreign(self) -> int:
        """Messages that were dropped so far, by anybody."""
        return self().add("foreign", 0)

    def queue(self, name: str, slots: int, stop, producers: int = 1) -> "StoreQueue":
        return StoreQueue(name, slots, stop, self, producers)

    def weights(self, layout: dict[str, tuple[int, ...]], cfg: Config) -> BroadcastWeights:
        size = 1 + cfg.actors * cfg.actor.tp
        return BroadcastWeights(layout, cfg.actor.dtype, self, size, cfg.train.overlap_sending)


@functools.cache
def cipher(secret: bytes, name: str) -> AESGCM:
    """With a key of its own for every place."""
    return AESGCM(hmac.digest(secret, name.encode(), "sha256"))


class StoreQueue(Queue):
    """`SharedMemoryQueue` between machines.

    A message is cut into frames that the store accepts. The first goes into the queue; the others lie ready before it
    in a queue of their own, so that messages of several producers do not mix. A producer that looks for room may fill
    its share of it before it looks again: one alone never puts in more than `slots`, several together twice as many. It
    takes the queue for full until over a quarter is free.
    """

    def __init__(self, name: str, slots: int, stop, link: Link, producers: int = 1):
        super().__init__(name, slots, stop)
        self.link, self.producers = link, producers
        self._room = 0  # our share of what was seen
        self._empty_until = 0.0

    def _write(self, data: bytes) -> bool:
        return self._ask(lambda store: self._push(store, data), "room")

    def _push(self, store: dist.Store, data: bytes) -> bool:
        if self._room < 1:
            free = self.slots - store.queue_len(self.name)
            if free <= self.slots // 4:  # from then on every look would find room for one: wait for more
                return False
            self._room = max(1, free // self.producers)
        self._room -= 1
        seal = self.link.seal(self.name, data)
        first = FRAME_BYTES - HEAD_BYTES
        others = range(first, len(data), FRAME_BYTES)
        for i in others:
            store.queue_push(f"{self.name}/{seal.hex()}", data[i : i + FRAME_BYTES])
        store.queue_push(self.name, b"".join((len(others).to_bytes(4, "little"), seal, data[:first])))
        return True

    def _read(self) -> bytes | None:
        if time.monotonic() < self._empty_until:
            return None  # looked a moment ago: a decode loop has no time to ask at every step
        data = self._ask(self._pop, "a message")
        if data is None:
            self._empty_until = time.monotonic() + LONGEST_REST_S
        return data

    def _pop(self, store: dist.Store) -> bytes | None:
        while (first := pop(store, self.name)) is not None:
            head = memoryview(first)
            frames, sealed = int.from_bytes(head[:4], "little"), head[4:]
            if frames:
                parts, rest = [sealed], f"{self.name}/{head[4:HEAD_BYTES].hex()}"
                while len(parts) <= frames and (part := pop(store, rest)) is not None:
                    parts.append(part)
                sealed = b"".join(parts)
            if (data := self.link.opened(self.name, sealed)) is not None:
                return data
            store.add("foreign", 1)
        return None

    def _ask(self, question: Callable[[dist.Store], object], waited_for: str):
        try:
            return question(self.link())
        except dist.DistError as error:
            raise self.link.lost(f"{waited_for} in the queue of {self.name}") from error

    def _rest(self, attempt: Callable, seconds: float) -> None:
        time.sleep(min(max(seconds, SHORTEST_REST_S), LONGEST_REST_S))
        self._empty_until = 0.0

    def __len__(self) -> int:
        return self._ask(lambda store: store.queue_len(self.name), "the length")


def pop(store: dist.Store, name: str) -> bytes | None:
    """The oldest payload of a queue; None if it is empty."""
    try:
        return store.queue_pop(name, block=False)
    except dist.QueueEmptyError:
        return None
