"""Whole records: tokens into pages and pages into tokens, built on the element law of naive.py."""

from __future__ import annotations

import torch

from ...errors import ShapeError
from ...kv.format import GROUP, PAGE, KVFormat, PageLayout
from . import naive as law

# channels int32 [N, O] as `arranged` (-1: unused), then k_mean k_gain k_weight [N, dk], v_gain v_weight [N, dv], FP32; weights as
# `shares` makes them
Book = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def encode_naive(
    pool_PNb: torch.Tensor, k_TNd: torch.Tensor, v_TNd: torch.Tensor, runs_R4: torch.Tensor, book: Book, layout: PageLayout
) -> torch.Tensor:
    """Append tokens to pages, in place.

    pool_PNb  uint8 [P, N, page_bytes]
    k_TNd     [T, N, dk + rope], v_TNd [T, N, dv]; any float dtype
    runs_R4   int [R, 4]: page, first slot, first row of k and v, tokens; no page twice, the first slot is the page's fill, and for formats
              whose V scale covers several tokens slot and count are multiples of that group
    In a pair each side is coded as in its own format.
    Returns int64 [2]: elements saturated, NaNs zeroed.
    """
    runs = runs_R4.long()
    page, slot, row, count = runs.unbind(-1)
    run_t = torch.repeat_interleave(torch.arange(len(runs), device=runs.device), count)
    offset_t = torch.arange(len(run_t), device=runs.device) - (count.cumsum(0) - count)[run_t]
    slot_t, row_t = slot[run_t] + offset_t, row[run_t] + offset_t
    k, k_sat, k_nan = law.clean(k_TNd[row_t])
    v, v_sat, v_nan = law.clean(v_TNd[row_t])
    k, rope = k[..., : layout.k_dim], k[..., layout.k_dim :]

    parts = law.unpack(pool_PNb[page], layout)
    k_code, k_scale, outlier = _code_k(k, book, layout)
    parts.k_codes[run_t, :, slot_t] = k_code
    if outlier is not None:
        parts.k_outliers[run_t, :, slot_t] = outlier
    v_scale = None
    if layout.v_dim:
        v_code, v_scale = _code_v(v, book, layout)
        parts.v_codes[run_t, :, slot_t] = v_code
    parts.k_rope[run_t, :, slot_t] = rope.half()
    for side, scale in ((0, k_scale), (1, v_scale)):
        if scale is not None:
            _place_scales(parts, side, scale, run_t, slot_t, layout)
    parts.fill = torch.maximum(parts.fill, (slot + count).to(torch.int32)[:, None])
    pool_PNb[page] = law.pack(parts, layout)
    return torch.stack([k_sat + v_sat, k_nan + v_nan])


