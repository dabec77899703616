"""Experts in every layout that is supported, with random bits: as modules of transformers and as checkpoints."""
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

E, D, F = 3, 64, 96
CLASSES = {"mixtral": MixtralExperts, "qwen2": Qwen2MoeExperts, "qwen3": Qwen3MoeExperts, "deepseek": DeepseekV2Experts,
           "gpt_oss": GptOssExperts}


def random_bits(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bit pattern, NaNs and denormals among them; of E4M3 none of the two NaNs, which stores refuse."""
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    if dtype == torch.float8_e4m3fn:
        raw -= (raw & 127 == 127).to(torch.uint8)
    return raw.view(dtype)


def _config() -> SimpleNamespace:
    return SimpleNamespace(hidden_size=D, intermediate_size=F, moe_intermediate_size=F, num_experts=E, num_local_experts=E,
                           num_experts_per_tok=2, hidden_act="silu", _experts_implementation="eager")


def _fill(module: nn.Module, seed: int, dtype: torch.dtype) -> nn.Module:
    g = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.data = random_bits(*p.shape, dtype=dtype, generator=g)
    return module


def module_of(kind: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """An experts module: a name of CLASSES, `linears`, `linears_bias`, `fp8`, or with `_t` after it: the same in transposed storages."""
    name = kind.removesuffix("_t")
    if name in CLASSES:
        module = _fill(CLASSES[name](_config()), seed, dtype)
    elif name == "fp8":
        module = nn.Module()
        g = torch.Generator().manual_seed(seed)
        for key, shape in (("gate_up_proj", (E, 2 * F, D)), ("down_proj", (E, D, F))):
            weight = random_bits(*shape, dtype=torch.float8_e4m3fn, generator=g)
            scale = random_bits(E, shape[1] // 32, shape[2] // 32, dtype=torch.float32, generator=g)
            module.register_parameter(key, nn.Parameter(weight, requires_grad=False))
            module.register_parameter(f"{key}_scale_inv", nn.Parameter(scale, requires_grad=False))
    else:
        bias = name == "linears_bias"
        one = lambda: nn.ModuleDict({"gate_proj": nn.Linear(D, F, bias), "up_proj": nn.Linear(D, F, bias),  # noqa: E731
                                     "down_proj": nn.Linear(F, D, bias)})
        module = _fill(nn.ModuleList([one() for _ in range(E)]), seed, dtype)
    if kind.endswith("_t"):
        for p in module.parameters():
            if p.dim() > 1:
                p.data = p.data.mT.contiguous().mT
                assert not p.is_contiguous()
    return module


def checkpoint_of(folder: Path, kind: str, layers: int = 2, seed: int = 0, shards: int = 1) -> dict[str, torch.Tensor]:
    """A checkpoint: `stacked`, `gpt_oss`, `mxfp4`, `linears`, `mixtral`, `deepseek_fp8`. Returns its tensors."""
    g, out = torch.Generator().manual_seed(seed), {}
    half = lambda *s: random_bits(*s, dtype=torch.bfloat16, generator=g)  # noqa: E731
    byte = lambda *s: random_bits(*s, dtype=torch.uint8, generator=g)  # noqa: E731
    for layer in range(layers):
        at = f"model.layers.{layer}.mlp.experts."
        if kind == "stacked":
            out |= {at + "gate_up_proj": half(E, 2 * F, D), at + "down_proj": half(E, D, F)}
        elif kind == "gpt_oss":
            out |= {at + "gate_up_proj": half(E, D, 2 * F), at + "down_proj": half(E, F, D)}
        elif kind == "mxfp4":
            for key, rows, columns in (("gate_up_proj", 2 * F, D), ("down_proj", D, F)):
                out |= {f"{at}{key}_blocks": byte(E, rows, columns // 32, 16), f"{at}{key}_scales": byte(E, rows, columns // 32) % 129}
        if kind in ("gpt_oss", "mxfp4"):
            out |= {at + "gate_up_proj_bias": half(E, 2 * F), at + "down_proj_bias": half(E, D)}
        names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        at = at.replace("mlp", "block_sparse_moe") if kind == "mixtral" else at
        for e in range(E) if kind in ("linears", "mixtral", "deepseek_fp8") else ():
            for n, shape in zip(names, ((F, D), (F, D), (D, F))):
                if kind == "deepseek_fp8":
                    out[f"{at}{e}.{n}.weight"] = random_bits(*shape, dtype=torch.float8_e4m3fn, generator=g)
                    out[f"{at}{e}.{n}.weight_scale_inv"] = random_bits(shape[0] // 32, shape[1] // 32, dtype=torch.float32, generator=g)
                else:
                    out[f"{at}{e}.{n}.weight"] = half(*shape)
        out[f"model.layers.{layer}.mlp.shared_experts.gate_proj.weight"] = half(F, D)
        out[f"model.layers.{layer}.self_attn.q_proj.weight"] = half(D, D)
    names = sorted(out)
    if shards == 1:
        save_file(out, folder / "model.safetensors")
    else:
        import json

        files = {n: f"model-{i % shards:05d}.safetensors" for i, n in enumerate(names)}
        for file in set(files.values()):
            save_file({n: out[n] for n in names if files[n] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return out
