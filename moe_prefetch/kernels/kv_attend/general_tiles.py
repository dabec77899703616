"""Elements of any page format on their way to FP16 (or BF16) tensor cores, a piece of up to 64 channels at a time.

A byte's nibbles become E5M2 bits, and those with a zero byte below them are FP16: E2M1 times 2^-14, exact. Times an E4M3 scale as FP16
(`scale16`, times 2^7) every product is exact too: six significant bits, a multiple of 2^-17. E8M0 scales need BF16's range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kv_fp4.fused import ASM, coded, dot, swapped, terms, to_e4m3

FP16 = tl.constexpr(0)  # what a page's codes are: PageLayout's code and order
FP8 = tl.constexpr(1)
PLANES = tl.constexpr(2)
LINEAR = tl.constexpr(3)
UNIT = tl.constexpr(128.0)  # an E2M1 code as FP16 times `scale16` is the value times 2^-7


@triton.jit
def lo16(x, CODE: tl.constexpr):
    """The low code of each byte as FP16, times 2^-14."""
    if ASM:
        if CODE == PLANES:
            y = tl.inline_asm_elementwise(
                """{ .reg .b32 a, b; shr.u32 a, $2, 3; shl.b32 b, $2, 7; and.b32 a, a, 0x0E0E0E0E; lop3.b32 a, b, 0x80808080, a, 0xEA;
                prmt.b32 $0, a, 0, 0x1404; prmt.b32 $1, a, 0, 0x3424; }""",
                "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
        else:
            y = tl.inline_asm_elementwise(
                """{ .reg .b32 a, b; shl.b32 a, $2, 1; shl.b32 b, $2, 4; and.b32 a, a, 0x0E0E0E0E; lop3.b32 a, b, 0x80808080, a, 0xEA;
                prmt.b32 $0, a, 0, 0x1404; prmt.b32 $1, a, 0, 0x3424; }""",
                "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    else:
        w = x.to(tl.uint16)
        if CODE == PLANES:
            w = ((w >> 3 & 0x0E) | (w << 7 & 0x80)) << 8
        else:
            w = ((w << 1 & 0x0E) | (w << 4 & 0x80)) << 8
        y = w.to(tl.float16, bitcast=True)
    return y


@triton.jit
def hi16(x, CODE: tl.constexpr):
    """The high code of each byte as FP16, times 2^-14."""
    if ASM:
        if CODE == PLANES:
            y = tl.inline_asm_elementwise(
                "{ .reg .b32 a; and.b32 a, $2, 0x8E8E8E8E; prmt.b32 $0, a, 0, 0x1404; prmt.b32 $1, a, 0, 0x3424; }",
                "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
        else:
            y = tl.inline_asm_elementwise(
                """{ .reg .b32 a; shr.u32 a, $2, 3; and.b32 a, a, 0x0E0E0E0E; lop3.b32 a, $2, 0x80808080, a, 0xEA;
                prmt.b32 $0, a, 0, 0x1404; prmt.b32 $1, a, 0, 0x3424; }""",
                "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    else:
        w = x.to(tl.uint16)
        if CODE == PLANES:
            w = (w & 0x8E) << 8
        else:
            w = ((w >> 3 & 0x0E) | (w & 0x80)) << 8
        y = w.to(tl.float16, bitcast=True)
    return y


@triton.jit
def e4m3(x):
    """E4M3 bytes as FP16, exact."""
    if ASM:
        y = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        w = x.to(tl.uint16)
        y = ((w & 0x80) << 8 | (w & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
    return y


@triton.jit
def keep(x, mask):
    """Bytes, zero where the mask (0xFF or 0, broadcast to them) is."""
    if ASM:
        y = tl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        y = x & mask
    return y


@triton.jit
def byte_at(at, i):
    """Bytes i of a part that starts at a multiple of 4, through the words they lie in: a copy to shared memory takes 4 bytes at least."""
    return tl.load(at.to(tl.pointer_type(tl.int32)) + i // 4) >> (i % 4 * 8) & 0xFF


@triton.jit
def scale16(byte):
    """A positive E4M3 as FP16, times 2^7; any byte gives a finite number."""
    return ((byte & 0x7F) << 7).to(tl.uint16).to(tl.float16, bitcast=True) * 32768.0


@triton.jit
def scale32(byte, E8M0: tl.constexpr):
    """A scale byte as FP32: an E8M0 as it is, an E4M3 times 2^-120 (denormals included)."""
    if E8M0:
        y = (byte << 23).to(tl.float32, bitcast=True)
    else:
        y = ((byte & 0x7F) << 20).to(tl.float32, bitcast=True)
    return y


@triton.constexpr_function
def width(dim, g):
    """Columns of a tile that holds piece g, channels 64 g and on, of `dim`."""
    return 64 if dim - 64 * g > 32 else 32


@triton.constexpr_function
def bytes_of(dim, g):
    """Bytes of a token's piece g of FP4 codes."""
    return min(64, dim - 64 * g) // 2


