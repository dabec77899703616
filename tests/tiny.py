"""tiny-moe in each supported layout, with random weights: the model of every fast test."""
from __future__ import annotations

from pathlib import Path

import torch
import yaml
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPEC = yaml.safe_load((Path(__file__).parents[1] / "model_configs" / "tiny-moe.yaml").read_text())
FAMILIES = ("qwen2_moe", "mixtral", "qwen3_moe")


def tiny(family: str = "qwen2_moe", *, seed: int = 0, dtype: torch.dtype = torch.float32, **change: int) -> PreTrainedModel:
    """tiny-moe as a transformers model of `family`, in eval mode; the same seed gives the same weights."""
    s = {**SPEC, **change}
    common = dict(
        vocab_size=s["vocabulary"], hidden_size=s["hidden"], num_hidden_layers=s["layers"], num_attention_heads=s["query_heads"],
        num_key_value_heads=s["kv_heads"], head_dim=s["head_dim"], num_experts_per_tok=s["top_k"], max_position_embeddings=512,
        bos_token_id=1, eos_token_id=None, pad_token_id=0)
    experts = dict(num_experts=s["experts"], moe_intermediate_size=s["expert_width"], norm_topk_prob=True, intermediate_size=96)
    torch.manual_seed(seed)
    if family == "qwen2_moe":
        model: PreTrainedModel = Qwen2MoeForCausalLM(Qwen2MoeConfig(**common, **experts, shared_expert_intermediate_size=s["shared_width"]))
    elif family == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts))
    else:
        model = MixtralForCausalLM(MixtralConfig(**common, num_local_experts=s["experts"], intermediate_size=s["expert_width"]))
    with torch.no_grad():
        for p in model.parameters():
            # Wider than the library's initialisation, so that routers decide and experts differ.
            if p.dim() > 1:
                p.normal_(0, 0.15)
    return model.to(dtype).eval()


# Families with one part or another that those above lack: dense layers first, groups of experts, a bias of the choice, MLA.
MORE = ("olmoe", "deepseek_v2", "deepseek_v2 in groups", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "dots1")


def another(name: str, seed: int = 0) -> PreTrainedModel:
    """A model of one of MORE, FP32, in eval mode: 3 MoE layers of 8 experts, 3 a token."""
    common = dict(vocab_size=211, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48,
                  num_experts_per_tok=3, max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    shared = dict(moe_intermediate_size=48, n_routed_experts=8, n_shared_experts=2)
    latent = dict(kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    dense = dict(first_k_dense_replace=1)
    groups = dict(n_group=4, topk_group=2, routed_scaling_factor=2.5)
    torch.manual_seed(seed)
    model: PreTrainedModel = {
        "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**{**common, "num_hidden_layers": 3}, num_experts=8)),
        "deepseek_v2": lambda: DeepseekV2ForCausalLM(DeepseekV2Config(**common, **shared, **latent, **dense, n_group=1, topk_group=1)),
        "deepseek_v2 in groups": lambda: DeepseekV2ForCausalLM(DeepseekV2Config(
            **common, **shared, **latent, **dense, **groups, topk_method="group_limited_greedy")),
        "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**common, **shared, **latent, **dense, **groups)),
        "glm4_moe": lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**common, **shared, **dense, head_dim=16)),
        "glm4_moe_lite": lambda: Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**common, **shared, **latent)),
        "dots1": lambda: Dots1ForCausalLM(Dots1Config(**common, **shared, **dense, head_dim=16, n_group=2, topk_group=1)),
    }[name]()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.15)
        for buffer_name, b in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                b.normal_(0, 0.05)
    return model.eval()
