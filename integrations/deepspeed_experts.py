"""How our part enters a model that DeepSpeed holds: the policy that finds its MoE blocks, stand-ins for its experts modules, and the
experts' weights out and back.

Everything goes through `module_inject.replace_module`; the router, the dispatch and the combine stay DeepSpeed's.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.policy import DSPolicy
from deepspeed.module_inject.replace_module import replace_module
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from moe_prefetch.config import KVConfig
from moe_prefetch.errors import SessionError, UnsupportedModelError
from moe_prefetch.integrations.deepspeed_formula import Activation
from moe_prefetch.integrations.watch import Still, set_meanwhile
from moe_prefetch.kernels.expert_mlp.naive import EAGER
from moe_prefetch.probes.forecast import Forecaster
from moe_prefetch.probes.probe import GateSpec
from moe_prefetch.seam import ExpertTaps, Taps
from moe_prefetch.types import PROB_ONE

Handles = list[torch.utils.hooks.RemovableHandle]


class MoEPrefetchPolicy(DSPolicy):
    """Which blocks of a model are ours to serve, for DeepSpeed's module replacement.

    `init_inference(model, config)` uses it by itself. The old style, `injection_policy={Block: MoEPrefetchPolicy}`, is accepted by our
    `init_inference` as a way to say which blocks are meant; DeepSpeed's own takes names of layers there, no classes.
    """

    _orig_layer_class: ClassVar[list[type[nn.Module]]] = [MixtralSparseMoeBlock, Qwen2MoeSparseMoeBlock, Qwen3MoeSparseMoeBlock, MoE,
                                                           AutoEPMoELayer]

    def attention(self) -> Any:
        raise UnsupportedModelError("this policy is about experts; it has no attention weights to hand out", where="MoEPrefetchPolicy",
                                    do="call init_inference of moe_prefetch.integrations.deepspeed")

    @classmethod
    def replace(cls, model: nn.Module, kind: type[nn.Module], change: Callable[[nn.Module, int, str], nn.Module]) -> None:
        """`change(module, number, its path)` takes the place of every module whose class is exactly `kind`."""
        before = {id(m) for m in model.modules() if "reset_cache" in m.__dict__}

        def replace(child: nn.Module, policy: Any, layer_id: int, prefix: str = "", state_dict: Any = None) -> nn.Module:
            return change(child, layer_id, prefix)

        replace_module(model=model, orig_class=kind, replace_fn=replace, _replace_policy=cls)
        # DeepSpeed's walk leaves a `reset_cache` of its kernels on every module that it passes.
        for m in model.modules():
            if id(m) not in before:
                m.__dict__.pop("reset_cache", None)

    @classmethod
    def blocks(cls, model: nn.Module, kinds: Sequence[type[nn.Module]] | None = None) -> list[tuple[str, nn.Module]]:
        """(path, block) of every MoE block of these kinds (default: all that we know), in the model's order. Changes nothing."""
        found: dict[int, tuple[str, nn.Module]] = {}

        def note(child: nn.Module, number: int, path: str) -> nn.Module:
            found[id(child)] = (path, child)
            return child

        for kind in kinds or cls._orig_layer_class:
            cls.replace(model, kind, note)
        return [found[id(m)] for m in model.modules() if id(m) in found]


