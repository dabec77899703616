"""`move` in Triton: the steps of `kernels/protocol.py`, word for word.

It is a handful of programs that take pieces of a record until none is left. A piece is copied past L1 in tiles, all loads of a tile
in flight before its first store; then each thread fences at system scope, the program meets, and one thread counts the piece. The number
of the next piece is asked for before this one is copied.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...types import SlotState
from ..kv_fp4.fused import ASM
from ..plan.naive import Tables
from ..protocol import DONE, EXPERT_MASK, GENERATION_AT, MOVING, QUEUED, SLOT_AT, STATE_AT, STEP_AT

# Bytes of a piece, of a tile of it, and warps of a program.
PIECE, TILE, WARPS = 512 << 10, 64 << 10, 16
C_EXPERT, C_GENERATION, C_SLOT, C_STEP = (tl.constexpr(x) for x in (EXPERT_MASK, GENERATION_AT, SLOT_AT, STEP_AT))
C_QUEUED, C_MOVING, C_DONE = (tl.constexpr(x) for x in (QUEUED, MOVING, DONE))
FILLING, READY = tl.constexpr(int(SlotState.FILLING) << STATE_AT), tl.constexpr(int(SlotState.READY) << STATE_AT)


@triton.jit
def fence():
    """What any thread of the program has written is seen, on every GPU and the host, before what it writes from now on."""
    if ASM:
        # Every thread has one of these.
        each = tl.arange(0, 32)
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [each], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def copy_piece(source, target, begin, end, TILE: tl.constexpr):
    """Bytes `begin` to `end` of a record, in words of 16 bytes; both addresses are multiples of 128, `end` of 16."""
    word = tl.arange(0, TILE // 4)
    source_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 32)
    target_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 32)
    at = begin
    while at < end:
        at = tl.multiple_of(at, 128)
        off = at // 4 + word
        # Groups of four words are all in or all out, so that they stay one access.
        on = tl.max_constancy(off < end // 4, 4)
        tile = tl.load(source_ptr + off, mask=on, other=0, cache_modifier=".cg")
        tl.store(target_ptr + off, tile, mask=on, cache_modifier=".cg")
        at += TILE


@triton.jit(do_not_specialize=["layer", "ahead"])
def move_pieces(where_ptr, home_ptr, slot_ptr, queue_ptr, count_ptr, claim_ptr, taken_ptr, done_ptr, step_ptr, buffers_ptr, layer, ahead,
                E: tl.constexpr, S: tl.constexpr, NBYTES: tl.constexpr, STRIDE: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr):
    PIECES: tl.constexpr = (NBYTES + PIECE - 1) // PIECE
    count = tl.load(count_ptr + layer)
    queued = (tl.load(step_ptr) + ahead << C_STEP) | C_QUEUED
    moving = queued - C_QUEUED + C_MOVING
    m = layer * 0
    while m < count:
        word = tl.load(queue_ptr + layer * S + m)
        expert, slot = (word & C_EXPERT).to(tl.int32), (word >> C_SLOT).to(tl.int32) & C_EXPERT
        claim = claim_ptr + layer * E + expert
        seen = tl.atomic_cas(claim, queued, moving, sem="acq_rel", scope="gpu")
        if (seen == queued) | (seen == moving):
            entry = layer * E + expert
            source = tl.load(home_ptr + entry)
            target = buffers_ptr.to(tl.int64) + slot.to(tl.int64) * STRIDE
            piece = tl.atomic_add(taken_ptr + layer * S + m, 1, sem="relaxed", scope="gpu")
            while piece < PIECES:
                next_ = tl.atomic_add(taken_ptr + layer * S + m, 1, sem="relaxed", scope="gpu")
                begin = piece * PIECE
                copy_piece(source, target, begin, tl.minimum(begin + PIECE, NBYTES), TILE)
                fence()
                done = tl.atomic_add(done_ptr + layer * S + m, 1, sem="acq_rel", scope="gpu")
                if done == PIECES - 1:
                    filling = (word >> C_GENERATION << C_GENERATION) | FILLING | (expert + 1).to(tl.int64)
                    if tl.load(slot_ptr + layer * S + slot, volatile=True) == filling:
                        tl.atomic_xchg(where_ptr + entry, target, sem="release", scope="sys")
                        tl.atomic_cas(slot_ptr + layer * S + slot, filling, filling - FILLING + READY, sem="acq_rel", scope="gpu")
                    tl.atomic_cas(claim, moving, moving - C_MOVING + C_DONE, sem="acq_rel", scope="gpu")
                piece = next_
        m += 1


def launch_move(t: Tables, layer: int, buffers_SB: torch.Tensor, nbytes: int, ahead: int, programs: int, piece: int = PIECE,
                tile: int = TILE, warps: int = WARPS) -> None:
    """See `move_naive`; records are read at home_LE's addresses."""
    move_pieces[(programs,)](t.where_LE, t.home_LE, t.slot_LS, t.queue_LS, t.count_L, t.claim_LE, t.taken_LS, t.done_LS, t.step, buffers_SB,
                             layer, ahead, E=t.where_LE.shape[1], S=t.slot_LS.shape[1], NBYTES=nbytes, STRIDE=buffers_SB.stride(0),
                             PIECE=piece, TILE=tile, num_warps=warps)
