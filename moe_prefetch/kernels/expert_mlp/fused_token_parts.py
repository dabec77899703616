"""What `fused_token.py` is made of: words of codes, products of a tile, and the words in which programs wait for each other."""
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def go():
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fetch(address):
    """A line to L2, where other kernels' stores are seen whenever it was asked for."""
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive(at, by):
    """Adds to the counter, once a program and after all of its stores: a barrier must stand before."""
    gl.inline_asm_elementwise("""{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
        @p red.release.gpu.global.add.u32 [$1], $2; mov.u32 $0, 0; }""", "=r,l,r", [at, by], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def until(at, old):
    """Waits for the counter's highest bit to be another than old's."""
    gl.inline_asm_elementwise("""{ .reg .pred p; .reg .b32 t;
        again: ld.acquire.gpu.global.b32 t, [$1]; xor.b32 t, t, $2; setp.ge.s32 p, t, 0; @p bra again; mov.u32 $0, t; }""",
        "=r,l,r", [at, old], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def part(address, AT: gl.constexpr, TYPE: gl.constexpr):
    return gl.multiple_of((address + AT).to(gl.pointer_type(TYPE), bitcast=True), 128)


@gluon.jit
def decoded(w, f, GROUP: gl.constexpr):
    """`fused_elements.e2m1` of two words of 16 bits in one of 32."""
    if GROUP == 0:
        y = gl.inline_asm_elementwise("and.b32 $0, $1, 0x81C081C0; mul.rn.bf16x2 $0, $0, $2;", "=&r,r,r", [w, f], dtype=gl.int32,
                                      is_pure=True, pack=1)
    elif GROUP == 1:
        y = gl.inline_asm_elementwise("shf.r.wrap.b32 $0, $1, $1, 3; and.b32 $0, $0, 0x81C081C0; mul.rn.bf16x2 $0, $0, $2;", "=&r,r,r",
                                      [w, f], dtype=gl.int32, is_pure=True, pack=1)
    elif GROUP == 2:
        y = gl.inline_asm_elementwise("shf.r.wrap.b32 $0, $1, $1, 6; and.b32 $0, $0, 0x81C081C0; mul.rn.bf16x2 $0, $0, $2;", "=&r,r,r",
                                      [w, f], dtype=gl.int32, is_pure=True, pack=1)
    else:
        y = gl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x001B001B; mul.lo.u32 $0, $0, 0x1084; and.b32 $0, $0, 0x81C081C0; mul.rn.bf16x2 $0, $0, $2;", "=&r,r,r",
            [w, f], dtype=gl.int32, is_pure=True, pack=1)
    return y


@gluon.jit
def factor(s, GROUP: gl.constexpr):
    """`fused_elements.factor` of scales to which 0x7E7E7E7E has been added."""
    return gl.inline_asm_elementwise("{ .reg .b32 a; prmt.b32 a, $1, 0, $2; shl.b32 $0, a, 7; }", "=r,r,n", [s, 0x4040 + GROUP * 0x0101],
                                     dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def product(a0, a1, a2, a3, b0, b1, c):
    """A warp's MMA. Of thread 4 g + q: a0 to a3 rows g, g + 8, g, g + 8 and columns 2 q, 2 q, 2 q + 8, 2 q + 8 and the next, b0 and b1 the
    same columns of vector g; c: rows g, g, g + 8, g + 8 of vectors 2 q, 2 q + 1, 2 q, 2 q + 1."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3", [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1)


# What a warp's threads hold: [warps, 8, 4], thread 4 g + q of a warp element (g, q). Arrays in shared memory, and what moves them.
L = gl.constexpr(gl.BlockedLayout([1, 1, 1], [1, 8, 4], [4, 1, 1], [2, 1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PLAIN3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def alike(x, AS: gl.constexpr):
    return gl.convert_layout(x, AS, assert_trivial=True)


@gluon.jit
def words(codes):
    """Of a tile's codes [4, 8, 16] in shared memory those of row g: w[2 m + low] is word 8 m + 2 q + low."""
    C_L: gl.constexpr = gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 8]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
                                                   [[1, 0, 0], [2, 0, 0]], [], [4, 8, 16])
    w0, w1 = gl.split(gl.permute(gl.reshape(codes.load(C_L), [4, 8, 2, 4, 2]), [0, 1, 3, 2, 4]))
    w00, w01 = gl.split(w0)
    w10, w11 = gl.split(w1)
    return alike(w00, L), alike(w10, L), alike(w01, L), alike(w11, L)


