"""What a probe has to beat, always in the same table: popularity, previous token, recent load, routing-ids ridge, stale gate, oracle.

Every predictor maps what is known at the tap to `score_TE` (higher is likelier, comparable within a token) and works on a `Routing`:
expert ids alone, which is all that public traces hold. The stale gate needs hidden states and is `RoutingProbe(gates)` untrained.
All are vectorised over the tokens of a trace, causal in the token's own sequence, and deterministic.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Router decisions of consecutive tokens. ids_TLK int64; start_T bool is True at the first token of each sequence."""

    ids_TLK: torch.Tensor
    start_T: torch.Tensor
    experts: int

    def __post_init__(self) -> None:
        ids = self.ids_TLK
        if ids.dim() != 3 or self.start_T.shape != ids.shape[:1] or self.start_T.dtype != torch.bool:
            raise ShapeError(f"ids {tuple(ids.shape)} with starts {tuple(self.start_T.shape)}", where="Routing",
                             expected="ids [T, L, K] and bool starts [T]", do="read the trace with traces.py")
        if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < self.experts):
            raise ShapeError(f"expert ids from {int(ids.min())} to {int(ids.max())}", where="Routing", expected=f"0 to {self.experts - 1}",
                             do="the trace is damaged or belongs to another model")
        if ids.shape[2] > 1 and bool((ids.sort(2).values.diff(dim=2) == 0).any()):
            raise ShapeError("a token has the same expert twice", where="Routing", expected="a router's top-k", do="the trace is damaged")

    @staticmethod
    def from_lengths(ids_TLK: torch.Tensor, lengths: torch.Tensor, experts: int) -> Routing:
        """`lengths` are the tokens of each sequence in order; they must add up to T, which is not 0. Raises ShapeError."""
        for name, t, dim in (("ids", ids_TLK, 3), ("lengths", lengths, 1)):
            if t.dim() != dim or not t.numel() or t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
                raise ShapeError(f"{name} are {t.dtype} {tuple(t.shape)}", where="Routing", expected=f"whole numbers in {dim} dimensions",
                                 do="check what wrote the trace")
        start = torch.zeros(ids_TLK.shape[0], dtype=torch.bool)
        ends = lengths.long().cumsum(0)
        if bool((lengths <= 0).any()) or int(ends[-1]) != ids_TLK.shape[0]:
            raise ShapeError(f"sequence lengths add up to {int(ends[-1])}", where="Routing", expected=f"{ids_TLK.shape[0]} tokens",
                             do="the trace is damaged")
        start[0] = True
        start[ends[:-1]] = True
        return Routing(ids_TLK.long(), start, experts)

    @property
    def layers(self) -> int:
        return int(self.ids_TLK.shape[1])

    def hot(self, layer: int) -> torch.Tensor:
        """Multi-hot routing of one layer, float32 [T, E]."""
        ids = self.ids_TLK[:, layer]
        return torch.zeros(ids.shape[0], self.experts).scatter_(1, ids, 1.0)

    def previous(self, layer: int) -> torch.Tensor:
        """Multi-hot routing of the token before, zeros at a sequence's start: float32 [T, E]."""
        hot = self.hot(layer)
        shifted = torch.zeros_like(hot)
        shifted[1:] = hot[:-1]
        shifted[self.start_T] = 0.0
        return shifted


Predictor = Callable[[Routing, int, int], torch.Tensor]  # (routing, target layer, horizon) -> score_TE


def popularity(train: Routing) -> Predictor:
    """How often the training trace used each expert of the layer."""
    share_LE = torch.stack([train.hot(layer).mean(0) for layer in range(train.layers)])

    def predict(routing: Routing, layer: int, horizon: int) -> torch.Tensor:
        return share_LE[layer].expand(routing.ids_TLK.shape[0], -1)

    return predict


def previous_token(train: Routing) -> Predictor:
    """The experts that the sequence's last token used in the target layer; ties and first tokens go by popularity."""
    popular = popularity(train)

    def predict(routing: Routing, layer: int, horizon: int) -> torch.Tensor:
        return routing.previous(layer) + popular(routing, layer, horizon)

    return predict


