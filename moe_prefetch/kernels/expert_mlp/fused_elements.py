"""What the kernels over records do with single elements: table entries, numbers of every type, decoding in registers; and the product of
rows of a record.

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
def e4m3(x, HALF: tl.constexpr, TYPE: tl.constexpr):
    """The codes of half a tile's columns in words of 16 bits, in the type of hidden states, exact (the interpreter: FP32).

    Two words are a register, in which `record.py` has put the bits of each code where BF16 has its sign, lowest exponent bits and highest
    mantissa bits, or four places off: it is then its value times 2^-120, denormal included, and a product with 2^120 is exact. A NaN would
    be 480: stores refuse it.
    """
    if ASM:
        if TYPE == tl.bfloat16:
            if HALF == 0:
                y = tl.inline_asm_elementwise(
                    "{ .reg .b32 a; and.b32 a, $1, 0x87F087F0; mov.b32 $0, 0x7B807B80; mul.rn.bf16x2 $0, a, $0; }",
                    "=&r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
            else:
                y = tl.inline_asm_elementwise(
                    """{ .reg .b32 a, b; shl.b32 a, $1, 4; shr.u32 b, $1, 4; and.b32 b, b, 0x07000700; and.b32 a, a, 0x80F080F0;
                    or.b32 a, a, b; mov.b32 $0, 0x7B807B80; mul.rn.bf16x2 $0, a, $0; }""",
                    "=&r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
        elif HALF == 0:
            # FP16's places are three further: times 2^-8.
            y = tl.inline_asm_elementwise(
                """{ .reg .b32 a, b; shl.b32 b, $1, 3; and.b32 b, b, 0x3F803F80; and.b32 a, $1, 0x80008000; or.b32 a, a, b;
                mov.b32 $0, 0x5C005C00; mul.rn.f16x2 $0, a, $0; }""",
                "=&r,r", [x], dtype=tl.float16, is_pure=True, pack=2)
        else:
            y = tl.inline_asm_elementwise(
                """{ .reg .b32 a, b; shl.b32 a, $1, 4; and.b32 a, a, 0x80008000; shr.u32 b, $1, 1; and.b32 b, b, 0x38003800;
                or.b32 a, a, b; shl.b32 b, $1, 7; and.b32 b, b, 0x07800780; or.b32 a, a, b; mov.b32 $0, 0x5C005C00;
                mul.rn.f16x2 $0, a, $0; }""",
                "=&r,r", [x], dtype=tl.float16, is_pure=True, pack=2)
    else:
        word = x.to(tl.int32)
        if HALF == 0:
            code = ((word >> 8) & 0x80) | ((word >> 4) & 0x7F)
        else:
            code = ((word >> 4) & 0x80) | ((word >> 8) & 0x70) | (word & 15)
        y = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        y = tl.where(code > 127, -y, y)
    return y


@triton.jit
def factor(s, GROUP: tl.constexpr):
    """2^62 times the scale of a group. s: four E8M0 bytes, at most 128 each."""
    return ((((s >> (8 * GROUP)) & 255) + 62) << 23).to(tl.float32, bitcast=True)


@triton.jit
def raised(x):
    """BF16 numbers times 2^64, so that products with codes, which are denormals, are none. From 2^63 on they become infinite."""
    if ASM:
        y = tl.inline_asm_elementwise("{ .reg .b32 a; mov.b32 a, 0x5F805F80; mul.rn.bf16x2 $0, $1, a; }", "=r,r", [x], dtype=tl.bfloat16,
                                      is_pure=True, pack=2)
    else:
        y = wide(x) * 18446744073709551616.0
    return y


@triton.jit
def lift(x_ptr, raised_ptr, N, B: tl.constexpr, PDL: tl.constexpr):
    """raised [N] = x, raised."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_B = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i_B, mask=i_B < N, other=0.0, cache_modifier=".cg")
    tl.store(raised_ptr + i_B, narrow(wide(x) * 18446744073709551616.0, x_ptr.dtype.element_ty), mask=i_B < N)


