"""Every operation of the transformers layer x every format x head dim x batch, and its attention under every number of query groups."""

from __future__ import annotations

import pytest
import torch

from moe_prefetch.config import KVConfig
from moe_prefetch.integrations.transformers_cache import PagedLayer
from moe_prefetch.kv.attention import attend
from moe_prefetch.kv.codec import StatsCollector
from moe_prefetch.kv.format import HEAD_DIMS

from .common import PAIRS, attention_loop, check, tokens

SERVED = ["fp16", "fp8", "fp4-72", "fp4-quality", "nvfp4", "mxfp4", *PAIRS]
GROUPS = (1, 3, 4, 5, 7, 8)
HEADS, SCALE = 2, 0.1


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("format", SERVED)
def test_every_operation_of_a_layer_equals_the_law(format: str, dim: int, batch: int) -> None:
    """update (an odd prompt, a chunk, single tokens), lengths, repeat, divergent update, reorder, crop both ways, select, reset."""
    k, v = tokens(205, HEADS, dim, batch), tokens(205, HEADS, dim, batch, seed=1)
    seen = StatsCollector()
    seen.add(k[0].repeat_interleave(2, 0), k[0], v[0])
    layer = PagedLayer(KVConfig(format=format, window=17, settle=1), 0, seen.stats())
    rows = [(k[b], v[b]) for b in range(batch)]
    at = 0
    for n in (151, 33, 1, 1):
        assert layer.get_mask_sizes(n) == (at + n, 0)
        keys, values = layer.update(k[:, :, at : at + n], v[:, :, at : at + n])
        at += n
        assert layer.get_seq_length() == keys.shape[2] == values.shape[2] == at
        assert torch.equal(keys[:, :, at - n :], k[:, :, at - n : at]) and torch.equal(values[:, :, at - n :], v[:, :, at - n : at])
    upto = lambda rows, n: [(a[:, :n], b[:, :n]) for a, b in rows]  # noqa: E731
    check(layer.store, upto(rows, at))

    layer.batch_repeat_interleave(2)
    more_k, more_v = tokens(9, HEADS, dim, 2 * batch, seed=2), tokens(9, HEADS, dim, 2 * batch, seed=3)
    layer.update(more_k, more_v)
    rows = [tuple(torch.cat([x[:, :at], m[b]], 1) for x, m in zip(rows[b // 2], (more_k, more_v), strict=True)) for b in range(2 * batch)]
    order = torch.arange(2 * batch).roll(1)
    layer.reorder_cache(order)
    rows = [rows[i] for i in order.tolist()]
    layer.crop(-3)
    assert layer.get_seq_length() == at + 6
    layer.crop(at + 4)
    check(layer.store, upto(rows, at + 4))
    layer.batch_select_indices(order.argsort()[::2])
    rows = [rows[i] for i in order.argsort()[::2].tolist()]
    check(layer.store, upto(rows, at + 4))

    k_all, v_all = layer.store.gather()
    for groups in GROUPS:
        q = torch.randn(batch, HEADS * groups, 2, dim)
        out, lse = attend(layer.store, q, scale=SCALE)
        assert bool(lse.isfinite().all())
        for b, h in {(0, 0), (batch - 1, HEADS * groups - 1)}:
            want = attention_loop(q[b, h], k_all[b, h // groups], v_all[b, h // groups], scale=SCALE, last=2)
            assert torch.allclose(out[b, h].double(), want, atol=2e-4, rtol=1e-4)

    layer.reset()
    assert layer.get_seq_length() == 0 and layer.store.pages.pages_held == 0
    layer.update(k[:, :, :63], v[:, :, :63])
    check(layer.store, upto([(k[b], v[b]) for b in range(batch)], 63))
