"""Time decode attention over the pages that the general kernels serve; write rows for `benchmarks/results/kv-attend.csv`.

usage: python benchmarks/kv_general.py --out ROWS.csv [--cases REGEX] [--commit ID] [--share I/N]

As `moe-prefetch bench kv-attend`: medians over CUDA graph replays, caches rotated out of L2, everything from q to the output inside, the
error of the same run against the naive law. The baseline is torch's fastest SDPA backend over FP16; for MLA the absorbed product in BF16
(two `bmm` and a softmax), SDPA with keys of 576 and values of 512 channels, FlashInfer where it is installed, and our own kernel over
FP16 pages. `--share I/N` only compiles: the kernels of every N-th case, for several processes to fill Triton's cache at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from moe_prefetch.bench.kv_attend import COLD, SINKS, WINDOW, Case, relative, sdpa_us, timed
from moe_prefetch.bench.rows import Row, append_rows, check_rows, machine_name
from moe_prefetch.kernels.kv_attend import general, general_latent
from moe_prefetch.kernels.kv_attend.naive import attend_naive
from moe_prefetch.kernels.kv_encode.naive import empty_pages
from moe_prefetch.kernels.kv_encode.records import arranged, encode_naive, neutral_book, runs_for
from moe_prefetch.kv.format import PAGE, PageLayout, format_of, layout_for

LATENT, ROTARY = 512, 64


@dataclass(frozen=True)
class Run:
    """One figure: format and shape. dim 0 is MLA: `group` query heads over one latent."""

    kind: str
    batch: int
    heads: int
    group: int
    dim: int
    tokens: int = 32768

    @property
    def name(self) -> str:
        what = f"mla{self.group}_b{self.batch}" if not self.dim else f"b{self.batch}_g{self.group}_d{self.dim}"
        short = {"fp4-72": "f72", "fp4-quality": "quality", "fp4-72-c64": "c64"}
        return f"{what}_t{self.tokens}_{short.get(self.kind, self.kind)}"

    @property
    def layout(self) -> PageLayout:
        if not self.dim:
            return PageLayout(format_of(self.kind), LATENT, 0, 0, ROTARY)
        return layout_for(format_of(self.kind), self.dim, self.dim)


RUNS = [
    Run("fp4-72", 16, 1, 16, 0),
    Run("fp8", 16, 1, 16, 0),
    Run("fp16", 16, 1, 16, 0),
    Run("fp16", 8, 8, 4, 128),
    Run("fp8", 8, 8, 4, 128),
    Run("nvfp4", 8, 8, 4, 128),
    Run("mxfp4", 8, 8, 4, 128),
    Run("fp4-72-c64", 8, 8, 4, 128),
    Run("fp4-quality", 8, 8, 4, 80),
    Run("fp4-quality", 8, 8, 4, 96),
    Run("fp4-quality", 8, 8, 4, 112),
    Run("fp4-quality", 8, 4, 4, 192),
    Run("fp4-quality", 8, 4, 4, 256),
    Run("fp8", 8, 4, 4, 256),
    Run("fp16", 8, 8, 8, 128, 2048),
]
# small and odd: options and lengths that the timed cases do not have
CHECKS: list[tuple[Run, dict[str, Any]]] = [
    (Run("fp4-quality", 5, 2, 5, 80, 700), {"draft": 3, "softcap": 20.0, "sink": True}),
    (Run("fp4-quality", 5, 2, 4, 112, 700), {"draft": 8, "sliding": 300}),
    (Run("fp8", 5, 2, 7, 96, 700), {"draft": 2, "sliding": 150}),
    (Run("fp16", 5, 2, 4, 80, 700), {"draft": 8}),
    (Run("nvfp4", 5, 2, 4, 112, 700), {}),
    (Run("mxfp4", 5, 2, 4, 80, 700), {"draft": 2}),
    (Run("fp4-72", 5, 1, 40, 0, 700), {"draft": 2, "softcap": 20.0, "sink": True, "sliding": 300}),
    (Run("fp4-72", 5, 1, 40, 0, 700), {"sink": True}),
    (Run("fp4-quality", 3, 1, 16, 0, 5000), {}),
    (Run("fp8", 5, 1, 16, 0, 700), {}),
]


class Cache:
    """Arguments of `attend` for rows of these lengths: `base` pages drawn at random into a shuffled pool."""

    def __init__(self, run: Run, layout: PageLayout, book: Any, base: torch.Tensor, lengths: list[int]) -> None:
        B, N, dev = len(lengths), run.heads, {"device": "cuda"}
        stored = [max(0, n - SINKS - WINDOW) // layout.format.append_group * layout.format.append_group for n in lengths]
        pages = [-(-s // PAGE) for s in stored]
        total = max(1, sum(pages))
        pick = torch.randint(len(base), (total,), **dev)
        self.pool = torch.empty(total, *base.shape[1:], dtype=torch.uint8, **dev)
        for at in range(0, total, 512):
            self.pool[at : at + 512] = base[pick[at : at + 512]]
        ids = torch.randperm(total, **dev).to(torch.int32)
        self.table = torch.zeros(B, max(1, *pages), dtype=torch.int32, **dev)
        at = 0
        for b, n in enumerate(pages):
            self.table[b, :n] = ids[at : at + n]
            at += n
        i32 = lambda x: torch.tensor(x, dtype=torch.int32, **dev)  # noqa: E731
        half = lambda n, d: torch.randn(B, N, n, d, dtype=torch.float16, **dev)  # noqa: E731
        self.stored, self.length, self.first = i32(stored), i32(lengths), i32([7] * B)
        ring, dk = WINDOW + layout.format.append_group, layout.k_dim + layout.rope
        self.fp16 = [half(SINKS, dk), half(SINKS, layout.v_dim), half(ring, dk), half(ring, layout.v_dim)]
        self.layout, self.book = layout, book
        # bytes that a step must read: records of the pages, FP16 tokens
        self.moved = N * (sum(pages) * layout.page_bytes + (sum(lengths) - sum(stored)) * 2 * layout.element_count)

    def call(self, f: Callable[..., Any], q: torch.Tensor, q_len: torch.Tensor, rows: slice = slice(None), **kw: Any) -> Any:
        fp16 = [x[rows] for x in self.fp16]
        return f(q[rows], q_len[rows], self.pool, self.table[rows], self.stored[rows], self.length[rows], *fp16, self.first[rows],
                 self.book, self.layout, scale=q.shape[-1] ** -0.5, **kw)


def attend_of(layout: PageLayout) -> Callable[..., Any]:
    return general_latent.attend if layout.v_dim == 0 else general.attend


def prepared(run: Run, pages: int = 32) -> tuple[PageLayout, Any, torch.Tensor]:
    """Layout, codebook, and full pages of N(0, 1) tokens through the naive encoder."""
    layout = run.layout
    channels = torch.stack([torch.randperm(layout.k_dim, device="cuda")[: layout.outliers] for _ in range(run.heads)])
    book = (arranged(channels, layout), *neutral_book(layout, run.heads, "cuda")[1:])
    base = empty_pages(pages, run.heads, layout, "cuda")
    for at in range(0, pages, 8):
        k, v = (torch.randn(8 * PAGE, run.heads, d, device="cuda") for d in (layout.k_dim + layout.rope, layout.v_dim))
        encode_naive(base, k, v, torch.tensor(runs_for(list(range(at, at + 8)), 0, 8 * PAGE, 0), device="cuda"), book, layout)
    return layout, book, base


def query(run: Run, layout: PageLayout, draft: int = 1) -> torch.Tensor:
    return torch.randn(run.batch, run.heads * run.group, draft, layout.k_dim + layout.rope, dtype=torch.bfloat16, device="cuda")


def errors(run: Run, draft: int = 1, sink: bool = False, **kw: Any) -> float:
    """The error of ragged rows with options."""
    layout, book, base = prepared(run, 8)
    lengths = [run.tokens - 131 * i for i in range(run.batch - 1)] + [1]
    cache, q = Cache(run, layout, book, base, lengths), query(run, layout, draft)
    q_len = torch.tensor([min(draft, n) for n in lengths], dtype=torch.int32, device="cuda")
    kw["sink_H"] = torch.randn(q.shape[1], device="cuda") if sink else None
    out, lse = cache.call(attend_of(layout), q, q_len, **kw)
    want, want_lse = cache.call(attend_naive, q, q_len, **kw)
    seen = want_lse.isfinite()
    same = torch.equal(seen, lse.isfinite()) and float((lse - want_lse)[seen].abs().max()) < 1e-2
    return relative(out, want) if same else math.nan


def mla_us(run: Run) -> dict[str, float]:
    """Microseconds of what reads a BF16 latent [B, T, 576] without us."""
    B, H, T, D = run.batch, run.group, run.tokens, LATENT + ROTARY
    kv = [torch.randn(B, T, D, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    q = torch.randn(B, H, D, dtype=torch.bfloat16, device="cuda")

    def absorbed(k: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=D**-0.5), -1, dtype=torch.float32)
        return torch.bmm(p.to(torch.bfloat16), k[..., :LATENT])

    out = {"absorbed bmm": timed([lambda k=k: absorbed(k) for k in kv], replays=5)}
    for backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend):
                f = lambda k: scaled_dot_product_attention(q[:, None], k[:, None], k[:, None, :, :LATENT])  # noqa: E731
                out[backend.name] = timed([lambda k=k, f=f: f(k) for k in kv], replays=3)
        except (RuntimeError, torch.AcceleratorError) as e:
            print(f"  MLA {backend.name}: {str(e).splitlines()[0][:100]}")
    for backend in ("fa3", "fa2") if importlib.util.find_spec("flashinfer") else ():
        try:
            run_, error = flashinfer_mla(backend, q, kv, absorbed(kv[0]))
            out[f"FlashInfer {backend}, error {error:.1e}"] = timed([lambda i=i, f=run_: f(i) for i in range(len(kv))], replays=5)
        except Exception as e:  # noqa: BLE001  a build that fails must not hide the rest
            print(f"  MLA FlashInfer {backend}: {str(e).splitlines()[0][:150]}")
    return out


def flashinfer_mla(
    backend: str, q_BHd: torch.Tensor, kv: list[torch.Tensor], want_BHd: torch.Tensor
) -> tuple[Callable[[int], torch.Tensor], float]:
    """FlashInfer's MLA decode over BF16 pages of 64 tokens in random order: a call for each of `kv` [B, T, 576], and its error."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    B, H, D = q_BHd.shape
    tokens, page, i32 = kv[0].shape[1], 64, {"dtype": torch.int32, "device": "cuda"}
    each = tokens // page
    decode = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.int8, device="cuda"), backend=backend)
    order = torch.randperm(B * each, device="cuda")
    starts, lengths = torch.arange(B + 1, **i32), torch.full((B,), tokens, **i32)
    decode.plan(starts, starts * each, order.to(torch.int32), lengths, H, LATENT, ROTARY, page, False, D**-0.5, q_BHd.dtype, kv[0].dtype)
    pools = [torch.empty_like(x.view(B * each, page, D)).index_copy_(0, order, x.view(B * each, page, D)) for x in kv]
    parts = [(x[..., :LATENT].contiguous(), x[..., LATENT:].contiguous()) for x in pools]
    q, rope = q_BHd[..., :LATENT].contiguous(), q_BHd[..., LATENT:].contiguous()
    f = lambda i: decode.run(q, rope, *parts[i])  # noqa: E731
    return f, relative(f(0), want_BHd)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--cases", default=".")
    ap.add_argument("--commit", default="unknown")
    ap.add_argument("--share", help="I/N: only compile, every N-th case from I on")
    a = ap.parse_args()
    if not torch.cuda.is_available():
        ap.error("these figures need a GPU")
    torch.manual_seed(0)
    runs = [r for r in RUNS if re.search(a.cases, r.name)]
    if a.share:
        i, n = map(int, a.share.split("/"))
        for r in [r for at, r in enumerate(runs) if at % n == i]:
            layout, book, base = prepared(r, 8)
            # a block table as wide, modulo 16, as the real one
            width = 16 if -(-(r.tokens - SINKS - WINDOW) // PAGE) % 16 == 0 else 17
            cache = Cache(r, layout, book, base, [width * PAGE] * r.batch)
            cache.call(attend_of(layout), query(r, layout), torch.ones(r.batch, dtype=torch.int32, device="cuda"))
        for r, kw in [c for at, c in enumerate(c for c in CHECKS if re.search(a.cases, c[0].name)) if at % n == i]:
            errors(r, **kw)
        return 0
    if a.out:
        check_rows(a.out)
    for r, kw in (c for c in CHECKS if re.search(a.cases, c[0].name)):
        err = errors(r, **kw)
        print(f"{r.name:32s} {kw}: error {err:.2e}{'' if err < 2e-3 else '  WRONG'}", flush=True)
    baselines: dict[Any, tuple[float, str]] = {}
    mla: dict[str, float] = {}
    if any(not r.dim for r in runs):
        mla = mla_us(next(r for r in runs if not r.dim))
        print("MLA, BF16: " + ", ".join(f"{k} {v:.0f} us" for k, v in mla.items()), flush=True)
    print(f"{'case':28s} {'us':>7s} {'GB/s':>6s} {'torch':>7s} {'x':>5s} {'bytes':>6s}  err / peaky")
    for r in runs:
        layout, book, base = prepared(r)
        lengths = [r.tokens] * r.batch
        size = r.batch * r.heads * r.tokens // PAGE * layout.page_bytes
        caches = [Cache(r, layout, book, base, lengths) for _ in range(min(24, max(2, -(-int(COLD) // size))))]
        q, q_len, attend = query(r, layout), torch.ones(r.batch, dtype=torch.int32, device="cuda"), attend_of(layout)
        errs = []
        for scale in (1.0, 8.0):
            out, _ = caches[0].call(attend, q * scale, q_len)
            want = torch.cat([caches[0].call(attend_naive, q * scale, q_len, slice(b, b + 1))[0] for b in range(min(2, r.batch))])
            errs.append(relative(out[: len(want)], want))
        us = timed([lambda c=c, q=q, q_len=q_len, attend=attend: c.call(attend, q, q_len) for c in caches])
        moved = caches[0].moved
        del caches
        torch.cuda.empty_cache()
        if r.dim:
            key = (r.batch, r.heads, r.group, r.dim, r.tokens)
            if key not in baselines:
                baselines[key] = sdpa_us(Case(*key))
            best, backend = baselines[key]
        else:
            backend, best = min(mla.items(), key=lambda x: x[1])
        fp16 = 2 * r.batch * r.heads * r.tokens * layout.element_count
        print(f"{r.name:28s} {us:7.1f} {moved / us / 1e3:6.0f} {best:7.1f} {best / us:5.2f} {1 - moved / fp16:6.3f}",
              f" {errs[0]:.2e} / {errs[1]:.2e}  {backend}", flush=True)
        # peaky scores of keys that are not rounded at all: the bound is that of FP16 products
        if not (errs[0] <= 2e-3 and errs[1] <= 4e-3):
            print(f"  {r.name}: wrong, no row", flush=True)
            continue
        figures = [("us", us, "us"), ("gbps", moved / us / 1e3, "GB/s"), ("speedup_vs_sdpa", best / us, "x"), ("sdpa_us", best, "us"),
                   ("bytes_saved", 1 - moved / fp16, "share"), ("error_peaky", errs[1], "relative")]
        if a.out:
            append_rows(a.out, "kv-attend", [Row(r.name, *figure) for figure in figures], machine=machine_name("cuda"), commit=a.commit,
                        checked=f"error {errs[0]:.2e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
