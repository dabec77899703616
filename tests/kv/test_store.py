from __future__ import annotations

import pytest
import torch

from moe_prefetch.checkpoint import load_tensors, save_tensors
from moe_prefetch.errors import ArtefactError, CacheError, IntegrityError, ShapeError
from moe_prefetch.kv.format import HEAD_DIMS, format_of
from moe_prefetch.kv.store import DRAFT, LayerStore
from moe_prefetch.kv.window import SPARE

from .common import NAMES, PAIRS, book, check, layout, store, tokens


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", [*NAMES, *PAIRS[:2]])
def test_every_operation_equals_the_law(name: str, dim: int, heads: int, batch: int) -> None:
    """Prompt, steps, chunks, fork, divergent append, reorder, crop in the window, repeat, drop, reset."""
    s = store(name, dim=dim, heads=heads, batch=batch)
    k, v = tokens(401, heads, dim, batch), tokens(401, heads, dim, batch, seed=1)
    rows = [(k[b], v[b]) for b in range(batch)]
    at = 0
    for n in (1, 36, 131, 1, 1, 30):
        s.append(k[:, :, at : at + n], v[:, :, at : at + n])
        at += n
    upto = lambda r, n: [(a[:, :n], b[:, :n]) for a, b in r]  # noqa: E731
    check(s, upto(rows, at))
    s.select([b for b in range(batch) for _ in range(2)])
    more_k, more_v = tokens(9, heads, dim, 2 * batch, seed=2), tokens(9, heads, dim, 2 * batch, seed=3)
    s.append(more_k, more_v)
    forked = [
        (torch.cat([rows[b // 2][0][:, :at], more_k[b]], 1), torch.cat([rows[b // 2][1][:, :at], more_v[b]], 1)) for b in range(2 * batch)
    ]
    s.crop(s.length - 4)
    check(s, upto(forked, at + 5))
    order = list(range(2 * batch))[::-1]
    s.select(order)
    check(s, upto([forked[i] for i in order], at + 5))
    s.select([order.index(2 * b) for b in range(batch)])
    s.crop(at)
    s.append(k[:, :, at:], v[:, :, at:])
    if format_of(name).append_group == 1:
        check(s, rows)
    s.reset()
    assert s.pages.pages_held == 0 and s.length == 0
    s.append(k[:, :, :77], v[:, :, :77])
    check(s, upto(rows, 77))


@pytest.mark.parametrize("name", [*NAMES, *PAIRS])
def test_two_sequences_together_equal_each_alone(name: str) -> None:
    k, v = tokens(300, 2, 64, 2), tokens(300, 2, 64, 2, seed=1)
    both = store(name, batch=2)
    both.append(k, v)
    both.settle()
    for b in range(2):
        one = store(name)
        one.append(k[b : b + 1], v[b : b + 1])
        one.settle()
        assert torch.equal(one.pool[one.pages.rows[0].pages], both.pool[both.pages.rows[b].pages])
        assert torch.equal(one.gather()[0][0], both.gather()[0][b])


@pytest.mark.parametrize("pads", [[0, 3, 40], [299, 150, 0], [5, 5, 5]])
@pytest.mark.parametrize("name", ["fp4-quality", "fp4-72-c64", "fp8"])
def test_ragged_rows_equal_unpadded_ones(name: str, pads: list[int]) -> None:
    n = 300
    k, v = tokens(n, 2, 64, 3), tokens(n, 2, 64, 3, seed=1)
    s = store(name, batch=3)
    s.set_pads(pads)
    s.append(k[:, :, :200], v[:, :, :200])
    for i in range(200, n):
        s.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    check(s, [(k[b, :, p:], v[b, :, p:]) for b, p in enumerate(pads)])


def test_padding_values_never_matter() -> None:
    out = []
    for fill in (0.0, 6e4, float("nan")):
        k = tokens(200, 2, 64, 2)
        k[1, :, :50] = fill
        s = store("fp4-quality", batch=2)
        s.set_pads([0, 50])
        s.append(k, k)
        s.settle()
        out.append(s.gather()[0])
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])


def test_an_unaccepted_draft_leaves_no_trace() -> None:
    """Append drafts, crop them, go on: bytes and window as if they had never been."""
    k, v = tokens(400, 2, 64), tokens(400, 2, 64, seed=1)
    plain, drafted = store("fp4-quality"), store("fp4-quality")
    for s in (plain, drafted):
        s.append(k[:, :, :150], v[:, :, :150])
    for i in range(150, 180):
        plain.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        drafted.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        junk = torch.full((1, 2, DRAFT, 64), 1e4)
        drafted.append(junk, junk)
        drafted.crop(i + 1)
    for s in (plain, drafted):
        s.settle()
    assert torch.equal(plain.gather()[0], drafted.gather()[0])
    assert torch.equal(plain.pool[plain.pages.rows[0].pages], drafted.pool[drafted.pages.rows[0].pages])


@pytest.mark.parametrize("to", [0, 2, 4, 5, 100, 131, 132, 133, 259, 260, 280])
def test_a_crop_below_the_window_keeps_what_was_encoded(to: int) -> None:
    s = store("fp4-72")
    k, v = tokens(300, 2, 64), tokens(300, 2, 64, seed=1)
    s.append(k, v)
    s.settle()
    before = s.gather()
    s.crop(to)
    s.check_integrity()
    assert torch.equal(s.gather()[0], before[0][:, :, :to]) and torch.equal(s.gather()[1], before[1][:, :, :to])
    s.append(k[:, :, to:], v[:, :, to:])
    s.settle()
    s.check_integrity()
    assert torch.equal(s.gather()[0][:, :, :to], before[0][:, :, :to])
    assert (s.gather()[0] - k).norm() / k.norm() < 0.16


def test_a_crop_between_tokens_that_share_a_scale_is_refused_whole() -> None:
    s = store("fp4-72-c64")
    k = tokens(300, 2, 64)
    s.append(k, k)
    s.settle()
    before = s.gather()[0]
    with pytest.raises(CacheError, match="share a scale"):
        s.crop(100)
    assert s.length == 300 and torch.equal(s.gather()[0], before)
    s.crop(4 + 64)
    s.check_integrity()


def test_a_crop_beyond_the_cache_is_refused() -> None:
    s = store("fp8")
    for bad in (1, -1):
        with pytest.raises(CacheError):
            s.crop(bad)


def test_a_shared_page_is_never_written() -> None:
    s = store("fp4-quality")
    k = tokens(200, 2, 64)
    s.append(k, k)
    s.settle()
    shared = {p: s.pool[p].clone() for p in s.pages.rows[0].pages}
    s.select([0, 0, 0])
    s.crop(150)
    s.append(tokens(60, 2, 64, 3, seed=5), tokens(60, 2, 64, 3, seed=6))
    s.settle()
    for p, data in shared.items():
        if s.pages.refs[p] > 1:
            assert torch.equal(s.pool[p], data)


@pytest.mark.parametrize("name", ["fp16", "fp8", "fp4-72", "fp4-quality", "nvfp4", "mxfp4", *PAIRS])
@pytest.mark.parametrize("dim", [64, 128])
def test_measured_bytes_are_the_formula(name: str, dim: int) -> None:
    """All storages, at a length where page tails no longer hide anything."""
    s = LayerStore(layout(name, dim), 2, book(layout(name, dim), 2), sinks=4, window=64)
    n, held, formula = 4100, 0, 0
    k = tokens(n, 2, dim)
    s.append(k, k)
    for at in range(3):
        s.append(k[:, :, at : at + 1], k[:, :, at : at + 1])
    held = s.held_bytes()
    formula = 2 * s.layout.held_bytes(s.length - 1, 4, 64)
    assert abs(held - formula) / formula < 0.02
    if format_of(name).has_book:
        assert s.book_bytes() == 2 * s.layout.book_bytes


def test_memory_of_a_prompt_is_given_back_at_once() -> None:
    s = store("fp4-72", window=64)
    k = tokens(2000, 2, 64)
    s.append(k, k)
    assert s.recent_k.shape[2] <= 64 + DRAFT
    assert s.recent.buffer_k.untyped_storage().nbytes() == 2 * 2 * 64 * (65 + DRAFT + SPARE)
    s.append(k[:, :, :1], k[:, :, :1])
    assert s.recent.buffer_k.untyped_storage().nbytes() == 2 * 2 * 64 * (65 + SPARE)


@pytest.mark.parametrize("name", ["fp4-quality", "fp8", "fp16", *PAIRS[:2]])
def test_a_sequence_moves_to_another_store(name: str, tmp_path) -> None:
    k, v = tokens(333, 2, 64, 2), tokens(333, 2, 64, 2, seed=1)
    s = store(name, batch=2)
    s.append(k[:, :, :300], v[:, :, :300])
    save_tensors(tmp_path / "row.safetensors", s.export_row(1))
    other = store(name)
    other.import_row(load_tensors(tmp_path / "row.safetensors"))
    other.check_integrity()
    s.append(k[:, :, 300:], v[:, :, 300:])
    other.append(k[1:, :, 300:], v[1:, :, 300:])
    for x in (s, other):
        x.settle()
    assert torch.equal(other.gather()[0][0], s.gather()[0][1])
    assert torch.equal(other.pool[other.pages.rows[0].pages], s.pool[s.pages.rows[1].pages])


def test_a_sequence_of_another_layout_or_codebook_is_refused() -> None:
    s = store("fp4-quality")
    s.append(tokens(200, 2, 64), tokens(200, 2, 64))
    data = s.export_row(0)
    others = (store("fp4-72"), store("fp4-quality+fp8"), store("fp4-quality", sinks=0))
    for other in (*others, LayerStore(s.layout, 2, book(s.layout, 2, seed=9))):
        with pytest.raises(ArtefactError):
            other.import_row(data)
    short = {**data, "records": data["records"][:0]}
    with pytest.raises(ArtefactError):
        store("fp4-quality").import_row(short)


DAMAGE = {
    "a head of the sinks is gone": lambda d: d.update(sink_k=d["sink_k"][:1]),
    "a sink is NaN": lambda d: d.update(sink_v=torch.full_like(d["sink_v"], torch.nan)),
    "another length": lambda d: d.update(shape=d["shape"] + torch.tensor([0, 0, 0, 0, 0, 0, 1000, 0])),
    "a short window": lambda d: d.update(recent_k=d["recent_k"][:, 1:]),
    "a window of another type": lambda d: d.update(recent_v=d["recent_v"].float()),
    "records of ones": lambda d: d.update(records=torch.full_like(d["records"], 0xFF)),
    "records of another type": lambda d: d.update(records=d["records"].float()),
    "no shape": lambda d: d.pop("shape"),
    "half a codebook": lambda d: d.pop("book_5"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_sequence_is_refused_and_the_store_is_as_it_was(what: str) -> None:
    """Seen by a newcomer: a broadcast sink, a NaN and a wrong length were taken."""
    s, other = store("fp4-quality"), store("fp4-quality")
    s.append(tokens(200, 2, 64), tokens(200, 2, 64))
    s.settle()
    data = s.export_row(0)
    DAMAGE[what](data)
    with pytest.raises(ArtefactError):
        other.import_row(data)
    assert other.length == 0 and other.pages.pages_made == 0
    other.import_row(s.export_row(0))
    other.check_integrity()


@pytest.mark.parametrize("n", [100, 300, 544, 800])
def test_a_long_window_that_is_not_full_costs_what_it_holds(n: int) -> None:
    """Seen by a newcomer: from half full on the whole window was held, twice what FP16 takes."""
    s = LayerStore(layout("fp4-quality"), 2, book(layout("fp4-quality"), 2), sinks=4, window=1024, settle=32)
    s.append(tokens(n, 2, 64), tokens(n, 2, 64))
    s.append(tokens(1, 2, 64), tokens(1, 2, 64))
    s.settle()
    assert s.held_bytes() <= (n + 1 + 128 + SPARE + 4) * 2 * 64 * 2 * 2 + 4096


def test_rows_may_have_codebooks_of_their_own() -> None:
    lay = layout("fp4-quality")
    made: list[torch.Tensor] = []

    def own(k: torch.Tensor, v: torch.Tensor):
        made.append(k)
        return book(lay, 2, seed=int(k[0, 0, 0] > 0))

    k = tokens(200, 2, 64, 2)
    k[0, :, 4], k[1, :, 4] = 1.0, -1.0
    s = LayerStore(lay, 2, own, batch=2, window=16)
    s.append(k, k)
    s.settle()
    assert len(made) == 2 and s.books[0] is not s.books[1]
    for b in range(2):
        one = LayerStore(lay, 2, own, window=16)
        one.append(k[b : b + 1], k[b : b + 1])
        one.settle()
        assert torch.equal(one.gather()[0][0], s.gather()[0][b])
    s.select([1, 1])
    assert s.books[0] is s.books[1]


def test_wrong_shapes_are_refused_before_anything_is_taken() -> None:
    s = store("fp4-quality", batch=2)
    for k, v in (
        (tokens(3, 2, 64), tokens(3, 2, 64)),
        (tokens(3, 2, 80, 2), tokens(3, 2, 64, 2)),
        (tokens(3, 1, 64, 2), tokens(3, 1, 64, 2)),
    ):
        with pytest.raises(ShapeError):
            s.append(k, v)
    assert s.length == 0
    s.append(tokens(3, 2, 64, 2), tokens(3, 2, 64, 2))
    with pytest.raises(CacheError):
        s.set_pads([1, 1])


def test_integrity_check_sees_damage() -> None:
    s = store("fp4-quality")
    s.append(tokens(200, 2, 64), tokens(200, 2, 64))
    s.check_integrity()
    s.pages.rows[0].stored -= 1
    s.pages.rows[0].stored += 40
    with pytest.raises(IntegrityError):
        s.check_integrity()


def test_page_limit_and_eviction() -> None:
    s = store("fp4-72", batch=2, page_limit=3)
    s.append(tokens(100, 2, 64, 2), tokens(100, 2, 64, 2))
    with pytest.raises(CacheError, match="no page is free"):
        s.append(tokens(300, 2, 64, 2), tokens(300, 2, 64, 2))
