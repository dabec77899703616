"""transformers: attach to a model through its own registries and hooks; nothing is patched.

Experts come in through `ExpertsInterface`, the residual stream through forward hooks, the KV cache through `Cache` layers. Families:
Qwen2-MoE, Mixtral, Qwen3-MoE (one class of decoder layer with `post_attention_layernorm` and `mlp.{gate,experts}`).
"""
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface
from torch import nn

from moe_prefetch.config import KVConfig
from moe_prefetch.errors import SessionError, UnsupportedModelError
from moe_prefetch.probes.probe import GateSpec
from moe_prefetch.seam import ExpertTaps, Listener, Taps, open_model, register_host

IMPLEMENTATION = "moe_prefetch"

# model_type -> how its router chooses.
FAMILIES = {"qwen2_moe": "softmax_topk", "qwen3_moe": "softmax_topk", "mixtral": "softmax_topk"}


@dataclass(frozen=True)
class _Served:
    taps: ExpertTaps
    layer: int


# Which session serves an experts module. One function is registered for the process, so two models in it never meet.
_SERVED: weakref.WeakKeyDictionary[nn.Module, _Served] = weakref.WeakKeyDictionary()


def _experts_forward(module: nn.Module, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    served = _SERVED.get(module)
    if served is None:
        # A model that shares its config object with an attached one is told to use our name too: give it its own computation.
        return type(module).forward.__wrapped__(module, hidden_TD, ids_TK, weights_TK)  # type: ignore[attr-defined]
    return served.taps.experts(served.layer, hidden_TD, ids_TK, weights_TK, module.act_fn)


ExpertsInterface.register(IMPLEMENTATION, _experts_forward)


class TransformersModel:
    """One model with MoE layers, seen through transformers (`seam.HostModel`)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.family = getattr(model.config, "model_type", type(model).__name__)
        self.base = model.base_model
        found = [m for m in self.base.modules() if hasattr(m, "experts") and hasattr(m, "gate")]
        if self.family not in FAMILIES:
            has = found or any(hasattr(m, "experts") for m in self.base.modules())
            raise UnsupportedModelError(f"{self.family} {'is an MoE family that is not supported yet' if has else 'has no MoE layers'}",
                                        where=type(model).__name__, expected=f"one of {', '.join(FAMILIES)}",
                                        do="use a supported family" if has else "load an MoE model; dense models need no expert prefetch")
        self.blocks: list[nn.Module] = [layer for layer in self.base.layers if hasattr(layer.mlp, "experts")]
        if not self.blocks:
            raise UnsupportedModelError(f"this {self.family} has no MoE layers", where=type(model).__name__,
                                        expected="at least one sparse layer", do="check num_experts and mlp_only_layers in its config")
        experts = self.blocks[0].mlp.experts
        if not isinstance(getattr(experts, "gate_up_proj", None), nn.Parameter):
            raise UnsupportedModelError("its expert weights are not plain parameters", where=f"{type(model).__name__}, {type(experts).__name__}",
                                        expected="gate_up_proj [E, 2F, D] and down_proj [E, D, F]", do="load it without quantisation")
        if experts.gate_up_proj.is_meta:
            raise SessionError("the model's experts are not in memory: a session is attached already", where=type(model).__name__,
                               do="detach it first")
        self.num_layers, self.num_experts = len(self.blocks), experts.gate_up_proj.shape[0]
        self.gates = [self._gate(b) for b in self.blocks]
        self._originals: list[tuple[nn.Module, str, nn.Parameter, torch.Size, tuple[int, ...]]] = []

    def _gate(self, block: nn.Module) -> GateSpec:
        gate, norm = block.mlp.gate, block.post_attention_layernorm
        return GateSpec(weight_ED=gate.weight.detach(), norm_D=norm.weight.detach(), norm_eps=norm.variance_epsilon, top_k=gate.top_k,
                        kind=FAMILIES[self.family])

    # experts' memory ------------------------------------------------------------------------------------------------
    def tensors(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        experts = self.blocks[layer].mlp.experts
        return {"gate_up": experts.gate_up_proj.detach()[expert], "down": experts.down_proj.detach()[expert]}

    def release(self) -> None:
        for block in self.blocks:
            module = block.mlp.experts
            for name in ("gate_up_proj", "down_proj"):
                original = getattr(module, name)
                self._originals.append((module, name, original, original.shape, original.stride()))
                # On `meta`, so that saving or moving the model now fails loudly instead of writing nothing.
                setattr(module, name, nn.Parameter(torch.empty_like(original, device="meta"), requires_grad=original.requires_grad))
                original.data = torch.empty(0, dtype=original.dtype)

    def restore(self, read: Callable[[int, int], dict[str, torch.Tensor]]) -> None:
        fresh = [torch.empty_strided(shape, stride, dtype=p.dtype) for _, _, p, shape, stride in self._originals]
        for layer in range(self.num_layers):
            for expert in range(self.num_experts):
                parts = read(layer, expert)
                fresh[2 * layer][expert].copy_(parts["gate_up"])
                fresh[2 * layer + 1][expert].copy_(parts["down"])
        for (module, name, original, _, _), data in zip(self._originals, fresh, strict=True):
            original.data = data
            setattr(module, name, original)
        self._originals = []

    # taps -----------------------------------------------------------------------------------------------------------
    def _hook(self, taps: Taps, kv: KVConfig | None) -> list[torch.utils.hooks.RemovableHandle]:
        """Forward hooks that call `taps`; with `kv`, new caches get our layers."""
        handles, entered = [], [False]

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            tokens = args[0] if args else kwargs.get("input_ids")
            tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
            taps.step_begin(tokens.shape[0], tokens.shape[0] * tokens.shape[1])
            entered[0] = True
            return (args, self._with_cache(kwargs, kv)) if kv is not None else None

        def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # Called after an exception too, also one from `step_begin` itself: then no step is open.
            if entered[0]:
                entered[0] = False
                taps.step_end()

        def tap(call: Callable[[int, torch.Tensor], None], layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                hidden = args[0] if args else kwargs["hidden_states"]
                call(layer, hidden.detach().reshape(-1, hidden.shape[-1]))

            return hook

        handles.append(self.base.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(self.base.register_forward_hook(end, always_call=True))
        for layer, block in enumerate(self.blocks):
            handles.append(block.register_forward_pre_hook(tap(taps.residual, layer), with_kwargs=True))
            handles.append(block.post_attention_layernorm.register_forward_pre_hook(tap(taps.moe_input, layer), with_kwargs=True))
        return handles

    def _with_cache(self, kwargs: dict[str, Any], kv: KVConfig) -> dict[str, Any]:
        """Give an empty DynamicCache our layers, in place (the caller keeps its object); make a cache where the model would make one."""
        if kv.format == "fp16" and not kv.layers:
            return kwargs
        from moe_prefetch.integrations.transformers_cache import make_cache

        cache = kwargs.get("past_key_values")
        use = kwargs.get("use_cache")
        if cache is None and (self.model.config.use_cache if use is None else use):
            return {**kwargs, "past_key_values": make_cache(self.model.config, kv)}
        if type(cache) is DynamicCache and cache.get_seq_length() == 0:
            cache.layers = make_cache(self.model.config, kv).layers
            cache.layer_class_to_replicate = None
        return kwargs

    def install(self, taps: ExpertTaps, kv: KVConfig) -> Callable[[], None]:
        if any(b.mlp.experts in _SERVED for b in self.blocks):
            raise SessionError("a session is attached to this model already", where=type(self.model).__name__, do="detach it first")
        before = self.model.config._experts_implementation
        handles = self._hook(taps, kv)
        try:
            self.model.set_experts_implementation(IMPLEMENTATION)
            for layer, block in enumerate(self.blocks):
                _SERVED[block.mlp.experts] = _Served(taps, layer)
        except BaseException:
            for handle in handles:
                handle.remove()
            raise

        def undo() -> None:
            for handle in handles:
                handle.remove()
            for block in self.blocks:
                _SERVED.pop(block.mlp.experts, None)
            self.model.set_experts_implementation(before)

        return undo

    @contextlib.contextmanager
    def observe(self, listener: Listener) -> Iterator[None]:
        """Call `listener` on every forward pass while the context is open. The model computes as it always does."""
        handles = self._hook(listener, None)

        def routed(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
                listener.routed(layer, output[0].detach(), output[2].detach())

            return hook

        handles += [b.mlp.gate.register_forward_hook(routed(i)) for i, b in enumerate(self.blocks)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Host:
    name = "transformers"

    def open(self, model: Any) -> TransformersModel:
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedModelError(f"{type(model).__name__} is no PreTrainedModel", where="attach", expected="a model loaded by transformers",
                                        do="pass the model itself, not a pipeline or a wrapper")
        return TransformersModel(model)


register_host("transformers", _Host())


def gates(model: Any) -> list[GateSpec]:
    """Every MoE layer's router and norm, by MoE layer index. Raises UnsupportedModelError."""
    return open_model(model).gates


def observe(model: Any, listener: Listener) -> contextlib.AbstractContextManager[None]:
    """Call `listener` on every forward pass while the context is open. Raises UnsupportedModelError."""
    return open_model(model).observe(listener)
