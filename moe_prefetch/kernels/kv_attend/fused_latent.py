"""Decode attention over MLA pages in FP4 on Hopper, in Gluon: `general_latent.attend_latent`, with products laid out by hand.

Bulk copies bring half a page (64 tokens) to one of two places in shared memory. Four warps decode it to FP16 in registers, which are an
operand of the scores' product (64 tokens by 16 heads); low nibbles also go to a tile in shared memory, which the output's product (64
channels by 16 heads) reads turned, while the next codes are decoded. High nibbles are decoded again, from codes read turned, as that
product's operand in registers: half the channels each way, since either would fill a unit, the data pipe of shared memory or that of logic.
`serves` says for which calls; tests/kernels/gluon_cpu.py runs this text on a CPU.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_init, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...kv.format import PageLayout
from ..kv_fp4.fused import ASM
from .fused_latent_combine import combine_latent, tuning
from .fused_latent_shares import share
from .fused_latent_steps import HEAD, HIGHS, LINES, MMA, PAIRS, QUERIES, SUMS, declare, prepare, step, write
from .latent_recent import attend_recent, pieces_of

NONE = gl.constexpr(-1.0e30)
CODES = gl.NVMMASharedLayout(128, 8, 5)
ROPES = gl.NVMMASharedLayout(128, 16, 3)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _ask(codes, rope, rec, half: gl.constexpr, codes_1, rope_1, codes_bar, rope_bar, ROPE_LINE: gl.constexpr, pred):
    """Have half a record copied. A barrier for each copy: for one that they share the compiler would separate them."""
    tma.async_copy_global_to_shared(codes, [rec, half * 2, 0, 0, 0], codes_bar, codes_1, pred=pred)
    tma.async_copy_global_to_shared(rope, [rec, ROPE_LINE + half * 64, 0], rope_bar, rope_1, pred=pred)


@gluon.jit
def _rcp(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _most(x, N: gl.constexpr, L: gl.constexpr):
    """The largest magnitude that each lane has of a row, [row, lane]."""
    return gl.convert_layout(gl.max(gl.reshape(gl.abs(x), [16, 32, N]), axis=2), L, assert_trivial=True)


@gluon.jit
def _near(base, half: gl.constexpr, KS_AT: gl.constexpr, TRAILER_AT: gl.constexpr):
    """Scales of half a page, four in a word, [token, word], and the page's factor."""
    BYTES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1]], [[0, 2], [1, 0], [2, 0], [4, 0], [8, 0]], [[16, 0], [32, 0]], [], [64, 4])
    t_T = half * 64 + gl.arange(0, 64, gl.SliceLayout(1, BYTES))
    i_I = gl.arange(0, 4, gl.SliceLayout(0, BYTES))
    four = gl.load((base + KS_AT).to(gl.pointer_type(gl.int32)) + t_T[:, None] * 4 + i_I[None, :])
    return four, gl.load((base + TRAILER_AT).to(gl.pointer_type(gl.float32)))


