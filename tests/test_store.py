"""Between machines: messages through a TCPStore, and weights by broadcast. Processes and stores are real; networks of
their own are in test_nodes.py."""

import datetime
import multiprocessing
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist
from test_queues import LAYOUT, MESSAGES, passed, same, staging, weights_of

import store
from queues import Report, Stopped, encode
from store import Link
from weights import BroadcastWeights

CONTEXT = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def server():
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture
def link(server, request) -> Link:
    return Link("127.0.0.1", server.port, request.node.name, os.urandom(32), 10.0)


class Flag:
    value = 0


def queue_of(link: Link, slots=4, producers=1):
    return link.queue("things", slots, Flag(), producers)


def clients(server) -> dist.Store:
    return dist.TCPStore("127.0.0.1", server.port, None, False, datetime.timedelta(seconds=10))


def test_every_message_arrives_as_it_was_sent_in_order_and_bounded(link):
    queue = queue_of(link, slots=len(MESSAGES))
    for message in MESSAGES:
        assert queue.put(message, timeout_s=0)
    assert not queue.put(MESSAGES[0], timeout_s=0.05), "it is full"
    assert len(queue) == len(MESSAGES)
    assert all(same(message, queue.get()) for message in MESSAGES) and queue.get(timeout_s=0) is None
    time.sleep(0.02)
    assert queue.put(MESSAGES[0], timeout_s=0) and same(queue.get(timeout_s=1), MESSAGES[0]), "there is room again"


@pytest.mark.parametrize("size", [store.FRAME_BYTES - 50, store.FRAME_BYTES, 3 * store.FRAME_BYTES, 20_000_000])
def test_message_of_any_length_is_cut_into_frames_the_store_accepts(link, size):
    queue, message = queue_of(link), Report("large", {"text": "x" * size})
    queue.put(message)
    assert queue.get(timeout_s=5) == message and len(queue) == 0


def test_waits_end_when_they_should_and_say_what_they_waited_for(link):
    queue = queue_of(link, slots=1)
    start = time.monotonic()
    assert queue.get(timeout_s=0.2) is None and time.monotonic() - start >= 0.2
    queue.stop.value = 1
    with pytest.raises(Stopped, match="a message in the queue of things"):
        queue.get()
    queue.put(Report("one", {}))
    with pytest.raises(Stopped, match="room in the queue of things"):
        queue.put(Report("two", {}))


def test_a_store_that_does_not_answer_is_an_error_that_names_it_and_the_wait():
    mortal = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    queue = queue_of(Link("127.0.0.1", mortal.port, "n", b"k" * 32, 0.5))
    queue.put(Report("one", {}))
    del mortal
    with pytest.raises(
        ConnectionError, match=f"store at 127.0.0.1:{queue.link.port}.*a message in the queue of things"
    ):
        queue.get()


def _produce(link, producer, count):
    queue = link.queue("things", 5, Flag(), 3)
    for i in range(count):
        queue.put(Report(str(producer), {"i": i, "pad": "x" * (6_000_000 if i % 50 == 0 else i % 700)}))


def test_what_goes_in_comes_out_once_with_several_producers_and_consumers_even_in_frames(link):
    """Frames of large messages do not mix; a thread has a client of its own."""
    queue, count = link.queue("things", 5, Flag(), 3), 120
    got, most = passed(queue, _produce, *((link, p, count) for p in range(3)))
    assert sorted(got) == sorted((str(p), i) for p in range(3) for i in range(count))
    assert len(queue) == 0 and most <= 10, "bounded"


def test_foreign_and_malformed_messages_are_dropped_and_counted_and_the_others_arrive(link, server):
    queue, stranger = queue_of(link, slots=50), dist.PrefixStore(link.namespace, clients(server))
    real = encode(Report("real", {}))
    other_run = link.queue("things", 50, Flag())
    object.__setattr__(other_run, "link", Link(link.host, link.port, link.namespace, os.urandom(32), 10.0))
    elsewhere = link.queue("elsewhere", 50, Flag())
    elsewhere.put(Report("of another queue", {}))
    replayed = stranger.queue_pop("elsewhere")
    queue.put(Report("first", {}))
    for payload in (b"", b"x", bytes(28), bytes(28) + real, os.urandom(10_000), b"\xff" * 100, replayed, real):
        stranger.queue_push("things", payload)
    other_run.put(Report("of another run", {}))
    queue.put(Report("last", {}))
    assert [queue.get(timeout_s=5).kind for _ in range(2)] == ["first", "last"]
    assert queue.get(timeout_s=0) is None and link.foreign() == 9


