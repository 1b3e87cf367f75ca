"""What moves between one device and its host: pages and kept tails.

A load moves a group of layers at a time, a store whole records. Made once, over the memory of both
ends. A move is queued on the worker of the stream that carries it, which is the current stream
there; loads and stores have one worker each.
"""

from collections.abc import Sequence
from typing import Literal, final

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.dma import CopyEngine
from kvlease.kernels.gpu.page_copy import Pools, RecordTable
from kvlease.kernels.gpu.staging import (
    NUM_EXTRA,
    Direction,
    MovedPages,
    PageMover,
    StagingRing,
)
from kvlease.kernels.gpu.tail_copy import TailPiece, TailTable, move_tails
from kvlease.protocols.host_layout import MOVE_NBYTES, move_ranges

PROGRAMS = 132
"""Programs of a kernel that spreads or gathers records, at most: each slot's is over in 50 us."""
SLOT_NBYTES = 24 << 20
NUM_SLOTS = 3
PRIORITY = -1
"""Of a ring's stream: a slot that waits for a multiprocessor holds up the link."""


@frozen
class PageEnds:
    """Pages at both ends.

    Attributes:
        host: records [num_pages, nbytes] uint8, pinned.
        groups: per group of layers its bytes of a record, and per piece its device memory
            [num_pages, ...] and where it begins in a record.
    """

    host: Tensor
    groups: tuple[tuple[Pools, int], ...]


@frozen
class TailEnds:
    """Kept tails at both ends, and the rings that they are kept from.

    ``host`` and ``device`` are records [num_tails, nbytes] uint8; ``host`` is pinned.
    """

    host: Tensor
    device: Tensor
    pieces: tuple[TailPiece, ...]


Ends = tuple[Sequence[int], Sequence[int]]
"""Pages, or tails, at the source and at the destination, in the same order."""
Resumed = tuple[Literal["device", "host"], int, int, int]
"""A kept tail's tier and number, the slot whose rings it fills, and its boundary in tokens."""


@final
class LoadMove:
    """The pages of one load on their way, and the kept tail that fills a slot's rings.

    All numbers cross the link once, in one piece.
    """

    __slots__ = ("_main", "_moved", "_mover", "_numbers", "_pages", "_table", "_tail")

    def __init__(
        self, mover: PageMover, pages: Ends, tail: Resumed | None, table: TailTable | None
    ) -> None:
        """Copy the numbers; ``table`` is that of the tail's tier."""
        self._mover = mover
        self._table = table
        self._tail = tail
        self._pages = pages[0][:], pages[1][:]
        self._main: torch.cuda.Stream | None = None
        self._moved: MovedPages | None = None

    def queue(self, groups: tuple[int, int]) -> None:
        """Queue groups of all pages on the current stream; the tail goes before the first."""
        main = self._main or self._begin()
        if self._moved is not None:
            self._mover.uploads.renew(self._numbers, main)
            self._mover.move(groups, self._moved, main)

    def _begin(self) -> torch.cuda.Stream:
        """Send the numbers: slot, tail and boundary, then those of pages, at 16 bytes' multiple."""
        main = self._main = torch.cuda.current_stream()
        host, device = self._pages
        self._numbers = numbers = np.empty(NUM_EXTRA + len(device), dtype=np.int64)
        numbers[NUM_EXTRA:] = device
        if self._tail is not None:
            _, number, slot, boundary = self._tail
            numbers[:NUM_EXTRA] = slot, number, boundary, 0
        there = self._mover.uploads.send(numbers, main)
        if self._table is not None:
            move_tails(self._table, there, 1, main, to_records=False)
        if host:
            self._moved = MovedPages(np.array(host, dtype=np.int64), there[NUM_EXTRA:])
        return main


@final
class StoreMove:
    """The pages of one store on their way, in as few pieces as the staging slots allow."""

    __slots__ = ("_device", "_host", "_mover", "_ranges")

    def __init__(self, mover: PageMover, pages: Ends, ranges: Sequence[tuple[int, int]]) -> None:
        """Copy the numbers; ``ranges`` are all groups, as they move together."""
        self._mover = mover
        self._ranges = ranges
        self._device, self._host = (np.array(numbers, dtype=np.int64) for numbers in pages)

    def queue(self, groups: tuple[int, int]) -> None:
        """Queue whole records on the current stream."""
        main = torch.cuda.current_stream()
        pages = MovedPages(self._host, self._mover.uploads.send(self._device, main))
        self._mover.begin(main)
        for pair in self._ranges:
            self._mover.move(pair, pages, main)


