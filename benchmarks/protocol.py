#!/usr/bin/env python3
"""Prefetching on the device, proved on a GPU; rows for `benchmarks/results/protocol.csv`.

exact    a decode step of 26 layers with forecasts, plans, moves, publications, evictions and expert compute is one CUDA graph. It is
         replayed with other routing each time, and with perfect, random, empty and adversarial forecasts by turns, and compared bit by
         bit with the same kernels over experts that are all resident: beside each layer in the graph, and now and then launched one by
         one. Homes: the host's memory, this GPU's.
delays   10^5 steps of four layers with delays drawn at every place where another program may come between: nothing is found wrong.
faults   each violation of `tests/protocol/device_faults.py` is found, and nothing without it.

usage: python benchmarks/protocol.py --out ROWS.csv [--parts exact delays faults] [--replays 10000] [--steps 100000] [--commit ID]
"""
from __future__ import annotations

import argparse
import csv
import datetime
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_prefetch.experts.homes import HostHome, LocalHome
from moe_prefetch.kernels.expert_mlp.record import Form
from moe_prefetch.runtime import REAL
from tests.experts.decode_step import Decode

FIELDS = ("bench", "case", "metric", "value", "unit", "machine", "torch", "triton", "commit", "date", "checked")
Row = tuple[str, str, float, str, str]


def exact(replays: int) -> list[Row]:
    rows: list[Row] = []
    for home in (HostHome(REAL), LocalHome("cuda", REAL)):
        began = time.perf_counter()
        decode = Decode(home, "cuda", form=Form("bfloat16", 512, 256))
        d = decode.device_experts
        graph = d.capture(decode.step)
        torch.cuda.synchronize()
        print(f"{home.name}: made in {time.perf_counter() - began:.1f} s", flush=True)
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
        if wrong or differ or t.demanded != int(decode.asked) or min(t.hit, t.miss, t.wasted) == 0:
            raise SystemExit("not exact")
        checked = f"bits of {replays} replays as all-resident"
        rows += [(f"{home.name}_26layers", *more, checked)
                 for more in (("replay_us", us, "us"), ("hit_rate", t.hit_rate, "ratio"), ("differing", 0, "numbers"))]
    return rows


def delayed(home: str, steps: int) -> tuple[str, list[int], dict[str, float], float]:
    from tests.protocol.device_faults import DELAYS
    from tests.protocol.device_scene import Scene, kernels

    with kernels(DELAYS):
        scene = Scene(home=home, maybe_ns=4000)
        scene.run(1)
        began = time.perf_counter()
        found = scene.run(steps)
        took = time.perf_counter() - began
    said = scene.device_experts.counts().total
    return home, found, {**said.as_dict(), "asked": int(scene.asked)}, took / steps * 1e6


def delays(steps: int) -> list[Row]:
    rows: list[Row] = []
    with processes(2) as pool:
        for home, found, said, us in pool.map(delayed, ("local", "host"), (steps // 2,) * 2):
            print(f"{home}: {steps // 2} steps with delays, {us:.0f} us each, found {found}; {said}", flush=True)
            if any(found) or said["demanded"] != said["asked"] or min(said[k] for k in ("hit", "late", "miss", "cancelled", "wasted")) == 0:
                raise SystemExit("not clean")
            rows.append((f"{home}_4layers_delays", "steps", steps // 2, "steps", "words, claimants, slots, entries, moves"))
    return rows


def planted(name: str) -> tuple[str, list[int], list[int], int]:
    from tests.protocol.device_faults import FAULTS

    fault = FAULTS[name]
    try:
        return name, fault.found(False), fault.found(True), fault.finding
    except Exception as e:  # noqa: BLE001 (the others still run)
        return f"{name}: {e!r}"[:300], [], [0] * 6, 0


def faults() -> list[Row]:
    from tests.protocol.device_faults import FAULTS

    good = 0
    with processes(9) as pool:
        for name, clean, broken, finding in pool.map(planted, FAULTS):
            found = not any(clean) and bool(clean) and broken[finding] > 0
            good += found
            print(f"{name}: {'found' if found else 'NOT FOUND'}, without {clean}, with {broken}", flush=True)
    return [("violations", "found", good, f"of {len(FAULTS)}", "each clean without it")]


def processes(n: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(n, mp_context=multiprocessing.get_context("spawn"))


PARTS = {"exact": lambda args: exact(args.replays // 2), "delays": lambda args: delays(args.steps), "faults": lambda args: faults()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=100_000)
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
