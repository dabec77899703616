"""One-sided exchanges in Triton: rows straight into the memory of the ranks that need them, results straight back; nothing asks the host.

`put`      one program a slot and receiver: ids and weights always, the row where one of its experts is there. `wait` is its wait alone.
`give`     one program a result row: back to the sender's memory.
`gather_sums`, `gather_rows`  the sums of all ranks in ascending order; or each expert's row, for a sum over experts.

In `put` and `give` the program that finishes last (counted with acquire and release order) raises the rank's flag at every receiver with
release order at system scope, and waits there for everybody's: no program waits that others of its launch are still behind. The number of
the exchange lives on the device, so replays of a graph need no reset. A wait ends at the deadline: the late ranks become bits of FAILED in
the state and of `failed`, which the host looks at; no later wait waits, and results are NaN.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..expert_mlp.fused_elements import ASM, entry, narrow, wide
from .planes import ARRIVED, BACK, FAILED, GIVE_DONE, LATE, MOVED, NUMBER, OUT, PUT_DONE, Planes

LINE = tl.constexpr(128)
F_OUT, F_BACK, F_ARRIVED = tl.constexpr(OUT), tl.constexpr(BACK), tl.constexpr(ARRIVED)
S_NUMBER, S_PUT, S_GIVE, S_LATE, S_MOVED, S_FAILED = (tl.constexpr(x) for x in (NUMBER, PUT_DONE, GIVE_DONE, LATE, MOVED, FAILED))
WORD = {2: torch.int16, 4: torch.int32}


@triton.jit
def clock():
    """Nanoseconds; 0 under the interpreter, which has none."""
    if ASM:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        now = tl.full((), 0, tl.int64)
    return now


@triton.jit
def flag_of(base, kind: tl.constexpr, sender, R: tl.constexpr):
    return (base + (kind * R + sender) * LINE).to(tl.pointer_type(tl.int64))


@triton.jit
def raise_flags(bases_ptr, kind: tl.constexpr, me, value, R: tl.constexpr, RP: tl.constexpr):
    to_R = tl.arange(0, RP)
    at_R = flag_of(tl.load(bases_ptr + to_R, mask=to_R < R, other=0), kind, me, R)
    tl.atomic_xchg(at_R, tl.zeros((RP,), tl.int64) + value, mask=to_R < R, sem="release", scope="sys")


@triton.jit
def late_ranks(state_ptr, failed_ptr, bits):
    tl.atomic_or(state_ptr + S_FAILED, bits, sem="relaxed", scope="gpu")
    tl.atomic_or(failed_ptr, bits, sem="relaxed", scope="sys")


@triton.jit
def wait_flags(base, state_ptr, failed_ptr, kind: tl.constexpr, value, limit, over, R: tl.constexpr, RP: tl.constexpr):
    """Until every sender's flag is there: (how long that took, whether the time is over). `limit`: nanoseconds, or looks under the
    interpreter; `over`: no time is left. What another thread has marked as failed may not be seen yet, so the answer is handed on."""
    sender_R = tl.arange(0, RP)
    # Beyond the last rank its flag again.
    at_R = flag_of(base, kind, tl.minimum(sender_R, R - 1), R)
    start = clock()
    looks = tl.full((), 0, tl.int64)
    late_R = (entry(at_R, 0) < value).to(tl.int64)
    while (tl.max(late_R, 0) > 0) & (over == 0):
        late_R = (entry(at_R, 0) < value).to(tl.int64)
        looks += 1
        if ASM:
            over = clock() - start > limit
        else:
            over = looks > limit
        if over:
            late_ranks(state_ptr, failed_ptr, tl.sum(tl.where(sender_R < R, late_R << sender_R.to(tl.int64), 0), 0))
    return clock() - start, over


@triton.jit
def wait_rows(base, state_ptr, failed_ptr, value, limit, R: tl.constexpr, RP: tl.constexpr):
    """For ranks that have not arrived, then for rows of those that have: counted apart."""
    over = tl.load(state_ptr + S_FAILED, volatile=True) != 0
    late, over = wait_flags(base, state_ptr, failed_ptr, F_ARRIVED, value, limit, over, R, RP)
    moved, over = wait_flags(base, state_ptr, failed_ptr, F_OUT, value, limit, over, R, RP)
    tl.store(state_ptr + S_LATE, tl.load(state_ptr + S_LATE) + late)
    tl.store(state_ptr + S_MOVED, tl.load(state_ptr + S_MOVED) + moved)


@triton.jit
def plane(address, at, TYPE: tl.constexpr):
    """Pointer to a plane, which starts at a multiple of 128 bytes."""
    return tl.multiple_of((address + at).to(tl.pointer_type(TYPE)), 128)


@triton.jit
def copy_row(source, target, D: tl.constexpr, BD: tl.constexpr):
    for d in tl.static_range(0, D, BD):
        d_D = d + tl.arange(0, BD)
        tl.store(target + d_D, tl.load(source + d_D, mask=d_D < D), mask=d_D < D)


@triton.jit(do_not_specialize=["T", "C", "me", "limit", "ids_at", "weights_at", "rows_at"])
def put(hidden_ptr, ids_ptr, weights_ptr, serve_ptr, number_ptr, bases_ptr, state_ptr, failed_ptr, T, C, me, limit, ids_at, weights_at,
        rows_at, R: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr,
        WAIT: tl.constexpr):
    """serve [E]: who serves an expert; number [R, E]: which of its own it is there, -1: none. hidden in words of the rows' size."""
    WORD: tl.constexpr = hidden_ptr.dtype.element_ty
    c, to = tl.program_id(0), tl.program_id(1)
    base = tl.load(bases_ptr + me)
    value = tl.load(state_ptr + S_NUMBER) + 1
    if (c == 0) & (to == 0):
        raise_flags(bases_ptr, F_ARRIVED, me, value, R, RP)
    there = tl.load(bases_ptr + to)
    slot = me * C + c
    k_K = tl.arange(0, KP)
    id_K = tl.load(ids_ptr + c * K + k_K, mask=(k_K < K) & (c < T), other=-1)
    known_K = (id_K >= 0) & (id_K < E)
    goes_K = known_K & (tl.load(serve_ptr + id_K, mask=known_K, other=-1) == to)
    own_K = tl.load(number_ptr + to * E + id_K, mask=goes_K, other=-1)
    tl.store((there + ids_at).to(tl.pointer_type(tl.int64)) + slot * K + k_K, own_K, mask=k_K < K)
    if tl.sum(goes_K.to(tl.int32), 0) > 0:
        weight_K = tl.load(weights_ptr + c * K + k_K, mask=k_K < K, other=0.0)
        tl.store((there + weights_at).to(tl.pointer_type(tl.float32)) + slot * K + k_K, weight_K, mask=k_K < K)
        copy_row(hidden_ptr + c.to(tl.int64) * D, plane(there, rows_at, WORD) + slot.to(tl.int64) * D, D, BD)
    # All threads of this program have written before one of them counts it.
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + S_PUT, 1, sem="acq_rel", scope="sys") == C * R - 1:
        tl.store(state_ptr + S_PUT, 0)
        raise_flags(bases_ptr, F_OUT, me, value, R, RP)
        if WAIT:
            wait_rows(base, state_ptr, failed_ptr, value, limit, R, RP)


