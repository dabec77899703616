"""Attention over FP4 pages on Hopper, in Triton: codes go from the page to the tensor cores as E5M2, never through FP16.

M of the MMA is tokens (scores) or channels (output), N is query rows; q and p enter as E4M3 pairs `hi + lo`. K scales multiply the
accumulators of their blocks (q is block diagonal over them), V scales multiply p, one p per 64 channels. docs/kernels.md counts bytes and
instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...kv.format import PageLayout
from ..kv_combine.fused import combine
from ..kv_fp4.fused import ASM, NONE, bend, dot, exp2, fetch, half_of, hi_plane, lo_plane, scale_of, seen, terms, to_e4m3, word_of
from ..kv_recent.fused import attend_recent

LOG2E = 1.4426950408889634


@triton.jit
def _rows(stored_ptr, length_ptr, q_len_ptr, B, BP: tl.constexpr, N: tl.constexpr, SINKS: tl.constexpr, SLIDING: tl.constexpr):
    """Per sequence: its first visible page, the visible pages of one head, and the running sum of those of all heads, its own included."""
    b_B = tl.arange(0, BP)
    in_B = b_B < B
    pages_B = (tl.load(stored_ptr + b_B, mask=in_B, other=0) + 127) // 128
    first_B = tl.zeros((BP,), tl.int32)
    if SLIDING > 0:
        length_B = tl.load(length_ptr + b_B, mask=in_B, other=0)
        oldest_B = length_B - tl.load(q_len_ptr + b_B, mask=in_B, other=0) - SLIDING + 1 - SINKS
        first_B = tl.minimum(tl.maximum(oldest_B, 0) // 128, pages_B)
    units_B = pages_B - first_B
    return first_B, units_B, tl.cumsum(units_B * N, 0)


@triton.jit
def _start(program, share, late_from, late_by):
    """First unit of a program: equal shares, the last programs (they start once FP16 tokens are done) less each."""
    return program * share - tl.maximum(program - late_from, 0) * late_by


@triton.jit
def _p8(p_TX, X: tl.constexpr, TERM_LAST: tl.constexpr, PAD: tl.constexpr):
    """FP32 p [128, X] as E4M3 [64, 2 X], columns (term, X) or (X, term), then as many zeros if PAD.

    Twice: for the low plane of V (tokens 0..63) and for the high one, tokens in the order of `tau`.
    """
    if ASM:
        # hi is FP16 rounded to four bits with integers: when it is made by conversion to FP8 and back, ptxas of CUDA 12.8 reads the
        # register of the way back before it is written
        hi, lo = tl.inline_asm_elementwise(
            """{ .reg .b16 a, b, c, d; .reg .b32 e, f, g, h;
            cvt.rn.f16x2.f32 g, $3, $2; cvt.rn.f16x2.f32 h, $5, $4;
            add.u32 e, g, 0x00400040; add.u32 f, h, 0x00400040; and.b32 e, e, 0xFF80FF80; and.b32 f, f, 0xFF80FF80;
            sub.rn.f16x2 g, g, e; sub.rn.f16x2 h, h, f;
            cvt.rn.satfinite.e4m3x2.f16x2 a, e; cvt.rn.satfinite.e4m3x2.f16x2 b, f;
            cvt.rn.satfinite.e4m3x2.f16x2 c, g; cvt.rn.satfinite.e4m3x2.f16x2 d, h;
            mov.b32 $0, {a, b}; mov.b32 $1, {c, d}; }""",
            "=r,=r,f,f,f,f", [p_TX], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4)
        hi = hi.to(tl.float8e4nv, bitcast=True)
        lo = lo.to(tl.float8e4nv, bitcast=True)
    else:
        hi = to_e4m3(p_TX)
        lo = to_e4m3(p_TX - hi)
    p8 = tl.join(hi, lo)
    if not TERM_LAST:
        p8 = tl.permute(p8, (0, 2, 1))
    if PAD:
        p8 = tl.permute(tl.join(p8, tl.zeros_like(p8)), (0, 3, 1, 2))
    Y: tl.constexpr = X * (4 if PAD else 2)
    return tl.split(tl.reshape(tl.permute(tl.reshape(p8, (2, 4, 2, 8, Y)), (1, 3, 2, 4, 0)), (64, Y, 2)))


@triton.jit
def _pv(v_CB, p_lo, p_hi, C: tl.constexpr, X: tl.constexpr):
    """Values of a page times p: [C, X]."""
    return dot(hi_plane(v_CB), p_hi, dot(lo_plane(v_CB), p_lo, tl.zeros((C, X), tl.float32)))


@triton.jit
def attend_pages(
    q_ptr, q_len_ptr, pool_ptr, table_ptr, stored_ptr, length_ptr, sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr, recent_first_ptr,
    channels_ptr, k_mean_ptr, k_gain_ptr, part_ptr, ml_ptr, span_ptr, B, table_width, t_at, scale_log2,
    BP: tl.constexpr, N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, T: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr,
    SINKS: tl.constexpr, RING: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr,
    PAGE_BYTES: tl.constexpr, V_AT: tl.constexpr, KS_AT: tl.constexpr, VS_AT: tl.constexpr, KO_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
    STAGES: tl.constexpr, RECENT: tl.constexpr, PDL: tl.constexpr,
):
    """Partial attention: the first B N programs take the FP16 tokens of an item each, the others equal shares of the flat list of pages.

    D = dk = dv, 64 or 128, planes, V scale per token and 64 channels. q [B, N, R, D] with R = G T rows; pool [P, N, PAGE_BYTES]; part FP32
    [slots, R, D], ml FP32 [slots, R, 2] (maximum in log2 units, sum). A program writes slot `program + item` of each item it meets; `span`
    [item, 2] gets an item's first slot and the one after its last; the FP16 tokens' slots come behind all of these.
    """
    KB: tl.constexpr = D // 2
    KG: tl.constexpr = D // 64
    # q as hi | lo in columns while they fit the least N of an FP8 MMA; two chained MMAs beyond that
    HL: tl.constexpr = 2 if KG * RP * 2 <= 16 else 1
    KC: tl.constexpr = 2 if RP == 4 else KG
    QC: tl.constexpr = KC * RP * HL
    OP: tl.constexpr = 4 if OUT <= 4 else 8 if OUT <= 8 else 16
    XC: tl.constexpr = 16 if RP < 16 else RP
    if PDL:
        # the combine kernel may take the place of programs that have ended
        tl.extra.cuda.gdc_launch_dependents()
    items = B * N
    programs = tl.num_programs(0) - items
    if tl.program_id(0) < items:
        attend_recent(
            tl.program_id(0), q_ptr, q_len_ptr, stored_ptr, length_ptr, sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr,
            recent_first_ptr, part_ptr, ml_ptr, span_ptr, programs + items + tl.program_id(0), t_at, scale_log2,
            N, R, RP, T, D, D, SINKS, RING, SLIDING, SOFTCAP)
        return
    program = tl.program_id(0) - items
    first_B, units_B, ends_B = _rows(stored_ptr, length_ptr, q_len_ptr, B, BP, N, SINKS, SLIDING)
    b_B = tl.arange(0, BP)
    total = tl.max(ends_B, axis=0)
    # the chip holds `programs` at once: as many page programs as there are FP16 programs start RECENT pages late
    late = tl.minimum(items, programs)
    late_by = RECENT
    share = tl.cdiv(total + late * RECENT, programs)
    if share <= 2 * RECENT:
        late_by = 0
        share = tl.cdiv(total, programs)
    unit = _start(program, share, programs - late, late_by)
    end = tl.minimum(_start(program + 1, share, programs - late, late_by), total)

    r_R = tl.arange(0, RP)
    j_K = tl.arange(0, KB)
    kg_G = tl.arange(0, KC)
    ch_K = j_K // 32 * 64 + j_K % 32
    t_T = tl.arange(0, 128)
    b_X = tl.arange(0, 64)
    while unit < end:
        b = tl.sum((ends_B <= unit).to(tl.int32), axis=0)
        mine_B = b_B == b
        units = tl.sum(tl.where(mine_B, units_B, 0), axis=0)
        before = tl.sum(tl.where(mine_B, ends_B, 0), axis=0) - N * units
        n = (unit - before) // units
        u0 = unit - before - n * units
        u1 = tl.minimum(units, u0 + end - unit)
        first = tl.sum(tl.where(mine_B, first_B, 0), axis=0) if SLIDING > 0 else 0
        t0 = first + u0
        t1 = first + u1
        unit += u1 - u0
        table = table_ptr + b * table_width
        page = tl.load(table + t0)
        page_1 = tl.load(table + tl.minimum(t0 + 1, t1 - 1))
        # DRAM has work while q is prepared
        fetch(pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES, PAGE_BYTES)
        fetch(pool_ptr + (page_1.to(tl.int64) * N + n) * PAGE_BYTES, PAGE_BYTES)
        trailer = (pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES + TRAILER_AT).to(tl.pointer_type(tl.float32))
        k_factor = tl.load(trailer)
        v_factor = tl.load(trailer + 1)
        stored = tl.load(stored_ptr + b)
        item = b * N + n
        slot = program + item
        if u0 == 0:
            tl.store(span_ptr + item * 2, slot)
        if u1 == units:
            tl.store(span_ptr + item * 2 + 1, slot + 1)
        q_at = q_ptr + item * R * D

        # q: divided by the K gain, scaled to +-256, block diagonal over the scale blocks of a plane, hi and lo
        on_KGR = ((j_K // 32)[:, None, None] == kg_G[None, :, None]) & (r_R < R)[None, None, :]
        at_KGR = ch_K[:, None, None] + r_R[None, None, :] * D + kg_G[None, :, None] * 0
        lo_KGR = tl.load(q_at + at_KGR, mask=on_KGR, other=0).to(tl.float32)
        hi_KGR = tl.load(q_at + at_KGR + 32, mask=on_KGR, other=0).to(tl.float32)
        if SOFTCAP > 0:
            at_K = k_mean_ptr + n * D + ch_K
            mean_KGR = lo_KGR * tl.load(at_K)[:, None, None] + hi_KGR * tl.load(at_K + 32)[:, None, None]
            mean_R = tl.sum(tl.sum(mean_KGR, axis=0), axis=0) * scale_log2
        at_K = k_gain_ptr + n * D + ch_K
        lo_KGR = lo_KGR * (1.0 / tl.load(at_K))[:, None, None]
        hi_KGR = hi_KGR * (1.0 / tl.load(at_K + 32))[:, None, None]
        # one norm for all rows: what counts in a score is its absolute error
        amax = tl.max(tl.max(tl.max(tl.maximum(tl.abs(lo_KGR), tl.abs(hi_KGR)), axis=2), axis=1), axis=0)
        amax = tl.maximum(amax, 1.0e-30)
        norm = 256.0 / amax
        # a score is code 2^-14 * scale 2^-120 * q * norm
        back = amax * (scale_log2 / 256.0 * 16384.0)
        ql_0, ql_1 = terms(lo_KGR * norm)
        qh_0, qh_1 = terms(hi_KGR * norm)
        if HL == 2:
            ql_0 = to_e4m3(tl.reshape(tl.join(ql_0, ql_1), (KB, QC)))
            qh_0 = to_e4m3(tl.reshape(tl.join(qh_0, qh_1), (KB, QC)))
            ql_1 = ql_0
            qh_1 = qh_0
        else:
            ql_0 = to_e4m3(tl.reshape(ql_0, (KB, QC)))
            qh_0 = to_e4m3(tl.reshape(qh_0, (KB, QC)))
            ql_1 = to_e4m3(tl.reshape(ql_1, (KB, QC)))
            qh_1 = to_e4m3(tl.reshape(qh_1, (KB, QC)))
        if OUT > 2:
            # outliers meet q in FP16 terms, in log2 units: rows of q_o are K's channels twice, for hi and lo (16 channels: two MMAs)
            k_O = tl.arange(0, 16)
            x_X = tl.arange(0, XC)
            o_O = k_O % OP if OP >= 8 else k_O % 8 // 2
            on_O = o_O < OUT if OP >= 8 else (o_O < OUT) & (k_O < 8)
            ch_O = tl.load(channels_ptr + n * OUT + o_O, mask=on_O, other=-1)
            # 16 columns are the least of an MMA whose rows lie as those of the scores do; a thread keeps its rows of q
            row_X = x_X % 8 // 2 if RP == 4 else x_X
            on_X = (row_X < R) & (x_X < 8) & (x_X % 2 == 0) if RP == 4 else row_X < R
            on_OX = on_X[None, :] & (ch_O >= 0)[:, None]
            qo_OX = tl.load(q_at + row_X[None, :] * D + ch_O[:, None], mask=on_OX, other=0).to(tl.float32) * scale_log2
            qo_0 = qo_OX.to(tl.float16)
            qo_1 = (qo_OX - qo_0.to(tl.float32)).to(tl.float16)
            if OP < 16:
                qo_0 = tl.where((k_O // 8 if OP == 8 else k_O % 2)[:, None] == 0, qo_0, qo_1)
        elif OUT > 0:
            ch = tl.load(channels_ptr + n * OUT)
            qo_0 = tl.load(q_at + r_R * D + ch, mask=(r_R < R) & (ch >= 0), other=0).to(tl.float32) * scale_log2
            ch = tl.load(channels_ptr + n * OUT + OUT - 1)
            qo_1 = tl.load(q_at + r_R * D + ch, mask=(r_R < R) & (ch >= 0), other=0).to(tl.float32) * scale_log2
        qpos_R = r_R * 0
        if T > 1 or SLIDING > 0:
            length = tl.load(length_ptr + b)
            q_len = tl.load(q_len_ptr + b)
            qpos_R = tl.where(t_at + r_R % T < q_len, length - q_len + t_at + r_R % T, -1)

        m_R = tl.full((RP,), NONE, tl.float32)
        l_WR = tl.zeros((4, 8, RP), tl.float32)
        if RP == 4:
            acc0 = tl.zeros((D, 16), tl.float32)
        else:
            acc0 = tl.zeros((64, RP * 2), tl.float32)
        acc1 = acc0
        for t in tl.range(t0 if ASM else t0.handle.data.item(), t1 if ASM else t1.handle.data.item(), num_stages=STAGES):
            base = pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES
            page = tl.load(table + tl.minimum(t + 1, t1 - 1))
            k_TB = tl.load(base + t_T[:, None] * KB + tl.arange(0, KB)[None, :])
            ks_T = word_of(base + KS_AT, t_T, 2 * KG)
            vs_T = word_of(base + VS_AT, t_T, KG)
            trailer = (pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES + TRAILER_AT).to(tl.pointer_type(tl.float32))
            next_k_factor = tl.load(trailer)
            next_v_factor = tl.load(trailer + 1)
            k_lo = lo_plane(k_TB)
            k_hi = hi_plane(k_TB)
            if HL == 2:
                s_lo = tl.sum(tl.reshape(dot(k_lo, ql_0, tl.zeros((128, QC), tl.float32)), (128, KC, RP, 2)), axis=3)
                s_hi = tl.sum(tl.reshape(dot(k_hi, qh_0, tl.zeros((128, QC), tl.float32)), (128, KC, RP, 2)), axis=3)
            else:
                s_lo = tl.reshape(dot(k_lo, ql_0, dot(k_lo, ql_1, tl.zeros((128, QC), tl.float32))), (128, KC, RP))
                s_hi = tl.reshape(dot(k_hi, qh_0, dot(k_hi, qh_1, tl.zeros((128, QC), tl.float32))), (128, KC, RP))
            if KC == 2:
                s0, s2 = tl.split(tl.permute(s_lo, (0, 2, 1)))
                s1, s3 = tl.split(tl.permute(s_hi, (0, 2, 1)))
            else:
                s0 = tl.reshape(s_lo, (128, RP))
                s1 = tl.reshape(s_hi, (128, RP))
            s_TR = s0 * scale_of(ks_T, 0)[:, None] + s1 * scale_of(ks_T, 1)[:, None]
            if KG == 2:
                s_TR = s_TR + s2 * scale_of(ks_T, 2)[:, None]
                s_TR = s_TR + s3 * scale_of(ks_T, 3)[:, None]
            score_unit = back * (k_factor * 1.329227995784916e36)
            if OUT > 2:
                o_P = tl.arange(0, OP)
                at_TO = (base + KO_AT).to(tl.pointer_type(tl.float16)) + t_T[:, None] * OUT + o_P[None, :]
                ko_TO = tl.load(at_TO, mask=(o_P < OUT)[None, :], other=0)
                if OP == 4:
                    ko_TO = tl.reshape(tl.join(ko_TO, ko_TO), (128, 8))
                if OP <= 8:
                    ko_TO = tl.reshape(tl.permute(tl.join(ko_TO, ko_TO), (0, 2, 1)), (128, 16))
                so_TX = dot(ko_TO, qo_0, tl.zeros((128, XC), tl.float32))
                if OP == 16:
                    so_TX = dot(ko_TO, qo_1, so_TX)
                if RP == 4:
                    so_TX, _ = tl.split(tl.reshape(so_TX, (128, 8, 2)))
                if RP < 16:
                    so_TX, _ = tl.split(tl.permute(tl.reshape(so_TX, (128, 2, RP)), (0, 2, 1)))
                s_TR = s_TR * score_unit + so_TX
                score_unit = 1.0
            elif OUT > 0:
                ko_T = word_of(base + KO_AT, t_T, 2 * OUT)
                s_TR = s_TR * score_unit + half_of(ko_T)[:, None] * qo_0[None, :]
                if OUT == 2:
                    s_TR += half_of(ko_T >> 16)[:, None] * qo_1[None, :]
                score_unit = 1.0
            if SOFTCAP > 0:
                s_TR = bend(s_TR * score_unit + mean_R[None, :], SOFTCAP)
                score_unit = 1.0
            s_TR = seen(s_TR, t * 128 + t_T + SINKS, t * 128 + t_T < stored, qpos_R, T, SLIDING)
            new_R = tl.maximum(m_R, tl.max(s_TR, axis=0) * score_unit)
            alpha_R = exp2(m_R - new_R)
            m_R = new_R
            # p * 2^120, so that times a scale of 2^-120 it is an FP8 number
            p_TR = exp2(s_TR * score_unit + (120.0 - new_R)[None, :])
            p_WR = tl.sum(tl.sum(tl.reshape(p_TR, (2, 4, 2, 8, RP)), axis=2), axis=0)
            l_WR = l_WR * alpha_R[None, None, :] + p_WR * 7.523163845262640e-37
            p0_TR = p_TR * scale_of(vs_T, 0)[:, None]
            if RP == 4:
                if KG == 2:
                    p1_TR = p_TR * scale_of(vs_T, 1)[:, None]
                    p_TX = tl.reshape(tl.permute(tl.join(p0_TR, p1_TR), (0, 2, 1)), (128, 8))
                    pa, pb = _p8(p_TX, 8, True, False)
                else:
                    pa, pb = _p8(p0_TR, 4, True, True)
                v_CB = tl.load(base + V_AT + tl.arange(0, D)[:, None] * 64 + b_X[None, :])
                alpha_X = tl.reshape(tl.broadcast_to(alpha_R[None, :, None], (2, RP, 2)), (16,))
                acc0 = acc0 * alpha_X[None, :] + _pv(v_CB, pa, pb, D, 16) * (v_factor * 16384.0)
            elif KG == 1:
                pa, pb = _p8(p0_TR, RP, False, False)
                v_CB = tl.load(base + V_AT + b_X[:, None] * 64 + b_X[None, :])
                alpha_X = tl.reshape(tl.broadcast_to(alpha_R[None, :], (2, RP)), (RP * 2,))
                acc0 = acc0 * alpha_X[None, :] + _pv(v_CB, pa, pb, 64, RP * 2) * (v_factor * 16384.0)
            else:
                p1_TR = p_TR * scale_of(vs_T, 1)[:, None]
                p0a, p0b = _p8(p0_TR, RP, False, False)
                p1a, p1b = _p8(p1_TR, RP, False, False)
                v0_CB = tl.load(base + V_AT + b_X[:, None] * 64 + b_X[None, :])
                v1_CB = tl.load(base + V_AT + 4096 + b_X[:, None] * 64 + b_X[None, :])
                alpha_X = tl.reshape(tl.broadcast_to(alpha_R[None, :], (2, RP)), (RP * 2,))
                acc0 = acc0 * alpha_X[None, :] + _pv(v0_CB, p0a, p0b, 64, RP * 2) * (v_factor * 16384.0)
                acc1 = acc1 * alpha_X[None, :] + _pv(v1_CB, p1a, p1b, 64, RP * 2) * (v_factor * 16384.0)
            k_factor = next_k_factor
            v_factor = next_v_factor

        part = part_ptr + slot * R * D + r_R[None, :] * D
        on_R = (r_R < R)[None, :]
        if RP == 4:
            # columns are (channel half, row, term); only the half that a channel lies in is its own
            h = tl.arange(0, KG)
            own = h[:, None, None, None] == tl.arange(0, 2)[None, None, :, None]
            acc = tl.sum(tl.reshape(acc0, (KG, 64, 2, RP, 2)), axis=4)
            acc = tl.reshape(tl.sum(tl.where(own, acc, 0.0), axis=2), (D, RP))
            tl.store(part + tl.arange(0, D)[:, None], acc, mask=on_R)
        else:
            tl.store(part + b_X[:, None], tl.sum(tl.reshape(acc0, (64, 2, RP)), axis=1), mask=on_R)
            if KG == 2:
                tl.store(part + 64 + b_X[:, None], tl.sum(tl.reshape(acc1, (64, 2, RP)), axis=1), mask=on_R)
        tl.store(ml_ptr + (slot * R + r_R) * 2, m_R, mask=r_R < R)
        tl.store(ml_ptr + (slot * R + r_R) * 2 + 1, tl.sum(tl.sum(l_WR, axis=0), axis=0), mask=r_R < R)


PROGRAMS_PER_SM = 4
RECENT = 2  # what a program of FP16 tokens costs, in pages
STAGES = 3
REGISTERS = 128  # for up to 8 rows: four programs of four warps fill a multiprocessor's register file
PDL = True
MAX_ROWS = 32  # query rows of one KV head in a launch; more queries take another pass over the pages


def serves(layout: PageLayout, group: int) -> bool:
    """Whether `attend` reads this layout with that many query heads per KV head."""
    f = layout.format
    return (group <= MAX_ROWS and f.code == "fp4" and f.order == "planes" and f.scale == "e4m3" and f.v_axis == "token"
            and f.v_group == 64 and layout.rope == 0 and layout.k_dim == layout.v_dim and layout.k_dim in (64, 128))


def programs_on(device: torch.device) -> int:
    """Programs of one launch: all of them fit on the chip at once."""
    return PROGRAMS_PER_SM * (torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1)


def attend(
    q_BHTd: torch.Tensor, q_len_B: torch.Tensor, pool_PNb: torch.Tensor, table_BP: torch.Tensor, stored_B: torch.Tensor,
    length_B: torch.Tensor, sink_k: torch.Tensor, sink_v: torch.Tensor, recent_k: torch.Tensor, recent_v: torch.Tensor,
    recent_first_B: torch.Tensor,
    book: tuple[torch.Tensor, ...], layout: PageLayout, *, scale: float, sliding: int = 0, softcap: float = 0.0,
    sink_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `naive.attend_naive`, for layouts that it `serves`; int32 tables and lengths, contiguous tensors.

    The host reads nothing: capturable, and a replay sees whatever lengths and tables lie there.
    """
    B, H, T_all, D = q_BHTd.shape
    N, G = pool_PNb.shape[1], q_BHTd.shape[1] // pool_PNb.shape[1]
    sinks, ring = sink_k.shape[2], max(recent_k.shape[2], 1)
    channels, k_mean, k_gain, _, v_gain, _ = book
    programs, dev = programs_on(q_BHTd.device), q_BHTd.device
    pdl = {"launch_pdl": True} if dev.type == "cuda" and PDL else {}
    out = torch.empty(B, H, T_all, D, dtype=torch.float32, device=dev)
    lse = torch.empty(B, H, T_all, dtype=torch.float32, device=dev)
    step = max(1, MAX_ROWS // G)
    at = {k: v[0] for k, v in layout.offsets.items()}
    BP = max(16, triton.next_power_of_2(B))
    for t_at in range(0, T_all, step):
        T = min(step, T_all - t_at)
        q = q_BHTd[:, :, t_at : t_at + T].contiguous()
        R = G * T
        RP = max(4, triton.next_power_of_2(R))
        items = B * N
        capped = {"maxnreg": REGISTERS} if RP <= 8 else {}
        slots = programs + 2 * items
        part = torch.empty(slots, R, D, dtype=torch.float32, device=dev)
        ml = torch.empty(slots, R, 2, dtype=torch.float32, device=dev)
        span = torch.empty(items, 2, dtype=torch.int32, device=dev)
        attend_pages[(items + programs,)](
            q, q_len_B, pool_PNb, table_BP, stored_B, length_B, sink_k, sink_v, recent_k, recent_v, recent_first_B,
            channels, k_mean, k_gain, part, ml, span,            B, table_BP.shape[1], t_at, scale * LOG2E,
            BP=BP, N=N, R=R, RP=RP, T=T, D=D, OUT=layout.outliers, SINKS=sinks, RING=ring, SLIDING=sliding, SOFTCAP=softcap,
            PAGE_BYTES=layout.page_bytes, V_AT=at["v_codes"], KS_AT=at["k_scales"], VS_AT=at["v_scales"], KO_AT=at["k_outliers"],
            TRAILER_AT=at["trailer"], STAGES=STAGES, RECENT=RECENT, PDL=bool(pdl), num_warps=4, **capped)
        combine[(items * R,)](
            q, q_len_B, length_B, k_mean, v_gain, lse if sink_H is None else sink_H, part, ml, span, out, lse, programs + items, t_at,
            scale * LOG2E, N=N, R=R, T=T, OUT_T=T_all, D=D, DP=triton.next_power_of_2(D),
            SOFTCAP=softcap, LOGIT=sink_H is not None, SB=16,
            PDL=bool(pdl), num_warps=2, **pdl)
    return out, lse
