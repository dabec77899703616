"""K and V in different formats on a GPU: bytes and attention against the law, and the time of attention beside each format alone.

usage: python benchmarks/kv_pairs.py --out ROWS.csv [--commit ID] [--checks | --share I/N]

Bytes: appends of many sizes, token by token, and whole pages with all 65,536 bfloat16 values (as `benchmarks/kv_encode.py`). Attention:
ragged rows with options, then the timed cases as `benchmarks/kv_general.py` takes them, groups of 4, batch 8, 32k tokens. `--checks` stops
before the times; `--share I/N` only compiles, for several processes to fill Triton's cache at once.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from kv_encode import differs, heads_of
from kv_general import Cache, Run, errors, prepared, query

from moe_prefetch.bench.kv_attend import COLD, FIELDS, relative, stamp_of, timed
from moe_prefetch.kernels.kv_attend.naive import attend_naive
from moe_prefetch.kernels.kv_attend.op import path_of
from moe_prefetch.kernels.kv_encode.naive import empty_pages
from moe_prefetch.kernels.kv_encode.op import fused_for
from moe_prefetch.kernels.kv_encode.records import book_shares, neutral_book, runs_for
from moe_prefetch.kv.format import PAGE, PageLayout, format_of

PAIRS = ("fp8+fp4-72", "fp4-quality+fp8", "fp16+fp4-72", "nvfp4+fp8")
CHECKS: list[dict[str, Any]] = [{}, {"draft": 3, "softcap": 20.0, "sink": True}, {"draft": 2, "sliding": 300}]
RUNS = [
    *(Run(kind, 8, 8, 4, 128) for kind in ("fp8", "fp4-72", "fp8+fp4-72", "fp4-72+fp8", "fp16+fp4-72")),
    *(Run(kind, 8, 8, 4, 64) for kind in ("fp8", "fp4-72", "fp8+fp4-72")),
]


def layouts() -> list[PageLayout]:
    return [Run(name, 1, 1, 1, dim).layout for name in PAIRS for dim in (64, 128)]


def book_of(layout: PageLayout, heads: int) -> tuple[torch.Tensor, ...]:
    """Channels, means, gains and weights that differ from head to head where a side's format has them."""
    rand = lambda d: torch.rand(heads, d, device="cuda") + 0.5  # noqa: E731
    channels = torch.stack([torch.randperm(layout.k_dim, device="cuda")[: layout.outliers].sort().values for _ in range(heads)])
    k_weight, v_weight = book_shares(rand(layout.k_dim), rand(layout.v_dim), layout)
    mean = torch.randn(heads, layout.k_dim, device="cuda")
    return channels.to(torch.int32).contiguous(), mean, rand(layout.k_dim), k_weight, rand(layout.v_dim), v_weight


def bytes_are_the_laws(layout: PageLayout) -> bool:
    encode = fused_for(torch.device("cuda"), layout)
    assert encode is not None
    done, faults = differs(SimpleNamespace(encode=encode), layout, book_of(layout, heads_of(layout)), 1, 16)
    name = f"{layout.format.name}_d{layout.k_dim}"
    print(f"{name:22s} bytes: {f'the law wrote the same {done} blocks' if not faults else '; '.join(faults)}", flush=True)
    return not faults


def attention_is_the_laws(name: str, dim: int) -> bool:
    found = [errors(Run(name, 5, 2, 4, dim, 700), **kw) for kw in CHECKS]
    right = all(e < 2e-3 for e in found)
    print(f"{name}_d{dim}".ljust(22), "attention:", *(f"{e:.1e}" for e in found), "" if right else "WRONG", flush=True)
    return right


def time_of(run: Run) -> tuple[float, float, int, float]:
    """Microseconds, error against the law, bytes that must be read, and their share of FP16's."""
    layout, book, base = prepared(run)
    size = run.batch * run.heads * run.tokens // PAGE * layout.page_bytes
    caches = [Cache(run, layout, book, base, [run.tokens] * run.batch) for _ in range(min(24, max(2, -(-int(COLD) // size))))]
    q, q_len = query(run, layout), torch.ones(run.batch, dtype=torch.int32, device="cuda")
    attend = path_of(q.device, layout, run.group)
    out, _ = caches[0].call(attend, q, q_len)
    error = relative(out[:1], caches[0].call(attend_naive, q, q_len, slice(0, 1))[0])
    us = timed([lambda c=c: c.call(attend, q, q_len) for c in caches])
    moved = caches[0].moved
    return us, error, moved, moved / (2 * run.batch * run.heads * run.tokens * layout.element_count)


def compile_jobs() -> Iterator[Callable[[], object]]:
    """Calls that compile every kernel once, each a few seconds of one core."""
    for layout in layouts():
        heads = heads_of(layout)
        pool, x = empty_pages(1, heads, layout, "cuda"), torch.zeros(PAGE, heads, layout.k_dim, dtype=torch.bfloat16, device="cuda")
        for most in (1, PAGE):
            runs = torch.tensor(runs_for([0], 0, most, 0), dtype=torch.int32, device="cuda")
            args = (pool, x, x, runs, neutral_book(layout, heads, "cuda"), layout)
            yield lambda layout=layout, args=args, most=most: fused_for(torch.device("cuda"), layout)(*args, most=most)
        for kw in CHECKS:
            yield lambda layout=layout, kw=kw: errors(Run(layout.format.name, 5, 2, 4, layout.k_dim, 700), **kw)
    for run in RUNS:
        yield lambda run=run: attend_once(run)


def attend_once(run: Run) -> None:
    layout, book, base = prepared(run, 8)
    # a block table as wide, modulo 16, as the real one
    cache, q = Cache(run, layout, book, base, [16 * PAGE] * run.batch), query(run, layout)
    cache.call(path_of(q.device, layout, run.group), q, torch.ones(run.batch, dtype=torch.int32, device="cuda"))


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out")
    ap.add_argument("--commit", default="unknown")
    ap.add_argument("--checks", action="store_true")
    ap.add_argument("--share", help="I/N: only compile, every N-th case from I on")
    a = ap.parse_args()
    if not torch.cuda.is_available():
        ap.error("these figures need a GPU")
    if a.share:
        i, n = map(int, a.share.split("/"))
        for job in list(compile_jobs())[i::n]:
            job()
        return 0
    torch.manual_seed(0)
    right = all([bytes_are_the_laws(layout) for layout in layouts()])
    right &= all([attention_is_the_laws(name, dim) for name in PAIRS for dim in (64, 128)])
    rows: list[dict[str, object]] = []
    for run in RUNS if not a.checks else []:
        us, error, moved, share = time_of(run)
        fine = error < 2e-3
        right &= fine
        print(f"{run.name:32s} {us:7.1f} us {moved / us / 1e3:6.0f} GB/s  {share:.3f} of FP16's bytes  error {error:.1e}", flush=True)
        figures = [("us", us, "us"), ("gbps", moved / us / 1e3, "GB/s"), ("bytes_saved", 1 - share, "share")]
        if fine and format_of(run.kind).values:
            rows += [
                {"bench": "kv-attend", "case": run.name, "metric": metric, "value": f"{value:.4g}", "unit": unit, **stamp_of(a.commit),
                 "checked": f"error {error:.2e}"}
                for metric, value, unit in figures
            ]  # fmt: skip
    if a.out and right and rows:
        with open(a.out, "w", newline="") as f:
            w = csv.DictWriter(f, FIELDS)
            w.writeheader()
            w.writerows(rows)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
