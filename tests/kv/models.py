"""Tiny transformers models with real attention shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_prefetch.config import KVConfig
from moe_prefetch.kv.codec import OutlierStats

VOCAB = 128


def llama(groups: int = 3, layers: int = 2, head_dim: int = 64) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=96,
            num_hidden_layers=layers,
            num_attention_heads=groups * 2,
            num_key_value_heads=2,
            head_dim=head_dim,
            intermediate_size=128,
            initializer_range=0.2,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
        )
    ).eval()


def qwen2_with_key_bias(norm: float, layer: int) -> Any:
    """One layer's keys carry a constant bias of this norm, as Qwen2's do; RoPE then turns it with the position."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=96,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=128,
            initializer_range=0.08,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    bias = torch.randn(48)
    with torch.no_grad():
        model.model.layers[layer].self_attn.k_proj.bias.copy_(bias / bias.norm() * norm)
    return model


def mla(family: str = "deepseek_v3", latent: int = 64, layers: int = 2, rotary: int = 16) -> Any:
    """A tiny model with MLA: `deepseek_v2`, `deepseek_v3`, `glm4_moe_lite` or `youtu`; latents of 64 and a rotary part of 16."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": latent,
        "q_lora_rank": 32,
        "qk_rope_head_dim": rotary,
        "v_head_dim": 32,
        "qk_nope_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,  # all: at a near-tie of a router two right runs go apart
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "initializer_range": 0.2,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    config = CONFIG_MAPPING[family](**sizes, **({"mlp_layer_types": ["dense", "sparse"][:layers]} if family == "glm4_moe_lite" else {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    if family == "deepseek_v2":
        # Made without an initial value.
        torch.nn.init.normal_(model.model.layers[-1].mlp.gate.weight, std=0.2)
    return model


def gpt_oss() -> Any:
    torch.manual_seed(0)
    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_local_experts=2,
            num_experts_per_tok=1,
            sliding_window=32,
            initializer_range=0.2,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()


def moe(family: str, layers: int = 2) -> Any:
    """A tiny MoE model: `qwen2_moe`, `qwen3_moe` or `mixtral`, with heads of 64."""
    torch.manual_seed(0)
    hidden = 256 if family == "qwen2_moe" else 96
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 4,  # all: at a near-tie of a router two right runs go apart
        # Scores like a real model's: at scores of 100 the rounding of one key is worth several percent of attention.
        "initializer_range": 0.12 * (96 / hidden) ** 0.5,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**common, head_dim=64, num_local_experts=4)).eval()
    common |= {"num_experts": 4, "moe_intermediate_size": 48}
    if family == "qwen3_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, head_dim=64, norm_topk_prob=True)).eval()
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**common, shared_expert_intermediate_size=48)).eval()


def gemma2(attention: str = "eager") -> Any:
    torch.manual_seed(0)
    return Gemma2ForCausalLM._from_config(
        Gemma2Config(
            vocab_size=VOCAB,
            hidden_size=96,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            query_pre_attn_scalar=1,
            attn_logit_softcapping=3.0,
            sliding_window=32,
            initializer_range=0.2,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
        ),
        attn_implementation=attention,
    ).eval()


def in_float64(model: Any) -> Any:
    """Two ways to the same numbers then differ too little to fall to either side of a tie between codes, whatever the CPU."""
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the grouped product has no float64
    return model.double()


def ids(n: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, n), generator=torch.Generator().manual_seed(seed))


def in_channels(stats: OutlierStats) -> OutlierStats:
    """A calibration that leaves keys in their channels."""
    return OutlierStats({n: replace(s, axes=None) for n, s in stats.layers.items()}, stats.keys)


def config(format: str = "fp4-quality", **kw: Any) -> KVConfig:
    return KVConfig(**{"format": format, "window": 16, "settle": 1, **kw})


def generate(model: Any, tokens: torch.Tensor, cache: Any, n: int = 24, **kw: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(
            tokens, attention_mask=kw.pop("mask", torch.ones_like(tokens)), past_key_values=cache, max_new_tokens=n, do_sample=False, **kw
        )
