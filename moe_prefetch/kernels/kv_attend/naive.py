"""The law of attention over pages, in FP32: decode the pages, put sinks and window beside them, softmax over positions."""

from __future__ import annotations

import torch

from ...kv.format import PAGE, PageLayout
from ..kv_encode.records import Book, decode_naive


def softmax_attention(
    q_BHTd: torch.Tensor,
    k_BNSd: torch.Tensor,
    v_BNSd: torch.Tensor,
    q_pos_BT: torch.Tensor,
    k_pos_BS: torch.Tensor,
    *,
    scale: float,
    sliding: int = 0,
    softcap: float = 0.0,
    sink_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention between tokens with positions; a negative position says that nothing is there.

    q [B, H, T, dk], k [B, N, S, dk], v [B, N, S, dv], H a multiple of N. `sliding` > 0 keeps the last `sliding` positions (the query's own
    counts); `softcap` > 0 bends scaled logits to c tanh(s / c); `sink_H` is a learned logit per head that takes part in the sum only.
    Returns FP32 out [B, H, T, dv] and log-sum-exp [B, H, T]; a query that sees nothing gets 0 and -inf. What lies at absent positions is
    never read.
    """
    B, H, T, _ = q_BHTd.shape
    N = k_BNSd.shape[1]
    there = (k_pos_BS >= 0)[:, None, :, None]
    k = torch.where(there, k_BNSd.float(), 0.0)
    v = torch.where(there, v_BNSd.float(), 0.0)
    q = q_BHTd.float().reshape(B, N, H // N * T, -1)
    logits = ((q @ k.mT) * scale).reshape(B, H, T, -1)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    qp, kp = q_pos_BT[:, None, :, None], k_pos_BS[:, None, None, :]
    seen = (kp >= 0) & (kp <= qp) & (qp >= 0)
    if sliding:
        seen &= kp > qp - sliding
    logits = logits.masked_fill(~seen, -torch.inf)
    if sink_H is not None:
        logits = torch.cat([logits, sink_H.float()[None, :, None, None].expand(B, H, T, 1).where((qp >= 0), -torch.inf)], -1)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(logits - lse[..., None]).nan_to_num(0.0)
    if sink_H is not None:
        p = p[..., :-1]
    out = (p.reshape(B, N, H // N * T, -1) @ v).reshape(B, H, T, -1)
    return out, lse


def merge(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys from the attention over each."""
    lse = torch.logaddexp(lse_a, lse_b)
    part = lambda o, s: o * torch.exp(s - lse).nan_to_num(0.0)[..., None]  # noqa: E731
    return part(out_a, lse_a) + part(out_b, lse_b), lse


def attend_naive(
    q_BHTd: torch.Tensor,
    q_len_B: torch.Tensor,
    pool_PNb: torch.Tensor,
    table_BP: torch.Tensor,
    stored_B: torch.Tensor,
    length_B: torch.Tensor,
    sink_k: torch.Tensor,
    sink_v: torch.Tensor,
    recent_k: torch.Tensor,
    recent_v: torch.Tensor,
    recent_first_B: torch.Tensor,
    book: Book,
    layout: PageLayout,
    *,
    scale: float,
    sliding: int = 0,
    softcap: float = 0.0,
    sink_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of each row's last tokens over everything the row holds.

    q         [B, H, T, dk + rope]; row b uses its first q_len[b] queries, at positions length[b] - q_len[b] + i; the others give 0 and -inf
    table     int [B, P] page ids of pool uint8 [P, N, page_bytes]; stored[b] tokens of row b are in them,
              and what stands behind their pages is not read
    length    int [B] tokens of each row, those of the queries included
    sink_k/v  FP16 [B, N, sinks, d], positions 0 .. sinks - 1
    recent_k/v FP16 [B, N, R, d]: position sinks + stored + j is at (recent_first + j) % R
    Returns FP32 out [B, H, T, dv] (MLA: the latent) and log-sum-exp [B, H, T], see `softmax_attention`.
    """
    B, _, T, _ = q_BHTd.shape
    dev = q_BHTd.device
    sinks, R = sink_k.shape[2], recent_k.shape[2]
    width = table_BP.shape[1]
    held_BP = torch.arange(width, device=dev) * PAGE < stored_B[:, None]
    k_page, v_page = decode_naive(pool_PNb[torch.where(held_BP, table_BP, 0).long().flatten()], book, layout)
    lay = lambda x: x.unflatten(0, (B, width)).permute(0, 2, 1, 3, 4).flatten(2, 3)  # noqa: E731
    order = (recent_first_B.long()[:, None] + torch.arange(R, device=dev)) % max(R, 1)
    roll = lambda x: x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))  # noqa: E731
    latent = layout.v_dim == 0
    k = torch.cat([sink_k.float(), lay(k_page), roll(recent_k).float()], 2)
    v = torch.cat(
        [
            (sink_k if latent else sink_v).float()[..., : layout.v_dim or layout.k_dim],
            lay(v_page)[..., : layout.v_dim or layout.k_dim],
            roll(recent_k if latent else recent_v).float()[..., : layout.v_dim or layout.k_dim],
        ],
        2,
    )
    stored, length = stored_B.long()[:, None], length_B.long()[:, None]
    at = lambda n: torch.arange(n, device=dev)[None].expand(B, -1)  # noqa: E731
    none = torch.tensor(-1, device=dev)
    pos = torch.cat(
        [
            torch.where(at(sinks) < length, at(sinks), none),
            torch.where(at(width * PAGE) < stored, at(width * PAGE) + sinks, none),
            torch.where(at(R) + sinks + stored < length, at(R) + sinks + stored, none),
        ],
        1,
    )
    q_pos = torch.where(at(T) < q_len_B.long()[:, None], length - q_len_B.long()[:, None] + at(T), none)
    return softmax_attention(q_BHTd, k, v, q_pos, pos, scale=scale, sliding=sliding, softcap=softcap, sink_H=sink_H)
