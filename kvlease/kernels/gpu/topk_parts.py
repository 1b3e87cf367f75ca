"""Top-k of any rows: parts held in registers, then the best of the parts.

A program narrows its part to a few scores, packs them together in position order
(topk_narrow.py), finds the bar that k of them reach, and writes those above it and, of those level
with it, the lowest positions.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvlease.kernels.gpu.topk_narrow import (
    choose,
    lanes_of,
    list_all,
    narrow,
    pages_of,
    pointers_of,
)

CROWDED = tl.constexpr(1)
"""Flag of a long row with too many scores above its floor."""


@triton.jit
def _finish(
    index, count, low, high, source, names, start, pages, out_scores, out_rows, final,
    K: tl.constexpr, GROUPS: tl.constexpr, PAGE_ROWS: tl.constexpr, NAMED: tl.constexpr,
):  # fmt: skip
    """Write the best k of ``count`` scores in order: flat addresses, or scores and rows."""
    held = tl.arange(0, GROUPS) < count
    few = tl.load(source + index, mask=held, other=0.0, cache_modifier=".cg")
    if NAMED:
        rows = tl.load(names + index, mask=held, other=0, cache_modifier=".cg")
    else:
        rows = start + index
    # asked for now, so that the pages are there when the search ends
    page = tl.load(pages + rows // PAGE_ROWS, mask=held & final, other=0)
    chosen, rank = choose(few, count, low, high, K, GROUPS)
    if final:
        tl.store(out_rows + rank, page * PAGE_ROWS + rows % PAGE_ROWS, mask=chosen)
    else:
        tl.store(out_scores + rank, few, mask=chosen)
        tl.store(out_rows + rank, rows, mask=chosen)


@triton.jit
def choose_part(
    x, visible, source, start, pages, out, best_scores, best_rows, pack,
    K: tl.constexpr, PAGE_ROWS: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Choose the best k of one part of a row with more than k; a row that is one part is done."""
    held = visible - start
    index = tl.arange(0, GROUPS)
    count = held
    low = tl.full([], 1, tl.uint32)
    high = tl.full([], 0xFFFFFFFF, tl.uint32)
    if held >= GROUPS:
        count, low, high = narrow(x, pack, K, PAIRS, GROUPS)
        index = tl.load(pack + index, mask=index < count, other=0, cache_modifier=".cg")
    final = visible <= 2 * PAIRS * GROUPS
    to_rows = best_rows
    if final:
        to_rows = out
    if count < K:
        # the last part may hold fewer than k: what is missing is no row at all
        tl.store(best_scores + index, float("-inf"), mask=index < K)
        tl.debug_barrier()
    _finish(
        index, count, low, high, source, source, start, pages, best_scores, to_rows, final,
        K, GROUPS, PAGE_ROWS, False,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["out_stride", "best_stride", "pack_stride", "scores_stride", "width"]
)
def choose_parts(
    scores, positions, sequences, table, out, best_scores, best_rows, pack, out_stride,
    best_stride, pack_stride, scores_stride, width, table_stride, K: tl.constexpr,
    RATIO: tl.constexpr, PAGE_ROWS: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr,
    BY_SEQUENCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the best k of one part of every row, or list all of a row with no more than k."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    start = part * (2 * PAIRS * GROUPS)
    if EARLY:
        # in this order: what starts early may then rely on all that came before these launches
        gdc_wait()
        gdc_launch_dependents()
    lanes = lanes_of(PAIRS, GROUPS)
    source = scores + row * scores_stride + start
    at = pointers_of(source, PAIRS, GROUPS)
    if part == 0:
        # most rows are short: their scores are asked for before their length is known
        visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
        x = tl.load(at, mask=lanes < width, other=0.0)
        x = tl.where(lanes < visible, x, float("-inf"))
    else:
        visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
        x = tl.load(at, mask=lanes < visible - start, other=float("-inf"))
    pages = pages_of(row, sequences, table, table_stride, BY_SEQUENCE)
    best = row * best_stride + part * K
    packed = pack + row * pack_stride + part * GROUPS
    if visible <= K:
        if part == 0:
            list_all(visible, pages, out + row * out_stride, K, GROUPS, PAGE_ROWS)
    elif visible > start:
        choose_part(
            x, visible, source, start, pages, out + row * out_stride, best_scores + best,
            best_rows + best, packed, K, PAGE_ROWS, PAIRS, GROUPS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["out_stride", "best_stride", "pack_stride"])
def choose_of_parts(
    positions, sequences, table, out, flags, best_scores, best_rows, pack, out_stride,
    best_stride, pack_stride, table_stride, K: tl.constexpr, RATIO: tl.constexpr,
    PAGE_ROWS: tl.constexpr, PART: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr,
    BY_SEQUENCE: tl.constexpr, FLAGGED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the best k of the best of all parts, for rows of more than one part."""
    row = tl.program_id(0).to(tl.int64)
    visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
    if EARLY:
        gdc_wait()
    if FLAGGED:  # noqa: SIM102 - the compiler knows this one
        if tl.load(flags + row) != CROWDED:
            return
    if visible > PART:
        pages = pages_of(row, sequences, table, table_stride, BY_SEQUENCE)
        lanes = lanes_of(PAIRS, GROUPS)
        source = best_scores + row * best_stride
        real = lanes < (visible + PART - 1) // PART * K
        at = pointers_of(source, PAIRS, GROUPS)
        x = tl.load(at, mask=real, other=float("-inf"))
        packed = pack + row * pack_stride
        count, low, high = narrow(x, packed, K, PAIRS, GROUPS)
        index = tl.arange(0, GROUPS)
        index = tl.load(packed + index, mask=index < count, other=0, cache_modifier=".cg")
        _finish(
            index, count, low, high, source, best_rows + row * best_stride, 0, pages, source,
            out + row * out_stride, True, K, GROUPS, PAGE_ROWS, True,
        )  # fmt: skip
