"""Exact top-k of indexer scores, in position order, as flat row addresses.

A program holds its part of a row in registers, narrows it to a few scores that it packs together in
position order (topk_narrow.py), finds the bar that k of them reach, and writes those above it and,
of those level with it, the lowest positions. Nothing is sorted.

Long rows are cut into parts, whose best k each are one shorter row for a second launch.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvlease.errors import LayoutMismatch
from kvlease.kernels.gpu.topk_narrow import (
    find_bar,
    lanes_of,
    narrow,
    pointers_of,
    sortable,
)

MAX_K = 1024
PART = 16384
MIN_GROUPS = 16
WARPS = 8


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
    keys = tl.where(held, sortable(few), 0)
    bar, reach = find_bar(keys, low, high, count, K, K, GROUPS <= 1024)
    chosen = keys >= bar
    if reach > K:
        level = keys == bar
        room = K - tl.sum((keys > bar).to(tl.int32))
        chosen = (keys > bar) | (level & (tl.cumsum(level.to(tl.int32)) <= room))
    rank = tl.cumsum(chosen.to(tl.int32)) - 1
    if final:
        tl.store(out_rows + rank, page * PAGE_ROWS + rows % PAGE_ROWS, mask=chosen)
    else:
        tl.store(out_scores + rank, few, mask=chosen)
        tl.store(out_rows + rank, rows, mask=chosen)


@triton.jit
def _pages_of(row, sequences, table, table_stride, BY_SEQUENCE: tl.constexpr):
    if BY_SEQUENCE:
        return table + tl.load(sequences + row).to(tl.int64) * table_stride
    else:
        return table + row * table_stride


@triton.jit
def _list_all(visible, pages, out, K: tl.constexpr, LANES: tl.constexpr, PAGE_ROWS: tl.constexpr):
    lanes = tl.arange(0, LANES)
    page = tl.load(pages + lanes // PAGE_ROWS, mask=lanes < visible, other=0)
    flat = tl.where(lanes < visible, page * PAGE_ROWS + lanes % PAGE_ROWS, -1)
    tl.store(out + lanes, flat, mask=lanes < K)


@triton.jit(
    do_not_specialize=["out_stride", "best_stride", "pack_stride", "scores_stride", "width"]
)
def _choose_parts(
    scores, positions, sequences, table, out, best_scores, best_rows, pack, out_stride,
    best_stride, pack_stride, scores_stride, width, table_stride, K: tl.constexpr,
    RATIO: tl.constexpr, PAGE_ROWS: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr,
    BY_SEQUENCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the best k of one part of a row; a row that lies in one part is done."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * (2 * PAIRS * GROUPS)
    part = tl.program_id(1)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
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
    pages = _pages_of(row, sequences, table, table_stride, BY_SEQUENCE)
    best = row * best_stride + part * K
    packed = pack + row * pack_stride + part * GROUPS
    if visible <= K:
        if part == 0:
            _list_all(visible, pages, out + row * out_stride, K, GROUPS, PAGE_ROWS)
    elif visible > start:
        held = visible - start
        index = tl.arange(0, GROUPS)
        count = held
        low = tl.full([], 1, tl.uint32)
        high = tl.full([], 0xFFFFFFFF, tl.uint32)
        if held >= GROUPS:
            count, low, high = narrow(x, packed, K, PAIRS, GROUPS)
            index = tl.load(packed + index, mask=index < count, other=0, cache_modifier=".cg")
        final = visible <= 2 * PAIRS * GROUPS
        to_rows = best_rows + best
        if final:
            to_rows = out + row * out_stride
        if count < K:
            # the last part may hold fewer than k: what is missing is no row at all
            tl.store(best_scores + best + index, float("-inf"), mask=index < K)
            tl.debug_barrier()
        _finish(
            index, count, low, high, source, source, start, pages, best_scores + best, to_rows,
            final, K, GROUPS, PAGE_ROWS, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["out_stride", "best_stride", "pack_stride"])
def _choose_of_parts(
    positions, sequences, table, out, best_scores, best_rows, pack, out_stride, best_stride,
    pack_stride, table_stride, K: tl.constexpr, RATIO: tl.constexpr, PAGE_ROWS: tl.constexpr,
    PART: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr, BY_SEQUENCE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the best k of the best of all parts, for rows of more than one part."""
    row = tl.program_id(0).to(tl.int64)
    visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
    if visible > PART:
        pages = _pages_of(row, sequences, table, table_stride, BY_SEQUENCE)
        lanes = lanes_of(PAIRS, GROUPS)
        source = best_scores + row * best_stride
        real = lanes < (visible + PART - 1) // PART * K
        if EARLY:
            gdc_wait()
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


