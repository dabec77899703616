"""Models whose experts DeepSpeed holds, as hosts of the library (`seam.HostModel`): AutoEP's layers and `deepspeed.moe.layer.MoE`.

Each rank holds a share of a layer's experts and computes whatever tokens its group sends.
"""
from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from deepspeed import comm
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from torch import nn

from moe_prefetch.config import KVConfig
from moe_prefetch.errors import ConfigError, SessionError, UnsupportedModelError
from moe_prefetch.integrations.deepspeed_experts import Handles, Held, MoEPrefetchPolicy, Weight
from moe_prefetch.integrations.deepspeed_formula import PROJECTIONS, Formula
from moe_prefetch.integrations.transformers import FAMILIES, TransformersModel
from moe_prefetch.probes.probe import GateSpec
from moe_prefetch.seam import ExpertTaps, Listener, Taps

# What has been tried inside DeepSpeed's engines; transformers alone has more (`integrations.transformers.FAMILIES`).
SERVED = ("qwen2_moe", "qwen3_moe", "mixtral")


def check_family(family: str, where: str) -> None:
    """Raises UnsupportedModelError."""
    if family not in SERVED:
        raise UnsupportedModelError(f"{family} is an MoE family that is not supported yet in a DeepSpeed engine", where=where,
                                    expected=f"one of {', '.join(SERVED)}", do="use a supported family, or attach to the model itself")


class AutoEPModel(Held, TransformersModel):
    """A transformers model whose MoE blocks AutoEP spread over an expert group (`deepspeed.initialize` with `expert_parallel`)."""

    def __init__(self, model: Any) -> None:
        self.model, self.base = model, model.base_model
        self.family = getattr(model.config, "model_type", type(model).__name__)
        check_family(self.family, type(model).__name__)
        self.blocks = [layer for layer in self.base.layers if type(layer.mlp) is AutoEPMoELayer]
        first = self.blocks[0].mlp
        for layer in (b.mlp for b in self.blocks):
            if layer.experts.activation != "swiglu" or layer.router.score_func != "softmax" or layer.router.num_expert_groups is not None:
                raise UnsupportedModelError("AutoEP was told to compute another function than the family's", where=self.family,
                                            expected="softmax scores, swiglu experts, no groups",
                                            do="drop the overrides in expert_parallel")
        self.num_experts = first.num_local_experts
        self._begin([b.mlp.experts for b in self.blocks], [F.silu] * len(self.blocks), first.ep_rank, first.ep_size)
        self.gates = [self._gate(b) for b in self.blocks]

    def _gate(self, block: nn.Module) -> GateSpec:
        router, norm = block.mlp.router, block.post_attention_layernorm
        return GateSpec(weight_ED=router.gate.weight.detach(), norm_D=norm.weight.detach(), norm_eps=norm.variance_epsilon,
                        top_k=router.top_k, kind=FAMILIES[self.family])

    def check_experts(self) -> None:
        super().check_experts()
        for layer, own in enumerate(self._experts):
            named = dict(own.named_parameters(remove_duplicate=False))
            plain = all(type(p) is nn.Parameter and type(p.data) is torch.Tensor for p in named.values())
            if named.keys() != {"w1", "w2", "w3"} or not plain:
                said = f"parameters {', '.join(named)}{'' if plain else ', not plain ones'}"
                raise UnsupportedModelError(f"its experts can't be served: {said}",
                                            where=f"MoE layer {layer}", expected="w1, w2 and w3, plain parameters",
                                            do="serve it without moe_prefetch")

    def _weights(self, layer: int, expert: int) -> tuple[Weight, Weight, Weight]:
        own = self._experts[layer]
        return Weight(own, "w1", expert), Weight(own, "w3", expert), Weight(own, "w2", expert)

    def _hook(self, taps: Taps, kv: KVConfig | None, handles: Handles) -> None:
        TransformersModel._hook(self, taps, kv, handles)

    @contextlib.contextmanager
    def observe(self, listener: Listener) -> Iterator[None]:
        handles: Handles = []
        logits: dict[int, torch.Tensor] = {}

        def scored(layer: int) -> Callable[..., None]:
            return lambda module, args, output: logits.__setitem__(layer, output.detach())

        def routed(layer: int) -> Callable[..., None]:
            return lambda module, args, output: listener.routed(layer, logits.pop(layer), output[1].detach())

        try:
            self._hook(listener, None, handles)
            for i, block in enumerate(self.blocks):
                handles.append(block.mlp.router.gate.register_forward_hook(scored(i)))
                handles.append(block.mlp.router.register_forward_hook(routed(i)))
            yield
        finally:
            for handle in handles:
                handle.remove()


