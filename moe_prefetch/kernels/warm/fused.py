"""`warm` in Triton: a few warps ask for records, 8 KiB an instruction (PTX `cp.async.bulk.prefetch.L2`), and do not wait for them."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kv_fp4.fused import ASM
from ..plan.naive import Tables
from .naive import LIKELY

PROGRAMS, BULK = 16, 8192
C_LIKELY = tl.constexpr(LIKELY)


@triton.jit(do_not_specialize=["layer"])
def warm_records(where_ptr, home_ptr, link_ptr, prob_ptr, chosen_ptr, layer, E: tl.constexpr, EP: tl.constexpr, MOST: tl.constexpr,
                 NBYTES: tl.constexpr, BULK: tl.constexpr):
    e, lane = tl.arange(0, EP), tl.arange(0, 32)
    on = e < E
    prob = tl.load(prob_ptr + e, mask=on, other=-1)
    where = tl.load(where_ptr + layer * E + e, mask=on, other=0)
    near = (tl.load(link_ptr + layer * E + e, mask=on, other=0) < 0) | (where != tl.load(home_ptr + layer * E + e, mask=on, other=0))
    likely = (on & near & (prob >= C_LIKELY) & (tl.load(prob_ptr) >= 0)).to(tl.int32)
    turn = tl.cumsum(likely, 0)
    chosen = tl.where(turn <= MOST, likely, 0)
    if tl.program_id(0) == 0:
        tl.store(chosen_ptr + e, chosen, mask=on)
    # There is no L2 to ask under the interpreter.
    count = tl.sum(chosen, 0) if ASM else 0
    n = layer * 0
    while n < count:
        address = tl.sum(tl.where((chosen > 0) & (turn == n + 1), where, 0), 0)
        at = (tl.program_id(0) * 32).to(tl.int64) * BULK
        while at < NBYTES:
            begin = at + lane.to(tl.int64) * BULK
            left = tl.minimum(tl.maximum(NBYTES - begin, 0), BULK).to(tl.int32)
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, $2; }", "=r,l,r",
                [address + begin, left], dtype=tl.int32, is_pure=False, pack=1)
            at += tl.num_programs(0) * 32 * BULK
        n += 1


def launch(t: Tables, layer: int, prob_E: torch.Tensor, chosen_E: torch.Tensor, most: int, nbytes: int) -> None:
    """See `warm_naive`; records have `nbytes`, a multiple of 16."""
    experts = t.where_LE.shape[1]
    warm_records[(PROGRAMS,)](t.where_LE, t.home_LE, t.link_LE, prob_E, chosen_E, layer, E=experts,
                              EP=max(32, triton.next_power_of_2(experts)), MOST=most, NBYTES=nbytes, BULK=BULK, num_warps=1)
