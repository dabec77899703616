"""attach and detach: what a session undoes, what it refuses, and what users do to a model in the meantime."""
from __future__ import annotations

import copy
import gc
import os
import random
import tempfile
import threading
import weakref

import numpy as np
import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

import moe_prefetch
from moe_prefetch.config import load
from moe_prefetch.errors import (
    ArtefactError,
    BudgetError,
    ConfigError,
    DeadlineError,
    MoEPrefetchError,
    SessionError,
    ShapeError,
    UnsupportedModelError,
)
from moe_prefetch.integrations import transformers as integration
from moe_prefetch.runtime import REAL
from moe_prefetch.seam import open_model
from moe_prefetch.session import Session
from moe_prefetch.types import PROB_ONE
from tests.models import DISK, GateRuntime, logits_of, movers, open_files, picture, prompt, settled, small
from tests.tiny import FAMILIES, tiny


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert os.listdir(folder) == []
    assert settled(lambda: not movers())
    assert not open_files()


# undo -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config", [None, DISK], ids=["local", "disk"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_left(family, config):
    model = small(family)
    before, want = picture(model), logits_of(model, prompt())
    with moe_prefetch.attach(model, config):
        assert picture(model) != before if config is None else True
        logits_of(model, prompt())
    assert picture(model) == before
    assert torch.equal(logits_of(model, prompt()), want)


def test_memory_comes_back():
    """Attached: slots and bounce buffers only. Detached: the weights only."""

    def tensor_bytes():
        gc.collect()
        seen = {}
        for t in gc.get_objects():
            try:
                if isinstance(t, torch.Tensor) and t.device.type == "cpu":
                    s = t.untyped_storage()
                    seen[s.data_ptr()] = s.nbytes()
            except ReferenceError:  # a weak proxy of something gone
                continue
        seen.pop(0, None)
        return sum(seen.values())

    model = small(hidden=64, expert_width=64)
    start = tensor_bytes()
    session = moe_prefetch.attach(model, DISK)
    held = session.held_bytes()["resident"]
    total = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if ".experts." in n)
    assert total <= session.held_bytes()["total"] <= total + 8192 * model.config.num_hidden_layers * model.config.num_experts
    logits_of(model, prompt())
    slack = 64 * (held // session.ledger.record_bytes) + 4096 + 16384
    # The probe's copy of the gates is counted apart.
    gates = sum(p.numel() * 4 for n, p in model.named_parameters() if "mlp.gate.weight" in n) + 2 * 64 * 4
    assert tensor_bytes() <= start - total + held + slack + gates
    session.detach()
    del session
    assert abs(tensor_bytes() - start) <= 16384


@pytest.mark.parametrize("config", [None, DISK, {"experts": {"home": "host", "resident": "50%"}}], ids=["local", "disk", "host"])
def test_a_session_that_is_dropped_goes_with_its_model(config):
    model = small()
    session = moe_prefetch.attach(model, config)
    logits_of(model, prompt())
    # The model alone keeps its session.
    del session
    gc.collect()
    logits_of(model, prompt())
    left, files = weakref.ref(model), len(open_files())
    del model
    gc.collect()
    assert left() is None
    assert settled(lambda: not movers())
    gc.collect()
    assert not open_files() and files == (config is DISK)


def test_arguments_that_are_something_else():
    model = tiny(layers=4)
    with pytest.raises(ConfigError, match="there is no plan 3"):
        moe_prefetch.attach(model, DISK, plan=3)
    with pytest.raises(UnsupportedModelError, match="pass the model itself"):
        moe_prefetch.attach(torch.compile(model))

    class Tensors:
        def forecast(self, layer, step, horizon, hidden_TD):
            return torch.zeros(8, dtype=torch.int64)

        def next_step(self, layer, step):
            return ()

        keep = next_step

    with moe_prefetch.attach(model, DISK, forecaster=Tensors()), pytest.raises(ShapeError, match="a forecast is a Tensor"):
        logits_of(model, prompt())


def test_detach_twice_is_once():
    model = small()
    session = moe_prefetch.attach(model, DISK)
    session.detach()
    before = picture(model)
    session.detach()
    assert picture(model) == before


def test_attach_and_detach_a_hundred_times():
    model = small()
    before = picture(model)
    for _ in range(100):
        moe_prefetch.attach(model).detach()
    for _ in range(5):
        moe_prefetch.attach(model, DISK).detach()
    assert picture(model) == before


@pytest.mark.parametrize("config", [None, DISK], ids=["local", "disk"])
def test_an_exception_in_the_body_still_undoes(config):
    model = small()
    before = picture(model)
    with pytest.raises(KeyError), moe_prefetch.attach(model, config):
        raise KeyError("the user's own")
    assert picture(model) == before


def test_attached_in_inference_mode_detached_outside():
    model = small()
    before, want = picture(model), logits_of(model, prompt())
    with torch.inference_mode():
        session = moe_prefetch.attach(model, DISK)
        got = logits_of(model, prompt())
    assert torch.equal(logits_of(model, prompt()), got)
    session.detach()
    assert picture(model) == before
    assert torch.equal(logits_of(model, prompt()), want)
    # Nor the other way round: a parameter made in inference mode could not be trained.
    session = moe_prefetch.attach(model, DISK)
    with torch.inference_mode():
        session.detach()
    assert picture(model) == before
    model(prompt()).logits.sum().backward()


def test_attached_under_another_default_device_and_dtype():
    model = small()
    before = picture(model)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), moe_prefetch.attach(model, DISK):
            pass
    finally:
        torch.set_default_dtype(torch.float32)
    assert picture(model) == before


