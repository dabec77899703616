"""One token and MXFP4 records, in Gluon: one launch with the bits of `fused.py`, on Hopper.

Programs of four warps, all there at once (a cooperative launch), go through two phases. In the first a warp has 8 rows of gate and 8 of up
of one expert, in the second half of the programs have 16 rows of down of all four experts, a warp an expert: M of its MMA. Between the
phases stands a counter, and h goes through global memory. The experts are added in ascending order in the same program, so there is no
`combine`.

Codes come by asynchronous copies into a ring of 24 tiles of 128 columns and 8 rows a warp, as deep as shared memory for three programs a
processor allows; it goes on to `down` while gate and up are multiplied, and memory works while programs wait for each other. Words and
vectors are in registers a tile before they are multiplied. Products are those of `fused.py` in the same order; columns have other places
within the 16 of an MMA, which changes no bit on an H200.
"""
from __future__ import annotations

from itertools import count
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .fused_elements import ASM, BF16, NONE, entry
from .fused_token_parts import (
    PLAIN,
    PLAIN2,
    PLAIN3,
    L,
    arrive,
    columns,
    copy,
    fetch,
    gated,
    go,
    halves,
    part,
    sixteen,
    total,
    until,
    wait,
)
from .record import Form

TOP_K = 4  # what has been timed; other numbers of experts go the general way
TOGETHER = 3  # programs that a processor has room for
AHEAD = 3  # groups of two tiles of gate and up on their way
PROCESSORS = 132  # so many programs are one on each
COUNTERS = 1 << 15  # launches that can be captured, and streams
# (Hidden, width, biases) whose bits have been compared with the other kernels' on a GPU: gpt-oss. None: all there is room for.
PROVEN: tuple[tuple[int, int, str], ...] | None = ((2880, 2880, "bfloat16"),)


