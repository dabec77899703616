"""What a newcomer gets wrong with the KV wing is refused by name before any work, or said aloud."""

from __future__ import annotations

import copy
import gc
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StaticCache
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs

import moe_prefetch
from moe_prefetch.config import WITH_OUTLIERS, KVConfig
from moe_prefetch.errors import ArtefactError, CacheError, ConfigError, MoEPrefetchError, ShapeError
from moe_prefetch.integrations.transformers_attention import key_hashes
from moe_prefetch.integrations.transformers_cache import calibrate, make_cache
from moe_prefetch.integrations.transformers_pages import reads_pages, serve
from moe_prefetch.integrations.transformers_quality import decoded, gate, log_probs
from moe_prefetch.kernels.kv_encode.records import arranged, neutral_book
from moe_prefetch.kv.codec import OutlierStats
from moe_prefetch.kv.format import FORMATS, PageLayout
from moe_prefetch.kv.static import StaticStore
from moe_prefetch.kv.store import LayerStore

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


@pytest.mark.parametrize(("ids", "said"), [(torch.full((2, 90), 7), "1 different"), (models.ids(12), "8 different"), (models.ids(90), "")])
def test_a_text_that_says_nothing_is_said(llama, caplog, ids: torch.Tensor, said: str) -> None:
    """Calibrated on one word, repeated, answers are several times worse than without."""
    calibrate(llama, ids)
    assert ("different tokens" in caplog.text) == bool(said) and said in caplog.text


def test_a_calibration_that_no_format_reads_is_refused(llama, tmp_path) -> None:
    for kv in (KVConfig(format="fp8", calibration=tmp_path), KVConfig(format="fp8", layers={1: "fp16"}, calibration=tmp_path)):
        with pytest.raises(ConfigError, match="no codebook"):
            make_cache(llama.config, kv, OutlierStats({}))
    # The gate's verdict where every layer falls back, with the calibration that it was judged by: not needed, and no mistake.
    OutlierStats({}).save(tmp_path)
    make_cache(llama.config, KVConfig(format="fp4-72", layers={0: "fp8", 1: "fp16"}, calibration=tmp_path))


def test_a_calibration_that_lacks_layers_is_refused(llama, stats) -> None:
    part = OutlierStats({0: stats.layers[0]})
    with pytest.raises(ConfigError, match="not seen layer 1"):
        make_cache(llama.config, models.config("fp4-72"), part)
    with pytest.raises(ConfigError, match="not seen layer 1"):
        gate(llama, [models.ids(90)[0]], part, format="fp4-72", max_kl=1.0, window=16)
    # A layer that has no codebook needs none.
    make_cache(llama.config, models.config("fp4-72", layers={1: "fp8"}), part)
    make_cache(llama.config, models.config("fp8"), part)


def test_another_models_calibration_is_refused(llama, stats, tmp_path: Path) -> None:
    """Of the same shape: nothing else tells them apart."""
    stats.save(tmp_path)
    other, text = models.llama(), models.ids(90)[0]
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.mul_(1.1)
    for found in (stats, OutlierStats.load(tmp_path)):
        with pytest.raises(ConfigError, match=r"keys of layer 1.*calibrate this model"):
            make_cache(other, models.config("fp4-72"), found)
        with pytest.raises(ConfigError, match="keys of layer 1"):
            gate(other, [text], found, format="fp4-72", max_kl=1.0, window=16)
        make_cache(llama, models.config("fp4-72"), found)
        # Formats without codebooks read nothing of it.
        make_cache(other, models.config("fp8"), found)
        make_cache(other, models.config("fp4-72", layers={1: "fp8"}), found)
    deeper = calibrate(models.llama(layers=3), models.ids(60))
    for it in (llama, llama.config):
        with pytest.raises(ConfigError, match="has layer 2"):
            make_cache(it, models.config("fp4-72"), deeper)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_calibration_serves_its_model_in_any_dtype(dtype: torch.dtype) -> None:
    """A bfloat16 checkpoint, values below FP16's normal range among them."""
    model = models.moe("qwen3_moe")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[:, ::3] *= 1e-5
    saved = model.bfloat16()
    found = OutlierStats({}, key_hashes(saved))
    assert set(found.keys) == {0, 1} and key_hashes(copy.deepcopy(saved).to(dtype)) == found.keys


