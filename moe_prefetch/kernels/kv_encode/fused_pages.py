"""Whole pages of FP4 in Gluon: the bytes of `fused.encode_pages`, with errors added up by tensor cores.

A lookup gives eight bytes, an element's errors under eight scales; as they lie they are its part of the product's first operand, and the
second has a channel's weight where the inner index is the candidate. tests/kernels/gluon_cpu.py runs this text on a CPU.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import naive as law
from .fused_tiles import (
    OWN,
    _ask,
    _bytes,
    _centred,
    _chosen,
    _codes,
    _columns,
    _finish,
    _gained,
    _outliers,
    _read,
    _shared,
    _store_k,
    _store_outliers,
    _store_v,
    _wait,
    _weights,
)

PROGRAMS = 4  # of 128 registers a thread and 44 KB of shared memory, on a multiprocessor


@gluon.jit
def _next(item, g, items, k_ptr, v_ptr, runs_ptr, N: gl.constexpr, D: gl.constexpr):
    """What is read after group g of an item: side, row, slot, count, head, first channel."""
    more = g + 1 < D // 64
    then = gl.where(more, item, gl.minimum(item + gl.num_programs(0), items - 1))
    run = runs_ptr + then // (2 * N) * 4
    slot = gl.load(run + 1)
    return then % 2, gl.load(run + 2) - slot, slot, gl.load(run + 3), then // 2 % N, gl.where(more, (g + 1) * 64, 0)


@gluon.jit
def _ask_next(then, k_ptr, v_ptr, start, N: gl.constexpr, D: gl.constexpr):
    side, row, slot, count, n, first = then
    if side == 0:
        _ask(k_ptr, start, row, slot, count, n, first, N, D)
    else:
        _ask(v_ptr, start, row, slot, count, n, first, N, D)


@gluon.jit
def _keys(
    item, items, record, row, slot, count, n, k_ptr, v_ptr, runs_ptr, channels_ptr, k_mean_ptr, ready_ptr, counts_ptr, start, lane,
    N: gl.constexpr, D: gl.constexpr, OUT: gl.constexpr, OUTP: gl.constexpr, KS_AT: gl.constexpr, KO_AT: gl.constexpr,
    TRAILER_AT: gl.constexpr,
):
    # of the groups: lower and upper tokens of the first, of the last
    s0_PQ = gl.zeros([32, 4], gl.int32, OWN)
    s1_PQ = s0_PQ
    s2_PQ = s0_PQ
    s3_PQ = s0_PQ
    fill = (record + TRAILER_AT + 8).to(gl.pointer_type(gl.int32))
    filled = gl.load(fill)
    old = gl.load((record + TRAILER_AT).to(gl.pointer_type(gl.int32)))
    if OUT > 0:
        out_TO = _outliers(row, slot, count, n, k_ptr, channels_ptr, k_mean_ptr, N, D, OUT, OUTP)
    words = ready_ptr + N * D + n * 4 * D
    for g in range(D // 64):
        at = n * D + g * 64
        then = _next(item, g, items, k_ptr, v_ptr, runs_ptr, N, D)
        w0 = _weights(words + g * 64, D)
        w1 = _weights(words + g * 64 + 32, D)
        _wait(start)
        mine = ()
        for upper in gl.static_range(2):
            x0 = _centred(_read(start, 2 * upper, k_ptr, counts_ptr), _columns(k_mean_ptr + at))
            x1 = _centred(_read(start, 2 * upper + 1, k_ptr, counts_ptr), _columns(k_mean_ptr + at + 32))
            if upper == 1:
                _ask_next(then, k_ptr, v_ptr, start, N, D)
            y0 = _gained(x0, _columns(ready_ptr.to(gl.pointer_type(gl.float32)) + at))
            y1 = _gained(x1, _columns(ready_ptr.to(gl.pointer_type(gl.float32)) + at + 32))
            inverse0, inverse1, scale = _chosen(y0 + y1, w0 + w1, lane, start, 2)
            c0, d0 = _codes(y0, inverse0)
            c1, d1 = _codes(y1, inverse1)
            _store_k(record + g * 32, gl.join(_bytes(c0, c1), _bytes(d0, d1)), upper * 64, slot, count, D)
            mine = mine + (scale,)
        s0_PQ = gl.where(g == 0, mine[0], s0_PQ)
        s1_PQ = gl.where(g == 0, mine[1], s1_PQ)
        s2_PQ = mine[0]
        s3_PQ = mine[1]
    scales = (s0_PQ, s1_PQ) if D == 64 else (s0_PQ, s1_PQ, s2_PQ, s3_PQ)
    _finish(record, KS_AT, TRAILER_AT, old, scales, slot, count, D // 32, 2)
    if OUT > 0:
        _store_outliers(record, out_TO, slot, count, OUT, OUTP, KO_AT)
    gl.store(fill, gl.maximum(filled, slot + count))


@gluon.jit
def _values(
    item, items, record, row, slot, count, n, k_ptr, v_ptr, runs_ptr, v_gain_ptr, ready_ptr, counts_ptr, start, lane,
    N: gl.constexpr, D: gl.constexpr, V_AT: gl.constexpr, VS_AT: gl.constexpr, TRAILER_AT: gl.constexpr,
):
    # of the groups: lower and upper tokens of the first, of the last
    s0_PQ = gl.zeros([32, 4], gl.int32, OWN)
    s1_PQ = s0_PQ
    s2_PQ = s0_PQ
    s3_PQ = s0_PQ
    old = gl.load((record + TRAILER_AT + 4).to(gl.pointer_type(gl.int32)))
    words = ready_ptr + N * D + (N + n) * 4 * D
    for g in range(D // 64):
        at = n * D + g * 64
        then = _next(item, g, items, k_ptr, v_ptr, runs_ptr, N, D)
        w0 = _weights(words + g * 64, D)
        w1 = _weights(words + g * 64 + 32, D)
        _wait(start)
        codes = ()
        mine = ()
        for upper in gl.static_range(2):
            y0 = _gained(_read(start, 2 * upper, v_ptr, counts_ptr), _columns(v_gain_ptr + at))
            y1 = _gained(_read(start, 2 * upper + 1, v_ptr, counts_ptr), _columns(v_gain_ptr + at + 32))
            if upper == 1:
                _ask_next(then, k_ptr, v_ptr, start, N, D)
            inverse, scale = _chosen(y0 + y1, w0 + w1, lane, start, 1)
            codes = codes + _codes(y0, inverse) + _codes(y1, inverse)
            mine = mine + (scale,)
        for i in gl.static_range(4):
            _store_v(record + V_AT, _bytes(codes[i], codes[4 + i]), g * 64 + i // 2 * 32 + i % 2 * 4, slot, count)
        s0_PQ = gl.where(g == 0, mine[0], s0_PQ)
        s1_PQ = gl.where(g == 0, mine[1], s1_PQ)
        s2_PQ = mine[0]
        s3_PQ = mine[1]
    scales = (s0_PQ, s1_PQ) if D == 64 else (s0_PQ, s1_PQ, s2_PQ, s3_PQ)
    _finish(record, VS_AT, TRAILER_AT + 4, old, scales, slot, count, D // 64, 1)


@gluon.jit(do_not_specialize=["items"])
def encode_pages(
    pool_ptr, k_ptr, v_ptr, runs_ptr, channels_ptr, k_mean_ptr, v_gain_ptr, ready_ptr, counts_ptr, table_ptr, items,
    N: gl.constexpr, D: gl.constexpr, OUT: gl.constexpr, OUTP: gl.constexpr, PAGE_BYTES: gl.constexpr, V_AT: gl.constexpr,
    KS_AT: gl.constexpr, VS_AT: gl.constexpr, KO_AT: gl.constexpr, TRAILER_AT: gl.constexpr,
):
    """Runs of up to 128 tokens; an item is (run, head, K or V). While one is encoded, the next one's numbers come."""
    start, lane = _shared(table_ptr)
    first = _next(gl.program_id(0) - gl.num_programs(0), D // 64, items, k_ptr, v_ptr, runs_ptr, N, D)
    _ask_next(first, k_ptr, v_ptr, start, N, D)
    # the book is ready
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r,r", [start], dtype=gl.int32, is_pure=False, pack=1)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n = item // 2 % N
        run = runs_ptr + item // (2 * N) * 4
        slot = gl.load(run + 1)
        row = gl.load(run + 2) - slot
        count = gl.load(run + 3)
        if count == 0:
            # its page may be another run's
            _wait(start)
            _ask_next(_next(item, D // 64, items, k_ptr, v_ptr, runs_ptr, N, D), k_ptr, v_ptr, start, N, D)
        else:
            record = pool_ptr + (gl.load(run).to(gl.int64) * N + n) * PAGE_BYTES
            if item % 2 == 0:
                _keys(item, items, record, row, slot, count, n, k_ptr, v_ptr, runs_ptr, channels_ptr, k_mean_ptr, ready_ptr, counts_ptr,
                      start, lane, N, D, OUT, OUTP, KS_AT, KO_AT, TRAILER_AT)
            else:
                _values(item, items, record, row, slot, count, n, k_ptr, v_ptr, runs_ptr, v_gain_ptr, ready_ptr, counts_ptr, start, lane,
                        N, D, V_AT, VS_AT, TRAILER_AT)


def serves(k_TNd: torch.Tensor, v_TNd: torch.Tensor) -> bool:
    """Whether `encode_pages` reads such tokens here: 16-bit numbers, on Hopper."""
    hopper = k_TNd.device.type != "cuda" or torch.cuda.get_device_capability(k_TNd.device)[0] == 9
    return hopper and k_TNd.dtype in (torch.bfloat16, torch.float16) and v_TNd.dtype in (torch.bfloat16, torch.float16)


@cache
def table_on(device: torch.device) -> torch.Tensor:
    """What programs copy to their shared memory, int32 [216 rows, 16 copies, 2]."""
    table = law.error_table()
    rows = torch.cat([table[w, : 40 + 8 * w] for w in range(law.WINDOWS)]).to(torch.uint8).view(torch.int32)
    inverse = (8.0 / torch.arange(8, 16, dtype=torch.float32)).view(torch.int32)[:, None].repeat(1, 2)
    return torch.cat([rows, inverse]).repeat(1, 16).to(device)


@cache
def programs_on(device: torch.device) -> int:
    """As many as run at once, less one: an odd number, so that each of them takes K and V in turn."""
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count // 2 * 2 - 1
