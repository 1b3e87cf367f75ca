"""Exact top-k of indexer scores, in position order, as flat row addresses. Nothing is sorted.

Short rows, and many rows, take a program a part (topk_parts.py). A few long rows take three short
launches of many programs (topk_long.py), and one or two that do nothing unless a row has too much
at its floor.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAssignmentType=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import torch
import triton
from attrs import frozen
from torch import Tensor

from kvlease.errors import LayoutMismatch
from kvlease.kernels.gpu.topk_long import choose_flagged, choose_listed, list_above, raise_tops
from kvlease.kernels.gpu.topk_parts import choose_of_parts, choose_parts

MAX_K = 1024
MIN_GROUPS = 16
NO_TOP = -(1 << 31)
SHORT = 8192
"""Scores of a row up to which one program chooses alone."""
PART = 16384
"""Scores that one program of the general kernels holds."""
MANY = 128
"""Queries above which there are programs enough without cutting rows into lists."""
LISTS = 32
"""Lists of a row at most."""
LIST_PART = 2048
LAST_WARPS = 4
COPIES = 8
"""Copies of the tops of a single row, so that raising them does not wait in line."""
_PER_WARP = 512
_FEW = 64
"""Programs that are enough to read a step's scores once."""


@frozen
class LongRows:
    """What the launches for long rows pass on.

    Attributes:
        part: scores of a row that one program lists.
        tops: [num_queries, copies, groups] int32, maxima of a row's scores by index modulo the
            number of groups; NO_TOP between calls, unless the scores kernel has raised them.
        lists: [num_queries, lists, groups] int32, rows that reach the floor.
        counts: [num_queries, lists] int32, how many each list was to hold, and how many of them
            are level with the floor.
        brackets: [num_queries, 2] int32, where the bar lies.
        flags: [num_queries] int32, whether a row is left to the general kernels.
    """

    part: int
    tops: Tensor
    lists: Tensor
    counts: Tensor
    brackets: Tensor
    flags: Tensor


