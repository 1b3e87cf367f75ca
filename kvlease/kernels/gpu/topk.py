"""Exact top-k of indexer scores, in position order, as flat row addresses.

A program holds its part of a row in registers and narrows it in three steps, none of which sorts:

1. *Floor*: the row is dealt into groups, and the k-th best of the groups' maxima is a floor below
   which nothing can be chosen. On random rows about 1.4 k scores lie at or above it.
2. *Bar*: those few are packed together, in position order, and the k-th best of them is found two
   bits at a time, by counting. Where too many lie above the floor, the whole row is searched.
3. Scores above the bar are chosen, and of those level with it the lowest positions.

Long rows are cut into parts, whose best k each are one shorter row for a second launch.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from kvlease.errors import LayoutMismatch

MAX_K = 1024
MIN_GROUPS = 16


@triton.jit
def _sortable(scores):
    """Return unsigned keys in the order of the scores; zeros are equal, and no key is 0."""
    bits = scores.to(tl.uint32, bitcast=True)
    bits = tl.where(bits == 0x80000000, 0, bits)
    return bits ^ tl.where(bits >= 0x80000000, 0xFFFFFFFF, 0x80000000)


@triton.jit
def _counts(keys, first, second, third, SMALL: tl.constexpr):
    """Return how many keys reach each of three thresholds; SMALL: there are at most 1023 keys."""
    if SMALL:
        packed = tl.sum(
            (keys >= first).to(tl.int32)
            + ((keys >= second).to(tl.int32) << 10)
            + ((keys >= third).to(tl.int32) << 20)
        )
        return packed & 1023, (packed >> 10) & 1023, packed >> 20
    else:
        packed = tl.sum((keys >= first).to(tl.uint32) + ((keys >= second).to(tl.uint32) << 16))
        most = tl.sum((keys >= third).to(tl.int32))
        return (packed & 0xFFFF).to(tl.int32), (packed >> 16).to(tl.int32), most


@triton.jit
def _bar(keys, low, count, k, enough, SMALL: tl.constexpr):
    """Return the highest bar that k keys reach, and how many do; any that `enough` reach will do.

    ``low`` is a bar that ``count`` keys, at least k, are known to reach.
    """
    high = tl.max(keys)
    # the highest bit in which keys can differ, rounded down to a pair of bits
    differ = low ^ high
    shift = tl.where(differ >= 1 << 16, 16, 0)
    shift += tl.where((differ >> shift) >= 1 << 8, 8, 0)
    shift += tl.where((differ >> shift) >= 1 << 4, 4, 0)
    shift += tl.where((differ >> shift) >= 1 << 2, 2, 0)
    bar = ((high >> shift) >> 2 << 2) << shift
    one = tl.full([], 1, tl.uint32)
    while (shift >= 0) & (count > enough):
        first = bar | (one << shift)
        second = bar | (one * 2 << shift)
        third = bar | (one * 3 << shift)
        n1, n2, n3 = _counts(keys, first, second, third, SMALL)
        count = tl.where(n3 >= k, n3, tl.where(n2 >= k, n2, tl.where(n1 >= k, n1, count)))
        bar = tl.where(n3 >= k, third, tl.where(n2 >= k, second, tl.where(n1 >= k, first, bar)))
        shift -= 2
    return tl.maximum(bar, low), count


@triton.jit
def _first_of_level(keys, bar, k):
    """Return which k of the keys are best: those above the bar, and the first of those level."""
    level = keys == bar
    room = k - tl.sum((keys > bar).to(tl.int32))
    return (keys > bar) | (level & (tl.cumsum(level.to(tl.int32)) <= room))


@triton.jit
def _narrow(
    keys,
    rows,
    pack,
    out_keys,
    out_rows,
    pages,
    final,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
):
    """Write the best k of more than k keys in order: flat addresses at the end, else keys and rows.

    Keys that do not count are 0.
    """
    tops = tl.max(tl.reshape(keys, [BLOCK // GROUPS, GROUPS]), axis=0)
    # one group is left out, so that counts fit their fields: the floor may only fall
    tops = tl.where(tl.arange(0, GROUPS) < GROUPS - 1, tops, 0)
    lowest = tl.min(tl.where(tops > 0, tops, 0xFFFFFFFF))
    reach = tl.sum((tops > 0).to(tl.int32))
    floor, _ = _bar(tops, lowest, reach, K, K + 16, GROUPS <= 1024)
    above = keys >= floor
    count = tl.sum(above.to(tl.int32))
    if count >= GROUPS:
        bar, reach = _bar(keys, floor, count, K, K, False)
        above = keys >= bar
        if reach > K:
            above = _first_of_level(keys, bar, K)
        count = K
    place = tl.cumsum(above.to(tl.int32)) - 1
    tl.store(pack + place, keys.to(tl.int32, bitcast=True), mask=above)
    tl.store(pack + GROUPS + place, rows, mask=above)
    tl.debug_barrier()
    slots = tl.arange(0, GROUPS)
    few = tl.load(pack + slots, mask=slots < count, other=0, cache_modifier=".cg")
    few = few.to(tl.uint32, bitcast=True)
    few_rows = tl.load(pack + GROUPS + slots, mask=slots < count, other=0, cache_modifier=".cg")
    bar, reach = _bar(few, floor, count, K, K, GROUPS <= 1024)
    chosen = few >= bar
    if reach > K:
        chosen = _first_of_level(few, bar, K)
    rank = tl.cumsum(chosen.to(tl.int32)) - 1
    if final:
        page = tl.load(pages + few_rows // PAGE_ROWS, mask=chosen, other=0)
        tl.store(out_rows + rank, page * PAGE_ROWS + few_rows % PAGE_ROWS, mask=chosen)
    else:
        tl.store(out_keys + rank, few.to(tl.int32, bitcast=True), mask=chosen)
        tl.store(out_rows + rank, few_rows, mask=chosen)


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


@triton.jit(do_not_specialize=["parts"])
def _choose_parts(
    scores,
    positions,
    sequences,
    table,
    out,
    best,
    pack,
    parts,
    scores_stride,
    table_stride,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    BY_SEQUENCE: tl.constexpr,
):
    """Choose the best k of one part of a row; a row that lies in one part is done."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
    start = part * BLOCK
    pages = _pages_of(row, sequences, table, table_stride, BY_SEQUENCE)
    result = out + row * K
    if visible <= K:
        if part == 0:
            _list_all(visible, pages, result, K, GROUPS, PAGE_ROWS)
    elif start < visible:
        rows = start + tl.arange(0, BLOCK)
        seen = rows < visible
        # read in fours: up to three scores past the visible ones, which do not count
        read = rows < (visible + 3) // 4 * 4
        raw = tl.load(scores + row * scores_stride + rows, mask=read, other=0.0)
        keys = tl.where(seen, _sortable(raw), 0)
        slot = row * parts + part
        best_keys = best + slot * 2 * K
        best_rows = best_keys + K
        if (part > 0) & (visible - start <= K):
            tl.store(best_keys + rows - start, keys.to(tl.int32, bitcast=True), mask=seen)
            tl.store(best_rows + rows - start, rows, mask=seen)
        else:
            final = visible <= BLOCK
            if final:
                best_rows = result
            _narrow(
                keys,
                rows,
                pack + slot * 2 * GROUPS,
                best_keys,
                best_rows,
                pages,
                final,
                K,
                BLOCK,
                GROUPS,
                PAGE_ROWS,
            )


