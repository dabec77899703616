#!/usr/bin/env python3
"""Records in every home, read where they lie, and the links to them: rows for `benchmarks/results/homes.csv`.

usage: python benchmarks/homes.py --out ROWS.csv [--commit ID]

16 experts of 6.3 MB in bf16. In one process: `local`, `host` and, with two GPUs, `peer`; then the links (`experts/links.py`), measured,
kept in a file and read back. With two GPUs then `shared`: two processes, a GPU and half of the experts each, which read the other's half in
place, one at a time and both at once. A row is written when the layer's output has local memory's bits, from the homes, through a copy of
a record, and home again; stamps are right; the other direction of `peer` gives the same; weights are back in the model after `close`.
Without a GPU the same runs on a CPU, small and without rows.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from moe_prefetch.bench.kv_attend import timed
from moe_prefetch.bench.rows import Row, append_rows, check_rows, machine_name
from moe_prefetch.distributed.groups import Group
from moe_prefetch.distributed.symmetric import symmetric_memory
from moe_prefetch.distributed.topology import Topology, measure, obtain
from moe_prefetch.experts.homes import Home, HostHome, LocalHome, MemoryStore, PeerHome, SharedHome
from moe_prefetch.experts.links import HomeProbe
from moe_prefetch.experts.sources import ModuleSource
from moe_prefetch.experts.where import Where
from moe_prefetch.kernels.expert_mlp import fused
from moe_prefetch.runtime import REAL

CUDA = torch.cuda.is_available()
HALF, HIDDEN, WIDTH, TOKENS, TOP_K = (8, 2048, 512, 16, 8) if CUDA else (2, 64, 32, 2, 2)
WEIGHTS = 3
Rows = list[tuple[str, list[tuple[str, float, str]]]]


@functools.cache
def weights_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g, shapes = torch.Generator().manual_seed(seed), ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    gate_up, down = ((torch.randn(HALF, *s, generator=g) / s[1] ** 0.5).to(torch.bfloat16) for s in shapes)
    return gate_up, down


def module(*seeds: int) -> nn.Module:
    """Experts as transformers keeps them; the same for the same seeds, HALF for each."""
    m = nn.Module()
    for name, w in zip(("gate_up_proj", "down_proj"), zip(*(weights_of(s) for s in seeds), strict=True), strict=True):
        setattr(m, name, nn.Parameter(torch.cat(w), requires_grad=False))
    return m


class Layer:
    """A store's one layer as a device sees it."""

    def __init__(self, store: MemoryStore, device: str) -> None:
        self.store, self.where, self.device = store, Where(store, device), device
        g = torch.Generator().manual_seed(7)
        self.x = torch.randn(TOKENS, HIDDEN, generator=g).to(torch.bfloat16).to(device)
        self.weights = torch.rand(TOKENS, TOP_K, generator=g).to(device)
        self.ids = (torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % (2 * HALF)).to(device)

    def out(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        ids = self.ids if ids is None else ids
        return fused.launch(self.x, ids, self.weights, self.where.address_LE[0], self.store.form, 0.0, 1.0)

    def gbps(self, ids: torch.Tensor | None = None) -> float:
        ids = self.ids if ids is None else ids
        return len(ids.unique()) * self.store.form.bytes_read / timed([lambda: self.out(ids)]) / 1e3 if CUDA else 0.0

    def faults(self, want: torch.Tensor, expert: int) -> list[str]:
        """What differs: from the homes, through a copy of a record in local memory, home again; stamps."""
        slot = LocalHome(self.device, REAL).allocate(self.store.layout.nbytes).mine
        slot.copy_(self.store.buffer(0, expert))
        steps: list[tuple[str, Callable[[], None]]] = [("in place", lambda: None),
                                                       ("a copy", lambda: self.where.point(0, expert, slot)),
                                                       ("home again", lambda: self.where.rehome(0, expert))]
        wrong = []
        for what, do in steps:
            do()
            if not torch.equal(self.out(), want.to(self.device)):
                wrong.append(what)
        every = range(self.store.num_experts)
        return wrong + ["stamps"] * any(self.store.layout.stamp_of(self.store.buffer(0, e)) != (WEIGHTS, 0, e) for e in every)


def given_back(store: MemoryStore, model: nn.Module, seeds: tuple[int, ...]) -> list[str]:
    store.close()
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), module(*seeds).parameters(), strict=True))
    return [] if same else ["weights after close"]


def links_of(found: Topology) -> Rows:
    return [(f"link_{one.place}_{one.way}", [("start_us", one.start * 1e6, "us"), ("gbps", one.rate / 1e9, "GB/s")]) for one in found.links]


