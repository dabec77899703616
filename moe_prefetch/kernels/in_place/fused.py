"""Memory at an address, read past L1 by as many programs as asked for; folded to a word each, or stored as it is read."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .naive import BLOCK


@triton.jit(do_not_specialize=["PIECES"])
def pull(where_ptr, out_ptr, word_ptr, PIECES, STORE: tl.constexpr, BLOCK: tl.constexpr):
    """PIECES of 16 bytes from the address that `where` holds. The address comes from memory, so a captured graph follows it."""
    source = tl.multiple_of(tl.load(where_ptr).to(tl.pointer_type(tl.int32)), 16)
    words = PIECES.to(tl.int64) * 4
    acc = tl.zeros((BLOCK,), tl.int32)
    turn = tl.program_id(0).to(tl.int64)
    while turn * BLOCK < words:
        i = turn * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(source + i, mask=i < words, other=0, cache_modifier=".cg")
        if STORE:
            tl.store(out_ptr + i, x, mask=i < words)
        else:
            acc ^= x
        turn += tl.num_programs(0)
    if not STORE:
        tl.store(word_ptr + tl.program_id(0), tl.xor_sum(acc, 0))


def launch(where: torch.Tensor, out: torch.Tensor, found: torch.Tensor, words: int, programs: int, store: bool) -> None:
    pull[(programs,)](where, out, found, words // 4, STORE=store, BLOCK=BLOCK, num_warps=4)
