"""Manifold-constrained hyper-connections: S residual streams, mixed around every block.

A block reads a weighted sum of the streams and writes back to all of them while they mix by a
doubly stochastic matrix. Knows nothing of what a block computes.
"""

from functools import lru_cache

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.activations import fold_sum, sigmoid
from kvlease.kernels.linear import batched, linear
from kvlease.kernels.norms import accumulate_dtype, rms_normalize
from kvlease.kernels.tiling import Tiling


@frozen
class MixerWeights:
    """Weights of one mixer: projection [M, S * D], scale [M] (spread per output), base [M].

    M is S * (2 + S) for a block (pre, post, comb), or S for the head, which only reads.
    float32, or float64 in a float64 model.
    """

    projection: Tensor
    scale: Tensor
    base: Tensor


@frozen
class Mixing:
    """How a block's output returns to the streams: post [N, S], comb [N, S, S]."""

    post: Tensor
    comb: Tensor


@frozen
class MixerNumbers:
    """Constants shared by all mixers of a model."""

    streams: int
    sinkhorn_iterations: int
    eps: float
    norm_eps: float


def _mixes(streams: Tensor, weights: MixerWeights, numbers: MixerNumbers, tiling: Tiling) -> Tensor:
    """Return projection(normalised streams) * scale + base, [N, M]."""
    wide = streams.flatten(1).to(accumulate_dtype(streams.dtype))
    mixed = linear(rms_normalize(wide, numbers.norm_eps), weights.projection, tiling)
    return mixed.mul_(weights.scale).add_(weights.base)


@lru_cache(maxsize=16)
def _summing(size: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return matrices that turn [S * S entries, 1] into (sums of each entry's column or row) + eps.

    The constant 1 behind the entries carries ``eps`` into every sum and stays 1 itself.
    """
    ones, same = torch.ones((size, size), dtype=dtype), torch.eye(size, dtype=dtype)
    extended: list[Tensor] = []
    for sums in (torch.kron(ones, same), torch.kron(same, ones)):
        matrix = torch.zeros((size * size + 1, size * size + 1), dtype=dtype)
        matrix[:-1, :-1] = sums
        matrix[-1, :-1] = eps
        matrix[-1, -1] = 1.0
        extended.append(matrix)
    return extended[0], extended[1]


def sinkhorn(positive: Tensor, iterations: int, eps: float) -> Tensor:
    """Return positive matrices made nearly doubly stochastic: columns, then (rows, columns) again.

    Shapes: positive [N, S, S]; result likewise. ``eps`` is added to every sum divided by.
    """
    size = positive.shape[1]
    if positive.device.type != "cpu":
        return _sinkhorn_folding(positive, iterations, eps)
    columns, rows = _summing(size, eps, positive.dtype)
    # flat entries times a 0/1 matrix give every entry the sum of its own column (or row), so that
    # a half iteration is one product and one division
    flat = positive.new_ones((len(positive), size * size + 1))
    flat[:, :-1] = positive.flatten(1)
    sums = torch.empty_like(flat)
    torch.mm(flat, columns, out=sums)
    flat.div_(sums)
    for _ in range(iterations - 1):
        torch.mm(flat, rows, out=sums)
        flat.div_(sums)
        torch.mm(flat, columns, out=sums)
        flat.div_(sums)
    return flat[:, :-1].reshape(positive.shape)


def _sinkhorn_folding(positive: Tensor, iterations: int, eps: float) -> Tensor:
    """The same with additions only, which no batch size reorders on any device."""
    result = positive / (fold_sum(positive, 1) + eps).unsqueeze(1)
    for _ in range(iterations - 1):
        result = result / (fold_sum(result, 2) + eps).unsqueeze(2)
        result = result / (fold_sum(result, 1) + eps).unsqueeze(1)
    return result


def enter_block(
    streams: Tensor, weights: MixerWeights, numbers: MixerNumbers, tiling: Tiling
) -> tuple[Tensor, Mixing]:
    """Return the block's input and how its output goes back.

    Shapes: streams [N, S, D]; input [N, D] in the streams' dtype.
    Source: DeepSeek-V4's mHC (transformers, `deepseek_v4`).
    """
    size = numbers.streams
    mixes = _mixes(streams, weights, numbers, tiling)
    gates = sigmoid(mixes[:, : 2 * size].contiguous())
    square = mixes[:, 2 * size :].reshape(-1, size, size)
    comb = sinkhorn(
        square.softmax(dim=2).add_(numbers.eps), numbers.sinkhorn_iterations, numbers.eps
    )
    entered = _weighted_sum(gates[:, :size] + numbers.eps, streams, tiling)
    return entered, Mixing(gates[:, size:] * 2.0, comb)


def leave_block(streams: Tensor, output: Tensor, mixing: Mixing, tiling: Tiling) -> Tensor:
    """Return the streams after a block: post_s * output + sum_t comb[t, s] * stream_t.

    Shapes: streams [N, S, D]; output [N, D]; result [N, S, D] in the streams' dtype.
    """
    wide = mixing.comb.dtype
    added = mixing.post.unsqueeze(2) * output.to(wide).unsqueeze(1)
    mixed = batched(mixing.comb.transpose(1, 2), streams.to(wide), tiling, added)
    return mixed.to(streams.dtype)


def read_head(
    streams: Tensor, weights: MixerWeights, numbers: MixerNumbers, tiling: Tiling
) -> Tensor:
    """Return the streams' final weighted sum, [N, D] in their dtype. Shapes: streams [N, S, D]."""
    pre = sigmoid(_mixes(streams, weights, numbers, tiling)).add_(numbers.eps)
    return _weighted_sum(pre, streams, tiling)


def _weighted_sum(weights: Tensor, streams: Tensor, tiling: Tiling) -> Tensor:
    wide = streams.to(weights.dtype)
    return batched(weights.unsqueeze(1), wide, tiling).squeeze(1).to(streams.dtype)
