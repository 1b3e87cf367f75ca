# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# Triton's language has no types: what a kernel does with them is checked by its tests.
"""A compressor's work for one row of a step; twin: ``kernels.models.compress_block``.

Where the row ends a group, the group's slots are pooled, normalised, turned and stored in the
sequence's page. In a decode step the row itself then goes into the ring; in a chunk that is left to
a later launch, since a row's place may be one that an earlier row still reads.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kvlease.kernels.gpu.rotation import Turns, turn_row
from kvlease.kernels.gpu.row_formats import RowStore, store_row
from kvlease.kernels.gpu.step_rows import add_parts, sequence_of, start_of


class Compressor(NamedTuple):
    """One compressor: weights, running state and where its rows go.

    bias [ratio, width] and norm [D] float32; rings kv [slots, RING, width] bf16 and gate float32;
    width is D, or 2 * D where groups overlap.
    """

    bias: Tensor
    norm: Tensor
    kv: Tensor
    gate: Tensor
    store: RowStore
    turns: Turns
    eps: float


@triton.jit
def _pool(
    rows, projected, work, n, position, slot, KV: tl.constexpr, GATE: tl.constexpr,
    PARTS: tl.constexpr, D: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr,
    OVERLAPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the gate-weighted mean of the slots of the group that ends at ``position``, [D]."""
    SLOTS: tl.constexpr = RATIO * 2 if OVERLAPS else RATIO
    WIDTH: tl.constexpr = D * 2 if OVERLAPS else D
    channels = tl.arange(0, D)
    start = start_of(rows, n, position)
    peak = tl.full((D,), -float("inf"), tl.float32)
    total = tl.zeros((D,), tl.float32)
    pooled = tl.zeros((D,), tl.float32)
    for first in range(0, SLOTS, TILE):
        number = first + tl.arange(0, TILE)
        at = position - SLOTS + 1 + number
        # a sequence's first group has no group before it
        exists = (at >= 0)[:, None] & (channels >= 0)[None, :]
        fresh = exists & (at >= start)[:, None]
        kept = exists & (at < start)[:, None]
        columns = channels[None, :]
        if OVERLAPS:
            columns += tl.where(number < RATIO, 0, D)[:, None]
        mine = (n - (position - at))[:, None]
        place = (slot * RING + at % RING).to(tl.int64)[:, None] * WIDTH + columns
        value = add_parts(projected, mine, KV + columns, fresh, PARTS)
        value = value.to(tl.bfloat16).to(tl.float32)
        value += tl.load(work.kv + place, mask=kept, other=0.0).to(tl.float32)
        gate = add_parts(projected, mine, GATE + columns, fresh, PARTS)
        gate += tl.load(work.bias + (at % RATIO)[:, None] * WIDTH + columns, mask=fresh, other=0.0)
        gate += tl.load(work.gate + place, mask=kept, other=0.0)
        gate = tl.where(exists, gate, -float("inf"))
        higher = tl.maximum(peak, tl.max(gate, axis=0))
        # the whole of the first tile may be missing
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp(gate - base[None, :])
        shrink = tl.exp(peak - base)
        total = total * shrink + tl.sum(weights, axis=0)
        pooled = pooled * shrink + tl.sum(weights * value, axis=0)
        peak = higher
    return pooled / total


@triton.jit
def compress_row(rows, projected, work, n, PARTS: tl.constexpr, SIZES: tl.constexpr):
    """Do one compressor's work for row n; SIZES are `Pooling.sizes`."""
    KV: tl.constexpr = SIZES[0]
    GATE: tl.constexpr = SIZES[1]
    D: tl.constexpr = SIZES[2]
    R: tl.constexpr = SIZES[3]
    RATIO: tl.constexpr = SIZES[4]
    RING: tl.constexpr = SIZES[5]
    OVERLAPS: tl.constexpr = SIZES[6]
    PAGE_ROWS: tl.constexpr = SIZES[7]
    position = tl.load(rows.positions + n)
    if position >= 0:
        sequence = sequence_of(rows, n)
        slot = tl.load(rows.slots + sequence).to(tl.int64)
        if position % RATIO == RATIO - 1:
            x = _pool(
                rows, projected, work, n, position, slot,
                KV, GATE, PARTS, D, RATIO, RING, OVERLAPS, SIZES[10],
            )  # fmt: skip
            channels = tl.arange(0, D)
            x *= tl.rsqrt(tl.sum(x * x) / D + work.eps)
            x *= tl.load(work.norm + channels)
            x = turn_row(x, work.turns, position - RATIO + 1, D, R)
            group = position // RATIO
            page = tl.load(rows.table + sequence * rows.table_row + group // PAGE_ROWS)
            store_row(x, work.store, page, group % PAGE_ROWS, D, R, SIZES[8], SIZES[9])
        if rows.starts is None:
            keep_state(rows, projected, work, n, PARTS, SIZES)


@triton.jit
def keep_state(rows, projected, work, n, PARTS: tl.constexpr, SIZES: tl.constexpr):
    """Put row n, which is none of padding, into its sequence's ring of one compressor."""
    D: tl.constexpr = SIZES[2]
    RATIO: tl.constexpr = SIZES[4]
    RING: tl.constexpr = SIZES[5]
    WIDTH: tl.constexpr = D * 2 if SIZES[6] else D
    position = tl.load(rows.positions + n)
    slot = tl.load(rows.slots + sequence_of(rows, n)).to(tl.int64)
    wide = tl.arange(0, WIDTH)
    always = wide >= 0
    place = (slot * RING + position % RING) * WIDTH + wide
    value = add_parts(projected, n, SIZES[0] + wide, always, PARTS)
    gate = add_parts(projected, n, SIZES[1] + wide, always, PARTS)
    gate += tl.load(work.bias + (position % RATIO) * WIDTH + wide)
    tl.store(work.kv + place, value.to(tl.bfloat16))
    tl.store(work.gate + place, gate)
