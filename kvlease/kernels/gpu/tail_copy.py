"""Moving kept tails between the rings of running sequences and records, a launch for many pieces.

A kept tail's record holds, per piece, the rows of positions boundary - kept_rows .. boundary - 1 in
order; in a ring position p lies at row p % ring_rows. Rows of positions below 0 do not exist: they
are kept as zeros, and not brought back.
"""

# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

TILE = 2048
NUM_WARPS = 8
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit(do_not_specialize=["count", "tiles_per_record", "record_words"])
def _move_rows(
    table_ptr,
    numbers_ptr,
    records_ptr,
    count,
    tiles_per_record,
    record_words,
    to_records: tl.constexpr,
    tile: tl.constexpr,
):
    number = tl.program_id(0) // tiles_per_record
    line = table_ptr + (tl.program_id(0) - number * tiles_per_record) * 8
    slot = tl.load(numbers_ptr + number)
    record = tl.load(numbers_ptr + count + number)
    boundary = tl.load(numbers_ptr + 2 * count + number)
    ring = (tl.load(line) + slot * tl.load(line + 1)).to(records_ptr.dtype, bitcast=True)
    row_stride = tl.load(line + 2)
    ring_rows = tl.load(line + 3)
    kept_rows = tl.load(line + 4)
    row_words = tl.load(line + 5)
    offset = tl.load(line + 6)
    word = tl.load(line + 7) + tl.arange(0, tile)
    row = word // row_words
    position = boundary - kept_rows + row
    inside = word < kept_rows * row_words
    exists = inside & (position >= 0)
    in_ring = ring + (position % ring_rows) * row_stride + (word - row * row_words)
    in_record = records_ptr + record * record_words + offset + word
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
    """The tiles of one group's kept rows, on the device.

    Ownership: borrows the rings for as long as it lives.
    """

    def __init__(self, pieces: Sequence[TailPiece], nbytes: int) -> None:
        """Lay out the tiles; ``nbytes`` is of a record."""
        sizes = [nbytes]
        for piece in pieces:
            size = piece.rings.itemsize
            strides = [size * piece.rings.stride(axis) for axis in (0, 1)]
            sizes += [piece.rings.data_ptr(), *strides, piece.offset, piece.kept_width * size]
        width = gcd(8, *sizes)
        self.word = _WORDS[width]
        self.record_words = nbytes // width
        lines: list[tuple[int, ...]] = []
        for piece in pieces:
            size = piece.rings.itemsize
            row_words = piece.kept_width * size // width
            facts = (
                piece.rings.data_ptr(),
                piece.rings.stride(0) * size,
                piece.rings.stride(1) * size // width,
                piece.rings.shape[1],
                piece.kept_rows,
                row_words,
                piece.offset // width,
            )
            lines.extend((*facts, at) for at in range(0, piece.kept_rows * row_words, TILE))
        self.num_tiles = len(lines)
        self.lines = torch.tensor(lines, dtype=torch.int64).to(pieces[0].rings.device)


def move_tails(table: TailTable, numbers: Tensor, records: Tensor, *, to_records: bool) -> None:
    """Move kept rows between rings and records on the current stream.

    Shapes: numbers [3, K] int64 on the device, one stretch: ring slot, record, boundary in tokens
    (one column each tail); records [..., nbytes] uint8, one stretch, on the device.
    """
    count = numbers.shape[1]
    _move_rows[(count * table.num_tiles,)](
        table.lines,
        numbers,
        records.view(table.word),
        count,
        table.num_tiles,
        table.record_words,
        to_records=to_records,
        tile=TILE,
        num_warps=NUM_WARPS,
    )
