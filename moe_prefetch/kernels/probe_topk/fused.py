"""`probe_topk` in one Triton launch.

A tap must read the weights of its targets (0.8 MB each for 2048 -> 128 + 64 rows in bf16) in a few microseconds, so the products are cut
three ways: tokens (16), rows of the packed weight (BN), and the hidden size (CHUNK). Each program adds up its piece and stores a
partial sum; the last one to finish for a (target, 16 tokens) adds the partials in a fixed order, so results repeat bit for
bit, and does the rest: norm, activation, small product, top-k, probabilities. The last of those for a target multiplies the tiles'
(1 - p) in order and quantises. Counters return to zero, so a captured graph can be replayed.

The RMS factor is one number per token and the products are linear, so it is applied to the sums. Weights are read before the kernel waits
for its predecessor in the stream (programmatic dependent launch): only the tap depends on it.
"""
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from ...types import PROB_ONE

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
BT, BN, CHUNK, WARPS = 16, 16, 512, 4


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _fetch(at, BYTES: tl.constexpr):
    """Ask for `BYTES` from `at` on to be in L2 soon."""
    for first in tl.static_range(0, BYTES, 32768):
        off = tl.minimum(first + tl.arange(0, 256) * 128, BYTES - 1)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at + off], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _ordered(z):
    """FP32 as int32 in the same order; its own inverse on the bits."""
    bits = z.to(tl.int32, bitcast=True)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


