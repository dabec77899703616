"""A rank's block for exchanges on a device: flags, and for each of two turns four planes that kernels read in place.

ids and weights of all senders' rows, the rows, and what comes back. Slots are the senders' own tokens in order, so nobody counts: a slot
that does not come has masked ids. A sender's slice of a plane starts at a multiple of 16 bytes, a plane at one of 128.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import ShapeError
from .message import LINE

OUT, BACK, ARRIVED = 0, 1, 2  # flags of a sender, a line each; the first two as in `distributed.health`
KINDS = 3
# Words of a rank's own state, int64: the last exchange that is done; programs of the running launches that have finished; nanoseconds
# waited for ranks that had not arrived, and for rows and results of those that had, since the start; ranks that did not come, a bit each.
NUMBER, PUT_DONE, GIVE_DONE, LATE, MOVED, FAILED = range(6)
STATE = 8


@dataclass(frozen=True, slots=True)
class Planes:
    """`ranks` senders of `slots` tokens, rows of `hidden` numbers of `dtype`, `top_k` experts each; unreduced: a row back for each."""

    ranks: int
    slots: int
    hidden: int
    top_k: int
    dtype: torch.dtype
    unreduced: bool = False

    def __post_init__(self) -> None:
        if min(self.ranks, self.slots, self.hidden, self.top_k) < 1 or self.top_k > 64 or self.hidden * self.dtype.itemsize % 16:
            raise ShapeError(f"planes for {self.ranks} ranks of {self.slots} rows of {self.hidden} {self.dtype}, {self.top_k} experts each",
                             where="dispatch", expected="positive sizes, rows of a multiple of 16 bytes, at most 64 experts a token",
                             do="use dispatch mode host")

    @property
    def back_rows(self) -> int:
        """Rows that come back for a token."""
        return self.top_k if self.unreduced else 1

    def _sizes(self) -> tuple[int, int, int, int]:
        pairs, row = self.slots * self.top_k, self.slots * self.hidden * self.dtype.itemsize
        return 8 * pairs, 4 * pairs, row, row * self.back_rows

    def offsets(self, turn: int) -> tuple[int, int, int, int]:
        """Bytes at which ids, weights, rows and results start."""
        at, out = KINDS * self.ranks * LINE, []
        sizes = [-(-self.ranks * s // LINE) * LINE for s in self._sizes()]
        at += turn * sum(sizes)
        for size in sizes:
            out.append(at)
            at += size
        return tuple(out)  # type: ignore[return-value]

    @property
    def nbytes(self) -> int:
        return 2 * self.offsets(1)[0] - self.offsets(0)[0]

    def views(self, block: torch.Tensor, turn: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids int64 [R slots, K], weights FP32 [R slots, K], rows [R slots, D], results [R, slots, rows back, D] of a uint8 block."""
        rows, flat = self.ranks * self.slots, []
        for at, size, dtype in zip(self.offsets(turn), self._sizes(), (torch.int64, torch.float32, self.dtype, self.dtype), strict=True):
            flat.append(block[at : at + self.ranks * size].view(dtype))
        return (flat[0].view(rows, self.top_k), flat[1].view(rows, self.top_k), flat[2].view(rows, self.hidden),
                flat[3].view(self.ranks, self.slots, self.back_rows, self.hidden))
