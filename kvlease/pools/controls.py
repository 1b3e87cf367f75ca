"""What users ask of the cache itself: pins, prefetches, evictions by prefix, and quotas.

Synchronous like the pools: a prefetch is planned here and carried out like any other transfer.
"""

from collections.abc import Iterator
from typing import Literal, final

from attrs import define, frozen

from kvlease.errors import PagesUnavailable
from kvlease.pools.held import PlannedTransfer
from kvlease.pools.memory import Memory
from kvlease.pools.prefix_index import PrefixIndex
from kvlease.pools.prefix_node import TIERS, CacheTier
from kvlease.pools.prefix_results import Match
from kvlease.pools.prefix_share import count_below, evict_below, share
from kvlease.pools.transfers import Transfers
from kvlease.protocols.event_base import EventSink
from kvlease.protocols.event_pages import PagePin, PageUnpin, UnpinReason

EVERY_PAGE = 1 << 62
MAX_PINS = 4096
"""Pins at a time; more are refused."""


@define(eq=False)
class Pin:
    """Cached pages of a prompt that are kept until ``expires_s`` of the engine's clock."""

    id: int
    root: bytes
    match: Match
    expires_s: float


@frozen
class Prefetched:
    """How many pages of a prompt are on the tier, and the transfer that brings what was not."""

    pages: int
    moved_pages: int
    planned: PlannedTransfer | None


@frozen
class EvictedPages:
    """Pages let go by tier, and copies that stay because somebody uses them."""

    device: int
    host: int
    kept: int


@frozen
class Quota:
    """Most pages that one tenant may keep cached on each tier; None for no bound."""

    device_pages: int | None = None
    host_pages: int | None = None

    def bounds(self) -> Iterator[tuple[CacheTier, int]]:
        """Yield the bounds that there are."""
        if self.device_pages is not None:
            yield "device", self.device_pages
        if self.host_pages is not None:
            yield "host", self.host_pages


NO_QUOTA = Quota()