@pytest.mark.parametrize("part", ["weight", "bias", "norm"])
def test_a_hash_of_keys_sees_all_that_makes_them(part: str) -> None:
    model = models.moe("qwen3_moe") if part == "norm" else models.qwen2_with_key_bias(5.0, 1)
    before, attention = key_hashes(model), model.model.layers[1].self_attn
    with torch.no_grad():
        (attention.k_norm.weight if part == "norm" else getattr(attention.k_proj, part)).mul_(1.1)
    after = key_hashes(model)
    assert after[0] == before[0] and after[1] != before[1]


def test_where_no_key_projection_is_found_nothing_is_compared(stats, tmp_path: Path) -> None:
    odd = models.llama()
    for layer in odd.model.layers:
        layer.self_attn.k_proj.weight = torch.nn.Parameter(layer.self_attn.k_proj.weight.to(torch.float8_e4m3fn), requires_grad=False)
    assert key_hashes(odd) == {}
    make_cache(odd, models.config("fp4-72"), stats)
    OutlierStats(stats.layers).save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["keys"] == {"0": None, "1": None} and OutlierStats.load(tmp_path).keys == {}
    for bad in ({"7": "x"}, {"0": 3}, ["x"]):
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "keys": bad}))
        with pytest.raises(ArtefactError):
            OutlierStats.load(tmp_path)


def test_without_a_calibration_the_gate_measures_what_is_served() -> None:
    """Each sequence makes its codebook from its own first tokens; a neutral one, or one made with hindsight, would be another cache."""
    llama, text = models.in_float64(models.llama()), models.ids(150)[0]
    one_pass = log_probs(llama, text, decoded(None, {0: "fp4-72", 1: "fp4-72"}, window=16, settle=32))
    cache = make_cache(llama.config, KVConfig(format="fp4-72", window=16))
    with torch.no_grad():
        steps = torch.cat([llama(input_ids=text[None, i : i + 1], past_key_values=cache).logits[0] for i in range(150)]).log_softmax(-1)
    exact = log_probs(llama, text)
    assert (one_pass - steps).abs().max() < 1e-3 * (exact - steps).abs().max()
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


def test_padding_goes_with_its_rows_where_there_is_no_token_yet(llama) -> None:
    mask, ids = torch.ones(2, 10), models.ids(10, 2)
    mask[0, :3] = 0
    cache = make_cache(llama.config, models.config("fp8"))
    cache.set_padding(mask)
    cache.batch_select_indices(torch.tensor([1]))
    models.generate(llama, ids[1:], cache, 2)
    assert cache.layers[0].store.pads == [0]
    # As beams, and for the same prompts again.
    cache = make_cache(llama.config, models.config("fp8"))
    for _ in range(2):
        cache.set_padding(mask)
        models.generate(llama, ids, cache, 2, mask=mask, num_beams=3)
        assert cache.layers[1].store.pads == [3, 3, 3, 0, 0, 0]
        cache.reset()


# sizes --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [0, -1, 2.5, "80"])
def test_a_fixed_size_must_hold_a_token(llama, n: Any) -> None:
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


def test_gate_warning_and_report_count_the_basis_alike(caplog) -> None:
    """At head dim 128 a basis costs one sequence .094 bits: what `fp4-72` promises holds in channels, and with many sequences."""
    model = models.llama(head_dim=128)
    stats, kv = calibrate(model, models.ids(200, 2, seed=9)), KVConfig(format="fp4-72")
    for found, bits in ((stats, 4.552), (models.in_channels(stats), 4.458)):
        caplog.clear()
        cache = make_cache(model, kv, found)
        with caplog.at_level(logging.WARNING):
            models.generate(model, models.ids(20), cache, 2)
        said = [r.getMessage() for r in caplog.records if "promises 4.48" in r.getMessage()]
        assert len(said) == (bits > 4.48) and all("basis" in x and "4.552" in x for x in said)
        verdict = gate(model, [models.ids(110)[0]], found, max_bits=5.0, window=64, format="fp4-72", formats=("fp4-72",))
        held = [row["bits_per_element"] for row in cache.report()]
        assert held == [verdict.bits] * 2 and verdict.bits == pytest.approx(bits, abs=6e-4)
    with pytest.raises(ConfigError, match=r"4\.48 bits"):
        gate(model, [models.ids(110)[0]], stats, max_bits=4.48, format="fp4-72", formats=("fp4-72", "fp8"))


