"""An attached model gives the numbers of the model as it was, in every dtype and whatever implementation its experts have."""
from __future__ import annotations

import pytest
import torch

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
