"""The transformers cache: every operation, and generate() with beams, drafts and shared prefixes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_prefetch.config import KVConfig
from moe_prefetch.errors import CacheError, ConfigError, SessionError, UnsupportedModelError
from moe_prefetch.integrations.transformers_attention import watch_attention
from moe_prefetch.integrations.transformers_cache import PagedLayer, calibrate, make_cache
from moe_prefetch.integrations.transformers_quality import gate
from moe_prefetch.kv.attention import attend
from moe_prefetch.kv.codec import OutlierStats

from . import models

FORMATS = ["fp16", "fp8", "fp4-72", "fp4-quality", "nvfp4", "mxfp4", "fp8+fp4-72", "fp4-quality+fp8"]


@pytest.fixture(scope="module")
def llama():
    return models.llama()


@pytest.fixture(scope="module")
def stats(llama):
    return calibrate(llama, models.ids(200, 2, seed=9))


@pytest.mark.parametrize("format", FORMATS)
def test_beams_equal_unshared_beams(llama, stats, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams that share pages against beams each of which holds pages of its own."""
    prompt = models.ids(70, 2)
    cache = make_cache(llama.config, models.config(format), stats)
    shared = models.generate(llama, prompt, cache, num_beams=3)
    cache.check_integrity()
    assert any(r > 1 for layer in cache.layers for r in layer.store.pages.refs)

    def unshare(self: PagedLayer, indices) -> None:
        if self.store is not None:
            self.store.select(list(indices))
            book = self.store.pages
            for row in book.rows:
                for i, page in enumerate(row.pages):
                    if book.refs[page] > 1:
                        own = book._alloc()
                        if own >= len(self.store.pool):
                            self.store.pool = torch.cat([self.store.pool, self.store.pool[:1]])
                        self.store.pool[own] = self.store.pool[page]
                        row.pages[i] = own
                        book._release(page)

    monkeypatch.setattr(PagedLayer, "_select", unshare)
    cache = make_cache(llama.config, models.config(format), stats)
    assert torch.equal(models.generate(llama, prompt, cache, num_beams=3), shared)
    cache.check_integrity()
    assert all(r <= 1 for layer in cache.layers for r in layer.store.pages.refs)


@pytest.mark.parametrize("format", FORMATS)
def test_assisted_decoding_equals_greedy(llama, stats, format: str) -> None:
    # A prompt without near ties: a chunk reads its own K unrounded, single steps read FP16.
    prompt = models.ids(12, seed=23).repeat(1, 6)
    make = lambda: make_cache(llama.config, models.config(format), stats)  # noqa: E731
    greedy = models.generate(llama, prompt, make(), n=40)
    assert torch.equal(models.generate(llama, prompt, make(), n=40, prompt_lookup_num_tokens=5), greedy)
    assert torch.equal(models.generate(llama, prompt, make(), n=40, assistant_model=models.llama(layers=1), num_assistant_tokens=5), greedy)


@pytest.mark.parametrize("format", FORMATS)
def test_a_shared_prefix_equals_an_unshared_one(llama, stats, format: str) -> None:
    """One prefix, forked for three questions, against each question with a prefix of its own."""
    prefix, tails = models.ids(150), models.ids(20, 3, seed=5)
    cache = make_cache(llama.config, models.config(format), stats)
    with torch.no_grad():
        llama(input_ids=prefix, past_key_values=cache)
        alone = []
        for t in tails:
            own = copy.deepcopy(cache)
            alone.append(models.generate(llama, torch.cat([prefix, t[None]], 1), own))
        cache.batch_repeat_interleave(3)
    assert all(s.store.pages.pages_held == len(s.store.pages.rows[0].pages) for s in cache.layers)
    together = models.generate(llama, torch.cat([prefix.expand(3, -1), tails], 1), cache)
    cache.check_integrity()
    assert torch.equal(together, torch.cat(alone))


def test_fp16_format_changes_no_token(llama) -> None:
    prompt = models.ids(60, 2)
    assert torch.equal(
        models.generate(llama, prompt, make_cache(llama.config, models.config("fp16"))), models.generate(llama, prompt, None)
    )


