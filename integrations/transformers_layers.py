"""The layers of a `PagedCache`: one decoder layer's K and V in our pages, growing (`PagedLayer`) or of fixed size (`StaticPagedLayer`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from moe_prefetch.config import KVConfig
from moe_prefetch.errors import CacheError, ConfigError
from moe_prefetch.integrations.transformers_held import Step, as_they_are, hold
from moe_prefetch.integrations.transformers_pages import Decoder, reads_pages
from moe_prefetch.kv.codec import make_coding, prompt_book, turns_keys
from moe_prefetch.kv.format import PageLayout, format_of, layout_for
from moe_prefetch.kv.ints import DeviceInts
from moe_prefetch.kv.outliers import LayerStats
from moe_prefetch.kv.static import StaticStore
from moe_prefetch.kv.store import DRAFT, LayerStore

log = logging.getLogger(__name__)


class PagedLayer(CacheLayerMixin):
    """One decoder layer's cache. `stats` is its calibration; without it the codebook is made from each sequence's own first tokens.

    `decoder` says at each step who attends; it and `ints` are shared by the layers of a cache.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        kv: KVConfig,
        number: int,
        stats: LayerStats | None,
        latent: int = 0,
        decoder: Decoder | None = None,
        ints: DeviceInts | None = None,
    ) -> None:
        super().__init__()
        self.kv, self.number, self.stats, self.latent = kv, number, stats, latent
        self.decoder, self.ints = decoder or Decoder(None), ints or DeviceInts()
        # How the last step of decode was read: "pages", or "tensors" and why; one layer of a cache says so, and warns.
        # `told`: a promise that the format breaks was named before, for another cache of this configuration.
        self.attention, self.speaks, self.told = "tensors", False, False
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
        layout = layout_for(self.format, k_dim, v_dim, outliers=outliers, sinks=self.kv.sinks, window=self.most_recent)
        bits, most = self.bits(layout), self.format.promise
        if self.speaks and not self.told and most is not None and bits > most:
            beside = ", and the basis of its keys, which all sequences share," if self.turned else ""
            log.warning(
                "%s promises %.2f bits per element at 32k tokens; with %d tokens of window and %d sinks%s it holds %.3f",
                self.format.name, most, self.most_recent, self.kv.sinks, beside, bits,
            )  # fmt: skip
        return layout

    @property
    def turned(self) -> bool:
        """Whether keys are kept in axes of their own."""
        return not self.latent and turns_keys(self.stats, self.format, self.kv.outliers)

    @property
    def kept_in(self) -> str | None:
        """What keys are kept in: "axes" or "channels" of a calibration, channels that each "prompt" chose; None without a codebook of K."""
        if self.format.max_bits is None:
            return None
        return "axes" if self.turned else "channels" if self.stats is not None else "prompt"

    def bits(self, layout: PageLayout) -> float:
        """Bits per element at 32k tokens, everything of a cache of one sequence counted."""
        return layout.bits_per_element(sinks=self.kv.sinks, window=self.most_recent, basis=self.turned)

    @property
    def most_recent(self) -> int:
        """Tokens that the window may hold: what bits are counted with."""
        return self.window + self.kv.settle - 1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        layout = self.layout(key_states.shape[-1], value_states.shape[-1])
        heads, device = key_states.shape[1], key_states.device
        adaptive = layout.format.has_book
        if self.stats is not None and adaptive and (len(self.stats.k2), len(self.stats.k2[0])) != (heads, layout.k_dim):
            raise ConfigError(
                f"the calibration of layer {self.number} has {len(self.stats.k2)} heads of {len(self.stats.k2[0])}",
                where="kv.calibration",
                expected=f"{heads} of {layout.k_dim}",
                do="calibrate this model",
            )
        made = (layout, heads, self.kv.outliers, device)
        book, basis = (prompt_book(*made), None) if adaptive and self.stats is None else make_coding(self.stats, *made)[:2]
        kept = {"sinks": self.kv.sinks, "window": self.window, "settle": self.kv.settle}
        self.store = LayerStore(layout, heads, book, batch=key_states.shape[0], **kept, device=device, ints=self.ints, basis=basis)
        self._pad()
        self.is_initialized = True

    def set_pads(self, pads: list[int]) -> None:
        self._pads = pads
        self._pad()

    def _pad(self) -> None:
        if self.store is not None and self._pads is not None:
            # Beams come as each prompt several times.
            self.store.set_pads([p for p in self._pads for _ in range(max(1, self.store.batch // len(self._pads)))])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling():
            # Which modes are on can't be asked in a trace.
            return self._update(key_states, value_states)
        with as_they_are(key_states):
            return self._update(key_states, value_states)

    def _update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        store = self.store
        assert store is not None
        both = self._both(key_states, value_states)
        if store.length and key_states.shape[2] <= DRAFT and self._direct(key_states):
            store.append(*both)
            return hold(Step(store, (key_states, value_states), self._note))
        store.settle()
        past_k, past_v = store.gather(key_states.dtype)
        store.append(*both)
        if self.latent:
            past_k, past_v = past_k.split([key_states.shape[-1], value_states.shape[-1]], -1)
        return torch.cat([past_k, key_states], 2), torch.cat([past_v.to(value_states.dtype), value_states], 2)

    def _direct(self, key_states: torch.Tensor) -> bool:
        """Whether attention may read this step from the store; where not, the report says so."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            # A trace breaks off where something is logged.
            self.attention = "tensors: a step that is traced"
            return False
        config = self.decoder.config
        ours = reads_pages(config)
        if self.kv.attention == "tensors" or (self.kv.attention == "auto" and not ours):
            self.attention = "tensors"
            return False
        why = "" if ours else "it has been pickled" if config is None else f"the model's attention is {config._attn_implementation!r}"
        if ours and key_states.requires_grad:
            why = "training"
        if why:
            self._note(why)
        return not why

    def _both(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as pages keep them: of an MLA layer latent and rotary part are K, and there is no V."""
        return (torch.cat([key_states, value_states], -1), value_states[..., :0]) if self.latent else (key_states, value_states)

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
        self._pads = None
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
        elif self._pads is not None:
            self._pads = [self._pads[i] for i in indices]

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
        coding = make_coding(self.stats, layout, heads, self.kv.outliers, key_states.device)
        self.static = StaticStore(
            layout,
            heads,
            coding.book,
            basis=coding.basis,
            batch=key_states.shape[0],
            max_tokens=self.max_length,
            sinks=self.kv.sinks,
            window=self.window,
            device=key_states.device,
        )
        self.is_initialized = True

    def _update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.static is None:
            self.lazy_initialization(key_states, value_states)
        store = self.static
        assert store is not None
        split = [key_states.shape[-1], value_states.shape[-1]]
        both = self._both(key_states, value_states)
        if not store.empty and key_states.shape[2] <= store.draft and self._direct(key_states):
            store.append(*both)
            return hold(Step(store, (key_states, value_states), self._note))
        if key_states.shape[2] > store.draft:
            if store.empty:
                # What `gather` gives of an empty store.
                k, v = (x.new_zeros(*x.shape[:2], self.max_length, x.shape[3]) for x in (both[0], both[0] if self.latent else both[1]))
            else:
                k, v = store.gather(key_states.dtype)
            store.prefill(*both)
        else:
            store.append(*both)
            k, v = store.gather(key_states.dtype)
        k, v = k.split(split, -1) if self.latent else (k, v)
        # This call's own tokens, unrounded.
        at = store.length[0] - key_states.shape[2] + torch.arange(key_states.shape[2], device=key_states.device)
        # Under autocast K may come in another dtype than V.
        return k.index_copy(2, at, key_states), v.to(value_states.dtype).index_copy(2, at, value_states)

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
