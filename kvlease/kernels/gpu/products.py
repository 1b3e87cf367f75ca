"""Rows times a matrix: by our own kernel where rows are few, by the library where they are many."""

import torch
from torch import Tensor

from kvlease.kernels.gpu.few_rows import FEW, multiply_few


def multiply(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows @ weight.T as parts to be added, [shares, N, M]; float32 where rows are few.

    Shapes: rows [N, K] bf16; weight [M, K] bf16.
    """
    if len(rows) <= FEW:
        return multiply_few(rows, weight)
    return torch.mm(rows, weight.t()).unsqueeze(0)


def multiply_whole(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows @ weight.T, [N, M] bf16; with weight [G, M, K], groups side by side.

    Shapes: rows [N, G * K] bf16; result [N, G * M].
    """
    if len(rows) <= FEW:
        return multiply_few(rows, weight, dtype=torch.bfloat16)[0]
    if weight.ndim == 2:
        return torch.mm(rows, weight.t())
    groups, width, deep = weight.shape
    result = rows.new_empty((len(rows), groups * width))
    for g in range(groups):
        part = rows[:, g * deep : (g + 1) * deep]
        torch.mm(part, weight[g].t(), out=result[:, g * width : (g + 1) * width])
    return result
