"""`where_LE`: for every layer and expert, the address where a kernel of this device can read the record now.

Every entry is readable at every moment: it is born pointing at the record's home, may point at a copy (a slot) while that holds the
record, and points home again before the copy is overwritten. Entries that lead to another GPU name homes only.

On the CPU there are no kernels that could follow an address, so the table has a twin that holds the records themselves; the law reads
that. Both are written together, here.
"""
from __future__ import annotations

import torch

from ..errors import ShapeError
from ..kernels.expert_mlp.record import LINE
from .homes import MemoryStore


class Where:
    """The table of one device over the records of one store. `disk` has no address: its records are staged into memory first."""

    def __init__(self, store: MemoryStore, device: torch.device | str = "cpu") -> None:
        self.store, self.layout = store, store.layout
        home = [[store.address(layer, e) for e in range(store.num_experts)] for layer in range(store.num_layers)]
        if any(a % LINE for row in home for a in row):
            raise ShapeError("a record's address is not aligned", where="experts", expected=f"a multiple of {LINE}", do="fix its Home")
        self.address_LE = torch.tensor(home, dtype=torch.int64).to(device)
        # The twin, and what keeps the memory of a copy alive as long as an entry points at it.
        self._copies: dict[tuple[int, int], torch.Tensor] = {}

    def point(self, layer: int, expert: int, copy: torch.Tensor) -> None:
        """Let an entry lead to a copy of the record, which holds it already. Raises ShapeError: it is no such copy."""
        where = f"layer {layer}, expert {expert}"
        if copy.dtype != torch.uint8 or copy.numel() < self.layout.nbytes or copy.data_ptr() % LINE or not copy.is_contiguous():
            raise ShapeError(f"a copy in {copy.dtype} of {copy.numel()} bytes at {copy.data_ptr():#x}", where=where,
                             expected=f"uint8, {self.layout.nbytes} bytes, aligned to {LINE}", do="allocate slots through a Home")
        if (stamp := self.layout.stamp_of(copy)) != (self.store.weights, layer, expert):
            raise ShapeError("the copy holds weights {}, layer {}, expert {}".format(*stamp), where=where,
                             expected=f"weights {self.store.weights}", do="publish a slot when its copy is complete")
        self._copies[layer, expert] = copy
        self.address_LE[layer, expert] = copy.data_ptr()

    def rehome(self, layer: int, expert: int) -> None:
        """Let an entry lead home again: before its copy is overwritten."""
        self.address_LE[layer, expert] = self.store.address(layer, expert)
        self._copies.pop((layer, expert), None)

    def records(self, layer: int) -> list[torch.Tensor]:
        """The twin of a row: the records that its entries lead to. Raises ShapeError: another rank holds one."""
        every = range(self.store.num_experts)
        return [self._copies[layer, e] if (layer, e) in self._copies else self.store.buffer(layer, e) for e in every]
