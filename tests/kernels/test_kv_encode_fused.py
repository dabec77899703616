"""The fused encoder writes the bytes of the naive law: one by one, in chunks, with values no model should have."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache, partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from moe_prefetch.kernels.kv_encode import fused
from moe_prefetch.kernels.kv_encode import naive as law
from moe_prefetch.kernels.kv_encode.fused_elements import _byte, _codes, _scales, table_on
from moe_prefetch.kernels.kv_encode.naive import empty_pages, fp4_blocks
from moe_prefetch.kernels.kv_encode.records import Book, arranged, book_shares, encode_naive, runs_for, shares
from moe_prefetch.kv.format import FORMATS, PAGE, PageLayout

from .gluon_cpu import Launch, Pointer, Tensor, unwrap

if fused.GLUON:
    from moe_prefetch.kernels.kv_encode import assembly, fused_pages, fused_stores, fused_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def book_of(layout: PageLayout, heads: int) -> Book:
    d, rand = layout.k_dim, lambda: torch.randn(heads, layout.k_dim).abs() + 0.2
    channels = torch.stack([torch.randperm(d)[: layout.outliers].sort().values for _ in range(heads)]).to(torch.int32)
    if layout.outliers > 2:
        channels[0, -1] = -1
    channels = arranged(channels, layout)
    k_weight, v_weight = book_shares(channels, rand(), rand(), layout)
    return tuple(x.to(DEVICE) for x in (channels, torch.randn(heads, d), rand(), k_weight, rand(), v_weight))


def tokens(n: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Loud and quiet tokens, a zero one, and one of NaN, Inf, denormals and signed zeros."""
    x = torch.randn(n, heads, dim) * torch.exp2(torch.randint(-8, 9, (n, 1, 1)).float())
    x[-1] = 0
    x[0, 0, :6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-40, -0.0, 7e4])
    return x.to(dtype).to(DEVICE)


CASES = [
    ("fp4-quality", 128, 8, [1] * 4, torch.bfloat16),
    ("fp4-72", 64, 1, [126, 1, 1, 1], torch.float16),
    ("fp4-quality", 128, 8, [20, 110], torch.bfloat16),
    ("fp4-72", 64, 0, [63, 66], torch.float32),
    ("fp4-quality", 64, 16, [129], torch.bfloat16),
]
# layouts with room for scales of their own
GLUON = [("fp4-quality", 128, 6, [20, 110], torch.bfloat16), ("fp4-quality", 64, 3, [129], torch.bfloat16), CASES[1]]
LONG = ("fp4-72", 128, 3, [128, 200], torch.bfloat16)


