"""The fused encoder writes the bytes of the naive law: one by one, in chunks, with values no model should have."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.kernels.kv_encode import fused
from moe_prefetch.kernels.kv_encode.naive import empty_pages
from moe_prefetch.kernels.kv_encode.records import Book, encode_naive, runs_for
from moe_prefetch.kv.format import FORMATS, PAGE, PageLayout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def book_of(layout: PageLayout, heads: int) -> Book:
    d, rand = layout.k_dim, lambda: torch.randn(heads, layout.k_dim).abs() + 0.2
    channels = torch.stack([torch.randperm(d)[: layout.outliers].sort().values for _ in range(heads)]).to(torch.int32)
    if layout.outliers > 2:
        channels[0, -1] = -1
    return tuple(x.to(DEVICE) for x in (channels.contiguous(), torch.randn(heads, d), rand(), rand(), rand(), rand()))


def tokens(n: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Loud and quiet tokens, a zero one, and one of NaN, Inf, denormals and signed zeros."""
    x = torch.randn(n, heads, dim) * torch.exp2(torch.randint(-8, 9, (n, 1, 1)).float())
    x[-1] = 0
    x[0, 0, :6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-40, -0.0, 7e4])
    return x.to(dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("name", "dim", "outliers", "chunks", "dtype"),
    [
        ("fp4-quality", 128, 8, [1] * 4, torch.bfloat16),
        ("fp4-72", 64, 1, [126, 1, 1, 1], torch.float16),
        ("fp4-quality", 128, 8, [20, 1, 60, 90], torch.bfloat16),
        ("fp4-72", 64, 0, [63, 66], torch.float32),
        ("fp4-quality", 64, 16, [129], torch.bfloat16),
    ],
)
def test_bytes_equal_the_law(name: str, dim: int, outliers: int, chunks: list[int], dtype: torch.dtype) -> None:
    heads, layout = 2, PageLayout(FORMATS[name], dim, dim, outliers)
    book = book_of(layout, heads)
    count = -(-sum(chunks) // PAGE)
    pages = torch.randperm(count).tolist()
    law = empty_pages(count, heads, layout, DEVICE)
    ours, at = law.clone(), 0
    for n in chunks:
        runs = torch.tensor(runs_for(pages, at, n, 0), dtype=torch.int32, device=DEVICE)
        k, v = tokens(n, heads, dim, dtype), tokens(n, heads, dim, dtype)
        want = encode_naive(law, k, v, runs, book, layout)
        got = fused.encode(ours, k, v, runs, book, layout, most=int(runs[:, 3].max()))
        assert torch.equal(want, got)
        at += n
        parts = {part: int((law != ours)[..., a : a + size].sum()) for part, (a, size) in layout.offsets.items()}
        assert torch.equal(law, ours), f"bytes that differ: {parts}"


def test_no_runs_write_nothing() -> None:
    layout = PageLayout(FORMATS["fp4-72"], 64, 64, 1)
    pool = empty_pages(1, 1, layout, DEVICE)
    before = pool.clone()
    none = torch.zeros(0, 1, 64, device=DEVICE)
    counts = fused.encode(pool, none, none, torch.zeros(0, 4, dtype=torch.int32, device=DEVICE), book_of(layout, 1), layout)
    assert torch.equal(pool, before)
    assert counts.tolist() == [0, 0]


def test_serves_what_it_can_write() -> None:
    assert fused.serves(PageLayout(FORMATS["fp4-72"], 128, 128, 4))
    for name, k, v, rope in (
        ("fp8", 128, 128, 0),
        ("nvfp4", 64, 64, 0),
        ("fp4-72", 80, 80, 0),
        ("fp4-72", 512, 0, 64),
    ):
        assert not fused.serves(PageLayout(FORMATS[name], k, v, 0, rope))
