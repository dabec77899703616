"""What the kernels over records do with single elements: table entries, numbers of every type, decoding in registers.

Inline assembly and half of the casts do not work under Triton's interpreter; there the same numbers are made by other means.
"""
from __future__ import annotations

import triton
import triton.language as tl

from ..kv_fp4.fused import ASM

PLAIN, FP8, MX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NONE, FP32, BF16, FP16, E8M0 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)


@triton.jit
def entry(where_ptr, e):
    """The address in a table entry, with acquire order: what the publisher wrote before it is seen too."""
    at = where_ptr + e
    if ASM:
        address = tl.inline_asm_elementwise("ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [at], dtype=tl.int64, is_pure=False, pack=1)
    else:
        address = tl.load(at)
    return address


@triton.jit
def part(address, AT: tl.constexpr, TYPE: tl.constexpr):
    """Pointer to a part of the record. Parts start at multiples of 128 bytes."""
    return tl.multiple_of((address + AT).to(tl.pointer_type(TYPE)), 128)


@triton.jit
def to_l2(start, SIZE: tl.constexpr, last):
    """Ask for SIZE bytes from address `start` on to be brought to L2, none of them beyond address `last`."""
    if ASM:
        for i in tl.static_range(0, SIZE, 128 * 128):
            at = tl.minimum(start + i + tl.arange(0, 128) * 128, last)
            tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wide(x):
    """As FP32. The interpreter keeps BF16 as integers and has casts of its own that are wrong for denormals."""
    if ASM:
        y = x.to(tl.float32)
    elif x.dtype == tl.bfloat16:
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """FP32 to the type of hidden states, to nearest even."""
    if ASM:
        y = x.to(TYPE)
    elif TYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(x == x, even, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(TYPE)
    return y


@triton.jit
def product(w, x, acc):
    if ASM:
        y = tl.dot(w, x, acc)
    else:
        y = tl.dot(wide(w), wide(x), acc)
    return y


@triton.jit
def number(at, mask, KIND: tl.constexpr):
    """Biases and scales as FP32, through the type that KIND names."""
    if KIND == FP32:
        y = tl.load(at.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0, cache_modifier=".cg")
    elif KIND == BF16:
        y = wide(tl.load(at.to(tl.pointer_type(tl.bfloat16)), mask=mask, other=0.0, cache_modifier=".cg"))
    elif KIND == FP16:
        y = wide(tl.load(at.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0, cache_modifier=".cg"))
    else:
        byte = tl.load(at, mask=mask, other=0, cache_modifier=".cg").to(tl.int32)
        bits = tl.where(byte == 255, 0x7FC00000, tl.where(byte == 0, 0x00400000, byte << 23))
        y = bits.to(tl.float32, bitcast=True)
    return y


@triton.jit
def numbers(address, AT: tl.constexpr, index, mask, KIND: tl.constexpr):
    """Elements `index` of a part of biases or scales, as FP32."""
    if KIND == FP32:
        y = number(part(address, AT, tl.float32) + index, mask, KIND)
    elif KIND == BF16:
        y = number(part(address, AT, tl.bfloat16) + index, mask, KIND)
    elif KIND == FP16:
        y = number(part(address, AT, tl.float16) + index, mask, KIND)
    else:
        y = number(part(address, AT, tl.uint8) + index, mask, KIND)
    return y


@triton.jit
def low(x, TYPE: tl.constexpr):
    """The first of two 16-bit numbers in each word."""
    return (x & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True)


@triton.jit
def high(x, TYPE: tl.constexpr):
    """The second."""
    return (x >> 16).to(tl.int16).to(TYPE, bitcast=True)


@triton.jit
def e4m3(x, TYPE: tl.constexpr):
    """E4M3 bytes in the type of hidden states, exact (the interpreter: FP32). To BF16 by way of FP32: FP16 to BF16 is an eighth as fast."""
    if ASM:
        y = x.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        if TYPE == tl.bfloat16:
            y = y.to(tl.float32).to(TYPE)
    else:
        w = x.to(tl.int32)
        y = ((w & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        y = tl.where((w & 0x7F) == 0x7F, float("nan"), tl.where(w > 127, -y, y))
    return y


@triton.jit
def e2m1(x, f):
    """The even and odd elements that bytes of two E2M1 codes stand for, times 2^-126 f, in BF16 (the interpreter: FP32). f BF16.

    A code's magnitude bits, put where BF16's lowest exponent bits and highest mantissa bit lie, are its value times 2^-126, denormal
    included, so products with a power of two are exact.
    """
    if ASM:
        even, odd = tl.inline_asm_elementwise(
            """{ .reg .b32 p, q, a, b;
            prmt.b32 p, $4, $4, 0x1100; prmt.b32 q, $4, $4, 0x3322;
            shr.u32 a, p, 6; and.b32 a, a, 0x01C001C0; lop3.b32 a, p, 0x80008000, a, 0xEA; mul.rn.bf16x2 $2, a, $5;
            shr.u32 b, q, 6; and.b32 b, b, 0x01C001C0; lop3.b32 b, q, 0x80008000, b, 0xEA; mul.rn.bf16x2 $3, b, $6;
            shl.b32 p, p, 4; shl.b32 q, q, 4;
            shr.u32 a, p, 6; and.b32 a, a, 0x01C001C0; lop3.b32 a, p, 0x80008000, a, 0xEA; mul.rn.bf16x2 $0, a, $5;
            shr.u32 b, q, 6; and.b32 b, b, 0x01C001C0; lop3.b32 b, q, 0x80008000, b, 0xEA; mul.rn.bf16x2 $1, b, $6; }""",
            "=&r,=&r,=&r,=&r,r,r,r", [x, f], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
    else:
        w = x.to(tl.int32)
        even = _code(w & 15) * 1.1754943508222875e-38 * wide(f)
        odd = _code(w >> 4) * 1.1754943508222875e-38 * wide(f)
    return even, odd


@triton.jit
def _code(c):
    """An E2M1 code as FP32."""
    m = c & 7
    y = tl.where(m < 2, m * 0.5, ((m + 252) << 22).to(tl.float32, bitcast=True))
    return tl.where(c > 7, -y, y)
