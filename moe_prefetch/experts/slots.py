"""Which expert is in which slot: pure bookkeeping, no tensors, no clock.

Slots belong to a layer. A slot goes FREE -> FILLING -> READY and back to FREE; each fill bumps its generation, and only the holder
of the current generation may publish or cancel. A leased slot is never written. Not thread-safe: the caller holds one lock.
"""
from __future__ import annotations

from dataclasses import dataclass

from ..config import ExpertsConfig, parse_bytes
from ..errors import BudgetError, IntegrityError
from ..types import PROB_ONE, Demand, Lease, Residency, SlotState, SlotView

# Decay of the recent load: a step weighs 1/8 (about the last 8 tokens in decode); integers, so equal everywhere.
LOAD_SHIFT = 3


@dataclass(slots=True)
class _Slot:
    expert: int = -1
    state: SlotState = SlotState.FREE
    generation: int = 0
    leases: int = 0
    last_use: int = -1
    ahead: bool = False   # filled ahead of demand
    used: bool = False    # leased since it was filled


@dataclass(frozen=True, slots=True)
class Eviction:
    """What a fill threw out: `wasted` when it had been fetched ahead and nobody ever read it."""

    expert: int
    wasted: bool


class SlotTable:
    """All slots of a session: `num_layers` x `num_slots`, for `num_experts` experts a layer."""

    def __init__(self, num_layers: int, num_slots: int, num_experts: int) -> None:
        if not (num_layers >= 1 and 1 <= num_slots <= num_experts):
            raise ValueError(f"need at least one layer and 1..{num_experts} slots, got {num_layers} layers and {num_slots} slots")
        self.num_layers, self.num_slots, self.num_experts = num_layers, num_slots, num_experts
        self.epoch = 0
        self._slots = [[_Slot() for _ in range(num_slots)] for _ in range(num_layers)]
        self._where: list[dict[int, int]] = [{} for _ in range(num_layers)]
        self._load: list[list[int]] = [[0] * num_experts for _ in range(num_layers)]

    # looking --------------------------------------------------------------------------------------------------------
    def view(self, layer: int) -> Residency:
        slots = tuple(SlotView(s.expert, s.state, s.generation, s.last_use) for s in self._slots[layer])
        return Residency(layer, slots, tuple(self._load[layer]))

    def find(self, layer: int, expert: int) -> tuple[int, SlotState] | None:
        """(slot, state) of an expert that is in a slot or on its way into one."""
        slot = self._where[layer].get(expert)
        return None if slot is None else (slot, self._slots[layer][slot].state)

    # filling --------------------------------------------------------------------------------------------------------
    def begin_fill(self, layer: int, slot: int, expert: int, *, ahead: bool) -> tuple[int, Eviction | None]:
        """Claim a slot: it becomes FILLING. Returns (generation, what was thrown out).

        Raises IntegrityError when the slot is leased or FILLING, or the expert already has a slot.
        """
        s = self._slots[layer][slot]
        if s.leases or s.state is SlotState.FILLING:
            raise IntegrityError("a slot in use was claimed", where=f"layer {layer}, slot {slot}",
                                 expected="a free, or ready and unleased, slot")
        if expert in self._where[layer]:
            raise IntegrityError("an expert was given a second slot", where=f"layer {layer}, expert {expert}",
                                 expected="one slot per expert")
        evicted = self._evict(layer, slot)
        s.expert, s.state, s.ahead, s.used = expert, SlotState.FILLING, ahead, False
        s.generation += 1
        self._where[layer][expert] = slot
        return s.generation, evicted

    def publish(self, layer: int, slot: int, generation: int) -> bool:
        """FILLING -> READY. False, and no change, when the generation is stale (cancelled, or claimed again)."""
        s = self._slots[layer][slot]
        if s.generation != generation or s.state is not SlotState.FILLING:
            return False
        s.state = SlotState.READY
        return True

    def cancel(self, layer: int, slot: int, generation: int) -> bool:
        """FILLING -> FREE. False, and no change, when the generation is stale."""
        s = self._slots[layer][slot]
        if s.generation != generation or s.state is not SlotState.FILLING:
            return False
        self._drop(layer, slot)
        return True

    def _evict(self, layer: int, slot: int) -> Eviction | None:
        s = self._slots[layer][slot]
        if s.state is SlotState.FREE:
            return None
        evicted = Eviction(s.expert, s.ahead and not s.used)
        self._drop(layer, slot)
        return evicted

    def _drop(self, layer: int, slot: int) -> None:
        s = self._slots[layer][slot]
        del self._where[layer][s.expert]
        s.expert, s.state, s.last_use = -1, SlotState.FREE, -1

    # reading --------------------------------------------------------------------------------------------------------
    def lease(self, layer: int, expert: int, step: int) -> Lease | None:
        """Permission to read a READY expert; None when it is not READY."""
        slot = self._where[layer].get(expert)
        if slot is None or self._slots[layer][slot].state is not SlotState.READY:
            return None
        s = self._slots[layer][slot]
        s.leases += 1
        s.used = True
        s.last_use = step
        return Lease(layer, expert, slot, s.generation, self.epoch)

    def release(self, lease: Lease) -> None:
        s = self._slots[lease.layer][lease.slot]
        if s.leases < 1 or s.generation != lease.generation:
            raise IntegrityError("a lease was released twice, or its slot was written while held",
                                 where=f"layer {lease.layer}, expert {lease.expert}, slot {lease.slot}",
                                 expected=f"generation {lease.generation}")
        s.leases -= 1

    def observe(self, demand: Demand) -> None:
        """Fold what the router decided into the recent load of the layer."""
        load = self._load[demand.layer]
        used = set(demand.experts)
        for e in range(self.num_experts):
            # Towards PROB_ONE for a used expert, towards 0 for the others; >> rounds towards minus infinity, the same on every machine.
            load[e] += ((PROB_ONE if e in used else 0) - load[e]) >> LOAD_SHIFT

    # dropping all -----------------------------------------------------------------------------------------------------
    def invalidate(self) -> list[int]:
        """Weights changed: every slot is dropped and the epoch moves on. Returns, per layer, the fetched-ahead slots never read.

        Raises IntegrityError while anything is leased or FILLING: quiesce first.
        """
        for layer, slots in enumerate(self._slots):
            for i, s in enumerate(slots):
                if s.leases or s.state is SlotState.FILLING:
                    raise IntegrityError("weights were updated under a reader or a mover", where=f"layer {layer}, slot {i}",
                                         expected="a quiesced session")
        self.epoch += 1
        return self.clear()

    def clear(self) -> list[int]:
        """Drop every slot, whatever its state, and every lease; generations stay, so that nothing old can publish. Only when no reader
        and no mover is alive: it mends a table that an interrupt left half changed. Returns what `invalidate` does."""
        unread = [sum(s.state is SlotState.READY and s.ahead and not s.used for s in slots) for slots in self._slots]
        for layer, slots in enumerate(self._slots):
            self._where[layer].clear()
            for s in slots:
                s.expert, s.state, s.leases, s.last_use = -1, SlotState.FREE, 0, -1
        return unread

    def check_integrity(self) -> None:
        """Raises IntegrityError naming the first invariant that does not hold."""
        for layer, slots in enumerate(self._slots):
            seen: dict[int, int] = {}
            for i, s in enumerate(slots):
                if (s.state is SlotState.FREE) != (s.expert == -1):
                    raise IntegrityError(f"state {s.state.name} with expert {s.expert}", where=f"layer {layer}, slot {i}")
                if s.leases and s.state is not SlotState.READY:
                    raise IntegrityError(f"{s.leases} leases on a {s.state.name} slot", where=f"layer {layer}, slot {i}")
                if s.leases < 0:
                    raise IntegrityError("negative leases", where=f"layer {layer}, slot {i}")
                if s.expert >= 0:
                    if s.expert in seen or s.expert >= self.num_experts:
                        raise IntegrityError(f"expert {s.expert} twice, or unknown",
                                             where=f"layer {layer}, slots {seen.get(s.expert)} and {i}")
                    seen[s.expert] = i
            if seen != self._where[layer]:
                raise IntegrityError("the index does not match the slots", where=f"layer {layer}")


def slots_per_layer(experts: ExpertsConfig, *, num_layers: int, num_experts: int, record_bytes: int, reserve: int = 0) -> int:
    """How many expert slots each layer gets; a size also pays for `reserve` records outside slots. Raises BudgetError for a budget that
    holds none, or more than there are."""
    value = experts.resident
    if isinstance(value, int):
        slots = value
    elif value.strip().endswith("%"):
        slots = int(num_experts * float(value.strip()[:-1]) / 100 + 1e-9)
    else:
        slots = min((parse_bytes(value) // record_bytes - reserve) // num_layers, num_experts)
    if slots < 1:
        raise BudgetError(f"experts.resident = {value} holds no expert of a layer",
                          where=f"{num_experts} experts, {record_bytes} bytes each",
                          expected=f"at least one slot per layer: {(num_layers + reserve) * record_bytes} bytes in all",
                          do="raise experts.resident")
    if slots > num_experts:
        raise BudgetError(f"experts.resident = {value} is more than the layer has", where=f"{num_experts} experts per layer",
                          expected=f"1 to {num_experts} slots; all experts together are {num_layers * num_experts * record_bytes} bytes",
                          do="lower experts.resident; if everything fits, home: local needs no slots")
    return slots
