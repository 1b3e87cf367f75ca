"""Leases: the typed right to read or write pages, and the gate in front of every layer.

A lease pins pages and opens nothing. `LayerLease.resolve` is the only way to a view, and it waits
until every transfer that fills that layer has resolved; handles in a view carry the lease's epoch
cell, so they die with the lease. Pools make leases; this module knows no memory and no loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar, final

from kvlease.errors import LeaseMoved, NotReady
from kvlease.protocols.ports import Completion, CompletionState, Stream
from kvlease.protocols.schema import Layer, ViewSource
from kvlease.protocols.views import EpochCell
from kvlease.units import LayerId, LeaseId

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


class PendingTransfer(Protocol):
    """A transfer as its readers see it: one completion per layer."""

    def layer_completion(self, layer: LayerId) -> Completion:
        """Return the completion of one layer, all its components together."""
        ...

    @property
    def name(self) -> str:
        """What to call the transfer in an error."""
        ...


class GateObserver(Protocol):
    """Hears of the waits that readers really did, for the log and the exposed-stall figure."""

    def waited(self, lease: LeaseId, layer: LayerId, transfer: str) -> None:
        """A reader of ``lease`` was made to wait for one layer of a transfer."""
        ...


@final
class Readiness:
    """Which layers of a set of pages can be read, given the transfers still filling them.

    One word decides the common case: layers below ``ready_through`` need no wait. What a stream was
    made to wait for is kept in ``bound`` until it is known to be done (R2).
    """

    __slots__ = ("_observer", "_pending", "bound", "ready_through")

    def __init__(
        self,
        num_layers: int,
        pending: Iterable[PendingTransfer] = (),
        observer: GateObserver | None = None,
    ) -> None:
        """Start with nothing ready if anything is pending, and all ready otherwise."""
        self._pending = list(dict.fromkeys(pending))
        self._observer = observer
        self.bound: list[Completion] = []
        self.ready_through = 0 if self._pending else num_layers

    def check(self, layer: LayerId) -> None:
        """Raise NotReady unless every completion of the layer is DONE."""
        for transfer in self._pending:
            state = transfer.layer_completion(layer).state
            if state is not CompletionState.DONE:
                raise NotReady(
                    f"layer {layer} is still being filled by {transfer.name}"
                    f" ({state.value}); await resolve() instead"
                )

    async def settle(self, lease: LeaseId, layer: LayerId, stream: Stream) -> None:
        """Wait until the layer's work is recorded, and order the stream behind it (R2).

        Raises TransferFailed when a transfer failed, came short, was revoked or was late.
        """
        all_done = True
        for transfer in self._pending:
            completion = transfer.layer_completion(layer)
            if completion.state is CompletionState.DONE:
                continue
            if self._observer is not None:
                self._observer.waited(lease, layer, transfer.name)
            await completion.wait_recorded()
            stream.wait(completion)
            self.bound.append(completion)
            all_done = False
        # Only what is DONE is ready for every stream; what is RECORDED is so for this one alone.
        if all_done and layer == self.ready_through:
            self.ready_through = layer + 1

    async def verify(self) -> None:
        """Wait until all that streams were ordered behind is DONE; raise TransferFailed if not."""
        for completion in self.bound:
            await completion.wait_done()


class Grantor(Protocol):
    """The pool behind a lease: it builds views and takes pages back."""

    def view_source(self, pages: Sequence[int], layer: LayerId, cell: EpochCell) -> ViewSource:
        """Return where a layer's rows can be named for these pages."""
        ...


@final
class LayerLease(Generic[V]):
    """The right to one layer; holds no rows. ``resolve`` turns it into that layer's view."""

    __slots__ = ("_build", "_cell", "_layer", "_lease", "_readiness", "_view")

    def __init__(
        self,
        lease: LeaseId,
        layer: LayerId,
        readiness: Readiness,
        cell: EpochCell,
        build: Callable[[], V],
    ) -> None:
        """Made by indexing a lease with a layer of its schema; ``cell`` is a living lease's."""
        self._lease = lease
        self._layer = layer
        self._readiness = readiness
        self._cell = cell
        self._build = build
        self._view: V | None = None

    async def resolve(self, stream: Stream) -> V:
        """Return the layer's view once its bytes are in the stream's order.

        Checkpoints: only if it waits. Raises TransferFailed when the bytes will not come,
        LeaseMoved when the lease has ended.
        """
        if self._layer >= self._readiness.ready_through:
            await self._readiness.settle(self._lease, self._layer, stream)
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


