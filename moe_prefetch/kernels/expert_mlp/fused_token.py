"""One token and MXFP4 records, in Gluon: two launches with the bits of `fused.py`, on Hopper.

`gate_up`  a warp has 8 rows of gate and 8 of up, which are M of its MMA; weights come straight into registers, AHEAD tiles of 128 columns
           before they are needed.
`down`     a program has 8 rows of all experts of the token, a warp an expert. Weights are N of the MMA and lie in shared memory, the first
           EARLY tiles asked for before the wait for `gate_up`; h is row 0 of M. The experts are added in ascending order in the same
           program, so there is no `combine`.

Products are those of `fused.py` in the same order; columns have other places within the 16 of an MMA, which changes no bit on an H200.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .fused_elements import ASM, BF16, NONE, entry
from .record import Form

WARPS, AHEAD, EARLY = 4, 4, 12  # warps of `gate_up`
TOP_K = 4  # what has been timed; other numbers of experts go the general way
# (Hidden, width, biases) whose bits have been compared with the other kernels' on a GPU: gpt-oss. None: all there is room for.
PROVEN: tuple[tuple[int, int, str], ...] | None = ((2880, 2880, "bfloat16"),)


@gluon.jit
def wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def go():
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fetch(address):
    """A line to L2, where other kernels' stores are seen whenever it was asked for."""
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def part(address, AT: gl.constexpr, TYPE: gl.constexpr):
    return gl.multiple_of((address + AT).to(gl.pointer_type(TYPE), bitcast=True), 128)


@gluon.jit
def decoded(w, f, GROUP: gl.constexpr):
    """`fused_elements.e2m1` of two words of 16 bits in one of 32."""
    if GROUP == 0:
        y = gl.inline_asm_elementwise("and.b32 $0, $1, 0x81C081C0; mul.rn.bf16x2 $0, $0, $2;", "=&r,r,r", [w, f], dtype=gl.int32,
                                      is_pure=True, pack=1)
    elif GROUP == 1:
        y = gl.inline_asm_elementwise("shf.r.wrap.b32 $0, $1, $1, 3; and.b32 $0, $0, 0x81C081C0; mul.rn.bf16x2 $0, $0, $2;", "=&r,r,r",
                                      [w, f], dtype=gl.int32, is_pure=True, pack=1)
    elif GROUP == 2:
        y = gl.inline_asm_elementwise("shf.r.wrap.b32 $0, $1, $1, 6; and.b32 $0, $0, 0x81C081C0; mul.rn.bf16x2 $0, $0, $2;", "=&r,r,r",
                                      [w, f], dtype=gl.int32, is_pure=True, pack=1)
    else:
        y = gl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x001B001B; mul.lo.u32 $0, $0, 0x1084; and.b32 $0, $0, 0x81C081C0; mul.rn.bf16x2 $0, $0, $2;", "=&r,r,r",
            [w, f], dtype=gl.int32, is_pure=True, pack=1)
    return y


@gluon.jit
def factor(s, GROUP: gl.constexpr):
    """`fused_elements.factor` of scales to which 0x7E7E7E7E has been added."""
    return gl.inline_asm_elementwise("{ .reg .b32 a; prmt.b32 a, $1, 0, $2; shl.b32 $0, a, 7; }", "=r,r,n", [s, 0x4040 + GROUP * 0x0101],
                                     dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def product(a0, a1, a2, a3, b0, b1, c):
    """A warp's MMA. Of thread 4 g + q: a0 to a3 rows g, g + 8, g, g + 8 and columns 2 q, 2 q, 2 q + 8, 2 q + 8 and the next, b0 and b1 the
    same columns of vector g; c: rows g, g, g + 8, g + 8 of vectors 2 q, 2 q + 1, 2 q, 2 q + 1."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3", [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1)


# gate_up --------------------------------------------------------------------------------------------------------------------
@gluon.jit
def two(at, on):
    """A word at each thread's pointer and the next."""
    B4: gl.constexpr = at.type.layout.parent
    i = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, B4))))
    at = gl.expand_dims(at, 3) + i[None, None, None, :]
    lo, hi = gl.split(gl.load(at, mask=gl.expand_dims(on, 3), cache_modifier=".cg"))
    return lo, hi


