#!/usr/bin/env python3
"""Check `plan` against its law on random states, then time it in a CUDA graph; write rows for `benchmarks/results/plan.csv`.

A figure is the median over replays of a graph of many launches, each for a layer of its own, so that no table is in L1; what one launch
costs in a step. `checked`: how many random states gave the law's words, all of them.

usage: python benchmarks/plan.py --out ROWS.csv [--states 100000] [--commit ID]
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_prefetch.bench.rows import Row, append_rows, check_rows, machine_name
from moe_prefetch.bench.timing import replay_us
from moe_prefetch.kernels.plan import fused
from moe_prefetch.kernels.plan.naive import plan_naive
from tests.kernels.plan_cases import COSTS, copy, same, states

SHAPES = [(8, 4, 1), (60, 30, 1), (64, 32, 1), (64, 13, 3), (128, 64, 1), (128, 40, 7), (256, 128, 1), (256, 64, 7)]
LAYERS = 96


def differing(total: int) -> tuple[int, int]:
    """(states compared, states of batches in which a word differs)."""
    done = wrong = 0
    part = max(1, total // len(SHAPES))
    for experts, slots, links in SHAPES:
        for first in range(0, part, 1000):
            n = min(1000, part - first)
            before, prob, keep = states(n, experts, slots, links, first + experts, "cuda")
            a, b = copy(before), copy(before)
            more = (torch.arange(n, dtype=torch.int32, device="cuda"), prob, keep if first // 1000 % 2 else None, COSTS, 1, links - 1)
            plan_naive(a, *more)
            fused.launch(b, *more)
            differ = same(a, b)
            if differ:
                print(f"{experts} experts, {slots} slots, {links} links: {differ}", flush=True)
            done, wrong = done + n, wrong + n * bool(differ)
    return done, wrong


def graph_us(experts: int, slots: int, links: int, most: int) -> tuple[float, float]:
    """(us a launch, moves a plan). Every replay starts from the same words: a copy in the graph puts them back, and is subtracted."""
    before, prob, _ = states(LAYERS, experts, slots, links, 0, "cuda")
    prob = torch.where(torch.rand_like(prob, dtype=torch.float32) < 0.1, 60000, prob.abs() // 16).int()
    before.budget_L3[:] = torch.tensor([most, 0, -1], dtype=torch.int32, device="cuda")
    t = copy(before)
    rows = [torch.tensor([n], dtype=torch.int32, device="cuda") for n in range(LAYERS)]
    probs = [prob[n : n + 1].contiguous() for n in range(LAYERS)]

    def reset() -> None:
        for name in ("slot_LS", "where_LE"):
            getattr(t, name).copy_(getattr(before, name))

    def timed(body: bool) -> float:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            reset()
            fused.launch(t, rows[0], probs[0], None, COSTS, 0, 0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            reset()
            for n in range(LAYERS if body else 0):
                fused.launch(t, rows[n], probs[n], None, COSTS, 0, 0)
        return replay_us(graph, 30)

    us = (timed(True) - timed(False)) / LAYERS
    return us, float(t.count_L.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--states", type=int, default=100_000)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    check_rows(args.out)
    done, wrong = differing(args.states)
    print(f"{done} states, {wrong} in batches that differ from the law", flush=True)
    for experts, slots, links in SHAPES if not wrong else ():
        for most in (0, 4, 16):
            us, moves = graph_us(experts, slots, links, most)
            print(f"E={experts} S={slots} K={links} at most {most}: {us:.2f} us, {moves:.1f} moves", flush=True)
            append_rows(args.out, "plan", [Row(f"e{experts}_s{slots}_k{links}_m{most}", "us", us, "us")], machine=machine_name("cuda"),
                        commit=args.commit, checked=f"{done} states as the law")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
