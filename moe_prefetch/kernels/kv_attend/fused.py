"""Attention over FP4 pages on Hopper, in Triton: codes go from the page to the tensor cores as E5M2, never through FP16.

M of the MMA is tokens (scores) or channels (output), N is query rows; q and p enter as E4M3 pairs `hi + lo`. K scales multiply the
accumulators of their blocks (q is block diagonal over them), V scales multiply p, one p per 64 channels. docs/kernels.md counts bytes and
instructions.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ...kv.format import PageLayout
from ..kv_combine.fused import combine
from ..kv_fp4.fused import (
    ASM,
    NONE,
    bend,
    dot,
    exp2,
    fetch,
    half_of,
    hi_plane,
    lo_plane,
    p8,
    pv,
    scale_of,
    seen,
    three_of,
    twice,
    word_of,
)
from ..kv_query.fused import buffers, prepare
from ..kv_recent.fused import attend_recent

# Gluon is experimental: another version's may differ
GLUON = triton.__version__.startswith("3.6.")
if GLUON:
    from . import fused_decode

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
def _cut(p, programs, total):
    """Where share p of `total` begins, rounded down."""
    return total // programs * p + total % programs * p // programs


@triton.jit
def _start(p, programs, total):
    """First page of program p: equal shares; of fewer pages than programs the first ones take one each."""
    sharing = tl.maximum(tl.minimum(programs, total), 1)
    return _cut(tl.minimum(p, sharing), sharing, total)


@triton.jit
def _where(unit, first_B, units_B, ends_B, b_B, N: tl.constexpr, SLIDING: tl.constexpr):
    """Sequence, head, its page and pages of a place in the flat list."""
    b = tl.sum((ends_B <= unit).to(tl.int32), axis=0)
    mine_B = b_B == b
    units = tl.sum(tl.where(mine_B, units_B, 0), axis=0)
    before = tl.sum(tl.where(mine_B, ends_B, 0), axis=0) - N * units
    n = (unit - before) // tl.maximum(units, 1)
    first = tl.sum(tl.where(mine_B, first_B, 0), axis=0) if SLIDING > 0 else 0
    return b, n, first, unit - before - n * units, units


@triton.jit(do_not_specialize=["table_width"])
def attend_pages(
    q8_ptr, qo_ptr, qf_ptr, q_len_ptr, pool_ptr, table_ptr, stored_ptr, length_ptr, part_ptr, ml_ptr, span_ptr, B, table_width, t_at,
    BP: tl.constexpr, N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, T: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr,
    KC: tl.constexpr, HL: tl.constexpr, XC: tl.constexpr, SWAPS: tl.constexpr,
    SINKS: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr,
    PAGE_BYTES: tl.constexpr, V_AT: tl.constexpr, KS_AT: tl.constexpr, VS_AT: tl.constexpr, KO_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """Partial attention over pages: programs take equal shares of the flat list of all items' pages.

    D = dk = dv, 64 or 128, planes, V scale per token and 64 channels. q [B, N, R, D] with R = G T rows, and as `prepare` leaves it; pool
    [P, N, PAGE_BYTES]; part FP32 [slots, R, D], ml FP32 [slots, R, 2] (maximum in log2 units, sum). A program writes slot `program + item`
    of each item it meets; `span` [item, 2] gets an item's first slot and the one after its last; the FP16 tokens' slots come behind all of
    these.
    """
    # p of both 64-channel halves side by side, and both planes of V at once, as long as registers last
    WIDE: tl.constexpr = 8 if D == 128 and OUT != 3 else 4
    ONE: tl.constexpr = RP == 4 or D == 64
    KB: tl.constexpr = D // 2
    KG: tl.constexpr = D // 64
    QC: tl.constexpr = KC * RP * HL
    OP: tl.constexpr = 4 if OUT <= 4 else 8 if OUT <= 8 else 16
    BARE: tl.constexpr = OUT == 0 and SOFTCAP == 0
    if PDL:
        # the next kernel may take the places of programs that have ended
        tl.extra.cuda.gdc_launch_dependents()
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    first_B, units_B, ends_B = _rows(stored_ptr, length_ptr, q_len_ptr, B, BP, N, SINKS, SLIDING)
    b_B = tl.arange(0, BP)
    total = tl.max(ends_B, axis=0)
    unit = _start(program, programs, total)
    end = _start(program + 1, programs, total)
    # DRAM has work while q is prepared
    b, n, first, u0, units = _where(unit, first_B, units_B, ends_B, b_B, N, SLIDING)
    for i in tl.static_range(2):
        page = tl.load(table_ptr + b * table_width + first + tl.minimum(u0 + i, units - 1), mask=unit < end, other=0)
        fetch(pool_ptr + (page.to(tl.int64) * N + tl.where(unit < end, n, 0)) * PAGE_BYTES, PAGE_BYTES)
    if PDL:
        tl.extra.cuda.gdc_wait()

    r_R = tl.arange(0, RP)
    t_T = tl.arange(0, 128)
    b_X = tl.arange(0, 64)
    while unit < end:
        b, n, first, u0, units = _where(unit, first_B, units_B, ends_B, b_B, N, SLIDING)
        u1 = tl.minimum(units, u0 + end - unit)
        t0 = first + u0
        t1 = first + u1
        unit += u1 - u0
        table = table_ptr + b * table_width
        page = tl.load(table + t0)
        stored = tl.load(stored_ptr + b)
        item = b * N + n
        slot = program + item
        if u0 == 0:
            tl.store(span_ptr + item * 2, slot)
        if u1 == units:
            tl.store(span_ptr + item * 2 + 1, slot + 1)
        q8_at = q8_ptr + item * (4 // HL * QC * KB) + tl.arange(0, QC)[None, :] * (2 // HL * KB) + tl.arange(0, 2 // HL * KB)[:, None]
        ql = tl.load(q8_at)
        qh = tl.load(q8_at + 2 // HL * QC * KB)
        back = tl.load(qf_ptr + item * (1 + RP))
        if SOFTCAP > 0:
            mean_R = tl.load(qf_ptr + item * (1 + RP) + 1 + r_R)
        if OUT > 3:
            qo_at = qo_ptr + item * (2 * XC * 16) + tl.arange(0, XC)[None, :] * 16 + tl.arange(0, 16)[:, None]
            qo_0 = tl.load(qo_at)
            if OP == 16:
                qo_1 = tl.load(qo_at + XC * 16)
        elif OUT > 0:
            qo_0 = tl.load(qo_ptr + item * (OUT * RP) + r_R)
            if OUT > 1:
                qo_1 = tl.load(qo_ptr + item * (OUT * RP) + RP + r_R)
            if OUT > 2:
                qo_2 = tl.load(qo_ptr + item * (OUT * RP) + 2 * RP + r_R)
        qpos_R = r_R * 0
        if T > 1 or SLIDING > 0:
            length = tl.load(length_ptr + b)
            q_len = tl.load(q_len_ptr + b)
            qpos_R = tl.where(t_at + r_R % T < q_len, length - q_len + t_at + r_R % T, -1)

        m_R = tl.full((RP,), NONE, tl.float32)
        v_was_R = tl.full((RP,), 1.0, tl.float32)
        l_WR = tl.zeros((4, 8, RP), tl.float32)
        if RP <= WIDE:
            acc0 = tl.zeros((D, RP * 4), tl.float32)
        else:
            acc0 = tl.zeros((64, RP * 2), tl.float32)
        acc1 = acc0
        for t in tl.range(t0 if ASM else t0.handle.data.item(), t1 if ASM else t1.handle.data.item(), num_stages=STAGES):
            base = pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES
            page = tl.load(table + tl.minimum(t + 1, t1 - 1))
            k_TB = tl.load(base + t_T[:, None] * KB + tl.arange(0, KB)[None, :])
            if SWAPS > 0:
                # in the last bytes of the first 32 codes
                ks_T = word_of(base + 28, t_T * (KB // 4), 4) >> (32 - 16 * KG) % 32
            else:
                ks_T = word_of(base + KS_AT, t_T, 2 * KG)
            vs_T = word_of(base + VS_AT, t_T, KG)
            # the page's factors as vectors: scalars would be read past the pipeline, and fences wait for that
            trailer_R = (base + TRAILER_AT).to(tl.pointer_type(tl.float32)) + r_R * 0
            unit_R = tl.minimum(tl.load(trailer_R) * back * 1.329227995784916e36, 3.0e38)
            # an output is held in units of the page's V factor; of zero codes none below 2^-80 is told apart
            v_now_R = tl.maximum(tl.load(trailer_R + 1), 8.271806125530277e-25)
            k_lo = lo_plane(k_TB)
            k_hi = hi_plane(k_TB)
            if HL == 2:
                s_lo = tl.sum(tl.reshape(dot(k_lo, ql, tl.zeros((128, QC), tl.float32)), (128, KC, RP, 2)), axis=3)
                s_hi = tl.sum(tl.reshape(dot(k_hi, qh, tl.zeros((128, QC), tl.float32)), (128, KC, RP, 2)), axis=3)
            else:
                s_lo = tl.reshape(dot(twice(k_lo, KB), ql, tl.zeros((128, QC), tl.float32)), (128, KC, RP))
                s_hi = tl.reshape(dot(twice(k_hi, KB), qh, tl.zeros((128, QC), tl.float32)), (128, KC, RP))
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
            if OUT > 3:
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
                s_TR = s_TR * unit_R[None, :] + so_TX
            elif OUT > 0:
                s_TR = s_TR * unit_R[None, :]
                if OUT == 3:
                    ko_T, third_T = three_of(base + KO_AT, t_T)
                    s_TR += half_of(third_T)[:, None] * qo_2[None, :]
                else:
                    ko_T = word_of(base + KO_AT, t_T, 2 * OUT)
                s_TR += half_of(ko_T)[:, None] * qo_0[None, :]
                if OUT > 1:
                    s_TR += half_of(ko_T >> 16)[:, None] * qo_1[None, :]
            elif SOFTCAP > 0:
                s_TR = s_TR * unit_R[None, :]
            if SOFTCAP > 0:
                s_TR = bend(s_TR + mean_R[None, :], SOFTCAP)
            s_TR = seen(s_TR, t * 128 + t_T + SINKS, t * 128 + t_T < stored, qpos_R, T, SLIDING)
            if BARE:
                new_R = tl.maximum(m_R, tl.max(s_TR, axis=0) * unit_R)
            else:
                new_R = tl.maximum(m_R, tl.max(s_TR, axis=0))
            alpha_R = exp2(m_R - new_R)
            m_R = new_R
            # both powers of two
            acc_R = alpha_R * (v_was_R * (0x7F000000 - v_now_R.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True))
            v_was_R = v_now_R
            # p * 2^120, so that times a scale of 2^-120 it is an FP8 number
            if BARE:
                p_TR = exp2(s_TR * unit_R[None, :] + (120.0 - new_R)[None, :])
            else:
                p_TR = exp2(s_TR + (120.0 - new_R)[None, :])
            p_WR = tl.sum(tl.sum(tl.reshape(p_TR, (2, 4, 2, 8, RP)), axis=2), axis=0)
            l_WR = l_WR * alpha_R[None, None, :] + p_WR * 7.523163845262640e-37
            p0_TR = p_TR * scale_of(vs_T, 0)[:, None]
            if RP <= WIDE:
                if KG == 2:
                    p1_TR = p_TR * scale_of(vs_T, 1)[:, None]
                    p_TX = tl.reshape(tl.permute(tl.join(p0_TR, p1_TR), (0, 2, 1)), (128, RP * 2))
                    pa, pb = p8(p_TX, RP * 2, True, False, ONE)
                else:
                    pa, pb = p8(p0_TR, 4, True, True, ONE)
                v_CB = tl.load(base + V_AT + tl.arange(0, D)[:, None] * 64 + b_X[None, :])
                alpha_X = tl.reshape(tl.broadcast_to(acc_R[None, :, None], (2, RP, 2)), (RP * 4,))
                acc0 = acc0 * alpha_X[None, :] + pv(v_CB, pa, pb, D, RP * 4, ONE)
            elif KG == 1:
                pa, pb = p8(p0_TR, RP, False, False, ONE)
                v_CB = tl.load(base + V_AT + b_X[:, None] * 64 + b_X[None, :])
                alpha_X = tl.reshape(tl.broadcast_to(acc_R[None, :], (2, RP)), (RP * 2,))
                acc0 = acc0 * alpha_X[None, :] + pv(v_CB, pa, pb, 64, RP * 2, ONE)
            else:
                p1_TR = p_TR * scale_of(vs_T, 1)[:, None]
                p0a, p0b = p8(p0_TR, RP, False, False, ONE)
                p1a, p1b = p8(p1_TR, RP, False, False, ONE)
                v0_CB = tl.load(base + V_AT + b_X[:, None] * 64 + b_X[None, :])
                v1_CB = tl.load(base + V_AT + 4096 + b_X[:, None] * 64 + b_X[None, :])
                alpha_X = tl.reshape(tl.broadcast_to(acc_R[None, :], (2, RP)), (RP * 2,))
                acc0 = acc0 * alpha_X[None, :] + pv(v0_CB, p0a, p0b, 64, RP * 2, ONE)
                acc1 = acc1 * alpha_X[None, :] + pv(v1_CB, p1a, p1b, 64, RP * 2, ONE)

        part = part_ptr + slot * R * D + r_R[None, :] * D
        on_R = (r_R < R)[None, :]
        out_R = v_was_R * 16384.0
        if RP <= WIDE:
            # columns are (channel half, row, term); only the half that a channel lies in is its own
            h = tl.arange(0, KG)
            own = h[:, None, None, None] == tl.arange(0, 2)[None, None, :, None]
            acc = tl.sum(tl.reshape(acc0, (KG, 64, 2, RP, 2)), axis=4)
            acc = tl.reshape(tl.sum(tl.where(own, acc, 0.0), axis=2), (D, RP)) * out_R[None, :]
            tl.store(part + tl.arange(0, D)[:, None], acc, mask=on_R)
        else:
            tl.store(part + b_X[:, None], tl.sum(tl.reshape(acc0, (64, 2, RP)), axis=1) * out_R[None, :], mask=on_R)
            if KG == 2:
                tl.store(part + 64 + b_X[:, None], tl.sum(tl.reshape(acc1, (64, 2, RP)), axis=1) * out_R[None, :], mask=on_R)
        tl.store(ml_ptr + (slot * R + r_R) * 2, m_R, mask=r_R < R)
        tl.store(ml_ptr + (slot * R + r_R) * 2 + 1, tl.sum(tl.sum(l_WR, axis=0), axis=0), mask=r_R < R)


# Query rows: programs on a multiprocessor at once, and the registers a thread may have for that (0: as many as it wants).
FIT = {4: (4, 128), 8: (4, 128)}
FIT_MORE = (2, 0)
STAGES = 3
PDL = True
JOIN = 16  # FP16 tokens beyond pieces of 64 that are no piece of their own
MAX_ROWS = 32  # query rows of one KV head in a launch; more queries take another pass over the pages
DECODE = ASM.value and GLUON


def serves(layout: PageLayout, group: int) -> bool:
    """Whether `attend` reads this layout with that many query heads per KV head."""
    f = layout.format
    return (group <= MAX_ROWS and f.code == "fp4" and f.order == "planes" and f.scale == "e4m3" and f.v_axis == "token"
            and f.v_group == 64 and layout.rope == 0 and layout.k_dim == layout.v_dim and layout.k_dim in (64, 128))


def programs_on(device: torch.device, each: int) -> int:
    """Programs that are on the chip at once, `each` on a multiprocessor."""
    return each * (torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1)


def shares(programs: int, items: int) -> int:
    """A number of programs, a little below that, whose equal shares end where items of equal length do as often as can be."""
    return max(range(max(1, programs * 15 // 16), programs - programs // 128 + 1), key=lambda p: (math.gcd(p, items), p))


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
    items, dev = B * N, q_BHTd.device
    pdl = {"launch_pdl": True} if PDL and ASM.value else {}
    out = torch.empty(B, H, T_all, D, dtype=torch.float32, device=dev)
    lse = torch.empty(B, H, T_all, dtype=torch.float32, device=dev)
    step = max(1, MAX_ROWS // G)
    at = {k: v[0] for k, v in layout.offsets.items()}
    for t_at in range(0, T_all, step):
        T = min(step, T_all - t_at)
        q = q_BHTd[:, :, t_at : t_at + T].contiguous()
        R = G * T
        RP = max(4, triton.next_power_of_2(R))
        decode = DECODE and fused_decode.serves(layout, R, pool_PNb, T_all, sliding, softcap)
        fit, registers = fused_decode.FIT[D, RP] if decode else FIT.get(RP, FIT_MORE)
        regs = {"maxnreg": registers} if registers else {}
        most = programs_on(dev, fit)
        programs = most if decode else shares(most, items)
        # a few tokens beyond pieces of 64 are the last one's
        pieces, rest = divmod(max(sinks + ring, 64), 64)
        if rest > JOIN:
            pieces, rest = pieces + 1, 0
        slots = programs + items * (1 + pieces)
        part = torch.empty(slots, R, D, dtype=torch.float32, device=dev)
        ml = torch.empty(slots, R, 2, dtype=torch.float32, device=dev)
        span = torch.empty(items, 2, dtype=torch.int32, device=dev)
        shape = {"BP": max(16, triton.next_power_of_2(B)), "N": N, "R": R, "RP": RP, "D": D, "OUT": layout.outliers, "num_warps": 4}
        if decode:
            fused_decode.attend_decode[(programs,)](
                *fused_decode.sources(pool_PNb, layout), q, channels, k_gain, table_BP, stored_B, part, ml, span, B, table_BP.shape[1],
                shares(most, items), scale * LOG2E, **shape, **fused_decode.constants(layout, RP), **regs, **pdl)
        else:
            # q as hi | lo in columns while they fit the least N of an FP8 MMA; two chained MMAs beyond that
            HL = 2 if D // 64 * RP * 2 <= 16 else 1
            KC = 2 if RP == 4 else D // 64
            XC = max(16, RP)
            shape |= {"KC": KC, "HL": HL, "XC": XC, "SWAPS": len(layout.reserved), "SOFTCAP": softcap, "PDL": bool(pdl)}
            q8, qo, qf = buffers(items, RP, KC * RP * HL, HL, D, layout.outliers, XC, dev)
            prepare[(items,)](q, channels, k_mean, k_gain, q8, qo, qf, scale * LOG2E, **{k: v for k, v in shape.items() if k != "BP"})
            attend_pages[(programs,)](
                q8, qo, qf, q_len_B, pool_PNb, table_BP, stored_B, length_B, part, ml, span, B, table_BP.shape[1], t_at,
                **shape, T=T, SINKS=sinks, SLIDING=sliding, PAGE_BYTES=layout.page_bytes, V_AT=at["v_codes"], KS_AT=at["k_scales"],
                VS_AT=at["v_scales"], KO_AT=at["k_outliers"], TRAILER_AT=at["trailer"], STAGES=STAGES, **regs, **pdl)
        # behind the pages: these take places that `shares` left, and those of programs that have ended
        attend_recent[(items * pieces,)](
            q, q_len_B, stored_B, length_B, sink_k, sink_v, recent_k, recent_v, recent_first_B, part, ml, span, programs + items, t_at,
            scale * LOG2E, N=N, R=R, RP=RP, T=T, D=D, SINKS=sinks, RING=ring, PIECES=pieces, REST=16 if rest else 0, SLIDING=sliding,
            SOFTCAP=softcap, PDL=bool(pdl), num_warps=4, **pdl)
        # one warp for 32 channels while an item has few partial results, more of them for many
        some = min(256, max(8, triton.next_power_of_2(programs // max(items, 1) + 2)))
        parts = min(D // 32, 1 << max(1, 2048 // (items * R)).bit_length() - 1)
        warps = max(1, min(8, some * (D // parts) // 1024))
        combine[(items * R, parts)](
            q, q_len_B, length_B, k_mean, v_gain, lse if sink_H is None else sink_H, part, ml, span, out, lse, programs + items, t_at,
            scale * LOG2E, N=N, R=R, T=T, OUT_T=T_all, D=D, DP=D // parts, SOFTCAP=softcap, LOGIT=sink_H is not None,
            SB=some, PIECES=pieces, PP=triton.next_power_of_2(pieces), PDL=bool(pdl), num_warps=warps, **pdl)
    return out, lse
