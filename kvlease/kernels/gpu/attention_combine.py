# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""Joining the partial results that the shares of a query row's keys left."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvlease.kernels.gpu import attention_core as core
from kvlease.kernels.gpu import attention_tiles as at


@triton.jit
def sum_shares(
    partial, row, num_heads, columns, top, first,
    D: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the weighted sum of STEP shares from ``first``, all asked for before any is used."""
    parts = ()
    for share in tl.static_range(first, first + STEP):
        if share < SPLITS:
            part = tl.load(partial.sums + (row + share * num_heads) * D + columns)
            parts = parts + (part,)  # noqa: RUF005 - Triton knows no unpacking
    values = tl.zeros(columns.shape, tl.float32)
    for share in tl.static_range(first, first + STEP):
        if share < SPLITS:
            peak = tl.load(partial.stats + (row + share * num_heads) * 2)
            values += parts[share - first].to(tl.float32) * tl.exp2(peak - top)
    return values


@triton.jit
def combine(
    queries, turn, partial, D: tl.constexpr, ROPE: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr, TURN: tl.constexpr,
    NEXT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Join PART channels of one head of one query row, with the sink in the denominator.

    NEXT: let the next kernel be set up meanwhile.
    """
    n, head = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * PART
    sink = tl.load(queries.sinks + head) * core.LOG2_E
    position = tl.maximum(tl.load(queries.positions + n), 0)
    cos, sin = None, None
    if TURN:
        cos, sin = at.angles(turn.cos, turn.sin, position, first - (D - ROPE), PART, ROPE)
    if EARLY:
        gdc_wait()
    if EARLY and NEXT:
        gdc_launch_dependents()
    row = n.to(tl.int64) * SPLITS * queries.num_heads + head
    shares = tl.arange(0, SPLITS_2)
    where = partial.stats + (row + shares * queries.num_heads) * 2
    peaks = tl.load(where, mask=shares < SPLITS, other=at.NO_KEY)
    totals = tl.load(where + 1, mask=shares < SPLITS, other=0.0)
    top = tl.maximum(sink, tl.max(peaks, 0))
    columns = first + tl.arange(0, PART)
    values = tl.zeros((PART,), tl.float32)
    for start in tl.static_range(0, SPLITS, STEP):
        values += sum_shares(partial, row, queries.num_heads, columns, top, start, D, STEP, SPLITS)
    total = tl.exp2(sink - top) + tl.sum(totals * tl.exp2(peaks - top), 0)
    values = tl.reshape(values / total, (1, PART))
    if TURN:
        values = at.rotate_back(values, cos, sin)
    at.put(queries.out, n.to(tl.int64) * queries.num_heads * D + first, head + tl.arange(0, 1),
           queries.num_heads, values, 0, D)  # fmt: skip
