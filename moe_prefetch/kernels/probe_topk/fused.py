"""`probe_topk` in one Triton launch.

A tap is a chain of latencies, not of bytes: the weights of its targets (0.8 MB each for 2048 -> 128 + 64 rows in bf16) are in shared memory
before the kernel waits for its predecessor in the stream (programmatic dependent launch), so what counts is the way from the tap to the
result. Two kinds of programs share a launch:

- *Producers* each multiply BT tokens with BN rows of the packed weight over CHUNK of the hidden size and store a partial sum.
- *Finishers* have BR tokens of one target: they find the RMS while the products are made, read the partial sums, and do the rest:
  activation, small product, top-k, probabilities.

Words carry their own arrival: scratch is EMPTY, a NaN that `_word` never stores, until it has been written, so each thread of a finisher
reads its own words until none is EMPTY and needs no fence, counter, barrier or second round trip. Every word is EMPTY again at the end, so
a captured graph can be replayed. Finishers come last in the grid: what they wait for has been scheduled before them.

The union over tokens is a sum of integers, -log2(1 - p) in units of 1/FAR, in one 64-bit atomic an expert with the number of programs
above it: whoever completes the number has the whole sum. Integers add in any order, so results repeat bit for bit.

The RMS factor is one number per token and the products are linear, so it is applied to the sums.
"""
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from ...types import PROB_ONE
from .op import CHUNK, COUNT_BIT, EMPTY_WORD, sizes

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
EMPTY = tl.constexpr(EMPTY_WORD)
# of a 64-bit word: the number of programs, and the sum below it
COUNT, ONE_TILE, BELOW = tl.constexpr(COUNT_BIT), tl.constexpr(1 << COUNT_BIT), tl.constexpr((1 << COUNT_BIT) - 1)
# -log2(1 - p): no farther than MOST, whose p is one; the integer that stands for 1
MOST, FAR = tl.constexpr(30.0), tl.constexpr(16777216.0)
LOG2E = tl.constexpr(1.4426950408889634)
BT, WARPS = 16, 4


def shape_for(tokens: int, exact: bool) -> tuple[int, int, int]:
    """(BN, KW, BR). 16-bit weights: 64 rows are one tensor instruction of a warp group. FP32: each warp has its own piece of CHUNK."""
    return (16, WARPS, 8) if exact else (64, 1, 4 if tokens <= 64 else 8)


def spin(arrays: int, elements: int, second: int = 0) -> tuple[str, str, int, tuple[tl.dtype, ...]]:
    """Inline PTX for `_arrived`: its text, constraints, elements a call (a thread has at least `elements`) and results.

    Read `pack` words in each of `arrays` arrays, `step` bytes apart, until none is EMPTY; with `second` also those so many bytes further
    on. Operands: words out, addresses in the first array, steps, words as they were read before.
    """
    each = 2 if second else 1
    pack = max([p for p in (1, 2, 4) if p <= elements and p * arrays * each <= 64], default=1)
    words = arrays * pack * each
    out, was = [f"${i}" for i in range(words)], [f"${words + 2 * pack + i}" for i in range(words)]
    # the largest unsigned number of all is EMPTY
    most = f"mov.b32 m, {out[0]};\n" + "".join(f"max.u32 m, m, {o};\n" for o in out[1:])
    again = ""
    for i in range(pack):
        again += f"mov.b64 a, ${words + i};\n"
        for k in range(arrays):
            for c in range(each):
                o = out[(c * arrays + k) * pack + i]
                again += f"setp.eq.s32 q, {o}, {EMPTY_WORD};\n@q ld.volatile.global.b32 {o}, [a+{c * second}];\n"
            again += f"add.s64 a, a, ${words + pack + i};\n"
    text = "{.reg .pred p, q;\n.reg .b32 m;\n.reg .b64 a;\n" + "".join(f"mov.b32 {o}, {w};\n" for o, w in zip(out, was)) + most
    text += f"setp.ne.s32 p, m, {EMPTY_WORD};\n@p bra DONE;\nAGAIN:\n" + again + most
    text += f"setp.eq.s32 p, m, {EMPTY_WORD};\n@p bra AGAIN;\nDONE:}}"
    return text, ",".join(["=&r"] * words + ["l"] * 2 * pack + ["r"] * words), pack, (tl.int32, ) * (arrays * each)