@gluon.jit
def ask(codes, scale, tile: gl.constexpr, F: gl.constexpr, on):
    """A tile's codes and scales of a row of gate and one of up, F rows further."""
    a0, a2 = two(codes + tile * F * 32, on)
    a1, a3 = two(codes + (tile * F * 32 + F * 16), on)
    b0, b2 = two(codes + (tile * F * 32 + 8), on)
    b1, b3 = two(codes + (tile * F * 32 + F * 16 + 8), on)
    gate = gl.load(scale + tile * F * 2, mask=on, cache_modifier=".cg")
    return a0, a1, a2, a3, b0, b1, b2, b3, gate, gl.load(scale + (tile * F * 2 + F), mask=on, cache_modifier=".cg")


@gluon.jit
def tile_up(c, w, x, tile, B4: gl.constexpr):
    """128 columns. x: the token in shared memory."""
    gate = w[8] + 0x7E7E7E7E
    up = w[9] + 0x7E7E7E7E
    for g in gl.static_range(4):
        f = factor(gate, g)
        u = factor(up, g)
        for m in gl.static_range(2):
            b0, b1 = gl.split(x.index(tile * 8 + g * 2 + m).load(B4))
            a = decoded(w[4 * m], f, g), decoded(w[4 * m + 1], u, g), decoded(w[4 * m + 2], f, g), decoded(w[4 * m + 3], u, g)
            c = product(a[0], a[1], a[2], a[3], b0, b1, c)
    return c


