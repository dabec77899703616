"""What a process of a group does with records that its ranks share; see tests/distributed/ranks.py."""
from __future__ import annotations

from typing import Any

import torch

from moe_prefetch.distributed.groups import Group
from moe_prefetch.distributed.symmetric import symmetric_memory
from moe_prefetch.errors import MoEPrefetchError
from moe_prefetch.experts.device import DeviceExperts, links_of
from moe_prefetch.experts.homes import LocalHome, MemoryStore, SharedHome
from moe_prefetch.experts.sources import ModuleSource
from moe_prefetch.experts.where import Where
from moe_prefetch.kernels.expert_mlp.naive import moe_records
from moe_prefetch.kernels.expert_mlp.op import expert_mlp
from moe_prefetch.runtime import REAL
from moe_prefetch.types import PROB_ONE
from tests.experts.layouts import E, module_of


def home(deadline: float = 20.0) -> SharedHome:
    return SharedHome(symmetric_memory(Group.of(), "cpu"), deadline)


def modules(rank: int, layers: int = 2) -> list[torch.nn.Module]:
    made = [module_of("gpt_oss", 10 * rank + layer) for layer in range(layers)]
    g = torch.Generator().manual_seed(rank)
    for p in (p for m in made for p in m.parameters()):
        p.data.copy_(torch.randn(p.shape, generator=g) / 8)
    return made


def records(rank: int, world: int) -> dict[str, Any]:
    """Every rank's records at their addresses, through the law and the op; then a copy takes one's place, and it goes home again."""
    mine = modules(rank)
    store = MemoryStore(ModuleSource(mine), home(), REAL, weights=5)
    where = Where(store)
    found: dict[str, Any] = {"experts": store.num_experts, "home": store.home.name}
    layout, right, stamps = store.layout, True, []
    for owner in range(world):
        alone = MemoryStore(ModuleSource(modules(owner)), LocalHome("cpu", REAL), REAL, weights=5)
        for layer in range(2):
            for e in range(E):
                there, expert = store.buffer(layer, owner * E + e), owner * E + e
                data = layout.parts[-1].offset
                right &= torch.equal(there[:data], alone.buffer(layer, e)[:data])
                right &= int(where.address_LE[layer, expert]) == there.data_ptr() == store.address(layer, expert)
                stamps.append(layout.stamp_of(there) == (5, layer, expert))
    found |= {"same": right, "stamps": all(stamps)}
    g = torch.Generator().manual_seed(0)
    x, weights = torch.randn(3, 64, generator=g), torch.rand(3, world, generator=g)
    ids = torch.arange(3 * world).view(3, world) % store.num_experts
    of = lambda: expert_mlp(x, ids, weights, where.address_LE[1], store.form, records=where.records(1), limit=7.0, alpha=1.702)  # noqa: E731
    want = of()
    found["law"] = torch.equal(want, moe_records(x, ids, weights, where.records(1), store.form, 7.0, 1.702))
    found["sum"] = want.double().sum().item()
    other = (rank + 1) % world * E
    copy = LocalHome("cpu", REAL).allocate(layout.nbytes).mine
    copy.copy_(store.buffer(1, other))
    where.point(1, other, copy)
    found["copy"] = torch.equal(of(), want) and int(where.address_LE[1, other]) == copy.data_ptr()
    where.rehome(1, other)
    found["back"] = torch.equal(of(), want) and int(where.address_LE[1, other]) == store.address(1, other)
    Group.of().gather(b"read")
    # Another rank's change is seen where it is made.
    if rank == 0:
        layout.views(store.buffer(1, 0))["down_bias"].fill_(3.0)
    Group.of().gather(b"changed")
    found["seen"] = bool((layout.views(store.buffer(1, 0))["down_bias"] == 3.0).all()) and not torch.equal(of(), want)
    Group.of().gather(b"done")
    before = modules(rank)
    if rank == 0:
        before[1].down_proj_bias.data[0] = 3.0
    store.close()
    found["returned"] = all(torch.equal(a, b) for m, n in zip(mine, before, strict=True)
                            for a, b in zip(m.parameters(), n.parameters(), strict=True))
    return found


