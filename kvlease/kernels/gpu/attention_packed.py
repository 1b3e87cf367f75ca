# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""Attention over chosen packed rows (e4m3 with scales, and plain RoPE channels) and a window.

Keys and sums lie in four parts of power-of-two widths A + B + C = D - ROPE, and ROPE.
"""

import triton
import triton.language as tl

from kvlease.kernels.gpu import attention_core as core
from kvlease.kernels.gpu import attention_tiles as at


@triton.jit
def packed_tile(
    base,
    address,
    seen,
    page_stride,
    scale_at,
    D: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    PAGED: tl.constexpr,
):
    """Load packed rows by flat address, as four parts."""
    NOPE: tl.constexpr = A + B + C
    rows = base + core.row_offsets(address, page_stride, ROW, PAGED)
    scale_rows = base + core.row_offsets(address, page_stride, SCALE_ROW, PAGED) + scale_at
    scales = tl.load(scale_rows.to(tl.pointer_type(tl.int64)), mask=seen, other=0)
    a = at.fp8_tile(rows, scales, seen, 0, A)
    b = at.fp8_tile(rows, scales, seen, A, B)
    c = at.fp8_tile(rows, scales, seen, A + B, C)
    d = at.plain_tile((rows + NOPE).to(tl.pointer_type(tl.bfloat16)), seen, 0, D - NOPE)
    return a, b, c, d


@triton.jit
def plain_parts(rows, seen, D: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Load plain rows as the same four parts."""
    NOPE: tl.constexpr = A + B + C
    a = at.plain_tile(rows, seen, 0, A)
    b = at.plain_tile(rows, seen, A, B)
    c = at.plain_tile(rows, seen, A + B, C)
    return a, b, c, at.plain_tile(rows, seen, NOPE, D - NOPE)


@triton.jit
def absorb(q, k, acc, peak, total, seen, scale):
    """Take one tile into the running softmax; q, k and acc are four parts each."""
    logits = tl.dot(q[3], tl.trans(k[3]))
    logits = tl.dot(q[0], tl.trans(k[0]), logits)
    logits = tl.dot(q[1], tl.trans(k[1]), logits)
    logits = tl.dot(q[2], tl.trans(k[2]), logits)
    weights, fade, peak, total = at.weigh(logits, peak, total, seen, scale)
    p = weights.to(k[3].dtype)
    a = tl.dot(p, k[0], acc[0] * fade[:, None])
    b = tl.dot(p, k[1], acc[1] * fade[:, None])
    c = tl.dot(p, k[2], acc[2] * fade[:, None])
    d = tl.dot(p, k[3], acc[3] * fade[:, None])
    return (a, b, c, d), peak, total


@triton.jit
def zero_parts(
    BLOCK_H: tl.constexpr, D: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return sums of nothing."""
    a = tl.zeros((BLOCK_H, A), tl.float32)
    b = tl.zeros((BLOCK_H, B), tl.float32)
    c = tl.zeros((BLOCK_H, C), tl.float32)
    return a, b, c, tl.zeros((BLOCK_H, D - A - B - C), tl.float32)


@triton.jit
def query_parts(
    queries, n, heads, D: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Load a row's heads as four parts."""
    a = core.load_queries(queries, n, heads, 0, A, D)
    b = core.load_queries(queries, n, heads, A, B, D)
    c = core.load_queries(queries, n, heads, A + B, C, D)
    return a, b, c, core.load_queries(queries, n, heads, A + B + C, D - A - B - C, D)


@triton.jit
def finish_parts(
    acc, peak, total, queries, partial, n, split, heads, D: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store a row's result, or what its share leaves for `combine`."""
    core.finish(acc[0], total, queries, partial, n, split, heads, 0, D, SPLITS)
    core.finish(acc[1], total, queries, partial, n, split, heads, A, D, SPLITS)
    core.finish(acc[2], total, queries, partial, n, split, heads, A + B, D, SPLITS)
    core.finish(acc[3], total, queries, partial, n, split, heads, A + B + C, D, SPLITS)
    if SPLITS > 1:
        core.leave_stats(partial, peak, total, n, split, heads, queries.num_heads, SPLITS)


@triton.jit
def near_tile(
    window,
    n,
    start,
    count,
    tile,
    D: tl.constexpr,
    BK: tl.constexpr,
    WINDOW: tl.constexpr,
    NEAR: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    PAGED: tl.constexpr,
):
    """Load a tile of the window: plain rows that lie together, or packed ones by address."""
    slots = tile * BK + tl.arange(0, BK)
    if NEAR == "list":
        where = window.at + n.to(tl.int64) * WINDOW + slots
        address = tl.load(where, mask=slots < count, other=-1)
        seen = address >= 0
        parts = packed_tile(
            window.base,
            address,
            seen,
            window.page_stride,
            window.scale_at,
            D,
            A,
            B,
            C,
            ROW,
            SCALE_ROW,
            PAGED,
        )
        return parts, seen
    else:
        seen = slots < count
        return plain_parts(window.base + (start + slots) * D, seen, D, A, B, C), seen


@triton.jit
def attend_packed(
    queries, window, chosen, turn, partial, D: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    NEAR: tl.constexpr, CHOSEN: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr,
    NEAR_PAGED: tl.constexpr, ROW: tl.constexpr, SCALE_ROW: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, TURN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attend one query row's heads to one share of its keys."""
    core.wait_for_inputs(EARLY)
    n, split = tl.program_id(0), tl.program_id(2)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    position, count, limit, far_tiles, first, last = core.share_of(
        queries, chosen, n, split, BK, SPLITS, WINDOW, NEAR, CHOSEN)  # fmt: skip
    q = query_parts(queries, n, heads, D, A, B, C)
    peak, total = core.first_stats(queries, heads, SPLITS)
    acc = zero_parts(BLOCK_H, D, A, B, C)
    for tile in tl.range(first, tl.minimum(last, far_tiles), num_stages=STAGES):
        slots = tile * BK + tl.arange(0, BK)
        address, seen = core.chosen_addresses(
            chosen, n, position, slots, slots < limit, CHOSEN, PAGE)  # fmt: skip
        keys = packed_tile(chosen.base, address, seen, chosen.page_stride, chosen.scale_at,
                           D, A, B, C, ROW, SCALE_ROW, PAGED)  # fmt: skip
        acc, peak, total = absorb(q, keys, acc, peak, total, seen, queries.scale)
    if NEAR != "none":
        start = count if NEAR == "list" else core.window_start(window, n, count, NEAR, WINDOW)
        for tile in tl.range(tl.maximum(first - far_tiles, 0), last - far_tiles, num_stages=1):
            keys, seen = near_tile(window, n, start, count, tile, D, BK, WINDOW, NEAR, A, B, C,
                                   ROW, SCALE_ROW, NEAR_PAGED)  # fmt: skip
            acc, peak, total = absorb(q, keys, acc, peak, total, seen, queries.scale)
    if TURN and SPLITS == 1:
        cos, sin = at.angles(turn.cos, turn.sin, tl.maximum(position, 0), 0, ROPE, ROPE)
        back = at.rotate_back(acc[3], cos, sin)
        acc = acc[0], acc[1], acc[2], back
    finish_parts(acc, peak, total, queries, partial, n, split, heads, D, A, B, C, SPLITS)
