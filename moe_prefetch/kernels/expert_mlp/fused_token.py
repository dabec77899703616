"""One token and MXFP4 records, in Gluon: two launches with the bits of `fused.py`, on Hopper.

Codes come by asynchronous copies into rings of pairs of tiles of 128 columns. M of a warp's MMA is 16 rows of weights, N the vectors of a
pair's eight blocks of 32 columns. Of the eight columns that a block's products give, each thread takes the one of its own block, times
the scale, into its own sum: so no code is multiplied with a scale, no product waits for another block's, and four sums a row are added at
the end, as in `fused_elements.multiply`.

`gate_up`  a warp has 8 rows of gate and 8 of up, a tile at a time.
`down`     a program has ROWS times 8 rows of all experts of the token, a warp an expert, two tiles at a time. Its ring is full before the
           wait for `gate_up`. The experts are added in ascending order in the same program, so there is no `combine`.

`gate_up` lets `down` begin when it has gone through GO pairs: sooner, copies of `down` would hold up those that it waits for; later, memory
would have nothing to do.
"""
from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .fused_elements import ASM, BF16, NONE, entry
from .fused_token_parts import (
    CODES3,
    CODES4,
    PLAIN2,
    PLAIN3,
    W_L,
    WIDE3,
    L,
    copy,
    fetch,
    gated,
    go,
    halves,
    own,
    part,
    quad,
    raised,
    row,
    total,
    vectors,
    wait,
    words,
)
from .record import Form

TOP_K = 4  # what has been timed; other numbers of experts go the general way
MOST = 1  # tokens: two take as long in `fused.py`, and from four on experts meet, which reads once
RING, GO, DOWN_RING = 3, 2, 5  # pairs of tiles
ROWS = 3
# (Hidden, width, biases) whose bits have been compared with the other kernels' on a GPU: gpt-oss. None: all there is room for.
PROVEN: tuple[tuple[int, int, str], ...] | None = ((2880, 2880, "bfloat16"),)


