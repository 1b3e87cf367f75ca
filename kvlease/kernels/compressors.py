"""Compressing groups of tokens into one row: plain ('heavy') and overlapping ('sparse').

Works on groups already gathered; which tokens they are, and where the row goes, is the caller's.
"""

import torch
from torch import Tensor

from kvlease.kernels.activations import fold_softmax, fold_sum
from kvlease.kernels.norms import rms_norm
from kvlease.kernels.rope import Rotation, rotate_trailing_


def pool_groups(values: Tensor, gates: Tensor) -> Tensor:
    """Return, per group and channel, the gate-weighted mean of the group's values.

    Shapes: values and gates [G, S, D], S slots a group, float32 or float64; a gate of -inf removes
    its slot, whose value must then be finite. Result [G, D].
    """
    return fold_sum(fold_softmax(gates, 1).mul_(values), 1)


def overlapping_slots(previous: Tensor, current: Tensor, first: Tensor, fill: float) -> Tensor:
    """Join the previous group's first series with the current group's second series.

    Shapes: previous and current [G, r, D]; first [G] bool, true for a sequence's group 0, which has
    no previous one: its slots become ``fill``. Result [G, 2r, D].
    """
    # a select, not a product: what lies before a sequence's start may be poison
    earlier = torch.where(first.view(-1, 1, 1), fill, previous)
    return torch.cat([earlier, current], dim=1)


def compressed_rows(
    values: Tensor, gates: Tensor, weight: Tensor, eps: float, turn: Rotation
) -> Tensor:
    """Return one row per group: pooled, normalised, and rotated to the group's first position.

    Shapes: values [G, S, D], any dtype; gates [G, S, D], float32 or wider; weight [D]; turn has G
    rows. Result [G, D] in the gates' dtype.
    Source: DeepSeek-V4's two compressors (transformers, `deepseek_v4`); they differ only in their
    slots.
    """
    pooled = pool_groups(values.to(gates.dtype), gates)
    return rotate_trailing_(rms_norm(pooled, weight, eps), turn)
