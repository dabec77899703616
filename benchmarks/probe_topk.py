#!/usr/bin/env python3
"""Check and time `probe_topk` on one GPU; write rows for `benchmarks/results/probe.csv`.

Qwen3-30B-A3B's shape (2048 -> 128 experts, top-8, rank 64), the MoE-input tap with its two targets. A figure is the median over replays of
a CUDA graph of one launch per tap over many taps' weights, so that none is in L2. `checked` is the share of ids equal to the naive law
in float32 wherever its margin exceeds the dtype's rounding; a case with any difference gets no row.

usage: python benchmarks/probe_topk.py --out ROWS.csv [--commit ID]
"""
from __future__ import annotations

import argparse
import csv
import datetime
import sys
from pathlib import Path

import torch
import triton

from moe_prefetch.kernels.probe_topk import fused
from moe_prefetch.kernels.probe_topk.naive import TapWeights, probe_topk_naive, tap_logits
from moe_prefetch.kernels.probe_topk.op import counters_for

FIELDS = ("bench", "case", "metric", "value", "unit", "machine", "torch", "triton", "commit", "date", "checked")
D, E, R, K, TAPS = 2048, 128, 64, 8, 96
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-4}


def weights(dtype: torch.dtype, targets: int, past: bool = False) -> TapWeights:
    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    past = (rand(targets, R, D) / D**0.5).to(dtype) if past else None
    return TapWeights((rand(targets, E + R, D) / D**0.5).to(dtype), past, rand(targets, R), rand(targets, E, R) / 8, rand(targets, E) / 4,
                      torch.zeros(targets, E, device="cuda"), torch.full((targets,), 2.0, device="cuda"), K, 32, 1e-6)


def call(x: torch.Tensor, w: TapWeights, counters: torch.Tensor, past: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return fused.launch(x, past, w.weight_HND, w.past_HRD, w.shift_HR, w.up_HER, w.out_HE, w.bias_HE, w.sharp_H, K, w.linear, w.norm_eps,
                        False, counters)


def wrong(x: torch.Tensor, w: TapWeights, past: torch.Tensor | None = None) -> tuple[int, int]:
    """(ids that differ from the law although its margin says they may not, ids compared)."""
    ids, prob = call(x, w, counters_for(x.shape[0], w.out_HE.shape[0], "cuda"), past)
    want, want_prob = probe_topk_naive(x, past, w.weight_HND, w.past_HRD, w.shift_HR, w.up_HER, w.out_HE, w.bias_HE, w.sharp_H, K,
                                       w.linear, w.norm_eps, False, 1, 1)
    z = tap_logits(x, past, w.weight_HND, w.past_HRD, w.shift_HR, w.up_HER, w.out_HE, w.linear, w.norm_eps)
    gap = (z.gather(2, ids.long()) - z.gather(2, want.long())).abs()
    bad = int(((ids != want) & (gap > ROUNDING[x.dtype])).sum()) + int(((prob - want_prob).abs() > 65536 * ROUNDING[x.dtype]).sum())
    return bad, ids.numel()


def graph_us(x: torch.Tensor, taps: list[TapWeights], past: torch.Tensor | None = None) -> float:
    counters = [counters_for(x.shape[0], w.out_HE.shape[0], "cuda") for w in taps]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for w, c in zip(taps, counters):
            call(x, w, c, past)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for w, c in zip(taps, counters):
            call(x, w, c, past)
    times = []
    for _ in range(30):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / len(taps))
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    torch.manual_seed(0)
    failed, rows = 0, []
    stamp = (torch.cuda.get_device_name(), torch.__version__, triton.__version__, args.commit, datetime.date.today().isoformat())
    for dtype in ROUNDING:
        for tokens in (1, 3, 63, 64, 1000, 4096):
            x, w = torch.randn(tokens, D, device="cuda").to(dtype), weights(dtype, 2)
            if tokens > 3:
                x[1, 7], x[2, 0] = float("nan"), float("inf")
            bad, total = wrong(x, w)
            failed += bad > 0
            print(f"{dtype} T={tokens}: {bad} of {total} ids or probabilities wrong", flush=True)
    if not failed:
        for targets, name in ((1, "_one-target"), (2, "")):
            taps = [weights(torch.bfloat16, targets) for _ in range(TAPS)]
            for tokens in (1, 8, 64):
                us = graph_us(torch.randn(tokens, D, device="cuda").bfloat16(), taps)
                print(f"T={tokens}, {targets} targets: {us:.2f} us a tap", flush=True)
                rows.append(("probe", f"qwen3-30b-a3b_t{tokens}{name}", "us", f"{us:.2f}", "us", *stamp, "0 ids wrong beyond rounding"))
    with open(args.out, "w", newline="") as f:
        csv.writer(f).writerows([FIELDS, *rows])
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
