"""Top-k of rows of any length: each program takes a part, then programs take the best of parts."""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvlease.kernels.gpu.topk_choice import best, candidates, sortable
from kvlease.kernels.gpu.topk_shared import clear, get, put, shared_space, slots


@triton.jit
def _rows(WARPS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the indices of a part, [WARPS, CHUNKS, 128]."""
    chunk = tl.arange(0, WARPS)[:, None, None] * CHUNKS + tl.arange(0, CHUNKS)[None, :, None]
    return chunk * 128 + tl.arange(0, 128)[None, None, :]


@triton.jit(do_not_specialize=["out_stride", "parts"])
def choose_parts(
    scores, positions, table, out, best_keys, best_rows, scores_stride, table_stride,
    out_stride, width, parts, K: tl.constexpr, RATIO: tl.constexpr, PAGE_ROWS: tl.constexpr,
    WARPS: tl.constexpr, CHUNKS: tl.constexpr, LIST: tl.constexpr, FOURS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the best k of one part of every row, or all of a part that has no more."""
    PART: tl.constexpr = WARPS * CHUNKS * 128
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    start = part * PART
    space = shared_space(EARLY)
    clear(space, WARPS)
    # neither positions nor pages are written by kernels
    visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
    if EARLY:
        # in this order: what starts early may then rely on all that came before these launches
        gdc_wait()
        gdc_launch_dependents()
    rows = start + _rows(WARPS, CHUNKS)
    scores += row * scores_stride
    keys = sortable(tl.load(scores + rows, mask=rows < width, other=0.0))
    if visible < start + PART:
        keys = tl.where(rows < visible, keys, 0)
    if (part == 0) & (visible < K):
        lanes = tl.arange(0, PART)
        tl.store(out + row * out_stride + lanes, -1, mask=(lanes >= visible) & (lanes < K))
    if visible > start:
        count = tl.minimum(visible - start, PART)
        index, total, low, high = candidates(keys, count, K, space, WARPS, CHUNKS, LIST, FOURS)
        there = slots(LIST, WARPS) < total
        index = start + tl.where(there, index, 0)
        few = sortable(get(scores, index, there, space).to(tl.float32, bitcast=True))
        few = tl.where(there, few, 0)
        page = get(table + row * table_stride, index // PAGE_ROWS, there, space)
        names = page * PAGE_ROWS + index % PAGE_ROWS
        chosen, place = best(few, total, low, high, K, space, WARPS)
        if visible <= PART:
            put(out + row * out_stride, place, names, chosen, space)
        else:
            own = (row * parts + part) * K
            put(best_keys + own, place, few.to(tl.int32, bitcast=True), chosen, space)
            put(best_rows + own, place, names, chosen, space)


@triton.jit(do_not_specialize=["out_stride", "parts", "size"])
def choose_of_parts(
    positions, out, part_keys, part_rows, best_keys, best_rows, out_stride, parts, size,
    K: tl.constexpr, RATIO: tl.constexpr, WARPS: tl.constexpr, CHUNKS: tl.constexpr,
    LIST: tl.constexpr, FOURS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the best k of what some parts, of ``size`` rows each, have left of every row."""
    TAKE: tl.constexpr = WARPS * CHUNKS * 128 // K
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    start = group * TAKE * size
    space = shared_space(EARLY)
    clear(space, WARPS)
    visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if (visible > size) & (visible > start):
        mine = _rows(WARPS, CHUNKS)
        part_keys += (row * parts + group * TAKE) * K
        part_rows += (row * parts + group * TAKE) * K
        there = mine < tl.minimum(parts - group * TAKE, TAKE) * K
        keys = tl.load(part_keys + mine, mask=there, other=0).to(tl.uint32, bitcast=True)
        keys = tl.where(there & (start + mine // K * size + mine % K < visible), keys, 0)
        # all parts but a row's last have left k
        full = (visible - start - 1) // size
        rest = tl.minimum(visible - start - full * size, K)
        count = tl.minimum(full * K + rest, TAKE * K)
        index, total, low, high = candidates(keys, count, K, space, WARPS, CHUNKS, LIST, FOURS)
        there = slots(LIST, WARPS) < total
        few = get(part_keys, index, there, space).to(tl.uint32, bitcast=True)
        names = get(part_rows, index, there, space)
        chosen, place = best(few, total, low, high, K, space, WARPS)
        if visible <= TAKE * size:
            put(out + row * out_stride, place, names, chosen, space)
        else:
            own = (row * tl.num_programs(1) + group) * K
            put(best_keys + own, place, few.to(tl.int32, bitcast=True), chosen, space)
            put(best_rows + own, place, names, chosen, space)
