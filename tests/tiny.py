"""tiny-moe in each supported layout, with random weights: the model of every fast test."""
from __future__ import annotations

from pathlib import Path

import torch
import yaml
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
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
