"""Choosing the compressed rows that each query reads: the indexer's scores, then the best k."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.few_rows import multiprocessors
from kvlease.kernels.gpu.index_scores import IndexKeys, decode_scores, programs_each
from kvlease.kernels.gpu.index_scores_prefill import prefill_scores
from kvlease.kernels.gpu.step_rows import StepRows
from kvlease.kernels.gpu.topk import choose_rows
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.tiling import round_up

_SCORES_NBYTES = 256 << 20
"""Memory for a chunk's scores; more queries are taken in several turns."""
_VECTOR = 16
"""Rows of scores have a multiple of so many, and are read by vector loads."""


@frozen
class Stretch:
    """Rows ``first`` .. ``end`` - 1 of a chunk, all of one sequence; the last sees ``keys``."""

    sequence: int
    first: int
    end: int
    keys: int


def choose(
    queries: Tensor,
    head_weights: Tensor,
    memory: Tensor,
    rows: StepRows,
    config: V4Config,
    stretches: Sequence[Stretch] | None,
) -> Tensor:
    """Return the flat addresses of each row's chosen rows in position order, then -1.

    Shapes: queries [N, H, D] bf16; head_weights [N, H] float32, scaled; memory [num_pages,
    rows_per_page, .] of the index keys; result [N, k] int32. ``stretches`` are a chunk's, None in
    a decode step.
    """
    page_rows, k = memory.shape[1], config.index_topk
    keys = IndexKeys(memory, None)
    if memory.dtype == torch.uint8:
        keys = IndexKeys.in_planes(memory.flatten(1), page_rows)
    out = torch.empty((len(queries), k), dtype=torch.int32, device=queries.device)
    choose_best = partial(choose_rows, ratio=config.sparse_ratio, rows_per_page=page_rows)
    if stretches is None:
        scores = head_weights.new_empty((len(queries), rows.table.shape[1] * page_rows))
        programs = programs_each(queries, keys) * multiprocessors(queries.device)
        decode_scores(
            queries, head_weights, keys, rows.table, rows.positions, scores,
            ratio=config.sparse_ratio, programs=programs,
        )  # fmt: skip
        choose_best(scores, rows.positions, rows.table, out)
        return out
    for part in _pieces(stretches):
        where = slice(part.first, part.end)
        mine = rows.positions[where]
        scores = head_weights.new_empty((len(mine), round_up(max(part.keys, 1), _VECTOR)))
        pages = rows.table[part.sequence]
        prefill_scores(
            queries[where], head_weights[where], keys, pages, mine, scores,
            ratio=config.sparse_ratio,
        )  # fmt: skip
        choose_best(scores, mine, pages.expand(len(mine), -1), out[where])
    return out


def _pieces(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    """Cut long stretches so that a piece's scores fit the memory set aside for them."""
    for one in stretches:
        step = max(_SCORES_NBYTES // (4 * max(one.keys, _VECTOR)), 1)
        for first in range(one.first, one.end, step):
            yield Stretch(one.sequence, first, min(first + step, one.end), one.keys)