@pytest.mark.parametrize("format", ["fp4-quality", "fp8"])
def test_left_padding_changes_nothing(llama, stats, format: str) -> None:
    """A padded batch against each row alone, the cache told about the padding."""
    long, short = models.ids(80), models.ids(50, seed=3)
    batch = torch.cat([long, torch.cat([torch.zeros(1, 30, dtype=torch.long), short], 1)])
    mask = torch.ones_like(batch)
    mask[1, :30] = 0
    cache = make_cache(llama.config, models.config(format), stats)
    cache.set_padding(mask)
    got = models.generate(llama, batch, cache, mask=mask)
    for row, prompt in ((0, long), (1, short)):
        alone = models.generate(llama, prompt, make_cache(llama.config, models.config(format), stats))
        assert torch.equal(got[row, 80:], alone[0, prompt.shape[1] :])


def test_every_cache_operation(llama, stats) -> None:
    cache = make_cache(llama.config, models.config(), stats)
    assert cache.get_seq_length() == 0 and cache.get_mask_sizes(5, 0) == (5, 0)
    with torch.no_grad():
        llama(input_ids=models.ids(100, 2), past_key_values=cache)
    read = lambda: cache.layers[1].store.gather()[0]  # noqa: E731
    assert cache.get_seq_length() == 100 and cache.get_mask_sizes(3, 1) == (103, 0) and cache.is_croppable
    first = read()
    cache.crop(-7)
    assert cache.get_seq_length() == 93 and torch.equal(read(), first[:, :, :93])
    cache.crop(90)
    assert cache.get_seq_length() == 90
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(read(), first[[1, 0], :, :90])
    cache.batch_repeat_interleave(2)
    assert torch.equal(read(), first[[1, 1, 0, 0], :, :90])
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert torch.equal(read(), first[[0, 1], :, :90])
    cache.batch_select_indices(torch.tensor([False, True]))
    assert torch.equal(read(), first[[1], :, :90])
    cache.check_integrity()
    cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.raises(CacheError, match="offload"):
        cache.layers[0].offload()


@pytest.mark.parametrize("seed", range(8))
def test_update_returns_what_attention_sees(llama, stats, seed: int) -> None:
    """Decoded past, this call's own K and V to the bit, and the same numbers as attention over the store."""
    torch.manual_seed(seed)
    layer = make_cache(llama.config, models.config(), stats).layers[0]
    k, v = torch.randn(1, 2, 130, 64), torch.randn(1, 2, 130, 64)
    out = layer.update(k, v)
    assert torch.equal(out[0], k) and torch.equal(out[1], v)
    new_k, new_v, q = torch.randn(1, 2, 1, 64).half().float(), torch.randn(1, 2, 1, 64).half().float(), torch.randn(1, 6, 1, 64)
    keys, values = layer.update(new_k, new_v)
    assert torch.equal(keys[:, :, -1:], new_k) and keys.shape[2] == 131
    assert not torch.equal(keys[:, :, 4:100], k[:, :, 4:100]) and torch.equal(values[:, :, :4], v[:, :, :4].half().float())
    # Keys go through FP16 in axes of their own.
    assert torch.allclose(keys[:, :, :4], k[:, :, :4], atol=0.01) and not torch.allclose(keys[:, :, 4:100], k[:, :, 4:100], atol=0.05)
    # Attention reads its own key as it is kept, FP16 in axes; over the same keys FP32 rounding is left, some 4e-7 whatever the seed.
    kept_k, kept_v = layer.store.gather()
    assert torch.allclose(kept_k[:, :, :-1], keys[:, :, :-1], atol=1e-4) and torch.equal(kept_v, values)
    assert torch.allclose(kept_k[:, :, -1:], new_k, atol=0.01)
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, kept_k, kept_v, scale=0.1, enable_gqa=True)
    assert torch.allclose(attend(layer.store, q, scale=0.1)[0], sdpa, atol=1e-5)


def test_held_bytes_are_all_storages_and_match_the_formula(llama, stats) -> None:
    for format in FORMATS:
        cache = make_cache(llama.config, models.config(format, window=64), stats)
        for layer in cache.layers:
            layer.update(torch.randn(1, 2, 3000, 64), torch.randn(1, 2, 3000, 64))
            layer.update(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64))
        lay = cache.layers[0].store.layout
        once = lay.book_bytes + (lay.basis_bytes if lay.format.max_bits else 0)
        formula = 2 * 2 * (lay.held_bytes(3000, 4, 64) + once)
        assert abs(cache.held_bytes() - formula) / formula < 0.02
        assert cache.bits_per_element() == pytest.approx(8 * cache.held_bytes() / (2 * 2 * 128 * 3001))
        assert len({t.untyped_storage().data_ptr() for x in cache.layers for t in (x.store.pool, x.store.recent_k, x.store.recent_v)}) == 6


