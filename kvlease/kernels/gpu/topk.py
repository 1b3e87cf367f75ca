"""Exact top-k of indexer scores, in position order, as flat row addresses. Nothing is sorted.

A program chooses the best of one part of a row; where rows have several parts, further programs
choose the best of those, until one part is left.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAssignmentType=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import torch
import triton
from torch import Tensor

from kvlease.errors import LayoutMismatch
from kvlease.kernels.gpu.early import early_launch
from kvlease.kernels.gpu.topk_parts import choose_of_parts, choose_parts

MAX_K = 1024
PART = 16384
"""Scores of a row that one program chooses of."""
SLOTS = 8192
"""What parts have chosen that one program chooses of; at least twice as many as are chosen."""
_LANES = 128
_VECTOR = 16
"""What sizes and addresses are multiples of where kernels are compiled to load four by four."""


def choose_rows(
    scores: Tensor,
    positions: Tensor,
    table: Tensor,
    out: Tensor,
    *,
    ratio: int,
    rows_per_page: int,
    part: int = PART,
) -> None:
    """Write the flat addresses of each query's k best rows, in position order, then -1.

    The lengths are read on the device: row n sees (positions[n] + 1) // ratio scores, none where
    its position is -1. Of equal scores the lower position wins; scores past the visible ones may
    be anything. Positions and pages are not written by kernels right before this one: they are
    read before those have ended.

    Shapes: scores [N, L] float32, any stride from row to row; positions [N] int32; table [N, P]
    int32, each row's pages, any stride from row to row, 0 where all rows are of one sequence; out
    [N, k] int32, filled with page * rows_per_page + offset. ``part``: scores that one program
    takes, a power of two; at most and by default 16,384.

    Raises:
        LayoutMismatch: more than 1,024 rows are to be chosen, or none.
    """
    (num_queries, width), k = scores.shape, out.shape[1]
    if not 1 <= k <= MAX_K:
        raise LayoutMismatch(f"top-k of {k} rows was asked for; 1 to {MAX_K} can be chosen")
    warps, chunks = _spread(min(width, part, PART), k)
    size = warps * chunks * _LANES
    parts = triton.cdiv(width, size)
    options = {"K": k, "RATIO": ratio, **early_launch(choose_parts)}
    aligned = all(n % _VECTOR == 0 for n in (width, scores.stride(0), scores.data_ptr()))
    best = (out, out) if parts == 1 else _memory(scores, parts, k)
    choose_parts[(num_queries, parts)](
        scores, positions, table, out, *best, scores.stride(0), table.stride(0),
        out.stride(0), width, parts, PAGE_ROWS=rows_per_page, WARPS=warps, CHUNKS=chunks,
        LIST=_list(warps, k), FOURS=options["EARLY"] and aligned, num_warps=warps, **options,
    )  # fmt: skip
    while parts > 1:
        warps, chunks = _spread(min(parts * k, max(SLOTS, 2 * k)), k)
        take = warps * chunks * _LANES // k
        groups = triton.cdiv(parts, take)
        to = (out, out) if groups == 1 else _memory(scores, groups, k)
        choose_of_parts[(num_queries, groups)](
            positions, out, *best, *to, out.stride(0), parts, size, WARPS=warps, CHUNKS=chunks,
            LIST=_list(warps, k), FOURS=options["EARLY"] and k % _VECTOR == 0, num_warps=warps,
            **options,
        )  # fmt: skip
        best, parts, size = to, groups, size * take


def _memory(scores: Tensor, parts: int, k: int) -> tuple[Tensor, Tensor]:
    """Return room for the keys and the rows that each part chooses."""
    shape = (len(scores), parts, k)
    return scores.new_empty(shape, dtype=torch.int32), scores.new_empty(shape, dtype=torch.int32)


def _spread(count: int, k: int) -> tuple[int, int]:
    """Return over how many warps ``count`` keys are spread, and how many chunks each has.

    The warps' groups of keys must be as many as are chosen.
    """
    chunks: int = triton.next_power_of_2(triton.cdiv(max(count, k), _LANES))
    warps = min(chunks, 8 if chunks <= 64 else 16)
    return warps, chunks // warps


def _list(warps: int, k: int) -> int:
    """Return how many keys that reach the floor a program lists."""
    return max(32 * warps, 1 << (2 * k - 1).bit_length())
