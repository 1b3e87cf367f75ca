"""Leases beside the scheduler: who reads cached pages of his own accord, and until when.

Knows the index and the books; what a lease opens into is the pool's.
"""

from array import array
from collections.abc import Callable
from typing import final

from kvlease.pools.held import PlannedTransfer, Reader
from kvlease.pools.memory import Memory
from kvlease.pools.prefix_index import PrefixIndex
from kvlease.protocols.event_base import EventSink, Opening
from kvlease.protocols.event_pages import LeaseClose, LeaseOpen
from kvlease.protocols.ownership import Grantor, Lease, OnClose, Shared
from kvlease.protocols.ports import Completion
from kvlease.protocols.readiness import GateObserver, Openings, PendingTransfer, Readiness
from kvlease.units import LeaseId


@final
class Readers:
    """Every lease beside the scheduler that is open, or whose last use is not over (R6)."""

    def __init__(
        self,
        memory: Memory,
        index: PrefixIndex,
        sink: EventSink,
        observer: GateObserver | None,
        next_lease: Callable[[], LeaseId],
    ) -> None:
        """Borrows memory and index for the life of the pool."""
        self._memory = memory
        self._index = index
        self._sink = sink
        self._observer = observer
        self._next_lease = next_lease
        self._readers: list[Reader] = []

    def __bool__(self) -> bool:
        return bool(self._readers)

    def lease(
        self, pool: Grantor, root: bytes, tokens: bytes, on_close: OnClose | None
    ) -> Lease[Shared]:
        """Do what `UnifiedPool.lease_prefix` promises, on behalf of ``pool``."""
        schema = self._memory.schema
        match = self._index.match(root, tokens, len(tokens) // (4 * schema.page_tokens))
        pages = array("i")
        for page in match.pages:
            if page < 0:
                break
            pages.append(page)
        lease_id = self._next_lease()
        pending: list[tuple[LeaseId, PendingTransfer]] = []
        for arrival in match.arrivals:
            assert isinstance(arrival, PlannedTransfer), "only the planner attaches arrivals"
            assert arrival.carrier is not None, (
                "a transfer is handed over in the call that plans it"
            )
            pending.append((lease_id, arrival.carrier))
        reader, openings = Reader(lease_id, match), Openings(lambda: self._sink.seq)
        self._readers.append(reader)

        def give_back(last_uses: tuple[Completion, ...]) -> None:
            reader.is_open, reader.last_uses = False, last_uses
            if self._sink.audit:
                opens = [Opening(lease_id, *run) for run in openings.runs]
                at_once = bool(opens) and not last_uses
                self._sink.emit(LeaseClose(lease=lease_id, opens=opens, at_once=at_once))
            self.see_off()
            if on_close is not None:
                on_close(last_uses)

        if self._sink.audit:
            runs = self._memory.device.runs(pages)
            self._sink.emit(LeaseOpen(lease=lease_id, mode="shared", pages=runs))
        readiness = Readiness(schema.num_layers, pending, self._observer)
        return Lease(lease_id, pages, pool, readiness, openings, give_back)

    def see_off(self) -> None:
        """Unpin what readers are done with."""
        over = [reader for reader in self._readers if reader.is_settled]
        if over:
            self._readers = [reader for reader in self._readers if not reader.is_settled]
            for reader in over:
                self._memory.take_back(self._index.abandon(reader.match.cursor))

    def of(self, planned: PlannedTransfer) -> list[Reader]:
        """List the readers that may have layers of a transfer open."""
        return [reader for reader in self._readers if planned in reader.match.arrivals]
