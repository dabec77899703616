from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_prefetch.errors import CacheError, ConfigError
from moe_prefetch.integrations.transformers_cache import calibrate, make_cache
from moe_prefetch.kernels.kv_encode.records import neutral_book
from moe_prefetch.kv import static as static_module
from moe_prefetch.kv.attention import attend
from moe_prefetch.kv.format import format_of
from moe_prefetch.kv.static import StaticStore
from moe_prefetch.kv.store import LayerStore

from . import models
from .common import NAMES, PAIRS, book, layout, tokens

ONE_TOKEN = [n for n in (*NAMES, *PAIRS[:2]) if format_of(n).append_group == 1]


def pair(name: str, *, batch: int = 2, max_tokens: int = 420, window: int = 16) -> tuple[StaticStore, LayerStore]:
    lay = layout(name)
    b = book(lay, 2)
    return StaticStore(lay, 2, b, batch=batch, max_tokens=max_tokens, window=window), LayerStore(lay, 2, b, batch=batch, window=window)


@pytest.mark.parametrize("prompt", [0, 3, 20, 21, 147, 300])
@pytest.mark.parametrize("name", ONE_TOKEN)
def test_steps_equal_the_paged_store(name: str, prompt: int) -> None:
    """Prompt, then single tokens: the same K and V to the bit, the same attention."""
    static, paged = pair(name)
    k, v = tokens(prompt + 60, 2, 64, 2), tokens(prompt + 60, 2, 64, 2, seed=1)
    if prompt:
        static.prefill(k[:, :, :prompt], v[:, :, :prompt])
        paged.append(k[:, :, :prompt], v[:, :, :prompt])
    for i in range(prompt, prompt + 60):
        for s in (static, paged):
            s.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    for got, want in zip(static.gather(), paged.gather(), strict=True):
        assert torch.equal(got[:, :, : prompt + 60], want) and bool((got[:, :, prompt + 60 :] == 0).all())
    q = torch.randn(2, 4, 1, 64)
    for got, want in zip(static.attend(q, scale=0.1), attend(paged, q, scale=0.1), strict=True):
        assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("chunks", [(3, 20, 40), (2, 9, 1, 150), (9, 1, 9, 130, 70), (160, 1, 1, 100), (147, 1, 129), (5, 5, 40)])
@pytest.mark.parametrize("name", ["fp8", "fp4-quality"])
def test_more_of_a_prompt_equals_the_paged_store(name: str, chunks: tuple[int, ...]) -> None:
    """Chunks of any length at any place: across sinks, window and pages; what lies there before they come must not matter."""
    static, paged = pair(name)
    total = sum(chunks)
    k, v = tokens(total + 30, 2, 64, 2), tokens(total + 30, 2, 64, 2, seed=1)
    loud = torch.full((2, 2, total, 64), 6e4)
    static.prefill(loud, loud)
    static.reset()
    static.pool.fill_(0x55)
    at = 0
    for n in (*chunks, *[1] * 30):
        part = k[:, :, at : at + n], v[:, :, at : at + n]
        static.prefill(*part) if n > 1 else static.append(*part)
        paged.append(*part)
        at += n
    for got, want in zip(static.gather(), paged.gather(), strict=True):
        assert torch.equal(got[:, :, :at], want) and bool((got[:, :, at:] == 0).all())
    assert static.known == at == int(static.length[0]) and int(static.stored[0]) == at - 4 - 16 - 1
    with pytest.raises(CacheError, match=f"more than the {at}"):
        static.prefill(*(tokens(421 - at, 2, 64, 2),) * 2)


def test_what_a_prompt_has_beyond_fp16_is_counted() -> None:
    static, paged = pair("fp4-72")
    k, v = tokens(40, 2, 64, 2), tokens(40, 2, 64, 2, seed=1)
    k[0, 0, 3, 5], k[1, 1, 30, 0], v[0, 1, 39, 2] = torch.inf, torch.nan, -7e4
    static.prefill(k, v)
    paged.append(k, v)
    assert static.counts.tolist() == paged.counts.tolist() == [2, 1]


def test_a_rejected_draft_leaves_no_trace() -> None:
    static, plain = pair("fp4-quality")[0], pair("fp4-quality")[0]
    k = tokens(200, 2, 64, 2)
    for s in (static, plain):
        s.prefill(k[:, :, :100], k[:, :, :100])
    for i in range(100, 140):
        junk = torch.full((2, 2, 5, 64), 900.0)
        junk[:, :, :1] = k[:, :, i : i + 1]
        static.append(junk, junk)
        static.crop(4)
        plain.append(k[:, :, i : i + 1], k[:, :, i : i + 1])
    got, want = static.gather()[0], plain.gather()[0]
    assert torch.equal(static.length, plain.length) and torch.equal(got[:, :, -300:], want[:, :, -300:])
    near = slice(int(plain.length[0]) - 16, int(plain.length[0]))
    assert torch.equal(got[:, :, near], want[:, :, near])