class OwnExperts(TransformersModel):
    """A transformers model whose experts are in an accelerator's memory. There nothing moves, and its own grouped kernels are faster than
    our loop over experts: they stay, and the KV cache alone is ours."""

    _busy: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()

    def check_free(self) -> None:
        super().check_free()
        if self.model in self._busy:
            raise SessionError("a session is attached to this model already", where=type(self.model).__name__, do="detach it first")

    def install(self, taps: ExpertTaps, kv: KVConfig) -> None:
        self.check_free()
        self._busy.add(self.model)
        self._hook(taps, kv, self._handles)

    def uninstall(self) -> None:
        if self._handles:
            self._busy.discard(self.model)
        super().uninstall()


class MoEModel(Held):
    """Any module with `deepspeed.moe.layer.MoE` layers. Its residual stream and norms are its author's business: both taps are what the MoE
    layer is given, and the gate's norm is a plain RMS norm, so that an unfitted forecast is the gate's own view of an earlier layer."""

    family = "deepspeed.moe"
    horizons = (1, 2)  # no tap lies before the MoE layer's own input

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers: list[Any] = [m for _, m in MoEPrefetchPolicy.blocks(model, [MoE])]
        first = self.layers[0]
        shapes = {(m.num_experts, m.ep_size, m.deepspeed_moe.gate.wg.weight.shape) for m in self.layers}
        if len(shapes) > 1:
            raise UnsupportedModelError("its MoE layers differ in experts, groups or width", where=type(model).__name__,
                                        expected="equal MoE layers", do="fit and serve models of equal layers")
        self.num_experts = first.num_local_experts
        group = first.deepspeed_moe.ep_group
        rank = 0 if group is None or first.ep_size == 1 else comm.get_rank(group)
        self._begin([m.deepspeed_moe.experts for m in self.layers], [F.silu] * len(self.layers), rank, first.ep_size)
        self.gates = [self._gate(m) for m in self.layers]

    @property
    def blocks(self) -> list[Any]:
        return self.layers

    def _gate(self, layer: Any) -> GateSpec:
        gate = layer.deepspeed_moe.gate
        weight_ED = gate.wg.weight.detach()
        return GateSpec(weight_ED=weight_ED, norm_D=torch.ones_like(weight_ED[0]), norm_eps=1e-6, top_k=gate.k)

    def check_experts(self) -> None:
        super().check_experts()
        self._formula = Formula([own.deepspeed_experts for own in self._experts])  # type: ignore[misc]
        self._acts = self._formula.acts

    def _still(self, layer: int) -> Callable[[], None]:
        return partial(self._formula.check, layer)

    def _weights(self, layer: int, expert: int) -> tuple[Weight, Weight, Weight]:
        own: Any = self._experts[layer]
        gate, up, down = (Weight(getattr(own.deepspeed_experts[expert], name), "weight", None) for name in PROJECTIONS)
        return gate, up, down

    def check_kv(self, kv: KVConfig) -> None:
        if kv.format != "fp16" or kv.layers:
            raise ConfigError(f"kv.format is {kv.format}, but this model keeps its KV cache itself", where=type(self.model).__name__,
                              expected="a transformers model", do="drop kv")

    def _hook(self, taps: Taps, kv: KVConfig | None, handles: Handles) -> None:
        opened: list[bool] = []

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            opened.append(False)
            first = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)
            batch, tokens = (0, 0) if first is None or not first.dim() else (first.shape[0], first.shape[:2].numel())
            taps.step_begin(batch, tokens)
            opened[-1] = True

        def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if opened and opened.pop():
                taps.step_end()

        def tap(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                hidden = args[0] if args else kwargs["hidden_states"]
                hidden_TD = hidden.detach().reshape(-1, hidden.shape[-1])
                taps.residual(layer, hidden_TD)
                taps.moe_input(layer, hidden_TD)

            return hook

        handles.append(self.model.register_forward_pre_hook(begin, with_kwargs=True, prepend=True))
        handles.append(self.model.register_forward_hook(end, always_call=True))
        for i, layer in enumerate(self.layers):
            handles.append(layer.register_forward_pre_hook(tap(i), with_kwargs=True))

    @contextlib.contextmanager
    def observe(self, listener: Listener) -> Iterator[None]:
        handles: Handles = []

        def routed(layer: int) -> Callable[..., None]:
            def hook(module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
                with torch.no_grad():
                    # The gate multiplies by its weight without calling it as a module; this is its sum, without training's jitter.
                    logits_TE = F.linear(args[0].detach().float(), module.wg.weight.float())
                listener.routed(layer, logits_TE, output[3].detach().T.to(torch.int64))

            return hook

        try:
            self._hook(listener, None, handles)
            handles += [m.deepspeed_moe.gate.register_forward_hook(routed(i)) for i, m in enumerate(self.layers)]
            yield
        finally:
            for handle in handles:
                handle.remove()


def autoep_works() -> bool:
    """Whether this transformers lets AutoEP retarget its output recorders (5.17 does; from 5.24 the registry takes no default)."""
    from transformers.utils import output_capturing

    registry = getattr(output_capturing, "_CAN_RECORD_REGISTRY", {})
    try:
        inspect.signature(registry.get).bind("name", None)
    except (TypeError, ValueError):
        return type(registry) is dict
    return True
