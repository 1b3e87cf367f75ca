# pyright: reportPrivateUsage=false
# Handles keep their memory private; this module is the one that may open them.
"""The one place where rows are opened.

Every opening compares the handle's epoch with its cell, so a handle kept past its lease yields
nothing; every write compares with the floor below which pages are sealed. What rows mean, and how
they are encoded, is the kernels' business.
"""

from typing import cast

import torch
from torch import Tensor

from kvlease.errors import LayoutMismatch, SealedPage, StaleEpoch
from kvlease.kernels.placing import place
from kvlease.protocols.views import OpenRows, PagedRows, SelectedRows, SlotRows

Handle = PagedRows | OpenRows | SlotRows


def check_epoch(handle: Handle) -> None:
    """Raise StaleEpoch unless the right under which the handle was made still stands."""
    if handle._epoch != handle._cell.epoch:
        raise StaleEpoch(
            f"rows of {handle.component} were opened after their lease had ended"
            f" (generation {handle._epoch}, now {handle._cell.epoch});"
            " resolve the layer again under a live lease"
        )


class RowIndex:
    """Memo of row addresses for one step: layers share page tables, so one translation serves all.

    Tables and numbers are in host memory; addresses are made there and placed where the rows are.
    Keeps what it was given alive, so that identities stay distinct; drop it with the step.
    """

    __slots__ = ("_above", "_memo")

    def __init__(self) -> None:
        """Start empty."""
        self._memo: dict[tuple[int, ...], tuple[Tensor, tuple[object, ...]]] = {}
        self._above: dict[tuple[int, ...], tuple[bool, tuple[object, ...]]] = {}

    def flat(
        self,
        table: Tensor,
        sequences: Tensor,
        rows: Tensor,
        rows_per_page: int,
        device: torch.device,
    ) -> Tensor:
        """Return page * rows_per_page + offset of each row, on the device.

        Shapes: table [B, P]; sequences [...] and rows [...] int64, of one shape or broadcast
        together; result of that shape.
        """
        key = (id(table), id(sequences), id(rows), rows_per_page)
        found = self._memo.get(key)
        if found is None:
            value = place(_flat_rows(table, sequences, rows, rows_per_page), device)
            found = self._memo[key] = value, (table, sequences, rows)
        return found[0]

    def pages(
        self, table: Tensor, sequences: Tensor, num_pages: int, device: torch.device
    ) -> Tensor:
        """Return the first pages of each sequence, [M * num_pages]; page 0 past the table's end.

        Shapes: table [B, P]; sequences [M, 1] int64.
        """
        key = (id(table), id(sequences), num_pages)
        found = self._memo.get(key)
        if found is None:
            columns = torch.arange(num_pages)
            value = table[sequences, columns.clamp(max=table.shape[1] - 1)]
            value = place(torch.where(columns < table.shape[1], value, 0).flatten(), device)
            found = self._memo[key] = value, (table, sequences)
        return found[0]

    def ring(
        self,
        slots: Tensor,
        sequences: Tensor,
        places: Tensor,
        ring_rows: int,
        device: torch.device,
    ) -> Tensor:
        """Return slot * ring_rows + place of each ring row; shapes as in `flat`, slots [B]."""
        key = (id(slots), id(sequences), id(places), ring_rows)
        found = self._memo.get(key)
        if found is None:
            value = place(slots[sequences] * ring_rows + places, device)
            found = self._memo[key] = value, (slots, sequences, places)
        return found[0]

    def placed(self, numbers: Tensor, device: torch.device) -> Tensor:
        """Return numbers from host memory on the device."""
        key = (id(numbers),)
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = place(numbers, device), (numbers,)
        return found[0]

    def above_floor(self, floor: Tensor, sequences: Tensor, rows: Tensor) -> bool:
        """Return whether every row lies at or above its sequence's floor."""
        key = (id(floor), id(sequences), id(rows))
        found = self._above.get(key)
        if found is None:
            # by numpy: torch gives Python's lock away in each of these small operations, and a
            # decode step is launched behind them
            value = bool((rows.numpy() >= floor.numpy()[sequences.numpy()]).all())
            found = self._above[key] = value, (floor, sequences, rows)
        return found[0]


