"""What moves between one device and its host: pages and kept tails, a group of layers at a time.

Made once, over the memory of both ends. A move is queued group by group on the worker of the stream
that carries it, which is the current stream there; loads and stores have one worker each.
"""

from collections.abc import Sequence
from typing import Literal, final

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.dma import CopyEngine
from kvlease.kernels.gpu.page_copy import RecordTable
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
    """One group of layers' pages at both ends.

    Attributes:
        host: records [num_pages, nbytes] uint8, pinned.
        pools: per piece its device memory [num_pages, ...] and where it begins in a record.
    """

    host: Tensor
    pools: tuple[tuple[Tensor, int], ...]


@frozen
class TailEnds:
    """One group of layers' kept tails at both ends, and the rings that they are kept from.

    ``host`` and ``device`` are records [num_tails, nbytes] uint8; ``host`` is pinned.
    """

    host: Tensor
    device: Tensor
    pieces: tuple[TailPiece, ...]


@final
class PageMove:
    """The pages of one transfer on their way; each group is queued once, by who asks first."""

    __slots__ = ("_device", "_host", "_mover", "_pages", "_queued", "_ranges")

    def __init__(self, mover: PageMover, host: Tensor, device: Tensor) -> None:
        """Take page numbers at both ends, [n] int64 in host memory, in the same order."""
        self._mover = mover
        self._host = host
        self._device = device
        self._pages: MovedPages | None = None
        self._ranges = move_ranges(mover.table.nbytes, len(host))
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
    """Kept tails on their way between the tiers, record by record."""

    __slots__ = ("_direction", "_ends", "_engine", "_from", "_queued", "_to")

    def __init__(
        self,
        direction: Direction,
        ends: Sequence[TailEnds],
        engine: CopyEngine,
        numbers: tuple[Tensor, Tensor],
    ) -> None:
        """Take tail numbers at both ends, [n] int64 in host memory, in the same order."""
        self._direction = direction
        self._ends = ends
        self._engine = engine
        self._from, self._to = (tails.numpy().astype(np.uint64) for tails in numbers)
        self._queued: set[int] = set()

    def queue(self, group: int) -> None:
        """Queue a group's records on the current stream, unless that was done."""
        if group in self._queued:
            return
        self._queued.add(group)
        ends, main = self._ends[group], torch.cuda.current_stream()
        source, target = ends.device, ends.host
        if self._direction == "load":
            source, target = target, source
        nbytes = np.uint64(source.shape[1])
        sources = source.data_ptr(), self._from * nbytes
        targets = target.data_ptr(), self._to * nbytes
        sizes = np.full(len(self._to), nbytes)
        self._engine.copy(targets, sources, sizes, (0, len(sizes)), main)


@final
class Carrier:
    """Moves whole groups between a device and its host, and tails between rings and records.

    Ownership: borrows the memory of both ends; owns its staging rings.
    """

    def __init__(
        self, pages: Sequence[PageEnds], tails: Sequence[TailEnds], device: torch.device
    ) -> None:
        """Lay out the tables and allocate the staging."""
        table = RecordTable([(group.pools, group.host.shape[1]) for group in pages], device)
        hosts = [group.host for group in pages]
        slot = max([SLOT_NBYTES, *(MOVE_NBYTES + nbytes for nbytes in table.nbytes)])
        self._movers: dict[Direction, PageMover] = {
            direction: PageMover(
                direction, hosts, table, StagingRing(device, slot, NUM_SLOTS, PRIORITY), PROGRAMS
            )
            for direction in ("load", "store")
        }
        self._tails = tuple(tails)
        self._tables = {
            "host": TailTable([(group.host, group.pieces) for group in tails], device),
            "device": TailTable([(group.device, group.pieces) for group in tails], device),
        }
        self._warm_up(device)

    def _warm_up(self, device: torch.device) -> None:
        """Compile every kernel now; nothing is kept anywhere yet, and nothing comes back."""
        main = torch.cuda.current_stream()
        for mover in self._movers.values():
            mover.warm_up(main)
        nobody = torch.zeros((3, 1), dtype=torch.int64, device=device)
        for table in self._tables.values():
            move_tails(table, nobody, to_records=False)
        move_tails(self._tables["device"], nobody, to_records=True)
        main.synchronize()

    def pages(self, direction: Direction, from_pages: Tensor, to_pages: Tensor) -> PageMove:
        """Return the move of pages, numbers [n] int64 in host memory at each end."""
        host, device = from_pages, to_pages
        if direction == "store":
            host, device = device, host
        return PageMove(self._movers[direction], host, device)

    def resume(
        self, tier: Literal["device", "host"], tail: int, slot: int, boundary: int
    ) -> ResumeMove:
        """Return the move of a tier's kept tail into a ring slot."""
        return ResumeMove(self._tables[tier], torch.tensor([[slot], [tail], [boundary]]))

    def tails(self, direction: Direction, from_tails: Tensor, to_tails: Tensor) -> TailMove:
        """Return the move of kept tails, numbers [n] int64 in host memory at each end."""
        engine = self._movers[direction].ring.engine
        return TailMove(direction, self._tails, engine, (from_tails, to_tails))

    def keep(self, slots: Tensor, tails: Tensor, boundaries: Tensor) -> None:
        """Keep running sequences' state, [K] int64 in host memory each, on the current stream."""
        numbers = torch.stack((slots, tails, boundaries))
        on_device = _uploaded(numbers, torch.cuda.current_stream())
        move_tails(self._tables["device"], on_device, to_records=True)


def _uploaded(numbers: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Return numbers on the device, in the order of its current stream, which is ``stream``."""
    return numbers.pin_memory().to(stream.device, non_blocking=True)