def test_parameters_shared_by_two_layers_come_back():
    model = small()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    before, want = picture(model), logits_of(model, prompt())
    with moe_prefetch.attach(model, DISK):
        assert torch.allclose(logits_of(model, prompt()), want, atol=1e-4)
    assert picture(model) == before


def test_parameters_that_are_not_contiguous_come_back():
    model = small()
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            p = getattr(layer.mlp.experts, name)
            setattr(layer.mlp.experts, name, torch.nn.Parameter(p.detach().transpose(1, 2).contiguous().transpose(1, 2)))
    before = picture(model)
    want = logits_of(model, prompt())
    with moe_prefetch.attach(model, DISK):
        assert torch.allclose(logits_of(model, prompt()), want, atol=1e-4)
    assert picture(model) == before


def test_frozen_while_attached_stays_frozen():
    model = small()
    with moe_prefetch.attach(model, DISK):
        model.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())


# models ------------------------------------------------------------------------------------------------------------------
def test_sparse_steps_and_dense_layers_between():
    torch.manual_seed(0)
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=7, num_attention_heads=2, num_key_value_heads=1, num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16, intermediate_size=48, shared_expert_intermediate_size=16, decoder_sparse_step=2, mlp_only_layers=[3],
        pad_token_id=0)).eval()
    before = picture(model)
    with moe_prefetch.attach(model) as session:
        assert session.num_layers == 2
        want = logits_of(model, prompt())
    with moe_prefetch.attach(model, DISK):
        assert torch.equal(logits_of(model, prompt()), want)
    assert picture(model) == before


@pytest.mark.parametrize("width", [9, 17, 50])
def test_odd_widths_are_bitwise_the_same(width):
    """Resident weights of odd widths lie at any address; the result must not know."""
    model = small(expert_width=width, hidden=2 * width)
    with moe_prefetch.attach(model):
        want = logits_of(model, prompt(2))
    with moe_prefetch.attach(model, DISK):
        assert torch.equal(logits_of(model, prompt(2)), want)


def test_beams_and_generate():
    model = tiny()
    kw = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    ids = prompt(2, 5)
    with moe_prefetch.attach(model):
        want = model.generate(ids, attention_mask=torch.ones_like(ids), **kw)
    with moe_prefetch.attach(model, DISK):
        assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **kw), want)


@pytest.mark.parametrize("build", [
    lambda: GptOssForCausalLM(GptOssConfig(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                                           num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2)),
    lambda: GraniteMoeForCausalLM(GraniteMoeConfig(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
                                                   num_attention_heads=2, num_local_experts=4, num_experts_per_tok=2)),
], ids=["gpt_oss", "granitemoe"])
def test_other_moe_families_are_refused_by_name(build, request):
    model = build()
    before = picture(model)
    with pytest.raises(UnsupportedModelError, match=f"{request.node.callspec.id} is an MoE family that is not supported yet"):
        moe_prefetch.attach(model)
    assert picture(model) == before


