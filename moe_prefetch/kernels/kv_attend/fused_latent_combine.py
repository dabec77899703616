"""The last step of decode attention over MLA pages on Hopper, in Gluon: partial results become outputs.

All of a row's partial results are in flight at once, and none of what they are added with waits for the launches before: which slots they
lie in is counted from lengths while those run.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .fused_latent_shares import slots

NONE = gl.constexpr(-1.0e30)


@gluon.jit
def combine_latent(
    q_len_ptr, stored_ptr, length_ptr, k_mean_ptr, k_gain_ptr, logit_ptr, part_ptr, ml_ptr, out_ptr, lse_ptr, B, programs, recent,
    BP: gl.constexpr, N: gl.constexpr, R: gl.constexpr, PIECES: gl.constexpr, SB: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr,
    WARPS: gl.constexpr, LOGIT: gl.constexpr, PDL: gl.constexpr,
):
    """Channels of one query row: its slots of pages, from `recent` on its PIECES of FP16 tokens, and the learned logit.

    SB slots at a time, SPLIT warps share them; a lane has V channels. out FP32 [B, N, R, 512], lse FP32 [B, N, R].
    """
    C: gl.constexpr = WARPS // SPLIT * 32 * V
    BLOCKS: gl.constexpr = (R + 15) // 16
    ITEMS: gl.constexpr = N * BLOCKS
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    TILE: gl.constexpr = gl.BlockedLayout([SB // SPLIT, V], [1, 32], [SPLIT, WARPS // SPLIT], [1, 0])
    CHANNEL: gl.constexpr = gl.SliceLayout(0, TILE)
    SLOT: gl.constexpr = gl.SliceLayout(1, TILE)
    at = gl.program_id(0)
    head = at // R
    row = at % R
    b = head // N
    item = head * BLOCKS + row // 16
    r = row % 16
    c_C = gl.program_id(1) * C + gl.arange(0, C, CHANNEL)
    mean_C = gl.load(k_mean_ptr + head % N * 512 + c_C)
    gain_C = 1.0 / gl.load(k_gain_ptr + head % N * 512 + c_C)
    q_len = gl.load(q_len_ptr + b)
    there = (0 < q_len) & (gl.load(length_ptr + b) - q_len >= 0)
    b_B = gl.arange(0, BP, LANES)
    pages_B = gl.where(b_B < B, gl.maximum((gl.load(stored_ptr + b_B, mask=b_B < B, other=0) + 127) // 128, 1), 0)
    pages = gl.sum(gl.where(b_B == b, pages_B, 0), axis=0)
    before = gl.sum(gl.where(b_B < b, pages_B, 0), axis=0) * ITEMS + pages * (item - b * ITEMS)
    s0, s1 = slots(item, before, pages, programs, gl.sum(pages_B, axis=0) * ITEMS, gl.max(pages_B, axis=0), B * ITEMS)
    recent += item * PIECES
    s_S = gl.arange(0, SB, LANES)
    i_S = gl.arange(0, SB, SLOT)
    p_P = gl.arange(0, 32, LANES)
    logit = 0.0
    if LOGIT:
        logit = gl.load(logit_ptr + head % N * R + row).to(gl.float32) * 1.4426950408889634
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    at_P = ml_ptr + (recent * 16 + r) * 3 + p_P * 48
    m_P = gl.load(at_P, mask=p_P < PIECES, other=NONE)
    l_P = gl.load(at_P + 1, mask=p_P < PIECES, other=0)
    shift = gl.load(ml_ptr + (recent * 16 + r) * 3 + 2)
    pieces = ()
    for p in gl.static_range(PIECES):
        pieces = pieces + (gl.load(part_ptr + ((recent + p) * 16 + r) * 512 + c_C),)
    m = NONE
    total = 0.0
    acc_C = gl.zeros([C], gl.float32, CHANNEL)
    for s in range(s0, s1, SB):
        at_SC = (part_ptr + (s * 16 + r) * 512 + c_C)[None, :] + (i_S * 8192)[:, None]
        part_SC = gl.load(at_SC, mask=(i_S < s1 - s)[:, None], other=0)
        at_S = ml_ptr + (s * 16 + r) * 3 + s_S * 48
        m_S = gl.load(at_S, mask=s_S < s1 - s, other=NONE)
        l_S = gl.load(at_S + 1, mask=s_S < s1 - s, other=0)
        new = gl.maximum(m, gl.max(m_S, axis=0))
        alpha = gl.exp2(m - new)
        w_S = gl.exp2(m_S - new)
        m = new
        total = total * alpha + gl.sum(l_S * w_S, axis=0)
        acc_C = acc_C * alpha + gl.sum(part_SC * gl.convert_layout(w_S, SLOT)[:, None], axis=0)
    new = gl.maximum(m, gl.max(m_P, axis=0))
    alpha = gl.exp2(m - new)
    w_P = gl.exp2(m_P - new)
    m = new + shift
    stored = total * alpha
    total = stored + gl.sum(l_P * w_P, axis=0)
    acc_C = acc_C * alpha
    for p in gl.static_range(PIECES):
        acc_C += pieces[p] * gl.sum(gl.where(p_P == p, w_P, 0.0), axis=0)
    # parts are in units of codes; the mean belongs to pages
    acc_C = acc_C * gain_C + mean_C * stored
    if LOGIT:
        new = gl.maximum(m, logit)
        alpha = gl.exp2(m - new)
        m = new
        total = total * alpha + gl.exp2(logit - new)
        acc_C = acc_C * alpha
    there = there & (total > 0)
    safe = gl.where(there, total, 1.0)
    gl.store(out_ptr + at * 512 + c_C, gl.where(there, acc_C / safe, 0.0))
    if gl.program_id(1) == 0:
        gl.store(lse_ptr + at, gl.where(there, (m + gl.log2(safe)) * 0.6931471805599453, float("-inf")))


def tuning(programs: int, items: int) -> dict[str, int]:
    """Slots of a step, channels of a lane, warps that share slots, warps: for items of some `programs / items` slots each."""
    slots = min(256, max(8, 1 << (max(1, programs * 15 // 16 // items) - 1).bit_length()))
    warps = 8 if slots > 64 else 4
    return {"SB": slots, "V": 2 if slots <= 64 else 1, "SPLIT": min(warps, max(1, slots // 16)), "WARPS": warps}
