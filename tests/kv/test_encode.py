from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_prefetch.errors import ShapeError
from moe_prefetch.kernels.kv_encode import naive as law
from moe_prefetch.kernels.kv_encode.op import kv_encode
from moe_prefetch.kernels.kv_encode.records import arranged, decode_naive, encode_naive, runs_for, shares, swapped
from moe_prefetch.kv.format import E2M1, E2M1_MIDPOINTS, FORMATS, HEAD_DIMS, PAGE, KVFormat, PageLayout, format_of

from .common import NAMES, PAIRS, book, layout, tokens

PLAIN = KVFormat("test", "fp4")


def flat(x: torch.Tensor) -> torch.Tensor:
    return x[0].transpose(0, 1)


def encode(name: str, dim: int, k: torch.Tensor, v: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Pages after appending tokens in the chunks given."""
    lay, heads, n = layout(name, dim), k.shape[1], k.shape[2]
    pages = law.empty_pages(-(-n // PAGE), heads, lay)
    at = 0
    for c in cuts:
        if c:
            encode_naive(pages, flat(k), flat(v), torch.tensor(runs_for(list(range(len(pages))), at, c, at)), book(lay, heads), lay)
        at += c
    assert at == n
    return pages


# one number at a time ------------------------------------------------------------------------------------------------------
def quantise(values: list[float]) -> list[float]:
    """Values in a block whose scale is exactly 1: 6 is in it."""
    code, scale = law.fp4_blocks(torch.tensor([6.0, *values] + [0.0] * (31 - len(values))), torch.ones(1), 32, PLAIN)
    assert scale.tolist() == [1.0]
    return law.fp4_values(code)[1 : 1 + len(values)].tolist()


def test_every_representable_value_is_kept() -> None:
    both = [*E2M1, *(-x for x in E2M1)]
    assert quantise(both) == both


def test_every_midpoint_goes_to_the_even_code() -> None:
    even = [E2M1[i if i % 2 == 0 else i + 1] for i in range(7)]
    assert quantise(list(E2M1_MIDPOINTS)) == even
    assert quantise([-m for m in E2M1_MIDPOINTS]) == [-e for e in even]


def test_a_hair_beside_every_midpoint_goes_to_its_side() -> None:
    up = [torch.nextafter(torch.tensor(m), torch.tensor(9.0)).item() for m in E2M1_MIDPOINTS]
    down = [torch.nextafter(torch.tensor(m), torch.tensor(0.0)).item() for m in E2M1_MIDPOINTS]
    assert quantise(up) == list(E2M1[1:]) and quantise(down) == list(E2M1[:-1])


def test_midpoints_hold_at_every_scale_significand() -> None:
    """mid * scale is exact in FP32, so ties are ties at all 8 significands and far exponents."""
    for m in range(8):
        for e in (-60, 0, 60):
            s = (1 + m / 8) * 2.0**e
            x = torch.tensor([6 * s, *(mid * s for mid in E2M1_MIDPOINTS)] + [0.0] * 24)
            code, scale = law.fp4_blocks(x, torch.ones(1), 32, PLAIN)
            assert scale.item() == s
            assert law.fp4_values(code)[1:8].tolist() == [E2M1[i if i % 2 == 0 else i + 1] for i in range(7)]


def test_significand_rounding_is_e4m3_rounding() -> None:
    x = torch.rand(20000) * 440 + 0.016
    assert torch.equal(law.round_significand(x), x.to(torch.float8_e4m3fn).float())


@given(st.integers(1, 0x7E), st.integers(0, 30), st.integers(0, 30))
def test_shifting_scales_twice_equals_once(code: int, a: int, b: int) -> None:
    c = torch.tensor([code], dtype=torch.uint8)
    t = lambda n: torch.tensor([n], dtype=torch.int32)  # noqa: E731
    assert torch.equal(law.shift_scale_bytes(law.shift_scale_bytes(c, t(a)), t(b)), law.shift_scale_bytes(c, t(a + b)))


def test_a_shifted_scale_is_the_same_value_while_normal() -> None:
    c = torch.arange(0x40, 0x78, dtype=torch.uint8)
    low = law.shift_scale_bytes(c, torch.tensor(5))
    assert torch.equal(low.view(torch.float8_e4m3fn).float() * 32, c.view(torch.float8_e4m3fn).float())


def weighted_errors(x: torch.Tensor, w: torch.Tensor, block: int, fmt: KVFormat) -> torch.Tensor:
    code, scale = law.fp4_blocks(x, w, block, fmt)
    miss = law.fp4_values(code) * scale.repeat_interleave(block, -1) - x
    return (miss**2 * w).unflatten(-1, (-1, block)).sum(-1)


@pytest.mark.parametrize("block", [32, 64])
def test_the_scale_is_nearly_the_best_of_all(block: int) -> None:
    """Against the exact weighted error under every scale of four significant bits from amax / 8 to amax / 3.6."""
    x = torch.randn(500, 64) * torch.exp2(torch.randint(-40, 15, (500, 1)).float())
    w = shares(torch.rand(1, 64) + 0.1, block)[0]
    mine = weighted_errors(x, w, block, FORMATS["fp4-quality"])
    mag = x.unflatten(-1, (-1, block)).abs()
    best = torch.full_like(mine, torch.inf)
    for divisor in torch.linspace(3.6, 8.0, 60):
        s = law.round_significand(mag.amax(-1) / divisor)[..., None]
        level = torch.tensor(E2M1)[torch.bucketize(mag / s, torch.tensor(E2M1_MIDPOINTS))]
        best = torch.minimum(best, ((level * s - mag) ** 2 * w.unflatten(-1, (-1, block))).sum(-1))
    assert float((mine / best).mean()) < 1.02
    assert float((mine / weighted_errors(x, w, block, KVFormat("plain", "fp4", block=block))).mean()) < 0.9


def test_shares_are_whole_and_add_up_to_at_most_256() -> None:
    for block, n in ((32, 64), (32, 80), (64, 96)):
        w = shares(torch.exp(3 * torch.randn(4, n)), block)
        assert torch.equal(w, w.round()) and bool((w >= 1).all())
        assert all(float(part.sum(-1).amax()) <= law.SHARES for part in w.split(block, -1))


def test_search_formats_round_ties_away_from_zero_and_keep_the_sign_of_zero() -> None:
    """Values in units of the scale, found from the block's own scale: the largest is 6 of them."""
    fmt, mids = FORMATS["fp4-72"], list(E2M1_MIDPOINTS)
    x = torch.tensor([6.0, *mids, *(-m for m in mids), -0.0, 0.2, -0.2] + [0.0] * 14)
    scale = torch.tensor([1.0])
    got = law.fp4_values(law._rounded(x, scale))
    up = list(E2M1[1:])
    assert got[:15].tolist() == [6.0, *up, *(-u for u in up)]
    assert law._rounded(x, scale)[15:18].tolist() == [8, 0, 8]
    code, _ = law.fp4_blocks(x[None] * 2.0**-120, torch.ones(32), 32, fmt)
    assert not (code & 7).any()


# special values ------------------------------------------------------------------------------------------------------------
def test_special_values_are_defined_and_counted() -> None:
    lay = layout("fp4-quality")
    k, v = tokens(10, 2, 64), tokens(10, 2, 64, seed=1)
    k[0, 0, 3, 5], k[0, 0, 3, 6], k[0, 1, 4, 0] = torch.inf, -torch.inf, torch.nan
    v[0, 0, 0, 0], v[0, 0, 1], v[0, 1, 2] = 1e30, 0.0, 1e-42
    pages = law.empty_pages(1, 2, lay)
    neutral = list(book(lay, 2))
    neutral[1] = torch.zeros(2, 64)
    counts = encode_naive(pages, flat(k), flat(v), torch.tensor([[0, 0, 0, 10]]), tuple(neutral), lay)
    assert counts.tolist() == [3, 1]
    k_out, v_out = (x[0, :, :10] for x in decode_naive(pages, tuple(neutral), lay))
    assert bool(k_out.isfinite().all()) and bool(v_out.isfinite().all())
    assert k_out[0, 3, 5] > 5e4 and k_out[0, 3, 6] < -5e4
    assert bool((v_out[0, 1] == 0).all()) and bool((v_out[1, 2] == 0).all())
    assert v_out[0, 0, 0] > 5e4


@pytest.mark.parametrize("name", ["fp4-72", "fp4-quality", "nvfp4", "fp4-72-c64"])
def test_scales_are_finite_and_positive_after_the_final_cast(name: str) -> None:
    lay = layout(name)
    n = 128
    k = tokens(n, 2, 64) * torch.logspace(-30, 4, n)[None, None, :, None]
    k[:, :, 7] = 0
    pages = encode(name, 64, k, k.flip(2), [n])
    parts = law.unpack(pages, lay)
    for s in (parts.k_scales, parts.v_scales):
        value = s.contiguous().view(torch.float8_e4m3fn).float()
        assert bool(value.isfinite().all()) and float(value.min()) >= 2.0**-9 and float(value.max()) < 256


@pytest.mark.parametrize("name", ["fp4-72", "nvfp4"])
def test_a_page_that_grows_louder_by_thirty_orders_stays_positive_and_equal(name: str) -> None:
    """Each token raises the factor; the quiet ones' scales are shifted out of range, one by one or at once, and never to zero."""
    n = 120
    k = tokens(n, 2, 64) * torch.logspace(-28, 4, n)[None, None, :, None]
    whole, steps = encode(name, 64, k, k, [n]), encode(name, 64, k, k, [1] * n)
    assert torch.equal(whole, steps)
    parts = law.unpack(steps, layout(name))
    assert int(parts.k_scales[..., :n, :].min()) >= 1 and int(parts.v_scales[..., :n, :].min()) >= 1


@pytest.mark.parametrize("exponent", [-26, -10, 0, 10])
@pytest.mark.parametrize("name", ["fp4-72", "nvfp4", "fp8"])
def test_error_is_relative_at_every_magnitude(name: str, exponent: int) -> None:
    lay = layout(name)
    neutral = list(book(lay, 2))
    neutral[1], neutral[2], neutral[3] = torch.zeros(2, 64), torch.ones(2, 64), torch.ones(2, 64)
    x = tokens(128, 2, 64)
    errors = []
    for scale in (1.0, 2.0**exponent):
        pages = law.empty_pages(1, 2, lay)
        encode_naive(pages, flat(x * scale), flat(x * scale), torch.tensor([[0, 0, 0, 128]]), tuple(neutral), lay)
        v = decode_naive(pages, tuple(neutral), lay)[1]
        errors.append((v - x * scale).norm() / (x * scale).norm())
    assert torch.isclose(errors[0], errors[1], rtol=1e-5)


# bytes ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", [*NAMES, *PAIRS])
def test_bytes_depend_on_the_tokens_alone(name: str, dim: int) -> None:
    """Prompt, chunks and single tokens write the same pages; decoding is close; packing is a bijection."""
    n, fmt = 192, format_of(name)
    g = fmt.append_group
    k, v = tokens(n, 2, dim), tokens(n, 2, dim, seed=1)
    whole = encode(name, dim, k, v, [n])
    cuts = [g, g] if g > 1 else [1, 1, 60, 67, 1, 40]
    assert torch.equal(whole, encode(name, dim, k, v, [*cuts, n - sum(cuts)]))
    lay = layout(name, dim)
    assert torch.equal(law.pack(law.unpack(whole, lay), lay), whole)
    k_out, v_out = decode_naive(whole, book(lay, 2), lay)
    join = lambda x: x.permute(1, 0, 2, 3).flatten(1, 2)[:, :n]  # noqa: E731
    bound = {"fp16": 1e-3, "fp8": 0.04, "fp4": 0.16}
    # A scale over 64 tokens of very different loudness can't serve the quiet ones.
    for out, x, code, loose in ((k_out, k, fmt.code, 1), (v_out, v, fmt.v.code, 2 if fmt.v.v_axis == "channel" else 1)):
        assert (join(out) - x[0]).norm() / x.norm() < bound[code] * loose


def test_planes_unpack_by_two_masks_as_documented() -> None:
    code = torch.randint(0, 16, (1, PAGE, 128), dtype=torch.uint8)
    data = law.pack_codes(code, FORMATS["fp4-72"], is_k=True).reshape(PAGE, 64)
    e5m2 = lambda b: b.view(torch.float8_e5m2).float() * 2.0**14  # noqa: E731
    hi, lo = e5m2(data & 0x8E), e5m2(((data >> 3) & 0x0E) | ((data << 7) & 0x80))
    want = law.fp4_values(code)[0]
    assert torch.equal(torch.cat([lo[:, :32], hi[:, :32], lo[:, 32:], hi[:, 32:]], 1), want)


def test_v_bytes_hold_token_pairs_as_documented() -> None:
    code = torch.randint(0, 16, (1, PAGE, 64), dtype=torch.uint8)
    data = law.pack_codes(code, FORMATS["fp4-72"], is_k=False).reshape(64, 64)
    for b in (0, 1, 2, 15, 16, 63):
        tau = 16 * (b // 16) + 8 * (b % 2) + b % 16 // 2
        x = data[:, b]
        assert torch.equal(law.fp4_values(((x >> 7) << 3) | ((x >> 1) & 7)), law.fp4_values(code[0, 64 + tau]))
        assert torch.equal(law.fp4_values(((x & 1) << 3) | ((x >> 4) & 7)), law.fp4_values(code[0, tau]))


INLINE = (("fp4-quality", 64, 4), ("fp4-72", 64, 8), ("fp4-quality", 128, 8), ("fp4-72-c64", 80, 6), ("fp4-quality+fp8", 112, 12))


def books_of(lay: PageLayout) -> dict[str, torch.Tensor]:
    """Outlier channels in every state that a book may be made from."""
    n, r = lay.outliers, list(lay.reserved)
    rows = {
        "unused": [-1] * n,
        "few": [5, 40, *[-1] * (n - 2)],
        "one block": list(range(n)),
        "the last ones": list(range(lay.k_dim - n, lay.k_dim)),
        "the reserved ones": [*r, *range(n - len(r))],
        "the reserved ones last": [*range(n - 3), *r[:3]],
        "one of them": [0, r[-1], *[-1] * (n - 2)],
    }
    return {what: torch.tensor([row, list(range(2, n + 2))], dtype=torch.int32) for what, row in rows.items()}


@pytest.mark.parametrize(("name", "dim", "outliers"), INLINE)
def test_outliers_that_leave_their_codes_to_scales(name: str, dim: int, outliers: int) -> None:
    """Whatever a book was made from: each channel is coded once or an outlier, K comes back by the plain arithmetic of its block."""
    lay, k = layout(name, dim, outliers=outliers), tokens(128, 2, dim)
    reserved = set(lay.reserved)
    for what, wanted in books_of(lay).items():
        channels = arranged(wanted, lay)
        for row, asked in zip(channels.tolist(), wanted.tolist(), strict=True):
            used = [c for c in row if c >= 0]
            assert set(asked) - {-1} <= set(used) and len(set(used)) == len(used) >= len(reserved), what
            assert all(r not in used or row[o] == r for o, r in enumerate(lay.reserved)), what
        assert torch.equal(arranged(channels, lay), channels), what
        whole = torch.arange(dim).expand(2, -1)
        places = swapped(whole, channels, lay)
        assert torch.equal(places.sort().values, whole) and torch.equal(swapped(places, channels, lay), whole), what
        mine = (channels, *book(lay, 2)[1:])
        pages = law.empty_pages(1, 2, lay)
        encode_naive(pages, flat(k), flat(k), torch.tensor([[0, 0, 0, 128]]), mine, lay)
        got = decode_naive(pages, mine, lay)[0][0]
        _, mean, gain, weight, *_ = mine
        for n in range(2):
            x = k[0, n] - mean[n]
            want, outs = x.clone(), channels[n][channels[n] >= 0].long()
            at = [int(p) for p in places[n]]
            y = (x * gain[n]).index_fill(1, outs, 0.0)[:, at]
            code, scale = law.fp4_blocks(y, weight[n][at], 32, lay.format)
            want[:, at] = law.fp4_values(code) * scale.repeat_interleave(32, -1)[:, :dim] / gain[n][at]
            want[:, outs] = x[:, outs].half().float()
            assert torch.allclose(got[n], want + mean[n], rtol=1e-6, atol=1e-6), what
            row = pages[0, n, : 64 * dim].reshape(PAGE, dim // 2)[:, 32 - lay.k_blocks : 32]
            assert torch.equal(row, law.unpack(pages[0, n], lay).k_scales)


@pytest.mark.parametrize(("name", "dim", "outliers"), INLINE)
def test_scales_among_the_codes_do_not_depend_on_how_tokens_came(name: str, dim: int, outliers: int) -> None:
    lay, k = layout(name, dim, outliers=outliers), tokens(128, 2, dim)
    mine, step = book(lay, 2), lay.format.append_group
    whole = law.empty_pages(1, 2, lay)
    encode_naive(whole, flat(k), flat(k), torch.tensor([[0, 0, 0, 128]]), mine, lay)
    assert torch.equal(law.pack(law.unpack(whole, lay), lay), whole)
    pages = law.empty_pages(1, 2, lay)
    for at in range(0, 128, step):
        encode_naive(pages, flat(k), flat(k), torch.tensor([[0, at, at, step]]), mine, lay)
    assert torch.equal(pages, whole)


def test_a_head_with_fewer_outliers_than_others_may_have_channel_0() -> None:
    """An unused entry stands for no channel: the first one's slot was filled beside its outlier, and came out twice as large."""
    lay, k = layout("fp4-quality", 64, outliers=2), tokens(64, 2, 64)
    mine = (torch.tensor([[0, -1], [5, 9]], dtype=torch.int32), *book(lay, 2)[1:])
    pages = law.empty_pages(1, 2, lay)
    encode_naive(pages, flat(k), flat(k), torch.tensor([[0, 0, 0, 64]]), mine, lay)
    assert bool((law.unpack(pages, lay).k_codes[0, 0, :64, 0] & 7 == 0).all())
    assert torch.allclose(decode_naive(pages, mine, lay)[0][0, 0, :64, 0], k[0, 0, :, 0], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("fp4-72", "14e060e7f986b06e"),
        ("fp4-quality", "13c451d81a2ea1b7"),
        ("fp8", "a96ce0942a9b4087"),
        ("nvfp4", "187346fdb01176d3"),
        ("mxfp4", "96e47890dc7f311c"),
    ],
)
def test_golden_pages(name: str, digest: str) -> None:
    """Bytes that were written by layout version 4; another digest is another version."""
    x = ((torch.arange(2 * 100 * 64) * 2654435761 % 4093).float() / 2048 - 1).reshape(1, 2, 100, 64)
    assert hashlib.sha256(encode(name, 64, x, x.flip(3), [100]).numpy().tobytes()).hexdigest()[:16] == digest


# the op --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fp4-quality", "fp16", "fp4-72-c64", "fp8+fp4-72"])
def test_opcheck(name: str) -> None:
    lay = layout(name)
    k, v = tokens(64, 2, 64), tokens(64, 2, 64, seed=1)
    args = (
        law.empty_pages(1, 2, lay),
        flat(k).contiguous(),
        flat(v).contiguous(),
        torch.tensor([[0, 0, 0, 64]], dtype=torch.int32),
        *book(lay, 2),
        name,
        64,
        64,
        lay.outliers,
        0,
    )
    torch.library.opcheck(
        torch.ops.moe_prefetch.kv_encode.default, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


def test_op_refuses_what_does_not_fit_before_writing() -> None:
    lay = layout("fp4-quality")
    pages = law.empty_pages(1, 2, lay)
    before = pages.clone()
    with pytest.raises(ShapeError, match="kv_encode"):
        kv_encode(pages, torch.zeros(3, 2, 80), torch.zeros(3, 2, 64), torch.zeros(1, 4, dtype=torch.int32), book(lay, 2), lay)
    with pytest.raises(ShapeError):
        kv_encode(pages, torch.zeros(3, 2, 64), torch.zeros(3, 2, 64), torch.zeros(1, 4, dtype=torch.int32), book(layout("fp4-72"), 2), lay)
    assert torch.equal(pages, before)
