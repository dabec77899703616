"""Whole records: tokens into pages and pages into tokens, built on the element law of naive.py."""

from __future__ import annotations

import torch

from ...kv.format import PAGE, PageLayout
from . import naive as law

# channels int32 [N, O] (-1: unused), then k_mean k_gain k_weight [N, dk], v_gain v_weight [N, dv], FP32; weights as `shares` makes them
Book = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def encode_naive(
    pool_PNb: torch.Tensor, k_TNd: torch.Tensor, v_TNd: torch.Tensor, runs_R4: torch.Tensor, book: Book, layout: PageLayout
) -> torch.Tensor:
    """Append tokens to pages, in place.

    pool_PNb  uint8 [P, N, page_bytes]
    k_TNd     [T, N, dk + rope], v_TNd [T, N, dv]; any float dtype
    runs_R4   int [R, 4]: page, first slot, first row of k and v, tokens; no page twice, the first slot is the page's fill, and for formats
              whose V scale covers several tokens slot and count are multiples of that group
    Returns int64 [2]: elements saturated, NaNs zeroed.
    """
    fmt = layout.format
    runs = runs_R4.long()
    page, slot, row, count = runs.unbind(-1)
    run_t = torch.repeat_interleave(torch.arange(len(runs), device=runs.device), count)
    offset_t = torch.arange(len(run_t), device=runs.device) - (count.cumsum(0) - count)[run_t]
    slot_t, row_t = slot[run_t] + offset_t, row[run_t] + offset_t
    k, k_sat, k_nan = law.clean(k_TNd[row_t])
    v, v_sat, v_nan = law.clean(v_TNd[row_t])
    k, rope = k[..., : layout.k_dim], k[..., layout.k_dim :]
    channels, k_mean, k_gain, k_weight, v_gain, v_weight = book

    parts = law.unpack(pool_PNb[page], layout)
    if fmt.code == "fp16":
        k_code, v_code, k_scale, v_scale = k.half(), v.half(), None, None
    elif fmt.code == "fp8":
        k_code, k_scale = law.fp8_rows(k)
        v_code, v_scale = law.fp8_rows(v) if layout.v_dim else (v.to(torch.uint8), None)
    else:
        k = k - k_mean
        at = channels.long().clamp(min=0).expand(len(k), -1, -1)
        used = (channels >= 0).expand_as(at)
        outlier = k.gather(-1, at).masked_fill(~used, 0.0)
        slots = torch.zeros(k.shape, dtype=torch.bool, device=k.device).scatter(-1, at, used)
        k_code, k_scale = law.fp4_blocks(k * k_gain.masked_fill(slots, 0.0), k_weight, fmt.block, fmt)
        v = v * v_gain
        if not layout.v_dim:
            v_code, v_scale = v.to(torch.uint8), None
        elif fmt.v_axis == "token":
            v_code, v_scale = law.fp4_blocks(v, v_weight, fmt.v_group, fmt)
        else:
            grouped = v.unflatten(0, (-1, fmt.v_group)).permute(0, 2, 3, 1)
            v_code, v_scale = law.fp4_blocks(grouped, v_weight[..., None], fmt.v_group, fmt)
            v_code = v_code.permute(0, 3, 1, 2).flatten(0, 1)
        parts.k_outliers[run_t, :, slot_t] = outlier.clamp(-law.FP16_MAX, law.FP16_MAX).half()
    parts.k_codes[run_t, :, slot_t] = k_code
    parts.v_codes[run_t, :, slot_t] = v_code
    parts.k_rope[run_t, :, slot_t] = rope.half()
    for side, scale in ((0, k_scale), (1, v_scale)):
        if scale is not None:
            _place_scales(parts, side, scale, run_t, slot_t, layout)
    parts.fill = torch.maximum(parts.fill, (slot + count).to(torch.int32)[:, None])
    pool_PNb[page] = law.pack(parts, layout)
    return torch.stack([k_sat + v_sat, k_nan + v_nan])


