"""A compiled model computes what it computes uncompiled, attached or not: each layer its own experts, every forecast in its own pass."""
from __future__ import annotations

import pytest
import torch
from transformers import CompileConfig

import moe_prefetch
from tests.tiny import FAMILIES, tiny

long = pytest.mark.nightly
CASES = [pytest.param(f, h, marks=() if (f, h) in (("qwen2_moe", "local"), ("qwen3_moe", "host")) else long)
         for f in FAMILIES for h in ("local", "disk", "host")]


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def config(home: str) -> dict:
    return {"experts": {"home": home} | ({} if home == "local" else {"resident": 2})}


@pytest.mark.parametrize(("family", "home"), CASES)
def test_a_compiled_forward_is_that_of_an_eager_one(family, home):
    model, ids = tiny(family), torch.randint(1, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    with moe_prefetch.attach(model, config(home)) as session, torch.no_grad():
        want = model(ids).logits
        once = session.ledger.total
        got = torch.compile(model, backend="eager")(ids).logits
        assert torch.equal(got, want)
        total = session.ledger.total
        assert total.hit + total.late + total.miss == 2 * (once.hit + once.late + once.miss), "one pass more in the books"


@pytest.mark.parametrize("home", ["local", pytest.param("host", marks=long)])
def test_generate_that_compiles_by_itself_makes_the_same_tokens(home):
    compiled = CompileConfig(backend="eager", fullgraph=False)
    compiled._compile_all_devices = True  # as it is on a GPU
    model, ids = tiny("qwen3_moe"), torch.randint(1, 100, (1, 9), generator=torch.Generator().manual_seed(1))

    def tokens(**change: object) -> list[list[int]]:
        return model.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids), **change).tolist()

    with moe_prefetch.attach(model, config(home)):
        assert tokens(cache_implementation="static", compile_config=compiled) == tokens()


def test_what_a_listener_sees_of_a_compiled_pass_is_what_it_sees_of_an_eager_one():
    from moe_prefetch.probes.collect import Collector
    from moe_prefetch.seam import open_model

    model, ids, steps = tiny("qwen2_moe"), torch.randint(1, 100, (1, 7), generator=torch.Generator().manual_seed(2)), []
    host = open_model(model)
    with host.observe(Collector(host.num_layers, steps.append)), torch.no_grad():
        model(ids)
        torch.compile(model, backend="eager")(ids)
    one, two = steps
    assert torch.equal(one.ids_TLK, two.ids_TLK)
    assert torch.equal(one.taps.residual_LTD, two.taps.residual_LTD)
    assert torch.equal(one.taps.moe_input_LTD, two.taps.moe_input_LTD)
