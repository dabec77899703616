"""Tokens into FP4 pages in `planes` order at every head dim, MLA's latent among them, in Triton: the bytes of `records.encode_naive`.

The elements are `fused.py`'s; here tiles have masks, and programs are as in `general.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...kv.format import PAGE, PageLayout
from ..kv_fp4.fused import swapped
from .fused_elements import _book_k, _byte, _codes, _exponent, _outliers, _scale_byte, _scales, _tally, table_on
from .general import _rows, _settle


@triton.constexpr_function
def half_of(dim, g):
    """Bytes of a token's K group g: the channels of each nibble."""
    return min(64, dim - 64 * g) // 2


@triton.constexpr_function
def pow2(n):
    return max(1, 1 << (n - 1).bit_length())


@triton.jit
def _k_tile(ptr, row_T, on_T, n, place_C, on_C, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, N: tl.constexpr, W: tl.constexpr,
            D: tl.constexpr, OUT: tl.constexpr, SWAPS: tl.constexpr):
    """What is coded of K in some places [T, C], 0 where not on; their weights; how many were beyond FP16, and NaN."""
    at_C = swapped(tl.minimum(place_C, D - 1), n, channels_ptr, OUT, SWAPS)
    x_TC, big, nan = _rows(ptr, row_T, on_T, n, tl.where(on_C, at_C, D), N, W, D)
    gain_C, w_C = _book_k(at_C, n, channels_ptr, k_gain_ptr, k_weight_ptr, D, OUT)
    x_TC = tl.where(on_C[None, :], (x_TC - tl.load(k_mean_ptr + n * D + at_C)[None, :]) * gain_C[None, :], 0.0)
    return x_TC, tl.where(on_C, w_C, 0), big, nan


@triton.jit
def _k_block(ptr, row_T, on_T, n, place_C, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, counts_ptr, table_ptr, N: tl.constexpr,
             W: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, SWAPS: tl.constexpr):
    """A scale block of K: what is coded [T, C], its scales [T] and their inverses."""
    x_TC, w_C, big, nan = _k_tile(ptr, row_T, on_T, n, place_C, place_C < D, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, N, W, D,
                                  OUT, SWAPS)
    _tally(counts_ptr, big, nan)
    scale_T, inverse_T = _scales((x_TC,), (w_C[None, :],), table_ptr, 0, False)
    return x_TC, scale_T, inverse_T


@triton.jit
def _put(all_TB, i, one_T):
    """Column i of all_TB becomes one_T."""
    i_B = tl.arange(0, all_TB.shape[1])
    return tl.where(i_B[None, :] == i, one_T[:, None], all_TB)


@triton.jit
def _store_scales(record, AT: tl.constexpr, scales_TB, factor, t_T, on_T, NB: tl.constexpr, ROW: tl.constexpr):
    i_B = tl.arange(0, scales_TB.shape[1])
    at_TB = record + AT + t_T[:, None] * ROW + i_B[None, :]
    tl.store(at_TB, _scale_byte(scales_TB, factor), mask=on_T[:, None] & (i_B < NB)[None, :])


