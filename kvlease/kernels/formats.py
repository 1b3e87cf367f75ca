"""How one cached row lies in memory: encoding rows for a page and decoding them for a kernel.

Plain formats are tensors of that dtype. The fp8 formats are bytes: values, then what is kept wide,
then scales, all inside the row, so that a row is complete wherever it is copied.
"""

import torch
from torch import Tensor

from kvlease.errors import LayoutMismatch
from kvlease.protocols.schema import FP8_TILE, RowFormat

_E4M3_MAX = 448.0
_EXPONENT_BIAS = 127
_PLAIN: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "byte": torch.uint8,
}


def storage_dtype(fmt: RowFormat) -> torch.dtype:
    """Return the dtype of a pool's tensor for rows of this format (bytes for the fp8 kinds)."""
    return _PLAIN.get(fmt.encoding, torch.uint8)


def storage_width(fmt: RowFormat) -> int:
    """Return how many elements of `storage_dtype` one row takes."""
    return fmt.width if fmt.is_plain else fmt.nbytes


def encode_rows(rows: Tensor, fmt: RowFormat) -> Tensor:
    """Return rows as they are stored.

    Shapes: rows [..., width], float32 or wider (or the plain dtype itself); result
    [..., storage_width].

    Raises:
        LayoutMismatch: the width is not the format's, or rows of this format hold no numbers.
    """
    if rows.shape[-1] != fmt.width:
        raise LayoutMismatch(f"a row of {rows.shape[-1]} values, the format takes {fmt.width}")
    match fmt.encoding:
        case "fp8_latent":
            return _encode_latent(rows, fmt)
        case "fp8_index":
            return _encode_index(rows)
        case "byte":
            raise LayoutMismatch("one-byte rows stand for state that is not computed")
        case _:
            return rows.to(storage_dtype(fmt))


def decode_rows(stored: Tensor, fmt: RowFormat, dtype: torch.dtype) -> Tensor:
    """Return stored rows as numbers of ``dtype`` (float32 or float64).

    Shapes: stored [..., storage_width]; result [..., width].

    Raises:
        LayoutMismatch: the width is not the format's, or rows of this format hold no numbers.
    """
    if stored.shape[-1] != storage_width(fmt):
        raise LayoutMismatch(
            f"a stored row of {stored.shape[-1]} elements, the format takes {storage_width(fmt)}"
        )
    match fmt.encoding:
        case "fp8_latent":
            return _decode_latent(stored, fmt, dtype)
        case "fp8_index":
            return _decode_index(stored, fmt, dtype)
        case "byte":
            raise LayoutMismatch("one-byte rows stand for state that is not computed")
        case _:
            return stored.to(dtype)


def _tiles(nope: Tensor) -> Tensor:
    """Return [..., T, 64], the last tile filled with zeros."""
    missing = -nope.shape[-1] % FP8_TILE
    padded = torch.nn.functional.pad(nope, (0, missing))
    return padded.reshape(*nope.shape[:-1], -1, FP8_TILE)


def _bytes(part: Tensor) -> Tensor:
    """Return a copy of part of a row: reading bytes as wider numbers asks for their alignment."""
    return part.clone(memory_format=torch.contiguous_format)


def _encode_latent(rows: Tensor, fmt: RowFormat) -> Tensor:
    """Lay out e4m3 channels, rope channels in bf16, and one power-of-two scale byte per tile."""
    nope = fmt.width - fmt.rope_width
    tiles = _tiles(rows[..., :nope].float())
    # the least power of two not below amax / 448, so that no value overflows; 1 for zeros
    mantissa, exponent = torch.frexp(tiles.abs().amax(dim=-1) / _E4M3_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    scaled = torch.ldexp(tiles, -exponent.unsqueeze(-1))
    values = scaled.to(torch.float8_e4m3fn).flatten(-2)[..., :nope].contiguous()
    rope = rows[..., nope:].to(torch.bfloat16).contiguous()
    scales = (exponent + _EXPONENT_BIAS).to(torch.uint8)
    unused = fmt.nbytes - nope - 2 * fmt.rope_width - scales.shape[-1]
    parts = [
        values.view(torch.uint8),
        rope.view(torch.uint8),
        scales,
        scales.new_zeros((*scales.shape[:-1], unused)),
    ]
    return torch.cat(parts, dim=-1)


def _decode_latent(stored: Tensor, fmt: RowFormat, dtype: torch.dtype) -> Tensor:
    nope = fmt.width - fmt.rope_width
    rope_end = nope + 2 * fmt.rope_width
    tiles = _tiles(_bytes(stored[..., :nope]).view(torch.float8_e4m3fn).to(dtype))
    scales = stored[..., rope_end : rope_end + tiles.shape[-2]]
    exponent = scales.to(torch.int32) - _EXPONENT_BIAS
    values = torch.ldexp(tiles, exponent.unsqueeze(-1)).flatten(-2)[..., :nope]
    if not fmt.rope_width:
        return values
    rope = _bytes(stored[..., nope:rope_end]).view(torch.bfloat16).to(dtype)
    return torch.cat([values, rope], dim=-1)


def _encode_index(rows: Tensor) -> Tensor:
    """Lay out e4m3 channels, then one fp32 scale."""
    wide = rows.float()
    scale = wide.abs().amax(dim=-1, keepdim=True) / _E4M3_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    values = (wide / scale).to(torch.float8_e4m3fn)
    return torch.cat([values.view(torch.uint8), scale.view(torch.uint8)], dim=-1)


def _decode_index(stored: Tensor, fmt: RowFormat, dtype: torch.dtype) -> Tensor:
    values = _bytes(stored[..., : fmt.width]).view(torch.float8_e4m3fn).to(dtype)
    scale = _bytes(stored[..., fmt.width :]).view(torch.float32)
    return values * scale.to(dtype)