@triton.jit
def _word(v):
    """The bits of a float, never EMPTY: every NaN becomes one and the same."""
    return tl.where(v == v, v.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def _ordered(bits):
    """The bits of a float as an integer of the same order; its own inverse."""
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


@triton.jit
def _ask(at, step, mask, SPLITS: tl.constexpr):
    """The words of all partial sums, in flight together; some may be EMPTY."""
    words = ()
    for s in tl.static_range(SPLITS):
        words = words + (tl.load(at + s * step, mask=mask, other=0, volatile=True), )
    return words


@triton.jit
def _arrived(at, step, words, SPIN: tl.constexpr, GPU: tl.constexpr):
    """`words` when none of them is EMPTY any more."""
    if GPU:
        args = (at, tl.zeros_like(words[0]) + step * 4) + words
        words = tl.inline_asm_elementwise(SPIN[0], SPIN[1], args, dtype=SPIN[3], is_pure=False, pack=SPIN[2])
    return words


@triton.jit
def _sum(words, FIRST: tl.constexpr, SPLITS: tl.constexpr):
    total = words[FIRST].to(tl.float32, bitcast=True)
    for s in tl.static_range(1, SPLITS):
        total += words[FIRST + s].to(tl.float32, bitcast=True)
    return total


@triton.jit
def _empty(at, step, mask, SPLITS: tl.constexpr):
    for s in tl.static_range(SPLITS):
        tl.store(at + s * step, tl.full(mask.shape, EMPTY, tl.int32), mask=mask)


@triton.jit
def _produce(at, x_ptr, past_ptr, w_ptr, past_w_ptr, part_ptr, T, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, PAST: tl.constexpr,
             EXACT: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, KW: tl.constexpr,
             GPU: tl.constexpr):
    N: tl.constexpr = E + R
    NT: tl.constexpr = (N + BN - 1) // BN
    NALL: tl.constexpr = N + R if PAST else N
    ROWS: tl.constexpr = NT + (R + BN - 1) // BN if PAST else NT
    tiles = tl.cdiv(T, BT)
    tile, split, n_tile, h = at % tiles, at // tiles % SPLITS, at // tiles // SPLITS % ROWS, at // tiles // SPLITS // ROWS
    j = tl.arange(0, BT)
    on, n = tile * BT + j < T, n_tile * BN + tl.arange(0, BN)
    # rows of `part`, of the weight, and the input they are multiplied with
    x_base, w_base, column, rows = x_ptr, w_ptr + h.to(tl.int64) * N * D, n, N
    if PAST:
        if n_tile >= NT:
            n = n - NT * BN
            x_base, w_base, column, rows = past_ptr, past_w_ptr + h.to(tl.int64) * R * D, N + n, R
    x_base += (tile * BT).to(tl.int64) * D
    CK: tl.constexpr = CHUNK // KW
    # One load for all of it: a loop would wait for each part before it asks for the next.
    if KW > 1:
        d = split * CHUNK + tl.arange(0, KW)[:, None] * CK + tl.arange(0, CK)[None, :]
        w_mask = (n < rows)[None, :, None] & (d < D)[:, None, :]
        w = tl.load(w_base + (n[None, :, None] * D + d[:, None, :]), mask=w_mask, other=0.0)
        x_at, x_mask = x_base + (j[None, None, :] * D + d[:, :, None]), on[None, None, :] & (d < D)[:, :, None]
    else:
        d = split * CHUNK + tl.arange(0, CHUNK)
        w = tl.load(w_base + (n[:, None] * D + d[None, :]), mask=(n < rows)[:, None] & (d < D)[None, :], other=0.0)
        x_at, x_mask = x_base + (j[None, :] * D + d[:, None]), on[None, :] & (d < D)[:, None]
    if GPU:
        tl.extra.cuda.gdc_wait()
        # Not before: the programs of launches to come would crowd those of this one into few multiprocessors.
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_at, mask=x_mask, other=0.0)
    if EXACT or not GPU:
        acc = tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="tf32x3" if GPU else "ieee")
    else:
        acc = tl.dot(w, x)
    if KW > 1:
        # The pieces of a sum in one warp: a reduction over warps has all lanes of a warp in one bank.
        flat = tl.reshape(tl.permute(acc, (1, 2, 0)), (BN * BT, KW))
        flat = tl.gather(flat, tl.broadcast_to(tl.arange(0, KW)[None, :], (BN * BT, KW)), 1)
        acc = tl.reshape(tl.sum(flat, 1), (BN, BT))
    part_ptr += ((h * SPLITS + split).to(tl.int64) * T + tile * BT) * NALL
    tl.store(part_ptr + (j[None, :] * NALL + column[:, None]), _word(acc), mask=on[None, :] & (n < rows)[:, None])


