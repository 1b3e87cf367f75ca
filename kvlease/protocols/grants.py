"""Rights that leave the process: bytes lent to storage and transports, pages lent to a peer.

A `ByteLease` lends leased pages as plain memory for as long as it is open; a `WriteGrant` is an
exclusive lease whose holder is elsewhere, and the `GrantBook` keeps its pages out of reuse until
that writer is known to have stopped (R6, R7). Pure book-keeping: no memory is owned here.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import final

from attrs import frozen

from kvlease.errors import LeaseMoved, StaleEpoch, UsageError
from kvlease.units import Epoch, LeaseId, PageId


@final
class ByteLease:
    """Leased pages as memory, for storage backends and transports, never as tensors.

    Ownership: borrows ``regions`` (one memoryview per component and page run) until `close`, which
    releases the views, so that a kept reference raises ValueError instead of reading reused pages.
    """

    __slots__ = ("_on_close", "_regions", "id")

    def __init__(
        self, lease_id: LeaseId, regions: Sequence[memoryview], on_close: Callable[[], None]
    ) -> None:
        """Called by pools only."""
        self.id = lease_id
        self._regions: tuple[memoryview, ...] | None = tuple(regions)
        self._on_close = on_close

    @property
    def regions(self) -> tuple[memoryview, ...]:
        """The lent memory; raises LeaseMoved after close."""
        if self._regions is None:
            raise LeaseMoved(f"byte lease {self.id} is closed; lease the pages again")
        return self._regions

    @property
    def nbytes(self) -> int:
        """Bytes lent in all."""
        return sum(region.nbytes for region in self.regions)

    def close(self) -> None:
        """Take the memory back."""
        for region in self.regions:
            region.release()
        self._regions = None
        self._on_close()

    def __enter__(self) -> "ByteLease":
        """Borrow for a ``with`` block."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close, unless already closed."""
        if self._regions is not None:
            self.close()


class GrantState(Enum):
    """Life of a write grant; only STOPPED frees the pages."""

    OPEN = "open"
    REVOKED = "revoked"
    STOPPED = "stopped"


@frozen
class WriteGrant:
    """The right of one incarnation of a peer to write some pages until it expires.

    Durations travel, clocks do not: ``expires_at_s`` is on the grantor's clock.
    """

    id: LeaseId
    pages: tuple[PageId, ...]
    epochs: tuple[Epoch, ...]
    peer: str
    incarnation: int
    region: str
    expires_at_s: float


@final
class GrantBook:
    """All write grants of one pool; decides when a remote writer can no longer write."""

    def __init__(self, on_stopped: Callable[[WriteGrant], None]) -> None:
        """``on_stopped`` takes the pages of a grant back, once, when its writer has stopped."""
        self._on_stopped = on_stopped
        self._grants: dict[LeaseId, tuple[WriteGrant, GrantState]] = {}

    def issue(self, grant: WriteGrant) -> None:
        """Enter a new grant; its pages stay out of reuse until `stopped`."""
        if grant.id in self._grants:
            raise UsageError(f"write grant {grant.id} is issued already; use a new id")
        self._grants[grant.id] = (grant, GrantState.OPEN)

    def accept(self, grant_id: LeaseId, incarnation: int, epochs: Sequence[Epoch]) -> WriteGrant:
        """Return the grant if a write under it is still allowed; raise StaleEpoch if not (R8)."""
        entry = self._grants.get(grant_id)
        if entry is None or entry[1] is not GrantState.OPEN:
            raise StaleEpoch(f"write grant {grant_id} is not open; the write is refused")
        grant = entry[0]
        if grant.incarnation != incarnation or grant.epochs != tuple(epochs):
            raise StaleEpoch(
                f"write grant {grant_id} is for incarnation {grant.incarnation} of {grant.peer};"
                " the write comes from an older one and is refused"
            )
        return grant

    def expire(self, now_s: float) -> list[WriteGrant]:
        """Revoke all grants past their expiry and return them; their pages stay held (R6)."""
        due = [
            g for g, s in self._grants.values() if s is GrantState.OPEN and g.expires_at_s <= now_s
        ]
        for grant in due:
            self._grants[grant.id] = (grant, GrantState.REVOKED)
        return due

    def stopped(self, grant_id: LeaseId) -> None:
        """The writer acknowledged its end, or its connection's epoch ended: free the pages."""
        entry = self._grants.pop(grant_id, None)
        if entry is None:
            raise StaleEpoch(f"write grant {grant_id} has ended already")
        self._on_stopped(entry[0])

    def connection_ended(self, peer: str, incarnation: int) -> int:
        """End all grants of one incarnation of a peer; return how many there were."""
        ids = [
            g.id for g, _ in self._grants.values() if (g.peer, g.incarnation) == (peer, incarnation)
        ]
        for grant_id in ids:
            self.stopped(grant_id)
        return len(ids)

    @property
    def num_open(self) -> int:
        """Grants whose pages are still held for a remote writer."""
        return len(self._grants)
