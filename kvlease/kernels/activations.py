"""Smooth element functions whose bits do not depend on where an element lies in its tensor.

Torch's own sigmoid, silu and softplus use a vector routine for full registers and another one for
the rest, and where the rest falls depends on the thread count. ``exp`` and ``log1p`` do not have
that seam, and the other steps here are single correctly rounded operations.
"""

import torch
from torch import Tensor

_SOFTPLUS_LINEAR_FROM = 20.0
"""Above this log(1 + e^x) exceeds x by less than 2.1e-9; torch's softplus cuts there too."""


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), elementwise."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)), elementwise."""
    return x / torch.exp(-x).add_(1.0)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), elementwise; x itself where exp would be too large to matter."""
    smooth = torch.log1p(torch.exp(x.clamp(max=_SOFTPLUS_LINEAR_FROM)))
    return torch.where(x > _SOFTPLUS_LINEAR_FROM, x, smooth)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit).

    Shapes: gate and up alike, any; result likewise.
    Source: DeepSeek-V4's experts (transformers, `deepseek_v4`).
    """
    # clamp makes contiguous copies, which the vector exp needs to be the only exp in use
    return silu(gate.clamp(max=limit)).mul_(up.clamp(min=-limit, max=limit))


def fold_sum(x: Tensor, dim: int) -> Tensor:
    """Return the sum over ``dim`` by halving: additions only, in an order fixed by its length.

    Torch's ``sum`` orders an outer reduction by how the tensor was split over threads and vector
    registers. Pairs (i, i + half) are added until one slice is left; an odd slice waits a round.
    """
    while (length := x.shape[dim]) > 1:
        half = length // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        if length % 2:
            folded = torch.cat([folded, x.narrow(dim, length - 1, 1)], dim=dim)
        x = folded
    return x.squeeze(dim)


def fold_softmax(x: Tensor, dim: int) -> Tensor:
    """Return softmax over ``dim`` (not the last one) with `fold_sum` as its sum.

    A slice that is -inf throughout is the caller's error (the result is NaN).
    """
    weights = torch.exp(x - x.amax(dim=dim, keepdim=True))
    return weights.div_(fold_sum(weights, dim).unsqueeze(dim))
