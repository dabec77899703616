"""The FP16 window of a batch: the last columns of K and V, in two buffers that tokens are appended to in place."""

from __future__ import annotations

import torch

from ..kernels.kv_take.op import kv_take

SPARE = 8  # slots behind the window: so many tokens come in before it is moved to the front again
STEP = 128  # of the sizes of a window that is not full yet: a long one must not cost more than the tokens it holds
WASTE = 16  # more slots than this without use are given back


class Window:
    """Columns [first, end) of FP16 buffers [B, N, slots, d]; those behind are room for tokens to come.

    size  columns it holds between two steps once it is full
    """

    def __init__(self, batch: int, heads: int, k_dim: int, v_dim: int, size: int, device: torch.device | str) -> None:
        self.size = size
        self.fill(*(torch.zeros(batch, heads, 0, d, dtype=torch.float16, device=device) for d in (k_dim, v_dim)))

    def fill(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Hold these columns, FP16 [B, N, n, d], and no others."""
        self.buffer_k, self.buffer_v, self.first, self.end = k, v, 0, k.shape[2]

    @property
    def k(self) -> torch.Tensor:
        return self.buffer_k[:, :, self.first : self.end]

    @property
    def v(self) -> torch.Tensor:
        return self.buffer_v[:, :, self.first : self.end]

    @property
    def columns(self) -> int:
        return self.end - self.first

    def append(self, k_BNTd: torch.Tensor, v_BNTd: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take T tokens (see `kv_take` for counts). Returns them as they lie here."""
        T = k_BNTd.shape[2]
        if self.end + T > self.buffer_k.shape[2]:
            self._resize(T)
        kv_take(self.buffer_k, self.buffer_v, counts, k_BNTd, v_BNTd, self.end)
        self.end += T
        return self.buffer_k[:, :, self.end - T : self.end], self.buffer_v[:, :, self.end - T : self.end]

    def keep(self, columns: int) -> None:
        """Forget all but the newest; memory is given back when that leaves far more than a step takes."""
        self.first = self.end - columns
        if self._too_large(columns):
            self._resize(0)

    def crop(self, count: int) -> None:
        """Forget the newest."""
        self.end = max(self.first, self.end - count)

    def select(self, rows: torch.Tensor) -> None:
        self.buffer_k, self.buffer_v = self.buffer_k[rows], self.buffer_v[rows]

    def _slots(self, columns: int) -> int:
        # Few sizes, since kernels are compiled for each: steps up to a window, and some more for a long draft.
        if columns > self.size:
            return self.size + -(-(columns - self.size) // WASTE) * WASTE + SPARE
        slots = 64 if columns <= 64 else -(-columns // STEP) * STEP
        return (self.size if slots + 64 >= self.size else slots) + SPARE

    def _too_large(self, columns: int) -> bool:
        return self.buffer_k.shape[2] > self._slots(columns) + WASTE

    def _resize(self, more: int) -> None:
        """Move to the front, into other buffers where these do not fit, so that `more` columns have room."""
        n, old = self.columns, (self.k, self.v)
        if n + more > self.buffer_k.shape[2] or self._too_large(n + more):
            new = [x.new_zeros(*x.shape[:2], self._slots(n + more), x.shape[3]) for x in old]
        else:
            # The places overlap.
            new, old = [self.buffer_k, self.buffer_v], (old[0].clone(), old[1].clone())
        for target, source in zip(new, old, strict=True):
            target[:, :, :n] = source
        self.fill(*new)
        self.end = n

    def nbytes(self) -> int:
        return self.buffer_k.untyped_storage().nbytes() + self.buffer_v.untyped_storage().nbytes()
