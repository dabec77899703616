"""A decode step as one CUDA graph: forecasts, plans, moves, publications, evictions, reads; replayed with other routing each time.

Expert kernels are stood in for by one that reads every demanded record whole, at its entry, and counts words that are not that expert's.
Without a GPU the same kernels run one after the other under the interpreter.
"""
from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from moe_prefetch.kernels.expert_mlp.fused_elements import entry
from moe_prefetch.kernels.move import fused as mover
from moe_prefetch.kernels.plan import fused as planner
from moe_prefetch.kernels.plan.naive import Tables
from moe_prefetch.kernels.settle import fused as settle
from moe_prefetch.kernels.settle.naive import COUNTS
from moe_prefetch.types import PROB_ONE

from .plan_cases import COSTS

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


class Alone:
    """A stream where there is none."""

    def wait_stream(self, other: Any) -> None:
        pass


def on(stream: Any) -> Any:
    return torch.cuda.stream(stream) if GPU else nullcontext()


@triton.jit
def read_all(where_ptr, home_ptr, demand_ptr, wrong_ptr, hit_ptr, layer, E: tl.constexpr, WORDS: tl.constexpr):
    e = tl.program_id(0)
    if tl.load(demand_ptr + layer * E + e).to(tl.int32) != 0:
        address = entry(where_ptr, layer * E + e)
        tl.atomic_add(hit_ptr, (address != tl.load(home_ptr + layer * E + e)).to(tl.int64))
        word = address.to(tl.pointer_type(tl.int32)) + tl.arange(0, 4096)
        wrong = tl.zeros((4096,), tl.int32)
        for i in range(0, WORDS, 4096):
            on = i + tl.arange(0, 4096) < WORDS
            wrong += (on & (tl.load(word + i, mask=on, other=0, cache_modifier=".cg") != layer * E + e)).to(tl.int32)
        tl.atomic_add(wrong_ptr, tl.sum(wrong, 0).to(tl.int64))