@gluon.jit
def token(x_ptr, ids_ptr, weights_ptr, where_ptr, h_ptr, out_ptr, count_ptr, limit, alpha, E: gl.constexpr, K: gl.constexpr,
          D: gl.constexpr, F: gl.constexpr, BIAS: gl.constexpr, UP: gl.constexpr, DOWN: gl.constexpr, CLAMPED: gl.constexpr,
          N: gl.constexpr, P: gl.constexpr, SMS: gl.constexpr):
    """out [D], by way of h [K, F], which is in the order of `columns`. UP, DOWN: where codes, scales and biases are in a record."""
    BLOCKS: gl.constexpr = F // 32
    TILES: gl.constexpr = (D + 127) // 128
    GROUPS: gl.constexpr = (TILES + 1) // 2
    DOWN_TILES: gl.constexpr = (F + 127) // 128
    PIECES: gl.constexpr = (D // 2 + 511) // 512
    Q_L: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 8, 4], [1, 4, 1, 1], [3, 2, 1, 0])
    C_L: gl.constexpr = gl.SliceLayout(0, Q_L)
    U_L: gl.constexpr = gl.BlockedLayout([1, 1, 4], [2, 2, 8], [4, 1, 1], [2, 1, 0])
    S_L: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [1, 4, 1], [2, 1, 0])
    H_L: gl.constexpr = gl.BlockedLayout([1, 1, 4], [2, 1, 16], [1, 4, 1], [2, 1, 0])
    O_L: gl.constexpr = gl.BlockedLayout([1, 1, 2], [8, 4, 1], [4, 1, 1], [2, 1, 0])
    # Pieces of a row of codes are rotated from row to row, so that no two threads meet in a bank.
    tiles = gl.allocate_shared_memory(gl.int32, [24, 4, 8, 16], gl.SwizzledSharedLayout(4, 1, 4, [2, 1, 0]))
    ring = tiles._reinterpret(gl.int32, [6, 4, 4, 8, 16], gl.SwizzledSharedLayout(4, 1, 4, [3, 2, 1, 0]))
    xs = gl.allocate_shared_memory(gl.int32, [PIECES, 512], PLAIN)
    up_scales = gl.allocate_shared_memory(gl.int32, [4, 8, 2, 32], PLAIN3)
    scales = gl.allocate_shared_memory(gl.int32, [32, 4, 16], PLAIN3)
    program = gl.program_id(0)
    lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    if program < 4:
        entries = where_ptr.to(gl.int64, bitcast=True) + gl.minimum(program * 512 + lane * 128, E * 8 - 8)
        fetch(gl.where(lane < 16, entries, ids_ptr.to(gl.int64, bitcast=True)))
        fetch(x_ptr.to(gl.int64, bitcast=True) + gl.minimum(program * 32 + lane, (D * 2 - 1) // 128) * 128)
    wait()
    go()
    # gate_up
    pair = gl.minimum(program // BLOCKS, K - 1)
    block = program % BLOCKS
    own = gl.load(ids_ptr + pair, cache_modifier=".cg")
    old = gl.load(count_ptr, cache_modifier=".cg")
    real = (own >= 0) & (own < E) & (program < K * BLOCKS)
    word = gl.arange(0, 512, gl.BlockedLayout([4], [32], [4], [0]))
    x_words = ()
    for i in gl.static_range(PIECES):
        x_at = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + i * 512 + word
        x_words = x_words + (gl.load(x_at, mask=i * 512 + word < D // 2, other=0, cache_modifier=".cg"),)
    address = entry(where_ptr, gl.minimum(gl.maximum(own, 0), E - 1))
    w_C = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, C_L)))[:, None, None]
    r_C = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, C_L)))[None, :, None]
    i_C = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, C_L)))[None, None, :]
    e_Q = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, Q_L))))[:, None, None, None]
    up_at = gl.expand_dims(part(address, UP[0], gl.int32) + ((block * 32 + w_C * 8 + r_C) * 16 + i_C), 0) + e_Q * (F * 16)
    on_Q = real & (e_Q >= 0)
    t_U = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, U_L)))[:, None, None]
    half_U = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, U_L)))[None, :, None]
    r_U = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, U_L)))[None, None, :]
    u_at = part(address, UP[1], gl.int32) + (t_U * (2 * F) + half_U * F + block * 32 + r_U)
    # A place in the ring has gate and up of two tiles, or 16 rows of `down`.
    for p in gl.static_range(P):
        copy(ring.index(p), up_at + p * F * 64, on_Q)
        if p == 0:
            copy(up_scales.index(0), u_at, real & (t_U < TILES))
        async_copy.commit_group()
    for i in gl.static_range(PIECES):
        xs.index(i).store(gl.reshape(gl.permute(gl.reshape(x_words[i], [32, 2, 4, 2]), [0, 2, 1, 3]), [512]))
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    zero = gl.zeros([4, 8, 4], gl.float32, L)
    f = block * 32 + warp * 8 + g + q * 0
    gate_bias = zero
    up_bias = zero
    if BIAS != NONE:
        bias_at = part(address, UP[2], gl.bfloat16) + f
        gate_bias = gl.load(bias_at, mask=real & (f >= 0), other=0.0, cache_modifier=".cg").to(gl.float32)
        up_bias = gl.load(bias_at + F, mask=real & (f >= 0), other=0.0, cache_modifier=".cg").to(gl.float32)
    # What `down` needs before h
    k_K = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, C_L)))
    own_K = gl.load(ids_ptr + k_K, cache_modifier=".cg")
    # The second third of the programs comes last: a processor has a program of each.
    turn = gl.where(program < SMS, program, gl.where(program < 2 * SMS, program + SMS, program - SMS))
    has = turn < D // 16
    on_K = (own_K >= 0) & (own_K < E) & has
    address_K = entry(where_ptr, gl.minimum(gl.maximum(own_K, 0), E - 1))
    # What is said of pointers holds where they are made: not across a call.
    down_at = (address_K + DOWN[0])[:, None, None] + ((turn * 16 + r_C) * 64 + i_C * 4).to(gl.int64)
    down_at = gl.max_contiguous(gl.multiple_of(down_at.to(gl.pointer_type(gl.int32), bitcast=True), [1, 1, 16]), [1, 1, 4])
    down_at = gl.expand_dims(down_at, 0) + ((e_Q >> 1) * (D * 16) + (e_Q & 1) * 128)
    down_on = gl.expand_dims(on_K[:, None, None], 0)
    for i in gl.static_range(1, (TILES + 7) // 8):
        copy(up_scales.index(i), u_at + i * (16 * F), real & (t_U + 8 * i < TILES))
    t_S = gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, S_L)))[:, None, None]
    r_S = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, S_L)))[None, None, :]
    s_at = (gl.convert_layout(address_K, gl.SliceLayout(0, gl.SliceLayout(2, S_L))) + DOWN[1])[None, :, None]
    s_at = (s_at + ((t_S * D + turn * 16 + r_S) * 4).to(gl.int64)).to(gl.pointer_type(gl.int32), bitcast=True)
    s_at = gl.max_contiguous(gl.multiple_of(s_at, [1, 1, 16]), [1, 1, 4])
    on_S = gl.convert_layout(on_K.to(gl.int32), gl.SliceLayout(0, gl.SliceLayout(2, S_L)))[None, :, None] > 0
    copy(scales, s_at, on_S & (t_S < DOWN_TILES))
    # Places that gate and up leave free
    for n in gl.static_range(6 - GROUPS):
        copy(ring.index(GROUPS + n), down_at + n * (D * 32), down_on & (2 * n + (e_Q >> 1) < DOWN_TILES))
    bias = zero
    high_bias = zero
    if BIAS != NONE:
        K_L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
        on_L = gl.convert_layout(on_K.to(gl.int32), K_L)[:, None, None] > 0
        at = (gl.convert_layout(address_K, K_L) + DOWN[2])[:, None, None] + (turn * 32 + g * 2 + q * 0).to(gl.int64)
        at = at.to(gl.pointer_type(gl.bfloat16), bitcast=True)
        bias = gl.load(at, mask=on_L, other=0.0, cache_modifier=".cg").to(gl.float32)
        high_bias = gl.load(at + 8, mask=on_L, other=0.0, cache_modifier=".cg").to(gl.float32)
    x = xs._reinterpret(gl.int32, [PIECES * 8, 64], PLAIN)
    up_scale = up_scales._reinterpret(gl.int32, [64, 4, 8], PLAIN2)
    c = (zero, zero, zero, zero)
    async_copy.wait_group(P - 1)
    w = gated(tiles.index(0), tiles.index(1), up_scale.index(0), up_scale.index(1))
    v = columns(x.index(0), False)
    place = program * 0
    to = program * 0 + P
    for s in range(0, GROUPS - 1):
        w2 = gated(tiles.index(place * 4 + 2), tiles.index(place * 4 + 3), up_scale.index(4 * s + 2), up_scale.index(4 * s + 3))
        v2 = columns(x.index(2 * s + 1), False)
        if s + P < GROUPS:
            copy(ring.index(to), up_at + (s + P) * (F * 64), on_Q & (e_Q < 2 * (TILES - 2 * (s + P))))
        n = s + 6 - GROUPS
        if n >= 0:
            copy(ring.index(place), down_at + n * (D * 32), down_on & (2 * n + (e_Q >> 1) < DOWN_TILES))
        async_copy.commit_group()
        c = sixteen(c, w, v, False)
        async_copy.wait_group(P - 1)
        place = gl.where(place == 5, 0, place + 1)
        to = gl.where(to == 5, 0, to + 1)
        w = gated(tiles.index(place * 4), tiles.index(place * 4 + 1), up_scale.index(4 * s + 4), up_scale.index(4 * s + 5))
        v = columns(x.index(2 * s + 2), False)
        c = sixteen(c, w2, v2, False)
    if TILES % 2 == 0:
        w2 = gated(tiles.index(place * 4 + 2), tiles.index(place * 4 + 3), up_scale.index(2 * TILES - 2), up_scale.index(2 * TILES - 1))
    copy(ring.index(place), down_at + 5 * (D * 32), down_on & (10 + (e_Q >> 1) < DOWN_TILES))
    async_copy.commit_group()
    c = sixteen(c, w, v, False)
    if TILES % 2 == 0:
        c = sixteen(c, w2, columns(x.index(TILES - 1), False), False)
    gate = c[0] + gate_bias
    up = c[2] + up_bias
    if CLAMPED:
        # Comparisons that a NaN passes through.
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up)) + 1.0
        h = gate / (1.0 + gl.exp(-alpha * gate)) * up
    else:
        h = gate / (1.0 + gl.exp(-gate)) * up
    # Column 16 m + 4 q + low of 32 has place 8 q + 4 m + low.
    to_F = (f & ~31) + ((f >> 2) & 3) * 8 + ((f >> 4) & 1) * 4 + (f & 3)
    gl.store(h_ptr + (pair * F + to_F), h.to(gl.bfloat16), mask=real & (q == 0) & (warp + g >= 0))
    gl.thread_barrier()
    # All programs together add 2^31, which turns the highest bit and leaves the others as they were.
    arrive(count_ptr, gl.where(program == 0, 0x80000000 - (N - 1), 1).to(gl.int32))
    if has:
        # down
        ids = ()
        weights = ()
        for k in gl.static_range(K):
            ids = ids + (gl.load(ids_ptr + k, cache_modifier=".cg"),)
            weights = weights + (gl.load(weights_ptr + k, cache_modifier=".cg"),)
        scale = scales._reinterpret(gl.int32, [32, 4, 2, 8], PLAIN3)
        hidden = gl.allocate_shared_memory(gl.int32, [8, 4, 64], PLAIN3)
        h_tile = hidden._reinterpret(gl.int32, [8, 4, 64], PLAIN2)
        t_H = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, H_L)))[:, None, None]
        k_H = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, H_L)))[None, :, None]
        word_H = t_H * 64 + gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, H_L)))[None, None, :]
        h_at = h_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (k_H * (F // 2) + word_H)
        async_copy.wait_group(5)
        place = program * 0 + GROUPS % 6
        w = halves(tiles.index(place * 4), tiles.index(place * 4 + 1), scale.index(0))
        until(count_ptr, old)
        hs = ()
        for p in gl.static_range((DOWN_TILES + 7) // 8):
            hs = hs + (gl.load(h_at + p * 512, mask=word_H + k_H * 0 + p * 512 < F // 2, other=0, cache_modifier=".cg"),)
        c = (zero, zero, zero, zero)
        for p in gl.static_range((DOWN_TILES + 7) // 8):
            hidden.store(hs[p])
            hv = columns(h_tile.index(0), True)
            for s in range(4 * p, min(4 * p + 4, DOWN_TILES // 2)):
                w2 = halves(tiles.index(place * 4 + 2), tiles.index(place * 4 + 3), scale.index(2 * s + 1))
                hv2 = columns(h_tile.index(2 * s + 1 - 8 * p), True)
                copy(ring.index(place), down_at + (s + 6) * (D * 32), down_on & (2 * (s + 6) + (e_Q >> 1) < DOWN_TILES))
                async_copy.commit_group()
                c = sixteen(c, w, hv, True)
                async_copy.wait_group(5)
                place = gl.where(place == 5, 0, place + 1)
                w = halves(tiles.index(place * 4), tiles.index(place * 4 + 1), scale.index(2 * s + 2))
                hv = columns(h_tile.index((2 * s + 2) % 8), True)
                c = sixteen(c, w2, hv2, True)
            if (p + 1 == (DOWN_TILES + 7) // 8) & (DOWN_TILES % 2 == 1):
                c = sixteen(c, w, hv, True)
        sums = gl.allocate_shared_memory(gl.float32, [4, 8, 4, 2], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
        sums.store(gl.join(c[0] + bias, c[2] + high_bias))
        row_sums = sums._reinterpret(gl.float32, [4, 8, 4, 2], PLAIN3)
        g_O = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, O_L)))[:, None, None]
        q_O = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, O_L)))[None, :, None]
        i_O = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, O_L)))[None, None, :]
        out_at = out_ptr + (turn * 16 + g_O + q_O * 0 + i_O * 8)
        gl.store(out_at, total(row_sums, ids, weights, E, K, O_L).to(gl.bfloat16), mask=(q_O == 0) & (g_O + i_O >= 0))


# launch ---------------------------------------------------------------------------------------------------------------------
class Counters:
    """Words of a device in which programs of one launch count themselves: between launches zero but for the highest bit.

    Launches of one stream follow each other and share a word. A captured launch has a word to itself for good: what is replayed beside it
    is not known. They are made by a launch that is not captured; without one, and when COUNTERS are used up, there is none.
    """

    def __init__(self) -> None:
        self.words: dict[int, torch.Tensor] = {}
        self.of_stream: dict[tuple[int, int], int] = {}
        self.next = count()

    def take(self, device: torch.device) -> torch.Tensor | None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        captured = torch.cuda.is_current_stream_capturing()
        if index not in self.words:
            if captured:
                return None
            self.words[index] = torch.zeros(4 * COUNTERS, dtype=torch.int32, device=device)
            # Other streams must not find what was there before.
            torch.cuda.current_stream(device).synchronize()
        key = (index, torch.cuda.current_stream(device).cuda_stream)
        at = next(self.next) if captured else self.of_stream.get(key)
        if at is None:
            at = self.of_stream.setdefault(key, next(self.next))
        return self.words[index][4 * at :] if at < COUNTERS else None


COUNTED = Counters()


def serves(form: Form, dtype: torch.dtype, tokens: int, top_k: int, device: torch.device) -> bool:
    """Whether a token goes this way: on Hopper, MXFP4, biases in BF16 or none, PROVEN matrices of a size that the kernel has room for."""
    known = PROVEN is None or (form.hidden, form.width, form.bias) in PROVEN
    if not (known and ASM.value and tokens == 1 and top_k == TOP_K and form.weights == "mxfp4" and form.bias in ("", "bfloat16")
            and dtype == torch.bfloat16 and 640 < form.hidden <= 3072 and form.width <= 3072
            and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9):
        return False
    return programs(form) <= TOGETHER * torch.cuda.get_device_properties(device).multi_processor_count


def programs(form: Form) -> int:
    """As many as there are blocks of 32 rows of gate; those of `down`, of 16 rows, are among them in another order."""
    blocks, least = TOP_K * form.width // 32, form.hidden // 16
    return max(blocks, least if least <= PROCESSORS else least + PROCESSORS)


def constants(form: Form, experts: int, clamped: bool) -> dict[str, Any]:
    at = {p.name: p.offset for p in form.layout().parts}
    where = [(at[which], at[f"{which}_scale"], at.get(f"{which}_bias", 0)) for which in ("gate_up", "down")]
    return {"E": experts, "K": TOP_K, "D": form.hidden, "F": form.width, "BIAS": BF16.value if form.bias else NONE.value,
            "UP": where[0], "DOWN": where[1], "CLAMPED": clamped, "N": programs(form), "P": AHEAD, "SMS": PROCESSORS}


def launch(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, where_E: torch.Tensor, form: Form, limit: float,
           alpha: float) -> torch.Tensor | None:
    """`fused.launch` of what this `serves`; None when there is no counter."""
    counter = COUNTED.take(hidden_TD.device)
    if counter is None:
        return None
    h = torch.empty(TOP_K, form.width, dtype=hidden_TD.dtype, device=hidden_TD.device)
    out = torch.empty_like(hidden_TD)
    token[(programs(form),)](hidden_TD, ids_TK, weights_TK, where_E, h, out, counter, limit, alpha, num_warps=4, launch_pdl=True,
                             launch_cooperative_grid=True, **constants(form, len(where_E), limit != 0))
    return out
