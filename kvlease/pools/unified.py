"""The pool that composes everything one engine caches: both tiers, rings, tails, and the index.

Built from the schema alone. It grants leases and takes them back, seals, keeps tails, evicts, and
keeps the ledger; it starts no work and never waits. Every page transition and its log event happen
in the same call (R14).
"""

from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import final

from kvlease.errors import LeaseMoved, LedgerImbalance, UsageError
from kvlease.pools import accounts
from kvlease.pools.audit import Audit
from kvlease.pools.controls import CacheControls
from kvlease.pools.copies import index_tensor, keep_tails
from kvlease.pools.held import Held, PlannedTransfer
from kvlease.pools.memory import Memory, PoolSizes
from kvlease.pools.page_book import Blocker, Ledger
from kvlease.pools.prefix_index import PrefixIndex
from kvlease.pools.prefix_node import Tail
from kvlease.pools.prefix_results import Cursor, Match
from kvlease.pools.readers import Readers
from kvlease.pools.step_views import SharedSource, StepSource, StepTables
from kvlease.pools.transfers import Transfers
from kvlease.protocols.config import Device, Eviction
from kvlease.protocols.event_base import EventSink
from kvlease.protocols.event_pages import (
    LeaseClose,
    LeaseMove,
    LeaseOpen,
    PageReserve,
    PageSeal,
)
from kvlease.protocols.ownership import Lease, OnClose, SequenceLease, Shared, StepLease
from kvlease.protocols.readiness import GateObserver, Openings
from kvlease.protocols.schema import Schema
from kvlease.protocols.views import EpochCell
from kvlease.units import NO_STEP, LayerId, LeaseId, StepId


