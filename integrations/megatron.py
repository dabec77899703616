"""Megatron-core 0.16.1 to 0.19: our router and MoE layer by spec, and taps of a model as it trains.

    spec = with_prefetch(get_gpt_layer_local_spec(num_experts=64, normalization="RMSNorm"))

`with_prefetch` takes the spec of a layer, a block or an MTP block and returns a copy whose MoE layers and routers are subclasses of what
stood there. They override steps (`route`, `gating`) and never `forward`, since the 1F1B overlap of Megatron calls the steps itself. Until
something is attached (`megatron_fit.ProbeFit`, `observe`) they compute what their parents compute and nothing else.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from moe_prefetch.errors import ConfigError, SessionError, UnsupportedModelError
from moe_prefetch.probes.probe import GateSpec
from moe_prefetch.seam import Listener

PROBES = "probes."  # where a probe's tensors stand in a checkpoint, under their MoE layer


class Passenger(Protocol):
    """What an MoE layer carries: it hears of the router and has tensors in the checkpoint."""

    def routed(self, moe: nn.Module, logits_TE: torch.Tensor, map_TE: torch.Tensor, padding_T: torch.Tensor | None) -> None: ...

    def shared(self, moe: nn.Module, out_SBD: torch.Tensor) -> None: ...

    def layer_state(self, moe: nn.Module) -> dict[str, torch.Tensor]: ...

    def load_layer_state(self, moe: nn.Module, state: dict[str, torch.Tensor]) -> None: ...


def recomputing() -> bool:
    """True inside a backward pass: what runs there is an activation checkpoint's second forward, seen before."""
    return torch._C._current_graph_task_id() != -1


class RouterSteps:
    """Mixed into a router: keeps the last logits while somebody is listening."""

    listening = False
    logits: torch.Tensor | None = None

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        logits = super().gating(input)  # type: ignore[misc]
        if self.listening:
            self.logits = logits.detach()
        return logits


