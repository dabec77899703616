"""K and V in different formats on a GPU: bytes and attention against the law, and the time of attention beside each format alone.

usage: python benchmarks/kv_pairs.py --out ROWS.csv [--commit ID] [--checks | --times] [--cases REGEX] [--tunings] [--share I/N]

Bytes: appends of many sizes, token by token, and whole pages with all 65,536 bfloat16 values (as `benchmarks/kv_encode.py`). Attention:
ragged rows with options, then the timed cases as `benchmarks/kv_general.py` takes them, groups of 4, batch 8, 32k tokens. `--checks` stops
before the times, `--times` leaves the first two out; `--tunings` times other tiles, registers and stages, too; `--share I/N` only compiles,
for several processes to fill Triton's cache at once.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from kv_encode import differs, heads_of
from kv_general import Cache, Run, errors, prepared, query

from moe_prefetch.bench.kv_attend import COLD, relative, timed
from moe_prefetch.bench.rows import Row, append_rows, check_rows, machine_name
from moe_prefetch.kernels.kv_attend import general
from moe_prefetch.kernels.kv_attend.naive import attend_naive
from moe_prefetch.kernels.kv_attend.op import path_of
from moe_prefetch.kernels.kv_encode.naive import empty_pages
from moe_prefetch.kernels.kv_encode.op import fused_for
from moe_prefetch.kernels.kv_encode.records import arranged, book_shares, neutral_book, runs_for
from moe_prefetch.kv.format import PAGE, PageLayout, format_of

PAIRS = ("fp8+fp4-72", "fp4-quality+fp8", "fp16+fp4-72", "nvfp4+fp8")
CHECKS: list[dict[str, Any]] = [{}, {"draft": 3, "softcap": 20.0, "sink": True}, {"draft": 2, "sliding": 300}]
RUNS = [
    *(Run(kind, 8, 8, 4, 128) for kind in ("fp8", "fp4-72", "fp8+fp4-72", "fp4-72+fp8", "fp16+fp4-72")),
    *(Run(kind, 8, 8, 4, 64) for kind in ("fp8", "fp4-72", "fp8+fp4-72")),
]

Tuning = tuple[int, int, int, int, int, int]
# general.tuning, what else it could say of a pair: by the tile it takes
TUNINGS: dict[int, list[Tuning]] = {
    128: [(16, 128, 4, 168, 3, 2), (16, 128, 4, 168, 3, 3), (16, 128, 4, 255, 2, 2), (16, 128, 4, 255, 2, 3)],
    64: [(16, 64, 4, 168, 3, 3), (16, 64, 4, 255, 2, 3), (16, 128, 4, 168, 3, 2)],
}
LANDED = general.tuning


def layouts() -> list[PageLayout]:
    return [Run(name, 1, 1, 1, dim).layout for name in PAIRS for dim in (64, 128)]


def book_of(layout: PageLayout, heads: int) -> tuple[torch.Tensor, ...]:
    """Channels, means, gains and weights that differ from head to head where a side's format has them."""
    rand = lambda d: torch.rand(heads, d, device="cuda") + 0.5  # noqa: E731
    channels = arranged(torch.stack([torch.randperm(layout.k_dim, device="cuda")[: layout.outliers] for _ in range(heads)]), layout)
    k_weight, v_weight = book_shares(channels, rand(layout.k_dim), rand(layout.v_dim), layout)
    mean = torch.randn(heads, layout.k_dim, device="cuda")
    return channels, mean, rand(layout.k_dim), k_weight, rand(layout.v_dim), v_weight


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


def tunings_of(run: Run, others: bool) -> list[Tuning]:
    """What the kernel has for that run, then others, for pairs."""
    own = LANDED(run.layout, run.group)
    return [own, *(t for t in TUNINGS[own[1]] if others and run.layout.format.values and t != own)]