@final
class CacheControls:
    """Holds pins, and does the rest without holding anything.

    Attributes:
        pins: by number.
    """

    def __init__(
        self, memory: Memory, index: PrefixIndex, transfers: Transfers, sink: EventSink
    ) -> None:
        """Borrows all four for the life of the pool."""
        self.pins: dict[int, Pin] = {}
        self._memory = memory
        self._index = index
        self._transfers = transfers
        self._sink = sink
        self._last_pin = 0

    def _match(self, root: bytes, tokens: bytes) -> Match:
        return self._index.match(root, tokens, len(tokens) // self._index.tree.page_bytes)

    def _drop(self, match: Match) -> None:
        self._memory.take_back(self._index.abandon(match.cursor))

    # -- pins ----------------------------------------------------------------------------------

    def pin(self, root: bytes, tokens: bytes, expires_s: float, quota: Quota = NO_QUOTA) -> Pin:
        """Keep the cached pages of a prompt, and the state at their end, where they are.

        Raises PagesUnavailable if nothing of it is cached, or if pins would hold more than half of
        a tier, or of the identity's quota: the rest has to stay free for those who run.
        """
        match = self._match(root, tokens)
        problem = self._why_not(match, root, quota)
        if problem:
            self._drop(match)
            raise PagesUnavailable(problem)
        if match.tail is not None:
            self._index.pin_tail(match.tail)
        self._last_pin += 1
        pin = self.pins[self._last_pin] = Pin(self._last_pin, root, match, expires_s)
        if self._sink.normal:
            self._sink.emit(
                PagePin(
                    pin=pin.id,
                    identity=root.hex(),
                    pages=match.num_pages,
                    deadline_ns=round(expires_s * 1e9),
                )
            )
        return pin

    def _why_not(self, match: Match, root: bytes, quota: Quota) -> str:
        """Say why a match may not be pinned; empty if it may."""
        if not match.num_pages:
            return "nothing of the prompt is cached, so nothing can be pinned"
        held = [(pin.root, pin.match.num_pages) for pin in self.pins.values()]
        held.append((root, match.num_pages))
        pinned = sum(pages for _, pages in held)
        own = sum(pages for its, pages in held if its == root)
        sizes = self._memory.sizes
        bound = max(sizes.device_pages, sizes.host_pages) // 2
        own_bound = min((pages // 2 for _, pages in quota.bounds()), default=bound)
        if pinned > bound or own > own_bound or len(self.pins) >= MAX_PINS:
            return f"pins would hold {pinned} pages in {len(held)} pins, {own} of this tenant's"
        return ""

    def unpin(self, number: int, root: bytes) -> bool:
        """End an identity's pin on its behalf; says whether there was such a pin."""
        pin = self.pins.get(number)
        if pin is None or pin.root != root:
            return False
        self._end(pin, "asked", root.hex())
        return True

    def expire(self, now_s: float) -> float | None:
        """End the pins whose time is up; returns when the next one's will be."""
        for pin in [pin for pin in self.pins.values() if pin.expires_s <= now_s]:
            self._end(pin, "expired")
        return min((pin.expires_s for pin in self.pins.values()), default=None)

    def unpin_all(self, reason: Literal["flushed", "closed"]) -> None:
        """End every pin: what they hold is to be forgotten, or nobody is left to end them."""
        for pin in list(self.pins.values()):
            self._end(pin, reason)

    def _end(self, pin: Pin, reason: UnpinReason, identity: str = "") -> None:
        del self.pins[pin.id]
        if self._sink.normal:
            self._sink.emit(PageUnpin(pin=pin.id, reason=reason, identity=identity))
        if pin.match.tail is not None:
            self._memory.take_back(self._index.unpin_tail(pin.match.tail))
        self._memory.take_back(self._index.release(pin.match.cursor))

    # -- eviction ------------------------------------------------------------------------------

    def evict(self, root: bytes, prefix: bytes, tier: CacheTier | None) -> EvictedPages:
        """Let every idle page go whose prefix begins with these tokens, from one tier or both."""
        counts = {"device": 0, "host": 0}
        for each in TIERS if tier is None else (tier,):
            released = evict_below(self._index.tree, root, each, EVERY_PAGE, prefix)
            for other in TIERS:
                counts[other] += len(released.pages(other))
            self._memory.evict(released, each)
        kept = count_below(self._index.tree, root, prefix)
        return EvictedPages(counts["device"], counts["host"], kept)

    def keep_quota(self, root: bytes, quota: Quota) -> None:
        """Let pages of an identity go that are over its quota, if they are idle.

        A sixteenth of the quota more, so that the search for them is not made for every page.
        """
        for tier, bound in quota.bounds():
            over = share(self._index.tree, root, tier) - bound
            if over > 0:
                released = evict_below(self._index.tree, root, tier, over + bound // 16)
                self._memory.evict(released, tier)

    def share(self, root: bytes, tier: CacheTier) -> int:
        """Count the pages that an identity has cached on a tier."""
        return share(self._index.tree, root, tier)

    # -- prefetch ------------------------------------------------------------------------------

    def prefetch(self, root: bytes, tokens: bytes, tier: Literal["device", "host"]) -> Prefetched:
        """Plan what brings the cached prefix of a prompt to a tier.

        The caller starts the transfer, if there is one. Raises PagesUnavailable when the tier has
        no room for it now.
        """
        match = self._match(root, tokens)
        try:
            planned = self._lift(match) if tier == "device" else self._transfers.plan_copy(match)
        finally:
            num_pages = match.num_pages
            self._drop(match)
        moved = 0 if planned is None else len(planned.destination)
        return Prefetched(num_pages, moved, planned)

    def _lift(self, match: Match) -> PlannedTransfer | None:
        """Make room on the device and plan the load; the match's pins keep its source."""
        device = self._memory.device
        device.reclaim()
        short = match.host_pages - device.available
        if short > 0:
            self._memory.evict(self._index.evict_device(short), "device")
        return self._transfers.plan_prefetch(match)
