"""Memory that every rank of a host can read and write in place: one block a rank, all of one size.

On GPUs this is torch's symmetric memory (mapped over NVLink or PCIe; multicast is never asked for), on a CPU pages that processes map. What
lies in a block is the owner's business: experts' records (`experts.homes`), messages (`distributed.channel`).

The CPU's messages rely on stores becoming visible in the order they were made, which x86-64 promises and others don't.
"""
from __future__ import annotations

import mmap
import os
import platform
import warnings
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..errors import ConfigError, PeerError, UnsupportedModelError
from ..runtime import REAL, Runtime
from .groups import DEADLINE, Group

LINE = 128  # bytes; blocks start at multiples of it
ORDERED = ("x86_64", "AMD64")  # processors whose stores others see in the order they were made
SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """One allocation: for every rank of `places` its block as this process reaches it, the own one among them.

    views   uint8 tensors of one size
    bases   their addresses, for kernels of this process
    words   int64 memory views of the same bytes on a CPU, whose items are read and written whole; empty on GPUs
    owner   what keeps the mapping besides the views
    """

    rank: int
    views: tuple[torch.Tensor, ...]
    bases: tuple[int, ...]
    words: tuple[memoryview, ...] = ()
    owner: Any = field(default=None, repr=False)

    @property
    def mine(self) -> torch.Tensor:
        return self.views[self.rank]


class SymmetricMemory(Protocol):
    """Memory of the ranks of one host. `places` are their places in `group`, ascending; `rank` is this process's index in `places`."""

    group: Group
    places: tuple[int, ...]
    rank: int

    def allocate(self, nbytes: int, deadline: float = DEADLINE) -> SharedBlock:
        """Zeroed blocks, one size for the ranks of a host. Collective over the whole group. Raises MemoryError, ConfigError, PeerError."""


def symmetric_memory(group: Group, device: torch.device | str, runtime: Runtime = REAL, deadline: float = DEADLINE) -> SymmetricMemory:
    """The memory that this rank shares with those of its host. Collective over the whole group.

    Raises UnsupportedModelError: a device or processor that can't; ConfigError: ranks on devices of different kinds; PeerError.
    """
    device = torch.device(device)
    group.agree("symmetric memory", {"device": device.type}, deadline)
    places = group.neighbours(deadline)
    if device.type == "cuda":
        return CudaMemory(group, places, device, deadline)
    if device.type != "cpu" or platform.machine() not in ORDERED:
        raise UnsupportedModelError(f"ranks can't share memory of {device.type} on {platform.machine()}", where="symmetric memory",
                                    expected="CUDA, or a CPU of x86-64", do="use dispatch mode host")
    return CpuMemory(group, places, runtime)


def _same_size(group: Group, places: tuple[int, ...], nbytes: int, deadline: float) -> None:
    group.agree("symmetric memory", {"nbytes": nbytes}, deadline, places)


def _own_gpu(group: Group, places: tuple[int, ...], gpu: str, deadline: float) -> None:
    """Raises ConfigError where ranks of this host share a GPU: torch refuses that, unless it is told that it is meant."""
    said = [w.decode() for w in group.gather(gpu.encode(), deadline)]
    shared = [p for p in places if [said[q] for q in places].count(said[p]) > 1]
    if shared and os.environ.get(SHARED_GPU) != "1":
        raise ConfigError(f"ranks {', '.join(map(str, shared))} share a GPU", where=f"symmetric memory, group {group.axis}",
                          expected="a GPU for each rank of a host", do=f"call torch.cuda.set_device; {SHARED_GPU}=1 allows it, for tests")


class CpuMemory:
    """Pages that the ranks of a host map from each other."""

    def __init__(self, group: Group, places: tuple[int, ...], runtime: Runtime = REAL) -> None:
        self.group, self.places, self.rank = group, places, places.index(group.rank)
        self._runtime = runtime

    def allocate(self, nbytes: int, deadline: float = DEADLINE) -> SharedBlock:
        nbytes = max(LINE, -(-nbytes // LINE) * LINE)
        _same_size(self.group, self.places, nbytes, deadline)
        shared, fault = None, ""
        try:
            shared = self._runtime.share(nbytes)
        except MemoryError as e:
            fault = str(e)
        try:
            # A rank without memory says so: the others must not wait for it.
            said = [w.decode() for w in self.group.gather((f"!{fault}" if shared is None else shared.name).encode(), deadline)]
            if failed := [f"rank {r}: {w[1:]}" for r, w in enumerate(said) if w.startswith("!")]:
                raise MemoryError("; ".join(failed))
            assert shared is not None
            maps = [shared.pages if p == self.group.rank else self._open(p, said[p], nbytes) for p in self.places]
            self.group.gather(b"mapped", deadline)
        finally:
            if shared is not None:
                shared.close()
        views = tuple(torch.frombuffer(m, dtype=torch.uint8, count=nbytes) for m in maps)
        # Pages go when nobody holds a view of them any more; there is nothing to undo.
        return SharedBlock(self.rank, views, tuple(v.data_ptr() for v in views), tuple(memoryview(m).cast("q") for m in maps))

    def _open(self, place: int, name: str, nbytes: int) -> mmap.mmap:
        try:
            return self._runtime.open_shared(name, nbytes)
        except OSError as e:
            raise PeerError(f"their memory can't be opened: {e}", ranks=(place,), where=f"group {self.group.axis}",
                            do="see whether that rank is alive and runs as the same user") from e


class CudaMemory:
    """torch's symmetric memory. Ranks that are part of a larger group get a process group of their own, made once."""

    def __init__(self, group: Group, places: tuple[int, ...], device: torch.device, deadline: float = DEADLINE) -> None:
        if group.size > 1 and group.process_group is None:
            raise ConfigError("a group without a process group", where="symmetric memory", expected="one made by torch.distributed",
                              do="open it with Group.of(process_group)")
        self.group, self.places, self.rank = group, places, places.index(group.rank)
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        _own_gpu(group, places, str(torch.cuda.get_device_properties(self._device).uuid), deadline)
        self._process_group = group.process_group
        if len(places) < group.size:
            ranks = [group.ranks[p] for p in places]
            self._process_group = torch.distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def allocate(self, nbytes: int, deadline: float = DEADLINE) -> SharedBlock:
        nbytes = max(LINE, -(-nbytes // LINE) * LINE)
        _same_size(self.group, self.places, nbytes, deadline)
        with torch.inference_mode(False), torch.cuda.device(self._device):
            if len(self.places) == 1:
                mine = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
                return SharedBlock(0, (mine,), (mine.data_ptr(),))
            from torch.distributed import _symmetric_memory as upstream

            name = self._process_group.group_name
            with warnings.catch_warnings():
                # Needed up to torch 2.8, superfluous and deprecated later.
                warnings.simplefilter("ignore")
                getattr(upstream, "enable_symm_mem_for_group", lambda name: None)(name)
            mine = upstream.empty(nbytes, dtype=torch.uint8, device=self._device)
            handle = upstream.rendezvous(mine, name)
            mine.zero_()
            torch.cuda.synchronize(self._device)
            views = tuple(mine if r == self.rank else handle.get_buffer(r, (nbytes,), torch.uint8) for r in range(len(self.places)))
            self.group.gather(b"zeroed", deadline)
        return SharedBlock(self.rank, views, tuple(v.data_ptr() for v in views), (), handle)
