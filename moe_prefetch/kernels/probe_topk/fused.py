"""`probe_topk` in one Triton launch.

A tap is a chain of latencies, not of bytes: the weights of its targets (0.8 MB each for 2048 -> 128 + 64 rows in bf16) are read before the
kernel waits for its predecessor in the stream (programmatic dependent launch), so what counts is the way from the tap to the result.
Two kinds of programs share a launch:

- *Producers* each multiply BT tokens with BN rows of the packed weight over CHUNK of the hidden size and store a partial sum.
- *Finishers* have BR tokens of one target: they find the RMS while the products are made, read the partial sums, and do the rest:
  activation, small product, top-k, probabilities. The last of a target's multiplies all (1 - p) and quantises.

Words carry their own arrival: scratch is EMPTY, a NaN that `_word` never stores, until it has been written, so a finisher reads until no
word is EMPTY and needs no fence, counter or second round trip. It puts EMPTY back, so a captured graph can be replayed. Sums are
taken in a fixed order: results repeat bit for bit. Finishers come last in the grid: what they wait for has been scheduled before them.

The RMS factor is one number per token and the products are linear, so it is applied to the sums.
"""
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from ...types import PROB_ONE
from .op import CHUNK, EMPTY_WORD, FEWEST

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
EMPTY = tl.constexpr(EMPTY_WORD)
BT, WARPS = 16, 4


def shape_for(tokens: int, exact: bool) -> tuple[int, int, int]:
    """(BN, KW, BR). 16-bit weights: 64 rows are one tensor instruction of a warp group. FP32: each warp has its own piece of CHUNK."""
    return (16, WARPS, 8) if exact else (64, 1, FEWEST if 8 < tokens <= 64 else 8)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _word(v):
    """The bits of a float, never EMPTY: every NaN becomes one and the same."""
    return tl.where(v == v, v.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def _ordered(bits):
    """The bits of a float as an integer of the same order; its own inverse."""
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


@triton.jit
def _any(a, b, A: tl.constexpr, B: tl.constexpr):
    """Whether any element of the two is set, in one reduction."""
    a, b = tl.reshape(a, (A,), can_reorder=True), tl.reshape(b, (B,), can_reorder=True)
    if A < B:
        a, b = b, a
    if A != B:
        M: tl.constexpr = A if A > B else B
        for _i in tl.static_range(12):
            if b.shape[0] < M:
                b = tl.cat(b, b, can_reorder=True)
    return tl.max(tl.cat(a, b, can_reorder=True), 0)


@triton.jit
def _produce(at, tiles, x_ptr, past_ptr, w_ptr, past_w_ptr, part_ptr, T, D, E: tl.constexpr, R: tl.constexpr, PAST: tl.constexpr,
             EXACT: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, KW: tl.constexpr,
             GPU: tl.constexpr):
    N: tl.constexpr = E + R
    NT: tl.constexpr = (N + BN - 1) // BN
    NALL: tl.constexpr = N + R if PAST else N
    ROWS: tl.constexpr = NT + (R + BN - 1) // BN if PAST else NT
    tile, split, n_tile, h = at % tiles, at // tiles % SPLITS, at // tiles // SPLITS % ROWS, at // tiles // SPLITS // ROWS
    t, n = tile * BT + tl.arange(0, BT), n_tile * BN + tl.arange(0, BN)
    # rows of `part`, of the weight, and the input they are multiplied with
    x_base, w_base, column, rows = x_ptr, w_ptr + h.to(tl.int64) * N * D, n, N
    if PAST:
        if n_tile >= NT:
            n = n - NT * BN
            x_base, w_base, column, rows = past_ptr, past_w_ptr + h.to(tl.int64) * R * D, N + n, R
    CK: tl.constexpr = CHUNK // KW
    # One load for all of it: a loop would wait for each part before it asks for the next.
    if KW > 1:
        d = split * CHUNK + tl.arange(0, KW)[:, None] * CK + tl.arange(0, CK)[None, :]
        w_mask = (n < rows)[None, :, None] & (d < D)[:, None, :]
        w = tl.load(w_base + n[None, :, None].to(tl.int64) * D + d[:, None, :], mask=w_mask, other=0.0)
    else:
        d = split * CHUNK + tl.arange(0, CHUNK)
        w = tl.load(w_base + n[:, None].to(tl.int64) * D + d[None, :], mask=(n < rows)[:, None] & (d < D)[None, :], other=0.0)
    if GPU:
        tl.extra.cuda.gdc_wait()
        # Not before: the programs of launches to come would crowd those of this one into few multiprocessors.
        tl.extra.cuda.gdc_launch_dependents()
    if KW > 1:
        x_mask = (t < T)[None, None, :] & (d < D)[:, :, None]
        x = tl.load(x_base + t[None, None, :].to(tl.int64) * D + d[:, :, None], mask=x_mask, other=0.0)
    else:
        x = tl.load(x_base + t[None, :].to(tl.int64) * D + d[:, None], mask=(t < T)[None, :] & (d < D)[:, None], other=0.0)
    if EXACT or not GPU:
        acc = tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="tf32x3" if GPU else "ieee")
    else:
        acc = tl.dot(w, x)
    if KW > 1:
        # The pieces of a sum in one warp: a reduction over warps has all lanes of a warp in one bank.
        flat = tl.reshape(tl.permute(acc, (1, 2, 0)), (BN * BT, KW))
        flat = tl.gather(flat, tl.broadcast_to(tl.arange(0, KW)[None, :], (BN * BT, KW)), 1)
        acc = tl.reshape(tl.sum(flat, 1), (BN, BT))
    row = (h * SPLITS + split).to(tl.int64) * T + t
    mask = (t < T)[None, :] & (n < rows)[:, None]
    tl.store(part_ptr + row[None, :] * NALL + column[:, None], _word(acc), mask=mask)



