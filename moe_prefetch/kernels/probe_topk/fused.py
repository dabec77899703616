"""`probe_topk` in one Triton launch.

A tap must read the weights of its targets (0.8 MB each for 2048 -> 128 + 64 rows in bf16) in a few microseconds, so the products are cut
three ways: tokens (16), rows of the packed weight (BN), and the hidden size (SPLITS). Each program adds up its piece and stores a
partial sum; the last one to finish for a (target, 16 tokens) adds the SPLITS partials in a fixed order, so results repeat bit for
bit, and does the rest: norm, activation, small product, top-k, probabilities. The last of those for a target multiplies the tiles'
(1 - p) in order and quantises. Counters return to zero, so a captured graph can be replayed.

The RMS factor is one number per token and the products are linear, so it is applied to the sums.
"""
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from ...types import PROB_ONE

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
BT, BK = 16, 128


@triton.jit
def probe_tap(x_ptr, w_ptr, shift_ptr, up_ptr, out_ptr, bias_ptr, sharp_ptr, part_ptr, square_ptr, miss_ptr, count_ptr, ids_ptr, prob_ptr,
              T, D, eps, E: tl.constexpr, R: tl.constexpr, K: tl.constexpr, LINEAR: tl.constexpr, SIGMOID: tl.constexpr, EP: tl.constexpr,
              RP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
              UPCAST: tl.constexpr, PRECISION: tl.constexpr, ONE: tl.constexpr):
    N: tl.constexpr = E + R
    NT: tl.constexpr = (N + BN - 1) // BN
    tile, piece, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles = tl.num_programs(0)
    n_tile, split = piece % NT, piece // NT
    t, n, k = tile * BT + tl.arange(0, BT), n_tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BT, BN), tl.float32)
    square = tl.zeros((BT,), tl.float32)
    for start in range(0, CHUNK, BK):
        d = split * CHUNK + start + k
        x = tl.load(x_ptr + t[:, None].to(tl.int64) * D + d[None, :], mask=(t < T)[:, None] & (d < D)[None, :], other=0.0)
        w = tl.load(w_ptr + (h * N + n)[:, None].to(tl.int64) * D + d[None, :], mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        square += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
    row = (h * SPLITS + split).to(tl.int64) * T + t
    tl.store(part_ptr + row[:, None] * N + n[None, :], acc, mask=(t < T)[:, None] & (n < N)[None, :])
    if n_tile == 0:
        tl.store(square_ptr + row, square, mask=t < T)
    tl.debug_barrier()
    arrived = tl.atomic_add(count_ptr + h * (tiles + 1) + tile, 1, sem="acq_rel")
    if arrived == NT * SPLITS - 1:
        tl.store(count_ptr + h * (tiles + 1) + tile, 0)
        e, r = tl.arange(0, EP), tl.arange(0, RP)
        z = tl.zeros((BT, EP), tl.float32)
        a = tl.zeros((BT, RP), tl.float32)
        total = tl.zeros((BT,), tl.float32)
        for s in range(SPLITS):
            row = (h * SPLITS + s).to(tl.int64) * T + t
            part = part_ptr + row[:, None] * N
            z += tl.load(part + e[None, :], mask=(t < T)[:, None] & (e < E)[None, :], other=0.0, cache_modifier=".cg")
            a += tl.load(part + E + r[None, :], mask=(t < T)[:, None] & (r < R)[None, :], other=0.0, cache_modifier=".cg")
            total += tl.load(square_ptr + row, mask=t < T, other=1.0, cache_modifier=".cg")
        scale = 1.0 / tl.sqrt(total / D + eps)
        a = a * scale[:, None] + tl.load(shift_ptr + h * R + r, mask=r < R, other=0.0)[None, :]
        a = tl.where(r[None, :] < LINEAR, a, a / (1.0 + tl.exp(-a)))
        a = tl.where(r[None, :] < R, a, 0.0)
        up = tl.load(up_ptr + (h * E + e)[None, :] * R + r[:, None], mask=(e < E)[None, :] & (r < R)[:, None], other=0.0)
        z = tl.dot(a, up, z * scale[:, None], input_precision=PRECISION)
        z += tl.load(out_ptr + h * E + e, mask=e < E, other=0.0)[None, :]
        # z - z is zero for finite numbers and NaN for the rest.
        bad = tl.sum(tl.where((e < E)[None, :] & ((z - z) != 0.0), 1, 0), 1) > 0
        if SIGMOID:
            z = 1.0 / (1.0 + tl.exp(-z)) + tl.load(bias_ptr + h * E + e, mask=e < E, other=0.0)[None, :]
        # A row that says nothing ranks its experts by number.
        z = tl.where(bad[:, None], -1.0 * e[None, :], z)
        z = tl.where((e < E)[None, :], z, float("-inf"))
        left, kth, after = z, tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32)
        for i in tl.static_range(K + 1):
            if i < E:
                best = tl.max(left, 1)
                where = tl.min(tl.where(left == best[:, None], e[None, :], EP), 1)
                if i < K:
                    tl.store(ids_ptr + (h * T + t).to(tl.int64) * K + i, where, mask=t < T)
                    kth = best
                after = best
                left = tl.where(e[None, :] == where[:, None], float("-inf"), left)
        sharp = tl.load(sharp_ptr + h)
        if K < E:
            miss = 1.0 / (1.0 + tl.exp((z - 0.5 * (kth + after)[:, None]) * sharp))
        else:
            miss = tl.zeros((BT, EP), tl.float32)
        miss = tl.where(bad[:, None] | (t >= T)[:, None], 1.0, miss)
        # The product over the tile; a zero becomes minus infinity and zero again.
        none = tl.exp2(tl.sum(tl.log2(miss), 0))
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


