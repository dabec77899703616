"""Assembly of the encoder of pages: what a lane does with eight or sixteen channels of its two rows, as PTX.

Operands are numbered as `inline_asm_elementwise` has them with two elements a lane: outputs, then inputs, both rows of each in turn.
tests/kernels/ptx_lanes.py runs this text, 32 lanes at once, on a CPU.
"""

from __future__ import annotations


def read(kind: str) -> str:
    """Eight numbers each of two rows from shared memory, as FP32 without NaN and within FP16; what was not is counted at $18."""
    out = ["{ .reg .b32 w<8>, m<4>, bad, none; .reg .f32 a, x<16>; .reg .pred p; .reg .b64 n; .reg .b16 l, h;"]
    out += [f"ld.shared.v4.b32 {{w{4 * r}, w{4 * r + 1}, w{4 * r + 2}, w{4 * r + 3}}}, [${16 + r}];" for r in (0, 1)]
    out += [f"max.NaN.xorsign.abs.{kind}x2 m{i}, w{2 * i}, w{2 * i + 1};" for i in range(4)]
    out += [f"max.NaN.xorsign.abs.{kind}x2 m{i}, m{i}, m{i + 2};" for i in range(2)]
    # the least pattern beyond 65504 and this make 0x8000
    add = {"bf16": "0x38803880", "f16": "0x04000400"}[kind]
    out += [f"max.NaN.xorsign.abs.{kind}x2 m0, m0, m1; and.b32 m0, m0, 0x7FFF7FFF; add.u32 m0, m0, {add};"]
    out += ["and.b32 m0, m0, 0x80008000; setp.ne.u32 p, m0, 0;"]
    for i in range(8):
        if kind == "bf16":
            out += [f"shl.b32 m1, w{i}, 16; mov.b32 x{2 * i}, m1; and.b32 m1, w{i}, 0xFFFF0000; mov.b32 x{2 * i + 1}, m1;"]
        else:
            out += [f"mov.b32 {{l, h}}, w{i}; cvt.f32.f16 x{2 * i}, l; cvt.f32.f16 x{2 * i + 1}, h;"]
    out += ["@!p bra done; mov.u32 bad, 0; mov.u32 none, 0;"]
    for i in range(16):
        out += [f"setp.nan.f32 p, x{i}, x{i}; @p mov.f32 x{i}, 0f00000000; @p add.u32 none, none, 1;",
                f"abs.f32 a, x{i}; setp.gt.f32 p, a, 0f477FE000; @p add.u32 bad, bad, 1;",
                f"min.f32 x{i}, x{i}, 0f477FE000; max.f32 x{i}, x{i}, 0fC77FE000;"]
    out += ["cvt.u64.u32 n, bad; red.global.add.u64 [$18], n; cvt.u64.u32 n, none; red.global.add.u64 [$18+8], n; done:"]
    out += [f"mov.f32 ${2 * j + r}, x{8 * r + j};" for j in range(8) for r in (0, 1)]
    return " ".join([*out, "}"])