def device(rank: int, world: int) -> dict[str, Any]:
    """Each rank has its own table, slots and ledger over the homes of all; then weights change on every rank at once."""
    store = MemoryStore(ModuleSource(modules(rank)), home(), REAL)
    d, group = DeviceExperts(store, "cpu", REAL, 2), Group.of()
    g = torch.Generator().manual_seed(rank)
    found: dict[str, Any] = {"links": [n == rank for n in range(world) for _ in range(E)] == [n == -1 for n in links_of(store)],
                             "same": True, "lent": False}

    def steps() -> None:
        for _ in range(4):
            for layer in range(2):
                x, weights = torch.randn(2, 64, generator=g), torch.rand(2, 2, generator=g)
                ids = torch.randint(0, store.num_experts, (2, 2), generator=g)
                d.forecast(layer, torch.randint(0, PROB_ONE, (2, store.num_experts), generator=g, dtype=torch.int32))
                got = d.experts(layer, x, ids, weights, limit=7.0, alpha=1.702)
                at_home = [store.buffer(layer, e) for e in range(store.num_experts)]
                found["same"] &= torch.equal(got, moe_records(x, ids, weights, at_home, store.form, 7.0, 1.702))
            d.next_NE.random_(0, PROB_ONE, generator=g)
            d.step_end()
            d.check()
            away = d.tables.where_LE != d.tables.home_LE
            found["lent"] |= bool(away.any())
            found["own stay"] = not bool(away[:, [e for e, link in enumerate(links_of(store)) if link < 0]].any())

    def write() -> None:
        for layer in range(2):
            store.layout.views(store.buffer(layer, rank * E))["down_bias"].fill_(rank + 1.0)

    steps()
    d.update(write, lambda: group.gather(b"at rest"))
    found["seen"] = all(bool((store.layout.views(store.buffer(0, r * E))["down_bias"] == r + 1.0).all()) for r in range(world))
    steps()
    said = d.counts()
    found["counted"] = said.total.demanded > 0 and said.moved_K[rank] == said.read_K[rank] == 0 < sum(said.moved_K)
    group.gather(b"done")
    store.close()
    return found


def refused(call: Any) -> dict[str, Any]:
    try:
        call()
    except MoEPrefetchError as e:
        return {"kind": type(e).__name__, "text": str(e), "ranks": list(getattr(e, "ranks", ()))}
    return {}


def differing(rank: int, world: int, what: str) -> dict[str, Any]:
    """Ranks whose records could not be told apart by address: refused before any record is made, and the weights are still there."""
    mine = modules(rank, 2 if what != "layers" or rank == 0 else 1)
    before = [p.clone() for m in mine for p in m.parameters()]
    said = refused(lambda: MemoryStore(ModuleSource(mine), home(), REAL, weights=1 + (what == "weights" and rank == 0)))
    return {**said, "whole": all(torch.equal(a, b) for a, b in zip(before, (p for m in mine for p in m.parameters()), strict=True))}


def failing(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 fails over its second layer: the others are told by name, in time, and have their weights again."""
    mine = modules(rank)
    if rank == 0:
        mine[1].gate_up_proj.data = mine[1].gate_up_proj.data[:, :, :-2]
    before = [p.clone() for m in mine for p in m.parameters()]
    said = refused(lambda: MemoryStore(ModuleSource(mine), home(2.0), REAL))
    return {**said, "whole": all(torch.equal(a, b) for a, b in zip(before, (p for m in mine for p in m.parameters()), strict=True))}


def hosts(rank: int, world: int) -> dict[str, Any]:
    """Ranks of two hosts can't read each other's records."""

    class Elsewhere(type(REAL)):
        def host(self) -> str:
            return f"host {rank}"

    runtime = Elsewhere()
    return refused(lambda: SharedHome(symmetric_memory(Group.of(runtime=runtime), "cpu", runtime)))