@triton.constexpr_function
def block_of(dim, g, j, hi, code, block):
    """Scale block of the code in byte j, low or high nibble, of piece g."""
    at = (j + hi * bytes_of(dim, g) if code == 2 else 2 * j + hi) + 64 * g
    return at // block


@triton.jit
def channel_of(j_C, D: tl.constexpr, G: tl.constexpr, HI: tl.constexpr, CODE: tl.constexpr):
    """Channels of the low or high codes in bytes j of piece G."""
    if CODE == PLANES:
        ch_C = 64 * G + HI * bytes_of(D, G) + j_C
    else:
        ch_C = 64 * G + 2 * j_C + HI
    return ch_C


@triton.jit
def scaled(x, j_C, at, row_T, D: tl.constexpr, G: tl.constexpr, HI: tl.constexpr, CODE: tl.constexpr, BLOCK: tl.constexpr,
           BF: tl.constexpr, there_T):
    """Codes of one nibble of bytes x [T, C], times their scales, whose rows begin `row` bytes behind `at`."""
    y = hi16(x, CODE) if HI else lo16(x, CODE)
    FIRST: tl.constexpr = block_of(D, G, 0, HI, CODE, BLOCK)
    LAST: tl.constexpr = block_of(D, G, bytes_of(D, G) - 1, HI, CODE, BLOCK)
    block_C = channel_of(j_C, D, G, HI, CODE) // BLOCK
    if BF:
        s = tl.where(there_T, scale32(byte_at(at, row_T + FIRST), True) * 16384.0, 0.0)[:, None]
        for i in tl.static_range(FIRST + 1, LAST + 1):
            s_T = tl.where(there_T, scale32(byte_at(at, row_T + i), True) * 16384.0, 0.0)
            s = tl.where((block_C == i)[None, :], s_T[:, None], s)
        y = y.to(tl.float32) * s
        if ASM:
            y = y.to(tl.bfloat16)
    else:
        s = scale16(byte_at(at, row_T + FIRST))[:, None]
        for i in tl.static_range(FIRST + 1, LAST + 1):
            s = tl.where((block_C == i)[None, :], scale16(byte_at(at, row_T + i))[:, None], s)
        y = y * s
    return y


@triton.jit
def terms16(x, BF: tl.constexpr):
    """FP32 x as what meets the codes: once in FP16, or BF16 hi and lo."""
    if not BF:
        terms = (x.to(tl.float16),)
    elif ASM:
        hi = x.to(tl.bfloat16)
        terms = (hi, (x - hi.to(tl.float32)).to(tl.bfloat16))
    else:
        terms = (x, x * 0.0)
    return terms


@triton.jit
def dots(a, b, acc, BF: tl.constexpr):
    """Terms a times b."""
    if BF:
        acc = dot(a[1], b, acc)
    return dot(a[0], b, acc)


# query -----------------------------------------------------------------------------------------------------------------
@triton.jit
def q_piece(q_at, row_R, on_R, ch_C, gain_ptr, DQ: tl.constexpr, D: tl.constexpr, GAIN: tl.constexpr):
    """FP32 [R, C]: channels ch of the query rows, divided by the K gain."""
    on_C = ch_C < D
    q_RC = tl.load(q_at + row_R[:, None] * DQ + ch_C[None, :], mask=on_R[:, None] & on_C[None, :], other=0).to(tl.float32)
    if GAIN:
        q_RC = q_RC / tl.load(gain_ptr + ch_C, mask=on_C, other=1.0)[None, :]
    return q_RC


