"""Time the encoder of FP4 pages on one GPU: append of one token per sequence, and a prompt; check its bytes against the naive law first.

usage: python benchmarks/kv_encode.py --out ROWS.csv [--commit ID] [--blocks N]

Medians over replays of a CUDA graph. `copy_share` = (bytes read + bytes written) / time over the rate of a device-to-device copy of the
same run.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import sys

import torch
import triton
from kv_attend import FIELDS, timed

from moe_prefetch.kernels.kv_encode import fused
from moe_prefetch.kernels.kv_encode.naive import empty_pages
from moe_prefetch.kernels.kv_encode.records import Book, encode_naive, neutral_book, runs_for
from moe_prefetch.kv.format import PAGE, PageLayout, format_of, layout_for

HEADS = 8


def book_of(layout: PageLayout) -> Book:
    book = neutral_book(layout, HEADS, "cuda")
    channels = torch.stack([torch.randperm(layout.k_dim, device="cuda")[: layout.outliers].sort().values for _ in range(HEADS)])
    return (channels.to(torch.int32).contiguous(), *book[1:])


def same_bytes(layout: PageLayout, book: Book, blocks: int) -> int:
    """Blocks compared, among them every bf16 value in every lane; raises AssertionError where a byte differs."""
    done, d = 0, layout.k_dim
    every = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    step = 64 * PAGE
    for turn in range(max(d, -(-blocks // (step * HEADS * (d // 32 + d // 64))))):
        shape = (step, HEADS, d)
        loud = torch.exp2(torch.randint(-20, 15, (step, 1, 1), device="cuda"))
        k, v = (torch.randn(shape, device="cuda").mul_(loud).bfloat16() for _ in "kv")
        if turn < d:
            # 65,536 values over the tokens and heads of this turn, all in lane `turn`
            k.view(-1, d)[: 1 << 16, turn] = every
            v.view(-1, d)[: 1 << 16, turn] = every
        law = empty_pages(64, HEADS, layout, "cuda")
        ours = law.clone()
        runs = torch.tensor(runs_for(list(range(64)), 0, step, 0), dtype=torch.int32, device="cuda")
        counts = encode_naive(law, k, v, runs, book, layout)
        assert torch.equal(counts, fused.encode(ours, k, v, runs, book, layout))
        assert torch.equal(law, ours), f"turn {turn}: {int((law != ours).sum())} bytes differ"
        done += step * HEADS * (d // 32 + d // 64)
    return done


def main() -> int:
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True)
    ap.add_argument("--commit", default="unknown")
    ap.add_argument("--blocks", type=int, default=10**8)
    a = ap.parse_args()
    torch.manual_seed(0)
    source, target = torch.randn(1 << 29, device="cuda").chunk(2)
    copy_rate = 2 * source.nbytes / timed([lambda: target.copy_(source)]) / 1e3
    rows = []
    for kind in ("fp4-72", "fp4-quality"):
        for dim in (64, 128):
            layout = layout_for(format_of(kind), dim, dim)
            book = book_of(layout)
            blocks = same_bytes(layout, book, a.blocks)
            pool = empty_pages(256, HEADS, layout, "cuda")
            k, v = (torch.randn(32768, HEADS, dim, dtype=torch.bfloat16, device="cuda") for _ in "kv")
            one = torch.tensor([[i, 5, i, 1] for i in range(64)], dtype=torch.int32, device="cuda")
            whole = torch.tensor(runs_for(list(range(256)), 0, 32768, 0), dtype=torch.int32, device="cuda")
            append = timed([lambda p=pool, k=k, v=v, r=one, b=book, x=layout: fused.encode(p, k, v, r, b, x, most=1)])
            prompt = timed([lambda p=pool, k=k, v=v, r=whole, b=book, x=layout: fused.encode(p, k, v, r, b, x)])
            share = (2 * k.nbytes + 256 * HEADS * layout.page_bytes) / prompt / 1e3 / copy_rate
            print(f"{kind} d{dim}: append of 64 {append:.1f} us, prompt of 32k {prompt:.0f} us = {share:.2f} of the copy rate", flush=True)
            for case, metric, value, unit in (
                ("append_b64", "us", append, "us"),
                ("prompt_32k", "us", prompt, "us"),
                ("prompt_32k", "copy_share", share, "share"),
            ):
                today = datetime.datetime.now(datetime.UTC).date().isoformat()
                stamp = (torch.cuda.get_device_name(), torch.__version__, triton.__version__, a.commit, today)
                rows.append(("kv-encode", f"{case}_d{dim}_{kind}", metric, f"{value:.4g}", unit, *stamp, f"{blocks} blocks equal"))
    with open(a.out, "w", newline="") as f:
        csv.writer(f).writerows([FIELDS, *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
