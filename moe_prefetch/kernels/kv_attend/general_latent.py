"""Attention over MLA pages (a latent that is K and V, and a rotary part that is K only), in Triton, in latent space.

Each code is decoded once: to FP16 in shared memory, where the scores' MMA (M = tokens) and the output's (M = 16 query heads) both read it.
DeepSeek-V2, arXiv 2405.04434, section 2.1; the absorbed form of decode.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...kv.format import PageLayout
from ..kv_fp4.fused import ASM, NONE, bend, dot, exp2, seen
from .general import LOG2E, merge_parts
from .general_tiles import FP8, FP16, UNIT, byte_at, e4m3, item_at, keep, scale16, scale32, units_of
from .latent_recent import latent_recent, softmax_step


@triton.jit
def word16(x, CODE: tl.constexpr):
    """Of each 16-bit word of `planes` codes the code CODE, as FP16 times 2^-14: low nibble of byte 0, of byte 1, high of byte 0, of byte 1.

    Not pure, so that the compiler keeps the result instead of decoding again for its second use.
    """
    if ASM:
        if CODE == 0:
            y = tl.inline_asm_elementwise(
                """{ .reg .b32 a, b; shl.b32 a, $1, 5; shl.b32 b, $1, 15; and.b32 a, a, 0x0E000E00;
                lop3.b32 $0, b, 0x80008000, a, 0xEA; }""", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2)
        elif CODE == 1:
            y = tl.inline_asm_elementwise(
                """{ .reg .b32 a, b; shr.u32 a, $1, 3; shl.b32 b, $1, 7; and.b32 a, a, 0x0E000E00;
                lop3.b32 $0, b, 0x80008000, a, 0xEA; }""", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2)
        elif CODE == 2:
            y = tl.inline_asm_elementwise(
                "{ .reg .b32 a; shl.b32 a, $1, 8; and.b32 $0, a, 0x8E008E00; }", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2)
        else:
            y = tl.inline_asm_elementwise("and.b32 $0, $1, 0x8E008E00;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2)
    else:
        if CODE == 0:
            w = (x << 5 & 0x0E00) | (x << 15 & 0x8000)
        elif CODE == 1:
            w = (x >> 3 & 0x0E00) | (x << 7 & 0x8000)
        elif CODE == 2:
            w = x << 8 & 0x8E00
        else:
            w = x & 0x8E00
        y = w.to(tl.float16, bitcast=True)
    return y


@triton.jit
def held(x):
    """FP16 that goes to an MMA through registers: a tile read from its buffer by an asynchronous MMA would need one buffer more."""
    if ASM:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2)
    return x


@triton.jit
def channels_of(P: tl.constexpr, CODE: tl.constexpr):
    """The 64 channels of piece P: natural order, or (FP4) those of code P % 4 in words 64 (P // 4) and on."""
    c_C = tl.arange(0, 64)
    if CODE == FP16 or CODE == FP8:
        ch_C = 64 * P + c_C
    else:
        ch_C = P // 4 * 256 + c_C // 16 * 64 + P % 4 // 2 * 32 + c_C % 16 * 2 + P % 2
    return ch_C


@triton.jit
def per_word(s_TG, TT: tl.constexpr):
    """Scales of four blocks beside the 64 words of these."""
    return tl.reshape(tl.broadcast_to(tl.expand_dims(s_TG, 2), (TT, 4, 16)), (TT, 64))


@triton.jit
def latent_bytes(base, t_T, there_T, D: tl.constexpr, ROPE: tl.constexpr, CODE: tl.constexpr, KS_AT: tl.constexpr, ROPE_AT: tl.constexpr):
    """What a page holds of tokens t: the rotary part, then pieces of the latent; FP4: words of 256 channels and their scales in turn."""
    c_C = tl.arange(0, 64)
    parts = (tl.load((base + ROPE_AT).to(tl.pointer_type(tl.float16)) + t_T[:, None] * ROPE + tl.arange(0, ROPE)[None, :]),)
    if CODE == FP16:
        for g in tl.static_range(D // 64):
            at_TC = base.to(tl.pointer_type(tl.float16)) + t_T[:, None] * D + 64 * g + c_C[None, :]
            parts = parts + (tl.load(at_TC, mask=there_T[:, None], other=0),)
    elif CODE == FP8:
        for g in tl.static_range(D // 64):
            parts = parts + (tl.load(base + t_T[:, None] * D + 64 * g + c_C[None, :]),)
    else:
        for h in tl.static_range(D // 256):
            x_TC = tl.load(base.to(tl.pointer_type(tl.uint16)) + t_T[:, None] * (D // 4) + 64 * h + c_C[None, :])
            at_TG = (base + KS_AT).to(tl.pointer_type(tl.uint16)) + t_T[:, None] * (D // 64) + 4 * h + tl.arange(0, 4)[None, :]
            parts = parts + (x_TC, tl.load(at_TG))
    return parts


@triton.jit
def latent_tiles(parts, there_T, D: tl.constexpr, CODE: tl.constexpr, TT: tl.constexpr):
    """The latent as FP16 pieces [TT, 64] in the order of `channels_of`; FP4: times 2^-7, the page's factor left out."""
    tiles = ()
    if CODE == FP16:
        for g in tl.static_range(D // 64):
            tiles = tiles + (parts[g + 1],)
    elif CODE == FP8:
        for g in tl.static_range(D // 64):
            tiles = tiles + (e4m3(keep(parts[g + 1], tl.where(there_T, 0xFF, 0).to(tl.uint8)[:, None])),)
    else:
        for h in tl.static_range(D // 256):
            x_TC = parts[2 * h + 1]
            s_TG = parts[2 * h + 2].to(tl.int32)
            lo_TC = per_word(scale16(s_TG), TT)
            hi_TC = per_word(scale16(s_TG >> 8), TT)
            tiles = tiles + (word16(x_TC, 0) * lo_TC, word16(x_TC, 1) * lo_TC, word16(x_TC, 2) * hi_TC, word16(x_TC, 3) * hi_TC)
    return tiles


@triton.jit
def attend_latent(
    q_ptr, q_len_ptr, pool_ptr, table_ptr, stored_ptr, length_ptr, sink_k_ptr, recent_k_ptr, recent_first_ptr, k_mean_ptr, k_gain_ptr,
    part_ptr, ml_ptr, span_ptr, B, table_width, scale_log2,
    BP: tl.constexpr, N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, T: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
    CODE: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr,
    PAGE_BYTES: tl.constexpr, KS_AT: tl.constexpr, ROPE_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
    TT: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):
    """As `general.attend_general`, for pages whose latent (D channels) is K and V, beside ROPE channels that are K only.

    A program writes slot `program + 2 item` of each item it meets, and the one after it for the item's FP16 tokens.
    """
    ITEMS: tl.constexpr = N * ((R + RP - 1) // RP)
    DQ: tl.constexpr = D + ROPE
    PT: tl.constexpr = 128 // TT
    first_B, units_B, ends_B = units_of(stored_ptr, length_ptr, q_len_ptr, B, BP, ITEMS, SINKS, SLIDING)
    total = tl.max(ends_B, axis=0)
    share = tl.cdiv(total, tl.num_programs(0))
    program = tl.program_id(0)
    unit = program * share
    end = tl.minimum(unit + share, total)
    r_R = tl.arange(0, RP)
    i_T = tl.arange(0, TT)
    c_O = tl.arange(0, ROPE)
    while unit < end:
        b, within, first, units, u0, u1 = item_at(unit, end, first_B, units_B, ends_B, BP, ITEMS)
        n = within // (ITEMS // N)
        unit += u1 - u0
        item = b * ITEMS + within
        slot = program + 2 * item
        if u0 == 0:
            tl.store(span_ptr + item * 2, slot)
        if u1 == units:
            tl.store(span_ptr + item * 2 + 1, slot + 2)
        stored = tl.load(stored_ptr + b)
        length = tl.load(length_ptr + b)
        q_len = tl.load(q_len_ptr + b)
        row_R = within % (ITEMS // N) * RP + r_R
        on_R = row_R < R
        qpos_R = tl.where(on_R & (row_R % T < q_len), length - q_len + row_R % T, -1)
        q_at = q_ptr + (b * N + n) * R * DQ

        # a row's largest element becomes 256
        at_OR = q_at + row_R[None, :] * DQ + D + c_O[:, None]
        rope_OR = tl.load(at_OR, mask=on_R[None, :], other=0).to(tl.float32)
        amax_R = tl.maximum(tl.max(tl.abs(rope_OR), axis=0), 1.0e-30)
        mean_R = tl.zeros((RP,), tl.float32)
        for p in tl.static_range(D // 64):
            ch_C = channels_of(p, CODE)
            q_CR = tl.load(q_at + row_R[None, :] * DQ + ch_C[:, None], mask=on_R[None, :], other=0).to(tl.float32)
            amax_R = tl.maximum(amax_R, tl.max(tl.abs(q_CR), axis=0))
            if CODE > FP8:
                mean_R += tl.sum(q_CR * tl.load(k_mean_ptr + n * D + ch_C)[:, None], axis=0)
                amax_R = tl.maximum(amax_R, tl.max(tl.abs(q_CR / tl.load(k_gain_ptr + n * D + ch_C)[:, None]), axis=0))
        mean_R = mean_R * scale_log2
        norm_R = 256.0 / amax_R
        back_R = amax_R * (scale_log2 / 256.0)

        factor = 1.0
        ratio = 1.0
        m_R = tl.full((RP,), NONE, tl.float32)
        mv_R = m_R
        l_TR = tl.zeros((TT, RP), tl.float32)
        accs = ()
        for _ in tl.static_range(D // 64):
            accs = accs + (tl.zeros((RP, 64), tl.float32),)
        t0 = (first + u0) * PT
        t1 = (first + tl.minimum(u1, units - 1)) * PT
        if t0 < t1:
            qs = ((rope_OR * norm_R[None, :]).to(tl.float16),)
            for p in tl.static_range(D // 64):
                ch_C = channels_of(p, CODE)
                q_CR = tl.load(q_at + row_R[None, :] * DQ + ch_C[:, None], mask=on_R[None, :], other=0).to(tl.float32)
                if CODE > FP8:
                    q_CR = q_CR / tl.load(k_gain_ptr + n * D + ch_C)[:, None]
                qs = qs + ((q_CR * norm_R[None, :]).to(tl.float16),)
            table = table_ptr + b * table_width
            base = pool_ptr + (tl.load(table + t0 // PT).to(tl.int64) * N + n) * PAGE_BYTES
            page = tl.load(table + tl.minimum(t0 + 1, t1 - 1) // PT)
            if CODE > FP8:
                factor = tl.load((base + TRAILER_AT).to(tl.pointer_type(tl.float32))) * UNIT
            if AHEAD:
                parts = latent_bytes(base, t0 % PT * TT + i_T, i_T >= 0, D, ROPE, CODE, KS_AT, ROPE_AT)
            for t in tl.range(t0 if ASM else t0.handle.data.item(), t1 if ASM else t1.handle.data.item(), num_stages=STAGES):
                t_T = t % PT * TT + i_T
                there_T = t // PT * 128 + t_T < stored
                next_base = pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES
                page = tl.load(table + tl.minimum(t + 2, t1 - 1) // PT)
                if not AHEAD:
                    parts = latent_bytes(base, t_T, there_T, D, ROPE, CODE, KS_AT, ROPE_AT)
                rope_TO = held(parts[0])
                tiles = latent_tiles(parts, there_T, D, CODE, TT)
                if CODE == FP8:
                    scale_T = byte_at(base + KS_AT, t_T)
                if CODE > FP8:
                    next_factor = tl.load((next_base + TRAILER_AT).to(tl.pointer_type(tl.float32))) * UNIT
                if AHEAD:
                    # while this tile is worked on
                    parts = latent_bytes(next_base, (t + 1) % PT * TT + i_T, i_T >= 0, D, ROPE, CODE, KS_AT, ROPE_AT)
                base = next_base
                s_TR = tl.zeros((TT, RP), tl.float32)
                for p in tl.static_range(D // 64):
                    s_TR = dot(tiles[p], qs[p + 1], s_TR)
                if CODE == FP8:
                    s_TR = s_TR * scale32(scale_T, True)[:, None]
                # the rotary part knows no factor
                s_TR = dot(rope_TO, qs[0], s_TR * factor) * back_R[None, :]
                if CODE > FP8:
                    s_TR += mean_R[None, :]
                if SOFTCAP > 0:
                    s_TR = bend(s_TR, SOFTCAP)
                s_TR = seen(s_TR, SINKS + t // PT * 128 + t_T, there_T, qpos_R, T, SLIDING)
                p_TR, alpha_R, m_R, l_TR = softmax_step(s_TR, m_R, l_TR)
                if CODE == FP8:
                    # the scale joins the exponent, under a maximum of its own, so that p fills FP16
                    s_TR += (scale_T - 127).to(tl.float32)[:, None]
                    p_TR, alpha_R, mv_R, _unused_TR = softmax_step(s_TR, mv_R, l_TR)
                if CODE > FP8:
                    # accumulators are in units of the page's factor, a power of two
                    alpha_R = alpha_R * ratio
                p_RT = tl.trans(p_TR.to(tl.float16))
                new = ()
                for p in tl.static_range(D // 64):
                    new = new + (dot(p_RT, tiles[p], accs[p] * alpha_R[:, None]),)
                accs = new
                if CODE > FP8:
                    ratio = factor / next_factor
                    factor = next_factor
        l_R = tl.sum(l_TR, axis=0)
        part_at = part_ptr + slot * RP * D
        for p in tl.static_range(D // 64):
            ch_C = channels_of(p, CODE)
            acc_RC = accs[p]
            if CODE == FP8:
                acc_RC = acc_RC * exp2(mv_R - m_R)[:, None]
            elif CODE > FP8:
                acc_RC = acc_RC * factor / tl.load(k_gain_ptr + n * D + ch_C)[None, :]
                acc_RC += l_R[:, None] * tl.load(k_mean_ptr + n * D + ch_C)[None, :]
            tl.store(part_at + r_R[:, None] * D + ch_C[None, :], acc_RC)
        tl.store(ml_ptr + (slot * RP + r_R) * 2, m_R)
        tl.store(ml_ptr + (slot * RP + r_R) * 2 + 1, l_R)
        if u1 == units:
            latent_recent(
                q_at, row_R, on_R, norm_R, back_R, qpos_R, b * N + n, stored, length, tl.load(recent_first_ptr + b), sink_k_ptr,
                recent_k_ptr, part_ptr + (slot + 1) * RP * D, ml_ptr + (slot + 1) * RP * 2, T, D, ROPE, RP, SINKS, RING, SLIDING, SOFTCAP)


# launch ----------------------------------------------------------------------------------------------------------------
ROWS = 16  # query rows of an item; more heads or drafts are further items over the same pages
TILE = 64  # tokens
# Gluon is experimental: another version's may differ
GLUON = triton.__version__.startswith("3.6.")
if GLUON:
    from . import fused_latent
FUSED = ASM.value and GLUON


def serves(layout: PageLayout, group: int = 1) -> bool:
    """Whether `attend` reads this layout: MLA in fp16, fp8 or an fp4-* format."""
    return (layout.v_dim == 0 and layout.k_dim % 256 == 0 and layout.k_dim <= 512 and layout.rope in (16, 32, 64) and layout.outliers == 0
            and layout.format.name not in ("nvfp4", "mxfp4"))


def constants(layout: PageLayout, heads: int, rows: int, queries: int, batch: int, *, sinks: int, ring: int, sliding: int,
              softcap: float) -> dict[str, object]:
    """Compile-time arguments of `attend_latent`."""
    at = {k: v[0] for k, v in layout.offsets.items()}
    code = layout.format.code
    return {
        "BP": max(16, triton.next_power_of_2(batch)), "N": heads, "R": rows, "RP": ROWS, "T": queries, "D": layout.k_dim,
        "ROPE": layout.rope, "CODE": ["fp16", "fp8", "fp4"].index(code), "SINKS": sinks, "RING": max(ring, 1), "SLIDING": sliding,
        "SOFTCAP": softcap, "PAGE_BYTES": layout.page_bytes, "KS_AT": at["k_scales"], "ROPE_AT": at["k_rope"],
        "TRAILER_AT": at["trailer"], "TT": TILE,
        # FP4 tiles come one ahead through registers, larger ones through shared memory
        "STAGES": 1 if code == "fp4" else 2, "AHEAD": code == "fp4",
    }


def programs_on(device: torch.device, layout: PageLayout) -> int:
    """Programs of one launch: all of them fit on the chip at once."""
    per_sm = 1 if layout.format.code == "fp8" else 2
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
    N, dev, D = pool_PNb.shape[1], q_BHTd.device, layout.k_dim
    R = H // N * T
    out = torch.empty(B, H, T, D, dtype=torch.float32, device=dev)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=dev)
    if FUSED and fused_latent.serves(layout, pool_PNb, T, sliding, softcap):
        fused_latent.attend(
            q_BHTd, q_len_B, pool_PNb, table_BP, stored_B, length_B, sink_k, recent_k, recent_first_B, book, layout, out, lse,
            scale * LOG2E, sink_H, triton.next_power_of_2(max(16, B)))
        return out, lse
    const = constants(layout, N, R, T, B, sinks=sink_k.shape[2], ring=recent_k.shape[2], sliding=sliding, softcap=softcap)
    programs, items = programs_on(dev, layout), B * N * -(-R // ROWS)
    part = torch.empty(programs + 2 * items, ROWS, D, dtype=torch.float32, device=dev)
    ml = torch.empty(programs + 2 * items, ROWS, 2, dtype=torch.float32, device=dev)
    span = torch.empty(items, 2, dtype=torch.int32, device=dev)
    attend_latent[(programs,)](
        q_BHTd.contiguous(), q_len_B, pool_PNb, table_BP, stored_B, length_B, sink_k, recent_k, recent_first_B, book[1], book[2],
        part, ml, span, B, table_BP.shape[1], scale * LOG2E, **const, num_warps=4)
    # all partial results of an item at once, 128 channels a program
    some = min(32, max(8, triton.next_power_of_2(programs // max(items, 1) + 2)))
    merge_parts[(B * N * R, D // 128)](
        q_len_B, length_B, lse if sink_H is None else sink_H, part, ml, span, out, lse, N=N, R=R, RP=ROWS, T=T, DV=D,
        DP=128, LOGIT=sink_H is not None, SB=some, num_warps=4)
    return out, lse
