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
    apart = rows.view(len(rows), groups, deep).transpose(0, 1)
    into = result.view(len(rows), groups, width).transpose(0, 1)
    torch.bmm(apart, weight.transpose(1, 2), out=into)
    return result


def multiply_exact(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows @ weight.T as parts to be added, [shares, N, M] float32; shapes as `multiply`."""
    if len(rows) <= FEW:
        return multiply_few(rows, weight)
    return float32_product(rows, weight.t()).unsqueeze(0)


def float32_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return rows @ matrix in float32, from bf16."""
    if rows.is_cuda:
        return torch.mm(rows, matrix, out_dtype=torch.float32)
    return rows.float() @ matrix.float()