def _flat_rows(table: Tensor, sequences: Tensor, rows: Tensor, rows_per_page: int) -> Tensor:
    pages = table[sequences, torch.div(rows, rows_per_page, rounding_mode="floor")]
    return pages * rows_per_page + rows % rows_per_page


def read_rows(handle: PagedRows, sequences: Tensor, rows: Tensor, index: RowIndex) -> Tensor:
    """Return stored rows by number.

    Ownership: the result is a copy. Shapes: sequences and rows int64, broadcast together to [...];
    every row must be one that the sequence's page table covers; result [..., *row].

    Raises:
        StaleEpoch: the right behind the handle has ended.
    """
    check_epoch(handle)
    base = cast("Tensor", handle._base)
    table = cast("Tensor", handle._table)
    flat = index.flat(table, sequences, rows, handle.rows_per_page, base.device)
    return _take_rows(handle, base, flat)


def _take_rows(handle: PagedRows, base: Tensor, flat: Tensor) -> Tensor:
    if not handle.planes:
        return _take(base.flatten(0, 1), flat)
    pages, offsets = _apart(flat, handle.rows_per_page)
    return torch.cat([part[pages, offsets] for part in _parts(base, handle.planes)], dim=-1)


def _apart(flat: Tensor, rows_per_page: int) -> tuple[Tensor, Tensor]:
    """Return page and offset of each flat row address."""
    return torch.div(flat, rows_per_page, rounding_mode="floor"), flat % rows_per_page


def _parts(base: Tensor, planes: tuple[int, ...]) -> list[Tensor]:
    """Return each part of all rows, [num_pages, rows_per_page, bytes], as views of the pool."""
    num_rows = base.shape[1]
    flat, parts, start = base.flatten(1), list[Tensor](), 0
    for nbytes in planes:
        end = start + num_rows * nbytes
        parts.append(flat[:, start:end].view(len(base), num_rows, nbytes))
        start = end
    return parts


