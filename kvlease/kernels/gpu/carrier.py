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
from kvlease.kernels.gpu.staging import Direction, MovedPages, PageMover, StagingRing
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


@final
class PageMove:
    """The pages of one transfer on their way; each group is queued once, by who asks first."""

    __slots__ = ("_device", "_host", "_mover", "_pages", "_queued", "_ranges")

    def __init__(
        self, mover: PageMover, host: Tensor, device: Tensor, ranges: Sequence[tuple[int, int]]
    ) -> None:
        """Take page numbers at both ends, [n] int64 in host memory, in the same order.

        ``ranges`` are the groups that move together, first and one past the last.
        """
        self._mover = mover
        self._host = host
        self._device = device
        self._pages: MovedPages | None = None
        self._ranges = ranges
        self._queued: set[int] = set()

    def queue(self, group: int) -> None:
        """Queue a group's records on the current stream, and those that move with them."""
        if group in self._queued:
            return
        groups = next(pair for pair in self._ranges if group < pair[1])
        self._queued.update(range(*groups))
        main = torch.cuda.current_stream()
        if self._pages is None:
            self._pages = MovedPages(self._host.numpy(), _uploaded(self._device, main))
            self._mover.begin(main)
        self._mover.move(groups, self._pages, main)


@final
class ResumeMove:
    """One kept tail on its way into a running sequence's rings; it moves all at once."""

    __slots__ = ("_is_queued", "_numbers", "_table")

    def __init__(self, table: TailTable, numbers: Tensor) -> None:
        """Take ring slot, tail and boundary, [3, 1] int64 in host memory."""
        self._table = table
        self._numbers = numbers
        self._is_queued = False

    def queue(self, group: int) -> None:
        """Queue all rows on the current stream, unless that was done."""
        if not self._is_queued:
            self._is_queued = True
            self._numbers = _uploaded(self._numbers, torch.cuda.current_stream())
            move_tails(self._table, self._numbers, to_records=False)


@final
class TailMove:
    """Kept tails on their way between the tiers, record by record, all at once."""

    __slots__ = ("_engine", "_from", "_is_queued", "_source", "_target", "_to")

    def __init__(
        self,
        ends: tuple[Tensor, Tensor],
        engine: CopyEngine,
        numbers: tuple[Tensor, Tensor],
    ) -> None:
        """Take what is read and what is written, and tail numbers there, [n] int64."""
        self._source, self._target = ends
        self._engine = engine
        self._from, self._to = (tails.numpy().astype(np.uint64) for tails in numbers)
        self._is_queued = False

    def queue(self, group: int) -> None:
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
        nobody = torch.zeros((3, 1), dtype=torch.int64, device=device)
        for table in self._tables.values():
            move_tails(table, nobody, to_records=False)
        if self._tails is not None:
            move_tails(self._tables["device"], nobody, to_records=True)
        main.synchronize()

    def pages(self, direction: Direction, from_pages: Tensor, to_pages: Tensor) -> PageMove:
        """Return the move of pages, numbers [n] int64 in host memory at each end."""
        mover = self._movers[direction]
        if direction == "store":
            return PageMove(mover, to_pages, from_pages, self._whole)
        ranges = move_ranges(self._group_nbytes, len(from_pages))
        return PageMove(mover, from_pages, to_pages, ranges)

    def resume(
        self, tier: Literal["device", "host"], tail: int, slot: int, boundary: int
    ) -> ResumeMove:
        """Return the move of a tier's kept tail into a ring slot."""
        return ResumeMove(self._tables[tier], torch.tensor([[slot], [tail], [boundary]]))

    def tails(self, direction: Direction, from_tails: Tensor, to_tails: Tensor) -> TailMove:
        """Return the move of kept tails, numbers [n] int64 in host memory at each end."""
        assert self._tails is not None, "a carrier without tails"
        ends = self._tails.device, self._tails.host
        if direction == "load":
            ends = ends[1], ends[0]
        return TailMove(ends, self._movers[direction].ring.engine, (from_tails, to_tails))

    def keep(self, slots: Tensor, tails: Tensor, boundaries: Tensor) -> None:
        """Keep running sequences' state, [K] int64 in host memory each, on the current stream."""
        numbers = torch.stack((slots, tails, boundaries))
        on_device = _uploaded(numbers, torch.cuda.current_stream())
        move_tails(self._tables["device"], on_device, to_records=True)


def _uploaded(numbers: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Return numbers on the device, in the order of its current stream, which is ``stream``."""
    return numbers.pin_memory().to(stream.device, non_blocking=True)
