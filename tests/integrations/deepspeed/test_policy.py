"""The policy finds MoE blocks through DeepSpeed's own walk, and what it puts in comes out again without a trace."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from deepspeed.module_inject.policy import DSPolicy
from deepspeed.moe.layer import MoE
from torch import nn
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeDecoderLayer, Qwen2MoeSparseMoeBlock

import moe_prefetch
from moe_prefetch.config import load
from moe_prefetch.errors import ConfigError, SessionError, UnsupportedModelError
from moe_prefetch.integrations import deepspeed as mpd
from moe_prefetch.integrations.deepspeed_experts import LocalShare
from moe_prefetch.integrations.deepspeed_models import OwnExperts
from moe_prefetch.runtime import REAL
from moe_prefetch.session import Session
from moe_prefetch.types import PROB_ONE
from tests.integrations.deepspeed.serving import DISK, HALF, Net
from tests.models import logits_of, picture, prompt
from tests.tiny import FAMILIES, tiny

pytestmark = pytest.mark.framework


@pytest.mark.parametrize("family", FAMILIES)
def test_it_finds_every_block_and_changes_nothing(family):
    model = tiny(family)
    before = picture(model)
    found = mpd.MoEPrefetchPolicy.blocks(model)
    assert [path for path, _ in found] == [f"model.layers.{i}.mlp" for i in range(4)]
    assert picture(model) == before


def test_it_is_one_of_deepspeeds_policies():
    assert issubclass(mpd.MoEPrefetchPolicy, DSPolicy)
    with pytest.raises(UnsupportedModelError, match="no attention weights"):
        mpd.MoEPrefetchPolicy().attention()
    assert [path for path, _ in mpd.MoEPrefetchPolicy.blocks(Net(1))] == ["moes.0", "moes.1", "moes.2"]


@pytest.mark.parametrize("policy", [mpd.MoEPrefetchPolicy, mpd.MoEPrefetchPolicy()], ids=["class", "instance"])
@pytest.mark.parametrize("key", ["injection_policy", "injection_dict"])
def test_the_older_style_is_taken(policy, key):
    model, ids = tiny("qwen2_moe"), prompt(2, 9)
    want = logits_of(model, ids, 4)
    engine = mpd.init_inference(model, {"dtype": "fp32", "moe_prefetch": DISK}, **{key: {Qwen2MoeSparseMoeBlock: policy}})
    got = logits_of(engine, ids, 4)
    assert engine.moe_prefetch.ledger.total.bytes_moved > 0
    engine.moe_prefetch.detach()
    assert torch.allclose(got, want, atol=1e-4) and torch.equal(logits_of(engine, ids, 4), want)


def test_names_of_layers_may_stand_beside_it():
    model, ids = tiny("qwen2_moe"), prompt(2, 9)
    want = logits_of(model, ids, 4)
    policies = {Qwen2MoeSparseMoeBlock: mpd.MoEPrefetchPolicy, Qwen2MoeDecoderLayer: ("self_attn.o_proj",)}
    engine = mpd.init_inference(model, {"dtype": "fp32", "moe_prefetch": DISK, "moe": {"enabled": True}}, injection_policy=policies)
    assert torch.allclose(logits_of(engine, ids, 4), want, atol=1e-4)
    engine.moe_prefetch.detach()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_engine_generates_and_is_left_as_deepspeed_made_it(dtype):
    model, ids = tiny("mixtral"), prompt(2, 9)
    engine = mpd.init_inference(model, {"dtype": dtype, "moe_prefetch": {**DISK, "kv": {"format": "fp8"}}}, max_out_tokens=64)
    out = engine.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert out.shape == (2, 13)
    session = engine.moe_prefetch
    with pytest.raises(SessionError, match="attached"):
        moe_prefetch.attach(engine, DISK)
    session.detach()
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert [h for h in hooks if "moe_prefetch" in h.__module__] == []
    with moe_prefetch.attach(engine, {"experts": {"home": "disk", "resident": 3}}) as again:
        assert again.num_slots == 3


def test_the_callers_dict_is_left_alone():
    config = {"dtype": "fp32", "moe_prefetch": {"kv": {"format": "fp8"}}}
    mpd.init_inference(tiny("mixtral"), config).moe_prefetch.detach()
    assert config == {"dtype": "fp32", "moe_prefetch": {"kv": {"format": "fp8"}}}


# deepspeed.moe.layer.MoE ------------------------------------------------------------------------------------------------
class Plain(nn.Module):
    """An expert that is no gated FFN."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        return F.relu(self.up(x))


def test_own_layers_need_deepspeeds_groups():
    with pytest.raises(ConfigError, match="init_distributed"):
        mpd.init_inference(Net(1), {"dtype": "fp32", "moe_prefetch": HALF})


def asked(net: nn.Module, **section):
    """What is asked of the model before DeepSpeed is called, its groups being there."""
    mpd._check_model(mpd.open_module(net), load(section), torch.float32, "cpu")


def test_experts_are_looked_at_before_deepspeed_is_called():
    for section in ({}, HALF):
        asked(Net(1), **section)
        with pytest.raises(UnsupportedModelError, match="gate_proj is missing"):
            asked(Net(1, expert=Plain()), **section)


def test_what_own_layers_can_not_have():
    with pytest.raises(ConfigError, match="keeps its KV cache itself"):
        asked(Net(1), kv={"format": "fp8"})
    net = Net(1)
    net.moes[1] = MoE(16, Plain(), num_experts=2, k=2)
    with pytest.raises(UnsupportedModelError, match="differ"):
        asked(net)


# parts -------------------------------------------------------------------------------------------------------------------
def test_a_rank_forecasts_its_own_experts_for_all_ranks():
    class Source:
        def forecast(self, layer, step, horizon, hidden_TD):
            return (0, PROB_ONE // 2, PROB_ONE, 7)

        def next_step(self, layer, step):
            return ()

        keep = next_step

    share = LocalShare(Source(), first=1, count=2, ranks=2)
    assert share.forecast(0, 0, 1, None) == (PROB_ONE * 3 // 4, PROB_ONE)
    assert share.next_step(0, 0) == share.keep(0, 0) == ()


def test_on_an_accelerator_the_experts_stay_and_the_cache_is_ours():
    model, ids = tiny("qwen3_moe"), prompt(2, 9)
    want, before = logits_of(model, ids, 4), picture(model)
    session = Session(OwnExperts(model), load(None), None, None, REAL, None)
    assert torch.equal(logits_of(model, ids, 4), want)  # the model's own kernels
    with pytest.raises(SessionError, match="attached"):
        OwnExperts(model).check_free()
    session.detach()
    assert picture(model) == before
    kv = Session(OwnExperts(model), load({"kv": {"format": "fp8", "window": 2, "sinks": 0}}), None, None, REAL, None)
    got = logits_of(model, ids, 4)
    kv.detach()
    with moe_prefetch.attach(model, {"kv": {"format": "fp8", "window": 2, "sinks": 0}}):
        assert torch.allclose(got, logits_of(model, ids, 4), atol=1e-4)
    assert not torch.equal(got, want)