@triton.jit(do_not_specialize=["me", "limit"])
def wait(bases_ptr, state_ptr, failed_ptr, me, limit, R: tl.constexpr, RP: tl.constexpr):
    """For everybody's rows, after a `put` that did not."""
    wait_rows(tl.load(bases_ptr + me), state_ptr, failed_ptr, tl.load(state_ptr + S_NUMBER) + 1, limit, R, RP)


@triton.jit(do_not_specialize=["C", "me", "limit", "ids_at", "results_at"])
def give(result_ptr, bases_ptr, state_ptr, failed_ptr, C, me, limit, ids_at, results_at, R: tl.constexpr, RP: tl.constexpr,
         K: tl.constexpr, KP: tl.constexpr, BACK_ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """result [R C (K), D], in words: row (sender, slot (, k)) to the sender, where one of its ids (id k) is this rank's."""
    WORD: tl.constexpr = result_ptr.dtype.element_ty
    row = tl.program_id(0)
    slot, k = row // BACK_ROWS, row % BACK_ROWS
    base = tl.load(bases_ptr + me)
    k_K = tl.arange(0, KP)
    id_K = tl.load((base + ids_at).to(tl.pointer_type(tl.int64)) + slot * K + k_K, mask=k_K < K, other=-1, cache_modifier=".cg")
    wanted_K = (id_K >= 0) & ((k_K == k) | (BACK_ROWS == 1))
    if tl.sum(wanted_K.to(tl.int32), 0) > 0:
        there = tl.load(bases_ptr + slot // C)
        at = ((me * C + slot % C) * BACK_ROWS + k).to(tl.int64) * D
        copy_row(result_ptr + row.to(tl.int64) * D, plane(there, results_at, WORD) + at, D, BD)
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + S_GIVE, 1, sem="acq_rel", scope="sys") == R * C * BACK_ROWS - 1:
        tl.store(state_ptr + S_GIVE, 0)
        value = tl.load(state_ptr + S_NUMBER) + 1
        raise_flags(bases_ptr, F_BACK, me, value, R, RP)
        over = tl.load(state_ptr + S_FAILED, volatile=True) != 0
        moved, over = wait_flags(base, state_ptr, failed_ptr, F_BACK, value, limit, over, R, RP)
        tl.store(state_ptr + S_MOVED, tl.load(state_ptr + S_MOVED) + moved)
        tl.store(state_ptr + S_NUMBER, value)


@triton.jit(do_not_specialize=["C"])
def gather_sums(ids_ptr, serve_ptr, results_ptr, state_ptr, out_ptr, C, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
                D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr):
    """out [T, D]: the ranks' sums for a token, in ascending order of ranks, in FP32. results [R, C, D] is this rank's own plane."""
    t = tl.program_id(0).to(tl.int64)
    k_K = tl.arange(0, KP)
    id_K = tl.load(ids_ptr + t * K + k_K, mask=k_K < K, other=-1)
    known_K = (id_K >= 0) & (id_K < E)
    dest_K = tl.load(serve_ptr + id_K, mask=known_K, other=-1)
    d_D = tl.program_id(1) * BD + tl.arange(0, BD)
    acc_D = tl.zeros((BD,), tl.float32)
    for r in tl.static_range(R):
        there = tl.sum((dest_K == r).to(tl.int32), 0) > 0
        y_D = tl.load(results_ptr + (r * C + t) * D + d_D, mask=(d_D < D) & there, other=0.0, cache_modifier=".cg")
        acc_D += wide(y_D)
    acc_D = tl.where(tl.load(state_ptr + S_FAILED) != 0, float("nan"), acc_D)
    tl.store(out_ptr + t * D + d_D, narrow(acc_D, out_ptr.dtype.element_ty), mask=d_D < D)


@triton.jit(do_not_specialize=["C"])
def gather_rows(ids_ptr, serve_ptr, results_ptr, state_ptr, out_ptr, C, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
                D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr):
    """out [T K, D] FP32: each expert's row; zero where an id is masked."""
    pair = tl.program_id(0).to(tl.int64)
    id = tl.load(ids_ptr + pair)
    known = (id >= 0) & (id < E)
    dest = tl.load(serve_ptr + id, mask=known, other=0)
    d_D = tl.program_id(1) * BD + tl.arange(0, BD)
    at = ((dest * C + pair // K) * K + pair % K) * D
    y_D = wide(tl.load(results_ptr + at + d_D, mask=(d_D < D) & known, other=0.0, cache_modifier=".cg"))
    y_D = tl.where(tl.load(state_ptr + S_FAILED) != 0, float("nan"), y_D)
    tl.store(out_ptr + pair * D + d_D, y_D, mask=d_D < D)


# launches -------------------------------------------------------------------------------------------------------------------
def ranks_up(ranks: int) -> int:
    return triton.next_power_of_2(max(2, ranks))


def shape_constants(planes: Planes) -> dict[str, int]:
    return {"R": planes.ranks, "RP": ranks_up(planes.ranks), "K": planes.top_k, "KP": planes.keys, "D": planes.hidden,
            "BD": min(2048, triton.next_power_of_2(planes.hidden))}


def launch_put(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, serve_E: torch.Tensor, number_RE: torch.Tensor,
               bases_R: torch.Tensor, state: torch.Tensor, failed: torch.Tensor, planes: Planes, turn: int, me: int, limit: int,
               waits: bool) -> None:
    ids, weights, rows, _ = planes.offsets(turn)
    words = hidden_TD.view(WORD[planes.dtype.itemsize])
    put[(planes.slots, planes.ranks)](words, ids_TK, weights_TK, serve_E, number_RE, bases_R, state, failed, len(hidden_TD), planes.slots,
                                      me, limit, ids, weights, rows, E=serve_E.shape[0], WAIT=waits, num_warps=4,
                                      **shape_constants(planes))


def launch_wait(bases_R: torch.Tensor, state: torch.Tensor, failed: torch.Tensor, me: int, limit: int) -> None:
    wait[(1,)](bases_R, state, failed, me, limit, R=len(bases_R), RP=ranks_up(len(bases_R)), num_warps=1)


def launch_give(result_ND: torch.Tensor, bases_R: torch.Tensor, state: torch.Tensor, failed: torch.Tensor, planes: Planes, turn: int,
                me: int, limit: int) -> None:
    words, at = result_ND.view(WORD[planes.dtype.itemsize]), planes.offsets(turn)
    give[(planes.ranks * planes.slots * planes.back_rows,)](words, bases_R, state, failed, planes.slots, me, limit, at[0], at[3],
                                                            BACK_ROWS=planes.back_rows, num_warps=4, **shape_constants(planes))


def launch_gather(ids_TK: torch.Tensor, serve_E: torch.Tensor, block: torch.Tensor, state: torch.Tensor, planes: Planes,
                  turn: int) -> torch.Tensor:
    """[T, D] in the rows' dtype, or unreduced [T K, D] in FP32."""
    tokens, results = len(ids_TK), planes.views(block, turn)[3]
    kernel, rows, dtype = ((gather_rows, tokens * planes.top_k, torch.float32) if planes.unreduced else
                           (gather_sums, tokens, planes.dtype))
    out = torch.empty(rows, planes.hidden, dtype=dtype, device=block.device)
    same = {k: v for k, v in shape_constants(planes).items() if k != "RP"} | {"BD": min(512, triton.next_power_of_2(planes.hidden))}
    if rows:
        grid = (rows, -(-planes.hidden // same["BD"]))
        kernel[grid](ids_TK, serve_E, results, state, out, planes.slots, E=serve_E.shape[0], num_warps=4, **same)
    return out
