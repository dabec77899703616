"""Taps of a running model, gathered by a listener (`seam.Listener`): what traces record and the online loop learns from."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import SessionError
from .trainer import Taps


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward pass: its taps, the router's choices ids_TLK int64, and start_T bool, True where a sequence begins."""

    taps: Taps
    ids_TLK: torch.Tensor
    start_T: torch.Tensor


class Collector:
    """Hands every forward pass's taps to `consume` once the pass has ended; holds one pass at a time, on the model's device.

    Hidden states are kept in `dtype` (the model's own by default). `limit` caps the tokens taken of a pass, the first ones. A pass with
    several tokens per sequence is taken for whole sequences; one with a single token each (decoding) begins none.
    """

    def __init__(self, layers: int, consume: Callable[[Step], None], *, limit: int | None = None, dtype: torch.dtype | None = None) -> None:
        self.layers, self.consume, self.limit, self.dtype = layers, consume, limit, dtype
        self._parts: dict[tuple[str, int], torch.Tensor] = {}
        self._length = 1

    def _keep(self, kind: str, layer: int, value: torch.Tensor, dtype: torch.dtype | None) -> None:
        value = value.detach().reshape(-1, value.shape[-1])[: self.limit]
        # A copy: a model may reuse or change the buffer after the hook.
        self._parts[kind, layer] = value.to(dtype or value.dtype, copy=True)

    def step_begin(self, batch: int, tokens: int) -> None:
        self._parts.clear()
        self._length = max(1, tokens // max(1, batch))

    def residual(self, layer: int, hidden_TD: torch.Tensor) -> None:
        self._keep("residual", layer, hidden_TD, self.dtype)

    def moe_input(self, layer: int, hidden_TD: torch.Tensor) -> None:
        self._keep("moe_input", layer, hidden_TD, self.dtype)

    def routed(self, layer: int, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> None:
        self._keep("logits", layer, logits_TE, torch.float32)
        self._keep("ids", layer, ids_TK, torch.int64)

    def step_end(self) -> None:
        parts, self._parts = self._parts, {}
        if ("moe_input", 0) not in parts:
            return  # a pass that broke off before its first MoE layer has nothing to tell
        try:
            residual, moe_input, logits, ids = (torch.stack([parts[kind, i] for i in range(self.layers)])
                                                for kind in ("residual", "moe_input", "logits", "ids"))
        except KeyError as e:
            raise SessionError(f"the pass ended without the tap {e.args[0]}", where="Collector", expected=f"taps of {self.layers} layers",
                               do="run the model whole, in eager mode: Python hooks do not fire inside a CUDA graph") from e
        start = torch.zeros(logits.shape[1], dtype=torch.bool)
        if self._length > 1:
            start[:: self._length] = True
        self.consume(Step(Taps(residual, moe_input, logits), ids.transpose(0, 1), start))