def _code_k(
    k_TNd: torch.Tensor, book: Book, layout: PageLayout
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Codes of K by place, FP32 scales [T, N, blocks] (fp8: exponent bytes; fp16: none), and where there is a codebook FP16 outliers
    [T, N, O]."""
    fmt, (channels, k_mean, k_gain, k_weight, _, _) = layout.format, book
    if fmt.code == "fp16":
        return k_TNd.half(), None, None
    if fmt.code == "fp8":
        return *law.fp8_rows(k_TNd), None
    k = k_TNd - k_mean
    at = channels.long().clamp(min=0).expand(len(k), -1, -1)
    used = (channels >= 0).expand_as(at)
    outlier = k.gather(-1, at).masked_fill(~used, 0.0)
    # Added up: unused entries point at channel 0, too.
    slots = torch.zeros(k.shape, dtype=torch.int32, device=k.device).scatter_add(-1, at, used.int())
    coded = swapped(k * k_gain.masked_fill(slots > 0, 0.0), channels, layout)
    code, scale = law.fp4_blocks(coded, swapped(k_weight, channels, layout), fmt.block, fmt)
    return code, scale, outlier.clamp(-law.FP16_MAX, law.FP16_MAX).half()


def _code_v(v_TNd: torch.Tensor, book: Book, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scales of V; with scales per channel these are [groups, N, dv, 1]."""
    fmt, (*_, v_gain, v_weight) = layout.format.v, book
    if fmt.code == "fp16":
        return v_TNd.half(), None
    if fmt.code == "fp8":
        return law.fp8_rows(v_TNd)
    v = v_TNd * v_gain
    if fmt.v_axis == "token":
        return law.fp4_blocks(v, v_weight, fmt.v_group, fmt)
    grouped = v.unflatten(0, (-1, fmt.v_group)).permute(0, 2, 3, 1)
    code, scale = law.fp4_blocks(grouped, v_weight[..., None], fmt.v_group, fmt)
    return code.permute(0, 3, 1, 2).flatten(0, 1), scale


def _place_scales(parts: law.Parts, side: int, scale: torch.Tensor, run_t: torch.Tensor, slot_t: torch.Tensor, layout: PageLayout) -> None:
    """Grow the page's factor where a new scale needs it, shift the old bytes, write the new ones."""
    fmt = layout.format.v if side else layout.format
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
    parts = law.unpack(records_XNb, layout)
    k = _values_of_k(parts, book, layout)
    v = _values_of_v(parts, book, layout) if layout.v_dim else k
    return torch.cat([k, parts.k_rope.float()], -1) if layout.rope else k, v


def _values_of_k(parts: law.Parts, book: Book, layout: PageLayout) -> torch.Tensor:
    fmt, (channels, k_mean, k_gain, *_) = layout.format, book
    if fmt.code == "fp16":
        return parts.k_codes.float()
    if fmt.code == "fp8":
        return parts.k_codes.contiguous().view(torch.float8_e4m3fn).float() * law.scale_values(parts.k_scales, fmt)
    k = law.fp4_values(parts.k_codes) * _scales(parts, 0, fmt).repeat_interleave(fmt.block, -1)[..., : layout.k_dim]
    k = swapped(k.transpose(-3, -2), channels, layout).transpose(-3, -2) / k_gain[:, None]
    if layout.outliers:
        at = channels.long().clamp(min=0)[:, None].expand(*k.shape[:-1], -1)
        out = torch.where((channels >= 0)[:, None], parts.k_outliers.float(), 0.0)
        k = k.scatter_add(-1, at, out)
    return k + k_mean[:, None]


def _values_of_v(parts: law.Parts, book: Book, layout: PageLayout) -> torch.Tensor:
    fmt, v_gain = layout.format.v, book[4]
    if fmt.code == "fp16":
        return parts.v_codes.float()
    if fmt.code == "fp8":
        return parts.v_codes.contiguous().view(torch.float8_e4m3fn).float() * law.scale_values(parts.v_scales, fmt)
    scale = _scales(parts, 1, fmt).repeat_interleave(fmt.v_group, -1)
    scale = scale[..., : layout.v_dim] if fmt.v_axis == "token" else scale.mT
    return law.fp4_values(parts.v_codes) * scale / v_gain[:, None]


def _scales(parts: law.Parts, side: int, fmt: KVFormat) -> torch.Tensor:
    """FP32 scales of FP4, K's (side 0) or V's, with the page's factor."""
    s = law.scale_values((parts.v_scales if side else parts.k_scales).contiguous(), fmt)
    return s * law.pow2(parts.factor[..., side, None, None]) if fmt.scale == "e4m3" else s


def shares(weight_Nd: torch.Tensor, block: int) -> torch.Tensor:
    """Positive weights as FP32 integers, at least 1 and at most `law.SHARES` together in each `block` channels of a head."""
    n = weight_Nd.shape[-1]
    w = torch.nn.functional.pad(weight_Nd.double(), (0, -n % block)).unflatten(-1, (-1, block))
    out = 1 + torch.floor(w / w.sum(-1, keepdim=True) * (law.SHARES - block))
    return out.flatten(-2)[..., :n].float()


def arranged(channels_NO: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Outlier channels (-1: unused) in the order that a book has them in, int32 [N, O].

    Where scales lie among the codes, entry o stands for the place `reserved[o]` as long as there are such: a reserved channel that is an
    outlier stands at its own, others take what is left in ascending order, and where a head uses too few the reserved channel itself
    becomes one. Behind these, and elsewhere, ascending. Raises ShapeError for more channels than the layout has, or others.
    """
    rows = []
    for row in channels_NO.tolist():
        used = sorted({c for c in row if c >= 0})
        if len(used) > layout.outliers or used[-1:] > [layout.k_dim - 1]:
            raise ShapeError(f"outlier channels {row}", where="KV codebook", expected=f"at most {layout.outliers} of {layout.k_dim}")
        free = iter([c for c in used if c not in layout.reserved])
        out = [r if r in used else next(free, r) for r in layout.reserved]
        out += free
        rows.append(out + [-1] * (layout.outliers - len(out)))
    return torch.tensor(rows, dtype=torch.int32, device=channels_NO.device).reshape(len(rows), layout.outliers)


def checked(book: Book, layout: PageLayout) -> Book:
    """The book. Raises ShapeError where outlier channels change places that are not theirs: kernels would write where they lead."""
    if layout.reserved and not torch.equal(book[0], arranged(book[0], layout)):
        raise ShapeError(f"outlier channels {book[0].tolist()}", where="KV codebook", expected=f"{arranged(book[0], layout).tolist()}",
                         do="give them through `arranged`")  # fmt: skip
    return book


def swapped(x_XNd: torch.Tensor, channels_NO: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """What belongs to channels, by the place that their codes lie in, or the other way round: `channels[o]` and channel `reserved[o]`
    swap places.
    """
    if not layout.reserved:
        return x_XNd
    moved = channels_NO[:, : len(layout.reserved)].long()
    places = torch.arange(layout.k_dim, device=moved.device).repeat(len(moved), 1)
    n, half = layout.k_blocks, GROUP // 2
    reserved = torch.cat([places[:, half - n : half], places[:, GROUP - n : GROUP]], -1)
    places = places.scatter(-1, moved, reserved).scatter(-1, reserved, moved)
    return x_XNd.gather(-1, places.expand_as(x_XNd))


def book_shares(
    channels: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor, layout: PageLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both weights of a book in the blocks of its layout, `channels` as `arranged`. Channels that share no scale have equal weights."""
    k, v = layout.format, layout.format.v
    if k.search:
        k_weight = swapped(shares(swapped(k_weight, channels, layout), k.block), channels, layout)
    if v.search:
        v_weight = shares(v_weight if v.v_axis == "token" else torch.ones_like(v_weight), v.v_group)
    return k_weight, v_weight


def neutral_book(layout: PageLayout, heads: int, device: torch.device | str = "cpu") -> Book:
    """No outliers but those that a layout must have, means 0, gains and weights 1."""
    zeros = lambda d: torch.zeros(heads, d, device=device)  # noqa: E731
    ones = lambda d: torch.ones(heads, d, device=device)  # noqa: E731
    row = [*layout.reserved, *[-1] * (layout.outliers - len(layout.reserved))]
    channels = torch.tensor(row, dtype=torch.int32, device=device).repeat(heads, 1)
    k, v = layout.k_dim, layout.v_dim
    k_weight, v_weight = book_shares(channels, ones(k), ones(v), layout)
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
