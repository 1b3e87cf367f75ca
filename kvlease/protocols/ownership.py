"""Leases: the typed right to read or write pages, and the gate in front of every layer.

A lease pins pages and opens nothing. `LayerLease.resolve` is the only way to a view, and it waits
until every transfer that fills that layer has resolved; handles in a view carry the lease's epoch
cell, so they die with the lease. Pools make leases; this module knows no memory and no loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar, final

from kvlease.errors import ActorClosed, LeaseMoved, NotReady
from kvlease.protocols.checks import CheckedReadiness, PageCheck
from kvlease.protocols.ports import Completion, Stream
from kvlease.protocols.readiness import GateObserver, Openings, PendingTransfer, Readiness
from kvlease.protocols.schema import Layer, ViewSource
from kvlease.protocols.views import EpochCell
from kvlease.units import NO_STEP, LayerId, LeaseId, StepId

V = TypeVar("V")
R = TypeVar("R")
W = TypeVar("W")


@final
class Shared:
    """Phantom state: the pages are sealed and may be read by many."""


@final
class Exclusive:
    """Phantom state: the pages have exactly one holder, who may write."""


S = TypeVar("S", Shared, Exclusive)
OnClose = Callable[[tuple[Completion, ...]], None]
"""Hears of a lease's end, with its last uses."""


class Grantor(Protocol):
    """The pool behind a lease: it builds views and takes pages back."""

    def view_source(self, pages: Sequence[int], layer: LayerId, cell: EpochCell) -> ViewSource:
        """Return where a layer's rows can be named for these pages."""
        ...

    def lease_moved(self, lease: LeaseId, *, freezes: bool) -> None:
        """A lease changed hands under the same number; ``freezes`` if it also gave up writing."""
        ...


@final
class LayerLease(Generic[V]):
    """The right to one layer; holds no rows. ``resolve`` turns it into that layer's view."""

    __slots__ = ("_build", "_cell", "_layer", "_lease", "_readiness", "_streams", "_view")

    def __init__(
        self,
        lease: LeaseId,
        layer: LayerId,
        readiness: Readiness,
        cell: EpochCell,
        build: Callable[[], V],
        streams: list[Stream] | None = None,
    ) -> None:
        """Made by indexing a lease with a layer of its schema; ``cell`` is a living lease's.

        ``streams`` are where the lease notes who reads; None where its holder knows that.
        """
        self._lease = lease
        self._layer = layer
        self._readiness = readiness
        self._cell = cell
        self._build = build
        self._streams = streams
        self._view: V | None = None

    async def resolve(self, stream: Stream) -> V:
        """Return the layer's view once its bytes are in the stream's order.

        Checkpoints: only if it waits. Raises TransferFailed when the bytes will not come,
        LeaseMoved when the lease has ended.
        """
        if self._layer >= self._readiness.ready_through:
            await self._readiness.settle(self._layer, stream)
        if self._streams is not None and stream not in self._streams:
            self._streams.append(stream)
        return self._opened()

    def resolve_nowait(self) -> V:
        """Return the layer's view if its bytes are there, else raise NotReady; never waits."""
        if self._layer >= self._readiness.ready_through:
            self._readiness.check(self._layer)
        return self._opened()

    def _opened(self) -> V:
        if self._cell.epoch:
            raise LeaseMoved(f"lease {self._lease} has ended or was moved; use the new handle")
        if self._view is None:
            self._view = self._build()
        return self._view


_Rights = tuple[LeaseId, Sequence[int], Grantor, Readiness, Openings, OnClose, list[Stream]]


