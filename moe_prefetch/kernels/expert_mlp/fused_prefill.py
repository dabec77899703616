"""The two matrix products of a MoE layer for many tokens, on Hopper, in Gluon.

A persistent program takes tiles, one after another, of 128 rows of a weight matrix and up to 256 pairs of token and expert, which lie
sorted by expert. One warp asks bulk copies (TMA) for both operands, STAGES steps of 64 columns ahead, through a descriptor that it makes of
an expert's table entry; two groups of four warps multiply 64 rows each. Rows of gate and up alternate in eights, so that both halves of a
gated pair are one thread's. Sums run as in `fused.multiply`: one accumulator, steps of 16 columns in ascending order, so a token's bits are
those that it has among few tokens.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import _allocation

from .record import Form

LINES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
TOGETHER = gl.constexpr(8)
SIZES = (256, 128, 64, 32)  # boxes of pairs that copies bring
STAGES = 4  # steps on their way or being multiplied
SORTED = 8  # pairs that a program of `sort` moves
# From how many pairs an expert on average, and rows of gate, on `launch` is the faster way: of small experts sums are short, and what comes
# before and after them weighs more.
FROM, WIDE = 128, 1024


@triton.jit(do_not_specialize=["T"])
def sort(x_ptr, pair_ptr, count_ptr, sorted_ptr, place_ptr, next_ptr, T, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr,
         D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr):
    """sorted [T K, D]: hidden states of the pairs that count, one expert's after the other's; place [T K]: where each pair's are. Sets the
    tiles that `product` has begun to none."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    item = tl.program_id(0)
    if item == 0:
        tl.store(next_ptr + tl.arange(0, 8), tl.zeros((8,), tl.int32))
    i_E = tl.arange(0, EP)
    count_E = tl.load(count_ptr + i_E, mask=i_E < E, other=0, cache_modifier=".cg")
    items_E = (count_E + BT - 1) // BT
    e = tl.sum((tl.cumsum(items_E, 0) <= item).to(tl.int32), 0)
    if e < E:
        first = (item - tl.sum(tl.where(i_E < e, items_E, 0), 0)) * BT
        start = tl.sum(tl.where(i_E < e, count_E, 0), 0) + first
        j_T = tl.arange(0, BT)
        on_T = j_T < tl.sum(tl.where(i_E == e, count_E, 0), 0) - first
        pair_T = tl.load(pair_ptr + e.to(tl.int64) * T + first + j_T, mask=on_T, other=0, cache_modifier=".cg")
        tl.store(place_ptr + pair_T, start + j_T, mask=on_T)
        d_D = tl.arange(0, BD)
        from_TD = x_ptr + (pair_T // K).to(tl.int64)[:, None] * D + d_D[None, :]
        to_TD = sorted_ptr + (start + j_T).to(tl.int64)[:, None] * D + d_D[None, :]
        for d in tl.range(0, D, BD):
            on_TD = on_T[:, None] & (d_D < D - d)[None, :]
            tl.store(to_TD + d, tl.load(from_TD + d, mask=on_TD, other=0.0), mask=on_TD)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _entry(at):
    # what the publisher wrote before it is seen too, by copies as well
    return gl.inline_asm_elementwise("ld.acquire.sys.global.b64 $0, [$1]; fence.proxy.async.global;", "=l,l", [at], dtype=gl.int64,
                                     is_pure=False, pack=1)


@gluon.jit
def _place(tile, count_E, E: gl.constexpr, EP: gl.constexpr, BLOCKS: gl.constexpr):
    """(expert, block of rows, first of the sorted pairs, how many) of a tile; none of them when there is none."""
    i_E = gl.arange(0, EP, count_E.type.layout)
    items_E = (count_E + 255) // 256
    ends_E = gl.associative_scan(items_E, 0, _add)
    e = gl.sum((ends_E * BLOCKS <= tile).to(gl.int32), axis=0)
    mine_E = i_E == e
    items = gl.sum(gl.where(mine_E, items_E, 0), axis=0)
    tile = tile - (gl.sum(gl.where(mine_E, ends_E, 0), axis=0) - items) * BLOCKS
    # several items of an expert go through its rows side by side, so that weights come from memory once
    group = tile // (TOGETHER * BLOCKS)
    tile = tile - group * (TOGETHER * BLOCKS)
    together = gl.maximum(gl.minimum(items - group * TOGETHER, TOGETHER), 1)
    block = tile // together
    first = (group * TOGETHER + tile - block * together) * 256
    left = gl.minimum(gl.sum(gl.where(mine_E, count_E, 0), axis=0) - first, 256)
    start = gl.sum(gl.where(i_E < e, count_E, 0), axis=0) + first
    return e, block, start, gl.where(e < E, left, 0)


@gluon.jit
def _describe(where_ptr, e, ROWS: gl.constexpr, N: gl.constexpr, AT: gl.constexpr, GATED: gl.constexpr, TYPE: gl.constexpr):
    """The expert's matrix as copies see it; of gate and up, rows of both in eights."""
    base = (_entry(where_ptr + e) + AT).to(gl.pointer_type(TYPE))
    if GATED:
        w = tma.make_tensor_descriptor(base, [ROWS // 8, 2, 8, N], [8 * N, ROWS * N, N, 1], [4, 2, 8, 64], BOX)
    else:
        w = tma.make_tensor_descriptor(base, [ROWS, N], [N, 1], [64, 64], LINES)
    return w


@gluon.jit
def _produce(where_ptr, count_ptr, next_ptr, x0, x1, x2, x3, rings, jobs, E: gl.constexpr, EP: gl.constexpr, ROWS: gl.constexpr,
             N: gl.constexpr, AT: gl.constexpr, GATED: gl.constexpr, BF: gl.constexpr, STAGES: gl.constexpr):
    """One warp: which tile is next, and its copies, as far ahead as there is room."""
    a_s, b_s, full, empty = rings
    job_s, job_full, job_empty = jobs
    TYPE: gl.constexpr = x0.dtype
    ROW: gl.constexpr = gl.BlockedLayout([EP // 32], [32], [1], [0])
    JOB: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    STEPS: gl.constexpr = (N + 63) // 64
    BLOCKS: gl.constexpr = (ROWS + 2 * BF - 1) // (2 * BF)
    i_E = gl.arange(0, EP, ROW)
    j_J = gl.arange(0, 4, JOB)
    count_E = gl.load(count_ptr + i_E, mask=i_E < E, other=0)
    step = 0
    job = 0
    e, block, start, left = _place(gl.atomic_add(next_ptr, 1), count_E, E, EP, BLOCKS)
    w = _describe(where_ptr, gl.minimum(e, E - 1), ROWS, N, AT, GATED, TYPE)
    while left > 0:
        slot = job % 2
        mbarrier.wait(job_empty.index(slot), ((job // 2) & 1) ^ 1)
        job_s.index(slot).store(gl.where(j_J == 0, block, gl.where(j_J == 1, start, left)))
        mbarrier.arrive(job_full.index(slot), count=1)
        job += 1
        for k in range(STEPS):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            bar = full.index(s)
            x = b_s.index(s)
            if left > 192:
                mbarrier.expect(bar, (128 + 256) * 128)
            elif left > 160:
                mbarrier.expect(bar, (128 + 192) * 128)
            elif left > 128:
                mbarrier.expect(bar, (128 + 160) * 128)
            elif left > 64:
                mbarrier.expect(bar, (128 + 128) * 128)
            elif left > 32:
                mbarrier.expect(bar, (128 + 64) * 128)
            else:
                mbarrier.expect(bar, (128 + 32) * 128)
            for c in gl.static_range(2):
                if GATED:
                    box = a_s.index(s * 2 + c)._reinterpret(TYPE, [4, 2, 8, 64], BOX)
                    tma.async_copy_global_to_shared(w, [(block * 2 + c) * 4, 0, 0, k * 64], bar, box)
                else:
                    tma.async_copy_global_to_shared(w, [(block * 2 + c) * 64, k * 64], bar, a_s.index(s * 2 + c))
            if left > 192:
                tma.async_copy_global_to_shared(x0, [start, k * 64], bar, x)
            elif left > 64:
                tma.async_copy_global_to_shared(x1, [start, k * 64], bar, x.slice(0, 128, dim=0))
                if left > 160:
                    tma.async_copy_global_to_shared(x2, [start + 128, k * 64], bar, x.slice(128, 64, dim=0))
                elif left > 128:
                    tma.async_copy_global_to_shared(x3, [start + 128, k * 64], bar, x.slice(128, 32, dim=0))
            elif left > 32:
                tma.async_copy_global_to_shared(x2, [start, k * 64], bar, x.slice(0, 64, dim=0))
            else:
                tma.async_copy_global_to_shared(x3, [start, k * 64], bar, x.slice(0, 32, dim=0))
            step += 1
        e1, block1, start1, left1 = _place(gl.atomic_add(next_ptr, 1), count_E, E, EP, BLOCKS)
        if (e1 != e) & (left1 > 0):
            # what has been asked for with the descriptor before has come: the new one takes its place
            for i in gl.static_range(STAGES):
                mbarrier.wait(full.index((step + i) % STAGES), (((step + i) // STAGES) & 1) ^ 1)
            w = _describe(where_ptr, e1, ROWS, N, AT, GATED, TYPE)
        e, block, start, left = e1, block1, start1, left1
    slot = job % 2
    mbarrier.wait(job_empty.index(slot), ((job // 2) & 1) ^ 1)
    job_s.index(slot).store(gl.zeros([4], gl.int32, JOB))
    mbarrier.arrive(job_full.index(slot), count=1)


@gluon.jit
def _finish(out_ptr, acc, start, left, row, limit, alpha, ROWS: gl.constexpr, GATED: gl.constexpr, CLAMPED: gl.constexpr, BF: gl.constexpr,
            BT: gl.constexpr):
    """A group's part of a tile to memory, activated."""
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(acc, [4, 2, 8, BT]), [0, 2, 3, 1]))
        if CLAMPED:
            # comparisons that a NaN passes through
            gate = gl.where(gate > limit, limit, gate)
            up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up)) + 1.0
            y = gate / (1.0 + gl.exp(-alpha * gate)) * up
        else:
            y = gate / (1.0 + gl.exp(-gate)) * up
        y = y.to(out_ptr.dtype.element_ty)
    else:
        y = acc
    y = gl.reshape(y, [BF, BT // 8, 8])
    L: gl.constexpr = y.type.layout
    # of pairs, every eighth is a thread's own: constants
    t_I = gl.arange(0, BT // 8, gl.SliceLayout(0, gl.SliceLayout(2, L))) * 8
    t_J = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    r_R = row + gl.arange(0, BF, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    at = out_ptr + start.to(gl.int64) * ROWS + r_R[:, None, None] + (t_J * ROWS)[None, None, :]
    on = (left - t_J)[None, None, :] > t_I[None, :, None]
    gl.store(at + (t_I * ROWS)[None, :, None], y, mask=on & (r_R < ROWS)[:, None, None])


@gluon.jit
def _tile(out_ptr, rings, step, block, start, left, limit, alpha, ROWS: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr,
          CLAMPED: gl.constexpr, BF: gl.constexpr, STAGES: gl.constexpr, WHICH: gl.constexpr, BT: gl.constexpr, BX: gl.constexpr):
    """BT + BX pairs."""
    a_s, b_s, full, empty = rings
    STEPS: gl.constexpr = (N + 63) // 64
    acc = gl.zeros([64, BT], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16]))
    if BX > 0:
        more = gl.zeros([64, BX], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BX, 16]))
    for k in range(STEPS):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        acc = warpgroup_mma(a_s.index(s * 2 + WHICH), b_s.index(s).slice(0, BT, dim=0).permute([1, 0]), acc, is_async=True)
        if BX > 0:
            more = warpgroup_mma(a_s.index(s * 2 + WHICH), b_s.index(s).slice(BT, BX, dim=0).permute([1, 0]), more, is_async=True)
            acc, more = warpgroup_mma_wait(2, [acc, more])
        else:
            acc = warpgroup_mma_wait(1, [acc])
        # the step before has been done
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        step += 1
    if BX > 0:
        acc, more = warpgroup_mma_wait(0, [acc, more])
    else:
        acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    row = (block * 2 + WHICH) * BF
    _finish(out_ptr, acc, start, left, row, limit, alpha, ROWS, GATED, CLAMPED, BF, BT)
    if BX > 0:
        _finish(out_ptr, more, start + BT, left - BT, row, limit, alpha, ROWS, GATED, CLAMPED, BF, BX)
    return step


@gluon.jit
def _consume(out_ptr, rings, jobs, limit, alpha, ROWS: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr, CLAMPED: gl.constexpr,
             BF: gl.constexpr, STAGES: gl.constexpr, WHICH: gl.constexpr):
    """Four warps: 64 rows of every tile."""
    job_s, job_full, job_empty = jobs
    JOB: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    j_J = gl.arange(0, 4, JOB)
    step = 0
    job = 0
    left = 1
    while left > 0:
        slot = job % 2
        mbarrier.wait(job_full.index(slot), (job // 2) & 1)
        job_J = job_s.index(slot).load(JOB)
        block = gl.sum(gl.where(j_J == 0, job_J, 0), axis=0)
        start = gl.sum(gl.where(j_J == 1, job_J, 0), axis=0)
        left = gl.sum(gl.where(j_J == 2, job_J, 0), axis=0)
        mbarrier.arrive(job_empty.index(slot), count=1)
        job += 1
        if left > 192:
            step = _tile(out_ptr, rings, step, block, start, left, limit, alpha, ROWS, N, GATED, CLAMPED, BF, STAGES, WHICH, 256, 0)
        elif left > 160:
            step = _tile(out_ptr, rings, step, block, start, left, limit, alpha, ROWS, N, GATED, CLAMPED, BF, STAGES, WHICH, 128, 64)
        elif left > 128:
            step = _tile(out_ptr, rings, step, block, start, left, limit, alpha, ROWS, N, GATED, CLAMPED, BF, STAGES, WHICH, 128, 32)
        elif left > 64:
            step = _tile(out_ptr, rings, step, block, start, left, limit, alpha, ROWS, N, GATED, CLAMPED, BF, STAGES, WHICH, 128, 0)
        elif left > 32:
            step = _tile(out_ptr, rings, step, block, start, left, limit, alpha, ROWS, N, GATED, CLAMPED, BF, STAGES, WHICH, 64, 0)
        elif left > 0:
            step = _tile(out_ptr, rings, step, block, start, left, limit, alpha, ROWS, N, GATED, CLAMPED, BF, STAGES, WHICH, 32, 0)


@gluon.jit
def product(x0, x1, x2, x3, where_ptr, count_ptr, next_ptr, out_ptr, limit, alpha, E: gl.constexpr, EP: gl.constexpr, ROWS: gl.constexpr,
            N: gl.constexpr, AT: gl.constexpr, GATED: gl.constexpr, CLAMPED: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr):
    """GATED: h [pairs, ROWS] = act(gate x) up x; otherwise y [pairs, ROWS] FP32 = w x. x0 to x3: x [pairs, N], sorted by expert, in boxes
    of SIZES; next: tiles begun so far."""
    TYPE: gl.constexpr = x0.dtype
    BF: gl.constexpr = 32 if GATED else 64
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    a_s = gl.allocate_shared_memory(TYPE, [STAGES * 2, 64, 64], LINES)
    b_s = gl.allocate_shared_memory(TYPE, [STAGES, 256, 64], LINES)
    job_s = gl.allocate_shared_memory(gl.int32, [2, 4], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    job_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    job_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(job_full.index(i), count=1)
        mbarrier.init(job_empty.index(i), count=2)
    rings = (a_s, b_s, full, empty)
    jobs = (job_s, job_full, job_empty)
    gl.warp_specialize([
        (_consume, (out_ptr, rings, jobs, limit, alpha, ROWS, N, GATED, CLAMPED, BF, STAGES, 0)),
        (_consume, (out_ptr, rings, jobs, limit, alpha, ROWS, N, GATED, CLAMPED, BF, STAGES, 1)),
        (_produce, (where_ptr, count_ptr, next_ptr, x0, x1, x2, x3, rings, jobs, E, EP, ROWS, N, AT, GATED, BF, STAGES)),
    ], [4, 1], [232, 40])


# Weights whose bits have been compared with the other kernels' on a GPU; FP16's are ready to be.
PROVEN: tuple[str, ...] = ("bfloat16",)


def serves(form: Form, dtype: torch.dtype, tokens: int, top_k: int, experts: int, device: torch.device) -> bool:
    """Whether `launch` takes a call: many pairs an expert, PROVEN weights without biases in lines that copies can read."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    plain = form.weights == str(dtype).removeprefix("torch.") and form.weights in PROVEN and not form.bias
    return hopper and plain and form.hidden % 8 == 0 and form.width % 8 == 0 and form.width >= WIDE and tokens * top_k >= FROM * experts


@lru_cache
def programs_on(device: torch.device) -> int:
    """Programs that are on the chip at once: one on a multiprocessor, whose shared memory it fills."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def launch(hidden_TD: torch.Tensor, pair_ET: torch.Tensor, count_E: torch.Tensor, where_E: torch.Tensor, form: Form, top_k: int,
           limit: float, alpha: float, items_of: Callable[[int], int], pdl: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T K, hidden] FP32, place [T K] int32): what each expert makes of its pairs, and in which row of y a pair's is.

    pair_ET, count_E: what `fused.plan` wrote; items_of(n): how many items of at most n pairs there can be; pdl: options of a launch.
    """
    (tokens, hidden), experts, device = hidden_TD.shape, where_E.shape[0], hidden_TD.device
    pairs = tokens * top_k
    new = lambda *shape, dtype: torch.empty(*shape, dtype=dtype, device=device)  # noqa: E731
    x, h = (new(pairs, n, dtype=hidden_TD.dtype) for n in (hidden, form.width))
    y, place, begun = new(pairs, hidden, dtype=torch.float32), new(pairs, dtype=torch.int32), new(2, 4, dtype=torch.int32)
    same: dict[str, Any] = {"E": experts, "EP": max(32, triton.next_power_of_2(experts)), "PDL": bool(pdl)}
    sort[(items_of(SORTED),)](hidden_TD, pair_ET, count_E, x, place, begun, tokens, K=top_k, D=hidden, BT=SORTED,
                              BD=min(1024, triton.next_power_of_2(hidden)), num_warps=8, **same, **pdl)
    at = {p.name: p.offset for p in form.layout().parts}
    # descriptors that programs make lie in memory of the launch
    token = _allocation._allocator.set(lambda size, alignment, stream: new(size, dtype=torch.uint8))
    try:
        for source, out, name, rows in ((x, h, "gate_up", form.width), (h, y, "down", hidden)):
            gated = name == "gate_up"
            boxes = [TensorDescriptor.from_tensor(source, [n, 64], LINES.value) for n in SIZES]
            tiles = -(-rows // (64 if gated else 128)) * items_of(SIZES[0])
            product[(min(programs_on(device), tiles),)](
                *boxes, where_E, count_E, begun[0 if gated else 1], out, limit, alpha, ROWS=rows, N=source.shape[1], AT=at[name],
                GATED=gated, CLAMPED=limit != 0, STAGES=STAGES, num_warps=4, maxnreg=168, **same, **pdl)
    finally:
        _allocation._allocator.reset(token)
    return y, place