def test_garbage_at_the_port_of_the_store_is_not_its_end(link, server):
    queue = queue_of(link, slots=50)
    queue.put(Report("before", {}))
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), os.urandom(100_000), b"\xff" * 2000, b"\x03" + b"\xff" * 16):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            try:
                connection.sendall(garbage)
                connection.settimeout(0.2)
                connection.recv(100)
            except OSError:
                pass  # closed, or left without an answer
    queue.put(Report("after", {}))
    assert [queue.get(timeout_s=5).kind for _ in range(2)] == ["before", "after"]


# ---------------------------------------------------------------- weights


def engine_worker(link, rank: int, versions: int, hold_s: float, results) -> None:
    torch.set_num_threads(1)
    weights = BroadcastWeights(LAYOUT, "float32", link, 3, bucket_bytes=40)
    target = staging(bucket_bytes=40)
    weights.join(rank, torch.device("cpu"))
    for version in range(1, versions + 1):
        while weights.offered < version:
            time.sleep(0.001)
        time.sleep(hold_s)
        assert weights.pull(target) == version
        results.put((rank, version, target.memory.unique().tolist()))
    time.sleep(0.5)  # the trainer's last word is no error
    assert weights.offered == versions


@pytest.mark.parametrize("overlap", [True, False])
def test_every_engine_worker_gets_every_version_whole_bucket_by_bucket(link, overlap):
    results = CONTEXT.Queue()
    workers = [CONTEXT.Process(target=engine_worker, args=(link, rank, 3, 0.3 * rank, results)) for rank in (1, 2)]
    for worker in workers:
        worker.start()
    weights = BroadcastWeights(LAYOUT, "float32", link, 3, overlap, bucket_bytes=40)
    weights.join(0, torch.device("cpu"))
    assert len(weights._copy.buckets) == 2 and weights._copy.memory.numel() == (26 if overlap else 15), LAYOUT
    for version in (1, 2, 3):
        began = time.monotonic()
        weights.publish(version, weights_of(version))
        if version == 1 and overlap:
            assert time.monotonic() - began < 0.2, "the trainer goes on while it is sent"
            assert weights.version == 0, "not there yet: no prompt may ask for it"
    weights.close()
    assert weights.version == 3 and 0 < weights.transfer_s < 1
    for worker in workers:
        worker.join(20)
    assert [worker.exitcode for worker in workers] == [0, 0]
    found = sorted(results.get() for _ in range(6))
    assert found == [(rank, version, [float(version)]) for rank in (1, 2) for version in (1, 2, 3)]


def test_trainer_waits_for_the_version_before_and_says_whom_it_has_lost(link):
    results = CONTEXT.Queue()
    workers = [CONTEXT.Process(target=engine_worker, args=(link, rank, 9, 0.0, results)) for rank in (1, 2)]
    for worker in workers:
        worker.start()
    weights = BroadcastWeights(LAYOUT, "float32", link, 3, bucket_bytes=40)
    weights.join(0, torch.device("cpu"))
    weights.publish(1, weights_of(1))
    assert [results.get(timeout=20)[1] for _ in workers] == [1, 1]
    workers[1].kill()
    weights.publish(2, weights_of(2))
    with pytest.raises(ConnectionError, match="waited for the engines, to send them version 2"):
        weights.publish(3, weights_of(3))
    workers[0].join(20)
    assert workers[0].exitcode == 1, "an engine that has lost its trainer does not go on with old weights"


def test_trainer_that_is_told_to_stop_does_not_wait_for_engines_that_never_came(link):
    weights, stop = BroadcastWeights(LAYOUT, "float32", link, 3), Flag()
    weights.join(0, torch.device("cpu"), stop)
    weights.publish(1, weights_of(1))
    stop.value = 1
    with pytest.raises(ConnectionError, match="told to stop while a version was on its way"):
        weights.publish(2, weights_of(2))
    began = time.monotonic()
    weights.close()
    assert time.monotonic() - began < 1


def test_engine_of_another_model_is_refused(link):
    pair = [BroadcastWeights(LAYOUT | {"norm": (n,)}, "float32", link, 2) for n in (7, 8)]
    for rank, weights in enumerate(pair):
        weights.join(rank, torch.device("cpu"))
    with pytest.raises(ValueError, match="other names, shapes or dtype than the trainer's"):
        pair[1]._joined.result()
