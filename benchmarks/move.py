#!/usr/bin/env python3
"""Check the mover, then time it from the host, from a peer and from this GPU; write rows for `benchmarks/results/move.csv`.

Eight records of 9.4 MB (Qwen3-30B-A3B in bf16) into slots, by one launch inside a CUDA graph; the figure is the median over replays, the
small copies that put the tables back subtracted. `beside`: a copy in HBM while the mover runs all the time, as a ratio to what it
takes alone, and to what the mover's bytes account for. `checked`: the bytes of every slot, and that every move was published.

usage: python benchmarks/move.py --out ROWS.csv [--commit ID] [--tune]
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path

import torch

from moe_prefetch.bench.rows import Row, append_rows, check_rows, machine_name
from moe_prefetch.bench.timing import replay_us
from moe_prefetch.experts.planner import HYSTERESIS, KEEP, WASTE
from moe_prefetch.kernels.move import fused
from moe_prefetch.kernels.plan.fused import launch as plan
from moe_prefetch.kernels.plan.naive import Costs, Tables
from moe_prefetch.kernels.protocol import DONE, claim_word
from moe_prefetch.runtime import REAL
from moe_prefetch.types import PROB_ONE

NBYTES, EXPERTS, SLOTS = 9_437_312, 8, 8
COSTS = Costs(WASTE, KEEP, HYSTERESIS)


def records(kind: str) -> torch.Tensor:
    """[EXPERTS, NBYTES] random bytes at home, readable from GPU 0."""
    size = EXPERTS * NBYTES
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    if kind == "host":
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        memory.copy_(data)
        return memory.view(EXPERTS, NBYTES)
    if kind == "peer":
        REAL.open_peers(torch.device("cuda:1"), torch.device("cuda:0"))
        return data.to("cuda:1").view(EXPERTS, NBYTES)
    return data.view(EXPERTS, NBYTES)


def planned(homes: torch.Tensor) -> Tables:
    """Tables of one layer in which every expert is to be moved."""

    def i32(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device="cuda")

    home = torch.tensor([[homes[e].data_ptr() for e in range(EXPERTS)]], device="cuda")
    t = Tables(home.clone(), home, torch.zeros(1, SLOTS, dtype=torch.int64, device="cuda"),
               torch.zeros(1, SLOTS, dtype=torch.int64, device="cuda"), i32(1), i32(1, EXPERTS), i32(1, SLOTS), i32(1, SLOTS),
               i32(1, EXPERTS), i32(1, EXPERTS), torch.tensor([[0, 0, 16]], dtype=torch.int32, device="cuda"),
               torch.tensor([[SLOTS, 0, -1]], dtype=torch.int32, device="cuda"), i32(1, value=1))
    plan(t, i32(1), i32(1, EXPERTS, value=PROB_ONE), None, COSTS, 0, 0)
    return t


def graph_of(body, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    return graph


class Bench:
    def __init__(self, kind: str) -> None:
        self.homes, self.slots = records(kind), torch.zeros(SLOTS, NBYTES, dtype=torch.uint8, device="cuda")
        self.start = planned(self.homes)
        self.t = replace(self.start, **{f.name: getattr(self.start, f.name).clone() for f in fields(self.start)})
        self.stream = torch.cuda.Stream()

    def reset(self) -> None:
        for name in ("where_LE", "slot_LS", "claim_LE", "taken_LS", "done_LS"):
            getattr(self.t, name).copy_(getattr(self.start, name))

    def once(self, programs: int, piece: int, tile: int, warps: int, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.reset()
            fused.launch_move(self.t, 0, self.slots, NBYTES, 0, programs, piece, tile, warps)

    def right(self) -> bool:
        """The bytes of every slot are those of its expert, every move is published."""
        by_slot = [int(w & 0xFFFF) - 1 for w in self.t.slot_LS[0]]
        good = all(int(c) == claim_word(1, DONE) for c in self.t.claim_LE[0])
        for s, e in enumerate(by_slot):
            good &= int(self.t.where_LE[0, e]) == self.slots[s].data_ptr() and torch.equal(self.slots[s], self.homes[e].to("cuda:0"))
        return good

    def gbps(self, programs: int, piece: int, tile: int, warps: int) -> tuple[float, bool]:
        with torch.cuda.stream(self.stream):
            self.once(programs, piece, tile, warps)
        torch.cuda.synchronize()
        empty = replay_us(graph_of(self.reset, self.stream), 15)
        graph = graph_of(lambda: self.once(programs, piece, tile, warps), self.stream)
        self.slots.fill_(0xCD)
        us = replay_us(graph, 15) - empty
        return SLOTS * NBYTES / us / 1e3, self.right()

    def beside(self, programs: int, piece: int, tile: int, warps: int, gbps: float) -> tuple[float, float]:
        """(ratio to alone, ratio to what the mover's bytes account for) of a copy of 1 GiB in HBM."""
        a, b = torch.zeros(2, 1 << 30, dtype=torch.uint8, device="cuda")
        compute = torch.cuda.Stream()
        with torch.cuda.stream(compute):
            b.copy_(a)
        mover = graph_of(lambda: self.once(programs, piece, tile, warps, rounds=max(3, int(gbps * 3e6 / (SLOTS * NBYTES)))), self.stream)
        torch.cuda.synchronize()

        def timed(with_mover: bool) -> float:
            found = []
            for _ in range(7):
                first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if with_mover:
                    with torch.cuda.stream(self.stream):
                        mover.replay()
                with torch.cuda.stream(compute):
                    b.copy_(a)
                    first.record()
                    b.copy_(a)
                    last.record()
                torch.cuda.synchronize()
                found.append(first.elapsed_time(last) * 1e3)
            return sorted(found)[len(found) // 2]

        alone, both = timed(False), timed(True)
        moved = gbps * 1e3 * both
        return both / alone, both / (alone * (1 + moved / (2 << 30)))


def write(args: argparse.Namespace, rows: list[Row]) -> None:
    append_rows(args.out, "move", rows, machine=machine_name("cuda"), commit=args.commit, checked="bytes and words of every slot")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--kinds", nargs="+", choices=("host", "peer", "local"), help="left out: all that are there")
    parser.add_argument("--tune", action="store_true", help="other pieces, tiles and warps too")
    args = parser.parse_args()
    check_rows(args.out)
    failed = 0
    forms = [(fused.PIECE, fused.TILE, fused.WARPS)]
    if args.tune:
        forms += [(128 << 10, 128 << 10, 16), (128 << 10, 32 << 10, 8), (256 << 10, 64 << 10, 16), (64 << 10, 32 << 10, 8)]
    for kind in args.kinds or ("host", *(["peer"] if torch.cuda.device_count() > 1 else []), "local"):
        bench = Bench(kind)
        for programs in (4, 6, 8, 16, 24):
            for form in forms if programs in (8, 24) else forms[:1]:
                gbps, right = bench.gbps(programs, *form)
                failed += not right
                said = f"{kind} {programs} programs {form[0] >> 10}/{form[1] >> 10} KiB {form[2]} warps: {gbps:.1f} GB/s"
                print(said, "right" if right else "WRONG", flush=True)
                if form == forms[0] and right:
                    write(args, [Row(f"{kind}_{programs}sm", "gbps", gbps, "GB/s")])
                if form == forms[0] and right and kind != "local":
                    ratio, over = bench.beside(programs, *form, gbps)
                    print(f"  a copy in HBM beside it: {ratio:.3f} of alone, {over:.3f} of what the bytes account for", flush=True)
                    figures = (("beside_ratio", ratio), ("beside_over_bytes", over))
                    write(args, [Row(f"{kind}_{programs}sm", metric, value, "ratio") for metric, value in figures])
        del bench
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
