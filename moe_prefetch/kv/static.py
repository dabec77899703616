"""A layer's KV cache of fixed size whose every step runs on the device: no allocation kept, no host read, so that a graph can capture it.

The same pages, sinks and window as `LayerStore`; rows have equal lengths, pages are not shared. Between `window` and `window + draft`
tokens are in FP16. A prompt, or more of it, is taken by `prefill`, outside a graph; steps of up to `draft` tokens by `append`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CacheError, ConfigError, ShapeError
from ..kernels.kv_attend.op import kv_attend
from ..kernels.kv_encode.naive import clean, empty_pages
from ..kernels.kv_encode.op import kv_encode
from ..kernels.kv_encode.records import Book, checked, decode_naive, runs_for
from ..kernels.kv_slide.naive import Slide, tell_naive
from ..kernels.kv_slide.op import kv_slide
from .basis import Basis
from .format import PAGE, PageLayout


class StaticStore:
    """`max_tokens` per row are reserved at once. Raises ConfigError for a format whose V scale covers several tokens."""

    def __init__(
        self,
        layout: PageLayout,
        heads: int,
        book: Book,
        *,
        batch: int,
        max_tokens: int,
        sinks: int = 4,
        window: int = 64,
        draft: int = 8,
        device: torch.device | str = "cpu",
        basis: Basis | None = None,
    ) -> None:
        if layout.format.append_group > 1:
            raise ConfigError(
                f"format {layout.format.name} stores several tokens at a time",
                where="static KV cache",
                expected="one scale per token",
                do="choose fp4-72, fp4-quality, fp8 or fp16",
            )
        self.layout, self.heads, self.book, self.sinks, self.window, self.draft = layout, heads, checked(book, layout), sinks, window, draft
        self.batch, self.max_tokens, self.basis = batch, max_tokens, basis
        self.ring = window + 2 * draft
        per_row = max(1, -(-(max_tokens - sinks) // PAGE))
        # One page a row more: what is not due yet goes there, so that each step writes the same number of tokens.
        self.pool = empty_pages(batch * (per_row + 1), heads, layout, device)
        self.blank = empty_pages(1, heads, layout, device)
        self.table = torch.arange(batch * per_row, dtype=torch.int32, device=device).reshape(batch, per_row)
        self.scratch = torch.arange(batch * per_row, batch * (per_row + 1), device=device)
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)
        self.known = 0  # the length as far as the host has counted: a replayed graph adds and crops without it
        self.stored = torch.zeros(batch, dtype=torch.int64, device=device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        k_dim, v_dim = layout.k_dim + layout.rope, layout.v_dim
        half = lambda n, d: torch.zeros(batch, heads, n, d, dtype=torch.float16, device=device)  # noqa: E731
        # One row more: what is no sink lands there.
        self._sinks = [torch.zeros(batch * heads * sinks + 1, d, dtype=torch.float16, device=device) for d in (k_dim, v_dim)]
        self._see_sinks()
        self.recent_k, self.recent_v = half(self.ring, k_dim), half(self.ring, v_dim)
        self.now = torch.zeros(3, batch, dtype=torch.int32, device=device)
        self._queries = {t: torch.full((batch,), t, dtype=torch.int32, device=device) for t in range(1, draft + 1)}
        self._slide = Slide(self.recent_k, self.recent_v, *self._sinks, self.pool, self.blank, self.table, self.scratch, self.length,
                            self.stored, self.now)  # fmt: skip
        tell_naive(self._slide)
        self.empty = True

    def _see_sinks(self) -> None:
        self.sink_k, self.sink_v = (x[:-1].view(self.batch, self.heads, self.sinks, x.shape[1]) for x in self._sinks)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # pickle makes tensors of their own out of what were parts of another
        self.__dict__.update(state)
        self._see_sinks()

    def append(self, k_BNTd: torch.Tensor, v_BNTd: torch.Tensor) -> None:
        """Take T <= draft tokens per row; as many older ones leave the window. Device work only. Raises CacheError for more, and
        when the cache is full (a graph that is replayed beyond its end is for its caller to stop); ShapeError for another batch or
        model."""
        T = self._tokens(k_BNTd, v_BNTd)
        if T > self.draft:
            raise CacheError(
                f"{T} tokens in one step", where="static KV cache", expected=f"at most {self.draft}", do="prefill first, or raise draft"
            )
        if not torch.compiler.is_compiling():
            self._count(T)
        k = k_BNTd if self.basis is None else self.basis.keys(k_BNTd)
        for leaving in zip(*kv_slide(self._slide, k, v_BNTd, self.window), strict=True):
            self.counts.add_(kv_encode(self.pool, *leaving, self.book, self.layout, most=1))
        self.empty = False

    def _tokens(self, k_BNTd: torch.Tensor, v_BNTd: torch.Tensor) -> int:
        """How many there are; one row would be spread over all, other rows or heads come out anywhere."""
        T, k_dim = k_BNTd.shape[2], self.layout.k_dim + self.layout.rope
        want = [(self.batch, self.heads, T, d) for d in (k_dim, self.layout.v_dim)]
        if [tuple(k_BNTd.shape), tuple(v_BNTd.shape)] != want:
            raise ShapeError(
                f"K {tuple(k_BNTd.shape)} and V {tuple(v_BNTd.shape)}",
                where="static KV cache",
                expected=f"{want[0]} and {want[1]}",
                do="give each batch and model a cache of its own",
            )
        return T

    def _count(self, more: int) -> None:
        """Raises CacheError where `more` tokens have no room. The length itself is read only when the host's count says so."""
        capturing = self.length.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.known + more > self.max_tokens and not capturing:
            self.known = int(self.length[0])
            if self.known + more > self.max_tokens:
                raise CacheError(
                    f"{more} tokens more than the {self.known} that are there",
                    where="static KV cache",
                    expected=f"at most {self.max_tokens} in all",
                    do="make the cache longer (make_cache(max_length=)), or crop or reset it",
                )
        self.known += more

    def prefill(self, k_BNTd: torch.Tensor, v_BNTd: torch.Tensor) -> None:
        """Take a prompt, or more of one: any number of tokens, outside a graph. Where some are there the host reads how many. Raises
        CacheError when they do not fit, ShapeError as `append`."""
        T = self._tokens(k_BNTd, v_BNTd)
        first, held = (0, 0) if self.empty else torch.stack([self.length[0], self.stored[0]]).tolist()
        length = first + T
        if length > self.max_tokens:
            raise CacheError(
                f"{T} tokens more than the {first} that are there",
                where="static KV cache",
                expected=f"at most {self.max_tokens} in all",
                do="make the cache longer (make_cache(max_length=)), or reset it",
            )
        k, k_big, k_nan = clean(k_BNTd if self.basis is None else self.basis.keys(k_BNTd))
        v, v_big, v_nan = clean(v_BNTd)
        self.counts.add_(torch.stack([k_big + v_big, k_nan + v_nan]))
        k, v = k.half(), v.half()
        if first < self.sinks:
            n = min(length, self.sinks) - first
            self.sink_k[:, :, first : first + n], self.sink_v[:, :, first : first + n] = k[:, :, :n], v[:, :, :n]
        stored = max(held, length - self.sinks - self.window)
        if stored > held:
            # From the oldest token in the window on, where there is one.
            oldest = min(held + self.sinks, first)
            window = torch.arange(oldest, first, device=self.pool.device) % self.ring
            every = [torch.cat([old[:, :, window], new], 2) for old, new in ((self.recent_k, k), (self.recent_v, v))]
            rows, skip = length - oldest, held + self.sinks - oldest
            runs = [r for b in range(self.batch) for r in runs_for(self.table[b].tolist(), held, stored - held, b * rows + skip)]
            self.pool[self.table[:, -(-held // PAGE) : -(-stored // PAGE)].flatten()] = self.blank
            flat = [x.transpose(1, 2).flatten(0, 1) for x in every]
            where = torch.tensor(runs, dtype=torch.int32, device=self.pool.device)
            self.counts.add_(kv_encode(self.pool, *flat, where, self.book, self.layout))
        last = torch.arange(max(0, T - self.ring), T, device=self.pool.device)
        for ring, x in ((self.recent_k, k), (self.recent_v, v)):
            ring[:, :, (first + last) % self.ring] = x[:, :, last]
        self.length.fill_(length)
        self.known = length
        self.stored.fill_(stored)
        tell_naive(self._slide)
        self.empty = False

    def gather(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """K [B, N, max_tokens, dk] and V as attention sees them, zero beyond the length."""
        pos = torch.arange(self.max_tokens, device=self.pool.device)
        paged = decode_naive(self.pool[self.table.flatten()], self.book, self.layout)
        at = (pos - self.sinks).clamp(0, self.table.shape[1] * PAGE - 1)
        out = []
        latent = not self.layout.v_dim
        for page, sink, recent in (
            (paged[0], self.sink_k, self.recent_k),
            (paged[1], self.sink_k if latent else self.sink_v, self.recent_k if latent else self.recent_v),
        ):
            d = page.shape[-1]
            page = page.unflatten(0, (self.batch, -1)).transpose(1, 2).flatten(2, 3)[:, :, at]
            in_page = (pos < self.sinks + self.stored[:, None])[:, None, :, None]
            x = torch.where(in_page, page, recent[:, :, pos % self.ring, :d].float())
            if self.sinks:
                x = torch.where((pos < self.sinks)[:, None], sink[:, :, pos.clamp(max=self.sinks - 1), :d].float(), x)
            out.append(torch.where((pos < self.length[:, None])[:, None, :, None], x, 0.0))
        k = out[0] if self.basis is None else self.basis.restore(out[0])
        return k.to(dtype), out[1].to(dtype)

    def attend(
        self, q_BHTd: torch.Tensor, *, scale: float, sliding: int = 0, softcap: float = 0.0, sink_H: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries of the T tokens appended last; see `moe_prefetch.kv.attention.attend`."""
        stored, length, first = self.now
        T = q_BHTd.shape[2]
        return kv_attend(
            q_BHTd if self.basis is None else self.basis.queries(q_BHTd),
            self._queries[T] if T in self._queries else torch.full_like(length, T),
            self.pool,
            self.table,
            stored,
            length,
            self.sink_k,
            self.sink_v,
            self.recent_k,
            self.recent_v,
            first,
            self.book,
            self.layout,
            scale=scale,
            sliding=sliding,
            softcap=softcap,
            sink_H=sink_H,
        )

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens. Device work only.

        No more than the last `append` brought leave no trace; beyond that, what is in pages below the cut stays as encoded.
        """
        self.length.sub_(count).clamp_(min=0)
        self.known = max(0, self.known - count)
        self.stored.copy_(torch.minimum(self.stored, (self.length - self.sinks).clamp(min=0)))
        tell_naive(self._slide)

    def reset(self) -> None:
        """Forget every token and what was counted of them; addresses stay."""
        self.pool.copy_(self.blank.expand_as(self.pool))
        self.length.zero_()
        self.known = 0
        self.stored.zero_()
        self.counts.zero_()
        tell_naive(self._slide)
        self.empty = True

    def held_bytes(self) -> int:
        """Bytes of every storage that its rows have; codebook and basis apart (`book_bytes`)."""
        return sum(t.untyped_storage().nbytes() for t in self._slide)

    def book_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in (*self.book, *(self.basis or ())))

    def tokens(self) -> int:
        """Tokens of all rows, read from the device."""
        return int(self.length.sum())