@triton.jit
def _finish(at, x_ptr, shift_ptr, up_ptr, out_ptr, bias_ptr, sharp_ptr, part_ptr, far_ptr, ids_ptr, prob_ptr, T, D: tl.constexpr, eps,
            E: tl.constexpr, R: tl.constexpr, K: tl.constexpr, LINEAR: tl.constexpr, SIGMOID: tl.constexpr, PAST: tl.constexpr,
            EXACT: tl.constexpr, EP: tl.constexpr, RP: tl.constexpr, KP: tl.constexpr, BR: tl.constexpr, SPLITS: tl.constexpr,
            CHUNK: tl.constexpr, SPIN_E: tl.constexpr, SPIN_R: tl.constexpr, GPU: tl.constexpr, ONE: tl.constexpr):
    N: tl.constexpr = E + R
    NALL: tl.constexpr = N + R if PAST else N
    tiles = tl.cdiv(T, BR)
    h, tile, j = at // tiles, at % tiles, tl.arange(0, BR)
    t, e, r = tile * BR + j, tl.arange(0, EP), tl.arange(0, RP)
    on, is_e, is_r = t < T, e < E, r < R
    up = tl.load(up_ptr + (h * E + e)[:, None] * R + r[None, :], mask=is_e[:, None] & is_r[None, :], other=0.0)
    shift = tl.load(shift_ptr + h * R + r, mask=is_r, other=0.0)
    out = tl.load(out_ptr + h * E + e, mask=is_e, other=0.0)
    bias = tl.load(bias_ptr + h * E + e, mask=is_e, other=0.0)
    sharp = tl.load(sharp_ptr + h)
    if GPU:
        tl.extra.cuda.gdc_wait()
    x_ptr += (tile * BR).to(tl.int64) * D
    square = tl.zeros((BR, CHUNK), tl.float32)
    for s in tl.static_range(SPLITS):
        d = s * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + (j[:, None] * D + d[None, :]), mask=on[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        square += x * x
    scale = (1.0 / tl.sqrt(tl.sum(square, 1) / D + eps))[None, :]
    step = T.to(tl.int64) * NALL
    part_ptr += (h.to(tl.int64) * SPLITS * T + tile * BR) * NALL
    z_at, z_mask = part_ptr + (j[None, :] * NALL + e[:, None]), is_e[:, None] & on[None, :]
    a_at, a_mask = part_ptr + (j[None, :] * NALL + E + r[:, None]), is_r[:, None] & on[None, :]
    words = _ask(a_at, step, a_mask, SPLITS)
    if PAST:
        words = words + _ask(a_at + R, step, a_mask, SPLITS)
    words = _arrived(a_at, step, words, SPIN_R, GPU)
    a = _sum(words, 0, SPLITS) * scale + shift[:, None]
    if PAST:
        a += _sum(words, SPLITS, SPLITS)
    # Asked for when they are likely there, and under way during what needs only the units.
    words = _ask(z_at, step, z_mask, SPLITS)
    if GPU:
        # Not before: weights of the next launch on their way into a multiprocessor delay words that its finishers wait for.
        tl.extra.cuda.gdc_launch_dependents()
    a = tl.where((r < LINEAR)[:, None], a, a / (1.0 + tl.exp(-a)))
    a = tl.where(is_r[:, None], a, 0.0)
    z = tl.dot(up, a, input_precision=("tf32x3" if EXACT else "tf32") if GPU else "ieee") + out[:, None]
    z += _sum(_arrived(z_at, step, words, SPIN_E, GPU), 0, SPLITS) * scale
    # All warps have read: what one of them puts back another would wait for.
    tl.debug_barrier()
    _empty(z_at, step, z_mask, SPLITS)
    _empty(a_at, step, a_mask, SPLITS)
    if PAST:
        _empty(a_at + R, step, a_mask, SPLITS)
    if SIGMOID:
        # z - z keeps what is not finite as NaN.
        z = 1.0 / (1.0 + tl.exp(-z)) + bias[:, None] + (z - z)
    # The same numbers, each token's in one warp: the maxima below then need no barriers.
    y = tl.gather(tl.trans(z), tl.broadcast_to(e[None, :], (BR, EP)), 1)
    bad = tl.max(tl.where(is_e[None, :] & ((y - y) != 0.0), 1, 0), 1) > 0
    # A row that says nothing ranks its experts by number.
    y = tl.where(bad[:, None], -1.0 * e[None, :], y)
    left = _ordered(tl.where(is_e[None, :], y, float("-inf")).to(tl.int32, bitcast=True))
    LOW: tl.constexpr = EP - 1
    if not EXACT:
        # The expert in the lowest bits, the least number first: what is lost is far below a 16-bit number's rounding.
        left = left & ~LOW | LOW - e[None, :]
    k = tl.arange(0, KP)
    ids = tl.zeros((BR, KP), tl.int32)
    kth, after = tl.zeros((BR,), tl.int32), tl.zeros((BR,), tl.int32)
    for i in tl.static_range(K + 1):
        if i < E:
            best = tl.max(left, 1)
            if EXACT:
                where = tl.min(tl.where(left == best[:, None], e[None, :], EP), 1)
                left = tl.where(e[None, :] == where[:, None], -2147483648, left)
            else:
                where = LOW - (best & LOW)
                left = tl.where(left == best[:, None], -2147483648, left)
                best = best & ~LOW
            ids = tl.where(k[None, :] == i, where[:, None], ids)
            if i < K:
                kth = best
            after = best
    tl.store(ids_ptr + (h * T + t).to(tl.int64)[:, None] * K + k[None, :], ids, mask=on[:, None] & (k < K)[None, :])
    if K < E:
        edge = 0.5 * (_ordered(kth).to(tl.float32, bitcast=True) + _ordered(after).to(tl.float32, bitcast=True))
    else:
        edge = tl.full((BR,), float("-inf"), tl.float32)
    # In the product's own layout, where all tokens of an expert lie in one warp.
    edge = tl.where(bad | (t >= T), float("inf"), edge)[None, :]
    far = tl.where(edge == float("inf"), 0.0, tl.log2(1.0 + tl.exp2((z - edge) * (sharp * LOG2E))))
    far = tl.minimum(tl.sum(far, 1), MOST)
    if tiles > 1:
        mine = (far * FAR + 0.5).to(tl.int64) + ONE_TILE
        # EMPTY is -1.
        total = tl.atomic_add(far_ptr + h * E + e, mine, mask=is_e, sem="relaxed") + mine + 1
        is_e &= total >> COUNT == tiles
        far = (total & BELOW).to(tl.float32) / FAR
        tl.store(far_ptr + h * E + e, tl.full((EP,), EMPTY, tl.int64), mask=is_e)
    tl.store(prob_ptr + h * E + e, ((1.0 - tl.exp2(-far)) * ONE + 0.5).to(tl.int32), mask=is_e)


@triton.jit(do_not_specialize=["T", "producers"], do_not_specialize_on_alignment=["far_ptr"])
def probe_tap(x_ptr, past_ptr, w_ptr, past_w_ptr, shift_ptr, up_ptr, out_ptr, bias_ptr, sharp_ptr, part_ptr, far_ptr, ids_ptr, prob_ptr,
              T, eps, producers, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, K: tl.constexpr, LINEAR: tl.constexpr,
              SIGMOID: tl.constexpr, PAST: tl.constexpr, EXACT: tl.constexpr, EP: tl.constexpr, RP: tl.constexpr, KP: tl.constexpr,
              BT: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, KW: tl.constexpr,
              SPIN_E: tl.constexpr, SPIN_R: tl.constexpr, GPU: tl.constexpr, ONE: tl.constexpr):
    at = tl.program_id(0)
    if at < producers:
        _produce(at, x_ptr, past_ptr, w_ptr, past_w_ptr, part_ptr, T, D, E, R, PAST, EXACT, BT, BN, SPLITS, CHUNK, KW, GPU)
    else:
        _finish(at - producers, x_ptr, shift_ptr, up_ptr, out_ptr, bias_ptr, sharp_ptr, part_ptr, far_ptr, ids_ptr, prob_ptr, T, D, eps,
                E, R, K, LINEAR, SIGMOID, PAST, EXACT, EP, RP, KP, BR, SPLITS, CHUNK, SPIN_E, SPIN_R, GPU, ONE)


def launch(hidden_TD: torch.Tensor, past_TD: torch.Tensor | None, weight_HND: torch.Tensor, past_HRD: torch.Tensor | None,
           shift_HR: torch.Tensor, up_HER: torch.Tensor, out_HE: torch.Tensor, bias_HE: torch.Tensor, sharp_H: torch.Tensor, top_k: int,
           linear: int, norm_eps: float, sigmoid: bool, scratch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `probe_topk_naive`; one to MOST_TOKENS tokens, no group limits. `scratch` from `op.scratch_for`."""
    (tokens, hidden), targets = hidden_TD.shape, weight_HND.shape[0]
    experts, rank, past = out_HE.shape[1], shift_HR.shape[1], past_TD is not None and past_HRD is not None
    exact = hidden_TD.dtype == torch.float32
    bn, kw, br = shape_for(tokens, exact)
    splits = -(-hidden // CHUNK)
    producers = targets * (-(-(experts + rank) // bn) + (-(-rank // bn) if past else 0)) * splits * -(-tokens // BT)
    parts, fars = sizes(tokens, hidden, targets, experts, rank, past)
    ids = torch.empty(targets, tokens, top_k, dtype=torch.int32, device=hidden_TD.device)
    prob = torch.empty(targets, experts, dtype=torch.int32, device=hidden_TD.device)
    lanes, ep, rp = 32 * WARPS, max(32, triton.next_power_of_2(experts)), max(16, triton.next_power_of_2(rank))
    probe_tap[(producers + targets * -(-tokens // br),)](
        hidden_TD, past_TD if past else hidden_TD, weight_HND, past_HRD if past else weight_HND, shift_HR, up_HER, out_HE, bias_HE, sharp_H,
        scratch, scratch[parts:parts + fars].view(torch.int64), ids, prob, tokens, norm_eps, producers, D=hidden, E=experts, R=rank,
        K=top_k, LINEAR=linear, SIGMOID=sigmoid, PAST=past, EXACT=exact, EP=ep, RP=rp, KP=triton.next_power_of_2(top_k), BT=BT, BN=bn,
        BR=br, SPLITS=splits, CHUNK=CHUNK, KW=kw, SPIN_E=spin(splits, ep * br // lanes),
        SPIN_R=spin(splits, rp * br // lanes, 4 * rank if past else 0), GPU=not INTERPRET, ONE=PROB_ONE, num_warps=WARPS,
        launch_pdl=not INTERPRET)
    return ids, prob
