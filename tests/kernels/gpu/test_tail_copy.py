"""Kept tails: the kernel keeps and brings back the same rows as plain indexing."""

import pytest
import torch
from torch import Tensor

from kvlease.kernels.gpu.tail_copy import TailPiece, TailTable, move_tails

RINGS = (
    (torch.float32, 16, 24, 15, 24),
    (torch.float32, 8, 8, 4, 4),
    (torch.int16, 8, 16, 4, 8),
    (torch.uint8, 16, 3, 15, 3),
)
"""Dtype, ring rows, width, kept rows, kept width."""


def made_rings(device: str, dtypes: int) -> tuple[list[TailPiece], int]:
    pieces: list[TailPiece] = []
    end = 0
    for dtype, ring_rows, width, kept_rows, kept_width in RINGS[:dtypes]:
        flat = torch.randint(0, 100, (4, ring_rows, width), device=device)
        rings = flat.to(dtype)
        pieces.append(TailPiece(rings, kept_rows, kept_width, end))
        end += -(-kept_rows * kept_width * dtype.itemsize // 16) * 16
    return pieces, end


def kept(piece: TailPiece, records: Tensor) -> Tensor:
    """One piece of all records, [num_records, kept_rows, kept_width]."""
    nbytes = piece.kept_rows * piece.kept_width * piece.rings.itemsize
    rows = records[:, piece.offset : piece.offset + nbytes].contiguous().view(piece.rings.dtype)
    return rows.view(-1, piece.kept_rows, piece.kept_width)


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("dtypes", [2, 3, 4])
@pytest.mark.parametrize("boundaries", [[32], [3, 40, 64]], ids=["one", "one-short"])
def test_tails_are_kept_and_brought_back(device: str, dtypes: int, boundaries: list[int]) -> None:
    pieces, nbytes = made_rings(device, dtypes)
    slots, places = [2, 0, 3][: len(boundaries)], [4, 1, 0][: len(boundaries)]
    numbers = torch.tensor([slots, places, boundaries], device=device)
    records = torch.randint(0, 256, (6, nbytes), dtype=torch.uint8, device=device)
    old = records.clone()
    table = TailTable(records, pieces, torch.device(device))

    here, count = torch.cuda.current_stream(), len(boundaries)
    move_tails(table, numbers, count, here, to_records=True)

    written = torch.zeros(6, nbytes, dtype=torch.bool, device=device)
    for piece in pieces:
        size = piece.kept_rows * piece.kept_width * piece.rings.itemsize
        written[places, piece.offset : piece.offset + size] = True
        found = kept(piece, records)
        for slot, place, boundary in zip(slots, places, boundaries, strict=True):
            positions = torch.arange(boundary - piece.kept_rows, boundary, device=device)
            rows = piece.rings[slot, positions % piece.rings.shape[1], : piece.kept_width]
            wanted = torch.where(positions[:, None] >= 0, rows, torch.zeros_like(rows))
            assert torch.equal(found[place], wanted)
    assert torch.equal(records[~written], old[~written])

    before = [piece.rings.clone() for piece in pieces]
    for piece in pieces:
        piece.rings.fill_(77)
    move_tails(table, numbers, count, here, to_records=False)
    for piece, rings in zip(pieces, before, strict=True):
        wanted = torch.full_like(rings, 77)
        for slot, boundary in zip(slots, boundaries, strict=True):
            positions = torch.arange(max(0, boundary - piece.kept_rows), boundary, device=device)
            rows = positions % rings.shape[1]
            wanted[slot, rows, : piece.kept_width] = rings[slot, rows, : piece.kept_width]
        assert torch.equal(piece.rings, wanted)
