"""Decode attention over MLA pages in FP4 on Hopper, in Gluon: `general_latent.attend_latent`, with products laid out by hand.

A lane reads 64 bytes of each of its two tokens, decodes them to pairs of FP16 and puts these into shared memory 16 bytes at a time, where
the scores' product (rows: tokens) and the output's (rows: channels) read them. Columns of a tile are channels in the order of `_channel`.
`serves` says for which calls; tests/kernels/gluon_cpu.py runs this text on a CPU.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...kv.format import PageLayout

NONE = gl.constexpr(-1.0e30)
# words of codes [64 tokens, 16 pieces, 4]; lane t has pieces t, t + 4, t + 8, t + 12
WORD = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 4, 0], [0, 8, 0], [8, 0, 0]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 16, 4])
)
PIECE = gl.constexpr(gl.SliceLayout(2, WORD))
# pairs of a decoded plane [64 tokens, 128], of the rotary part [64 tokens, 32]
PAIR = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 128])
)
ROPE_L = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 32])
)
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
HEAD = gl.constexpr(gl.SliceLayout(0, MMA))
TOKEN = gl.constexpr(gl.SliceLayout(1, MMA))
MAX_L = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [0, 1], [0, 8]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, 16])
)
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
Q_S = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PAIR_S = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
P_S = gl.constexpr(gl.NVMMASharedLayout(32, 16, 2))
FLAT2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _channel(c):
    """Channel of a column of low nibbles; the high nibble's is 32 more."""
    piece = (c >> 4 & 3) + (c >> 6) * 4
    return piece // 2 * 64 + piece % 2 * 16 + (c & 12) + c % 2 * 2 + c // 2 % 2


@gluon.jit
def _low(x, scale):
    """Low nibbles of words of codes, [64, 16, 4], times their scales: pairs of FP16 [64, 128]; of even bytes, of odd bytes in turn."""
    even = gl.inline_asm_elementwise(
        """{ .reg .b32 a, b; shl.b32 a, $1, 5; shl.b32 b, $1, 15; and.b32 a, a, 0x0E000E00;
        lop3.b32 a, b, 0x80008000, a, 0xEA; mul.f16x2 $0, a, $2; }""", "=r,r,r", [x, scale], dtype=gl.int32, is_pure=False, pack=1)
    odd = gl.inline_asm_elementwise(
        """{ .reg .b32 a, b; shr.u32 a, $1, 3; shl.b32 b, $1, 7; and.b32 a, a, 0x0E000E00;
        lop3.b32 a, b, 0x80008000, a, 0xEA; mul.f16x2 $0, a, $2; }""", "=r,r,r", [x, scale], dtype=gl.int32, is_pure=False, pack=1)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [64, 128]), PAIR)


@gluon.jit
def _high(x, scale):
    """High nibbles, likewise."""
    even = gl.inline_asm_elementwise(
        "{ .reg .b32 a; shl.b32 a, $1, 8; and.b32 a, a, 0x8E008E00; mul.f16x2 $0, a, $2; }", "=r,r,r", [x, scale],
        dtype=gl.int32, is_pure=False, pack=1)
    odd = gl.inline_asm_elementwise(
        "{ .reg .b32 a; and.b32 a, $1, 0x8E008E00; mul.f16x2 $0, a, $2; }", "=r,r,r", [x, scale], dtype=gl.int32, is_pure=False, pack=1)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [64, 128]), PAIR)


@gluon.jit
def _scale(byte):
    """A positive E4M3 as FP16, times 2^7, twice; any byte gives a finite number. [64, 16] -> [64, 16, 1]."""
    two = gl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.b32 a, 0x78007800; mul.f16x2 $0, $1, a; }", "=r,r", [(byte & 0x7F) * 0x00800080], dtype=gl.int32,
        is_pure=True, pack=1)
    return gl.expand_dims(two, 2)


