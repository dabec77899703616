"""Assembly of the encoder of pages: what a lane does with eight or sixteen channels of its two rows, as PTX.

Operands are numbered as `inline_asm_elementwise` has them with two elements a lane: outputs, then inputs, both rows of each in turn.
tests/kernels/ptx_lanes.py runs this text, 32 lanes at once, on a CPU.
"""

from __future__ import annotations


def _loads() -> list[str]:
    """Words of sixteen numbers each of two rows, of both halves of their channels: w0 to w7 and w8 to w15."""
    out = []
    for r in (0, 1):
        for half in (0, 1):
            w = ", ".join(f"w{8 * r + 4 * half + i}" for i in range(4))
            out += [f"ld.shared.v4.b32 {{{w}}}, [${32 + r}+{4096 * half}];"]
    return out


def _unpacked(kind: str) -> list[str]:
    out = []
    for i in range(16):
        if kind == "bf16":
            out += [f"shl.b32 t, w{i}, 16; mov.b32 x{2 * i}, t; and.b32 t, w{i}, 0xFFFF0000; mov.b32 x{2 * i + 1}, t;"]
        else:
            out += [f"mov.b32 {{l, h}}, w{i}; cvt.f32.f16 x{2 * i}, l; cvt.f32.f16 x{2 * i + 1}, h;"]
    return out


def read(kind: str) -> str:
    """Sixteen numbers each of two rows from shared memory, as FP32."""
    out = ["{ .reg .b32 w<16>, t; .reg .f32 x<32>; .reg .b16 l, h;", *_loads(), *_unpacked(kind)]
    out += [f"mov.f32 ${2 * j + r}, x{16 * r + j};" for j in range(16) for r in (0, 1)]
    return " ".join([*out, "}"])


def clean(kind: str) -> str:
    """The same from global memory ($32 and $33; $34 and $35: whether they are there), without NaN and within FP16. What was not is counted
    at $36, but for channels whose gain ($38 and on) is 0.
    """
    out = ["{ .reg .b32 w<16>, t, bad, none; .reg .f32 a, x<32>; .reg .pred p, q; .reg .b64 n; .reg .b16 l, h;"]
    out += [f"mov.u32 w{i}, 0;" for i in range(16)]
    for r in (0, 1):
        words = [", ".join(f"w{8 * r + 4 * half + i}" for i in range(4)) for half in (0, 1)]
        out += [f"setp.ne.u32 p, ${34 + r}, 0; @p ld.global.cg.v4.b32 {{{words[0]}}}, [${32 + r}];"]
        out += [f"@p ld.global.cg.v4.b32 {{{words[1]}}}, [${32 + r}+64];"]
    out += [*_unpacked(kind), "mov.u32 bad, 0; mov.u32 none, 0;"]
    for r in (0, 1):
        for j in range(16):
            x = f"x{16 * r + j}"
            out += [f"setp.neu.f32 q, ${38 + 2 * j + r}, 0f00000000; setp.nan.and.f32 p, {x}, {x}, q; @p add.u32 none, none, 1;",
                    f"abs.f32 a, {x}; setp.gt.and.f32 p, a, 0f477FE000, q; @p add.u32 bad, bad, 1;",
                    f"setp.nan.f32 p, {x}, {x}; @p mov.f32 {x}, 0f00000000;",
                    f"min.f32 {x}, {x}, 0f477FE000; max.f32 {x}, {x}, 0fC77FE000;"]
    out += ["setp.ne.u32 p, bad, 0; cvt.u64.u32 n, bad; @p red.global.add.u64 [$36], n;"]
    out += ["setp.ne.u32 p, none, 0; cvt.u64.u32 n, none; @p red.global.add.u64 [$36+8], n;"]
    out += [f"mov.f32 ${2 * j + r}, x{16 * r + j};" for j in range(16) for r in (0, 1)]
    return " ".join([*out, "}"])


def outlier() -> str:
    """FP16 of an outlier $1 less a mean $2; NaN as 0, and both within FP16. What was not is counted at $3."""
    return """{ .reg .f32 x, a; .reg .pred p, q, r; .reg .b64 n; .reg .b16 h; mov.u64 n, 1; mov.f32 x, $1; abs.f32 a, x;
        setp.nan.f32 p, x, x; setp.gt.f32 q, a, 0f477FE000; setp.gtu.f32 r, a, 0f477FE000; @!r bra done; griddepcontrol.wait;
        @p mov.f32 x, 0f00000000; @p red.global.add.u64 [$3+8], n; @q red.global.add.u64 [$3], n;
        min.f32 x, x, 0f477FE000; max.f32 x, x, 0fC77FE000;
        done: sub.f32 x, x, $2; min.f32 x, x, 0f477FE000; max.f32 x, x, 0fC77FE000; cvt.rn.f16.f32 h, x; mov.b32 $0, {h, h}; }"""


