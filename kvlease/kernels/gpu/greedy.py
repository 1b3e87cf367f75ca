# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# Triton's language has no types: what a kernel does with them is checked by its tests.
"""The best token of each row of logits, the lowest among equals; twin: ``torch.argmax``."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlease.kernels.gpu.early import early_launch, wait_for_inputs

_BLOCK = 4096


@triton.jit
def _best_of_block(
    logits, values, places, V: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_inputs(EARLY)
    n, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + n * V + at, mask=at < V, other=-float("inf"))
    best = tl.max(x)
    where = n * tl.num_programs(1) + block
    tl.store(values + where, best)
    tl.store(places + where, tl.min(tl.where(x == best, at, V)))


@triton.jit
def _best_of_row(
    values, places, tokens, following, V: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    n = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK)
    x = tl.load(values + n * COUNT + blocks, mask=blocks < COUNT, other=-float("inf"))
    place = tl.load(places + n * COUNT + blocks, mask=blocks < COUNT, other=V)
    # a row of nothing but NaN has no best; token 0 is as good as any
    token = tl.min(tl.where(x == tl.max(x), place, V))
    token = tl.where(token < V, token, 0)
    tl.store(tokens + n, token)
    if following is not None:
        # every kernel of the step that reads these has ended
        position = tl.load(following.positions + n)
        tl.store(following.positions + n, position + 1, mask=position >= 0)
        tl.store(following.tokens + n, token, mask=position >= 0)


class Following(NamedTuple):
    """A decode step's positions and tokens, both [N] int32; a row that is none is at -1."""

    positions: Tensor
    tokens: Tensor


def greedy_tokens(logits: Tensor, following: Following | None = None) -> Tensor:
    """Return each row's best token, [N] int32. Shapes: logits [N, V] float32, contiguous.

    A step that is ``following`` gets the tokens drawn, each one position further.
    """
    num_rows, width = logits.shape
    count = triton.cdiv(width, _BLOCK)
    values = logits.new_empty((num_rows, count))
    places = logits.new_empty((num_rows, count), dtype=torch.int32)
    tokens = logits.new_empty((num_rows,), dtype=torch.int32)
    _best_of_block[(num_rows, count)](
        logits, values, places, V=width, BLOCK=_BLOCK, num_warps=8, **early_launch(_best_of_block)
    )
    _best_of_row[(num_rows,)](
        values, places, tokens, following, V=width, COUNT=count,
        BLOCK=triton.next_power_of_2(count),
        **early_launch(_best_of_row),
        num_warps=1,
    )  # fmt: skip
    return tokens