@triton.jit
def _encode_k(
    record, row_T, on_T, t_T, slot, n, k_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, counts_ptr, table_ptr,
    N: tl.constexpr, W: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, SWAPS: tl.constexpr, KS_AT: tl.constexpr,
    KS_ROW: tl.constexpr, TRAILER_AT: tl.constexpr,
):
    NB: tl.constexpr = (D + 31) // 32
    WHOLE: tl.constexpr = D // 64
    HALF: tl.constexpr = half_of(D, WHOLE)
    c_C = tl.arange(0, 32)
    scales_TB = tl.full((t_T.shape[0], pow2(NB)), 1.0, tl.float32)
    top = -1000
    # A loop and not one piece of code: 16 copies of it take minutes to compile. In a whole group each nibble is a block.
    for g in tl.range(WHOLE, num_stages=1):
        ch_C = 64 * g + c_C
        x_TC, scale_T, inverse_T = _k_block(k_ptr, row_T, on_T, n, ch_C, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, counts_ptr,
                                            table_ptr, N, W, D, OUT, SWAPS)
        lo_TC = _codes(x_TC, inverse_T)
        scales_TB = _put(scales_TB, 2 * g, scale_T)
        top = tl.maximum(top, tl.max(tl.where(on_T, _exponent(scale_T), -1000), axis=0))
        ch_C += 32
        x_TC, scale_T, inverse_T = _k_block(k_ptr, row_T, on_T, n, ch_C, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, counts_ptr,
                                            table_ptr, N, W, D, OUT, SWAPS)
        scales_TB = _put(scales_TB, 2 * g + 1, scale_T)
        top = tl.maximum(top, tl.max(tl.where(on_T, _exponent(scale_T), -1000), axis=0))
        at_TC = record + t_T[:, None] * (D // 2) + 32 * g + c_C[None, :]
        tl.store(at_TC, _byte(lo_TC, _codes(x_TC, inverse_T)), mask=on_T[:, None])
    if HALF > 0:
        # The rest, of 16, 32 or 48 channels: its nibbles are no blocks.
        inverses = ()
        for i in tl.static_range(2 * WHOLE, NB):
            ch_C = 32 * i + c_C
            _x, scale_T, inverse_T = _k_block(k_ptr, row_T, on_T, n, ch_C, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, counts_ptr,
                                              table_ptr, N, W, D, OUT, SWAPS)
            inverses = inverses + (inverse_T,)
            scales_TB = _put(scales_TB, i, scale_T)
            top = tl.maximum(top, tl.max(tl.where(on_T, _exponent(scale_T), -1000), axis=0))
        on_C = c_C < HALF
        ch_C = 64 * WHOLE + c_C
        x_TC, _w, _b, _n = _k_tile(k_ptr, row_T, on_T, n, ch_C, on_C, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, N, W, D, OUT,
                                      SWAPS)
        lo_TC = _codes(x_TC, inverses[0])
        ch_C += HALF
        x_TC, _w, _b, _n = _k_tile(k_ptr, row_T, on_T, n, ch_C, on_C, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, N, W, D, OUT,
                                      SWAPS)
        if HALF == 24:
            # the high nibbles of 48 channels lie in two blocks
            hi_TC = tl.where((ch_C < 64 * WHOLE + 32)[None, :], _codes(x_TC, inverses[0]), _codes(x_TC, inverses[1]))
        else:
            hi_TC = _codes(x_TC, inverses[0])
        at_TC = record + t_T[:, None] * (D // 2) + 32 * WHOLE + c_C[None, :]
        tl.store(at_TC, _byte(lo_TC, hi_TC), mask=on_T[:, None] & on_C[None, :])
    # behind a barrier: scales may lie where codes were written
    factor = _settle(record, KS_AT, TRAILER_AT, top, slot, NB, KS_ROW)
    _store_scales(record, KS_AT, scales_TB, factor, t_T, on_T, NB, KS_ROW)


@triton.jit
def _merge_codes(at_CT, code_CT, on_CT, HIGH: tl.constexpr):
    """Put codes into one nibble plane of bytes whose other plane stays."""
    old = tl.load(at_CT, mask=on_CT, other=0).to(tl.int32)
    none = tl.zeros(code_CT.shape, tl.uint8)
    if HIGH:
        new = old & 0x71 | _byte(none, code_CT).to(tl.int32)
    else:
        new = old & 0x8E | _byte(code_CT, none).to(tl.int32)
    tl.store(at_CT, new.to(tl.uint8), mask=on_CT)


@triton.jit
def _encode_v(
    record, row_T, on_T, t_T, slot, n, v_ptr, v_gain_ptr, v_weight_ptr, counts_ptr, table_ptr,
    N: tl.constexpr, D: tl.constexpr, V_AT: tl.constexpr, VS_AT: tl.constexpr, FACTOR_AT: tl.constexpr,
):
    NB: tl.constexpr = (D + 63) // 64
    c_C = tl.arange(0, 64)
    scales_TB = tl.full((t_T.shape[0], pow2(NB)), 1.0, tl.float32)
    top = -1000
    for g in tl.range(NB, num_stages=1):
        ch_C = 64 * g + c_C
        on_C = ch_C < D
        x_TC, big, nan = _rows(v_ptr, row_T, on_T, n, ch_C, N, D, D)
        _tally(counts_ptr, big, nan)
        x_TC = x_TC * tl.load(v_gain_ptr + n * D + ch_C, mask=on_C, other=0)[None, :]
        w_C = tl.load(v_weight_ptr + n * D + ch_C, mask=on_C, other=0).to(tl.int32)
        scale_T, inverse_T = _scales((x_TC,), (w_C[None, :],), table_ptr, 0, False)
        code_TC = _codes(x_TC, inverse_T)
        at_TC = record + V_AT + ch_C[None, :] * 64 + (t_T % 64 // 16 * 16 + t_T % 8 * 2 + t_T % 16 // 8)[:, None]
        on_TC = on_T[:, None] & on_C[None, :]
        # tokens t and 64 + t share a byte: one after the other
        _merge_codes(at_TC, code_TC, on_TC & (t_T < 64)[:, None], False)
        tl.debug_barrier()
        _merge_codes(at_TC, code_TC, on_TC & (t_T >= 64)[:, None], True)
        scales_TB = _put(scales_TB, g, scale_T)
        top = tl.maximum(top, tl.max(tl.where(on_T, _exponent(scale_T), -1000), axis=0))
    factor = _settle(record, VS_AT, FACTOR_AT, top, slot, NB, NB)
    _store_scales(record, VS_AT, scales_TB, factor, t_T, on_T, NB, NB)


@triton.jit
def encode_planes(
    pool_ptr, k_ptr, v_ptr, runs_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, v_gain_ptr, v_weight_ptr, counts_ptr, table_ptr,
    N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROPE: tl.constexpr, TT: tl.constexpr, OUT: tl.constexpr, OUTP: tl.constexpr,
    SWAPS: tl.constexpr, PAGE_BYTES: tl.constexpr, V_AT: tl.constexpr, KS_AT: tl.constexpr, KS_ROW: tl.constexpr, VS_AT: tl.constexpr,
    KO_AT: tl.constexpr, ROPE_AT: tl.constexpr, TRAILER_AT: tl.constexpr, FIRST: tl.constexpr,
):
    """Runs of up to TT tokens: program (run, head, K or V); FIRST 1: V alone."""
    run = tl.program_id(0)
    n = tl.program_id(1)
    page = tl.load(runs_ptr + run * 4)
    slot = tl.load(runs_ptr + run * 4 + 1)
    row = tl.load(runs_ptr + run * 4 + 2)
    count = tl.load(runs_ptr + run * 4 + 3)
    if count == 0:
        return
    record = pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES
    i_T = tl.arange(0, TT)
    on_T = i_T < count
    if tl.program_id(2) + FIRST == 0:
        _encode_k(record, row + i_T, on_T, slot + i_T, slot, n, k_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, counts_ptr,
                  table_ptr, N, D + ROPE, D, OUT, SWAPS, KS_AT, KS_ROW, TRAILER_AT)
        if OUT > 0:
            _outliers(record, row - slot, n, slot + i_T, on_T, k_ptr, channels_ptr, k_mean_ptr, N, D, OUT, OUTP, KO_AT)
        if ROPE > 0:
            c_C = tl.arange(0, ROPE)
            x_TC, big, nan = _rows(k_ptr + D, row + i_T, on_T, n, c_C, N, D + ROPE, ROPE)
            at_TC = (record + ROPE_AT).to(tl.pointer_type(tl.float16)) + (slot + i_T)[:, None] * ROPE + c_C[None, :]
            tl.store(at_TC, x_TC.to(tl.float16), mask=on_T[:, None])
            _tally(counts_ptr, big, nan)
        fill = (record + TRAILER_AT + 8).to(tl.pointer_type(tl.int32))
        tl.store(fill, tl.maximum(tl.load(fill), slot + count))
    else:
        _encode_v(record, row + i_T, on_T, slot + i_T, slot, n, v_ptr, v_gain_ptr, v_weight_ptr, counts_ptr, table_ptr, N, DV, V_AT, VS_AT,
                  TRAILER_AT + 4)


# launch ----------------------------------------------------------------------------------------------------------------
def serves(layout: PageLayout) -> bool:
    """Whether `encode` writes this layout."""
    return layout.format.values is None and all(serves_side(layout, side) for side in range(2 if layout.v_dim else 1))


def serves_side(layout: PageLayout, side: int) -> bool:
    """Whether `encode` writes K (side 0) or V (1) of this layout alone."""
    f = (layout.format.k, layout.format.v)[side]
    whole = f.v_axis == "token" and f.v_group == 64 if side else layout.rope in (0, 16, 32, 64)
    return f.code == "fp4" and f.order == "planes" and f.search and whole


def constants(layout: PageLayout, heads: int, most: int, side: int | None = None) -> dict[str, object]:
    """Compile-time arguments of `encode_planes` for runs of at most `most` tokens."""
    at = {k: v[0] for k, v in layout.offsets.items()}
    return {
        "N": heads, "D": layout.k_dim, "DV": layout.v_dim, "ROPE": layout.rope, "TT": 4 if most <= 4 else PAGE, "OUT": layout.outliers,
        "OUTP": triton.next_power_of_2(max(1, layout.outliers)), "PAGE_BYTES": layout.page_bytes, "V_AT": at["v_codes"],
        "KS_AT": at["k_scales"], "VS_AT": at["v_scales"], "KO_AT": at["k_outliers"], "ROPE_AT": at["k_rope"], "TRAILER_AT": at["trailer"],
        "FIRST": int(side == 1), "SWAPS": len(layout.reserved), "KS_ROW": layout.k_scale_row,
    }


def encode(
    pool_PNb: torch.Tensor, k_TNd: torch.Tensor, v_TNd: torch.Tensor, runs_R4: torch.Tensor, book: tuple[torch.Tensor, ...],
    layout: PageLayout, *, most: int = PAGE, side: int | None = None,
) -> torch.Tensor:
    """As `records.encode_naive`, for layouts that it `serves`; int32 runs. `most`: no run has more tokens. The host reads nothing.
    `side` 0: only K and the count of tokens, 1: only V.

    Returns int64 [2]: elements saturated, NaNs zeroed.
    """
    counts = torch.zeros(2, dtype=torch.int64, device=pool_PNb.device)
    if not len(runs_R4):
        return counts
    N = pool_PNb.shape[1]
    encode_planes[(len(runs_R4), N, 2 if layout.v_dim and side is None else 1)](
        pool_PNb, k_TNd.contiguous(), v_TNd.contiguous(), runs_R4, *book, counts, table_on(pool_PNb.device),
        **constants(layout, N, most, side), num_warps=1 if most <= 4 else 8, enable_fp_fusion=False)
    return counts
