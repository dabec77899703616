from __future__ import annotations

import pytest
import torch

from moe_prefetch.errors import ShapeError
from moe_prefetch.kernels.kv_attend.naive import merge, softmax_attention
from moe_prefetch.kernels.kv_attend.op import kv_attend
from moe_prefetch.kernels.kv_encode.records import neutral_book
from moe_prefetch.kv.attention import attend, attend_as_decoded, attend_chunk
from moe_prefetch.kv.format import FORMATS, HEAD_DIMS, PAGE, layout_for
from moe_prefetch.kv.pages import block_table
from moe_prefetch.kv.store import LayerStore

from .common import NAMES, PAIRS, attention_loop, book, layout, store, tokens

SCALE = 0.1
EXTRAS = [{}, {"sliding": 70}, {"softcap": 3.0}, {"sink": 0.7}, {"sliding": 33, "softcap": 5.0, "sink": -1.0}]


def ints(*x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("groups", [1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("name", [*NAMES, *PAIRS[:2]])
def test_attention_equals_the_sum_it_is(name: str, groups: int, dim: int) -> None:
    """Several queries over pages, sinks and window, two ragged rows, against a loop over what the store says it holds."""
    extra = EXTRAS[(groups + dim // 16) % len(EXTRAS)]
    heads, last = 2, 3
    s = store(name, dim=dim, heads=heads, batch=2)
    s.set_pads([0, 29])
    k, v = tokens(190, heads, dim, 2), tokens(190, heads, dim, 2, seed=1)
    s.append(k[:, :, :-last], v[:, :, :-last])
    s.append(k[:, :, -last:], v[:, :, -last:])
    q = torch.randn(2, heads * groups, last, dim)
    kw = dict(extra)
    sink = kw.pop("sink", None)
    out, lse = attend(s, q, scale=SCALE, sink_H=None if sink is None else torch.full((heads * groups,), sink), **kw)
    k_all, v_all = s.gather()
    assert bool(lse.isfinite().all())
    for b in range(2):
        for h in (0, heads * groups - 1):
            pad = s.pads[b]
            want = attention_loop(
                q[b, h], k_all[b, h // groups, pad:], v_all[b, h // groups, pad:], scale=SCALE, last=last, sink=sink, **kw
            )
            # logits reach a hundred, so that FP32 leaves 1e-5 of each weight open
            assert torch.allclose(out[b, h].double(), want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", ["fp16", "fp8", "fp4-72", "fp4-quality", "fp4-72-c64", *PAIRS])
def test_stepwise_decode_equals_chunk_of_one_prefill(name: str, extra: dict[str, float]) -> None:
    kw = dict(extra)
    sink = kw.pop("sink", None)
    sink_H = None if sink is None else torch.full((6,), sink)
    k, v, q = tokens(230, 2, 64, 2), tokens(230, 2, 64, 2, seed=1), torch.randn(2, 6, 230, 64)
    one, two = store(name, batch=2), store(name, batch=2)
    for s in (one, two):
        s.set_pads([0, 7])
        s.append(k[:, :, :200], v[:, :, :200])
    for i in range(200, 230):
        at = slice(i, i + 1)
        a = attend_chunk(one, q[:, :, at], k[:, :, at], v[:, :, at], scale=SCALE, sink_H=sink_H, **kw)
        two.append(k[:, :, at], v[:, :, at])
        b = attend(two, q[:, :, at], scale=SCALE, sink_H=sink_H, **kw)
        assert torch.allclose(a[0], b[0], atol=1e-5) and torch.allclose(a[1], b[1], atol=1e-5)
    one.settle(), two.settle()
    assert torch.equal(one.pool, two.pool)


@pytest.mark.parametrize(("window", "settle"), [(0, 1), (16, 1), (16, 32), (5, 7)])
@pytest.mark.parametrize("name", ["fp16", "fp8", "fp4-72", "fp4-quality", "fp4-72-c64", "nvfp4"])
def test_one_pass_equals_stepwise_decode(name: str, window: int, settle: int) -> None:
    n = 200
    k, v, q = tokens(n, 2, 64), tokens(n, 2, 64, seed=1), torch.randn(1, 6, n, 64)
    lay = layout(name)
    whole = attend_as_decoded(q, k, v, lay, book(lay, 2), sinks=4, window=window, settle=settle, scale=SCALE, block=64)
    s = LayerStore(lay, 2, book(lay, 2), sinks=4, window=window, settle=settle)
    for i in range(n):
        at = slice(i, i + 1)
        out, _ = attend_chunk(s, q[:, :, at], k[:, :, at], v[:, :, at], scale=SCALE)
        assert torch.allclose(out, whole[:, :, at], atol=1e-5, rtol=1e-3), i


def test_a_prefill_chunk_reads_its_own_keys_unrounded() -> None:
    k, v, q = torch.randn(1, 2, 300, 64), torch.randn(1, 2, 300, 64), torch.randn(1, 4, 300, 64)
    s = store("fp4-72")
    out, _ = attend_chunk(s, q, k, v, scale=SCALE)
    pos = torch.arange(300)[None]
    want, _ = softmax_attention(q, k, v, pos, pos, scale=SCALE)
    assert torch.allclose(out, want, atol=1e-5)


def test_rows_may_bring_different_numbers_of_queries() -> None:
    """Prefill, verify and decode in one batch: each row as if alone; queries that are not there give 0 and -inf."""
    n, lens = 180, [1, 4, 8]
    k, v, q = tokens(n, 2, 64, 3), tokens(n, 2, 64, 3, seed=1), torch.randn(3, 4, 8, 64)
    s = store("fp4-quality", batch=3)
    s.append(k, v)
    out, lse = attend(s, q, lens, scale=SCALE)
    for b, t in enumerate(lens):
        one = store("fp4-quality")
        one.append(k[b : b + 1], v[b : b + 1])
        alone, _ = attend(one, q[b : b + 1, :, :t], scale=SCALE)
        assert torch.allclose(out[b, :, :t], alone[0], atol=1e-5)
        assert bool((out[b, :, t:] == 0).all()) and bool((lse[b, :, t:] == -torch.inf).all())


def test_an_empty_sequence_gives_zero_and_minus_infinity() -> None:
    s = store("fp4-quality", batch=2)
    s.set_pads([0, 5])
    s.append(tokens(5, 2, 64, 2), tokens(5, 2, 64, 2))
    out, lse = attend(s, torch.randn(2, 2, 1, 64), [1, 0], scale=SCALE)
    assert bool((out[1] == 0).all()) and bool((lse[1] == -torch.inf).all()) and bool(lse[0].isfinite().all())


@pytest.mark.parametrize("cut", [0, 1, 63, 100])
def test_parts_merge_by_log_sum_exp(cut: int) -> None:
    q, k, v = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)
    pos = torch.arange(100)[None]
    at = torch.tensor([[99]])
    whole = softmax_attention(q, k, v, at, pos, scale=SCALE)
    a, b = (softmax_attention(q, k[:, :, x], v[:, :, x], at, pos[:, x], scale=SCALE) for x in (slice(0, cut), slice(cut, 100)))
    for got, want in zip(merge(*a, *b), whole, strict=True):
        assert torch.allclose(got, want, atol=1e-5)


def test_centring_keys_does_not_move_the_answer() -> None:
    """Stored keys lose a mean that window and sinks keep; q . mean comes back, so LSE and output stay right."""
    lay = layout("fp4-quality")
    plain = list(neutral_book(lay, 2))
    centred = list(plain)
    centred[1] = torch.full((2, 64), 50.0)
    k, v = tokens(200, 2, 64) * 0.1 + 50.0, tokens(200, 2, 64, seed=1)
    q = torch.randn(1, 2, 1, 64)
    results = {}
    for what, b in (("plain", plain), ("centred", centred)):
        s = LayerStore(lay, 2, tuple(b), window=16)
        s.append(k, v)
        s.settle()
        results[what] = attend(s, q, scale=SCALE)
    pos = torch.arange(200)[None]
    true, true_lse = softmax_attention(q, k, v, torch.tensor([[199]]), pos, scale=SCALE)
    error = {what: float((out - true).norm() / true.norm()) for what, (out, _) in results.items()}
    assert error["centred"] < 0.15 and error["plain"] > 3 * error["centred"]
    assert torch.allclose(results["centred"][1], true_lse, atol=0.05)


def test_bytes_that_hold_no_token_are_never_read() -> None:
    """Garbage in every unused slot, unused page, unused ring slot and table cell changes no bit."""
    outs = []
    for fill in (0x00, 0xFF, 0x7F):
        s = store("fp4-quality", batch=2)
        s.set_pads([0, 60])
        s.append(tokens(250, 2, 64, 2), tokens(250, 2, 64, 2, seed=1))
        s.settle()
        s.pool = torch.cat([s.pool, torch.full((2, *s.pool.shape[1:]), fill, dtype=torch.uint8)])
        for row in s.pages.rows:
            n, page = row.stored % PAGE, row.pages[-1]
            for part, width in (("k_codes", 32), ("k_scales", 2), ("v_scales", 1), ("k_outliers", 2 * s.layout.outliers)):
                at, size = s.layout.offsets[part]
                s.pool[page, :, at + n * width : at + size] = fill
            if n < 64:
                at, size = s.layout.offsets["v_codes"]
                s.pool[page, :, at : at + size] = (s.pool[page, :, at : at + size] & 0x71) | (fill & 0x8E)
        R = s.recent_k.shape[2]
        live = [s.row_length(b) - 4 - r.stored for b, r in enumerate(s.pages.rows)]
        ring = torch.full((2, 2, R + 5, 64), float("nan") if fill else 0.0, dtype=torch.float16)
        ring_k, ring_v = ring.clone(), ring.clone()
        for b, n in enumerate(live):
            where = (torch.arange(n) + 3) % (R + 5)
            ring_k[b][:, where], ring_v[b][:, where] = s.recent_k[b, :, R - n :], s.recent_v[b, :, R - n :]
        table = torch.tensor(block_table(s.pages.rows, fill=len(s.pool) - 1), dtype=torch.int32)
        table = torch.cat([table, torch.full((2, 3), len(s.pool) - 2, dtype=torch.int32)], 1)
        torch.manual_seed(3)
        outs.append(
            kv_attend(
                torch.randn(2, 4, 1, 64),
                ints(1, 1),
                s.pool,
                table,
                ints(*(r.stored for r in s.pages.rows)),
                ints(250, 190),
                s.sink_k,
                s.sink_v,
                ring_k,
                ring_v,
                ints(3, 3),
                s.books[0],
                s.layout,
                scale=SCALE,
            )
        )
    for o in outs[1:]:
        assert torch.equal(o[0], outs[0][0]) and torch.equal(o[1], outs[0][1])


# MLA -----------------------------------------------------------------------------------------------------------------------
def relative(out: torch.Tensor, true: torch.Tensor) -> float:
    return float((out - true).norm() / true.norm())


def latent_and_gqa_errors(seed: int, sharpness: float) -> tuple[float, float]:
    """Relative error of a layer's attention output with an FP4 latent, and with plain GQA FP4, for the same hidden states.

    Random weights in DeepSeek-V2's shape: hidden 2048, 16 heads, latent 512 + rotary 64, no-position 128, values 128; GQA has 4 KV heads of
    128. Queries are scaled so that logits spread by `sharpness` in both.
    """
    torch.manual_seed(seed)
    n, heads, hidden = 600, 16, 2048
    x, last = torch.randn(n, hidden), torch.randn(1, hidden)
    w = lambda *shape: torch.randn(*shape) / shape[-1] ** 0.5  # noqa: E731
    at, positions = torch.tensor([[n - 1]]), torch.arange(n)[None]

    latent = x @ w(512, hidden).T
    c, rope = latent / latent.square().mean(-1, keepdim=True).sqrt(), x @ w(64, hidden).T
    up_k, up_v = w(heads, 128, 512), w(heads, 128, 512)
    q_nope, q_rope = (last @ w(heads * 128, hidden).T).view(heads, 1, 128), (last @ w(heads * 64, hidden).T).view(heads, 1, 64)
    q = torch.cat([torch.einsum("htd,hdc->htc", q_nope, up_k), q_rope], -1)[None]
    k = torch.cat([c, rope], -1)[None, None]
    scale = sharpness / float((q @ k.mT).std())
    lay = layout_for(FORMATS["fp4-quality"], 512, 0, rope=64)
    s = LayerStore(lay, 1, neutral_book(lay, 1), window=16)
    s.append(k, k[..., :0])
    up = lambda o: torch.einsum("bhtc,hdc->bhtd", o, up_v)  # noqa: E731
    mla = relative(up(attend(s, q, scale=scale)[0]), up(softmax_attention(q, k, c[None, None], at, positions, scale=scale)[0]))

    k, v = ((x @ w(4 * 128, hidden).T).view(n, 4, 128).transpose(0, 1)[None] for _ in range(2))
    q = (last @ w(heads * 128, hidden).T).view(1, heads, 1, 128)
    scale = sharpness / float((q.view(1, 4, 4, 128) @ k.mT).std())
    lay = layout("fp4-quality", 128, outliers=0)
    g = LayerStore(lay, 4, neutral_book(lay, 4), window=16)
    g.append(k, v)
    return mla, relative(attend(g, q, scale=scale)[0], softmax_attention(q, k, v, at, positions, scale=scale)[0])


@pytest.mark.parametrize("sharpness", [1.0, 2.0, 4.0])
def test_mla_latent_is_as_good_as_plain_gqa(sharpness: float) -> None:
    errors = [latent_and_gqa_errors(seed, sharpness) for seed in range(3)]
    mla, gqa = (sum(x) / len(errors) for x in zip(*errors, strict=True))
    assert 0.001 < mla <= 1.2 * gqa, (mla, gqa)


def test_mla_mean_is_added_back_on_both_sides() -> None:
    lay = layout_for(FORMATS["fp4-quality"], 128, 0, rope=64)
    b = list(neutral_book(lay, 1))
    b[1] = torch.full((1, 128), 5.0)
    c = torch.randn(1, 1, 300, 128) * 0.1 + 5.0
    rope = torch.randn(1, 1, 300, 64)
    s = LayerStore(lay, 1, tuple(b), window=16)
    s.append(torch.cat([c, rope], -1), c[..., :0])
    s.settle()
    k, v = s.gather()
    assert (k[..., :128] - c).norm() / c.norm() < 0.01 and torch.equal(k[..., :128], v)
    assert torch.equal(k[..., 128:], rope.half().float())


@pytest.mark.parametrize("pads", [[0, 0, 0], [0, 190, 20]])
def test_rows_with_codebooks_of_their_own(pads: list[int]) -> None:
    """Each row reads its pages through its own book; the second of the padded ones has no page, and so no book."""
    lay = layout("fp4-quality")
    make = lambda k, v: book(lay, 2, seed=int(k.abs().sum()))  # noqa: E731
    k, v, q = tokens(200, 2, 64, 3), tokens(200, 2, 64, 3, seed=1), torch.randn(3, 4, 1, 64)
    s = LayerStore(lay, 2, make, batch=3, window=16)
    s.set_pads(pads)
    s.append(k, v)
    s.settle()
    out, lse = attend(s, q, scale=SCALE)
    assert len(s.by_book()) == 3 - (pads[1] > 0)
    for b, pad in enumerate(pads):
        one = LayerStore(lay, 2, make, window=16)
        one.append(k[b : b + 1, :, pad:], v[b : b + 1, :, pad:])
        one.settle()
        want, want_lse = attend(one, q[b : b + 1], scale=SCALE)
        assert torch.allclose(out[b], want[0], atol=1e-5) and torch.allclose(lse[b], want_lse[0], atol=1e-4)


# refusals ------------------------------------------------------------------------------------------------------------------
def test_bad_shapes_are_refused() -> None:
    s = store("fp4-quality", heads=2)
    s.append(tokens(10, 2, 64), tokens(10, 2, 64))
    with pytest.raises(ShapeError, match="a multiple"):
        attend(s, torch.randn(1, 3, 1, 64), scale=SCALE)
    with pytest.raises(ShapeError):
        attend(s, torch.randn(1, 4, 1, 80), scale=SCALE)


def test_opcheck() -> None:
    s = store("fp4-quality")
    s.append(tokens(200, 2, 64), tokens(200, 2, 64))
    s.settle()
    args = (
        torch.randn(1, 4, 1, 64),
        ints(1),
        s.pool,
        torch.tensor(block_table(s.pages.rows), dtype=torch.int32),
        ints(s.pages.rows[0].stored),
        ints(200),
        s.sink_k,
        s.sink_v,
        s.recent_k,
        s.recent_v,
        ints(0),
        *s.books[0],
        None,
        "fp4-quality",
        64,
        64,
        s.layout.outliers,
        0,
        SCALE,
        0,
        0.0,
    )
    torch.library.opcheck(
        torch.ops.moe_prefetch.kv_attend.default, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )
