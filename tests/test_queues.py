"""What travels arrives as it was sent, in order, bounded, and nothing is lost or left behind."""

import multiprocessing
import re
import subprocess
import sys
import textwrap
import threading
import time

import msgspec
import pytest
import torch

import queues
from queues import MicroBatch, Prompt, Report, Rollout, RolloutGroup, StepBatch, Stopped, decode, encode
from transport import SharedMemoryQueue
from weights import Flat, SharedMemoryWeights

CONTEXT = multiprocessing.get_context("spawn")


def make_queue(slots=4, slot_bytes=1 << 16):
    return SharedMemoryQueue("things", slots, slot_bytes, CONTEXT, CONTEXT.Value("b", 0, lock=False))


def example(cls):
    """The literal example in a message's docstring."""
    lines = re.findall(r"^ *(?:>>>|\.\.\.) ?(.*)$", cls.__doc__, re.M)
    return eval("\n".join(lines), {"torch": torch, cls.__name__: cls})


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__dataclass_fields__)
    return a == b


MESSAGES = [example(Prompt), example(Rollout), example(MicroBatch), Report("eval", {"eval_accuracy": 0.5, "x": None})]
MESSAGES += [RolloutGroup(example(Prompt), [example(Rollout), example(Rollout)])]
MESSAGES += [StepBatch(3, [example(MicroBatch)] * 2, 12, {"reward": 0.25})]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_message_survives_the_wire_and_its_docstring_example_is_valid(message):
    assert same(message, decode(encode(message)))


def test_encoding_holds_no_pickle_and_refuses_what_it_cannot_say():
    assert msgspec.msgpack.decode(encode(Report("step", {"x": 1}))) == ["Report", {"kind": "step", "values": {"x": 1}}]
    with pytest.raises(TypeError, match="neither a tensor nor a plain value"):
        encode(Report("step", {"x": object()}))
    with pytest.raises(msgspec.DecodeError):
        decode(b"hello there")
    with pytest.raises(msgspec.DecodeError, match="missing required field `values`"):
        decode(msgspec.msgpack.encode(["Report", {"kind": "step"}]))
    with pytest.raises(
        AssertionError, match="versions run backwards"
    ):  # what is checked when made is checked on arrival
        decode(encode(example(Rollout)).replace(bytes([3] + [0] * 7 + [4]), bytes([5] + [0] * 7 + [4])))


@pytest.mark.parametrize(
    "change",
    [
        dict(logprobs=torch.tensor([-0.1, float("-inf"), 0.0])),  # never train on a log-prob that is not one
        dict(logprobs=torch.tensor([-0.1, float("nan"), 0.0])),
        dict(versions=torch.tensor([3, 4, 3])),  # weights only get newer
        dict(versions=torch.tensor([3, 3])),  # a token without a version
    ],
)
def test_impossible_rollouts_are_refused(change):
    with pytest.raises(AssertionError):
        Rollout(**(vars(example(Rollout)) | change))


def test_queue_keeps_order_and_wraps_around():
    queue = make_queue(slots=3)
    got = []
    for i in range(20):
        queue.put(Report("step", {"i": i}))
        if i % 3 == 2:
            got += [queue.get().values["i"] for _ in range(3)]
    assert got == list(range(18)) and len(queue) == 2


def test_full_queue_makes_the_producer_wait():
    queue = make_queue(slots=2)
    assert queue.put(Report("a", {})) and queue.put(Report("b", {}), timeout_s=0)
    assert not queue.put(Report("c", {}), timeout_s=0)
    assert not queue.put(Report("c", {}), timeout_s=0.15)
    waiting = threading.Thread(target=queue.put, args=(Report("c", {}),))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive(), "put returned though the queue was full"
    assert queue.get().kind == "a"
    waiting.join(timeout=5)
    assert [queue.get().kind, queue.get().kind] == ["b", "c"]


