"""Faults that users of other KV caches have met: one test for each kind. docs/field-faults.md lists them."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from moe_prefetch.errors import ArtefactError, ShapeError
from moe_prefetch.integrations.transformers_cache import calibrate, make_cache
from moe_prefetch.kernels.kv_encode import naive as law
from moe_prefetch.kernels.kv_encode import records
from moe_prefetch.kernels.kv_encode.records import decode_naive, encode_naive, neutral_book, runs_for
from moe_prefetch.kv import store as store_module
from moe_prefetch.kv.attention import attend
from moe_prefetch.kv.format import FORMATS, PAGE, PageLayout, format_of, layout_for
from moe_prefetch.kv.gate import drift
from moe_prefetch.kv.static import StaticStore
from moe_prefetch.kv.store import LayerStore

from . import models
from .common import NAMES, PAIRS, attention_loop, book, layout, store, tokens


def filled(value: float, n: int, heads: int = 2, dim: int = 64) -> torch.Tensor:
    return torch.full((1, heads, n, dim), value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["reorder", "repeat", "select", "crop"])
def test_batch_operations_move_pages_not_only_the_window(name: str, change: str) -> None:
    s = LayerStore(layout(name), 2, neutral_book(layout(name), 2), batch=2, window=16)
    both = torch.cat([filled(1.0, 300), filled(-3.0, 300)])
    s.append(both, both)
    s.settle()
    assert all(r.stored >= 128 for r in s.pages.rows)
    want = {"reorder": [-3, 1], "repeat": [1, 1, -3, -3], "select": [-3], "crop": [1, -3]}[change]
    if change == "crop":
        s.crop(299)
    else:
        s.select({"reorder": [1, 0], "repeat": [0, 0, 1, 1], "select": [1]}[change])
    k, _ = s.gather()
    assert all(torch.allclose(k[i], torch.tensor(float(x)), rtol=0.1) for i, x in enumerate(want))


def test_a_prompt_keeps_its_window_and_sinks() -> None:
    s = store("fp4-quality", window=32)
    k = tokens(500, 2, 64)
    s.append(k, k)
    s.settle()
    got = s.gather()[0]
    assert torch.equal(got[:, :, :4], k[:, :, :4]) and torch.equal(got[:, :, -32:], k[:, :, -32:])
    assert not torch.equal(got[:, :, 4:-32], k[:, :, 4:-32])


def test_no_other_package_quantises_for_us() -> None:
    """A release of somebody's quantiser can't break what imports none."""
    code = "import sys, moe_prefetch.kv.attention, moe_prefetch.kv.codec; print(*{m.partition('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"transformers", "optimum", "hqq", "quanto", "bitsandbytes", "torchao"} & set(loaded)


@pytest.mark.parametrize("pad", [1, 16, 133])
def test_left_padding_is_neither_stored_nor_measured(pad: int) -> None:
    k = tokens(300, 2, 64)
    padded = torch.cat([filled(1e4, pad), k], 2)
    own = lambda kk, vv: book(layout("fp4-quality"), 2, seed=int(kk.abs().amax() > 1e3))  # noqa: E731
    a, b = (LayerStore(layout("fp4-quality"), 2, own, window=16) for _ in range(2))
    a.append(k, k)
    b.set_pads([pad])
    b.append(padded, padded)
    a.settle(), b.settle()
    assert torch.equal(a.pool, b.pool) and torch.equal(a.gather()[0], b.gather()[0][:, :, pad:])
    q = torch.randn(1, 4, 1, 64)
    assert torch.equal(attend(a, q, scale=0.1)[0], attend(b, q, scale=0.1)[0])


@pytest.mark.parametrize("length", [15, 16, 17, 19, 20, 21, 35, 147, 148, 149, 276, 277])
@pytest.mark.parametrize("name", ["fp4-72", "fp4-72-c64"])
def test_every_prompt_length_leaves_the_window_in_time(name: str, length: int) -> None:
    """Around window, sinks + window, and a page more; then decode: pages grow, the window does not."""
    s = store(name, window=16)
    s.append(tokens(length, 2, 64), tokens(length, 2, 64))
    group = format_of(name).append_group
    for i in range(150):
        s.append(tokens(1, 2, 64, seed=i), tokens(1, 2, 64, seed=i))
        assert s.recent_k.shape[2] <= max(16 + group, 16 + store_module.DRAFT + group if i == 0 else 0, length if length <= 36 else 0)
    s.settle()
    assert s.pages.rows[0].stored == (length + 150 - 4 - 16) // group * group


def test_sinks_are_each_rows_own() -> None:
    k = tokens(100, 2, 64, 3)
    s = store("fp4-quality", batch=3)
    s.set_pads([0, 10, 37])
    s.append(k, k)
    s.settle()
    got = s.gather()[0]
    for b, pad in enumerate((0, 10, 37)):
        assert torch.equal(got[b, :, pad : pad + 4], k[b, :, pad : pad + 4])
        assert not torch.equal(got[b, :, pad + 4 : pad + 8], k[b, :, pad + 4 : pad + 8])


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", ["fp4-72", "fp4-72-c64", "nvfp4", "mxfp4", "fp8"])
def test_writer_and_reader_agree_on_the_order_of_scales(name: str, dim: int) -> None:
    """Every block and token has a magnitude of its own, so that any swap of scales shows."""
    n = 256
    x = ((torch.arange(dim) // 16 + 1)[None, :] * (1 + torch.arange(n) % 61)[:, None]).float()[None, None].repeat(1, 2, 1, 1)
    lay = layout(name, dim)
    s = LayerStore(lay, 2, neutral_book(lay, 2), sinks=0, window=0)
    s.append(x, x)
    s.settle()
    for got in s.gather():
        ratio = got / x
        limit = 0.45 if format_of(name).v_axis == "channel" or format_of(name).v_group == 64 else 0.3
        assert float((ratio.median() - 1).abs()) < 0.1 and float((ratio[..., -1] - 1).abs().mean()) < limit
    out, _ = attend(s, torch.zeros(1, 2, 1, dim), scale=1.0)
    assert torch.allclose(out[:, :, 0], s.gather()[1].mean(2), rtol=1e-4)


def test_head_dim_comes_from_the_layout_never_from_packed_bytes() -> None:
    lay = layout("fp4-72", 128)
    pool = law.empty_pages(1, 2, lay)
    assert law.unpack(pool, lay).k_codes.shape[-1] == 128 and lay.offsets["k_codes"][1] == PAGE * 64
    with pytest.raises(ShapeError):
        attend(store("fp4-72", dim=64), torch.randn(1, 2, 1, 128), scale=1.0)


@pytest.mark.parametrize("dim", [8, 40, 100])
def test_an_unsupported_head_dim_is_refused_before_work(dim: int) -> None:
    with pytest.raises(ShapeError, match="multiple of 16"):
        layout_for(FORMATS["fp4-quality"], dim, dim)


@pytest.mark.parametrize("name", [*NAMES, *PAIRS])
def test_head_dim_80_and_other_short_blocks_work(name: str) -> None:
    s = store(name, dim=80)
    k = tokens(200, 2, 80)
    s.append(k, k)
    s.settle()
    for got in s.gather():
        assert (got - k).norm() / k.norm() < 0.35 and bool(got.isfinite().all())


@pytest.mark.parametrize("name", [n for n in NAMES if format_of(n).scale != "none"] + list(PAIRS))
def test_no_scale_byte_is_ever_undefined(name: str) -> None:
    """Odd token counts and head dims; every byte of a fresh and of a partly filled page, padding and unused slots included."""
    lay = layout(name, 80)
    assert int(law.empty_pages(3, 2, lay)[..., : lay.offsets["trailer"][0]].max()) == 0
    s = LayerStore(lay, 2, neutral_book(lay, 2), window=0)
    s.append(tokens(4 + 64, 2, 80), tokens(4 + 64, 2, 80))
    s.settle()
    parts = law.unpack(s.pool, lay)
    for scale, fmt in ((parts.k_scales, lay.format), (parts.v_scales, lay.format.v)):
        assert fmt.scale == "none" or bool(law.scale_values(scale.contiguous(), fmt).isfinite().all())


@pytest.mark.parametrize("name", ["fp8", "fp4-72", "fp4-quality", "fp4-72-c64", "nvfp4", "mxfp4"])
def test_small_signals_keep_their_relative_error(name: str) -> None:
    lay = PageLayout(FORMATS[name], 64, 64)
    error = {}
    for scale in (1.0, 2.0**-20):
        x = tokens(128, 2, 64) * scale
        pool = law.empty_pages(1, 2, lay)
        encode_naive(pool, x[0].transpose(0, 1), x[0].transpose(0, 1), torch.tensor(runs_for([0], 0, 128, 0)), neutral_book(lay, 2), lay)
        # no outliers: FP16 loses digits down there, the codes must not
        k, v = decode_naive(pool, neutral_book(lay, 2), lay)
        error[scale] = float((v[0] - x[0]).norm() / x.norm()), float((k[0] - x[0]).norm() / x.norm())
    assert error[1.0] == pytest.approx(error[2.0**-20], rel=1e-4)


@pytest.mark.parametrize("name", ["fp4-quality", "fp8"])
def test_layers_that_share_one_buffer_do_not_alias(name: str) -> None:
    """Pages of two layers interleaved in one allocation, as strided views."""
    lay = layout(name)
    buffer = law.empty_pages(4, 2 * 2, lay).reshape(4, 2, 2, lay.page_bytes)
    views, apart = [buffer[:, 0], buffer[:, 1]], [law.empty_pages(4, 2, lay) for _ in range(2)]
    for i in range(0, 300, 50):
        for n in range(2):
            k, v = tokens(50, 2, 64, seed=i + n)[0].transpose(0, 1), tokens(50, 2, 64, seed=i + n + 9)[0].transpose(0, 1)
            for pool in (views[n], apart[n]):
                encode_naive(pool, k, v, torch.tensor(runs_for([3, 1, 0], i, 50, 0)), book(lay, 2, seed=n), lay)
    for n in range(2):
        assert torch.equal(views[n], apart[n])


def test_bytes_per_page_have_one_source() -> None:
    """Allocator, formula and records agree; scales and outliers are inside."""
    for name in (*NAMES, *PAIRS):
        lay = layout(name, 128)
        assert law.empty_pages(2, 3, lay).shape == (2, 3, lay.page_bytes)
        assert lay.held_bytes(PAGE, 0, 0, draft=1) == lay.page_bytes + 4 + 2 * 256 * lay.format.append_group
        assert lay.page_bytes >= sum(size for _, size in lay.offsets.values())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [*NAMES, *PAIRS])
def test_shards_of_heads_equal_the_whole(name: str, ranks: int) -> None:
    """Two KV heads on two ranks, and on four (each head on two of them): same pages, same attention."""
    k, v, q = tokens(200, 2, 64), tokens(200, 2, 64, seed=1), torch.randn(1, 8, 1, 64)
    lay = layout(name)
    whole_book = book(lay, 2)
    whole = LayerStore(lay, 2, whole_book, window=16)
    whole.append(k, v)
    whole.settle()
    out, _ = attend(whole, q, scale=0.1)
    per = 8 // ranks
    for rank in range(ranks):
        h = slice(rank * 2 // ranks, rank * 2 // ranks + 1)
        shard = LayerStore(lay, 1, tuple(t[h] for t in whole_book), window=16)
        shard.append(k[:, h], v[:, h])
        shard.settle()
        assert torch.equal(shard.pool, whole.pool[:, h])
        mine = slice(rank * per, (rank + 1) * per)
        assert torch.allclose(attend(shard, q[:, mine], scale=0.1)[0], out[:, mine], atol=1e-5)


def test_page_zero_and_fresh_pages_are_defined_and_nobodys_default() -> None:
    """Warm up, drop everything, look at page 0: a table cell that points nowhere may name it, and must not read from it."""
    s = store("fp4-quality", batch=2)
    s.append(torch.full((2, 2, 200, 64), float("nan")), torch.full((2, 2, 200, 64), float("inf")))
    s.reset()
    s.append(tokens(3, 2, 64, 2), tokens(3, 2, 64, 2))
    out, _ = attend(s, torch.randn(2, 2, 1, 64), scale=0.1)
    assert bool(out.isfinite().all()) and s.pool.shape[0] == 0
    s.append(tokens(200, 2, 64, 2), tokens(200, 2, 64, 2))
    s.pages.clear(0)
    s.pool[0] = 0xFF
    assert bool(attend(s, torch.randn(2, 2, 1, 64), [0, 1], scale=0.1)[0].isfinite().all())


def test_hybrid_head_dims_have_page_sizes_of_their_own() -> None:
    sizes = set()
    for dim in (256, 512):
        lay = PageLayout(FORMATS["fp4-quality"], dim, dim, 8)
        s = LayerStore(lay, 1, book(lay, 1), window=16)
        k = tokens(200, 1, dim)
        s.append(k, k)
        s.settle()
        assert (s.gather()[0] - k).norm() / k.norm() < 0.16
        sizes.add(lay.page_bytes)
    assert len(sizes) == 2


@pytest.mark.parametrize("name", ["fp4-quality", "fp8"])
def test_a_batch_that_grows_keeps_its_strides(name: str) -> None:
    s = store(name)
    k = tokens(200, 2, 64)
    s.append(k, k)
    s.settle()
    one = s.gather()[0]
    s.select([0, 0, 0, 0])
    assert torch.equal(s.gather()[0], one.expand(4, -1, -1, -1))
    q = torch.randn(1, 4, 1, 64)
    assert torch.allclose(attend(s, q.expand(4, -1, -1, -1), scale=0.1)[0][3], attend(s, q.expand(4, -1, -1, -1), scale=0.1)[0][0], atol=0)
    more = tokens(50, 2, 64, 4, seed=7)
    s.append(more, more)
    s.settle()
    assert torch.equal(s.gather()[0][:, :, :184], one[:, :, :184].expand(4, -1, -1, -1))


@pytest.mark.parametrize(("name", "want"), [("fp4-72", 63.250884), ("fp4-quality", 63.175516), ("fp8", 64.539797)])
def test_recorded_pages_give_recorded_outputs(name: str, want: float) -> None:
    """Bytes in, numbers out: attention over the golden pages of test_encode, as first written."""
    x = ((torch.arange(2 * 100 * 64) * 2654435761 % 4093).float() / 2048 - 1).reshape(1, 2, 100, 64)
    s = LayerStore(layout(name), 2, book(layout(name), 2), sinks=0, window=0)
    s.append(x, x.flip(3))
    s.settle()
    out, _ = attend(s, x[:, :, :1] * 4, scale=0.5)
    assert float(out.double().abs().sum()) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("sink", [-5.0, 0.0, 8.0])
def test_sink_logits_take_part_in_the_sum_only(sink: float) -> None:
    s = store("fp4-quality")
    k = tokens(150, 2, 64)
    s.append(k, k)
    q = torch.randn(1, 4, 1, 64)
    out, lse = attend(s, q, scale=0.1, sink_H=torch.full((4,), sink))
    got_k, got_v = s.gather()
    want = attention_loop(q[0, 3], got_k[0, 1], got_v[0, 1], scale=0.1, last=1, sink=sink)
    assert torch.allclose(out[0, 3].double(), want, atol=1e-4)
    plain, plain_lse = attend(s, q, scale=0.1)
    assert torch.allclose(out, plain * torch.exp(plain_lse - lse)[..., None], atol=1e-4)


def test_a_model_with_sink_logits_generates_and_its_drift_is_measured() -> None:
    """The one-pass gate refuses such a model (test_gate); generating with the cache measures it."""
    model, text = models.gpt_oss(), models.ids(120)
    with torch.no_grad():
        exact = model(input_ids=text).logits[0].log_softmax(-1)
        result = {}
        for name in ("fp16", "fp8", "mxfp4"):
            cache = make_cache(model.config, models.config(name))
            steps = [model(input_ids=text[:, i : i + 1], past_key_values=cache).logits[0] for i in range(120)]
            result[name] = drift([exact], [torch.cat(steps).log_softmax(-1)], [text[0]]).kl
    assert result["fp16"] < result["fp8"] < result["mxfp4"] and result["fp16"] < 1e-4


def test_prefill_reads_fresh_keys_not_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt decodes no page at all, in whatever format."""
    decoded: list[int] = []
    real = records.decode_naive
    monkeypatch.setattr(store_module, "decode_naive", lambda r, *a: decoded.append(len(r)) or real(r, *a))
    layer = make_cache(models.llama().config, models.config("fp4-72")).layers[0]
    k, v = torch.randn(1, 2, 500, 64), torch.randn(1, 2, 500, 64)
    keys, values = layer.update(k, v)
    assert decoded == [] and torch.equal(keys, k) and torch.equal(values, v)


