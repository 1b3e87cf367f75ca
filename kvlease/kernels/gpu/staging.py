"""Pages between pinned host records and device pools, through a ring of staging slots.

Two stages on two streams: a copy engine moves records between the host and a slot, and a kernel
moves them between the slot and the pools. Each slot's two events order its stages, so that while
one slot crosses the link another is spread. The stage that makes bytes true runs on the caller's
stream: what it records there covers the whole move.

Why so: a copy engine leaves the multiprocessors to compute, and a kernel that crosses the link does
not. Measured on an H200, 1,024 scattered pages of DeepSeek-V4-Flash (fp8, 43 layers), pinned copies
at 55.2 GB/s: this way loads at 52.1 to 52.6 GB/s and stores at 51.4 to 52.9; beside a bf16 matmul
loop at 48.9 and 48.5, the loop keeping 96 and 100 % of its rate; with the second stage at copies'
priority, as an engine's streams have it, at 54.4 with 92 to 97 % kept (that with records of groups,
moved again and again). Kernels over pinned memory: 48 to 49.5 GB/s, beside the loop loads at 38
with 77 % kept, stores at 46 with 32 %. Engines straight to pages of 46 KB: 45 to 51 GB/s, of 8 KB a
tenth.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, final

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.dma import CopyEngine, Numbers
from kvlease.kernels.gpu.page_copy import RecordTable, move_records
from kvlease.kernels.gpu.uploads import Uploads

Direction = Literal["load", "store"]

NUM_EXTRA = 4
"""Numbers that may be sent with those of all pages."""
LEAST_COPY_NBYTES = 4 << 20
"""Copies by rows have so many bytes on average: each costs the copy engine 3 us beyond its bytes, a
copy of a batch next to nothing. Loads of 1,024 pages in runs of 8 came at 45 GB/s by rows, at 52.6
in batches; long runs by rows come faster than in batches, which cost the host more."""


@frozen
class Cut:
    """How a transfer's pages become copies of a part of their records, a slot's worth at a time.

    Attributes:
        on_host, in_slot: per copy, in bytes from the part's place in the first record, and from
            where the slot begins.
        sizes: per copy its bytes; or if ``by_rows`` its records, of which it takes the part.
        chunks: per slot its pages, and its copies: each first, and one past the last.
    """

    on_host: Numbers
    in_slot: Numbers
    sizes: Numbers
    by_rows: bool
    chunks: list[tuple[int, int, int, int]]


@final
class MovedPages:
    """The pages of one transfer at both ends, in one order; keeps how they are cut into copies."""

    __slots__ = ("_breaks", "_cuts", "_on_host", "count", "device", "host")

    def __init__(self, host: npt.NDArray[np.int64], device: Tensor) -> None:
        """Take page numbers, [n] int64: ``host``, and ``device`` on the device."""
        self.host = host
        self.device = device
        self.count = len(host)
        self._breaks = np.flatnonzero(host[1:] != host[:-1] + 1) + 1
        """Where no neighbour follows on the host."""
        self._cuts: dict[int, Cut] = {}
        self._on_host: Numbers | None = None

    def cut(self, nbytes: int, record_nbytes: int, slot_nbytes: int) -> Cut:
        """Return the copies of ``nbytes`` of each record; records and slots are of one size."""
        found = self._cuts.get(nbytes)
        if found is None:
            # neighbours on the host are one piece; of parts of records, one copy of several rows
            is_part = nbytes < record_nbytes
            apart = is_part and self.count * nbytes < (len(self._breaks) + 1) * LEAST_COPY_NBYTES
            way = self._cut_pages if apart else self._cut_runs
            found = self._cuts[nbytes] = way(nbytes, record_nbytes, slot_nbytes // nbytes)
        return found

    def _cut_pages(self, nbytes: int, record_nbytes: int, per_slot: int) -> Cut:
        count = self.count
        in_slot = np.arange(count, dtype=np.uint64)
        if per_slot < count:
            in_slot %= per_slot
        in_slot *= nbytes
        if self._on_host is None:
            self._on_host = self.host.astype(np.uint64)
            self._on_host *= record_nbytes
        sizes = np.empty(count, dtype=np.uint64)
        sizes.fill(nbytes)
        chunks = [(first, min(first + per_slot, count)) for first in range(0, count, per_slot)]
        return Cut(self._on_host, in_slot, sizes, False, [chunk + chunk for chunk in chunks])

    def _cut_runs(self, nbytes: int, record_nbytes: int, per_slot: int) -> Cut:
        by_rows = nbytes < record_nbytes
        pieces: list[tuple[int, int, int]] = []
        edges: list[int] = []
        for start, end in pairwise([0, *self._breaks.tolist(), self.count]):
            host = int(self.host[start]) - start
            while start < end:
                if start % per_slot == 0:
                    edges.append(len(pieces))
                stop = min(end, start - start % per_slot + per_slot)
                size = (stop - start) * (1 if by_rows else nbytes)
                pieces.append(((host + start) * record_nbytes, start % per_slot * nbytes, size))
                start = stop
        edges.append(len(pieces))
        on_host, in_slot, sizes = np.array(pieces, dtype=np.uint64).T
        firsts = range(0, self.count, per_slot)
        chunks = [
            (first, min(first + per_slot, self.count), *pair)
            for first, pair in zip(firsts, pairwise(edges), strict=True)
        ]
        return Cut(on_host, in_slot, sizes, by_rows, chunks)


@frozen
class _Slot:
    """One slot of a ring; ``ready`` after its first stage, ``free`` after its second."""

    address: int
    ready: torch.cuda.Event
    free: torch.cuda.Event


@final
class StagingRing:
    """Slots of device memory that records pass through, in turn, and the second stream.

    One thread at a time uses a ring. Ownership: owns its memory, stream, events and copy engine.
    """

    def __init__(
        self, device: torch.device, slot_nbytes: int, num_slots: int, priority: int
    ) -> None:
        """Allocate ``num_slots`` slots of ``slot_nbytes``."""
        self.slot_nbytes = slot_nbytes
        self.stream = torch.cuda.Stream(device, priority=priority)
        self.engine = CopyEngine(device)
        self._slots: list[_Slot] = []
        self.memory = torch.empty((num_slots, slot_nbytes), dtype=torch.uint8, device=device)
        for memory in self.memory:
            events = torch.cuda.Event(), torch.cuda.Event()
            self._slots.append(_Slot(memory.data_ptr(), *events))
        self._turn = 0

    def pass_through(
        self,
        first: Callable[[_Slot, torch.cuda.Stream], None],
        second: Callable[[_Slot, torch.cuda.Stream], None],
        main: torch.cuda.Stream,
    ) -> None:
        """Queue both stages of the next slot: one on the ring's stream, the other on ``main``."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        aside = self.stream
        aside.wait_event(slot.free)
        try:
            first(slot, aside)
            slot.ready.record(aside)
            main.wait_event(slot.ready)
            second(slot, main)
        except BaseException:
            main.wait_stream(aside)  # what was queued aside still uses memory of the move (R6)
            raise
        slot.free.record(main)


