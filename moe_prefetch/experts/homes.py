"""Homes in memory, `local`, `host` and `peer`: every record at an address that never changes, built without ever holding two copies."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..distributed.groups import DEADLINE
from ..distributed.symmetric import SymmetricMemory
from ..errors import ShapeError, UnsupportedModelError
from ..kernels.expert_mlp.record import CODES, LINE, MX_SCALE_MAX, MX_SCALES, Piece, RecordLayout, pieces
from ..runtime import Runtime
from .store import ExpertSource


class YieldingSource(ExpertSource, Protocol):
    """A source that can give a layer's memory back while records take its place, and take it again."""

    def held_bytes(self, layer: int) -> int:
        """Bytes that the source holds in memory for a layer."""

    def forget(self, layer: int) -> None:
        """Give a layer's memory back; `tensors` is not called for it until `recall`."""

    def recall(self, layer: int, unpack: Callable[[int, Mapping[str, Piece]], None]) -> None:
        """Make room again; `unpack(expert, parts)` fills parts. For a layer that was not forgotten nothing is done."""


@dataclass(frozen=True, slots=True)
class Block:
    """Memory of one layer's records: what this process fills, and for every rank where a kernel of this process reads that rank's.

    views   the ranks' memory as tensors, uint8, for homes that can show it; only the own is ever written
    """

    mine: torch.Tensor
    bases: tuple[int, ...]
    release: Callable[[], None] = field(default=lambda: None, repr=False)
    views: tuple[torch.Tensor, ...] = field(default=(), repr=False)


class Home(Protocol):
    """Where records lie in memory: the one seam to devices. `allocate` gives a zeroed block whose start is a multiple of 128."""

    name: str
    rank: int

    def allocate(self, nbytes: int) -> Block:
        """Raises MemoryError; where ranks share memory it is collective, and raises PeerError: some rank did not come."""

    def agree(self, facts: Mapping[str, str | int]) -> None:
        """Before any record is made. Raises ConfigError: ranks of this home differ in them."""

    def settle(self) -> None:
        """Return when the records of every rank are there. Raises PeerError: some rank's are not."""


class LocalHome:
    """Memory of one device: of a GPU, or of the CPU where kernels run under an interpreter or not at all."""

    name, rank = "local", 0

    def __init__(self, device: torch.device | str, runtime: Runtime) -> None:
        self._device, self._runtime = torch.device(device), runtime

    def allocate(self, nbytes: int) -> Block:
        memory = _on_line(self._runtime.allocate_on(nbytes + LINE, self._device), nbytes)
        return Block(memory, (memory.data_ptr(),))

    def agree(self, facts: Mapping[str, str | int]) -> None:
        """There is one rank."""

    def settle(self) -> None:
        """There is one rank."""


class PeerHome(LocalHome):
    """Memory of another GPU of this process, which kernels of `reader` read in place. Raises UnsupportedModelError where they can't.

    Between processes it is `SharedHome`.
    """

    name = "peer"

    def __init__(self, device: torch.device | str, reader: torch.device | str, runtime: Runtime) -> None:
        super().__init__(device, runtime)
        if not runtime.open_peers(torch.device(device), torch.device(reader)):
            raise UnsupportedModelError(f"{reader} can't read the memory of {device}", where="experts", expected="GPUs with peer access",
                                        do="use home: host")


class SharedHome:
    """Memory that the ranks of one host share: each holds the experts it owns and reads the others' in place, over NVLink between GPUs.

    Every call is collective: all ranks make their stores in one order. Raises UnsupportedModelError: ranks on several hosts.
    """

    name = "peer"

    def __init__(self, memory: SymmetricMemory, deadline: float = DEADLINE) -> None:
        if len(memory.places) < memory.group.size:
            raise UnsupportedModelError(f"ranks {memory.group.ranks} are on several hosts", where="experts",
                                        expected="a group within one host", do="use home: host, or a smaller expert group")
        self._memory, self._deadline, self.rank = memory, deadline, memory.rank

    def allocate(self, nbytes: int) -> Block:
        block = self._memory.allocate(nbytes, self._deadline)
        return Block(block.mine[:nbytes], block.bases, views=block.views)

    def agree(self, facts: Mapping[str, str | int]) -> None:
        self._memory.group.agree("expert records", facts, self._deadline)

    def settle(self) -> None:
        if self._memory.group.size > 1 and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._memory.group.gather(b"records are there", self._deadline)


class HostHome(LocalHome):
    """Page-locked memory of the CPU, which kernels of every GPU of this process read in place over PCIe."""

    name = "host"

    def __init__(self, runtime: Runtime) -> None:
        super().__init__("cpu", runtime)

    def allocate(self, nbytes: int) -> Block:
        memory = _on_line(self._runtime.allocate(nbytes + LINE), nbytes)
        return Block(memory, (memory.data_ptr(),), self._runtime.pin(memory))


def _release(blocks: list[Block]) -> None:
    while blocks:
        blocks.pop().release()


def _on_line(raw: torch.Tensor, nbytes: int) -> torch.Tensor:
    start = -raw.data_ptr() % LINE
    return raw[start : start + nbytes]


