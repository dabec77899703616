"""Time FP4 decode attention against FP16 SDPA on one GPU; write rows for `benchmarks/results/kv-attend.csv`.

usage: moe-prefetch bench kv-attend --out ROWS.csv [--cases REGEX] [--commit ID] [--align BYTES] [--set STAGES=3 ...]

Every figure is the median over replays of a CUDA graph whose calls rotate over copies of the cache, so that none is in L2. A call is
everything from q to the output: q preparation, paging through a random block table, FP16 sinks and window, combine. SDPA reads a plain FP16
cache of as many tokens, through its fastest backend. `checked` is the error ||out - ref|| / ||ref|| of the same run against FP32 attention
over the decoded cache, on N(0, 1) data; a case whose error is above the bound gets no row.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..kernels.kv_attend import fused
from ..kernels.kv_attend.naive import attend_naive
from ..kernels.kv_encode.naive import empty_pages
from ..kernels.kv_encode.records import Book, arranged, encode_naive, neutral_book, runs_for
from ..kv import format as kv_format
from ..kv.format import PAGE, PageLayout, format_of, layout_for
from .rows import add_rows, check_rows, choice
from .timing import replay_us

SINKS, WINDOW, COLD, WARM_US = 4, 64, 400e6, 40e3


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    group: int
    dim: int
    tokens: int

    @property
    def name(self) -> str:
        return f"b{self.batch}_g{self.group}_d{self.dim}_t{self.tokens}"


CASES = [
    Case(8, 8, 4, 128, 32768),
    Case(32, 8, 4, 128, 8192),
    Case(8, 8, 8, 128, 32768),
    Case(64, 4, 8, 128, 4096),
    Case(1, 8, 8, 128, 131072),
    Case(16, 8, 4, 64, 32768),
    Case(16, 8, 8, 64, 32768),
    Case(8, 8, 4, 128, 1024),
    Case(8, 8, 4, 128, 2048),
    Case(8, 8, 4, 128, 4096),
    Case(8, 8, 4, 128, 8192),
    Case(8, 8, 1, 128, 32768),
]


def layout_of(kind: str, dim: int) -> PageLayout:
    if kind == "f72":
        return layout_for(format_of("fp4-72"), dim, dim)
    return layout_for(format_of("fp4-quality"), dim, dim, outliers=int(kind[1:]))


def book_for(layout: PageLayout, heads: int) -> Book:
    book = neutral_book(layout, heads, "cuda")
    channels = torch.stack([torch.randperm(layout.k_dim, device="cuda")[: layout.outliers] for _ in range(heads)])
    return (arranged(channels, layout), *book[1:])


def pages_of(layout: PageLayout, heads: int, book: Book, count: int) -> torch.Tensor:
    """`count` full pages of N(0, 1) tokens, through the naive encoder."""
    pool = empty_pages(count, heads, layout, "cuda")
    for at in range(0, count, 8):
        n = min(8, count - at)
        k, v = (torch.randn(n * PAGE, heads, d, device="cuda") for d in (layout.k_dim, layout.v_dim))
        encode_naive(pool, k, v, torch.tensor(runs_for(list(range(at, at + n)), 0, n * PAGE, 0), device="cuda"), book, layout)
    return pool


class Cache:
    """A decode step's tensors: pages in random order, FP16 sinks and window."""

    def __init__(
        self, base: torch.Tensor, layout: PageLayout, book: Book, case: Case, lengths: list[int], *, shuffled: bool = True
    ) -> None:
        B, N, D = len(lengths), case.heads, case.dim
        dev = {"device": "cuda"}
        stored = [max(0, n - SINKS - WINDOW) for n in lengths]
        pages = [-(-s // PAGE) for s in stored]
        width, total = max(1, *pages) if len(pages) > 1 else max(1, pages[0]), sum(pages)
        pick = torch.randint(len(base), (max(1, total),), **dev)
        self.pool = torch.empty(max(1, total), *base.shape[1:], dtype=torch.uint8, **dev)
        for at in range(0, len(pick), 512):
            self.pool[at : at + 512] = base[pick[at : at + 512]]
        ids = torch.randperm(total, **dev) if shuffled else torch.arange(total, **dev)
        self.table = torch.zeros(B, width, dtype=torch.int32, **dev)
        at = 0
        for b, n in enumerate(pages):
            self.table[b, :n] = ids[at : at + n]
            at += n
        i32 = lambda x: torch.tensor(x, dtype=torch.int32, **dev)  # noqa: E731
        half = lambda n: torch.randn(B, N, n, D, dtype=torch.float16, **dev)  # noqa: E731
        self.stored, self.length, self.q_len, self.first = i32(stored), i32(lengths), i32([1] * B), i32([7] * B)
        self.sink_k, self.sink_v, self.recent_k, self.recent_v = half(SINKS), half(SINKS), half(WINDOW + 1), half(WINDOW + 1)
        self.layout, self.book, self.scale = layout, book, D**-0.5

    def args(self, q: torch.Tensor) -> tuple:
        return (
            q,
            self.q_len,
            self.pool,
            self.table,
            self.stored,
            self.length,
            self.sink_k,
            self.sink_v,
            self.recent_k,
            self.recent_v,
            self.first,
            self.book,
            self.layout,
        )

    def attend(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fused.attend(*self.args(q), scale=self.scale)

    def reference(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The naive law, one sequence at a time."""
        outs, lses = [], []
        for b in range(len(q)):
            one = slice(b, b + 1)
            n = -(-int(self.stored[b]) // PAGE)
            pool = self.pool[self.table[b, :n].long()] if n else self.pool[:1]
            table = torch.arange(max(n, 1), device="cuda", dtype=torch.int32)[None]
            o, lse = attend_naive(
                q[one],
                self.q_len[one],
                pool,
                table,
                self.stored[one],
                self.length[one],
                self.sink_k[one],
                self.sink_v[one],
                self.recent_k[one],
                self.recent_v[one],
                self.first[one],
                self.book,
                self.layout,
                scale=self.scale,
            )
            outs.append(o)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    @property
    def bytes_read(self) -> int:
        """Bytes of the cache that a step must read: records of the pages, FP16 tokens."""
        tokens = sum(int(n) - int(s) for n, s in zip(self.length, self.stored, strict=True))
        pages = sum(-(-int(s) // PAGE) for s in self.stored)
        return self.pool.shape[1] * (pages * self.layout.page_bytes + tokens * 2 * self.layout.element_count)


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Error in the norm; infinite where `out` has a NaN: comparisons and `max` would pass over one."""
    err = float((out.double() - ref.double()).norm() / ref.double().norm())
    return math.inf if math.isnan(err) else err


def timed(calls: list[Callable[[], object]], replays: int = 9) -> float:
    """Median microseconds of one call, in a graph that runs all of them at least 6 times together and has run for a while."""
    todo = calls * max(1, -(-6 // len(calls)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for f in calls[:2]:
            f()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for f in todo:
            f()
    # behind heavy work, such as the reference's, the first replays are up to a tenth slower
    warm = 0.0
    while warm < WARM_US:
        warm += replay_us(graph, 4) * 4
    return replay_us(graph, replays) / len(todo)


def sdpa_us(case: Case, say: Callable[..., None] = print) -> tuple[float, str]:
    """The fastest of torch's backends over FP16 K and V: (us, backend). Query heads of a KV head also tried as rows of one head."""
    B, N, G, D, T = case.batch, case.heads, case.group, case.dim, case.tokens
    size = 2 * B * N * T * D * 2
    copies = min(24, max(2, -(-int(COLD) // size)))
    kv = [[torch.randn(B, N, T, D, dtype=torch.float16, device="cuda") for _ in range(2)] for _ in range(copies)]
    q = torch.randn(B, N * G, 1, D, dtype=torch.float16, device="cuda")
    best = (float("inf"), "none")
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for rows in (False, True):
            q_ = q.reshape(B, N, G, D) if rows else q
            gqa = {} if rows or G == 1 else {"enable_gqa": True}
            try:
                with sdpa_kernel(backend):
                    us = timed([lambda k=k, v=v, q_=q_, gqa=gqa: scaled_dot_product_attention(q_, k, v, **gqa) for k, v in kv], replays=5)
            except (RuntimeError, torch.AcceleratorError) as e:
                say(f"  SDPA {backend.name} rows={rows}: {str(e).splitlines()[0][:100]}")
                continue
            best = min(best, (us, f"{backend.name}{'+rows' if rows else ''}"))
    return best


def set_constants(module: ModuleType, items: Sequence[str], refuse: Callable[[str], Any]) -> None:
    """NAME=INT for constants of a kernel's module, to compare variants; `refuse` is told of a name that it does not have."""
    for item in items:
        name, value = item.split("=")
        if not hasattr(module, name):
            refuse(f"{name} is no constant of the kernel")
        setattr(module, name, int(value))


def stamp_of(commit: str) -> dict[str, str]:
    """The columns that say where a row comes from."""
    return {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main(argv: list[str] | None = None, say: Callable[..., None] = print) -> int:
    ap = argparse.ArgumentParser(prog="kv-attend", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", required=True)
    ap.add_argument("--cases", default=".")
    ap.add_argument("--kinds", default="o8,f72,o0")
    ap.add_argument("--commit", default="unknown")
    ap.add_argument("--set", nargs="*", default=[], help="constants of the fused module, NAME=INT")
    ap.add_argument("--align", type=int, default=kv_format.ALIGN, help="bytes that records are aligned to, to compare layouts")
    ap.add_argument("--no-check", action="store_true")
    a = ap.parse_args(argv)
    if not torch.cuda.is_available():
        ap.error("these figures need a GPU")
    kv_format.ALIGN = a.align
    set_constants(fused, a.set, ap.error)
    cases = choice(a.cases, "bench kv-attend --cases")
    torch.manual_seed(0)
    stamp = stamp_of(a.commit)
    check_rows(Path(a.out))
    say(f"{'case':26s} {'us':>7s} {'GB/s':>6s} {'SDPA':>7s} {'x':>5s} {'bytes':>6s}  err / peaky")
    for case in CASES:
        wanted = [k for k in a.kinds.split(",") if cases.search(f"{case.name}_{k}")]
        if not wanted:
            continue
        sdpa, backend = sdpa_us(case, say)
        for kind in wanted:
            layout = layout_of(kind, case.dim)
            book = book_for(layout, case.heads)
            base = pages_of(layout, case.heads, book, 64)
            lengths = [case.tokens] * case.batch
            size = case.batch * case.heads * case.tokens // PAGE * layout.page_bytes
            caches = [Cache(base, layout, book, case, lengths) for _ in range(min(24, max(3, -(-int(COLD) // size))))]
            q = torch.randn(case.batch, case.heads * case.group, 1, case.dim, dtype=torch.bfloat16, device="cuda")
            err = peaky = float("nan")
            if not a.no_check:
                errs = []
                for scale in (1.0, 8.0):
                    out, _ = caches[0].attend(q * scale)
                    errs.append(relative(out, caches[0].reference(q * scale)[0]))
                err, peaky = errs
            us = timed([lambda c=c, q=q: c.attend(q) for c in caches])
            moved = caches[0].bytes_read
            fp16 = 4 * case.batch * case.heads * case.tokens * case.dim
            name = f"{case.name}_{kind}"
            say(
                f"{name:26s} {us:7.1f} {moved / us / 1e3:6.0f} {sdpa:7.1f} {sdpa / us:5.2f} {1 - moved / fp16:6.3f}",
                f" {err:.2e} / {peaky:.2e}  {backend}",
                flush=True,
            )
            if not (a.no_check or (err <= 2e-3 and peaky <= 4e-3)):
                say(f"  {name}: wrong, no row", flush=True)
                continue
            figures = {
                "us": (us, "us"),
                "gbps": (moved / us / 1e3, "GB/s"),
                "speedup_vs_sdpa": (sdpa / us, "x"),
                "sdpa_us": (sdpa, "us"),
                "bytes_saved": (1 - moved / fp16, "share"),
                "error_peaky": (peaky, "relative"),
            }
            whose = {"bench": "kv-attend", "case": name, **stamp, "checked": f"error {err:.2e}"}
            add_rows(Path(a.out), [{**whose, "metric": m, "value": f"{value:.4g}", "unit": unit} for m, (value, unit) in figures.items()])
            del caches
            torch.cuda.empty_cache()
    return 0
