#!/usr/bin/env python3
"""Check and time `probe_topk` on one GPU; write rows for `benchmarks/results/probe.csv`.

Qwen3-30B-A3B's shape (2048 -> 128 experts, top-8, rank 64): the MoE-input tap with its two targets, the same with one, and the residual
tap with the recent past. A figure is the median over replays of a CUDA graph of one launch per tap over many taps' weights, so that none
is in L2. Before anything is timed, ids and probabilities are compared with the naive law in float32, in three dtypes, for 1 to 4,096 tokens
with NaN and Inf rows, with and without the past: any id that differs although the law's margin exceeds the dtype's rounding, any scratch
that is not as it was, and there are no rows. Every timed tap is compared as well.

usage: python benchmarks/probe_topk.py --out ROWS.csv [--commit ID]
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from moe_prefetch.bench.rows import Row, append_rows, check_rows, machine_name
from moe_prefetch.bench.timing import replay_us
from moe_prefetch.kernels.probe_topk import fused
from moe_prefetch.kernels.probe_topk.naive import TapWeights, probe_topk_naive, tap_logits
from moe_prefetch.kernels.probe_topk.op import EMPTY_WORD, scratch_for

D, E, R, K, TAPS = 2048, 128, 64, 8, 96
TOKENS = (1, 3, 8, 17, 63, 64, 1000, 4096)
# targets, with the past, name
FORMS = ((1, False, "_one-target"), (2, False, ""), (1, True, "_one-target_past"))
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-4}


def weights(dtype: torch.dtype, targets: int, past: bool = False) -> TapWeights:
    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    past = (rand(targets, R, D) / D**0.5).to(dtype) if past else None
    return TapWeights((rand(targets, E + R, D) / D**0.5).to(dtype), past, rand(targets, R), rand(targets, E, R) / 8, rand(targets, E) / 4,
                      torch.zeros(targets, E, device="cuda"), torch.full((targets,), 2.0, device="cuda"), K, 32, 1e-6)


def call(x: torch.Tensor, w: TapWeights, scratch: torch.Tensor, past: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return fused.launch(x, past, w.weight_HND, w.past_HRD, w.shift_HR, w.up_HER, w.out_HE, w.bias_HE, w.sharp_H, K, w.linear, w.norm_eps,
                        False, scratch)


def wrong(x: torch.Tensor, w: TapWeights, past: torch.Tensor | None = None) -> int:
    """Ids that differ from the law although its margin says they may not, probabilities that do, and words of scratch left behind."""
    scratch = scratch_for(x.shape[0], w)
    ids, prob = call(x, w, scratch, past)
    want, want_prob = probe_topk_naive(x, past, w.weight_HND, w.past_HRD, w.shift_HR, w.up_HER, w.out_HE, w.bias_HE, w.sharp_H, K,
                                       w.linear, w.norm_eps, False, 1, 1)
    z = tap_logits(x, past, w.weight_HND, w.past_HRD, w.shift_HR, w.up_HER, w.out_HE, w.linear, w.norm_eps)
    gap = (z.gather(2, ids.long()) - z.gather(2, want.long())).abs()
    # rows that say nothing have the law's ids, and NaN is no small gap
    bad = (ids != want) & ~(gap <= ROUNDING[x.dtype])
    off = (prob - want_prob).abs() > 65536 * ROUNDING[x.dtype]
    return int(bad.sum()) + int(off.sum()) + int((scratch != EMPTY_WORD).sum())


def graph_us(x: torch.Tensor, taps: list[TapWeights], past: torch.Tensor | None = None) -> float:
    scratch = [scratch_for(x.shape[0], w) for w in taps]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for w, s in zip(taps, scratch):
            call(x, w, s, past)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for w, s in zip(taps, scratch):
            call(x, w, s, past)
    return replay_us(graph, 30) / len(taps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    torch.manual_seed(0)
    failed, rows = 0, list[Row]()
    check_rows(args.out)
    for dtype in ROUNDING:
        for tokens in TOKENS:
            for past in (False, True):
                x, p = (torch.randn(tokens, D, device="cuda").to(dtype) for _ in "xp")
                if tokens > 3:
                    x[1, 7], x[2, 0] = float("nan"), float("inf")
                bad = wrong(x, weights(dtype, 2, past), p if past else None)
                failed += bad > 0
                print(f"{dtype} T={tokens}{' past' * past}: {bad} wrong", flush=True)
    for targets, past, name in FORMS if not failed else ():
        taps = [weights(torch.bfloat16, targets, past) for _ in range(TAPS)]
        for tokens in (1, 8, 64):
            x, p = (torch.randn(tokens, D, device="cuda").bfloat16() for _ in "xp")
            us = graph_us(x, taps, p if past else None)
            bad = sum(wrong(x, w, p if past else None) for w in taps[::8])
            failed += bad > 0
            print(f"T={tokens}{name}: {us:.2f} us a tap, {bad} wrong", flush=True)
            rows.append(Row(f"qwen3-30b-a3b_t{tokens}{name}", "us", us, "us"))
    if not failed:
        append_rows(args.out, "probe", rows, machine=machine_name("cuda"), commit=args.commit, checked="0 ids wrong beyond rounding")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
