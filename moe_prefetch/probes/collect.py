"""Taps of a running model, gathered by a listener (`seam.Listener`): what traces record and the online loop learns from."""
from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import SessionError
from .trainer import Taps


class Collector:
    """Hands every step's taps to `consume` once the step has ended; holds one step at a time.

    `limit` caps the tokens taken of a step (the first ones). Tensors are kept in `dtype` on the model's device.
    """

    def __init__(self, layers: int, consume: Callable[[Taps], None], *, limit: int | None = None, dtype: torch.dtype | None = None) -> None:
        self.layers, self.consume, self.limit, self.dtype = layers, consume, limit, dtype
        self._parts: dict[tuple[str, int], torch.Tensor] = {}

    def _keep(self, kind: str, layer: int, value: torch.Tensor, dtype: torch.dtype | None) -> None:
        value = value.detach().reshape(-1, value.shape[-1])[: self.limit]
        # A copy: a model may reuse or change the buffer after the hook.
        self._parts[kind, layer] = value.to(dtype or value.dtype, copy=True)

    def step_begin(self, sequences: int, tokens: int) -> None:
        self._parts.clear()

    def residual(self, layer: int, hidden_TD: torch.Tensor) -> None:
        self._keep("residual", layer, hidden_TD, self.dtype)

    def moe_input(self, layer: int, hidden_TD: torch.Tensor) -> None:
        self._keep("moe_input", layer, hidden_TD, self.dtype)

    def routed(self, layer: int, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> None:
        self._keep("logits", layer, logits_TE, None)

    def step_end(self) -> None:
        if not self._parts:
            return
        try:
            stacked = [torch.stack([self._parts[kind, i] for i in range(self.layers)]) for kind in ("residual", "moe_input", "logits")]
        except KeyError as e:
            raise SessionError(f"the step ended without the tap {e.args[0]}", where="Collector", expected=f"taps of {self.layers} layers",
                               do="check that the model ran whole, in eager mode: Python hooks do not fire inside a CUDA graph") from e
        finally:
            self._parts.clear()
        self.consume(Taps(*stacked))