def assert_law(name: str, dim: int, outliers: int, chunks: list[int], dtype: torch.dtype) -> None:
    heads, layout = 2, PageLayout(FORMATS[name], dim, dim, outliers)
    book = book_of(layout, heads)
    count = -(-sum(chunks) // PAGE)
    pages = torch.randperm(count).tolist()
    law = empty_pages(count, heads, layout, DEVICE)
    ours, at = law.clone(), 0
    for n in chunks:
        runs = torch.tensor(runs_for(pages, at, n, 0), dtype=torch.int32, device=DEVICE)
        k, v = tokens(n, heads, dim, dtype), tokens(n, heads, dim, dtype)
        want = encode_naive(law, k, v, runs, book, layout)
        got = fused.encode(ours, k, v, runs, book, layout, most=int(runs[:, 3].max()))
        at += n
        parts = {part: int((law != ours)[..., a : a + size].sum()) for part, (a, size) in layout.offsets.items()}
        assert torch.equal(law, ours), f"bytes that differ: {parts}"
        assert torch.equal(want, got)


@pytest.mark.parametrize("case", CASES)
def test_bytes_equal_the_law(case: tuple[str, int, int, list[int], torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "PAGES", False)
    assert_law(*case)


class Assembly:
    """What the assembly of fused_tiles.py and fused_stores.py does; a program's shared memory is at 0."""

    def __init__(self) -> None:
        self.shared = torch.full((4 * 256, 8), float("nan"))
        # from what is kept for a program's head on
        self.words = torch.full((1440,), 0x7FC00000, dtype=torch.int32)

    def slots(self, at: Tensor) -> torch.Tensor:
        assert (at.v % 16 == 0).all() and (at.v >= fused_tiles.STAGE.value).all()
        return (at.v - fused_tiles.STAGE.value) // 16

    def __call__(self, text: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
        if text.startswith("mov.b32 $0, $3"):
            return tuple(args)
        if "mad.lo.s32 t, $2, -8" in text:
            return Tensor(law.scale_bytes(args[0].v.contiguous().view(torch.float32), torch.as_tensor(unwrap(args[1]))).int())
        if "ld.global.cg.v2" in text:
            return 0
        if "redux.sync.max" in text:
            self.most = int(args[0].v.max())
            return 0
        if "bar.sync" in text:
            return Tensor(torch.tensor(self.most))
        if text.startswith("ld.global.cg.v4"):
            p = args[0]
            return tuple(Tensor(p.base.view(-1)[int(p.at) + i]) for i in range(4))
        if "cp.async.cg" in text:
            to, source, step, first, count = self.slots(args[0]), args[1], int(args[2]), args[3], int(args[4])
            # of the two tokens of a lane, in bytes
            assert ((source.at[1::2] - source.at[::2]) * 2 == step).all()
            on = ((first.v >= 0) & (first.v < count)).expand(64, 4)
            for half in (0, 1):
                at = torch.where(on, torch.as_tensor(source.at) + 32 * half, 0)[..., None] + torch.arange(8)
                self.shared[to + 256 * half] = torch.where(on[..., None], source.base.view(-1)[at].float(), 0.0)
            return 0
        if text.startswith("st.shared.b32"):
            self.words[(args[0].v - fused_tiles.KEPT.value) // 4] = args[1].v
            return 0
        if "redux.sync.min" in text:
            at = (int(args[0]) - fused_tiles.KEPT.value) // 4
            least = self.words[at + 4 : at + 4 + (128 if "[l+272]" in text else 64)].view(torch.float32).min()
            self.words[at] = least.view(torch.int32)
            return 0
        if text.startswith("st.shared.v2"):
            self.kept = [y.v for y in args[1:]]
            return 0
        if text.startswith("ld.shared.v2"):
            return tuple(Tensor(y) for y in self.kept)
        if text.startswith("ld.shared.v4"):
            words = self.words[(args[0].v[..., None] - fused_tiles.KEPT.value) // 4 + torch.arange(8)]
            words = words.view(torch.float32) if "v4.f32" in text else words
            return tuple(Tensor(y) for y in words.unbind(-1))
        if "max.NaN.f32 encode_most, encode_most" in text:
            blocks = 1 if "shfl.sync.bfly.b32 g" in text else 2
            mag = by_block(torch.stack([y.v.expand(64, 4) for y in args[:16]], -1).abs(), blocks).amax(-1)
            self.loud = max(self.loud, mag.amax().nan_to_num(torch.inf).item())
            return Tensor(own(mag, blocks))
        if text.startswith("mov.f32 encode_most"):
            self.loud = 0.0
            return 0
        if "setp.geu.f32 p, encode_most" in text:
            limit = self.words[(int(args[0]) - fused_tiles.KEPT.value) // 4].view(torch.float32)
            return Tensor(torch.tensor(int(self.loud >= limit)))
        if "setp.gtu.f32 r" in text:
            x, *counts = law.clean(args[0].v)
            args[2].base.view(-1).add_(torch.stack(counts))
            return Tensor((x - args[1].v).clamp(-law.FP16_MAX, law.FP16_MAX).half().view(torch.int16).int())
        if "ld.shared.v4" in text:
            at = self.slots(args[0])
            return tuple(Tensor(y) for y in torch.cat([self.shared[at], self.shared[at + 256]], -1).unbind(-1))
        if "ld.global.cg.v4" in text:
            source, on = args[0], args[1].v.expand(64, 4)[..., None] != 0
            at = torch.where(on, torch.as_tensor(source.at)[..., None], 0) + torch.tensor([*range(8), *range(32, 40)])
            x = torch.where(on, source.base.view(-1)[at].float(), 0.0)
            gain = torch.stack([y.v.expand(64, 4) for y in args[3:]], -1)
            args[2].base.view(-1).add_(torch.stack(law.clean(torch.where(gain != 0, x, 0.0))[1:]))
            return tuple(Tensor(y) for y in law.clean(x)[0].unbind(-1))
        x = [Tensor(torch.as_tensor(unwrap(y))) if not isinstance(y, Pointer) else y for y in args]
        if any(word in text for word in (".shared .align", "cp.async", "%laneid", "griddepcontrol", "prefetch")):
            return 0
        if "mma.sync" in text:
            return chosen(x, len(dtype) - 1)
        if "min.xorsign" in text:
            code = torch.stack([rounded(y.v, x[8].v) for y in x[:8]], -1).long()
            # 1 is added to a byte when it finds its place; bit 0 is anything
            junk = torch.where(code & 7 == 0, 1, torch.randint(0, 2, code.shape))
            words = ((code >> 3 << 7 | ((code & 7) << 1 | junk) - 1).unflatten(-1, (2, 4)) << torch.arange(0, 32, 8)).sum(-1)
            return Tensor(to_int32(words[..., 0])), Tensor(to_int32(words[..., 1]))
        a, b = (y.v.long() & 0xFFFFFFFF for y in x)
        if "0x70707070" in text:
            both = ((a + 0x01010101) << 3 & 0x70707070) | (b + 0x01010101 & 0x8E8E8E8E) | (a >> 7 & 0x01010101)
            return Tensor(to_int32(both))
        if "0x71717171" in text:
            return Tensor(to_int32((a & 0x71717171) | (b + 0x01010101 & 0x8E8E8E8E)))
        assert "0x5140" in text
        pick = lambda i: (a >> 8 * i & 0xFF) | (b >> 8 * i & 0xFF) << 8  # noqa: E731
        return Tensor(to_int32(pick(0) | pick(1) << 16)), Tensor(to_int32(pick(2) | pick(3) << 16))


def chosen(x: list[Tensor], blocks: int) -> tuple[Tensor, ...]:
    """4 / scale of every block of a row, and the scales as lanes have them, from 16 numbers a lane and weights in the byte of a row."""
    byte = torch.arange(64)[:, None] // 2 % 4 * 8
    words = torch.stack([y.v.expand(64, 4) for y in x[19:35]], -1)
    weight = words >> byte[..., None] & 0xFF
    assert (weight << byte[..., None] == words).all()
    turn = partial(by_block, blocks=blocks)
    mag = turn(torch.stack([y.v for y in x[:16]], -1).abs())
    # of numbers beyond FP16 and of none comes anything: their page is coded anew
    mag = torch.where(mag < 1e30, mag, torch.rand(()))
    zero = mag.amax(-1) < law.TINY
    scale = law._chosen_scale(mag, turn(weight))
    inverse = torch.where(zero, 0.0, 4.0 / scale)
    bits = scale.masked_fill(zero, law.ZERO_SCALE).view(torch.int32)
    return *(Tensor(inverse[:, h : h + 1].expand(64, 4)) for h in range(blocks)), Tensor(own(bits, blocks))


def by_block(y: torch.Tensor, blocks: int) -> torch.Tensor:
    """Sixteen channels each of four lanes, by block."""
    return y.unflatten(-1, (blocks, -1)).transpose(1, 2).flatten(-2)


def own(y: torch.Tensor, blocks: int) -> torch.Tensor:
    """What each lane has of a row's blocks [64, blocks]."""
    lane = torch.arange(4)
    return y.unflatten(0, (32, 2))[:, lane // 2, lane % blocks].repeat_interleave(2, 0)


def to_int32(x: torch.Tensor) -> torch.Tensor:
    return (x & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def rounded(x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """`naive._rounded` with 4 / scale given."""
    v = (x * inverse).half()
    z = torch.maximum(v.abs() * 0.5 + 2.0, v.abs()).clamp(max=24.0)
    return (z.view(torch.int16) + 0x100 >> 9) & 7 | (v.view(torch.int16) >> 12) & 8


def use_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "PAGES", True)
    if DEVICE == "cpu":
        names = {"assembly": assembly, "cache": cache, "torch": torch}
        kernel = Launch("encode_pages", fused_tiles.__file__, fused_stores.__file__, fused_pages.__file__, asm=Assembly(), names=names)
        monkeypatch.setattr(fused_pages, "encode_pages", kernel)
        monkeypatch.setattr(fused_pages, "programs_on", lambda device: 9)


@pytest.mark.skipif(not fused.GLUON, reason="this version of Triton takes the kernel in Triton")
@pytest.mark.parametrize("case", [*GLUON, LONG])
def test_tensor_cores_write_the_law(case: tuple[str, int, int, list[int], torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    use_gluon(monkeypatch)
    assert_law(*case)


@pytest.mark.skipif(not fused.GLUON, reason="this version of Triton takes the kernel in Triton")
def test_runs_without_tokens_touch_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between runs that have some; what their pages hold is another's."""
    use_gluon(monkeypatch)
    layout = PageLayout(FORMATS["fp4-72"], 64, 64, 1)
    book, x, y = book_of(layout, 2), tokens(200, 2, 64, torch.bfloat16), tokens(200, 2, 64, torch.bfloat16)
    runs = torch.tensor([[3, 0, 0, 0], [0, 0, 0, 128], [3, 9, 7, 0], [2, 0, 128, 72], [3, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    law_pool = empty_pages(4, 2, layout, DEVICE)
    law_pool[3] = torch.randint(0, 256, law_pool[3].shape, dtype=torch.uint8)
    ours = law_pool.clone()
    encode_naive(law_pool, x, y, runs[runs[:, 3] > 0], book, layout)
    fused.encode(ours, x, y, runs, book, layout)
    assert torch.equal(law_pool, ours)


@triton.jit
def blocks(x_ptr, w_ptr, byte_ptr, scale_ptr, table_ptr, X: tl.constexpr, BLOCK: tl.constexpr):
    at = (tl.program_id(0) * X + tl.arange(0, X))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at)
    scale, inverse = _scales((x,), (tl.load(w_ptr + at),), table_ptr, 0, False)
    code = _codes(x, inverse)
    tl.store(byte_ptr + at, _byte(code, code))
    tl.store(scale_ptr + tl.program_id(0) * X + tl.arange(0, X), scale)


@pytest.mark.parametrize(("block", "count"), [(32, 1 << 16), (64, 1 << 15)])
def test_scales_and_codes_of_random_blocks_equal_the_law(block: int, count: int) -> None:
    """10^5 blocks of every loudness, from below the smallest scale up, with ties, zeros and one-number blocks among them."""
    x = torch.randn(count, block) * torch.exp2(torch.randint(-110, 17, (count, 1)).float())
    x[::3] = x[::3].bfloat16().float()
    # multiples of a quarter of a scale: many ties
    x[1::3] = (x[1::3] / x[1::3].abs().amax(-1, keepdim=True) * 24).round() * torch.exp2(torch.randint(-40, 10, (len(x[1::3]), 1)).float())
    x[::97] *= torch.rand(len(x[::97]), block) < 0.1
    w = shares(torch.rand(count, block) ** 3 + 0.01, block)
    x, w = x.to(DEVICE), w.to(DEVICE)
    byte = torch.empty(count, block, dtype=torch.uint8, device=DEVICE)
    scale = torch.empty(count, device=DEVICE)
    rows = 1024
    blocks[(count // rows,)](x, w.to(torch.int32), byte, scale, table_on(x.device), X=rows, BLOCK=block, enable_fp_fusion=False)
    code, want = fp4_blocks(x, w, block, FORMATS["fp4-72"])
    assert torch.equal(scale, want[..., 0])
    assert torch.equal((byte >> 7 << 3) | (byte >> 1 & 7), code)
    assert torch.equal((byte & 1) << 3 | (byte >> 4 & 7), code)


def test_no_runs_write_nothing() -> None:
    layout = PageLayout(FORMATS["fp4-72"], 64, 64, 1)
    pool = empty_pages(1, 1, layout, DEVICE)
    before = pool.clone()
    none = torch.zeros(0, 1, 64, device=DEVICE)
    counts = fused.encode(pool, none, none, torch.zeros(0, 4, dtype=torch.int32, device=DEVICE), book_of(layout, 1), layout)
    assert torch.equal(pool, before)
    assert counts.tolist() == [0, 0]


def test_serves_what_it_can_write() -> None:
    assert fused.serves(PageLayout(FORMATS["fp4-72"], 128, 128, 4))
    for name, k, v, rope in (
        ("fp8", 128, 128, 0),
        ("nvfp4", 64, 64, 0),
        ("fp4-72", 80, 80, 0),
        ("fp4-72", 512, 0, 64),
    ):
        assert not fused.serves(PageLayout(FORMATS[name], k, v, 0, rope))


COMPILE = """
import re
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moe_prefetch.kernels.kv_encode import fused
from moe_prefetch.kernels.kv_encode import naive as law
from moe_prefetch.kv.format import FORMATS, PageLayout
dim, outliers = 64, 4
layout = PageLayout(FORMATS["fp4-quality"], dim, dim, outliers)
at = {k: v[0] for k, v in layout.offsets.items()}
constants = dict(N=8, D=dim, OUT=outliers, OUTP=4, PAGE_BYTES=layout.page_bytes, V_AT=at["v_codes"], KS_AT=at["k_scales"],
                 VS_AT=at["v_scales"], KO_AT=at["k_outliers"], TRAILER_AT=at["trailer"], PDL=True,
                 SWAPS=len(layout.reserved), KS_ROW=layout.k_scale_row)
types = {"pool_ptr": "*u8", "k_ptr": "*bf16", "v_ptr": "*bf16", "counts_ptr": "*i64"} | dict.fromkeys(
    ("runs_ptr", "channels_ptr", "table_ptr", "ready_ptr", "out_ptr"), "*i32")
for name in sys.argv[1:]:
    kernel = getattr(fused, name)
    used = {k: v for k, v in constants.items() if k in kernel.arg_names}
    sig = {n: "constexpr" if n in used else types.get(n, "*fp32") for n in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n.endswith("_ptr")}
    pages = name == "encode_pages"
    options = {"num_warps": 4 if pages else 1, "enable_fp_fusion": False} | ({"maxnreg": fused.REGISTERS} if pages else {})
    source = ASTSource(fn=kernel, signature=sig, constexprs=used, attrs=attrs)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = done.asm["ptx"]
    print(name, len(done.asm["cubin"]) > 0, len(re.findall("ld.shared.v4.b32", ptx)) >= 4 * dim, len(re.findall("fma.rn.f16x2", ptx)) > 0)
"""


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["prepare_book", "count_nothing", "append_one"],
         ["prepare_book True False False", "count_nothing True False False", "append_one True False True"]),
        pytest.param(["encode_pages"], ["encode_pages True True True"], marks=pytest.mark.nightly),
    ],
)
def test_compiles_for_hopper_without_a_gpu(names: list[str], said: list[str]) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE, *names], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == said
