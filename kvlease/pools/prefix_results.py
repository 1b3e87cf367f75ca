"""What the prefix index hands out: cursors, matches, and the outcomes of its calls.

Plain records; the rules are in the index.
"""

from typing import final

from attrs import define, frozen

from kvlease.errors import UsageError
from kvlease.pools.prefix_node import Node, Pages, Tail


@final
class Cursor:
    """One running sequence's place in the index; every edge on its path is pinned until released.

    Owned by the sequence, ended by `PrefixIndex.release`. It stays true while others split and
    join edges around it.
    """

    __slots__ = ("_node", "use")

    def __init__(self, node: Node, use: int) -> None:
        """Made by the index only, which has pinned the path."""
        self._node: Node | None = node
        self.use = use
        """Use number that the sequence stamps on its edges."""

    @property
    def node(self) -> Node:
        """The edge whose end is the place.

        Raises:
            UsageError: the cursor was released.
        """
        if self._node is None:
            raise UsageError("a cursor was used after release; match or fork for a new one")
        return self._node

    @property
    def num_pages(self) -> int:
        """Pages from the root to the cursor."""
        return self.node.end

    @property
    def is_live(self) -> bool:
        """Whether new requests can still reach the path (False once it was flushed)."""
        return self.node.is_live

    def move(self, node: Node | None) -> None:
        """Put the cursor elsewhere; for the index only, which moves the pins with it."""
        self._node = node


@define
class Match:
    """The usable part of a prompt: what is cached, where, and what must be loaded first.

    Attributes:
        cursor: its pinned end; the caller owns it.
        num_pages: usable pages.
        pages: their device page ids; -1 for each page that has to be loaded.
        to_load: edges held by the host only, in order; read them before the next call.
        arrivals: the distinct transfers still filling `pages`; wait for them.
        tail: the resume state at the end; None without tails or pages. It is not pinned: pin it
            before any other call that may evict tails.
        matched_pages: pages usable before cutting back to a tail.
        device_pages: how many of `num_pages` are on the device or on their way there.
        host_pages: how many of `num_pages` are on the host only.
    """

    cursor: Cursor
    num_pages: int
    pages: Pages
    to_load: list[Node]
    arrivals: list[object]
    tail: Tail | None
    matched_pages: int
    device_pages: int
    host_pages: int


@frozen
class Extended:
    """What became of pages given to the index.

    Attributes:
        num_taken: pages that the index holds now.
        not_taken: the others, in order; the caller keeps them.
    """

    num_taken: int
    not_taken: Pages


@frozen
class Attached:
    """What became of pages given for a load.

    Attributes:
        nodes: edges that the transfer fills: copy ``host.pages[i]`` to ``device.pages[i]``.
        unused: pages not needed, since another transfer was first; the caller keeps them.
    """

    nodes: list[Node]
    unused: Pages


@frozen
class KeptTail:
    """What became of a slot given to the index.

    Attributes:
        tail: the tail at the boundary; None if its page is gone or flushed.
        unused: the slot that the index does not hold any more (a replaced one) or did not take.
    """

    tail: Tail | None
    unused: int | None


@frozen
class IndexStatistics:
    """Counts of one moment; pages and slots by tier, `pinned` ones are part of the total."""

    num_nodes: int
    device_pages: int
    device_pages_pinned: int
    host_pages: int
    host_pages_pinned: int
    device_tails: int
    device_tails_pinned: int
    host_tails: int
    host_tails_pinned: int