def _place_scales(parts: law.Parts, side: int, scale: torch.Tensor, run_t: torch.Tensor, slot_t: torch.Tensor, layout: PageLayout) -> None:
    """Grow the page's factor where a new scale needs it, shift the old bytes, write the new ones."""
    fmt = layout.format
    stored = parts.v_scales if side else parts.k_scales
    by_channel = side == 1 and fmt.v_axis == "channel"
    if by_channel:  # scale [groups, N, dv, 1], one group per v_group tokens
        run_t, slot_t, scale = run_t[:: fmt.v_group], slot_t[:: fmt.v_group] // fmt.v_group, scale[..., 0]
    if fmt.scale == "e4m3":
        heads = scale.shape[1]
        need = law.exponent(scale).amax(-1) - law.TOP
        old = parts.factor[..., side]
        new = old.scatter_reduce(0, run_t[:, None].expand(-1, heads), need.to(old.dtype), "amax", include_self=True)
        shifted = law.shift_scale_bytes(stored, (new - old)[..., None, None])
        per_slot = fmt.v_group if by_channel else 1
        n = stored.shape[-1 if by_channel else -2]
        written = torch.arange(n, device=stored.device) < (parts.fill // per_slot)[..., None]
        stored = torch.where(written[..., None, :] if by_channel else written[..., None], shifted, stored)
        parts.factor = parts.factor.clone()
        parts.factor[..., side] = new
        scale = law.scale_bytes(scale, new[run_t][..., None])
    elif fmt.code == "fp4":
        scale = (law.exponent(scale) + 127).to(torch.uint8)
    stored = stored.clone()
    if by_channel:
        stored[run_t, :, :, slot_t] = scale
    else:
        stored[run_t, :, slot_t] = scale
    if side:
        parts.v_scales = stored
    else:
        parts.k_scales = stored


def decode_naive(records_XNb: torch.Tensor, book: Book, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Records uint8 [X, N, page_bytes] -> K [X, N, PAGE, dk + rope] and V [X, N, PAGE, dv or dk], FP32, as attention must see them.

    Slots beyond a page's fill come out as whatever lies there, NaN included: the caller cuts them off.
    """
    fmt = layout.format
    channels, k_mean, k_gain, _, v_gain, _ = book
    parts = law.unpack(records_XNb, layout)
    if fmt.code == "fp16":
        k, v = parts.k_codes.float(), parts.v_codes.float()
    elif fmt.code == "fp8":
        k = parts.k_codes.contiguous().view(torch.float8_e4m3fn).float() * law.scale_values(parts.k_scales, fmt)
        v = parts.v_codes.contiguous().view(torch.float8_e4m3fn).float()
        v = v * law.scale_values(parts.v_scales, fmt) if layout.v_dim else v
    else:
        factor = law.pow2(parts.factor) if fmt.scale == "e4m3" else torch.ones_like(parts.factor, dtype=torch.float32)
        k = law.fp4_values(parts.k_codes) * _spread(parts.k_scales, factor[..., 0], layout.k_dim, fmt.block, layout)
        k = k / k_gain[:, None]
        if layout.outliers:
            at = channels.long().clamp(min=0)[:, None].expand(*k.shape[:-1], -1)
            out = torch.where((channels >= 0)[:, None], parts.k_outliers.float(), 0.0)
            k = k.scatter_add(-1, at, out)
        k = k + k_mean[:, None]
        v = parts.v_codes
        if layout.v_dim and fmt.v_axis == "token":
            v = law.fp4_values(parts.v_codes) * _spread(parts.v_scales, factor[..., 1], layout.v_dim, fmt.v_group, layout)
            v = v / v_gain[:, None]
        elif layout.v_dim:
            s = law.scale_values(parts.v_scales, fmt) * factor[..., 1, None, None]
            v = law.fp4_values(parts.v_codes) * s.repeat_interleave(fmt.v_group, -1).mT
            v = v / v_gain[:, None]
    v = v if layout.v_dim else k
    return torch.cat([k, parts.k_rope.float()], -1) if layout.rope else k, v


def _spread(scales: torch.Tensor, factor: torch.Tensor, dim: int, block: int, layout: PageLayout) -> torch.Tensor:
    """Scale bytes [X, N, PAGE, blocks] -> FP32 [X, N, PAGE, dim]."""
    s = law.scale_values(scales.contiguous(), layout.format) * factor[..., None, None]
    return s.repeat_interleave(block, -1)[..., :dim]


def shares(weight_Nd: torch.Tensor, block: int) -> torch.Tensor:
    """Positive weights as FP32 integers, at least 1 and at most `law.SHARES` together in each `block` channels of a head."""
    n = weight_Nd.shape[-1]
    w = torch.nn.functional.pad(weight_Nd.double(), (0, -n % block)).unflatten(-1, (-1, block))
    out = 1 + torch.floor(w / w.sum(-1, keepdim=True) * (law.SHARES - block))
    return out.flatten(-2)[..., :n].float()


def book_shares(k_weight: torch.Tensor, v_weight: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Both weights of a book in the blocks of its layout. Channels that share no scale have equal weights."""
    fmt = layout.format
    if not fmt.search:
        return k_weight, v_weight
    by_token = fmt.v_axis == "token"
    return shares(k_weight, fmt.block), shares(v_weight if by_token else torch.ones_like(v_weight), fmt.v_group)


def neutral_book(layout: PageLayout, heads: int, device: torch.device | str = "cpu") -> Book:
    """No outliers chosen, means 0, gains and weights 1."""
    zeros = lambda d: torch.zeros(heads, d, device=device)  # noqa: E731
    ones = lambda d: torch.ones(heads, d, device=device)  # noqa: E731
    channels = torch.full((heads, layout.outliers), -1, dtype=torch.int32, device=device)
    k, v = layout.k_dim, layout.v_dim
    k_weight, v_weight = book_shares(ones(k), ones(v), layout)
    return channels, zeros(k), ones(k), k_weight, ones(v), v_weight


def tokens_in(records: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Fill of each record, int32."""
    at = layout.offsets["trailer"][0] + 8
    return records[..., at : at + 4].contiguous().view(torch.int32)[..., 0]


def runs_for(pages: list[int], start: int, count: int, row: int) -> list[tuple[int, int, int, int]]:
    """The runs that append `count` tokens at position `start` of a sequence whose pages are `pages`, reading rows from `row` on."""
    runs, end = [], start + count
    while start < end:
        slot = start % PAGE
        n = min(PAGE - slot, end - start)
        runs.append((pages[start // PAGE], slot, row, n))
        start, row = start + n, row + n
    return runs
