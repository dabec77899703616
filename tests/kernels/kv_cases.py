"""Arguments of attention over pages of any layout: random block tables, bytes that nobody wrote full of ones."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch

from moe_prefetch.kernels.kv_encode import naive as law
from moe_prefetch.kernels.kv_encode.records import Book, arranged, book_shares, encode_naive, runs_for
from moe_prefetch.kv.format import PAGE, PageLayout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOWHERE = 1 << 30


def book_of(layout: PageLayout, heads: int) -> Book:
    d, dv = layout.k_dim, layout.v_dim
    rand = lambda n: torch.rand(heads, n) + 0.5  # noqa: E731
    channels = torch.stack([torch.randperm(d)[: layout.outliers].sort().values for _ in range(heads)]).to(torch.int32)
    if layout.outliers > 2:
        channels[0, -1] = -1
    channels = arranged(channels, layout)
    mean = torch.randn(heads, d) * 0.5
    k_weight, v_weight = book_shares(channels, rand(d), rand(dv), layout)
    return tuple(x.to(DEVICE) for x in (channels, mean, rand(d), k_weight, rand(dv), v_weight))


def fill_unused(record_Nb: torch.Tensor, fill: int, layout: PageLayout) -> torch.Tensor:
    """A page's record with all bits set in the slots from `fill` on: NaN in FP16, FP8 and scales."""
    parts = law.unpack(record_Nb, layout)
    k_ones, v_ones = ({"fp16": float("nan"), "fp4": 15, "fp8": 255}[f.code] for f in (layout.format, layout.format.v))
    parts.k_codes, parts.v_codes, parts.k_scales = parts.k_codes.clone(), parts.v_codes.clone(), parts.k_scales.clone()
    parts.v_scales, parts.k_outliers, parts.k_rope = parts.v_scales.clone(), parts.k_outliers.clone(), parts.k_rope.clone()
    for x, v in ((parts.k_codes, k_ones), (parts.v_codes, v_ones), (parts.k_scales, 255), (parts.k_outliers, float("nan"))):
        x[..., fill:, :] = v
    parts.k_rope[..., fill:, :] = float("nan")
    if layout.format.v.v_axis == "channel":
        parts.v_scales[..., -(-fill // layout.format.v.v_group) :] = 255
    else:
        parts.v_scales[..., fill:, :] = 255
    return law.pack(parts, layout)


def case(
    layout: PageLayout,
    group: int,
    lengths: list[int],
    *,
    heads: int = 1,
    draft: int = 1,
    sinks: int = 4,
    window: int = 32,
    q_len: list[int] | None = None,
    learned_sink: bool = False,
    loud: float = 4.0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of `attend_naive` and its kin."""
    B, ints = len(lengths), lambda x: torch.tensor(x, dtype=torch.int32, device=DEVICE)
    step = layout.format.append_group
    stored = [max(0, n - sinks - window) // step * step for n in lengths]
    width = max(1, *(-(-s // PAGE) for s in stored), 1)
    ids = torch.randperm(B * width + 2)
    table = ids[: B * width].reshape(B, width)
    dk, dv = layout.k_dim + layout.rope, layout.v_dim
    book = book_of(layout, heads)
    pool = law.empty_pages(len(ids), heads, layout, DEVICE)
    for b, n in enumerate(stored):
        if n:
            k, v = torch.randn(n, heads, dk, device=DEVICE), torch.randn(n, heads, dv, device=DEVICE)
            k[:, :, :3] *= loud
            encode_naive(pool, k, v, ints(runs_for(table[b].tolist(), 0, n, 0)), book, layout)
    owned = {int(p) for b, n in enumerate(stored) for p in table[b, : -(-n // PAGE)]}
    for page in set(range(len(ids))) - owned:
        pool[page] = 0xFF
    for b, n in enumerate(stored):
        if n % PAGE:
            last = table[b, n // PAGE]
            pool[last] = fill_unused(pool[last], n % PAGE, layout)
    for b, n in enumerate(stored):
        # no kernel asks for a page behind a row's last one
        table[b, -(-n // PAGE) :] = NOWHERE
    half = lambda n, d: torch.randn(B, heads, n, d, device=DEVICE).half()  # noqa: E731
    ring = window + step + 8
    args = [
        torch.randn(B, heads * group, draft, dk, device=DEVICE).to(dtype),
        ints(q_len or [min(draft, n) for n in lengths]),
        pool,
        ints(table.tolist()),
        ints(stored),
        ints(lengths),
        half(sinks, dk),
        half(sinks, dv),
        half(ring, dk),
        half(ring, dv),
        torch.randint(0, ring, (B,), dtype=torch.int32, device=DEVICE),
        book,
        layout,
    ]
    sink = torch.randn(heads * group, device=DEVICE) if learned_sink else None
    return args, {"scale": dk**-0.5, "sink_H": sink, **options}


def relative(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want.double()).norm() / want.double().norm())


def compiled(launches: str) -> list[str]:
    """Names of the kernels that these lines of Python launch, compiled for sm_90, without a GPU, by a process of its own."""
    code = (
        "import torch\nfrom tests.kernels.ahead import compile_only\nkernels = compile_only()\n"
        f"{launches}\nassert all(len(k.asm['cubin']) for k in kernels)\nprint(*(k.name for k in kernels))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