@triton.jit
def _finish(at, tiles, x_ptr, shift_ptr, up_ptr, out_ptr, bias_ptr, sharp_ptr, part_ptr, miss_ptr, ids_ptr, prob_ptr, T, D, eps,
            E: tl.constexpr, R: tl.constexpr, K: tl.constexpr, LINEAR: tl.constexpr, SIGMOID: tl.constexpr, PAST: tl.constexpr,
            EXACT: tl.constexpr, EP: tl.constexpr, RP: tl.constexpr, KP: tl.constexpr, BR: tl.constexpr, SPLITS: tl.constexpr,
            CHUNK: tl.constexpr, GPU: tl.constexpr, ONE: tl.constexpr):
    N: tl.constexpr = E + R
    NALL: tl.constexpr = N + R if PAST else N
    h, tile = at // tiles, at % tiles
    t, e, r = tile * BR + tl.arange(0, BR), tl.arange(0, EP), tl.arange(0, RP)
    on, is_e, is_r = t < T, e < E, r < R
    up = tl.load(up_ptr + (h * E + e)[:, None] * R + r[None, :], mask=is_e[:, None] & is_r[None, :], other=0.0)
    shift = tl.load(shift_ptr + h * R + r, mask=is_r, other=0.0)
    out = tl.load(out_ptr + h * E + e, mask=is_e, other=0.0)
    bias = tl.load(bias_ptr + h * E + e, mask=is_e, other=0.0)
    sharp = tl.load(sharp_ptr + h)
    if GPU:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    square = tl.zeros((BR, CHUNK), tl.float32)
    for s in tl.static_range(SPLITS):
        d = s * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + t[:, None].to(tl.int64) * D + d[None, :], mask=on[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        square += x * x
    scale = (1.0 / tl.sqrt(tl.sum(square, 1) / D + eps))[None, :]
    first_z = tl.zeros((EP, BR), tl.float32) + out[:, None]
    first_a = tl.zeros((RP, BR), tl.float32) + shift[:, None]
    z, a, waiting = first_z, first_a, 1
    part = part_ptr + (h.to(tl.int64) * SPLITS * T + t)[None, :] * NALL
    z_mask, a_mask = is_e[:, None] & on[None, :], is_r[:, None] & on[None, :]
    while waiting > 0:
        z, a = first_z, first_a
        late_z, late_a = tl.zeros((EP, BR), tl.int32), tl.zeros((RP, BR), tl.int32)
        for s in tl.static_range(SPLITS):
            here = part + s * T * NALL
            word = tl.load(here + e[:, None], mask=z_mask, other=0, volatile=True)
            z += word.to(tl.float32, bitcast=True) * scale
            late_z |= (word == EMPTY).to(tl.int32)
            word = tl.load(here + E + r[:, None], mask=a_mask, other=0, volatile=True)
            a += word.to(tl.float32, bitcast=True) * scale
            late_a |= (word == EMPTY).to(tl.int32)
            if PAST:
                word = tl.load(here + N + r[:, None], mask=a_mask, other=0, volatile=True)
                a += word.to(tl.float32, bitcast=True)
                late_a |= (word == EMPTY).to(tl.int32)
        waiting = _any(late_z, late_a, EP * BR, RP * BR)
    a = tl.where((r < LINEAR)[:, None], a, a / (1.0 + tl.exp(-a)))
    a = tl.where(is_r[:, None], a, 0.0)
    z = tl.dot(up, a, z, input_precision=("tf32x3" if EXACT else "tf32") if GPU else "ieee")
    # All warps have read: what one of them puts back another would wait for.
    tl.debug_barrier()
    for s in tl.static_range(SPLITS):
        here = part + s * T * NALL
        tl.store(here + e[:, None], tl.full((EP, BR), EMPTY, tl.int32), mask=z_mask)
        tl.store(here + E + r[:, None], tl.full((RP, BR), EMPTY, tl.int32), mask=a_mask)
        if PAST:
            tl.store(here + N + r[:, None], tl.full((RP, BR), EMPTY, tl.int32), mask=a_mask)
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
    j = tl.arange(0, KP)
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
            ids = tl.where(j[None, :] == i, where[:, None], ids)
            if i < K:
                kth = best
            after = best
    if K < E:
        edge = 0.5 * (_ordered(kth).to(tl.float32, bitcast=True) + _ordered(after).to(tl.float32, bitcast=True))
    else:
        edge = tl.full((BR,), float("-inf"), tl.float32)
    edge = tl.where(bad | (t >= T), float("inf"), edge)
    # In the product's own layout, where all tokens of an expert lie in one warp.
    miss = tl.where(edge[None, :] == float("inf"), 1.0, 1.0 / (1.0 + tl.exp((z - edge[None, :]) * sharp)))
    none = tl.reduce(miss, 1, _times)
    if tiles > 1:
        tl.store(miss_ptr + (h * tiles + tile) * E + e, _word(none), mask=is_e)
    tl.store(ids_ptr + (h * T + t).to(tl.int64)[:, None] * K + j[None, :], ids, mask=on[:, None] & (j < K)[None, :])
    if tile == tiles - 1:
        if tiles > 1:
            none = tl.full((EP,), 1.0, tl.float32)
            first = tile * 0
            while first < tiles:
                eight, missing = none, 1
                while missing > 0:
                    eight, late = none, tl.zeros((EP,), tl.int32)
                    for i in tl.static_range(8):
                        one = miss_ptr + (h * tiles + first + i) * E + e
                        word = tl.load(one, mask=is_e & (first + i < tiles), other=0x3F800000, volatile=True)
                        eight *= word.to(tl.float32, bitcast=True)
                        late |= (word == EMPTY).to(tl.int32)
                    missing = tl.max(late, 0)
                tl.debug_barrier()
                for i in tl.static_range(8):
                    tl.store(miss_ptr + (h * tiles + first + i) * E + e, tl.full((EP,), EMPTY, tl.int32), mask=is_e & (first + i < tiles))
                none = eight
                first += 8
        tl.store(prob_ptr + h * E + e, ((1.0 - none) * ONE + 0.5).to(tl.int32), mask=is_e)


@triton.jit(do_not_specialize=["T", "producers"])
def probe_tap(x_ptr, past_ptr, w_ptr, past_w_ptr, shift_ptr, up_ptr, out_ptr, bias_ptr, sharp_ptr, part_ptr, miss_ptr, ids_ptr, prob_ptr,
              T, D, eps, producers, E: tl.constexpr, R: tl.constexpr, K: tl.constexpr, LINEAR: tl.constexpr, SIGMOID: tl.constexpr,
              PAST: tl.constexpr, EXACT: tl.constexpr, EP: tl.constexpr, RP: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
              BN: tl.constexpr, BR: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, KW: tl.constexpr, GPU: tl.constexpr,
              ONE: tl.constexpr):
    at = tl.program_id(0)
    if at < producers:
        _produce(at, tl.cdiv(T, BT), x_ptr, past_ptr, w_ptr, past_w_ptr, part_ptr, T, D, E, R, PAST, EXACT, BT, BN, SPLITS, CHUNK, KW, GPU)
    else:
        _finish(at - producers, tl.cdiv(T, BR), x_ptr, shift_ptr, up_ptr, out_ptr, bias_ptr, sharp_ptr, part_ptr, miss_ptr, ids_ptr,
                prob_ptr, T, D, eps, E, R, K, LINEAR, SIGMOID, PAST, EXACT, EP, RP, KP, BR, SPLITS, CHUNK, GPU, ONE)


def launch(hidden_TD: torch.Tensor, past_TD: torch.Tensor | None, weight_HND: torch.Tensor, past_HRD: torch.Tensor | None,
           shift_HR: torch.Tensor, up_HER: torch.Tensor, out_HE: torch.Tensor, bias_HE: torch.Tensor, sharp_H: torch.Tensor, top_k: int,
           linear: int, norm_eps: float, sigmoid: bool, scratch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `probe_topk_naive`; at least one token, no group limits. `scratch` from `op.scratch_for`."""
    (tokens, hidden), targets = hidden_TD.shape, weight_HND.shape[0]
    experts, rank, past = out_HE.shape[1], shift_HR.shape[1], past_TD is not None and past_HRD is not None
    exact = hidden_TD.dtype == torch.float32
    bn, kw, br = shape_for(tokens, exact)
    splits = -(-hidden // CHUNK)
    producers = targets * (-(-(experts + rank) // bn) + (-(-rank // bn) if past else 0)) * splits * -(-tokens // BT)
    parts = targets * splits * tokens * (experts + rank * (1 + past))
    ids = torch.empty(targets, tokens, top_k, dtype=torch.int32, device=hidden_TD.device)
    prob = torch.empty(targets, experts, dtype=torch.int32, device=hidden_TD.device)
    probe_tap[(producers + targets * -(-tokens // br),)](
        hidden_TD, past_TD if past else hidden_TD, weight_HND, past_HRD if past else weight_HND, shift_HR, up_HER, out_HE, bias_HE, sharp_H,
        scratch, scratch[parts:], ids, prob, tokens, hidden, norm_eps, producers, E=experts, R=rank, K=top_k, LINEAR=linear,
        SIGMOID=sigmoid, PAST=past, EXACT=exact, EP=max(32, triton.next_power_of_2(experts)), RP=max(16, triton.next_power_of_2(rank)),
        KP=triton.next_power_of_2(top_k), BT=BT, BN=bn, BR=br, SPLITS=splits, CHUNK=CHUNK, KW=kw, GPU=not INTERPRET, ONE=PROB_ONE,
        num_warps=WARPS, launch_pdl=not INTERPRET)
    return ids, prob
