"""A MoE layer from records through a table of addresses, in four Triton launches: plan, gate_up, down, combine.

`plan`     one program an expert: which (token, k) pairs are its own, in token order; a token that names it twice appears once. Left out for
           few tokens: then programs find their own.
`gate_up`  one program an item (an expert and up to BT of its pairs) and block of BF rows: its gate and up rows are one tile of the MMA, the
           activation follows in registers, h goes to [T K, F].
`down`     the same for the rows of the second matrix; y goes to [T K, D] in FP32.
`combine`  one program a token and block of channels: its experts' y in ascending order, times their weights.
`lift`     before `gate_up`, for MXFP4 in items of more than RAISE pairs: hidden states times 2^64, see `fused_elements.raised`.

A program loads its table entry once, with acquire order, and its weights past L1 (`.cg`): another kernel may have published either.
M of the MMA is weight rows, N is tokens, so few tokens waste little and weights come from registers where they are decoded (fp8, mxfp4).
Both kinds of MMA, of a warp (8 tokens) and of four (16 and more), add alike: seen on an H200, in every case bit for bit.
Sums run along the contiguous axis in one order whatever T is, so a token's result does not depend on its neighbours. Nothing depends on the
host: ids, weights and addresses may change between replays of a captured graph.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .fused_elements import ASM, BF16, E8M0, FP8, FP16, FP32, MX, NONE, PLAIN, entry, lift, multiply, narrow, numbers, wide
from .record import Form

# Gluon is experimental: another version's may differ
GLUON = triton.__version__.startswith("3.6.")
if GLUON:
    from . import fused_prefill, fused_token

PREFILL = TOKEN = ASM.value and GLUON

CODES = {"": NONE.value, "float32": FP32.value, "bfloat16": BF16.value, "float16": FP16.value, "float8_e8m0fnu": E8M0.value}
PDL = True
PROCESSORS = 132  # of a large chip
CHUNK = 256  # tokens that `plan` looks at together
RAISE = tl.constexpr(8)  # up to how many pairs an item has whose hidden states are raised in registers
SMALL = 8  # up to how many tokens programs find their pairs in the ids, and `plan` does not run

@triton.jit(do_not_specialize=["T"])
def plan(ids_ptr, pair_ptr, count_ptr, T, K: tl.constexpr, KP: tl.constexpr, CT: tl.constexpr, PDL: tl.constexpr):
    """pair [E, T] int32: the pairs t K + k of expert `program_id`, ascending; count [E] int32: how many."""
    e = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    k_K = tl.arange(0, KP)
    count = e * 0
    first = e * 0
    while first < T:
        t_T = first + tl.arange(0, CT)
        ids_TK = tl.load(ids_ptr + t_T.to(tl.int64)[:, None] * K + k_K[None, :], mask=(t_T < T)[:, None] & (k_K < K)[None, :], other=-1)
        k_T = tl.min(tl.where(ids_TK == e, k_K[None, :], KP), axis=1)
        mine_T = (k_T < KP).to(tl.int32)
        at_T = count + tl.cumsum(mine_T, 0) - mine_T
        tl.store(pair_ptr + e.to(tl.int64) * T + at_T, t_T * K + k_T, mask=mine_T > 0)
        count += tl.sum(mine_T, 0)
        first += CT
    tl.store(count_ptr + e, count)


@triton.jit
def place(BLOCKS, TOGETHER: tl.constexpr):
    """(item, block of rows) of a program: TOGETHER items, mostly of one expert, go through the blocks of rows side by side, so that its
    weights come from memory once."""
    p = tl.program_id(0)
    return p // (BLOCKS * TOGETHER) * TOGETHER + p % TOGETHER, p // TOGETHER % BLOCKS


@triton.jit
def pairs_of(ids_ptr, where_ptr, item, T, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr):
    """(expert, address of its record, which of BT columns count, pair of each column) of an item of at most BT tokens, a column each;
    expert E or more where an item is none: item i is the expert of pair i, if no pair before names it. Columns that do not count repeat a
    pair that does."""
    j_T = tl.arange(0, BT)
    # The first load that the table entry, and so every weight, waits for.
    own = tl.load(ids_ptr + item, cache_modifier=".cg")
    address = entry(where_ptr, tl.maximum(tl.minimum(own, E - 1), 0))
    k_K = tl.arange(0, KP)
    ids_TK = tl.load(ids_ptr + j_T[:, None] * K + k_K[None, :], mask=(j_T < T)[:, None] & (k_K < K)[None, :], other=-1,
                     cache_modifier=".cg")
    k_T = tl.min(tl.where(ids_TK == own, k_K[None, :], KP), axis=1)
    on_T = k_T < KP
    pair_T = j_T * K + k_T
    first = tl.min(tl.where(on_T, pair_T, T * K), axis=0)
    e = tl.where((own >= 0) & (own < E) & (first == item), own, E).to(tl.int32)
    return e, address, on_T, tl.where(on_T, pair_T, item).to(tl.int64)


@triton.jit
def item_of(where_ptr, count_ptr, item, E: tl.constexpr, EP: tl.constexpr, BT: tl.constexpr):
    """(expert, address of its record, which of its pairs is the item's first, how many it has from there on) from what `plan` wrote."""
    i_E = tl.arange(0, EP)
    count_E = tl.load(count_ptr + i_E, mask=i_E < E, other=0, cache_modifier=".cg")
    tiles_E = (count_E + BT - 1) // BT
    e = tl.sum((tl.cumsum(tiles_E, 0) <= item).to(tl.int32), 0)
    address = entry(where_ptr, tl.minimum(e, E - 1))
    first = (item - tl.sum(tl.where(i_E < e, tiles_E, 0), 0)) * BT
    return e, address, first, tl.sum(tl.where(i_E == e, count_E, 0), 0) - first


@triton.jit
def columns_of(pair_ptr, e, first, left, T, BT: tl.constexpr):
    """(which of BT columns count, pair of each) of an item; the rest repeat the last."""
    j_T = tl.arange(0, BT)
    pair_T = tl.load(pair_ptr + e.to(tl.int64) * T + first + tl.minimum(j_T, left - 1), mask=j_T >= 0, other=0, cache_modifier=".cg")
    return j_T < left, pair_T.to(tl.int64)


@triton.jit
def gate_up_tile(address, x_ptr, columns, h_ptr, block, limit, alpha, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
                 W: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, AT: tl.constexpr, SCALE_AT: tl.constexpr,
                 BIAS_AT: tl.constexpr, CLAMPED: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    BF: tl.constexpr = BR // 2
    on_T, pair_T = columns
    r_R = tl.arange(0, BR)
    f_R = tl.minimum(block * BF + r_R % BF, F - 1)
    row_R = tl.where(r_R < BF, f_R, F + f_R)
    scale_row_R = row_R
    if W == FP8:
        scale_row_R = f_R // BLOCK + tl.where(r_R < BF, 0, (F + BLOCK - 1) // BLOCK)
    acc_RT = multiply(address, row_R, scale_row_R, x_ptr, pair_T // K * D, 2 * F, D, AT, SCALE_AT, W, TYPE, SCALE, BLOCK, BR, BT, BK,
                      STAGES, BT > RAISE)
    if BIAS != NONE:
        acc_RT += numbers(address, BIAS_AT, row_R, row_R >= 0, BIAS)[:, None]
    gate_FT, up_FT = tl.split(tl.permute(tl.reshape(acc_RT, (2, BF, BT)), (1, 2, 0)))
    if CLAMPED:
        # Comparisons that a NaN passes through.
        gate_FT = tl.where(gate_FT > limit, limit, gate_FT)
        up_FT = tl.where(up_FT > limit, limit, tl.where(up_FT < -limit, -limit, up_FT)) + 1.0
        h_FT = gate_FT / (1.0 + tl.exp(-alpha * gate_FT)) * up_FT
    else:
        h_FT = gate_FT / (1.0 + tl.exp(-gate_FT)) * up_FT
    if W == MX:
        h_FT *= 18446744073709551616.0  # as `raised`
    f_F = block * BF + tl.arange(0, BF)
    tl.store(h_ptr + pair_T[None, :] * F + f_F[:, None], narrow(h_FT, TYPE), mask=on_T[None, :] & (f_F < F)[:, None])


@triton.jit(do_not_specialize=["T"])
def gate_up(x_ptr, ids_ptr, where_ptr, pair_ptr, count_ptr, h_ptr, T, limit, alpha, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr,
            KP: tl.constexpr, D: tl.constexpr, F: tl.constexpr, W: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
            BIAS: tl.constexpr, AT: tl.constexpr, SCALE_AT: tl.constexpr, BIAS_AT: tl.constexpr, CLAMPED: tl.constexpr, BT: tl.constexpr,
            DIRECT: tl.constexpr, HALVES: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, TOGETHER: tl.constexpr,
            PDL: tl.constexpr):
    """h [T K, F] = act(gate x) up x, of the pairs that count. BR rows: BR / 2 of gate, then as many of up."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    item, block = place(tl.cdiv(F, BR // 2), TOGETHER)
    if DIRECT:
        e, address, on_T, pair_T = pairs_of(ids_ptr, where_ptr, item, T, E, K, KP, BT)
        if e < E:
            gate_up_tile(address, x_ptr, (on_T, pair_T), h_ptr, block, limit, alpha, K, D, F, W, SCALE, BLOCK, BIAS, AT, SCALE_AT, BIAS_AT,
                         CLAMPED, BT, BR, BK, STAGES)
    else:
        e, address, first, left = item_of(where_ptr, count_ptr, item, E, EP, BT)
        if e < E:
            # The code of two branches is slower than that of one: they are there where many items are half empty.
            if HALVES:
                if left <= BT // 2:
                    gate_up_tile(address, x_ptr, columns_of(pair_ptr, e, first, left, T, BT // 2), h_ptr, block, limit, alpha, K, D, F, W,
                                 SCALE, BLOCK, BIAS, AT, SCALE_AT, BIAS_AT, CLAMPED, BT // 2, BR, BK, STAGES)
                else:
                    gate_up_tile(address, x_ptr, columns_of(pair_ptr, e, first, left, T, BT), h_ptr, block, limit, alpha, K, D, F, W, SCALE,
                                 BLOCK, BIAS, AT, SCALE_AT, BIAS_AT, CLAMPED, BT, BR, BK, STAGES)
            else:
                gate_up_tile(address, x_ptr, columns_of(pair_ptr, e, first, left, T, BT), h_ptr, block, limit, alpha, K, D, F, W, SCALE,
                             BLOCK, BIAS, AT, SCALE_AT, BIAS_AT, CLAMPED, BT, BR, BK, STAGES)


@triton.jit
def down_tile(address, h_ptr, columns, y_ptr, block, D: tl.constexpr, F: tl.constexpr, W: tl.constexpr, SCALE: tl.constexpr,
              BLOCK: tl.constexpr, BIAS: tl.constexpr, AT: tl.constexpr, SCALE_AT: tl.constexpr, BIAS_AT: tl.constexpr, BT: tl.constexpr,
              BR: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):
    TYPE: tl.constexpr = h_ptr.dtype.element_ty
    on_T, pair_T = columns
    d_R = block * BR + tl.arange(0, BR)
    row_R = tl.minimum(d_R, D - 1)
    scale_row_R = row_R
    if W == FP8:
        scale_row_R = row_R // BLOCK
    acc_RT = multiply(address, row_R, scale_row_R, h_ptr, pair_T * F, D, F, AT, SCALE_AT, W, TYPE, SCALE, BLOCK, BR, BT, BK, STAGES, True)
    if BIAS != NONE:
        acc_RT += numbers(address, BIAS_AT, row_R, row_R >= 0, BIAS)[:, None]
    tl.store(y_ptr + pair_T[None, :] * D + d_R[:, None], acc_RT, mask=on_T[None, :] & (d_R < D)[:, None])


@triton.jit(do_not_specialize=["T"])
def down(h_ptr, ids_ptr, where_ptr, pair_ptr, count_ptr, y_ptr, T, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr,
         KP: tl.constexpr, D: tl.constexpr, F: tl.constexpr, W: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
         AT: tl.constexpr, SCALE_AT: tl.constexpr, BIAS_AT: tl.constexpr, BT: tl.constexpr, DIRECT: tl.constexpr, HALVES: tl.constexpr,
         BR: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr):
    """y [T K, D] FP32 = down h + bias, of the pairs that count."""
    # All but h was there before gate_up began, which waited for it: so what can be done is done while gate_up ends.
    item, block = place(tl.cdiv(D, BR), TOGETHER)
    if DIRECT:
        e, address, on_T, pair_T = pairs_of(ids_ptr, where_ptr, item, T, E, K, KP, BT)
    else:
        e, address, first, left = item_of(where_ptr, count_ptr, item, E, EP, BT)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if e < E:
        if DIRECT:
            down_tile(address, h_ptr, (on_T, pair_T), y_ptr, block, D, F, W, SCALE, BLOCK, BIAS, AT, SCALE_AT, BIAS_AT, BT, BR, BK, STAGES)
        elif HALVES:
            if left <= BT // 2:
                down_tile(address, h_ptr, columns_of(pair_ptr, e, first, left, T, BT // 2), y_ptr, block, D, F, W, SCALE, BLOCK, BIAS, AT,
                          SCALE_AT, BIAS_AT, BT // 2, BR, BK, STAGES)
            else:
                down_tile(address, h_ptr, columns_of(pair_ptr, e, first, left, T, BT), y_ptr, block, D, F, W, SCALE, BLOCK, BIAS, AT,
                          SCALE_AT, BIAS_AT, BT, BR, BK, STAGES)
        else:
            down_tile(address, h_ptr, columns_of(pair_ptr, e, first, left, T, BT), y_ptr, block, D, F, W, SCALE, BLOCK, BIAS, AT, SCALE_AT,
                      BIAS_AT, BT, BR, BK, STAGES)


@triton.jit
def combine(y_ptr, place_ptr, ids_ptr, weights_ptr, out_ptr, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr,
            BD: tl.constexpr, PDL: tl.constexpr):
    """out [T, D] = the sum over a token's experts, ascending, of weight times y; y [T K, D] in any type, a pair's row where `place` says,
    if there is one."""
    t = tl.program_id(0).to(tl.int64)
    # Ids and weights were there before gate_up began.
    k_K = tl.arange(0, KP)
    on_K = k_K < K
    id_K = tl.load(ids_ptr + t * K + k_K, mask=on_K, other=-1, cache_modifier=".cg")
    weight_K = tl.load(weights_ptr + t * K + k_K, mask=on_K, other=0.0, cache_modifier=".cg")
    on_K = (id_K >= 0) & (id_K < E)
    id_K = tl.where(on_K, id_K, -1).to(tl.int32)
    # Of equal ids the first counts, with all their weights. [i, j]: j against i.
    same = (id_K[:, None] == id_K[None, :]) & on_K[:, None]
    weight_K = tl.sum(tl.where(same, weight_K[None, :], 0.0), 1)
    counts_K = on_K & (tl.min(tl.where(same, k_K[None, :], KP), 1) == k_K)
    rank_K = tl.sum((counts_K[None, :] & (id_K[None, :] < id_K[:, None])).to(tl.int32), 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    d_D = tl.program_id(1) * BD + tl.arange(0, BD)
    acc_D = tl.zeros((BD,), tl.float32)
    for i in tl.static_range(K):
        here_K = counts_K & (rank_K == i)
        there = tl.sum(here_K.to(tl.int32), 0) > 0
        k = tl.sum(tl.where(here_K, k_K, 0), 0)
        weight = tl.sum(tl.where(here_K, weight_K, 0.0), 0)
        row = t * K + k
        if place_ptr is not None:
            row = tl.load(place_ptr + row, mask=there, other=0).to(tl.int64)
        y_D = wide(tl.load(y_ptr + row * D + d_D, mask=(d_D < D) & there, other=0.0, cache_modifier=".cg"))
        acc_D = tl.where(there, acc_D + weight * y_D, acc_D)
    tl.store(out_ptr + t * D + d_D, narrow(acc_D, out_ptr.dtype.element_ty), mask=d_D < D)


def serves(form: Form, dtype: torch.dtype) -> bool:
    """Whether records of this form are multiplied with hidden states of this type."""
    name = str(dtype).removeprefix("torch.")
    if form.weights == "mxfp4":
        return name == "bfloat16" and form.hidden % 32 == 0 and form.width % 32 == 0
    if form.weights == "fp8":
        return name in ("bfloat16", "float16") and 32 <= form.block <= 128 and form.hidden % 16 == 0 and form.width % 16 == 0
    return name in ("bfloat16", "float16") and form.weights == name


class Tile(NamedTuple):
    """Of an item and a program: pairs, rows, columns of a step, warps, steps in flight, items side by side; whether items that are at
    most half full are computed in half as many columns."""

    pairs: int
    rows: int
    step: int
    warps: int = 4
    stages: int = 3
    together: int = 1
    halves: bool = False


def width(form: Form, tokens: int, top_k: int, experts: int) -> int:
    """Pairs of an item: by how many an expert has on average, so that few experts need a second item."""
    pairs = tokens * top_k / min(experts, max(1, tokens * top_k))
    most = 128 if form.weights not in ("fp8", "mxfp4") else 64  # decoding and its registers cost more than a second item
    if direct(tokens):
        return max(8 if most == 64 else 16, triton.next_power_of_2(tokens))  # a column each
    if most == 64 and pairs <= 3:
        return 8
    return min(most, 16 if pairs <= 8 else 32 if pairs <= 20 else 64 if pairs <= 40 else 128)


def share(programs: int) -> float:
    """What share of a large chip's processors is busy, on average, when all programs take equally long."""
    return programs / (-(-programs // PROCESSORS) * PROCESSORS)


def distinct(pairs: int, experts: int) -> float:
    """How many experts that many pairs have, if they choose at random."""
    return experts * (1 - (1 - 1 / experts) ** pairs)


def tuning(form: Form, which: str, tokens: int, top_k: int, experts: int) -> Tile:
    """How `gate_up` or `down` is cut up. Steps must not reach over a tile of mxfp4, or a block of fp8; of fp8 two whole tiles are a
    step, too."""
    n = width(form, tokens, top_k, experts)
    all_rows, columns = (2 * form.width, form.hidden) if which == "gate_up" else (form.hidden, form.width)
    items = items_of(tokens, top_k, experts, n)
    wide, narrow = (-(-all_rows // rows) * items for rows in (128, 64))
    # Fewer instructions a weight with 128 rows, better spread of few programs with 64; and few programs need more in flight each.
    rows = 128 if wide >= 2 * PROCESSORS or share(wide) + 0.05 >= share(narrow) else 64
    few = (wide if rows == 128 else narrow) <= PROCESSORS
    if form.weights == "mxfp4":
        if n == 8:
            return Tile(n, 32 if -(-all_rows // 64) * items < 3 * PROCESSORS else 64, 128, 2, 4)
        # Five sums of 32 columns, and in two turns four of 64, need more registers than there are for four warps and 128 rows.
        return Tile(n, 64 if n == 32 else 128, 128, 8 if n == 64 else 4, 4, 4 if n == 64 else 1)
    if form.weights == "fp8":
        # Few programs and short sums are cut finer. A processor has room for 6 programs of 128 rows and 8 pairs, with a step more in flight
        # for 4: better where fewer run in the last round.
        rows = 64 if direct(tokens) and (share(wide) < 0.8 or columns <= 1024) else 128
        rounds = [-(-distinct(tokens * top_k, experts) * all_rows // (rows * PROCESSORS * each)) for each in (4, 6)]
        deep = n == 8 and rows == 128 and rounds[1] > 1 and 4 * rounds[0] < 6 * rounds[1]
        alone = rows == 64 and narrow <= 2 * PROCESSORS and columns > 1024 and form.block == 128 and columns % 256 == 0
        return Tile(n, rows, 256 if alone else min(128, form.block), 8 if n == 64 else 4, 4 if deep else 3, 4 if n == 64 else 1)
    # Every tile must take the same steps over columns that none divides: a product with zeros can round, too.
    if n <= 32:
        deep = {64: 4, 128: 3}[rows] + (2 if rows == 64 else 1) * few
        return Tile(n, rows, 128 if columns % 128 == 0 else 64, 4, deep)
    # Loops over few columns are unrolled, and a fourth step in flight then needs more registers than there are.
    return Tile(n, 128, 64, 4, 4, 4) if n == 64 else Tile(n, 256, 64, 8, 4 if columns > 1024 else 3, 8, tokens * top_k <= 300 * experts)


def direct(tokens: int) -> bool:
    """Whether programs find their own pairs, so that `plan` need not run."""
    return tokens <= SMALL


def constants(form: Form, which: str, experts: int, tokens: int, top_k: int) -> tuple[dict[str, Any], int, int]:
    """Of `gate_up` or `down`: (constants that both have, warps, programs)."""
    at, tile = {p.name: p.offset for p in form.layout().parts}, tuning(form, which, tokens, top_k, experts)
    items, blocks = items_of(tokens, top_k, experts, tile.pairs), -(-(2 * form.width if which == "gate_up" else form.hidden) // tile.rows)
    return {"E": experts, "EP": max(16, triton.next_power_of_2(experts)), "K": top_k,
            "KP": triton.next_power_of_2(max(2, top_k)), "DIRECT": direct(tokens), "D": form.hidden, "F": form.width,
            "W": {"fp8": FP8.value, "mxfp4": MX.value}.get(form.weights, PLAIN.value), "SCALE": CODES[form.scale], "BLOCK": form.block or 1,
            "BIAS": CODES[form.bias], "AT": at[which], "SCALE_AT": at.get(f"{which}_scale", 0), "BIAS_AT": at.get(f"{which}_bias", 0),
            "BT": tile.pairs, "BR": tile.rows, "BK": tile.step, "STAGES": tile.stages, "TOGETHER": tile.together,
            "HALVES": tile.halves, "PDL": PDL and ASM.value}, tile.warps, -(-items // tile.together) * tile.together * blocks


def items_of(tokens: int, top_k: int, experts: int, width: int) -> int:
    """How many items there are at most: every expert that has pairs has one, and one more for `width` pairs more."""
    pairs = tokens * top_k
    if direct(tokens):
        return pairs
    most = min(experts, pairs)
    return most + (pairs - most) // width


def launch(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, where_E: torch.Tensor, form: Form, limit: float,
           alpha: float) -> torch.Tensor:
    """See `op.expert_mlp`; at least one token and one k."""
    (tokens, hidden), top_k, experts = hidden_TD.shape, ids_TK.shape[1], where_E.shape[0]
    pairs, device = tokens * top_k, hidden_TD.device
    if TOKEN and fused_token.serves(form, hidden_TD.dtype, tokens, top_k, device):
        return fused_token.launch(hidden_TD, ids_TK, weights_TK, where_E, form, limit, alpha)
    # Scratch: every element that is read has been written by this call.
    pair = torch.empty(experts, tokens, dtype=torch.int32, device=device)
    count = torch.empty(experts, dtype=torch.int32, device=device)
    pdl = {"launch_pdl": True} if PDL and ASM.value else {}
    if not direct(tokens):
        plan[(experts,)](ids_TK, pair, count, tokens, K=top_k, KP=triton.next_power_of_2(max(2, top_k)), CT=CHUNK, PDL=PDL and ASM.value,
                         num_warps=4, **pdl)
    if PREFILL and fused_prefill.serves(form, hidden_TD.dtype, tokens, top_k, experts, device):
        y, place = fused_prefill.launch(hidden_TD, pair, count, where_E, form, top_k, limit, alpha,
                                        lambda n: items_of(tokens, top_k, experts, n), pdl)
        return total(y, ids_TK, weights_TK, experts, hidden_TD.dtype, place)
    h = torch.empty(pairs, form.width, dtype=hidden_TD.dtype, device=device)
    y = torch.empty(pairs, hidden, dtype=torch.float32, device=device)
    same, warps, programs = constants(form, "gate_up", experts, tokens, top_k)
    if form.weights == "mxfp4" and same["BT"] > RAISE.value:
        hidden_TD, given = torch.empty_like(hidden_TD), hidden_TD
        lift[(-(-tokens * hidden // 4096),)](given, hidden_TD, tokens * hidden, B=4096, PDL=PDL and ASM.value, num_warps=8, **pdl)
    gate_up[(programs,)](hidden_TD, ids_TK, where_E, pair, count, h, tokens, limit, alpha, CLAMPED=limit != 0, num_warps=warps, **same,
                         **pdl)
    same, warps, programs = constants(form, "down", experts, tokens, top_k)
    down[(programs,)](h, ids_TK, where_E, pair, count, y, tokens, num_warps=warps, **same, **pdl)
    return total(y, ids_TK, weights_TK, experts, hidden_TD.dtype)


def total(y: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, experts: int, dtype: torch.dtype,
          place: torch.Tensor | None = None) -> torch.Tensor:
    """The last step: y [T K, D] of all pairs to [T, D]. Rows of pairs that do not count are not read. place: see `combine`."""
    (tokens, top_k), hidden = ids_TK.shape, y.shape[1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=y.device)
    on = PDL and ASM.value
    block = 512 if tokens > 8 else 256
    combine[(tokens, -(-hidden // block))](y, place, ids_TK, weights_TK, out, E=experts, K=top_k,
                                           KP=triton.next_power_of_2(max(2, top_k)), D=hidden, BD=block, PDL=on, num_warps=4,
                                           **({"launch_pdl": True} if on else {}))
    return out