@triton.jit
def probe_tap(x_ptr, past_ptr, w_ptr, past_w_ptr, shift_ptr, up_ptr, out_ptr, bias_ptr, sharp_ptr, part_ptr, square_ptr, miss_ptr,
              count_ptr, ids_ptr, prob_ptr, T, D, eps, E: tl.constexpr, R: tl.constexpr, K: tl.constexpr, LINEAR: tl.constexpr,
              SIGMOID: tl.constexpr, PAST: tl.constexpr, EXACT: tl.constexpr, EP: tl.constexpr, RP: tl.constexpr, KP: tl.constexpr,
              BT: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, GPU: tl.constexpr,
              ONE: tl.constexpr):
    N: tl.constexpr = E + R
    NT: tl.constexpr = (N + BN - 1) // BN
    NALL: tl.constexpr = N + R if PAST else N
    PIECES: tl.constexpr = (NT + (R + BN - 1) // BN if PAST else NT) * SPLITS
    tile, piece, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles = tl.num_programs(0)
    n_tile, split = piece // SPLITS, piece % SPLITS
    t, n = tile * BT + tl.arange(0, BT), n_tile * BN + tl.arange(0, BN)
    # rows of `part`, of the weight, and the input they are multiplied with
    x_base, w_base, column, rows = x_ptr, w_ptr + h.to(tl.int64) * N * D, n, N
    if PAST:
        if n_tile >= NT:
            n = n - NT * BN
            x_base, w_base, column, rows = past_ptr, past_w_ptr + h.to(tl.int64) * R * D, N + n, R
    # One load for all of it: a loop would wait for each part before it asks for the next.
    d = split * CHUNK + tl.arange(0, CHUNK)
    w = tl.load(w_base + n[:, None].to(tl.int64) * D + d[None, :], mask=(n < rows)[:, None] & (d < D)[None, :], other=0.0)
    if GPU:
        if piece == 0:
            _fetch((up_ptr + h * E * R).to(tl.pointer_type(tl.uint8)), E * R * 4)
            _fetch((out_ptr + h * E).to(tl.pointer_type(tl.uint8)), E * 4)
            _fetch((shift_ptr + h * R).to(tl.pointer_type(tl.uint8)), R * 4)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_base + t[:, None].to(tl.int64) * D + d[None, :], mask=(t < T)[:, None] & (d < D)[None, :], other=0.0)
    if EXACT or not GPU:
        acc = tl.dot(x.to(tl.float32), tl.trans(w).to(tl.float32), input_precision="tf32x3" if GPU else "ieee")
    else:
        acc = tl.dot(x, tl.trans(w))
    row = (h * SPLITS + split).to(tl.int64) * T + t
    tl.store(part_ptr + row[:, None] * NALL + column[None, :], acc, mask=(t < T)[:, None] & (n < rows)[None, :])
    if n_tile == 0:
        tl.store(square_ptr + row, tl.sum(x.to(tl.float32) * x.to(tl.float32), 1), mask=t < T)
    tl.debug_barrier()
    arrived = tl.atomic_add(count_ptr + h * (tiles + 1) + tile, 1, sem="acq_rel")
    if arrived == PIECES - 1:
        tl.store(count_ptr + h * (tiles + 1) + tile, 0)
        e, r, on = tl.arange(0, EP), tl.arange(0, RP), t < T
        z = tl.zeros((BT, EP), tl.float32)
        a = tl.zeros((BT, RP), tl.float32)
        extra = tl.zeros((BT, RP), tl.float32)
        total = tl.zeros((BT,), tl.float32)
        for s in tl.static_range(SPLITS):
            row = (h * SPLITS + s).to(tl.int64) * T + t
            part = part_ptr + row[:, None] * NALL
            z += tl.load(part + e[None, :], mask=on[:, None] & (e < E)[None, :], other=0.0, cache_modifier=".cg")
            a += tl.load(part + E + r[None, :], mask=on[:, None] & (r < R)[None, :], other=0.0, cache_modifier=".cg")
            if PAST:
                extra += tl.load(part + N + r[None, :], mask=on[:, None] & (r < R)[None, :], other=0.0, cache_modifier=".cg")
            total += tl.load(square_ptr + row, mask=on, other=1.0, cache_modifier=".cg")
        up = tl.load(up_ptr + (h * E + e)[None, :] * R + r[:, None], mask=(e < E)[None, :] & (r < R)[:, None], other=0.0)
        shift = tl.load(shift_ptr + h * R + r, mask=r < R, other=0.0)
        out = tl.load(out_ptr + h * E + e, mask=e < E, other=0.0)
        scale = 1.0 / tl.sqrt(total / D + eps)
        a = a * scale[:, None] + shift[None, :]
        if PAST:
            a += extra
        a = tl.where((r < LINEAR)[None, :], a, a / (1.0 + tl.exp(-a)))
        a = tl.where((r < R)[None, :], a, 0.0)
        z = tl.dot(a, up, z * scale[:, None] + out[None, :], input_precision=("tf32x3" if EXACT else "tf32") if GPU else "ieee")
        # The same numbers, each token's in one warp: the maxima below then need no barriers.
        z = tl.gather(z, tl.broadcast_to(e[None, :], (BT, EP)), 1)
        # z - z is zero for finite numbers and NaN for the rest.
        bad = tl.max(tl.where((e < E)[None, :] & ((z - z) != 0.0), 1, 0), 1) > 0
        if SIGMOID:
            z = 1.0 / (1.0 + tl.exp(-z)) + tl.load(bias_ptr + h * E + e, mask=e < E, other=0.0)[None, :]
        # A row that says nothing ranks its experts by number.
        z = tl.where(bad[:, None], -1.0 * e[None, :], z)
        z = tl.where((e < E)[None, :], z, float("-inf"))
        left = _ordered(z)
        LOW: tl.constexpr = EP - 1
        if not EXACT:
            # The expert in the lowest bits, the least number first: what is lost is far below a 16-bit number's rounding.
            left = left & ~LOW | LOW - e[None, :]
        j = tl.arange(0, KP)
        ids = tl.zeros((BT, KP), tl.int32)
        kth, after = tl.zeros((BT,), tl.int32), tl.zeros((BT,), tl.int32)
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
        tl.store(ids_ptr + (h * T + t).to(tl.int64)[:, None] * K + j[None, :], ids, mask=on[:, None] & (j < K)[None, :])
        if K < E:
            kth = (kth ^ (kth >> 31 & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            after = (after ^ (after >> 31 & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            miss = 1.0 / (1.0 + tl.exp((z - 0.5 * (kth + after)[:, None]) * tl.load(sharp_ptr + h)))
        else:
            miss = tl.zeros((BT, EP), tl.float32)
        none = tl.reduce(tl.where(bad[:, None] | (t >= T)[:, None], 1.0, miss), 0, _times)
        if tiles == 1:
            tl.store(prob_ptr + h * E + e, ((1.0 - none) * ONE + 0.5).to(tl.int32), mask=e < E)
        else:
            tl.store(miss_ptr + (h * tiles + tile) * E + e, none, mask=e < E)
            tl.debug_barrier()
            finished = tl.atomic_add(count_ptr + h * (tiles + 1) + tiles, 1, sem="acq_rel")
            if finished == tiles - 1:
                tl.store(count_ptr + h * (tiles + 1) + tiles, 0)
                none = tl.full((EP,), 1.0, tl.float32)
                at = tile * 0
                while at < tiles:
                    none *= tl.load(miss_ptr + (h * tiles + at) * E + e, mask=e < E, other=1.0, cache_modifier=".cg")
                    at += 1
                tl.store(prob_ptr + h * E + e, ((1.0 - none) * ONE + 0.5).to(tl.int32), mask=e < E)


def launch(hidden_TD: torch.Tensor, past_TD: torch.Tensor | None, weight_HND: torch.Tensor, past_HRD: torch.Tensor | None,
           shift_HR: torch.Tensor, up_HER: torch.Tensor, out_HE: torch.Tensor, bias_HE: torch.Tensor, sharp_H: torch.Tensor, top_k: int,
           linear: int, norm_eps: float, sigmoid: bool, counters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `probe_topk_naive`; at least one token, no group limits. `counters` from `op.counters_for`."""
    (tokens, hidden), targets = hidden_TD.shape, weight_HND.shape[0]
    experts, rank, past = out_HE.shape[1], shift_HR.shape[1], past_TD is not None and past_HRD is not None
    tiles = -(-tokens // BT)
    splits = -(-hidden // CHUNK)
    pieces = (-(-(experts + rank) // BN) + (-(-rank // BN) if past else 0)) * splits
    device = hidden_TD.device
    # Scratch: every element that is read has been written by this launch.
    part = torch.empty(targets, splits, tokens, experts + rank * (1 + past), dtype=torch.float32, device=device)
    square = torch.empty(targets, splits, tokens, dtype=torch.float32, device=device)
    miss = torch.empty(targets, tiles, experts, dtype=torch.float32, device=device)
    ids = torch.empty(targets, tokens, top_k, dtype=torch.int32, device=device)
    prob = torch.empty(targets, experts, dtype=torch.int32, device=device)
    probe_tap[(tiles, pieces, targets)](
        hidden_TD, past_TD if past else hidden_TD, weight_HND, past_HRD if past else weight_HND, shift_HR, up_HER, out_HE, bias_HE, sharp_H,
        part, square, miss, counters, ids, prob, tokens, hidden, norm_eps, E=experts, R=rank, K=top_k, LINEAR=linear, SIGMOID=sigmoid,
        PAST=past, EXACT=hidden_TD.dtype == torch.float32, EP=max(32, triton.next_power_of_2(experts)),
        RP=max(16, triton.next_power_of_2(rank)), KP=triton.next_power_of_2(top_k), BT=BT, BN=BN, SPLITS=splits,
        CHUNK=CHUNK, GPU=not INTERPRET, ONE=PROB_ONE, num_warps=WARPS, launch_pdl=not INTERPRET)
    return ids, prob
