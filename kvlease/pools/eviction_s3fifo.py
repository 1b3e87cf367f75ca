"""S3-FIFO adapted to a tree: most pages are seen once, so let the unproven ones go first.

New pages enter a small queue; those asked for again move to the main queue when their turn comes,
the others go and leave their hash behind, and one that comes back in time enters the main queue
at once. The main queue gives each edge one more round for every recent hit. Only leaves take part,
so a parent never goes before its child. Idea: Yang et al., "FIFO queues are all you need for cache
eviction" (SOSP 2023); the leaf-first form is ours.
"""

from array import array
from typing import final

from attrs import define

from kvlease.pools.eviction import Admits, Lanes
from kvlease.pools.prefix_node import CacheTier, Node

# The published setting (a tenth, one hit, one cache of memory) was measured too: on the public
# conversation trace these give more hits at every size (`benchmarks/prefix_index.py`), since whole
# conversations come back late and edges carry many pages.
SMALL_SHARE = 3
"""The small queue is emptied first while it holds more than one page in this many."""
PROMOTE_HITS = 2
"""Hits that move an edge from the small queue to the main queue."""
GHOST_SHARE = 4
"""Evicted pages remembered for each page held."""
MOST_HITS = 3
"""Hits beyond this many win no further rounds."""


@define
class _Place:
    """Where one edge stands: its queue, its number there, and the hits already paid for."""

    is_main: bool
    number: int
    spent_hits: int


@final
class S3FifoOrder:
    """Small and main queue for the edges of one tier, and a memory of what left the small one."""

    __slots__ = ("_ghosts", "_main", "_num_pages", "_numbers", "_places", "_small", "_small_pages",
                 "_tier")  # fmt: skip

    def __init__(self, tier: CacheTier) -> None:
        """Start empty."""
        self._tier: CacheTier = tier
        self._places: dict[Node, _Place] = {}
        self._small = Lanes()
        self._main = Lanes()
        self._numbers = 0
        self._small_pages = 0
        self._num_pages = 0
        # Insertion order is age; bounded by GHOST_SHARE.
        self._ghosts: dict[int, None] = {}

    def chain(self, above: Node, tokens: bytes, page_bytes: int) -> "array[int]":
        """Hash page by page; O(bytes)."""
        # An identity's root has no pages; its own hash keeps equal tokens of two identities apart.
        link = above.chain[-1] if above.chain else hash(above.key)
        hashes = array("q")
        for start in range(0, len(tokens), page_bytes):
            link = hash((link, tokens[start : start + page_bytes]))
            hashes.append(link)
        return hashes

    def alike_run(self, chain: "array[int]", num_pages: int) -> int:
        """Count the leading pages that are all remembered, or all not."""
        is_main = chain[0] in self._ghosts
        for index in range(1, num_pages):
            if (chain[index] in self._ghosts) != is_main:
                return index
        return num_pages

    def may_append(self, node: Node, chain: "array[int]") -> bool:
        """New pages may join an edge of their queue that has no hits to pass on."""
        place = self._places[node]
        return place.is_main == (chain[0] in self._ghosts) and node.hits == place.spent_hits

    def placed(self, node: Node) -> None:
        """Let the edge enter the main queue if it left not long ago, else the small one."""
        is_main = bool(node.chain) and node.chain[0] in self._ghosts
        self._places[node] = _Place(is_main, self._next_number(), node.hits)
        self._count(node, len(node.chain), is_main=is_main)

    def appended(self, node: Node, num_pages: int) -> None:
        """Count the new pages and forget that they had been evicted."""
        self._count(node, num_pages, is_main=self._places[node].is_main)

    def dropped(self, node: Node) -> None:
        """Forget the edge; remember its pages if they leave the small queue."""
        place = self._places.pop(node)
        count = len(node.chain)
        self._num_pages -= count
        (self._main if place.is_main else self._small).discard(node)
        if not place.is_main:
            self._small_pages -= count
            for link in node.chain:
                self._ghosts.pop(link, None)
                self._ghosts[link] = None
            while len(self._ghosts) > max(GHOST_SHARE * self._num_pages, count):
                del self._ghosts[next(iter(self._ghosts))]

    def split(self, upper: Node, lower: Node) -> None:
        """Give the upper half the place of the whole."""
        place = self._places.get(lower)
        if place is not None:
            self._places[upper] = _Place(place.is_main, place.number, place.spent_hits)

    def may_join(self, upper: Node, lower: Node) -> bool:
        """Edges of one queue with equal hits to spend are alike."""
        if (above := self._places.get(upper)) is None or (below := self._places.get(lower)) is None:
            return True
        return above.is_main == below.is_main and self._hits(upper, above) == self._hits(
            lower, below
        )

    def joined(self, upper: Node, lower: Node) -> None:
        """Forget the edge; its child stands for both, with the hits it had to spend."""
        place = self._places.pop(upper, None)
        if place is not None:
            (self._main if place.is_main else self._small).discard(upper)
            self._places[lower].spent_hits += max(0, upper.hits - lower.hits)

    def offer(self, node: Node) -> None:
        """Let the edge stand in its queue."""
        place = self._places[node]
        (self._main if place.is_main else self._small).push(node, place.number)

    def take(self, admits: Admits, *, copied_only: bool) -> Node | None:
        """Withdraw and return the edge to evict next, moving others on where they earned it."""
        while True:
            queues = (self._small, self._main)
            if self._small_pages * SMALL_SHARE <= self._num_pages:
                queues = (self._main, self._small)
            entry = queues[0].pop(copied_only=copied_only)
            if entry is None:
                entry = queues[1].pop(copied_only=copied_only)
            if entry is None:
                return None
            node = entry[1]
            if not admits(node):
                continue
            place = self._places[node]
            if not self._moves_on(node, place):
                return node
            self.offer(node)

    def _moves_on(self, node: Node, place: _Place) -> bool:
        """Spend a hit on another round; False when the edge's time is up."""
        hits = self._hits(node, place)
        if place.is_main:
            if not hits:
                return False
            place.spent_hits = node.hits - (hits - 1)
        else:
            if hits < PROMOTE_HITS:
                return False
            place.is_main = True
            place.spent_hits = node.hits
            self._small_pages -= len(node.chain)
        place.number = self._next_number()
        return True

    def _hits(self, node: Node, place: _Place) -> int:
        # A match that is taken back takes its hit along, which may have been spent already.
        return max(0, min(MOST_HITS, node.hits - place.spent_hits))

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _count(self, node: Node, num_pages: int, *, is_main: bool) -> None:
        self._num_pages += num_pages
        if not is_main:
            self._small_pages += num_pages
        for link in node.chain[-num_pages:]:
            self._ghosts.pop(link, None)