def test_the_report_counts_outliers_and_what_was_not_finite(llama, stats) -> None:
    for policy in ("importance", "topn", "sigma", "none"):
        cache = make_cache(llama.config, models.config(outliers=policy), stats)
        k = torch.randn(1, 2, 200, 64)
        k[0, 0, 0, 0], k[0, 1, 9, 3], k[0, 1, 9, 4] = torch.nan, torch.inf, -1e6
        for layer in cache.layers:
            layer.update(k, torch.randn(1, 2, 200, 64))
        for row in cache.report():
            # In axes of its own what is not finite in a key is in all of its channels.
            assert (row["saturated"], row["nan"]) == ((64, 64) if policy == "importance" else (2, 1)) and row["format"] == "fp4-quality"
            assert row["outlier_share"] <= 0.05 and (row["outlier_share"] > 0.03) == (policy != "none")
            assert row["bits_per_element"] <= 4.85


def test_the_report_says_what_keys_are_kept_in(llama, stats) -> None:
    kept = lambda kv, s, **kw: [row["keys"] for row in _filled(llama, kv, s, **kw).report()]  # noqa: E731
    for size in ({}, {"max_length": 40}):
        assert kept(models.config(layers={1: "fp8"}), stats, **size) == ["axes", None]
        assert kept(models.config(outliers="topn"), stats, **size) == kept(models.config(), models.in_channels(stats), **size)
        assert kept(models.config(outliers="topn"), stats, **size) == ["channels", "channels"]
    assert kept(models.config(), None) == ["prompt", "prompt"]


def _filled(model, kv: KVConfig, stats, **kw):
    cache = make_cache(model.config, kv, stats, **kw)
    models.generate(model, models.ids(30), cache, n=2)
    return cache


def test_layers_may_differ_and_unknown_layers_are_refused(llama, stats) -> None:
    cache = make_cache(llama.config, models.config(layers={1: "fp8"}), stats)
    assert [x.format.name for x in cache.layers] == ["fp4-quality", "fp8"]
    models.generate(llama, models.ids(60), cache)
    with pytest.raises(ConfigError, match="layer 5"):
        make_cache(llama.config, models.config(layers={5: "fp8"}))


def test_calibration_comes_from_its_file_and_must_fit(llama, stats, tmp_path: Path) -> None:
    stats.save(tmp_path)
    kv = models.config(calibration=tmp_path)
    prompt = models.ids(60)
    a = models.generate(llama, prompt, make_cache(llama.config, kv))
    assert torch.equal(a, models.generate(llama, prompt, make_cache(llama.config, models.config(), stats)))
    other = models.llama(head_dim=128)
    with pytest.raises(ConfigError, match="calibration"):
        models.generate(other, prompt, make_cache(other.config, kv))


def test_without_calibration_each_sequence_makes_its_own_codebook(llama) -> None:
    prompt = models.ids(90, 2)
    cache = make_cache(llama.config, models.config())
    both = models.generate(llama, prompt, cache)
    books = cache.layers[0].store.books
    assert books[0] is not books[1] and not torch.equal(books[0][1], books[1][1])
    for b in range(2):
        assert torch.equal(models.generate(llama, prompt[b : b + 1], make_cache(llama.config, models.config()))[0], both[b])


def test_calibration_leaves_the_model_as_it_was(llama) -> None:
    before = llama.config._attn_implementation
    logits = llama(input_ids=models.ids(20)).logits
    one = calibrate(llama, models.ids(60, 2))
    assert llama.config._attn_implementation == before and torch.equal(llama(input_ids=models.ids(20)).logits, logits)
    spread = calibrate(llama, models.ids(60, 2), span=4000).layers[1]
    assert torch.allclose(torch.tensor(spread.v2), torch.tensor(one.layers[1].v2), rtol=1e-3), "attention is relative: values do not change"
    assert not torch.allclose(torch.tensor(spread.k1), torch.tensor(one.layers[1].k1), rtol=1e-2), "keys turn with their position"
    with pytest.raises(ConfigError, match="span"):
        calibrate(llama, models.ids(60, 2), span=50)
    assert one == calibrate(llama, models.ids(60, 2)) and set(one.layers) == {0, 1} and one.layers[0].tokens == 2 * 56


