"""What one rank sends another, byte by byte: one block of static size, however many rows it carries.

Parts start at multiples of 128 bytes. A message out: header, ids, weights, scales (fp8 only), rows. A message back: rows alone, in the
slots that the rows came in. Rows from `count` on are whatever was there before; nobody reads them.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from ...errors import ShapeError

LINE, GROUP = 128, 128
COUNT, MORE, LAYER = 0, 1, 2  # words of the header
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Message:
    """Layout for rows of `hidden` numbers of `dtype`, at most `capacity` a message, each with up to `top_k` experts.

    fp8      rows travel as E4M3 with an FP32 scale per 128 numbers; they come back in `dtype` all the same
    unreduced  rows come back one for each expert, [capacity, top_k, hidden], in place of their weighted sum
    """

    capacity: int
    hidden: int
    top_k: int
    dtype: torch.dtype
    fp8: bool = False
    unreduced: bool = False

    def __post_init__(self) -> None:
        if min(self.capacity, self.hidden, self.top_k) < 1 or self.dtype not in DTYPES:
            raise ShapeError(f"messages of {self.capacity} rows of {self.hidden} {self.dtype} with {self.top_k} experts", where="dispatch",
                             expected="positive sizes; float32, bfloat16 or float16", do="take the sizes from the model")

    def _out(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        rows = (self.capacity, self.hidden)
        parts = {"header": (torch.int64, (LINE // 8,)), "ids": (torch.int32, (self.capacity, self.top_k)),
                 "weights": (torch.float32, (self.capacity, self.top_k))}
        if self.fp8:
            parts["scales"] = (torch.float32, (self.capacity, -(-self.hidden // GROUP)))
        return {**parts, "rows": (torch.float8_e4m3fn if self.fp8 else self.dtype, rows)}

    def offsets(self) -> dict[str, int]:
        """Where each part of a message out starts, in bytes; under "" its whole size."""
        at, found = 0, {}
        for name, (dtype, shape) in self._out().items():
            found[name] = at
            at += -(-prod(shape) * dtype.itemsize // LINE) * LINE
        return {**found, "": at}

    @property
    def out_bytes(self) -> int:
        return self.offsets()[""]

    @property
    def back_bytes(self) -> int:
        return -(-self.capacity * self.hidden * (self.top_k if self.unreduced else 1) * self.dtype.itemsize // LINE) * LINE

    def out_views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Parts of a message out in a uint8 buffer, without a copy."""
        at = self.offsets()
        return {name: buffer[at[name] : at[name] + prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for name, (dtype, shape) in self._out().items()}

    def back_rows(self, buffer: torch.Tensor) -> torch.Tensor:
        """Rows of a message back, [capacity, hidden], or [capacity, top_k, hidden] unreduced."""
        shape = (self.capacity, self.top_k, self.hidden) if self.unreduced else (self.capacity, self.hidden)
        return buffer[: prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)
