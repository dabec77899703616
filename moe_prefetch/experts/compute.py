"""Computes a MoE layer from wherever its experts are: serves one demand, waits where it must, and settles it.

The arithmetic does not depend on where a weight came from or when: experts are taken in ascending order, each over all its tokens,
from memory of the same alignment. So every plan, forecast and home gives the same bits.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ..errors import IntegrityError, SessionError, ShapeError, UnsupportedModelError
from ..kernels.expert_mlp.naive import EAGER, Activation, How, Shares
from ..runtime import Runtime
from ..types import Demand, Lease, Settlement
from .ledger import Ledger
from .mover import Job, Mover
from .planner import Policy
from .store import LocalStore, RecordLayout


def demand_of(layer: int, step: int, ids_TK: torch.Tensor, num_experts: int) -> Demand:
    """Distinct experts and their token counts; ids outside 0..num_experts-1 are masked and not counted."""
    ids = ids_TK.reshape(-1)
    if ids.numel() <= 32:
        counts: dict[int, int] = {}
        for e in ids.tolist():
            if 0 <= e < num_experts:
                counts[e] = counts.get(e, 0) + 1
        pairs = sorted(counts.items())
    else:
        count_E = torch.bincount(ids[(ids >= 0) & (ids < num_experts)], minlength=num_experts).tolist()
        pairs = [(e, n) for e, n in enumerate(count_E) if n]
    return Demand(layer, step, tuple(e for e, _ in pairs), tuple(n for _, n in pairs))


def check_hidden(hidden_TD: torch.Tensor, layout: RecordLayout, layer: int, how: How) -> None:
    """Raises SessionError, ShapeError. Autocast leaves hidden states in any dtype, and some implementations cast what they are given."""
    if torch.is_grad_enabled() and hidden_TD.requires_grad:
        raise SessionError("an attached model serves inference only", where="experts", expected="torch.no_grad() or torch.inference_mode()",
                           do="detach to train")
    known = str(hidden_TD.dtype) == f"torch.{layout.parts[0].dtype}" or (how.casts and hidden_TD.dtype == how.given)
    if not known and not torch.is_autocast_enabled(hidden_TD.device.type):
        raise ShapeError(f"hidden states are {hidden_TD.dtype}, the experts {layout.parts[0].dtype}", where=f"layer {layer}",
                         expected="one dtype", do="convert the model before it is attached; detach first if it is")


def in_dtype_of(layout: RecordLayout, hidden_TD: torch.Tensor) -> torch.Tensor:
    """Hidden states in the experts' dtype, which may be another than theirs (`check_hidden`)."""
    return hidden_TD.to(getattr(torch, layout.parts[0].dtype))


def check_silu(act: Activation, layer: int) -> None:
    """The kernels over records know SwiGLU. Raises UnsupportedModelError."""
    if type(act).__name__ not in ("SiLU", "SiLUActivation") and act is not torch.nn.functional.silu:
        raise UnsupportedModelError(f"its experts use {type(act).__name__}", where=f"layer {layer}", expected="SiLU",
                                    do="use home: local or disk")


class LocalCompute:
    """All experts at home in memory: every demand is a hit. `how`: how they are summed (`Shares`)."""

    def __init__(self, store: LocalStore, ledger: Ledger, on_demand: Callable[[Demand], None], how: How = EAGER) -> None:
        self._store, self._ledger, self._on_demand, self._how = store, ledger, on_demand, how

    def run(self, layer: int, step: int, kind: str, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor,
            act: Activation) -> torch.Tensor:
        """hidden_TD [T, D], ids_TK [T, K] int64, weights_TK [T, K] -> [T, D]."""
        check_hidden(hidden_TD, self._store.layout_of(layer), layer, self._how)
        demand = demand_of(layer, step, ids_TK, self._store.source.num_experts)
        shares = Shares(hidden_TD, ids_TK, weights_TK, act, self._how)
        for e in demand.experts:
            v = self._store.views(layer, e)
            shares.add(e, v["gate_up"], v["down"])
        self._on_demand(demand)
        self._ledger.settle(Settlement(layer, step, len(demand.experts), 0, 0, 0, 0, 0, 0.0), kind)
        return shares.total()


