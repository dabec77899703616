"""Qwen2-MoE checkpoints of transformers, SmolMoE first of all, as a Megatron-core GPTModel of the local spec (no Transformer Engine)."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_prefetch.errors import UnsupportedModelError

from .megatron import with_prefetch


def config_of(hf: Any, **change: Any) -> TransformerConfig:
    """The TransformerConfig of a Qwen2MoeConfig. `change`: parallel sizes, dispatcher, aux losses and whatever else a training run sets.
    Raises UnsupportedModelError for what this conversion does not know."""
    faults = [what for what, wrong in {
        "biases in attention": getattr(hf, "qkv_bias", True), "sliding windows": hf.use_sliding_window,
        "dense layers": bool(hf.mlp_only_layers) or hf.decoder_sparse_step != 1,
        f"activation {hf.hidden_act}": hf.hidden_act != "silu", "scaled RoPE": hf.rope_parameters.get("rope_type", "default") != "default",
    }.items() if wrong]
    if faults:
        raise UnsupportedModelError(", ".join(faults), where="megatron_smolmoe", expected="a Qwen2-MoE like SmolMoE",
                                    do="convert it with Megatron's own tools")
    values: dict[str, Any] = dict(
        num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size, num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads, kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        ffn_hidden_size=hf.moe_intermediate_size, moe_ffn_hidden_size=hf.moe_intermediate_size, num_moe_experts=hf.num_experts,
        moe_router_topk=hf.num_experts_per_tok, moe_router_pre_softmax=not hf.norm_topk_prob, moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0, moe_shared_expert_intermediate_size=hf.shared_expert_intermediate_size, moe_shared_expert_gate=True,
        normalization="RMSNorm", layernorm_epsilon=hf.rms_norm_eps, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, persist_layer_norm=False, bias_dropout_fusion=False,
        bias_activation_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False, use_cpu_initialization=True,
        perform_initialization=False)
    return TransformerConfig(**{**values, **change})


def convert(model: Any, **change: Any) -> GPTModel:
    """This pipeline stage's and expert rank's part of a transformers Qwen2-MoE, in its dtype, with our MoE layers; the original is not
    changed. `change` as in `config_of`. Needs initialised parallel groups. Raises UnsupportedModelError."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        raise UnsupportedModelError("tensor parallelism", where="megatron_smolmoe", expected="TP 1; pipeline and expert parallelism",
                                    do="convert at TP 1, save a distributed checkpoint, load it at the other layout")
    hf, dtype = model.config, model.dtype
    config = config_of(hf, **{"params_dtype": dtype, "bf16": dtype is torch.bfloat16, "pipeline_dtype": dtype,
                              "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
                              "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(), **change})
    out = GPTModel(config, with_prefetch(get_gpt_layer_local_spec(num_experts=hf.num_experts, normalization="RMSNorm")),
                   vocab_size=hf.vocab_size, max_sequence_length=hf.max_position_embeddings, position_embedding_type="rope",
                   rotary_base=hf.rope_parameters["rope_theta"], share_embeddings_and_output_weights=hf.tie_word_embeddings,
                   pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage())
    found = model.state_dict()
    with torch.no_grad():
        left = dict(out.named_parameters())
        for name, value in _weights(out, config, found, hf).items():
            parameter = left.pop(name)
            parameter.copy_(value.reshape(parameter.shape))
    if left:
        raise UnsupportedModelError(f"no weights for {', '.join(sorted(left)[:5])}", where="megatron_smolmoe",
                                    expected="a Qwen2-MoE like SmolMoE", do="convert it with Megatron's own tools")
    return out.to(dtype)


def _weights(out: GPTModel, config: TransformerConfig, hf: Mapping[str, torch.Tensor], hf_config: Any) -> dict[str, torch.Tensor]:
    """Megatron's names with transformers' values, for what this rank holds."""
    made: dict[str, torch.Tensor] = {}
    if out.pre_process:
        made["embedding.word_embeddings.weight"] = hf["model.embed_tokens.weight"]
    if out.post_process:
        made["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not hf_config.tie_word_embeddings:
            made["output_layer.weight"] = hf["lm_head.weight"]
        elif not out.pre_process:
            made["output_layer.weight"] = hf["model.embed_tokens.weight"]
    for i, layer in enumerate(out.decoder.layers):
        a, b = f"model.layers.{layer.layer_number - 1}.", f"decoder.layers.{i}."
        groups, width = config.num_query_groups, config.kv_channels
        # Megatron keeps queries, key and value of a group together.
        parts = [hf[f"{a}self_attn.{p}_proj.weight"].reshape(groups, -1, width, config.hidden_size) for p in "qkv"]
        made[b + "self_attention.linear_qkv.weight"] = torch.cat(parts, 1)
        made[b + "self_attention.linear_proj.weight"] = hf[a + "self_attn.o_proj.weight"]
        made[b + "input_layernorm.weight"] = hf[a + "input_layernorm.weight"]
        made[b + "pre_mlp_layernorm.weight"] = hf[a + "post_attention_layernorm.weight"]
        made[b + "mlp.router.weight"] = hf[a + "mlp.gate.weight"]
        for j, expert in enumerate(layer.mlp.local_expert_indices):
            made[f"{b}mlp.experts.local_experts.{j}.linear_fc1.weight"] = hf[a + "mlp.experts.gate_up_proj"][expert]
            made[f"{b}mlp.experts.local_experts.{j}.linear_fc2.weight"] = hf[a + "mlp.experts.down_proj"][expert]
        shared = a + "mlp.shared_expert."
        made[b + "mlp.shared_experts.linear_fc1.weight"] = torch.cat([hf[shared + "gate_proj.weight"], hf[shared + "up_proj.weight"]])
        made[b + "mlp.shared_experts.linear_fc2.weight"] = hf[shared + "down_proj.weight"]
        made[b + "mlp.shared_experts.gate_weight"] = hf[a + "mlp.shared_expert_gate.weight"]
    return made
