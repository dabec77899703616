"""Attention over pages of every format and head dim, in Triton: correct for all, near the memory's speed, without `fused.py`'s tricks.

M of the MMA is query rows (16 or 32), N tokens (scores) or channels (output); codes become FP16 in registers. One kernel walks pages and
the FP16 tokens, one merges. docs/kernels.md says what is served.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...kv.format import KVFormat, PageLayout
from ..kv_fp4.fused import ASM, NONE, bend, dot, exp2, fetch
from .general_tiles import (
    FP8,
    PLANES,
    UNIT,
    byte_at,
    item_at,
    k_native,
    k_piece,
    q_native,
    q_page,
    q_piece,
    scale32,
    seen,
    units_of,
    v_piece,
    width,
    zeros,
)

LOG2E = 1.4426950408889634


# FP16 tokens -----------------------------------------------------------------------------------------------------------
@triton.jit
def _recent(m_R, l_R, accs, q_at, row_R, on_R, norm_R, back_R, qpos_R, head, stored, length, first, sink_k_ptr, sink_v_ptr,
            recent_k_ptr, recent_v_ptr, D: tl.constexpr, DV: tl.constexpr, RP: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr,
            SLIDING: tl.constexpr, SOFTCAP: tl.constexpr):
    """Sinks and window of KV head `head` (of all sequences'), 64 tokens at a time, after the pages."""
    i_T = tl.arange(0, 64)
    in_sinks = tl.minimum(length, SINKS)
    count = tl.where(length > SINKS, length - stored, length)
    for at in tl.range(0, count if ASM else count.handle.data.item(), 64, num_stages=1):
        t_T = at + i_T
        there_T = t_T < count
        row_T = head * RING + (first + t_T - in_sinks) % RING
        k_T = recent_k_ptr + row_T * D
        v_T = recent_v_ptr + row_T * DV
        if SINKS > 0:
            row_T = head * SINKS + t_T
            k_T = tl.where(t_T < in_sinks, sink_k_ptr + row_T * D, k_T)
            v_T = tl.where(t_T < in_sinks, sink_v_ptr + row_T * DV, v_T)
        s_RT = tl.zeros((RP, 64), tl.float32)
        for g in tl.static_range((D + 63) // 64):
            c_C = 64 * g + tl.arange(0, width(D, g))
            q_RC = (q_piece(q_at, row_R, on_R, c_C, q_at, D, D, False) * norm_R[:, None]).to(tl.float16)
            k_TC = tl.load(k_T[:, None] + c_C[None, :], mask=there_T[:, None] & (c_C < D)[None, :], other=0)
            s_RT = dot(q_RC, tl.trans(k_TC), s_RT)
        s_RT = s_RT * back_R[:, None]
        if SOFTCAP > 0:
            s_RT = bend(s_RT, SOFTCAP)
        s_RT = seen(s_RT, tl.where(t_T < in_sinks, t_T, t_T + stored), there_T, qpos_R, SLIDING)
        new_R = tl.maximum(m_R, tl.max(s_RT, axis=1))
        alpha_R = exp2(m_R - new_R)
        m_R = new_R
        p_RT = exp2(s_RT - m_R[:, None])
        l_R = l_R * alpha_R + tl.sum(p_RT, axis=1)
        new = ()
        for g in tl.static_range((DV + 63) // 64):
            c_C = 64 * g + tl.arange(0, width(DV, g))
            v_TC = tl.load(v_T[:, None] + c_C[None, :], mask=there_T[:, None] & (c_C < DV)[None, :], other=0)
            new = new + (dot(p_RT.to(tl.float16), v_TC, accs[g] * alpha_R[:, None]),)
        accs = new
    return m_R, l_R, accs


@triton.jit
def attend_general(
    q_ptr, q_len_ptr, pool_ptr, table_ptr, stored_ptr, length_ptr, sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr, recent_first_ptr,
    channels_ptr, k_mean_ptr, k_gain_ptr, v_gain_ptr, part_ptr, ml_ptr, span_ptr, B, table_width, scale_log2,
    BP: tl.constexpr, N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, T: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    CODE: tl.constexpr, BF: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr, SWAPS: tl.constexpr,
    VCODE: tl.constexpr, VBF: tl.constexpr, VFACTOR: tl.constexpr, BY_CHANNEL: tl.constexpr, GROUP: tl.constexpr, VNB: tl.constexpr,
    SINKS: tl.constexpr, RING: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr,
    PAGE_BYTES: tl.constexpr, V_AT: tl.constexpr, KS_AT: tl.constexpr, KS_ROW: tl.constexpr, VS_AT: tl.constexpr, KO_AT: tl.constexpr,
    TRAILER_AT: tl.constexpr, TT: tl.constexpr, STAGES: tl.constexpr, FETCH: tl.constexpr, NATIVE: tl.constexpr,
):
    """Partial attention: each program takes an equal share of the flat list of units.

    An item is (sequence, KV head, RP query rows); its units are its visible pages and one for its FP16 tokens, which comes last. q
    [B, N, R, D] with R = G T rows; pool [P, N, PAGE_BYTES]; part FP32 [slots, RP, DV], ml FP32 [slots, RP, 2] (maximum in log2 units, sum):
    true partial attention, means and gains included. A program writes slot `program + item` of each item it meets; `span` [item, 2] gets an
    item's first slot and the one after its last. CODE to SWAPS are K's, VCODE to VNB V's.
    """
    ITEMS: tl.constexpr = N * ((R + RP - 1) // RP)
    first_B, units_B, ends_B = units_of(stored_ptr, length_ptr, q_len_ptr, B, BP, ITEMS, SINKS, SLIDING)
    total = tl.max(ends_B, axis=0)
    share = tl.cdiv(total, tl.num_programs(0))
    program = tl.program_id(0)
    unit = program * share
    end = tl.minimum(unit + share, total)

    r_R = tl.arange(0, RP)
    i_T = tl.arange(0, TT)
    if VCODE == PLANES:
        # tokens in the order of V's bytes
        i_T = i_T // 64 * 64 + i_T % 64 // 16 * 16 + i_T % 2 * 8 + i_T % 16 // 2
    while unit < end:
        b, within, first, units, u0, u1 = item_at(unit, end, first_B, units_B, ends_B, BP, ITEMS)
        n = within // (ITEMS // N)
        unit += u1 - u0
        item = b * ITEMS + within
        slot = program + item
        if u0 == 0:
            tl.store(span_ptr + item * 2, slot)
        if u1 == units:
            tl.store(span_ptr + item * 2 + 1, slot + 1)
        stored = tl.load(stored_ptr + b)
        length = tl.load(length_ptr + b)
        q_len = tl.load(q_len_ptr + b)
        row_R = within % (ITEMS // N) * RP + r_R
        on_R = row_R < R
        qpos_R = tl.where(on_R & (row_R % T < q_len), length - q_len + row_R % T, -1)
        q_at = q_ptr + (b * N + n) * R * D
        gain_at = k_gain_ptr + n * D

        # a row's largest element becomes 256
        amax_R = tl.full((RP,), 1.0e-30, tl.float32)
        mean_R = tl.zeros((RP,), tl.float32)
        for g in tl.static_range((D + 63) // 64):
            ch_C = 64 * g + tl.arange(0, 64)
            q_RC = q_piece(q_at, row_R, on_R, ch_C, gain_at, D, D, False)
            amax_R = tl.maximum(amax_R, tl.max(tl.abs(q_RC), axis=1))
            if CODE >= PLANES:
                mean_R += tl.sum(q_RC * tl.load(k_mean_ptr + n * D + ch_C, mask=ch_C < D, other=0)[None, :], axis=1)
                q_RC = q_piece(q_at, row_R, on_R, ch_C, gain_at, D, D, True)
                amax_R = tl.maximum(amax_R, tl.max(tl.abs(q_RC), axis=1))
        mean_R = mean_R * scale_log2
        norm_R = 256.0 / amax_R
        back_R = amax_R * (scale_log2 / 256.0)

        m_R = tl.full((RP,), NONE, tl.float32)
        mv_R = m_R
        l_RT = tl.zeros((RP, TT), tl.float32)
        accs = zeros(RP, DV)
        t0 = (first + u0) * (128 // TT)
        t1 = (first + tl.minimum(u1, units - 1)) * (128 // TT)
        if t0 < t1:
            if NATIVE:
                qs = q_native(q_at, row_R, on_R, gain_at, norm_R, D, RP)
            else:
                qs = q_page(q_at, row_R, on_R, gain_at, norm_R, channels_ptr, n, D, CODE, BF, OUT, SWAPS)
            if OUT > 0:
                o_O = tl.arange(0, 16)
                ch_O = tl.load(channels_ptr + n * OUT + o_O, mask=o_O < OUT, other=-1)
                qo_RO = (q_piece(q_at, row_R, on_R, tl.where(ch_O < 0, D, ch_O), gain_at, D, D, False) * norm_R[:, None]).to(tl.float16)
            table = table_ptr + b * table_width
            page = tl.load(table + t0 // (128 // TT))
            at = (pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES + TRAILER_AT).to(tl.pointer_type(tl.float32))
            k_factor = tl.load(at)
            v_factor = tl.load(at + 1)
            for t in tl.range(t0 if ASM else t0.handle.data.item(), t1 if ASM else t1.handle.data.item(), num_stages=STAGES):
                base = pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES
                page = tl.load(table + tl.minimum(t + 1, t1 - 1) // (128 // TT))
                at = (pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES + TRAILER_AT).to(tl.pointer_type(tl.float32))
                t_T = t % (128 // TT) * TT + i_T
                there_T = t // (128 // TT) * 128 + t_T < stored
                if NATIVE:
                    s_RT = k_native(qs, mean_R / back_R, base, t_T, D, KS_AT, RP)
                else:
                    s_RT = tl.zeros((RP, TT), tl.float32)
                    for g in tl.static_range((D + 63) // 64):
                        if CODE >= PLANES:
                            s_RT = k_piece(qs[2 * g], qs[2 * g + 1], s_RT, base, t_T, there_T, g, D, CODE, BF, KS_AT, KS_ROW, BLOCK)
                        else:
                            s_RT = k_piece(qs[g], qs[g], s_RT, base, t_T, there_T, g, D, CODE, BF, KS_AT, KS_ROW, BLOCK)
                if CODE == FP8:
                    s_RT = s_RT * scale32(byte_at(base + KS_AT, t_T), True)[None, :]
                s_RT = s_RT * (back_R * (k_factor * UNIT) if FACTOR else back_R)[:, None]
                if OUT > 0:
                    at_TO = (base + KO_AT).to(tl.pointer_type(tl.float16)) + t_T[:, None] * OUT + o_O[None, :]
                    ko_TO = tl.load(at_TO, mask=(o_O < OUT)[None, :], other=0)
                    s_RT += dot(qo_RO, tl.trans(ko_TO), tl.zeros((RP, TT), tl.float32)) * back_R[:, None]
                if CODE >= PLANES and not NATIVE:
                    s_RT += mean_R[:, None]
                if SOFTCAP > 0:
                    s_RT = bend(s_RT, SOFTCAP)
                s_RT = seen(s_RT, SINKS + t // (128 // TT) * 128 + t_T, there_T, qpos_R, SLIDING)
                if FETCH:
                    fetch(pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES, PAGE_BYTES)
                new_R = tl.maximum(m_R, tl.max(s_RT, axis=1))
                alpha_R = exp2(m_R - new_R)
                m_R = new_R
                p_RT = exp2(s_RT - m_R[:, None])
                l_RT = l_RT * alpha_R[:, None] + p_RT
                if VCODE == FP8:
                    # V's scale joins the exponent, under a maximum of its own, so that p fills FP16
                    s_RT += (byte_at(base + VS_AT, t_T) - 127).to(tl.float32)[None, :]
                    new_R = tl.maximum(mv_R, tl.max(s_RT, axis=1))
                    alpha_R = exp2(mv_R - new_R)
                    mv_R = new_R
                    p_RT = exp2(s_RT - mv_R[:, None])
                new = ()
                for g in tl.static_range((DV + 63) // 64):
                    new = new + (v_piece(accs[g] * alpha_R[:, None], p_RT, base, t_T, there_T, v_factor if VFACTOR else 1.0, g, DV, RP,
                                          VCODE, VBF, V_AT, VS_AT, BY_CHANNEL, GROUP, VNB),)
                accs = new
                if FACTOR:
                    k_factor = tl.load(at)
                if VFACTOR:
                    v_factor = tl.load(at + 1)
        l_R = tl.sum(l_RT, axis=1)
        if VCODE >= FP8:
            new = ()
            for g in tl.static_range((DV + 63) // 64):
                c_C = 64 * g + tl.arange(0, width(DV, g))
                if VCODE == FP8:
                    new = new + (accs[g] * exp2(mv_R - m_R)[:, None],)
                else:
                    new = new + (accs[g] / tl.load(v_gain_ptr + n * DV + c_C, mask=c_C < DV, other=1.0)[None, :],)
            accs = new
        if u1 == units:
            m_R, l_R, accs = _recent(
                m_R, l_R, accs, q_at, row_R, on_R, norm_R, back_R, qpos_R, b * N + n, stored, length, tl.load(recent_first_ptr + b),
                sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr, D, DV, RP, SINKS, RING, SLIDING, SOFTCAP)
        for g in tl.static_range((DV + 63) // 64):
            c_C = 64 * g + tl.arange(0, width(DV, g))
            tl.store(part_ptr + (slot * RP + r_R)[:, None] * DV + c_C[None, :], accs[g], mask=(c_C < DV)[None, :])
        tl.store(ml_ptr + (slot * RP + r_R) * 2, m_R)
        tl.store(ml_ptr + (slot * RP + r_R) * 2 + 1, l_R)


@triton.jit
def merge_parts(
    q_len_ptr, length_ptr, logit_ptr, part_ptr, ml_ptr, span_ptr, out_ptr, lse_ptr,
    N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, T: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, LOGIT: tl.constexpr,
    SB: tl.constexpr,
):
    """DP channels of one query row of all: its slots and the learned logit. out FP32 [B, N, R, DV], lse FP32 [B, N, R]."""
    BLOCKS: tl.constexpr = (R + RP - 1) // RP
    at = tl.program_id(0)
    head = at // R
    row = at % R
    b = head // N
    item = head * BLOCKS + row // RP
    r = row % RP
    d_D = tl.program_id(1) * DP + tl.arange(0, DP)
    s_S = tl.arange(0, SB)
    q_len = tl.load(q_len_ptr + b)
    there = (row % T < q_len) & (tl.load(length_ptr + b) - q_len + row % T >= 0)
    s0 = tl.load(span_ptr + item * 2)
    s1 = tl.load(span_ptr + item * 2 + 1)
    m = NONE
    total = 0.0
    acc_D = tl.zeros((DP,), tl.float32)
    for s in tl.range(s0 if ASM else s0.handle.data.item(), s1 if ASM else s1.handle.data.item(), SB):
        row_S = (s + s_S) * RP + r
        on_S = s + s_S < s1
        m_S = tl.load(ml_ptr + row_S * 2, mask=on_S, other=NONE)
        l_S = tl.load(ml_ptr + row_S * 2 + 1, mask=on_S, other=0)
        part_SD = tl.load(part_ptr + row_S[:, None] * DV + d_D[None, :], mask=on_S[:, None] & (d_D < DV)[None, :], other=0)
        new = tl.maximum(m, tl.max(m_S, axis=0))
        alpha = exp2(m - new)
        w_S = exp2(m_S - new)
        m = new
        total = total * alpha + tl.sum(w_S * l_S, axis=0)
        acc_D = acc_D * alpha + tl.sum(part_SD * w_S[:, None], axis=0)
    if LOGIT:
        logit = tl.load(logit_ptr + head % N * (R // T) + row // T).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(m, logit)
        alpha = exp2(m - new)
        m = new
        total = total * alpha + exp2(logit - new)
        acc_D = acc_D * alpha
    there = there & (total > 0)
    safe = tl.where(there, total, 1.0)
    tl.store(out_ptr + at * DV + d_D, tl.where(there, acc_D / safe, 0.0), mask=d_D < DV)
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + at, tl.where(there, (m + tl.log2(safe)) * 0.6931471805599453, float("-inf")))


# launch ----------------------------------------------------------------------------------------------------------------
FETCH = True  # ask L2 for the next page where one tile at a time is in shared memory


def tuning(layout: PageLayout, rows: int) -> tuple[int, int, int, int, int, int]:
    """(query rows of an item, tokens of a tile, warps, registers a thread, programs a multiprocessor holds then, pipeline stages)."""
    wide = max(layout.k_dim, layout.v_dim) > 128
    if layout.format.values:
        # V's planes hold tokens t and 64 + t in a byte; as measured, K's planes beside FP8 values are faster so, too
        tile = 128 if PLANES.value in (code_of(layout.format), code_of(layout.format.v)) else 64
        if wide or (tile == 128 and "mxfp4" in layout.format.name):
            return 16, tile, 4, 255, 2, 2
        long = layout.format.code == "fp16" and tile == 128 and layout.k_dim > 64
        return (16, tile, 4, 255, 2, 3) if long else (16, tile, 4, 168, 3, 2)
    if layout.format.code == "fp4":
        tile = 128 if layout.format.order == "planes" else 64
        # stages as measured: one tile in shared memory and the next page in L2, but for head dim 112
        stages = 3 if tile == 64 or layout.k_dim % 64 == 48 else 2
        return (16, tile, 4, 255, 2, 3) if wide else (16, tile, 4, 168, 3, stages)
    if wide:
        return 16, 32 if layout.format.code == "fp16" else 64, 4, 255, 2, 3
    return (16, 64, 4, 168, 3, 3) if rows <= 16 else (32, 64, 4, 255, 2, 3)


def serves(layout: PageLayout, group: int = 1) -> bool:
    """Whether `attend` reads this layout: everything but MLA (general_latent.py), which shares its codes between K and V."""
    return layout.v_dim > 0 and layout.rope == 0 and layout.k_dim <= 256 and layout.v_dim <= 256


def native(layout: PageLayout, device: torch.device) -> bool:
    """Whether the device's MMA reads these keys as they are stored: `mxfp4` on sm_100."""
    on_blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
    return on_blackwell and layout.format.name == "mxfp4" and layout.k_dim in (64, 128, 256)


def code_of(f: KVFormat) -> int:
    """What the kernel calls a format's codes (general_tiles.py)."""
    return ["fp16", "fp8", "planes", "linear"].index(f.order if f.code == "fp4" else f.code)


def constants(layout: PageLayout, heads: int, rows: int, queries: int, batch: int, *, sinks: int, ring: int, sliding: int,
              softcap: float, natively: bool = False) -> dict[str, object]:
    """Compile-time arguments of `attend_general`; `natively`: see `native`."""
    f, v = layout.format, layout.format.v
    block_rows, tile, _, _, _, stages = tuning(layout, rows)
    at = {k: v[0] for k, v in layout.offsets.items()}
    return {
        "BP": max(16, triton.next_power_of_2(batch)), "N": heads, "R": rows, "T": queries, "D": layout.k_dim, "DV": layout.v_dim,
        "RP": block_rows, "TT": 128 if natively else tile, "STAGES": stages, "FETCH": FETCH and stages == 2, "NATIVE": natively,
        "CODE": code_of(f), "BF": f.code == "fp4" and f.scale == "e8m0", "FACTOR": f.code == "fp4" and f.scale == "e4m3",
        "BLOCK": max(f.block, 1), "OUT": layout.outliers, "SWAPS": len(layout.reserved),
        "VCODE": code_of(v), "VBF": v.code == "fp4" and v.scale == "e8m0", "VFACTOR": v.code == "fp4" and v.scale == "e4m3",
        "BY_CHANNEL": v.v_axis == "channel", "GROUP": max(v.v_group, 1), "VNB": layout.v_scale_shape[1],
        "SINKS": sinks, "RING": max(ring, 1), "SLIDING": sliding, "SOFTCAP": softcap, "PAGE_BYTES": layout.page_bytes,
        "V_AT": at["v_codes"], "KS_AT": at["k_scales"], "KS_ROW": layout.k_scale_row, "VS_AT": at["v_scales"],
        "KO_AT": at["k_outliers"], "TRAILER_AT": at["trailer"],
    }


def programs_on(device: torch.device, per_sm: int) -> int:
    """Programs of one launch: all of them fit on the chip at once."""
    return per_sm * (torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1)


def attend(
    q_BHTd: torch.Tensor, q_len_B: torch.Tensor, pool_PNb: torch.Tensor, table_BP: torch.Tensor, stored_B: torch.Tensor,
    length_B: torch.Tensor, sink_k: torch.Tensor, sink_v: torch.Tensor, recent_k: torch.Tensor, recent_v: torch.Tensor,
    recent_first_B: torch.Tensor,
    book: tuple[torch.Tensor, ...], layout: PageLayout, *, scale: float, sliding: int = 0, softcap: float = 0.0,
    sink_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `naive.attend_naive`, for layouts that it `serves`; int32 tables and lengths, contiguous tensors. The host reads nothing."""
    B, H, T, _ = q_BHTd.shape
    N, dev = pool_PNb.shape[1], q_BHTd.device
    R, DV = H // N * T, layout.v_dim
    channels, k_mean, k_gain, _, v_gain, _ = book
    const = constants(layout, N, R, T, B, sinks=sink_k.shape[2], ring=recent_k.shape[2], sliding=sliding, softcap=softcap,
                      natively=native(layout, dev))
    RP, _, warps, registers, per_sm, _ = tuning(layout, R)
    programs, items = programs_on(dev, per_sm), B * N * -(-R // RP)
    out = torch.empty(B, H, T, DV, dtype=torch.float32, device=dev)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=dev)
    part = torch.empty(programs + items, RP, DV, dtype=torch.float32, device=dev)
    ml = torch.empty(programs + items, RP, 2, dtype=torch.float32, device=dev)
    span = torch.empty(items, 2, dtype=torch.int32, device=dev)
    attend_general[(programs,)](
        q_BHTd.contiguous(), q_len_B, pool_PNb, table_BP, stored_B, length_B, sink_k, sink_v, recent_k, recent_v, recent_first_B,
        channels, k_mean, k_gain, v_gain, part, ml, span, B, table_BP.shape[1], scale * LOG2E, **const, num_warps=warps,
        maxnreg=registers)
    merge_parts[(B * N * R,)](
        q_len_B, length_B, lse if sink_H is None else sink_H, part, ml, span, out, lse, N=N, R=R, RP=RP, T=T, DV=DV,
        DP=triton.next_power_of_2(DV), LOGIT=sink_H is not None, SB=16, num_warps=2)
    return out, lse
