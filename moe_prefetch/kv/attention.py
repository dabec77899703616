"""Attention over a `LayerStore`: steps of decode, chunks of prefill, and both in one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.kv_attend.naive import merge, softmax_attention
from ..kernels.kv_attend.op import kv_attend
from ..kernels.kv_encode.records import Book
from .basis import Basis
from .format import PageLayout
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

    Rows may bring fewer than T queries: `q_len`. Returns FP32 out [B, H, T, dv] and log-sum-exp [B, H, T]. Rows with codebooks of their own
    take a call of the kernel for each codebook. Nothing is read from the device.
    """
    q_BHTd = q_BHTd if store.basis is None else store.basis.queries(q_BHTd)
    groups = store.by_book()
    if len(groups) <= 1:
        groups = [(groups[0][0] if groups else store.neutral, list(range(store.batch)))]
    else:
        paged = {b for _, rows in groups for b in rows}
        groups[0][1].extend(b for b in range(store.batch) if b not in paged)
    counts = list(q_len) if q_len is not None else [q_BHTd.shape[2]] * store.batch
    results = []
    for book, rows in groups:
        whole = len(groups) == 1
        at = slice(None) if whole else slice(rows[0], rows[0] + 1) if len(rows) == 1 else store.ints(rows, store.device).long()
        of = lambda numbers: store.ints(list(numbers), q_BHTd.device)  # noqa: E731
        results.append(
            kv_attend(
                q_BHTd[at],
                of(counts[b] for b in rows),
                store.pool,
                store.table()[at],
                of(store.pages.rows[b].stored for b in rows),
                of(store.row_length(b) for b in rows),
                store.sink_k[at],
                store.sink_v[at],
                store.recent.buffer_k[at],
                store.recent.buffer_v[at],
                of(store.recent.end - store.live(b) for b in rows),
                book,
                store.layout,
                scale=scale,
                sliding=sliding,
                softcap=softcap,
                sink_H=sink_H,
            )
        )
    if len(results) == 1:
        return results[0]
    calls = [b for _, rows in groups for b in rows]
    order = store.ints([calls.index(b) for b in range(store.batch)], q_BHTd.device).long()
    return torch.cat([out for out, _ in results])[order], torch.cat([lse for _, lse in results])[order]


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
    book: Book | Callable[[torch.Tensor, torch.Tensor], Book],
    *,
    sinks: int,
    window: int,
    settle: int = 1,
    scale: float,
    sliding: int = 0,
    block: int = 512,
    basis: Basis | None = None,
) -> torch.Tensor:
    """What T steps of decode give, in one pass: each query reads its own key unrounded, sinks and window in FP16, all else from pages.
    Tokens leave the window `settle` at a time. A `book` that is a function sees all tokens beyond the sinks (`LayerStore`).

    The keys go through `kv_encode` and back; since the bytes of a page depend on its tokens alone, these are the bytes stepwise decode
    would have read (tests compare the two). Of MLA k is latent and rotary part, v [B, 1, T, 0], q taken to the latents. Returns FP32 out
    [B, H, T, dv] (MLA: [B, H, T, latent]). Teacher-forced quality measurements use it.
    """
    B, H, T, _ = q_BHTd.shape
    N = k_BNTd.shape[1]
    group = math.lcm(layout.format.append_group, settle)
    store = LayerStore(layout, N, book, batch=B, sinks=sinks, window=0, device=q_BHTd.device, basis=basis)
    store.append(k_BNTd, v_BNTd)
    if not layout.v_dim:
        v_BNTd = k_BNTd[..., : layout.k_dim]
    recent_k = k_BNTd.half().float() if basis is None else basis.restore(basis.keys(k_BNTd).half().float())
    recent_v, own_k, own_v = v_BNTd.half().float(), k_BNTd.float(), v_BNTd.float()
    store.settle()
    paged_k, paged_v = store.gather()
    out = torch.empty(B, H, T, v_BNTd.shape[-1], device=q_BHTd.device)
    keys = torch.arange(T, device=q_BHTd.device)
    for start in range(0, T, block):
        end = min(T, start + block)
        n_sinks = min(sinks, end)
        q = q_BHTd[:, :, start:end].float().reshape(B, N, -1, q_BHTd.shape[-1]) * scale
        split = lambda x, t=end - start: x.unflatten(2, (H // N, t))  # noqa: E731
        rows = lambda x: x.flatten(2, 3)  # noqa: E731
        at = keys[start:end, None]
        in_pages = sinks + ((at - sinks - window).clamp(min=0) // group) * group  # keys from the sinks to here
        # Keys from here on may lie in the window of a query of this block.
        near = min(int(in_pages[0]), end)
        recent, own_at = keys[near:end] >= in_pages, at.expand(B, N, H // N, -1, -1)
        logits = split(q @ paged_k[:, :, :end].mT)
        logits[..., near:] = torch.where(recent, split(q @ recent_k[:, :, near:end].mT), logits[..., near:])
        logits[..., :n_sinks] = split(q @ recent_k[:, :, :n_sinks].mT)
        logits.scatter_(-1, own_at, (split(q) * own_k[:, :, None, start:end]).sum(-1, keepdim=True))
        hide = keys[:end] > at if not sliding else (keys[:end] > at) | (keys[:end] <= at - sliding)
        p = logits.masked_fill_(hide, -torch.inf).softmax(-1)
        o = p.gather(-1, own_at) * own_v[:, :, None, start:end]
        p.scatter_(-1, own_at, 0.0)
        o += split(rows(p[..., :n_sinks]) @ recent_v[:, :, :n_sinks])
        p[..., :n_sinks] = 0.0
        o += split(rows(p[..., near:].masked_fill(~recent, 0.0)) @ recent_v[:, :, near:end])
        p[..., near:].masked_fill_(recent, 0.0)
        o += split(rows(p) @ paged_v[:, :, :end])
        out[:, :, start:end] = o.reshape(B, H, end - start, -1)
    return out
