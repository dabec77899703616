"""FP4 pages in `planes` order at odd head dims: the bytes of the naive law."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.kernels.kv_encode import fused, op
from moe_prefetch.kernels.kv_encode import general as others
from moe_prefetch.kernels.kv_encode import general_planes as general
from moe_prefetch.kernels.kv_encode.naive import empty_pages
from moe_prefetch.kernels.kv_encode.op import fused_for
from moe_prefetch.kernels.kv_encode.records import encode_naive, runs_for
from moe_prefetch.kv.format import FORMATS, PAGE, PageLayout

from .kv_cases import DEVICE, book_of
from .test_kv_encode_general import tokens


@pytest.mark.parametrize(
    ("layout", "chunks", "dtype"),
    [
        (PageLayout(FORMATS["fp4-72"], 80, 80, 3), [20, 1, 3, 110], torch.bfloat16),
        (PageLayout(FORMATS["fp4-quality"], 96, 96, 6), [126, 1, 1, 4], torch.float16),
        (PageLayout(FORMATS["fp4-quality"], 112, 112, 0), [63, 1, 70], torch.float32),
        (PageLayout(FORMATS["fp4-quality"], 112, 80, 9), [4, 1, 126], torch.float16),
        (PageLayout(FORMATS["fp4-72"], 80, 80, 6), [1, 2, 40], torch.float32),
        (PageLayout(FORMATS["fp4-quality"], 256, 64, 16), [2, 3], torch.bfloat16),
        (PageLayout(FORMATS["fp4-72"], 64, 112, 1), [1, 1, 1], torch.bfloat16),
        (PageLayout(FORMATS["fp4-72"], 192, 128, 2), [100], torch.bfloat16),
        (PageLayout(FORMATS["fp4-quality"], 512, 0, 0, 64), [60, 3, 1], torch.float32),
        (PageLayout(FORMATS["fp4-72"], 256, 0, 0, 0), [2, 130], torch.bfloat16),
    ],
    ids=lambda x: f"{x.format.name}-{x.k_dim}-{x.v_dim}-{x.rope}-{x.outliers}" if isinstance(x, PageLayout) else None,
)
def test_bytes_equal_the_law(layout: PageLayout, chunks: list[int], dtype: torch.dtype) -> None:
    heads = 2
    book = book_of(layout, heads)
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


def test_each_layout_takes_the_first_encoder_that_writes_it_once_that_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, shipped = torch.device("cuda"), op.PROVEN
    monkeypatch.setattr(op, "PROVEN", ())
    assert fused_for(gpu, PageLayout(FORMATS["fp4-72"], 128, 128, 4)) is None, "the law, until a GPU has shown the same bytes"
    assert shipped == ("fused", "general", "general_planes"), "which an H200 has (docs/kernels.md)"
    monkeypatch.setattr(op, "PROVEN", shipped)
    assert fused_for(gpu, PageLayout(FORMATS["fp4-72"], 128, 128, 4)) is fused.encode
    assert fused_for(gpu, PageLayout(FORMATS["fp8"], 80, 80)) is others.encode
    assert fused_for(gpu, PageLayout(FORMATS["fp4-72"], 80, 80, 3)) is general.encode
    assert fused_for(gpu, PageLayout(FORMATS["fp4-72"], 512, 0, 0, 64)) is general.encode
    assert fused_for(gpu, PageLayout(FORMATS["fp4-72-c64"], 80, 80)) is None
    assert fused_for(torch.device("cpu"), PageLayout(FORMATS["fp8"], 80, 80)) is None


def test_serves_what_it_can_write() -> None:
    for dim in (64, 80, 96, 112, 128, 192, 256):
        assert general.serves(PageLayout(FORMATS["fp4-72"], dim, dim))
    assert general.serves(PageLayout(FORMATS["fp4-72-c64"], 512, 0, 0, 64))
    for name in ("fp4-72-c64", "nvfp4", "fp8"):
        assert not general.serves(PageLayout(FORMATS[name], 80, 80))
