"""The law of page bytes, readable, bit for bit what any fused encoder must write. docs/kv.md tells it in words.

Scales are chosen with integers and codes rounded with single IEEE operations, so that every device gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ...kv.format import E2M1, E2M1_MIDPOINTS, GROUP, LAYOUT_VERSION, PAGE, KVFormat, PageLayout

FP16_MAX = 65504.0
TINY = 2.0**-100  # a block below this is zero
ZERO_SCALE = 2.0**-108
EMPTY = -110  # factor exponent of a page without tokens
TOP = 7  # the largest scale of a page lies in [2^TOP, 2^(TOP+1))
BINS, WINDOWS, CANDIDATES = 64, 4, 8  # of `error_table`
SHARES = 256  # the integer weights of a block add up to at most this


@dataclass
class Parts:
    """A batch of records taken apart; X stands for any leading shape. Codes are one uint8 each (fp16: one FP16 each)."""

    k_codes: torch.Tensor  # [X, PAGE, dk], by place; 0 where scales lie
    v_codes: torch.Tensor  # [X, PAGE, dv]
    k_scales: torch.Tensor  # uint8 [X, PAGE, blocks]
    v_scales: torch.Tensor  # uint8 [X, rows, cols]
    k_outliers: torch.Tensor  # fp16 [X, PAGE, O]
    k_rope: torch.Tensor  # fp16 [X, PAGE, rope]
    factor: torch.Tensor  # int32 [X, 2]: exponents of the K and V factors
    fill: torch.Tensor  # int32 [X]: tokens in the page


def clean(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP32 copy with NaN -> 0 and Inf (and all beyond FP16) -> +-65504, and how many of each: (x, saturated, nan), counts int64."""
    x = x.float()
    nan, big = x.isnan(), x.abs() > FP16_MAX
    return x.masked_fill(nan, 0.0).clamp(-FP16_MAX, FP16_MAX), big.sum(), nan.sum()


# scales ----------------------------------------------------------------------------------------------------------------
def round_significand(x: torch.Tensor) -> torch.Tensor:
    """FP32 to four significant bits (E4M3's), ties to even, exponent unbounded; x >= 0 and far from overflow."""
    bits = x.view(torch.int32)
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).view(torch.float32)


def exponent(x: torch.Tensor) -> torch.Tensor:
    """floor(log2 x) of positive normal FP32, as int32."""
    return ((x.view(torch.int32) >> 23) & 0xFF) - 127


def pow2(e: torch.Tensor) -> torch.Tensor:
    """2^e as FP32, exactly, for -126 <= e <= 127."""
    return ((e.to(torch.int32) + 127) << 23).view(torch.float32)


