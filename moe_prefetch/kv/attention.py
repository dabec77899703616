"""Attention over a `LayerStore`: steps of decode, chunks of prefill, and both in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CacheError
from ..kernels.kv_attend.naive import merge, softmax_attention
from ..kernels.kv_attend.op import kv_attend
from ..kernels.kv_encode.records import Book, neutral_book
from .format import PageLayout
from .pages import block_table
from .store import LayerStore


def attend(
    store: LayerStore,
    q_BHTd: torch.Tensor,
    q_len: Sequence[int] | None = None,
    *,
    scale: float,
    sliding: int = 0,
    softcap: float = 0.0,
    sink_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of the tokens appended last (1 in decode, more in speculative verify), over all the store holds, their own keys included.

    Rows may bring fewer than T queries: `q_len`. Returns FP32 out [B, H, T, dv] and log-sum-exp [B, H, T].
    Raises CacheError when rows were calibrated each from its own prompt.
    """
    groups = store.by_book()
    if len(groups) > 1:
        raise CacheError(
            f"{len(groups)} codebooks in one batch",
            where="kv.attend",
            expected="one calibration for all rows",
            do="calibrate the model once, or use gather()",
        )
    book = groups[0][0] if groups else neutral_book(store.layout, store.heads, store.device)
    dev = q_BHTd.device
    ints = lambda x: torch.tensor(list(x), dtype=torch.int32, device=dev)  # noqa: E731
    rows = range(store.batch)
    live = [store.row_length(b) - store._in_sinks(b) - store.pages.rows[b].stored for b in rows]
    table = ints(block_table(store.pages.rows)).reshape(store.batch, -1)
    return kv_attend(
        q_BHTd,
        ints(q_len if q_len is not None else [q_BHTd.shape[2]] * store.batch),
        store.pool,
        table,
        ints(r.stored for r in store.pages.rows),
        ints(store.row_length(b) for b in rows),
        store.sink_k,
        store.sink_v,
        store.recent_k,
        store.recent_v,
        ints(store.recent_k.shape[2] - n for n in live),
        book,
        store.layout,
        scale=scale,
        sliding=sliding,
        softcap=softcap,
        sink_H=sink_H,
    )


def attend_chunk(
    store: LayerStore,
    q_BHTd: torch.Tensor,
    k_BNTd: torch.Tensor,
    v_BNTd: torch.Tensor,
    *,
    scale: float,
    sliding: int = 0,
    softcap: float = 0.0,
    sink_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk of T new tokens per row, then append it: past from the store, the chunk's own K and V as they are (not through FP16 or FP4).

    Where chunks end is part of the semantics: a token is read unrounded by its own chunk, in FP16 while in the window, from its page later.
    """
    B, T = q_BHTd.shape[0], q_BHTd.shape[2]
    at = torch.arange(T, device=q_BHTd.device)[None] + store.length - torch.tensor(store.pads, device=q_BHTd.device)[:, None]
    store.settle()
    k, v = store.gather()
    past = torch.arange(store.length, device=q_BHTd.device)[None] - torch.tensor(store.pads, device=q_BHTd.device)[:, None]
    kw: dict[str, Any] = {"scale": scale, "sliding": sliding, "softcap": softcap}
    old = softmax_attention(q_BHTd, k, v, at, past.clamp(min=-1), **kw) if store.length else None
    own_v = v_BNTd if store.v_dim else k_BNTd[..., : store.layout.k_dim]
    new = softmax_attention(q_BHTd, k_BNTd, own_v, at, at.clamp(min=-1), **kw)
    out, lse = merge(*old, *new) if old is not None else new
    if sink_H is not None:
        extra = sink_H.float()[None, :, None].expand(B, -1, T)
        out, lse = merge(out, lse, torch.zeros_like(out), torch.where((at >= 0)[:, None], extra, -torch.inf))
    store.append(k_BNTd, v_BNTd)
    return out, lse


def attend_as_decoded(
    q_BHTd: torch.Tensor,
    k_BNTd: torch.Tensor,
    v_BNTd: torch.Tensor,
    layout: PageLayout,
    book: Book,
    *,
    sinks: int,
    window: int,
    scale: float,
    sliding: int = 0,
    block: int = 512,
) -> torch.Tensor:
    """What T steps of decode give, in one pass: each query reads its own key unrounded, sinks and window in FP16, all else from pages.

    The keys go through `kv_encode` and back; since the bytes of a page depend on its tokens alone, these are the bytes stepwise decode
    would have read (tests compare the two). Returns FP32 out [B, H, T, dv]. Teacher-forced quality measurements use it.
    """
    B, H, T, _ = q_BHTd.shape
    N = k_BNTd.shape[1]
    group = layout.format.append_group
    store = LayerStore(layout, N, book, batch=B, sinks=sinks, window=0, device=q_BHTd.device)
    store.append(k_BNTd, v_BNTd)
    recent_k, recent_v = k_BNTd.half().float(), v_BNTd.half().float()
    store.settle()
    paged_k, paged_v = store.gather()
    out = torch.empty(B, H, T, v_BNTd.shape[-1], device=q_BHTd.device)
    keys = torch.arange(T, device=q_BHTd.device)
    for start in range(0, T, block):
        end = min(T, start + block)
        q = q_BHTd[:, :, start:end].float().reshape(B, N, -1, q_BHTd.shape[-1]) * scale
        at = keys[start:end, None]
        stored_end = sinks + ((at - sinks - window).clamp(min=0) // group) * group
        paged = (keys >= sinks) & (keys < stored_end)
        own = keys == at
        grow = lambda mask: mask.repeat(H // N, 1)  # noqa: E731
        span = lambda x, end=end: x[:, :, :end].float()  # noqa: E731
        hide = grow(keys > at) if not sliding else grow((keys > at) | (keys <= at - sliding))
        logits = torch.where(
            grow(paged)[:, :end], q @ span(paged_k).mT, torch.where(grow(own)[:, :end], q @ span(k_BNTd).mT, q @ span(recent_k).mT)
        )
        p = logits.masked_fill_(hide[:, :end], -torch.inf).softmax(-1)
        pick = lambda mask, p=p, end=end, grow=grow: p.masked_fill(~grow(mask)[:, :end], 0.0)  # noqa: E731
        o = pick(paged) @ span(paged_v) + pick(own) @ span(v_BNTd) + pick(~paged & ~own) @ span(recent_v)
        out[:, :, start:end] = o.reshape(B, H, end - start, -1)
    return out
