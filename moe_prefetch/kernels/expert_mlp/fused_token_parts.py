"""What `fused_token.py` is made of: words of codes, products of a block, sums of four threads."""
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# What a warp's threads hold: [warps, 8, 4], thread 4 g + q of a warp element (g, q); and of rows of 16 words four a thread.
L = gl.constexpr(gl.BlockedLayout([1, 1, 1], [1, 8, 4], [4, 1, 1], [2, 1, 0]))
W_L = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 8, 4], [4, 1, 1], [2, 1, 0]))
# Arrays in shared memory that copies of 16 bytes fill, and others.
WIDE3 = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [2, 1, 0]))
# Codes: halves of a row change places from one pair of rows to the next, so that no two threads meet in a bank.
CODES3 = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 2, [2, 1, 0]))
CODES4 = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 2, [3, 2, 1, 0]))
PLAIN2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PLAIN3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


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
def part(address, AT: gl.constexpr, TYPE: gl.constexpr):
    return gl.multiple_of((address + AT).to(gl.pointer_type(TYPE), bitcast=True), 128)


@gluon.jit
def copy(to, at, on):
    """16 bytes at a time, past L1; zeros where it is not on."""
    async_copy.async_copy_global_to_shared(to, at, mask=on, cache_modifier=".cg")


@gluon.jit
def raised(x):
    """`fused_elements.raised` of two numbers in a word."""
    return gl.inline_asm_elementwise("{ .reg .b32 a; mov.b32 a, 0x5F805F80; mul.rn.bf16x2 $0, $1, a; }", "=r,r", [x], dtype=gl.int32,
                                     is_pure=True, pack=1)


@gluon.jit
def decoded(w, B: gl.constexpr):
    """`fused_elements.e2m1` of two words of 16 bits in one of 32."""
    if B == 0:
        y = gl.inline_asm_elementwise("and.b32 $0, $1, 0x81C081C0;", "=r,r", [w], dtype=gl.int32, is_pure=True, pack=1)
    elif B == 1:
        y = gl.inline_asm_elementwise("shf.r.wrap.b32 $0, $1, $1, 3; and.b32 $0, $0, 0x81C081C0;", "=r,r", [w], dtype=gl.int32,
                                      is_pure=True, pack=1)
    elif B == 2:
        y = gl.inline_asm_elementwise("shf.r.wrap.b32 $0, $1, $1, 6; and.b32 $0, $0, 0x81C081C0;", "=r,r", [w], dtype=gl.int32,
                                      is_pure=True, pack=1)
    else:
        y = gl.inline_asm_elementwise("and.b32 $0, $1, 0x001B001B; mul.lo.u32 $0, $0, 0x1084; and.b32 $0, $0, 0x81C081C0;", "=r,r", [w],
                                      dtype=gl.int32, is_pure=True, pack=1)
    return y


