"""MLA layers of transformers models attend over latents in pages, queries taken to them, as they do over K and V made of all latents."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import moe_prefetch
from moe_prefetch.errors import ConfigError, ShapeError
from moe_prefetch.integrations import transformers_held
from moe_prefetch.integrations.transformers_cache import calibrate, make_cache
from moe_prefetch.integrations.transformers_held import MLA_MODELS, Held
from moe_prefetch.integrations.transformers_pages import serve
from moe_prefetch.kv.store import LayerStore

from . import models
from .test_transformers_pages import OURS, both, under


@pytest.fixture(scope="module")
def mla() -> Any:
    return models.mla()


def steps(model: Any, cache: Any, ids: torch.Tensor, prompt: int = 90, mask: Any = None) -> torch.Tensor:
    """Logits of a prompt, of five steps, and of a draft of four tokens."""
    given = lambda end: {} if mask is None else {"attention_mask": mask[:, :end]}  # noqa: E731
    out = [model(ids[:, :prompt], past_key_values=cache, **given(prompt)).logits]
    for at in range(prompt, prompt + 5):
        out.append(model(ids[:, at : at + 1], past_key_values=cache, **given(at + 1)).logits)
    out.append(model(ids[:, prompt + 5 : prompt + 9], past_key_values=cache, **given(prompt + 9)).logits)
    return torch.cat(out, 1)


def alike(got: torch.Tensor, want: torch.Tensor) -> bool:
    # The query's own key is read as FP16 from the window.
    return torch.allclose(got, want, atol=0.01 * float(want.abs().max()), rtol=0)


@pytest.mark.parametrize("format", ["fp16", "fp8", "fp4-72"])
@pytest.mark.parametrize("family", MLA_MODELS)
def test_steps_are_those_over_heads_made_of_all_latents(family: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = models.mla(family), models.ids(100, 2)
    want = under(model, "sdpa", lambda: steps(model, make_cache(model.config, models.config(format)), ids))
    cache = make_cache(model, models.config(format, attention="pages"))
    whole, calls = LayerStore.gather, []
    monkeypatch.setattr(LayerStore, "gather", lambda self, *a: calls.append(self.length) or whole(self, *a))
    with torch.no_grad():
        got = steps(model, cache, ids)
    assert alike(got, want)
    # The prompt alone asked for what is cached: nothing.
    assert set(calls) == {0}
    assert {row["attention"] for row in cache.report()} == {"pages"}
    cache.check_integrity()


def test_tokens_beams_and_drafts_of_generate(mla: Any) -> None:
    make = lambda: make_cache(mla.config, models.config("fp4-72"))  # noqa: E731
    for kw in ({}, {"num_beams": 3, "n": 12}, {"prompt_lookup_num_tokens": 4, "n": 20}):
        transformers_held.absorb(mla)
        try:
            cache = both(mla, make, models.ids(90, 1).repeat(1 if "prompt_lookup_num_tokens" in kw else 2, 1), **kw)
        finally:
            transformers_held.release(mla)
        assert {row["attention"] for row in cache.report()} == {"pages"}


def test_left_padding_is_not_attended_to(mla: Any) -> None:
    ids, mask = models.ids(100, 2), torch.ones(2, 100, dtype=torch.long)
    mask[1, :23] = 0

    def run(model: Any) -> tuple[torch.Tensor, Any]:
        cache = make_cache(model, models.config("fp8", attention="pages" if model is mla else "auto"))
        cache.set_padding(mask[:, :90])
        with torch.no_grad():
            return steps(mla, cache, ids, mask=mask), cache

    (want, _), (got, cache) = run(mla.config), run(mla)
    assert alike(got[0], want[0]) and alike(got[1, 23:], want[1, 23:])
    assert {row["attention"] for row in cache.report()} == {"pages"}


@pytest.mark.parametrize("format", ["fp8", "fp4-72"])
def test_a_cache_of_fixed_size(mla: Any, format: str) -> None:
    ids, stats = models.ids(100, 2), calibrate(mla, models.ids(60, 2))
    run = lambda model, how: steps(mla, make_cache(model, models.config(format, attention=how), stats, max_length=120), ids)  # noqa: E731
    with torch.no_grad():
        want, got = run(mla.config, "auto"), run(mla, "pages")
    assert alike(got, want) and not torch.equal(got, want)


class Adapter(torch.nn.Module):
    """Stands in front of a linear layer, as an adapter does, with its weight in view."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.in_features = base, base.in_features

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * 1.5


def adapter(linear: torch.nn.Linear, attention: Any) -> Any:
    attention.kv_b_proj = Adapter(linear)


def own_forward(linear: torch.nn.Linear, attention: Any) -> Any:
    linear.forward = lambda x: torch.nn.functional.linear(x, linear.weight) * 1.5