@frozen
class TopkPlan:
    """How rows of up to ``max_rows`` scores are cut, and the memory the launches pass on through.

    Ownership: one launch at a time may use a plan; it holds nothing between launches.

    Attributes:
        k: how many are chosen of each row, at most 1024.
        pairs: of rows of `groups` scores, what one program holds.
        groups: one maximum each gives the floor.
        best_scores: [num_queries, parts, k] float32, each part's best.
        best_rows: [num_queries, parts, k] int32, their rows.
        pack: [num_queries, parts, groups] int32, what lies above each part's floor.
    """

    k: int
    pairs: int
    groups: int
    best_scores: Tensor
    best_rows: Tensor
    pack: Tensor

    @classmethod
    def make(
        cls, num_queries: int, max_rows: int, k: int, device: torch.device, part: int = PART
    ) -> "TopkPlan":
        """Allocate what ``choose_rows`` needs for so many queries of up to so many scores each."""
        if not 1 <= k <= MAX_K:
            raise LayoutMismatch(f"top-k of {k} rows was asked for; 1 to {MAX_K} can be chosen")
        groups = max(MIN_GROUPS, triton.next_power_of_2(2 * k))
        held = max(2 * groups, min(part, triton.next_power_of_2(max_rows)))
        parts = max(1, -(-max_rows // held))
        return cls(
            k,
            held // (2 * groups),
            groups,
            torch.empty((num_queries, parts, k), dtype=torch.float32, device=device),
            torch.empty((num_queries, parts, k), dtype=torch.int32, device=device),
            torch.empty((num_queries, parts, groups), dtype=torch.int32, device=device),
        )


def choose_rows(
    scores: Tensor,
    positions: Tensor,
    table: Tensor,
    out: Tensor,
    plan: TopkPlan,
    *,
    ratio: int,
    rows_per_page: int,
    sequences: Tensor | None = None,
) -> None:
    """Write the flat addresses of each query's k best rows, in position order, then -1.

    The lengths are read on the device: row n sees (positions[n] + 1) // ratio scores, none where
    its position is -1. Of equal scores the lower position wins; scores past the visible ones may
    be anything.

    Shapes: scores [N, L] float32, any stride from row to row; positions [N]
    int32; table [B, P] int32, pages of sequence n, or of sequence sequences[n] where [N] int32 is
    given; out [N, k] int32, filled with page * rows_per_page + offset.

    Raises:
        LayoutMismatch: more queries or scores than the plan was made for.
    """
    num_queries, width = scores.shape
    max_queries, max_parts, groups = plan.pack.shape
    part = 2 * plan.pairs * groups
    if num_queries > max_queries or width > part * max_parts:
        raise LayoutMismatch(
            f"scores {tuple(scores.shape)} exceed the plan's {max_queries} queries of"
            f" {part * max_parts}; make the plan for the largest step"
        )
    parts = -(-width // part)
    sequence_of = positions if sequences is None else sequences
    memory = (plan.best_scores, plan.best_rows, plan.pack)
    strides = (out.stride(0), plan.best_rows.stride(0), plan.pack.stride(0))
    common = {
        "K": plan.k, "RATIO": ratio, "PAGE_ROWS": rows_per_page, "GROUPS": groups,
        "BY_SEQUENCE": sequences is not None, "EARLY": False, "num_warps": WARPS,
    }  # fmt: skip
    _choose_parts[(num_queries, parts)](
        scores, positions, sequence_of, table, out, *memory, *strides,
        scores.stride(0), width, table.stride(0), PAIRS=plan.pairs, **common,
    )  # fmt: skip
    if parts > 1:
        pairs = triton.next_power_of_2(triton.cdiv(parts * plan.k, 2 * groups))
        _choose_of_parts[(num_queries,)](
            positions, sequence_of, table, out, *memory, *strides,
            table.stride(0), PART=part, PAIRS=pairs, **common,
        )  # fmt: skip
