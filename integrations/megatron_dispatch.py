"""Megatron-core 0.16.1 to 0.19: a model's MoE layers served by our dispatch and expert kernel, over the expert group Megatron made.

    with serve_experts(model, {64: "gather", 4096: "gather"}) as served:      # on every rank, model.eval() and no gradients
        model(tokens, positions, mask)

Router, shared experts and everything around stay Megatron's; each MoE layer gets another token dispatcher, and its experts' weights move
into records (the parameters then are views of these, so state dicts and updates in place go on; pieces of an optimizer's buffer are kept
beside them, and get what the weights hold at `close`). Nothing is read back from a device.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import nn

from moe_prefetch.distributed.groups import DEADLINE, Group
from moe_prefetch.errors import SessionError, UnsupportedModelError
from moe_prefetch.experts.dispatch import Dispatch, DispatchSpec, Mode
from moe_prefetch.experts.placement import Placement
from moe_prefetch.experts.steps import Steps
from moe_prefetch.kernels.expert_mlp.op import expert_mlp
from moe_prefetch.kernels.expert_mlp.record import Form, RecordLayout

from .megatron import chunks_of
from .watch import Watch, beside


def serve_experts(model: nn.Module | Sequence[nn.Module], modes: Mapping[int, Mode] | None = None, *, deterministic: bool = False,
                  deadline: float = 30.0, attach_deadline: float = DEADLINE) -> ServedExperts:
    """Collective over the model's expert group; until `close`, which gives the layers back what they had.

    modes  dispatch mode (`gather`, `host`) by size, the most tokens that a rank has in a forward pass; default {64: "gather"}. With several
           sizes all ranks agree before each pass on the smallest that holds every rank's tokens.

    Raises UnsupportedModelError, with the layer and what it has; ConfigError: ranks that differ; PeerError; MemoryError.
    """
    return ServedExperts(model, {64: "gather"} if modes is None else modes, deterministic, deadline, attach_deadline)


# Where a class must come from for its `forward` to be known: Megatron's own linear layers, or Transformer Engine's.
KNOWN = ("megatron.core.", "transformer_engine.")
# What only lists modules, and is never called.
LISTS = (nn.ModuleList, nn.ModuleDict)


def _settings(config: Any) -> list[str]:
    """What a configuration says of experts beyond SwiGLU, or against it."""
    said = {"moe_latent_size": getattr(config, "moe_latent_size", None), "add_bias_linear": config.add_bias_linear,
            "moe_apply_probs_on_input": config.moe_apply_probs_on_input, "fp8": getattr(config, "fp8", None),
            "fp4": getattr(config, "fp4", None), "glu_linear_offset": getattr(config, "glu_linear_offset", None),
            "moe_mlp_glu_interleave_size": getattr(config, "moe_mlp_glu_interleave_size", None)}
    wrong = [f"{k} is {v}" for k, v in said.items() if v]
    if (clamp := getattr(config, "activation_func_clamp_value", None)) is not None:
        wrong.append(f"activation_func_clamp_value is {clamp}")
    if not config.gated_linear_unit or config.activation_func is not torch.nn.functional.silu:
        wrong.append("its activation is no SwiGLU")
    return wrong


def _left_out(experts: nn.Module) -> str:
    """What a call of these modules would do that is left out where they are not called; the first thing found, or empty."""
    if why := beside(experts):
        return why
    for path, module in experts.named_modules():
        whose, kind, act = f"its {path}" if path else "it", type(module), getattr(module, "activation_func", None)
        foreign = [x for x in (kind.__module__, kind.forward.__module__) if not x.startswith(KNOWN)]
        if foreign and kind not in LISTS:
            return f"{whose} is {kind.__name__}, whose forward is of {foreign[0]}"
        if not isinstance(act, nn.Module) and act not in (None, torch.nn.functional.silu):
            return f"{whose} has another activation"
    return ""


def _matrices(moe: MoELayer) -> tuple[list[tuple[Any, Any]], list[str]]:
    """(first and second matrix of each of this rank's experts, what is wrong with them)."""
    experts = moe.experts
    if hasattr(experts, "local_experts"):
        pairs = [[getattr(getattr(e, fc, None), "weight", None) for fc in ("linear_fc1", "linear_fc2")] for e in experts.local_experts]
    elif all(hasattr(getattr(experts, fc, None), "weight0") for fc in ("linear_fc1", "linear_fc2")):
        # Transformer Engine's grouped linear layers: a parameter for each expert.
        pairs = [[getattr(getattr(experts, fc), f"weight{i}", None) for fc in ("linear_fc1", "linear_fc2")]
                 for i in range(moe.num_local_experts)]
    else:
        return [], [f"its experts are {type(experts).__name__}"]
    found = [w for pair in pairs for w in pair]
    wrong = []
    # A subclass of Tensor (quantised, distributed) has no bytes that a record could hold.
    if any(type(w) is not nn.Parameter or type(w.data) is not torch.Tensor or not w.is_floating_point() for w in found):
        wrong.append("its expert weights are not plain parameters")
    known = {id(w) for w in found}
    if more := [n for n, p in experts.named_parameters() if id(p) not in known]:
        wrong.append(f"it has other parameters: {more[0]}{f' and {len(more) - 1} more' if more[1:] else ''}")
    return [(fc1, fc2) for fc1, fc2 in pairs], wrong


def weights_of(moe: MoELayer) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """This rank's experts: ([2 F, D], gate rows first; [D, F]) of each. Raises UnsupportedModelError."""
    config, experts = moe.config, moe.experts
    # Megatron gives its experts copies of the layer's configuration.
    configs = {id(c): c for c in (config, *(m.config for m in experts.modules() if hasattr(m, "config")))}
    found, wrong = _matrices(moe)
    wrong += [x for c in configs.values() for x in _settings(c)] + [x for x in (_left_out(experts),) if x]
    if hasattr(moe, "_inference_token_dispatcher"):
        wrong.append("transformer_impl inference_optimized puts a dispatcher of its own in place at every pass")
    if getattr(moe, "use_shared_expert", False) and config.moe_shared_expert_overlap and config.tensor_model_parallel_size > 1:
        wrong.append("moe_shared_expert_overlap under tensor parallelism leaves the shared expert's sum to Megatron's dispatcher")
    if getattr(experts, "tp_group", None) is not None and experts.tp_group.size() > 1:
        wrong.append("its experts are split over ranks")
    if wrong:
        raise UnsupportedModelError("; ".join(dict.fromkeys(wrong)), where=f"MoE layer {moe.layer_number}",
                                    expected="SwiGLU experts without bias, hooks and adapters, whole on one rank: SequentialMLP or "
                                             "TEGroupedMLP",
                                    do="serve this model by Megatron's own dispatcher")
    return found


class _Dispatcher(MoETokenDispatcher):
    """Takes the place of a layer's token dispatcher, with its six steps; the shared experts run while rows travel."""

    def __init__(self, served: ServedExperts, moe: MoELayer, layer: int) -> None:
        old = moe.token_dispatcher
        super().__init__(moe.config, SimpleNamespace(ep=old.ep_group, expt_tp=old.tp_group, tp_ep=old.tp_ep_group))
        self._served, self._layer, self._top_k = served, layer, moe.config.moe_router_topk
        self._shared = moe.shared_experts if moe.use_shared_expert else None
        self._flight: Any = None
        self._extra: torch.Tensor | None = None

    def dispatch_preprocess(self, hidden_SBD: torch.Tensor, map_TE: torch.Tensor,
                            probs_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled() and hidden_SBD.requires_grad:
            raise SessionError("a forward pass that keeps gradients", where=f"served MoE layer {self._layer}", expected="torch.no_grad()",
                               do="close it before training goes on")
        hidden_TD = hidden_SBD.reshape(-1, hidden_SBD.shape[-1])
        # A token has at most top-k experts; padding and dropped ones have fewer.
        top = torch.where(map_TE, probs_TE.float(), -1.0).topk(self._top_k)
        ids_TK, weights_TK = torch.where(top.values < 0, -1, top.indices), top.values.clamp_min(0)
        dispatch = self._served.dispatch_for(self._layer, len(hidden_TD))
        self._flight = dispatch.begin(self._layer, hidden_TD.contiguous(), ids_TK, weights_TK)
        return hidden_SBD, probs_TE

    def token_dispatch(self, hidden_SBD: torch.Tensor, probs_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._extra = None if self._shared is None else self._shared(hidden_SBD)
        return hidden_SBD, probs_TE

    def dispatch_postprocess(self, hidden_SBD: torch.Tensor, probs_TE: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        flight, self._flight = self._flight, None
        return flight.finish().view_as(hidden_SBD), None, probs_TE

    def combine_preprocess(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        return hidden_SBD

    def token_combine(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        extra, self._extra = self._extra, None
        return hidden_SBD if extra is None else hidden_SBD + extra

    def combine_postprocess(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        return hidden_SBD


def _digest(data: torch.Tensor) -> int:
    """Of its bits, each place with a weight of its own; exact, so equal bits have equal ones."""
    bits = data.contiguous().view(torch.int16 if data.element_size() == 2 else torch.int32).flatten().long()
    return int((bits * (torch.arange(len(bits), device=bits.device) % 65521 + 1)).sum())


def _done(hidden: torch.Tensor, tokens_per_expert: None, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
    """In place of the experts' `forward`: the dispatcher's flight ran them."""
    return hidden, None


class ServedExperts:
    """Made by `serve_experts`. `size`: None, or the size that all passes have from now on, without asking (while a graph is captured)."""

    def __init__(self, model: nn.Module | Sequence[nn.Module], modes: Mapping[int, Mode], deterministic: bool, deadline: float,
                 attach_deadline: float) -> None:
        self.size: int | None = None
        self._layers = _moe_layers(model)
        weights = [weights_of(moe) for moe in self._layers]
        first = self._layers[0]
        parts = {(fc1.shape, fc2.shape, fc1.dtype, fc2.dtype, fc1.device) for pairs in weights for fc1, fc2 in pairs}
        alike = {(m.config.num_moe_experts, m.config.moe_router_topk, tuple(m.local_expert_indices)) for m in self._layers}
        if len(parts) != 1 or len(alike) != 1 or any(m.ep_group is not first.ep_group for m in self._layers):
            raise UnsupportedModelError(f"MoE layers of {len(parts)} shapes, {len(alike)} routings", where="serve_experts",
                                        expected="one for all layers", do="serve this model by Megatron's own dispatcher")
        fc1, fc2 = weights[0][0]
        self._form = Form(str(fc1.dtype).removeprefix("torch."), fc2.shape[0], fc2.shape[1])
        group = Group.of(first.ep_group)
        placement = Placement.even(first.config.num_moe_experts, group.size)
        spec = {size: DispatchSpec(self._form.hidden, first.config.moe_router_topk, fc1.dtype, size, deterministic) for size in modes}
        self.steps = Steps(group, modes, placement, deadline=deadline, attach_deadline=attach_deadline)
        self.dispatches = {size: Dispatch(group, spec[size], placement, mode, local=self._local, device=fc1.device, deadline=deadline,
                                          attach_deadline=attach_deadline) for size, mode in sorted(modes.items())}
        self._lent: list[tuple[nn.Parameter, torch.Tensor, int]] = []
        self._had: list[Any] = []
        self._views: list[tuple[nn.Parameter, int]] = []
        try:
            # After everything that may be refused.
            self._table(weights, self._form.layout(), fc1.device)
        except BaseException:
            self.close()
            raise
        self._only = next(iter(modes)) if len(modes) == 1 else None
        self._now = self.dispatches[min(modes)]
        self._had = [(m, m.token_dispatcher, m.shared_expert_overlap) for m in self._layers]
        for i, moe in enumerate(self._layers):
            moe.token_dispatcher = _Dispatcher(self, moe, i)
            moe.experts.forward = _done
            # Its own step for them is left out then: the dispatcher adds them.
            moe.shared_expert_overlap = moe.use_shared_expert
        self._watch = Watch(moe.experts for moe in self._layers)

    def _table(self, weights: list[list[tuple[nn.Parameter, nn.Parameter]]], layout: RecordLayout, device: torch.device) -> None:
        with torch.no_grad():
            self._records = [list(torch.zeros(len(pairs), layout.nbytes, dtype=torch.uint8, device=device)) for pairs in weights]
            for layer, pairs in enumerate(weights):
                for record, (fc1, fc2) in zip(self._records[layer], pairs, strict=True):
                    layout.pack({"gate_up": fc1, "down": fc2}, record)
                    views = layout.views(record)
                    for weight, view in ((fc1, views["gate_up"]), (fc2, views["down"])):
                        if weight.untyped_storage().nbytes() > weight.nbytes or hasattr(weight, "main_grad"):
                            # A piece of a buffer that others know, as an optimizer's over all ranks: it is wanted back.
                            self._lent.append((weight, weight.data, _digest(weight.data)))
                        weight.data = view
                        self._views.append((weight, view.data_ptr()))
            self._where = [torch.tensor([r.data_ptr() for r in records], dtype=torch.int64, device=device) for records in self._records]

    def _local(self, layer: int, rows_ND: torch.Tensor, ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        records = self._records[layer] if rows_ND.device.type == "cpu" else ()
        return expert_mlp(rows_ND, ids_NK, weights_NK, self._where[layer], self._form, records=records)

    def dispatch_for(self, layer: int, tokens: int) -> Dispatch:
        """What runs this layer. At a pass's first layer ranks agree on its size, if there are several. Raises ShapeError, PeerError."""
        if layer == 0:
            if any(moe.token_dispatcher._flight is not None for moe in self._layers):
                raise SessionError("a forward pass broke off", where="serve_experts", expected="passes that end on every rank",
                                   do="close it and call serve_experts again, on every rank")
            self._unchanged()
            size = self.size or self._only
            self._now = self.dispatches[self.steps.next(tokens).size if size is None else size]
        return self._now

    def _unchanged(self) -> None:
        if self._watch.unchanged():
            return
        # The modules within: the layer's own has our `forward`.
        found = ((m.layer_number, _left_out(x)) for m in self._layers for x in m.experts.children())
        layer, why = next((f for f in found if f[1]), ("?", "hooks, or modules that were replaced"))
        raise SessionError(f"experts were changed while they are served: {why}", where=f"MoE layer {layer}",
                           expected="experts as they were: served ones are not called", do="undo it, or close it first, on every rank")

    def check(self) -> None:
        """Between passes: raises PeerError where a device found that a rank did not come (see `Dispatch.check`), SessionError where a
        weight lies elsewhere than when it was served (what is written into weights is seen, another tensor in their place is not), or where
        experts got hooks, adapters or a `forward`, as each pass asks, too."""
        self._unchanged()
        if any(weight.data_ptr() != address for weight, address in self._views):
            raise SessionError("weights of experts were put elsewhere", where="serve_experts", expected="values copied into the weights",
                               do="close it, load without assign=True, and call serve_experts again")
        for dispatch in self.dispatches.values():
            dispatch.check()

    def close(self) -> None:
        """Collective in spirit: ranks that still wait for this one are told. Calling it again does nothing."""
        for moe, dispatcher, overlap in self._had:
            moe.token_dispatcher, moe.shared_expert_overlap = dispatcher, overlap
            del moe.experts.forward
        for weight, data, digest in self._lent:
            # What was written to the buffer meanwhile is newer than what was served.
            if _digest(data) == digest:
                data.copy_(weight.detach())
            weight.data = data
        self._had, self._lent, self._views = [], [], []
        for dispatch in self.dispatches.values():
            dispatch.close()
        self.steps.close()

    def __enter__(self) -> ServedExperts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _moe_layers(model: nn.Module | Sequence[nn.Module]) -> list[MoELayer]:
    """Of this rank's chunks in order; layers for multi-token prediction are left out. Raises UnsupportedModelError."""
    found = []
    for chunk in chunks_of(model):
        mtp = tuple(name + "." for name, m in chunk.named_modules() if isinstance(m, MultiTokenPredictionLayer))
        found += [m for name, m in chunk.named_modules() if isinstance(m, MoELayer) and not name.startswith(mtp or ("\0",))]
    busy = [m for m in found if isinstance(m.token_dispatcher, _Dispatcher) or getattr(m, "passengers", ())]
    if not found or busy:
        raise UnsupportedModelError("its MoE layers are served or watched already" if busy else "it has no MoE layer",
                                    where="serve_experts", expected="a model with MoE layers of its own",
                                    do="close what is attached, or pass the MoE model")
    return found
