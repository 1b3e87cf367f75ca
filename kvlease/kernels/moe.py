"""A mixture of experts: gated two-layer networks, summed by routing weight in index order.

Two forms of one function. Few experts: all of them on all rows, as two products. Many: each
expert on its own rows. Which form a model uses follows from its number of experts alone, so that
a row meets the same form whatever the batch.
"""

from typing import cast

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.activations import clamped_swiglu
from kvlease.kernels.linear import linear
from kvlease.kernels.routing import Routing
from kvlease.kernels.tiling import Tiling, pad_rows

DENSE_EXPERTS = 16
"""Up to this many experts, computing all of them costs less than gathering rows for each."""


@frozen
class ExpertWeights:
    """Weights of E experts of width F: gate and up [E * F, D], down [D, E * F].

    Rows (columns of ``down``) e * F .. (e + 1) * F - 1 belong to expert e.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    num_experts: int

    @property
    def width(self) -> int:
        """Hidden width of one expert."""
        return self.gate.shape[0] // self.num_experts


def mix_experts(
    rows: Tensor, routing: Routing, weights: ExpertWeights, limit: float, tiling: Tiling
) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs.

    Shapes: rows [N, D]; routing of N rows; result [N, D], in the rows' dtype.
    Source: DeepSeek-V4's MoE block (transformers, `deepseek_v4`); clamps as in `clamped_swiglu`.
    """
    if weights.num_experts <= DENSE_EXPERTS:
        return _all_experts(rows, routing, weights, limit, tiling)
    return _each_expert(rows, routing, weights, limit, tiling)


def _all_experts(
    rows: Tensor, routing: Routing, weights: ExpertWeights, limit: float, tiling: Tiling
) -> Tensor:
    hidden = clamped_swiglu(
        linear(rows, weights.gate, tiling), linear(rows, weights.up, tiling), limit
    )
    shaped = hidden.view(rows.shape[0], weights.num_experts, weights.width)
    # the weight goes in before the last product, whose inner sum then adds experts in index order
    weighted = shaped * routing.weights.to(hidden.dtype).unsqueeze(2)
    return linear(weighted.flatten(1), weights.down, tiling)


def _each_expert(
    rows: Tensor, routing: Routing, weights: ExpertWeights, limit: float, tiling: Tiling
) -> Tensor:
    total = torch.zeros_like(rows, dtype=routing.weights.dtype)
    width = weights.width
    used = cast("list[int]", routing.chosen.any(dim=0).nonzero().flatten().tolist())
    for expert in used:
        mine = routing.chosen[:, expert].nonzero().flatten()
        part = pad_rows(rows.index_select(0, mine), tiling.round_rows(len(mine)))
        of_expert = slice(expert * width, (expert + 1) * width)
        hidden = clamped_swiglu(
            linear(part, weights.gate[of_expert], tiling),
            linear(part, weights.up[of_expert], tiling),
            limit,
        )
        output = linear(hidden, weights.down[:, of_expert], tiling)[: len(mine)]
        share = routing.weights[:, expert].index_select(0, mine).unsqueeze(1)
        total.index_add_(0, mine, output.to(total.dtype) * share)
    return total.to(rows.dtype)
