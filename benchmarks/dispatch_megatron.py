#!/usr/bin/env python3
"""`moe-prefetch bench dispatch` with Megatron-core's MoELayer beside it, in the same run (written for 0.19.2).

megatron_allgather, megatron_alltoall   its dispatchers with its own experts (SequentialMLP: the one that needs neither Transformer Engine
                                        nor another package), as they are: eager
..._kernel                              the same with our expert kernel in their place

Its router is given the ids and weights that every way is given, in its own form (a map and probabilities over all experts). Only models in
BF16, with experts that the ranks divide. Arguments are those of `moe-prefetch bench dispatch`; on a CPU Megatron-core must be told so first
(`integrations/megatron_cpu.py`).
"""
from __future__ import annotations

import sys
from typing import Any

import torch

from moe_prefetch.bench import dispatch
from moe_prefetch.bench.dispatch_ways import Bank, Way


class Kernel(torch.nn.Module):
    """Experts of a MoELayer: rows sorted by expert, each with its probability."""

    def __init__(self, bank: Bank) -> None:
        super().__init__()
        self.bank, self.local = bank, bank.local()
        self.number_E = torch.arange(len(bank.own), device=bank.device)

    def forward(self, rows_PD: torch.Tensor, tokens_per_expert: torch.Tensor, probs_P: torch.Tensor) -> tuple[torch.Tensor, None]:
        counts = torch.as_tensor(tokens_per_expert).to(rows_PD.device)
        ids_P = torch.repeat_interleave(self.number_E, counts, output_size=len(rows_PD))
        return self.local(0, rows_PD, ids_P[:, None], probs_P.reshape(-1, 1).float()), None


class Told(torch.nn.Module):
    """A router that says what it was told."""

    def forward(self, hidden: torch.Tensor, padding_mask: Any = None, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.probs, self.map

    def set_layer_number(self, number: int) -> None: ...


def layer_of(bank: Bank, dispatcher: str) -> Any:
    """A MoELayer over the bank's group, its experts those of the bank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    form, model = bank.model.form, bank.model
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=bank.ranks)
    if bank.device.type == "cuda":
        model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=form.hidden, num_attention_heads=8, ffn_hidden_size=form.width, num_moe_experts=model.experts,
        moe_router_topk=model.top_k, moe_ffn_hidden_size=form.width, moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type="none", expert_model_parallel_size=bank.ranks, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, params_dtype=model.dtype, bf16=model.dtype == torch.bfloat16,
        gradient_accumulation_fusion=False, persist_layer_norm=False, bias_activation_fusion=False, perform_initialization=False,
        use_cpu_initialization=bank.device.type == "cpu")
    mlp = get_gpt_layer_local_spec(num_experts=model.experts, moe_grouped_gemm=False, normalization="RMSNorm").submodules.mlp
    inner = mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]
    layer = MoELayer(config, submodules=inner, layer_number=1).eval()
    layer.router = Told()
    for expert, record in zip(layer.experts.local_experts, bank.own, strict=True):
        views = form.layout().views(record)
        expert.linear_fc1.weight.data, expert.linear_fc2.weight.data = views["gate_up"], views["down"]
    return layer


class Megatron(Way):
    captured = False
    dispatcher, kernel = "", False
    _made: tuple[Any, dict[str, Any]] = (None, {})

    def __init__(self, bank: Bank, tokens: int, experts: Any) -> None:
        super().__init__(bank, tokens, experts)
        if Megatron._made[0] is not bank:
            Megatron._made = (bank, {})
        made = Megatron._made[1]
        if self.dispatcher not in made:
            made[self.dispatcher] = layer_of(bank, self.dispatcher)
            made[f"{self.dispatcher} own"] = made[self.dispatcher].experts
        self.layer = made[self.dispatcher]
        self.layer.experts = Kernel(bank) if self.kernel else made[f"{self.dispatcher} own"]

    @torch.no_grad()
    def __call__(self, n: int, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        probs_TE = x_TD.new_zeros(len(x_TD), self.bank.model.experts, dtype=torch.float32).scatter_(1, ids_TK, weights_TK)
        self.layer.router.probs = probs_TE
        self.layer.router.map = torch.zeros_like(probs_TE, dtype=torch.bool).scatter_(1, ids_TK, True)
        return self.layer(x_TD[:, None])[0][:, 0]


def _way(kind: str, with_kernel: bool) -> type[Megatron]:
    name = f"megatron_{kind}" + "_kernel" * with_kernel
    return type(name, (Megatron,), {"name": name, "dispatcher": kind, "kernel": with_kernel})


WAYS = [_way(kind, kernel) for kind in ("allgather", "alltoall") for kernel in (False, True)]


def ways(bank: Bank, tokens: int) -> list[type[Way]]:
    return list(WAYS) if bank.model.form.weights in ("bfloat16", "float32") and bank.model.experts % bank.ranks == 0 else []


if __name__ == "__main__":
    sys.exit(dispatch.main(more=ways))