def scale_bytes(scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """E4M3 byte of `scale / 2^factor`: exact in the normal range, truncated below it, at least 1 (2^-9)."""
    e = exponent(scale) - factor + 7
    m = (scale.view(torch.int32) >> 20) & 7
    return torch.where(e >= 1, e.clamp(min=0) * 8 + m, ((8 + m) >> (1 - e).clamp(0, 31)).clamp(min=1)).to(torch.uint8)


def shift_scale_bytes(code: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """The same scales under a factor 2^by larger; shifting twice equals shifting by the sum."""
    c, by = code.to(torch.int32), by.clamp(0, 1000)
    e, m = c >> 3, c & 7
    low = torch.where(e >= 1, (8 + m) >> (by - e + 1).clamp(0, 31), m >> by.clamp(max=31)).clamp(min=1)
    return torch.where(e - by >= 1, c - 8 * by, low).to(torch.uint8)


def scale_values(code: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """FP32 value of stored scale bytes, the page's factor left out."""
    if fmt.scale == "e8m0":
        return pow2(code.to(torch.int32) - 127)
    return code.view(torch.float8_e4m3fn).float()


# blocks ----------------------------------------------------------------------------------------------------------------
@cache
def error_table() -> torch.Tensor:
    """int32 [WINDOWS, BINS, CANDIDATES], 0..255: how badly each of eight scales serves a magnitude.

    For a block with amax in 2^e [1 + w/4, 1 + (w+1)/4) the candidates are the eight scales of four significant bits from
    2^(e-6) (10 + 2w) on: amax / 8 to amax / 3.6. Bin b stands for magnitudes in 2^(e-5) [b, b+1); an entry is their mean squared distance
    from the nearest E2M1 value times the scale, in units of (first scale x last scale) / 128, cut at 255. All integers.
    """
    sub = 32
    u = torch.arange(BINS * sub, dtype=torch.int64) * 2 + 1  # in units of 2^(e-11)
    table = []
    for w in range(WINDOWS):
        i = torch.arange(2 * w + 2, 2 * w + 2 + CANDIDATES)
        scale = (8 + i % 8) * 2 ** (i // 8) * 32
        levels = scale[:, None] * torch.tensor([round(2 * x) for x in E2M1]) // 2
        miss = (u[:, None, None] - levels).abs().amin(-1).square()
        total, unit = miss.view(BINS, sub, CANDIDATES).sum(1), sub * int(scale[0]) * int(scale[-1])
        table.append(((2 * 128 * total + unit) // (2 * unit)).clamp(max=255))
    return torch.stack(table).to(torch.int32)


def _chosen_scale(mag: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The candidate of least weighted error for blocks mag [..., block]; the first on a tie."""
    bits = mag.amax(-1).clamp(min=TINY).view(torch.int32)
    e, window = (bits >> 23) - 127, (bits >> 21) & 3
    table = error_table().to(mag.device).long()
    pairs = table[..., 0::2] | table[..., 1::2] << 16
    bins = (mag * pow2(BINS.bit_length() - 2 - e)[..., None]).to(torch.int64)
    # Two sums share a word, as in a kernel: with weights of more than SHARES together they run into each other, everywhere alike.
    total = (pairs[window[..., None], bins] * weight.to(torch.int64)[..., None]).sum(-2) & 0xFFFFFFFF
    best = torch.stack([total & 0xFFFF, total >> 16], -1).flatten(-2).argmin(-1).to(torch.int32)
    return (((e + 124) << 23) + ((best + 2 * window + 2) << 20)).view(torch.float32)


def _rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E2M1 codes of FP32 x / scale, ties away from zero; a zero keeps its sign. scale 0: only signs.

    With y = |x| / scale, max(2 + 2y, 4y) has its exponent and first significand bit where E2M1 has them, subnormals included.
    """
    v = (x * torch.where(scale > 0, 4.0 / scale, 0.0)).half()
    z = torch.maximum(v.abs() * 0.5 + 2.0, v.abs()).clamp(max=24.0)
    code = (z.view(torch.int16) + 0x100 >> 9) & 7
    return (code | (v.view(torch.int16) >> 12) & 8).to(torch.uint8)


def _nearest(mag: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E2M1 magnitude codes of mag / scale, ties to the even code; all products are exact."""
    code = torch.zeros(mag.shape, dtype=torch.uint8, device=mag.device)
    for i, mid in enumerate(E2M1_MIDPOINTS):
        edge = scale * mid
        code += (mag > edge if i % 2 == 0 else mag >= edge).to(torch.uint8)
    return code


def fp4_blocks(x: torch.Tensor, weight: torch.Tensor, block: int, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise FP32 x[..., n] in blocks along the last axis: (codes uint8 [..., n], scales FP32 [..., ceil(n / block)]).

    `weight` (broadcastable to x; integers of at most SHARES together in a block, see `records.shares`) weighs the squared error by which
    formats with `search` choose a scale.
    """
    n = x.shape[-1]
    pad = -n % block
    x = torch.nn.functional.pad(x, (0, pad)).unflatten(-1, (-1, block))
    mag = x.abs()
    amax = mag.amax(-1)
    zero = amax < TINY
    if fmt.search:
        w = torch.nn.functional.pad(weight.expand(*x.shape[:-2], n), (0, pad)).unflatten(-1, (-1, block))
        scale = _chosen_scale(mag, w)
        code = _rounded(x, scale.masked_fill(zero, 0.0)[..., None])
    else:
        if fmt.scale == "e8m0":
            scale = pow2((exponent(amax.clamp(min=TINY)) - 2).clamp(-126, 127))
        else:
            scale = round_significand(amax * torch.tensor(1 / 6, dtype=torch.float32, device=x.device))
        code = _nearest(mag, scale[..., None]).masked_fill(zero[..., None], 0)
        code += ((x < 0) & (code > 0)).to(torch.uint8) * 8
    return code.flatten(-2)[..., :n], scale.masked_fill(zero, ZERO_SCALE)


def fp4_values(code: torch.Tensor) -> torch.Tensor:
    return torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=torch.float32, device=code.device)[code.long()]


def fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes [..., n] and one power-of-two scale exponent byte [..., 1] per row: the least that keeps amax <= 448."""
    amax = x.abs().amax(-1, keepdim=True).clamp(min=TINY)
    # 448 = 1.75 * 2^8
    above = (amax.view(torch.int32) & 0x7FFFFF) > 0x600000
    e = exponent(amax) - 8 + above.to(torch.int32)
    code = (x * pow2(-e)).to(torch.float8_e4m3fn).view(torch.uint8)
    return code, (e + 127).to(torch.uint8)


# bytes -----------------------------------------------------------------------------------------------------------------
def _byte(lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    return ((hi & 8) << 4) | ((lo & 7) << 4) | ((hi & 7) << 1) | (lo >> 3)


def _nibbles(byte: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ((byte & 1) << 3) | ((byte >> 4) & 7), ((byte >> 7) << 3) | ((byte >> 1) & 7)


def _groups(dim: int) -> list[tuple[int, int]]:
    return [(at, min(GROUP, dim - at)) for at in range(0, dim, GROUP)]


def _token_order(device: torch.device) -> torch.Tensor:
    """tau: byte index 0..63 -> token of the lo nibble."""
    b = torch.arange(GROUP, device=device)
    return b // 16 * 16 + (b % 2) * 8 + b % 16 // 2


def pack_codes(code: torch.Tensor, fmt: KVFormat, *, is_k: bool) -> torch.Tensor:
    """Codes [X, PAGE, d] -> bytes [X, n] of the record part."""
    if fmt.code == "fp16":
        return code.contiguous().flatten(-2).view(torch.uint8)
    if fmt.code == "fp8":
        return (code if is_k else code.mT).flatten(-2)
    if fmt.order == "linear":
        return (code[..., 0::2] | (code[..., 1::2] << 4)).flatten(-2)
    if is_k:
        return torch.cat([_byte(*code[..., at : at + n].chunk(2, -1)) for at, n in _groups(code.shape[-1])], -1).flatten(-2)
    tau = _token_order(code.device)
    return _byte(code[..., tau, :], code[..., GROUP + tau, :]).mT.flatten(-2)


def unpack_codes(data: torch.Tensor, dim: int, fmt: KVFormat, *, is_k: bool) -> torch.Tensor:
    """The inverse of `pack_codes`."""
    if fmt.code == "fp16":
        return data.contiguous().view(torch.float16).unflatten(-1, (PAGE, dim))
    if fmt.code == "fp8":
        return data.unflatten(-1, (PAGE, dim)) if is_k else data.unflatten(-1, (dim, PAGE)).mT
    if fmt.order == "linear":
        data = data.unflatten(-1, (PAGE, dim // 2))
        return torch.stack([data & 15, data >> 4], -1).flatten(-2)
    if is_k:
        data = data.unflatten(-1, (PAGE, dim // 2))
        return torch.cat([torch.cat(_nibbles(data[..., at // 2 : (at + n) // 2]), -1) for at, n in _groups(dim)], -1)
    lo, hi = _nibbles(data.unflatten(-1, (dim, GROUP)).mT)
    back = _token_order(data.device).argsort()
    return torch.cat([lo[..., back, :], hi[..., back, :]], -2)


def unpack(records: torch.Tensor, layout: PageLayout) -> Parts:
    """Take records uint8 [X, page_bytes] apart."""

    def part(name: str) -> torch.Tensor:
        at, size = layout.offsets[name]
        return records[..., at : at + size]

    rows, cols = layout.v_scale_shape
    trailer = part("trailer").contiguous().view(torch.int32)
    k_codes = unpack_codes(part("k_codes"), layout.k_dim, layout.format, is_k=True)
    k_scales = part("k_scales")
    if layout.reserved:
        at = layout.reserved[0]
        k_codes[..., at : GROUP // 2] = 0
        k_codes[..., at + GROUP // 2 : GROUP] = 0
        k_scales = part("k_codes").unflatten(-1, (PAGE, layout.k_scale_row))[..., at : at + layout.k_blocks].flatten(-2)
    return Parts(
        k_codes,
        unpack_codes(part("v_codes"), layout.v_dim, layout.format.v, is_k=False)
        if layout.v_dim
        else records.new_zeros(*records.shape[:-1], PAGE, 0, dtype=torch.float16 if layout.format.code == "fp16" else torch.uint8),
        k_scales.unflatten(-1, (PAGE, layout.k_blocks)),
        part("v_scales").unflatten(-1, (rows, cols)),
        part("k_outliers").contiguous().view(torch.float16).unflatten(-1, (PAGE, layout.outliers)),
        part("k_rope").contiguous().view(torch.float16).unflatten(-1, (PAGE, layout.rope)),
        ((trailer[..., :2] >> 23) & 0xFF) - 127,
        trailer[..., 2],
    )


def pack(parts: Parts, layout: PageLayout) -> torch.Tensor:
    """The inverse of `unpack`; padding is zero."""
    factor = ((parts.factor + 127) << 23).to(torch.int32)
    version = torch.full_like(parts.fill, LAYOUT_VERSION)
    trailer = torch.cat([factor, parts.fill[..., None], version[..., None]], -1).to(torch.int32).contiguous()
    k_codes, k_scales = pack_codes(parts.k_codes, layout.format, is_k=True), parts.k_scales.flatten(-2)
    if layout.reserved:
        at = layout.reserved[0]
        k_codes.unflatten(-1, (PAGE, layout.k_scale_row))[..., at : at + layout.k_blocks] = parts.k_scales
        k_scales = k_scales[..., :0]
    out = torch.cat(
        [
            k_codes,
            pack_codes(parts.v_codes, layout.format.v, is_k=False),
            k_scales,
            parts.v_scales.flatten(-2),
            parts.k_outliers.contiguous().flatten(-2).view(torch.uint8),
            parts.k_rope.contiguous().flatten(-2).view(torch.uint8),
            trailer.view(torch.uint8),
        ],
        -1,
    )
    return torch.nn.functional.pad(out, (0, layout.page_bytes - out.shape[-1]))


def empty_pages(n: int, heads: int, layout: PageLayout, device: torch.device | str = "cpu") -> torch.Tensor:
    """uint8 [n, N, page_bytes] without tokens."""
    out = torch.zeros(n, heads, layout.page_bytes, dtype=torch.uint8, device=device)
    at, size = layout.offsets["trailer"]
    words = torch.tensor([(EMPTY + 127) << 23, (EMPTY + 127) << 23, 0, LAYOUT_VERSION], dtype=torch.int32, device=device)
    out[..., at : at + size] = words.view(torch.uint8)
    return out