class StandIn(nn.Module):
    """An experts module with our forward: it shares parameters, submodules, hooks and names with the module it stands in for."""

    own: nn.Module
    taps: ExpertTaps
    layer: int
    act: Activation
    still: Callable[[], None]  # raises SessionError: what it stands for has changed

    def __init__(self, own: nn.Module, **rest: Any) -> None:
        super().__init__()
        self.__dict__.update(own.__dict__)
        self.__dict__.update(own=own, **rest)

    def serve(self, rows_ND: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
        """Each row through its expert. Rows of zeros are what DeepSpeed pads with: they give zero and are no demand."""
        self.still()
        ids_NK = torch.where((rows_ND != 0).any(-1), ids_N, -1)[:, None]
        return self.taps.experts(self.layer, rows_ND, ids_NK, torch.ones_like(rows_ND[:, :1]), self.act)


class _GroupedStandIn(StandIn):
    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        counts = num_tokens_per_expert.to(torch.int64)
        ids_N = torch.full((x.shape[0],), -1, dtype=torch.int64, device=x.device)
        named = torch.arange(len(counts), device=x.device).repeat_interleave(counts)
        ids_N[: len(named)] = named
        return self.serve(x, ids_N)


class _ChunkStandIn(StandIn):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs [ranks of the group, local experts, capacity, D]."""
        groups, experts, capacity, hidden = inputs.shape
        ids_N = torch.arange(experts, device=inputs.device).view(1, -1, 1).expand(groups, -1, capacity).reshape(-1)
        return self.serve(inputs.reshape(-1, hidden), ids_N).view(inputs.shape)


_STAND_INS: dict[type[nn.Module], type[StandIn]] = {GroupedExperts: _GroupedStandIn, Experts: _ChunkStandIn}


@dataclass(frozen=True)
class Weight:
    """One matrix of an expert: a parameter, or one row of a stacked one."""

    module: nn.Module
    name: str
    index: int | None

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter if self.index is None else parameter[self.index]

    @property
    def value(self) -> torch.Tensor:
        return self.of(getattr(self.module, self.name).detach())


class LocalShare:
    """A forecast over all experts, as this rank needs it: its own experts, wanted if any rank of the group wants them. Other ranks' tokens
    are taken to be like ours, since asking them would cost the wait that forecasts are there to avoid."""

    def __init__(self, source: Forecaster, first: int, count: int, ranks: int) -> None:
        self._source, self._range, self._ranks = source, slice(first, first + count), ranks

    def _local(self, prob_E: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(round(PROB_ONE * (1 - (1 - p / PROB_ONE) ** self._ranks)) for p in prob_E[self._range])

    def forecast(self, layer: int, step: int, horizon: int, hidden_TD: torch.Tensor) -> tuple[int, ...]:
        return self._local(self._source.forecast(layer, step, horizon, hidden_TD))

    def next_step(self, layer: int, step: int) -> tuple[int, ...]:
        return self._local(self._source.next_step(layer, step))

    def keep(self, layer: int, step: int) -> tuple[int, ...]:
        return self._local(self._source.keep(layer, step))


class Held:
    """What both kinds share: experts' weights out and back, and stand-ins in and out. `num_experts` counts those of this rank."""

    model: nn.Module
    num_layers: int
    num_experts: int
    gates: list[GateSpec]
    how = EAGER  # the layer itself weighs and adds the rows that experts give

    def _begin(self, experts: list[nn.Module], acts: list[Activation], rank: int, ranks: int) -> None:
        self._experts, self._acts, self._rank, self._ranks = experts, acts, rank, ranks
        self.num_layers, self._looked = len(experts), False
        self._originals: list[tuple[Weight, nn.Parameter, torch.Size]] = []
        self._refusals: list[torch.utils.hooks.RemovableHandle | Still] = []
        self._handles: Handles = []

    def _weights(self, layer: int, expert: int) -> tuple[Weight, Weight, Weight]:
        """gate, up, down."""
        raise NotImplementedError

    def _hook(self, taps: Taps, kv: KVConfig | None, handles: Handles) -> None:
        raise NotImplementedError

    def share(self, forecaster: Forecaster) -> Forecaster:
        return forecaster if self._ranks == 1 else LocalShare(forecaster, self._rank * self.num_experts, self.num_experts, self._ranks)

    def check_experts(self) -> None:
        """Whether they compute what we compute in their place. Raises UnsupportedModelError."""
        for layer, own in enumerate(self._experts):
            kind = type(own)
            if kind not in _STAND_INS or "forward" in vars(own) or kind.forward.__module__ != kind.__module__:
                raise UnsupportedModelError(f"its experts can't be served: {kind.__name__} with a forward that is not DeepSpeed's own",
                                            where=f"MoE layer {layer}", expected=" or ".join(k.__name__ for k in _STAND_INS),
                                            do="serve it without moe_prefetch")

    def _still(self, layer: int) -> Callable[[], None]:
        """What is asked at each step of a layer."""
        return lambda: None

    def tensors(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        if not self._looked:
            self.check_experts()
            self._looked = True
        gate, up, down = self._weights(layer, expert)
        return {"gate_up": torch.cat([gate.value, up.value]), "down": down.value}

    def check_free(self) -> None:
        where = type(self.model).__name__
        if any(isinstance(m, StandIn) for m in self.model.modules()):
            raise SessionError("a session is attached to this model already", where=where, do="detach it first")
        if any(p.is_meta for p in self.model.parameters()):
            raise SessionError("the model's weights are not in memory", where=where, expected="weights", do="load the model first")

    def _parameters(self) -> list[Weight]:
        every = (w for layer in range(self.num_layers) for e in range(self.num_experts) for w in self._weights(layer, e))
        return list({(id(w.module), w.name): w for w in every}.values())

    def release(self) -> None:
        def refuse(module: nn.Module, *args: Any) -> None:
            raise SessionError("the experts of an attached model are not in memory", where=type(module).__name__,
                               do="detach before you save or load weights")

        self._originals = [(w, p := getattr(w.module, w.name), p.shape) for w in self._parameters()]
        for module in {id(w.module): w.module for w, _, _ in self._originals}.values():
            self._refusals.append(module.register_state_dict_pre_hook(refuse))
            self._refusals.append(module.register_load_state_dict_pre_hook(refuse))
        with torch.inference_mode(False):
            for w, p, shape in self._originals:
                setattr(w.module, w.name, nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad))
            self._refusals.append(Still(self.model, self._originals[0][1].device))
            for _, p, _ in self._originals:
                p.data = torch.empty(0, dtype=p.dtype, device=p.device)

    def restore(self, read: Callable[[int, int], dict[str, torch.Tensor]]) -> None:
        if not self._originals:
            return
        with torch.inference_mode(False):
            # All or nothing: until every record is read the parameters stay as they are.
            fresh = {(id(w.module), w.name): torch.zeros(shape, dtype=p.dtype, device=p.device) for w, p, shape in self._originals}
            for layer in range(self.num_layers):
                for expert in range(self.num_experts):
                    parts = read(layer, expert)
                    values = (*parts["gate_up"].chunk(2), parts["down"])
                    for w, value in zip(self._weights(layer, expert), values, strict=True):
                        w.of(fresh[id(w.module), w.name]).copy_(value)
            for w, p, _ in self._originals:
                set_meanwhile(self.model, w.name, getattr(w.module, w.name), p)
                p.data = fresh[id(w.module), w.name]
                setattr(w.module, w.name, p)
        for handle in self._refusals:
            handle.remove()
        self._originals, self._refusals = [], []

    def install(self, taps: ExpertTaps, kv: KVConfig) -> None:
        self.check_free()
        self._hook(taps, kv, self._handles)
        number = {id(m): i for i, m in enumerate(self._experts)}

        def put(child: nn.Module, _: int, path: str) -> nn.Module:
            if (layer := number.get(id(child))) is None:
                return child
            return _STAND_INS[type(child)](child, taps=taps, layer=layer, act=self._acts[layer], still=self._still(layer))

        for kind in {type(m) for m in self._experts}:
            MoEPrefetchPolicy.replace(self.model, kind, put)

    def uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

        def back(child: Any, _: int, path: str) -> nn.Module:
            # Set meanwhile on the stand-in alone.
            child.own.training = child.training
            return child.own  # type: ignore[no-any-return]

        for kind in _STAND_INS.values():
            MoEPrefetchPolicy.replace(self.model, kind, back)
