"""Decode attention over MLA pages in FP4 on Hopper, in Gluon: `general_latent.attend_latent`, with products laid out by hand.

Bulk copies bring half a page (64 tokens) to one of PLACES in shared memory. What is decoded never goes there: four warps decode 32 tokens
at a time, 128 channels each, to FP16 in registers, in pairs of tokens, which is an operand of the output's product (`mma.m16n8k16`: 16
heads by 8 channels). Transposed within the warp, 8 by 8, by products with a unit matrix, the same registers are pairs of channels, an
operand of the scores' product (16 tokens by 8 heads); what the warps have of a score is added up through shared memory. `serves` says for
which calls; tests/kernels/gluon_cpu.py runs this text on a CPU.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...kv.format import PageLayout
from .fused_latent_steps import (
    FLAT,
    P_S,
    PARTS,
    QUERIES,
    QUERY_R,
    QUERY_RX,
    TURN,
    add_values,
    prepare,
    scores,
    softmax,
    unit_matrix,
    write,
)

NONE = gl.constexpr(-1.0e30)
CODES = gl.NVMMASharedLayout(128, 8, 5)
ROPES = gl.NVMMASharedLayout(128, 16, 3)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _expect(codes_bar, rope_bar, s, pred):
    mbarrier.expect(codes_bar.index(s), 16384, pred=pred)
    mbarrier.expect(rope_bar.index(s), 8192, pred=pred)


@gluon.jit
def _ask(codes, rope, rec, half, codes_s, rope_s, codes_bar, rope_bar, s, ROPE_LINE: gl.constexpr, pred):
    """Have half a record copied to place s. A barrier for each copy: for one that they share the compiler would separate them."""
    tma.async_copy_global_to_shared(codes, [rec, half * 2, 0, 0, 0], codes_bar.index(s), codes_s.index(s), pred=pred)
    tma.async_copy_global_to_shared(rope, [rec, ROPE_LINE + half * 64, 0], rope_bar.index(s), rope_s.index(s), pred=pred)


@gluon.jit
def _near(base, half, KS_AT: gl.constexpr, TRAILER_AT: gl.constexpr, BYTES: gl.constexpr):
    """Scales of half a page, four in a word, [token, word], and the page's factor."""
    t_T = half * 64 + gl.arange(0, 64, gl.SliceLayout(1, BYTES))
    i_I = gl.arange(0, 4, gl.SliceLayout(0, BYTES))
    four = gl.load((base + KS_AT).to(gl.pointer_type(gl.int32)) + t_T[:, None] * 4 + i_I[None, :])
    return four, gl.load((base + TRAILER_AT).to(gl.pointer_type(gl.float32)))


