"""Life: how a role tells its launcher that it lives and what it is doing; and why a run ends."""

import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

HERE = str(Path(__file__).parent)
BEAT_S = 0.1


class ActorState:
    """A byte an actor. One that died is only started again when its groups have been taken back, to be issued anew."""

    STARTING, UP, DEAD, TAKEN_BACK = range(4)  # launcher, actor, launcher, preprocessor: who sets it


@dataclass(frozen=True)
class End:
    """Why a run ended."""

    kind: str  # complete, interrupted, failed
    role: str = ""  # that failed
    what: str = ""


class Life:
    """In memory that the role and its launcher share. A process that is stopped, or swapped out for good, has no beat;
    one that only computes for long has."""

    def __init__(self, context):
        self._beats = context.Value("Q", 0, lock=False)
        self._doing = context.Array("c", 240, lock=False)

    @property
    def beats(self) -> int:
        return self._beats.value

    @property
    def doing(self) -> str:
        return self._doing.value.decode(errors="replace")

    def begin(self, queues: list) -> None:
        """In the role: beat from now on."""
        threading.Thread(target=self._beat, args=(queues, threading.get_ident()), daemon=True).start()

    def _beat(self, queues: list, role: int) -> None:
        while True:
            waits = [queue.waits_for for queue in queues if queue.waits_for]
            doing = f"waiting for {waits[0]}" if waits else f"in {whereabouts(role)}"
            self._doing.value = doing.encode()[:239]
            self._beats.value += 1
            time.sleep(BEAT_S)


def whereabouts(thread: int) -> str:
    """The innermost functions of ours that a thread is in: "train.main > train.step > train.backward"."""
    frame, names = sys._current_frames().get(thread), []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if str(path.parent) == HERE and path.stem != "launch":
            names.append(f"{path.stem}.{frame.f_code.co_name}")
        frame = frame.f_back
    return " > ".join(reversed(names[:3])) or "its start"
