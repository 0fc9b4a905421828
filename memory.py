"""Memory that the processes of one machine share."""

import contextlib
import fcntl
import mmap
import os
import threading


class SharedMemory:
    """Shared memory without a name: it is gone when the last process that holds it is, however that one ends.

    Pages are allocated when first touched. Pickles as a path that other processes of the same user can open while its
    maker lives.
    """

    def __init__(self, num_bytes: int, path: str = ""):
        self._file = (
            os.open(path, os.O_RDWR) if path else os.memfd_create("pipelinerl")
        )  # kept open: the path leads to it
        os.ftruncate(self._file, num_bytes)
        self.num_bytes, self.path = num_bytes, path or f"/proc/{os.getpid()}/fd/{self._file}"
        self.buffer = mmap.mmap(self._file, num_bytes)
        self._threads = threading.Lock()

    def __reduce__(self):
        return SharedMemory, (self.num_bytes, self.path)

    @contextlib.contextmanager
    def locked(self):
        """Exclusive between processes and threads; the kernel gives it up for a process that is killed inside."""
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