@final
class UnifiedPool:
    """All cached state of one engine; everyone else holds leases."""

    def __init__(
        self,
        schema: Schema,
        sizes: PoolSizes,
        sink: EventSink,
        *,
        eviction: Eviction = "lru",
        poison: bool = False,
        observer: GateObserver | None = None,
        audit_rate: float = 0.0,
        device: Device = "cpu",
    ) -> None:
        """Allocate all memory at once; nothing is allocated later. Raises ConfigError."""
        self.schema = schema
        self.memory = Memory(schema, sizes, sink, poison=poison, where=device)
        self.index = PrefixIndex(schema.page_tokens * 4, schema.needs_tail, eviction)
        self.transfers = Transfers(self.memory, self.index, sink, self._lease_id)
        self.audit: Audit | None = None
        if audit_rate:
            stores = self.memory.spans, self.memory.rings, self.memory.tails
            self.audit = Audit(schema, *stores, audit_rate)
            self.memory.sums = self.audit.book
        self.spares_last_copies = False
        self.unstored_pages = 0
        self._sink = sink
        self._observer = observer
        self._last_lease = 0
        self._held: dict[Held, None] = {}
        self.controls = CacheControls(self.memory, self.index, self.transfers, sink)
        self.readers = Readers(self.memory, self.index, sink, observer, self._lease_id)

    def _lease_id(self) -> LeaseId:
        self._last_lease += 1
        return LeaseId(self._last_lease)

    # -- finding and holding pages -------------------------------------------------------------

    def match(self, root: bytes, tokens: bytes, limit_pages: int) -> Match:
        """Find and pin the usable cached prefix; end it with `open` or `drop`."""
        return self.index.match(root, tokens, limit_pages)

    def drop(self, match: Match) -> None:
        """Unpin a match that will not be used; it counts as no hit."""
        self.memory.take_back(self.index.abandon(match.cursor))

    def room(self, num_pages: int) -> bool:
        """Make pages available on the device by evicting, leaf first; say whether it worked.

        With write-back last copies are spared while they can be stored first: ``unstored_pages``
        then says how many pages that would have to free.
        """
        device = self.memory.device
        device.reclaim()
        short = num_pages - device.available
        if short <= 0:
            return True
        if not self.could_have(num_pages):
            return False  # evicting would empty the cache and still not be enough
        released = self.index.evict_device(short, not self.spares_last_copies)
        self.memory.evict(released, "device")
        short = num_pages - device.available
        if self.spares_last_copies:
            self.unstored_pages = max(self.unstored_pages, short)
        return short <= 0

    def open(self, match: Match, num_new_pages: int, request: int) -> Held | None:
        """Make a match a running sequence, with pages for its load and ``num_new_pages`` more.

        Takes the match's pins; ``held.load`` is the transfer to start, if one is needed. Returns
        None, taking nothing, when pages or slots are short now.
        """
        memory = self.memory
        if match.tail is not None:
            self.index.pin_tail(match.tail)  # making room must not evict it
        memory.slots.reclaim()
        wanted = match.host_pages + num_new_pages
        enough = memory.slots.available > 0 and self.room(wanted)
        held = self._open(match, wanted, request) if enough else None
        if match.tail is not None:
            memory.take_back(self.index.unpin_tail(match.tail))
        return held

    def _open(self, match: Match, num_pages: int, request: int) -> Held:
        memory = self.memory
        reservation = memory.device.reserve(num_pages)
        slot = memory.slots.acquire(1)[0]
        if memory.poison:
            memory.rings.poison_slot(slot)
        lease = SequenceLease(self._lease_id(), array("i", match.pages), match.num_pages, slot)
        lease.commit(match.num_pages * self.schema.page_tokens)
        arrivals = [a for a in match.arrivals if isinstance(a, PlannedTransfer)]
        held = Held(lease, match.cursor, reservation, array("i"), arrivals)
        self._held[held] = None
        held.load = self.transfers.plan_load(held, match, request)
        if held.load is not None:
            held.arrivals.append(held.load)
        if self._sink.audit:
            runs = memory.device.runs(lease.pages)
            self._sink.emit(LeaseOpen(lease=lease.id, mode="shared", pages=runs, request=request))
        return held

    def grow(self, held: Held, num_pages: int, request: int) -> bool:
        """Add pages to a sequence's table, from its reservation and then from the pool.

        Returns False, changing nothing, when the pool has too few pages now.
        """
        if num_pages <= 0:
            return True
        device = self.memory.device
        promised = min(num_pages, held.reservation.remaining)
        if num_pages > promised and not self.room(num_pages - promised):
            return False
        pages = device.take(held.reservation, promised)
        pages.extend(device.acquire(num_pages - promised))
        held.owned.extend(pages)
        held.lease.pages.extend(pages)
        if self._sink.audit:
            runs = device.runs(pages)
            self._sink.emit(PageReserve(pages=runs, lease=held.lease.id, request=request))
        return True

    def close(self, held: Held) -> None:
        """End a running sequence: what only it owned is released, the rest stays cached.

        Call it only when no step uses the lease any more (R6). Rings that a late load may still
        write stay in quarantine until that load has settled.
        """
        if held not in self._held:
            raise UsageError(f"lease {held.lease.id} was closed already; a sequence ends once")
        del self._held[held]
        held.lease.cell.end()
        if self._sink.audit:
            self._sink.emit(LeaseClose(lease=held.lease.id))
        self.memory.take_back(self.index.release(held.cursor))
        self.memory.device.forfeit(held.reservation)
        self.memory.device.release(held.owned)
        held.owned = array("i")
        writers = () if held.load is None else (held.load,)
        self.memory.slots.release(array("i", [held.lease.slot]), writers)

    def lease_prefix(
        self,
        root: bytes,
        tokens: bytes,
        on_close: OnClose | None = None,
    ) -> Lease[Shared]:
        """Lease the cached pages of a prefix that are on the device or on their way there.

        For readers beside the scheduler: nothing is loaded for them, and a layer still being filled
        makes `LayerLease.resolve` wait. Returns the lease, which pins its pages until it is closed;
        it may hold no page at all. It ends where a request could resume, at a kept tail.
        ``on_close`` hears of the end, with the last uses, once the lease has been given back.
        """
        return self.readers.lease(self, root, tokens, on_close)

    def _openings(self) -> Openings:
        return Openings(lambda: self._sink.seq)

    def lease_moved(self, lease: LeaseId, *, freezes: bool) -> None:
        """Write that a lease changed hands."""
        if self._sink.audit:
            self._sink.emit(LeaseMove(lease=lease, freezes=freezes))

    def view_source(self, pages: Sequence[int], layer: LayerId, cell: EpochCell) -> SharedSource:
        """Return where a layer's rows of sealed pages can be named."""
        return SharedSource(self.memory.spans, pages, layer, cell)

    def reclaim(self) -> None:
        """Free what has left quarantine, and unpin what readers are done with (R6)."""
        self.readers.see_off()
        self.memory.reclaim()

    def lost(self, planned: PlannedTransfer, reason: str, steps: Sequence[Blocker]) -> None:
        """End a transfer that brought nothing; as `Transfers.lost`.

        Its pages are in the tables of sequences, and layers of it that had arrived may be open in
        leases beside the scheduler: they stay in quarantine until all of these are done too (R6).
        """
        held = [one for one in self._held if planned in one.arrivals]
        readers = self.readers.of(planned)
        self.transfers.lost(planned, reason, (*steps, *held, *readers))

    # -- sealing and tails ---------------------------------------------------------------------

    def seal(self, held: Held, tokens: bytes, num_pages: int, request: int) -> None:
        """Make the table's pages up to ``num_pages`` immutable and show them in the index (R4).

        ``tokens`` are all tokens up to there, or those of the pages not sealed before alone. Pages
        whose equal is there already stay with this sequence alone.
        """
        first = held.lease.sealed
        pages = held.lease.pages[first:num_pages]
        if not pages:
            return
        extended = self.index.extend(held.cursor, tokens, pages)
        kept = set(extended.not_taken)
        taken = array("i", (page for page in pages if page not in kept))
        self.memory.device.seal(taken)
        gone = set(taken)
        held.owned = array("i", (page for page in held.owned if page not in gone))
        held.lease.sealed = num_pages
        if self.audit is not None and held.trail is not None:
            for number, page in enumerate(pages, first):
                self.audit.sealed(held.trail, number, page, taken=page in gone)
        if self._sink.audit:
            numbers = [number for number, page in enumerate(pages, first) if page in gone]
            self._say_sealed(held.lease, numbers, request)

    def _say_sealed(self, lease: SequenceLease, numbers: list[int], request: int) -> None:
        """Write which pages of a table were sealed, a line for each stretch of neighbours."""
        for _, stretch in groupby(enumerate(numbers), lambda entry: entry[1] - entry[0]):
            places = [number for _, number in stretch]
            runs = self.memory.device.runs(array("i", (lease.pages[place] for place in places)))
            start = places[0] * self.schema.page_tokens
            self._sink.emit(PageSeal(pages=runs, lease=lease.id, request=request, start=start))

    def tail_slot(self) -> int | None:
        """Take a tail slot on the device, evicting the oldest idle tail if needed; None if none."""
        slots = self.memory.device_tail_slots
        slots.reclaim()
        if slots.available == 0:
            self.memory.evict(self.index.evict_tails(1, "device"), "device")
        return slots.acquire(1)[0] if slots.available else None

    def free_tail_slot(self, slot: int) -> None:
        """Give back a slot that was never shown in the index."""
        self.memory.device_tail_slots.release(array("i", [slot]))

    def put_tail(self, held: Held, boundary: int, slot: int, *, rolling: bool) -> Tail | None:
        """Show a kept tail at a token boundary on the sequence's sealed path. Takes the slot.

        A rolling tail replaces the sequence's previous rolling one. Returns None, giving the slot
        back, when the boundary is not on a path that new requests can reach.
        """
        slots = self.memory.device_tail_slots
        page = boundary // self.schema.page_tokens
        if not held.cursor.is_live or held.cursor.num_pages < page:
            self.free_tail_slot(slot)
            return None
        slots.seal(array("i", [slot]))
        kept = self.index.put_tail(held.cursor, page, slot)
        if kept.unused is not None:
            slots.release(array("i", [kept.unused]))
        if self.audit is not None and held.trail is not None:
            self.audit.tail_shown(held.trail, boundary, slot, kept.unused)
        old = held.rolling_tail
        if old is not None and old is not kept.tail and old.node is not None and not old.is_busy:
            self.memory.take_back(self.index.drop_tail(old))
        held.rolling_tail = kept.tail if rolling else None
        return kept.tail

    def keep_tails(self, keeps: Sequence[tuple[int, int, int]]) -> None:
        """Copy states at boundaries into tail slots: (sequence slot, tail slot, boundary) each.

        Runs on the compute stream, right after the step that reached the boundaries.
        """
        memory = self.memory
        slots, tail_slots, boundaries = (
            index_tensor(column) for column in zip(*keeps, strict=True)
        )
        if memory.carrier is not None:
            memory.carrier.keep(slots, tail_slots, boundaries)
            return
        stores = (memory.rings, memory.tails)
        keep_tails(self.schema, stores, slots, tail_slots, boundaries)

    # -- steps ---------------------------------------------------------------------------------

    def lease_step(self, members: Sequence[SequenceLease], step: StepId = NO_STEP) -> StepLease:
        """Join sequences for one step; the step's holder closes it after its last use.

        Raises LeaseMoved when one of them has ended: its pages may be somebody else's (R8).
        """
        for member in members:
            if member.cell.epoch:
                raise LeaseMoved(f"lease {member.id} has ended; a step cannot be made of it")
        tables = StepTables(members)
        return StepLease(
            self._lease_id(),
            members,
            tables,
            self,
            self.schema.num_layers,
            self._openings(),
            self._observer,
            step,
        )

    def step_source(self, lease: StepLease, layer: LayerId) -> StepSource:
        """Return where a layer's rows can be named for a step's members."""
        tables = lease.tables
        assert isinstance(tables, StepTables), "the pool made the lease"
        return StepSource(self.memory.spans, self.memory.rings, tables, layer, lease.cell)

    def could_have(self, num_pages: int) -> bool:
        """Whether so many device pages are free or evictable now; a quick bound, evicts nothing."""
        counts = self.index.statistics()
        evictable = counts.device_pages - counts.device_pages_pinned
        return self.memory.device.available + evictable >= num_pages

    # -- accounts ------------------------------------------------------------------------------

    def flush(self) -> None:
        """Forget everything cached; what is pinned or in flight follows when its holders end."""
        self.controls.unpin_all("flushed")
        self.memory.take_back(self.index.clear())

    def condemn(self, cursor: Cursor, number: int) -> None:
        """Drop a page of a cursor's path and all that follows it from both tiers; as `flush`."""
        self.memory.take_back(self.index.condemn(cursor, number))

    def say_ledger(self) -> None:
        """Write both tiers' own counts into the log, to be held against it (R11)."""
        accounts.say(self.memory, self.index, self._sink, len(self.controls.pins))

    def ledgers(self) -> dict[str, Ledger]:
        """Return the ledger of every book, by its name."""
        return {book.name: book.ledger() for book in self.memory.books}

    def check(self, held: Sequence[Held], tail_slots: Sequence[int]) -> None:
        """Recount every book against its holders; raises LedgerImbalance on a mismatch (R11).

        ``held`` are all running sequences, ``tail_slots`` those taken for steps under way.
        """
        accounts.check(self.memory, self.index, held, tail_slots)
        if not (held or self.readers or self.controls.pins or self.transfers.unsettled):
            counts = self.index.statistics()
            pinned = counts.device_pages_pinned + counts.host_pages_pinned
            if pinned:
                raise LedgerImbalance(f"{pinned} pages are pinned although nobody holds any")