def test_a_configuration_may_be_a_dict(llama) -> None:
    kv, prompt = {"format": "fp8", "window": 16}, models.ids(60)
    one, two = (models.generate(llama, prompt, make_cache(llama, given)) for given in (kv, KVConfig(**kv)))
    assert torch.equal(one, two)
    for wrong, said in (({"formt": "fp8"}, "did you mean 'format'"), ("fp8", "a section")):
        with pytest.raises(ConfigError, match=said):
            make_cache(llama, wrong)
    with pytest.raises(ConfigError, match="max_length"):
        make_cache(llama, kv, max_length=True)


@pytest.mark.parametrize("static", [False, True])
def test_a_reset_forgets_padding_and_counts(llama, static: bool) -> None:
    prompt, mask = models.ids(30, 2), torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0

    def run(cache, model=llama) -> torch.Tensor:
        with torch.no_grad():
            model(input_ids=prompt[:, :29], past_key_values=cache)
            return model(input_ids=prompt[:, 29:], past_key_values=cache).logits

    spoilt = copy.deepcopy(llama)
    spoilt.model.layers[0].self_attn.k_proj.weight.data[0] = float("nan")
    fresh, used = (make_cache(llama.config, models.config("fp8"), max_length=64 if static else None) for _ in range(2))
    run(used, spoilt)
    assert used.report()[0]["nan"]
    used.reset()
    assert torch.equal(run(used), run(fresh)) and used.report() == fresh.report()
    if not static:
        early = make_cache(llama.config, models.config("fp8"))
        early.set_padding(mask)
        early.reset()
        fresh.reset()
        assert torch.equal(run(early), run(fresh))


def test_two_models_calibrated_at_once_never_meet(llama) -> None:
    """Attention's registry is the process's: each must see its own model, and leave nothing there."""
    other, ids, seen = models.llama(), models.ids(8), []
    before = list(ALL_ATTENTION_FUNCTIONS), list(ALL_MASK_ATTENTION_FUNCTIONS), llama.config._attn_implementation
    one, two = (watch_attention(m, lambda layer, *_, at=at: seen.append((at, layer))) for at, m in enumerate((llama, other)))
    with one, two:
        llama(input_ids=ids)
        other(input_ids=ids)
        # Two of one model, or of one config object, would: they are refused, and the first goes on.
        for twice in (llama, type(llama)(llama.config)):
            with pytest.raises(SessionError, match="calibrated or measured"):
                calibrate(twice, ids)
        llama(input_ids=ids)
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
    assert before == (list(ALL_ATTENTION_FUNCTIONS), list(ALL_MASK_ATTENTION_FUNCTIONS), llama.config._attn_implementation)


def test_attention_that_can_not_be_exchanged_is_not_calibrated(llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(llama), "_can_set_attn_implementation", lambda self: False)
    with pytest.raises(UnsupportedModelError, match="can't be exchanged"):
        calibrate(llama, models.ids(8))


@pytest.mark.parametrize("format", ["fp16", "fp8", "fp4-quality"])
def test_mla_models_keep_latent_and_rotary_part(format: str) -> None:
    model = models.mla()
    prompt = models.ids(70)
    cache = make_cache(model.config, models.config(format))
    with torch.no_grad():
        exact = model(input_ids=prompt).logits[0, -1].softmax(-1)
        model(input_ids=prompt[:, :-1], past_key_values=cache)
        got = model(input_ids=prompt[:, -1:], past_key_values=cache).logits[0, -1].softmax(-1)
    lay = cache.layers[0].store.layout
    assert (lay.k_dim, lay.v_dim, lay.rope) == (64, 0, 16)
    assert (got - exact).abs().sum() < {"fp16": 0.02, "fp8": 0.3, "fp4-quality": 1.2}[format]
    models.generate(model, prompt, make_cache(model.config, models.config(format)), num_beams=2)


