"""One layer's KV cache: pages, sinks and window of a batch of sequences, and every operation on them.

Columns are the batch's common positions (0 .. length - 1). A row with left padding starts at its own column `pads[b]`: padding is never
stored, encoded or counted. Of its tokens the first `sinks` and the last ones stay in FP16; the rest is in pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import cast

import torch

from ..errors import ArtefactError, CacheError, IntegrityError, ShapeError
from ..kernels.kv_encode.naive import empty_pages
from ..kernels.kv_encode.op import kv_encode
from ..kernels.kv_encode.records import Book, checked, decode_naive, neutral_book, tokens_in
from .basis import Basis
from .format import LAYOUT_VERSION, PAGE, PageLayout
from .ints import DeviceInts
from .pages import Copy, PageBook, Run, block_table
from .window import Window

DRAFT = 32  # a chunk of at most this many tokens may be rolled back: nothing leaves the window before the next update


class LayerStore:
    """KV cache of one layer for `batch` sequences.

    layout        how pages are made; heads KV heads
    book          the codebook of all rows; or a function that makes one row's own from its first tokens beyond the sinks
                  (k [N, T, dk], v [N, T, dv]), called when the row first leaves its window: frozen then, shared with forks only
    basis         what keys are turned into before anything is kept, sinks and window too; they come and go as the model has them
    sinks, window tokens kept in FP16 at the start and at the end
    settle        tokens that leave the window together: window to window + settle - 1 are in FP16 (a format's own group counts too)
    ints          shared by the layers of a cache, so that equal tables are brought to the device once
    `counts` int64 [2]: elements saturated, NaNs zeroed. `poison` fills freed pages with 0xFF (tests).
    """

    def __init__(
        self,
        layout: PageLayout,
        heads: int,
        book: Book | Callable[[torch.Tensor, torch.Tensor], Book],
        *,
        batch: int = 1,
        sinks: int = 4,
        window: int = 64,
        settle: int = 1,
        device: torch.device | str = "cpu",
        page_limit: int | None = None,
        poison: bool = False,
        ints: DeviceInts | None = None,
        basis: Basis | None = None,
    ) -> None:
        self.layout, self.heads, self.sinks, self.window, self.device, self.poison = layout, heads, sinks, window, device, poison
        self.ints, self.basis, self.group = ints or DeviceInts(), basis, math.lcm(layout.format.append_group, settle)
        self.make_book = book if callable(book) else None
        self._fixed = None if callable(book) else checked(book, layout)
        self.k_dim, self.v_dim = layout.k_dim + layout.rope, layout.v_dim
        self.pages = PageBook(page_limit, on_free=self._freed if poison else None)
        self.pages.add(batch)
        self.pool = empty_pages(0, heads, layout, device)
        self._blank = empty_pages(1, heads, layout, device)
        self._table: tuple[int, torch.Tensor] | None = None
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        self.length = 0
        self.pads = [0] * batch
        self._books(batch)
        self._fp16(batch)

    def _books(self, batch: int) -> None:
        # Codebooks of the rows, by identity; None until a row has one.
        self.books: list[Book | None] = [self._fixed] * batch

    @cached_property
    def neutral(self) -> Book:
        """Stands for a codebook while nothing is in pages."""
        return neutral_book(self.layout, self.heads, self.device)

    def by_book(self) -> list[tuple[Book, list[int]]]:
        """Rows that hold pages, grouped by codebook."""
        groups: dict[int, tuple[Book, list[int]]] = {}
        for b, book in enumerate(self.books):
            if book is not None and self.pages.rows[b].stored:
                groups.setdefault(id(book), (book, []))[1].append(b)
        return list(groups.values())

    def _fp16(self, batch: int) -> None:
        make = lambda d: torch.zeros(batch, self.heads, self.sinks, d, dtype=torch.float16, device=self.device)  # noqa: E731
        self.sink_k, self.sink_v = make(self.k_dim), make(self.v_dim)
        self.recent = Window(batch, self.heads, self.k_dim, self.v_dim, self.window + self.group, self.device)

    @property
    def recent_k(self) -> torch.Tensor:
        """FP16 [B, N, R, dk]: the last R columns. A row's own part ends there and may be shorter."""
        return self.recent.k

    @property
    def recent_v(self) -> torch.Tensor:
        return self.recent.v

    def table(self) -> torch.Tensor:
        """Block table int32 [B, pages] on the device, made anew when pages came or went."""
        if self._table is None or self._table[0] != self.pages.version:
            rows = block_table(self.pages.rows)
            flat = self.ints([p for row in rows for p in row], self.device)
            self._table = (self.pages.version, flat.reshape(len(rows), len(rows[0])))
        return self._table[1]

    def _freed(self, page: int) -> None:
        if page < len(self.pool):
            self.pool[page] = 0xFF

    @property
    def batch(self) -> int:
        return len(self.pads)

    def row_length(self, row: int) -> int:
        return max(0, self.length - self.pads[row])

    def _in_sinks(self, row: int) -> int:
        return min(self.sinks, self.row_length(row))

    # writing -----------------------------------------------------------------------------------------------------------
    def set_pads(self, pads: Sequence[int]) -> None:
        """Left padding of each row, before the first token. Raises CacheError later."""
        if self.length or len(pads) != self.batch or any(p < 0 for p in pads):
            raise CacheError(
                f"padding {list(pads)} can't be set",
                where=f"{self.batch} rows, {self.length} columns",
                expected="one count per row, before the first token",
                do="reset the cache first",
            )
        self.pads = list(pads)

    def settle(self, keep: int | None = None) -> None:
        """Move what is older than the window into pages. Only accepted tokens may be here."""
        keep = self.window if keep is None else keep
        r = self.recent.columns
        due: list[tuple[int, int, int]] = []  # row, its first column to leave the window, how many
        for row in range(self.batch):
            stored = self.pages.rows[row].stored
            target = (self.row_length(row) - self.sinks - keep) // self.group * self.group
            if target <= stored:
                continue
            column = self.pads[row] + self.sinks + stored - (self.length - r)
            if column < 0:
                raise IntegrityError(f"row {row} lacks tokens between its pages and its window")
            due.append((row, column, target - stored))
        if not due:
            return
        lo, hi = min(column for _, column, _ in due), max(column + n for _, column, n in due)
        copies: list[Copy] = []
        runs: list[tuple[int, Run]] = []
        full: CacheError | None = None
        for row, column, n in due:
            if self.books[row] is None:
                assert self.make_book is not None
                self.books[row] = self.make_book(self.recent_k[row, :, column:], self.recent_v[row, :, column:])
            try:
                c, u = self.pages.append(row, n, row * (hi - lo) + column - lo)
            except CacheError as e:
                full = e
                break
            copies += c
            runs += [(row, x) for x in u]
        # Also when the pool is full: what was booked is written, so that books and bytes agree.
        if runs:
            self._write(copies, runs, self.recent_k[:, :, lo:hi], self.recent_v[:, :, lo:hi])
            self._trim()
        if full is not None:
            raise full

    def _write(self, copies: list[Copy], runs: list[tuple[int, Run]], k_BNTd: torch.Tensor, v_BNTd: torch.Tensor) -> None:
        if (missing := self.pages.pages_made - len(self.pool)) > 0:
            spare = 0 if len(self.pool) == 0 else max(missing, len(self.pool) // 64) - missing
            self.pool = torch.cat([self.pool, self._blank.expand(missing + spare, -1, -1)])
        for src, dst in copies:
            self.pool[dst] = self.pool[src]
        opened = [u.page for _, u in runs if u.slot == 0]
        if opened:
            self.pool[self.ints(opened, self.device).long()] = self._blank
        count = self.pool.view(torch.int32)[:, :, self.layout.offsets["trailer"][0] // 4 + 2]
        for _, u in runs:
            if u.slot:  # a page cut by a crop still counts what was cut off
                count[u.page].fill_(u.slot)
        flat = lambda x: x.permute(0, 2, 1, 3).flatten(0, 1)  # noqa: E731
        k, v = flat(k_BNTd), flat(v_BNTd)
        for book, rows in self.by_book():
            mine = [u for row, u in runs if row in rows]
            if mine:
                kv_encode(self.pool, k, v, self.ints(mine, self.device), book, self.layout, most=max(u.tokens for u in mine))

    def live(self, row: int) -> int:
        """Tokens of a row in its window."""
        return self.row_length(row) - self._in_sinks(row) - self.pages.rows[row].stored

    def _trim(self) -> None:
        self.recent.keep(max((self.live(b) for b in range(self.batch)), default=0))

    def append(self, k_BNTd: torch.Tensor, v_BNTd: torch.Tensor) -> None:
        """Take T new tokens per row (columns length .. length + T - 1). Raises ShapeError; nothing is taken then."""
        want = (self.batch, self.heads, k_BNTd.shape[2])
        if tuple(k_BNTd.shape) != (*want, self.k_dim) or tuple(v_BNTd.shape) != (*want, self.v_dim):
            rows = f"it holds {self.batch} rows: make a cache for another number of them"
            raise ShapeError(
                f"K {tuple(k_BNTd.shape)} and V {tuple(v_BNTd.shape)}", where="KV cache",
                expected=f"{(*want, self.k_dim)} and {(*want, self.v_dim)}",
                do="give the cache the model it was made for" if len(k_BNTd) == self.batch else rows,
            )
        self.settle()
        T = k_BNTd.shape[2]
        k, v = self.recent.append(k_BNTd if self.basis is None else self.basis.keys(k_BNTd), v_BNTd, self.counts)
        for row, pad in enumerate(self.pads):
            have = self.row_length(row)
            first = max(0, pad - self.length)
            n = min(self.sinks - have, T - first)
            if n > 0:
                self.sink_k[row, :, have : have + n] = k[row, :, first : first + n]
                self.sink_v[row, :, have : have + n] = v[row, :, first : first + n]
        self.length += T
        self._trim()
        if T > DRAFT:
            self.settle(self.window + DRAFT)

    # reading -----------------------------------------------------------------------------------------------------------
    def gather(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """All K [B, N, length, dk] and V as attention sees them; padding is zero."""
        kept = torch.float32 if self.basis else dtype
        out_k = torch.zeros(self.batch, self.heads, self.length, self.k_dim, dtype=kept, device=self.device)
        out_v = torch.zeros(self.batch, self.heads, self.length, self.v_dim or self.layout.k_dim, dtype=dtype, device=self.device)
        latent_v = not self.v_dim
        r = self.recent.columns
        decoded: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for book, rows in self.by_book():
            held = sorted({p for b in rows for p in self.pages.rows[b].pages})
            decoded.update(zip(held, zip(*decode_naive(self.pool[held], book, self.layout), strict=True), strict=True))
        for b, row in enumerate(self.pages.rows):
            pad, s = self.pads[b], self._in_sinks(b)
            live = self.live(b)
            for out, sink, recent in (
                (out_k, self.sink_k, self.recent_k),
                (out_v, self.sink_k if latent_v else self.sink_v, self.recent_k if latent_v else self.recent_v),
            ):
                d = out.shape[-1]
                if live > 0:
                    out[b, :, self.length - live :] = recent[b, :, r - live :, :d]
                if s > 0:
                    out[b, :, pad : pad + s] = sink[b, :, :s, :d]
            for i, page in enumerate(row.pages):
                n = min(PAGE, row.stored - i * PAGE)
                at = pad + self.sinks + i * PAGE
                out_k[b, :, at : at + n], out_v[b, :, at : at + n] = (x[:, :n] for x in decoded[page])
        return (out_k if self.basis is None else self.basis.restore(out_k).to(dtype)), out_v

    # moving ------------------------------------------------------------------------------------------------------------
    def select(self, indices: Sequence[int]) -> None:
        """Rows become rows[i]: beam reorder, repeat, drop, fork. Pages are shared until one of the holders writes."""
        self.pages.select(indices)
        at = self.ints(list(indices), self.device).long()
        self.sink_k, self.sink_v = self.sink_k[at], self.sink_v[at]
        self.recent.select(at)
        self.pads, self.books = [self.pads[i] for i in indices], [self.books[i] for i in indices]

    def crop(self, length: int) -> None:
        """Forget all columns from `length` on.

        Tokens still in FP16 go without a trace. Below the window the pages are cut: what is kept stays as it was encoded (and so does
        the page's factor); where several tokens share a scale and the cut falls between them, CacheError.
        """
        if not 0 <= length <= self.length:
            raise CacheError(
                f"can't crop to {length} columns", where=f"a cache of {self.length}", expected="no more than it holds", do="check the count"
            )
        group = self.layout.format.append_group
        targets = [min(row.stored, max(0, length - self.pads[b] - self.sinks)) for b, row in enumerate(self.pages.rows)]
        for b, (row, target) in enumerate(zip(self.pages.rows, targets, strict=True)):
            if target < row.stored and target % group:
                raise CacheError(
                    f"a crop to {length} columns cuts tokens that share a scale",
                    where=f"row {b}, {row.stored} tokens in pages",
                    expected=f"a cut at a multiple of {group}",
                    do="crop within the window, or use a format with one scale per token",
                )
        for b, target in enumerate(targets):
            self.pages.crop(b, target, group)
        self.recent.crop(self.length - length)
        self.length = length

    def reset(self) -> None:
        """Forget every token and what was counted of them; the pool's memory is given back."""
        for b in range(batch := self.batch):
            self.pages.clear(b)
        self.pages = PageBook(self.pages.limit, evict=self.pages.evict, on_free=self.pages.on_free)
        self.pages.add(batch)
        self.pool = empty_pages(0, self.heads, self.layout, self.device)
        self._table, self.length, self.pads = None, 0, [0] * batch
        self._books(batch)
        self._fp16(batch)
        self.counts.zero_()

    # leaving and coming back -------------------------------------------------------------------------------------------
    def export_row(self, row: int) -> dict[str, torch.Tensor]:
        """Everything one sequence needs elsewhere: its records, FP16 parts, codebook, and what they mean."""
        lay, seq = self.layout, self.pages.rows[row]
        live, r = self.live(row), self.recent.columns
        return {
            "records": self.pool[seq.pages].clone(),
            "sink_k": self.sink_k[row].clone(),
            "sink_v": self.sink_v[row].clone(),
            "recent_k": self.recent_k[row, :, r - live :].clone(),
            "recent_v": self.recent_v[row, :, r - live :].clone(),
            "shape": torch.tensor(
                [LAYOUT_VERSION, lay.k_dim, lay.v_dim, lay.outliers, lay.rope, self.sinks, self.row_length(row), seq.stored]
            ),
            "format": torch.tensor(list(lay.format.name.encode()), dtype=torch.uint8),
            **{f"book_{i}": t for i, t in enumerate(self.books[row] or ())},
            **({} if self.basis is None else {"basis": self.basis.into}),
        }

    def import_row(self, tensors: dict[str, torch.Tensor]) -> None:
        """Fill an empty one-row store from `export_row`. Raises ArtefactError when it was written under another layout or codebook, or is
        damaged; the store is then as it was.
        """
        lay = self.layout
        want = [LAYOUT_VERSION, lay.k_dim, lay.v_dim, lay.outliers, lay.rope, self.sinks]
        parts = ("records", "sink_k", "sink_v", "recent_k", "recent_v", "shape", "format")
        if missing := [name for name in parts if name not in tensors]:
            raise ArtefactError(f"{missing[0]} is missing", where="KV import", expected=", ".join(parts), do="export the row again")
        shape = tensors["shape"].tolist()
        whole = all(f"book_{i}" in tensors for i in range(6))
        book = cast(Book, tuple(tensors[f"book_{i}"].to(self.device) for i in range(6))) if whole else None
        same_book = self._fixed is None or (book is not None and all(torch.equal(a, b) for a, b in zip(self._fixed, book, strict=True)))
        turned = tensors.get("basis")
        same_book &= turned is None if self.basis is None else turned is not None and torch.equal(self.basis.into, turned.to(self.device))
        if len(shape) != 8 or shape[:6] != want or bytes(tensors["format"].tolist()) != lay.format.name.encode() or not same_book:
            raise ArtefactError(
                "a saved sequence of another layout or codebook",
                where="KV import",
                expected=f"{lay.format.name} {want}",
                do="save and load with the same model, format and calibration",
            )
        length, stored = shape[6:]
        records = tensors["records"]
        pages = -(-stored // PAGE)
        if self.batch != 1 or self.length or tuple(records.shape) != (pages, self.heads, lay.page_bytes):
            raise ArtefactError(
                f"records {tuple(records.shape)}",
                where="KV import",
                expected=f"{(pages, self.heads, lay.page_bytes)} into an empty one-row store",
                do="reset the store first",
            )
        live = length - min(self.sinks, length) - stored
        for name, n, d in (("sink_k", self.sinks, self.k_dim), ("sink_v", self.sinks, self.v_dim),
                           ("recent_k", live, self.k_dim), ("recent_v", live, self.v_dim)):  # fmt: skip
            t = tensors[name]
            if t.dtype != torch.float16 or tuple(t.shape) != (self.heads, n, d) or not bool(t.isfinite().all()):
                raise ArtefactError(
                    f"{name} is {t.dtype} {tuple(t.shape)}, or not finite",
                    where="KV import",
                    expected=f"finite FP16 {(self.heads, n, d)}",
                    do="export the row again",
                )
        full = torch.tensor([min(PAGE, stored - i * PAGE) for i in range(pages)], device=records.device)[:, None]
        if records.dtype != torch.uint8 or (pages and bool((tokens_in(records, lay) < full).any())) or (pages and not whole):
            raise ArtefactError("records do not hold what the row counts", where="KV import", do="export the row again")
        _, runs = self.pages.append(0, stored, 0)
        self.pool = torch.cat([self.pool, self._blank.expand(max(0, self.pages.pages_made - len(self.pool)), -1, -1)])
        if runs:
            self.pool[[u.page for u in runs]] = records.to(self.device)
        move = lambda name: tensors[name][None].to(self.device)  # noqa: E731
        self.sink_k, self.sink_v = move("sink_k"), move("sink_v")
        self.recent.fill(move("recent_k"), move("recent_v"))
        self.length = length
        self.books = [self._fixed or book]

    # accounts ----------------------------------------------------------------------------------------------------------
    def held_bytes(self) -> int:
        """Bytes of every storage that this layer's sequences hold, block tables included; the codebook apart (`book_bytes`)."""
        tensors = (self.pool, self.sink_k, self.sink_v)
        return sum(t.untyped_storage().nbytes() for t in tensors) + self.recent.nbytes() + 4 * sum(len(r.pages) for r in self.pages.rows)

    def book_bytes(self) -> int:
        books = {id(b): b for b in (*self.books, self.basis) if b is not None}.values()
        return sum(t.untyped_storage().nbytes() for book in books for t in book)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless books, pages and FP16 parts fit together."""
        self.pages.check_integrity()
        fill = tokens_in(self.pool, self.layout)
        for b, row in enumerate(self.pages.rows):
            live = self.live(b)
            if live < 0 or live > self.recent_k.shape[2]:
                raise IntegrityError(f"row {b}: {live} tokens should be in a window of {self.recent_k.shape[2]}")
            for i, page in enumerate(row.pages):
                if int(fill[page].min()) < min(PAGE, row.stored - i * PAGE):
                    raise IntegrityError(f"row {b}: page {page} holds fewer tokens than its sequence counts")