@gluon.jit
def _ask(base, half, KS_AT: gl.constexpr, ROPE_AT: gl.constexpr):
    """Half a page: codes, two scale bytes a piece, rotary part in pairs."""
    t_T = gl.arange(0, 64, gl.SliceLayout(1, PIECE)) + half * 64
    p_P = gl.arange(0, 16, gl.SliceLayout(0, PIECE))
    i_I = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, WORD)))
    at_TP = t_T[:, None] * 64 + (p_P * 4)[None, :]
    x = gl.load(base.to(gl.pointer_type(gl.int32)) + gl.expand_dims(at_TP, 2) + gl.expand_dims(gl.expand_dims(i_I, 0), 0))
    s = gl.load((base + KS_AT).to(gl.pointer_type(gl.int16)) + t_T[:, None] * 8 + (p_P // 2)[None, :])
    r_T = gl.arange(0, 64, gl.SliceLayout(1, ROPE_L)) + half * 64
    r_C = gl.arange(0, 32, gl.SliceLayout(0, ROPE_L))
    return x, s, gl.load((base + ROPE_AT).to(gl.pointer_type(gl.int32)) + r_T[:, None] * 32 + r_C[None, :])


@gluon.jit(do_not_specialize=["table_width"])
def attend_latent(
    q_ptr, pool_ptr, table_ptr, stored_ptr, k_mean_ptr, k_gain_ptr, part_ptr, ml_ptr, span_ptr, B, table_width, scale_log2,
    BP: gl.constexpr, N: gl.constexpr, R: gl.constexpr, PAGE_BYTES: gl.constexpr, KS_AT: gl.constexpr, ROPE_AT: gl.constexpr,
    TRAILER_AT: gl.constexpr,
):
    """Partial attention over pages: latent 512, rotary 64, one query of R heads to N KV heads, 16 an item.

    A program writes slot `program + 2 item` of each item it meets; the one after an item's last is that of its FP16 tokens.
    """
    ITEMS: gl.constexpr = N * ((R + 15) // 16)
    v0_s = gl.allocate_shared_memory(gl.float16, [1, 64, 256], Q_S)
    v1_s = gl.allocate_shared_memory(gl.float16, [1, 64, 256], Q_S)
    q0_s = gl.allocate_shared_memory(gl.float16, [1, 16, 256], Q_S)
    q1_s = gl.allocate_shared_memory(gl.float16, [1, 16, 256], Q_S)
    qr_s = gl.allocate_shared_memory(gl.float16, [1, 16, 64], Q_S)
    r_s = gl.allocate_shared_memory(gl.float16, [1, 64, 64], Q_S)
    p_s = gl.allocate_shared_memory(gl.float16, [1, 64, 16], P_S)
    max_s = gl.allocate_shared_memory(gl.float32, [4, 16], FLAT2)
    b_B = gl.arange(0, BP, FLAT)
    pages_B = gl.maximum((gl.load(stored_ptr + b_B, mask=b_B < B, other=0) + 127) // 128, 1)
    pages_B = gl.where(b_B < B, pages_B, 0)
    ends_B = gl.associative_scan(pages_B * ITEMS, 0, _add)
    total = gl.max(ends_B, axis=0)
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    program = gl.program_id(0)
    unit = program * share
    end = gl.minimum(unit + share, total)
    while unit < end:
        b = gl.sum((ends_B <= unit).to(gl.int32), axis=0)
        units = gl.sum(gl.where(b_B == b, pages_B, 0), axis=0)
        before = gl.sum(gl.where(b_B == b, ends_B, 0), axis=0) - ITEMS * units
        within = (unit - before) // units
        u0 = unit - before - within * units
        u1 = gl.minimum(units, u0 + end - unit)
        unit += u1 - u0
        n = within // (ITEMS // N)
        item = b * ITEMS + within
        slot = program + 2 * item
        if u0 == 0:
            gl.store(span_ptr + item * 2, slot)
        if u1 == units:
            gl.store(span_ptr + item * 2 + 1, slot + 2)
        stored = gl.load(stored_ptr + b)
        table = table_ptr + b * table_width
        t0 = u0 * 2
        t1 = gl.where(stored > 0, u1 * 2, t0)
        base = pool_ptr + (gl.load(table + u0).to(gl.int64) * N + n) * PAGE_BYTES
        x, s, r = _ask(base, 0, KS_AT, ROPE_AT)
        last = gl.maximum(t1 - 1, t0)
        ahead = gl.load(table + gl.minimum(t0 + 1, last) // 2)

        # queries: a row's largest element becomes 256
        h_H = gl.arange(0, 16, gl.SliceLayout(1, QUERY))
        k_K = gl.arange(0, 256, gl.SliceLayout(0, QUERY))
        o_O = gl.arange(0, 64, gl.SliceLayout(0, QUERY))
        row_H = within % (ITEMS // N) * 16 + h_H
        q_H = ((b * N + n) * R + row_H) * 576
        ch_K = _channel(k_K)
        q0_HK = gl.load(q_ptr + q_H[:, None] + ch_K[None, :], mask=(row_H < R)[:, None], other=0).to(gl.float32)
        q1_HK = gl.load(q_ptr + q_H[:, None] + 32 + ch_K[None, :], mask=(row_H < R)[:, None], other=0).to(gl.float32)
        r_HO = gl.load(q_ptr + q_H[:, None] + (512 + o_O)[None, :], mask=(row_H < R)[:, None], other=0).to(gl.float32)
        mean_K = k_mean_ptr + n * 512 + ch_K
        gain_K = k_gain_ptr + n * 512 + ch_K
        mean_H = gl.sum(q0_HK * gl.load(mean_K)[None, :], axis=1) + gl.sum(q1_HK * gl.load(mean_K + 32)[None, :], axis=1)
        q0_HK = q0_HK / gl.load(gain_K)[None, :]
        q1_HK = q1_HK / gl.load(gain_K + 32)[None, :]
        amax_H = gl.maximum(gl.max(gl.abs(q0_HK), axis=1), gl.max(gl.abs(q1_HK), axis=1))
        amax_H = gl.maximum(gl.maximum(amax_H, gl.max(gl.abs(r_HO), axis=1)), 1.0e-30)
        norm_H = 256.0 / amax_H
        q0_s.index(0).store((q0_HK * norm_H[:, None]).to(gl.float16))
        q1_s.index(0).store((q1_HK * norm_H[:, None]).to(gl.float16))
        qr_s.index(0).store((r_HO * norm_H[:, None]).to(gl.float16))
        back_R = gl.convert_layout(amax_H * (scale_log2 / 256.0), HEAD)
        mean_R = gl.convert_layout(mean_H * scale_log2, HEAD)
        fence_async_shared()
        gl.thread_barrier()

        t_T = gl.arange(0, 64, TOKEN)
        was = 1.0
        m_R = gl.full([16], NONE, gl.float32, HEAD)
        l_TR = gl.zeros([64, 16], gl.float32, MMA)
        acc0 = gl.zeros([256, 16], gl.float32, MMA)
        acc1 = gl.zeros([256, 16], gl.float32, MMA)
        zero = gl.zeros([64, 16], gl.float32, MMA)
        for t in range(t0, t1):
            # not known to be 0: what describes operands to a product is made where it is used, not kept in registers
            o = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            now = gl.load((base + TRAILER_AT).to(gl.pointer_type(gl.float32))) * 128.0
            s = s.to(gl.int32)
            v0_s.index(o)._reinterpret(gl.int32, [64, 128], PAIR_S).store(_low(x, _scale(s)))
            v1_s.index(o)._reinterpret(gl.int32, [64, 128], PAIR_S).store(_high(x, _scale(s >> 8)))
            r_s.index(o)._reinterpret(gl.int32, [64, 32], PAIR_S).store(r)
            base = pool_ptr + (ahead.to(gl.int64) * N + n) * PAGE_BYTES
            x, s, r = _ask(base, (t + 1) % 2, KS_AT, ROPE_AT)
            ahead = gl.load(table + gl.minimum(t + 2, last) // 2)
            fence_async_shared()
            s1 = warpgroup_mma(r_s.index(o), qr_s.index(o).permute([1, 0]), zero, use_acc=False, is_async=True)
            s0 = warpgroup_mma(v0_s.index(o), q0_s.index(o).permute([1, 0]), zero, use_acc=False, is_async=True)
            s0 = warpgroup_mma(v1_s.index(o), q1_s.index(o).permute([1, 0]), s0, is_async=True)
            s0, s1 = warpgroup_mma_wait(0, [s0, s1])
            s_TR = s0 * (back_R * now)[None, :] + s1 * back_R[None, :] + mean_R[None, :]
            s_TR = gl.where((t * 64 + t_T < stored)[:, None], s_TR, float("-inf"))
            # maximum: of a warp, then of all
            max_s.store(gl.max(gl.max(gl.reshape(s_TR, [4, 2, 8, 16]), axis=1), axis=1))
            new_R = gl.maximum(m_R, gl.convert_layout(gl.max(max_s.load(MAX_L), axis=0), HEAD))
            alpha_R = _exp2(m_R - new_R)
            m_R = new_R
            p_TR = _exp2(s_TR - new_R[None, :])
            l_TR = l_TR * alpha_R[None, :] + p_TR
            p_s.index(o).store(p_TR.to(gl.float16))
            # accumulators are in units of the page's factor, a power of two
            alpha_R = alpha_R * (was / now)
            acc0 = acc0 * alpha_R[None, :]
            acc1 = acc1 * alpha_R[None, :]
            was = now
            fence_async_shared()
            acc0 = warpgroup_mma(v0_s.index(o).permute([1, 0]), p_s.index(o), acc0, is_async=True)
            acc1 = warpgroup_mma(v1_s.index(o).permute([1, 0]), p_s.index(o), acc1, is_async=True)
            acc0, acc1 = warpgroup_mma_wait(0, [acc0, acc1])

        l_R = gl.sum(l_TR, axis=0)
        r_R = gl.arange(0, 16, HEAD)
        ch_C = _channel(gl.arange(0, 256, TOKEN))
        mean_C = k_mean_ptr + n * 512 + ch_C
        gain_C = k_gain_ptr + n * 512 + ch_C
        at = part_ptr + slot * 8192 + (r_R * 512)[None, :] + ch_C[:, None]
        gl.store(at, acc0 * was / gl.load(gain_C)[:, None] + l_R[None, :] * gl.load(mean_C)[:, None])
        gl.store(at + 32, acc1 * was / gl.load(gain_C + 32)[:, None] + l_R[None, :] * gl.load(mean_C + 32)[:, None])
        gl.store(ml_ptr + (slot * 16 + r_R) * 2, m_R)
        gl.store(ml_ptr + (slot * 16 + r_R) * 2 + 1, l_R)


PROGRAMS = 2  # of a multiprocessor: 93 KB of shared memory and up to 255 registers a thread each


def serves(layout: PageLayout, queries: int, sliding: int, softcap: float, device: torch.device) -> bool:
    """Whether `attend_latent` takes a call: one query a sequence over FP4 pages of DeepSeek's shape, on Hopper."""
    f = layout.format
    hopper = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9
    return (hopper and f.code == "fp4" and f.order == "planes" and f.scale == "e4m3" and f.block == 32 and layout.k_dim == 512
            and layout.v_dim == 0 and layout.rope == 64 and layout.outliers == 0 and queries == 1 and sliding == 0 and softcap == 0)


@cache
def programs_on(device: torch.device) -> int:
    """Programs of one launch: all of them fit on the chip at once."""
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