def recent_load(train: Routing, decay: float = 0.9) -> Predictor:
    """Exponential average of the target layer's routing over the tokens before, from popularity at a sequence's start."""
    popular = popularity(train)

    def predict(routing: Routing, layer: int, horizon: int) -> torch.Tensor:
        hot, prior = routing.hot(layer), popular(routing, layer, horizon)
        score = torch.empty_like(hot)
        load = prior[0]
        for t, fresh in enumerate(routing.start_T.tolist()):
            load = prior[t] if fresh else decay * load + (1 - decay) * hot[t - 1]
            score[t] = load
        return score

    return predict


def ids_ridge(train: Routing, strength: float = 100.0, window: int = 1) -> Predictor:
    """Ridge regression from the routing of the tap layer to that of the target layer, one per (layer, horizon), solved on first use.

    `window` > 1 adds the routing of the layers before the tap. At horizon 1 and 2 the tap is the MoE input of layer `target - horizon`,
    whose own routing follows from it at once; at horizon 0 the last routing known is that of `target - 1`.
    """
    weights: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def features(routing: Routing, layer: int, horizon: int) -> torch.Tensor:
        tap = layer - max(horizon, 1)
        if tap < 0:
            raise ShapeError(f"layer {layer} has no tap at horizon {horizon}", where="ids_ridge", do="ask for a later layer")
        return torch.cat([routing.hot(i) for i in range(max(0, tap - window + 1), tap + 1)], 1)

    def predict(routing: Routing, layer: int, horizon: int) -> torch.Tensor:
        if (layer, horizon) not in weights:
            weights[layer, horizon] = _solve(features(train, layer, horizon), train.hot(layer), strength)
        w, b = weights[layer, horizon]
        return features(routing, layer, horizon) @ w + b

    return predict


def ids_context(train: Routing, strength: float = 100.0, window: int = 8, decays: tuple[float, ...] = (0.8, 0.98)) -> Predictor:
    """The forecast for traces without hidden states: the ridge of `ids_ridge` over the routing of up to `window` layers up to the tap, with
    what the sequence did before at the target layer: its last token, and its recent load at two speeds. The window says what the token
    is, the load what the text is about; the load is what carries over to a domain the fit has not seen.
    """
    weights: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def features(routing: Routing, layer: int, horizon: int) -> torch.Tensor:
        tap = layer - max(horizon, 1)
        if tap < 0:
            raise ShapeError(f"layer {layer} has no tap at horizon {horizon}", where="ids_context", do="ask for a later layer")
        loads = [_load(routing, layer, decay) for decay in decays]
        return torch.cat([*(routing.hot(i) for i in range(max(0, tap - window + 1), tap + 1)), routing.previous(layer), *loads], 1)

    def predict(routing: Routing, layer: int, horizon: int) -> torch.Tensor:
        if (layer, horizon) not in weights:
            weights[layer, horizon] = _solve(features(train, layer, horizon), train.hot(layer), strength)
        w, b = weights[layer, horizon]
        return features(routing, layer, horizon) @ w + b

    return predict


def _load(routing: Routing, layer: int, decay: float) -> torch.Tensor:
    """Exponential average over the tokens before, zero at a sequence's start: float32 [T, E]."""
    hot = routing.hot(layer)
    out, load = torch.zeros_like(hot), torch.zeros(routing.experts)
    for t, fresh in enumerate(routing.start_T.tolist()):
        load = torch.zeros(routing.experts) if fresh else decay * load + (1 - decay) * hot[t - 1]
        out[t] = load
    return out


def _solve(x_TF: torch.Tensor, y_TE: torch.Tensor, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Ridge regression with an unpunished intercept: weights [F, E] and intercept [E]."""
    x, y = x_TF.double(), y_TE.double()
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = x - mean_x, y - mean_y
    w = torch.linalg.solve(x.T @ x + strength * torch.eye(x.shape[1], dtype=torch.float64), x.T @ y)
    return w.float(), (mean_y - mean_x @ w).float()


def oracle() -> Predictor:
    """The truth."""
    return lambda routing, layer, horizon: routing.hot(layer)
