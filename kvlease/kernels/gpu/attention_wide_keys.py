# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
"""How tiles of keys come to shared memory in the wide schedule: four warps do nothing else.

Plain rows are copied to where the tensor cores read them. Packed rows are copied as they are, three
tiles ahead, and then scaled to bf16 into that place.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from kvlease.kernels.gpu import attention_gluon as share
from kvlease.kernels.gpu import attention_gluon_packed as packed

HEADS = gl.constexpr(64)
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, COPY.value))


class Bars(NamedTuple):
    """Barriers: queries are there, or no longer needed; a slot's keys are there, or no longer
    needed; a tile's weights are there, or no longer needed.
    """

    q_here: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor


@gluon.jit
def item_of(item, groups, SPLITS: gl.constexpr):
    """Return an item's row, the first of its heads, and its share's number."""
    part = item // SPLITS
    return part // groups, part % groups * HEADS, item % SPLITS


@gluon.jit
def bring_queries(q, bars, turns, queries, n, first_head, D: gl.constexpr):
    """Start copying a row's heads, once those before are no longer needed."""
    mbarrier.wait(bars.q_free.index(0), (turns & 1) ^ 1)
    share.copy_queries(q, queries, n, first_head, D, HEADS, COPY)
    async_copy.mbarrier_arrive(bars.q_here.index(0), increment_count=False)


