"""Exchanges of small messages: every 8 bytes carry 4 of a row and the number of the exchange, so a word says by itself that it has come.

No fence, no flag, no program that waits for the others of its launch: a program sends its shares, then looks at what it is to take until
all words have the number, and unpacks them. Twice the bytes of `fused`, in two launches around the experts instead of three:

`put_words`   ids, weights and rows to every rank; takes everybody's, into the planes that the experts read
`give_words`  results back; takes this rank's and adds them in ascending order of ranks

8 bytes are read and written whole, whatever the width of the access. A program takes only after it has sent all of its own, and no launch
has more programs than the chip has processors, so all of them run: two ranks can't wait for programs that wait for a place. The number is
the exchange's, modulo 2^32. What no token needs is not sent, except one slot in turn, which keeps every word younger than 4 x `slots`
exchanges: a number never comes round to words of its own.

Flags are written as in `fused` but for diagnosis alone: nobody waits for them but the program that counts how long ranks were late.
"""
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..expert_mlp.fused_elements import ASM, narrow, wide
from .fused import F_ARRIVED, F_BACK, F_OUT, LINE, S_FAILED, S_LATE, S_MOVED, S_NUMBER, clock, late_ranks, plane, ranks_up, wait_flags
from .planes import NOW, Planes

S_NOW = tl.constexpr(NOW)
LOOKS = tl.constexpr(64)  # looks between two looks at the clock
PUT_BLOCK, GIVE_BLOCK, WARPS = 1024, 512, 4  # words of a share, warps of a program at most
PDL = True


