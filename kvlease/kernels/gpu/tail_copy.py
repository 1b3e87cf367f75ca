"""Moving kept tails between the rings of running sequences and records, all pieces in one launch.

A kept tail's record holds, per piece, the rows of positions boundary - kept_rows .. boundary - 1 in
order; in a ring position p lies at row p % ring_rows. Rows of positions below 0 do not exist: they
are kept as zeros, and not brought back. Records may lie in pinned host memory: a tail is a few
megabytes and comes once a load, so the kernel reads it across the link by itself.
"""

# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.launches import Launches

TILE = 2048
NUM_WARPS = 8
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_COLUMNS = tl.constexpr(9)


@triton.jit(do_not_specialize=["count", "num_tiles"])
def _move_rows(
    table_ptr,
    numbers_ptr,
    count,
    num_tiles,
    to_records: tl.constexpr,
    dtype: tl.constexpr,
    tile: tl.constexpr,
):
    number = tl.program_id(0) // num_tiles
    line = table_ptr + (tl.program_id(0) - number * num_tiles) * _COLUMNS
    slot = tl.load(numbers_ptr + number)
    tail = tl.load(numbers_ptr + count + number)
    boundary = tl.load(numbers_ptr + 2 * count + number)
    ring = (tl.load(line) + slot * tl.load(line + 1)).to(tl.pointer_type(dtype), bitcast=True)
    row_stride = tl.load(line + 2)
    ring_rows = tl.load(line + 3)
    kept_rows = tl.load(line + 4)
    row_words = tl.load(line + 5)
    record = tl.load(line + 6) + tail * tl.load(line + 7)
    word = tl.load(line + 8) + tl.arange(0, tile)
    row = word // row_words
    position = boundary - kept_rows + row
    inside = word < kept_rows * row_words
    exists = inside & (position >= 0)
    in_ring = ring + (position % ring_rows) * row_stride + (word - row * row_words)
    in_record = record.to(tl.pointer_type(dtype), bitcast=True) + word
    if to_records:
        tl.store(in_record, tl.load(in_ring, mask=exists, other=0), mask=inside)
    else:
        tl.store(in_ring, tl.load(in_record, mask=exists, other=0), mask=exists)


@frozen
class TailPiece:
    """One kept component: its rings, and its place in a record.

    ``rings`` is [num_slots, ring_rows, width]; the first ``kept_width`` values of a row are kept.
    """

    rings: Tensor
    kept_rows: int
    kept_width: int
    offset: int


class TailTable:
    """The tiles of all kept rows of one tier, on the device.

    Ownership: borrows rings and records for as long as it lives.
    """

    def __init__(self, records: Tensor, pieces: Sequence[TailPiece], device: torch.device) -> None:
        """Lay out the tiles; records [num_tails, nbytes] uint8."""
        width = gcd(8, *_numbers(records, pieces))
        self.dtype = _WORDS[width]
        lines: list[tuple[int, ...]] = []
        for piece in pieces:
            lines.extend(_tiles(records, piece, width))
        self.lines = torch.tensor(lines, dtype=torch.int64).to(device)
        self.launches = {
            to_records: Launches(_move_rows, NUM_WARPS) for to_records in (False, True)
        }
        """The kernel by direction."""


def _numbers(records: Tensor, pieces: Sequence[TailPiece]) -> list[int]:
    """Everything that a word's width must divide."""
    numbers = [records.data_ptr(), records.stride(0)]
    for piece in pieces:
        size = piece.rings.itemsize
        numbers += [piece.rings.data_ptr(), piece.offset, piece.kept_width * size]
        numbers += [size * piece.rings.stride(axis) for axis in (0, 1)]
    return numbers


def _tiles(records: Tensor, piece: TailPiece, width: int) -> list[tuple[int, ...]]:
    size = piece.rings.itemsize
    row_words = piece.kept_width * size // width
    facts = (
        piece.rings.data_ptr(),
        piece.rings.stride(0) * size,
        piece.rings.stride(1) * size // width,
        piece.rings.shape[1],
        piece.kept_rows,
        row_words,
        records.data_ptr() + piece.offset,
        records.stride(0),
    )
    return [(*facts, at) for at in range(0, piece.kept_rows * row_words, TILE)]


def move_tails(
    table: TailTable, numbers: Tensor, count: int, stream: torch.cuda.Stream, *, to_records: bool
) -> None:
    """Move the kept rows of ``count`` tails between rings and records, on a stream.

    Shapes: numbers int64 on the device, 16-byte aligned: ring slots, tails, and boundaries in
    tokens, [count] each.
    """
    num_tiles = len(table.lines)
    if num_tiles:
        given = table.lines, numbers, count, num_tiles, to_records, table.dtype, TILE
        table.launches[to_records](count * num_tiles, stream, *given)
