#!/usr/bin/env python3
"""Check and time what a basis of keys (`kv/basis.py`) adds to a layer's decode step on one GPU; rows for `benchmarks/results/kv-turn.csv`.

The step's keys and its queries into axes, 8 KV heads with 4 queries each, by `kv_turn` and by its law (casts and one batched product);
medians over replays of a CUDA graph. Before a case is timed, keys are compared with FP64 sums in every bit, queries with a bound.

usage: python benchmarks/kv_turn.py --out ROWS.csv [--commit ID]
"""
from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from moe_prefetch.bench.rows import Row, append_rows, check_rows, machine_name
from moe_prefetch.bench.timing import replay_us
from moe_prefetch.kernels.kv_turn.fused import turn
from moe_prefetch.kernels.kv_turn.naive import turn_naive

N, G = 8, 4
COPIES = 24  # layers of a graph, each with tensors of its own


def layers(turn_, k, into, q, back) -> None:
    for n in range(COPIES):
        turn_(k[n], into[n].mT, True)
        turn_(q[n], back[n], False)


def timed(f) -> float:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        f()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        f()
    return replay_us(graph, 15) / COPIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    check_rows(args.out)
    wrong = 0
    for d in (64, 128):
        for batch in (1, 8, 64):
            q = [torch.randn(batch, 1, N * G, d, device="cuda").bfloat16().transpose(1, 2) for _ in range(COPIES)]
            k = [torch.randn(batch, 1, N, d, device="cuda").bfloat16().transpose(1, 2) for _ in range(COPIES)]
            into = [torch.randn(N, d, d, device="cuda").half() for _ in range(COPIES)]
            back = [torch.randn(N, d, d, device="cuda") for _ in range(COPIES)]
            want = torch.einsum("bntd,nde->bnte", k[0].double(), into[0].mT.double()).float()
            far = (turn(q[0], back[0], False) - turn_naive(q[0], back[0], True)).abs().max() / turn_naive(q[0], back[0], True).abs().max()
            right = torch.equal(turn(k[0], into[0].mT, True), want) and float(far) < 1e-5
            wrong += not right
            took = {}
            for name, f in (("fused", turn), ("law", turn_naive)):
                took[name] = timed(partial(layers, f, k, into, q, back))
            print(f"d{d} b{batch}: {took['fused']:.2f} us a layer, by the law {took['law']:.2f}", "right" if right else "WRONG", flush=True)
            if right:
                append_rows(args.out, "kv-turn", [Row(f"b{batch}_g{G}_d{d}", f"us_{name}", us, "us a layer") for name, us in took.items()],
                            machine=machine_name("cuda"), commit=args.commit, checked="keys bitwise, queries 1e-5")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