@triton.jit
def e2m1(x, GROUP: tl.constexpr):
    """The codes of a group in words of 16 bits, times 2^-126, in BF16 (the interpreter: FP32).

    Two words are a register, in which `record.py` has put the bits of each code where a rotation brings its magnitude to BF16's lowest
    exponent bits and highest mantissa bit: it is then its value times 2^-126, denormal included.
    """
    if ASM:
        if GROUP == 0:
            y = tl.inline_asm_elementwise("and.b32 $0, $1, 0x81C081C0;", "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
        elif GROUP == 1:
            y = tl.inline_asm_elementwise("shf.r.wrap.b32 $0, $1, $1, 3; and.b32 $0, $0, 0x81C081C0;", "=r,r", [x], dtype=tl.bfloat16,
                                          is_pure=True, pack=2)
        elif GROUP == 2:
            y = tl.inline_asm_elementwise("shf.r.wrap.b32 $0, $1, $1, 6; and.b32 $0, $0, 0x81C081C0;", "=r,r", [x], dtype=tl.bfloat16,
                                          is_pure=True, pack=2)
        else:
            # Three shifts in one product: the bits that it sets elsewhere do not meet those that stay.
            y = tl.inline_asm_elementwise("and.b32 $0, $1, 0x001B001B; mul.lo.u32 $0, $0, 0x1084; and.b32 $0, $0, 0x81C081C0;", "=r,r", [x],
                                          dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        # The interpreter has no words of two elements.
        pairs = (x.to(tl.int64) & 0xFFFF).reshape(x.shape[0], x.shape[1] // 2, 2)
        lane = 16 * tl.arange(0, 2)[None, None, :]
        word = tl.sum(pairs << lane, 2)[:, :, None] >> tl.zeros_like(lane)
        y = _bits(word, lane, GROUP).reshape(x.shape[0], x.shape[1]) * 1.1754943508222875e-38
    return y


@triton.jit
def _bits(word, lane, GROUP: tl.constexpr):
    """The code of a group and lane as an FP32 number."""
    SIGN: tl.constexpr = 3 * GROUP if GROUP < 3 else 20
    HIGH: tl.constexpr = 3 * GROUP if GROUP < 3 else 25
    LOW: tl.constexpr = 3 * GROUP if GROUP < 3 else 30
    code = ((word >> ((15 + SIGN + lane) % 32)) & 1) << 3 | ((word >> ((8 + HIGH + lane) % 32)) & 1) << 2
    code = code | ((word >> ((7 + HIGH + lane) % 32)) & 1) << 1 | ((word >> ((6 + LOW + lane) % 32)) & 1)
    return _code(code.to(tl.int32))


@triton.jit
def _code(c):
    """An E2M1 code as FP32."""
    m = c & 7
    y = tl.where(m < 2, m * 0.5, ((m + 252) << 22).to(tl.float32, bitcast=True))
    return tl.where(c > 7, -y, y)


@triton.jit
def multiply(address, row_R, scale_row_R, x_ptr, x_T, ROWS: tl.constexpr, N: tl.constexpr, AT: tl.constexpr, SCALE_AT: tl.constexpr,
             W: tl.constexpr, TYPE: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, BT: tl.constexpr,
             BK: tl.constexpr, STAGES: tl.constexpr, RAISED: tl.constexpr):
    """Rows `row_R` of a [ROWS, N] matrix of the record times the vectors that start at elements x_T: FP32 [R, BT]. RAISED: vectors for
    MXFP4 have been."""
    EVEN: tl.constexpr = N % BK == 0
    acc_RT = tl.zeros((R, BT), tl.float32)
    if W == PLAIN:
        k_K = tl.arange(0, BK)
        w_RK = part(address, AT, TYPE) + row_R[:, None] * N + k_K[None, :]
        x_KT = x_ptr + x_T[None, :] + k_K[:, None]
        for k in tl.range(0, N, BK, num_stages=STAGES):
            if EVEN:
                w = tl.load(w_RK + k, cache_modifier=".cg")
                x = tl.load(x_KT + k, cache_modifier=".cg")
            else:
                w = tl.load(w_RK + k, mask=k_K[None, :] < N - k, other=0.0, cache_modifier=".cg")
                x = tl.load(x_KT + k, mask=k_K[:, None] < N - k, other=0.0, cache_modifier=".cg")
            acc_RT = product(w, x, acc_RT)
    elif W == FP8 and BK == 256:
        # Two tiles a step (BLOCK 128, N a multiple of 256), whose products do not wait for each other: for a program that is nearly alone.
        COLUMNS: tl.constexpr = N // 128
        j_J = tl.arange(0, 64)
        w_RJ = part(address, AT, tl.int16) + row_R[:, None] * 64 + j_J[None, :]
        x_JT = x_ptr + x_T[None, :] + j_J[:, None]
        on_R = scale_row_R >= 0
        s_R = numbers(address, SCALE_AT, scale_row_R * COLUMNS, on_R, SCALE)
        t_R = numbers(address, SCALE_AT, scale_row_R * COLUMNS + 1, on_R, SCALE)
        for i in tl.range(0, COLUMNS, 2, num_stages=STAGES):
            k = i * 128
            w = tl.load(w_RJ + i * (ROWS * 64), cache_modifier=".cg")
            v = tl.load(w_RJ + (i + 1) * (ROWS * 64), cache_modifier=".cg")
            x = tl.load(x_JT + k, cache_modifier=".cg")
            z = tl.load(x_JT + k + 64, cache_modifier=".cg")
            y = tl.load(x_JT + k + 128, cache_modifier=".cg")
            u = tl.load(x_JT + k + 192, cache_modifier=".cg")
            next_R = numbers(address, SCALE_AT, scale_row_R * COLUMNS + (i + 2), on_R & (k + 256 < N), SCALE)
            after_R = numbers(address, SCALE_AT, scale_row_R * COLUMNS + (i + 3), on_R & (k + 384 < N), SCALE)
            p_RT = product(e4m3(w, 0, TYPE), x, tl.zeros((R, BT), tl.float32))
            q_RT = product(e4m3(v, 0, TYPE), y, tl.zeros((R, BT), tl.float32))
            p_RT = product(e4m3(w, 1, TYPE), z, p_RT)
            q_RT = product(e4m3(v, 1, TYPE), u, q_RT)
            acc_RT += p_RT * s_R[:, None]
            acc_RT += q_RT * t_R[:, None]
            s_R = next_R
            t_R = after_R
    elif W == FP8:
        # Words of 16 bits hold a code of each half of a tile of 128 columns (see record.py): a product for each half, or for each part of a
        # half that has one scale a row.
        J: tl.constexpr = BK // 2
        PARTS: tl.constexpr = 64 // J
        COLUMNS: tl.constexpr = (N + BLOCK - 1) // BLOCK
        j_J = tl.arange(0, J)
        w_RJ = part(address, AT, tl.int16) + row_R[:, None] * 64 + j_J[None, :]
        x_JT = x_ptr + x_T[None, :] + j_J[:, None]
        on_R = scale_row_R >= 0
        s_R = numbers(address, SCALE_AT, scale_row_R * COLUMNS, on_R, SCALE)
        for i in tl.range(0, (N + 127) // 128 * PARTS, num_stages=STAGES):
            k = i // PARTS * 128 + i % PARTS * J
            w = tl.load(w_RJ + (i // PARTS * (ROWS * 64) + i % PARTS * J), cache_modifier=".cg")
            if N % 128 == 0:
                x = tl.load(x_JT + k, cache_modifier=".cg")
                z = tl.load(x_JT + k + 64, cache_modifier=".cg")
            else:
                x = tl.load(x_JT + k, mask=j_J[:, None] < N - k, other=0.0, cache_modifier=".cg")
                z = tl.load(x_JT + k + 64, mask=j_J[:, None] < N - k - 64, other=0.0, cache_modifier=".cg")
            if BLOCK == 128:
                # The scales of the next step are asked for before this one's are needed.
                next_R = numbers(address, SCALE_AT, scale_row_R * COLUMNS + (i + 1), on_R & (k + 128 < N), SCALE)
                p_RT = product(e4m3(w, 0, TYPE), x, tl.zeros((R, BT), tl.float32))
                acc_RT += product(e4m3(w, 1, TYPE), z, p_RT) * s_R[:, None]
                s_R = next_R
            else:
                s_R = numbers(address, SCALE_AT, scale_row_R * COLUMNS + k // BLOCK, on_R & (k < N), SCALE)
                acc_RT += product(e4m3(w, 0, TYPE), x, tl.zeros((R, BT), tl.float32)) * s_R[:, None]
                s_R = numbers(address, SCALE_AT, scale_row_R * COLUMNS + (k + 64) // BLOCK, on_R & (k + 64 < N), SCALE)
                acc_RT += product(e4m3(w, 1, TYPE), z, tl.zeros((R, BT), tl.float32)) * s_R[:, None]
    else:
        # Words of 16 bits hold a code of each of four groups of 32 columns (see record.py): a product for each, from zero, times its
        # scales, and a sum for each, so that the kernels for one token can have a thread for each.
        j_J = tl.arange(0, 32)
        w_RJ = part(address, AT, tl.int16) + row_R[:, None] * 32 + j_J[None, :]
        scale_R = part(address, SCALE_AT, tl.int32) + row_R
        x_JT = x_ptr + x_T[None, :] + j_J[:, None]
        # Four sums of many vectors, and products, are more than there are registers: then two groups after the other two.
        TURNS: tl.constexpr = 2 if BT == 64 else 1
        zero_RT = tl.zeros((R, BT), tl.float32)
        for turn in tl.static_range(TURNS):
            first_RT = zero_RT
            second_RT = zero_RT
            third_RT = zero_RT
            fourth_RT = zero_RT
            for k in tl.range(0, N, 128, num_stages=STAGES):
                w = tl.load(w_RJ + k // 128 * (ROWS * 32), cache_modifier=".cg")
                s_R = tl.load(scale_R + k // 128 * ROWS, cache_modifier=".cg")
                for i in tl.static_range(4 // TURNS):
                    if 32 * (turn * 2 + i) < N % 128 or N % 128 == 0:
                        x = tl.load(x_JT + k + 32 * (turn * 2 + i), cache_modifier=".cg")
                    else:
                        x = tl.load(x_JT + k + 32 * (turn * 2 + i), mask=k + 32 * (turn * 2 + i) < N, other=0.0, cache_modifier=".cg")
                    if not RAISED:
                        x = raised(x)
                    p_RT = product(e2m1(w, turn * 2 + i), x, zero_RT) * factor(s_R, turn * 2 + i)[:, None]
                    if i == 0:
                        first_RT += p_RT
                    elif i == 1:
                        second_RT += p_RT
                    elif i == 2:
                        third_RT += p_RT
                    else:
                        fourth_RT += p_RT
            if TURNS == 1:
                acc_RT = (first_RT + second_RT) + (third_RT + fourth_RT)
            elif turn == 0:
                acc_RT = first_RT + second_RT
            else:
                acc_RT += first_RT + second_RT
    return acc_RT