@frozen
class TopkPlan:
    """How rows of scores are cut, and the memory that the launches pass on through.

    Ownership: one call at a time may use a plan; but for tops it holds nothing between calls.

    Attributes:
        k: how many are chosen of each row, at most 1024.
        groups: scores are dealt into so many groups, whose maxima give a floor.
        part: scores of a row that one program of the general kernels holds.
        best_scores: [num_queries, parts, k] float32, each part's best.
        best_rows: [num_queries, parts, k] int32, their rows.
        pack: [num_queries, parts, groups] int32, what lies above each part's floor.
        long: what few long rows need; None where the general kernels choose.
    """

    k: int
    groups: int
    part: int
    best_scores: Tensor
    best_rows: Tensor
    pack: Tensor
    long: LongRows | None

    @classmethod
    def make(
        cls,
        num_queries: int,
        max_rows: int,
        k: int,
        device: torch.device,
        *,
        short: int = SHORT,
        part: int = PART,
    ) -> "TopkPlan":
        """Allocate what ``choose_rows`` needs for so many queries of up to so many scores each."""
        if not 1 <= k <= MAX_K:
            raise LayoutMismatch(f"top-k of {k} rows was asked for; 1 to {MAX_K} can be chosen")
        groups = max(MIN_GROUPS, triton.next_power_of_2(2 * k))
        part = max(2 * groups, min(part, triton.next_power_of_2(max_rows)))
        listed = max(2 * groups, triton.next_power_of_2(-(-max_rows // LISTS)))
        part, listed = max(part, listed), max(listed, min(LIST_PART, part))
        parts = max(1, -(-max_rows // part))

        def memory(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty((num_queries, *shape), dtype=dtype, device=device)

        long = None
        if num_queries <= MANY and max_rows > max(short, 2 * groups):
            lists = triton.next_power_of_2(-(-max_rows // listed))
            long = LongRows(
                listed,
                memory(max(1, COPIES // num_queries), groups).fill_(NO_TOP),
                memory(lists, groups),
                memory(lists),
                memory(2),
                memory(),
            )
        best_scores = memory(parts, k, dtype=torch.float32)
        return cls(k, groups, part, best_scores, memory(parts, k), memory(parts, groups), long)


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
    has_tops: bool = False,
) -> None:
    """Write the flat addresses of each query's k best rows, in position order, then -1.

    The lengths are read on the device: row n sees (positions[n] + 1) // ratio scores, none where
    its position is -1. Of equal scores the lower position wins; scores past the visible ones may
    be anything. ``has_tops``: the scores kernel was given this plan and has raised its tops.

    Shapes: scores [N, L] float32, any stride from row to row; positions [N] int32; table [B, P]
    int32, pages of sequence n, or of sequence sequences[n] where [N] int32 is given; out [N, k]
    int32, filled with page * rows_per_page + offset.

    Raises:
        LayoutMismatch: more queries or scores than the plan was made for.
    """
    num_queries, width = scores.shape
    max_queries, max_parts, _ = plan.pack.shape
    if num_queries > max_queries or width > plan.part * max_parts:
        raise LayoutMismatch(
            f"scores {tuple(scores.shape)} exceed the plan's {max_queries} queries of"
            f" {plan.part * max_parts}; make the plan for the largest step"
        )
    common = {"K": plan.k, "RATIO": ratio, "GROUPS": plan.groups, "EARLY": scores.is_cuda}
    if scores.is_cuda:
        # a launch may start while the one before it ends, and waits for it where it must
        common["launch_pdl"] = True
    pages = {"PAGE_ROWS": rows_per_page, "BY_SEQUENCE": sequences is not None}
    query = (scores, positions, positions if sequences is None else sequences, table, out)
    if plan.long is not None:
        _choose_long(query, plan.long, has_tops, common, pages)
    _choose_general(query, plan, common, pages)


Query = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Options = dict[str, int]


def _choose_long(
    query: Query, long: LongRows, has_tops: bool, common: Options, pages: Options
) -> None:
    scores, positions, *_, table, out = query
    num_queries, width = scores.shape
    stride, groups, num_lists = scores.stride(0), common["GROUPS"], long.lists.shape[1]
    common = {**common, "COPIES": long.tops.shape[1]}
    if not has_tops:
        rest = {name: value for name, value in common.items() if name != "K"}
        # few programs, so that few maxima are raised, but enough to read fast
        fair = triton.next_power_of_2(num_queries * width // _FEW)
        part = max(long.part, min(PART, fair, triton.next_power_of_2(width)))
        raise_tops[(num_queries, triton.cdiv(width, part))](
            scores, positions, long.tops, stride,
            PAIRS=part // (2 * groups), num_warps=_warps(part), **rest,
        )  # fmt: skip
    lists = (long.tops, long.lists, long.counts, long.brackets)
    list_above[(num_queries, triton.cdiv(width, long.part))](
        scores, positions, *lists, stride, PAIRS=long.part // (2 * groups), LISTS=num_lists,
        num_warps=_warps(long.part), **common,
    )  # fmt: skip
    strides = (stride, out.stride(0), long.tops.stride(0), long.lists.stride(0), table.stride(0))
    choose_listed[(num_queries,)](
        *query, *lists, long.flags, *strides, PART=long.part, LISTS=num_lists,
        PARTS=triton.next_power_of_2(triton.cdiv(width, long.part)), num_warps=LAST_WARPS,
        **common, **pages,
    )  # fmt: skip


def _choose_general(query: Query, plan: TopkPlan, common: Options, pages: Options) -> None:
    scores, positions, *_, table, out = query
    num_queries, width = scores.shape
    memory = (plan.best_scores, plan.best_rows, plan.pack)
    strides = (out.stride(0), plan.best_rows.stride(0), plan.pack.stride(0))
    rest = {**common, **pages, "num_warps": 8}
    pairs, parts, long = plan.part // (2 * plan.groups), triton.cdiv(width, plan.part), plan.long
    if long is None:
        choose_parts[(num_queries, parts)](
            *query, *memory, *strides, scores.stride(0), width, table.stride(0),
            PAIRS=pairs, **rest,
        )  # fmt: skip
    else:
        choose_flagged[(num_queries, parts)](
            *query, long.flags, long.counts, long.brackets, *memory, *strides, scores.stride(0),
            table.stride(0), PAIRS=pairs, LISTS=long.lists.shape[1], LIST_PART=long.part, **rest,
        )  # fmt: skip
    if parts > 1:
        flags = positions if long is None else long.flags
        choose_of_parts[(num_queries,)](
            *query[1:], flags, *memory, *strides, table.stride(0), PART=plan.part,
            PAIRS=triton.next_power_of_2(triton.cdiv(parts * plan.k, 2 * plan.groups)),
            FLAGGED=long is not None, **rest,
        )  # fmt: skip


def _warps(part: int) -> int:
    return min(8, max(1, part // _PER_WARP))
