"""What a host framework must offer, and what it is offered: the seam between the library and `integrations/`.

An integration registers a `Host` when it is imported; `attach` imports the one that matches the model by the name of the package
that its class comes from. Nothing else in the library knows a framework.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from .errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from .config import KVConfig
    from .kernels.expert_mlp.naive import How
    from .probes.forecast import Forecaster
    from .probes.probe import GateSpec


class Taps(Protocol):
    """Called by the host as the model runs; layers are MoE layer indices. Tensors may be read during the call only."""

    def step_begin(self, batch: int, tokens: int) -> None:
        """A forward pass starts: `batch` sequences, `tokens` in all."""

    def residual(self, layer: int, hidden_TD: torch.Tensor) -> None:
        """The residual stream that enters the decoder layer of MoE layer `layer`."""

    def moe_input(self, layer: int, hidden_TD: torch.Tensor) -> None:
        """The residual stream after that layer's attention, before its pre-MoE norm; with the shared expert's output added where the model
        computes one before the routed experts (`GateSpec.shared`): it is there already, and most of what the block will add."""

    def step_end(self) -> None:
        """The forward pass ended, normally or by an exception."""


class Listener(Taps, Protocol):
    """Watches a model without changing it."""

    def routed(self, layer: int, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> None:
        """What the router computed and chose."""


class ExpertTaps(Taps, Protocol):
    """Takes the place of the experts."""

    def experts(self, layer: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor,
                act: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The routed experts' weighted sum, [T, D]."""


class HostModel(Protocol):
    """One model seen through its framework. Reading it changes nothing."""

    family: str
    num_layers: int
    num_experts: int
    gates: list[GateSpec]
    how: How  # its own experts are computed

    def tensors(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        """`gate_up` [2 F, D] and `down` [D, F] of one expert: views of the model's own memory."""

    def share(self, forecaster: Forecaster) -> Forecaster:
        """A forecaster over every expert of the gates, as one over the `num_experts` that this process holds."""

    def check_free(self) -> None:
        """Raises SessionError when a session is attached already or the weights are not in memory."""

    def check_kv(self, kv: KVConfig) -> None:
        """Raises ConfigError, ShapeError or ArtefactError where the model's cache can't be kept as `kv` says."""

    def release(self) -> None:
        """Give the experts' memory back, and refuse to save or load them; `tensors` is not called until `restore`.

        When it is interrupted, `restore` mends what was done.
        """

    def restore(self, read: Callable[[int, int], dict[str, torch.Tensor]]) -> None:
        """Put weights back into the same parameters; `read(layer, expert)` gives an expert's parts, valid until the next call."""

    def install(self, taps: ExpertTaps, kv: KVConfig) -> None:
        """Call `taps` from now on, and give new caches the KV format. Raises SessionError when another session came first."""

    def uninstall(self) -> None:
        """Undo `install`, also one that was interrupted half way; calling it again does nothing."""

    def observe(self, listener: Listener) -> AbstractContextManager[None]:
        """Call `listener` while the context is open."""


class Host(Protocol):
    name: str

    def open(self, model: Any) -> HostModel:
        """Raises UnsupportedModelError when the model has no MoE layers or is of a family that is not supported yet."""


_HOSTS: dict[str, Host] = {}
_MODULES = {"transformers": "moe_prefetch.integrations.transformers", "deepspeed": "moe_prefetch.integrations.deepspeed"}


def register_host(package: str, host: Host) -> None:
    """Called by an integration at import: models whose class comes from `package` are its own."""
    _HOSTS[package] = host


def open_model(model: Any) -> HostModel:
    """The model seen through its framework. Raises UnsupportedModelError."""
    roots = [cls.__module__.partition(".")[0] for cls in type(model).__mro__]
    for root in roots:
        if root in _MODULES and root not in _HOSTS:
            importlib.import_module(_MODULES[root])
        if root in _HOSTS:
            return _HOSTS[root].open(model)
    raise UnsupportedModelError(f"no integration knows {type(model).__module__}.{type(model).__qualname__}", where="attach",
                                expected=f"a model of {', '.join(sorted(_MODULES))}",
                                do="pass the model itself, no wrapper such as torch.compile's; or import its framework's integration first")
