"""The one door to clock, memory, threads and disk.

Everything the library asks of the world goes through a `Runtime`, so that a test can hand down one that fails, delays or
corrupts the Nth call (`tests/faults/`). Deciding code never sees it.
"""
from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import ArtefactError

ALIGN = 64  # bytes: a cache line and the widest vector, so that BLAS takes the same path for every copy of a weight


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Memory to be shared: the name that others open it by, the pages, and the descriptor that keeps the name good."""

    name: str
    pages: mmap.mmap
    fd: int

    def close(self) -> None:
        """The name ends; the pages stay as long as somebody maps them."""
        os.close(self.fd)


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
        """Zeroed uint8 tensor of `nbytes`, aligned to ALIGN bytes, on the CPU. Raises MemoryError."""
        # Whatever mode and default device the caller is in, this memory outlives them.
        with torch.inference_mode(False):
            try:
                raw = torch.zeros(nbytes + ALIGN, dtype=torch.uint8, device="cpu")
            except RuntimeError as e:
                raise MemoryError(str(e)) from e
            start = -raw.data_ptr() % ALIGN
            return raw[start : start + nbytes]

    def allocate_on(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Zeroed uint8 tensor of `nbytes` on a device, aligned to ALIGN bytes (on GPUs to 512). Raises MemoryError."""
        if device.type == "cpu":
            return self.allocate(nbytes)
        with torch.inference_mode(False):
            try:
                return torch.zeros(nbytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError as e:
                raise MemoryError(str(e)) from e

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Lock a CPU tensor's pages, so that kernels of this process's GPUs read them at the same addresses; returns what undoes it.

        torch's own pinned memory is rounded up to a power of two. Without a GPU there is nothing to lock. Raises MemoryError.
        """
        if not torch.cuda.is_available() or memory.numel() == 0:
            return lambda: None
        cuda, start = torch.cuda.cudart(), memory.data_ptr()
        portable_and_mapped = 3
        error = cuda.cudaHostRegister(start, memory.numel(), portable_and_mapped)
        if int(error) != 0:
            raise MemoryError(f"{memory.numel()} bytes can't be page-locked: CUDA error {int(error)}")

        def unpin() -> None:
            # Whoever still reads it is done first.
            torch.cuda.synchronize()
            cuda.cudaHostUnregister(start)

        return unpin

    def open_peers(self, one: torch.device, other: torch.device) -> bool:
        """Let kernels of two GPUs of this process read each other's memory; False where the hardware does not.

        A copy by torch switches on the direction that it needs and no other.
        """
        if not (torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)):
            return False
        for to, source in ((one, other), (other, one)):
            torch.zeros(1, device=to).copy_(torch.zeros(1, device=source))
        torch.cuda.synchronize(one)
        torch.cuda.synchronize(other)
        return True

    def share(self, nbytes: int) -> SharedPages:
        """Zeroed memory that other processes of this host can map by its name; it has no file, so nothing outlives the last of them.

        Raises MemoryError.
        """
        fd = os.memfd_create("moe_prefetch", os.MFD_CLOEXEC)
        try:
            # Asked for now: a page that is missing later would be a bus error.
            os.posix_fallocate(fd, 0, nbytes)
            return SharedPages(f"{self.process()}/{fd}", mmap.mmap(fd, nbytes), fd)
        except OSError as e:
            os.close(fd)
            raise MemoryError(f"{nbytes} bytes of shared memory: {e}") from e

    def open_shared(self, name: str, nbytes: int) -> mmap.mmap:
        """Map what another process of this host shares. Raises OSError: it is gone, smaller, or another user's."""
        process, number = name.split("/")
        fd = os.open(f"/proc/{int(process)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < nbytes:
                raise OSError(errno.EINVAL, f"smaller than {nbytes} bytes")
            return mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)

    # processes and threads -----------------------------------------------------------------------------------------
    def process(self) -> int:
        """Number of this process; another one after a fork."""
        return os.getpid()

    def host(self) -> str:
        """A name of this kernel and of the processes that it lets see each other: those with one name can share memory."""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f"{f.read().strip()} {os.readlink('/proc/self/ns/pid')}"

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    # disk ----------------------------------------------------------------------------------------------------------
    def open_read(self, path: Path) -> io.FileIO:
        """An open file; one that is forgotten is closed."""
        seen = os.lstat(path)
        if not stat.S_ISREG(seen.st_mode):
            raise OSError(errno.ELOOP, "not a regular file, or a symbolic link")
        # No `opener`: the file would be lost when Ctrl-C strikes in it.
        f = io.FileIO(path, "rb")
        if not os.path.samestat(os.fstat(f.fileno()), seen):
            f.close()
            raise OSError(errno.ELOOP, "replaced while it was opened")
        return f

    def free_bytes(self, folder: Path) -> int:
        """Bytes that this user may still write on the folder's drive."""
        drive = os.statvfs(folder)
        return drive.f_bavail * drive.f_frsize

    def writable(self, folder: Path) -> bool:
        """Whether files can be made in an existing folder."""
        return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)

    def try_lock(self, fd: int) -> bool:
        """Take the exclusive advisory lock of an open file or folder, given back when it is closed; False while another holds it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def pread_into(self, fd: int, buffer: memoryview, offset: int, where: str) -> None:
        """Fill `buffer` from `offset`. Raises ArtefactError on a short file, OSError as the system does."""
        done = 0
        while done < len(buffer):
            n = os.preadv(fd, [buffer[done:]], offset + done)
            if n == 0:
                raise ArtefactError(f"the file ends {len(buffer) - done} bytes early", where=where,
                                    expected=f"{len(buffer)} bytes at offset {offset}")
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