def one_process(told: Callable[[str, list[str]], bool]) -> Rows:
    device = "cuda:0" if CUDA else "cpu"
    homes: dict[str, Callable[[], Home]] = {"local": lambda: LocalHome(device, REAL), "host": lambda: HostHome(REAL)}
    if torch.cuda.device_count() > 1:
        homes["peer"] = lambda: PeerHome("cuda:1", device, REAL)
    rows: Rows = []
    want = None
    for name, home in homes.items():
        model = module(0, 1)
        store = MemoryStore(ModuleSource([model]), home(), REAL, weights=WEIGHTS)
        layer = Layer(store, device)
        want = layer.out().clone() if want is None else want
        faults = layer.faults(want, 3)
        if name == "peer":
            with torch.cuda.device(1):
                back = MemoryStore(ModuleSource([module(0, 1)]), PeerHome(device, "cuda:1", REAL), REAL, weights=WEIGHTS)
                faults += [f"the other way: {f}" for f in Layer(back, "cuda:1").faults(want, 3)]
                back.close()
        figures = [("gbps", layer.gbps(), "GB/s"), *((f"peak_bytes_{d}", n, "bytes") for d, n in sorted(store.peak_bytes.items()))]
        if told(name, faults + given_back(store, model, (0, 1))):
            rows.append((f"{name}_{2 * HALF}x6.3MB", figures))
    probe = HomeProbe([home() for home in homes.values()], device, REAL)
    with tempfile.TemporaryDirectory() as folder:
        found = obtain(Path(folder), probe)
        if told("links, kept in a file", [] if obtain(Path(folder), probe) == found else ["read back"]):
            rows += links_of(found)
    probe.close()
    return rows


def rank_of_two(rank: int, folder: str) -> None:
    """One process of `shared`: leaves figures and faults in `folder`. Gets ready, then waits until the GPUs are free."""
    device = f"cuda:{rank}" if CUDA else "cpu"
    if CUDA:
        torch.cuda.set_device(rank)
    torch.zeros(1, device=device)
    for seed in (0, 1):
        weights_of(seed)
    while not Path(folder, "go").exists():
        time.sleep(0.05)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    group = Group.of()
    model = module(rank)
    store = MemoryStore(ModuleSource([model]), SharedHome(symmetric_memory(group, device)), REAL, weights=WEIGHTS)
    layer = Layer(store, device)
    local = Layer(MemoryStore(ModuleSource([module(0, 1)]), LocalHome(device, REAL), REAL, weights=WEIGHTS), device)
    far = HALF * (1 - rank)
    faults = layer.faults(local.out(), far + 1)
    theirs = (layer.ids % HALF + far).contiguous()
    faults += [] if torch.equal(layer.out(theirs), local.out(theirs)) else ["the other's experts"]
    group.gather(b"both")
    figures = [("gbps_both", layer.gbps(theirs), "GB/s")]
    for turn in (0, 1):
        group.gather(b"turn")
        if turn == rank:
            figures.append(("gbps_alone", layer.gbps(theirs), "GB/s"))
    group.gather(b"links")
    probe = HomeProbe([SharedHome(symmetric_memory(group, device))], device, REAL)
    links = links_of(measure(probe)) if rank == 0 else []
    group.gather(b"measured")
    faults += given_back(store, model, (rank,))
    torch.save({"faults": faults, "figures": figures, "links": links}, f"{folder}/rank{rank}.pt")
    group.gather(b"done")
    dist.destroy_process_group()


def of_ranks(folder: str, told: Callable[[str, list[str]], bool]) -> Rows:
    rows: Rows = []
    for rank in (0, 1):
        said = torch.load(f"{folder}/rank{rank}.pt", weights_only=True)
        if told(f"shared, rank {rank}", said["faults"]):
            rows.append((f"shared_rank{rank}_{HALF}x6.3MB", said["figures"]))
            rows += [(case.replace("link_peer", "link_shared"), figures) for case, figures in said["links"]]
    return rows


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--commit", default="unknown")
    a = ap.parse_args()
    if a.out:
        check_rows(a.out)
    wrong = []

    def told(what: str, faults: list[str]) -> bool:
        print("WRONG" if faults else "ok", what, *faults, flush=True)
        wrong.extend(faults)
        return not faults

    def write(rows: Rows) -> None:
        for case, figures in rows:
            print(f"{case:28s}", *(f"{metric} {value:.4g}" for metric, value, _ in figures), flush=True)
        if a.out and CUDA:
            append_rows(a.out, "homes", [Row(case, m, v, u) for case, figures in rows for m, v, u in figures], machine=machine_name("cuda"),
                        commit=a.commit, checked="bits of local memory")

    with tempfile.TemporaryDirectory() as folder:
        both = not CUDA or torch.cuda.device_count() > 1
        ranks = torch.multiprocessing.spawn(rank_of_two, (folder,), 2, join=False) if both else None
        rows = one_process(told)
        write(rows)
        if ranks is not None:
            Path(folder, "go").touch()
            while not ranks.join():
                pass
            write(of_ranks(folder, told))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