def test_experts_with_a_gate_of_their_own_are_refused(monkeypatch):
    model = tiny("qwen3_moe")
    before, experts = picture(model), model.model.layers[1].mlp.experts
    experts._apply_gate = lambda gate_up: gate_up.chunk(2, -1)[0].clamp(max=1)
    with pytest.raises(UnsupportedModelError, match="_apply_gate of their own"):
        moe_prefetch.attach(model)
    del experts._apply_gate
    monkeypatch.setattr(type(experts), "_apply_gate", lambda self, gate_up: gate_up.chunk(2, -1)[0])
    with pytest.raises(UnsupportedModelError, match="_apply_gate of their own"):
        moe_prefetch.attach(model, DISK)
    assert picture(model) == before


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_of_another_dtype(layer):
    """transformers casts hidden states to the weights' dtype, so such a model works; where records are made, it is refused."""
    model = tiny("qwen2_moe", expert_width=24)
    model.model.layers[layer].mlp.experts.bfloat16()
    want = logits_of(model, prompt())
    with moe_prefetch.attach(model):
        assert torch.equal(logits_of(model, prompt()), want)
    for home in ("disk", "host"):
        with pytest.raises(UnsupportedModelError, match="experts differ"):
            moe_prefetch.attach(model, {"version": 1, "experts": {"home": home, "resident": "50%"}})
    assert torch.equal(logits_of(model, prompt()), want)


def test_a_dense_model_is_refused_by_name():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(UnsupportedModelError, match="llama has no MoE layers"):
        moe_prefetch.attach(model)


def test_a_sparse_family_without_sparse_layers_is_refused():
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                               num_key_value_heads=1,
                                               num_experts=4, moe_intermediate_size=16, intermediate_size=48, mlp_only_layers=[0, 1]))
    with pytest.raises(UnsupportedModelError, match="no MoE layers"):
        moe_prefetch.attach(model)


@pytest.mark.parametrize("thing", [None, 3, "Qwen/Qwen3-30B-A3B", torch.nn.Linear(2, 2), GenerationConfig(), torch.nn.Sequential(),
                                   MixtralForCausalLM],
                         ids=lambda t: type(t).__name__)
def test_what_is_no_model_is_refused(thing):
    with pytest.raises(UnsupportedModelError):
        moe_prefetch.attach(thing)


@pytest.mark.parametrize("flag", ["is_concatenated", "is_transposed", "has_bias", "has_gate"])
def test_experts_of_another_layout_are_refused(flag):
    """Where dimension 0 is not the expert, or gate and up lie otherwise, the bytes would be cut at the wrong places."""
    model = small()
    experts = model.model.layers[1].mlp.experts
    setattr(experts, flag, not getattr(experts, flag))
    with pytest.raises(UnsupportedModelError, match="another layout"):
        moe_prefetch.attach(model, DISK)


def test_quantised_or_wrapped_experts_are_refused():
    model = small()
    experts = model.model.layers[1].mlp.experts
    weight = experts.down_proj.detach()
    del experts.down_proj
    experts.down_proj = weight
    with pytest.raises(UnsupportedModelError, match="plain parameters"):
        moe_prefetch.attach(model, DISK)


def test_no_random_number_is_drawn():
    model = small()
    with moe_prefetch.attach(model, DISK):
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
        logits_of(model, prompt(2))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), np.random.get_state()[1].tobytes()) == before[1:]


def test_a_shared_expert_is_added_once():
    """It is the model's own business; against the model untouched, at every step."""
    model = tiny("qwen2_moe")
    want = logits_of(model, prompt(2), 6)
    with moe_prefetch.attach(model, DISK):
        assert torch.allclose(logits_of(model, prompt(2), 6), want, atol=1e-3)


