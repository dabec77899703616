"""`moe_prefetch::in_place`: read memory where it is, or copy it by a kernel (on a GPU; elsewhere the law, from the memory's twin)."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import ShapeError
from .naive import read


@torch.library.custom_op("moe_prefetch::in_place", mutates_args=("out", "found"))
def _in_place(where: torch.Tensor, out: torch.Tensor, found: torch.Tensor, nbytes: int, store: bool,
              memory: Sequence[torch.Tensor]) -> None:
    if where.device.type == "cuda":
        from . import fused

        fused.launch(where, out.view(torch.int32), found, nbytes // 4, len(found), store)
        return
    mine, copy = read(memory[0][:nbytes], len(found))
    if store:
        out[:nbytes].copy_(copy)
    else:
        found.copy_(mine)


@_in_place.register_fake
def _(where, out, found, nbytes, store, memory):
    return None


def in_place(where: torch.Tensor, nbytes: int, found: torch.Tensor, *, out: torch.Tensor | None = None,
             memory: Sequence[torch.Tensor] = ()) -> None:
    """Read `nbytes` (a multiple of 16) from the address in `where` (int64 [1], a multiple of 16) by len(found) programs.

    found int32 [programs] gets each program's exclusive or of words; with `out` (uint8, at least nbytes) the bytes go there instead, and
    found stays as it is. `memory`: the twin of the address, one uint8 tensor, needed on a CPU. Raises ShapeError.
    """
    target = torch.empty(16, dtype=torch.uint8, device=where.device) if out is None else out
    faults = [
        (f"an address of {where.dtype} {tuple(where.shape)}", "int64 [1]", where.dtype == torch.int64 and where.shape == (1,)),
        (f"{nbytes} bytes", "a multiple of 16", nbytes % 16 == 0 and nbytes >= 0),
        (f"results in {found.dtype} {tuple(found.shape)}", "int32 [programs]",
         found.dtype == torch.int32 and found.dim() == 1 and len(found) > 0),
        (f"{target.numel()} bytes to write to", f"uint8, {nbytes}, a multiple of 16",
         target.dtype == torch.uint8 and target.is_contiguous() and (out is None or target.numel() >= nbytes) and target.numel() % 16 == 0),
        ("no memory to read", "the tensor at the address, on a CPU", where.device.type == "cuda" or (len(memory) == 1
                                                                                                  and memory[0].numel() >= nbytes)),
    ]
    for what, expected, right in faults:
        if not right:
            raise ShapeError(what, where="in_place", expected=expected, do="pass whole 16-byte pieces of uint8 memory")
    _in_place(where, target, found, nbytes, out is not None, list(memory))
