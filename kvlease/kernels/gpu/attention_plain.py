# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""Attention over plain rows (bf16): window and chosen rows in one loop of gathered tiles."""

import triton
import triton.language as tl

from kvlease.kernels.gpu import attention_core as core
from kvlease.kernels.gpu import attention_tiles as at


@triton.jit
def tile_rows(
    window,
    chosen,
    n,
    position,
    start,
    count,
    limit,
    tile,
    far_tiles,
    D: tl.constexpr,
    BK: tl.constexpr,
    CHOSEN: tl.constexpr,
    NEAR: tl.constexpr,
    PAGE: tl.constexpr,
    PAGED: tl.constexpr,
):
    """Return pointers to a tile's rows, and which of them are seen."""
    if CHOSEN == "none":
        slots = tile * BK + tl.arange(0, BK)
        return window.base + (start + slots) * D, slots < count
    else:
        is_near = tile >= far_tiles
        slots = tl.where(is_near, tile - far_tiles, tile) * BK + tl.arange(0, BK)
        wanted = (slots < limit) & (is_near == 0)
        address, seen = core.chosen_addresses(chosen, n, position, slots, wanted, CHOSEN, PAGE)
        rows = chosen.base + core.row_offsets(address, chosen.page_stride, D, PAGED)
        if NEAR == "none":
            return rows, seen
        else:
            rows = tl.where(is_near, window.base + (start + slots) * D, rows)
            return rows, tl.where(is_near, slots < count, seen)


@triton.jit
def attend_plain(
    queries, window, chosen, turn, partial, D: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    NEAR: tl.constexpr, CHOSEN: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr,
    TURN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attend one query row's heads to one share of its keys."""
    core.wait_for_inputs(EARLY)
    n, split = tl.program_id(0), tl.program_id(2)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    position, count, limit, far_tiles, first, last = core.share_of(
        queries, chosen, n, split, BK, SPLITS, WINDOW, NEAR, CHOSEN)  # fmt: skip
    start = position.to(tl.int64)
    if NEAR != "none":
        start = core.window_start(window, n, count, NEAR, WINDOW)
    q = core.load_queries(queries, n, heads, 0, D, D)
    peak, total = core.first_stats(queries, heads, SPLITS)
    acc = tl.zeros((BLOCK_H, D), tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        rows, seen = tile_rows(window, chosen, n, position, start, count, limit, tile, far_tiles,
                               D, BK, CHOSEN, NEAR, PAGE, PAGED)  # fmt: skip
        keys = at.plain_tile(rows, seen, 0, D)
        logits = tl.dot(q, tl.trans(keys))
        weights, fade, peak, total = at.weigh(logits, peak, total, seen, queries.scale)
        acc = tl.dot(weights.to(keys.dtype), keys, acc * fade[:, None])
    if TURN and SPLITS == 1:
        place = tl.maximum(position, 0)
        cos, sin = at.angles(turn.cos, turn.sin, place, ROPE - D, D, ROPE)
        acc = at.rotate_back(acc, cos, sin)
    core.finish(acc, total, queries, partial, n, split, heads, 0, D, SPLITS)
    if SPLITS > 1:
        core.leave_stats(partial, peak, total, n, split, heads, queries.num_heads, SPLITS)
