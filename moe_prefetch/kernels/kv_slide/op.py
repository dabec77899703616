"""`moe_prefetch::kv_slide`: a step of a cache of fixed size, but for the encoding of what leaves its window."""

from __future__ import annotations

import torch

from ...errors import ShapeError
from .naive import Slide, slide_naive

# Whether `fused` has been compared with the law on a GPU (tests and benchmarks/generate.py do it); else the law runs there too.
PROVEN = True


def _kv_slide(
    ring_k: torch.Tensor, ring_v: torch.Tensor, sink_k: torch.Tensor, sink_v: torch.Tensor, pool: torch.Tensor, blank: torch.Tensor,
    table: torch.Tensor, spare: torch.Tensor, length: torch.Tensor, stored: torch.Tensor, now: torch.Tensor, out_k: torch.Tensor,
    out_v: torch.Tensor, runs: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int,
) -> None:  # fmt: skip
    s = Slide(ring_k, ring_v, sink_k, sink_v, pool, blank, table, spare, length, stored, now)
    if PROVEN and ring_k.device.type == "cuda":
        from .fused import slide

        return slide(s, out_k, out_v, runs, k, v, window)
    return slide_naive(s, out_k, out_v, runs, k, v, window)


_LIBRARY = torch.library.Library("moe_prefetch", "FRAGMENT")
_LIBRARY.define(
    "kv_slide(Tensor(a!) ring_k, Tensor(b!) ring_v, Tensor(c!) sink_k, Tensor(d!) sink_v, Tensor(e!) pool, Tensor blank, Tensor table, "
    "Tensor spare, Tensor(f!) length, Tensor(g!) stored, Tensor(h!) now, Tensor(i!) out_k, Tensor(j!) out_v, Tensor(k!) runs, Tensor k, "
    "Tensor v, int window) -> ()"
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("kv_slide", _kv_slide, _key)


@torch.library.register_fake("moe_prefetch::kv_slide", lib=_LIBRARY)
def _(*args):
    return None


def kv_slide(s: Slide, k_BNTd: torch.Tensor, v_BNTd: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take tokens; returns K and V [T, B, N, d] and runs [T, B, 4] to encode, see `slide_naive`. The ring must have `window` slots and
    room for twice T. Raises ShapeError when it has not, or where tokens do not fit it; nothing has been written then."""
    B, N, R, dk = s.ring_k.shape
    T, dv = k_BNTd.shape[2], s.ring_v.shape[3]
    if tuple(k_BNTd.shape) != (B, N, T, dk) or tuple(v_BNTd.shape) != (B, N, T, dv) or R < window + 2 * T:
        raise ShapeError(f"K {tuple(k_BNTd.shape)}, V {tuple(v_BNTd.shape)} for a ring of {R} and a window of {window}", where="kv_slide",
                         expected=f"{(B, N, T, dk)}, {(B, N, T, dv)}, at most {(R - window) // 2} tokens", do="prefill longer prompts")
    out_k, out_v = s.ring_k.new_empty(T, B, N, dk), s.ring_v.new_empty(T, B, N, dv)
    runs = s.table_BP.new_empty(T, B, 4)
    torch.ops.moe_prefetch.kv_slide.default(*s, out_k, out_v, runs, k_BNTd.detach(), v_BNTd.detach(), window)
    return out_k, out_v, runs