def read_pages(handle: PagedRows, sequences: Tensor, num_rows: int, index: RowIndex) -> Tensor:
    """Return each sequence's first rows by whole pages, which copies faster than row by row.

    Rows past what the sequence has written are whatever the memory holds, poison included: the
    caller must not let them count.
    Shapes: sequences [M, 1] int64; result [M, L, *row], L the least multiple of the rows of a page
    that is not below ``num_rows``.

    Raises:
        StaleEpoch: the right behind the handle has ended.
    """
    check_epoch(handle)
    base = cast("Tensor", handle._base)
    table = cast("Tensor", handle._table)
    num_pages = -(-num_rows // handle.rows_per_page)
    pages = index.pages(table, sequences, num_pages, base.device)
    if handle.planes:
        parts = [part.index_select(0, pages) for part in _parts(base, handle.planes)]
        return torch.cat(parts, dim=-1).view(len(sequences), -1, *base.shape[2:])
    return base.index_select(0, pages).view(len(sequences), -1, *base.shape[2:])


def _take(rows: Tensor, flat: Tensor) -> Tensor:
    return rows.index_select(0, flat.flatten()).view(*flat.shape, *rows.shape[1:])


def read_selected(selected: SelectedRows, sequences: Tensor, index: RowIndex) -> Tensor:
    """Return the rows chosen per query; where none was chosen (-1), the sequence's row 0.

    A query that sees any row sees row 0, so what fills the unused places is never foreign; a query
    that sees none gets whatever lies there, and the caller must clear it.
    Shapes: selected.chosen [N, K], where the rows are; sequences [N, 1]; result [N, K, *row].

    Raises:
        StaleEpoch: the right behind the handle has ended.
    """
    handle = selected.rows
    check_epoch(handle)
    base = cast("Tensor", handle._base)
    table = cast("Tensor", handle._table)
    rows = cast("Tensor", selected.chosen).clamp(min=0)
    table, sequences = (index.placed(numbers, base.device) for numbers in (table, sequences))
    return _take_rows(handle, base, _flat_rows(table, sequences, rows, handle.rows_per_page))


def write_rows(
    handle: OpenRows, sequences: Tensor, rows: Tensor, stored: Tensor, index: RowIndex
) -> None:
    """Write encoded rows at the given row numbers.

    Ownership: the caller holds the sequences' open pages through the handle. Shapes: sequences and
    rows [G] int64, no pair twice; stored [G, *row].

    Raises:
        StaleEpoch: the right behind the handle has ended.
        SealedPage: a row lies below its sequence's floor.
        LayoutMismatch: dtype or row shape differ from the pool's.
    """
    check_epoch(handle)
    base = cast("Tensor", handle._base)
    table = cast("Tensor", handle._table)
    _check_layout(handle.component, base, stored)
    require_open(handle, sequences, rows, index)
    flat = index.flat(table, sequences, rows, handle.rows_per_page, base.device)
    if not handle.planes:
        base.view(-1, *base.shape[2:]).index_copy_(0, flat, stored)
        return
    pages, offsets = _apart(flat, handle.rows_per_page)
    start = 0
    for part in _parts(base, handle.planes):
        part[pages, offsets] = stored[:, start : start + part.shape[2]]
        start += part.shape[2]


def memory_of(handle: Handle) -> Tensor:
    """Return all of the memory behind a handle, for a kernel that finds its rows by itself.

    Ownership: borrowed for the launches of the step whose right the handle is; a captured graph
    keeps the address, so each replay opens the handle of its own step first.

    Raises:
        StaleEpoch: the right behind the handle has ended.
    """
    check_epoch(handle)
    return cast("Tensor", handle._base)


def pages_of(handle: PagedRows) -> Tensor:
    """Return the page table, [B, P] int64 in host memory."""
    return cast("Tensor", handle._table)


def slots_of(handle: SlotRows) -> Tensor:
    """Return the ring of each sequence, [B] int64 in host memory."""
    return cast("Tensor", handle._slots)


def require_open(handle: OpenRows, sequences: Tensor, rows: Tensor, index: RowIndex) -> None:
    """Check what a kernel is about to write by itself; shapes as in `write_rows`.

    Raises:
        StaleEpoch, SealedPage: as `write_rows` does.
    """
    check_epoch(handle)
    if not index.above_floor(cast("Tensor", handle._floor), sequences, rows):
        raise SealedPage(
            f"a row of {handle.component} below the open page was to be written;"
            " sealed pages never change"
        )


def ring_rows(handle: SlotRows) -> int:
    """Return how many positions a ring of this component holds."""
    return cast("Tensor", handle._base).shape[1]


def read_rings(handle: SlotRows, sequences: Tensor) -> Tensor:
    """Return whole rings of the given sequences; a copy.

    Shapes: sequences [M] int64; result [M, ring_rows, width].

    Raises:
        StaleEpoch: the right behind the handle has ended.
    """
    check_epoch(handle)
    base = cast("Tensor", handle._base)
    slots = cast("Tensor", handle._slots)
    return base.index_select(0, place(slots[sequences], base.device))


def read_ring_rows(handle: SlotRows, sequences: Tensor, places: Tensor, index: RowIndex) -> Tensor:
    """Return ring rows by place (position % ring_rows); a copy.

    Shapes: sequences and places int64, broadcast together to [...]; result [..., width].

    Raises:
        StaleEpoch: the right behind the handle has ended.
    """
    check_epoch(handle)
    base = cast("Tensor", handle._base)
    slots = cast("Tensor", handle._slots)
    flat = index.ring(slots, sequences, places, base.shape[1], base.device)
    return _take(base.flatten(0, 1), flat)


def write_ring_rows(
    handle: SlotRows, sequences: Tensor, places: Tensor, rows: Tensor, index: RowIndex
) -> None:
    """Write ring rows by place (position % ring_rows).

    Shapes: sequences and places [M] int64, no pair twice; rows [M, width].

    Raises:
        StaleEpoch: the right behind the handle has ended.
        LayoutMismatch: dtype or width differ from the pool's.
    """
    check_epoch(handle)
    base = cast("Tensor", handle._base)
    slots = cast("Tensor", handle._slots)
    _check_layout(handle.component, base, rows)
    flat = index.ring(slots, sequences, places, base.shape[1], base.device)
    base.view(-1, base.shape[2]).index_copy_(0, flat, rows)


def _check_layout(component: str, base: Tensor, rows: Tensor) -> None:
    if base.dtype != rows.dtype or base.shape[2:] != rows.shape[1:]:
        raise LayoutMismatch(
            f"{component}: rows of {rows.dtype} {tuple(rows.shape[1:])} were to be written into a"
            f" pool of {base.dtype} {tuple(base.shape[2:])}"
        )
