"""Top-k of long rows by many programs, in three short launches.

*Tops* are the maxima of a row's scores by index modulo the number of groups. The k-th best of them
is a floor that at least k scores reach; on most rows about 1.4 k do. Every part of a row finds the
same floor and lists what reaches it; one program a row then chooses among all lists. A row with too
much at its floor (many equal scores) is flagged and left to the general kernels.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvlease.kernels.gpu.topk_narrow import (
    choose,
    find_bar,
    first_marked,
    lanes_of,
    list_all,
    pack_marked,
    pages_of,
    pointers_of,
    score_of,
    sortable,
    top_of,
    words_of,
)
from kvlease.kernels.gpu.topk_parts import CROWDED, choose_part

TIED = tl.constexpr(2)
"""Flag of a row with fewer than k scores above its floor and too many level with it."""


@triton.jit
def _noted(notes, used):
    """Return how many scores each list was to hold, and how many of them are level with the floor.

    Both fit 16 bits.
    """
    note = tl.load(notes, mask=used, other=0).to(tl.uint32, bitcast=True)
    return (note & 0xFFFF).to(tl.int32), (note >> 16).to(tl.int32)


@triton.jit
def _place_tied(
    x, start, visible, counts, brackets, pages, out, K: tl.constexpr, PAIRS: tl.constexpr,
    GROUPS: tl.constexpr, LISTS: tl.constexpr, LIST_PART: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    """Write a part's share of a tied row: all above the floor, and the first level with it.

    x [PAIRS, 2, GROUPS] are the scores from ``start`` on, which is where a list starts too.
    """
    lists = tl.arange(0, LISTS)
    held, level = _noted(counts + lists, lists * LIST_PART < visible)
    room = K - tl.sum(held - level)
    before = lists * LIST_PART < start
    level_before = tl.sum(tl.where(before, level, 0))
    above_before = tl.sum(tl.where(before, held - level, 0))
    lanes = lanes_of(PAIRS, GROUPS)
    floor = score_of(tl.load(brackets).to(tl.uint32, bitcast=True))
    first = x == floor
    left = tl.maximum(room - level_before, 0)
    if tl.sum(first.to(tl.int32)) > left:
        first = first_marked(first, lanes, left, 2 * PAIRS * GROUPS)
    chosen = (x > floor) | first
    rows = start + lanes
    page = tl.load(pages + rows // PAGE_ROWS, mask=chosen, other=0)
    words = words_of(chosen)
    pack_marked(
        out + above_before + tl.minimum(level_before, room), page * PAGE_ROWS + rows % PAGE_ROWS,
        chosen, words, tl.sum(words, axis=1), K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["out_stride", "best_stride", "pack_stride", "scores_stride"])
def choose_flagged(
    scores, positions, sequences, table, out, flags, counts, brackets, best_scores, best_rows,
    pack, out_stride, best_stride, pack_stride, scores_stride, table_stride,
    K: tl.constexpr, RATIO: tl.constexpr, PAGE_ROWS: tl.constexpr, PAIRS: tl.constexpr,
    GROUPS: tl.constexpr, LISTS: tl.constexpr, LIST_PART: tl.constexpr,
    BY_SEQUENCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the best k of one part of the rows that lists could not hold."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * (2 * PAIRS * GROUPS)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    flag = tl.load(flags + row)
    visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
    if (flag != 0) & (visible > start):
        pages = pages_of(row, sequences, table, table_stride, BY_SEQUENCE)
        source = scores + row * scores_stride + start
        seen = lanes_of(PAIRS, GROUPS) < visible - start
        x = tl.load(pointers_of(source, PAIRS, GROUPS), mask=seen, other=float("-inf"))
        if flag == TIED:
            _place_tied(
                x, start, visible, counts + row * LISTS, brackets + row * 2, pages,
                out + row * out_stride, K, PAIRS, GROUPS, LISTS, LIST_PART, PAGE_ROWS,
            )  # fmt: skip
        else:
            best = row * best_stride + tl.program_id(1) * K
            packed = pack + row * pack_stride + tl.program_id(1) * GROUPS
            choose_part(
                x, visible, source, start, pages, out + row * out_stride, best_scores + best,
                best_rows + best, packed, K, PAGE_ROWS, PAIRS, GROUPS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["scores_stride"])
def raise_tops(
    scores, positions, tops, scores_stride, RATIO: tl.constexpr, PAIRS: tl.constexpr,
    GROUPS: tl.constexpr, COPIES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Raise a row's tops to the maxima of one part of its scores."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * (2 * PAIRS * GROUPS)
    if EARLY:
        # in this order: what starts early may then rely on all that came before these launches
        gdc_wait()
        gdc_launch_dependents()
    visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
    if visible > start:
        at = pointers_of(scores + row * scores_stride + start, PAIRS, GROUPS)
        seen = lanes_of(PAIRS, GROUPS) < visible - start
        x = tl.max(tl.max(tl.load(at, mask=seen, other=float("-inf")), axis=1), axis=0)
        groups = tl.arange(0, GROUPS)
        copy = row * COPIES + tl.program_id(1) % COPIES
        at = tops + copy * GROUPS + groups
        tl.atomic_max(at, top_of(x), mask=groups < visible, sem="relaxed")


@triton.jit(do_not_specialize=["scores_stride"])
def list_above(
    scores, positions, tops, lists, counts, brackets, scores_stride,
    K: tl.constexpr, RATIO: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr,
    COPIES: tl.constexpr, LISTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """List which scores of one part reach the floor, in order, and leave the bracket of the bar."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    start = part * (2 * PAIRS * GROUPS)
    if EARLY:
        gdc_launch_dependents()
    visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
    if EARLY:
        gdc_wait()
    if (visible > K) & (visible > start):
        at = pointers_of(scores + row * scores_stride + start, PAIRS, GROUPS)
        lanes = lanes_of(PAIRS, GROUPS)
        x = tl.load(at, mask=lanes < visible - start, other=float("-inf"))
        copies = tl.arange(0, COPIES)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        best = tl.max(tl.load(tops + row * (COPIES * GROUPS) + copies), axis=0)
        keys = best.to(tl.uint32, bitcast=True) ^ 0x80000000
        high = tl.max(keys) + 1
        all_groups = tl.full([], GROUPS, tl.int32)
        low, _ = find_bar(keys, tl.min(keys), high, all_groups, K, K + K // 16, GROUPS <= 1024)
        low = tl.maximum(low, sortable(tl.full([], float("-inf"), tl.float32)))
        mask = x >= score_of(low)
        words = words_of(mask)
        totals = tl.sum(words, axis=1)
        slot = row * LISTS + part
        pack_marked(lists + slot * GROUPS, start + lanes, mask, words, totals, GROUPS)
        level = (x == score_of(low)).to(tl.uint32) << 16
        note = tl.sum(mask.to(tl.uint32) + level)
        tl.store(counts + slot, note.to(tl.int32, bitcast=True))
        if part == 0:
            tl.store(brackets + row * 2, low.to(tl.int32, bitcast=True))
            tl.store(brackets + row * 2 + 1, high.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["scores_stride", "out_stride", "tops_stride", "lists_stride"])
def choose_listed(
    scores, positions, sequences, table, out, tops, lists, counts, brackets, flags, scores_stride,
    out_stride, tops_stride, lists_stride, table_stride, K: tl.constexpr, RATIO: tl.constexpr,
    PAGE_ROWS: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    COPIES: tl.constexpr, LISTS: tl.constexpr, BY_SEQUENCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the best k of what a row's parts have listed, or flag the row; reset its tops."""
    row = tl.program_id(0).to(tl.int64)
    if EARLY:
        gdc_launch_dependents()
    visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
    pages = pages_of(row, sequences, table, table_stride, BY_SEQUENCE)
    slots = tl.arange(0, GROUPS)
    if EARLY:
        gdc_wait()
    for copy in tl.static_range(COPIES):
        at = tops + row * tops_stride + copy * GROUPS + slots
        tl.store(at, tl.full([GROUPS], -(1 << 31), tl.int32))
    if visible <= K:
        list_all(visible, pages, out + row * out_stride, K, GROUPS, PAGE_ROWS)
        tl.store(flags + row, 0)
    else:
        parts = tl.arange(0, PARTS)
        used = parts < (visible + PART - 1) // PART
        held, level = _noted(counts + row * LISTS + parts, used)
        ends = tl.cumsum(held)
        total = tl.sum(held)
        tied = tl.where(total - tl.sum(level) < K, TIED, CROWDED)
        tl.store(flags + row, tl.where(total < GROUPS, 0, tied))
        if total < GROUPS:
            low = tl.load(brackets + row * 2).to(tl.uint32, bitcast=True)
            high = tl.load(brackets + row * 2 + 1).to(tl.uint32, bitcast=True)
            # every list that ends before a slot has room that the slot skips
            past = ends[:, None] <= slots[None, :]
            skipped = tl.sum(tl.where(past, GROUPS - held[:, None], 0), axis=0)
            at = lists + row * lists_stride + slots + skipped
            rows = tl.load(at, mask=slots < total, other=0)
            few = tl.load(scores + row * scores_stride + rows, mask=slots < total, other=0.0)
            page = tl.load(pages + rows // PAGE_ROWS, mask=slots < total, other=0)
            chosen, rank = choose(few, total, low, high, K, GROUPS)
            flat = page * PAGE_ROWS + rows % PAGE_ROWS
            tl.store(out + row * out_stride + rank, flat, mask=chosen)
