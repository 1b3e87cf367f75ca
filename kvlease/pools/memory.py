"""All memory of one engine's cache and the books that say who has what of it.

Made once, from the schema and the sizes; nothing is allocated later. Only the unified pool and its
transfers hold it.
"""

from array import array
from collections.abc import Iterable
from typing import final

import torch
from attrs import frozen

from kvlease.pools.carriage import Carrier
from kvlease.pools.page_book import Blocker, PageBook
from kvlease.pools.prefix_node import CacheTier, Released
from kvlease.pools.storage import RingStore, SpanStore, TailStore
from kvlease.pools.sums import SumBook
from kvlease.protocols.config import Device
from kvlease.protocols.event_base import EventSink
from kvlease.protocols.event_pages import PageEvict
from kvlease.protocols.schema import Schema


@frozen
class PoolSizes:
    """How many pages, kept tails and running sequences there is memory for."""

    device_pages: int
    host_pages: int
    device_tails: int
    host_tails: int
    slots: int


@final
class Memory:
    """Rows of pages on two tiers, kept tails on two tiers, and the rings of running sequences.

    ``poison`` fills memory with NaN bytes on allocation, on release and when a load begins, so that
    a read before arrival or after reuse shows itself; meant for tests.
    """

    def __init__(
        self,
        schema: Schema,
        sizes: PoolSizes,
        sink: EventSink,
        *,
        poison: bool,
        where: Device = "cpu",
    ) -> None:
        """Allocate everything; raises ConfigError when there is not enough memory.

        ``where`` the device's memory is. If that is a GPU, host memory is pinned, and what crosses
        the link lies in records, and ``carrier`` moves them; whoever makes it sets it, before the
        first transfer.
        """
        pinned = where != "cpu"
        # Copy engines want the device's number, which the name alone does not have.
        device = f"cuda:{torch.cuda.current_device()}" if pinned else "cpu"
        self.schema = schema
        self.sizes = sizes
        self._sink = sink
        self.poison = poison
        self.spans = SpanStore(schema, sizes.device_pages, device)
        self.host_spans = SpanStore(schema, sizes.host_pages, pinned=pinned, in_records=pinned)
        self.tails = TailStore(schema, sizes.device_tails, device, in_records=pinned)
        self.host_tails = TailStore(schema, sizes.host_tails, pinned=pinned, in_records=pinned)
        self.rings = RingStore(schema, sizes.slots, device)
        self.device = PageBook("device pages", sizes.device_pages, sink, "device")
        self.host = PageBook("host pages", sizes.host_pages, sink, "host")
        self.device_tail_slots = PageBook("device tails", sizes.device_tails)
        self.host_tail_slots = PageBook("host tails", sizes.host_tails)
        self.slots = PageBook("sequence slots", sizes.slots)
        self.carrier: Carrier | None = None
        self.sums: SumBook | None = None
        """What audited copies were summed to; they go when the index lets the copies go."""
        if poison:
            self.spans.poison_all()
            self.host_spans.poison_all()

    def book(self, tier: CacheTier) -> PageBook:
        """Return the book of one tier's pages."""
        return self.device if tier == "device" else self.host

    @property
    def books(self) -> tuple[PageBook, ...]:
        """Every book, for the ledger."""
        return (
            self.device,
            self.host,
            self.device_tail_slots,
            self.host_tail_slots,
            self.slots,
        )

    def evict(self, released: Released, tier: CacheTier) -> None:
        """Take back what a tier gives up, and say so."""
        pages, tails = released.pages(tier), released.tails(tier)
        if self._sink.audit and (pages or tails):
            self._sink.emit(
                PageEvict(pages=self.book(tier).runs(pages), tier=tier, tails=len(tails))
            )
        self.take_back(released)

    def take_back(self, released: Released, blockers: Iterable[Blocker] = ()) -> None:
        """Put what the index let go into quarantine, until the blockers have settled (R6)."""
        if not released:
            return
        if self.sums is not None:
            self.sums.forget(released)
        waiting = tuple(blockers)
        self.device.release(released.device_pages, waiting)
        self.host.release(released.host_pages, waiting)
        self.device_tail_slots.release(array("i", released.device_tails), waiting)
        self.host_tail_slots.release(array("i", released.host_tails), waiting)

    def reclaim(self) -> None:
        """Free whatever has left quarantine."""
        for book in self.books:
            book.reclaim()