def test_a_page_opened_again_starts_blank() -> None:
    """Loud drafts open a page and are rejected; what then fills it must not inherit their factor."""
    static, plain = pair("fp4-72", window=0)[0], pair("fp4-72", window=0)[0]
    k = tokens(150, 2, 64, 2) * 0.01
    for s in (static, plain):
        s.prefill(k[:, :, :132], k[:, :, :132])
    loud = torch.full((2, 2, 8, 64), 6e4)
    static.append(loud, loud)
    static.append(loud, loud)
    static.crop(8)
    static.crop(8)
    for i in range(132, 150):
        for s in (static, plain):
            s.append(k[:, :, i : i + 1], k[:, :, i : i + 1])
    assert torch.equal(static.pool[static.table[:, 1].long()], plain.pool[plain.table[:, 1].long()])
    assert torch.equal(static.gather()[0], plain.gather()[0])


def test_reset_and_reuse_keep_addresses_and_bytes() -> None:
    static, fresh = pair("fp4-72")[0], pair("fp4-72")[0]
    k = tokens(300, 2, 64, 2)
    static.prefill(k * 100, k * 100)
    where = [t.data_ptr() for t in (static.pool, static.recent_k, static.length)]
    static.reset()
    for s in (static, fresh):
        s.prefill(k[:, :, :50], k[:, :, :50])
        for i in range(50, 250):
            s.append(k[:, :, i : i + 1], k[:, :, i : i + 1])
    assert where == [t.data_ptr() for t in (static.pool, static.recent_k, static.length)]
    assert torch.equal(static.gather()[0], fresh.gather()[0])


@pytest.mark.parametrize("name", ["fp16", "fp8", "fp4-quality"])
def test_a_step_reads_nothing_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors that have no values, any `.item()`, `.tolist()` or shape that depends on data raises: what would break graph capture.
    (Making a store looks at its book once.)
    """
    monkeypatch.setattr(static_module, "checked", lambda book, layout: book)
    with FakeTensorMode():
        lay = layout(name)
        s = StaticStore(lay, 2, neutral_book(lay, 2), batch=2, max_tokens=300)
        for _ in range(3):
            s.append(torch.randn(2, 2, 1, 64), torch.randn(2, 2, 1, 64))
            out, lse = s.attend(torch.randn(2, 4, 1, 64), scale=0.1)
            s.gather()
        s.append(torch.randn(2, 2, 4, 64), torch.randn(2, 2, 4, 64))
        s.crop(3)
        assert out.shape == (2, 4, 1, 64) and lse.shape == (2, 4, 1)
        with pytest.raises(Exception, match=r"(?i)data|item|scalar"):
            s.length.tolist()


@pytest.mark.parametrize("name", ["fp16", "fp8", "fp4-quality", "fp8+fp4-72"])
def test_generate_equals_the_paged_cache(name: str) -> None:
    model = models.llama()
    stats = calibrate(model, models.ids(200, 2, seed=9))
    for prompt in (models.ids(6, 2), models.ids(70, 2)):
        static = make_cache(model.config, models.config(name), stats, max_length=120)
        want = models.generate(model, prompt, make_cache(model.config, models.config(name), stats))
        assert torch.equal(models.generate(model, prompt, static), want)
        static.reset()
        assert torch.equal(models.generate(model, prompt, static), want)


@pytest.mark.parametrize("name", ["fp8", "fp4-72"])
def test_held_bytes_count_codebooks_and_bases(name: str) -> None:
    model = models.llama()
    cache = make_cache(model.config, models.config(name), calibrate(model, models.ids(200, 2, seed=9)), max_length=200)
    assert math.isnan(cache.bits_per_element())
    models.generate(model, models.ids(70, 2), cache)
    stores = [layer.static for layer in cache.layers]
    once = sum(t.nbytes for s in stores for t in (*s.book, *(s.basis or ())))
    assert cache.held_bytes() == once + sum(s.held_bytes() for s in stores)
    if name == "fp4-72":
        assert once > 0.9 * sum(s.heads * (s.layout.book_bytes + s.layout.basis_bytes) for s in stores)
    assert cache.bits_per_element() == pytest.approx(8 * cache.held_bytes() / (2 * 2 * 128 * 2 * int(cache.get_seq_length())))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="several tokens"):
        StaticStore(layout("fp4-72-c64"), 2, book(layout("fp4-72-c64"), 2), batch=1, max_tokens=100)
    s = pair("fp8")[0]
    with pytest.raises(CacheError, match="at most 8"):
        s.append(tokens(9, 2, 64, 2), tokens(9, 2, 64, 2))
    with pytest.raises(CacheError):
        s.prefill(tokens(421, 2, 64, 2), tokens(421, 2, 64, 2))
    config = models.llama().config
    with pytest.raises(ConfigError, match="calibration"):
        make_cache(config, models.config("fp4-72"), max_length=50)
    cache = make_cache(config, models.config("fp8"), max_length=50)
    with pytest.raises(CacheError):
        cache.reorder_cache(torch.tensor([0]))
