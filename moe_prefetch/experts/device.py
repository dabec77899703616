"""A step's experts without the host: forecast, plan, move, publish and compute, enqueued on three streams and fit for one CUDA graph.

`DeviceExperts` owns the words of one GPU (`kernels/protocol.py`), its slots and its ledger. For each layer its caller says what a tap
expects (`moe_input`, or `forecast` with probabilities of its own) and what the router has chosen (`experts`), and after the last layer
`step_end`. These calls only enqueue, and what the kernels do depends on device memory alone: captured once, by the caller or by `capture`,
a step is replayed with other routing and other forecasts by a host that does nothing else. On a CPU the laws do the same, one by one.

Layer L is planned once a step: from the tap two layers before; the first two after their own experts of the step before, from `next_NE`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import IntegrityError, ShapeError
from ..kernels.expert_mlp.op import expert_mlp
from ..kernels.expert_mlp.record import LINE
from ..kernels.move.op import MOST, PROGRAMS, move
from ..kernels.plan.naive import Costs, Tables
from ..kernels.plan.op import plan
from ..kernels.probe_topk.naive import TapWeights
from ..kernels.probe_topk.op import probe_topk, scratch_for
from ..kernels.protocol import EXPERT_MASK, GENERATION_AT, STATE_AT
from ..kernels.settle.naive import COUNTS
from ..kernels.settle.op import settle, withdraw
from ..kernels.warm.op import warm
from ..runtime import Runtime
from ..types import SlotState
from .homes import MemoryStore
from .ledger import Totals
from .planner import HYSTERESIS, KEEP, WASTE, Budget, Link
from .where import Where

HORIZON = 2
COSTS = Costs(WASTE, KEEP, HYSTERESIS)
WARM = 24 << 20  # bytes: what half of a large chip's L2 holds


@dataclass(frozen=True, slots=True)
class DeviceCounts:
    """The ledger when `step` began: totals of each layer, and bytes by link, moved into slots and read in place."""

    step: int
    layers: tuple[Totals, ...]
    moved_K: tuple[int, ...]
    read_K: tuple[int, ...]

    @property
    def total(self) -> Totals:
        return sum(self.layers, Totals())


def links_of(store: MemoryStore) -> tuple[int, ...]:
    """Which link each expert of a store is behind: -1 in this memory, else 0, or the owner's rank where ranks share their homes."""
    if len(store.blocks[0].bases) == 1:
        return (-1 if store.home.name == "local" else 0,) * store.num_experts
    owners = (e // store.source.num_experts for e in range(store.num_experts))
    return tuple(-1 if owner == store.home.rank else owner for owner in owners)


class DeviceExperts:
    """Experts of one GPU over a store of records, with `slots` a layer for those whose homes are elsewhere.

    tables     the words; `tables.where_LE` is what kernels read records through
    ledger_LC  counts of each layer on the device (`kernels/settle/naive.py`)
    next_NE    int32, what is expected of the first layers in the next step, to be written in place; -1: their recent load
    epoch      version of the weights
    """

    # Tensors that are written in inference mode and out of it.
    @torch.inference_mode(False)
    def __init__(self, store: MemoryStore, device: torch.device | str, runtime: Runtime, slots: int, *, link_E: Sequence[int] | None = None,
                 budget: Budget | None = None, taps: Sequence[TapWeights | None] = (), tokens: int = 256, programs: int = 0) -> None:
        """link_E, budget  as in `planner`; left out: `links_of`, every link alike, and as many moves as slots
        taps               of each layer's MoE input, for horizons 1 and 2 as far as there are layers, for up to `tokens` tokens
        programs           of the mover; 0: 6, or 24 where homes are another GPU's

        Raises MemoryError, ShapeError.
        """
        layers, experts, device = store.num_layers, store.num_experts, torch.device(device)
        if not 1 <= slots <= experts or not 0 <= programs <= MOST or len(taps) not in (0, layers):
            raise ShapeError(f"{slots} slots, {programs} programs, {len(taps)} taps", where="experts",
                             expected=f"1 to {experts} slots, up to {MOST} programs, {layers} taps or none")
        self.store, self.layers, self.slots, self.epoch = store, layers, slots, 0
        self._device, self._runtime, self._taps = device, runtime, tuple(taps)
        self._programs = programs or (MOST if store.home.name == "peer" else PROGRAMS)
        link_E = links_of(store) if link_E is None else tuple(link_E)
        # Of ranks that share homes each numbers the links alike, its own among them.
        budget = budget or Budget(slots, links=(Link(),) * max(len(store.blocks[0].bases), max(link_E) + 1))
        if len(link_E) != experts or not -1 <= min(link_E) <= max(link_E) < len(budget.links):
            raise ShapeError(f"{len(link_E)} experts behind links {min(link_E)} to {max(link_E)}", where="experts",
                             expected=f"{experts} experts, links -1 to {len(budget.links) - 1}", do="give a Link for each number")
        self._first = budget.first
        raw, size = runtime.allocate_on(layers * slots * store.layout.nbytes + LINE, device), layers * slots * store.layout.nbytes
        start = -raw.data_ptr() % LINE
        self.buffers = raw[start : start + size].view(layers, slots, -1)
        # The step and the ledger lie in one block, which one copy sends to the host.
        columns = len(COUNTS) + 2 * len(budget.links)
        self._block = torch.zeros(2 + layers * columns, dtype=torch.int64, device=device)
        self._sent = torch.zeros_like(self._block, device="cpu", pin_memory=device.type == "cuda")
        self.ledger_LC = self._block[2:].view(layers, columns)
        slot_LS = torch.zeros(layers, slots, dtype=torch.int64, device=device)

        def i32(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def of(rows: Any) -> torch.Tensor:
            return torch.tensor(rows, dtype=torch.int32, device=device).contiguous()

        home = Where(store, device).address_LE
        self.tables = Tables(home.clone(), home, slot_LS, torch.zeros_like(slot_LS), i32(layers), i32(layers, experts), i32(layers, slots),
                             i32(layers, slots), i32(layers, experts), of([link_E] * layers),
                             of([[k.time, k.queued, k.worth] for k in budget.links]),
                             of([[budget.moves, budget.window, budget.waste]] * layers), self._block[:1].view(torch.int32)[:1])
        self._waste_L = self.tables.budget_L3[:, 2].clone() if budget.waste >= 0 else None
        self._row_L = torch.arange(layers, dtype=torch.int32, device=device)
        self.next_NE = torch.full((min(HORIZON, layers), experts), -1, dtype=torch.int32, device=device)
        # Taps follow each other, so they share the largest scratch.
        self._scratch = max((scratch_for(tokens, tap) for tap in taps if tap is not None), key=torch.numel, default=None)
        self._chosen_E, self._unknown, self._tokens = i32(experts), i32(HORIZON, experts) - 1, tokens
        # Movers have one stream, plans another: beside them compute goes on, and a plan does not wait for a mover.
        self._side, self._plans = ((torch.cuda.Stream(device) for _ in range(2)) if device.type == "cuda" else (None, None))
        self._pending: list[tuple[int, Any, torch.Tensor]] = []

    # a step ---------------------------------------------------------------------------------------------------------
    def moe_input(self, layer: int, hidden_TD: torch.Tensor, past_TD: torch.Tensor | None = None) -> None:
        """The tap at a layer's MoE input, before its router: the probe's forecasts are spent. Raises ShapeError.

        Without taps, and for more tokens than they were made for, the recent load speaks.
        """
        tap = self._taps[layer] if self._taps else None
        known = tap is not None and self._scratch is not None and len(hidden_TD) <= self._tokens
        with self._without_autocast():
            self.forecast(layer, probe_topk(hidden_TD, tap, self._scratch, past_TD)[1] if known else self._unknown)

    def forecast(self, layer: int, prob_HE: torch.Tensor) -> None:
        """What is expected of the layers after `layer`, int32 [1 or 2, E]; a negative first number in a row: nothing is known.

        The layer two ahead is planned and its moves begin; moves of the next one that no longer pay are taken back: beside this
        layer, so `prob_HE` is to stay as it is until the next one's `experts` has been called. Raises ShapeError.
        """
        if not 0 <= layer < self.layers or not 1 <= len(prob_HE) <= HORIZON or prob_HE.shape[1:] != self.next_NE.shape[1:]:
            raise ShapeError(f"a forecast {tuple(prob_HE.shape)} after layer {layer}", where="experts",
                             expected=f"[1 or {HORIZON}, {self.next_NE.shape[1]}], layers 0 to {self.layers - 1}")
        if layer + 1 < self.layers:
            with self._planning(layer + 1, prob_HE):
                if len(prob_HE) > 1 and layer + HORIZON < self.layers:
                    self._plan(layer + HORIZON, prob_HE[1:2], 0)
                withdraw(self.tables, layer + 1, prob_HE[0], COSTS.waste)

    def warm(self, layer: int, prob_E: torch.Tensor, nbytes: int = WARM) -> None:
        """Ask for what is expected of `layer` and lies in this memory, up to `nbytes` of it, into L2: before the layer's attention."""
        warm(self.tables, layer, prob_E, self._chosen_E, nbytes // self.store.layout.nbytes, self.store.layout.nbytes)

    def experts(self, layer: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, *, limit: float = 0.0,
                alpha: float = 1.0) -> torch.Tensor:
        """The layer's weighted sum, [T, D], from wherever its records are; arguments as in `expert_mlp`. Raises ShapeError."""
        t, ids_TK = self.tables, ids_TK.to(torch.int64).contiguous()
        self._planned(layer)
        settle(t, layer, ids_TK, self.ledger_LC)
        if ids_TK.numel():
            records = () if self._side else self.records(layer)
            with self._without_autocast():
                out_TD = expert_mlp(hidden_TD, ids_TK, weights_TK, t.where_LE[layer], self.store.form, records=records, limit=limit,
                                    alpha=alpha)
        else:
            out_TD = torch.zeros_like(hidden_TD)
        if layer < HORIZON:
            with self._planning(self.layers, self.next_NE):
                self._plan(layer, self.next_NE[layer : layer + 1], 1)
        return out_TD

    def _without_autocast(self) -> AbstractContextManager[Any]:
        """The laws of kernels, which serve CPUs, have dtypes of their own."""
        kind = self._device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    @contextmanager
    def _planning(self, first: int, said: torch.Tensor) -> Iterator[None]:
        """What is enqueued here sees all that was before; `settle` of layer `first` and later ones see it. `said` is kept until then."""
        if not self._plans:
            yield
            return
        self._plans.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._plans):
                yield
        finally:
            self._pending.append((first, self._plans.record_event(), said))

    def _planned(self, layer: int) -> None:
        """What is enqueued after this sees all plans that `layer` depends on."""
        due = [event for first, event, _ in self._pending if first <= layer]
        # Taken off first: a wait that fails must fail once.
        self._pending = [p for p in self._pending if p[0] > layer]
        for event in due:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _plan(self, layer: int, prob_1E: torch.Tensor, ahead: int) -> None:
        t, records = self.tables, ()
        plan(t, self._row_L[layer : layer + 1], prob_1E, COSTS, ahead=ahead, first=self._first)
        if self._side:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        else:
            records = [self.store.buffer(layer, e) for e in range(self.store.num_experts)]
        with torch.cuda.stream(self._side) if self._side else nullcontext():
            move(t, layer, self.buffers[layer], self.store.layout.nbytes, records=records, ahead=ahead, programs=self._programs)

    def step_end(self) -> None:
        """After the last layer: movers have ended, the ledger is on its way to the host, the next step begins."""
        self.join()
        self.tables.step.add_(1)
        if self._waste_L is not None:
            self.tables.budget_L3[:, 2] = self._waste_L
        self._sent.copy_(self._block, non_blocking=True)

    def join(self) -> None:
        """What is enqueued after this sees no mover at work: before anything else that reads or writes slots."""
        self._planned(self.layers)
        if self._side:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """One step as a graph. `step` is run once as it is, so that all is compiled and allocated, and once to be captured."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        return graph

    # weights --------------------------------------------------------------------------------------------------------
    def update(self, write: Callable[[], None], quiesce: Callable[[], None] = lambda: None) -> None:
        """New weights: all readers and movers have come to rest, entries lead home, slots are dropped, `write` fills the homes.

        `quiesce` returns when every rank that reads these homes has called it: it is called before and after. Between steps only.
        """
        self.rest()
        quiesce()
        t = self.tables
        t.where_LE.copy_(t.home_LE)
        t.slot_LS.bitwise_right_shift_(GENERATION_AT).bitwise_left_shift_(GENERATION_AT)
        self.epoch += 1
        self.rest()
        write()
        self.rest()
        quiesce()

    def rest(self) -> None:
        """Return when all that is enqueued has been done, movers too."""
        self.join()
        if self._side:
            torch.cuda.synchronize(self._device)

    # looking --------------------------------------------------------------------------------------------------------
    def counts(self, *, wait: bool = True) -> DeviceCounts:
        """The ledger now, after all that is enqueued; without `wait` as the last finished step has sent it. Not while capturing."""
        if wait:
            self.rest()
            sent = self._block.cpu()
        else:
            # A copy may be arriving: what two looks agree on is whole.
            sent = self._sent.clone()
            while not torch.equal(sent, last := self._sent.clone()):
                sent = last
        ledger_LC = sent[2:].view(self.ledger_LC.shape)
        links, size, first = self.tables.link_K3.shape[0], self.store.layout.nbytes, len(COUNTS)
        layers = []
        for row in ledger_LC.tolist():
            hit, late, miss, cancelled, used, unread = row[:first]
            wasted = sum(row[first : first + links]) - used - unread
            layers.append(Totals(hit, late, miss, wasted, cancelled, sum(row[first:]) * size, wasted * size))
        over = (ledger_LC.sum(0)[first:] * size).tolist()
        return DeviceCounts(int(sent[:1].view(torch.int32)[0]), tuple(layers), tuple(over[:links]), tuple(over[links:]))

    def held_bytes(self) -> int:
        """Bytes of experts in this device's memory: slots, and homes that lie there too."""
        homes = self.layers * self.store.num_experts * self.store.layout.nbytes
        return self.buffers.numel() + (homes if self._device.type == "cpu" or self.store.home.name == "local" else 0)

    def records(self, layer: int) -> list[torch.Tensor]:
        """The records that a row's entries lead to, for homes in this process's memory. Waits for the device."""
        base, size, homes = self.buffers[layer].data_ptr(), self.buffers.shape[2], self.tables.home_LE[layer].tolist()
        found = []
        for e, address in enumerate(self.tables.where_LE[layer].tolist()):
            found.append(self.store.buffer(layer, e) if address == homes[e] else self.buffers[layer, (address - base) // size])
        return found

    def check(self) -> None:
        """Between steps. Raises IntegrityError: an entry leads neither home nor to its expert's READY slot, or a slot is FILLING."""
        self.rest()
        t = self.tables
        state_LS, expert_LS = t.slot_LS >> STATE_AT & 3, (t.slot_LS & EXPERT_MASK) - 1
        want_LE, size = t.home_LE.clone(), self.buffers.shape[2]
        layer, slot = (state_LS == SlotState.READY).nonzero(as_tuple=True)
        want_LE[layer, expert_LS[layer, slot]] = self.buffers.data_ptr() + (layer * self.slots + slot) * size
        wrong = (want_LE != t.where_LE).nonzero().tolist()
        filling = (state_LS == SlotState.FILLING).nonzero().tolist()
        if wrong or filling:
            raise IntegrityError(f"entries {wrong[:3]} lead elsewhere, slots {filling[:3]} are FILLING", where="experts",
                             expected="home, or the READY slot of the expert", do="join before slots are looked at")
