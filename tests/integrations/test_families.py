"""Families beside the three that every other test uses: their routers as probes know them, and the law of an attached model."""
from __future__ import annotations

from typing import Any

import pytest
import torch

import moe_prefetch
from moe_prefetch.probes.collect import Collector
from moe_prefetch.probes.router import select
from moe_prefetch.seam import open_model
from tests.tiny import MORE, another

PROMPT = torch.randint(1, 200, (2, 19), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


@pytest.mark.parametrize("name", MORE)
def test_its_router_is_known(name: str) -> None:
    model, got = another(name), []
    host = open_model(model)
    with host.observe(Collector(host.num_layers, got.append)):
        logits(model)
    for layer, gate in enumerate(host.gates):
        # In FP32 the law chooses what the model chose, groups and biases among it.
        want = got[0].ids_TLK[:, layer].sort(1).values
        assert torch.equal(select(got[0].taps.logits_LTE[layer], gate.to("cpu")).sort(1).values, want), layer
    assert (host.gates[0].n_group > 1) == (name in ("deepseek_v2 in groups", "deepseek_v3", "dots1"))
    assert (host.gates[0].bias_E is None) == name.startswith(("olmoe", "deepseek_v2"))


@pytest.mark.parametrize("name", MORE)
def test_an_attached_model_has_its_bits_and_is_given_back(name: str) -> None:
    model = another(name)
    want, before = logits(model), {n: p.data_ptr() for n, p in model.named_parameters()}
    tokens = model.generate(PROMPT[:, :9], max_new_tokens=8, do_sample=False)
    for experts in ({"home": "local"}, {"home": "disk", "resident": "50%", "threads": 2}):
        with moe_prefetch.attach(model, {"version": 1, "experts": experts}) as session:
            assert torch.equal(logits(model), want)
            assert torch.equal(model.generate(PROMPT[:, :9], max_new_tokens=8, do_sample=False), tokens)
            assert session.ledger.total.demanded
    with moe_prefetch.attach(model, {"version": 1, "experts": {"home": "host", "resident": "50%"}}):
        torch.testing.assert_close(logits(model), want, rtol=1e-3, atol=1e-4)
    # Up to 68 tokens every format keeps FP16 or what it was given.
    with moe_prefetch.attach(model, {"version": 1, "kv": {"format": "fp4-72"}}):
        torch.testing.assert_close(logits(model), want, rtol=1e-2, atol=1e-2)
    assert torch.equal(logits(model), want)
    assert not [n for n, p in model.named_parameters() if p.is_meta] and before.keys() == dict(model.named_parameters()).keys()