@gluon.jit
def bring_plain(
    q, keys, seen, bars, queries, window, chosen, items, groups, WINDOW: gl.constexpr,
    D: gl.constexpr, NEAR: gl.constexpr, CHOSEN: gl.constexpr, PAGE: gl.constexpr,
    PAGED: gl.constexpr, SPLITS: gl.constexpr, KEYS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Copy the queries and the tiles of plain keys of each share."""
    i = items * 0
    turns = i
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, first_head, split = item_of(item, groups, SPLITS)
        mine = share.share_of(queries, chosen, n, split, WINDOW, NEAR, CHOSEN, SPLITS, KEYS)
        start = share.window_start(window, n, mine.count, NEAR, WINDOW)
        address = share.fetch(window, chosen, n, mine, mine.first, mine.last, NEAR, CHOSEN, PAGE,
                              KEYS, ROWS)  # fmt: skip
        bring_queries(q, bars, turns, queries, n, first_head, D)
        for tile in range(mine.first, mine.last):
            later = share.fetch(window, chosen, n, mine, tile + 1, mine.last, NEAR, CHOSEN, PAGE,
                                KEYS, ROWS)  # fmt: skip
            slot = i % SLOTS
            mbarrier.wait(bars.free.index(slot), ((i // SLOTS) & 1) ^ 1)
            share.copy_tile(keys.index(slot), window, chosen, address, start, tile >= mine.far, D,
                            NEAR, CHOSEN, PAGED, COPY)  # fmt: skip
            async_copy.mbarrier_arrive(bars.full.index(slot), increment_count=False)
            seen.index(slot).store((address >= 0).to(gl.int16))
            mbarrier.arrive(bars.full.index(slot))
            address = later
            i += 1
        turns += 1
    async_copy.wait_group(0)


@gluon.jit
def ask(
    raw, tail, place, address, window, chosen, is_near, D: gl.constexpr, ROPE: gl.constexpr,
    KIND: gl.constexpr, ROW: gl.constexpr, SCALE_ROW: gl.constexpr, PAGED: gl.constexpr,
    NEAR_PAGED: gl.constexpr,
):  # fmt: skip
    """Start copying a tile of packed rows as they are; return their scales."""
    rows = packed.row_pointers(window, chosen, address, is_near, KIND, ROW, PAGED, NEAR_PAGED)
    packed.copy_packed(raw, tail, place, rows, address >= 0, D, ROPE, COPY)
    return packed.load_scales(
        window, chosen, address, is_near, KIND, SCALE_ROW, PAGED, NEAR_PAGED)  # fmt: skip


@gluon.jit
def bring_near(
    keys, seen, bars, window, start, mine, i, WINDOW: gl.constexpr, D: gl.constexpr,
    KEYS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of a window's plain rows; return the number of the next tile."""
    for tile in range(gl.maximum(mine.first, mine.far), mine.last):
        slot = i % SLOTS
        rows = (tile - mine.far) * KEYS + gl.arange(0, KEYS, layout=ROWS)
        is_seen = rows < mine.count
        mbarrier.wait(bars.free.index(slot), ((i // SLOTS) & 1) ^ 1)
        share.copy_rows(keys.index(slot), window.base + (start + rows) * D, is_seen, D, COPY)
        async_copy.mbarrier_arrive(bars.full.index(slot), increment_count=False)
        seen.index(slot).store(is_seen.to(gl.int16))
        mbarrier.arrive(bars.full.index(slot))
        i += 1
    return i


@gluon.jit
def bring_packed(
    q, keys, raw, tail, seen, bars, queries, window, chosen, items, groups,
    WINDOW: gl.constexpr, D: gl.constexpr, ROPE: gl.constexpr, NEAR: gl.constexpr,
    CHOSEN: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr, NEAR_PAGED: gl.constexpr,
    ROW: gl.constexpr, SCALE_ROW: gl.constexpr, SPLITS: gl.constexpr, KEYS: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Copy the queries and the tiles of packed keys of each share, and of its plain window."""
    KIND: gl.constexpr = "list" if NEAR == "list" else "none"  # of window among the packed tiles
    i = items * 0
    turns = i
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, first_head, split = item_of(item, groups, SPLITS)
        mine = share.share_of(queries, chosen, n, split, WINDOW, NEAR, CHOSEN, SPLITS, KEYS)
        first, far = mine.first, mine.far
        end = mine.last if NEAR == "list" else gl.minimum(mine.last, far)
        address = share.fetch(
            window, chosen, n, mine, first, end, KIND, CHOSEN, PAGE, KEYS, ROWS)  # fmt: skip
        later = share.fetch(
            window, chosen, n, mine, first + 1, end, KIND, CHOSEN, PAGE, KEYS, ROWS)  # fmt: skip
        scales = ask(raw, tail, i * 0, address, window, chosen, first >= far, D, ROPE, KIND, ROW,
                     SCALE_ROW, PAGED, NEAR_PAGED)  # fmt: skip
        scales_2 = ask(raw, tail, i * 0 + 1, later, window, chosen, first + 1 >= far, D, ROPE,
                       KIND, ROW, SCALE_ROW, PAGED, NEAR_PAGED)  # fmt: skip
        latest = share.fetch(
            window, chosen, n, mine, first + 2, end, KIND, CHOSEN, PAGE, KEYS, ROWS)  # fmt: skip
        bring_queries(q, bars, turns, queries, n, first_head, D)
        async_copy.commit_group()
        for tile in range(first, end):
            place = (tile - first) % 3
            scales_3 = ask(raw, tail, (place + 2) % 3, latest, window, chosen, tile + 2 >= far, D,
                           ROPE, KIND, ROW, SCALE_ROW, PAGED, NEAR_PAGED)  # fmt: skip
            # all groups but the last two: this tile's is not among them
            async_copy.wait_group(2)
            slot = i % SLOTS
            mbarrier.wait(bars.free.index(slot), ((i // SLOTS) & 1) ^ 1)
            packed.unpack(keys.index(slot), raw, tail, place, scales, D, ROPE, COPY, 4)
            seen.index(slot).store((address >= 0).to(gl.int16))
            fence_async_shared()
            mbarrier.arrive(bars.full.index(slot), count=129)
            scales, scales_2, address, later = scales_2, scales_3, later, latest
            latest = share.fetch(
                window, chosen, n, mine, tile + 3, end, KIND, CHOSEN, PAGE, KEYS, ROWS)  # fmt: skip
            i += 1
        if NEAR == "ring" or NEAR == "span":
            start = share.window_start(window, n, mine.count, NEAR, WINDOW)
            i = bring_near(keys, seen, bars, window, start, mine, i, WINDOW, D, KEYS, SLOTS)
        turns += 1
    async_copy.wait_group(0)


@gluon.jit
def bring(
    q, keys, raw, tail, seen, bars, queries, window, chosen, items, groups,
    WINDOW: gl.constexpr, D: gl.constexpr, ROPE: gl.constexpr, NEAR: gl.constexpr,
    CHOSEN: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr, NEAR_PAGED: gl.constexpr,
    ROW: gl.constexpr, SCALE_ROW: gl.constexpr, SPLITS: gl.constexpr, KEYS: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Copy the queries and the tiles of keys, plain or packed, of each share."""
    if ROW == 0:
        bring_plain(q, keys, seen, bars, queries, window, chosen, items, groups, WINDOW, D, NEAR,
                    CHOSEN, PAGE, PAGED, SPLITS, KEYS, SLOTS)  # fmt: skip
    else:
        bring_packed(q, keys, raw, tail, seen, bars, queries, window, chosen, items, groups,
                     WINDOW, D, ROPE, NEAR, CHOSEN, PAGE, PAGED, NEAR_PAGED, ROW, SCALE_ROW,
                     SPLITS, KEYS, SLOTS)  # fmt: skip
