"""Top-k of rows of any length: each program takes a part, then programs take the best of parts."""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvlease.kernels.gpu.topk_choice import choose, sortable
from kvlease.kernels.gpu.topk_shared import clear, put, shared_space


@triton.jit
def _rows(WARPS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the indices of a part, [WARPS, CHUNKS, 128]."""
    chunk = tl.arange(0, WARPS)[:, None, None] * CHUNKS + tl.arange(0, CHUNKS)[None, :, None]
    return chunk * 128 + tl.arange(0, 128)[None, None, :]


@triton.jit
def _fours(WARPS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return every fourth index, [32, WARPS, CHUNKS]: loads go by the first axis here."""
    chunk = tl.arange(0, WARPS)[None, :, None] * CHUNKS + tl.arange(0, CHUNKS)[None, None, :]
    return chunk * 128 + tl.arange(0, 32)[:, None, None] * 4


@triton.jit
def _pages(
    pages, start, visible, PAGE_ROWS: tl.constexpr, WARPS: tl.constexpr, CHUNKS: tl.constexpr
):
    """Return the page of each row of a part, [WARPS, CHUNKS, 128]."""
    if PAGE_ROWS % 4 == 0:
        fours = start + _fours(WARPS, CHUNKS)
        page = tl.load(pages + fours // PAGE_ROWS, mask=fours < visible, other=0)
        page = tl.trans(page, [1, 2, 0])[:, :, :, None]
        return tl.reshape(tl.broadcast_to(page, [WARPS, CHUNKS, 32, 4]), [WARPS, CHUNKS, 128])
    else:
        rows = start + _rows(WARPS, CHUNKS)
        return tl.load(pages + rows // PAGE_ROWS, mask=rows < visible, other=0)


@triton.jit(do_not_specialize=["out_stride", "parts"])
def choose_parts(
    scores, positions, table, out, best_keys, best_rows, scores_stride, table_stride,
    out_stride, width, parts, K: tl.constexpr, RATIO: tl.constexpr, PAGE_ROWS: tl.constexpr,
    WARPS: tl.constexpr, CHUNKS: tl.constexpr, LIST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the best k of one part of every row, or all of a part that has no more."""
    PART: tl.constexpr = WARPS * CHUNKS * 128
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    start = part * PART
    space = shared_space(EARLY)
    clear(space, WARPS * 32)
    # neither positions nor pages are written by kernels
    visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
    page = _pages(table + row * table_stride, start, visible, PAGE_ROWS, WARPS, CHUNKS)
    if EARLY:
        # in this order: what starts early may then rely on all that came before these launches
        gdc_wait()
        gdc_launch_dependents()
    rows = start + _rows(WARPS, CHUNKS)
    x = tl.load(scores + row * scores_stride + rows, mask=rows < width, other=0.0)
    keys = tl.where(rows < visible, sortable(x), 0)
    if (part == 0) & (visible < K):
        lanes = tl.arange(0, PART)
        tl.store(out + row * out_stride + lanes, -1, mask=(lanes >= visible) & (lanes < K))
    if visible > start:
        count = tl.minimum(visible - start, PART)
        flat = page * PAGE_ROWS + rows % PAGE_ROWS
        place, few, names, chosen = choose(keys, flat, count, K, space, WARPS, CHUNKS, LIST)
        if visible <= PART:
            put(out + row * out_stride, place, names, chosen, space)
        else:
            best = (row * parts + part) * K
            put(best_keys + best, place, few.to(tl.int32, bitcast=True), chosen, space)
            put(best_rows + best, place, names, chosen, space)


@triton.jit(do_not_specialize=["out_stride", "parts", "size"])
def choose_of_parts(
    positions, out, part_keys, part_rows, best_keys, best_rows, out_stride, parts, size,
    K: tl.constexpr, RATIO: tl.constexpr, WARPS: tl.constexpr, CHUNKS: tl.constexpr,
    LIST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the best k of what some parts, of ``size`` rows each, have left of every row."""
    TAKE: tl.constexpr = WARPS * CHUNKS * 128 // K
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    start = group * TAKE * size
    space = shared_space(EARLY)
    clear(space, WARPS * 32)
    visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if (visible > size) & (visible > start):
        slots = _rows(WARPS, CHUNKS)
        at = (row * parts + group * TAKE) * K + slots
        there = slots < tl.minimum(parts - group * TAKE, TAKE) * K
        keys = tl.load(part_keys + at, mask=there, other=0).to(tl.uint32, bitcast=True)
        rows = tl.load(part_rows + at, mask=there, other=0)
        keys = tl.where(there & (start + slots // K * size + slots % K < visible), keys, 0)
        # all parts but a row's last have left k
        full = (visible - start - 1) // size
        rest = tl.minimum(visible - start - full * size, K)
        count = tl.minimum(full * K + rest, TAKE * K)
        place, few, names, chosen = choose(keys, rows, count, K, space, WARPS, CHUNKS, LIST)
        if visible <= TAKE * size:
            put(out + row * out_stride, place, names, chosen, space)
        else:
            best = (row * tl.num_programs(1) + group) * K
            put(best_keys + best, place, few.to(tl.int32, bitcast=True), chosen, space)
            put(best_rows + best, place, names, chosen, space)
