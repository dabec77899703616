"""The general encoder writes the bytes of the naive law: one by one, in chunks, with values no model should have."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.kernels.kv_encode import general
from moe_prefetch.kernels.kv_encode.naive import empty_pages
from moe_prefetch.kernels.kv_encode.records import encode_naive, runs_for
from moe_prefetch.kv.format import FORMATS, PAGE, PageLayout

from .kv_cases import DEVICE, book_of


def tokens(n: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Loud and quiet tokens, a zero one, and one of NaN, Inf, denormals and signed zeros."""
    x = torch.randn(n, heads, dim) * torch.exp2(torch.randint(-8, 9, (n, 1, 1)).float())
    if dim:
        x[-1] = 0
        x[0, 0, :8] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-40, -0.0, 7e4, -1e-12, 448.0])
    return x.to(dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("layout", "chunks", "dtype"),
    [
        (PageLayout(FORMATS["fp16"], 80, 80), [20, 1, 3, 110], torch.bfloat16),
        (PageLayout(FORMATS["fp8"], 96, 112), [126, 1, 1, 4], torch.float16),
        (PageLayout(FORMATS["fp8"], 128, 128), [1] * 3, torch.bfloat16),
        (PageLayout(FORMATS["fp8"], 256, 0, 0, 64), [60, 3, 1], torch.float32),
        (PageLayout(FORMATS["fp16"], 256, 0, 0, 16), [2, 130], torch.bfloat16),
        (PageLayout(FORMATS["nvfp4"], 80, 80), [1, 1, 60, 70], torch.bfloat16),
        (PageLayout(FORMATS["nvfp4"], 128, 64), [129], torch.float32),
        (PageLayout(FORMATS["mxfp4"], 112, 96), [63, 66], torch.float32),
        (PageLayout(FORMATS["mxfp4"], 80, 80), [4, 1], torch.float16),
        (PageLayout(FORMATS["nvfp4"], 256, 0, 0, 32), [5, 1], torch.bfloat16),
    ],
    ids=lambda x: f"{x.format.name}-{x.k_dim}-{x.v_dim}-{x.rope}" if isinstance(x, PageLayout) else None,
)
def test_bytes_equal_the_law(layout: PageLayout, chunks: list[int], dtype: torch.dtype) -> None:
    heads, book = 2, book_of(layout, 2)
    count = -(-sum(chunks) // PAGE)
    pages = torch.randperm(count).tolist()
    law = empty_pages(count, heads, layout, DEVICE)
    ours, at = law.clone(), 0
    for n in chunks:
        runs = torch.tensor(runs_for(pages, at, n, 0), dtype=torch.int32, device=DEVICE)
        k, v = tokens(n, heads, layout.k_dim + layout.rope, dtype), tokens(n, heads, layout.v_dim, dtype)
        want = encode_naive(law, k, v, runs, book, layout)
        got = general.encode(ours, k, v, runs, book, layout, most=int(runs[:, 3].max()))
        assert torch.equal(want, got)
        at += n
        parts = {part: int((law != ours)[..., a : a + size].sum()) for part, (a, size) in layout.offsets.items()}
        assert torch.equal(law, ours), f"bytes that differ: {parts}"


def test_every_fp16_value_as_fp8() -> None:
    """All finite FP16 numbers, each in a row with the loudest that its byte allows."""
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[x.isfinite()]
    layout = PageLayout(FORMATS["fp8"], 64, 64)
    n = 32
    rows = x[torch.randperm(len(x))[: n * 63]].reshape(n, 1, 63)
    k = torch.cat([torch.exp2(torch.randint(-10, 14, (n, 1, 1)).float()).half(), rows], -1).to(DEVICE)
    law = empty_pages(1, 1, layout, DEVICE)
    ours = law.clone()
    runs = torch.tensor([[0, 0, 0, n]], dtype=torch.int32, device=DEVICE)
    encode_naive(law, k, k, runs, book_of(layout, 1), layout)
    general.encode(ours, k, k, runs, book_of(layout, 1), layout, most=n)
    assert torch.equal(law, ours)


def test_no_runs_write_nothing() -> None:
    layout = PageLayout(FORMATS["fp8"], 80, 80)
    pool = empty_pages(1, 1, layout, DEVICE)
    before = pool.clone()
    none = torch.zeros(0, 1, 80, device=DEVICE)
    counts = general.encode(pool, none, none, torch.zeros(0, 4, dtype=torch.int32, device=DEVICE), book_of(layout, 1), layout)
    assert torch.equal(pool, before)
    assert counts.tolist() == [0, 0]


def test_serves_what_it_can_write() -> None:
    assert general.serves(PageLayout(FORMATS["fp8"], 512, 0, 0, 64))
    assert not general.serves(PageLayout(FORMATS["fp4-72"], 80, 80))
