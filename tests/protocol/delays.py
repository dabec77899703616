"""What holds a program up on a GPU: for long, where a window is to be open; or now and then, for a little. Elsewhere nothing."""
from __future__ import annotations

import triton
import triton.language as tl

from moe_prefetch.kernels.kv_fp4.fused import ASM


@triton.jit
def hold(NS: tl.constexpr):
    """The whole program, for NS nanoseconds."""
    if ASM:
        each = tl.arange(0, 32) * 0 + NS
        tl.inline_asm_elementwise(
            """{ .reg .u64 a, b; .reg .pred p; cvt.u64.u32 b, $1; mov.u64 a, %globaltimer; add.u64 a, a, b;
            again: nanosleep.u32 100; mov.u64 b, %globaltimer; setp.lt.u64 p, b, a; @p bra again; mov.u32 $0, $1; }""",
            "=r,r", [each], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()


@triton.jit
def maybe(NS: tl.constexpr):
    """One time in four, for up to NS nanoseconds (at most 2^20), both drawn from the clocks by the program's first thread."""
    if ASM:
        each = tl.arange(0, 32) * 0 + NS
        tl.inline_asm_elementwise(
            """{ .reg .u64 a, b; .reg .u32 r, s; .reg .pred p; mov.u32 r, %tid.x; setp.ne.u32 p, r, 0; @p bra out;
            mov.u64 a, %globaltimer; cvt.u32.u64 r, a; mov.u32 s, %clock; xor.b32 r, r, s; mul.lo.u32 r, r, 0x9E3779B1; shr.u32 s, r, 30;
            setp.ne.u32 p, s, 0; @p bra out; shr.u32 r, r, 18; and.b32 r, r, 4095; mul.lo.u32 r, r, $1; shr.u32 r, r, 12; cvt.u64.u32 b, r;
            add.u64 a, a, b; again: nanosleep.u32 50; mov.u64 b, %globaltimer; setp.lt.u64 p, b, a; @p bra again; out: mov.u32 $0, $1; }""",
            "=r,r", [each], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
