"""Pages between pinned host records and device pools, through a ring of staging slots.

Two stages on two streams: a copy engine moves records between the host and a slot, and a kernel
moves them between the slot and the pools. Each slot's two events order its stages, so that while
one slot crosses the link another is spread. The stage that makes bytes true runs on the caller's
stream: what it records there covers the whole move.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, final

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.dma import Addresses, copy_engine
from kvlease.kernels.gpu.page_copy import RecordTable, move_records

Direction = Literal["load", "store"]
Stage = Callable[[], None]


@frozen
class GroupEnds:
    """Both ends of one group of layers: where its records lie on the host, and its pools' tiles."""

    host: Tensor
    """[num_pages, nbytes] uint8, pinned, rows of one stretch each."""
    table: RecordTable


@final
class MovedPages:
    """The pages of one transfer at both ends, in one order; keeps how they are cut into copies."""

    __slots__ = ("_cuts", "_linked", "count", "device", "host")

    def __init__(self, host: npt.NDArray[np.int64], device: Tensor) -> None:
        """Take page numbers: ``host`` [n], and ``device`` [n] int32 or int64 on the device."""
        self.host = host
        self.device = device
        self.count = len(host)
        self._linked = np.empty(self.count, dtype=np.bool_)
        self._linked[:1] = False
        np.equal(host[1:], host[:-1] + 1, out=self._linked[1:])
        self._cuts: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def cuts(self, per_slot: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return first index and length of each run of consecutive host pages within a slot."""
        found = self._cuts.get(per_slot)
        if found is None:
            starts_run = ~self._linked
            starts_run[::per_slot] = True
            starts = np.flatnonzero(starts_run)
            lengths = np.diff(starts, append=self.count)
            found = self._cuts[per_slot] = starts, lengths
        return found


@final
class StagingRing:
    """Slots of device memory that records pass through, in turn, and the second stream.

    One thread at a time uses a ring. Ownership: owns its memory, stream and events.
    """

    def __init__(
        self, device: torch.device, slot_nbytes: int, num_slots: int, priority: int = 0
    ) -> None:
        """Allocate ``num_slots`` slots of ``slot_nbytes``."""
        self.slots = torch.empty((num_slots, slot_nbytes), dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream(device, priority=priority)
        self.engine = copy_engine(self.slots.get_device())
        self._base = self.slots.data_ptr()
        self._ready = [torch.cuda.Event() for _ in range(num_slots)]
        self._free = [torch.cuda.Event() for _ in range(num_slots)]
        self._turn = 0

    def address(self, slot: int) -> int:
        """Where a slot begins."""
        return self._base + slot * self.slots.shape[1]

    def turns(self, count: int) -> Iterator[int]:
        """Yield the next ``count`` slots."""
        for _ in range(count):
            yield self._turn
            self._turn = (self._turn + 1) % len(self.slots)

    def upcoming(self, count: int) -> npt.NDArray[np.int64]:
        """Return the next ``count`` slots without taking them."""
        return (self._turn + np.arange(count)) % len(self.slots)

    def pass_through(self, slot: int, first: Stage, second: Stage, main: torch.cuda.Stream) -> None:
        """Queue both stages of a slot: the first on the ring's stream, the second on ``main``."""
        aside = self.stream
        aside.wait_event(self._free[slot])
        try:
            first()
            self._ready[slot].record(aside)
            main.wait_event(self._ready[slot])
            second()
        except BaseException:
            main.wait_stream(aside)  # what was queued aside still uses memory of the move (R6)
            raise
        self._free[slot].record(main)


@final
class PageMover:
    """Moves pages one way, a group of layers at a time.

    A store's gather is ordered behind what the caller's stream waits for only through `begin`.
    """

    def __init__(
        self, direction: Direction, groups: Sequence[GroupEnds], ring: StagingRing, programs: int
    ) -> None:
        """Borrow both ends; ``programs`` bounds the multiprocessors that the kernel takes."""
        self.direction = direction
        self._groups = groups
        self._ring = ring
        self._programs = programs

    def begin(self, main: torch.cuda.Stream) -> None:
        """Order what follows on the ring's stream behind all that is on ``main`` now."""
        self._ring.stream.wait_stream(main)

    def move(self, group: int, pages: MovedPages, main: torch.cuda.Stream) -> int:
        """Queue the move of one group's records of all pages; ``main`` is the current stream.

        Returns how many bytes will have been moved when ``main`` is through with it.
        """
        ends, ring = self._groups[group], self._ring
        nbytes = ends.table.nbytes
        per_slot = ring.slots.shape[1] // nbytes
        starts, lengths = pages.cuts(per_slot)
        num_chunks = -(-pages.count // per_slot)
        slot_of = ring.upcoming(num_chunks)[starts // per_slot]
        staged = self._staged(slot_of, starts % per_slot, nbytes)
        on_host = ends.host.data_ptr() + pages.host[starts] * nbytes
        sizes = (lengths * nbytes).astype(np.uint64)
        outer = (staged, on_host.astype(np.uint64), sizes)
        edges = np.searchsorted(starts, np.arange(num_chunks + 1) * per_slot).tolist()
        for chunk, slot in enumerate(ring.turns(num_chunks)):
            part = chunk * per_slot, min((chunk + 1) * per_slot, pages.count)
            self._pass(
                ends, pages.device, slot, part, (edges[chunk], edges[chunk + 1]), outer, main
            )
        return pages.count * nbytes

    def _staged(
        self, slot_of: npt.NDArray[np.int64], within: npt.NDArray[np.int64], nbytes: int
    ) -> Addresses:
        ring = self._ring
        return (ring.address(0) + slot_of * ring.slots.shape[1] + within * nbytes).astype(np.uint64)

    def _pass(
        self,
        ends: GroupEnds,
        device_pages: Tensor,
        slot: int,
        part: tuple[int, int],
        copies: tuple[int, int],
        outer: tuple[Addresses, Addresses, Addresses],
        main: torch.cuda.Stream,
    ) -> None:
        ring = self._ring
        staged, on_host, sizes = outer
        is_load = self.direction == "load"
        ends_of_copy = (staged, on_host) if is_load else (on_host, staged)

        def cross(stream: torch.cuda.Stream) -> None:
            ring.engine.copy(*ends_of_copy, sizes, copies, stream)

        def spread() -> None:
            move_records(
                ends.table,
                device_pages,
                ring.slots[slot],
                part,
                self._programs,
                to_records=not is_load,
            )

        def gather() -> None:
            with torch.cuda.stream(ring.stream):
                spread()

        if is_load:
            ring.pass_through(slot, lambda: cross(ring.stream), spread, main)
        else:
            ring.pass_through(slot, gather, lambda: cross(main), main)
