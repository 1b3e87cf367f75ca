# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""What the attention kernels share: their arguments, where rows lie, how a query row ends.

A program holds BLOCK_H heads of one query row and walks a share of the row's key tiles: chosen
rows first, since where they lie needs no position, then the window. With one share a row the
result is final; with several, each leaves a partial result for `combine`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvlease.kernels.gpu import attention_tiles as at

LOG2_E = tl.constexpr(1.4426950408889634)


class Queries(NamedTuple):
    """Query rows: q, out [N, H, D]; sinks [H]; positions [N] int32, -1 where a row is padding."""

    q: Tensor
    out: Tensor
    sinks: Tensor
    positions: Tensor
    num_heads: int
    scale: float


class Window(NamedTuple):
    """Rows of the window; ``at`` [N] says where a row's lie.

    RING: the ring's slot. SPAN: the row of the query's own position, the last of its window.
    LIST: packed rows by flat address, at [N, limit].
    """

    base: Tensor | None
    at: Tensor | None
    limit: int
    page_stride: int
    scale_at: int


class Chosen(NamedTuple):
    """Rows of the pool.

    LIST: rows [N, limit] are flat addresses, -1 for none. TABLE: every visible row,
    (position + 1) // ratio of them, through the page table rows [sequences, limit].
    """

    base: Tensor | None
    rows: Tensor | None
    sequence: Tensor | None
    limit: int
    ratio: int
    page_stride: int
    scale_at: int


class Turn(NamedTuple):
    """Tables of the rotation to undo: cos and sin [positions, ROPE / 2], float32."""

    cos: Tensor
    sin: Tensor


class Partial(NamedTuple):
    """What shares of a row leave: sums [N, SPLITS, H, D]; stats [N, SPLITS, H, 2], peak, total."""

    sums: Tensor | None
    stats: Tensor | None


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait for the kernel in front to end, and then let the next one be set up meanwhile."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def row_offsets(address, page_stride, ROW: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """Return where rows start, in elements; PAGE_ROWS 0: rows follow each other throughout."""
    wide = address.to(tl.int64)
    if PAGE_ROWS == 0:
        return wide * ROW
    else:
        return (wide // PAGE_ROWS) * page_stride + (wide % PAGE_ROWS) * ROW


@triton.jit
def chosen_addresses(chosen, n, position, slots, wanted, KIND: tl.constexpr, PAGE: tl.constexpr):
    """Return the flat addresses of a row's chosen keys number ``slots``, and which exist."""
    if KIND == "list":
        address = tl.load(
            chosen.rows + n.to(tl.int64) * chosen.limit + slots, mask=wanted, other=-1
        )
        return address, address >= 0
    else:
        row = tl.load(chosen.sequence + n).to(tl.int64) if chosen.sequence is not None else n
        page = tl.load(chosen.rows + row * chosen.limit + slots // PAGE, mask=wanted, other=0)
        # the choice also hides from the compiler what it would get wrong: that a row of an even
        # number starts at a multiple of 16 bytes says nothing of the row after it
        return tl.where(wanted, page * PAGE + slots % PAGE, -1), wanted


@triton.jit
def share_of(
    queries, chosen, n, split, BK: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    NEAR: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Return position, keys of the window and of the pool, and the share's tiles of the latter."""
    position = tl.load(queries.positions + n)
    count = tl.minimum(position + 1, WINDOW)
    if CHOSEN == "list":
        places = chosen.limit
    elif CHOSEN == "table":
        places = (position + 1) // chosen.ratio
    else:
        places = 0
    far_tiles = tl.cdiv(places, BK)
    tiles = far_tiles + (0 if NEAR == "none" else WINDOW // BK)
    first, last = tiles * split // SPLITS, tiles * (split + 1) // SPLITS
    return position, count, tl.where(position < 0, 0, places), far_tiles, first, last


@triton.jit
def window_start(window, n, count, KIND: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first of a window's rows, which lie one after the other."""
    place = tl.load(window.at + n).to(tl.int64)
    if KIND == "ring":
        return place * WINDOW
    else:
        return place + 1 - count


@triton.jit
def load_queries(queries, n, heads, START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Load channels START.. of a row's heads; heads past the last are zeros."""
    columns = START + tl.arange(0, WIDTH)
    row = (n.to(tl.int64) * queries.num_heads + heads)[:, None] * D
    return tl.load(
        queries.q + row + columns[None, :], mask=(heads < queries.num_heads)[:, None], other=0.0
    )


@triton.jit
def first_stats(queries, heads, SPLITS: tl.constexpr):
    """Return the peak and total to start from: the sink's where there is one share, else none."""
    if SPLITS == 1:
        sink = tl.load(queries.sinks + heads, mask=heads < queries.num_heads, other=0.0)
        return sink * LOG2_E, tl.full(heads.shape, 1.0, tl.float32)
    else:
        none = tl.full(heads.shape, at.NO_KEY, tl.float32)
        return none, tl.zeros(heads.shape, tl.float32)


@triton.jit
def finish(
    values,
    total,
    queries,
    partial,
    n,
    split,
    heads,
    START: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Store channels START.. of a row's sums: divided where they are final."""
    row = n.to(tl.int64) * SPLITS + split
    if SPLITS == 1:
        at.put(
            queries.out,
            row * queries.num_heads * D,
            heads,
            queries.num_heads,
            values / total[:, None],
            START,
            D,
        )
    else:
        at.put(
            partial.sums, row * queries.num_heads * D, heads, queries.num_heads, values, START, D
        )


@triton.jit
def leave_stats(partial, peak, total, n, split, heads, num_heads, SPLITS: tl.constexpr):
    """Store a share's peak and total for `combine`."""
    where = ((n.to(tl.int64) * SPLITS + split) * num_heads + heads) * 2
    tl.store(partial.stats + where, peak, mask=heads < num_heads)
    tl.store(partial.stats + where + 1, total, mask=heads < num_heads)