class SlotCompute:
    """Experts in slots, filled by a mover from their home.

    `keep_E(layer, step)` may give what each expert in a slot is worth after this step; empty means the recent load. `how`: how experts
    are summed (`Shares`).
    """

    def __init__(self, mover: Mover, policy: Policy, ledger: Ledger, runtime: Runtime, on_demand: Callable[[Demand], None],
                 keep_E: Callable[[int, int], tuple[int, ...]], how: How = EAGER) -> None:
        self._how = how
        self._mover, self._policy, self._ledger, self._runtime = mover, policy, ledger, runtime
        self._on_demand, self._keep_E = on_demand, keep_E

    def run(self, layer: int, step: int, kind: str, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor,
            act: Activation) -> torch.Tensor:
        """hidden_TD [T, D], ids_TK [T, K] int64, weights_TK [T, K] -> [T, D]. Raises DeadlineError, ArtefactError."""
        mover = self._mover
        check_hidden(hidden_TD, mover.store.layout, layer, self._how)
        demand = demand_of(layer, step, ids_TK, mover.table.num_experts)
        shares = Shares(hidden_TD, ids_TK, weights_TK, act, self._how)
        serving = _Serving(mover, self._policy, demand, self._keep_E(layer, step))
        stall = 0.0
        try:
            for e in demand.experts:
                start = self._runtime.now()
                buffer = serving.acquire(e)
                stall += self._runtime.now() - start
                v = mover.store.layout.views(buffer)
                shares.add(e, v["gate_up"], v["down"])
                serving.release(e)
        finally:
            serving.close()
        self._on_demand(demand)
        moved, wasted, cancelled = mover.take_counts(layer)
        self._ledger.settle(Settlement(layer, step, serving.hit, serving.late, serving.miss, wasted, cancelled,
                                       moved * mover.store.layout.nbytes, stall), kind)
        return shares.total()


class _Serving:
    """One demand being served: leases on what is there, jobs for what is not. `close` gives everything back, also after an error."""

    def __init__(self, mover: Mover, policy: Policy, demand: Demand, keep_E: tuple[int, ...]) -> None:
        self._mover, self._demand = mover, demand
        self._leases: dict[int, Lease] = {}
        self._jobs: dict[int, Job] = {}
        self._bounced: deque[int] = deque()
        try:
            with mover.lock:
                self._begin(policy, keep_E)
        except BaseException:
            self.close()
            raise

    def _begin(self, policy: Policy, keep_E: tuple[int, ...]) -> None:
        mover, table, demand, layer = self._mover, self._mover.table, self._demand, self._demand.layer
        # The link now belongs to the demand: fetches for this layer that have not started would come after their use.
        for job in mover.unstarted(layer):
            mover.cancel(job)
        missing = []
        for e in demand.experts:
            if (lease := table.lease(layer, e, demand.step)) is not None:
                self._leases[e] = lease
            elif (job := mover.filling(layer, e)) is not None:
                self._jobs[e] = job
            else:
                missing.append(e)
        self.hit, self.late, self.miss = len(self._leases), len(self._jobs), len(missing)
        busy = {lease.slot for lease in self._leases.values()}
        for e in missing:
            slot = policy.admit(table.view(layer), e, frozenset(busy), keep_E)
            if slot is None:
                self._bounced.append(e)
            else:
                busy.add(slot)
                self._jobs[e] = mover.demand(layer, e, slot)
        self._issue()

    def _issue(self) -> None:
        """Queue bounced reads, in ascending order, as far as there are buffers."""
        while self._bounced and (job := self._mover.demand(self._demand.layer, self._bounced[0], None)) is not None:
            self._jobs[self._bounced.popleft()] = job

    def acquire(self, expert: int) -> torch.Tensor:
        """The record of a demanded expert, once it is there; valid until `release`."""
        mover = self._mover
        with mover.lock:
            if expert not in self._leases:
                job = self._jobs[expert]
                mover.wait(job)
                if job.slot < 0:
                    return job.buffer
                lease = mover.table.lease(self._demand.layer, expert, self._demand.step)
                if lease is None:
                    raise IntegrityError("a slot that was waited for is not ready",
                                         where=f"layer {job.layer}, expert {expert}, slot {job.slot}")
                self._leases[expert] = lease
            return mover.buffers[self._demand.layer][self._leases[expert].slot]

    def release(self, expert: int) -> None:
        mover = self._mover
        with mover.lock:
            job = self._jobs.pop(expert, None)
            if (lease := self._leases.pop(expert, None)) is not None:
                mover.table.release(lease)
            elif job is not None:
                mover.free_bounce(job)
                self._issue()

    def close(self) -> None:
        mover = self._mover
        with mover.lock:
            for lease in self._leases.values():
                mover.table.release(lease)
            for job in self._jobs.values():
                mover.abandon(job)
            self._leases, self._jobs = {}, {}
            self._bounced.clear()
            mover.table.observe(self._demand)
