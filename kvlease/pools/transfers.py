"""Loads and stores as the pools see them: planned with both ends held, and ended once.

One mechanism in both directions: pin the source, take the destination, tell the index, build the
copy orders; on the end tell the index again; on settling let both ends go (R7). Nothing here moves
a byte or waits.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal, final

from kvlease.errors import InternalError, PagesUnavailable
from kvlease.pools.audit import tail_place
from kvlease.pools.carriage import Resumed
from kvlease.pools.copies import index_tensor
from kvlease.pools.held import Held, PlannedTransfer
from kvlease.pools.memory import Memory
from kvlease.pools.orders import Lifted, Orders, odd_parts
from kvlease.pools.page_book import Blocker
from kvlease.pools.prefix_index import PrefixIndex
from kvlease.pools.prefix_node import CacheTier, Node, Tail
from kvlease.pools.prefix_results import Cursor, Match
from kvlease.protocols.event_base import EventSink
from kvlease.protocols.event_pages import LeaseClose, LeaseOpen, PageReserve, PageSeal
from kvlease.protocols.ports import CopyOrder
from kvlease.units import LeaseId, TransferId


@final
class Transfers:
    """Plans loads and stores over one memory and one index."""

    def __init__(
        self,
        memory: Memory,
        index: PrefixIndex,
        sink: EventSink,
        next_lease: Callable[[], LeaseId],
    ) -> None:
        """Borrows the memory and the index for the life of the pool."""
        self._memory = memory
        self._index = index
        self._orders = Orders(memory)
        self._sink = sink
        self._next_lease = next_lease
        self._last_id = 0
        self._parts = {
            (spans, tails): memory.schema.parts(spans=spans, tails=tails)
            for spans in (False, True)
            for tails in (False, True)
        }
        self.unsettled: dict[PlannedTransfer, None] = {}  # in order: the log names them

    def plan_load(self, held: Held, match: Match, request: int) -> PlannedTransfer | None:
        """Plan what a matched prefix still needs: pages from the host, and the tail at its end.

        Takes device pages for the host-only ones from the sequence's reservation and enters them in
        its table; they are visible in the index as loading from now on. Returns None when there is
        nothing to move.
        """
        if match.host_pages == 0 and match.tail is None:
            return None
        planned = self._blank("load", (held.cursor,), request)
        device, count = self._memory.device, match.host_pages
        self._attach(planned, match, device.take(held.reservation, count, sealed=True))
        held.lease.pages[:] = match.pages
        resumed = None
        if match.tail is not None:
            tier, tail = tail_place(match.tail)
            boundary = match.num_pages * self._memory.schema.page_tokens
            resumed = Resumed(tier, tail, held.lease.slot, boundary)
            planned.tails = (match.tail,)
            planned.reader = held.lease.id
            self._index.pin_tail(match.tail)
        return self._enter(planned, self._load_orders(planned, resumed))

    def _attach(self, planned: PlannedTransfer, match: Match, pages: array[int]) -> None:
        """Name both ends of a load: it fills the pages, which the index shows from now on."""
        memory = self._memory
        for node in match.to_load:
            planned.source.extend(node.host.pages or ())
        planned.destination = pages
        if not pages:
            return
        attached = self._index.attach_device(match, pages, planned)
        assert not attached.unused, "nobody loads between match and plan"
        if memory.sums is not None:
            memory.sums.copied("host", zip(planned.source, pages, strict=True))
        if memory.poison:
            memory.spans.poison_pages(index_tensor(pages))

    def _load_orders(
        self, planned: PlannedTransfer, tail: Resumed | Lifted | None
    ) -> tuple[CopyOrder, ...]:
        return self._orders.load(planned.id, (planned.source, planned.destination), tail)

    def plan_prefetch(self, match: Match) -> PlannedTransfer | None:
        """Plan what a matched prefix needs to be whole on the device, for nobody in particular.

        As `plan_load`, but the kept tail goes to a slot of its own. There has to be room. Returns
        None when everything is there or on its way; raises PagesUnavailable when pages are short.
        """
        memory, tail = self._memory, match.tail
        wants_tail = tail is not None and tail.device.slot is None
        if not (match.host_pages or wants_tail):
            return None
        pages = memory.device.acquire(match.host_pages, sealed=True)
        planned = self._blank("load", (match.cursor,), 0)
        self._attach(planned, match, pages)
        lifted = self._lift_tail(planned, tail) if wants_tail and tail is not None else None
        return self._enter(planned, self._load_orders(planned, lifted))

    def _lift_tail(self, planned: PlannedTransfer, tail: Tail) -> Lifted | None:
        """Take a slot for a kept tail of the host, if the device has one."""
        memory, slots, source = self._memory, self._memory.device_tail_slots, tail.host.slot
        self._index.pin_tail(tail)
        slots.reclaim()
        if not slots.available:
            memory.evict(self._index.evict_tails(1, "device"), "device")
        if not slots.available or source is None:
            memory.take_back(self._index.unpin_tail(tail))
            return None
        target = slots.acquire(1, sealed=True)
        self._index.attach_tail_device(tail, target[0], planned)
        if memory.sums is not None:
            memory.sums.tails_copied("host", [(source, target[0])])
        planned.tails = (tail,)
        return Lifted(source, target[0])

    def plan_copy(self, match: Match) -> PlannedTransfer | None:
        """Plan the copy to the host of what a matched prefix has on the device alone.

        Returns None when there is nothing; raises PagesUnavailable when the host has no room.
        """
        tails = [] if match.tail is None else [match.tail]
        nodes = self._index.plan_store(match.cursor)
        self._host_room(sum(node.num_pages for node in nodes))
        return self._store(self._index.plan_store(match.cursor), (match.cursor,), tails)

    def plan_store(
        self, held: Held, request: int, min_hits: int = 0, tails: Sequence[Tail] = ()
    ) -> PlannedTransfer | None:
        """Plan the copy of a sequence's sealed pages, and of some tails, to the host.

        Edges found by fewer than ``min_hits`` requests are left out. Returns None when nothing is
        left to store; raises PagesUnavailable when the host has no room for it now.
        """
        if not self._memory.sizes.host_pages:
            return None
        nodes = self._unstored(held, min_hits)
        self._host_room(sum(node.num_pages for node in nodes))
        # Making room may have cut or joined edges around these, so they are named anew.
        nodes = self._unstored(held, min_hits)
        return self._store(nodes, (held.cursor,), tails, request)

    def _unstored(self, held: Held, min_hits: int) -> list[Node]:
        """List what of a sequence's path the host lacks and new requests can still reach."""
        nodes = self._index.plan_store(held.cursor, min_hits)
        return [node for node in nodes if node.is_live]

    def plan_write_back(self, num_pages: int) -> PlannedTransfer | None:
        """Plan the copy to the host of pages that would be evicted next and are nowhere else.

        Returns None when there are none. Raises PagesUnavailable when the host has no room.
        """
        self._host_room(num_pages)
        nodes = self._index.evictable_unstored(num_pages)
        tails = [tail for node in nodes for tail in node.tails.values()]
        return self._store(nodes, nodes, tails)

    def _store(
        self,
        nodes: Sequence[Node],
        places: Sequence[Cursor | Node],
        tails: Sequence[Tail],
        request: int = 0,
    ) -> PlannedTransfer | None:
        """Plan the copy of edges without a host copy; the host has room for them already.

        The paths to ``places`` stay pinned until it has settled: a store that came too late is
        forgotten by the index, but its last copy may still read the pages (R6, R7).
        """
        memory = self._memory
        source = array("i", chain.from_iterable(n.device.pages or () for n in nodes))
        wanted = [t for t in tails if t.host.slot is None and t.device.slot is not None]
        if not (source or wanted):
            return None
        planned = self._blank("store", places, request)
        pages = memory.host.acquire(len(source), sealed=True)
        if pages:
            self._index.attach_host(nodes, pages, planned)
            if memory.sums is not None:
                memory.sums.copied("device", zip(source, pages, strict=True))
        kept = self._store_tails(planned, wanted)
        planned.source, planned.destination = source, pages
        return self._enter(planned, self._orders.store(planned.id, (source, pages), kept))

    def _store_tails(
        self, planned: PlannedTransfer, tails: Sequence[Tail]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Take host slots for as many of the tails as there are; each is pinned meanwhile.

        Returns the slots at both ends.
        """
        memory, slots = self._memory, self._memory.host_tail_slots
        slots.reclaim()
        short = len(tails) - slots.available
        if short > 0:
            memory.evict(self._index.evict_tails(short, "host"), "host")
        source: list[int] = []
        chosen: list[Tail] = []
        for tail in tails[: slots.available]:
            if tail.device.slot is not None and tail.node is not None:
                source.append(tail.device.slot)
                chosen.append(tail)
        if not chosen:
            return (), ()
        target = slots.acquire(len(chosen), sealed=True)
        for tail, slot in zip(chosen, target, strict=True):
            self._index.attach_tail_host(tail, slot, planned)
            self._index.pin_tail(tail)
        if memory.sums is not None:
            memory.sums.tails_copied("device", zip(source, target, strict=True))
        planned.tails = tuple(chosen)
        return source, target

    def _host_room(self, num_pages: int) -> None:
        host = self._memory.host
        host.reclaim()
        counts = self._index.statistics()
        evictable = counts.host_pages - counts.host_pages_pinned
        if host.available < num_pages <= host.available + evictable:
            released = self._index.evict_host(num_pages - host.available)
            self._memory.evict(released, "host")
        if num_pages > host.available:
            raise PagesUnavailable(
                f"host pages: {num_pages} wanted for a store, {host.available} available"
            )

    def _blank(
        self, kind: Literal["load", "store"], places: Sequence[Cursor | Node], request: int
    ) -> PlannedTransfer:
        self._last_id += 1
        return PlannedTransfer(
            id=TransferId(self._last_id),
            kind=kind,
            source_lease=self._next_lease(),
            destination_lease=self._next_lease(),
            cursors=tuple(self._index.fork(place) for place in places),
            request=request,
        )

    def _enter(
        self, planned: PlannedTransfer, copies: tuple[CopyOrder, ...]
    ) -> PlannedTransfer | None:
        """Complete the plan; one that came to nothing (no tail slot was free) is let go again."""
        planned.copies = copies
        self.unsettled[planned] = None
        if not copies:
            self.lost(planned, "empty")
            self.settled(planned)
            return None
        self._check_whole(planned)
        if self._sink.audit:
            self._say_held(planned)
        return planned

    def _check_whole(self, planned: PlannedTransfer) -> None:
        """Refuse a plan that leaves out a component of what it moves, or adds one (R5)."""
        whole = self._parts[bool(planned.source), bool(planned.tails)]
        odd = odd_parts(tuple([order.parts for order in planned.copies]), whole)
        if odd:
            raise InternalError(
                f"{planned.name} does not move whole bundles: (layer, component) {list(odd)} are"
                " missing or too many",
                "R5",
            )

    def _say_held(self, planned: PlannedTransfer) -> None:
        """Write that both ends are held from now on (R7)."""
        emit, memory = self._sink.emit, self._memory
        tiers: tuple[CacheTier, CacheTier]
        tiers = ("host", "device") if planned.kind == "load" else ("device", "host")
        sources = memory.book(tiers[0]).runs(planned.source)
        emit(
            LeaseOpen(
                lease=planned.source_lease,
                mode="shared",
                pages=sources,
                tier=tiers[0],
                transfer=planned.id,
            )
        )
        target = planned.destination_lease
        emit(
            LeaseOpen(lease=target, mode="exclusive", pages=[], tier=tiers[1], transfer=planned.id)
        )
        if planned.destination:
            runs = memory.book(tiers[1]).runs(planned.destination)
            emit(PageReserve(pages=runs, lease=target, tier=tiers[1], request=planned.request))

    def done(self, planned: PlannedTransfer) -> None:
        """Everything arrived: its pages are sealed and readable without a wait."""
        self._say_sealed(planned)
        self._memory.take_back(self._index.arrived(planned))

    def _say_sealed(self, planned: PlannedTransfer) -> None:
        """Write, once, that a transfer's destination is sealed."""
        if planned.is_sealed:
            return
        planned.is_sealed = True
        if self._sink.audit and planned.destination:
            tier: CacheTier = "device" if planned.kind == "load" else "host"
            runs = self._memory.book(tier).runs(planned.destination)
            self._sink.emit(
                PageSeal(
                    pages=runs, tier=tier, lease=planned.destination_lease, request=planned.request
                )
            )

    def lost(self, planned: PlannedTransfer, reason: str, holders: Sequence[Blocker] = ()) -> None:
        """It ended without its bytes: nobody may use what it should have filled.

        The pages wait in quarantine until no copy can write them any more, and until the
        ``holders``, which may still read them for results nobody will see, are done (R6). A load
        that failed or came short drops the host copies as well, so that bad pages are not tried
        for ever; one that was late or revoked says nothing about them.
        """
        planned.is_lost = True
        drop_host = planned.kind == "load" and reason not in ("late", "revoked")
        released = self._index.lost(planned, drop_host=drop_host)
        # An earlier load of the same host pages that was late may still be reading them.
        readers = [one for one in self.unsettled if one.kind == "load"] if drop_host else [planned]
        self._memory.take_back(released, (*readers, *holders))

    def settled(self, planned: PlannedTransfer) -> None:
        """No copy of it touches memory any more: both ends are let go.

        The scheduler may hear only later that it was done, or never, if it has gone.
        """
        planned.is_settled = True
        self.unsettled.pop(planned, None)
        carrier = planned.carrier
        if carrier is not None and carrier.is_done:
            self._say_sealed(planned)
        if self._sink.audit and planned.copies:
            self._sink.emit(LeaseClose(lease=planned.source_lease))
            self._sink.emit(LeaseClose(lease=planned.destination_lease))
        for tail in planned.tails:
            self._memory.take_back(self._index.unpin_tail(tail))
        for cursor in planned.cursors:
            self._memory.take_back(self._index.release(cursor))
        self._memory.reclaim()