@gluon.jit(do_not_specialize=["table_width", "k7", "k8"])
def attend_latent(
    codes, rope, q_ptr, pool_ptr, table_ptr, stored_ptr, k_mean_ptr, k_gain_ptr, part_ptr, ml_ptr, span_ptr, B, table_width,
    scale_log2, k7, k8,
    BP: gl.constexpr, N: gl.constexpr, R: gl.constexpr, PAGE_BYTES: gl.constexpr, KS_AT: gl.constexpr, ROPE_LINE: gl.constexpr,
    TRAILER_AT: gl.constexpr, PLACES: gl.constexpr,
):
    """Partial attention over pages: latent 512, rotary 64, one query of R heads to N KV heads, 16 an item.

    A program writes slot `program + 2 item` of each item it meets; the one after an item's last is that of its FP16 tokens.
    """
    ITEMS: gl.constexpr = N * ((R + 15) // 16)
    # [group of 64 channels, rows, columns]: a warp has groups of its own
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    R_MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    R_A: gl.constexpr = gl.DotOperandLayout(0, R_MMA, 2)
    R_X: gl.constexpr = gl.DotOperandLayout(1, R_MMA, 2)
    # scores of a warp's own heads, in all shares: [share, token, head]
    SUM: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0]], [[0, 4, 0], [0, 8, 0], [0, 16, 0], [0, 0, 1], [0, 0, 2]], [[0, 0, 4], [0, 0, 8]], [],
        [4, 32, 16])
    S_L: gl.constexpr = gl.SliceLayout(0, SUM)
    LANE: gl.constexpr = gl.DistributedLinearLayout([], [[1, 0], [2, 0], [4, 0], [0, 1], [0, 2]], [[0, 4], [0, 8]], [], [8, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, S_L)
    ACC_H: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, MMA))
    BYTES: gl.constexpr = gl.DistributedLinearLayout(
        [[32, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [64, 4])
    FLATB: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])

    # FP16 tokens may take the places left over
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)

    codes_s = gl.allocate_shared_memory(gl.uint8, [PLACES, 1, 2, 2, 32, 128], CODES)
    rope_s = gl.allocate_shared_memory(gl.float16, [PLACES, 1, 64, 64], ROPES)
    codes_bar = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    rope_bar = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    q_s = gl.allocate_shared_memory(gl.float16, [4, 2048], FLAT)
    part_s = gl.allocate_shared_memory(gl.float32, [4, 32, 16], PARTS)
    turn_s = gl.allocate_shared_memory(gl.float32, [32, 16], TURN)
    p_s = gl.allocate_shared_memory(gl.float16, [16, 32], P_S)
    lo_s = gl.allocate_shared_memory(gl.float16, [2, 256], FLAT)
    hi_s = gl.allocate_shared_memory(gl.float16, [2, 256], FLAT)
    alpha_s = gl.allocate_shared_memory(gl.float32, [16], FLAT)
    for i in gl.static_range(PLACES):
        mbarrier.init(codes_bar.index(i), count=1)
        mbarrier.init(rope_bar.index(i), count=1)

    b_B = gl.arange(0, BP, FLATB)
    pages_B = gl.maximum((gl.load(stored_ptr + b_B, mask=b_B < B, other=0) + 127) // 128, 1)
    pages_B = gl.where(b_B < B, pages_B, 0)
    ends_B = gl.associative_scan(pages_B * ITEMS, 0, _add)
    total = gl.max(ends_B, axis=0)
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    program = gl.program_id(0)
    unit = program * share
    end = gl.minimum(unit + share, total)
    stage = 0
    phase = 0
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
        last = gl.maximum(t1 - 1, t0)
        # first what is read from global memory now: behind pages that have been asked for it would wait for all of them
        h_H = gl.arange(0, 16, gl.SliceLayout(1, QUERY))
        k_K = gl.arange(0, 256, gl.SliceLayout(0, QUERY))
        o_O = gl.arange(0, 64, gl.SliceLayout(0, QUERY))
        first = within % (ITEMS // N) * 16
        q_at = q_ptr + (b * N + n) * R * 576
        on_H = (first + h_H < R)[:, None]
        row_H = (first + h_H)[:, None] * 576
        mean_ptr = k_mean_ptr + n * 512
        gain_ptr = k_gain_ptr + n * 512
        q0_HK = gl.load(q_at + row_H + k_K[None, :], mask=on_H, other=0)
        q1_HK = gl.load(q_at + row_H + 256 + k_K[None, :], mask=on_H, other=0)
        r_HO = gl.load(q_at + row_H + (512 + o_O)[None, :], mask=on_H, other=0)
        mean0_K = gl.load(mean_ptr + k_K)
        mean1_K = gl.load(mean_ptr + 256 + k_K)
        gain0_K = gl.load(gain_ptr + k_K)
        gain1_K = gl.load(gain_ptr + 256 + k_K)
        # what stands in a table behind a row's pages is no page
        page = gl.where(stored > 0, gl.load(table + u0), 0)
        four, now = _near(pool_ptr + (page.to(gl.int64) * N + n) * PAGE_BYTES, 0, KS_AT, TRAILER_AT, BYTES)
        near = gl.load(table + gl.minimum(t0 + 1, last) // 2)
        # all warps have left the item before
        gl.thread_barrier()
        for i in gl.static_range(PLACES):
            _expect(codes_bar, rope_bar, (stage + i) % PLACES, t0 + i < t1)
        gl.thread_barrier()
        for i in gl.static_range(PLACES):
            page = gl.load(table + gl.minimum(t0 + i, last) // 2)
            at = (stage + i) % PLACES
            _ask(codes, rope, page * N + n, (t0 + i) % 2, codes_s, rope_s, codes_bar, rope_bar, at, ROPE_LINE, t0 + i < t1)
        ahead = gl.load(table + gl.minimum(t0 + PLACES, last) // 2)

        # queries: a row's largest element becomes 256
        q0_HK = q0_HK.to(gl.float32)
        q1_HK = q1_HK.to(gl.float32)
        r_HO = r_HO.to(gl.float32)
        mean_H = gl.sum(q0_HK * mean0_K[None, :] + q1_HK * mean1_K[None, :], axis=1)
        q0_HK = q0_HK * (1.0 / gain0_K)[None, :]
        q1_HK = q1_HK * (1.0 / gain1_K)[None, :]
        amax_H = gl.max(gl.maximum(gl.abs(q0_HK), gl.abs(q1_HK)), axis=1)
        amax_H = gl.maximum(gl.maximum(amax_H, gl.max(gl.abs(r_HO), axis=1)), 1.0e-30)
        norm_H = 256.0 / amax_H
        q0_HK = (q0_HK * norm_H[:, None]).to(gl.float16)
        q1_HK = (q1_HK * norm_H[:, None]).to(gl.float16)
        q_s._reinterpret(gl.float16, [16, 512], QUERIES).store(gl.reshape(gl.permute(gl.join(q0_HK, q1_HK), [0, 2, 1]), [16, 512]))
        turned_s = part_s._reinterpret(gl.float16, [4, 1024], FLAT).index(0)
        turned_s._reinterpret(gl.float16, [16, 64], QUERY_R).store((r_HO * norm_H[:, None]).to(gl.float16))
        back_R = gl.convert_layout(amax_H * (scale_log2 / 256.0), HEAD)
        mean_R = gl.convert_layout(mean_H * scale_log2, HEAD)
        prepare(four, lo_s, hi_s)
        gl.thread_barrier()
        qr = turned_s._reinterpret(gl.float16, [64, 16], QUERY_RX).load(R_X)
        gl.thread_barrier()

        # registers of their own for each quarter of 8 by 8, so that products find them in a row
        one_a, none_a = unit_matrix(k7)
        one_b, none_b = unit_matrix(k8)
        one = (one_a, none_a, none_b, one_b)
        was = 1.0
        m_R = gl.full([16], NONE, gl.float32, HEAD)
        l_R = gl.zeros([8, 16], gl.float32, LANE)
        acc0 = gl.zeros([8, 16, 16], gl.float32, MMA)
        acc1 = gl.zeros([8, 16, 16], gl.float32, MMA)
        acc2 = gl.zeros([8, 16, 16], gl.float32, MMA)
        acc3 = gl.zeros([8, 16, 16], gl.float32, MMA)
        for t in range(t0, t1):
            s = stage
            more = t + PLACES < t1
            # of the tile to come
            four, then = _near(pool_ptr + (near.to(gl.int64) * N + n) * PAGE_BYTES, (t + 1) % 2, KS_AT, TRAILER_AT, BYTES)
            near = gl.load(table + gl.minimum(t + 2, last) // 2)
            mbarrier.wait(codes_bar.index(s), phase)
            mbarrier.wait(rope_bar.index(s), phase)
            stage = (stage + 1) % PLACES
            phase = gl.where(stage == 0, phase ^ 1, phase)
            x0, x1, x2, x3 = scores(
                codes_s.index(s), rope_s.index(s), 0, lo_s, hi_s, q_s, qr, k7, k8, part_s, turn_s, A, X, one, MMA, R_A, R_MMA)
            gl.thread_barrier()
            _expect(codes_bar, rope_bar, s, more)
            m_R, l_R = softmax(t * 64, stored, now, was, back_R, mean_R, m_R, l_R, part_s, turn_s, p_s, alpha_s, SUM)
            gl.thread_barrier()
            acc0, acc1, acc2, acc3 = add_values(p_s, alpha_s, x0, x1, x2, x3, acc0, acc1, acc2, acc3, A, MMA)
            x0, x1, x2, x3 = scores(
                codes_s.index(s), rope_s.index(s), 1, lo_s, hi_s, q_s, qr, k7, k8, part_s, turn_s, A, X, one, MMA, R_A, R_MMA)
            gl.thread_barrier()
            # the place has been read
            _ask(codes, rope, ahead * N + n, (t + PLACES) % 2, codes_s, rope_s, codes_bar, rope_bar, s, ROPE_LINE, more)
            ahead = gl.load(table + gl.minimum(t + PLACES + 1, last) // 2)
            prepare(four, lo_s, hi_s)
            m_R, l_R = softmax(t * 64 + 32, stored, now, now, back_R, mean_R, m_R, l_R, part_s, turn_s, p_s, alpha_s, SUM)
            was = now
            now = then
            gl.thread_barrier()
            acc0, acc1, acc2, acc3 = add_values(p_s, alpha_s, x0, x1, x2, x3, acc0, acc1, acc2, acc3, A, MMA)

        l_R = gl.convert_layout(gl.sum(l_R, axis=0), HEAD, assert_trivial=True) * 0.015625
        gl.thread_barrier()
        alpha_s.store(l_R)
        gl.thread_barrier()
        sums = alpha_s.load(ACC_H)
        r_R = gl.arange(0, 16, HEAD)
        unit_1 = was * 2.0
        out = part_ptr + slot * 8192
        write(out, mean_ptr, gain_ptr, gl.join(acc0, acc1), sums, unit_1)
        write(out + 32, mean_ptr + 32, gain_ptr + 32, gl.join(acc2, acc3), sums, unit_1)
        gl.store(ml_ptr + (slot * 16 + r_R) * 2, m_R)
        gl.store(ml_ptr + (slot * 16 + r_R) * 2 + 1, l_R)


PROGRAMS = 2  # of a multiprocessor: 255 registers a thread, 101 KB of shared memory
PLACES = 3  # half pages on their way or being read


def sources(pool_PNb: torch.Tensor, layout: PageLayout) -> tuple[TensorDescriptor, TensorDescriptor]:
    """What copies read: codes by halves of a row, and lines of 128 bytes of the rotary part."""
    flat = pool_PNb.view(-1)
    records, size = flat.numel() // layout.page_bytes, layout.page_bytes
    codes = TensorDescriptor(flat, [records, 4, 2, 32, 128], [size, 8192, 128, 256, 1], [1, 2, 2, 32, 128], CODES)
    return codes, TensorDescriptor(flat.view(torch.float16), [records, size // 128, 64], [size // 2, 64, 1], [1, 64, 64], ROPES)


def constants(layout: PageLayout) -> dict[str, int]:
    """What the kernel is compiled for, beside the shapes."""
    at = {k: v[0] for k, v in layout.offsets.items()}
    return {"PAGE_BYTES": layout.page_bytes, "KS_AT": at["k_scales"], "ROPE_LINE": at["k_rope"] // 128, "TRAILER_AT": at["trailer"],
            "PLACES": PLACES}


def serves(layout: PageLayout, pool_PNb: torch.Tensor, queries: int, sliding: int, softcap: float) -> bool:
    """Whether `attend_latent` takes a call: one query a sequence over FP4 pages of DeepSeek's shape, on Hopper."""
    f = layout.format
    hopper = pool_PNb.device.type != "cuda" or torch.cuda.get_device_capability(pool_PNb.device)[0] == 9
    # what copies read starts at a multiple of 16 bytes
    there = pool_PNb.numel() > 0 and pool_PNb.data_ptr() % 16 == 0
    return (hopper and there and f.code == "fp4" and f.order == "planes" and f.scale == "e4m3" and f.block == 32 and layout.k_dim == 512
            and layout.v_dim == 0 and layout.rope == 64 and layout.outliers == 0 and queries == 1 and sliding == 0 and softcap == 0)


@cache
def programs_on(device: torch.device) -> int:
    """Programs of one launch: all of them fit on the chip at once."""
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
