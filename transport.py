"""Transport: the queues between the processes of one machine, and all queues of a run."""

from collections.abc import Callable

from config import ROW_BYTES, Config
from life import ActorState
from memory import SharedMemory
from model_files import model_layout
from queues import Channels, Queue
from weights import SharedMemoryWeights


class SharedMemoryQueue(Queue):
    """Between the processes of one machine: a ring of equal slots in shared memory.

    One file descriptor a queue, none a message. The two counters say what is in it: they change under a lock that the
    kernel takes from a process that is killed; semaphores only wake those who wait.
    """

    first_rest_s = 0.1  # a message or room ends it

    def __init__(self, name: str, slots: int, slot_bytes: int, context, stop):
        super().__init__(name, slots, stop)
        self.slot_bytes, self._memory = slot_bytes, SharedMemory(slots * slot_bytes)
        self._room, self._news = context.Semaphore(0), context.Semaphore(0)
        self._counts = context.Array("Q", 2, lock=False)  # messages put, messages taken

    def _write(self, data: bytes) -> bool:
        if len(data) + 8 > self.slot_bytes:
            sizes = f"a message of {len(data):,} bytes does not fit the {self.slot_bytes:,} of a slot"
            raise ValueError(f"{sizes} in the queue of {self.name}: are there dataset rows of hundreds of kilobytes?")
        if len(self) >= self.slots:
            return False
        with self._memory.locked():  # the copy too: else another producer could announce this slot before it is written
            if len(self) >= self.slots:
                return False
            start = self._counts[0] % self.slots * self.slot_bytes
            self._memory.buffer[start : start + 8 + len(data)] = len(data).to_bytes(8, "little") + data
            self._counts[0] += 1
        self._room.acquire(block=False)
        self._news.release()
        return True

    def _read(self) -> bytes | None:
        if not len(self):
            return None
        with self._memory.locked():
            if not len(self):
                return None
            start = self._counts[1] % self.slots * self.slot_bytes
            size = int.from_bytes(self._memory.buffer[start : start + 8], "little")
            data = self._memory.buffer[start + 8 : start + 8 + size]
            self._counts[1] += 1
        self._news.acquire(block=False)
        self._room.release()
        return data

    def _rest(self, attempt: Callable, seconds: float) -> None:
        (self._news if attempt == self._read else self._room).acquire(timeout=seconds)

    def __len__(self) -> int:
        return self._counts[0] - self._counts[1]


def make_channels(cfg: Config, context, link=None) -> Channels:
    """All queues, sized so that the largest message the configuration allows fits; memory is taken when used. With a
    `store.Link`, those that lead to other machines go through its store."""
    stop, row_bytes = context.Value("b", 0, lock=False), ROW_BYTES + 2**12
    prompt_tokens, completion_tokens = cfg.actor.max_prompt_tokens, cfg.actor.max_completion_tokens
    samples = max(cfg.group_size, cfg.eval.samples)
    group_bytes = row_bytes + 8 * prompt_tokens + samples * (24 * completion_tokens + 4096)
    batch_bytes = row_bytes + cfg.batch_size * (44 * (prompt_tokens + completion_tokens) + 1024)

    layout, dtype = model_layout(cfg.model), cfg.actor.dtype
    ready, waiting = cfg.preprocess.ready_batches, 4  # batches; groups for an actor
    if cfg.schedule != "pipeline":  # a phase: all that it is made of is known when it begins
        ready, waiting = cfg.phase_steps, cfg.phase_steps * cfg.groups_per_batch

    def local(name: str, slots: int, slot_bytes: int) -> Queue:
        return SharedMemoryQueue(name, slots, slot_bytes, context, stop)

    def queue(name: str, slots: int, slot_bytes: int, producers: int = 1) -> Queue:
        return link.queue(name, slots, stop, producers) if link else local(name, slots, slot_bytes)

    return Channels(
        prompts=[queue(f"prompts for actor {i}", waiting, group_bytes) for i in range(cfg.actors)],
        eval_prompts=queue("held-out prompts", 2 * cfg.eval.prompts, group_bytes),
        completions=queue("completions", 64, group_bytes, cfg.actors),
        rollouts=local("rollouts", 64, group_bytes),
        batches=[queue(f"batches for trainer {i}", ready + 1, batch_bytes) for i in range(cfg.trainers)],
        weights=link.weights(layout, cfg) if link else SharedMemoryWeights(layout, dtype),
        reports=queue("reports", 256, group_bytes, cfg.actors + 3),
        stop=stop,
        actors=context.Array("b", [ActorState.UP if link else ActorState.STARTING] * cfg.actors, lock=False),
        link=link,
    )
