"""A transformers `Cache` whose layers keep K and V in our pages.

    cache = make_cache(model, config.kv)
    model.generate(**inputs, past_key_values=cache)

`update()` returns ordinary tensors: decoded pages, FP16 sinks and window, and this call's own K and V untouched. So it works with every
attention implementation. Where that is our own (`transformers_pages`), a step of decode decodes nothing: attention reads the pages.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from moe_prefetch.config import KVConfig, load
from moe_prefetch.errors import CacheError, ConfigError, ShapeError
from moe_prefetch.integrations.transformers_attention import are_ids, key_hashes, refuse_another_models, watch_attention
from moe_prefetch.integrations.transformers_layers import PagedLayer, StaticPagedLayer
from moe_prefetch.integrations.transformers_pages import Decoder, left_padding, serve
from moe_prefetch.kv.codec import OutlierStats, StatsCollector
from moe_prefetch.kv.format import format_of
from moe_prefetch.kv.ints import DeviceInts
from moe_prefetch.kv.outliers import LayerStats
from moe_prefetch.kv.static import StaticStore
from moe_prefetch.kv.store import LayerStore

log = logging.getLogger(__name__)
FEW = 16  # different tokens


class PagedCache(Cache):
    """A `Cache` of `PagedLayer`s (layers with another kind of attention keep transformers' own) that knows its bytes."""

    def _paged(self) -> Iterator[PagedLayer]:
        return (x for x in self.layers if isinstance(x, PagedLayer))

    def set_padding(self, attention_mask: torch.Tensor) -> None:
        """Tell the cache where left padding ends (mask [B, S], 0 = padding), before the first token: padding is then neither stored nor
        measured. Raises ShapeError for what is no mask [B, S], CacheError for one with zeros elsewhere, or too late.
        """
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2 or not len(attention_mask):
            raise ShapeError(
                f"a mask {tuple(getattr(attention_mask, 'shape', ()))}", where="set_padding", expected="[batch, tokens]", do="pass the mask"
            )
        pads = left_padding(attention_mask)
        if pads is None:
            raise CacheError(
                "a mask with zeros behind ones", where="set_padding", expected="padding on the left", do="pad the prompts on the left"
            )
        for layer in self._paged():
            layer.set_pads(pads)

    def _stores(self) -> Iterator[LayerStore | StaticStore]:
        for x in self._paged():
            store = x.static if isinstance(x, StaticPagedLayer) else x.store
            if store is not None:
                yield store

    def held_bytes(self) -> int:
        """Bytes of every storage the cache holds, codebooks, bases and block tables included."""
        total = sum(s.held_bytes() + s.book_bytes() for s in self._stores())
        for x in self.layers:
            for t in (getattr(x, "keys", None), getattr(x, "values", None)):
                total += t.untyped_storage().nbytes() if isinstance(t, torch.Tensor) else 0
        return total

    def bits_per_element(self) -> float:
        """Bits held per K or V element cached now, of the layers in pages; NaN while empty. Of a cache of fixed size all that is reserved
        counts, and its length is read from the device."""
        tokens = lambda s: s.tokens() if isinstance(s, StaticStore) else sum(map(s.row_length, range(s.batch)))  # noqa: E731
        elements = sum(tokens(s) * s.heads * s.layout.element_count for s in self._stores())
        return 8 * sum(s.held_bytes() + s.book_bytes() for s in self._stores()) / elements if elements else float("nan")

    def report(self) -> list[dict[str, Any]]:
        """One row per paged layer: format, what keys are kept in (`PagedLayer.kept_in`), how the last step of decode was read, bits per
        element of one sequence of 32k tokens (and what the format promises), share of FP16 outliers, elements saturated and NaNs zeroed.
        """
        rows = []
        for x in self._paged():
            store = x.store if x.store is not None else getattr(x, "static", None)
            if store is None:
                continue
            books = [store.book] if isinstance(store, StaticStore) else [b for b in store.books if b is not None]
            used = max((int((b[0] >= 0).sum()) for b in books), default=0)
            saturated, nan = store.counts.tolist()
            rows.append(
                {
                    "layer": x.number,
                    "format": x.format.name,
                    "keys": x.kept_in,
                    "attention": x.attention,
                    "saturated": saturated,
                    "nan": nan,
                    "bits_per_element": x.bits(store.layout),
                    "max_bits": x.format.promise,
                    "outlier_share": used / (store.heads * (store.layout.k_dim + store.layout.v_dim)),
                }
            )
        return rows

    def check_integrity(self) -> None:
        """Raises IntegrityError for a layer's pages, CacheError for layers of unlike lengths, as a forward that broke off leaves."""
        held = {x.number: x.store.length for x in self._paged() if x.store is not None}
        held |= {x.number: int(x.static.length[0]) for x in self._paged() if isinstance(x, StaticPagedLayer) and x.static is not None}
        if len(set(held.values())) > 1:
            raise CacheError(f"layers hold {sorted(set(held.values()))} tokens", where="KV cache", expected="as many in each",
                             do="reset the cache, or crop it to the least")  # fmt: skip
        for x in self._paged():
            if x.store is not None:
                x.store.check_integrity()


class Latents(DynamicCache):
    """A prompt's cache that shows what MLA layers keep: `see(layer, ones [B, 1, T, r], latents [B, 1, T, r], nothing [B, 1, T, 0])`."""

    def __init__(self, config: Any, see: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__(config=config)
        self.see = see

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.see(layer_idx, torch.ones_like(key_states), key_states, value_states[..., :0])
        return key_states, value_states


def make_cache(
    model: Any, kv_config: KVConfig | dict[str, Any], stats: OutlierStats | None = None, *, max_length: int | None = None
) -> PagedCache:
    """The cache for one model (or its config). `stats` (or `kv_config.calibration`, read once per call) gives the codebooks.

    Given the model itself, its decode steps are switched to reading pages as `kv_config.attention` says (`transformers_pages.serve`),
    until the last cache that asked for it, and the last copy of one, is gone.
    With `max_length` the cache has a fixed size and its decode steps can be captured (`StaticPagedLayer`); FP4 with outliers then needs
    a calibration. Layers with sliding-window or linear attention keep transformers' own cache.
    Raises ConfigError for a layer that the model does not have or keep in pages, a calibration that lacks one or is another model's (given
    the config alone: one with more layers), or a `max_length` below 1; ArtefactError for a bad calibration file.
    """
    if not isinstance(kv_config, KVConfig):
        kv_config = load({"kv": kv_config}).kv
    model_config = model.config if hasattr(model, "config") else model
    text = model_config.get_text_config(decoder=True)
    if bad := [n for n in kv_config.layers if n >= text.num_hidden_layers]:
        raise ConfigError(
            f"kv.layers names decoder layer {bad[0]}",
            where="kv.layers",
            expected=f"0 to {text.num_hidden_layers - 1}",
            do="correct the layer numbers",
        )
    if stats is None and kv_config.calibration is not None:
        stats = OutlierStats.load(kv_config.calibration)
    moments: Mapping[int, LayerStats] = stats.layers if stats is not None else {}
    latent = getattr(text, "kv_lora_rank", None) or 0
    theirs = DynamicCache(config=model_config).layers or [DynamicLayer() for _ in range(text.num_hidden_layers)]
    paged = [n for n, x in enumerate(theirs) if type(x) is DynamicLayer]
    if not paged:
        raise ConfigError(
            f"no layer of {text.model_type} keeps K and V in pages",
            where="make_cache", expected="layers with full attention over a cache of transformers' plain kind", do="leave kv out",
        )  # fmt: skip
    if own := [n for n in kv_config.layers if n not in paged]:
        raise ConfigError(
            f"kv.layers names decoder layer {own[0]}, which keeps transformers' own cache",
            where="kv.layers",
            expected="layers with full attention",
            do="drop it",
        )
    formats = {n: format_of(kv_config.layers.get(n, kv_config.format)) for n in paged}
    if latent and (pairs := [f.name for f in formats.values() if f.values]):
        raise ConfigError(
            f"{pairs[0]} is two formats, and MLA keeps one latent for K and V",
            where="kv.format",
            expected="one format a layer",
            do=f"choose {' or '.join(pairs[0].split('+'))}",
        )
    coded = [n for n, f in formats.items() if f.has_book]
    # Where the gate moved every layer of such a format elsewhere, its calibration is not needed, and no mistake.
    if kv_config.calibration is not None and not coded and not format_of(kv_config.format).has_book:
        raise ConfigError(
            f"kv.calibration is set, and {kv_config.format} has no codebook",
            where="kv.calibration", expected="a format with outlier channels", do="use fp4-72 or fp4-quality, or drop calibration",
        )  # fmt: skip
    if stats is not None and coded:
        refuse_another_models(stats, model, coded)
    lacking = [n for n in coded if n not in moments]
    if stats is not None and lacking:
        raise ConfigError(
            f"the calibration has not seen layer{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))}",
            where="kv.calibration",
            expected=f"all of the {len(paged)} layers whose K and V are kept in pages",
            do="calibrate this model anew",
        )
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise ConfigError(f"max_length is {max_length!r}", where="make_cache", expected="1 or more tokens", do="give the longest sequence")
    if max_length is not None and "settle" in kv_config.model_fields_set and kv_config.settle != 1:
        raise ConfigError(
            f"kv.settle is {kv_config.settle}", where="make_cache(max_length=)",
            expected="tokens leave the window of a static cache one by one", do="drop kv.settle",
        )  # fmt: skip
    if max_length is not None and lacking:
        raise ConfigError(
            "a static cache can't make codebooks from the prompt",
            where="kv.calibration",
            expected="a calibration",
            do="run calibrate() once",
        )

    decoder, ints = Decoder(text), DeviceInts()

    def layer(n: int) -> PagedLayer:
        if max_length is not None:
            return StaticPagedLayer(kv_config, n, moments.get(n), latent, decoder, ints, max_length=max_length)
        return PagedLayer(kv_config, n, moments.get(n), latent, decoder, ints)

    cache = PagedCache(layers=[layer(n) if n in paged else x for n, x in enumerate(theirs)])
    if model_config is not model:
        weakref.finalize(decoder, serve(model, kv_config).remove).atexit = False
    for first in list(cache._paged())[:1]:
        first.speaks = True
    return cache


def calibrate(model: Any, token_ids: torch.Tensor, *, skip: int = 4, span: int | None = None) -> OutlierStats:
    """Run token ids [B, S] (no padding) through the model, one row at a time, and collect the moments that choose outliers, means and
    gains.

    skip  first tokens of each row to leave out: they stay in FP16 as sinks, and their keys are unlike all others
    span  longest context that will be served: the rows' positions are spread over it. Attention is relative and does not change, but
          keys turn with their position, and so do their means and loud channels (default: positions 0 to S - 1, right for contexts of S
          tokens)

    A few thousand tokens are enough. Of an MLA layer the moments are its latents', whatever is asked of them. Raises ShapeError for
    what is no matrix of the model's token ids with more than `skip` in a row, ConfigError for a span below S.
    """
    ids = token_ids
    if not are_ids(model, ids, 2) or not ids.shape[1] > skip >= 0:
        known = model.config.get_text_config(decoder=True).vocab_size
        raise ShapeError(
            f"token_ids {tuple(getattr(ids, 'shape', ()))} of {getattr(ids, 'dtype', type(ids).__name__)}, skip {skip}",
            where="calibrate",
            expected=f"whole numbers [rows, tokens] from 0 to {known - 1}, more than {max(0, skip)} in a row",
            do="pass the tokenizer's ids, text[None] for one text",
        )
    if (different := len(ids[:, skip:].unique())) < FEW:
        log.warning("the calibration's text has %d different tokens: with so few, answers may be worse than without one", different)
    rows, length = token_ids.shape
    room = 0 if span is None else span - length
    if room < 0:
        raise ConfigError(
            f"rows of {length} tokens are longer than a span of {span}", where="calibrate", expected="span >= row length", do="cut the rows"
        )
    seen: dict[int, StatsCollector] = {}

    def see(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        seen.setdefault(layer, StatsCollector(axes=not latent)).add(q[0], k[0], v[0], skip)

    latent = bool(getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None))
    with torch.no_grad(), nullcontext() if latent else watch_attention(model, see):
        for i, row in enumerate(token_ids):
            start = room * i // max(1, rows - 1)
            position = torch.arange(start, start + length, device=model.device)[None]
            given = {"past_key_values": Latents(model.config, see)} if latent else {"use_cache": False}
            model(input_ids=row[None].to(model.device), position_ids=position, **given)
    keys = key_hashes(model)
    return OutlierStats({n: s.stats() for n, s in sorted(seen.items())}, {n: keys[n] for n in sorted(seen) if n in keys})
