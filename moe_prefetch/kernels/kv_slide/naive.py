"""The law of a step of a cache of fixed size (`kv/static.py`): new tokens into the FP16 window, as many old ones out of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kv.format import PAGE
from ..kv_encode.naive import clean


class Slide(NamedTuple):
    """Everything of a `StaticStore` that a step writes or asks, at addresses that stay. All contiguous.

    ring_k      FP16 [B, N, R, dk]: position p at slot p % R
    ring_v      FP16 [B, N, R, dv]
    sink_k      FP16 [B N S + 1, dk]: the first S positions of each row and head; the last row takes what is none
    sink_v      FP16 [B N S + 1, dv]
    pool_PNb    uint8 [P, N, bytes], records
    blank_1Nb   uint8 [1, N, bytes], an empty page
    table_BP    int32 [B, pages]
    spare_B     int64 [B], a page of each row that nobody reads
    length_B    int64 [B], tokens
    stored_B    int64 [B], of them in pages
    now_3B      int32 [3, B]: stored, length, and the slot of the oldest token in the ring, for attention
    """

    ring_k: torch.Tensor
    ring_v: torch.Tensor
    sink_k: torch.Tensor
    sink_v: torch.Tensor
    pool_PNb: torch.Tensor
    blank_1Nb: torch.Tensor
    table_BP: torch.Tensor
    spare_B: torch.Tensor
    length_B: torch.Tensor
    stored_B: torch.Tensor
    now_3B: torch.Tensor


def slide_naive(s: Slide, out_k: torch.Tensor, out_v: torch.Tensor, runs: torch.Tensor, k_BNTd: torch.Tensor, v_BNTd: torch.Tensor,
                window: int) -> None:  # fmt: skip
    """Take T tokens a row. Up to T others, those before the last `window` of the tokens that were there, are handed out to be encoded.

    out_k FP16 [T, B, N, dk], out_v [T, B, N, dv] and runs int32 [T, B, 4] (page, slot, row of out[t], 1) are written: for `kv_encode`,
    one t after the other. A page that they open is made blank. What is not due yet goes to slot 0 of the row's spare page, so that each
    step does the same.
    """
    B, N, R = s.ring_k.shape[:3]
    T, rows = k_BNTd.shape[2], torch.arange(B, device=k_BNTd.device)
    sinks = (len(s.sink_k) - 1) // (B * N)
    for t in range(T):
        at = s.stored_B + sinks
        due = at < s.length_B - window
        slot = torch.where(due, s.stored_B % PAGE, 0)
        page = torch.where(due, s.table_BP[rows, (s.stored_B // PAGE).clamp(max=s.table_BP.shape[1] - 1)].long(), s.spare_B)
        opened = (due & (slot == 0))[:, None, None]
        s.pool_PNb.index_copy_(0, page, torch.where(opened, s.blank_1Nb, s.pool_PNb[page]))
        out_k[t], out_v[t] = (ring[rows, :, at % R] for ring in (s.ring_k, s.ring_v))
        runs[t] = torch.stack([page, slot, rows, torch.ones_like(page)], 1)
        s.stored_B.add_(due)
    at_BT = s.length_B[:, None] + torch.arange(T, device=rows.device)
    row_BT = rows[:, None].expand_as(at_BT)
    head_N = torch.arange(N, device=rows.device)
    sink_BTN = ((rows[:, None] * N + head_N) * sinks)[:, None] + at_BT[:, :, None]
    sink_BTN = torch.where(at_BT[:, :, None] < sinks, sink_BTN, B * N * sinks)
    for ring, sink, x in ((s.ring_k, s.sink_k, k_BNTd), (s.ring_v, s.sink_v, v_BNTd)):
        x = clean(x)[0].half().transpose(1, 2)
        ring[row_BT, :, at_BT % R] = x
        sink[sink_BTN] = x
    s.length_B.add_(T)
    tell_naive(s)


def tell_naive(s: Slide) -> None:
    """`now_3B` of what lengths are."""
    sinks = (len(s.sink_k) - 1) // (s.ring_k.shape[0] * s.ring_k.shape[1])
    s.now_3B.copy_(torch.stack([s.stored_B, s.length_B, (s.stored_B + sinks) % s.ring_k.shape[2]]))