def test_empty_queue_makes_the_consumer_wait_as_long_as_it_likes_or_until_all_are_to_stop():
    queue = make_queue(slots=1)
    assert queue.get(timeout_s=0) is None
    start = time.monotonic()
    assert queue.get(timeout_s=0.2) is None and time.monotonic() - start >= 0.2
    queue.stop.value = 1
    with pytest.raises(Stopped):
        queue.get()
    assert queue.put(Report("last words", {})), "there is room: no wait that could end"
    with pytest.raises(Stopped):
        queue.put(Report("more", {}))
    assert queue.get(timeout_s=0).kind == "last words", "a wait of a known length is not ended: the launcher's"


def test_who_waits_is_woken_and_does_not_poll(monkeypatch):
    queue, looks = make_queue(), []
    read = queue._read
    monkeypatch.setattr(queue, "_read", lambda: looks.append(1) or read())
    assert queue.get(timeout_s=0.25) is None and len(looks) <= 5
    looks.clear()
    threading.Timer(0.05, queue.put, (Report("note", {"what": "woken"}),)).start()
    assert queue.get(timeout_s=60).values == {"what": "woken"} and len(looks) <= 4


def test_message_larger_than_a_slot_is_refused_with_its_size():
    with pytest.raises(ValueError, match=r"does not fit the 1,000 of a slot in the queue of things"):
        make_queue(slot_bytes=1000).put(Report("step", {"text": "x" * 2000}))


def _produce(queue, producer, count):
    for i in range(count):
        queue.put(Report(str(producer), {"i": i, "pad": "x" * (i % 700)}))


def passed(queue, produce, *arguments) -> tuple[list, int]:
    """What two threads take from a queue that processes of `produce(arguments)` fill, and how full it was at most."""
    producers = [CONTEXT.Process(target=produce, args=each) for each in arguments]
    for process in producers:
        process.start()
    got, lengths, lock = [], [0], threading.Lock()

    def consume():
        while (message := queue.get(timeout_s=20)) is not None and message.kind != "end":
            with lock:
                got.append((message.kind, message.values["i"]))
                lengths.append(len(queue))

    consumers = [threading.Thread(target=consume) for _ in range(2)]
    for consumer in consumers:
        consumer.start()
    for process in producers:
        process.join()
    for _ in consumers:
        queue.put(Report("end", {}))
    for consumer in consumers:
        consumer.join()
    return got, max(lengths)


def test_what_goes_in_comes_out_once_with_several_producers_and_consumers():
    queue, count = make_queue(slots=5), 300
    got, most = passed(queue, _produce, *((queue, p, count) for p in range(2)))
    assert sorted(got) == sorted((str(p), i) for p in range(2) for i in range(count))
    assert len(queue) == 0 and most <= 5


def test_2000_messages_of_50_tensors_pass_under_a_limit_of_128_open_files():
    script = textwrap.dedent("""
        import multiprocessing, resource, torch
        from queues import MicroBatch, StepBatch
        from transport import SharedMemoryQueue
        from test_queues import MESSAGES, encode

        def produce(queue):
            resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
            row = MESSAGES[2]
            rows = [MicroBatch(**(vars(row) | {"ref_logprobs": torch.zeros(6) if i == 0 else None})) for i in range(7)]
            for step in range(2000):
                queue.put(StepBatch(step, rows, 1, {}))

        if __name__ == "__main__":
            resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
            context = multiprocessing.get_context("spawn")
            queue = SharedMemoryQueue("batches", 32, 1 << 16, context, context.Value("b", 0, lock=False))
            process = context.Process(target=produce, args=(queue,))
            process.start()
            for step in range(2000):
                batch = queue.get()
                tensors = sum(isinstance(v, torch.Tensor) for m in batch.micro_batches for v in vars(m).values())
                assert batch.step == step and tensors == 50, (batch.step, tensors)
            process.join()
            print("all", step + 1)
    """)
    path = queues.__file__.replace("queues.py", "")
    done = subprocess.run(
        [sys.executable, "-c", _as_main_file(script)], capture_output=True, text=True, cwd=path, timeout=120
    )
    assert done.stdout.strip() == "all 2000", done.stderr


