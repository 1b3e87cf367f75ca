# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# Triton's language has no types: what a kernel does with them is checked by its tests.
"""Query heads from their joined projection: norm and rotation of all, in one launch.

Attention's heads are normalised (without a weight) and turned, the indexer's only turned. Twin:
``models.attention_block``.
"""

import triton
import triton.language as tl
from torch import Tensor

from kvlease.kernels.gpu.early import early_launch, wait_for_inputs
from kvlease.kernels.gpu.rotation import Turns, turn_heads


@triton.jit
def _turn_some(
    asked, turns, out, n, position, first, eps, asked_row, START: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BH: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Write heads ``first`` .. of row n; they begin at column START of the projection."""
    heads = first + tl.arange(0, BH)
    at = heads[:, None] * D + tl.arange(0, D)[None, :]
    inside = (heads < H)[:, None]
    x = tl.load(asked + n * asked_row + START + at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    x = turn_heads(x, turns, position, BH, D, R)
    tl.store(out + n * (H * D) + at, x.to(tl.bfloat16), mask=inside)


@triton.jit
def _heads(
    asked, positions, turns, queries, index_queries, eps, asked_row, H: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BH: tl.constexpr, IH: tl.constexpr, ID: tl.constexpr,
    IBH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (n, i) does heads i * BH .. of row n; those past the last do the indexer's."""
    wait_for_inputs(EARLY)
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.maximum(tl.load(positions + n), 0)
    PARTS: tl.constexpr = (H + BH - 1) // BH
    if part < PARTS:
        _turn_some(
            asked, turns, queries, n, position, part * BH, eps, asked_row, 0, H, D, R, BH, True
        )
    elif IH > 0:
        first = (part - PARTS) * IBH
        _turn_some(
            asked,
            turns,
            index_queries,
            n,
            position,
            first,
            eps,
            asked_row,
            H * D,
            IH,
            ID,
            R,
            IBH,
            False,
        )


def query_heads(
    asked: Tensor,
    positions: Tensor,
    turns: Turns,
    rope: int,
    eps: float,
    shape: tuple[int, int],
    index_shape: tuple[int, int] | None,
) -> tuple[Tensor, Tensor | None]:
    """Return heads [N, H, D] and index heads [N, IH, ID] (None without an indexer), bf16.

    Shapes: asked [N, H * D + IH * ID] bf16; positions [N] int32, padding rows below 0.
    """
    num_rows, (heads, width) = len(asked), shape
    queries = asked.new_empty((num_rows, heads, width))
    index_heads, index_width = index_shape or (0, 16)
    indexed = asked.new_empty((num_rows, index_heads, index_width)) if index_shape else None
    block = max(1, 4096 // width)
    index_block = max(1, 4096 // index_width)
    parts = triton.cdiv(heads, block) + triton.cdiv(index_heads, index_block)
    _heads[(num_rows, parts)](
        asked, positions, turns, queries, indexed, eps, asked.stride(0), H=heads, D=width, R=rope,
        BH=block, IH=index_heads, ID=index_width, IBH=index_block, num_warps=4,
        **early_launch(_heads),
    )  # fmt: skip
    return queries, indexed
