"""Shared by the KV tests: codebooks that use every feature, and plain loops to compare with."""

from __future__ import annotations

import torch

from moe_prefetch.kernels.kv_encode import naive as law
from moe_prefetch.kernels.kv_encode.records import Book, arranged, book_shares, decode_naive, encode_naive, runs_for
from moe_prefetch.kv.format import FORMATS, PAGE, PageLayout, format_of, layout_for
from moe_prefetch.kv.store import LayerStore

NAMES = tuple(FORMATS)
PAIRS = ("fp8+fp4-72", "fp4-quality+fp8", "fp16+fp4-72", "nvfp4+fp8")  # K's format and V's


def layout(name: str, k_dim: int = 64, v_dim: int | None = None, **kw: int) -> PageLayout:
    """The outliers that a window of 64 leaves: four of 64 for `fp4-quality`, where its own window of 1,024 leaves one."""
    return layout_for(format_of(name), k_dim, k_dim if v_dim is None else v_dim, **{"window": 64, **kw})


def book(lay: PageLayout, heads: int, seed: int = 0) -> Book:
    """Random outlier channels, means and gains (neutral where the format of K, or V, knows none)."""
    g = torch.Generator().manual_seed(seed)
    plain, plain_v = (f.max_bits is None for f in (lay.format, lay.format.v))
    channels = (
        torch.stack([torch.randperm(lay.k_dim, generator=g)[: lay.outliers].sort().values for _ in range(heads)])
        .int()
        .reshape(heads, lay.outliers)
    )
    channels = arranged(channels, lay)
    rand = lambda d, ones: torch.ones(heads, d) if ones else torch.rand(heads, d, generator=g) * 2 + 0.5  # noqa: E731
    mean = torch.zeros(heads, lay.k_dim) if plain else torch.randn(heads, lay.k_dim, generator=g)
    (k_gain, k_weight), (v_gain, v_weight) = ((rand(d, x), rand(d, x)) for d, x in ((lay.k_dim, plain), (lay.v_dim, plain_v)))
    k_weight, v_weight = book_shares(channels, k_weight, v_weight, lay)
    return channels, mean, k_gain, k_weight, v_gain, v_weight


def tokens(n: int, heads: int, dim: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """[batch, heads, n, dim], loud and quiet tokens, values that FP16 holds exactly."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, heads, n, dim, generator=g) * (torch.rand(batch, 1, n, 1, generator=g) * 6 - 3).exp2()
    return x.half().float()


def store(name: str, *, dim: int = 64, heads: int = 2, batch: int = 1, window: int = 16, sinks: int = 4, **kw: object) -> LayerStore:
    lay = layout(name, dim)
    return LayerStore(lay, heads, book(lay, heads), batch=batch, sinks=sinks, window=window, poison=True, **kw)


def attention_loop(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    last: int,
    sliding: int = 0,
    softcap: float = 0.0,
    sink: float | None = None,
) -> torch.Tensor:
    """One head, the last `last` positions as queries, written as the sum it is: q [last, d], k v [S, d] -> [last, dv], FP64."""
    out = []
    for i in range(last):
        at = len(k) - last + i
        lo = max(0, at - sliding + 1) if sliding else 0
        s = (k[lo : at + 1].double() @ q[i].double()) * scale
        if softcap:
            s = softcap * (s / softcap).tanh()
        e = s.exp()
        total = e.sum() + (0.0 if sink is None else torch.tensor(sink, dtype=torch.float64).exp())
        out.append((e @ v[lo : at + 1].double()) / total)
    return torch.stack(out)


def expected(s: LayerStore, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention must see of one row's tokens k, v [N, n, d], from the element law alone: FP16 at both ends, pages between."""
    lay, n = s.layout, k.shape[1]
    g = lay.format.append_group
    stored = max(0, (n - s.sinks - s.window) // g * g)
    k, v = k.clone(), v.clone()
    if stored:
        mid = slice(s.sinks, s.sinks + stored)
        pages = law.empty_pages(-(-stored // PAGE), s.heads, lay)
        encode_naive(
            pages,
            k[:, mid].transpose(0, 1),
            v[:, mid].transpose(0, 1),
            torch.tensor(runs_for(list(range(len(pages))), 0, stored, 0)),
            s.books[0],
            lay,
        )
        k_page, v_page = decode_naive(pages, s.books[0], lay)
        k[:, mid], v[:, mid] = (x.permute(1, 0, 2, 3).flatten(1, 2)[:, :stored] for x in (k_page, v_page))
    return k, v


def check(s: LayerStore, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Row b of the settled store equals the law for its tokens rows[b] = (k, v) [N, n, d], bit for bit; padding reads zero."""
    s.settle()
    s.check_integrity()
    k_all, v_all = s.gather()
    for b, (k, v) in enumerate(rows):
        pad = s.pads[b]
        for got, want in zip((k_all[b], v_all[b]), expected(s, k, v), strict=True):
            assert torch.equal(got[:, pad:], want)
            assert bool((got[:, :pad] == 0).all())
