"""What a newcomer gets wrong with the KV wing is refused by name before any work, or said aloud."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch

from moe_prefetch.config import WITH_OUTLIERS, KVConfig
from moe_prefetch.errors import CacheError, ConfigError, MoEPrefetchError, ShapeError
from moe_prefetch.integrations.transformers_cache import calibrate, make_cache
from moe_prefetch.integrations.transformers_pages import reads_pages, serve
from moe_prefetch.integrations.transformers_quality import decoded, gate, log_probs
from moe_prefetch.kv.codec import OutlierStats
from moe_prefetch.kv.format import FORMATS

from . import models


@pytest.fixture(scope="module")
def llama() -> Any:
    return models.llama()


@pytest.fixture(scope="module")
def stats(llama) -> OutlierStats:
    return calibrate(llama, models.ids(200, 2, seed=9))


# calibration ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ids", "kw"),
    [
        (models.ids(50)[0], {}), (models.ids(50).float(), {}), (models.ids(50)[None], {}), (models.ids(50)[:0], {}), (models.ids(4), {}),
        (models.ids(50), {"skip": -1}), (models.ids(50), {"skip": 50}), (models.ids(50) + models.VOCAB, {}), (-models.ids(50), {}),
        (models.ids(50).tolist(), {}),
    ],
    ids=["one row", "floats", "three dims", "no row", "sinks only", "skip -1", "skip all", "too large", "negative", "a list"],
)  # fmt: skip
def test_calibration_refuses_what_are_no_token_ids(llama, ids: Any, kw: dict[str, int]) -> None:
    with pytest.raises(ShapeError, match="token_ids"):
        calibrate(llama, ids, **kw)


def test_a_calibration_that_lacks_layers_is_refused(llama, stats) -> None:
    part = OutlierStats({0: stats.layers[0]})
    with pytest.raises(ConfigError, match="not seen layer 1"):
        make_cache(llama.config, models.config("fp4-72"), part)
    with pytest.raises(ConfigError, match="not seen layer 1"):
        gate(llama, [models.ids(90)[0]], part, format="fp4-72", max_kl=1.0, window=16)
    # A layer that has no codebook needs none.
    make_cache(llama.config, models.config("fp4-72", layers={1: "fp8"}), part)
    make_cache(llama.config, models.config("fp8"), part)


def test_without_a_calibration_the_gate_measures_what_is_served(llama) -> None:
    """Each sequence makes its codebook from its own first tokens; a neutral one, or one made with hindsight, would be another cache."""
    text = models.ids(150)[0]
    one_pass = log_probs(llama, text, decoded(None, {0: "fp4-72", 1: "fp4-72"}, window=16, settle=32))
    cache = make_cache(llama.config, KVConfig(format="fp4-72", window=16))
    with torch.no_grad():
        steps = torch.cat([llama(input_ids=text[None, i : i + 1], past_key_values=cache).logits[0] for i in range(150)]).log_softmax(-1)
    exact = log_probs(llama, text)
    assert (one_pass - steps).abs().max() < 0.1 * (exact - steps).abs().max()
    books = [layer.store.books[0] for layer in cache.layers]
    assert all(bool((book[0] >= 0).any()) and bool(book[1].any()) for book in books)


# padding ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mask", [torch.ones(5), torch.ones(0, 5), torch.ones(1, 1, 5), [[1, 1]], None], ids=str)
def test_padding_refuses_what_is_no_mask(llama, mask: Any) -> None:
    with pytest.raises(ShapeError, match="mask"):
        make_cache(llama.config, models.config("fp8")).set_padding(mask)


def test_padding_that_comes_too_late_or_for_other_rows(llama) -> None:
    cache = make_cache(llama.config, models.config("fp8"))
    cache.set_padding(torch.ones(3, 10))
    with pytest.raises(CacheError, match="padding"):
        models.generate(llama, models.ids(10, 2), cache, 2)
    cache = make_cache(llama.config, models.config("fp8"))
    models.generate(llama, models.ids(10, 2), cache, 2)
    with pytest.raises(CacheError, match="padding"):
        cache.set_padding(torch.ones(2, 10))


# sizes --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [0, -1])
def test_a_fixed_size_must_hold_a_token(llama, n: int) -> None:
    with pytest.raises(ConfigError, match="max_length"):
        make_cache(llama.config, models.config("fp8"), max_length=n)


def test_a_full_cache_of_fixed_size_says_so_and_goes_on(llama) -> None:
    cache, ids = make_cache(llama.config, models.config("fp8"), max_length=32), models.ids(33)
    step = lambda i: llama(input_ids=ids[:, i : i + 1], past_key_values=cache).logits  # noqa: E731
    with torch.no_grad():
        llama(input_ids=ids[:, :31], past_key_values=cache)
        last = step(31)
        for _ in range(2):
            with pytest.raises(CacheError, match="at most 32"):
                step(32)
        assert int(cache.get_seq_length()) == 32
        cache.crop(-1)
        assert torch.equal(step(31), last)
        cache.reset()
        llama(input_ids=ids[:, :32], past_key_values=cache)


def test_steps_that_a_graph_took_behind_the_hosts_back_do_not_refuse_room(llama) -> None:
    """A replayed graph adds and crops on the device alone: where the host's count says full, the device is asked."""
    cache, ids = make_cache(llama.config, models.config("fp8"), max_length=32), models.ids(33)
    with torch.no_grad():
        llama(input_ids=ids[:, :31], past_key_values=cache)
        for layer in cache.layers:
            layer.static.length.sub_(5)
        for i in range(26, 32):
            llama(input_ids=ids[:, i : i + 1], past_key_values=cache)
        with pytest.raises(CacheError, match="at most 32"):
            llama(input_ids=ids[:, 32:], past_key_values=cache)