def test_left_padding_is_no_different():
    model = tiny()
    ids, mask = prompt(2, 6), torch.ones(2, 6, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        with moe_prefetch.attach(model, DISK):
            got = model(ids, attention_mask=mask).logits
        with moe_prefetch.attach(model):
            assert torch.equal(model(ids, attention_mask=mask).logits, got)
    assert torch.allclose(got[mask.bool()], want[mask.bool()], atol=1e-3)


def test_experts_on_an_accelerator_are_refused_for_now():
    """No accelerator is needed to see it: a host whose tensors are anywhere but on the CPU."""
    model = small()
    host = open_model(model)
    host.tensors = lambda layer, expert: {"gate_up": torch.empty(32, 32, device="meta"), "down": torch.empty(32, 16, device="meta")}
    with pytest.raises(UnsupportedModelError, match="CPU"):
        Session(host, load(DISK), None, None, REAL, None)


def test_a_model_that_was_never_loaded_is_refused():
    model = small("mixtral").to("meta")
    with pytest.raises(SessionError, match="not in memory") as e:
        moe_prefetch.attach(model, DISK)
    assert "attached already" not in str(e.value)


# twice --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", [None, DISK], ids=["local", "disk"])
@pytest.mark.parametrize("second", [None, DISK], ids=["local", "disk"])
def test_a_second_session_on_a_model_is_refused_before_any_work(first, second, tmp_path):
    model = small()
    before = picture(model)
    if second:
        second = {"experts": {**second["experts"], "path": str(tmp_path / "records")}}
    with moe_prefetch.attach(model, first) as session:
        with pytest.raises(SessionError, match="attached"):
            moe_prefetch.attach(model, second)
        with pytest.raises(SessionError, match="attached"):
            moe_prefetch.attach(model.model, second)
        assert not (tmp_path / "records").exists()
        logits_of(model, prompt())
        assert session.ledger.total.demanded > 0
    assert picture(model) == before


def test_two_models_in_one_process_never_meet():
    """Interleaved, detached in either order; one with weights of its own, one a twin."""
    models = [small(seed=s) for s in (0, 1, 1)]
    wants = []
    for m in models:
        with moe_prefetch.attach(m):
            wants.append(logits_of(m, prompt()))
    before = [picture(m) for m in models]
    sessions = [moe_prefetch.attach(m, DISK) for m in models]
    for _ in range(2):
        for m, want in zip(models, wants):
            assert torch.equal(logits_of(m, prompt()), want)
    sessions[1].detach()
    assert torch.equal(logits_of(models[0], prompt()), wants[0])
    assert torch.equal(logits_of(models[2], prompt()), wants[2])
    sessions[0].detach()
    assert torch.equal(logits_of(models[2], prompt()), wants[2])
    sessions[2].detach()
    assert [picture(m) for m in models] == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_models_that_share_one_config_object(order):
    a = small()
    config = a.config
    b, c = Qwen2MoeForCausalLM(config).eval(), Qwen2MoeForCausalLM(config).eval()
    plain = [logits_of(m, prompt()) for m in (a, b, c)]
    before = [picture(m) for m in (a, b, c)]
    sessions = [moe_prefetch.attach(a, DISK), moe_prefetch.attach(b, DISK)]
    # The third was never attached: its own computation, bit for bit.
    assert torch.equal(logits_of(c, prompt()), plain[2])
    for i in order:
        sessions[i].detach()
        for m, want in ((a, plain[0]), (b, plain[1])):
            assert torch.allclose(logits_of(m, prompt()), want, atol=1e-4)
    assert [picture(m) for m in (a, b, c)] == before


def test_the_models_own_switch_of_implementation_does_not_bypass_a_session():
    model = small()
    with moe_prefetch.attach(model, DISK) as session:
        want = logits_of(model, prompt())
        model.set_experts_implementation("batched_mm")
        n = session.ledger.total.demanded
        assert torch.equal(logits_of(model, prompt()), want)
        assert session.ledger.total.demanded > n
    assert model.config._experts_implementation == "batched_mm"


# what users do to an attached model -----------------------------------------------------------------------------------------
def test_saving_an_attached_model_fails_loudly(tmp_path):
    model = small()
    want = model.state_dict()
    want = {k: v.clone() for k, v in want.items()}
    with moe_prefetch.attach(model, DISK):
        with pytest.raises(SessionError, match="detach"):
            model.state_dict()
        with pytest.raises(SessionError, match="detach"):
            model.save_pretrained(tmp_path / "saved")
        with pytest.raises(SessionError, match="detach"):
            model.load_state_dict(want)
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    for name, value in again.state_dict().items():
        assert torch.equal(value, want[name]), name


def test_saving_with_experts_at_home_local_writes_a_model_that_loads(tmp_path):
    model = small()
    with moe_prefetch.attach(model):
        model.save_pretrained(tmp_path / "saved")
    assert "moe_prefetch" not in (tmp_path / "saved" / "config.json").read_text()
    again = type(model).from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(logits_of(again, prompt()), logits_of(model, prompt()))


@pytest.mark.parametrize("config", [None, DISK], ids=["local", "disk"])
def test_a_copy_of_an_attached_model_is_no_part_of_the_session(config):
    model = small()
    want = logits_of(model, prompt())
    with moe_prefetch.attach(model, config) as session:
        twin = copy.deepcopy(model)
        inside = logits_of(model, prompt())
        n, step = session.ledger.total.demanded, session._step
        if config is None:
            assert torch.allclose(logits_of(twin, prompt()), want, atol=1e-4)
        else:
            with pytest.raises(SessionError, match="copy"):
                logits_of(twin, prompt())
        assert (session.ledger.total.demanded, session._step) == (n, step)
        assert torch.equal(logits_of(model, prompt()), inside)


def test_a_model_converted_while_attached_is_told():
    model = small()
    before = picture(model)
    with moe_prefetch.attach(model, DISK):
        model.bfloat16()
        with pytest.raises(ShapeError, match="bfloat16"):
            logits_of(model, prompt())
        model.float()
    after = picture(model)
    assert [p[:-1] for p in after["parameters"]] == [p[:-1] for p in before["parameters"]]


@pytest.mark.parametrize("part", ["model", "base", "layer", "experts", "wrapper"])
def test_an_attached_model_may_be_moved_to_where_it_is_and_nowhere_else(part):
    """Trainer and Accelerator move every model; and torch's advice for what is on `meta`, to_empty, would lose all other weights."""
    model = small()
    parts = {"model": model, "base": model.model, "layer": model.model.layers[1], "experts": model.model.layers[1].mlp.experts,
             "wrapper": torch.nn.Sequential(model)}
    before, want, x = picture(model), logits_of(model, prompt()), parts[part]
    with moe_prefetch.attach(model, DISK):
        for same in (lambda: x.to("cpu"), lambda: x.to(torch.float32), lambda: x.cpu(), lambda: x.float()):
            same()
        for other in (lambda: x.to("meta"), lambda: x.to_empty(device="cpu"), lambda: x.to("meta", torch.bfloat16)):
            with pytest.raises(SessionError, match="detach before"):
                other()
        twin = copy.deepcopy(model)
        with pytest.raises(SessionError, match="detach before"):
            twin.to_empty(device="cpu")
        assert torch.equal(logits_of(model, prompt()), want)
    assert picture(model) == before and torch.equal(logits_of(model, prompt()), want)
    assert not [m for m in model.modules() if "_apply" in vars(m)]
    x.to("cpu")
    x.to("meta")


def test_a_users_hooks_stay_and_run():
    model = small()
    calls = []
    # An activation runs once an expert, or once a batch of them: that is the computation's own affair.
    handles = [m.register_forward_hook(lambda m, a, o: calls.append(type(m).__name__)) for n,
               m in model.named_modules() if not n.endswith("act_fn")]
    logits_of(model, prompt())
    plain = calls.copy()
    calls.clear()
    before = picture(model)
    with moe_prefetch.attach(model, DISK):
        logits_of(model, prompt())
    assert calls == plain
    assert picture(model) == before
    for h in handles:
        h.remove()


def test_gradients_are_refused():
    model = small()
    with moe_prefetch.attach(model, DISK), pytest.raises(SessionError, match="inference only"):
        model(prompt())


def test_single_blocks_are_refused_outside_a_pass():
    model = small()
    with moe_prefetch.attach(model, DISK), torch.no_grad(), pytest.raises(SessionError, match="outside"):
        model.model.layers[0].mlp(torch.zeros(1, 3, 32))


def test_wrong_arguments_get_the_models_own_error():
    model = small()
    with pytest.raises(ValueError, match="input_ids") as plain, torch.no_grad():
        model()
    with moe_prefetch.attach(model, DISK), torch.no_grad():
        with pytest.raises(ValueError, match="input_ids") as attached:
            model()
        assert str(attached.value) == str(plain.value)
        with pytest.raises(TypeError, match="input_ids"):
            model.model(prompt(), input_ids=prompt())
        with pytest.raises(TypeError, match="argument"):
            model.model(*[None] * 30)
        logits_of(model, prompt())


# passes ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit], ids=lambda e: e.__name__)
@pytest.mark.parametrize("where", ["model.layers.0", "model.layers.1.mlp.gate", "model.layers.1.mlp.experts", "model.norm"])
def test_an_exception_inside_a_pass(where, error):
    """torch runs `always_call` hooks after an Exception only: Ctrl-C must not lock the session for good."""
    model = small()
    before = picture(model)
    with moe_prefetch.attach(model):
        want = logits_of(model, prompt())

    def strike(module, args, output):
        raise error("struck")

    session = moe_prefetch.attach(model, DISK)
    for _ in range(2):
        handle = model.get_submodule(where).register_forward_hook(strike)
        with pytest.raises(error):
            logits_of(model, prompt())
        handle.remove()
        assert torch.equal(logits_of(model, prompt()), want)
        session.table.check_integrity()
    handle = model.get_submodule(where).register_forward_hook(strike)
    with pytest.raises(error):
        logits_of(model, prompt())
    handle.remove()
    session.detach()
    assert picture(model) == before


def test_a_pass_within_a_pass_is_refused_and_the_outer_one_goes_on():
    model = small()
    ids, seen = prompt(), []

    def nested(module, args, output):
        with pytest.raises(SessionError, match="second forward pass"):
            model(ids)
        seen.append(True)

    with moe_prefetch.attach(model, DISK) as session:
        want = logits_of(model, ids)
        handle = model.model.layers[0].register_forward_hook(nested)
        step = session._step
        assert torch.equal(logits_of(model, ids, 1), want[:, :7])
        handle.remove()
        assert seen and session._step == step + 1
        assert torch.equal(logits_of(model, ids), want)


def test_detaching_within_a_pass_is_refused():
    model = small()
    before = picture(model)
    with moe_prefetch.attach(model, DISK) as session:

        def hook(module, args, output):
            with pytest.raises(SessionError, match="inside a forward pass"):
                session.detach()

        handle = model.model.layers[0].register_forward_hook(hook)
        logits_of(model, prompt())
        handle.remove()
    assert picture(model) == before


def test_a_second_thread_is_refused_and_the_first_goes_on():
    model = small()
    with moe_prefetch.attach(model):
        want = logits_of(model, prompt(), 1)
    runtime = GateRuntime()
    with moe_prefetch.attach(model, DISK, runtime=runtime) as session:
        got = []
        runtime.shut()
        thread = threading.Thread(target=lambda: got.append(logits_of(model, prompt(), 1)))
        thread.start()
        assert settled(lambda: runtime.waiting > 0)
        step = session._step
        for _ in range(3):
            with pytest.raises(SessionError, match="second forward pass"):
                logits_of(model, prompt())
        with pytest.raises(SessionError, match="inside a forward pass"):
            session.detach()
        assert session._step == step
        runtime.open()
        thread.join(20)
        assert torch.equal(got[0], want)
        assert session._step == step + 1
        session.table.check_integrity()


def test_a_pass_may_come_from_any_thread():
    model = small()
    with moe_prefetch.attach(model, DISK):
        want = logits_of(model, prompt())
        got = []
        thread = threading.Thread(target=lambda: got.append(logits_of(model, prompt())))
        thread.start()
        thread.join()
        assert torch.equal(got[0], want)


def test_an_abandoned_pass_of_a_thread_that_is_gone():
    model = small()
    with moe_prefetch.attach(model, DISK):
        want = logits_of(model, prompt())

        def strike(module, args, output):
            raise SystemExit

        handle = model.model.layers[1].register_forward_hook(strike)
        ended = []

        def work():
            with pytest.raises(SystemExit):
                logits_of(model, prompt())
            ended.append(True)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        handle.remove()
        assert ended
        assert torch.equal(logits_of(model, prompt()), want)


# bad input ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("resident", [5, 100, "1%", "1B", "4000B"])
def test_budgets_that_hold_nothing_or_too_much(resident):
    model = small()
    before = picture(model)
    with pytest.raises(BudgetError) as e:
        moe_prefetch.attach(model, {"experts": {"home": "disk", "resident": resident}})
    assert e.value.do
    assert picture(model) == before


def test_a_budget_in_bytes_holds_with_everything_counted():
    model = small()
    record = 8192
    for budget in (record * (2 * 1 + 3), record * (2 * 2 + 3) + 5, record * (2 * 4 + 3)):
        with moe_prefetch.attach(model, {"experts": {"home": "disk", "resident": f"{budget}B", "threads": 2}}) as session:
            assert session.ledger.record_bytes == record
            assert session.held_bytes()["resident"] <= budget
            assert session.num_slots == (budget // record - 3) // 2
    with pytest.raises(BudgetError):
        moe_prefetch.attach(model, {"experts": {"home": "disk", "resident": f"{record * 5 - 1}B", "threads": 2}})


@pytest.mark.parametrize("plan", ["prob", "none", ""])
def test_an_unknown_plan(plan):
    with pytest.raises(ConfigError, match="plan"):
        moe_prefetch.attach(small(), DISK, plan=plan)


def test_a_plan_that_would_not_be_what_it_says():
    """An oracle without a future and a probe without a file would run the unfitted gate under another name."""
    for plan in ("oracle", "probe"):
        with pytest.raises(ConfigError, match=plan):
            moe_prefetch.attach(small(), DISK, plan=plan)
    with pytest.raises(ConfigError, match="local"):
        moe_prefetch.attach(small(), plan="lru")


class Wrong:
    def __init__(self, probs):
        self.probs = probs

    def forecast(self, layer, step, horizon, hidden_TD):
        return self.probs

    def next_step(self, layer, step):
        return self.probs

    def keep(self, layer, step):
        return ()


@pytest.mark.filterwarnings("ignore:.*always_call.*")
@pytest.mark.parametrize("probs", [(PROB_ONE,), (0,) * 5, (0.5,) * 4, (-1, 0, 0, 0), (PROB_ONE + 1, 0, 0, 0)], ids=str)
def test_a_forecast_of_the_wrong_kind_is_named(probs):
    model = small(layers=4)
    before = picture(model)
    with moe_prefetch.attach(model, DISK, forecaster=Wrong(probs), plan="stale"):
        with pytest.raises(ShapeError, match="forecast"):
            logits_of(model, prompt())
    assert picture(model) == before


def test_weights_that_are_set_while_attached_are_not_taken_over_in_silence(caplog):
    model = small()
    before, experts = picture(model), model.model.layers[0].mlp.experts
    with moe_prefetch.attach(model, DISK), caplog.at_level("WARNING"):
        experts.down_proj = torch.nn.Parameter(torch.zeros(experts.down_proj.shape))
    assert picture(model) == before
    assert [r.message for r in caplog.records if "was set" in r.message] == [
        f"down_proj was set while {type(model).__name__} was attached; what it was before comes back"]


def test_layers_that_share_their_experts_come_back_without_a_warning(caplog):
    model = small()
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    before = picture(model)
    with moe_prefetch.attach(model, DISK):
        logits_of(model, prompt())
    assert picture(model) == before and not [r for r in caplog.records if "was set" in r.message]


def test_a_modelled_drive_that_no_deadline_allows_is_refused():
    """Its sleep can't be ended: passes would fail, and `detach` would keep the weights for as long."""
    model = small()
    before, experts = picture(model), {"home": "disk", "resident": 1, "threads": 2, "deadline": 1, "drive": {"bandwidth": 10.0}}
    with pytest.raises(ConfigError, match="modelled drive"):
        moe_prefetch.attach(model, {"experts": experts})
    assert picture(model) == before
    with moe_prefetch.attach(model, {"experts": {**experts, "drive": {"bandwidth": 1e9}}}):
        logits_of(model, prompt())


def test_a_read_beyond_the_deadline():
    """A typed error in about the deadline, not a multiple of it; then the same session goes on, and detaches."""
    model = small(experts=8, top_k=4)
    before = picture(model)
    with moe_prefetch.attach(model):
        want = logits_of(model, prompt())
    runtime = GateRuntime()
    config = {"experts": {"home": "disk", "resident": 1, "threads": 2, "deadline": 0.3}}
    session = moe_prefetch.attach(model, config, runtime=runtime)
    runtime.shut()
    start = runtime.now()
    for _ in range(2):
        with pytest.raises(DeadlineError):
            logits_of(model, prompt())
    assert runtime.now() - start < 2.5
    with pytest.raises(DeadlineError):
        session.detach()
    runtime.open()
    assert torch.equal(logits_of(model, prompt()), want)
    session.wait_idle()
    session.table.check_integrity()
    session.detach()
    assert picture(model) == before


# with others ----------------------------------------------------------------------------------------------------------------
def test_an_attached_model_can_be_observed():
    model = small()
    want = []

    class Watch:
        def step_begin(self, *args):
            """Nothing to do."""

        residual = moe_input = step_end = step_begin

        def routed(self, layer, logits_TE, ids_TK):
            want.append((layer, tuple(map(tuple, ids_TK.tolist()))))

    with integration.observe(model, Watch()):
        logits_of(model, prompt(), 2)
    plain = want.copy()
    want.clear()
    before = picture(model)
    with moe_prefetch.attach(model, DISK):
        assert len(integration.gates(model)) == 2
        with integration.observe(model, Watch()):
            logits_of(model, prompt(), 2)
    assert want == plain
    assert picture(model) == before


def test_two_sessions_on_one_folder(tmp_path):
    """The second has other weights and writes the folder again; the first reads on from what it opened."""
    models = [small(seed=s) for s in (0, 1)]
    config = {"experts": {**DISK["experts"], "path": str(tmp_path / "records")}}
    wants = []
    for m in models:
        with moe_prefetch.attach(m):
            wants.append(logits_of(m, prompt()))
    before = [picture(m) for m in models]
    with moe_prefetch.attach(models[0], config), moe_prefetch.attach(models[1], config):
        for _ in range(2):
            for m, want in zip(models, wants):
                assert torch.equal(logits_of(m, prompt()), want)
    assert [picture(m) for m in models] == before


def test_a_cache_given_by_place_stays_the_callers():
    """The base model called with positional arguments, its cache the fourth."""
    model = small()
    with moe_prefetch.attach(model, {"kv": {"format": "fp8"}}), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model.model(prompt(), None, None, cache)
        assert cache.get_seq_length() == 7
        first = model.model(prompt(1, 1), None, None, cache).last_hidden_state
        again = DynamicCache(config=model.config)
        model.model(input_ids=prompt(), past_key_values=again)
        assert torch.equal(model.model(input_ids=prompt(1, 1), past_key_values=again).last_hidden_state, first)


@pytest.mark.parametrize("kv", [{"format": "fp4-quality", "calibration": "nowhere"}, {"format": "fp8", "layers": {99: "fp8"}}])
def test_a_cache_that_can_not_be_kept_is_refused_at_attach(kv):
    """Seen by a newcomer: these were found out in generate()."""
    model = tiny()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(MoEPrefetchError):
        moe_prefetch.attach(model, {"kv": kv})
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_report_made_after_detach_says_what_was_held():
    """Seen by a newcomer: it said that everything had been in memory."""
    model = tiny()
    with moe_prefetch.attach(model, {"experts": {"home": "disk", "resident": 2}}) as session, torch.no_grad():
        model(torch.arange(6)[None])
        inside = session.report().intro
    assert session.report().intro == inside and session.held_bytes()["resident"] < session.held_bytes()["total"]


def test_records_altered_while_attached_do_not_become_the_model(tmp_path):
    """Their stamps are whole; detach compares every byte, and goes on once the file is as it was."""
    model = small()
    before = logits_of(model, prompt())
    session = moe_prefetch.attach(model, {"experts": {"home": "disk", "resident": "50%", "path": str(tmp_path)}})
    (file,) = [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".json"]
    whole = file.read_bytes()
    at = len(whole) // 2 // 4096 * 4096 + 512
    with open(file, "r+b") as f:
        f.seek(at)
        f.write(bytes(b ^ 1 for b in whole[at : at + 64]))
    with pytest.raises(ArtefactError, match=r"altered.*keep the file: it alone has the experts' weights") as e:
        session.detach()
    assert "delete" not in str(e.value)
    file.write_bytes(whole)
    session.detach()
    assert torch.equal(logits_of(model, prompt()), before)
