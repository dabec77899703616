"""Decode attention over FP4 pages on Hopper, in Gluon: the arithmetic of `fused.attend_pages`, with copies and barriers laid out by hand.

Bulk copies bring a record in two pieces to one of STAGES places in shared memory, asked for by one thread as soon as the page before there
has been read or, LATE, behind the scores of the page after it. The reference of the softmax moves only when a
page leaves it behind by 2^MARGIN: p is made with the one there is, and the barrier behind it tells whether anybody wants another. Three
barriers a page: p's, and two around the next copy. Columns of every MMA lie so that a lane keeps its rows from scores to p to output.
`serves` says for which calls; tests/kernels/gluon_cpu.py runs this text on a CPU.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...kv.format import PageLayout
from ..kv_query.fused_decode import KEEP, outlier_queries, queries, read, read_channels
from .fused_decode_steps import (
    among,
    by_row,
    exp2,
    hi_plane,
    k_scales,
    lo_plane,
    outliers,
    outputs,
    products,
    put,
    scale,
    v_scales,
    values,
    weights,
)

NONE = gl.constexpr(-1.0e30)
# bits that a weight may grow by before the reference moves; FP8 has so many less for it at first
MARGIN = gl.constexpr(3.0)
CODES = gl.NVMMASharedLayout(128, 8, 2)
PLAIN = gl.NVMMASharedLayout(0, 32, 3)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _cut(p, programs, total):
    return total // programs * p + total % programs * p // programs


@gluon.jit
def _expect(codes_bar, tail_bar, s, D: gl.constexpr, TAIL: gl.constexpr, pred):
    mbarrier.expect(codes_bar.index(s), D * 128, pred=pred)
    mbarrier.expect(tail_bar.index(s), TAIL * 128, pred=pred)


@gluon.jit
def _ask(codes, tail, rec, codes_s, tail_s, codes_bar, tail_bar, s, D: gl.constexpr, LINES: gl.constexpr, pred):
    """Have record `rec` copied to stage s."""
    tma.async_copy_global_to_shared(codes, [rec * LINES, 0], codes_bar.index(s), codes_s.index(s), pred=pred)
    tma.async_copy_global_to_shared(tail, [rec, D, 0], tail_bar.index(s), tail_s.index(s), pred=pred)


@gluon.jit(do_not_specialize=["table_width", "even"])
def attend_decode(
    codes, tail, q_ptr, channels_ptr, k_gain_ptr, table_ptr, stored_ptr, part_ptr, ml_ptr, span_ptr, B, table_width, even, scale_log2,
    BP: gl.constexpr, N: gl.constexpr, R: gl.constexpr, RP: gl.constexpr, D: gl.constexpr, OUT: gl.constexpr,
    LINES: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, LATE: gl.constexpr,
):
    """Partial attention over pages, one query of R heads an item: as `fused.attend_pages`, which says what goes in and out.

    `codes` and `tail` describe the pool to the copies (`sources`); a record is LINES of 128 bytes, TAIL of them behind the codes.
    """
    KG: gl.constexpr = D // 64
    SWAPS: gl.constexpr = D // 16 if among(D, OUT) else 0
    # columns of a plane's scores: of 4 rows (row, scale block), of 8 rows as `by_row` says, a block at a time; of p: (row, term)
    PARTS: gl.constexpr = KG if RP == 8 else 1
    X: gl.constexpr = 2 * RP
    KB: gl.constexpr = D // 2
    S_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    O_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    V_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X, 32])
    K_A: gl.constexpr = gl.DotOperandLayout(0, S_MMA, 4)
    V_A: gl.constexpr = gl.DotOperandLayout(0, V_MMA, 4)
    O_A: gl.constexpr = gl.DotOperandLayout(0, O_MMA, 2)
    Q_S: gl.constexpr = gl.NVMMASharedLayout(KB // PARTS, 8, 2)
    # rows of 64 bytes, and of 32, in the copy's lines of 128, whose 16-byte pieces are swizzled
    S64: gl.constexpr = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 0], [2, 16], [4, 32], [9, 0], [16, 0], [32, 0]]
    S32: gl.constexpr = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 0], [2, 0], [4, 16], [9, 0], [18, 0], [32, 0], [64, 0]]
    V_S: gl.constexpr = gl.SharedLinearLayout(S64)
    K_S: gl.constexpr = gl.SharedLinearLayout(S64 + [[64, 0]] if D == 128 else S32)
    # every warp has the lengths of all sequences
    ROW: gl.constexpr = gl.BlockedLayout([BP // 32 if BP > 32 else 1], [32], [4], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    MAX_L: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0]] if RP == 4 else [[1, 0], [2, 0], [0, 4]], [[0, 1], [0, 2], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, RP])
    FOUR: gl.constexpr = gl.DistributedLinearLayout([[1], [2]], [[0], [0], [0], [0], [0]], [[0], [0]], [], [4])
    TWO: gl.constexpr = gl.DistributedLinearLayout([[1]], [[0], [0], [0], [0], [0]], [[0], [0]], [], [2])
    P_S: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    # launched while the kernel in front may still end; the next one may take the places of programs that have ended
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)

    codes_s = gl.allocate_shared_memory(gl.uint8, [STAGES, D, 128], CODES)
    tail_s = gl.allocate_shared_memory(gl.int32, [STAGES, 1, TAIL, 32], PLAIN)
    q0_s = gl.allocate_shared_memory(gl.float8e4nv, [PARTS, 8, KB // PARTS], Q_S)
    q1_s = gl.allocate_shared_memory(gl.float8e4nv, [PARTS, 8, KB // PARTS], Q_S)
    q2_s = gl.allocate_shared_memory(gl.float8e4nv, [PARTS, 8, KB // PARTS], Q_S)
    q3_s = gl.allocate_shared_memory(gl.float8e4nv, [PARTS, 8, KB // PARTS], Q_S)
    qo_s = gl.allocate_shared_memory(gl.float16, [8, 16], gl.NVMMASharedLayout(32, 16, 2))
    p0_s = gl.allocate_shared_memory(gl.float8e4nv, [X, 64], P_S)
    p1_s = gl.allocate_shared_memory(gl.float8e4nv, [X, 64], P_S)
    p2_s = gl.allocate_shared_memory(gl.float8e4nv, [X, 64], P_S)
    p3_s = gl.allocate_shared_memory(gl.float8e4nv, [X, 64], P_S)
    max_s = gl.allocate_shared_memory(gl.float32, [4, RP], FLAT2)
    again_s = gl.allocate_shared_memory(gl.int32, [4], FLAT)
    codes_bar = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tail_bar = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(codes_bar.index(i), count=1)
        mbarrier.init(tail_bar.index(i), count=1)

    b_B = gl.arange(0, BP, ROW)
    units_B = (gl.load(stored_ptr + b_B, mask=b_B < B, other=0, eviction_policy=KEEP) + 127) // 128
    ends_B = gl.associative_scan(units_B * N, 0, _add)
    total = gl.max(ends_B, axis=0)
    # the shares of `even` programs end where items of equal length do; of other lengths all programs take some
    spread = gl.max(units_B, axis=0) + gl.max(gl.where(b_B < B, 0 - units_B, -0x40000000), axis=0)
    program = gl.program_id(0)
    sharing = gl.maximum(gl.minimum(gl.where(spread == 0, even, gl.num_programs(0)), total), 1)
    unit = _cut(gl.minimum(program, sharing), sharing, total)
    end = _cut(gl.minimum(program + 1, sharing), sharing, total)
    stage = 0
    phase = 0
    while unit < end:
        b = gl.sum((ends_B <= unit).to(gl.int32), axis=0)
        units = gl.sum(gl.where(b_B == b, units_B, 0), axis=0)
        before = gl.sum(gl.where(b_B == b, ends_B, 0), axis=0) - N * units
        n = (unit - before) // units
        t0 = unit - before - n * units
        t1 = gl.minimum(units, t0 + end - unit)
        unit += t1 - t0
        table = table_ptr + b * table_width
        item = b * N + n
        slot = program + item
        # first what is read from global memory now: behind pages that have been asked for it would wait for all of them
        stored = gl.load(stored_ptr + b, eviction_policy=KEEP)
        first = gl.load(table + t0, eviction_policy=KEEP)
        second = gl.load(table + gl.minimum(t0 + 1, t1 - 1), eviction_policy=KEEP)
        page = second if LATE else gl.load(table + gl.minimum(t0 + 2, t1 - 1), eviction_policy=KEEP)
        q_lo, q_hi, gain_lo, gain_hi = read(q_ptr + item * R * D, k_gain_ptr + n * D, channels_ptr + n * OUT, R, RP, D, SWAPS)
        if OUT > 0:
            channels_O = read_channels(channels_ptr + n * OUT, OUT)
        gl.thread_barrier()
        _expect(codes_bar, tail_bar, stage, D, TAIL, True)
        _expect(codes_bar, tail_bar, 1 - stage, D, TAIL, t0 + 1 < t1)
        gl.thread_barrier()
        _ask(codes, tail, first * N + n, codes_s, tail_s, codes_bar, tail_bar, stage, D, LINES, True)
        if not LATE:
            _ask(codes, tail, second * N + n, codes_s, tail_s, codes_bar, tail_bar, 1 - stage, D, LINES, t0 + 1 < t1)
        if t0 == 0:
            gl.store(span_ptr + item * 2, slot)
        if t1 == units:
            gl.store(span_ptr + item * 2 + 1, slot + 1)
        back = queries(q_lo, q_hi, gain_lo, gain_hi, scale_log2, q0_s, q1_s, q2_s, q3_s, PARTS, SWAPS)
        if OUT > 0:
            outlier_queries(q_ptr + item * R * D, channels_O, scale_log2, qo_s, R, RP, D)
        fence_async_shared()
        gl.thread_barrier()

        # layouts of scores: what a split of the accumulators leaves
        S_L: gl.constexpr = gl.DistributedLinearLayout(
            [[8, 0], [64, 0]] if RP == 4 else [[8, 0], [0, 4], [64, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
            [128, RP])
        T_L: gl.constexpr = gl.SliceLayout(1, S_L)
        R_L: gl.constexpr = gl.SliceLayout(0, S_L)
        VN_L: gl.constexpr = gl.SliceLayout(0, V_MMA)
        t_T = gl.arange(0, 128, T_L)
        # what is added to a score before its power is taken: the margin and the reference, negative
        add_R = gl.full([RP], 0.0 - MARGIN - NONE, gl.float32, R_L)
        v_was_X = gl.full([X], 1.0, gl.float32, VN_L)
        L_L: gl.constexpr = gl.DistributedLinearLayout(
            [] if RP == 4 else [[0, 0, 4]], [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [[1, 0, 0], [2, 0, 0]], [], [4, 8, RP])
        l_WR = gl.zeros([4, 8, RP], gl.float32, L_L)
        acc0 = gl.zeros([64, X], gl.float32, V_MMA)
        acc1 = gl.zeros([64, X], gl.float32, V_MMA)
        for t in range(t0, t1):
            s = stage
            mbarrier.wait(codes_bar.index(s), phase)
            k = codes_s.index(s).slice(0, D // 2, dim=0)._reinterpret(gl.uint8, [128, KB], K_S).load(K_A)
            mbarrier.wait(tail_bar.index(s), phase)
            tail_1 = tail_s.index(s)
            stage = (stage + 1) % STAGES
            phase = gl.where(stage == 0, phase ^ 1, phase)
            ks_T = k_scales(codes_s.index(s), tail_1, T_L, D, OUT, TAIL)
            tr = tail_1._reinterpret(gl.float32, [TAIL * 16, 2], FLAT).index(LINES * 16 - D * 16 - 16).load(TWO)
            if OUT > 0:
                ko = gl.convert_layout(outliers(tail_1, D, OUT, TAIL), O_A)
                s_o = warpgroup_mma(ko, qo_s.permute([1, 0]), gl.zeros([128, 8], gl.float32, O_MMA), use_acc=False, is_async=True)
            if PARTS == 2:
                ka, kb = gl.split(gl.permute(gl.reshape(k, [128, 2, 32]), [0, 2, 1]))
                ka = gl.convert_layout(ka, K_A)
                kb = gl.convert_layout(kb, K_A)
                s0 = products(lo_plane(ka), q0_s, q1_s, 0, S_MMA)
                s2 = products(lo_plane(kb), q0_s, q1_s, 1, S_MMA)
                if OUT > 0:
                    # registers of its operand are wanted
                    s_o = warpgroup_mma_wait(4, [s_o])
                s1 = products(hi_plane(ka), q2_s, q3_s, 0, S_MMA)
                s3 = products(hi_plane(kb), q2_s, q3_s, 1, S_MMA)
                s0, s1, s2, s3 = warpgroup_mma_wait(0, [s0, s1, s2, s3])
                s2 = gl.convert_layout(by_row(s2, RP), S_L)
                s3 = gl.convert_layout(by_row(s3, RP), S_L)
            else:
                s0 = products(lo_plane(k), q0_s, q1_s, 0, S_MMA)
                if OUT > 0:
                    s_o = warpgroup_mma_wait(2, [s_o])
                s1 = products(hi_plane(k), q2_s, q3_s, 0, S_MMA)
                s0, s1 = warpgroup_mma_wait(0, [s0, s1])
                if D == 128:
                    _, s2 = gl.split(gl.reshape(s0, [128, RP, 2]))
                    _, s3 = gl.split(gl.reshape(s1, [128, RP, 2]))
                    s2 = gl.convert_layout(s2, S_L)
                    s3 = gl.convert_layout(s3, S_L)
            s0 = gl.convert_layout(by_row(s0, RP), S_L)
            s1 = gl.convert_layout(by_row(s1, RP), S_L)
            unit_1, v_now_1 = gl.split(gl.reshape(tr, [1, 2]))
            unit_R = gl.minimum(gl.convert_layout(unit_1, R_L) * back * 1.329227995784916e36, 3.0e38)
            v_now_X = gl.maximum(gl.convert_layout(v_now_1, VN_L), gl.full([X], 8.271806125530277e-25, gl.float32, VN_L))
            s_TR = s0 * scale(ks_T, 0)[:, None] + s1 * scale(ks_T, 1)[:, None]
            if D == 128:
                s_TR = s_TR + s2 * scale(ks_T, 2)[:, None]
                s_TR = s_TR + s3 * scale(ks_T, 3)[:, None]
            s_TR = s_TR * unit_R[None, :]
            if OUT > 0:
                s_TR = s_TR + gl.convert_layout(by_row(s_o, RP), S_L)
            vs_T = v_scales(tail_1, T_L, D, OUT, TAIL)
            more = t + STAGES < t1
            if LATE:
                # every warp has read the page before
                gl.thread_barrier()
                _ask(codes, tail, page * N + n, codes_s, tail_s, codes_bar, tail_bar, 1 - s, D, LINES, t + 1 < t1)
                page = gl.load(table + gl.minimum(t + 2, t1 - 1))
                _expect(codes_bar, tail_bar, s, D, TAIL, more)
            # weights by the reference there is; whether one is too large for it, or is not there, is known when all warps have theirs
            p_TR, p_WR = weights(s_TR, add_R, L_L, RP)
            put(p_TR, vs_T, p0_s, p1_s, p2_s, p3_s, RP, D)
            again_WR = gl.where(p_WR > 1.0, 1, gl.where((t + 1) * 128 > stored, 1, 0))
            again_s.store(gl.convert_layout(gl.max(gl.reshape(again_WR, [4, 8 * RP]), axis=1), gl.SliceLayout(1, gl.SliceLayout(2, L_L))))
            acc_X = v_was_X * (0x7F000000 - v_now_X.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
            v_was_X = v_now_X
            if not LATE:
                va = values(codes_s.index(s), 0, D, V_S, V_A)
                if D == 128:
                    vb = values(codes_s.index(s), 1, D, V_S, V_A)
            fence_async_shared()
            if not LATE:
                _expect(codes_bar, tail_bar, s, D, TAIL, more)
            if gl.max(again_s.load(FOUR), axis=0) != 0:
                s_TR = gl.where((t * 128 + t_T < stored)[:, None], s_TR, float("-inf"))
                # maximum: of a warp, then of all
                max_s.store(gl.max(gl.max(gl.max(gl.reshape(s_TR, [2, 4, 2, 8, RP]), axis=2), axis=0), axis=1))
                m_R = 0.0 - MARGIN - add_R
                new_R = gl.maximum(m_R, gl.convert_layout(gl.max(max_s.load(MAX_L), axis=0), R_L))
                add_R = 0.0 - MARGIN - new_R
                alpha_R = exp2(m_R - new_R)
                alpha_L = gl.convert_layout(alpha_R, gl.SliceLayout(0, gl.SliceLayout(0, L_L)))
                alpha_X = gl.convert_layout(gl.reshape(gl.join(alpha_R, alpha_R), [X]), VN_L)
                l_WR = l_WR * gl.expand_dims(gl.expand_dims(alpha_L, 0), 0)
                acc0 = acc0 * alpha_X[None, :]
                acc1 = acc1 * alpha_X[None, :]
                p_TR, p_WR = weights(s_TR, add_R, L_L, RP)
                put(p_TR, v_scales(tail_1, T_L, D, OUT, TAIL), p0_s, p1_s, p2_s, p3_s, RP, D)
                fence_async_shared()
                gl.thread_barrier()
            l_WR = l_WR + p_WR
            if LATE:
                va = values(codes_s.index(s), 0, D, V_S, V_A)
                if D == 128:
                    vb = values(codes_s.index(s), 1, D, V_S, V_A)
            o0 = outputs(va, p0_s, p1_s, V_MMA, X)
            if D == 128:
                o1 = outputs(vb, p2_s, p3_s, V_MMA, X)
            if not LATE:
                # every warp has read its part of this page, since P is complete: the one after next may come
                _ask(codes, tail, page * N + n, codes_s, tail_s, codes_bar, tail_bar, s, D, LINES, more)
                page = gl.load(table + gl.minimum(t + STAGES + 1, t1 - 1))
            if D == 128:
                o0, o1 = warpgroup_mma_wait(0, [o0, o1])
                acc1 = acc1 * acc_X[None, :] + o1
            else:
                o0 = warpgroup_mma_wait(0, [o0])
            acc0 = acc0 * acc_X[None, :] + o0

        part = part_ptr + slot * R * D
        # lo is held 16 times as large
        out_X = v_was_X * gl.where(gl.arange(0, X, VN_L) % 2 == 0, 16384.0 * 2.0**MARGIN, 1024.0 * 2.0**MARGIN)
        acc0 = gl.sum(gl.reshape(acc0 * out_X[None, :], [64, RP, 2]), axis=2)
        A_L: gl.constexpr = acc0.type.layout
        r_R = gl.arange(0, RP, gl.SliceLayout(0, A_L))
        c_C = gl.arange(0, 64, gl.SliceLayout(1, A_L))
        at = part + r_R[None, :] * D + c_C[:, None]
        gl.store(at, acc0, mask=(r_R < R)[None, :])
        if D == 128:
            gl.store(at + 64, gl.sum(gl.reshape(acc1 * out_X[None, :], [64, RP, 2]), axis=2), mask=(r_R < R)[None, :])
        r_M = gl.arange(0, RP, R_L)
        gl.store(ml_ptr + (slot * R + r_M) * 2, 0.0 - MARGIN - add_R, mask=r_M < R)
        l_R = gl.sum(gl.sum(l_WR, axis=1), axis=0) * 2.0**MARGIN
        r_L = gl.arange(0, RP, l_R.type.layout)
        gl.store(ml_ptr + (slot * R + r_L) * 2 + 1, l_R, mask=r_L < R)


# Head dim and query rows: programs on a multiprocessor, with so many registers a thread; whether a program asks for pages late (above).
# What is asked for early waits in line: with more than 100 KB a multiprocessor some programs get less than others, and end late.
FIT = {(128, 4): (4, 128), (128, 8): (3, 168), (64, 4): (4, 128), (64, 8): (4, 128)}
LATE = {(128, 4): True, (128, 8): False, (64, 4): False, (64, 8): False}
STAGES = 2  # pages on their way or being read


def serves(layout: PageLayout, rows: int, pool_PNb: torch.Tensor, queries: int, sliding: int, softcap: float) -> bool:
    """Whether `attend_decode` takes a call for a layout that `fused.serves`: one query a sequence, up to 8 query heads per KV head."""
    hopper = pool_PNb.device.type != "cuda" or torch.cuda.get_device_capability(pool_PNb.device)[0] == 9
    # a copy starts at an int32 number of lines of 128 bytes, the last of a record's holds its trailer
    lines = 0 < pool_PNb.numel() < 1 << 38 and pool_PNb.data_ptr() % 16 == 0 and layout.offsets["trailer"][0] == layout.page_bytes - 128
    return hopper and lines and queries == 1 and rows <= 8 and layout.outliers in (0, 1, 3, 4, 8) and sliding == 0 and softcap == 0


def sources(pool_PNb: torch.Tensor, layout: PageLayout) -> tuple[TensorDescriptor, TensorDescriptor]:
    """What copies read: lines of 128 bytes, codes and the rest of a record apart."""
    words = pool_PNb.view(-1).view(torch.int32)
    codes = TensorDescriptor.from_tensor(pool_PNb.view(-1, 128), [layout.k_dim, 128], CODES)
    return codes, TensorDescriptor.from_tensor(words.view(-1, layout.page_bytes // 128, 32), [1, _tail(layout), 32], PLAIN)


def _tail(layout: PageLayout) -> int:
    # lines behind a record's codes, as a power of two: copies beyond its end are zeros that nobody fetches
    return 1 << (layout.page_bytes // 128 - layout.k_dim - 1).bit_length()


def constants(layout: PageLayout, rows: int) -> dict[str, int]:
    """What the kernel is compiled for, beside the shapes."""
    return {"LINES": layout.page_bytes // 128, "TAIL": _tail(layout), "STAGES": STAGES, "LATE": LATE[layout.k_dim, rows]}
