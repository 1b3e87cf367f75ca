"""Quantised weights of a checkpoint, back to numbers: block-scaled fp8 and packed fp4.

Official checkpoints of this family keep linear layers as e4m3 with one scale for 128 × 128 values,
and expert matrices as two e2m1 values a byte (the earlier one in the low half) with one scale for
32 values of a row; scales are floats, or bytes that are powers of two (transformers 5.24,
`integrations/finegrained_fp8`, reads them so). A weight ``x.weight`` has its scales in ``x.scale``.
This module reads no file.
"""

import torch
from torch import Tensor

FP8_DTYPES = frozenset(("F8_E4M3",))
FP4_DTYPES = frozenset(("I8", "U8"))
SCALE_DTYPES = frozenset(("F32", "BF16", "F8_E8M0", "U8"))
FP8_BLOCK = (128, 128)
FP4_BLOCK = (1, 32)
_EXPONENT_BIAS = 127
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scale_name(weight: str) -> str:
    """Return the canonical name of a weight's scales."""
    return weight.removesuffix(".weight") + ".scale"


def stored_shape(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Return the shape in which a matrix is stored: fp4 packs two values of a row in a byte."""
    return (*shape[:-1], shape[-1] // 2) if dtype in FP4_DTYPES else shape


def scales_shape(shape: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """Return the shape of the scales of a matrix of ``shape``, the last blocks cut short."""
    rows, columns = FP4_BLOCK if dtype in FP4_DTYPES else FP8_BLOCK
    return -(-shape[0] // rows), -(-shape[1] // columns)


def dequantized(stored: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers that a quantised matrix stands for, in float32.

    Shapes: stored [R, C] e4m3 or [R, C / 2] packed e2m1; scales as `scales_shape`; result [R, C].
    """
    packed = stored.dtype in (torch.int8, torch.uint8)
    values = _unpacked(stored) if packed else stored.float()
    rows, columns = FP4_BLOCK if packed else FP8_BLOCK
    wide = _powers(scales).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return values * wide[: values.shape[0], : values.shape[1]]


def _powers(scales: Tensor) -> Tensor:
    if scales.dtype is torch.uint8:
        return torch.exp2(scales.float() - _EXPONENT_BIAS)
    return scales.float()


def _unpacked(packed: Tensor) -> Tensor:
    """Return [R, 2 C] of [R, C] bytes."""
    codes = packed.view(torch.uint8)
    both = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    return table[both.int()]
