"""The slot table: every order of claims, publications, cancellations, leases and evictions keeps its invariants."""
from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from moe_prefetch.errors import IntegrityError
from moe_prefetch.experts.slots import SlotTable
from moe_prefetch.types import PROB_ONE, Demand, SlotState


class Slots(RuleBasedStateMachine):
    """The table against a model of it: who owns each slot, which leases are out, which fetches were wasted."""

    fills = Bundle("fills")
    leases = Bundle("leases")

    @initialize(layers=st.integers(1, 3), slots=st.integers(1, 4), extra=st.integers(0, 3))
    def make(self, layers, slots, extra):
        self.table = SlotTable(layers, slots, slots + extra)
        self.model = {}        # (layer, slot) -> [expert, state, generation, leases, ahead, used]
        self.generations = {(la, s): 0 for la in range(layers) for s in range(slots)}
        self.step = 0

    def place(self, layer, number, size):
        return layer % self.table.num_layers, number % size

    @rule(target=fills, layer=st.integers(0, 2), slot=st.integers(0, 3), expert=st.integers(0, 6), ahead=st.booleans())
    def claim(self, layer, slot, expert, ahead):
        layer, slot = self.place(layer, slot, self.table.num_slots)
        expert %= self.table.num_experts
        old = self.model.get((layer, slot))
        taken = any(k[0] == layer and v[0] == expert for k, v in self.model.items())
        if taken or (old and (old[3] or old[1] is SlotState.FILLING)):
            with pytest.raises(IntegrityError):
                self.table.begin_fill(layer, slot, expert, ahead=ahead)
            return multiple()
        generation, evicted = self.table.begin_fill(layer, slot, expert, ahead=ahead)
        assert generation == self.generations[layer, slot] + 1
        assert (evicted is None) == (old is None)
        if old:
            assert (evicted.expert, evicted.wasted) == (old[0], old[4] and not old[5])
        self.generations[layer, slot] = generation
        self.model[layer, slot] = [expert, SlotState.FILLING, generation, 0, ahead, False]
        return (layer, slot, generation)

    @rule(fill=fills, publish=st.booleans())
    def end_fill(self, fill, publish):
        """Also long after, when somebody else has the slot."""
        layer, slot, generation = fill
        own = self.model.get((layer, slot))
        current = own is not None and own[1] is SlotState.FILLING and own[2] == generation
        assert (self.table.publish if publish else self.table.cancel)(layer, slot, generation) == current
        if current and publish:
            own[1] = SlotState.READY
        elif current:
            del self.model[layer, slot]

    @rule(target=leases, layer=st.integers(0, 2), expert=st.integers(0, 6))
    def lease(self, layer, expert):
        layer, expert = self.place(layer, expert, self.table.num_experts)
        self.step += 1
        lease = self.table.lease(layer, expert, self.step)
        at = [k for k, v in self.model.items() if k[0] == layer and v[:2] == [expert, SlotState.READY]]
        assert (lease is not None) == bool(at)
        if lease is None:
            return multiple()
        assert (lease.slot, lease.generation, lease.epoch) == (at[0][1], self.model[at[0]][2], self.table.epoch)
        assert self.table.view(layer).slots[lease.slot].last_use == self.step
        self.model[at[0]][3] += 1
        self.model[at[0]][5] = True
        return lease

    @rule(lease=consumes(leases))
    def release(self, lease):
        own = self.model.get((lease.layer, lease.slot))
        if own is None or own[2] != lease.generation or not own[3]:
            with pytest.raises(IntegrityError):
                self.table.release(lease)
            return
        self.table.release(lease)
        own[3] -= 1

    @rule(layer=st.integers(0, 2), experts=st.sets(st.integers(0, 6)))
    def observe(self, layer, experts):
        layer %= self.table.num_layers
        experts = sorted({e % self.table.num_experts for e in experts})
        before = self.table.view(layer).load_E
        self.table.observe(Demand(layer, self.step, tuple(experts), (1,) * len(experts)))
        for e, (a, b) in enumerate(zip(before, self.table.view(layer).load_E)):
            assert 0 <= b < PROB_ONE
            assert b >= a if e in experts else b <= a

    @rule(force=st.booleans())
    def drop_all(self, force):
        unread = [sum(v[1] is SlotState.READY and v[4] and not v[5] for k,
                      v in self.model.items() if k[0] == la) for la in range(self.table.num_layers)]
        busy = any(v[3] or v[1] is SlotState.FILLING for v in self.model.values())
        epoch = self.table.epoch
        if force:
            assert self.table.clear() == unread
            assert self.table.epoch == epoch
        elif busy:
            with pytest.raises(IntegrityError):
                self.table.invalidate()
            return
        else:
            assert self.table.invalidate() == unread
            assert self.table.epoch == epoch + 1
        self.model.clear()

    @invariant()
    def agrees(self):
        if not hasattr(self, "table"):
            return
        self.table.check_integrity()
        for layer in range(self.table.num_layers):
            for slot, view in enumerate(self.table.view(layer).slots):
                own = self.model.get((layer, slot))
                assert (view.expert, view.state) == ((own[0], own[1]) if own else (-1, SlotState.FREE))
                assert view.generation == self.generations[layer, slot]
                if own:
                    assert self.table.find(layer, own[0]) == (slot, own[1])


TestSlots = Slots.TestCase


@pytest.mark.parametrize(("layers", "slots", "experts"), [(0, 1, 1), (1, 0, 4), (1, 5, 4), (-1, 1, 1)])
def test_impossible_tables(layers, slots, experts):
    with pytest.raises(ValueError, match="slots"):
        SlotTable(layers, slots, experts)


def planted(change):
    table = SlotTable(1, 3, 4)
    for slot, expert in enumerate((2, 0)):
        table.publish(0, slot, table.begin_fill(0, slot, expert, ahead=True)[0])
    table.check_integrity()
    change(table, table._slots[0])
    return table


@pytest.mark.parametrize("change", [
    lambda t, s: setattr(s[1], "expert", 2), lambda t, s: setattr(s[2], "expert", 1), lambda t, s: setattr(s[0], "state", SlotState.FREE),
    lambda t, s: setattr(s[0], "expert", 9), lambda t, s: setattr(s[2], "leases", 1), lambda t, s: setattr(s[0], "leases", -1),
    lambda t, s: t._where[0].pop(2), lambda t, s: t._where[0].update({3: 2}),
])
def test_the_check_sees_each_damage(change):
    """The invariant that every test above rests on can fail."""
    with pytest.raises(IntegrityError):
        planted(change).check_integrity()


def test_a_lease_outlived_by_its_slot_is_noticed():
    table = planted(lambda t, s: None)
    lease = table.lease(0, 2, 5)
    with pytest.raises(IntegrityError, match="in use"):
        table.begin_fill(0, 0, 3, ahead=False)
    table.release(lease)
    table.begin_fill(0, 0, 3, ahead=False)
    with pytest.raises(IntegrityError, match="released twice"):
        table.release(lease)


def test_the_load_decays_and_grows_as_integers():
    """Known values: 1/8 a step, rounded down, so that any implementation can be compared digit by digit."""
    table = SlotTable(1, 1, 2)
    seen = []
    for used in ((0,), (0,), (0,), (), (), (1,)):
        table.observe(Demand(0, 0, used, (1,) * len(used)))
        seen.append(table.view(0).load_E)
    assert seen == [(8192, 0), (15360, 0), (21632, 0), (18928, 0), (16562, 0), (14491, 8192)]
