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
# waited for ranks that had not arrived, and for rows and results of those that had, since the start; ranks that did not come, a bit each;
# the exchange that runs (by words).
NUMBER, PUT_DONE, GIVE_DONE, LATE, MOVED, FAILED, NOW = range(7)
STATE = 8
WORDS_UP_TO = 512 << 10  # bytes of a rank's rows


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
        turn = self.offsets(1)[0] - self.offsets(0)[0]
        return self.offsets(0)[0] + turn + 2 * self.turn_bytes if self.by_words else self.offsets(0)[0] + 2 * turn

    # by words -----------------------------------------------------------------------------------------------------------------
    @property
    def by_words(self) -> bool:
        """Whether messages are small enough for words that carry the exchange's number (`fused_words`). Then planes are there once, since
        no other rank writes them, and words twice, by turns of the number."""
        return self.slots * self.hidden * self.dtype.itemsize <= WORDS_UP_TO

    @property
    def words(self) -> int:
        """Of 4 bytes in a row."""
        return self.hidden * self.dtype.itemsize // 4

    @property
    def keys(self) -> int:
        """Words for a slot's ids, and for its weights."""
        return max(2, 1 << (self.top_k - 1).bit_length())

    @property
    def _word_sizes(self) -> list[int]:
        slots = self.ranks * self.slots
        return [-(-8 * n // LINE) * LINE for n in (2 * self.keys * slots, self.words * slots, self.words * slots * self.back_rows)]

    @property
    def turn_bytes(self) -> int:
        return sum(self._word_sizes)

    @property
    def word_offsets(self) -> tuple[int, int, int]:
        """Bytes at which ids and weights, rows, and results start, of even exchanges; odd ones are `turn_bytes` behind."""
        at, sizes = self.offsets(1)[0], self._word_sizes
        return at, at + sizes[0], at + sizes[0] + sizes[1]

    def views(self, block: torch.Tensor, turn: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids int64 [R slots, K], weights FP32 [R slots, K], rows [R slots, D], results [R, slots, rows back, D] of a uint8 block."""
        rows, flat = self.ranks * self.slots, []
        for at, size, dtype in zip(self.offsets(turn), self._sizes(), (torch.int64, torch.float32, self.dtype, self.dtype), strict=True):
            flat.append(block[at : at + self.ranks * size].view(dtype))
        return (flat[0].view(rows, self.top_k), flat[1].view(rows, self.top_k), flat[2].view(rows, self.hidden),
                flat[3].view(self.ranks, self.slots, self.back_rows, self.hidden))