@gluon.jit
def gate_up(x_ptr, ids_ptr, where_ptr, h_ptr, limit, alpha, E: gl.constexpr, D: gl.constexpr, F: gl.constexpr, BIAS: gl.constexpr,
            AT: gl.constexpr, SCALE_AT: gl.constexpr, BIAS_AT: gl.constexpr, CLAMPED: gl.constexpr, W: gl.constexpr, AHEAD: gl.constexpr):
    """h [K, F] = act(gate x) up x, in `down`'s order within 32 columns. At least AHEAD tiles."""
    B4: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2], [1, 8, 4, 1], [W, 1, 1, 1], [3, 2, 1, 0])
    L: gl.constexpr = gl.SliceLayout(3, B4)
    BLOCKS: gl.constexpr = (F + 8 * W - 1) // (8 * W)
    TILES: gl.constexpr = (D + 127) // 128
    LAST: gl.constexpr = TILES % AHEAD + AHEAD
    PIECES: gl.constexpr = (D // 2 + 128 * W - 1) // (128 * W)
    program = gl.program_id(0)
    xs = gl.allocate_shared_memory(gl.int32, [PIECES, 128 * W], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    lane = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    if program < 4:
        entries = where_ptr.to(gl.int64, bitcast=True) + gl.minimum(program * 512 + lane * 128, E * 8 - 8)
        fetch(gl.where(lane < 16, entries, ids_ptr.to(gl.int64, bitcast=True)))
        fetch(x_ptr.to(gl.int64, bitcast=True) + gl.minimum(program * 32 + lane, (D * 2 - 1) // 128) * 128)
    wait()
    go()
    pair = program // BLOCKS
    block = program % BLOCKS
    own = gl.load(ids_ptr + pair, cache_modifier=".cg")
    real = (own >= 0) & (own < E)
    word = gl.arange(0, 128 * W, gl.BlockedLayout([4], [32], [W], [0]))
    for i in gl.static_range(PIECES):
        at = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + i * 128 * W + word
        async_copy.async_copy_global_to_shared(xs.index(i), at, mask=i * 128 * W + word < D // 2, cache_modifier=".cg")
    async_copy.commit_group()
    address = entry(where_ptr, gl.minimum(gl.maximum(own, 0), E - 1))
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    f_out = block * (8 * W) + warp * 8 + g + q * 0
    f = gl.minimum(f_out, F - 1)
    on = real & (f >= 0)
    codes = part(address, AT, gl.int32) + (f * 16 + q * 2)
    scale = part(address, SCALE_AT, gl.int32) + f
    first = ()
    for p in gl.static_range(AHEAD):
        first = first + ask(codes, scale, p, F, on)
    if real:
        ring = first
        zero = gl.zeros([W, 8, 4], gl.float32, L)
        c = (zero, zero, zero, zero)
        async_copy.wait_group(0)
        x = xs._reinterpret(gl.int32, [PIECES * 16 * W, 1, 1, 4, 2], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
        for base in range(0, TILES - LAST, AHEAD):
            for p in gl.static_range(AHEAD):
                coming = ask(codes, scale, p + AHEAD, F, on)
                c = tile_up(c, ring[:10], x, base + p, B4)
                ring = ring[10:] + coming
            codes += AHEAD * F * 32
            scale += AHEAD * F * 2
        for p in gl.static_range(LAST):
            if p + AHEAD < LAST:
                ring = ring + ask(codes, scale, p + AHEAD, F, on)
            c = tile_up(c, ring[:10], x, TILES - LAST + p, B4)
            ring = ring[10:]
        gate = c[0]
        up = c[2]
        if BIAS != NONE:
            gate += gl.load(part(address, BIAS_AT, gl.bfloat16) + f, cache_modifier=".cg").to(gl.float32)
            up += gl.load(part(address, BIAS_AT, gl.bfloat16) + F + f, cache_modifier=".cg").to(gl.float32)
        if CLAMPED:
            # Comparisons that a NaN passes through.
            gate = gl.where(gate > limit, limit, gate)
            up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up)) + 1.0
            h = gate / (1.0 + gl.exp(-alpha * gate)) * up
        else:
            h = gate / (1.0 + gl.exp(-gate)) * up
        # Column 16 m + 4 q + low of 32 has place 8 q + 4 m + low.
        to = (f_out & ~31) + ((f_out >> 2) & 3) * 8 + ((f_out >> 4) & 1) * 4 + (f_out & 3)
        gl.store(h_ptr + (pair * F + to), h.to(gl.bfloat16), mask=(f_out < F) & (q == 0))


# down -----------------------------------------------------------------------------------------------------------------------
@gluon.jit
def product_n(a0, a2, b0, b1, c):
    """`product` with rows of A from 8 on zero."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 z; mov.b32 z, 0;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, z, $5, z}, {$6, $7}, {$8, $9, $10, $11}; }""",
        "=f,=f,=f,=f,r,r,r,r,0,1,2,3", [a0, a2, b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1)


@gluon.jit
def alike(x, L: gl.constexpr):
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon.jit
def piece(h, tile: gl.constexpr, g: gl.constexpr, m: gl.constexpr, L: gl.constexpr):
    """[KP, 1, 4] of h [KP, 4, tile, group / 2, group % 2, m]."""
    first, second = gl.split(h)
    x = second if m else first
    first, second = gl.split(x)
    x = second if g % 2 else first
    first, second = gl.split(x)
    x = second if g // 2 else first
    first, second = gl.split(x)
    x = second if tile else first
    return gl.expand_dims(alike(x, gl.SliceLayout(1, L)), 1)


@gluon.jit
def tiles_down(c, codes, scales, h, tile, KP: gl.constexpr, L: gl.constexpr, COUNT: gl.constexpr):
    """One or two tiles of columns; h: of both."""
    EXPERTS: gl.constexpr = [[1, 0], [2, 0], [4, 0]]
    EXPERTS3: gl.constexpr = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    LOG: gl.constexpr = 1 if KP == 2 else 2 if KP == 4 else 3
    C_L: gl.constexpr = gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 8]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
                                                   EXPERTS3[:LOG], [], [KP, 8, 16])
    H_L: gl.constexpr = gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 16], [0, 32], [0, 64]], [[0, 4], [0, 8], [0, 0], [0, 0], [0, 0]],
                                                   EXPERTS[:LOG], [], [KP, 128])
    lo, hi = gl.split(gl.permute(gl.reshape(h.load(H_L), [KP, 2, 2, 2, 4, 2, 2]), [0, 4, 1, 2, 3, 5, 6]))
    for t in gl.static_range(COUNT):
        w0, w1 = gl.split(gl.permute(gl.reshape(codes.index(tile + t).load(C_L), [KP, 8, 2, 4, 2]), [0, 1, 3, 2, 4]))
        w00, w01 = gl.split(w0)
        w10, w11 = gl.split(w1)
        w = (alike(w00, L), alike(w10, L), alike(w01, L), alike(w11, L))
        s = gl.expand_dims(scales.index(tile + t).load(gl.SliceLayout(2, L)), 2) + 0x7E7E7E7E
        for g in gl.static_range(4):
            f = factor(s, g)
            for m in gl.static_range(2):
                c = product_n(piece(lo, t, g, m, L), piece(hi, t, g, m, L), decoded(w[2 * m], f, g), decoded(w[2 * m + 1], f, g), c)
    return c


