"""Whole pages of FP4 in Gluon: the bytes of `fused.encode_pages`, with errors added up by tensor cores.

A lookup gives eight bytes, an element's errors under eight scales; as they lie they are its part of the product's first operand, and the
second has a channel's weight where the inner index is the candidate. tests/kernels/gluon_cpu.py runs this text on a CPU.

Programs begin while the kernel before them, which only says that nothing has been counted, still runs. So whatever they read comes from L2:
a multiprocessor's L1 need not have been emptied since the kernels before both.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import naive as law
from .fused_stores import (
    _bytes,
    _finish,
    _outliers,
    _outlying,
    _over_kept,
    _put,
    _store_k,
    _store_outliers,
    _store_v,
)
from .fused_tiles import (
    FLAT,
    OWN,
    SCRATCH,
    _ask,
    _centred,
    _chosen,
    _clean,
    _codes,
    _columns,
    _gained,
    _lane,
    _later,
    _learn,
    _limit,
    _loud,
    _most,
    _quiet,
    _read,
    _shared,
    _soon,
    _wait,
    _wait_before,
    _weights,
)

PROGRAMS = 4  # of 128 registers a thread and 44 KB of shared memory, on a multiprocessor


@gluon.jit
def _run(r, runs, runs_ptr, none):
    """Of a run, or the last one: page, slot, row, count. `none` is 0, but may differ from lane to lane for all the compiler knows: what all
    lanes share it would move to other registers, and wait for it at once.
    """
    page, slot, row, count = gl.inline_asm_elementwise(
        "ld.global.cg.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [(runs_ptr + gl.minimum(r, runs - 1) * 4 + none).to(gl.int64)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)
    return page, slot, row, count


@gluon.jit
def _keys_again(record, row, slot, count, n, k_ptr, counts_ptr, start, lane, wide, N: gl.constexpr, D: gl.constexpr):
    """A warp's part of a page anew, with numbers that are none or beyond FP16 made such and counted. Returns scales."""
    MEAN: gl.constexpr = 4 * D + 16
    _wait_before(start)
    s0_PQ = gl.zeros([32, 4], gl.int32, OWN)
    s1_PQ = s0_PQ
    s2_PQ = s0_PQ
    s3_PQ = s0_PQ
    for i in range(D // 32):
        g = i // 2
        upper = i % 2
        w = _weights(start, g * 64, D)
        gain = _columns(start, MEAN + D + g * 64)
        x = _clean(k_ptr, row - slot, slot, count, n, g * 64, upper, counts_ptr, gain, N, D)
        y = _gained(_centred(x, _columns(start, MEAN + g * 64)), gain)
        inverse0, inverse1, scale = _chosen(y, w, _most(y, lane, 2), lane, start, wide, 2)
        c0, d0 = _codes(y[:8], inverse0)
        c1, d1 = _codes(y[8:], inverse1)
        _store_k(record + g * 32, gl.join(_bytes(c0, c1), _bytes(d0, d1)), upper * 64, slot, count, D)
        s0_PQ = gl.where(i == 0, scale, s0_PQ)
        s1_PQ = gl.where(i == 1, scale, s1_PQ)
        s2_PQ = gl.where(upper == 0, scale, s2_PQ)
        s3_PQ = scale
    return s0_PQ, s1_PQ, s2_PQ, s3_PQ


@gluon.jit
def _values_again(to, row, slot, count, n, v_ptr, counts_ptr, start, lane, wide, N: gl.constexpr, D: gl.constexpr):
    """As `_keys_again`."""
    GAIN: gl.constexpr = 5 * D + 16
    _wait_before(start)
    s0_PQ = gl.zeros([32, 4], gl.int32, OWN)
    s1_PQ = s0_PQ
    s2_PQ = s0_PQ
    s3_PQ = s0_PQ
    for i in range(D // 32):
        g = i // 2
        upper = i % 2
        w = _weights(start, g * 64, D)
        gain = _columns(start, GAIN + g * 64)
        y = _gained(_clean(v_ptr, row - slot, slot, count, n, g * 64, upper, counts_ptr, gain, N, D), gain)
        inverse, scale = _chosen(y, w, _most(y, lane, 1), lane, start, wide, 1)
        codes = _codes(y[:8], inverse) + _codes(y[8:], inverse)
        if upper == 0:
            _put(start, codes)
        else:
            _store_v(to, _over_kept(start, codes), g * 64, slot, count, g * (wide - 128))
        s0_PQ = gl.where(i == 0, scale, s0_PQ)
        s1_PQ = gl.where(i == 1, scale, s1_PQ)
        s2_PQ = gl.where(upper == 0, scale, s2_PQ)
        s3_PQ = scale
    return s0_PQ, s1_PQ, s2_PQ, s3_PQ


@gluon.jit
def _keys(
    r0, runs, step, n, pool_ptr, k_ptr, runs_ptr, channels_ptr, k_mean_ptr, counts_ptr, start, lane, wide,
    N: gl.constexpr, D: gl.constexpr, OUT: gl.constexpr, OUTP: gl.constexpr, PAGE_BYTES: gl.constexpr, KS_AT: gl.constexpr,
    KO_AT: gl.constexpr, TRAILER_AT: gl.constexpr,
):
    MEAN: gl.constexpr = 4 * D + 16
    if OUT > 0:
        ch_O, mean_O = _outlying(n, channels_ptr, k_mean_ptr, D, OUT, OUTP)
    turn = start + SCRATCH
    page, slot, row, count = _run(r0, runs, runs_ptr, start + lane >> 31)
    for r in range(r0, runs, step):
        then_page, then_slot, then_row, then_count = _run(r + step, runs, runs_ptr, start + lane >> 31)
        if count == 0:
            # its page may be another run's
            _wait(start)
            for upper in gl.static_range(2):
                _ask(k_ptr, start, then_row - then_slot, then_slot, then_count, n, 0, upper, N, D)
        else:
            record = pool_ptr + (page.to(gl.int64) * N + n) * PAGE_BYTES
            fill = (record + TRAILER_AT + 8).to(gl.pointer_type(gl.int32))
            # of 128 channels none of this would keep its place in registers: it is asked for again once they are coded
            if D == 64:
                filled = gl.load(fill, cache_modifier=".cg")
                old = gl.load((record + TRAILER_AT).to(gl.pointer_type(gl.int32)), cache_modifier=".cg")
                if OUT > 0:
                    out_TO = _outliers(row - slot, slot, count, n, k_ptr, ch_O, N, D, OUTP)
            else:
                _soon(fill)
            # of the groups: lower and upper tokens of the first, of the last
            s0_PQ = gl.zeros([32, 4], gl.int32, OWN)
            s1_PQ = s0_PQ
            s2_PQ = s0_PQ
            s3_PQ = s0_PQ
            _quiet(start)
            for g in range(D // 64):
                w = _weights(start, g * 64, D)
                mine = ()
                for upper in gl.static_range(2):
                    mean = _columns(start, MEAN + g * 64)
                    gain = _columns(start, MEAN + D + g * 64)
                    _wait(start)
                    y = _gained(_centred(_read(start, upper, k_ptr), mean), gain)
                    most = _most(y, lane, 2)
                    if g < D // 64 - 1:
                        _ask(k_ptr, start, row - slot, slot, count, n, (g + 1) * 64, upper, N, D)
                    else:
                        to_slot, to_row, to_count = _later(then_slot, then_row, then_count)
                        _ask(k_ptr, start, to_row - to_slot, to_slot, to_count, n, 0, upper, N, D)
                    inverse0, inverse1, scale = _chosen(y, w, most, lane, start, wide, 2)
                    c0, d0 = _codes(y[:8], inverse0)
                    c1, d1 = _codes(y[8:], inverse1)
                    _store_k(record + g * 32, gl.join(_bytes(c0, c1), _bytes(d0, d1)), upper * 64, slot, count, D)
                    mine = mine + (scale,)
                s0_PQ = gl.where(g == 0, mine[0], s0_PQ)
                s1_PQ = gl.where(g == 0, mine[1], s1_PQ)
                s2_PQ = mine[0]
                s3_PQ = mine[1]
            if _loud(start, D) != 0:
                s0_PQ, s1_PQ, s2_PQ, s3_PQ = _keys_again(record, row, slot, count, n, k_ptr, counts_ptr, start, lane, wide, N, D)
            if D > 64:
                filled = gl.load(fill, cache_modifier=".cg")
                old = gl.load((record + TRAILER_AT).to(gl.pointer_type(gl.int32)), cache_modifier=".cg")
                if OUT > 0:
                    out_TO = _outliers(row - slot, slot, count, n, k_ptr, ch_O, N, D, OUTP)
            scales = (s0_PQ, s1_PQ) if D == 64 else (s0_PQ, s1_PQ, s2_PQ, s3_PQ)
            _finish(record, KS_AT, TRAILER_AT, old, scales, slot, count, start, turn, D // 32, 2)
            if OUT > 0:
                _store_outliers(record, out_TO, mean_O, slot, count, counts_ptr, OUT, OUTP, KO_AT)
            gl.store(fill, gl.maximum(filled, slot + count))
            turn ^= 16
        page = then_page
        slot = then_slot
        row = then_row
        count = then_count


@gluon.jit
def _values(
    r0, runs, step, n, pool_ptr, v_ptr, runs_ptr, counts_ptr, start, lane, wide,
    N: gl.constexpr, D: gl.constexpr, PAGE_BYTES: gl.constexpr, V_AT: gl.constexpr, VS_AT: gl.constexpr, TRAILER_AT: gl.constexpr,
):
    GAIN: gl.constexpr = 5 * D + 16
    turn = start + SCRATCH
    page, slot, row, count = _run(r0, runs, runs_ptr, start + lane >> 31)
    for r in range(r0, runs, step):
        then_page, then_slot, then_row, then_count = _run(r + step, runs, runs_ptr, start + lane >> 31)
        if count == 0:
            _wait(start)
            for upper in gl.static_range(2):
                _ask(v_ptr, start, then_row - then_slot, then_slot, then_count, n, 0, upper, N, D)
        else:
            record = pool_ptr + (page.to(gl.int64) * N + n) * PAGE_BYTES
            old = gl.load((record + TRAILER_AT + 4).to(gl.pointer_type(gl.int32)), cache_modifier=".cg")
            s0_PQ = gl.zeros([32, 4], gl.int32, OWN)
            s1_PQ = s0_PQ
            s2_PQ = s0_PQ
            s3_PQ = s0_PQ
            _quiet(start)
            for g in range(D // 64):
                w = _weights(start, g * 64, D)
                mine = ()
                for upper in gl.static_range(2):
                    gain = _columns(start, GAIN + g * 64)
                    _wait(start)
                    y = _gained(_read(start, upper, v_ptr), gain)
                    most = _most(y, lane, 1)
                    if g < D // 64 - 1:
                        _ask(v_ptr, start, row - slot, slot, count, n, (g + 1) * 64, upper, N, D)
                    else:
                        to_slot, to_row, to_count = _later(then_slot, then_row, then_count)
                        _ask(v_ptr, start, to_row - to_slot, to_slot, to_count, n, 0, upper, N, D)
                    inverse, scale = _chosen(y, w, most, lane, start, wide, 1)
                    codes = _codes(y[:8], inverse) + _codes(y[8:], inverse)
                    if upper == 0:
                        _put(start, codes)
                    mine = mine + (scale,)
                _store_v(record + V_AT, _over_kept(start, codes), g * 64, slot, count, g * (wide - 128))
                s0_PQ = gl.where(g == 0, mine[0], s0_PQ)
                s1_PQ = gl.where(g == 0, mine[1], s1_PQ)
                s2_PQ = mine[0]
                s3_PQ = mine[1]
            if _loud(start, D) != 0:
                s0_PQ, s1_PQ, s2_PQ, s3_PQ = _values_again(record + V_AT, row, slot, count, n, v_ptr, counts_ptr, start, lane, wide, N, D)
            scales = (s0_PQ, s1_PQ) if D == 64 else (s0_PQ, s1_PQ, s2_PQ, s3_PQ)
            _finish(record, VS_AT, TRAILER_AT + 4, old, scales, slot, count, start, turn, D // 64, 1)
            turn ^= 16
        page = then_page
        slot = then_slot
        row = then_row
        count = then_count


@gluon.jit(do_not_specialize=["runs", "step", "wide", "apart"])
def encode_pages(
    pool_ptr, k_ptr, v_ptr, runs_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, v_gain_ptr, v_weight_ptr, counts_ptr, table_ptr,
    runs, step, wide, apart,
    N: gl.constexpr, D: gl.constexpr, OUT: gl.constexpr, OUTP: gl.constexpr, PAGE_BYTES: gl.constexpr, V_AT: gl.constexpr,
    KS_AT: gl.constexpr, VS_AT: gl.constexpr, KO_AT: gl.constexpr, TRAILER_AT: gl.constexpr,
):
    """Runs of up to 128 tokens: a program takes K or V of one head of every so many. While one is encoded, the next one's numbers come.

    `wide` is 128, a factor that the compiler must not know: else it shifts, which is slower here. Programs `apart` from each other may
    share a multiprocessor; they take K and V in turn.
    """
    p = gl.program_id(0)
    side = (p + p // apart) % 2
    n = p % (2 * N) // 2
    first = p // (2 * N)
    gains = k_gain_ptr
    weights = k_weight_ptr
    if side != 0:
        gains = v_gain_ptr
        weights = v_weight_ptr
    ch_I = gl.arange(0, 128, FLAT) % D
    gain_I = gl.load(gains + n * D + ch_I, cache_modifier=".cg")
    weight_I = gl.load(weights + n * D + ch_I, cache_modifier=".cg").to(gl.int32)
    mean_I = gl.load(k_mean_ptr + n * D + ch_I, cache_modifier=".cg")
    out_I = ch_I < 0
    for o in gl.static_range(OUT):
        out_I = out_I | (ch_I == gl.load(channels_ptr + n * OUT + o, cache_modifier=".cg"))
    lane = _lane()
    _, slot, row, count = _run(first, runs, runs_ptr, lane >> 31)
    start = _shared(table_ptr)
    for upper in gl.static_range(2):
        if side == 0:
            _ask(k_ptr, start, row - slot, slot, count, n, 0, upper, N, D)
        else:
            _ask(v_ptr, start, row - slot, slot, count, n, 0, upper, N, D)
    _learn(start, gain_I, weight_I, mean_I, out_I, ch_I, side == 0, D)
    gl.thread_barrier()
    _limit(start, D)
    if side == 0:
        _keys(first, runs, step, n, pool_ptr, k_ptr, runs_ptr, channels_ptr, k_mean_ptr, counts_ptr, start, lane, wide,
              N, D, OUT, OUTP, PAGE_BYTES, KS_AT, KO_AT, TRAILER_AT)
    else:
        _values(first, runs, step, n, pool_ptr, v_ptr, runs_ptr, counts_ptr, start, lane, wide,
                N, D, PAGE_BYTES, V_AT, VS_AT, TRAILER_AT)
    # who waits for this kernel waits for the one before it, too
    _wait_before(start)


# By dtype of tokens: (head dim, outliers) whose bytes have been compared with the law's on a GPU; others are `fused.encode_pages`' there.
# None: all of them, which is how `benchmarks/kv_encode.py --all` compares the others.
PROVEN: dict[torch.dtype, tuple[tuple[int, int], ...]] | None = {
    torch.bfloat16: ((64, 1), (128, 3), (128, 4)),
    torch.float16: ((64, 0), (64, 1), (128, 0), (128, 3), (128, 4)),
}


def serves(k_TNd: torch.Tensor, v_TNd: torch.Tensor, outliers: int) -> bool:
    """Whether `encode_pages` reads such tokens here: 16-bit numbers, on Hopper, in a layout that is PROVEN, scales apart from codes."""
    dtypes = {k_TNd.dtype, v_TNd.dtype}
    if not dtypes <= {torch.bfloat16, torch.float16}:
        return False
    if k_TNd.device.type != "cuda":
        return True
    proven = PROVEN is None or (len(dtypes) == 1 and (k_TNd.shape[-1], outliers) in PROVEN[k_TNd.dtype])
    return proven and torch.cuda.get_device_capability(k_TNd.device)[0] == 9


@cache
def table_on(device: torch.device) -> torch.Tensor:
    """What programs have in their shared memory, int32 [240, 2]: errors of 208 magnitudes, then for window w and candidate i what, with the
    bits of 2^e, makes the scale and 4 / scale (`assembly.choose`).
    """
    table = law.error_table()
    rows = torch.cat([table[w, : 40 + 8 * w] for w in range(law.WINDOWS)]).to(torch.uint8).view(torch.int32)
    step = 2 + 2 * torch.arange(law.WINDOWS)[:, None] + torch.arange(law.CANDIDATES)
    inverse = (8.0 / (8 + step % 8)).float().view(torch.int32).long() + (132 - step // 8 << 23)
    parts = torch.stack([(step << 20) - (3 << 23), inverse], -1).view(-1, 2)
    return torch.cat([rows, parts.to(torch.int32)]).to(device)


@cache
def programs_on(device: torch.device) -> int:
    """As many as run at once."""
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def grid(device: torch.device, heads: int, runs: int) -> tuple[int, int]:
    """Programs for K or V of a head, and how far apart those are that may share a multiprocessor: an even number."""
    most = programs_on(device)
    return min(max(most // (2 * heads), 1), runs), max(most // PROGRAMS // 2 * 2, 2)
