#!/usr/bin/env python3
"""Prefetching on the device, proved on a GPU; rows for `benchmarks/results/protocol.csv`.

exact    a decode step of 26 layers with forecasts, plans, moves, publications, evictions and expert compute is one CUDA graph. It is
         replayed with other routing each time, and with perfect, random, empty and adversarial forecasts by turns, and compared bit by
         bit with the same kernels over experts that are all resident: beside each layer in the graph, and now and then launched one by
         one. Homes: the host's memory, this GPU's.

usage: python benchmarks/protocol.py --out ROWS.csv [--parts exact] [--replays 10000] [--commit ID]
"""
from __future__ import annotations

import argparse
import csv
import datetime
import sys
import time
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_prefetch.experts.homes import HostHome, LocalHome
from moe_prefetch.runtime import REAL
from tests.experts.decode_step import Decode

FIELDS = ("bench", "case", "metric", "value", "unit", "machine", "torch", "triton", "commit", "date", "checked")
Row = tuple[str, str, float, str, str]


def exact(replays: int) -> list[Row]:
    rows: list[Row] = []
    for home in (HostHome(REAL), LocalHome("cuda", REAL)):
        decode = Decode(home, "cuda")
        d = decode.device_experts
        graph = d.capture(decode.step)
        torch.cuda.synchronize()
        decode.wrong.zero_()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        spent, differ = 0.0, 0
        for _ in range(10):
            began = time.perf_counter()
            for _ in range(replays // 10):
                graph.replay()
            torch.cuda.synchronize()
            spent += time.perf_counter() - began
            if before != torch.cuda.memory_stats()["allocation.all.allocated"]:
                raise SystemExit("a replay allocated")
            d.check()
            differ += not torch.equal(decode.out, decode.alone())
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
        said, wrong, us = d.counts(), int(decode.wrong), spent / replays * 1e6
        t = said.total
        print(f"{home.name}: {replays} replays, {us:.0f} us each, {wrong} numbers differ, {differ} of 10 steps one by one; {t.as_dict()}",
              flush=True)
        if wrong or differ or t.demanded != int(decode.asked) or min(t.hit, t.miss, t.cancelled, t.wasted) == 0:
            raise SystemExit("not exact")
        checked = f"bits of {replays} replays as all-resident"
        rows += [(f"{home.name}_26layers", *more, checked)
                 for more in (("replay_us", us, "us"), ("hit_rate", t.hit_rate, "ratio"), ("differing", 0, "numbers"))]
    return rows


PARTS = {"exact": lambda args: exact(args.replays // 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    stamp = (torch.cuda.get_device_name(), torch.__version__, triton.__version__, args.commit, datetime.date.today().isoformat())
    with open(args.out, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(FIELDS)
        for part in args.parts:
            for case, metric, value, unit, checked in PARTS[part](args):
                writer.writerow(("protocol", case, metric, f"{value:.4g}", unit, *stamp, checked))
            f.flush()


if __name__ == "__main__":
    main()
