"""`moe_prefetch::kv_take`: new tokens into the FP16 window, in place."""

from __future__ import annotations

import torch

from ...errors import ShapeError
from .naive import take_naive

# Whether `fused` has been compared with the law on a GPU (benchmarks/generate.py does it); else the law runs there too.
PROVEN = True


def _kv_take(
    buffer_k: torch.Tensor, buffer_v: torch.Tensor, counts: torch.Tensor, k_BNTd: torch.Tensor, v_BNTd: torch.Tensor, at: int
) -> None:
    if PROVEN and buffer_k.device.type == "cuda":
        from .fused import take

        return take(buffer_k, buffer_v, counts, k_BNTd, v_BNTd, at)
    return take_naive(buffer_k, buffer_v, counts, k_BNTd, v_BNTd, at)


# Not by `custom_op`: for an op that writes its arguments that costs the host 20 us a call, and this one is called by every layer.
_LIBRARY = torch.library.Library("moe_prefetch", "FRAGMENT")
_LIBRARY.define("kv_take(Tensor(a!) buffer_k, Tensor(b!) buffer_v, Tensor(c!) counts, Tensor k, Tensor v, int at) -> ()")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("kv_take", _kv_take, _key)


@torch.library.register_fake("moe_prefetch::kv_take", lib=_LIBRARY)
def _(buffer_k, buffer_v, counts, k, v, at):
    return None


def kv_take(
    buffer_k: torch.Tensor, buffer_v: torch.Tensor, counts: torch.Tensor, k_BNTd: torch.Tensor, v_BNTd: torch.Tensor, at: int
) -> None:
    """Write tokens to slots from `at` on; see `take_naive`. Raises ShapeError when they do not fit; nothing has been written then."""
    for what, buffer, x in (("K", buffer_k, k_BNTd), ("V", buffer_v, v_BNTd)):
        B, N, R, d = buffer.shape
        T = k_BNTd.shape[2]
        if tuple(x.shape) != (B, N, T, d) or buffer.dtype != torch.float16 or not buffer.is_contiguous() or not 0 <= at <= R - T:
            raise ShapeError(
                f"{what} {tuple(x.shape)} for slots from {at} of {buffer.dtype} {tuple(buffer.shape)}",
                where="kv_take",
                expected=f"{(B, N, T, d)} and a contiguous FP16 buffer with room",
                do="make the window larger first",
            )
    torch.ops.moe_prefetch.kv_take.default(buffer_k, buffer_v, counts, k_BNTd.detach(), v_BNTd.detach(), at)
