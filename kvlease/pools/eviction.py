"""In which order cached edges are given up: the rule, the heap under it, and least recent use.

An order only ranks the edges offered to it. Whether an edge may go at all is asked of the edge
(`evictable_pages`) when its turn comes, so that nothing has to be withdrawn when it is pinned.
"""

from array import array
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar, final

from kvlease.pools.prefix_node import Node

T = TypeVar("T")


class Admits(Protocol):
    """Says whether an edge may be evicted now (any true value)."""

    def __call__(self, node: Node, /) -> object:
        """Answer for one edge."""
        ...


@final
class LazyHeap(Generic[T]):
    """A heap whose entries are moved and withdrawn lazily; each item has one key at a time.

    O(log n) amortised for each call: outdated entries are skipped when they surface, and swept
    once they outnumber the valid ones. Equal keys leave in the order of their pushes.
    """

    __slots__ = ("_entries", "_keys", "_pushes")

    def __init__(self) -> None:
        """Start empty."""
        self._entries: list[tuple[int, int, T]] = []
        self._keys: dict[T, tuple[int, int]] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._keys)

    def push(self, item: T, key: int) -> None:
        """Add `item`, or move it to `key`."""
        held = self._keys.get(item)
        if held is not None and held[0] == key:
            return
        self._pushes += 1
        self._keys[item] = (key, self._pushes)
        heappush(self._entries, (key, self._pushes, item))
        if len(self._entries) > 2 * len(self._keys) + 64:
            self._sweep()

    def discard(self, item: T) -> None:
        """Withdraw `item` if it is there."""
        self._keys.pop(item, None)
        if not self._keys:
            self._entries.clear()

    def first_key(self) -> int | None:
        """Return the smallest key; None when empty."""
        entries, keys = self._entries, self._keys
        while entries:
            key, push, item = entries[0]
            if keys.get(item) == (key, push):
                return key
            heappop(entries)
        return None

    def pop(self) -> tuple[int, T] | None:
        """Remove and return the smallest key and its item; None when empty."""
        if self.first_key() is None:
            return None
        key, _, item = heappop(self._entries)
        del self._keys[item]
        return key, item

    def _sweep(self) -> None:
        keys = self._keys
        self._entries = [entry for entry in self._entries if keys.get(entry[2]) == entry[:2]]
        heapify(self._entries)


@final
class Lanes:
    """Edges with a second copy on the other tier beside edges without, each in its own heap.

    Two heaps, because a write-back cache first looks for edges that lose nothing by going.
    """

    __slots__ = ("_alone", "_copied")

    def __init__(self) -> None:
        """Start empty."""
        self._copied: LazyHeap[Node] = LazyHeap()
        self._alone: LazyHeap[Node] = LazyHeap()

    def push(self, node: Node, key: int) -> None:
        """Add an edge, or move it."""
        mine, other = self._copied, self._alone
        if node.device.pages is None or node.host.pages is None:
            mine, other = other, mine
        other.discard(node)
        mine.push(node, key)

    def discard(self, node: Node) -> None:
        """Withdraw an edge if it is there."""
        self._copied.discard(node)
        self._alone.discard(node)

    def pop(self, *, copied_only: bool) -> tuple[int, Node] | None:
        """Remove and return the edge with the smallest key; None when there is none."""
        copied_key = self._copied.first_key()
        alone_key = None if copied_only else self._alone.first_key()
        if alone_key is None or (copied_key is not None and copied_key < alone_key):
            return self._copied.pop()
        return self._alone.pop()


class EvictionOrder(Protocol):
    """Ranks the edges of one tier; told of everything that changes an edge's copy there."""

    def chain(self, above: Node, tokens: bytes, page_bytes: int) -> "array[int]":
        """Return a hash of the whole prefix for each page of `tokens`, which follow `above`.

        Empty for orders that remember nothing of what they evicted.
        """
        ...

    def alike_run(self, chain: "array[int]", num_pages: int) -> int:
        """Count the leading pages, at least one, that the order would place alike."""
        ...

    def may_append(self, node: Node, chain: "array[int]") -> bool:
        """Say whether new pages, placed alike, may be added to the edge itself."""
        ...

    def placed(self, node: Node) -> None:
        """Take note that the edge got a copy on this tier."""
        ...

    def appended(self, node: Node, num_pages: int) -> None:
        """Take note that the edge's copy grew at its end."""
        ...

    def dropped(self, node: Node) -> None:
        """Take note that the edge's copy goes; called while its pages are still there."""
        ...

    def split(self, upper: Node, lower: Node) -> None:
        """Take note that `upper` was cut off the front of `lower`."""
        ...

    def may_join(self, upper: Node, lower: Node) -> bool:
        """Say whether the order treats both edges alike, so that they can become one."""
        ...

    def joined(self, upper: Node, lower: Node) -> None:
        """Take note that `upper` becomes part of `lower`, which will have the hits of both."""
        ...

    def offer(self, node: Node) -> None:
        """Consider the edge from now on; again when its copy on the other tier comes or goes."""
        ...

    def take(self, admits: Admits, *, copied_only: bool) -> Node | None:
        """Withdraw and return the edge to evict next, or None.

        Edges that `admits` refuses are withdrawn too; they are offered again when they are free.
        With `copied_only`, only edges that have a copy on the other tier as well.
        """
        ...


@final
class LruOrder:
    """Least recent use: the leaf whose last request is the longest ago goes first."""

    __slots__ = ("_lanes",)

    def __init__(self) -> None:
        """Start empty."""
        self._lanes = Lanes()

    def chain(self, above: Node, tokens: bytes, page_bytes: int) -> "array[int]":
        """Nothing evicted is remembered, so nothing is hashed."""
        return array("q")

    def alike_run(self, chain: "array[int]", num_pages: int) -> int:
        """All pages are placed alike."""
        return num_pages

    def may_append(self, node: Node, chain: "array[int]") -> bool:
        """New pages are like any others."""
        return True

    def placed(self, node: Node) -> None:
        """Nothing to note: the edge carries its use number."""

    def appended(self, node: Node, num_pages: int) -> None:
        """Nothing to note."""

    def dropped(self, node: Node) -> None:
        """Forget the edge."""
        self._lanes.discard(node)

    def split(self, upper: Node, lower: Node) -> None:
        """Nothing to note: the upper half is offered once the lower has gone."""

    def may_join(self, upper: Node, lower: Node) -> bool:
        """Edges of equal use number are alike; the index has compared those."""
        return True

    def joined(self, upper: Node, lower: Node) -> None:
        """Forget the edge."""
        self._lanes.discard(upper)

    def offer(self, node: Node) -> None:
        """Rank the edge by its use number."""
        self._lanes.push(node, node.last_use)

    def take(self, admits: Admits, *, copied_only: bool) -> Node | None:
        """Withdraw and return the edge with the smallest use number."""
        # Keys are never outdated here: use numbers change under a pin only, and an edge is offered
        # again when its last pin goes or when it becomes a leaf.
        while (entry := self._lanes.pop(copied_only=copied_only)) is not None:
            if admits(entry[1]):
                return entry[1]
        return None