@triton.jit
def q_page(q_at, row_R, on_R, gain_ptr, norm_R, channels_ptr, n, D: tl.constexpr, CODE: tl.constexpr, BF: tl.constexpr,
           OUT: tl.constexpr, SWAPS: tl.constexpr):
    """The query as the pages' pieces meet it: one tile a piece, or one for low and one for high nibbles."""
    qs = ()
    for g in tl.static_range((D + 63) // 64):
        if CODE >= PLANES:
            j_C = tl.arange(0, width(D, g) // 2)
            for hi in tl.static_range(2):
                place_C = channel_of(j_C, D, g, hi, CODE)
                # what scales mean as codes is asked for by no channel
                on_C = (j_C < bytes_of(D, g)) & coded(place_C, SWAPS) if SWAPS > 0 else j_C < bytes_of(D, g)
                ch_C = tl.where(on_C, swapped(place_C, n, channels_ptr, OUT, SWAPS), D)
                qs = qs + (terms16(q_piece(q_at, row_R, on_R, ch_C, gain_ptr, D, D, True) * norm_R[:, None], BF),)
        else:
            ch_C = 64 * g + tl.arange(0, width(D, g))
            qs = qs + (terms16(q_piece(q_at, row_R, on_R, ch_C, gain_ptr, D, D, False) * norm_R[:, None], BF),)
    return qs


# pages -----------------------------------------------------------------------------------------------------------------
@triton.jit
def k_piece(q, q_hi, s_RT, base, t_T, there_T, G: tl.constexpr, D: tl.constexpr, CODE: tl.constexpr, BF: tl.constexpr,
            KS_AT: tl.constexpr, KS_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the scores of piece G of a page's keys."""
    c_C = 64 * G + tl.arange(0, width(D, G))
    if CODE >= PLANES:
        j_C = tl.arange(0, width(D, G) // 2)
        x_TC = tl.load(base + t_T[:, None] * (D // 2) + (32 * G + j_C)[None, :], mask=(j_C < bytes_of(D, G))[None, :], other=0)
        at = base + KS_AT // 4 * 4
        row_T = t_T * KS_ROW + KS_AT % 4
        s_RT = dots(q, tl.trans(scaled(x_TC, j_C, at, row_T, D, G, 0, CODE, BLOCK, BF, there_T)), s_RT, BF)
        s_RT = dots(q_hi, tl.trans(scaled(x_TC, j_C, at, row_T, D, G, 1, CODE, BLOCK, BF, there_T)), s_RT, BF)
    elif CODE == FP8:
        x_TC = tl.load(base + t_T[:, None] * D + c_C[None, :], mask=(c_C < D)[None, :], other=0)
        s_RT = dots(q, tl.trans(e4m3(x_TC)), s_RT, False)
    else:
        k_TC = tl.load(base.to(tl.pointer_type(tl.float16)) + t_T[:, None] * D + c_C[None, :], mask=(c_C < D)[None, :], other=0)
        s_RT = dots(q, tl.trans(k_TC), s_RT, False)
    return s_RT


@triton.jit
def q_native(q_at, row_R, on_R, gain_ptr, norm_R, D: tl.constexpr, RP: tl.constexpr):
    """The query for `k_native`: E4M3 [D, 2 RP], columns (row, term)."""
    d_D = tl.arange(0, D)
    hi, lo = terms(tl.trans(q_piece(q_at, row_R, on_R, d_D, gain_ptr, D, D, True) * norm_R[:, None]))
    return to_e4m3(tl.reshape(tl.join(hi, lo), (D, 2 * RP)))


@triton.jit
def k_native(q, start_R, base, t_T, D: tl.constexpr, KS_AT: tl.constexpr, RP: tl.constexpr):
    """Scores [RP, 128] of a page of `mxfp4` keys: the MMA of sm_100 reads codes and scales as they are stored, and q as E4M3.

    `start` [RP] is added. Triton 3.6 compiles neither a chain of two such products nor one that starts from zeros in a loop.
    """
    x_TC = tl.load(base + t_T[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :])
    s_TC = tl.load(base + KS_AT + t_T[:, None] * (D // 32) + tl.arange(0, D // 32)[None, :])
    start_X = tl.reshape(tl.join(start_R, start_R * 0.0), (2 * RP,))
    start_TX = tl.broadcast_to(start_X[None, :], (128, 2 * RP))
    if ASM:
        ones = tl.full((2 * RP, D // 32), 127, tl.uint8)
        s_TX = tl.dot_scaled(x_TC, s_TC, "e2m1", q, ones, "e4m3", start_TX)
    else:
        k_TD = tl.reshape(tl.join(lo16(x_TC, LINEAR), hi16(x_TC, LINEAR)), (128, D)).to(tl.float32)
        scale_TC = tl.expand_dims(scale32(s_TC.to(tl.int32), True) * 16384.0, 2)
        s_TX = dot(k_TD * tl.reshape(tl.broadcast_to(scale_TC, (128, D // 32, 32)), (128, D)), q, start_TX)
    return tl.trans(tl.sum(tl.reshape(s_TX, (128, RP, 2)), axis=2))


@triton.jit
def v_planes(acc_RC, p_RT, base, t_T, unit, G: tl.constexpr, D: tl.constexpr, RP: tl.constexpr, V_AT: tl.constexpr,
             VS_AT: tl.constexpr, BY_CHANNEL: tl.constexpr, NB: tl.constexpr):
    """`v_piece` for channel-major FP4: p meets the two nibbles apart, tokens 0..63 and 64..127 of the page."""
    c_C = 64 * G + tl.arange(0, width(D, G))
    x_CB = tl.load(base + V_AT + c_C[:, None] * 64 + tl.arange(0, 64)[None, :], mask=(c_C < D)[:, None], other=0)
    lo_CB = lo16(x_CB, PLANES)
    hi_CB = hi16(x_CB, PLANES)
    if BY_CHANNEL:
        lo_CB = lo_CB * scale16(byte_at(base + VS_AT, tl.minimum(c_C, D - 1) * 2))[:, None]
        hi_CB = hi_CB * scale16(byte_at(base + VS_AT, tl.minimum(c_C, D - 1) * 2 + 1))[:, None]
        unit = unit * UNIT
    else:
        p_RT = p_RT * (scale32(byte_at(base + VS_AT, t_T * NB + G), False) * 1.329227995784916e36)[None, :]
        unit = unit * 16384.0
    p_lo, p_hi = tl.split(tl.permute(tl.reshape(p_RT.to(tl.float16), (RP, 2, 64)), (0, 2, 1)))
    d_RC = dot(p_lo, tl.trans(lo_CB), tl.zeros((RP, width(D, G)), tl.float32))
    return acc_RC + dot(p_hi, tl.trans(hi_CB), d_RC) * unit


@triton.jit
def v_linear(acc_RC, p_RT, base, t_T, there_T, unit, G: tl.constexpr, D: tl.constexpr, RP: tl.constexpr, BF: tl.constexpr,
             V_AT: tl.constexpr, VS_AT: tl.constexpr, GROUP: tl.constexpr, NB: tl.constexpr):
    """`v_piece` for token-major FP4: the nibbles are even and odd channels."""
    C: tl.constexpr = width(D, G) // 2
    j_C = tl.arange(0, C)
    x_TC = tl.load(base + V_AT + t_T[:, None] * (D // 2) + (32 * G + j_C)[None, :], mask=(j_C < bytes_of(D, G))[None, :], other=0)
    p = terms16(p_RT, BF)
    zero_RC = tl.zeros((RP, C), tl.float32)
    lo_RC = dots(p, scaled(x_TC, j_C, base + VS_AT, t_T * NB, D, G, 0, LINEAR, GROUP, BF, there_T), zero_RC, BF)
    hi_RC = dots(p, scaled(x_TC, j_C, base + VS_AT, t_T * NB, D, G, 1, LINEAR, GROUP, BF, there_T), zero_RC, BF)
    if not BF:
        unit = unit * UNIT
    return acc_RC + tl.reshape(tl.join(lo_RC, hi_RC), (RP, 2 * C)) * unit


@triton.jit
def v_piece(acc_RC, p_RT, base, t_T, there_T, unit, G: tl.constexpr, D: tl.constexpr, RP: tl.constexpr, CODE: tl.constexpr,
            BF: tl.constexpr, V_AT: tl.constexpr, VS_AT: tl.constexpr, BY_CHANNEL: tl.constexpr, GROUP: tl.constexpr, NB: tl.constexpr):
    """Adds p times piece G of a page's values."""
    c_C = 64 * G + tl.arange(0, width(D, G))
    if CODE == PLANES:
        acc_RC = v_planes(acc_RC, p_RT, base, t_T, unit, G, D, RP, V_AT, VS_AT, BY_CHANNEL, NB)
    elif CODE == LINEAR:
        acc_RC = v_linear(acc_RC, p_RT, base, t_T, there_T, unit, G, D, RP, BF, V_AT, VS_AT, GROUP, NB)
    elif CODE == FP8:
        x_CT = tl.load(base + V_AT + c_C[:, None] * 128 + t_T[None, :], mask=(c_C < D)[:, None], other=0)
        x_CT = keep(x_CT, tl.where(there_T, 0xFF, 0).to(tl.uint8)[None, :])
        acc_RC = dot(p_RT.to(tl.float16), tl.trans(e4m3(x_CT)), acc_RC)
    else:
        at_TC = (base + V_AT).to(tl.pointer_type(tl.float16)) + t_T[:, None] * D + c_C[None, :]
        v_TC = tl.load(at_TC, mask=there_T[:, None] & (c_C < D)[None, :], other=0)
        acc_RC = dot(p_RT.to(tl.float16), v_TC, acc_RC)
    return acc_RC


@triton.jit
def zeros(R: tl.constexpr, D: tl.constexpr):
    accs = ()
    for g in tl.static_range((D + 63) // 64):
        accs = accs + (tl.zeros((R, width(D, g)), tl.float32),)
    return accs


@triton.jit
def seen(s_RT, kpos_T, there_T, qpos_R, SLIDING: tl.constexpr):
    """-inf where a key is absent, or not visible to its query."""
    seen_RT = there_T[None, :] & (kpos_T[None, :] <= qpos_R[:, None])
    if SLIDING > 0:
        seen_RT = seen_RT & (kpos_T[None, :] > qpos_R[:, None] - SLIDING)
    return tl.where(seen_RT, s_RT, float("-inf"))


# schedule --------------------------------------------------------------------------------------------------------------
@triton.jit
def units_of(stored_ptr, length_ptr, q_len_ptr, B, BP: tl.constexpr, ITEMS: tl.constexpr, SINKS: tl.constexpr, SLIDING: tl.constexpr):
    """Per sequence: its first visible page, the units of one item (visible pages and one for FP16 tokens), and the running sum of those of
    all items, its own included.
    """
    b_B = tl.arange(0, BP)
    pages_B = (tl.load(stored_ptr + b_B, mask=b_B < B, other=0) + 127) // 128
    first_B = tl.zeros((BP,), tl.int32)
    if SLIDING > 0:
        oldest_B = tl.load(length_ptr + b_B, mask=b_B < B, other=0) - tl.load(q_len_ptr + b_B, mask=b_B < B, other=0) - SLIDING + 1 - SINKS
        first_B = tl.minimum(tl.maximum(oldest_B, 0) // 128, pages_B)
    units_B = tl.where(b_B < B, pages_B - first_B + 1, 0)
    return first_B, units_B, tl.cumsum(units_B * ITEMS, 0)


@triton.jit
def item_at(unit, end, first_B, units_B, ends_B, BP: tl.constexpr, ITEMS: tl.constexpr):
    """Sequence, item within it, its first visible page and units, and the range of these from `unit` on that ends before `end`."""
    b = tl.sum((ends_B <= unit).to(tl.int32), axis=0)
    mine_B = tl.arange(0, BP) == b
    units = tl.sum(tl.where(mine_B, units_B, 0), axis=0)
    before = tl.sum(tl.where(mine_B, ends_B, 0), axis=0) - ITEMS * units
    first = tl.sum(tl.where(mine_B, first_B, 0), axis=0)
    within = (unit - before) // units
    u0 = unit - before - within * units
    return b, within, first, units, u0, tl.minimum(units, u0 + end - unit)