@gluon.jit
def gated(codes, up_codes, scale, up_scale):
    """A tile's words and scales of rows g of gate and of up."""
    s = gl.expand_dims(scale.load(gl.SliceLayout(2, L)), 2)
    t = gl.expand_dims(up_scale.load(gl.SliceLayout(2, L)), 2)
    return words(codes) + words(up_codes) + (s, t)


@gluon.jit
def halves(codes, high_codes, scale):
    """A tile's words and scales of rows g and g + 8; scale: [4, 2, 8]."""
    S_L: gl.constexpr = gl.DistributedLinearLayout([[0, 1, 0]], [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
                                                   [[1, 0, 0], [2, 0, 0]], [], [4, 2, 8])
    s, t = gl.split(gl.permute(scale.load(S_L), [0, 2, 1]))
    s = gl.expand_dims(alike(s, gl.SliceLayout(2, L)), 2)
    t = gl.expand_dims(alike(t, gl.SliceLayout(2, L)), 2)
    return words(codes) + words(high_codes) + (s, t)


@gluon.jit
def columns(v, OWN: gl.constexpr):
    """Two words a thread, group and m of a tile [64] of the token, or with OWN [4, 64] of h, a warp an expert."""
    if OWN:
        V_L: gl.constexpr = gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 16], [0, 32]], [[0, 4], [0, 8], [0, 0], [0, 0], [0, 0]],
                                                       [[1, 0], [2, 0]], [], [4, 64])
        lo, hi = gl.split(gl.permute(gl.reshape(v.load(V_L), [4, 2, 2, 4, 2, 2]), [0, 3, 1, 2, 4, 5]))
    else:
        X_L: gl.constexpr = gl.DistributedLinearLayout([[1], [2], [16], [32]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [64])
        lo, hi = gl.split(gl.permute(gl.reshape(v.load(X_L), [2, 2, 4, 2, 2]), [2, 0, 1, 3, 4]))
    return lo, hi


@gluon.jit
def column(x, g: gl.constexpr, m: gl.constexpr, OWN: gl.constexpr):
    """[4, 1, 4] or [1, 1, 4] of [.., q, group / 2, group % 2, m]."""
    first, second = gl.split(x)
    x = second if m else first
    first, second = gl.split(x)
    x = second if g % 2 else first
    first, second = gl.split(x)
    x = second if g // 2 else first
    if OWN:
        y = gl.expand_dims(alike(x, gl.SliceLayout(1, L)), 1)
    else:
        y = gl.expand_dims(gl.expand_dims(alike(x, gl.SliceLayout(0, gl.SliceLayout(1, L))), 0), 1)
    return y


@gluon.jit
def sixteen(c, w, v, OWN: gl.constexpr):
    """A tile of 16 rows of a warp. w: words of row g and of row g + 8 of M, a scale of each."""
    s = w[8] + 0x7E7E7E7E
    t = w[9] + 0x7E7E7E7E
    for g in gl.static_range(4):
        f = factor(s, g)
        u = factor(t, g)
        for m in gl.static_range(2):
            a = decoded(w[2 * m], f, g), decoded(w[4 + 2 * m], u, g), decoded(w[2 * m + 1], f, g), decoded(w[5 + 2 * m], u, g)
            c = product(a[0], a[1], a[2], a[3], column(v[0], g, m, OWN), column(v[1], g, m, OWN), c)
    return c


@gluon.jit
def copy(to, at, on):
    """16 bytes at a time, past L1."""
    async_copy.async_copy_global_to_shared(to, at, mask=on, cache_modifier=".cg")


@gluon.jit
def total(sums, ids, weights, E: gl.constexpr, K: gl.constexpr, O_L: gl.constexpr):
    """The sum over experts, ascending. Of equal ids the first counts, with all their weights."""
    counts = ()
    summed = ()
    for k in gl.static_range(K):
        here = (ids[k] >= 0) & (ids[k] < E)
        weight = 0.0
        for j in gl.static_range(K):
            if j < k:
                here = here & (ids[j] != ids[k])
            weight += gl.where(ids[j] == ids[k], weights[j], 0.0)
        counts = counts + (here,)
        summed = summed + (weight,)
    y = ()
    for k in gl.static_range(K):
        y = y + (sums.index(k).load(O_L),)
    acc = gl.zeros([8, 4, 2], gl.float32, O_L)
    for i in gl.static_range(K):
        there = False
        weight = 0.0
        next_y = acc * 0.0
        for k in gl.static_range(K):
            rank = 0
            for j in gl.static_range(K):
                rank += (counts[j] & (ids[j] < ids[k])).to(gl.int32)
            mine = counts[k] & (rank == i)
            there = there | mine
            weight = gl.where(mine, summed[k], weight)
            next_y = gl.where(mine, y[k], next_y)
        acc = gl.where(there, acc + weight * next_y, acc)
    return acc