@gluon.jit
def gate_up(x_ptr, ids_ptr, where_ptr, h_ptr, limit, alpha, E: gl.constexpr, K: gl.constexpr, D: gl.constexpr, F: gl.constexpr,
            BIAS: gl.constexpr, AT: gl.constexpr, SCALE_AT: gl.constexpr, BIAS_AT: gl.constexpr, CLAMPED: gl.constexpr, RING: gl.constexpr,
            GO: gl.constexpr):
    """h [T K, pairs of tiles, 8, 4, 8] = act(gate x) up x times 2^64, in the order in which threads of `down` want it: block and tile,
    thread of four, column."""
    BLOCKS: gl.constexpr = F // 32
    TILES: gl.constexpr = (D + 127) // 128
    PAIRS: gl.constexpr = (TILES + 1) // 2
    PIECES: gl.constexpr = (PAIRS + 3) // 4
    C_L: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 8, 4], [1, 4, 1, 1], [3, 2, 1, 0])
    S_L: gl.constexpr = gl.BlockedLayout([1, 1, 4], [2, 2, 8], [4, 1, 1], [2, 1, 0])
    # of a pair: tile and half, warp, row, word
    ring = gl.allocate_shared_memory(gl.int32, [RING, 4, 4, 8, 16], CODES4)
    tiles = ring._reinterpret(gl.int32, [RING * 4, 4, 8, 16], CODES3)
    scale_ring = gl.allocate_shared_memory(gl.int32, [RING, 2, 2, 32], WIDE3)
    scales = scale_ring._reinterpret(gl.int32, [RING * 4, 4, 8], PLAIN2)
    xs = gl.allocate_shared_memory(gl.int32, [PIECES, 512], gl.SwizzledSharedLayout(4, 1, 1, [0]))
    x = xs._reinterpret(gl.int32, [PIECES * 4, 2, 4, 16], WIDE3)
    program = gl.program_id(0)
    lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    if program < 4:
        entries = where_ptr.to(gl.int64, bitcast=True) + gl.minimum(program * 512 + lane * 128, E * 8 - 8)
        fetch(gl.where(lane < 16, entries, ids_ptr.to(gl.int64, bitcast=True)))
        fetch(x_ptr.to(gl.int64, bitcast=True) + gl.minimum(program * 32 + lane, (D * 2 - 1) // 128) * 128)
    wait()
    if GO == 0:
        go()
    pair = program // BLOCKS
    block = program % BLOCKS
    expert = gl.load(ids_ptr + pair, cache_modifier=".cg")
    real = (expert >= 0) & (expert < E)
    word = gl.arange(0, 512, gl.BlockedLayout([4], [32], [4], [0]))
    x_at = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + pair // K * (D // 2) + word
    given = ()
    for i in gl.static_range(PIECES):
        given = given + (gl.load(x_at + i * 512, mask=word + i * 512 < D // 2, other=0, cache_modifier=".cg"),)
    address = entry(where_ptr, gl.minimum(gl.maximum(expert, 0), E - 1))
    e_C = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, C_L))))[:, None, None, None]
    w_C = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, C_L))))[None, :, None, None]
    r_C = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, C_L))))[None, None, :, None]
    i_C = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, C_L))))[None, None, None, :]
    codes_at = part(address, AT, gl.int32) + (e_C * (F * 16) + ((block * 32 + w_C * 8 + r_C) * 16 + i_C))
    t_S = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, S_L)))[:, None, None]
    half_S = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, S_L)))[None, :, None]
    r_S = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, S_L)))[None, None, :]
    scales_at = part(address, SCALE_AT, gl.int32) + (t_S * (2 * F) + half_S * F + block * 32 + r_S)
    for p in gl.static_range(RING):
        copy(ring.index(p), codes_at + p * (F * 64), real & (e_C < 2 * (TILES - 2 * p)))
        copy(scale_ring.index(p), scales_at + p * (F * 4), real & (t_S < TILES - 2 * p))
        async_copy.commit_group()
    for i in gl.static_range(PIECES):
        xs.index(i).store(raised(given[i]))
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    zero = gl.zeros([4, 8, 4], gl.float32, L)
    f = block * 32 + warp * 8 + g + q * 0
    gate_bias = zero
    up_bias = zero
    if BIAS != NONE:
        bias_at = part(address, BIAS_AT, gl.bfloat16) + f
        gate_bias = gl.load(bias_at, mask=real & (f >= 0), other=0.0, cache_modifier=".cg").to(gl.float32)
        up_bias = gl.load(bias_at + F, mask=real & (f >= 0), other=0.0, cache_modifier=".cg").to(gl.float32)
    acc = (zero, zero)
    place = program * 0
    for s in range(0, PAIRS):
        async_copy.wait_group(RING - 1)
        first = words(tiles.index(place * 4)), words(tiles.index(place * 4 + 1))
        second = words(tiles.index(place * 4 + 2)), words(tiles.index(place * 4 + 3))
        scale = row(scales.index(place * 4)), row(scales.index(place * 4 + 1))
        later = row(scales.index(place * 4 + 2)), row(scales.index(place * 4 + 3))
        v = vectors(x.index(s))
        gl.thread_barrier()
        if s + RING < PAIRS:
            copy(ring.index(place), codes_at + (s + RING) * (F * 64), real & (e_C < 2 * (TILES - 2 * (s + RING))))
            copy(scale_ring.index(place), scales_at + (s + RING) * (F * 4), real & (t_S < TILES - 2 * (s + RING)))
        async_copy.commit_group()
        if GO > 0:
            if s == GO:
                go()
        place = gl.where(place == RING - 1, 0, place + 1)
        acc = gated(acc, first[0], first[1], v, scale[0], scale[1], q, 0)
        acc = gated(acc, second[0], second[1], v, later[0], later[1], q, 1)
    gate = quad(acc[0]) + gate_bias
    up = quad(acc[1]) + up_bias
    if CLAMPED:
        # Comparisons that a NaN passes through.
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up)) + 1.0
        h = gate / (1.0 + gl.exp(-alpha * gate)) * up
    else:
        h = gate / (1.0 + gl.exp(-gate)) * up
    h = h * 18446744073709551616.0
    # Column 16 m + 4 q + low of 32 has place 8 q + 4 m + low.
    to = (f >> 8) * 256 + ((f >> 5) & 3) * 64 + ((f >> 7) & 1) * 32 + ((f >> 2) & 3) * 8 + ((f >> 4) & 1) * 4 + (f & 3)
    gl.store(h_ptr + (pair * ((F + 255) // 256 * 256) + to), h.to(gl.bfloat16), mask=real & (q == 0) & (warp + g >= 0))


@gluon.jit
def down(h_ptr, ids_ptr, weights_ptr, where_ptr, out_ptr, E: gl.constexpr, K: gl.constexpr, D: gl.constexpr, F: gl.constexpr,
         BIAS: gl.constexpr, AT: gl.constexpr, SCALE_AT: gl.constexpr, BIAS_AT: gl.constexpr, ROWS: gl.constexpr, RING: gl.constexpr):
    """out [T, D] = the sum over experts, ascending, of weight times (down h + bias)."""
    TILES: gl.constexpr = (F + 127) // 128
    PAIRS: gl.constexpr = (TILES + 1) // 2
    BLOCKS: gl.constexpr = D // (8 * ROWS)
    C_L: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 8, 4], [1, 4, 1, 1], [3, 2, 1, 0])
    S_L: gl.constexpr = gl.BlockedLayout([1, 1, 4], [4, 4, 2], [4, 1, 1], [2, 1, 0])
    O_L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    EIGHTS: gl.constexpr = 1 if ROWS == 1 else 2 if ROWS == 2 else 4
    # of a pair: tile and eight rows, expert, row, word
    ring = gl.allocate_shared_memory(gl.int32, [RING, 2 * EIGHTS, 4, 8, 16], CODES4)
    tiles = ring._reinterpret(gl.int32, [RING * 2 * EIGHTS, 4, 8, 16], CODES3)
    scale_ring = gl.allocate_shared_memory(gl.int32, [RING, 2 * EIGHTS, 4, 8], WIDE3)
    scales = scale_ring._reinterpret(gl.int32, [RING * 2 * EIGHTS, 4, 8], PLAIN2)
    hs = gl.allocate_shared_memory(gl.int32, [RING, 4, 8, 16], WIDE3)
    sums = gl.allocate_shared_memory(gl.float32, [ROWS, 4, 8, 4], PLAIN3)
    token = gl.program_id(0) // BLOCKS
    block = gl.program_id(0) % BLOCKS
    ids_ptr += token * K
    weights_ptr += token * K
    e_C = gl.arange(0, 2 * EIGHTS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, C_L))))[:, None, None, None]
    k_C = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, C_L))))
    r_C = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, C_L))))[None, None, :, None]
    i_C = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, C_L))))[None, None, None, :]
    own_K = gl.load(ids_ptr + k_C, cache_modifier=".cg")
    on_K = (own_K >= 0) & (own_K < E)
    on_C = on_K[None, :, None, None] & (e_C % EIGHTS < ROWS)
    address_K = entry(where_ptr, gl.minimum(gl.maximum(own_K, 0), E - 1))
    # What is said of pointers holds where they are made: not across a call.
    at = e_C // EIGHTS * (D * 64) + ((block * ROWS + e_C % EIGHTS) * 8 + r_C) * 64 + i_C * 4
    at = ((address_K + AT)[None, :, None, None] + at.to(gl.int64)).to(gl.pointer_type(gl.int32), bitcast=True)
    codes_at = gl.max_contiguous(gl.multiple_of(at, [1, 1, 1, 16]), [1, 1, 1, 4])
    e_S = gl.arange(0, 2 * EIGHTS, gl.SliceLayout(1, gl.SliceLayout(2, S_L)))[:, None, None]
    r_S = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, S_L)))[None, None, :]
    on_S = gl.convert_layout(on_K.to(gl.int32), gl.SliceLayout(0, gl.SliceLayout(2, S_L)))[None, :, None] > 0
    on_S = on_S & (e_S % EIGHTS < ROWS)
    address_S = gl.convert_layout(address_K, gl.SliceLayout(0, gl.SliceLayout(2, S_L)))
    at = e_S // EIGHTS * (D * 4) + ((block * ROWS + e_S % EIGHTS) * 8 + r_S) * 4
    at = ((address_S + SCALE_AT)[None, :, None] + at.to(gl.int64)).to(gl.pointer_type(gl.int32), bitcast=True)
    scales_at = gl.max_contiguous(gl.multiple_of(at, [1, 1, 16]), [1, 1, 4])
    for p in range(0, RING):
        copy(ring.index(p), codes_at + p * (D * 32), on_C & (e_C < EIGHTS * (TILES - 2 * p)))
        copy(scale_ring.index(p), scales_at + p * (D * 2), on_S & (e_S < EIGHTS * (TILES - 2 * p)))
        async_copy.commit_group()
    ids = ()
    weights = ()
    for k in gl.static_range(K):
        ids = ids + (gl.load(ids_ptr + k, cache_modifier=".cg"),)
        weights = weights + (gl.load(weights_ptr + k, cache_modifier=".cg"),)
    r_O = gl.arange(0, 8, gl.SliceLayout(1, O_L))[:, None]
    q_O = gl.arange(0, 4, gl.SliceLayout(0, O_L))[None, :]
    d_O = block * (8 * ROWS) + r_O + q_O * 0
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    biases = ()
    if BIAS != NONE:
        K_L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
        on_L = gl.convert_layout(on_K.to(gl.int32), K_L)[:, None, None] > 0
        at = (gl.convert_layout(address_K, K_L) + BIAS_AT)[:, None, None] + (block * (16 * ROWS) + g * 2 + q * 0).to(gl.int64)
        bias_at = at.to(gl.pointer_type(gl.bfloat16), bitcast=True)
        for i in gl.static_range(ROWS):
            biases = biases + (gl.load(bias_at + 8 * i, mask=on_L & (g + q >= 0), other=0.0, cache_modifier=".cg").to(gl.float32),)
    wait()
    k_H = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, W_L)))[:, None, None]
    g_H = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, W_L)))[None, :, None]
    i_H = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, W_L)))[None, None, :]
    column = gl.max_contiguous(gl.multiple_of((g_H & 1) * 64 + (g_H >> 1) * 16 + i_H + k_H * 0, [1, 1, 4]), [1, 1, 4])
    word = gl.max_contiguous(gl.multiple_of((token * K + k_H) * ((F + 255) // 256 * 128) + g_H * 16 + i_H, [1, 1, 4]), [1, 1, 4])
    h_at = h_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + word
    for p in range(0, RING):
        copy(hs.index(p), h_at + p * 128, column + p * 128 < F // 2)
    async_copy.commit_group()
    async_copy.wait_group(0)
    acc = (gl.zeros([4, 8, 4], gl.float32, L),) * ROWS
    place = block * 0
    for p in range(0, PAIRS):
        async_copy.wait_group(RING - 1)
        v = own(hs.index(place))
        found = ()
        for i in gl.static_range(ROWS):
            found = found + (words(tiles.index(place * 2 * EIGHTS + i)) + words(tiles.index((place * 2 + 1) * EIGHTS + i))
                             + (row(scales.index(place * 2 * EIGHTS + i)), row(scales.index((place * 2 + 1) * EIGHTS + i))),)
        gl.thread_barrier()
        if p + RING < PAIRS:
            copy(ring.index(place), codes_at + (p + RING) * (D * 32), on_C & (e_C < EIGHTS * (TILES - 2 * (p + RING))))
            copy(scale_ring.index(place), scales_at + (p + RING) * (D * 2), on_S & (e_S < EIGHTS * (TILES - 2 * (p + RING))))
            copy(hs.index(place), h_at + (p + RING) * 128, column + (p + RING) * 128 < F // 2)
        async_copy.commit_group()
        place = gl.where(place == RING - 1, 0, place + 1)
        new = ()
        for i in gl.static_range(ROWS):
            new = new + (halves(acc[i], found[i], v, q),)
        acc = new
    for i in gl.static_range(ROWS):
        y = quad(acc[i])
        if BIAS != NONE:
            y = y + biases[i]
        sums.index(i).store(y)
    row_sums = sums._reinterpret(gl.float32, [ROWS * 4, 8, 4], PLAIN2)
    for i in gl.static_range(ROWS):
        out = total(row_sums, 4 * i, ids, weights, E, K, O_L)
        gl.store(out_ptr + (token * D + d_O + 8 * i), out.to(gl.bfloat16), mask=(q_O == 0) & (r_O >= 0))


# launch ---------------------------------------------------------------------------------------------------------------------
def serves(form: Form, dtype: torch.dtype, tokens: int, top_k: int, device: torch.device) -> bool:
    """Whether tokens go this way: on Hopper, MXFP4, biases in BF16 or none, PROVEN matrices of a size that the kernels have room for."""
    known = PROVEN is None or (form.hidden, form.width, form.bias) in PROVEN
    return (known and ASM.value and tokens <= MOST and top_k == TOP_K and form.weights == "mxfp4" and form.bias in ("", "bfloat16")
            and dtype == torch.bfloat16 and form.hidden % (8 * ROWS) == 0 and form.hidden <= 8192
            and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9)


def constants(form: Form, which: str, experts: int, tokens: int, clamped: bool) -> tuple[dict[str, Any], int, int]:
    """Of `gate_up` or `down`: (constants, warps, programs)."""
    at = {p.name: p.offset for p in form.layout().parts}
    both = {"E": experts, "K": TOP_K, "D": form.hidden, "F": form.width, "BIAS": BF16.value if form.bias else NONE.value, "AT": at[which],
            "SCALE_AT": at[f"{which}_scale"], "BIAS_AT": at.get(f"{which}_bias", 0)}
    if which == "gate_up":
        return {**both, "CLAMPED": clamped, "RING": RING, "GO": GO}, 4, tokens * TOP_K * (form.width // 32)
    return {**both, "ROWS": ROWS, "RING": DOWN_RING}, 4, tokens * (form.hidden // (8 * ROWS))


def launch(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, where_E: torch.Tensor, form: Form, limit: float,
           alpha: float) -> torch.Tensor:
    """`fused.launch` of what this `serves`."""
    h = torch.empty(ids_TK.numel(), -(-form.width // 256) * 256, dtype=hidden_TD.dtype, device=hidden_TD.device)
    out, sizes = torch.empty_like(hidden_TD), (len(where_E), len(hidden_TD), limit != 0)
    same, warps, programs = constants(form, "gate_up", *sizes)
    gate_up[(programs,)](hidden_TD, ids_TK, where_E, h, limit, alpha, num_warps=warps, launch_pdl=True, **same)
    same, warps, programs = constants(form, "down", *sizes)
    down[(programs,)](h, ids_TK, weights_TK, where_E, out, num_warps=warps, launch_pdl=True, **same)
    return out