def hook(linear: torch.nn.Linear, attention: Any) -> Any:
    return linear.register_forward_hook(lambda _m, _x, out: out * 1.5)


def hook_before(linear: torch.nn.Linear, attention: Any) -> Any:
    return linear.register_forward_pre_hook(lambda _m, given: (given[0] * 1.5,))


class Moved:
    """As a hook of accelerate's, which wraps `forward` and is known by this name."""


def moved(linear: torch.nn.Linear, attention: Any) -> Any:
    linear._hf_hook, linear.weight.data = Moved(), linear.weight.data * 1.5


def bias(linear: torch.nn.Linear, attention: Any) -> Any:
    linear.bias = torch.nn.Parameter(linear.weight.detach().mean(1))


def hook_everywhere(linear: torch.nn.Linear, attention: Any) -> Any:
    return torch.nn.modules.module.register_module_forward_hook(lambda m, _x, out: out * 1.5 if m is linear else None)


class Packed(torch.Tensor):
    """A weight that is not what it looks like, as quantised ones are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            return func(args[0], args[1].as_subclass(torch.Tensor) * 1.5)
        return super().__torch_function__(func, types, args, kwargs or {})


def packed(linear: torch.nn.Linear, attention: Any) -> Any:
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Packed), requires_grad=False)


@pytest.mark.parametrize("change", [adapter, own_forward, hook, hook_before, moved, bias, hook_everywhere, packed])
def test_a_layer_that_is_more_than_its_weight_makes_heads_as_it_would(change: Any) -> None:
    model, ids = models.mla(), models.ids(100, 1)
    before = make_cache(model, models.config("fp8", attention="pages"))
    attention = model.model.layers[1].self_attn
    handle = change(attention.kv_b_proj, attention)
    try:
        with torch.no_grad():
            got = steps(model, before, ids)
            said = [row["attention"] for row in before.report()]
            assert said[1].startswith("tensors: ") and (said[0] == "pages" or change is hook_everywhere)
            with pytest.raises(ConfigError, match=r"kv_b_proj|every module"):
                serve(under_sdpa(model), models.config(attention="pages"))
            want = steps(model, make_cache(model.config, models.config("fp8", attention="tensors")), ids)
    finally:
        _ = handle and handle.remove()
    assert alike(got, want)
    with torch.no_grad():
        plain = models.mla()
        assert not alike(steps(plain, make_cache(plain.config, models.config("fp8")), ids), want)


@pytest.mark.parametrize("change", ["subclass", "patched", "linear"])
def test_a_class_of_the_callers_own_makes_heads_as_it_would(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = models.mla(), models.ids(100, 1)
    attention, linear = type(model.model.layers[0].self_attn), torch.nn.Linear.forward
    plain = attention.expand_kv
    louder = lambda self, k, r: tuple(x * 1.5 for x in plain(self, k, r))  # noqa: E731
    if change == "subclass":
        model.model.layers[1].self_attn.__class__ = type("Own", (attention,), {"expand_kv": louder})
    elif change == "patched":
        monkeypatch.setattr(attention, "expand_kv", louder)
    else:
        monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: linear(self, x) * 1.1)
    with pytest.raises(ConfigError, match=r"transformers' own|no plain linear layer"):
        make_cache(model, models.config("fp8", attention="pages"))
    run = lambda: steps(model, make_cache(model.config, models.config("fp8")), ids)  # noqa: E731
    want = under(model, "sdpa", run)
    transformers_held.absorb(model)
    assert alike(under(model, OURS, run), want)


def test_attach_asks_for_the_records_that_will_be_kept() -> None:
    """Of the latent and the rotary part, not of a head."""
    kv = {"kv": {"format": "fp8", "window": 4}}
    model = models.mla(rotary=24)
    with moe_prefetch.attach(model, kv):
        models.generate(model, models.ids(20), None)
    with pytest.raises(ShapeError, match="k_dim 40"):
        moe_prefetch.attach(models.mla(latent=40), kv)


def test_a_weight_that_is_nowhere_is_not_used() -> None:
    model = models.mla().to("meta")
    assert {transformers_held._absorbs(m) for m in transformers_held.latent_layers(model)} == {"kv_b_proj is no plain linear layer"}


def test_an_expand_kv_of_the_callers_own_stays(mla: Any) -> None:
    model, ids = models.mla(), models.ids(100, 1)
    attention = model.model.layers[0].self_attn
    attention.expand_kv = own = lambda k, r: tuple(x * 1.5 for x in type(attention).expand_kv(attention, k, r))
    with pytest.raises(ConfigError, match="the caller's own"):
        make_cache(model, models.config("fp8", attention="pages"))
    want = steps(model, make_cache(model.config, models.config("fp8")), ids)
    cache = make_cache(model.config, models.config("fp8", attention="pages"))
    got = under(model, OURS, lambda: steps(model, cache, ids))
    assert alike(got, want.detach()) and attention.expand_kv is own
    assert "heads are made of all latents" in cache.report()[0]["attention"]


def test_a_weight_that_alone_is_trained_gets_its_gradient() -> None:
    model, ids = models.mla(), models.ids(100, 1)
    model.requires_grad_(False)
    weight = model.model.layers[0].self_attn.kv_b_proj.weight.requires_grad_()
    cache = make_cache(model, models.config("fp8", attention="pages"))
    steps(model, cache, ids)[:, 90:].sum().backward()
    assert weight.grad is not None and weight.grad.isfinite().all() and weight.grad.any()


def test_a_served_model_is_saved_as_it_was(mla: Any, tmp_path: Any) -> None:
    cache = make_cache(mla, models.config("fp8", attention="pages"))
    torch.save(mla, tmp_path / "model.pt")
    del cache
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    loaded.set_attn_implementation("sdpa")
    ids = models.ids(20)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, mla(ids).logits)
    assert not [m for m in transformers_held.latent_layers(loaded) if isinstance(vars(m).get("expand_kv"), transformers_held._Expand)]


def under_sdpa(model: Any) -> Any:
    model.set_attn_implementation("sdpa")
    return model


def test_a_model_that_is_not_known_is_decoded() -> None:
    model = models.mla()
    model.config.model_type = "longcat_flash"
    with pytest.raises(ConfigError, match="MLA layers of longcat_flash"):
        make_cache(model, models.config(attention="pages"))
    assert model.config._attn_implementation == "sdpa"


def test_what_was_switched_on_is_taken_back(mla: Any) -> None:
    attention = mla.model.layers[0].self_attn
    first, second = (make_cache(mla, models.config("fp8", attention="pages")) for _ in range(2))
    assert "expand_kv" in vars(attention) and mla.config._attn_implementation == OURS
    twin = copy.deepcopy(mla)
    assert twin.model.layers[0].self_attn.expand_kv.module is twin.model.layers[0].self_attn
    del first
    assert "expand_kv" in vars(attention)
    del second
    assert "expand_kv" not in vars(attention) and mla.config._attn_implementation == "sdpa"
    third = make_cache(mla, models.config("fp8", attention="pages"))
    mla.set_attn_implementation("eager")
    del third
    assert "expand_kv" not in vars(attention) and mla.config._attn_implementation == "eager"
    mla.set_attn_implementation("sdpa")


def test_models_that_share_a_config_are_served_and_given_back_together(mla: Any) -> None:
    other = type(mla)(mla.config).eval()
    first = make_cache(mla, models.config("fp8", attention="pages"))
    second = make_cache(other, models.config("fp8", attention="pages"))
    del first
    with torch.no_grad():
        steps(other, second, models.ids(100))
    assert {row["attention"] for row in second.report()} == {"pages"}
    del second
    assert mla.config._attn_implementation == "sdpa"
    assert not any("expand_kv" in vars(m) for x in (mla, other) for m in transformers_held.latent_layers(x))


def test_autocast_leaves_what_is_cached_and_read_alone() -> None:
    # Without experts, whose choice hangs on a bit.
    model, ids = models.mla("youtu"), models.ids(100, 2)
    for size in (None, 120):
        cache = make_cache(model, models.config("fp8", attention="pages"), max_length=size)
        plain = make_cache(model.config, models.config("fp8"), max_length=size)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            got, want = steps(model, cache, ids).float(), under(model, "sdpa", lambda plain=plain: steps(model, plain, ids)).float()
        assert float((got - want).norm() / want.norm()) < 0.02
        assert {row["attention"] for row in cache.report()} == {"pages"}


def test_held_heads_are_all_heads_to_whoever_computes_with_them(mla: Any) -> None:
    attention = mla.model.layers[0].self_attn
    cache = make_cache(mla, models.config("fp8", attention="pages"))
    layer, twin = (make_cache(mla.config, models.config("fp8", attention=how)).layers[0] for how in ("pages", "tensors"))
    given = [(torch.randn(1, 1, n, 64), torch.randn(1, 1, n, 16)) for n in (130, 1)]
    with torch.no_grad():
        held, plain = [[x.update(*pair) for pair in given][1] for x in (layer, twin)]
        k, v = attention.expand_kv(*held)
        assert type(k) is Held and k.shape == (1, 4, 131, 48) and v.shape == (1, 4, 131, 32)
        want_k, want_v = attention.expand_kv(*plain)
        assert type(want_k) is torch.Tensor
        assert torch.equal(k + 0, want_k) and torch.equal(torch.cat([v, v]), torch.cat([want_v, want_v]))
    del cache
