"""The fused attention against the naive law: groups, head dims, outliers, ragged rows, drafts, masks; unused bytes are 0xFF."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.kernels.kv_attend import fused
from moe_prefetch.kernels.kv_attend.naive import attend_naive
from moe_prefetch.kernels.kv_encode.naive import empty_pages
from moe_prefetch.kernels.kv_encode.records import arranged, encode_naive, runs_for
from moe_prefetch.kv.format import FORMATS, PAGE, PageLayout

from .kv_cases import DEVICE, NOWHERE


def case(
    name: str,
    dim: int,
    group: int,
    outliers: int,
    lengths: list[int],
    *,
    heads: int = 1,
    draft: int = 1,
    sinks: int = 4,
    window: int = 32,
    q_len: list[int] | None = None,
    learned_sink: bool = False,
    loud: float = 4.0,
    swell: float = 1.0,
    **options: Any,
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of `attend`: pages in random order, pages and slots that nobody owns full of 0xFF."""
    layout = PageLayout(FORMATS[name], dim, dim, outliers)
    B, ints = len(lengths), lambda x: torch.tensor(x, dtype=torch.int32, device=DEVICE)
    stored = [max(0, n - sinks - window) for n in lengths]
    width = max(1, *(-(-s // PAGE) for s in stored), 1)
    ids = torch.randperm(B * width + 2)
    table = ids[: B * width].reshape(B, width)
    rand = lambda: torch.randn(heads, dim).abs() + 0.5  # noqa: E731
    channels = arranged(torch.stack([torch.randperm(dim)[:outliers] for _ in range(heads)]), layout)
    book = tuple(x.to(DEVICE) for x in (channels, torch.randn(heads, dim) * 0.5, rand(), rand(), rand(), rand()))
    pool = empty_pages(len(ids), heads, layout, DEVICE)
    for b, n in enumerate(stored):
        if n:
            k, v = torch.randn(n, heads, dim, device=DEVICE), torch.randn(n, heads, dim, device=DEVICE)
            k[:, :, :3] *= loud
            # pages whose factors differ
            v[PAGE:] *= swell
            v[2 * PAGE :] /= swell**2
            encode_naive(pool, k, v, ints(runs_for(table[b].tolist(), 0, n, 0)), book, layout)
    owned = {int(p) for b, n in enumerate(stored) for p in table[b, : -(-n // PAGE)]}
    for page in set(range(len(ids))) - owned:
        pool[page] = 0xFF
    for b, n in enumerate(stored):
        if n % PAGE:
            last, first = table[b, n // PAGE], n % PAGE
            for part, row in (("k_codes", dim // 2), ("k_scales", layout.k_blocks), ("v_scales", dim // 64), ("k_outliers", 2 * outliers)):
                at, size = layout.offsets[part]
                pool[last, :, at + first * row : at + size] = 0xFF
    for b, n in enumerate(stored):
        # no kernel asks for a page behind a row's last one
        table[b, -(-n // PAGE) :] = NOWHERE
    half = lambda n: torch.randn(B, heads, n, dim, device=DEVICE).half()  # noqa: E731
    ring = window + 8
    q = torch.randn(B, heads * group, draft, dim, device=DEVICE)
    args = [
        q,
        ints(q_len or [min(draft, n) for n in lengths]),
        pool,
        ints(table.tolist()),
        ints(stored),
        ints(lengths),
        half(sinks),
        half(sinks),
        half(ring),
        half(ring),
        torch.randint(0, ring, (B,), dtype=torch.int32, device=DEVICE),
        book,
        layout,
    ]
    sink = torch.randn(heads * group, device=DEVICE) if learned_sink else None
    return args, {"scale": dim**-0.5, "sink_H": sink, **options}


CASES = {
    "groups of 4, 8 outliers": dict(name="fp4-quality", dim=128, group=4, outliers=8, lengths=[300, 2, 0]),
    "groups of 8, 4 outliers, two heads": dict(name="fp4-72", dim=128, group=8, outliers=4, lengths=[300, 165], heads=2),
    "groups of 8, none": dict(name="fp4-72", dim=128, group=8, outliers=0, lengths=[421]),
    "pages of unequal loudness": dict(name="fp4-quality", dim=128, group=8, outliers=8, lengths=[500], swell=37.0),
    "one query head, unequal loudness": dict(name="fp4-quality", dim=64, group=1, outliers=0, lengths=[500], swell=1 / 37),
    "one query head": dict(name="fp4-72", dim=128, group=1, outliers=4, lengths=[165, 33]),
    "groups of 16": dict(name="fp4-72", dim=128, group=16, outliers=4, lengths=[300]),
    "odd group, odd outliers": dict(name="fp4-72", dim=128, group=5, outliers=3, lengths=[300], sinks=0),
    "16 outliers": dict(name="fp4-quality", dim=128, group=5, outliers=16, lengths=[200]),
    "head dim 64, 1 outlier": dict(name="fp4-72", dim=64, group=4, outliers=1, lengths=[300, 900]),
    "head dim 64, 2 outliers, draft, no window": dict(name="fp4-72", dim=64, group=8, outliers=2, lengths=[300], draft=2, window=0),
    "head dim 64, 8 outliers, soft cap": dict(name="fp4-quality", dim=64, group=8, outliers=8, lengths=[300], softcap=20.0),
    "draft of 3": dict(name="fp4-72", dim=128, group=4, outliers=4, lengths=[300, 190], draft=3),
    "draft of 8 in two passes, ragged": dict(
        name="fp4-quality", dim=128, group=6, outliers=8, lengths=[300, 420], draft=8, q_len=[8, 5], sliding=100
    ),
    "sliding window": dict(name="fp4-quality", dim=128, group=8, outliers=8, lengths=[300, 420], sliding=150),
    "sliding window within the FP16 one": dict(
        name="fp4-quality", dim=128, group=4, outliers=8, lengths=[420], sliding=20, learned_sink=True
    ),
    "window of 1,024 tokens": dict(name="fp4-quality", dim=128, group=4, outliers=8, lengths=[1400, 700, 90], window=1024),
    "window of 1,024 tokens, sliding, draft": dict(
        name="fp4-quality", dim=64, group=4, outliers=4, lengths=[1400, 700], window=1024, sliding=600, draft=2
    ),
    "soft cap, learned sink": dict(name="fp4-quality", dim=128, group=4, outliers=8, lengths=[300, 5], softcap=20.0, learned_sink=True),
}


def assert_law(args: tuple[Any, ...], kw: dict[str, Any]) -> None:
    """The fused attention is the law's, and nothing where the law sees nothing."""
    out, lse = fused.attend(*args, **kw)
    want, want_lse = attend_naive(*args, **kw)
    seen = want_lse.isfinite()
    assert torch.equal(seen, lse.isfinite())
    assert bool((out[~seen] == 0).all())
    assert float((out - want).norm() / want.norm()) < 2.5e-3
    assert bool(((lse - want_lse).abs() < 2e-2 + 2e-4 * want_lse.abs())[seen].all())


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("programs", [3, 40])
def test_equals_the_law(what: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "programs_on", lambda device, rows: programs)
    args, kw = case(**CASES[what])
    assert_law(args, kw)


def test_peaky_scores() -> None:
    args, kw = case("fp4-quality", 128, 4, 8, [300], loud=1.0)
    args[0] *= 8
    out, want = fused.attend(*args, **kw)[0], attend_naive(*args, **kw)[0]
    assert float((out - want).norm() / want.norm()) < 4e-3


def test_unused_bytes_never_show() -> None:
    """Other bytes where nothing is stored: the same bits come out."""
    args, kw = case("fp4-quality", 128, 4, 8, [300])
    out, lse = fused.attend(*args, **kw)
    pool, table, stored, layout = args[2], args[3], int(args[4][0]), args[12]
    owned = set(table[0, : -(-stored // PAGE)].tolist())
    for page in set(range(len(pool))) - owned:
        pool[page] = 0x7E
    last, first = int(table[0, stored // PAGE]), stored % PAGE
    for part, row in (("k_codes", 64), ("k_scales", 4), ("v_scales", 2), ("k_outliers", 16)):
        at, size = layout.offsets[part]
        pool[last, :, at + first * row : at + size] = 0x35
    again, lse_again = fused.attend(*args, **kw)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


def test_serves_what_it_can_read() -> None:
    assert fused.serves(PageLayout(FORMATS["fp4-quality"], 128, 128, 8), 32)
    assert not fused.serves(PageLayout(FORMATS["fp4-quality"], 128, 128, 8), 33)
    for name, k, v, rope in (
        ("fp8", 128, 128, 0),
        ("nvfp4", 64, 64, 0),
        ("fp4-72", 80, 80, 0),
        ("fp4-72", 512, 0, 64),
    ):
        assert not fused.serves(PageLayout(FORMATS[name], k, v, 0, rope), 4)