def times_of(run: Run, others: bool) -> Iterator[tuple[str, float, float, int, float]]:
    """Per tuning its name ("" for the first), microseconds, error against the law, bytes that must be read, their share of FP16's."""
    layout, book, base = prepared(run)
    size = run.batch * run.heads * run.tokens // PAGE * layout.page_bytes
    caches = [Cache(run, layout, book, base, [run.tokens] * run.batch) for _ in range(min(24, max(2, -(-int(COLD) // size))))]
    q, q_len = query(run, layout), torch.ones(run.batch, dtype=torch.int32, device="cuda")
    attend, moved = path_of(q.device, layout, run.group), caches[0].moved
    want = caches[0].call(attend_naive, q, q_len, slice(0, 1))[0]
    for i, tuning in enumerate(tunings_of(run, others)):
        general.tuning = lambda layout, rows, tuning=tuning: tuning
        error = relative(caches[0].call(attend, q, q_len)[0][:1], want)
        us = timed([lambda c=c: c.call(attend, q, q_len) for c in caches])
        name = "_" + "-".join(map(str, tuning)) if i else ""
        yield name, us, error, moved, moved / (2 * run.batch * run.heads * run.tokens * layout.element_count)
    general.tuning = LANDED


def compile_jobs(runs: list[Run], others: bool, checks: bool) -> Iterator[Callable[[], object]]:
    """Calls that compile every kernel once, each a few seconds of one core."""
    for layout in layouts() if checks else []:
        heads = heads_of(layout)
        pool, x = empty_pages(1, heads, layout, "cuda"), torch.zeros(PAGE, heads, layout.k_dim, dtype=torch.bfloat16, device="cuda")
        for most in (1, PAGE):
            runs = torch.tensor(runs_for([0], 0, most, 0), dtype=torch.int32, device="cuda")
            args = (pool, x, x, runs, neutral_book(layout, heads, "cuda"), layout)
            yield lambda layout=layout, args=args, most=most: fused_for(torch.device("cuda"), layout)(*args, most=most)
        for kw in CHECKS:
            yield lambda layout=layout, kw=kw: errors(Run(layout.format.name, 5, 2, 4, layout.k_dim, 700), **kw)
    for run in runs:
        for tuning in tunings_of(run, others):
            yield lambda run=run, tuning=tuning: attend_once(run, tuning)


def attend_once(run: Run, tuning: Tuning) -> None:
    layout, book, base = prepared(run, 8)
    general.tuning = lambda layout, rows: tuning
    # a block table as wide, modulo 16, as the real one
    cache, q = Cache(run, layout, book, base, [16 * PAGE] * run.batch), query(run, layout)
    cache.call(path_of(q.device, layout, run.group), q, torch.ones(run.batch, dtype=torch.int32, device="cuda"))
    general.tuning = LANDED


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--commit", default="unknown")
    ap.add_argument("--checks", action="store_true")
    ap.add_argument("--times", action="store_true")
    ap.add_argument("--cases", default=".", help="which of the timed ones")
    ap.add_argument("--tunings", action="store_true")
    ap.add_argument("--share", help="I/N: only compile, every N-th kernel from I on")
    a = ap.parse_args()
    if not torch.cuda.is_available():
        ap.error("these figures need a GPU")
    runs = [r for r in RUNS if re.search(a.cases, r.name) and not a.checks]
    if a.share:
        i, n = map(int, a.share.split("/"))
        for job in list(compile_jobs(runs, a.tunings, not a.times))[i::n]:
            job()
        return 0
    torch.manual_seed(0)
    right = True
    if a.out:
        check_rows(a.out)
    if not a.times:
        right = all([bytes_are_the_laws(layout) for layout in layouts()])
        right &= all([attention_is_the_laws(name, dim) for name in PAIRS for dim in (64, 128)])
    for run in runs:
        for name, us, error, moved, share in times_of(run, a.tunings):
            fine = error < 2e-3
            right &= fine
            case = run.name + name
            print(f"{case:48s} {us:7.1f} us {moved / us / 1e3:6.0f} GB/s  {share:.3f} of FP16's bytes  error {error:.1e}", flush=True)
            if a.out and fine and format_of(run.kind).values:
                figures = [("us", us, "us"), ("gbps", moved / us / 1e3, "GB/s"), ("bytes_saved", 1 - share, "share")]
                append_rows(a.out, "kv-attend", [Row(case, *figure) for figure in figures], machine=machine_name("cuda"), commit=a.commit,
                            checked=f"error {error:.2e}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
