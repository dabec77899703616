"""An attached model gives the numbers of the model as it was, in every dtype and whatever implementation its experts have.

Bit for bit where a row of a product does not depend on its place among the rows, as it was seen with AVX2 and AVX-512; with
MKL_CBWR=COMPATIBLE it does."""
from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import moe_prefetch
from tests.tiny import FAMILIES, tiny

HOMES = ({"home": "local"}, {"home": "disk", "resident": "25%", "threads": 2})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_attached_model_has_the_bits_of_the_plain_one(family: str, implementation: str, dtype: torch.dtype) -> None:
    # More experts a token than two: then it matters in which order, and in what, they are added.
    model = tiny(family, dtype=dtype, top_k=5)
    model.set_experts_implementation(implementation)
    g = torch.Generator().manual_seed(1)
    prompt, token = torch.randint(2, 200, (2, 24), generator=g), torch.randint(2, 200, (2, 1), generator=g)

    def logits() -> list[torch.Tensor]:
        with torch.no_grad():
            out = model(prompt, use_cache=True)
            return [out.logits, model(token, past_key_values=out.past_key_values).logits]

    want = logits()
    for experts in HOMES:
        with moe_prefetch.attach(model, {"version": 1, "experts": experts}):
            assert all(torch.equal(a, b) for a, b in zip(logits(), want, strict=True)), experts
    assert all(torch.equal(a, b) for a, b in zip(logits(), want, strict=True))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
def test_autocast_computes_experts_as_without_a_session(implementation: str, weights: torch.dtype) -> None:
    """Routing weights in BF16, hidden states in FP32, and products in the dtype that autocast gives each implementation, or does not."""
    prompt = torch.randint(2, 200, (2, 24), generator=torch.Generator().manual_seed(1))

    def made(layers: int) -> PreTrainedModel:
        model = tiny("qwen2_moe", dtype=weights, top_k=5, layers=layers)
        model.set_experts_implementation(implementation)
        if weights == torch.bfloat16:
            # Norms kept in FP32 hand hidden states of FP32 to experts of BF16.
            for layer in model.model.layers:
                layer.post_attention_layernorm.float()
        return model

    def logits(model: PreTrainedModel) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(prompt).logits

    model = made(4)
    want = logits(model)
    for experts in HOMES:
        with moe_prefetch.attach(model, {"version": 1, "experts": experts}):
            got = logits(model)
            assert got.dtype == want.dtype
            # torch.bmm and torch.nn.functional.linear may add in another order.
            assert torch.equal(got, want) or (implementation == "batched_mm" and torch.allclose(got, want, atol=0.02)), experts
    # Kernels multiply weights as they are, as grouped_mm does, and round less: a router after them may choose another expert.
    model = made(1)
    want = logits(model)
    with moe_prefetch.attach(model, {"version": 1, "experts": {"home": "host", "resident": "25%"}}):
        got = logits(model)
    assert got.dtype == want.dtype and got.isfinite().all()
    assert implementation != "grouped_mm" or weights != torch.float32 or torch.allclose(got, want, atol=0.02)
