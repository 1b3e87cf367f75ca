"""Opening rows: epochs, floors, layouts, and addresses through page tables."""

import pytest
import torch
from torch import Tensor

from kvlease.errors import LayoutMismatch, SealedPage, StaleEpoch
from kvlease.kernels.views import (
    RowIndex,
    read_pages,
    read_ring_rows,
    read_rings,
    read_rows,
    read_selected,
    ring_rows,
    write_ring_rows,
    write_rows,
)
from kvlease.protocols.views import EpochCell, OpenRows, PagedRows, SlotRows

ROWS = 4
TABLE = torch.tensor([[5, 2, 0], [1, 3, 0]])


def base_rows() -> Tensor:
    return torch.arange(6 * ROWS * 2, dtype=torch.float32).view(6, ROWS, 2)


def test_rows_are_found_through_the_page_table() -> None:
    """Row 6 of sequence 0 lies in its second page, at offset 2."""
    base, index = base_rows(), RowIndex()
    handle = PagedRows("latent", base, TABLE, EpochCell(), ROWS)
    rows, sequences = torch.tensor([[0, 6], [3, 5]]), torch.tensor([[0], [1]])
    got = read_rows(handle, sequences, rows, index)
    wanted = torch.stack([base[5, 0], base[2, 2], base[1, 3], base[3, 1]]).view(2, 2, 2)
    assert torch.equal(got, wanted)
    assert torch.equal(read_rows(handle, sequences, rows, index), wanted)
    chosen = handle.select(torch.tensor([[6, -1], [5, 3]]))
    got = read_selected(chosen, sequences, index)
    assert torch.equal(got[0, 0], base[2, 2])
    assert torch.equal(got[0, 1], base[5, 0]), "where none is chosen, the sequence's own row 0"


def test_writes_land_in_open_pages_only() -> None:
    """A write below the floor would change a page that others share."""
    base, index = base_rows(), RowIndex()
    floor = torch.tensor([4, 0])
    handle = OpenRows("latent", base, TABLE, floor, EpochCell(), ROWS)
    before = base.clone()
    sequences = torch.tensor([0, 1])
    write_rows(handle, sequences, torch.tensor([4, 7]), torch.full((2, 2), -1.0), index)
    changed = (base != before).any(-1).nonzero().tolist()
    assert changed == [[2, 0], [3, 3]]
    with pytest.raises(SealedPage, match="latent"):
        write_rows(handle, sequences, torch.tensor([3, 7]), torch.zeros(2, 2), index)
    with pytest.raises(LayoutMismatch, match="float64"):
        write_rows(handle, sequences, torch.tensor([4, 7]), torch.zeros(2, 2).double(), index)


def test_parts_of_rows_lie_in_planes_of_their_page() -> None:
    """Keys of a page one after another, then their scales: one wrong stride garbles every score."""
    base = torch.full((6, ROWS, 5), 255, dtype=torch.uint8)
    cell, index, planes = EpochCell(), RowIndex(), (3, 2)
    opened = OpenRows("keys", base, TABLE, torch.zeros(2).long(), cell, ROWS, planes)
    paged = PagedRows("keys", base, TABLE, cell, ROWS, planes)
    stored = torch.arange(10, dtype=torch.uint8).view(2, 5)
    sequences, rows = torch.tensor([0, 1]), torch.tensor([6, 1])
    write_rows(opened, sequences, rows, stored, index)
    page = base[2].flatten()
    assert page[6:9].tolist() == [0, 1, 2], "the third row's values"
    assert page[16:18].tolist() == [3, 4], "the third row's scale, behind all values"
    assert int((base != 255).sum()) == 10, "nothing else is touched"
    assert torch.equal(read_rows(paged, sequences, rows, index), stored)
    chosen = paged.select(torch.tensor([[6], [1]]))
    assert torch.equal(read_selected(chosen, sequences.unsqueeze(1), index)[:, 0], stored)
    whole = read_pages(paged, sequences.unsqueeze(1), 2 * ROWS, index)
    assert torch.equal(whole[0, 6], stored[0])
    assert torch.equal(whole[1, 1], stored[1])


def test_rings_are_addressed_by_slot_and_place() -> None:
    base = base_rows()
    handle, index = SlotRows("window", base, torch.tensor([4, 1]), EpochCell()), RowIndex()
    assert ring_rows(handle) == ROWS
    assert torch.equal(read_rings(handle, torch.tensor([1, 0, 1])), base[[1, 4, 1]])
    got = read_ring_rows(handle, torch.tensor([[0], [1]]), torch.tensor([[3, 0], [1, 2]]), index)
    assert torch.equal(got[0, 0], base[4, 3])
    write_ring_rows(handle, torch.tensor([1]), torch.tensor([2]), torch.full((1, 2), 9.0), index)
    assert base[1, 2].tolist() == [9.0, 9.0]
    with pytest.raises(LayoutMismatch, match="window"):
        write_ring_rows(handle, torch.tensor([1]), torch.tensor([2]), torch.zeros(1, 3), index)


def test_a_handle_dies_with_its_lease() -> None:
    """Every opening compares the epoch: the read that came too late is refused, not answered."""
    cell, index = EpochCell(), RowIndex()
    one, rows = torch.tensor([0]), torch.tensor([0])
    paged = PagedRows("latent", base_rows(), TABLE, cell, ROWS)
    opened = OpenRows("latent", base_rows(), TABLE, torch.zeros(2, dtype=torch.int64), cell, ROWS)
    slots = SlotRows("window", base_rows(), torch.tensor([0]), cell)
    chosen = paged.select(torch.tensor([[0]]))
    read_rows(paged, one, rows, index)
    cell.end()
    for use in (
        lambda: read_rows(paged, one, rows, index),
        lambda: read_selected(chosen, one.unsqueeze(1), index),
        lambda: write_rows(opened, one, rows, torch.zeros(1, 2), index),
        lambda: read_rings(slots, one),
        lambda: read_ring_rows(slots, one, rows, index),
        lambda: write_ring_rows(slots, one, rows, torch.zeros(1, 2), index),
    ):
        with pytest.raises(StaleEpoch, match="generation 0, now 1"):
            use()
