from __future__ import annotations

import pytest

from moe_prefetch.errors import ConfigError, ShapeError
from moe_prefetch.kv.format import ALIGN, FORMATS, HEAD_DIMS, PAGE, PageLayout, capacity, format_of, layout_for

from .common import NAMES, PAIRS


def layout(name: str, dim: int = 64) -> PageLayout:
    return layout_for(format_of(name), dim, dim)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", [*NAMES, *PAIRS])
def test_parts_follow_each_other_without_gap_or_overlap(name: str, dim: int) -> None:
    lay = layout(name, dim)
    at, parts = 0, dict(lay.offsets)
    if lay.reserved:
        assert parts.pop("k_scales") == (32 - lay.k_blocks, 0) and lay.k_scale_row * PAGE == lay.offsets["k_codes"][1]
    for first, size in parts.values():
        assert first == at and size >= 0
        at += size
    assert at <= lay.page_bytes < at + ALIGN and lay.page_bytes % ALIGN == 0
    assert all(first % 2 == 0 for first, _ in parts.values())
    assert lay.offsets["trailer"][0] % 4 == 0


def test_recorded_sizes() -> None:
    """Files and kernels depend on these: a change is a new layout version."""
    assert {(n, d): (layout(n, d).page_bytes, layout(n, d).outliers) for n in ("fp4-72", "fp4-quality", "fp8") for d in (64, 128)} == {
        ("fp4-72", 64): (8960, 1),
        ("fp4-72", 128): (18048, 3),
        ("fp4-quality", 64): (8960, 1),
        ("fp4-quality", 128): (18304, 4),
        ("fp8", 64): (16768, 0),
        ("fp8", 128): (33152, 0),
    }


def test_scales_lie_among_the_codes_where_outliers_leave_room() -> None:
    at = lambda name, dim, o: PageLayout(format_of(name), dim, dim, o)  # noqa: E731
    assert at("fp4-quality", 128, 8).reserved == at("fp4-72-c64", 128, 12).reserved == (28, 29, 30, 31, 60, 61, 62, 63)
    assert at("fp4-quality", 64, 4).reserved == at("fp4-72+fp8", 64, 8).reserved == (30, 31, 62, 63)
    assert at("fp4-quality", 80, 6).reserved == (29, 30, 31, 61, 62, 63) and at("fp4-quality", 256, 16).reserved[::8] == (24, 56)
    assert [at("fp4-quality", *x).page_bytes // 128 for x in ((128, 8), (128, 6), (64, 4), (64, 3))] == [147, 147, 74, 74]
    for few in (at("fp4-quality", 128, 6), at("fp4-quality", 64, 3), at("fp4-quality", 48, 4), at("fp8+fp4-72", 64, 0), at("nvfp4", 64, 0)):
        assert few.reserved == () and few.offsets["k_scales"][1] == PAGE * few.k_scale_row == PAGE * few.k_blocks
    assert not PageLayout(FORMATS["fp4-quality"], 128, 0, 8, 64).reserved, "a latent's codes are V, too"


def test_more_outliers_are_granted_where_fewer_would_not_fit() -> None:
    """At head dim 80 six of them take no bytes for scales, four do."""
    assert layout_for(FORMATS["fp4-quality"], 80, 80, window=64).outliers == 6
    sizes = {o: PageLayout(FORMATS["fp4-quality"], 128, 128, o).page_bytes for o in (6, 8)}
    assert sizes[6] == sizes[8]


def test_a_shorter_window_buys_more_outliers() -> None:
    """Both are paid from one budget of bits at 32k tokens."""
    assert [layout_for(FORMATS["fp4-quality"], 128, 128, window=w).outliers for w in (64, 1024)] == [8, 4]


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_budgets_hold_with_everything_counted_at_32k(dim: int) -> None:
    assert layout("fp4-72", dim).bits_per_element() <= 4.48
    assert layout("fp4-quality", dim).bits_per_element() <= 4.85
    assert layout("fp4-quality", dim).outlier_share <= 0.05
    assert 1 - layout("fp4-72", dim).bits_per_element() / 16 >= 0.72


def test_every_byte_of_a_token_is_counted() -> None:
    lay = layout("fp4-quality", 128)
    for window in (64, 1024):
        pages = -(-(32768 - 4 - window) // PAGE)
        by_hand = pages * (lay.page_bytes + 4) + (4 + window + 1) * 2 * 256 + 4 * (lay.outliers + 3 * 128 + 2 * 128)
        assert lay.bits_per_element(window=window) == pytest.approx(by_hand * 8 / (32768 * 256))
    assert lay.bits_per_element() == lay.bits_per_element(window=1024) <= 4.85


def test_mla_counts_the_latent_once() -> None:
    lay = layout_for(FORMATS["fp4-quality"], 512, 0, rope=64)
    assert lay.element_count == 576 and lay.offsets["v_codes"][1] == 0 and lay.offsets["k_rope"][1] == PAGE * 64 * 2


def test_kv_head_dims_may_differ() -> None:
    lay = layout_for(FORMATS["fp4-72"], 192, 128)
    assert lay.v_scale_shape == (PAGE, 2) and lay.offsets["v_codes"][1] == PAGE * 64


@pytest.mark.parametrize(
    ("k_dim", "v_dim", "kw"), [(72, 64, {}), (0, 64, {}), (64, 40, {}), (64, 64, {"outliers": 17}), (64, 64, {"rope": 3})]
)
def test_unsupported_shapes_are_refused(k_dim: int, v_dim: int, kw: dict[str, int]) -> None:
    with pytest.raises(ShapeError):
        PageLayout(FORMATS["fp4-72"], k_dim, v_dim, **kw)


def test_unknown_format_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="fp4-quality"):
        format_of("fp3")


def test_capacity_figures_are_two_and_differ() -> None:
    c = capacity([layout("fp4-72", 128)] * 4, 8, budget_bytes=8 << 30, tokens=8192, reserved=32768)
    assert c["ratio_vs_reserved_fp16"] == pytest.approx(4 * c["ratio_vs_paged_fp16"], rel=0.01)
    assert 3.2 < c["ratio_vs_paged_fp16"] < 3.6
    assert c["sequences"] > c["sequences_paged_fp16"] > c["sequences_reserved_fp16"] > 0
    assert c["bytes_per_token"] < c["fp16_bytes_per_token"]