# settings -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kw",
    [{"format": "fp3"}, {"format": None}, {"window": -1}, {"windw": 3}, {"layers": {"x": "fp8"}}, {"layers": {-1: "fp8"}},
     {"layers": {1: "q"}}, {"layers": {"1": "fp8", "01": "fp8"}}, {"sinks": 2.5}, {"outliers": "all"}, {"settle": 0},
     {"layers": {True: "fp8"}}],
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


def test_attach_knows_whose_calibration_it_is_and_reads_it_once(tmp_path: Path, caplog) -> None:
    model, other = models.moe("qwen3_moe"), models.moe("qwen3_moe")
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.mul_(1.1)
    tokens = models.ids(64)
    calibrate(other, tokens).save(tmp_path / "theirs")
    calibrate(model, tokens).save(tmp_path / "mine")

    def attach(which: str):
        return moe_prefetch.attach(model, {"version": 1, "kv": {"format": "fp4-72", "window": 8, "calibration": str(tmp_path / which)}})

    with pytest.raises(ConfigError, match="another model's"):
        attach("theirs")
    with attach("mine"), torch.no_grad():
        shutil.rmtree(tmp_path / "mine")
        out = model(tokens, use_cache=True)
        assert out.past_key_values.layers[0].store.layout.format.name == "fp4-72"
        with caplog.at_level("WARNING"):
            for _ in range(2):
                model(tokens[:, :4], past_key_values=StaticCache(config=model.config, max_cache_len=8))
    said = [r.message for r in caplog.records if "is not used" in r.message]
    assert len(said) == 1 and "fp4-72" in said[0] and "StaticCache" in said[0]


def test_a_session_names_a_broken_promise_once(caplog) -> None:
    """Not at each call of `generate`, which makes a cache of its own."""
    model = models.moe("qwen3_moe")
    with caplog.at_level("WARNING"), moe_prefetch.attach(model, {"kv": {"format": "fp4-72", "window": 1000}}):
        for _ in range(3):
            models.generate(model, models.ids(8), None, n=4)
    assert len([r for r in caplog.records if "promises 4.48" in r.getMessage()]) == 1


def test_continuous_batching_is_told_that_its_cache_is_its_own(caplog) -> None:
    """transformers' `generate_batch` gives the model pages of transformers' own, by this name; a run takes a minute on a CPU."""
    assert {"cache", "use_cache"} <= PagedAttentionArgs.__annotations__.keys()
    model, theirs = models.moe("qwen3_moe"), type("PagedAttentionCache", (), {})()
    with moe_prefetch.attach(model, {"kv": {"format": "fp8"}}), torch.no_grad(), caplog.at_level("WARNING"):
        for _ in range(2):
            model(models.ids(4), use_cache=False, cache=theirs)
        model(models.ids(4), use_cache=False)
    said = [r.message for r in caplog.records if "is not used" in r.message]
    assert len(said) == 1 and "fp8" in said[0] and "PagedAttentionCache" in said[0]


# codebooks ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", [[3, 7, 50, -1], [-1] * 4, [3, 3, 4, 5], [62, 63, 30, 31], [64, 1, 2, 3]], ids=str)
def test_outlier_channels_in_places_of_others_are_refused(row: list[int]) -> None:
    """Among codes that hold scales they change places: -1 would be the channel before a token's first."""
    layout = PageLayout(FORMATS["fp4-quality"], 64, 64, 4)
    book = torch.tensor([row], dtype=torch.int32), *neutral_book(layout, 1)[1:]
    for make in (lambda: LayerStore(layout, 1, book, batch=1), lambda: StaticStore(layout, 1, book, batch=1, max_tokens=300)):
        with pytest.raises(ShapeError, match="outlier channels"):
            make()
    if row[0] < 64:
        right = arranged(book[0], layout), *book[1:]
        LayerStore(layout, 1, right, batch=1)