@final
class PageMover:
    """Moves pages one way, some groups of layers at a time."""

    def __init__(
        self,
        direction: Direction,
        host: Tensor,
        table: RecordTable,
        ring: StagingRing,
        programs: int,
    ) -> None:
        """Borrow both ends.

        Args:
            direction: which of the two ends is read.
            host: records [num_pages, nbytes] uint8, pinned, in one stretch.
            table: where the pieces of records lie on the device.
            ring: what they pass through; each group fits a slot.
            programs: bounds the multiprocessors that the kernel takes.
        """
        self._is_load = direction == "load"
        self._address = host.data_ptr()
        self.table = table
        self.ring = ring
        self._programs = programs
        self.uploads = Uploads(len(host) + NUM_EXTRA, ring.engine, ring.memory.device)
        self._words = {memory.data_ptr(): memory.view(table.word) for memory in ring.memory}
        """The ring's slots by their addresses, as records are moved in them."""

    def begin(self, main: torch.cuda.Stream) -> None:
        """Order the move's first stage behind what ``main`` waits for: before the first group.

        A load's first stage reads host pages that are true already, and waits for nothing.
        """
        if not self._is_load:
            self.ring.stream.wait_stream(main)

    def warm_up(self, main: torch.cuda.Stream) -> None:
        """Compile, so that no transfer has to wait for that."""
        if self.table.nbytes:
            none = torch.zeros(1, dtype=torch.int64, device=self.ring.memory.device)
            self._spread((0, 0), none, next(iter(self._words.values())), (0, 0), main)

    def _spread(
        self,
        groups: tuple[int, int],
        pages: Tensor,
        memory: Tensor,
        part: tuple[int, int],
        stream: torch.cuda.Stream,
    ) -> None:
        to_records, programs = not self._is_load, self._programs
        move_records(
            self.table, groups, pages, memory, part, programs, stream, to_records=to_records
        )

    def move(self, groups: tuple[int, int], pages: MovedPages, main: torch.cuda.Stream) -> None:
        """Queue the move of groups[0] to groups[1] - 1 of all pages.

        ``main`` is the current stream; the move is over when it has got there.
        """
        ring = self.ring
        begin, end = (self.table.bounds[number] for number in groups)
        cut = pages.cut(end - begin, self.table.nbytes, ring.slot_nbytes)
        host = self._address + begin, cut.on_host
        for first, last, *copies in cut.chunks:

            def cross(
                slot: _Slot, stream: torch.cuda.Stream, copies: Sequence[int] = copies
            ) -> None:
                target, source = (slot.address, cut.in_slot), host
                sizes = end - begin, end - begin, self.table.nbytes
                if not self._is_load:
                    target, source = source, target
                    sizes = end - begin, self.table.nbytes, end - begin
                part = copies[0], copies[1]
                if cut.by_rows:
                    ring.engine.copy_rows(target, source, cut.sizes, part, sizes, stream)
                else:
                    ring.engine.copy(target, source, cut.sizes, part, stream)

            def spread(
                slot: _Slot, stream: torch.cuda.Stream, part: tuple[int, int] = (first, last)
            ) -> None:
                self._spread(groups, pages.device, self._words[slot.address], part, stream)

            if self._is_load:
                ring.pass_through(cross, spread, main)
            else:
                ring.pass_through(spread, cross, main)
