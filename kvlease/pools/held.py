"""What one running sequence holds, and what one planned transfer holds.

Plain records that the unified pool fills and empties; they decide nothing.
"""

from array import array
from typing import Literal

from attrs import define, field

from kvlease.pools.audit import Trail
from kvlease.pools.page_book import Reservation
from kvlease.pools.prefix_node import Tail
from kvlease.pools.prefix_results import Cursor, Match
from kvlease.protocols.ownership import SequenceLease
from kvlease.protocols.ports import Completion, CopyOrder
from kvlease.protocols.readiness import PendingTransfer
from kvlease.units import LeaseId, TransferId


@define(eq=False)
class PlannedTransfer:
    """A load or a store with both ends held from planning until it has settled (R7).

    It is also the index's arrival token, and the blocker of memory that a late copy may still
    write. ``cursors`` pin the paths at the source until it has settled, ``tails`` are pinned resume
    states, and ``source`` and ``destination`` name the pages at both ends in the same
    order.
    """

    id: TransferId
    kind: Literal["load", "store"]
    source_lease: LeaseId
    destination_lease: LeaseId
    cursors: tuple[Cursor, ...] = ()
    copies: tuple[CopyOrder, ...] = field(default=(), repr=False)
    source: "array[int]" = field(factory=lambda: array("i"))
    destination: "array[int]" = field(factory=lambda: array("i"))
    tails: tuple[Tail, ...] = ()
    request: int = 0
    reader: LeaseId | None = None
    """The sequence lease whose rings the tail fills, if it is a load with one."""
    carrier: PendingTransfer | None = field(default=None, repr=False)
    """What carries it out and what readers wait for; set when it is handed to the loader."""
    is_settled: bool = field(default=False)
    is_lost: bool = field(default=False)
    is_sealed: bool = field(default=False)
    """Whether the log has been told that everything arrived."""

    @property
    def nbytes(self) -> int:
        """Bytes planned, all layers and components."""
        return sum(order.nbytes for order in self.copies)

    @property
    def name(self) -> str:
        """What to call it in errors and logs."""
        return f"{self.kind} {self.id}"


@define(eq=False)
class Reader:
    """A shared lease beside the scheduler; blocks the reuse of its pages until it is done (R6)."""

    id: LeaseId
    match: Match
    is_open: bool = True
    last_uses: tuple[Completion, ...] = ()

    @property
    def kind(self) -> str:
        """What it is as a blocker of pages."""
        return "lease"

    @property
    def is_settled(self) -> bool:
        """Whether it was closed and the work that it had launched has ended."""
        return not self.is_open and all(use.state.is_final for use in self.last_uses)


@define(eq=False)
class Held:
    """A running sequence's pages: the lease, its place in the index, and what only it owns.

    Blocks the reuse of pages that are taken from under its lease, until that has ended (R6).

    ``owned`` are held pages of its table (open page, pages not yet filled, duplicates of pages that
    another sequence sealed first). ``arrivals`` are the planned transfers still filling its pages
    or its rings; ``load`` is the one planned for this sequence itself, if any.
    """

    lease: SequenceLease
    cursor: Cursor
    reservation: Reservation
    owned: "array[int]"
    arrivals: list[PlannedTransfer]
    load: PlannedTransfer | None = None
    rolling_tail: Tail | None = None
    """The tail kept while decoding at the latest boundary, dropped when the next one is kept."""

    unstored_pages: int = 0
    unstored_tails: list[Tail] = field(factory=list[Tail])
    """Sealed pages and kept tails that no store has been planned for."""

    trail: Trail | None = None
    """Its part in the audit, where pages are audited."""
    is_spoiled: bool = False
    """Whether a page of its table was found changed."""

    @property
    def kind(self) -> str:
        """What it is as a blocker of pages."""
        return "lease"

    @property
    def id(self) -> LeaseId:
        """The lease's number."""
        return self.lease.id

    @property
    def is_settled(self) -> bool:
        """Whether its lease has ended: it is never moved, so that it ends once."""
        return self.lease.cell.epoch > 0

    @property
    def is_lost(self) -> bool:
        """Whether what its pages hold is not to be had, so that it must start over."""
        return self.is_spoiled or any(arrival.is_lost for arrival in self.arrivals)
