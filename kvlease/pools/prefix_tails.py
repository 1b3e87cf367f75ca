"""The tails of the prefix index: slots on two tiers, pins, and their own eviction.

Knows which boundary of which edge a tail belongs to; the rule that a tail leaves with its page is
applied by the tree, which calls `drop_idle`.
"""

from typing import final

from attrs import define

from kvlease.errors import UsageError
from kvlease.pools.eviction import LazyHeap
from kvlease.pools.prefix_node import GONE_TAIL, TIERS, CacheTier, Node, Released, Tail, TailCopy


@define
class TierCount:
    """How much of one kind the index holds on one tier, and how much of that is pinned."""

    total: int = 0
    pinned: int = 0


@final
class TailStore:
    """All tails of one index.

    Attributes:
        counts: slots held on each tier.
    """

    __slots__ = ("_heaps", "counts")

    def __init__(self) -> None:
        """Start empty."""
        self.counts: dict[CacheTier, TierCount] = {tier: TierCount() for tier in TIERS}
        self._heaps: dict[CacheTier, LazyHeap[TailCopy]] = {tier: LazyHeap() for tier in TIERS}

    def find_or_make(self, node: Node, offset: int, use: int) -> Tail:
        """Return the tail at one boundary of `node`, stamped with `use`."""
        tail = node.tails.get(offset)
        if tail is None:
            tail = node.tails[offset] = Tail(node, offset, use)
        tail.last_use = max(tail.last_use, use)
        return tail

    def place(self, tail: Tail, tier: CacheTier, slot: int, arrival: object | None) -> None:
        """Give the tail a copy on a tier that has none. Takes `slot`."""
        copy = tail.copy(tier)
        copy.slot, copy.arrival = slot, arrival
        count = self.counts[tier]
        count.total += 1
        count.pinned += tail.pins > 0
        self.offer(tail)

    def drop_copy(self, copy: TailCopy, released: Released) -> None:
        """Let one copy go, arrived or not, pinned or not; the last one takes the tail with it."""
        tail = copy.tail
        if copy.slot is None:
            return
        released.tails(copy.tier).append(copy.slot)
        count = self.counts[copy.tier]
        count.total -= 1
        count.pinned -= tail.pins > 0
        copy.slot = copy.arrival = None
        self._heaps[copy.tier].discard(copy)
        if tail.device.slot is None and tail.host.slot is None and tail.node is not None:
            del tail.node.tails[tail.offset]
            tail.node = None
            tail.device, tail.host = GONE_TAIL.device, GONE_TAIL.host

    def drop_idle(self, node: Node, released: Released) -> None:
        """Let all tails of an edge go that no transfer reads or fills."""
        for tail in list(node.tails.values()):
            if not tail.is_busy:
                for tier in TIERS:
                    self.drop_copy(tail.copy(tier), released)

    def pin(self, tail: Tail) -> None:
        """Keep the tail's slots until `unpin`."""
        if tail.node is None:
            raise UsageError("a tail was pinned after the index had let it go; match again")
        if not tail.pins:
            self._count_pinned(tail, 1)
        tail.pins += 1

    def unpin(self, tail: Tail) -> None:
        """End one `pin`."""
        if not tail.pins:
            raise UsageError("a tail was unpinned more often than pinned; pair the calls", "R7")
        tail.pins -= 1
        if not tail.pins:
            self._count_pinned(tail, -1)
            self.offer(tail)

    def offer(self, tail: Tail) -> None:
        """Consider the tail's copies for eviction if nothing keeps them."""
        if tail.node is None or tail.is_busy:
            return
        for tier in TIERS:
            copy = tail.copy(tier)
            if copy.slot is not None:
                self._heaps[tier].push(copy, tail.last_use)

    def evict(self, tier: CacheTier, num_tails: int, released: Released) -> list[Node]:
        """Let the least recently used idle slots of a tier go.

        Returns the edges that lost a tail. O(log n) amortised for each slot.
        """
        touched: list[Node] = []
        heap = self._heaps[tier]
        while num_tails > 0 and (entry := heap.pop()) is not None:
            key, copy = entry
            tail = copy.tail
            if copy.slot is None or tail.is_busy or tail.node is None:
                continue
            if key != tail.last_use:
                heap.push(copy, tail.last_use)
                continue
            touched.append(tail.node)
            self.drop_copy(copy, released)
            num_tails -= 1
        return touched

    def _count_pinned(self, tail: Tail, step: int) -> None:
        for tier in TIERS:
            if tail.copy(tier).slot is not None:
                self.counts[tier].pinned += step


def move_tails(source: Node, target: Node, cut: int) -> None:
    """Hand the tails of a split edge to its halves: up to `cut` to `target`, the rest stays.

    Offsets in `source` then count from the cut. O(tails of the edge).
    """
    stays: dict[int, Tail] = {}
    for offset, tail in source.tails.items():
        if offset <= cut:
            tail.node = target
            target.tails[offset] = tail
        else:
            tail.offset = offset - cut
            stays[offset - cut] = tail
    source.tails = stays
