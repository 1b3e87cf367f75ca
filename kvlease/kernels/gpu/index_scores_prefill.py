"""Indexer scores of many queries of one sequence over its paged keys, causal.

A program keeps one tile of keys and walks over queries: keys are the wide side of the product, so
that a query's heads are read once for as many keys as fit.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlease.kernels.gpu.index_scores import IndexKeys


@triton.jit(do_not_specialize=["num_queries"])
def _prefill_scores(
    queries,
    head_weights,
    values,
    scales,
    table,
    positions,
    out,
    num_queries,
    out_stride,
    PAGE_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    SCALE_PAGE_STRIDE: tl.constexpr,
    SCALE_ROW_STRIDE: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    STAGES: tl.constexpr,
):
    start = tl.program_id(0) * TILE
    first = tl.program_id(1) * QUERIES
    lanes = first + tl.arange(0, QUERIES)
    given = lanes < num_queries
    seen = tl.maximum(tl.load(positions + lanes, mask=given, other=-1) + 1, 0) // RATIO
    most = tl.max(seen)
    if most > start:
        last = tl.minimum(first + QUERIES, num_queries)
        # positions ascend: the first queries may see nothing of this tile
        first += tl.sum(((seen <= start) & given).to(tl.int32))
        rows = start + tl.arange(0, TILE)
        heads = tl.arange(0, HEADS)
        channels = tl.arange(0, WIDTH)
        wide = tl.full([], 0, tl.int64)
        place = tl.load(table + rows // PAGE_ROWS, mask=rows < most, other=0).to(tl.int64)
        row = rows % PAGE_ROWS
        keys = tl.load(
            values + (place * PAGE_STRIDE + row * ROW_STRIDE)[:, None] + channels[None, :]
        ).to(queries.dtype.element_ty)
        # relu(x) = (x + |x|) / 2: an addition issues at twice the rate of a maximum
        scale = tl.full([TILE], 0.5, tl.float32)
        if SCALE_ROW_STRIDE > 0:
            scale *= tl.load(scales + place * SCALE_PAGE_STRIDE + row * SCALE_ROW_STRIDE)
        for n in tl.range(first, last, num_stages=STAGES):
            at = wide + n
            query = tl.load(queries + (at * HEADS + heads[None, :]) * WIDTH + channels[:, None])
            weights = tl.load(head_weights + at * HEADS + heads)
            visible = tl.maximum(tl.load(positions + n) + 1, 0) // RATIO
            products = tl.dot(keys, query)
            sums = tl.sum((products + tl.abs(products)) * weights[None, :], axis=1)
            tl.store(out + at * out_stride + rows, sums * scale, mask=rows < visible)


def prefill_scores(
    queries: Tensor,
    head_weights: Tensor,
    keys: IndexKeys,
    pages: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    ratio: int,
) -> None:
    """Write each query's scores of its visible keys, and nothing past them.

    Query n sees (positions[n] + 1) // ratio keys. To bound the scores' memory, call it for a few
    queries at a time.

    Shapes: queries [N, H, D], e4m3 (over e4m3 keys only) or bf16, all of one sequence and with
    ascending positions, H a multiple of 16; head_weights [N, H] float32 with every scale already
    in; pages [P] int32, the sequence's page table; positions [N] int32; out [N, L] float32, L
    what the last query sees or more.
    """
    num_queries, num_heads, _ = queries.shape
    tile, each = 128, 128
    _prefill_scores[(triton.cdiv(out.shape[1], tile), triton.cdiv(num_queries, each))](
        queries,
        head_weights,
        keys.values,
        head_weights if keys.scales is None else keys.scales,
        pages,
        positions,
        out,
        num_queries,
        out.stride(0),
        **keys.layout(),
        HEADS=num_heads,
        RATIO=ratio,
        TILE=tile,
        QUERIES=each,
        STAGES=4 if queries.dtype == torch.float8_e4m3fn else 3,
        num_warps=4,
    )
