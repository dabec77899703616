"""K and V of one layer in different formats: each side is what it is in its own format, and everything that takes a format takes a pair."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_prefetch.config import KVConfig
from moe_prefetch.errors import ArtefactError, ConfigError, ShapeError
from moe_prefetch.integrations.transformers_cache import PagedLayer, calibrate, make_cache
from moe_prefetch.integrations.transformers_quality import decoded, gate, log_probs
from moe_prefetch.kernels.kv_encode import naive as law
from moe_prefetch.kernels.kv_encode.records import decode_naive, encode_naive, runs_for
from moe_prefetch.kv.codec import OutlierStats, make_coding
from moe_prefetch.kv.format import FORMATS, PAGE, PageLayout, format_of, layout_for
from moe_prefetch.kv.store import LayerStore

from . import models
from .common import NAMES, PAIRS, book, layout, tokens


@pytest.fixture(scope="module")
def llama():
    return models.llama()


@pytest.fixture(scope="module")
def stats(llama):
    return calibrate(llama, models.ids(200, 2, seed=9))


# names and layouts ----------------------------------------------------------------------------------------------------------
def test_a_pair_is_made_of_two_registered_formats() -> None:
    pair = format_of("fp8+fp4-quality")
    assert pair is format_of("fp8+fp4-quality") and pair.name == "fp8+fp4-quality"
    assert pair.k is FORMATS["fp8"] and pair.v is FORMATS["fp4-quality"] and pair.window == 1024
    assert pair.has_book and pair.promise is None and pair.max_bits is None
    assert all(f.k is f.v is f for f in FORMATS.values())


@pytest.mark.parametrize("name", ["fp8+fp8", "fp8+", "+fp8", "fp8+fp5", "fp5+fp8", "fp8+fp16+fp8", "fp8 + fp16", "+", ""])
def test_what_is_no_pair_is_refused_with_the_valid_forms(name: str) -> None:
    with pytest.raises(ConfigError, match=r"fp8\+fp4-72") as e:
        format_of(name)
    assert "mxfp4" in str(e.value)
    with pytest.raises(ConfigError, match=r"as K\+V, such as 'fp8\+fp4-72'"):
        KVConfig(format=name)
    with pytest.raises(ConfigError, match=r"layers\.3"):
        KVConfig(format="fp8", layers={3: name})


def test_the_configuration_knows_the_pairs_that_there_are() -> None:
    served = [n for n in NAMES if not n.endswith("-c64")]
    for k in served:
        for v in served:
            if k != v:
                assert format_of(KVConfig(format=f"{k}+{v}").format).name == f"{k}+{v}"


@pytest.mark.parametrize("window", [None, 64, 1055])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["fp4-quality+fp8", "fp4-72+fp8", "fp4-72+mxfp4", "fp8+fp4-72"])
def test_outliers_are_those_of_ks_own_budget(name: str, dim: int, window: int | None) -> None:
    pair = format_of(name)
    assert layout_for(pair, dim, dim, window=window).outliers == layout_for(pair.k, dim, dim, window=window).outliers


def test_the_longer_window_counts_against_ks_budget() -> None:
    pair = layout_for(format_of("fp4-72+fp4-quality"), 128, 128)
    assert pair.outliers == layout_for(FORMATS["fp4-72"], 128, 128, window=1024).outliers < layout_for(FORMATS["fp4-72"], 128, 128).outliers


@pytest.mark.parametrize("dim", [64, 128])
def test_every_byte_of_a_pair_is_counted(dim: int) -> None:
    lay = layout_for(format_of("fp8+fp4-72"), dim, dim)
    # per token: K code and scale, V code and scales; then trailer and padding
    by_hand = PAGE * (dim + 1 + dim // 2 + dim // 64) + 16
    assert by_hand <= lay.page_bytes < by_hand + 128
    pages = -(-(32768 - 4 - 64) // PAGE)
    total = pages * (lay.page_bytes + 4) + (4 + 64 + 1) * 2 * 2 * dim + 4 * 5 * dim
    assert lay.bits_per_element() == pytest.approx(total * 8 / (32768 * 2 * dim))
    alone = [layout_for(FORMATS[n], dim, dim, outliers=0).bits_per_element() for n in ("fp8", "fp4-72")]
    assert lay.bits_per_element() == pytest.approx(sum(alone) / 2, rel=0.01)


def test_a_latent_has_one_format(stats) -> None:
    with pytest.raises(ShapeError, match="latent"):
        PageLayout(format_of("fp8+fp4-72"), 512, 0, 0, 64)
    model = models.mla()
    for kv in (models.config("fp8+fp4-72"), models.config("fp8", layers={1: "fp8+fp4-72"})):
        with pytest.raises(ConfigError, match="one latent for K and V"):
            make_cache(model, kv)


# bytes ----------------------------------------------------------------------------------------------------------------------
NUMBERS = st.tuples(
    st.sampled_from(NAMES), st.sampled_from(NAMES), st.sampled_from([16, 48, 64, 80, 128]), st.sampled_from([16, 64, 96, 112]),
    st.sampled_from([64, 128, 192]), st.sampled_from([3, 8]), st.integers(0, 99),
)  # fmt: skip


@given(NUMBERS)
def test_each_side_is_coded_as_in_its_own_format(numbers: tuple[str, str, int, int, int, int, int]) -> None:
    """Bytes of codes, scales, outliers and factors, and what is decoded from them."""
    k_name, v_name, dk, dv, n, outliers, seed = numbers
    name = k_name if k_name == v_name else f"{k_name}+{v_name}"
    lay = PageLayout(format_of(name), dk, dv, outliers if format_of(name).max_bits else 0)
    k, v = (tokens(n, 2, d, seed=seed + i)[0].transpose(0, 1) for i, d in enumerate((dk, dv)))
    both, runs, out = book(lay, 2, seed), torch.tensor(runs_for([1, 0], 0, n, 0)), {}
    for own in (lay, PageLayout(FORMATS[k_name], dk, dv, lay.outliers), PageLayout(FORMATS[v_name], dk, dv)):
        mine = (both[0][:, : own.outliers], *both[1:])
        pages = law.empty_pages(2, 2, own)
        counts = encode_naive(pages, k, v, runs, mine, own)
        out[own] = law.unpack(pages, own), decode_naive(pages, mine, own), counts.tolist()
    (pair, decoded_pair, counts), (of_k, decoded_k, counts_k), (of_v, decoded_v, counts_v) = (
        list(out.values()) if len(out) == 3 else [out[lay]] * 3
    )
    bits = lambda x: x.contiguous().flatten().view(torch.uint8)  # noqa: E731
    for part in ("k_codes", "k_scales", "k_outliers"):
        assert torch.equal(bits(getattr(pair, part)), bits(getattr(of_k, part)))
    for part in ("v_codes", "v_scales"):
        assert torch.equal(bits(getattr(pair, part)), bits(getattr(of_v, part)))
    assert torch.equal(pair.factor, torch.stack([of_k.factor[..., 0], of_v.factor[..., 1]], -1)) and torch.equal(pair.fill, of_k.fill)
    assert torch.equal(decoded_pair[0], decoded_k[0]) and torch.equal(decoded_pair[1], decoded_v[1]) and counts == counts_k == counts_v


# codebooks ------------------------------------------------------------------------------------------------------------------
def test_each_side_has_the_codebook_of_its_own_format(stats) -> None:
    names = ("fp8+fp4-72", "fp4-quality+fp8", "nvfp4+fp4-72", "fp4-72", "fp4-quality")
    made = {n: make_coding(stats.layers[0], layout(n), 2, "importance") for n in names}
    for name in ("fp8+fp4-72", "nvfp4+fp4-72"):
        channels, k_mean, k_gain, _, v_gain, v_weight = made[name].book
        assert channels.shape == (2, 0) and bool((k_mean == 0).all()) and bool((k_gain == 1).all()) and made[name].basis is None
        assert torch.equal(v_gain, made["fp4-72"].book[4]) and torch.equal(v_weight, made["fp4-72"].book[5])
    pair, own = made["fp4-quality+fp8"], made["fp4-quality"]
    assert all(torch.equal(a, b) for a, b in zip(pair.book[:4], own.book[:4], strict=True))
    assert bool((pair.book[4] == 1).all()) and torch.equal(pair.basis.into, own.basis.into)


def test_v_alone_needs_a_calibration_too(llama, stats) -> None:
    part = OutlierStats({0: stats.layers[0]})
    with pytest.raises(ConfigError, match="not seen layer 1"):
        make_cache(llama.config, models.config("fp8+fp4-72"), part)
    with pytest.raises(ConfigError, match="a static cache can't make codebooks"):
        make_cache(llama.config, models.config("fp8+fp4-72"), max_length=50)
    make_cache(llama.config, models.config("fp8+nvfp4"), part, max_length=50)


def test_without_calibration_v_has_the_gains_of_its_prompt(llama) -> None:
    cache = make_cache(llama.config, models.config("fp8+fp4-72"))
    models.generate(llama, models.ids(90), cache)
    (book_of_row,) = cache.layers[0].store.books
    assert bool((book_of_row[2] == 1).all()) and not bool((book_of_row[4] == 1).all())


# use ------------------------------------------------------------------------------------------------------------------------
def test_layers_may_be_pairs_and_the_report_says_so(llama, stats) -> None:
    cache = make_cache(llama.config, models.config("fp8+fp4-72", layers={1: "fp4-quality+fp8"}), stats)
    models.generate(llama, models.ids(90), cache)
    cache.check_integrity()
    rows = cache.report()
    assert [(r["format"], r["keys"], r["max_bits"]) for r in rows] == [("fp8+fp4-72", None, None), ("fp4-quality+fp8", "axes", None)]
    stores = [x.store.layout for x in cache.layers]
    assert [r["bits_per_element"] for r in rows] == [
        x.bits_per_element(window=16, basis=turned) for x, turned in zip(stores, (False, True), strict=True)
    ]
    assert {x.window for x in make_cache(llama.config, KVConfig(format="fp8+fp4-quality")).layers} == {1024}


@pytest.mark.parametrize("name", PAIRS)
def test_one_pass_sees_what_steps_do(stats, name: str) -> None:
    llama, text = models.in_float64(models.llama()), models.ids(90)[0]
    one_pass = log_probs(llama, text, decoded(stats, dict.fromkeys(range(2), name), window=16))
    cache = make_cache(llama.config, models.config(name), stats)
    with torch.no_grad():
        steps = torch.cat([llama(input_ids=text[None, i : i + 1], past_key_values=cache).logits[0] for i in range(90)]).log_softmax(-1)
    exact = log_probs(llama, text)
    assert (one_pass - steps).abs().max() < 1e-3 * (exact - steps).abs().max()


@pytest.mark.parametrize("name", PAIRS)
def test_generate_over_pages_is_generate_over_the_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that reads pages against decoded tensors whose own token is as it is kept, FP16: the same numbers at every step."""
    model, take = models.moe("qwen2_moe"), PagedLayer.update
    stats, prompt = models.in_channels(calibrate(model, models.ids(200, 2, seed=9))), models.ids(60, 2)

    def as_kept(self: PagedLayer, k: torch.Tensor, v: torch.Tensor, *args: object, **kw: object) -> object:
        out = take(self, k, v, *args, **kw)
        if k.shape[2] == 1 and out[0].shape[2] > 1:
            out = tuple(torch.cat([x[:, :, :-1], own.half().to(x.dtype)], 2) for x, own in zip(out, (k, v), strict=True))
        return out

    def run(attention: str) -> tuple[object, torch.Tensor]:
        cache = make_cache(model, models.config(name, attention=attention), stats)
        out = models.generate(model, prompt, cache, 32, output_logits=True, return_dict_in_generate=True)
        assert {row["attention"].partition(":")[0] for row in cache.report()} == {attention}
        return out.sequences, torch.stack(out.logits)

    pages = run("pages")
    monkeypatch.setattr(PagedLayer, "update", as_kept)
    law_of_all = run("tensors")
    assert torch.equal(pages[0], law_of_all[0])
    assert float((pages[1] - law_of_all[1]).abs().max() / law_of_all[1].abs().max()) < 1e-3


