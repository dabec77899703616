"""Steps of `DeviceExperts` over records that say whose they are, and what is checked of them on the device.

Its kernels are the library's, or those with a delay or a violation put in (`planted.py`). The expert kernel is stood in for by one that
reads every demanded record whole, at its entry, past L1. Without a GPU the same kernels run one after the other under the interpreter.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from moe_prefetch.experts import device as device_module
from moe_prefetch.experts.device import DeviceExperts
from moe_prefetch.experts.homes import HostHome, LocalHome, MemoryStore
from moe_prefetch.kernels.expert_mlp.fused_elements import entry
from moe_prefetch.kernels.expert_mlp.record import Form
from moe_prefetch.kernels.move import fused as move_fused
from moe_prefetch.kernels.move import op as move_op
from moe_prefetch.kernels.plan import fused as plan_fused
from moe_prefetch.kernels.plan import op as plan_op
from moe_prefetch.kernels.settle import fused as settle_fused
from moe_prefetch.kernels.settle import op as settle_op
from moe_prefetch.runtime import REAL
from tests.experts.decode_step import RandomSource, Traffic

from .delays import hold, maybe
from .planted import SMALL, Change, module

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# 12 KiB of numbers and the stamp: four pieces of 4 KiB.
FORM = Form("float32", 128, 8)
WORDS = 3 * 128 * 8
# What can be found wrong: words that are not the expert's, experts that two bring, slots FILLING, entries, moves that disagree with claims.
WORD, CLAIMANTS, FILLING, ENTRY, MOVE = range(5)


class NumberSource(RandomSource):
    """Every word of a record is its number, and the version of the weights."""

    def tensors(self, layer: int, expert: int) -> Any:
        number = self.version << 16 | (layer * self.num_experts + expert)
        return {n: torch.full(shape, number, dtype=torch.int32).view(torch.float32) for n, (_, shape) in self.form.shapes().items()}


@triton.jit
def read_demanded(where_ptr, claim_ptr, step_ptr, ids_ptr, version_ptr, found_ptr, layer, E: tl.constexpr, P: tl.constexpr,
                  PP: tl.constexpr, WORDS: tl.constexpr, HOLD: tl.constexpr, MAYBE: tl.constexpr):
    e, i = tl.program_id(0), tl.arange(0, PP)
    ids = tl.load(ids_ptr + i, mask=i < P, other=-1)
    if tl.max((ids == e).to(tl.int32), 0) > 0:
        if MAYBE > 0:
            maybe(MAYBE)
        number = tl.load(version_ptr) << 16 | (layer * E + e)
        address = entry(where_ptr, layer * E + e)
        if HOLD > 0:
            hold(HOLD)
        if MAYBE > 0:
            maybe(MAYBE)
        claim = tl.load(claim_ptr + layer * E + e, volatile=True)
        # QUEUED and MOVING: a mover will bring the same bytes.
        brought = (claim >> 3 == tl.load(step_ptr)) & ((claim & 7 == 1) | (claim & 7 == 2))
        tl.atomic_add(found_ptr + 1, brought.to(tl.int64))
        word = address.to(tl.pointer_type(tl.int32)) + tl.arange(0, 1024)
        wrong = tl.zeros((1024,), tl.int32)
        for at in range(0, WORDS, 1024):
            wrong += (tl.load(word + at, cache_modifier=".cg") != number).to(tl.int32)
        tl.atomic_add(found_ptr, tl.sum(wrong, 0).to(tl.int64))


@triton.jit
def judge(where_ptr, home_ptr, slot_ptr, queue_ptr, count_ptr, claim_ptr, taken_ptr, buffers_ptr, found_ptr, E: tl.constexpr,
          S: tl.constexpr, EP: tl.constexpr, SP: tl.constexpr, NBYTES: tl.constexpr):
    """A program a layer, at the end of a step."""
    layer = tl.program_id(0)
    e, s = tl.arange(0, EP), tl.arange(0, SP)
    word = tl.load(slot_ptr + layer * S + s, mask=s < S, other=0, volatile=True)
    state, expert = (word >> 16).to(tl.int32) & 3, (word & 0xFFFF).to(tl.int32) - 1
    ready = state == 2
    tl.atomic_add(found_ptr + 2, tl.sum((state == 1).to(tl.int32), 0).to(tl.int64))
    leads = tl.load(where_ptr + layer * E + expert, mask=ready, other=0, volatile=True)
    slot = buffers_ptr.to(tl.int64) + (layer * S + s).to(tl.int64) * NBYTES
    home = tl.load(home_ptr + layer * E + e, mask=e < E, other=0)
    away = tl.load(where_ptr + layer * E + e, mask=e < E, other=0, volatile=True) != home
    amiss = tl.sum((ready & (leads != slot)).to(tl.int32), 0) + (tl.sum(away.to(tl.int32), 0) != tl.sum(ready.to(tl.int32), 0)).to(tl.int32)
    tl.atomic_add(found_ptr + 3, amiss.to(tl.int64))
    # Pieces were taken of those moves whose claim is DONE, and of no others.
    on = s < tl.load(count_ptr + layer)
    move = (tl.load(queue_ptr + layer * S + s, mask=on, other=0) & 0xFFFF).to(tl.int32)
    claim = tl.load(claim_ptr + layer * E + move, mask=on, other=0, volatile=True) & 7
    took = tl.load(taken_ptr + layer * S + s, mask=on, other=0, volatile=True) > 0
    tl.atomic_add(found_ptr + 4, tl.sum((on & (took != (claim == 3))).to(tl.int32), 0).to(tl.int64))


@contextmanager
def kernels(changes: tuple[Change, ...] = ()) -> Iterator[None]:
    """The ops launch kernels with these changes, under the interpreter too."""
    with pytest.MonkeyPatch.context() as patch:
        plan, move, settle = (module(name, (SMALL, *changes)) for name in ("plan", "move", "settle"))
        for target, name, launch in (
                (plan_fused, "launch", plan.launch), (move_fused, "launch_move", move.launch_move),
                (settle_fused, "launch_settle", settle.launch_settle), (settle_fused, "launch_withdraw", settle.launch_withdraw)):
            patch.setattr(target, name, launch)
        if not GPU:
            patch.setattr(plan_op, "plan_naive", plan.launch)
            patch.setattr(move_op, "move_naive", lambda t, n, to, nbytes, records, ahead: move.launch_move(t, n, to, nbytes, ahead, 2))
            patch.setattr(settle_op, "settle_naive", settle.launch_settle)
            patch.setattr(settle_op, "withdraw_naive", settle.launch_withdraw)
        yield


class Scene(Traffic):
    """`found` [5] counts what is wrong. Readers stop between entry and record: `hold_ns` each time, up to `maybe_ns` now and then."""

    def __init__(self, *, layers: int = 4, experts: int = 8, slots: int = 3, tokens: int = 2, mode: int | None = None, home: str = "local",
                 programs: int = 2, hold_ns: int = 0, maybe_ns: int = 0, kind: type[DeviceExperts] = DeviceExperts) -> None:
        self.source = NumberSource(FORM, layers, experts)
        self.store = MemoryStore(self.source, HostHome(REAL) if home == "host" else LocalHome(DEVICE, REAL), REAL)
        behind = kind(self.store, DEVICE, REAL, slots, link_E=(0,) * experts, programs=programs)
        super().__init__(behind, DEVICE, FORM.hidden, tokens, 2, mode)
        self.holds = hold_ns, maybe_ns
        self.found = torch.zeros(5, dtype=torch.int64, device=DEVICE)
        self.version = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def read(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, where_E: torch.Tensor, *_: Any,
             **__: Any) -> torch.Tensor:
        """In the place of `expert_mlp`."""
        self.read_layer(self.device_experts, where_E.storage_offset() // self.num_experts, ids_TK)
        return hidden_TD

    def read_layer(self, d: DeviceExperts, layer: int, ids: torch.Tensor) -> None:
        t = d.tables
        read_demanded[(self.num_experts,)](t.where_LE, t.claim_LE, t.step, ids, self.version, self.found, layer, E=self.num_experts,
                                           P=ids.numel(), PP=max(2, triton.next_power_of_2(ids.numel())), WORDS=WORDS, HOLD=self.holds[0],
                                           MAYBE=self.holds[1])

    def judge(self) -> None:
        t, d = self.device_experts.tables, self.device_experts
        judge[(self.layers,)](t.where_LE, t.home_LE, t.slot_LS, t.queue_LS, t.count_L, t.claim_LE, t.taken_LS, d.buffers, self.found,
                              E=self.num_experts, S=d.slots, EP=max(2, triton.next_power_of_2(self.num_experts)),
                              SP=max(2, triton.next_power_of_2(d.slots)), NBYTES=d.buffers.shape[2])

    def step(self) -> None:
        self.draw()
        d = self.device_experts
        for layer in range(self.layers):
            d.forecast(layer, self.forecast(layer))
            d.experts(layer, self.hidden, self.ids[layer], self.weights[layer])
        d.step_end()
        self.judge()

    def run(self, steps: int, captured: Callable[[], None] | None = None) -> list[int]:
        """What is found wrong in so many steps (or replays of a graph of `captured`)."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_module, "expert_mlp", self.read)
            if not GPU:
                for _ in range(steps):
                    (captured or self.step)()
                return self.found.tolist()
            graph = self.device_experts.capture(captured or self.step)
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            for _ in range(steps):
                graph.replay()
            torch.cuda.synchronize()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        return self.found.tolist()