class MoESteps:
    """Mixed into an MoE layer: tells its passengers what was routed, and carries their tensors through checkpoints."""

    passengers: tuple[Passenger, ...] = ()

    def route(self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        out = super().route(hidden_states, padding_mask, *args, **kwargs)  # type: ignore[misc]
        router = self.router  # type: ignore[attr-defined]
        if self.passengers and router.logits is not None:
            logits, router.logits = router.logits, None
            if not recomputing():
                padding = None if padding_mask is None else padding_mask.detach().reshape(-1)
                for passenger in self.passengers:
                    passenger.routed(self, logits.reshape(-1, logits.shape[-1]), out[1].detach(), padding)  # type: ignore[arg-type]
        return out

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> Any:
        out = super().shared_experts_compute(hidden_states)  # type: ignore[misc]
        if out is not None and not recomputing():
            for passenger in self.passengers:
                passenger.shared(self, out.detach())  # type: ignore[arg-type]
        return out

    def board(self, passenger: Passenger) -> None:
        self.passengers, self.router.listening = (*self.passengers, passenger), True  # type: ignore[attr-defined]

    def leave(self, passenger: Passenger) -> None:
        self.passengers = tuple(p for p in self.passengers if p is not passenger)
        self.router.listening, self.router.logits = bool(self.passengers), None  # type: ignore[attr-defined]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for passenger in self.passengers:
            destination.update({prefix + PROBES + k: v for k, v in passenger.layer_state(self).items()})  # type: ignore[arg-type]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        mine = {k: state_dict.pop(k) for k in list(state_dict) if k.startswith(prefix + PROBES)}
        state = {k[len(prefix + PROBES) :]: v for k, v in mine.items()}
        for passenger in self.passengers:
            if state:
                passenger.load_layer_state(self, state)  # type: ignore[arg-type]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]


class PrefetchTopKRouter(RouterSteps, TopKRouter):
    """TopKRouter that can be listened to."""


class PrefetchMoELayer(MoESteps, MoELayer):
    """MoELayer that can carry probes. 0.16.1 hands its process groups to `MoELayer` alone, not to subclasses; then the global ones are
    taken, or those given to `with_prefetch`."""


@functools.cache
def _with_steps(base: type, steps: type, plain: type, ready: type) -> type:
    return ready if base is plain else base if issubclass(base, steps) else type("Prefetch" + base.__name__, (steps, base), {})


def _router(router: Any) -> Any:
    if isinstance(router, functools.partial):
        return functools.partial(_router(router.func), *router.args, **router.keywords)
    if not (isinstance(router, type) and issubclass(router, TopKRouter)):
        raise UnsupportedModelError(f"its router is {router!r}", where="with_prefetch", expected="TopKRouter or a subclass of it",
                                    do="probes forecast top-k routers only")
    return _with_steps(router, RouterSteps, TopKRouter, PrefetchTopKRouter)


class _Converter:
    def __init__(self, pg_collection: Any) -> None:
        self.extra = {} if pg_collection is None else {"pg_collection": pg_collection}
        self.count = 0
        self._done: dict[int, tuple[Any, Any]] = {}

    def __call__(self, node: Any) -> Any:
        # A block's spec names one layer spec many times: it stays one object. The original is kept, so that its id is not reused.
        if id(node) not in self._done:
            self._done[id(node)] = (node, self._convert(node))
        return self._done[id(node)][1]

    def _convert(self, node: Any) -> Any:
        if isinstance(node, ModuleSpec):
            if isinstance(node.module, type) and issubclass(node.module, MoELayer):
                return dataclasses.replace(node, module=self._moe(node.module), params={**node.params, **self.extra},
                                           submodules=self._submodules(node.submodules))
            inner = self(node.submodules)
            return node if inner is node.submodules else dataclasses.replace(node, submodules=inner)
        if isinstance(node, functools.partial):
            if isinstance(node.func, type) and issubclass(node.func, MoELayer):
                keywords = {**node.keywords, **self.extra, "submodules": self._submodules(node.keywords.get("submodules"))}
                return functools.partial(self._moe(node.func), *node.args, **keywords)
            return node
        if isinstance(node, list | tuple):
            new = [self(n) for n in node]
            return node if all(a is b for a, b in zip(new, node)) else type(node)(new)
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            old = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
            changed = {k: new for k, v in old.items() if (new := self(v)) is not v}
            return dataclasses.replace(node, **changed) if changed else node
        return node

    def _moe(self, base: type) -> type:
        self.count += 1
        return _with_steps(base, MoESteps, MoELayer, PrefetchMoELayer)

    def _submodules(self, submodules: Any) -> Any:
        if not dataclasses.is_dataclass(submodules) or isinstance(submodules, type) or not hasattr(submodules, "router"):
            raise UnsupportedModelError(f"its MoE layer has the submodules {submodules!r}", where="with_prefetch", expected="MoESubmodules",
                                        do="pass a spec as get_gpt_layer_local_spec makes it")
        return dataclasses.replace(submodules, router=_router(submodules.router))


def with_prefetch(spec: Any, *, pg_collection: Any = None) -> Any:
    """A copy of a spec whose MoE layers and routers are ours; the original is left alone.

    spec           a layer's `ModuleSpec`, `TransformerBlockSubmodules`, an MTP block's submodules, or a list of these
    pg_collection  the process groups the model is built with, where they are not the global ones; needed for 0.16.1 only, which does not
                   pass them to a subclass of MoELayer

    Raises UnsupportedModelError when there is no MoE layer in it, or one with a router that is no TopKRouter; ConfigError.
    """
    if pg_collection is not None and not isinstance(pg_collection, ProcessGroupCollection):
        raise ConfigError(f"pg_collection is a {type(pg_collection).__name__}", where="with_prefetch", expected="a ProcessGroupCollection",
                          do="pass the groups that the model is built with, or leave it out")
    convert = _Converter(pg_collection)
    out = convert(spec)
    if not convert.count:
        raise UnsupportedModelError("this spec has no MoE layer", where="with_prefetch", expected="a spec made with num_experts",
                                    do="pass the spec of the MoE layers")
    return out


# the model, seen from outside -----------------------------------------------------------------------------------------------
def moe_layers(chunk: nn.Module) -> list[TransformerLayer]:
    """The decoder layers of one chunk whose MoE layer is ours, in order; layers for multi-token prediction are left out. Raises
    UnsupportedModelError."""
    if not isinstance(chunk, nn.Module):
        raise UnsupportedModelError(f"a {type(chunk).__name__} is no model", where="Megatron-core",
                                    expected="a GPTModel, or the list of its chunks", do="pass the model")
    mtp = [name + "." for name, m in chunk.named_modules() if isinstance(m, MultiTokenPredictionLayer)]
    found = [m for name, m in chunk.named_modules() if isinstance(m, TransformerLayer) and isinstance(m.mlp, MoELayer)
             and not name.startswith(tuple(mtp))]
    if any(not isinstance(m.mlp, MoESteps) for m in found):
        raise UnsupportedModelError("its MoE layers are Megatron's own", where=type(chunk).__name__,
                                    expected="a model built from with_prefetch(spec)", do="convert the spec before the model is built")
    for layer in found:
        groups = getattr(layer, "pg_collection", None)
        if groups is not None and groups.ep is not layer.mlp.ep_group:
            raise UnsupportedModelError("its MoE layers use other process groups than its attention", where=f"layer {layer.layer_number}",
                                        expected="one pg_collection", do="pass it to with_prefetch as well: this Megatron-core does not")
    return sorted(found, key=lambda m: m.layer_number)


def gate(layer: TransformerLayer) -> GateSpec:
    """The router and norm of a layer as they are now: views of the model's own weights. Raises UnsupportedModelError."""
    c, router, norm = layer.config, layer.mlp.router, layer.pre_mlp_layernorm
    faults = []
    function = c.moe_router_score_function
    groups, chosen = c.moe_router_num_groups or 1, c.moe_router_group_topk or c.moe_router_num_groups or 1
    if isinstance(norm, IdentityOp):
        faults.append("there is no norm of its own before its experts, so no RMSNorm to read")
    elif c.normalization != "RMSNorm":
        faults.append(f"the norm before its experts is {c.normalization}, no RMSNorm; give normalization=\"RMSNorm\" to TransformerConfig "
                      "and to the layer spec (Megatron's default is LayerNorm)")
    if function not in ("softmax", "sigmoid") and (groups > 1 or router.expert_bias is not None):
        faults.append(f"score function {function} with groups or a bias")
    if chosen < groups and c.moe_router_topk // chosen != (2 if function == "sigmoid" else 1):
        faults.append(f"groups ranked by their best {c.moe_router_topk // chosen} experts")
    if getattr(router, "bias", None) is not None and function == "sigmoid":
        faults.append("a sigmoid router with a bias of its own")
    if c.cuda_graph_impl != "none":
        faults.append("CUDA graphs, in which no Python code runs")
    if faults:
        raise UnsupportedModelError("; ".join(faults), where=f"layer {layer.layer_number}",
                                    expected="RMSNorm and a top-k router that probes know", do="change the model's configuration")
    bias = router.expert_bias if router.expert_bias is not None else getattr(router, "bias", None)
    if getattr(router, "qb_beta", None) is not None:
        bias = -router.qb_beta  # quantile balancing selects on logits - beta
    weight = norm.weight.detach() + (1.0 if c.layernorm_zero_centered_gamma else 0.0)
    # Softmax before or after the top-k changes weights, never the choice; what transformers calls softmax, top-k, normalise is here the
    # latter. One name for both, so that a probe of one framework is a probe of the other.
    kind = "sigmoid_group" if function == "sigmoid" else "softmax_topk"
    return GateSpec(router.weight.detach(), weight, c.layernorm_epsilon, c.moe_router_topk, kind, None if bias is None else bias.detach(),
                    groups, chosen, float(c.moe_router_topk_scaling_factor or 1.0), shared=adds_shared(layer))


def adds_shared(layer: TransformerLayer) -> bool:
    """Whether the layer's taps for horizons 1 and 2 hold its shared expert's output: where it is there before the router speaks."""
    return bool(layer.mlp.use_shared_expert and not layer.mlp.shared_expert_overlap)


def plain_logits(layer: TransformerLayer, logits_TE: torch.Tensor) -> torch.Tensor:
    """Router logits without a bias of the linear map, which a `GateSpec` holds as selection bias."""
    bias = getattr(layer.mlp.router, "bias", None)
    return logits_TE if bias is None else logits_TE - bias.detach()


def tap(layer: TransformerLayer, residual: Callable[[torch.Tensor], None], moe_input: Callable[[torch.Tensor], None]) -> list[Any]:
    """Hooks on the layer's two norms: every path through Megatron calls these modules, 1F1B overlap included. Returns their handles."""

    def hook(call: Callable[[torch.Tensor], None]) -> Callable[..., None]:
        def run(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not recomputing():
                call(args[0].detach())

        return run

    pairs = ((layer.input_layernorm, residual), (layer.pre_mlp_layernorm, moe_input))
    return [norm.register_forward_pre_hook(hook(call)) for norm, call in pairs]


def chunks_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    return list(model) if isinstance(model, list | tuple | nn.ModuleList) else [model]  # type: ignore[list-item]


def gates(model: nn.Module | Sequence[nn.Module]) -> list[GateSpec]:
    """Routers and norms of this rank's MoE layers, in order. Raises UnsupportedModelError."""
    return [gate(layer) for chunk in chunks_of(model) for layer in moe_layers(chunk)]


@contextlib.contextmanager
def observe(model: nn.Module, listener: Listener) -> Iterator[None]:
    """Call `listener` (`probes.collect.Collector`, say) on every forward pass of a whole model, not a pipeline stage, while the context is
    open. Raises UnsupportedModelError, and SessionError when the listener is not told of every layer."""
    layers = moe_layers(model)
    watcher = _Watcher(layers, listener)
    handles: list[Any] = []
    for i, layer in enumerate(layers):
        handles += tap(layer, functools.partial(watcher.residual, i), functools.partial(watcher.moe_input, i))
        layer.mlp.board(watcher)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers:
            layer.mlp.leave(watcher)


class _Watcher:
    """A Listener as a passenger; a pass begins at the first MoE layer and ends with the last one's router."""

    def __init__(self, layers: list[TransformerLayer], listener: Listener) -> None:
        self.layers, self.listener = layers, listener
        self.index = {id(layer.mlp): (i, layer) for i, layer in enumerate(layers)}

    def _flat(self, value: torch.Tensor) -> torch.Tensor:
        """Megatron's tokens lie sequence first; a listener wants whole sequences one after the other."""
        return value.reshape(*self.shape, value.shape[-1]).transpose(0, 1).reshape(-1, value.shape[-1])

    def residual(self, layer: int, hidden_SBD: torch.Tensor) -> None:
        if layer == 0:
            self.shape = hidden_SBD.shape[:2]
            self.listener.step_begin(hidden_SBD.shape[1], hidden_SBD.shape[0] * hidden_SBD.shape[1])
        self.listener.residual(layer, self._flat(hidden_SBD))

    def moe_input(self, layer: int, hidden_SBD: torch.Tensor) -> None:
        if adds_shared(self.layers[layer]):
            self.before = hidden_SBD
        else:
            self.listener.moe_input(layer, self._flat(hidden_SBD))

    def shared(self, moe: nn.Module, out_SBD: torch.Tensor) -> None:
        i, layer = self.index[id(moe)]
        if adds_shared(layer):
            self.listener.moe_input(i, self._flat(self.before + out_SBD))

    def routed(self, moe: nn.Module, logits_TE: torch.Tensor, map_TE: torch.Tensor, padding_T: torch.Tensor | None) -> None:
        i, layer = self.index[id(moe)]
        k = layer.config.moe_router_topk
        if int(map_TE.sum(-1).min()) != k:
            raise SessionError("a token has fewer experts than top-k: their capacity was full", where=f"MoE layer {i}",
                               do="observe without moe_expert_capacity_factor")
        ids_TK = torch.where(map_TE, logits_TE.float(), float("-inf")).topk(k, -1).indices
        self.listener.routed(i, self._flat(plain_logits(layer, logits_TE)), self._flat(ids_TK))
        if i == len(self.index) - 1:
            self.listener.step_end()

    def layer_state(self, moe: nn.Module) -> dict[str, torch.Tensor]:
        return {}

    def load_layer_state(self, moe: nn.Module, state: dict[str, torch.Tensor]) -> None: ...