@triton.jit
def stamped(data, value):
    """Words of 4 bytes each (int32) and the number."""
    return (value << 32) | (data.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def stale(word, value):
    """1 where a word does not have the number."""
    return (((word ^ (value << 32)) >> 32) != 0).to(tl.int32)


@triton.jit
def passed(looks, since, limit, gave_up):
    """(1 if the time is over, since when this waits). `limit`: nanoseconds, or looks under the interpreter."""
    over = gave_up
    if ASM:
        if looks % LOOKS == 0:
            now = clock()
            since = tl.where(since == 0, now, since)
            over = (now - since > limit).to(tl.int32)
    else:
        over = (looks > limit).to(tl.int32)
    return over, since


@triton.jit
def look(stale_X, over):
    """0: all is there; 1: look again; 2: it is not there and the time is over. Warps load for themselves and have clocks of their own: what
    they do next must be one answer, made of all of theirs."""
    return tl.max(stale_X * (1 + over))


@triton.jit
def tell(bases_ptr, kind: tl.constexpr, me, value, R: tl.constexpr, RP: tl.constexpr):
    """This rank's flag at everybody's."""
    to_R = tl.arange(0, RP)
    base_R = tl.load(bases_ptr + to_R, mask=to_R < R, other=0)
    at_R = (base_R + (kind * R + me) * LINE).to(tl.pointer_type(tl.int64))
    tl.store(at_R, tl.zeros((RP,), tl.int64) + value, mask=to_R < R)


@triton.jit
def watch(base, meta_at, state_ptr, failed_ptr, value, limit, gave_up, slots, WORDS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr):
    """How long ranks were late, and how long words of those that were there took: the first of every slot."""
    late_before, moved_before = tl.load(state_ptr + S_LATE), tl.load(state_ptr + S_MOVED)
    late, absent = wait_flags(base, state_ptr, failed_ptr, F_ARRIVED, value, limit, gave_up != 0, R, RP)
    gave_up = absent.to(tl.int32)
    start = clock()
    first = slots * 0
    while first < slots:
        # Beyond the last slot it again.
        i_N = tl.minimum(first + tl.arange(0, 256), slots - 1)
        at_N = (base + meta_at).to(tl.pointer_type(tl.int64)) + i_N.to(tl.int64) * WORDS
        looks, since = tl.full((), 1, tl.int64), tl.full((), 0, tl.int64)
        found = look(stale(tl.load(at_N, volatile=True), value), gave_up)
        while found == 1:
            over, since = passed(looks, since, limit, gave_up)
            looks += 1
            found = look(stale(tl.load(at_N, volatile=True), value), over)
        first += 256
    tl.store(state_ptr + S_LATE, late_before + late)
    tl.store(state_ptr + S_MOVED, moved_before + clock() - start)


@triton.jit
def slot_stale(id_K, weight_K, row_W, value, on_W):
    """A slot is there with its ids, its weights and, where it has ids, its row."""
    meta = tl.max(stale(id_K, value) | stale(weight_K, value), 0)
    return tl.where(meta > 0, 1, tl.where(on_W & (tl.max(id_K.to(tl.int32), 0) >= 0), stale(row_W, value), 0))


@triton.jit(do_not_specialize=["T", "C", "me", "limit", "turn_bytes", "meta_at", "words_at", "ids_at", "weights_at", "rows_at"])
def put_words(hidden_ptr, ids_ptr, weights_ptr, serve_ptr, number_ptr, bases_ptr, state_ptr, failed_ptr, T, C, me, limit, turn_bytes,
              meta_at, words_at, ids_at, weights_at, rows_at, R: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
              W: tl.constexpr, BW: tl.constexpr, E: tl.constexpr, SEND: tl.constexpr, TAKE: tl.constexpr, PDL: tl.constexpr):
    """As `fused.put`. hidden [T, W] int32; a share is a block of BW words of a slot, from or to one rank. The last program watches."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    BLOCKS: tl.constexpr = (W + BW - 1) // BW
    p, programs = tl.program_id(0), tl.num_programs(0) - 1
    base = tl.load(bases_ptr + me)
    value = tl.load(state_ptr + S_NUMBER) + 1
    gave_up = (tl.load(state_ptr + S_FAILED) != 0).to(tl.int32)
    k_K, w_W = tl.arange(0, KP), tl.arange(0, BW)
    turn = (value & 1) * turn_bytes
    meta_at += turn
    words_at += turn
    # The last program has no share.
    shares = tl.where(p < programs, C * R * BLOCKS, 0)
    if SEND:
        if p == 0:
            tl.store(state_ptr + S_NOW, value)
            tell(bases_ptr, F_ARRIVED, me, value, R, RP)
            tell(bases_ptr, F_OUT, me, value, R, RP)
        share = p
        while share < shares:
            block, to, c = share % BLOCKS, share // BLOCKS % R, share // (BLOCKS * R)
            there = tl.load(bases_ptr + to)
            d_W = block * BW + w_W
            row_W = tl.load(hidden_ptr + c.to(tl.int64) * W + d_W, mask=(d_W < W) & (c < T), other=0)
            id_K = tl.load(ids_ptr + c * K + k_K, mask=(k_K < K) & (c < T), other=-1)
            weight_K = tl.load(weights_ptr + c * K + k_K, mask=(k_K < K) & (c < T), other=0.0)
            known_K = (id_K >= 0) & (id_K < E)
            server_K = tl.load(serve_ptr + id_K, mask=known_K, other=-1)
            own_K = tl.load(number_ptr + to * E + id_K, mask=known_K, other=-1)
            own_K = tl.where(server_K == to, own_K, -1).to(tl.int32)
            slot = (me * C + c).to(tl.int64)
            if block == 0:
                meta_K = (there + meta_at).to(tl.pointer_type(tl.int64)) + slot * (2 * KP) + k_K
                tl.store(meta_K, stamped(own_K, value))
                tl.store(meta_K + KP, stamped(weight_K.to(tl.int32, bitcast=True), value))
            if (tl.max(own_K, 0) >= 0) | (c == value // 2 % C):
                tl.store(plane(there, words_at, tl.int64) + slot * W + d_W, stamped(row_W, value), mask=d_W < W)
            share += programs
    if TAKE:
        share = p
        while share < shares:
            block, sender, c = share % BLOCKS, share // BLOCKS % R, share // (BLOCKS * R)
            slot = (sender * C + c).to(tl.int64)
            d_W = block * BW + w_W
            meta_K = (base + meta_at).to(tl.pointer_type(tl.int64)) + slot * (2 * KP) + k_K
            word_W = plane(base, words_at, tl.int64) + slot * W + d_W
            id_K, weight_K = tl.load(meta_K, volatile=True), tl.load(meta_K + KP, volatile=True)
            row_W = tl.load(word_W, mask=d_W < W, other=0, volatile=True)
            looks, since = tl.full((), 1, tl.int64), tl.full((), 0, tl.int64)
            found = look(slot_stale(id_K, weight_K, row_W, value, d_W < W), gave_up)
            while found == 1:
                id_K, weight_K = tl.load(meta_K, volatile=True), tl.load(meta_K + KP, volatile=True)
                row_W = tl.load(word_W, mask=d_W < W, other=0, volatile=True)
                over, since = passed(looks, since, limit, gave_up)
                looks += 1
                found = look(slot_stale(id_K, weight_K, row_W, value, d_W < W), over)
            if found == 2:
                # Who is not there when nobody waits any more is not late.
                if gave_up == 0:
                    late_ranks(state_ptr, failed_ptr, tl.full((), 1, tl.int64) << sender)
                # The time is over for this program's other shares, too.
                gave_up = found - 1
            own_K = tl.where(found == 2, -1, id_K.to(tl.int32))
            if block == 0:
                tl.store((base + ids_at).to(tl.pointer_type(tl.int64)) + slot * K + k_K, own_K.to(tl.int64), mask=k_K < K)
                tl.store((base + weights_at).to(tl.pointer_type(tl.int32)) + slot * K + k_K, weight_K.to(tl.int32), mask=k_K < K)
            if tl.max(own_K, 0) >= 0:
                tl.store(plane(base, rows_at, tl.int32) + slot * W + d_W, row_W.to(tl.int32), mask=d_W < W)
            share += programs
        if p == programs:
            watch(base, meta_at, state_ptr, failed_ptr, value, limit, gave_up, C * R, 2 * KP, R, RP)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["T", "C", "me", "limit", "turn_bytes", "ids_at", "back_at"])
def give_words(result_ptr, ids_ptr, serve_ptr, bases_ptr, state_ptr, failed_ptr, out_ptr, T, C, me, limit, turn_bytes, ids_at, back_at,
               R: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, E: tl.constexpr,
               BACK: tl.constexpr, TYPE: tl.constexpr, UNREDUCED: tl.constexpr, PDL: tl.constexpr):
    """result [R C BACK, W] int32 to their senders. out: the sums [T, W] int32 of the rows' type, or [T K, D] FP32, each expert's row."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    BLOCKS: tl.constexpr = (W + BW - 1) // BW
    p, programs = tl.program_id(0), tl.num_programs(0)
    base = tl.load(bases_ptr + me)
    value = tl.load(state_ptr + S_NOW)
    gave_up = (tl.load(state_ptr + S_FAILED) != 0).to(tl.int32)
    k_K, w_W, r_R = tl.arange(0, KP), tl.arange(0, BW), tl.arange(0, RP)
    back_at += (value & 1) * turn_bytes
    began, moved = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if p == 0:
        began, moved = clock(), tl.load(state_ptr + S_MOVED)
        tell(bases_ptr, F_BACK, me, value, R, RP)
    share = p
    while share < R * C * BACK * BLOCKS:
        row = share // BLOCKS
        slot, k, d_W = row // BACK, row % BACK, share % BLOCKS * BW + w_W
        row_W = tl.load(result_ptr + row.to(tl.int64) * W + d_W, mask=d_W < W, other=0)
        id_K = tl.load((base + ids_at).to(tl.pointer_type(tl.int64)) + slot * K + k_K, mask=k_K < K, other=-1)
        there = tl.load(bases_ptr + slot // C)
        wanted_K = (id_K >= 0) & ((k_K == k) | (BACK == 1))
        if (tl.max(wanted_K.to(tl.int32), 0) > 0) | (slot % C == value // 2 % C):
            at = ((me * C + slot % C) * BACK + k).to(tl.int64) * W
            tl.store(plane(there, back_at, tl.int64) + at + d_W, stamped(row_W, value), mask=d_W < W)
        share += programs
    share = p
    while share < T * BACK * BLOCKS:
        row = share // BLOCKS
        t, k, d_W = row // BACK, row % BACK, share % BLOCKS * BW + w_W
        id_K = tl.load(ids_ptr + t * K + k_K, mask=k_K < K, other=-1)
        wanted_K = (id_K >= 0) & (id_K < E) & ((k_K == k) | (BACK == 1))
        server_K = tl.load(serve_ptr + id_K, mask=wanted_K, other=-1)
        there_R = tl.max((server_K[None, :] == r_R[:, None]).to(tl.int32), 1)
        at_R = ((r_R * C + t) * BACK + k).to(tl.int64) * W
        on_RW = (there_R[:, None] > 0) & (d_W < W)[None, :]
        word_RW = plane(base, back_at, tl.int64) + at_R[:, None] + d_W[None, :]
        got_RW = tl.load(word_RW, mask=on_RW, other=0, volatile=True)
        looks, since = tl.full((), 1, tl.int64), tl.full((), 0, tl.int64)
        found = look(tl.where(on_RW, stale(got_RW, value), 0), gave_up)
        while found == 1:
            got_RW = tl.load(word_RW, mask=on_RW, other=0, volatile=True)
            over, since = passed(looks, since, limit, gave_up)
            looks += 1
            found = look(tl.where(on_RW, stale(got_RW, value), 0), over)
        if found == 2:
            if gave_up == 0:
                late_R = tl.max(tl.where(on_RW, stale(got_RW, value), 0), 1).to(tl.int64)
                late_ranks(state_ptr, failed_ptr, tl.sum(late_R << r_R.to(tl.int64), 0))
            gave_up = found - 1
        data_RW = got_RW.to(tl.int32)
        low_W, high_W = tl.zeros((BW,), tl.float32), tl.zeros((BW,), tl.float32)
        for r in tl.static_range(R):
            # One of a row is not zero: an exact pick.
            data_W = tl.sum(tl.where((r_R == r)[:, None] & on_RW, data_RW, 0), 0)
            if TYPE == tl.float32:
                low_W += data_W.to(tl.float32, bitcast=True)
            else:
                low_W += wide(data_W.to(tl.int16).to(TYPE, bitcast=True))
                high_W += wide((data_W >> 16).to(tl.int16).to(TYPE, bitcast=True))
        if gave_up != 0:
            low_W, high_W = low_W + float("nan"), high_W + float("nan")
        if TYPE == tl.float32:
            tl.store(out_ptr + row.to(tl.int64) * W + d_W, low_W, mask=d_W < W)
        elif UNREDUCED:
            tl.store(out_ptr + row.to(tl.int64) * (2 * W) + 2 * d_W, low_W, mask=d_W < W)
            tl.store(out_ptr + row.to(tl.int64) * (2 * W) + 2 * d_W + 1, high_W, mask=d_W < W)
        else:
            pair_W = (narrow(low_W, TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (
                narrow(high_W, TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
            tl.store(out_ptr + row.to(tl.int64) * W + d_W, pair_W, mask=d_W < W)
        share += programs
    if p == 0:
        tl.store(state_ptr + S_NUMBER, value)
        tl.store(state_ptr + S_MOVED, moved + clock() - began)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


# launches -------------------------------------------------------------------------------------------------------------------
@functools.cache
def processors(device: torch.device) -> int:
    """How many programs run for certain, and at once. The interpreter runs one after another: one that sends everything first."""
    return torch.cuda.get_device_properties(device).multi_processor_count if ASM.value else 1


def constants(planes: Planes) -> dict[str, int]:
    return {"R": planes.ranks, "RP": ranks_up(planes.ranks), "K": planes.top_k, "KP": planes.keys, "W": planes.words,
            "PDL": PDL and ASM.value}


def block_of(planes: Planes, most: int) -> int:
    return max(32, min(most, triton.next_power_of_2(planes.words)))


def warps_of(block: int) -> int:
    """No more than have words of their own: two warps that hold the same words could see them differently."""
    return min(WARPS, block // 32)


def launch_put(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, serve_E: torch.Tensor, number_RE: torch.Tensor,
               bases_R: torch.Tensor, state: torch.Tensor, failed: torch.Tensor, planes: Planes, me: int, limit: int, sends: bool,
               takes: bool) -> None:
    ids, weights, rows = planes.offsets(0)[:3]
    meta, words, _ = planes.word_offsets
    block = block_of(planes, PUT_BLOCK)
    shares = planes.slots * planes.ranks * -(-planes.words // block)
    put_words[(min(shares, processors(hidden_TD.device)) + 1,)](
        words_of(hidden_TD), ids_TK, weights_TK, serve_E, number_RE, bases_R, state, failed, len(hidden_TD), planes.slots, me, limit,
        planes.turn_bytes, meta, words, ids, weights, rows, BW=block, E=serve_E.shape[0], SEND=sends, TAKE=takes, num_warps=warps_of(block),
        **constants(planes), **({"launch_pdl": True} if PDL and ASM.value else {}))


def launch_give(result_ND: torch.Tensor, ids_TK: torch.Tensor, serve_E: torch.Tensor, bases_R: torch.Tensor, state: torch.Tensor,
                failed: torch.Tensor, planes: Planes, me: int, limit: int) -> torch.Tensor:
    """[T, D] in the rows' dtype, or unreduced [T K, D] in FP32."""
    tokens, block = len(ids_TK), block_of(planes, GIVE_BLOCK)
    shape, dtype = ((tokens * planes.top_k, torch.float32) if planes.unreduced else (tokens, planes.dtype))
    out = torch.empty(shape, planes.hidden, dtype=dtype, device=result_ND.device)
    shares = planes.slots * planes.ranks * planes.back_rows * -(-planes.words // block)
    give_words[(min(shares, processors(result_ND.device)),)](
        words_of(result_ND), ids_TK, serve_E, bases_R, state, failed, out if dtype == torch.float32 else words_of(out), tokens,
        planes.slots, me, limit, planes.turn_bytes, planes.offsets(0)[0], planes.word_offsets[2], BW=block, E=serve_E.shape[0],
        BACK=planes.back_rows,
        TYPE=getattr(tl, str(planes.dtype).removeprefix("torch.")), UNREDUCED=planes.unreduced, num_warps=warps_of(block),
        **constants(planes), **({"launch_pdl": True} if PDL and ASM.value else {}))
    return out


def words_of(rows_ND: torch.Tensor) -> torch.Tensor:
    return (rows_ND if rows_ND.data_ptr() % 4 == 0 else rows_ND.clone()).view(torch.int32)
