"""transformers: attach to a model through its own registries and hooks; nothing is patched.

Experts come in through `ExpertsInterface`, the residual stream through forward hooks, the KV cache through `Cache` layers. Families:
FAMILIES (one class of decoder layer with `post_attention_layernorm` and `mlp.{gate,experts}`).
"""
from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from moe_prefetch.config import KVConfig
from moe_prefetch.errors import SessionError, UnsupportedModelError
from moe_prefetch.integrations.watch import Still, set_meanwhile
from moe_prefetch.kernels.expert_mlp.naive import How
from moe_prefetch.kv.codec import OutlierStats
from moe_prefetch.probes.forecast import Forecaster
from moe_prefetch.probes.probe import GateSpec
from moe_prefetch.seam import ExpertTaps, Listener, Taps, open_model, register_host

log = logging.getLogger(__name__)

IMPLEMENTATION = "moe_prefetch"
NAMES = ("gate_up_proj", "down_proj")

# model_type -> how its router chooses.
FAMILIES = dict.fromkeys(("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "deepseek_v2"), "softmax_topk") | dict.fromkeys(
    ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "dots1"), "sigmoid_group")


@dataclass(frozen=True)
class _Served:
    taps: weakref.ref[ExpertTaps]  # kept by the model's hooks: a registry that kept it would keep the model for ever
    layer: int


