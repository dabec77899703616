"""Taps of a running model, gathered by a listener (`seam.Listener`): what traces record and the online loop learns from."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..errors import SessionError
from .targets import Taps, unit_rms


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward pass: its taps, the router's choices ids_TLK int64, and start_T bool, True where a sequence begins."""

    taps: Taps
    ids_TLK: torch.Tensor
    start_T: torch.Tensor

    def taps_with_past(self, eps: float | None) -> Taps:
        """The taps, and for each token the recent past of the residual; `eps` is that of the model's norms, None asks for no past."""
        if eps is None:
            return self.taps
        residual = self.taps.residual_LTD
        return replace(self.taps, past_LTD=recent_past(unit_rms(residual, eps), self.start_T).to(residual.dtype))


def recent_past(unit_LTD: torch.Tensor, start_T: torch.Tensor) -> torch.Tensor:
    """Sum over k >= 1 of 2^-k times the unit-RMS tap k tokens before, within a sequence; `start_T` is True where one begins. Any leading
    shape. While decoding it is one tensor a sequence and layer, zero at the start: past <- (past + unit_rms(tap)) / 2 after each token."""
    sequence_T = start_T.to(unit_LTD.device).cumsum(0)
    past = torch.zeros_like(unit_LTD)
    # What lies further back is below a bfloat16's rounding.
    for k in range(1, min(12, unit_LTD.shape[-2] - 1) + 1):
        same_T1 = (sequence_T[k:] == sequence_T[:-k]).unsqueeze(-1)
        past[..., k:, :] += torch.where(same_T1, unit_LTD[..., :-k, :], 0.0) * 0.5**k
    return past


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