def test_the_gate_judges_pairs_and_chooses_among_them() -> None:
    model = models.qwen2_with_key_bias(600.0, layer=1)
    stats, text = models.in_channels(calibrate(model, models.ids(200, 2, seed=9))), models.ids(120)[0]
    caught = gate(model, [text], stats, format="fp4-72+fp8", max_kl=0.02, window=16)
    assert caught.before.kl > 0.02 and caught.passed and 1 in caught.layers
    held = gate(model, [text], stats, format="fp8+fp4-72", max_kl=0.05, window=16)
    assert held.passed and held.before.kl < caught.before.kl
    v = gate(model, [text], stats, max_bits=6.6, window=16, formats=("fp4-72", "fp8+fp4-72", "fp8"))
    chosen = {**dict.fromkeys(range(3), v.format), **v.layers}
    assert v.passed and v.bits <= 6.6 and chosen[1] in ("fp8+fp4-72", "fp8")
    cache = make_cache(model, models.config(v.format, layers=v.layers), stats)
    models.generate(model, text[None], cache)
    assert [x.format.name for x in cache.layers] == list(chosen.values())


def test_a_row_of_one_side_is_not_taken_for_the_others() -> None:
    """`fp4-72+fp4-quality` and `fp4-72` lay out the same bytes; a saved row still says which it is."""
    one = LayerStore(layout("fp4-72", window=1024), 2, book(layout("fp4-72", window=1024), 2), window=16)
    pair = layout("fp4-72+fp4-quality", window=1024)
    assert one.layout.page_bytes == pair.page_bytes and one.layout.offsets == pair.offsets
    one.append(tokens(200, 2, 64), tokens(200, 2, 64))
    with pytest.raises(ArtefactError, match="another layout"):
        LayerStore(pair, 2, book(pair, 2), window=16).import_row(one.export_row(0))