@final
class Lease(Generic[S]):
    """Pages held: shared (sealed, readable) or exclusive (being written); opens nothing.

    Ends by leaving its ``with`` block, by `close`, or by moving it; using it afterwards raises
    LeaseMoved. ``on_close`` gives the pages back to the pool that granted them, exactly once, with
    the last uses that must be final before anyone may write there (R6): those of all streams that
    layers were resolved on, recorded when the lease ends.
    """

    __slots__ = (
        "_cell", "_grantor", "_on_close", "_openings", "_pages", "_readiness", "_streams", "id",
    )  # fmt: skip

    def __init__(
        self,
        lease_id: LeaseId,
        pages: Sequence[int],
        grantor: Grantor,
        readiness: Readiness,
        openings: Openings,
        on_close: OnClose,
        streams: list[Stream] | None = None,
    ) -> None:
        """Called by pools only; whoever hears ``on_close`` knows what ``openings`` holds."""
        self.id = lease_id
        self._pages: Sequence[int] | None = pages
        self._grantor = grantor
        self._readiness = readiness
        self._openings = openings
        self._on_close = on_close
        self._streams: list[Stream] = [] if streams is None else streams
        self._cell = EpochCell()

    def _alive(self) -> Sequence[int]:
        if self._pages is None:
            raise LeaseMoved(f"lease {self.id} has ended or was moved; use the new handle")
        return self._pages

    @property
    def num_pages(self) -> int:
        """How many pages the lease holds."""
        return len(self._alive())

    def __getitem__(self: Lease[Shared], layer: Layer[R, W]) -> LayerLease[R]:
        """Return the right to one layer of shared pages."""
        pages = self._alive()

        def build() -> R:
            self._openings.note(layer.id)
            return layer.read_view(self._grantor.view_source(pages, layer.id, self._cell))

        return LayerLease(self.id, layer.id, self._readiness, self._cell, build, self._streams)

    async def verify(self) -> None:
        """Wait until all that `resolve` ordered streams behind has arrived (R2).

        A device runs behind a recorded copy before anybody knows that it succeeded: use no result
        before. Checkpoints: only if it waits. Raises TransferFailed when some did not arrive.
        """
        await self._readiness.verify()

    def move(self) -> Lease[S]:
        """Return a new handle with the same right; this one and its views are dead."""
        return Lease(*self._hand_on(freezes=False))

    def freeze(self: Lease[Exclusive]) -> Lease[Shared]:
        """Give up writing: return the same pages as a shared lease; this handle is dead."""
        return Lease(*self._hand_on(freezes=True))

    def _hand_on(self, *, freezes: bool) -> _Rights:
        """End this handle, say so, and return what the next one is made of."""
        pages = self._alive()
        self._end()
        grantor = self._grantor
        grantor.lease_moved(self.id, freezes=freezes)
        readiness, openings = self._readiness, self._openings
        return self.id, pages, grantor, readiness, openings, self._on_close, self._streams

    def close(self, last_use: Completion | None = None) -> None:
        """End the lease; the pages are not reused before its last uses are final (R6).

        ``last_use`` is for work that is on none of the streams that layers were resolved on.
        """
        self._alive()
        self._end()
        last_uses = [] if last_use is None else [last_use]
        for stream in self._streams:
            with suppress(ActorClosed):  # whose work has ended, or can be waited for no more
                last_uses.append(stream.record())
        self._on_close(tuple(last_uses))

    def _end(self) -> None:
        self._pages = None
        self._cell.end()

    def __enter__(self) -> Lease[S]:
        """Borrow for a ``with`` block."""
        self._alive()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close, unless the lease was moved inside the block."""
        if self._pages is not None:
            self.close()


@final
class SequenceLease:
    """One sequence's right: its shared prefix and its exclusive open page, as one.

    ``pages`` is the page table in order. Pages below ``sealed`` are shared and never written; the
    rest belongs to this sequence alone, as do the rings of its state ``slot``. ``pending`` are the
    transfers still filling any of it. ``committed`` counts the tokens whose rows are final.
    ``checks`` are taken by its first step, which makes them before it reads.
    """

    __slots__ = ("cell", "checks", "committed", "id", "pages", "pending", "sealed", "slot")

    def __init__(self, lease_id: LeaseId, pages: array[int], sealed: int, slot: int) -> None:
        """Takes the page table; called by pools only."""
        self.id = lease_id
        self.pages = pages
        self.sealed = sealed
        self.slot = slot
        self.pending: list[PendingTransfer] = []
        self.checks: tuple[PageCheck, ...] = ()
        self.committed = 0
        self.cell = EpochCell()

    def commit(self, num_tokens: int) -> None:
        """Make rows up to ``num_tokens`` final; rows past it still belong to the writer."""
        self.committed = max(self.committed, num_tokens)


class StepGrantor(Protocol):
    """The pool behind a step lease."""

    def step_source(self, lease: StepLease, layer: LayerId) -> ViewSource:
        """Return where a layer's rows can be named for the step's members."""
        ...


@final
class StepLease:
    """The members of one step under one epoch: one resolve a layer, whatever the batch.

    Pins page tables and index tensors until the step's last use is done (R13). ``tables`` is the
    grantor's own batch record, opaque here.
    """

    __slots__ = (
        "_grantor", "_num_layers", "_readiness", "cell", "checks", "id", "members", "openings",
        "tables",
    )  # fmt: skip

    def __init__(
        self,
        lease_id: LeaseId,
        members: Sequence[SequenceLease],
        tables: object,
        grantor: StepGrantor,
        num_layers: int,
        openings: Openings,
        observer: GateObserver | None = None,
        step: StepId = NO_STEP,
    ) -> None:
        """Borrows the members until `close`; called by pools only."""
        self.id = lease_id
        self.openings = openings
        self.members = tuple(members)
        self.tables = tables
        self.cell = EpochCell()
        self._grantor = grantor
        self._num_layers = num_layers
        pending = ((member.id, transfer) for member in members for transfer in member.pending)
        self.checks = tuple(check for member in members for check in member.checks)
        if self.checks:
            self._readiness: Readiness = CheckedReadiness(
                num_layers, pending, self.checks, observer, step
            )
            for member in members:
                member.checks = ()
        else:
            self._readiness = Readiness(num_layers, pending, observer, step)

    @property
    def was_ready(self) -> bool:
        """Whether nothing was still filling its members' pages when the step was leased."""
        return not self._readiness.pending

    @property
    def pending(self) -> Iterable[PendingTransfer]:
        """The transfers that were filling its members' pages when the step was leased."""
        return self._readiness.pending

    @property
    def ready_through_layer(self) -> int:
        """Layers below this number need no wait."""
        return self._readiness.ready_through

    @property
    def memory(self) -> object:
        """Stands for the memory that its rows lie in: the same object for all steps of a pool."""
        return self._grantor

    def __getitem__(self, layer: Layer[R, W]) -> LayerLease[W]:
        """Return the right to one layer for all members."""

        def build() -> W:
            self.openings.note(layer.id)
            return layer.step_view(self._grantor.step_source(self, layer.id))

        return LayerLease(self.id, layer.id, self._readiness, self.cell, build)

    def open_all(self) -> None:
        """Open every layer at once, for a reader who knows the memory of all; never waits.

        Raises NotReady unless all are ready, LeaseMoved when the step has ended.
        """
        if self.cell.epoch:
            raise LeaseMoved(f"step lease {self.id} has ended")
        if self._readiness.ready_through < self._num_layers:
            raise NotReady(f"layers of step lease {self.id} are still being filled; open each")
        self.openings.note(LayerId(0), self._num_layers)

    async def verify(self) -> None:
        """Wait for everything the step was ordered behind; publish nothing before it (R2).

        Raises TransferFailed when any of it did not end DONE: the step must be discarded.
        """
        await self._readiness.verify()

    def close(self) -> None:
        """End the step's right; its handles are stale from now on."""
        self.cell.end()
