"""A source of experts without a model, for tests of store, mover and compute."""
from __future__ import annotations

from pathlib import Path

import torch

from moe_prefetch.experts.mover import Mover
from moe_prefetch.experts.slots import SlotTable
from moe_prefetch.experts.store import DiskStore
from moe_prefetch.runtime import REAL


class Source:
    """`num_layers` x `num_experts` experts with random weights."""

    def __init__(self, num_layers=2, num_experts=5, hidden=8, width=6, dtype=torch.float32, seed=0):
        self.num_layers, self.num_experts = num_layers, num_experts
        g = torch.Generator().manual_seed(seed)
        self.gate_up = [torch.randn(num_experts, 2 * width, hidden, generator=g).to(dtype) for _ in range(num_layers)]
        self.down = [torch.randn(num_experts, hidden, width, generator=g).to(dtype) for _ in range(num_layers)]

    def tensors(self, layer, expert):
        return {"gate_up": self.gate_up[layer][expert], "down": self.down[layer][expert]}


def mover_of(folder: Path, source: Source, *, slots=2, threads=2, deadline=5.0, runtime=REAL, **kw) -> Mover:
    store = DiskStore.obtain(folder, source, runtime)
    mover = Mover(store, SlotTable(source.num_layers, slots, source.num_experts), runtime, threads=threads, deadline=deadline, **kw)
    try:
        mover.start()
    except BaseException:
        mover.close()
        raise
    return mover


def poison(buffer: torch.Tensor) -> None:
    """NaN in every dtype that a record holds."""
    buffer.fill_(0xFF)


def expected(mover: Mover, source: Source, layer: int, expert: int) -> torch.Tensor:
    buffer = REAL.allocate(mover.store.layout.nbytes)
    mover.store.layout.pack(source.tensors(layer, expert), buffer, stamp=(mover.store.weights, layer, expert))
    return buffer
