"""Page tables and index tensors of one batch, and where its layers' rows can be named.

Built once a step and shared by all layers, so that resolving a ready layer allocates a few small
handles and nothing else. The tensors belong to the step until its last use (R13).
"""

from array import array
from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from kvlease.errors import SealedPage, UsageError
from kvlease.pools.storage import RingStore, SpanStore
from kvlease.protocols.ownership import SequenceLease
from kvlease.protocols.views import EpochCell, OpenRows, PagedRows, SlotRows
from kvlease.units import LayerId


@final
class StepTables:
    """The batch's page tables [B, P], state slots [B], and first writable pages [B], all int64.

    Unused table entries name page 0; kernels never read them, because row counts come from
    positions.
    """

    __slots__ = ("_floors", "_sealed", "slots", "table")

    def __init__(self, members: Sequence[SequenceLease]) -> None:
        """Copies what it needs from the members; later changes to their tables do not reach it."""
        tables = [member.pages for member in members]
        size, width = len(members), max(map(len, tables), default=0)
        rows = [pages.tobytes().ljust(4 * width, b"\0") for pages in tables]
        slots = [member.slot for member in members]
        sealed = [member.sealed for member in members]
        # All numbers of the batch in one array of numpy's: a call for each member would be most of
        # what the gate costs. And not of torch's, which lets the interpreter lock go in every call,
        # and a busy stream worker takes it for milliseconds.
        packed = b"".join([*rows, array("i", slots + sealed)])
        numbers = np.frombuffer(packed, dtype=np.int32).astype(np.int64)
        self.table = torch.from_numpy(numbers[: size * width].reshape(size, width))
        self.slots = torch.from_numpy(numbers[size * width : -size])
        self._sealed = numbers[-size:]
        self._floors: dict[int, torch.Tensor] = {}

    def floor(self, rows_per_page: int) -> torch.Tensor:
        """Return the first writable row of each sequence, [B] int64."""
        floor = self._floors.get(rows_per_page)
        if floor is None:
            floor = torch.from_numpy(self._sealed * rows_per_page)
            self._floors[rows_per_page] = floor
        return floor


@final
class SharedSource:
    """Names one layer's rows of sealed pages, for one reader; offers nothing to write."""

    __slots__ = ("_cell", "_layer", "_spans", "_table")

    def __init__(
        self, spans: SpanStore, pages: Sequence[int], layer: LayerId, cell: EpochCell
    ) -> None:
        """Borrows the store for the life of the cell's epoch; the table is [1, P] int64."""
        self._spans = spans
        self._table = torch.from_numpy(np.array([pages], dtype=np.int64))
        self._layer = layer
        self._cell = cell

    def paged(self, name: str) -> PagedRows:
        """Rows of a span component, read only."""
        rows, per_page, planes = self._spans.handles[self._layer, name]
        return PagedRows(name, rows, self._table, self._cell, per_page, planes)

    def opened(self, name: str) -> OpenRows:
        """Refused: sealed pages never change (R4)."""
        raise SealedPage(f"{name}: a shared lease opens nothing for writing")

    def ring(self, name: str) -> SlotRows:
        """Refused: rings belong to running sequences."""
        raise UsageError(f"{name}: a shared lease of pages has no running state")


@final
class StepSource:
    """Names one layer's rows for a batch; opens nothing."""

    __slots__ = ("_cell", "_layer", "_rings", "_spans", "_tables")

    def __init__(
        self,
        spans: SpanStore,
        rings: RingStore,
        tables: StepTables,
        layer: LayerId,
        cell: EpochCell,
    ) -> None:
        """Borrows the stores and the tables for the life of the cell's epoch."""
        self._spans = spans
        self._rings = rings
        self._tables = tables
        self._layer = layer
        self._cell = cell

    def paged(self, name: str) -> PagedRows:
        """Rows of a span component, read only."""
        rows, per_page, planes = self._spans.handles[self._layer, name]
        return PagedRows(name, rows, self._tables.table, self._cell, per_page, planes)

    def opened(self, name: str) -> OpenRows:
        """Rows of a span component above the sealed pages, for writing."""
        rows, per_page, planes = self._spans.handles[self._layer, name]
        table, floor = self._tables.table, self._tables.floor(per_page)
        return OpenRows(name, rows, table, floor, self._cell, per_page, planes)

    def ring(self, name: str) -> SlotRows:
        """State rings of a tail component."""
        ring = self._rings.ring(self._layer, name)
        return SlotRows(name, ring, self._tables.slots, self._cell)
