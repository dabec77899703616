"""What a page of the KV cache is, byte by byte: the one description that allocator, codec, kernels, files and reports share.

A page holds PAGE tokens of one KV head as one contiguous record; docs/kv.md draws it. No torch here.
E2M1, E4M3: OCP Microscaling Formats v1.0 and OCP 8-bit Floating Point v1.0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, Literal

from ..errors import ArtefactError, ConfigError, ShapeError

LAYOUT_VERSION = 4
PAGE = 128  # tokens of one KV head in a page
GROUP = 64  # channels (K) or tokens (V) whose two halves share bytes: low nibbles the first half, high nibbles the second
MAX_OUTLIERS = 16  # K channels in FP16: one MMA step of the decode kernel
OUTLIER_STEPS = (1, 2, 3, 4, 6, 8, 12, 16)  # what budgets grant
ALIGN = 128  # bytes: a cache line; records that straddle lines are read at three quarters of the rate
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Exact midpoints. A tie goes to the even code: below midpoint i lies code i, so ties at even i stay, at odd i rise.
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How elements become bits: K's and V's, or K's alone where V has a format of its own (a pair, made by `format_of`).

    code       fp16 | fp8 (E4M3) | fp4 (E2M1)
    block      channels that share a scale along head_dim (0: none; -1: the whole row of one token)
    scale      none | e4m3 (times the page's FP32 factor) | e8m0 (factor 1)
    order      planes: permuted bytes for the decode kernel, V channel-major | linear: channel 2j low nibble, 2j+1 high, both token-major
    v_axis     token: a V scale serves `v_group` channels of one token | channel: it serves `v_group` tokens of one channel
    v_group    (-1: the whole row; 0 in a pair, whose `values` say)
    search     the scale of least weighted error among eight, and ties away from zero; else amax / 6 (e8m0: 2^(floor(log2 amax) - 2)) and
               ties to even
    max_bits   outlier channels of K are granted while bits per element at 32k, with V alike, stay within this (None: none are)
    max_share  and while the FP16 share of K and V elements stays within this
    window     most recent tokens that stay in FP16 where the user names no number
    values     V's format in a pair (None: as K)
    """

    name: str
    code: Literal["fp16", "fp8", "fp4"]
    block: int = 32
    scale: Literal["none", "e4m3", "e8m0"] = "e4m3"
    order: Literal["planes", "linear"] = "planes"
    v_axis: Literal["token", "channel"] = "token"
    v_group: int = 32
    search: bool = False
    max_bits: float | None = None
    max_share: float = 0.05
    window: int = 64
    values: KVFormat | None = None

    @property
    def k(self) -> KVFormat:
        """The registered format that K has."""
        return self if self.values is None else FORMATS[self.name.partition("+")[0]]

    @property
    def v(self) -> KVFormat:
        """The format that V has: what all that concerns V goes by."""
        return self.values or self

    @property
    def has_book(self) -> bool:
        """Whether K or V is coded by a codebook that a calibration or a prompt makes."""
        return self.max_bits is not None or self.v.max_bits is not None

    @property
    def promise(self) -> float | None:
        """Bits per element at 32k that it stays within as it comes; a pair promises none."""
        return self.max_bits if self.values is None else None

    @property
    def append_group(self) -> int:
        """Tokens that must leave the window together: a scale over several tokens needs all of them."""
        return self.v.v_group if self.v.v_axis == "channel" else 1

    def window_or(self, window: int | None) -> int:
        """That window, or the format's own."""
        return self.window if window is None else window


FORMATS: dict[str, KVFormat] = {
    f.name: f
    for f in (
        KVFormat("fp16", "fp16", block=0, scale="none", order="linear"),
        KVFormat("fp8", "fp8", block=-1, scale="e8m0", v_group=-1),
        KVFormat("fp4-72", "fp4", v_group=64, search=True, max_bits=4.48),
        KVFormat("fp4-quality", "fp4", v_group=64, search=True, max_bits=4.85, window=1024),
        # V scales over 64 tokens of a channel: an alternative for kernels with many query heads per KV head; measured worse per bit.
        KVFormat("fp4-72-c64", "fp4", v_axis="channel", v_group=64, search=True, max_bits=4.48),
        KVFormat("fp4-quality-c64", "fp4", v_axis="channel", v_group=64, search=True, max_bits=4.85),
        KVFormat("nvfp4", "fp4", block=16, v_group=16, order="linear"),
        KVFormat("mxfp4", "fp4", scale="e8m0", order="linear"),
    )
}