@gluon.jit(do_not_specialize=["table_width", "k7", "k8"])
def attend_latent(
    codes, rope, q_ptr, pool_ptr, table_ptr, stored_ptr, k_gain_ptr, part_ptr, ml_ptr, B, table_width, scale_log2, k7, k8,
    BP: gl.constexpr, N: gl.constexpr, R: gl.constexpr, PAGE_BYTES: gl.constexpr, KS_AT: gl.constexpr, ROPE_LINE: gl.constexpr,
    TRAILER_AT: gl.constexpr,
):
    """Partial attention over pages: latent 512, rotary 64, one query of R heads to N KV heads, 16 an item.

    A program writes slot `program + item` of each item it meets, in the units of codes: K gain and mean are left to `combine_latent`.
    """
    ITEMS: gl.constexpr = N * ((R + 15) // 16)
    FLATB: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    # [word, head, byte] of what a thread has of the output
    OUT_LOW: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 1, 0], [0, 8, 0]], [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[8, 0, 0], [16, 0, 0]], [],
        [32, 16, 2])
    OUT_HIGH: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 1, 0], [8, 0, 0], [0, 8, 0], [64, 0, 0]], [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [128, 16, 2])

    # FP16 tokens may take the places left over
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    declare()

    # allocations of their own, since the compiler separates with barriers what it finds in one
    codes0_s = gl.allocate_shared_memory(gl.uint8, [1, 2, 2, 32, 128], CODES)
    codes1_s = gl.allocate_shared_memory(gl.uint8, [1, 2, 2, 32, 128], CODES)
    rope0_s = gl.allocate_shared_memory(gl.float16, [1, 64, 64], ROPES)
    rope1_s = gl.allocate_shared_memory(gl.float16, [1, 64, 64], ROPES)
    tile0_s = gl.allocate_shared_memory(gl.float16, [1, 64, 64], LINES)
    tile1_s = gl.allocate_shared_memory(gl.float16, [1, 64, 64], LINES)
    tile2_s = gl.allocate_shared_memory(gl.float16, [1, 64, 64], LINES)
    tile3_s = gl.allocate_shared_memory(gl.float16, [1, 64, 64], LINES)
    codes0_bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    codes1_bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    rope0_bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    rope1_bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    q_s = gl.allocate_shared_memory(gl.float16, [4, 16, 128], LINES)
    qr_s = gl.allocate_shared_memory(gl.float16, [1, 16, 64], LINES)
    p_s = gl.allocate_shared_memory(gl.float16, [1, 16, 64], LINES)
    pairs0_s = gl.allocate_shared_memory(gl.int32, [64, 8], PAIRS)
    pairs1_s = gl.allocate_shared_memory(gl.int32, [64, 8], PAIRS)
    high0_s = gl.allocate_shared_memory(gl.float16, [8, 64], HIGHS)
    high1_s = gl.allocate_shared_memory(gl.float16, [8, 64], HIGHS)
    tiles = (tile0_s, tile1_s, tile2_s, tile3_s)
    mbarrier.init(codes0_bar, count=1)
    mbarrier.init(codes1_bar, count=1)
    mbarrier.init(rope0_bar, count=1)
    mbarrier.init(rope1_bar, count=1)

    b_B = gl.arange(0, BP, FLATB)
    pages_B = gl.maximum((gl.load(stored_ptr + b_B, mask=b_B < B, other=0) + 127) // 128, 1)
    pages_B = gl.where(b_B < B, pages_B, 0)
    ends_B = gl.associative_scan(pages_B * ITEMS, 0, _add)
    total = gl.max(ends_B, axis=0)
    program = gl.program_id(0)
    unit, end = share(program, gl.num_programs(0), total, gl.max(pages_B, axis=0), B * ITEMS)
    phase = 0
    while unit < end:
        b = gl.sum((ends_B <= unit).to(gl.int32), axis=0)
        units = gl.sum(gl.where(b_B == b, pages_B, 0), axis=0)
        before = gl.sum(gl.where(b_B == b, ends_B, 0), axis=0) - ITEMS * units
        within = (unit - before) // units if ITEMS > 1 else 0
        u0 = unit - before - within * units
        u1 = gl.minimum(units, u0 + end - unit)
        unit += u1 - u0
        n = within // (ITEMS // N)
        item = b * ITEMS + within
        slot = program + item
        stored = gl.load(stored_ptr + b)
        table = table_ptr + b * table_width
        u1 = gl.where(stored > 0, u1, u0)
        last = gl.maximum(u1 - 1, u0)
        # first what is read from global memory now: behind pages that have been asked for it would wait for all of them
        h_H = gl.arange(0, 16, gl.SliceLayout(1, QUERY))
        k_K = gl.arange(0, 256, gl.SliceLayout(0, QUERY))
        o_O = gl.arange(0, 64, gl.SliceLayout(0, ROPE))
        first = within % (ITEMS // N) * 16
        q_at = q_ptr + (b * N + n) * R * 576
        on_H = (first + h_H < R)[:, None]
        row_H = (first + h_H)[:, None] * 576
        rope_H = first + gl.arange(0, 16, gl.SliceLayout(1, ROPE))
        gain_ptr = k_gain_ptr + n * 512
        q0_HK = gl.load(q_at + row_H + k_K[None, :], mask=on_H, other=0)
        q1_HK = gl.load(q_at + row_H + 256 + k_K[None, :], mask=on_H, other=0)
        r_HO = gl.load(q_at + rope_H[:, None] * 576 + (512 + o_O)[None, :], mask=(rope_H < R)[:, None], other=0)
        gain0_K = gl.load(gain_ptr + k_K)
        gain1_K = gl.load(gain_ptr + 256 + k_K)
        # all warps have left the item before; and queries are asked for before anything waits for the table
        gl.thread_barrier()
        # what stands in a table behind a row's pages is no page
        page = gl.where(stored > 0, gl.load(table + u0), 0)
        base = pool_ptr + (page.to(gl.int64) * N + n) * PAGE_BYTES
        four, now = _near(base, 0, KS_AT, TRAILER_AT)
        other, _ = _near(base, 1, KS_AT, TRAILER_AT)
        near = gl.where(stored > 0, gl.load(table + gl.minimum(u0 + 1, last)), 0)
        some = u0 < u1
        mbarrier.expect(codes0_bar, 16384, pred=some)
        mbarrier.expect(rope0_bar, 8192, pred=some)
        mbarrier.expect(codes1_bar, 16384, pred=some)
        mbarrier.expect(rope1_bar, 8192, pred=some)
        gl.thread_barrier()
        _ask(codes, rope, page * N + n, 0, codes0_s, rope0_s, codes0_bar, rope0_bar, ROPE_LINE, some)
        _ask(codes, rope, page * N + n, 1, codes1_s, rope1_s, codes1_bar, rope1_bar, ROPE_LINE, some)

        # queries: a row's largest element becomes 256
        q0_HK = q0_HK.to(gl.float32)
        q1_HK = q1_HK.to(gl.float32)
        r_HO = r_HO.to(gl.float32)
        q0_HK = q0_HK * _rcp(gain0_K)[None, :]
        q1_HK = q1_HK * _rcp(gain1_K)[None, :]
        most = gl.maximum(gl.maximum(_most(q0_HK, 8, LANES), _most(q1_HK, 8, LANES)), _most(r_HO, 2, LANES))
        amax_H = gl.maximum(gl.max(most, axis=1), 1.0e-30)
        norm_H = 256.0 * _rcp(amax_H)
        norm_r = gl.convert_layout(norm_H, gl.SliceLayout(1, ROPE), assert_trivial=True)
        norm_H = gl.convert_layout(norm_H, gl.SliceLayout(1, QUERY), assert_trivial=True)
        q0_HK = (q0_HK * norm_H[:, None]).to(gl.float16)
        q1_HK = (q1_HK * norm_H[:, None]).to(gl.float16)
        q_s._reinterpret(gl.float16, [16, 512], QUERIES).store(gl.reshape(gl.permute(gl.join(q0_HK, q1_HK), [0, 2, 1]), [16, 512]))
        qr_s.index(0).store((r_HO * norm_r[:, None]).to(gl.float16))
        back_R = gl.convert_layout(amax_H * (scale_log2 / 256.0), HEAD)
        prepare(four, u0 * 128, stored, pairs0_s, high0_s)
        fence_async_shared()
        gl.thread_barrier()

        # 1.0, as a number that the compiler does not know
        factor = gl.minimum(stored, 0) + 0x3F800000
        m_R = gl.full([16], NONE, gl.float32, HEAD)
        l_TR = gl.zeros([4, 8, 16], gl.float32, SUMS)
        acc0 = warpgroup_mma_init(gl.zeros([64, 16], gl.float32, MMA))
        acc1 = warpgroup_mma_init(gl.zeros([64, 16], gl.float32, MMA))
        acc2 = warpgroup_mma_init(gl.zeros([64, 16], gl.float32, MMA))
        acc3 = warpgroup_mma_init(gl.zeros([64, 16], gl.float32, MMA))
        acc4 = warpgroup_mma_init(gl.zeros([128, 16], gl.float32, MMA))
        acc5 = warpgroup_mma_init(gl.zeros([128, 16], gl.float32, MMA))
        for u in range(u0, u1):
            more = u + 1 < u1
            ahead = near
            base = pool_ptr + (near.to(gl.int64) * N + n) * PAGE_BYTES
            near = gl.load(table + gl.minimum(u + 2, last))
            four, then = _near(base, 0, KS_AT, TRAILER_AT)
            m_R, l_TR, factor, acc0, acc1, acc2, acc3, acc4, acc5 = step(
                codes0_s, rope0_s, codes0_bar, rope0_bar, phase, pairs0_s, high0_s, pairs1_s, high1_s, q_s, qr_s, p_s, tiles, other, u * 2,
                stored, now, factor, back_R, m_R, l_TR, acc0, acc1, acc2, acc3, acc4, acc5, k7, k8, more)
            # the place has been read
            _ask(codes, rope, ahead * N + n, 0, codes0_s, rope0_s, codes0_bar, rope0_bar, ROPE_LINE, more)
            other, _ = _near(base, 1, KS_AT, TRAILER_AT)
            m_R, l_TR, factor, acc0, acc1, acc2, acc3, acc4, acc5 = step(
                codes1_s, rope1_s, codes1_bar, rope1_bar, phase, pairs1_s, high1_s, pairs0_s, high0_s, q_s, qr_s, p_s, tiles, four,
                u * 2 + 1, stored, now, factor, back_R, m_R, l_TR, acc0, acc1, acc2, acc3, acc4, acc5, k7, k8, more)
            _ask(codes, rope, ahead * N + n, 1, codes1_s, rope1_s, codes1_bar, rope1_bar, ROPE_LINE, more)
            phase ^= 1
            now = then

        acc0, acc1, acc2, acc3, acc4, acc5 = warpgroup_mma_wait(0, [acc0, acc1, acc2, acc3, acc4, acc5])
        # nothing here waits for global memory: what gains and means do to the sums is done once, by the last step
        unit_1 = factor.to(gl.float32, bitcast=True) * 256.0
        out = part_ptr + slot * 8192
        accs = (acc0, acc1, acc2, acc3)
        for i in gl.static_range(4):
            # rows are [half a group, byte, word of 8]
            acc = gl.reshape(gl.permute(gl.reshape(accs[i], [4, 2, 8, 16]), [0, 2, 3, 1]), [32, 16, 2])
            write(out + 128 * i, acc, unit_1, 32, OUT_LOW)
        write(out + 32, gl.join(acc4, acc5), unit_1, 128, OUT_HIGH)
        l_R = gl.convert_layout(gl.sum(gl.sum(l_TR, axis=1), axis=0), HEAD) * 0.015625
        at_R = ml_ptr + (slot * 16 + gl.arange(0, 16, HEAD)) * 3
        gl.store(at_R, m_R)
        gl.store(at_R + 1, l_R)


PROGRAMS = 2  # of a multiprocessor: 255 registers a thread, 106 KB of shared memory


def sources(pool_PNb: torch.Tensor, layout: PageLayout) -> tuple[TensorDescriptor, TensorDescriptor]:
    """What copies read: codes by halves of a row, and lines of 128 bytes of the rotary part."""
    flat = pool_PNb.view(-1)
    records, size = flat.numel() // layout.page_bytes, layout.page_bytes
    codes = TensorDescriptor(flat, [records, 4, 2, 32, 128], [size, 8192, 128, 256, 1], [1, 2, 2, 32, 128], CODES)
    return codes, TensorDescriptor(flat.view(torch.float16), [records, size // 128, 64], [size // 2, 64, 1], [1, 64, 64], ROPES)


def constants(layout: PageLayout) -> dict[str, int]:
    """What the kernel is compiled for, beside the shapes."""
    at = {k: v[0] for k, v in layout.offsets.items()}
    return {"PAGE_BYTES": layout.page_bytes, "KS_AT": at["k_scales"], "ROPE_LINE": at["k_rope"] // 128, "TRAILER_AT": at["trailer"]}


def serves(layout: PageLayout, pool_PNb: torch.Tensor, queries: int, sliding: int, softcap: float) -> bool:
    """Whether `attend_latent` takes a call: one query a sequence over FP4 pages of DeepSeek's shape, on Hopper."""
    f = layout.format
    hopper = pool_PNb.device.type != "cuda" or torch.cuda.get_device_capability(pool_PNb.device)[0] == 9
    # what copies read starts at a multiple of 16 bytes
    there = pool_PNb.numel() > 0 and pool_PNb.data_ptr() % 16 == 0
    return (hopper and there and f.code == "fp4" and f.order == "planes" and f.scale == "e4m3" and f.block == 32 and layout.k_dim == 512
            and layout.v_dim == 0 and layout.rope == 64 and layout.outliers == 0 and queries == 1 and sliding == 0 and softcap == 0)


@cache
def programs_on(device: torch.device) -> int:
    """Programs of one launch: all of them fit on the chip at once."""
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def attend(
    q_BHTd: torch.Tensor, q_len_B: torch.Tensor, pool_PNb: torch.Tensor, table_BP: torch.Tensor, stored_B: torch.Tensor,
    length_B: torch.Tensor, sink_k: torch.Tensor, recent_k: torch.Tensor, recent_first_B: torch.Tensor, book: tuple[torch.Tensor, ...],
    layout: PageLayout, out: torch.Tensor, lse: torch.Tensor, scale_log2: float, sink_H: torch.Tensor | None, padded: int,
) -> None:
    """What `general_latent.attend` does, for calls that it `serves`; fills out and lse. padded: a power of two >= the batch."""
    (B, H), N, sinks = q_BHTd.shape[:2], pool_PNb.shape[1], sink_k.shape[2]
    R, ring = H // N, max(recent_k.shape[2], 1)
    programs, items, q = programs_on(q_BHTd.device), B * N * -(-R // 16), q_BHTd.contiguous()
    pieces, each = pieces_of(sinks + ring)
    f32 = {"dtype": torch.float32, "device": q.device}
    slots = programs + items * (1 + pieces)
    part, ml = torch.empty(slots, 16, 512, **f32), torch.empty(slots, 16, 3, **f32)
    pdl = {"launch_pdl": True} if ASM.value else {}
    attend_latent[(programs,)](
        *sources(pool_PNb, layout), q, pool_PNb, table_BP, stored_B, book[2], part, ml, B, table_BP.shape[1], scale_log2, 1 << 7, 1 << 8,
        BP=padded, N=N, R=R, **constants(layout), num_warps=4, maxnreg=255)
    # beside the pages, in places that they leave
    attend_recent[(items, pieces)](
        q, stored_B, length_B, sink_k, recent_k, recent_first_B, book[1], book[2], part, ml, programs + items, scale_log2, N=N, R=R, RP=16,
        D=512, ROPE=64, SINKS=sinks, RING=ring, TT=32, EACH=each, PDL=bool(pdl), num_warps=8, **pdl)
    how = tuning(programs, items)
    combine_latent[(B * H, 512 * how["SPLIT"] // (how["WARPS"] * 32 * how["V"]))](
        q_len_B, stored_B, length_B, book[1], book[2], lse if sink_H is None else sink_H, part, ml, out, lse, B, programs, programs + items,
        BP=padded, N=N, R=R, PIECES=pieces, LOGIT=sink_H is not None, PDL=bool(pdl), num_warps=how["WARPS"], **how, **pdl)