@final
class TailMove:
    """Kept tails on their way between the tiers, record by record, all at once."""

    __slots__ = ("_engine", "_from", "_is_queued", "_source", "_target", "_to")

    def __init__(self, ends: tuple[Tensor, Tensor], engine: CopyEngine, tails: Ends) -> None:
        """Take what is read and what is written; copy the numbers."""
        self._source, self._target = ends
        self._engine = engine
        self._from, self._to = (np.array(numbers, dtype=np.uint64) for numbers in tails)
        self._is_queued = False

    def queue(self, groups: tuple[int, int]) -> None:
        """Queue all records on the current stream, unless that was done."""
        if self._is_queued:
            return
        self._is_queued = True
        nbytes = np.uint64(self._source.shape[1])
        sources = self._source.data_ptr(), self._from * nbytes
        targets = self._target.data_ptr(), self._to * nbytes
        sizes = np.full(len(self._to), nbytes)
        everything = 0, len(sizes)
        self._engine.copy(targets, sources, sizes, everything, torch.cuda.current_stream())


@final
class Carrier:
    """Moves whole groups between a device and its host, and tails between rings and records.

    Ownership: keeps the memory of both ends, of which its tables have addresses only; owns its
    staging rings.
    """

    def __init__(self, pages: PageEnds, tails: TailEnds | None, device: torch.device) -> None:
        """Lay out the tables and allocate the staging; ``tails`` of None are never moved."""
        table = RecordTable(pages.groups, device)
        self._group_nbytes = [nbytes for _, nbytes in pages.groups]
        slot = max([SLOT_NBYTES, *(MOVE_NBYTES + nbytes for nbytes in self._group_nbytes)])
        self._movers: dict[Direction, PageMover] = {
            direction: PageMover(
                direction,
                pages.host,
                table,
                StagingRing(device, slot, NUM_SLOTS, PRIORITY),
                PROGRAMS,
            )
            for direction in ("load", "store")
        }
        fits = table.nbytes <= slot
        self._whole = [(0, len(pages.groups))] if fits else move_ranges(self._group_nbytes, slot)
        """What a store moves at once: whole records, or a group where records are too large."""
        self._pages = pages
        self._tails = tails
        self._tables: dict[str, TailTable] = {}
        if tails is not None:
            self._tables["host"] = TailTable(tails.host, tails.pieces, device)
            self._tables["device"] = TailTable(tails.device, tails.pieces, device)
        self._warm_up(device)

    def _warm_up(self, device: torch.device) -> None:
        """Compile every kernel now; nothing is kept anywhere yet, and nothing comes back."""
        main = torch.cuda.current_stream()
        for mover in self._movers.values():
            mover.warm_up(main)
        nobody = torch.zeros(3, dtype=torch.int64, device=device)
        for table in self._tables.values():
            move_tails(table, nobody, 1, main, to_records=False)
        if self._tails is not None:
            move_tails(self._tables["device"], nobody, 1, main, to_records=True)
        main.synchronize()

    def load(self, pages: Ends, tail: Resumed | None) -> LoadMove:
        """Return the move of host pages, if any, and of a kept tail into the rings of its slot."""
        table = None if tail is None else self._tables[tail[0]]
        return LoadMove(self._movers["load"], pages, tail, table)

    def store(self, pages: Ends) -> StoreMove:
        """Return the move of pages to the host."""
        return StoreMove(self._movers["store"], pages, self._whole)

    def tails(self, direction: Direction, tails: Ends) -> TailMove:
        """Return the move of kept tails to the device or to the host."""
        assert self._tails is not None, "a carrier without tails"
        ends = self._tails.device, self._tails.host
        if direction == "load":
            ends = ends[1], ends[0]
        return TailMove(ends, self._movers[direction].ring.engine, tails)

    def keep(self, slots: Tensor, tails: Tensor, boundaries: Tensor) -> None:
        """Keep running sequences' state, [K] int64 in host memory each, on the current stream."""
        main, count = torch.cuda.current_stream(), len(slots)
        numbers = torch.cat((slots, tails, boundaries)).pin_memory()
        there = numbers.to(main.device, non_blocking=True)
        move_tails(self._tables["device"], there, count, main, to_records=True)