@final
class Lease(Generic[S]):
    """Pages held: shared (sealed, readable) or exclusive (being written); opens nothing.

    Ends by leaving its ``with`` block, by `close`, or by moving it; using it afterwards raises
    LeaseMoved. ``on_close`` gives the pages back to the pool that granted them, exactly once.
    """

    __slots__ = ("_cell", "_grantor", "_on_close", "_pages", "_readiness", "id")

    def __init__(
        self,
        lease_id: LeaseId,
        pages: Sequence[int],
        grantor: Grantor,
        readiness: Readiness,
        on_close: Callable[[Completion | None], None],
    ) -> None:
        """Called by pools only."""
        self.id = lease_id
        self._pages: Sequence[int] | None = pages
        self._grantor = grantor
        self._readiness = readiness
        self._on_close = on_close
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
            return layer.read_view(self._grantor.view_source(pages, layer.id, self._cell))

        return LayerLease(self.id, layer.id, self._readiness, self._cell, build)

    def move(self) -> Lease[S]:
        """Return a new handle with the same right; this one and its views are dead."""
        pages = self._alive()
        self._end()
        return Lease(self.id, pages, self._grantor, self._readiness, self._on_close)

    def freeze(self: Lease[Exclusive]) -> Lease[Shared]:
        """Give up writing: return the same pages as a shared lease; this handle is dead."""
        pages = self._alive()
        self._end()
        return Lease(self.id, pages, self._grantor, self._readiness, self._on_close)

    def close(self, last_use: Completion | None = None) -> None:
        """End the lease; the pages are not reused before ``last_use`` is final (R6)."""
        self._alive()
        self._end()
        self._on_close(last_use)

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
    """One sequence's right: its shared prefix and its exclusive open page, as one (DESIGN 5).

    ``pages`` is the page table in order. Pages below ``sealed`` are shared and never written; the
    rest belongs to this sequence alone, as do the rings of its state ``slot``. ``pending`` are the
    transfers still filling any of it. ``committed`` counts the tokens whose rows are final.
    """

    __slots__ = ("cell", "committed", "id", "pages", "pending", "sealed", "slot")

    def __init__(self, lease_id: LeaseId, pages: array[int], sealed: int, slot: int) -> None:
        """Takes the page table; called by pools only."""
        self.id = lease_id
        self.pages = pages
        self.sealed = sealed
        self.slot = slot
        self.pending: list[PendingTransfer] = []
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
    grantor's own batch record, opaque here. ``opened`` lists runs of layers (first, count) with the
    log position that had been reached when they were opened.
    """

    __slots__ = (
        "_grantor",
        "_position",
        "_readiness",
        "_was_ready",
        "cell",
        "id",
        "members",
        "opened",
        "tables",
    )

    def __init__(
        self,
        lease_id: LeaseId,
        members: Sequence[SequenceLease],
        tables: object,
        grantor: StepGrantor,
        num_layers: int,
        position: Callable[[], int],
        observer: GateObserver | None = None,
    ) -> None:
        """Borrows the members until `close`; called by pools only.

        ``position`` reads the log's present sequence number.
        """
        self.id = lease_id
        self.opened: list[tuple[int, int, int]] = []
        self._position = position
        self.members = tuple(members)
        self.tables = tables
        self.cell = EpochCell()
        self._grantor = grantor
        pending = (transfer for member in members for transfer in member.pending)
        self._readiness = Readiness(num_layers, pending, observer)
        self._was_ready = self._readiness.ready_through >= num_layers

    @property
    def was_ready(self) -> bool:
        """Whether nothing was still filling its members' pages when the step was leased."""
        return self._was_ready

    @property
    def ready_through_layer(self) -> int:
        """Layers below this number need no wait."""
        return self._readiness.ready_through

    def __getitem__(self, layer: Layer[R, W]) -> LayerLease[W]:
        """Return the right to one layer for all members."""

        def build() -> W:
            self._note(layer.id)
            return layer.step_view(self._grantor.step_source(self, layer.id))

        return LayerLease(self.id, layer.id, self._readiness, self.cell, build)

    def _note(self, layer: LayerId) -> None:
        """Remember the log position at which the layer was opened, folding equal neighbours."""
        position = self._position()
        if self.opened:
            first, count, after = self.opened[-1]
            if after == position and first + count == layer:
                self.opened[-1] = (first, count + 1, after)
                return
        self.opened.append((layer, 1, position))

    async def verify(self) -> None:
        """Wait for everything the step was ordered behind; publish nothing before it (R2).

        Raises TransferFailed when any of it did not end DONE: the step must be discarded.
        """
        await self._readiness.verify()

    def close(self) -> None:
        """End the step's right; its handles are stale from now on."""
        self.cell.end()