@gluon.jit
def down(h_ptr, ids_ptr, weights_ptr, where_ptr, out_ptr, E: gl.constexpr, K: gl.constexpr, KP: gl.constexpr, D: gl.constexpr,
         F: gl.constexpr, BIAS: gl.constexpr, AT: gl.constexpr, SCALE_AT: gl.constexpr, BIAS_AT: gl.constexpr, TP: gl.constexpr,
         EARLY: gl.constexpr):
    """out [D] = the sum over experts, ascending, of weight times (down h + bias). At least EARLY tiles, at most TP."""
    TILES: gl.constexpr = (F + 127) // 128
    PHASES: gl.constexpr = (TILES + 7) // 8
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [KP, 1, 1], [2, 1, 0])
    C_L: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [KP, 1, 1], [2, 1, 0])
    S_L: gl.constexpr = gl.BlockedLayout([1, 1, 4], [16, 1, 2], [1, KP, 1], [2, 1, 0])
    H_L: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, KP, 1], [2, 1, 0])
    O_L: gl.constexpr = gl.BlockedLayout([1], [32], [KP], [0])
    # Pieces of a row of codes are rotated from row to row, so that no two threads meet in a bank.
    codes = gl.allocate_shared_memory(gl.int32, [TILES, KP, 8, 16], gl.SwizzledSharedLayout(4, 1, 4, [2, 1, 0]))
    scales = gl.allocate_shared_memory(gl.int32, [TP, KP, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    hidden = gl.allocate_shared_memory(gl.int32, [4, KP, 128], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    sums = gl.allocate_shared_memory(gl.float32, [KP, 8, 4, 2], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    block = gl.program_id(0)
    k_K = gl.arange(0, KP, gl.SliceLayout(1, gl.SliceLayout(2, C_L)))
    r_R = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, C_L)))
    word_C = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, C_L)))
    own = gl.load(ids_ptr + k_K, mask=k_K < K, other=-1, cache_modifier=".cg")
    on = ((own >= 0) & (own < E))[:, None, None]
    address = entry(where_ptr, gl.minimum(gl.maximum(own, 0), E - 1))
    row = gl.minimum(block * 8 + r_R, D - 1)
    # What is said of pointers holds where they are made: not across a call.
    at = (address + AT)[:, None, None] + ((row * 64)[None, :, None] + (word_C * 4)[None, None, :]).to(gl.int64)
    codes_at = gl.max_contiguous(gl.multiple_of(at.to(gl.pointer_type(gl.int32), bitcast=True), [1, 1, 16]), [1, 1, 4])
    tile_S = gl.arange(0, TP, gl.SliceLayout(1, gl.SliceLayout(2, S_L)))[:, None, None]
    k_S = gl.arange(0, KP, gl.SliceLayout(0, gl.SliceLayout(2, S_L)))
    r_S = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, S_L)))
    own_S = gl.load(ids_ptr + k_S, mask=k_S < K, other=-1, cache_modifier=".cg")
    on_S = ((own_S >= 0) & (own_S < E))[None, :, None]
    address_S = entry(where_ptr, gl.minimum(gl.maximum(own_S, 0), E - 1))
    row_S = (gl.minimum(block * 8 + r_S, D - 1) * 4)[None, None, :]
    at_S = (address_S + SCALE_AT)[None, :, None] + (tile_S * (D * 4) + row_S).to(gl.int64)
    scales_at = gl.max_contiguous(gl.multiple_of(at_S.to(gl.pointer_type(gl.int32), bitcast=True), [1, 1, 16]), [1, 1, 4])
    async_copy.async_copy_global_to_shared(scales, scales_at, mask=(tile_S < TILES) & on_S, cache_modifier=".cg")
    for t in range(0, EARLY):
        async_copy.async_copy_global_to_shared(codes.index(t), codes_at + t * (D * 16), mask=on, cache_modifier=".cg")
        async_copy.commit_group()
    ids = ()
    weights = ()
    for k in gl.static_range(K):
        ids = ids + (gl.load(ids_ptr + k, cache_modifier=".cg"),)
        weights = weights + (gl.load(weights_ptr + k, cache_modifier=".cg"),)
    d = block * 8 + gl.arange(0, 8, O_L)
    biases = ()
    if BIAS != NONE:
        for k in gl.static_range(K):
            bias_at = part(entry(where_ptr, gl.minimum(gl.maximum(ids[k], 0), E - 1)), BIAS_AT, gl.bfloat16) + d
            there_D = (d < D) & (ids[k] >= 0) & (ids[k] < E)
            biases = biases + (gl.load(bias_at, mask=there_D, other=0.0, cache_modifier=".cg").to(gl.float32),)
    wait()
    pair_H = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, H_L)))[:, None, None]
    k_H = gl.arange(0, KP, gl.SliceLayout(0, gl.SliceLayout(2, H_L)))[None, :, None]
    word_H = pair_H * 128 + gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, H_L)))[None, None, :]
    h_at = h_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (gl.minimum(k_H, K - 1) * (F // 2) + word_H)
    h = ()
    for p in gl.static_range(PHASES):
        h = h + (gl.load(h_at + p * 512, mask=word_H + k_H * 0 + p * 512 < F // 2, other=0, cache_modifier=".cg"),)
    for t in range(EARLY, TILES):
        async_copy.async_copy_global_to_shared(codes.index(t), codes_at + t * (D * 16), mask=on, cache_modifier=".cg")
        async_copy.commit_group()
    zero = gl.zeros([KP, 8, 4], gl.float32, L)
    scale = scales._reinterpret(gl.int32, [TP, KP, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    c = (zero, zero, zero, zero)
    h_pair = hidden._reinterpret(gl.int32, [4, KP, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for p in gl.static_range(PHASES):
        # Eight tiles at a time; each tile's copies are a group.
        hidden.store(h[p])
        if p + 1 < PHASES:
            async_copy.wait_group(TILES - 8 * (p + 1))
        else:
            async_copy.wait_group(0)
        for pair in range(0, 4 if 8 * p + 8 <= TILES else (TILES - 8 * p) // 2):
            c = tiles_down(c, codes, scale, h_pair.index(pair), 8 * p + 2 * pair, KP, L, 2)
        if (p + 1 == PHASES) & (TILES % 2 == 1):
            c = tiles_down(c, codes, scale, h_pair.index((TILES - 8 * p) // 2), TILES - 1, KP, L, 1)
    go()
    # Row 0 of M has columns 2 q and 2 q + 1: rows of weights.
    sums.store(gl.join(c[0], c[1]))
    row_sums = sums._reinterpret(gl.float32, [KP * 8, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Of equal ids the first counts, with all their weights.
    counts = ()
    summed = ()
    for k in gl.static_range(K):
        here = (ids[k] >= 0) & (ids[k] < E)
        weight = 0.0
        for j in gl.static_range(K):
            if j < k:
                here = here & (ids[j] != ids[k])
            weight += gl.where(ids[j] == ids[k], weights[j], 0.0)
        counts = counts + (here,)
        summed = summed + (weight,)
    y = ()
    for k in gl.static_range(K):
        y_D = row_sums.index(k * 8).load(O_L)
        if BIAS != NONE:
            y_D = y_D + biases[k]
        y = y + (y_D,)
    acc_D = gl.zeros([8], gl.float32, O_L)
    for i in gl.static_range(K):
        there = False
        weight = 0.0
        next_D = acc_D * 0.0
        for k in gl.static_range(K):
            rank = 0
            for j in gl.static_range(K):
                rank += (counts[j] & (ids[j] < ids[k])).to(gl.int32)
            mine = counts[k] & (rank == i)
            there = there | mine
            weight = gl.where(mine, summed[k], weight)
            next_D = gl.where(mine, y[k], next_D)
        acc_D = gl.where(there, acc_D + weight * next_D, acc_D)
    gl.store(out_ptr + d, acc_D.to(gl.bfloat16), mask=d < D)


# launch ---------------------------------------------------------------------------------------------------------------------
def serves(form: Form, dtype: torch.dtype, tokens: int, top_k: int, device: torch.device) -> bool:
    """Whether a token goes this way: on Hopper, MXFP4, biases in BF16 or none, PROVEN matrices of a size that the kernels have room for."""
    known = PROVEN is None or (form.hidden, form.width, form.bias) in PROVEN
    return (known and ASM.value and tokens == 1 and top_k == TOP_K and form.weights == "mxfp4" and form.bias in ("", "bfloat16")
            and dtype == torch.bfloat16 and form.hidden >= 128 * AHEAD and EARLY <= -(-form.width // 128) <= 32
            and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9)


def constants(form: Form, which: str, experts: int, top_k: int, clamped: bool) -> tuple[dict[str, Any], int, int]:
    """Of `gate_up` or `down`: (constants, warps, programs)."""
    at = {p.name: p.offset for p in form.layout().parts}
    both = {"E": experts, "D": form.hidden, "F": form.width, "BIAS": BF16.value if form.bias else NONE.value, "AT": at[which],
            "SCALE_AT": at[f"{which}_scale"], "BIAS_AT": at.get(f"{which}_bias", 0)}
    if which == "gate_up":
        return {**both, "CLAMPED": clamped, "W": WARPS, "AHEAD": AHEAD}, WARPS, top_k * -(-form.width // (8 * WARPS))
    wide, tiles = triton.next_power_of_2(max(2, top_k)), triton.next_power_of_2(-(-form.width // 128))
    return {**both, "K": top_k, "KP": wide, "TP": tiles, "EARLY": EARLY}, wide, -(-form.hidden // 8)


def launch(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, where_E: torch.Tensor, form: Form, limit: float,
           alpha: float) -> torch.Tensor:
    """`fused.launch` of what this `serves`."""
    h = torch.empty(ids_TK.shape[1], form.width, dtype=hidden_TD.dtype, device=hidden_TD.device)
    out, sizes = torch.empty_like(hidden_TD), (len(where_E), ids_TK.shape[1], limit != 0)
    same, warps, programs = constants(form, "gate_up", *sizes)
    gate_up[(programs,)](hidden_TD, ids_TK, where_E, h, limit, alpha, num_warps=warps, launch_pdl=True, **same)
    same, warps, programs = constants(form, "down", *sizes)
    down[(programs,)](h, ids_TK, weights_TK, where_E, out, num_warps=warps, launch_pdl=True, **same)
    return out