@gluon.jit
def factor(s, q):
    """`fused_elements.factor` of group q."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; shl.b32 b, $2, 12; or.b32 b, b, 0x444; add.u32 a, $1, 0x3E3E3E3E; prmt.b32 a, a, 0, b; shr.u32 $0, a, 1; }",
        "=f,r,r", [s, q], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def products(low, high, v, B: gl.constexpr):
    """Block B of 16 rows times the vectors of eight blocks, which are N, from zero. Of thread 4 g + q, low and high: four words of row g
    and of row g + 8; v: of vector g; result: rows g, g, g + 8, g + 8 and vectors 2 q, 2 q + 1, 2 q, 2 q + 1."""
    a = decoded(low[0], B), decoded(high[0], B), decoded(low[1], B), decoded(high[1], B)
    b = decoded(low[2], B), decoded(high[2], B), decoded(low[3], B), decoded(high[3], B)
    return gl.inline_asm_elementwise(
        """{ .reg .f32 z; mov.f32 z, 0f00000000;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$12, $13}, {z, z, z, z};
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$14, $15}, {$0, $1, $2, $3}; }""",
        "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r", [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], v[0], v[1], v[2], v[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1)


@gluon.jit
def gated(acc, gate, up, v, s, t, q, ODD: gl.constexpr):
    """Adds a tile of 8 rows of gate and 8 of up: to a thread's two sums what its own block gives. ODD: the second tile of v's two."""
    f = factor(s, q)
    u = factor(t, q)
    for b in gl.static_range(4):
        d = products(gate, up, v, b)
        acc = gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.u32 p, $6, $7; @p fma.rn.f32 $0, $2, $4, $0; @p fma.rn.f32 $1, $3, $5, $1; }",
            "=f,=f,f,f,f,f,r,n,0,1", [d[ODD], d[2 + ODD], f, u, q, b, acc[0], acc[1]], dtype=(gl.float32, gl.float32), is_pure=True, pack=1)
    return acc


@gluon.jit
def halves(acc, w, v, q):
    """Adds two tiles of 8 rows, which are rows 0 to 7 and 8 to 15 of M. w: words of both, scales of both."""
    f = factor(w[8], q)
    u = factor(w[9], q)
    for b in gl.static_range(4):
        d = products(w[:4], w[4:8], v, b)
        acc = gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.u32 p, $5, $6; @p fma.rn.f32 $0, $1, $3, $0; @p fma.rn.f32 $0, $2, $4, $0; }",
            "=f,f,f,f,f,r,n,0", [d[0], d[3], f, u, q, b, acc], dtype=gl.float32, is_pure=True, pack=1)
    return acc


@gluon.jit
def quad(x):
    """(x0 + x1) + (x2 + x3) of four neighbouring threads."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 a; shfl.sync.bfly.b32 a, $1, 1, 31, -1; add.rn.f32 $0, $1, a;
        shfl.sync.bfly.b32 a, $0, 2, 31, -1; add.rn.f32 $0, $0, a; }""", "=&f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def alike(x, AS: gl.constexpr):
    return gl.convert_layout(x, AS, assert_trivial=True)


@gluon.jit
def four(w):
    """The four words of each thread, one by one, of rows of 4 or 16."""
    even, odd = gl.split(gl.reshape(w, [w.shape[0], w.shape[1], w.shape[2] // 2, 2]))
    a, c = gl.split(gl.reshape(even, [w.shape[0], w.shape[1], w.shape[2] // 4, 2]))
    b, d = gl.split(gl.reshape(odd, [w.shape[0], w.shape[1], w.shape[2] // 4, 2]))
    return a, b, c, d


@gluon.jit
def words(codes):
    """Of codes [4, 8, 16] in shared memory each thread's four: 2 q and 2 q + 1 of the first product, 8 + 2 q and 9 + 2 q of the second."""
    C_L: gl.constexpr = gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 8]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
                                                   [[1, 0, 0], [2, 0, 0]], [], [4, 8, 16])
    even, odd = gl.split(gl.permute(gl.reshape(codes.load(C_L), [4, 8, 2, 4, 2]), [0, 1, 3, 2, 4]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return alike(a, L), alike(b, L), alike(c, L), alike(d, L)


@gluon.jit
def own(h):
    """Of h [4, 8, 16] in shared memory each thread's four words, a warp an expert."""
    a, b, c, d = four(h.load(W_L))
    return alike(a, L), alike(b, L), alike(c, L), alike(d, L)


@gluon.jit
def vectors(x):
    """Of a pair of tiles [2, 4, 16] in shared memory each thread's four words, the same in all warps: of block g // 2 of tile g % 2."""
    X_L: gl.constexpr = gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 8]], [[0, 0, 2], [0, 0, 4], [1, 0, 0], [0, 1, 0], [0, 2, 0]],
                                                   [[0, 0, 0], [0, 0, 0]], [], [2, 4, 16])
    w = gl.permute(gl.reshape(x.load(X_L), [2, 4, 2, 4, 2]), [1, 0, 3, 2, 4])
    even, odd = gl.split(gl.reshape(w, [8, 4, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return _of_all(a), _of_all(b), _of_all(c), _of_all(d)


@gluon.jit
def _of_all(x):
    return gl.expand_dims(alike(gl.reshape(x, [8, 4]), gl.SliceLayout(0, L)), 0)


@gluon.jit
def row(s):
    """A word of each row, [4, 8] in shared memory."""
    return gl.expand_dims(s.load(gl.SliceLayout(2, L)), 2)


@gluon.jit
def total(sums, first: gl.constexpr, ids, weights, E: gl.constexpr, K: gl.constexpr, O_L: gl.constexpr):
    """[8, 4] of 8 rows: the sum over experts, ascending, of weight times y. Of equal ids the first counts, with all their
    weights."""
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
        y = y + (sums.index(first + k).load(O_L),)
    acc = gl.zeros([8, 4], gl.float32, O_L)
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