@triton.jit(do_not_specialize=["parts"])
def _choose_of_parts(
    positions,
    sequences,
    table,
    out,
    best,
    pack,
    parts,
    table_stride,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    BY_SEQUENCE: tl.constexpr,
):
    """Choose the best k of the best of all parts, for rows of more than one part."""
    row = tl.program_id(0).to(tl.int64)
    visible = tl.maximum(tl.load(positions + row) + 1, 0) // RATIO
    if visible > BLOCK:
        pages = _pages_of(row, sequences, table, table_stride, BY_SEQUENCE)
        lanes = tl.arange(0, LANES)
        part = lanes // K
        held = tl.minimum(visible - part * BLOCK, K)
        at = best + (row * parts + part) * 2 * K + lanes % K
        real = lanes % K < held
        keys = tl.load(at, mask=real, other=0).to(tl.uint32, bitcast=True)
        rows = tl.load(at + K, mask=real, other=0)
        result = out + row * K
        _narrow(
            keys,
            rows,
            pack + row * parts * 2 * GROUPS,
            result,
            result,
            pages,
            True,
            K,
            LANES,
            GROUPS,
            PAGE_ROWS,
        )


@frozen
class TopkPlan:
    """How rows of up to ``max_rows`` scores are cut, and the memory the launches pass on through.

    Ownership: one launch at a time may use a plan; it holds nothing between launches.

    Attributes:
        k: how many are chosen of each row, at most 1024.
        part: scores of a row that one program holds.
        parts: programs of one row.
        best: [num_queries, parts, 2, k] int32, keys and rows of each part's best.
        pack: [num_queries, parts, 2, groups] int32, what lies above each part's floor.
    """

    k: int
    part: int
    parts: int
    best: Tensor
    pack: Tensor

    @classmethod
    def make(
        cls, num_queries: int, max_rows: int, k: int, device: torch.device, part: int = 16384
    ) -> "TopkPlan":
        """Allocate what ``choose_rows`` needs for so many queries of up to so many scores each."""
        if not 1 <= k <= MAX_K:
            raise LayoutMismatch(f"top-k of {k} rows was asked for; 1 to {MAX_K} can be chosen")
        groups = max(MIN_GROUPS, triton.next_power_of_2(2 * k))
        part = max(groups, min(part, triton.next_power_of_2(max_rows)))
        parts = max(1, -(-max_rows // part))
        return cls(
            k,
            part,
            parts,
            torch.empty((num_queries, parts, 2, k), dtype=torch.int32, device=device),
            torch.empty((num_queries, parts, 2, groups), dtype=torch.int32, device=device),
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

    Shapes: scores [N, L] float32, L a multiple of 4, rows at multiples of 16 bytes; positions [N]
    int32; table [B, P] int32, pages of sequence n, or of sequence sequences[n] where [N] int32 is
    given; out [N, k] int32, filled with page * rows_per_page + offset.

    Raises:
        LayoutMismatch: more queries or scores than the plan was made for.
    """
    num_queries, width = scores.shape
    groups = plan.pack.shape[3]
    if num_queries > plan.pack.shape[0] or width > plan.part * plan.parts:
        raise LayoutMismatch(
            f"scores {tuple(scores.shape)} exceed the plan's {plan.pack.shape[0]} queries of"
            f" {plan.part * plan.parts}; make the plan for the largest step"
        )
    parts = -(-width // plan.part)
    by_sequence = sequences is not None
    common = (plan.best, plan.pack)
    _choose_parts[(num_queries, parts)](
        scores, positions, sequences if by_sequence else positions, table, out, *common,
        plan.parts, scores.stride(0), table.stride(0),
        K=plan.k, RATIO=ratio, PAGE_ROWS=rows_per_page, BLOCK=plan.part, GROUPS=groups,
        BY_SEQUENCE=by_sequence, num_warps=_warps_for(plan.part),
    )  # fmt: skip
    if parts > 1:
        lanes = max(groups, triton.next_power_of_2(parts * plan.k))
        _choose_of_parts[(num_queries,)](
            positions, sequences if by_sequence else positions, table, out, *common,
            plan.parts, table.stride(0),
            K=plan.k, RATIO=ratio, PAGE_ROWS=rows_per_page, BLOCK=plan.part, GROUPS=groups,
            LANES=lanes, BY_SEQUENCE=by_sequence, num_warps=_warps_for(lanes),
        )  # fmt: skip


def _warps_for(lanes: int) -> int:
    return min(32, max(4, lanes // 512))
