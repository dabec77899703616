"""A transformers `Cache` whose layers keep K and V in our pages.

    cache = make_cache(model, config.kv)
    model.generate(**inputs, past_key_values=cache)

`update()` returns ordinary tensors: decoded pages, FP16 sinks and window, and this call's own K and V untouched. So it works with every
attention implementation. Where that is our own (`transformers_pages`), a step of decode decodes nothing: attention reads the pages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from moe_prefetch.config import KVConfig
from moe_prefetch.errors import CacheError, ConfigError
from moe_prefetch.integrations.transformers_attention import watch_attention
from moe_prefetch.integrations.transformers_pages import Step, hold, left_padding, reads_pages, serve
from moe_prefetch.kernels.kv_encode.records import Book
from moe_prefetch.kv.codec import OutlierStats, StatsCollector, make_book
from moe_prefetch.kv.format import PageLayout, format_of, layout_for
from moe_prefetch.kv.ints import DeviceInts
from moe_prefetch.kv.outliers import LayerStats
from moe_prefetch.kv.static import StaticStore
from moe_prefetch.kv.store import DRAFT, LayerStore

log = logging.getLogger(__name__)


class PagedLayer(CacheLayerMixin):
    """One decoder layer's cache. `stats` is its calibration; without it the codebook is made from each sequence's own first tokens.

    `text` is the decoder's config, which says at each step who attends; `ints` are shared by the layers of a cache.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self, kv: KVConfig, number: int, stats: LayerStats | None, latent: int = 0, text: Any = None, ints: DeviceInts | None = None
    ) -> None:
        super().__init__()
        self.kv, self.number, self.stats, self.latent, self.text = kv, number, stats, latent, text
        self.ints = ints or DeviceInts()
        # How the last step of decode was read: "pages", or "tensors" and why; one layer of a cache says so.
        self.attention, self.speaks = "tensors", False
        self.format = format_of(kv.layers.get(number, kv.format))
        # One window for all layers: a layer that fell back to a finer format keeps what its neighbours keep.
        self.window = format_of(kv.format).window_or(kv.window)
        self.store: LayerStore | None = None
        self._pads: list[int] | None = None

    def layout(self, k_dim: int, v_dim: int) -> PageLayout:
        """The record for these head dims. An MLA layer's `update` brings (latent, rotary part): one record, no V of its own."""
        outliers = 0 if self.kv.outliers == "none" and self.format.max_bits is not None else None
        if self.latent:
            return layout_for(self.format, k_dim, 0, rope=v_dim)
        return layout_for(self.format, k_dim, v_dim, outliers=outliers, sinks=self.kv.sinks, window=self.most_recent)

    @property
    def most_recent(self) -> int:
        """Tokens that the window may hold: what bits are counted with."""
        return self.window + self.kv.settle - 1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        layout = self.layout(key_states.shape[-1], value_states.shape[-1])
        heads, device = key_states.shape[1], key_states.device

        def from_prompt(k_NTd: torch.Tensor, v_NTd: torch.Tensor) -> Book:
            seen = StatsCollector()
            # The query is not known here: its weights are 1, and `importance` falls back to E[k^2].
            seen.add(torch.ones_like(k_NTd[..., : layout.k_dim]), k_NTd[..., : layout.k_dim], v_NTd)
            return make_book(seen.stats(), layout, heads, self.kv.outliers, device)[0]

        adaptive = layout.format.max_bits is not None
        if self.stats is not None and adaptive and (len(self.stats.k2), len(self.stats.k2[0])) != (heads, layout.k_dim):
            raise ConfigError(
                f"the calibration of layer {self.number} has {len(self.stats.k2)} heads of {len(self.stats.k2[0])}",
                where="kv.calibration",
                expected=f"{heads} of {layout.k_dim}",
                do="calibrate this model",
            )
        book = from_prompt if adaptive and self.stats is None else make_book(self.stats, layout, heads, self.kv.outliers, device)[0]
        kept = {"sinks": self.kv.sinks, "window": self.window, "settle": self.kv.settle}
        self.store = LayerStore(layout, heads, book, batch=key_states.shape[0], **kept, device=device, ints=self.ints)
        if self._pads is not None:
            # Beams come as each prompt several times.
            self.store.set_pads([p for p in self._pads for _ in range(max(1, self.store.batch // len(self._pads)))])
        self.is_initialized = True

    def set_pads(self, pads: list[int]) -> None:
        self._pads = pads
        if self.store is not None:
            self.store.set_pads(pads)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        store = self.store
        assert store is not None
        if store.length and key_states.shape[2] <= DRAFT and self._direct(key_states):
            store.append(key_states, value_states)
            return hold(Step(store, (key_states, value_states), self._note))
        store.settle()
        past_k, past_v = store.gather(key_states.dtype)
        if self.latent:
            store.append(torch.cat([key_states, value_states], -1), value_states[..., :0])
            past_k, past_v = past_k.split([key_states.shape[-1], value_states.shape[-1]], -1)
        else:
            store.append(key_states, value_states)
        return torch.cat([past_k, key_states], 2), torch.cat([past_v, value_states], 2)

    def _direct(self, key_states: torch.Tensor) -> bool:
        """Whether attention may read this step from the store."""
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
        mine = self.kv.attention != "tensors" and reads_pages(self.text)
        return mine and not self.latent and not traced and not key_states.requires_grad

    def _note(self, why: str) -> None:
        how = f"tensors: {why}" if why else "pages"
        if why and how != self.attention and self.speaks:
            log.warning("attention decodes the whole KV cache at each step: %s", why)
        self.attention = how

    def get_seq_length(self) -> int:
        return 0 if self.store is None else self.store.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        if self.store is not None:
            self.store.reset()

    def _count(self, tokens: int | torch.Tensor) -> int:
        # Assisted decoding counts on the device.
        return self.ints.read(tokens) if isinstance(tokens, torch.Tensor) else tokens

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Negative: forget that many tokens. Positive: keep that many (transformers' older meaning)."""
        tokens_to_remove = self._count(tokens_to_remove)
        if self.store is None or tokens_to_remove == 0:
            return
        self.store.crop(max(0, self.store.length + tokens_to_remove) if tokens_to_remove < 0 else min(tokens_to_remove, self.store.length))

    def _select(self, indices: Iterable[int]) -> None:
        if self.store is not None:
            self.store.select(list(indices))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(self.ints.read(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            self._select(b for b in range(self.store.batch) for _ in range(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices.nonzero().flatten().tolist() if indices.dtype == torch.bool else indices.tolist())

    def offload(self) -> None:
        where = f"layer {self.number}"
        raise CacheError("pages are not offloaded by layers", where=where, expected="offloading=False", do="choose a smaller KV format")

    prefetch = offload


class StaticPagedLayer(PagedLayer):
    """A `PagedLayer` of fixed size whose decode steps run on the device alone: tensors keep their addresses, nothing is read by the host.

    It can't be reordered or repeated (nor can transformers' own StaticLayer be repeated); rows must have equal lengths.
    """

    is_compileable = True

    def __init__(self, *args: Any, max_length: int) -> None:
        super().__init__(*args)
        self.max_length = max_length
        self.static: StaticStore | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        layout, heads = self.layout(key_states.shape[-1], value_states.shape[-1]), key_states.shape[1]
        book, _ = make_book(self.stats, layout, heads, self.kv.outliers, key_states.device)
        self.static = StaticStore(
            layout,
            heads,
            book,
            batch=key_states.shape[0],
            max_tokens=self.max_length,
            sinks=self.kv.sinks,
            window=self.window,
            device=key_states.device,
        )
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.static is None:
            self.lazy_initialization(key_states, value_states)
        store = self.static
        assert store is not None
        split = [key_states.shape[-1], value_states.shape[-1]]
        both = (torch.cat([key_states, value_states], -1), value_states[..., :0]) if self.latent else (key_states, value_states)
        if not store.empty and key_states.shape[2] <= store.draft and self._direct(key_states):
            store.append(*both)
            return hold(Step(store, (key_states, value_states), self._note))
        prompt = store.empty and key_states.shape[2] > store.draft
        if prompt:
            k, v = store.gather(key_states.dtype)
            store.prefill(*both)
        else:
            store.append(*both)
            k, v = store.gather(key_states.dtype)
        k, v = k.split(split, -1) if self.latent else (k, v)
        # This call's own tokens, unrounded.
        at = store.length[0] - key_states.shape[2] + torch.arange(key_states.shape[2], device=key_states.device)
        return k.index_copy(2, at, key_states), v.index_copy(2, at, value_states)

    def get_seq_length(self) -> Any:
        return 0 if self.static is None else self.static.length[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_length, 0

    def get_max_length(self) -> int:
        return self.max_length

    def reset(self) -> None:
        if self.static is not None:
            self.static.reset()

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        tokens_to_remove = self._count(tokens_to_remove)
        if self.static is None or tokens_to_remove == 0:
            return
        if tokens_to_remove > 0:
            raise CacheError(
                "a static cache crops by a count", where=f"layer {self.number}", expected="a negative number of tokens", do="pass -n"
            )
        self.static.crop(-tokens_to_remove)

    def set_pads(self, pads: list[int]) -> None:
        if any(pads):
            raise CacheError(
                "rows of a static cache have equal lengths",
                where=f"layer {self.number}",
                expected="no padding",
                do="use make_cache without max_length",
            )

    def _select(self, indices: Iterable[int]) -> None:
        raise CacheError(
            "a static cache keeps its rows", where=f"layer {self.number}", expected="no beams", do="use make_cache without max_length"
        )


class PagedCache(Cache):
    """A `Cache` of `PagedLayer`s (layers with another kind of attention keep transformers' own) that knows its bytes."""

    def _paged(self) -> Iterator[PagedLayer]:
        return (x for x in self.layers if isinstance(x, PagedLayer))

    def set_padding(self, attention_mask: torch.Tensor) -> None:
        """Tell the cache where left padding ends (mask [B, S], 0 = padding), before the first token: padding is then neither stored nor
        measured. Raises CacheError for a mask with zeros elsewhere.
        """
        pads = left_padding(attention_mask)
        if pads is None:
            raise CacheError(
                "a mask with zeros behind ones", where="set_padding", expected="padding on the left", do="pad the prompts on the left"
            )
        for layer in self._paged():
            layer.set_pads(pads)

    def held_bytes(self) -> int:
        """Bytes of every storage the cache holds, codebooks and block tables included."""
        total = sum(x.store.held_bytes() + x.store.book_bytes() for x in self._paged() if x.store is not None)
        total += sum(x.static.held_bytes() for x in self.layers if isinstance(x, StaticPagedLayer) and x.static is not None)
        for x in self.layers:
            for t in (getattr(x, "keys", None), getattr(x, "values", None)):
                total += t.untyped_storage().nbytes() if isinstance(t, torch.Tensor) else 0
        return total

    def bits_per_element(self) -> float:
        """Bits held per K or V element cached now; NaN while empty."""
        stores = [x.store for x in self._paged() if x.store is not None]
        elements = sum(s.row_length(b) * s.heads * s.layout.element_count for s in stores for b in range(s.batch))
        return 8 * sum(s.held_bytes() + s.book_bytes() for s in stores) / elements if elements else float("nan")

    def report(self) -> list[dict[str, Any]]:
        """One row per paged layer: format, how the last step of decode was read, bits per element at 32k, share of FP16 outliers, elements
        saturated and NaNs zeroed so far.
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
                    "attention": x.attention,
                    "saturated": saturated,
                    "nan": nan,
                    "bits_per_element": store.layout.bits_per_element(sinks=x.kv.sinks, window=x.most_recent),
                    "outlier_share": used / (store.heads * (store.layout.k_dim + store.layout.v_dim)),
                }
            )
        return rows

    def check_integrity(self) -> None:
        for x in self._paged():
            if x.store is not None:
                x.store.check_integrity()


def make_cache(model: Any, kv_config: KVConfig, stats: OutlierStats | None = None, *, max_length: int | None = None) -> PagedCache:
    """The cache for one model (or its config). `stats` (or `kv_config.calibration`, read once per call) gives the codebooks.

    Given the model itself, its decode steps are switched to reading pages as `kv_config.attention` says: `transformers_pages.serve`.
    With `max_length` the cache has a fixed size and its decode steps can be captured (`StaticPagedLayer`); FP4 with outliers then needs
    a calibration. Layers with sliding-window or linear attention keep transformers' own cache, except where `kv_config.layers` names them.
    Raises ConfigError for a layer that the model does not have, ArtefactError for a bad calibration file.
    """
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
    if max_length is not None and not moments and format_of(kv_config.format).max_bits is not None:
        raise ConfigError(
            "a static cache can't make codebooks from the prompt",
            where="kv.calibration",
            expected="a calibration",
            do="run calibrate() once",
        )

    ints = DeviceInts()

    def layer(n: int) -> PagedLayer:
        if max_length is not None:
            return StaticPagedLayer(kv_config, n, moments.get(n), latent, text, ints, max_length=max_length)
        return PagedLayer(kv_config, n, moments.get(n), latent, text, ints)

    if model_config is not model:
        serve(model, kv_config)

    cache = PagedCache(layers=[layer(n) if type(x) is DynamicLayer else x for n, x in enumerate(theirs)])
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

    A few thousand tokens are enough. Layers whose attention brings no plain heads (MLA) are left out. Raises ConfigError for a span
    below S.
    """
    rows, length = token_ids.shape
    room = 0 if span is None else span - length
    if room < 0:
        raise ConfigError(
            f"rows of {length} tokens are longer than a span of {span}", where="calibrate", expected="span >= row length", do="cut the rows"
        )
    seen: dict[int, StatsCollector] = {}

    def see(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        seen.setdefault(layer, StatsCollector()).add(q[0, :, skip:], k[0, :, skip:], v[0, :, skip:])

    with torch.no_grad(), watch_attention(model, see):
        for i, row in enumerate(token_ids):
            start = room * i // max(1, rows - 1)
            position = torch.arange(start, start + length, device=model.device)[None]
            model(input_ids=row[None].to(model.device), position_ids=position, use_cache=False)
    return OutlierStats({n: s.stats() for n, s in sorted(seen.items())})
