"""Small integers between host and device: what a decode step needs of them, once for all layers and without waiting."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch


class DeviceInts:
    """int32 tensors by their numbers: layers that ask for the same ones get the same tensor, which nobody writes.

    A copy to a GPU starts from pinned memory, so the host does not wait. The last `keep` tensors are kept.
    """

    def __init__(self, keep: int = 64) -> None:
        self.keep = keep
        self._made: OrderedDict[tuple[object, ...], torch.Tensor] = OrderedDict()
        self._read: tuple[torch.Tensor, int, Any] | None = None

    def __call__(self, numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device | str) -> torch.Tensor:
        """int32 [n], or [m, n] of m rows of equal length."""
        device = torch.device(device)
        key = (device, *(tuple(x) if isinstance(x, Sequence) else x for x in numbers))
        made = self._made.get(key)
        if made is None:
            pin = device.type == "cuda" and len(numbers) > 0
            made = torch.tensor(list(numbers), dtype=torch.int32, pin_memory=pin).to(device, non_blocking=True)
            self._made[key] = made
            if len(self._made) > self.keep:
                self._made.popitem(last=False)
        else:
            self._made.move_to_end(key)
        return made

    def read(self, tensor: torch.Tensor) -> Any:
        """`tensor.tolist()`; layers that are handed the same one in turn have it read once."""
        if tensor.is_inference():
            # It would not tell that it was written to.
            return tensor.tolist()
        known = self._read
        if known is None or known[0] is not tensor or known[1] != tensor._version:
            known = self._read = (tensor, tensor._version, tensor.tolist())
        return known[2]