def launch(hidden_TD: torch.Tensor, weight_HND: torch.Tensor, shift_HR: torch.Tensor, up_HER: torch.Tensor, out_HE: torch.Tensor,
           bias_HE: torch.Tensor, sharp_H: torch.Tensor, top_k: int, linear: int, norm_eps: float, sigmoid: bool,
           counters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `probe_topk_naive`; at least one token, no group limits. `counters` from `op.counters_for`."""
    (tokens, hidden), (targets, rows, _) = hidden_TD.shape, weight_HND.shape
    experts, rank = out_HE.shape[1], shift_HR.shape[1]
    tiles = -(-tokens // BT)
    bn = 32
    splits = max(1, min(4, hidden // (2 * BK)))
    chunk = -(-hidden // (splits * BK)) * BK
    device = hidden_TD.device
    # Scratch: every element that is read has been written by this launch.
    part = torch.empty(targets, splits, tokens, rows, dtype=torch.float32, device=device)
    square = torch.empty(targets, splits, tokens, dtype=torch.float32, device=device)
    miss = torch.empty(targets, tiles, experts, dtype=torch.float32, device=device)
    ids = torch.empty(targets, tokens, top_k, dtype=torch.int32, device=device)
    prob = torch.empty(targets, experts, dtype=torch.int32, device=device)
    exact = hidden_TD.dtype == torch.float32
    probe_tap[(tiles, -(-rows // bn) * splits, targets)](
        hidden_TD, weight_HND, shift_HR, up_HER, out_HE, bias_HE, sharp_H, part, square, miss, counters, ids, prob,
        tokens, hidden, norm_eps, E=experts, R=rank, K=top_k, LINEAR=linear, SIGMOID=sigmoid, EP=max(16, triton.next_power_of_2(experts)),
        RP=max(16, triton.next_power_of_2(rank)), BT=BT, BN=bn, BK=BK, SPLITS=splits, CHUNK=chunk, UPCAST=INTERPRET or exact,
        PRECISION="ieee" if INTERPRET else "tf32x3", ONE=PROB_ONE, num_warps=4)
    return ids, prob
