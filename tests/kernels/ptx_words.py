"""Runs straight PTX of one operand, `$1`, on 32-bit words: what decodes codes to pairs of 16-bit numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch


def signed(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


def times(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The products of both halves of words, in FP64 and then rounded once."""

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, y = (signed(v).contiguous().view(dtype).double() for v in torch.broadcast_tensors(a, b))
        return (x * y).to(dtype).view(torch.int32).to(torch.int64) & 0xFFFFFFFF

    return run


OPS: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda a: a, "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b, "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF, "mul.rn.bf16x2": times(torch.bfloat16), "mul.rn.f16x2": times(torch.float16)}


def run(text: str, words: torch.Tensor) -> torch.Tensor:
    """`$0` as int32, of any shape."""
    regs = {"$1": words.to(torch.int64) & 0xFFFFFFFF}
    for line in filter(None, (t.strip() for t in text.strip(" {}").split(";"))):
        op, _, rest = line.partition(" ")
        if op != ".reg":
            to, *sources = [s.strip() for s in rest.split(",")]
            regs[to] = OPS[op](*(regs[s] if s in regs else torch.tensor(int(s, 0)) for s in sources))
    return signed(regs["$0"])