def test_decode_touches_only_the_pages_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work follows the sequence, not the pool: a pool a hundred times larger decodes the same records."""
    decoded: list[int] = []
    real = records.decode_naive
    monkeypatch.setattr(store_module, "decode_naive", lambda r, *a: decoded.append(len(r)) or real(r, *a))
    for pages in (0, 300):
        s = store("fp4-quality")
        s.append(tokens(300, 2, 64), tokens(300, 2, 64))
        s.pool = torch.cat([s.pool, law.empty_pages(pages, 2, s.layout)])
        s.settle()
        s.gather()
    assert decoded == [3, 3]


def test_peak_memory_of_a_decode_step_is_one_layers_not_the_caches() -> None:
    """What `update` decodes is freed with it: over many layers the peak stays near the packed size plus one decoded layer."""
    layers = 12
    config = models.llama(layers=layers).config
    cache = make_cache(config, models.config("fp4-72", window=16))
    one = torch.randn(1, 2, 1, 64)
    for layer in cache.layers:
        layer.update(torch.randn(1, 2, 1500, 64), torch.randn(1, 2, 1500, 64))
    held, fp16 = cache.held_bytes(), layers * 2 * 2 * 1500 * 64 * 2
    alive = []
    for layer in cache.layers:
        out = layer.update(one, one)
        alive.append(sum(t.untyped_storage().nbytes() for t in out))
        del out
    assert cache.held_bytes() < 1.05 * held < 0.4 * fp16
    assert held + max(alive) < fp16


@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_of_another_batch_is_refused_never_spread(batch: int) -> None:
    """A captured step serves the batch that it was made for: one row would be written to both, a third to neither."""
    lay = layout("fp8")
    s, k = StaticStore(lay, 2, neutral_book(lay, 2), batch=2, max_tokens=100), tokens(40, 2, 64, 3)
    s.prefill(k[:2, :, :30], k[:2, :, :30])
    before = [x.clone() for x in (*s.gather(), s.length)]
    for take in (s.append, s.prefill):
        with pytest.raises(ShapeError, match="static KV cache"):
            take(k[:batch, :, 30:31], k[:batch, :, 30:31])
    assert all(torch.equal(a, b) for a, b in zip((*s.gather(), s.length), before, strict=True))


@pytest.mark.parametrize(("calibrated", "max_length"), [(False, None), (True, None), (True, 300)])
def test_a_cache_goes_through_pickle(calibrated: bool, max_length: int | None) -> None:
    """To another process, or to disk between turns: with books made from prompts as with those of a calibration, of both kinds, and while
    sinks are still coming in."""
    llama = models.llama()
    stats = calibrate(llama, models.ids(200, 2, seed=9)) if calibrated else None
    for prompt in (2, 90):
        cache = make_cache(llama.config, models.config(), stats, max_length=max_length)
        models.generate(llama, models.ids(prompt, 2), cache, 1)
        twin = pickle.loads(pickle.dumps(cache))
        more, grown = torch.randn(2, 2, 40, 64, generator=torch.Generator().manual_seed(0)), []
        for c in (cache, twin):
            for at in range(0, 40, 4):
                for layer in c.layers:
                    layer.update(more[:, :, at : at + 4], more[:, :, at : at + 4])
            c.check_integrity()
            grown.append([x for layer in c.layers for x in (layer.static if max_length else layer.store).gather()])
        assert all(torch.equal(a, b) for a, b in zip(*grown, strict=True))


def test_a_pickled_cache_of_another_layout_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lay = layout("fp4-quality")
    assert pickle.loads(pickle.dumps(lay)) == lay
    monkeypatch.setattr(PageLayout, "__getstate__", lambda self: dict(self.__dict__))
    with pytest.raises(ArtefactError, match="layout version"):
        pickle.loads(pickle.dumps(lay))
