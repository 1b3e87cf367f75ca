# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# Triton's language has no types: what a kernel does with them is checked by its tests.
"""Turning pairs of trailing channels by a position's angles, from tables.

The twin is ``kernels.rope``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlease.kernels.rope import RopeSpec, inverse_frequencies


class Turns(NamedTuple):
    """Cosines and sines of every position: [positions, R / 2] float32 each, R channels turned."""

    cos: Tensor
    sin: Tensor


def turn_tables(spec: RopeSpec, num_positions: int, device: torch.device) -> Turns:
    """Return the tables of one RoPE base, made in float32 as the twin's angles are."""
    frequencies = inverse_frequencies(spec, torch.float32, device)
    angles = torch.arange(num_positions, dtype=torch.float32, device=device).unsqueeze(1)
    angles = angles * frequencies
    return Turns(angles.cos(), angles.sin())


@triton.jit
def turn_row(x, turns, position, D: tl.constexpr, R: tl.constexpr):
    """Return x [D] with its last R channels turned by the angles of one position."""
    pairs = tl.arange(0, D // 2) - (D - R) // 2
    at = position.to(tl.int64) * (R // 2) + pairs
    cos = tl.load(turns.cos + at, mask=pairs >= 0, other=1.0)
    sin = tl.load(turns.sin + at, mask=pairs >= 0, other=0.0)
    even, odd = tl.split(tl.reshape(x, (D // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (D,))


@triton.jit
def turn_heads(x, turns, position, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Return x [H, D] with each head's last R channels turned by one position's angles."""
    pairs = tl.arange(0, D // 2) - (D - R) // 2
    at = position.to(tl.int64) * (R // 2) + pairs
    cos = tl.load(turns.cos + at, mask=pairs >= 0, other=1.0)[None, :]
    sin = tl.load(turns.sin + at, mask=pairs >= 0, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(x, (H, D // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (H, D))