def ask() -> str:
    """Have a lane's numbers of two tokens copied: $8, counted from the first that is there, and 8 more. $10 are there; others become 0.
    Sixteen bytes lie from address $4 on and from 64 bytes further; those of the other token $6 bytes further.
    """
    out = ["{ .reg .b64 a, d; .reg .b32 t, z; .reg .pred p; mov.b32 z, 0; cvt.u64.u32 d, $6; add.u64 a, $4, d;"]
    for to, source, on in (("$2", "$4", 0), ("$3", "a", 8)):
        out += [f"add.u32 t, $8, {on}; setp.lt.u32 p, t, $10; @p cp.async.cg.shared.global.L2::128B [{to}], [{source}], 16;",
                f"@p cp.async.cg.shared.global.L2::128B [{to}+4096], [{source}+64], 16;",
                f"@!p st.shared.v4.b32 [{to}], {{z, z, z, z}}; @!p st.shared.v4.b32 [{to}+4096], {{z, z, z, z}};"]
    return " ".join([*out, "cp.async.commit_group; mov.u32 $0, 0; mov.u32 $1, 0; }"])


def least(count: int) -> str:
    """The least of `count` FP32 numbers, none below zero, from 16 bytes behind $1 on in shared memory: to $1, where all warps put it."""
    out = ["{ .reg .b32 l, a, b; mov.u32 l, %laneid; shl.b32 l, l, 2; add.u32 l, l, $1; ld.shared.b32 a, [l+16];"]
    out += [f"ld.shared.b32 b, [l+{128 * i + 16}]; min.u32 a, a, b;" for i in range(1, count // 32)]
    return " ".join([*out, "redux.sync.min.u32 a, a, -1; st.shared.b32 [$1], a; mov.u32 $0, 0; }"])


def columns() -> str:
    """Eight channels' FP32 numbers from shared memory."""
    return "ld.shared.v4.f32 {$0, $1, $2, $3}, [$8]; ld.shared.v4.f32 {$4, $5, $6, $7}, [$8+16];"


def weights() -> str:
    """Eight channels' weights from shared memory, the same for both rows."""
    same = " ".join(f"mov.b32 ${2 * j + 1}, ${2 * j};" for j in range(8))
    return f"ld.shared.v4.b32 {{$0, $2, $4, $6}}, [$16]; ld.shared.v4.b32 {{$8, $10, $12, $14}}, [$16+16]; {same}"


def _exchange(kind: str, take: str, op: str, x: str, y: str, by: int) -> str:
    """x where `take` is false, y where it is true, of this lane and of the one `by` away, into f or t."""
    d, e = ("f", "g") if kind == "f32" else ("t", "u")
    pick = f"selp.{kind} {e}, {x}, {y}, {take}; selp.{kind} {d}, {y}, {x}, {take};"
    return f"{pick} shfl.sync.bfly.b32 {e}, {e}, {by}, 31, -1; {op} {d}, {d}, {e};"


def most(blocks: int) -> str:
    """The largest magnitude of a block, NaN if one is: lane q has that of row q // 2, block q % blocks. The largest of a page so far stays
    in a register that `_shared` names.
    """
    regs = lambda i: (f"${2 + 2 * i}", f"${3 + 2 * i}")  # noqa: E731
    place = regs(16)[0]
    out = ["{ .reg .b32 t; .reg .f32 f, g, r<4>; .reg .pred odd, low;",
           f"and.b32 t, {place}, 8; setp.ne.u32 odd, t, 0; and.b32 t, {place}, 16; setp.ne.u32 low, t, 0;"]
    cells = [(r, h) for r in (0, 1) for h in range(blocks)]
    name = {cell: f"r{i}" for i, cell in enumerate(cells)}
    each = 16 // blocks
    for r, h in cells:
        x = name[r, h]
        # two chains, of which neither waits for the other
        out += [f"abs.f32 {x}, {regs(h * each)[r]}; abs.f32 g, {regs(h * each + 1)[r]};"]
        out += [f"abs.f32 f, {regs(h * each + j)[r]}; max.NaN.f32 {y}, {y}, f;" for j, y in zip(range(2, each), (x, "g") * 8)]
        out += [f"max.NaN.f32 {x}, {x}, g;"]
    if blocks == 2:
        for r in (0, 1):
            out += [_exchange("f32", "odd", "max.NaN.f32", name[r, 0], name[r, 1], 1), f"mov.f32 {name[r, 0]}, f;"]
    out += [_exchange("f32", "low", "max.NaN.f32", name[0, 0], name[1, 0], 2)]
    if blocks == 1:
        out += ["shfl.sync.bfly.b32 g, f, 1, 31, -1; max.NaN.f32 f, f, g;"]
    out += ["max.NaN.f32 encode_most, encode_most, f; mov.f32 $0, f; mov.f32 $1, f;"]
    return " ".join([*out, "}"])


def loud() -> str:
    """Whether the largest magnitude of a page is not below the FP32 number at $1 in shared memory for a lane of the warp."""
    return """{ .reg .f32 a; .reg .pred p; ld.shared.f32 a, [$1]; setp.geu.f32 p, encode_most, a;
        vote.sync.any.pred p, p, -1; selp.b32 $0, 1, 0, p; }"""


def choose(blocks: int) -> str:
    """Scales of 16 channels a lane of two rows, as one block of the row (of 64 in four lanes) or two (of 32).

    Out: 4 / scale for a block of a row, in all four lanes, then the bits of a scale: lane q has that of row q // 2 and block q % blocks. A
    block below TINY has 0 and ZERO_SCALE.
    """
    out_n = 2 * blocks + 2
    regs = lambda i: (f"${out_n + 2 * i}", f"${out_n + 2 * i + 1}")  # noqa: E731
    lane, start, wide = regs(16)[0], regs(17)[0], regs(18)[0]
    out = ["{ .reg .b32 a<4>, c<4>, z, s, t, u, ex, w; .reg .f32 f, g, r<4>; .reg .pred odd, low, tiny;",
           f"mov.b32 z, 0; and.b32 t, {lane}, 8; setp.ne.u32 odd, t, 0; and.b32 t, {lane}, 16; setp.ne.u32 low, t, 0;"]
    cells = [(r, h) for r in (0, 1) for h in range(blocks)]
    name = {cell: f"r{i}" for i, cell in enumerate(cells)}
    each = 16 // blocks
    # |x| + 2^(e + 11) and the window's first row (0, 40, 88 or 144) has the table's row in bits 7 to 14: whatever x is, that is an address
    out += [f"mov.f32 f, {regs(35)[0]}; setp.lt.f32 tiny, f, 0f0D800000; max.f32 f, f, 0f0D800000; mov.b32 s, f;"]
    out += ["and.b32 ex, s, 0x7F800000; shr.u32 t, s, 17; lop3.b32 t, t, 0x30, 0x4404, 0xEA; prmt.b32 t, 0x482C1400, 0, t;"]
    out += ["shr.u32 w, s, 15; and.b32 w, w, 0xC0; add.u32 t, t, ex; add.u32 t, t, 0x05800000; mov.b32 f, t;"]
    source = {cell: cell[0] * 2 + cell[1] for cell in cells}
    out += [f"shfl.sync.idx.b32 {name[cell]}, f, {source[cell]}, 0x1C1F, -1;" for cell in cells]
    for r, h in cells:
        for j in range(h * each, (h + 1) * each, 2):
            for i in (0, 1):
                out += [f"abs.f32 f, {regs(j + i)[r]}; add.rz.f32 f, f, {name[r, h]}; mov.b32 t, f; lop3.b32 t, t, 0x7F80, {lane}, 0xEA;",
                        f"add.u32 t, t, {start}; ld.shared.v2.b32 {{a{2 * i}, a{2 * i + 1}}}, [t];"]
            sums = "{z, z, z, z}" if j == h * each else "{c0, c1, c2, c3}"
            weights = f"{{{regs(19 + j)[0]}, {regs(20 + j)[0]}}}"
            out += [f"mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {{c0, c1, c2, c3}}, {{a0, a1, a2, a3}}, {weights}, {sums};"]
        # candidates 0, 1, 4, 5 in even lanes, two more in odd ones
        out += [f"mad.lo.u32 c{i}, c{i}, {wide}, {c};" for i, c in enumerate((0, 8, 32, 40))]
        out += [f"min.u32 c0, c0, c1; min.u32 c2, c2, c3; min.u32 c0, c0, c2; mov.b32 {name[r, h]}, c0;"]
    mine = []
    for h in range(blocks):
        out += [f"mov.b32 a{h}, {name[0, h]}; mov.b32 c{h}, {name[1, h]}; selp.b32 a{h}, c{h}, a{h}, low; @odd add.u32 a{h}, a{h}, 16;"]
        mine += [f"a{h}"]
    if blocks == 2:
        out += [_exchange("b32", "odd", "min.u32", "a0", "a1", 1)]
    else:
        out += ["shfl.sync.bfly.b32 u, a0, 1, 31, -1; min.u32 t, a0, u;"]
    out += [f"lop3.b32 t, t, 0x38, w, 0xEA; add.u32 t, t, {start};"]
    out += [" ld.shared.v2.b32 {s, t}, [t + 26624]; add.u32 s, s, ex; sub.u32 t, t, ex;"]
    out += ["selp.b32 t, 0, t, tiny; selp.b32 s, 0x09800000, s, tiny; mov.b32 f, t;"]
    out += [f"shfl.sync.idx.b32 ${2 * h + r}, f, {source[r, h]}, 0x1C1F, -1;" for r, h in cells]
    out += [f"mov.b32 ${out_n - 2}, s; mov.b32 ${out_n - 1}, s;"]
    return " ".join([*out, "}"])


def codes() -> str:
    """E2M1 codes of eight channels of two rows, a byte each: sign in bit 7, magnitude in bits 1 to 3 once 1 has been added to the byte.

    y / scale * 2^-14 in FP16 has its exponent and first significand bit where E2M1 has them, subnormals included.
    """
    out = ["{ .reg .f32 f, g; .reg .b32 v<4>, tiny, most; mov.b32 tiny, 0x01000100; mov.b32 most, 0x4E004E00;"]
    for r in (0, 1):
        for i in range(4):
            a, b = f"${4 + 4 * i + r}", f"${6 + 4 * i + r}"
            out += [f"mul.f32 f, {a}, ${20 + r}; mul.f32 g, {b}, ${20 + r}; cvt.rn.f16x2.f32 v{i}, g, f;",
                    f"min.xorsign.abs.f16x2 v{i}, v{i}, most; mul.rn.f16x2 v{i}, v{i}, tiny;"]
        out += [f"prmt.b32 ${r}, v0, v1, 0x7531; prmt.b32 ${2 + r}, v2, v3, 0x7531;"]
    return " ".join([*out, "}"])


def give() -> str:
    """The largest integer of a warp into its word of 16 bytes of shared memory at $2, which the last call did not take."""
    return """{ .reg .b32 m, t, w; .reg .pred p; redux.sync.max.s32 m, $1, -1; mov.u32 t, %tid.x; and.b32 w, t, 31; setp.eq.u32 p, w, 0;
        shr.u32 t, t, 5; shl.b32 t, t, 2; add.u32 t, t, $2; @p st.shared.b32 [t], m; mov.u32 $0, 0; }"""


def take() -> str:
    """The largest of four warps' integers, once all of them are there."""
    return """{ .reg .b32 a<4>; bar.sync 0; ld.shared.v4.b32 {a0, a1, a2, a3}, [$1]; max.s32 a0, a0, a1; max.s32 a2, a2, a3;
        max.s32 $0, a0, a2; }"""


def scale_byte() -> str:
    """E4M3 byte of a scale with bits $1 under a factor 2^$2."""
    return """{ .reg .b32 t, e; .reg .pred p; shr.u32 t, $1, 20; mad.lo.s32 t, $2, -8, t; sub.s32 t, t, 960; setp.lt.s32 p, t, 8;
        @!p bra done; shr.s32 e, t, 3; sub.s32 e, 1, e; min.s32 e, e, 31; and.b32 t, t, 7; or.b32 t, t, 8; shr.u32 t, t, e; max.u32 t, t, 1;
        done: mov.b32 $0, t; }"""


def spread() -> str:
    """16 copies of the 8 bytes at $2, from $1 on in shared memory; no two lanes of eight write to the same banks at once."""
    out = ["{ .reg .b32 a, b, l, t; ld.global.cg.v2.b32 {a, b}, [$2]; mov.u32 l, %laneid; shl.b32 l, l, 4;"]
    out += [f"add.u32 t, l, {16 * i}; and.b32 t, t, 112; add.u32 t, t, $1; st.shared.v4.b32 [t], {{a, b, a, b}};" for i in range(8)]
    return " ".join([*out, "mov.u32 $0, 0; }"])


def bytes_of_planes() -> str:
    """Both planes of four bytes from codes as `codes` leaves them: low nibbles from the first, high ones from the second."""
    return """{ .reg .b32 a, b; mad.lo.u32 a, $1, 8, 0x08080808; add.u32 b, $2, 0x01010101; lop3.b32 a, a, 0x70707070, b, 0xE2;
        shr.b32 b, $1, 7; lop3.b32 $0, b, 0x01010101, a, 0xE2; }"""


def over() -> str:
    """Both planes of four bytes: the low one of those in $1, and the high one from codes."""
    return "{ .reg .b32 b; add.u32 b, $2, 0x01010101; lop3.b32 $0, $1, 0x71717171, b, 0xE2; }"


def in_pairs() -> str:
    """Bytes 0 to 3 of two words as four pairs of 16 bits in two words."""
    return "prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;"