def test_a_cache_of_fixed_size_has_no_settle(llama) -> None:
    with pytest.raises(ConfigError, match="settle"):
        make_cache(llama.config, KVConfig(format="fp8", settle=16), max_length=50)
    make_cache(llama.config, KVConfig(format="fp8"), max_length=50)


@pytest.mark.parametrize(("window", "said"), [(4096, True), (16, False)])
def test_a_window_that_breaks_the_formats_promise_is_said_once(llama, caplog, window: int, said: bool) -> None:
    cache = make_cache(llama.config, KVConfig(format="fp4-72", window=window))
    with caplog.at_level(logging.WARNING):
        models.generate(llama, models.ids(20), cache, 2)
    found = [r for r in caplog.records if "promises 4.48" in r.getMessage()]
    assert len(found) == said
    assert all((row["bits_per_element"] > row["max_bits"]) == said for row in cache.report())


# settings -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kw",
    [{"format": "fp3"}, {"format": None}, {"window": -1}, {"windw": 3}, {"layers": {"x": "fp8"}}, {"layers": {-1: "fp8"}},
     {"layers": {1: "q"}}, {"layers": {"1": "fp8", "01": "fp8"}}, {"sinks": 2.5}, {"outliers": "all"}, {"settle": 0}],
    ids=str,
)  # fmt: skip
def test_settings_made_in_python_raise_our_error(kw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as e:
        KVConfig(**kw)
    assert len(e.value.problems) == 1 and isinstance(e.value, MoEPrefetchError) and next(iter(kw)) in str(e.value)


def test_formats_with_outliers_are_those_with_a_budget() -> None:
    served = {name for name, f in FORMATS.items() if f.max_bits is not None and not name.endswith("-c64")}
    assert set(WITH_OUTLIERS) == served


def test_layers_that_keep_transformers_own_cache_take_no_format() -> None:
    with pytest.raises(ConfigError, match="own cache"):
        make_cache(models.gpt_oss().config, models.config("fp8", layers={0: "fp16"}))


# the model's attention ------------------------------------------------------------------------------------------------------
def test_the_models_attention_comes_back_with_the_last_cache(llama) -> None:
    pages, before = models.config("fp8", attention="pages"), llama.config._attn_implementation
    first = make_cache(llama, pages)
    second = make_cache(llama, pages)
    assert reads_pages(llama.config)
    del first
    gc.collect()
    assert reads_pages(llama.config)
    out = models.generate(llama, models.ids(20), second, return_dict_in_generate=True)
    del second
    gc.collect()
    # What generate returned holds the cache still.
    assert reads_pages(llama.config)
    del out
    gc.collect()
    assert llama.config._attn_implementation == before


def test_attention_that_the_user_set_himself_is_left_alone(llama) -> None:
    before = llama.config._attn_implementation
    llama.set_attn_implementation("moe_prefetch")
    try:
        cache = make_cache(llama, models.config("fp8", attention="pages"))
        del cache
        gc.collect()
        assert reads_pages(llama.config)
    finally:
        llama.set_attn_implementation(before)


def test_who_gives_back_twice_gives_back_once(llama) -> None:
    pages, before = models.config("fp8", attention="pages"), llama.config._attn_implementation
    one, two = serve(llama, pages), serve(llama, pages)
    one.remove()
    one.remove()
    assert reads_pages(llama.config)
    two.remove()
    assert llama.config._attn_implementation == before
