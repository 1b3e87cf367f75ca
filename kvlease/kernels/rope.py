"""Rotary position embedding on the trailing channels, in interleaved pairs.

Plain and YaRN frequencies; the YaRN attention factor is 1 in this family, so none is applied. The
inverse rotation is the same call with the angles' sine negated.
"""

import math
from functools import lru_cache

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.placing import CPU


@frozen
class Yarn:
    """YaRN's numbers: how far the context is stretched and which frequencies take part."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@frozen
class RopeSpec:
    """One RoPE base: channels rotated (even), base, and optional YaRN stretching."""

    dim: int
    theta: float
    yarn: Yarn | None = None


@frozen
class Rotation:
    """Angles of N rows, each channel of a pair with its own entry: cos and signed sin [N, dim].

    ``sin`` holds -sin for the first channel of a pair and +sin for the second, so that rotating is
    x * cos + swapped(x) * sin.
    """

    cos: Tensor
    sin: Tensor

    def inverse(self) -> "Rotation":
        """Return the rotation that undoes this one."""
        return Rotation(self.cos, -self.sin)


@lru_cache(maxsize=16)
def inverse_frequencies(spec: RopeSpec, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Return radians per position for each pair, [dim / 2], in float32 or float64; do not write it.

    Computed on the CPU and moved, so that every device turns by the same angles.
    Source: YaRN (arXiv 2309.00071), ramp between interpolated and original frequencies.
    """
    steps = torch.arange(0, spec.dim, 2, dtype=dtype) / spec.dim
    plain = 1.0 / (spec.theta**steps)
    yarn = spec.yarn
    if yarn is None:
        return plain.to(device)

    def channel_of(turns: float) -> float:
        """The (fractional) pair index whose wave makes ``turns`` turns in the original context."""
        spread = math.log(yarn.original_positions / (turns * 2 * math.pi))
        return spec.dim * spread / (2 * math.log(spec.theta))

    low = max(math.floor(channel_of(yarn.beta_fast)), 0)
    high = min(math.ceil(channel_of(yarn.beta_slow)), spec.dim - 1)
    width = (high - low) or 0.001  # a ramp of no width would divide by zero
    stretched = ((torch.arange(spec.dim // 2, dtype=dtype) - low) / width).clamp(0, 1)
    return (plain / yarn.factor * stretched + plain * (1 - stretched)).to(device)


def rotation(positions: Tensor, frequencies: Tensor) -> Rotation:
    """Return the angles of rows at given positions.

    Shapes: positions [N] int64; frequencies [dim / 2]; cos and sin [N, dim], the dtype of the
    frequencies.
    """
    angles = positions.to(frequencies.dtype).unsqueeze(1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return Rotation(
        torch.stack([cos, cos], dim=-1).flatten(1), torch.stack([-sin, sin], dim=-1).flatten(1)
    )


def rotate_trailing_(x: Tensor, turn: Rotation) -> Tensor:
    """Rotate the trailing channels of x by each row's angles, in place, and return x.

    Ownership: the caller owns x and no view of it is in use elsewhere.
    Shapes: x [N, D] or [N, H, D]; turn [N, dim] with dim <= D.
    """
    dim = turn.cos.shape[-1]
    cos, sin = turn.cos, turn.sin
    if x.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    tail = x[..., x.shape[-1] - dim :]
    wide = tail.to(cos.dtype)
    swapped = wide.reshape(*wide.shape[:-1], -1, 2).flip(-1).flatten(-2)
    # two products and one sum: a fused multiply-add would round by vector position
    kept = wide * cos
    tail.copy_(kept.add_(swapped.mul_(sin)))
    return x
