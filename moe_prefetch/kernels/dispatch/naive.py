"""The law of expert parallelism: which token goes to which rank in which slot, what is computed there, in which order results are added.

Each rank that holds experts of a token gets the token's row once, in a message of static capacity; tokens that do not fit go in the next
round. A rank returns the weighted sum of its experts, ascending, and sums of ranks are added in ascending order in FP32. Unreduced, it
returns each expert's row, and the token's own rank adds them in ascending order of experts, as a single process does.

Messages travel by plain collectives here (`all_to_all`); `distributed.channel` has the same exchange one-sided.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..expert_mlp.naive import tokens_of
from .message import COUNT, GROUP, LAYER, MORE, Message

E4M3_MAX = 448.0

# Experts of one rank: (rows [N, D], ids int64 [N, K] into its own experts, those outside masked, weights FP32 [N, K]) -> [N, D].
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Route:
    """Where the tokens of one rank go.

    dest_TK   int64, the rank that serves each chosen expert; -1 where the id is masked
    slot_RT   int64, the place of each token among those that go to a rank, -1 where it does not go there; its round is slot // capacity
    count_R   int64, tokens that go to each rank
    """

    dest_TK: torch.Tensor
    slot_RT: torch.Tensor
    count_R: torch.Tensor


def route(ids_TK: torch.Tensor, serve_E: torch.Tensor, ranks: int) -> Route:
    """ids_TK [T, K] int64, masked outside 0..E-1; serve_E [E] int64, the rank that serves each expert for this one."""
    known_TK = (ids_TK >= 0) & (ids_TK < len(serve_E))
    dest_TK = torch.where(known_TK, serve_E[torch.where(known_TK, ids_TK, 0)], -1)
    goes_RT = (dest_TK[None] == torch.arange(ranks, device=ids_TK.device)[:, None, None]).any(-1)
    return Route(dest_TK, torch.where(goes_RT, goes_RT.cumsum(1) - 1, -1), goes_RT.sum(1))


def tokens_in(found: Route, dest: int, round_: int, capacity: int) -> torch.Tensor:
    """Tokens that go to `dest` in a round, by slot, ascending: int64 [at most capacity]."""
    slot_T = found.slot_RT[dest]
    return ((slot_T >= round_ * capacity) & (slot_T < (round_ + 1) * capacity)).nonzero().squeeze(-1)


# messages -------------------------------------------------------------------------------------------------------------------
def to_fp8(rows_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [N, D] and its FP32 scales [N, ceil(D / 128)]: the largest magnitude of 128 numbers becomes 448 (OCP 8-bit floating point)."""
    N, D = rows_ND.shape
    groups = -(-D // GROUP)
    x = torch.zeros(N, groups * GROUP, dtype=torch.float32, device=rows_ND.device)
    x[:, :D] = rows_ND
    x = x.view(N, groups, GROUP)
    scale = x.abs().amax(-1) / E4M3_MAX
    # A group of zeros has any scale; one so small that its scale is none has the smallest.
    scale = torch.where(scale == 0, torch.finfo(torch.float32).tiny, scale)
    return (x / scale[..., None]).to(torch.float8_e4m3fn).view(N, -1)[:, :D], scale


def from_fp8(rows_ND: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (rows_ND.float() * scales.repeat_interleave(GROUP, 1)[:, : rows_ND.shape[1]]).to(dtype)


def write(message: Message, buffer: torch.Tensor, token_n: torch.Tensor, chosen_TK: torch.Tensor, hidden_TD: torch.Tensor,
          weights_TK: torch.Tensor, *, layer: int, more: bool) -> None:
    """Fill a message with these tokens. chosen_TK [T, K]: ids of the receiver's experts, -1 for the others."""
    parts, n = message.out_views(buffer), len(token_n)
    if message.fp8:
        parts["rows"].view(torch.uint8)[:n], parts["scales"][:n] = (t.view(torch.uint8) if t.element_size() == 1 else t
                                                                     for t in to_fp8(hidden_TD[token_n]))
    else:
        parts["rows"][:n] = hidden_TD[token_n]
    parts["ids"][:n] = chosen_TK[token_n].to(torch.int32)
    parts["weights"][:n] = weights_TK[token_n].float()
    header = parts["header"]
    header[COUNT], header[MORE], header[LAYER] = n, int(more), layer


def read(message: Message, buffers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All messages of a round: rows [R capacity, D], ids int64 [R capacity, K] (-1 in slots without a row), weights [R capacity, K]."""
    rows, ids, weights = [], [], []
    for buffer in buffers:
        parts = message.out_views(buffer)
        filled = torch.arange(message.capacity, device=buffer.device) < parts["header"][COUNT]
        rows.append(from_fp8(parts["rows"], parts["scales"], message.dtype) if message.fp8 else parts["rows"])
        ids.append(torch.where(filled[:, None], parts["ids"].long(), -1))
        weights.append(parts["weights"])
    return torch.cat(rows), torch.cat(ids), torch.cat(weights)


def serve(message: Message, experts: Experts, rows_ND: torch.Tensor, ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
    """What goes back for each row: [N, D], or unreduced [N, K, D], zero where an id is masked."""
    if not message.unreduced:
        return experts(rows_ND, ids_NK, weights_NK)
    return expert_rows(experts, rows_ND, ids_NK)


def expert_rows(experts: Experts, rows_ND: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """Each chosen expert's result for each row, without its weight: [N, K, D]. Every pair is a row of its own, alone with one expert."""
    (N, K), D = ids_NK.shape, rows_ND.shape[1]
    pairs_PD = rows_ND[:, None].expand(N, K, D).reshape(N * K, D)
    ones = torch.ones(N * K, 1, dtype=torch.float32, device=rows_ND.device)
    return experts(pairs_PD, ids_NK.reshape(-1, 1), ones).view(N, K, D)


def combine_sums(shape: tuple[int, int], sums: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor], dtype: torch.dtype,
                 device: torch.device) -> torch.Tensor:
    """[T, D] from every rank's sums [n, D] and the tokens [n] they belong to: added in order of ranks, in FP32."""
    out_TD = torch.zeros(shape, dtype=torch.float32, device=device)
    for rows_nD, token_n in zip(sums, tokens, strict=True):
        out_TD.index_add_(0, token_n, rows_nD.float())
    return out_TD.to(dtype)


def combine_rows(rows_TKD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, D] from each expert's rows, as `expert_mlp.naive.moe_records` adds: ascending experts, in FP32, one named twice counting once
    with both weights."""
    out_TD = torch.zeros(rows_TKD.shape[0], rows_TKD.shape[2], dtype=torch.float32, device=rows_TKD.device)
    for e in ids_TK.unique().tolist():
        if 0 <= e < experts:
            token_n, weight_n = tokens_of(e, ids_TK, weights_TK.float())
            first_n = (ids_TK[token_n] == e).int().argmax(-1)
            out_TD[token_n] += weight_n[:, None] * rows_TKD[token_n, first_n].float()
    return out_TD.to(dtype)


# by collectives -------------------------------------------------------------------------------------------------------------
def all_to_all(out_RB: torch.Tensor, in_RB: torch.Tensor, process_group: Any, far: Sequence[bool] = ()) -> Any:
    """Message r of out_RB to rank r, and its into in_RB; `far`: only with these ranks, whose messages alone are in the buffers.

    Sizes are static, so nothing is told beforehand. Returns torch's handle to wait for; None where there is no group.
    """
    if process_group is None:
        in_RB.copy_(out_RB)
        return None
    splits = [out_RB.shape[1] if f else 0 for f in far] if far else None
    return dist.all_to_all_single(in_RB.view(-1), out_RB.view(-1), splits, splits, group=process_group, async_op=True)