@cache
def format_of(name: str) -> KVFormat:
    """The format of that name, or a pair, such as `fp8+fp4-72`: K's format and V's, two different ones. A pair keeps the longer window of
    both, and the outlier channels that K's own budget grants. Raises ConfigError for a name that is neither.
    """
    k, plus, v = name.partition("+")
    if k not in FORMATS or (plus and (v not in FORMATS or v == k)):
        raise ConfigError(
            f"{name!r} is no KV format",
            where="kv.format",
            expected=f"{' | '.join(FORMATS)}, or two different ones, K's + V's, such as fp8+fp4-72",
            do="choose one of them",
        )
    if not plus:
        return FORMATS[k]
    keys, values = FORMATS[k], FORMATS[v]
    return replace(keys, name=name, v_group=0, window=max(keys.window, values.window), values=values)


def _div_up(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class PageLayout:
    """Byte offsets of one record; sizes follow from `format`, the head dims and the number of FP16 outlier channels.

    k_dim, v_dim  head dims of K and V; v_dim 0 means that V is K's own codes (MLA: the latent)
    outliers      K channels kept in FP16 beside the codes (their codes are 0, or lie where scales do: `reserved`)
    rope          further K channels that live in FP16 only and have no slot (MLA: the rotary part)
    Raises ShapeError for a shape that no kernel of ours reads.
    """

    format: KVFormat
    k_dim: int
    v_dim: int
    outliers: int = 0
    rope: int = 0

    def __post_init__(self) -> None:
        for what, dim in (("k_dim", self.k_dim), ("v_dim", self.v_dim)):
            if dim % 16 or dim < (16 if what == "k_dim" else 0):
                raise ShapeError(
                    f"{what} {dim} can't be stored", expected="a positive multiple of 16", do="keep this layer in the host's own cache"
                )
        if not 0 <= self.outliers <= min(self.k_dim, MAX_OUTLIERS) or self.rope < 0 or self.rope % 2:
            raise ShapeError(
                f"{self.outliers} outlier and {self.rope} rotary channels beside head dim {self.k_dim}",
                expected=f"at most {MAX_OUTLIERS} outliers within the head dim, an even number of rotary channels",
                do="lower kv.outliers",
            )
        if self.outliers and self.format.max_bits is None:
            raise ShapeError(f"format {self.format.name} has no outlier channels", expected="outliers = 0", do="choose an fp4-* format")
        if not self.v_dim and self.format.values:
            raise ShapeError(
                f"a latent is K and V at once: it can't be {self.format.name}", where="MLA", expected="one format", do="drop the + and V's"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "version": LAYOUT_VERSION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Raises ArtefactError: of another version's pages only the shapes would be told from these."""
        found = state.get("version", "older than 4")
        if found != LAYOUT_VERSION:
            raise ArtefactError(f"pages of layout version {found}", where="a pickled KV cache", expected=f"version {LAYOUT_VERSION}",
                                do="make the cache anew from its tokens")  # fmt: skip
        self.__dict__.update({k: v for k, v in state.items() if k != "version"})

    def _code_bytes(self, dim: int, code: str) -> int:
        return PAGE * dim * {"fp16": 16, "fp8": 8, "fp4": 4}[code] // 8

    def _blocks(self, dim: int) -> int:
        f = self.format
        return 0 if f.scale == "none" or dim == 0 else 1 if f.block == -1 else _div_up(dim, f.block)

    @property
    def k_blocks(self) -> int:
        """Scales of one token's K row; a head dim that is no multiple of the block ends in a shorter one."""
        return self._blocks(self.k_dim)

    @cached_property
    def reserved(self) -> tuple[int, ...]:
        """Places among a token's K codes that hold its scales, where enough outlier channels leave theirs: two a scale, the last bytes
        of the first group. `channels[o]` of a codebook and channel `reserved[o]` change places (`records.arranged`).
        """
        n, half = self.k_blocks, GROUP // 2
        planes = self.format.code == "fp4" and self.format.order == "planes"
        found = planes and self.v_dim and self.k_dim >= GROUP and self.outliers >= 2 * n
        return (*range(half - n, half), *range(GROUP - n, GROUP)) if found else ()

    @property
    def k_scale_row(self) -> int:
        """Bytes from one token's K scales to the next one's."""
        return self.k_dim // 2 if self.reserved else self.k_blocks

    @property
    def v_scale_shape(self) -> tuple[int, int]:
        """Shape of the V scales: [PAGE, blocks] per token, [v_dim, PAGE // v_group] per channel."""
        f = self.format.v
        if f.scale == "none" or not self.v_dim:
            return 0, 0
        if f.v_axis == "channel":
            return self.v_dim, PAGE // f.v_group
        return PAGE, 1 if f.v_group == -1 else _div_up(self.v_dim, f.v_group)

    @cached_property
    def offsets(self) -> dict[str, tuple[int, int]]:
        """Part name -> (first byte, bytes), in the order of the record; scales among the codes have no bytes of their own."""
        rows, cols = self.v_scale_shape
        sizes = {
            "k_codes": self._code_bytes(self.k_dim, self.format.code),
            "v_codes": self._code_bytes(self.v_dim, self.format.v.code),
            "k_scales": 0 if self.reserved else PAGE * self.k_blocks,
            "v_scales": rows * cols,
            "k_outliers": PAGE * self.outliers * 2,
            "k_rope": PAGE * self.rope * 2,
            "trailer": 16,
        }
        out, at = {}, 0
        for part, size in sizes.items():
            out[part] = (at, size)
            at += size
        if self.reserved:
            out["k_scales"] = (self.reserved[0], 0)
        return out

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one record, padding included: the only place where this number is made."""
        first, size = self.offsets["trailer"]
        return _div_up(first + size, ALIGN) * ALIGN

    @property
    def element_count(self) -> int:
        """K and V elements of one token and head that the record stands for (an MLA latent is counted once)."""
        return self.k_dim + self.v_dim + self.rope

    @property
    def outlier_share(self) -> float:
        return self.outliers / (self.k_dim + self.v_dim)

    def recent_capacity(self, window: int, draft: int = 1) -> int:
        """FP16 slots a sequence needs for its window while `draft` tokens are under way."""
        return window + self.format.append_group - 1 + draft

    @property
    def book_bytes(self) -> int:
        """Bytes of one head's codebook: channels, means, gains, weights. Once per model, or per sequence when made from its prompt."""
        return 4 * (self.outliers + 3 * self.k_dim + 2 * self.v_dim) if "fp4" in (self.format.code, self.format.v.code) else 0

    @property
    def basis_bytes(self) -> int:
        """Bytes of one head's basis (kv/basis.py), where a calibration brings one: once per cache, whatever its sequences hold."""
        return 6 * self.k_dim * self.k_dim

    def held_bytes(self, tokens: int, sinks: int, window: int, draft: int = 1) -> int:
        """Bytes one sequence holds in one KV head: pages, sinks, window, block table. The formula that storage is measured against."""
        fp16 = 2 * (sinks + self.recent_capacity(window, draft)) * self.element_count
        stored = max(0, tokens - sinks - window)
        pages = _div_up(stored // self.format.append_group * self.format.append_group, PAGE)
        return pages * (self.page_bytes + 4) + fp16

    def bits_per_element(self, tokens: int = 32768, sinks: int = 4, window: int | None = None, basis: bool = False) -> float:
        """Bits per K or V element with everything counted: codes, scales, factors, outliers, padding, sinks, window (None: the format's
        own), tables, and a codebook; with `basis` that of a cache of one sequence, too.
        """
        once = self.book_bytes + (self.basis_bytes if basis else 0)
        return (self.held_bytes(tokens, sinks, self.format.window_or(window)) + once) * 8 / (tokens * self.element_count)


def layout_for(
    format: KVFormat, k_dim: int, v_dim: int, *, outliers: int | None = None, rope: int = 0, sinks: int = 4, window: int | None = None
) -> PageLayout:
    """The layout of a format at these head dims; without `outliers` the most that its budget grants beside those sinks and that window
    (None: the format's own); in a pair, as K's format would get for both.
    """
    plain = PageLayout(format, k_dim, v_dim, 0, rope)
    if outliers is not None:
        return replace(plain, outliers=outliers)
    if format.max_bits is None or not v_dim:
        return plain
    best = plain
    for n in (n for n in OUTLIER_STEPS if n <= k_dim):
        trial = PageLayout(format.k, k_dim, v_dim, n, rope)
        bits = trial.bits_per_element(sinks=sinks, window=format.window_or(window))
        # not the first that does not fit: with more, scales may need no bytes of their own
        if bits <= format.max_bits and trial.outlier_share <= format.max_share:
            best = replace(plain, outliers=n)
    return best


def capacity(
    layouts: list[PageLayout], heads: int, *, budget_bytes: int, tokens: int, reserved: int, sinks: int = 4, window: int | None = None
) -> dict[str, float]:
    """Two capacity figures that must never be quoted as each other.

    `layouts` one per layer; one of MLA (no V) keeps one latent for all `heads`. Returns bytes per token, and how many sequences of
    `tokens` fit in `budget_bytes` here, in paged FP16, and in FP16 reserved at `reserved` tokens a sequence, with the two ratios.
    """
    kept = [(heads if x.v_dim else 1, x) for x in layouts]
    ours = sum(n * x.held_bytes(tokens, sinks, x.format.window_or(window)) for n, x in kept)
    row = 2 * sum(n * x.element_count for n, x in kept)
    paged = row * _div_up(tokens, PAGE) * PAGE
    fit, fit_paged, fit_reserved = (budget_bytes // x for x in (ours, paged, row * reserved))
    return {
        "bytes_per_token": ours / tokens,
        "fp16_bytes_per_token": float(row),
        "sequences": float(fit),
        "sequences_paged_fp16": float(fit_paged),
        "sequences_reserved_fp16": float(fit_reserved),
        "ratio_vs_paged_fp16": paged / ours,
        "ratio_vs_reserved_fp16": row * reserved / ours,
    }