class Step:
    """Layers with their experts, slots and forecasts; records in the host's memory or this GPU's. `fault`: what is broken."""

    def __init__(self, layers: int = 26, experts: int = 64, slots: int = 8, nbytes: int = 1 << 16, home: str = "host", fault: str = "",
                 programs: int = 8, share: float = 0.06) -> None:
        self.share = share
        self.layers, self.experts, self.nbytes, self.fault, self.programs = layers, experts, nbytes, fault, programs
        numbers = torch.arange(layers * experts, dtype=torch.int32).view(-1, 1).expand(-1, nbytes // 4).contiguous()
        self.homes = numbers.to(DEVICE) if home != "host" else numbers.pin_memory() if GPU else numbers
        self.buffers = torch.full((layers, slots, nbytes), 0xCD, dtype=torch.uint8, device=DEVICE)

        def i32(*shape: int, value: int = 0) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=DEVICE)

        at = (torch.arange(layers * experts, device=DEVICE).view(layers, experts) * nbytes + self.homes.data_ptr()).contiguous()
        self.t = Tables(at.clone(), at, torch.zeros(layers, slots, dtype=torch.int64, device=DEVICE),
                        torch.zeros(layers, slots, dtype=torch.int64, device=DEVICE), i32(layers), i32(layers, experts), i32(layers, slots),
                        i32(layers, slots), i32(layers, experts), i32(layers, experts),
                        torch.tensor([[0, 0, 16]], dtype=torch.int32, device=DEVICE),
                        torch.tensor([[slots, 0, -1]] * layers, dtype=torch.int32, device=DEVICE), i32(1, value=1))
        self.rows = [i32(1, value=n) for n in range(layers)]
        self.demand, self.next_demand = (torch.zeros(layers, experts, dtype=torch.bool, device=DEVICE) for _ in range(2))
        self.prob = i32(layers, experts)
        self.number = torch.arange(experts, device=DEVICE)
        self.ledger = torch.zeros(layers, len(COUNTS) + 2, dtype=torch.int64, device=DEVICE)
        self.wrong, self.hit, self.asked = (torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(3))
        self.compute, self.side = (torch.cuda.Stream() if GPU else Alone() for _ in range(2))

    def draw(self) -> None:
        """Routing of the next step, and a forecast for this one: perfect, random, empty or adversarial, another each step."""
        self.demand.copy_(self.next_demand)
        self.next_demand.copy_(torch.rand(self.layers, self.experts, device=DEVICE) < self.share)
        mode = (torch.rand(1, device=DEVICE) * 4).int()
        chance = (torch.rand(self.layers, self.experts, device=DEVICE) * PROB_ONE).int()
        # Layers 0 and 1 are planned for the next step.
        true = torch.cat([self.next_demand[:2], self.demand[2:]])
        others = torch.where(mode == 1, chance, torch.where(mode == 2, -1, (~true).int() * PROB_ONE))
        self.prob.copy_(torch.where(mode == 0, true.int() * PROB_ONE, others))
        self.t.load_LE.copy_(chance // 2)
        self.asked += self.demand.sum()

    def plan(self, layer: int, ahead: int) -> None:
        t = self.t
        old = t.where_LE[layer].clone() if self.fault == "no rehome" else None
        planner.launch(t, self.rows[layer], self.prob[layer : layer + 1], None, COSTS, ahead, 0)
        if old is not None:
            t.where_LE[layer].copy_(old)
        if self.fault == "entry before the copy":
            taken = torch.where(t.slot_LS[layer] >> 16 & 3 == 1, (t.slot_LS[layer] & 0xFFFF) - 1, -1)
            at = self.buffers[layer].data_ptr() + torch.arange(len(taken), device=DEVICE) * self.nbytes
            row = torch.cat([t.where_LE[layer], at[:1]])
            row.scatter_(0, torch.where(taken >= 0, taken, self.experts), at)
            t.where_LE[layer].copy_(row[:-1])
        self.side.wait_stream(self.compute)
        with on(self.side):
            # As if every fence and count were missing, what is published is not the record.
            words = replace(t, home_LE=torch.full_like(t.home_LE, self.buffers.data_ptr())) if self.fault == "stale words" else t
            mover.launch_move(words, layer, self.buffers[layer], self.nbytes, ahead, self.programs)

    def step(self) -> None:
        t = self.t
        self.draw()
        for layer in range(self.layers):
            if layer + 2 < self.layers:
                self.plan(layer + 2, 0)
            if layer >= 2:
                settle.launch_withdraw(t, layer, self.prob[layer] // 2, COSTS.waste, 0)
            settle.launch_settle(t, layer, torch.where(self.demand[layer], self.number, -1), self.ledger)
            read_all[(self.experts,)](t.where_LE, t.home_LE, self.demand, self.wrong, self.hit, layer, E=self.experts,
                                      WORDS=self.nbytes // 4)
        self.plan(0, 1)
        self.plan(1, 1)
        self.compute.wait_stream(self.side)
        t.step.add_(1)

    def capture(self) -> torch.cuda.CUDAGraph:
        with on(self.compute):
            self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.compute):
            self.step()
        return graph

    def replay(self, times: int) -> dict[str, int]:
        """Counts over `times` replays: experts asked for, found in slots, words that were another's."""
        graph = self.capture()
        for x in (self.wrong, self.hit, self.asked):
            x.zero_()
        before = torch.cuda.memory_allocated()
        for _ in range(times):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        self.check()
        return {"asked": int(self.asked), "in_slots": int(self.hit), "wrong_words": int(self.wrong)}

    def check(self) -> None:
        """Every entry leads home or to the READY slot of its expert."""
        t = self.t
        state, expert = t.slot_LS >> 16 & 3, (t.slot_LS & 0xFFFF) - 1
        assert not bool((state == 1).any()), "a slot is FILLING after the join"
        want = t.home_LE.clone()
        layer, slot = (state == 2).nonzero(as_tuple=True)
        want[layer, expert[layer, slot]] = self.buffers.data_ptr() + (layer * t.slot_LS.shape[1] + slot) * self.nbytes
        if not self.fault:
            assert torch.equal(t.where_LE, want)
