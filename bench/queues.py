"""Throughput of the queues: rollouts a second from producers to one consumer, in processes of their own.

    python bench/queues.py

Ways, in turns, so that all see the same machine: a plain socket (the ceiling), the store's own push and pop of the same
bytes, `StoreQueue`, `SharedMemoryQueue`. The store is kept by another process, as torchrun does. Bounded queues hold at
most 64 messages; the store's own is not bounded.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from placement import KEEP_MEMORY  # noqa: E402
from queues import Prompt, Rollout, RolloutGroup, decode, encode  # noqa: E402
from store import Link  # noqa: E402
from transport import SharedMemoryQueue  # noqa: E402

WAYS = ("socket", "push/pop", "StoreQueue", "SharedMemoryQueue")
SLOTS = 64


def group(tokens: int, rollouts: int) -> RolloutGroup:
    numbers = torch.arange(tokens)
    one = Rollout(numbers, -torch.rand(tokens), numbers // 100, "stop", reward=1.0)
    return RolloutGroup(Prompt(0, 0, rollouts, numbers[:100], {"answer": "12"}), [one] * rollouts)


def keep_store(port, stop) -> None:
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port.value = server.port
    stop.wait()


def produce(way: str, queue, link: Link, port: int, tokens: int, rollouts: int, count: int) -> None:
    message = group(tokens, rollouts)
    data = encode(message)
    if way == "socket":
        with socket.create_connection(("127.0.0.1", port)) as out:
            for _ in range(count):
                out.sendall(len(data).to_bytes(8, "little") + data)
    elif way == "push/pop":
        store = link()
        for _ in range(count):
            store.queue_push("raw", data)
        store.queue_len("raw")  # a push has no answer: do not leave before it is there
    else:
        for _ in range(count):
            queue.put(message)


def receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        got += connection.recv_into(view[got:])
    return bytes(data)


def rate(way: str, queue, link: Link, context, tokens: int, rollouts: int, producers: int, seconds: float) -> float:
    """Rollouts a second, from the second message of every producer on."""
    server = socket.create_server(("127.0.0.1", 0))
    each = max(10, int(seconds * 2000 / rollouts / producers))
    arguments = (way, queue, link, server.getsockname()[1], tokens, rollouts, each)
    processes = [context.Process(target=produce, args=arguments) for _ in range(producers)]
    for process in processes:
        process.start()
    connections = [server.accept()[0] for _ in processes] if way == "socket" else []
    got, skipped, began = 0, 5 * producers, time.monotonic()
    for i in range(each * producers):
        if way == "socket":
            connection = connections[i % producers]
            decode(receive(connection, int.from_bytes(receive(connection, 8), "little")))
        elif way == "push/pop":
            link().queue_pop("raw")
        else:
            queue.get()
        if i + 1 == skipped:
            began = time.monotonic()
        got += i + 1 > skipped
    elapsed = time.monotonic() - began
    for process in processes:
        process.join()
    return got * rollouts / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn, about")
    args = parser.parse_args()
    if not KEEP_MEMORY.items() <= os.environ.items():  # as the launcher sets it for the roles
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)
    context = multiprocessing.get_context("spawn")
    port, stop = context.Value("i", 0), context.Event()
    keeper = context.Process(target=keep_store, args=(port, stop), daemon=True)
    keeper.start()
    while not port.value:
        time.sleep(0.1)
    link, stopped = Link("127.0.0.1", port.value, "bench", os.urandom(32), 60.0), context.Value("b", 0, lock=False)
    print(f"{os.cpu_count()} cores; rollouts a second, median of {args.rounds} rounds (lowest – highest)")
    print(f"{'':<44}" + "".join(f"{way:>24}" for way in WAYS) + f"{'StoreQueue ÷ push/pop':>28}")
    cases = [(2000, 1, 1), (8000, 1, 1), (2000, 8, 1), (4000, 8, 1), (8000, 8, 1), (2000, 1, 3), (2000, 8, 3)]
    for tokens, rollouts, producers in cases:
        size = len(encode(group(tokens, rollouts)))
        memory = SharedMemoryQueue("bench", SLOTS, size + 4096, context, stopped)
        store_queue, rates = link.queue("bench", SLOTS, stopped, producers), {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                queue = {"StoreQueue": store_queue, "SharedMemoryQueue": memory}.get(way)
                rates[way].append(rate(way, queue, link, context, tokens, rollouts, producers, args.seconds))
        ratios = [ours / raw for ours, raw in zip(rates["StoreQueue"], rates["push/pop"], strict=True)]
        what = f"{rollouts} × {tokens} tokens ({size / 1000:.0f} kB), {producers} producer{'s' * (producers > 1)}"
        cells = [f"{statistics.median(r):.0f} ({min(r):.0f} – {max(r):.0f})" for r in rates.values()]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})"
        print(f"{what:<44}" + "".join(f"{cell:>24}" for cell in cells) + f"{ratio:>28}", flush=True)
    stop.set()
    keeper.join()


if __name__ == "__main__":
    main()
