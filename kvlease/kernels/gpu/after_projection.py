# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# Triton's language has no types: what a kernel does with them is checked by its tests.
"""All that follows a block's joined projection, in one launch; twin: ``models.attention_block``.

For each row: the query's low-rank vector normalised; the window row normalised, turned and put
where attention reads it; the compressors' work; and the indexer's head weights scaled. In a chunk
a second launch leaves the last rows in the rings.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.compress_row import Compressor, compress_row, keep_state
from kvlease.kernels.gpu.early import early_launch, wait_for_inputs
from kvlease.kernels.gpu.rotation import Turns, turn_row
from kvlease.kernels.gpu.step_rows import Projected, StepRows, add_parts, sequence_of


class Near(NamedTuple):
    """Where the query's vector and the window row go, and the weights of both norms.

    rank [N, Q] bf16 is written, and the sequences' rings [slots, RING, D] bf16 in a decode step. In
    a chunk window [., D] is: rows of all windows in order, row n's own at ``own`` [N] int32.
    """

    q_norm: Tensor
    kv_norm: Tensor
    rank: Tensor
    rings: Tensor
    window: Tensor | None
    own: Tensor | None
    turns: Turns
    eps: float


class Heads(NamedTuple):
    """The indexer's head weights, to be scaled: out [N, H] float32."""

    out: Tensor
    scale: float


@frozen
class Pooling:
    """What is fixed about a compressor: its columns in the projection, sizes, and row format."""

    kv: int
    gate: int
    width: int
    rope: int
    ratio: int
    ring: int
    overlaps: bool
    page_rows: int
    kind: int
    pad: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """As the kernel takes them, slots a turn last."""
        slots = self.ratio * 2 if self.overlaps else self.ratio
        return (
            self.kv, self.gate, self.width, self.rope, self.ratio, self.ring, int(self.overlaps),
            self.page_rows, self.kind, self.pad, min(slots, 8 if self.width > 256 else 32),
        )  # fmt: skip


@triton.jit
def _rank(projected, near, n, eps, Q: tl.constexpr, BQ: tl.constexpr, PARTS: tl.constexpr):
    columns = tl.arange(0, BQ)
    inside = columns < Q
    x = add_parts(projected, n, columns, inside, PARTS)
    x *= tl.rsqrt(tl.sum(x * x) / Q + eps)
    x *= tl.load(near.q_norm + columns, mask=inside, other=0.0)
    tl.store(near.rank + n.to(tl.int64) * Q + columns, x.to(tl.bfloat16), mask=inside)


@triton.jit
def _window_row(
    rows, projected, near, n, Q: tl.constexpr, D: tl.constexpr, R: tl.constexpr, RING: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    position = tl.load(rows.positions + n)
    if position >= 0:
        columns = tl.arange(0, D)
        x = add_parts(projected, n, Q + columns, columns >= 0, PARTS)
        x *= tl.rsqrt(tl.sum(x * x) / D + near.eps)
        x = (x * tl.load(near.kv_norm + columns)).to(tl.bfloat16).to(tl.float32)
        x = turn_row(x, near.turns, position, D, R)
        ring = near.rings + tl.load(rows.slots + sequence_of(rows, n)).to(tl.int64) * (RING * D)
        if near.own is None:
            tl.store(ring + position % RING * D + columns, x.to(tl.bfloat16))
        else:
            own = near.window + tl.load(near.own + n).to(tl.int64) * D + columns
            tl.store(own, x.to(tl.bfloat16))
            # a chunk's rows share out the rows before it, which its first ones look back to
            start = tl.load(rows.starts + n)
            before = tl.minimum(start, RING - 1)
            first = own - (position - start + before) * D
            for k in range(position - start, before, tl.load(rows.lasts + n) - start + 1):
                old = tl.load(ring + (start - before + k) % RING * D + columns)
                tl.store(first + k * D, old)


@triton.jit
def _after(
    rows, projected, near, main, inner, heads,
    Q: tl.constexpr, BQ: tl.constexpr, D: tl.constexpr, R: tl.constexpr, RING: tl.constexpr,
    PARTS: tl.constexpr, MAIN: tl.constexpr, INNER: tl.constexpr, HEADS_AT: tl.constexpr,
    HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    n = tl.program_id(0)
    task = tl.program_id(1)
    if task == 0:
        _rank(projected, near, n, near.eps, Q, BQ, PARTS)
    elif task == 1:
        _window_row(rows, projected, near, n, Q, D, R, RING, PARTS)
    elif task == 2:
        if MAIN is not None:
            compress_row(rows, projected, main, n, PARTS, MAIN)
    else:
        if INNER is not None:
            columns = tl.arange(0, HEADS)
            x = add_parts(projected, n, HEADS_AT + columns, columns >= 0, PARTS)
            tl.store(heads.out + n.to(tl.int64) * HEADS + columns, x * heads.scale)
            compress_row(rows, projected, inner, n, PARTS, INNER)


@triton.jit
def _keep_last(rows, projected, work, n, left, PARTS: tl.constexpr, SIZES: tl.constexpr):
    if left < SIZES[5]:
        keep_state(rows, projected, work, n, PARTS, SIZES)


@triton.jit
def _keep(
    rows, projected, near, main, inner, D: tl.constexpr, RING: tl.constexpr, PARTS: tl.constexpr,
    MAIN: tl.constexpr, INNER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Put row n of a chunk into one of its sequence's rings, if it is one of the last ones."""
    wait_for_inputs(EARLY)
    n = tl.program_id(0)
    task = tl.program_id(1)
    position = tl.load(rows.positions + n)
    left = tl.load(rows.lasts + n) - position
    if task == 0:
        if left < RING:
            columns = tl.arange(0, D)
            slot = tl.load(rows.slots + tl.load(rows.sequences + n)).to(tl.int64)
            row = tl.load(near.window + tl.load(near.own + n).to(tl.int64) * D + columns)
            tl.store(near.rings + (slot * RING + position % RING) * D + columns, row)
    elif task == 1:
        if MAIN is not None:
            _keep_last(rows, projected, main, n, left, PARTS, MAIN)
    else:
        if INNER is not None:
            _keep_last(rows, projected, inner, n, left, PARTS, INNER)


def after_projection(
    rows: StepRows,
    joined: Projected,
    near: Near,
    main: tuple[Compressor, Pooling] | None,
    inner: tuple[Compressor, Pooling] | None,
    heads: tuple[Heads, int] | None,
    rope: int,
) -> None:
    """Launch it. ``heads`` names the first column of the head weights; given with ``inner``.

    A chunk's last rows are put into the rings by a second launch, when all have looked back.
    """
    rank, num_rows = near.rank.shape[1], len(rows.positions)
    tasks = 2 if main is None else 3 if inner is None else 4
    works = (None if main is None else main[0]), (None if inner is None else inner[0])
    shared = {
        "D": near.kv_norm.shape[0], "RING": near.rings.shape[1], "PARTS": joined.parts.shape[0],
        "MAIN": None if main is None else main[1].sizes,
        "INNER": None if inner is None else inner[1].sizes, "num_warps": 4,
    }  # fmt: skip
    _after[(num_rows, tasks)](
        rows, joined, near, *works, None if heads is None else heads[0],
        Q=rank, BQ=triton.next_power_of_2(rank), R=rope,
        HEADS_AT=0 if heads is None else heads[1],
        HEADS=16 if heads is None else heads[0].out.shape[1], **shared, **early_launch(_after),
    )  # fmt: skip
    if near.window is not None:
        grid = num_rows, tasks - 1
        _keep[grid](rows, joined, near, *works, **shared, **early_launch(_keep))