def _as_main_file(script: str) -> str:
    """Spawned processes import the main module, so it has to be a file."""
    import tempfile

    file = tempfile.NamedTemporaryFile("w", suffix=".py", delete=False)
    file.write(script)
    file.close()
    return f"import runpy, sys; sys.argv = [{file.name!r}]; runpy.run_path({file.name!r}, run_name='__main__')"


LAYOUT = {"embed": (5, 3), "norm": (7,), "head": (2, 2)}


def weights_of(version: int):
    return [(name, torch.full(shape, float(version))) for name, shape in LAYOUT.items()]


def staging(layout=LAYOUT, dtype=torch.float32, **options) -> Flat:
    return Flat(layout, lambda n: torch.full((n,), -1.0, dtype=dtype), **options)


def test_reader_gets_the_newest_version_and_skips_older_ones():
    weights = SharedMemoryWeights(LAYOUT, "float32")
    for version in (1, 2, 3):
        weights.publish(version, weights_of(version))
    target = staging()
    assert weights.pull(target) == weights.version == 3
    assert all((tensor == 3.0).all() for tensor in target.tensors.values())


def test_publish_casts_and_refuses_missing_or_unknown_names():
    weights = SharedMemoryWeights(LAYOUT, "bfloat16")
    weights.publish(1, [(n, t + 1e-4) for n, t in weights_of(1)])
    target = staging(dtype=torch.bfloat16)
    weights.pull(target)
    assert target.tensors["norm"].tolist() == [1.0] * 7
    with pytest.raises(ValueError, match="1 weights were not published: .*head"):
        weights.publish(2, weights_of(2)[:2])
    with pytest.raises(ValueError, match="'module.norm' was published where 'norm' was due"):
        weights.publish(2, [weights_of(2)[0], ("module.norm", torch.zeros(7))])
    assert weights.version == 1, "a version that is not whole must not be announced"


def test_reader_overtaken_by_the_writer_copies_again():
    """A reader of version 1 that is so slow that version 3 is begun in the same buffer must not return a mixture."""
    weights = SharedMemoryWeights(LAYOUT, "float32")
    weights.publish(1, weights_of(1))
    flat, calls = weights._flat, []

    def slow_flat(version):
        calls.append(version)
        found = flat(version)
        if len(calls) == 1:  # two more versions arrive between the choice of the buffer and the copy
            weights._flat = flat
            weights.publish(2, weights_of(2))
            weights.publish(3, weights_of(3))
            weights._state[0], weights._state[1] = 2, 3  # ... the second not yet announced
            weights._flat = slow_flat
        return found

    weights._flat = slow_flat
    target = staging()
    assert weights.pull(target) == 2
    assert all((tensor == 2.0).all() for tensor in target.tensors.values())


def _publish_for_ever(weights, stop):
    version = 0
    while not stop.value:
        version += 1
        weights.publish(version, [(n, torch.full(s, float(version))) for n, s in LAYOUT_LARGE.items()])


LAYOUT_LARGE = {f"w{i}": (300, 100) for i in range(10)}


def test_no_torn_read_while_another_process_publishes():
    weights = SharedMemoryWeights(LAYOUT_LARGE, "float32")
    stop = CONTEXT.Value("b", 0, lock=False)
    process = CONTEXT.Process(target=_publish_for_ever, args=(weights, stop))
    process.start()
    target = staging(LAYOUT_LARGE, bucket_bytes=100_000)
    seen = set()
    deadline = time.monotonic() + 60
    while len(seen) < 50 and time.monotonic() < deadline:
        version = weights.pull(target)
        values = {
            tensor.unique().item() if tensor.unique().numel() == 1 else None for tensor in target.tensors.values()
        }
        assert values == {float(version)}
        seen.add(version)
    stop.value = 1
    process.join(timeout=10)
    assert len(seen) == 50 and process.exitcode == 0
