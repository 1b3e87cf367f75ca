"""Opaque handles on rows: what a resolved lease yields and only a kernel can open.

A handle holds the memory, the page table and the epoch cell of the right it was made under, all in
private slots. ``kvlease.kernels.views`` is the one module that reads those slots, and every opening
there compares the epoch, so a handle kept after its lease ended yields nothing. This module does
not know what memory is; a base may be a tensor or anything else.
"""

from typing import final

import msgspec


@final
class EpochCell:
    """The generation of one right; every handle made under the right remembers the number.

    Ending the right (close, move, revoke) adds one, which makes all its handles stale at once.
    """

    __slots__ = ("epoch",)

    def __init__(self) -> None:
        """Start at generation 0."""
        self.epoch = 0

    def end(self) -> None:
        """Make every handle of the present generation stale."""
        self.epoch += 1


@final
class PagedRows:
    """Rows of one component of one layer, seen through the page tables of B sequences.

    Ownership: borrows the pool's memory for as long as its lease lives.
    Shapes (fixed by the pool): base [num_pages, rows_per_page, *row]; table [B, P] page ids. With
    ``planes`` (`RowFormat.planes`) a page holds each part of all its rows together.
    """

    __slots__ = ("_base", "_cell", "_epoch", "_table", "component", "planes", "rows_per_page")

    def __init__(
        self,
        component: str,
        base: object,
        table: object,
        cell: EpochCell,
        rows_per_page: int,
        planes: tuple[int, ...] = (),
    ) -> None:
        """Remember the cell's present epoch; called by pools only."""
        self.component = component
        self.rows_per_page = rows_per_page
        self.planes = planes
        self._base = base
        self._table = table
        self._cell = cell
        self._epoch = cell.epoch

    def select(self, chosen: object) -> "SelectedRows":
        """Name rows per query, opening none: chosen [N, K] row numbers, -1 for no row."""
        return SelectedRows(self, chosen)


@final
class SelectedRows:
    """Some rows of a `PagedRows`, named per query; opened by the kernel that reads them."""

    __slots__ = ("chosen", "rows")

    def __init__(self, rows: PagedRows, chosen: object) -> None:
        """Borrow the rows handle; chosen is [N, K] row numbers, -1 for none."""
        self.rows = rows
        self.chosen = chosen


@final
class OpenRows:
    """The right to write rows of one component of one layer, above a floor per sequence.

    Shapes: base and table as in `PagedRows`; floor [B] is the first writable row of each sequence
    (rows below it lie in sealed pages).
    """

    __slots__ = (
        "_base", "_cell", "_epoch", "_floor", "_table", "component", "planes", "rows_per_page",
    )  # fmt: skip

    def __init__(
        self,
        component: str,
        base: object,
        table: object,
        floor: object,
        cell: EpochCell,
        rows_per_page: int,
        planes: tuple[int, ...] = (),
    ) -> None:
        """Remember the cell's present epoch; called by pools only."""
        self.component = component
        self.rows_per_page = rows_per_page
        self.planes = planes
        self._base = base
        self._table = table
        self._floor = floor
        self._cell = cell
        self._epoch = cell.epoch


@final
class SlotRows:
    """State rings of B sequences for one component of one layer, readable and writable.

    Shapes: base [num_slots, ring_rows, width]; slots [B]. Position p lies at ring row
    p % ring_rows.
    """

    __slots__ = ("_base", "_cell", "_epoch", "_slots", "component")

    def __init__(self, component: str, base: object, slots: object, cell: EpochCell) -> None:
        """Remember the cell's present epoch; called by pools only."""
        self.component = component
        self._base = base
        self._slots = slots
        self._cell = cell
        self._epoch = cell.epoch


class CompressorRows(msgspec.Struct, frozen=True):
    """A compressor's running state: kv in the compute dtype, gates in fp32 or wider."""

    kv: SlotRows
    gate: SlotRows


class SparseView(msgspec.Struct, frozen=True):
    """A compressed-sparse layer, read only: latent rows and index keys of sealed pages."""

    latent: PagedRows
    index_k: PagedRows


class HeavyView(msgspec.Struct, frozen=True):
    """A heavily-compressed layer, read only: latent rows of sealed pages."""

    latent: PagedRows


class SlidingView(msgspec.Struct, frozen=True):
    """A sliding-window layer, read only: it keeps nothing per page."""


class DenseView(msgspec.Struct, frozen=True):
    """A grouped-query layer, read only: keys and values of sealed pages."""

    k: PagedRows
    v: PagedRows


class IndexedView(msgspec.Struct, frozen=True):
    """A multi-head-latent layer with an indexer, read only (DeepSeek-V3.2, GLM-5)."""

    latent: PagedRows
    index_k: PagedRows


class SlidingStepView(msgspec.Struct, frozen=True):
    """A sliding-window layer inside a step: the sequences' window rings."""

    window: SlotRows


class SparseStepView(msgspec.Struct, frozen=True):
    """A compressed-sparse layer inside a step: reads, the open page, and the running state."""

    window: SlotRows
    latent: PagedRows
    index_k: PagedRows
    latent_open: OpenRows
    index_k_open: OpenRows
    compressor: CompressorRows
    index_compressor: CompressorRows


class HeavyStepView(msgspec.Struct, frozen=True):
    """A heavily-compressed layer inside a step: reads, the open page, and the running state."""

    window: SlotRows
    latent: PagedRows
    latent_open: OpenRows
    compressor: CompressorRows


class DenseStepView(msgspec.Struct, frozen=True):
    """A grouped-query layer inside a step: reads and the open page."""

    k: PagedRows
    v: PagedRows
    k_open: OpenRows
    v_open: OpenRows


class IndexedStepView(msgspec.Struct, frozen=True):
    """A multi-head-latent layer with an indexer inside a step: reads and the open page."""

    latent: PagedRows
    index_k: PagedRows
    latent_open: OpenRows
    index_k_open: OpenRows
