"""The one door to clock, memory, threads and disk.

Everything the library asks of the world goes through a `Runtime`, so that a test can hand down one that fails, delays or
corrupts the Nth call (`tests/faults/`). Deciding code never sees it.
"""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .errors import ArtefactError

ALIGN = 64  # bytes: a cache line and the widest vector, so that BLAS takes the same path for every copy of a weight


class Runtime:
    """The real world. Subclass and override a method to inject a fault."""

    # clock ---------------------------------------------------------------------------------------------------------
    def now(self) -> float:
        """Monotonic seconds."""
        return time.perf_counter()

    def sleep_until(self, deadline: float) -> None:
        """Return no earlier than `deadline` (monotonic seconds); accurate to about 50 us."""
        while (left := deadline - time.perf_counter()) > 0:
            time.sleep(left)

    # memory --------------------------------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeroed uint8 tensor of `nbytes`, aligned to ALIGN bytes, on the CPU. Raises MemoryError as torch does."""
        raw = torch.zeros(nbytes + ALIGN, dtype=torch.uint8)
        start = -raw.data_ptr() % ALIGN
        return raw[start : start + nbytes]

    # threads -------------------------------------------------------------------------------------------------------
    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    # disk ----------------------------------------------------------------------------------------------------------
    def open_read(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pread_into(self, fd: int, buffer: memoryview, offset: int, where: str) -> None:
        """Fill `buffer` from `offset`. Raises ArtefactError on a short file, OSError as the system does."""
        done = 0
        while done < len(buffer):
            n = os.preadv(fd, [buffer[done:]], offset + done)
            if n == 0:
                raise ArtefactError(
                    f"the file ends {len(buffer) - done} bytes early", where=where, expected=f"{len(buffer)} bytes at offset {offset}",
                    do="delete the file; it is rebuilt from the checkpoint at the next attach")
            done += n

    def write(self, fd: int, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            view = view[os.write(fd, view) :]

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def replace(self, src: Path, dst: Path) -> None:
        os.replace(src, dst)


REAL = Runtime()