def test_latents_of_mla_layers_are_calibrated(tmp_path: Path) -> None:
    model, prompt, ids = models.mla(), models.ids(70), models.ids(100, 3)
    calibrate(model, ids).save(tmp_path)
    found = OutlierStats.load(tmp_path)
    assert sorted(found.layers) == sorted(found.keys) == [0, 1] and {s.tokens for s in found.layers.values()} == {3 * 96}
    seen: list[torch.Tensor] = []
    handle = model.model.layers[1].self_attn.kv_a_layernorm.register_forward_hook(lambda _m, _x, out: seen.append(out[0, 4:]))
    with torch.no_grad():
        [model(row[None]) for row in ids]
    handle.remove()
    latents = torch.cat(seen).double()
    assert torch.allclose(torch.tensor(found.layers[1].k1, dtype=torch.float64)[0], latents.mean(0), atol=1e-6)
    assert torch.allclose(torch.tensor(found.layers[1].k2, dtype=torch.float64)[0], latents.square().mean(0), atol=1e-5)
    # One codebook for all rows, and a cache of fixed size.
    cache = make_cache(model, models.config(), found)
    want = models.generate(model, prompt, cache)
    assert {row["keys"] for row in cache.report()} == {"channels"}
    assert torch.equal(models.generate(model, prompt, make_cache(model, models.config(), found, max_length=120)), want)
    other = models.mla()
    torch.nn.init.normal_(other.model.layers[1].self_attn.kv_a_proj_with_mqa.weight, std=0.2)
    with pytest.raises(ConfigError, match="another model's: keys of layer 1"):
        make_cache(other, models.config(), found)
    with pytest.raises(ConfigError, match="a static cache can't make codebooks"):
        make_cache(model, models.config(), max_length=80)
    verdict = gate(model, [prompt[0]], found, format="fp4-72", max_kl=0.02, window=16)
    assert verdict.before.kl > 0.02 >= verdict.after.kl and verdict.layers and set(verdict.layers.values()) <= {"fp8", "fp16"}
    within = gate(model, [prompt[0]], found, max_bits=9.0, window=16)
    assert within.passed and set(within.layers) <= {0, 1}
    model.config.model_type = "longcat_flash"
    with pytest.raises(UnsupportedModelError, match="MLA of longcat_flash"):
        gate(model, [prompt[0]], found, max_kl=1.0, window=16)


def test_sliding_layers_stay_as_configured() -> None:
    model = models.gpt_oss()
    cache = make_cache(model.config, models.config())
    kinds = [type(x) for x in cache.layers]
    assert kinds == [DynamicSlidingWindowLayer, PagedLayer]
    models.generate(model, models.ids(70, 2), cache)
    assert cache.held_bytes() > sum(x.store.held_bytes() for x in cache.layers if isinstance(x, PagedLayer))


def test_a_format_brings_its_window_and_all_layers_share_it(llama) -> None:
    """A layer that falls back to a finer format keeps the FP16 tokens of the others: it must not be worse for it."""
    windows = lambda **kw: {x.window for x in make_cache(llama.config, KVConfig(**kw)).layers}  # noqa: E731
    assert windows(format="fp4-72") == {64} and windows(format="fp4-quality") == {1024}
    assert windows(format="fp4-quality", layers={0: "fp8"}) == {1024} and windows(format="fp4-quality", window=0, layers={0: "fp8"}) == {0}
    cache = make_cache(llama.config, KVConfig(format="fp4-quality", outliers="none", settle=1))
    models.generate(llama, models.ids(1100), cache, n=2)
    assert {x.store.pages.rows[0].stored for x in cache.layers} == {1100 - 4 - 1024}


def test_window_zero_and_no_sinks_work(llama, stats) -> None:
    cache = make_cache(llama.config, KVConfig(format="fp4-72", window=0, sinks=0, settle=1), stats)
    models.generate(llama, models.ids(30), cache)
    cache.check_integrity()
    assert cache.layers[0].store.recent_k.shape[2] <= 1


def test_a_forward_that_breaks_off_is_seen(llama, stats) -> None:
    cache = make_cache(llama.config, models.config("fp4-72"), stats)
    with torch.no_grad():
        llama(models.ids(40), past_key_values=cache)
        cache.check_integrity()

        def stop(*_: object) -> None:
            raise KeyError("in the middle")

        hook = llama.model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(KeyError):
            llama(models.ids(1), past_key_values=cache)
        hook.remove()
    with pytest.raises(CacheError, match=r"layers hold \[40, 41\] tokens"):
        cache.check_integrity()
    cache.reset()
    cache.check_integrity()