def choose(blocks: int) -> str:
    """Scales of 16 channels a lane of two rows, as one block of the row (of 64 in four lanes) or two (of 32).

    Out: 4 / scale for a block of a row, in all four lanes, then the bits of a scale: lane q has that of row q // 2 and block q % blocks. A
    block below TINY has 0 and ZERO_SCALE.
    """
    out_n = 2 * blocks + 2
    regs = lambda i: (f"${out_n + 2 * i}", f"${out_n + 2 * i + 1}")  # noqa: E731
    lane, start = regs(16)[0], regs(17)[0]
    out = ["{ .reg .b32 a<4>, c<4>, z, s, t, u, ex, w; .reg .f32 f, g, r<4>; .reg .pred odd, low, tiny;",
           f"mov.b32 z, 0; and.b32 t, {lane}, 8; setp.ne.u32 odd, t, 0; and.b32 t, {lane}, 16; setp.ne.u32 low, t, 0;"]
    cells = [(r, h) for r in (0, 1) for h in range(blocks)]
    name = {cell: f"r{i}" for i, cell in enumerate(cells)}
    each = 16 // blocks

    def exchange(kind: str, take: str, op: str, x: str, y: str, by: int) -> str:
        """x where `take` is false, y where it is true, of this lane and of the one `by` away, into f or t."""
        d, e = ("f", "g") if kind == "f32" else ("t", "u")
        pick = f"selp.{kind} {e}, {x}, {y}, {take}; selp.{kind} {d}, {y}, {x}, {take};"
        return f"{pick} shfl.sync.bfly.b32 {e}, {e}, {by}, 31, -1; {op} {d}, {d}, {e};"

    for r, h in cells:
        x = name[r, h]
        out += [f"abs.f32 {x}, {regs(h * each)[r]};"]
        out += [f"abs.f32 f, {regs(h * each + j)[r]}; max.f32 {x}, {x}, f;" for j in range(1, each)]
    if blocks == 2:
        for r in (0, 1):
            out += [exchange("f32", "odd", "max.f32", name[r, 0], name[r, 1], 1), f"mov.f32 {name[r, 0]}, f;"]
    out += [exchange("f32", "low", "max.f32", name[0, 0], name[1, 0], 2)]
    if blocks == 1:
        out += ["shfl.sync.bfly.b32 g, f, 1, 31, -1; max.f32 f, f, g;"]
    # |x| + 2^(e + 11) and the window's first row, cut off, has the table's row in bits 7 to 14
    out += ["setp.lt.f32 tiny, f, 0f0D800000; max.f32 f, f, 0f0D800000; mov.b32 s, f;"]
    out += ["and.b32 ex, s, 0x7F800000; shr.u32 w, s, 21; and.b32 w, w, 3;"]
    out += ["add.u32 t, w, 9; mul.lo.u32 t, t, w; shl.b32 t, t, 9; add.u32 t, t, ex; add.u32 t, t, 0x05800000; mov.b32 f, t;"]
    source = {cell: cell[0] * 2 + cell[1] for cell in cells}
    out += [f"shfl.sync.idx.b32 {name[cell]}, f, {source[cell]}, 0x1C1F, -1;" for cell in cells]
    for r, h in cells:
        for j in range(h * each, (h + 1) * each, 2):
            for i in (0, 1):
                out += [f"abs.f32 f, {regs(j + i)[r]}; add.rz.f32 f, f, {name[r, h]}; mov.b32 t, f; lop3.b32 t, t, 0x7F80, {lane}, 0xEA;",
                        f"add.u32 t, t, {start}; ld.shared.v2.b32 {{a{2 * i}, a{2 * i + 1}}}, [t];"]
            sums = "{z, z, z, z}" if j == h * each else "{c0, c1, c2, c3}"
            weights = f"{{{regs(18 + j)[0]}, {regs(19 + j)[0]}}}"
            out += [f"mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {{c0, c1, c2, c3}}, {{a0, a1, a2, a3}}, {weights}, {sums};"]
        # candidates 0, 1, 4, 5 in even lanes, two more in odd ones
        out += [f"mad.lo.u32 c{i}, c{i}, 8, {c};" for i, c in enumerate((0, 1, 4, 5))]
        out += [f"min.u32 c0, c0, c1; min.u32 c2, c2, c3; min.u32 c0, c0, c2; mov.b32 {name[r, h]}, c0;"]
    mine = []
    for h in range(blocks):
        out += [f"mov.b32 a{h}, {name[0, h]}; mov.b32 c{h}, {name[1, h]}; selp.b32 a{h}, c{h}, a{h}, low; @odd add.u32 a{h}, a{h}, 2;"]
        mine += [f"a{h}"]
    if blocks == 2:
        out += [exchange("b32", "odd", "min.u32", "a0", "a1", 1)]
    else:
        out += ["shfl.sync.bfly.b32 u, a0, 1, 31, -1; min.u32 t, a0, u;"]
    out += ["and.b32 t, t, 7; shl.b32 u, w, 1; add.u32 t, t, u; add.u32 t, t, 2;"]
    out += ["shl.b32 s, t, 20; add.u32 s, s, ex; sub.u32 s, s, 0x01800000;"]
    out += [f"and.b32 t, t, 7; shl.b32 t, t, 7; add.u32 t, t, {lane}; add.u32 t, t, {start}; ld.shared.b32 t, [t + 26624];"]
    out += ["and.b32 u, s, 0x7F800000; sub.u32 t, t, u; add.u32 t, t, 0x40800000;"]
    out += ["selp.b32 t, 0, t, tiny; selp.b32 s, 0x09800000, s, tiny; mov.b32 f, t;"]
    out += [f"shfl.sync.idx.b32 ${2 * h + r}, f, {source[r, h]}, 0x1C1F, -1;" for r, h in cells]
    out += [f"mov.b32 ${out_n - 2}, s; mov.b32 ${out_n - 1}, s;"]
    return " ".join([*out, "}"])


def codes() -> str:
    """E2M1 codes of eight channels of two rows, as in `_codes` of fused_elements.py, but for bits 0 and 4 to 6, which are anything."""
    out = ["{ .reg .f32 f, g; .reg .b32 v<4>, m<4>, z<4>, two, half, most;",
           "mov.b32 two, 0x40004000; mov.b32 half, 0x38003800; mov.b32 most, 0x4E004E00;"]
    for r in (0, 1):
        for i in range(4):
            a, b = f"${4 + 4 * i + r}", f"${6 + 4 * i + r}"
            out += [f"mul.f32 f, {a}, ${20 + r}; mul.f32 g, {b}, ${20 + r}; cvt.rn.f16x2.f32 v{i}, g, f; abs.f16x2 m{i}, v{i};",
                    f"min.f16x2 m{i}, m{i}, most; fma.rn.f16x2 z{i}, m{i}, half, two; max.f16x2 z{i}, z{i}, m{i};",
                    f"add.u32 z{i}, z{i}, 0x01000100; lop3.b32 z{i}, v{i}, 0x80008000, z{i}, 0xEA;"]
        out += [f"prmt.b32 ${r}, z0, z1, 0x7531; prmt.b32 ${2 + r}, z2, z3, 0x7531;"]
    return " ".join([*out, "}"])


def bytes_of_planes() -> str:
    """Both planes of four bytes from codes as `codes` leaves them: low nibbles from the first, high ones from the second."""
    return """{ .reg .b32 a, b; shl.b32 a, $1, 3; lop3.b32 a, a, 0x70707070, $2, 0xE2;
        shr.b32 b, $1, 7; lop3.b32 $0, b, 0x01010101, a, 0xE2; }"""


def in_pairs() -> str:
    """Bytes 0 to 3 of two words as four pairs of 16 bits in two words."""
    return "prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;"