@dataclass(frozen=True)
class _Original:
    """A parameter whose memory was given back, and what it takes to make it again."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device
    inference: bool


# Which session serves an experts module. One function is registered for the process, so two models in it never meet.
_SERVED: weakref.WeakKeyDictionary[nn.Module, _Served] = weakref.WeakKeyDictionary()
_SERVED_LOCK = threading.Lock()
# Models that a fit learns beside: their weights must stay where they are.
FITTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


# Dynamo takes the registry's answer for the first layer for a constant, and would trace the session's locks and counters: eager, always.
@torch.compiler.disable
def _experts_forward(module: nn.Module, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    served = _SERVED.get(module)
    if served is not None and (taps := served.taps()) is not None:
        return taps.experts(served.layer, hidden_TD, ids_TK, weights_TK, module.act_fn)
    # A deep copy of an attached model carries our name along, but it is not attached.
    if module.gate_up_proj.is_meta:
        raise SessionError("this is a copy of an attached model: its experts are not in memory", where=type(module).__name__,
                           do="copy the model before it is attached, or after detach")
    return type(module).forward.__wrapped__(module, hidden_TD, ids_TK, weights_TK)  # type: ignore[attr-defined]


ExpertsInterface.register(IMPLEMENTATION, _experts_forward)


class TransformersModel:
    """One model with MoE layers, seen through transformers (`seam.HostModel`)."""

    _stats: OutlierStats | None = None  # the calibration of `kv`
    _warned = False

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
        for block in self.blocks:
            self._check_layout(block.mlp.experts)
        experts = self.blocks[0].mlp.experts
        self.num_layers, self.num_experts = len(self.blocks), experts.gate_up_proj.shape[0]
        self.gates = [self._gate(b) for b in self.blocks]
        self.how = How(experts.config._experts_implementation or "eager", self.gates[0].norm_D.dtype)
        self._originals: list[_Original] = []
        self._refusals: list[torch.utils.hooks.RemovableHandle | Still] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._configs: list[tuple[nn.Module, Any]] = []

    def _check_layout(self, experts: nn.Module) -> None:
        where = f"{type(self.model).__name__}, {type(experts).__name__}"
        # A subclass of Tensor (quantised, distributed) has no bytes that a record could hold.
        weights = [getattr(experts, name, None) for name in NAMES]
        if any(type(p) is not nn.Parameter or type(p.data) is not torch.Tensor for p in weights):
            raise UnsupportedModelError("its expert weights are not plain parameters", where=where,
                                        expected="gate_up_proj [E, 2F, D] and down_proj [E, D, F]",
                                        do="load it without quantisation or sharding")
        dispatched = hasattr(type(experts).forward, "__wrapped__") and hasattr(experts, "config")
        layout = [getattr(experts, k, None) for k in ("is_concatenated", "is_transposed", "has_bias", "has_gate")]
        # act(gate) * up: transformers gives this method to classes that have none of their own.
        gated = getattr(experts, "_apply_gate", None)
        if getattr(gated, "__module__", "") != ExpertsInterface.__module__:
            raise UnsupportedModelError("its experts have an _apply_gate of their own", where=where, expected="act(gate) * up",
                                        do="use a supported family")
        if not dispatched or layout != [True, False, False, True]:
            raise UnsupportedModelError("its experts are of another layout", where=where,
                                        expected="transformers' experts interface: gate and up "
                                        "concatenated, not transposed, without bias", do="use a supported family")

    def share(self, forecaster: Forecaster) -> Forecaster:
        return forecaster

    def check_free(self) -> None:
        where = type(self.model).__name__
        if any(b.mlp.experts in _SERVED for b in self.blocks):
            raise SessionError("a session is attached to this model already", where=where, do="detach it first")
        if self.model in FITTED:
            raise SessionError("a fit runs beside this model", where=where, do="finish() or stop() it first")
        if any(p.is_meta for p in self.base.parameters()):
            raise SessionError("the model's weights are not in memory", where=where, expected="weights",
                               do="load the model without offloading; if it is a copy of an attached model, copy it after detach")

    def _gate(self, block: nn.Module) -> GateSpec:
        gate, norm = block.mlp.gate, block.post_attention_layernorm
        bias_E = getattr(gate, "e_score_correction_bias", None)
        # DeepSeek-V2 has numbers of groups where it does not use them, too.
        grouped = getattr(gate, "num_group", None) is not None and getattr(gate, "topk_method", "") != "greedy"
        # The shared experts of the DeepSeek family come after the routed ones, too late for a tap.
        return GateSpec(weight_ED=gate.weight.detach(), norm_D=norm.weight.detach(), norm_eps=norm.variance_epsilon, top_k=gate.top_k,
                        kind=FAMILIES[self.family], bias_E=None if bias_E is None else bias_E.detach(),
                        n_group=gate.num_group if grouped else 1, topk_group=gate.topk_group if grouped else 1,
                        scaling=float(getattr(gate, "routed_scaling_factor", 1.0)), shared=hasattr(block.mlp, "shared_expert"))

    # experts' memory ------------------------------------------------------------------------------------------------
    def tensors(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        experts = self.blocks[layer].mlp.experts
        return {"gate_up": experts.gate_up_proj.detach()[expert], "down": experts.down_proj.detach()[expert]}

    def release(self) -> None:
        def refuse(module: nn.Module, *args: Any) -> None:
            raise SessionError("the experts of an attached model are not in memory", where=type(module).__name__,
                               do="detach before you save or load weights")

        pairs = [(b.mlp.experts, name) for b in self.blocks for name in NAMES]
        # Shapes first: two layers may share a parameter.
        self._originals = [_Original(m, n, p := getattr(m, n), p.shape, p.stride(), p.device, p.is_inference()) for m, n in pairs]
        for block in self.blocks:
            self._refusals.append(block.mlp.experts.register_state_dict_pre_hook(refuse))
            self._refusals.append(block.mlp.experts.register_load_state_dict_pre_hook(refuse))
        with torch.inference_mode(False):
            for o in self._originals:
                p = o.parameter
                # On `meta`, so that using or moving the model's own weights fails loudly.
                setattr(o.module, o.name, nn.Parameter(torch.empty(o.shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad))
            self._refusals.append(Still(self.model, self._originals[0].device))
            for o in self._originals:
                o.parameter.data = torch.empty(0, dtype=o.parameter.dtype, device=o.device)

    def restore(self, read: Callable[[int, int], dict[str, torch.Tensor]]) -> None:
        if not self._originals:
            return
        with torch.inference_mode(False):
            # All or nothing: until every record is read the parameters stay as they are.
            fresh = [torch.empty_strided(o.shape, o.stride, dtype=o.parameter.dtype, device=o.device) for o in self._originals]
            for layer in range(self.num_layers):
                for expert in range(self.num_experts):
                    parts = read(layer, expert)
                    fresh[2 * layer][expert].copy_(parts["gate_up"])
                    fresh[2 * layer + 1][expert].copy_(parts["down"])
            for o, data in zip(self._originals, fresh, strict=True):
                stand_in = getattr(o.module, o.name)
                if not set_meanwhile(self.model, o.name, stand_in, o.parameter) and stand_in.dtype != o.parameter.dtype:
                    log.warning("%s was converted to %s while attached; its experts come back as %s", type(self.model).__name__,
                                stand_in.dtype, o.parameter.dtype)
                o.parameter.data = data
                o.parameter.requires_grad_(stand_in.requires_grad)
                setattr(o.module, o.name, o.parameter)
        for handle in self._refusals:
            handle.remove()
        self._originals, self._refusals = [], []

    # taps -----------------------------------------------------------------------------------------------------------
    def _hook(self, taps: Taps, kv: KVConfig | None, handles: list[torch.utils.hooks.RemovableHandle]) -> None:
        """Forward hooks that call `taps`, noted in `handles` one by one; with `kv`, new caches get our layers."""
        thread, names = threading.local(), list(inspect.signature(self.base.forward).parameters)

        # Hooks are copied by deepcopy: each asks whether it still runs on its own module. Under torch.compile they run as they are.
        @torch.compiler.disable
        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if module is not self.base:
                return None
            # One entry per call of the model on this thread, innermost last: whether `step_begin` let it in.
            calls = thread.__dict__.setdefault("calls", [])
            calls.append(False)
            tokens = args[0] if args else kwargs.get("input_ids")
            tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
            # Without either, the model has its own words for it.
            batch, length = (0, 0) if tokens is None else tokens.shape[:2]
            taps.step_begin(batch, batch * length)
            calls[-1] = True
            named = dict(zip(names, args, strict=False))
            if kv is None or len(named) < len(args) or named.keys() & kwargs.keys():
                return None
            # By name, so that a cache given by place is found.
            return (), self._with_cache({**named, **kwargs}, kv)

        @torch.compiler.disable
        def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # Called after an exception too, also one from `step_begin` itself: then no step is open.
            if module is self.base and (calls := thread.__dict__.get("calls")) and calls.pop():
                taps.step_end()

        def tap(call: Callable[[int, torch.Tensor], None], layer: int, owner: nn.Module) -> Callable[..., None]:
            @torch.compiler.disable
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if module is owner:
                    hidden = args[0] if args else kwargs["hidden_states"]
                    call(layer, hidden.detach().reshape(-1, hidden.shape[-1]))

            return hook

        def tap_shared(layer: int, norm: nn.Module, mlp: nn.Module) -> tuple[Callable[..., None], Callable[..., None]]:
            before = threading.local()

            @torch.compiler.disable
            def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if module is norm:
                    before.hidden = args[0] if args else kwargs["hidden_states"]

            @torch.compiler.disable
            def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
                # Without the norm's input the block was called alone, outside a pass.
                if module is mlp.shared_expert and (hidden := before.__dict__.pop("hidden", None)) is not None:
                    hidden = hidden.detach()
                    # By its weight: calling the module would call its hooks, and the model is about to.
                    share = torch.sigmoid(nn.functional.linear(args[0].detach(), mlp.shared_expert_gate.weight))
                    taps.moe_input(layer, hidden.reshape(-1, hidden.shape[-1]) + share * output.detach())

            return keep, hook

        if kv is not None and (kv.format != "fp16" or kv.layers):
            from moe_prefetch.integrations.transformers_pages import serve

            handles.append(serve(self.model, kv))
        # First of all, so that `end` never answers for a call that another hook refused.
        handles.append(self.base.register_forward_pre_hook(begin, with_kwargs=True, prepend=True))
        handles.append(self.base.register_forward_hook(end, always_call=True))
        for layer, block in enumerate(self.blocks):
            norm = block.post_attention_layernorm
            handles.append(block.register_forward_pre_hook(tap(taps.residual, layer, block), with_kwargs=True))
            if not self.gates[layer].shared:
                handles.append(norm.register_forward_pre_hook(tap(taps.moe_input, layer, norm), with_kwargs=True))
                continue
            keep, hook = tap_shared(layer, norm, block.mlp)
            handles.append(norm.register_forward_pre_hook(keep, with_kwargs=True))
            handles.append(block.mlp.shared_expert.register_forward_hook(hook))

    def _with_cache(self, kwargs: dict[str, Any], kv: KVConfig) -> dict[str, Any]:
        """Give an empty DynamicCache our layers, in place (the caller keeps its object); make a cache where the model would make one."""
        if kv.format == "fp16" and not kv.layers:
            return kwargs
        from moe_prefetch.integrations.transformers_cache import PagedLayer, make_cache
        from moe_prefetch.integrations.transformers_pages import left_padding

        cache = kwargs.get("past_key_values")
        use = kwargs.get("use_cache")
        wanted = cache is None and (self.model.config.use_cache if use is None else use)
        if not wanted and (type(cache) is not DynamicCache or cache.get_seq_length()):
            # `cache` is continuous batching's (`generate_batch`).
            theirs = kwargs.get("cache") if cache is None else cache
            if theirs is not None and not self._warned and not any(isinstance(x, PagedLayer) for x in getattr(theirs, "layers", ())):
                self._warned = True
                log.warning("kv.format %s is not used where a call brings a cache of its own, here %s; give none, an empty DynamicCache, "
                            "or one of make_cache", kv.format, type(theirs).__name__)
            return kwargs
        made, mask = make_cache(self.model.config, kv, self._stats), kwargs.get("attention_mask")
        for layer in made.layers:
            layer.told = True  # by `check_kv`
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and any(left_padding(mask) or ()):
            made.set_padding(mask)
        if wanted:
            return {**kwargs, "past_key_values": made}
        cache.layers = made.layers
        cache.layer_class_to_replicate = None
        return kwargs

    def check_kv(self, kv: KVConfig) -> None:
        if kv.format == "fp16" and not kv.layers:
            return
        from moe_prefetch.integrations.transformers_attention import refuse_another_models
        from moe_prefetch.integrations.transformers_cache import PagedLayer, make_cache
        from moe_prefetch.integrations.transformers_pages import choose

        choose(self.model, kv)
        text = self.model.config.get_text_config(decoder=True)
        # Read and compared with the model once: caches are then made from its config.
        self._stats = None if kv.calibration is None else OutlierStats.load(kv.calibration)
        if self._stats is not None:
            refuse_another_models(self._stats, self.model, range(text.num_hidden_layers))
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        for layer in make_cache(self.model.config, kv, self._stats).layers:
            if isinstance(layer, PagedLayer):
                layer.layout(*(layer.latent, text.qk_rope_head_dim) if layer.latent else (dim, dim))

    def install(self, taps: ExpertTaps, kv: KVConfig) -> None:
        with _SERVED_LOCK:
            self.check_free()
            self._configs = [(b.mlp.experts, b.mlp.experts.config) for b in self.blocks]
            self._hook(taps, kv, self._handles)
            for layer, (experts, config) in enumerate(self._configs):
                # A copy for these modules alone: the model's own config may be shared with another model, and may be saved.
                experts.config = copy.copy(config)
                experts.config._experts_implementation = IMPLEMENTATION
                _SERVED[experts] = _Served(weakref.ref(taps), layer)

    def uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        for experts, config in self._configs:
            _SERVED.pop(experts, None)
            experts.config = config
        self._handles, self._configs = [], []

    @contextlib.contextmanager
    def observe(self, listener: Listener) -> Iterator[None]:
        """Call `listener` on every forward pass while the context is open. The model computes as it always does."""
        handles: list[torch.utils.hooks.RemovableHandle] = []

        def routed(layer: int) -> Callable[..., None]:
            @torch.compiler.disable
            def hook(module: nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
                if module is self.blocks[layer].mlp.gate:
                    listener.routed(layer, output[0].detach(), output[2].detach())

            return hook

        try:
            self._hook(listener, None, handles)
            handles += [b.mlp.gate.register_forward_hook(routed(i)) for i, b in enumerate(self.blocks)]
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Host:
    name = "transformers"

    def open(self, model: Any) -> TransformersModel:
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedModelError(f"{type(model).__name__} is no PreTrainedModel", where="attach",
                                        expected="a model loaded by transformers",
                                        do="pass the model itself, not a pipeline or a wrapper")
        return TransformersModel(model)


register_host("transformers", _Host())


def gates(model: Any) -> list[GateSpec]:
    """Every MoE layer's router and norm, by MoE layer index. Raises UnsupportedModelError."""
    return open_model(model).gates


def observe(model: Any, listener: Listener) -> contextlib.AbstractContextManager[None]:
    """Call `listener` on every forward pass while the context is open. Raises UnsupportedModelError."""
    return open_model(model).observe(listener)