class MemoryStore:
    """Records in memory, at addresses that never change, in whatever `Home`.

    Each rank of the home holds `source.num_experts` consecutive experts of a layer. Made layer by layer, and the source gives back each
    layer that has become records, so there are never two copies of more than one layer. `peak_bytes` says for each device the most that
    records and source held on it together. When it fails half way, the source has its weights again.
    """

    def __init__(self, source: YieldingSource, home: Home, runtime: Runtime, progress: Callable[[int, int], None] | None = None, *,
                 weights: int = 1) -> None:
        self.source, self.home, self.weights = source, home, weights
        self.num_layers = source.num_layers
        first = source.tensors(0, 0)
        self.layout = RecordLayout.of(first)
        self.form = self.layout.form()
        self.blocks: list[Block] = []
        # Page-locked memory must not go back to the system locked: a store that nobody closes unlocks it when it goes.
        weakref.finalize(self, _release, self.blocks).atexit = False
        self.peak_bytes: dict[str, int] = {}
        held = sum(source.held_bytes(layer) for layer in range(self.num_layers))
        theirs = str(pieces(first["gate_up"])[0].device)
        del first
        size = source.num_experts * self.layout.nbytes
        home.agree({"layers": self.num_layers, "experts of a rank": source.num_experts, "weights": weights, "form": str(self.form),
                    "bytes of a record": self.layout.nbytes})
        try:
            for layer in range(self.num_layers):
                self.blocks.append(home.allocate(size))
                # A source that holds nothing reads one expert at a time; its parts are at most a record.
                self._note(str(self.blocks[-1].mine.device), len(self.blocks) * size, theirs, held or self.layout.nbytes)
                for expert in range(source.num_experts):
                    parts = source.tensors(layer, expert)
                    if RecordLayout.of(parts) != self.layout:
                        raise UnsupportedModelError("experts differ in shape or dtype", where=f"layer {layer}, expert {expert}",
                                                    expected="one layout for all", do="leave this model's experts where they are")
                    self._check_numbers(parts, f"layer {layer}, expert {expert}")
                    self.layout.pack(parts, self._slot(layer, expert), stamp=(weights, layer, self._first + expert))
                    if progress:
                        progress(layer * source.num_experts + expert + 1, self.num_layers * source.num_experts)
                held -= source.held_bytes(layer)
                source.forget(layer)
            home.settle()
        except BaseException:
            self.close()
            raise
        self.num_experts = source.num_experts * (len(self.blocks[0].bases) if self.blocks else 1)

    def _check_numbers(self, parts: Mapping[str, Piece], where: str) -> None:
        """What kernels would read as another number."""
        nan = lambda t: int((t.detach().view(torch.uint8) & 127).max()) == 127  # noqa: E731
        if self.form.weights == "fp8" and any(nan(t) for n in CODES for t in pieces(parts[n])):
            raise UnsupportedModelError("an FP8 weight that is NaN", where=where, expected="numbers",
                                        do="look for the fault in the checkpoint: the kernels read it as 480")
        if self.form.weights == "mxfp4" and any(int(t.max()) > MX_SCALE_MAX for n in MX_SCALES for t in pieces(parts[n])):
            raise UnsupportedModelError("an MXFP4 scale above 2", where=where, expected=f"E8M0 bytes up to {MX_SCALE_MAX}",
                                        do="use bf16 weights: the kernels' factors end there")

    def _note(self, ours: str, records: int, theirs: str, held: int) -> None:
        now = {ours: records}
        now[theirs] = now.get(theirs, 0) + held
        self.peak_bytes.update({device: max(n, self.peak_bytes.get(device, 0)) for device, n in now.items()})

    @property
    def _first(self) -> int:
        return self.home.rank * self.source.num_experts

    def _slot(self, layer: int, local: int) -> torch.Tensor:
        return self.blocks[layer].mine[local * self.layout.nbytes : (local + 1) * self.layout.nbytes]

    @property
    def record_bytes(self) -> int:
        """Bytes of memory that this process's records take."""
        return sum(b.mine.numel() for b in self.blocks)

    def address(self, layer: int, expert: int) -> int:
        """Where a kernel of this process reads the record."""
        rank, local = divmod(expert, self.source.num_experts)
        return self.blocks[layer].bases[rank] + local * self.layout.nbytes

    def buffer(self, layer: int, expert: int) -> torch.Tensor:
        """The record itself, a uint8 tensor; another rank's is for reading. Raises ShapeError: a rank holds it that does not show it."""
        rank, local = divmod(expert, self.source.num_experts)
        if rank == self.home.rank:
            return self._slot(layer, local)
        views = self.blocks[layer].views
        if not 0 <= rank < len(views):
            raise ShapeError(f"expert {expert} is held by another rank", where=f"layer {layer}",
                             expected=f"{self._first} to {self._first + self.source.num_experts - 1}", do="read it at its address")
        return views[rank][local * self.layout.nbytes : (local + 1) * self.layout.nbytes]

    def close(self) -> None:
        """The weights back to the source, the memory to the system, layer by layer. Calling it again does nothing."""
        while self.blocks:
            layer = len(self.blocks) - 1
            self.source.recall(layer, lambda local, parts, layer=layer: self.layout.unpack(self._slot(layer, local), parts))
            self.blocks.pop().release()
