"""The parts of the prefix index: edges, the copies of their pages, tails, and what was let go.

Plain records with the rules that concern one edge only. They know nothing of the tree as a whole,
of eviction order, or of the memory behind a page id.
"""

from array import array
from typing import Literal, TypeAlias, final

from attrs import define, field

Pages: TypeAlias = "array[int]"
"""Page ids of one tier, in sequence order, as ``array('i')``."""

CacheTier: TypeAlias = Literal["device", "host"]
"""The two tiers that the index keeps; storage has an index of its own."""


def no_pages() -> Pages:
    """Return a new, empty array of page ids."""
    return array("i")


@final
class EdgeCopy:
    """One tier's copy of all pages of one edge, or the place where it would be.

    Attributes:
        node: the edge.
        tier: where the pages are.
        pages: one page id for each page of the edge; None where the tier has no copy.
        arrival: the transfer that is filling the pages; None once they have arrived.
        below: how many of the edge's children have a copy on this tier.
    """

    __slots__ = ("arrival", "below", "node", "pages", "tier")

    def __init__(self, node: "Node", tier: CacheTier) -> None:
        """Start without pages."""
        self.node = node
        self.tier: CacheTier = tier
        self.pages: Pages | None = None
        self.arrival: object | None = None
        self.below = 0


@final
class TailCopy:
    """One tier's slot of one tail, or the place where it would be.

    Attributes:
        tail: the tail.
        tier: where the slot is.
        slot: the slot; None where the tier has no copy.
        arrival: the transfer that is filling the slot; None once it has arrived.
    """

    __slots__ = ("arrival", "slot", "tail", "tier")

    def __init__(self, tail: "Tail", tier: CacheTier) -> None:
        """Start without a slot."""
        self.tail = tail
        self.tier: CacheTier = tier
        self.slot: int | None = None
        self.arrival: object | None = None


@final
class Tail:
    """The resume state kept at one page boundary; stays the same object through splits and joins.

    Attributes:
        node: the edge that holds the boundary; None once the index has let the tail go.
        offset: the boundary, in pages from the start of that edge (1 to its length).
        device: the copy on the device.
        host: the copy on the host.
        pins: transfers and restores that are reading it.
        last_use: use number of the last request that made it or resumed from it.
    """

    __slots__ = ("device", "host", "last_use", "node", "offset", "pins")

    def __init__(self, node: "Node", offset: int, last_use: int) -> None:
        """Start without slots; made by the index only."""
        self.node: Node | None = node
        self.offset = offset
        self.device = TailCopy(self, "device")
        self.host = TailCopy(self, "host")
        self.pins = 0
        self.last_use = last_use

    @property
    def is_usable(self) -> bool:
        """Whether computing can resume here: some copy has arrived."""
        device, host = self.device, self.host
        return (device.slot is not None and device.arrival is None) or (
            host.slot is not None and host.arrival is None
        )

    @property
    def is_busy(self) -> bool:
        """Whether a transfer reads or fills it, so that its slots may not be let go."""
        return self.pins > 0 or self.device.arrival is not None or self.host.arrival is not None

    def copy(self, tier: CacheTier) -> TailCopy:
        """Return the copy on `tier`."""
        return self.device if tier == "device" else self.host


@final
class Home:
    """One identity's share of the pages: whose they are, and how many on each tier.

    Attributes:
        identity: the root's key.
        pages: pages held, pinned and unreachable ones included.
    """

    __slots__ = ("identity", "pages")

    def __init__(self, identity: bytes) -> None:
        """Start without pages."""
        self.identity = identity
        self.pages: dict[CacheTier, int] = {"device": 0, "host": 0}


@final
class Node:
    """One edge of the tree: a run of pages that is cached, pinned and evicted alike.

    Callers outside the index borrow nodes and read them only, and only until their next call of
    the index: later calls may split, join or remove the edge. A cursor is what lasts.

    Attributes:
        tokens: the edge's tokens as bytes, a whole number of pages.
        parent: the edge above; None for the root of an identity.
        key: under which the parent's `children` holds this edge.
        children: the edges below.
        crowded: how many children had to be keyed by their whole first page.
        end: pages from the root to the end of the edge.
        device: the copy on the device.
        host: the copy on the host.
        tails: kept tails, by boundary in pages from the start of the edge.
        pins: cursors at or below the end of the edge.
        last_use: use number of the last request that matched or extended through the edge.
        hits: how many requests found the edge already there.
        is_live: False once flushed or removed: no new request can reach it.
        home: the share of the whole that its identity's prefixes have.
        keys: chained key of each page, 16 bytes each, where the tree is keyed; empty otherwise.
        chain: for policies that remember what they evicted: a hash of the whole prefix for each
            page of the edge; empty otherwise.
    """

    __slots__ = (
        "chain",
        "children",
        "crowded",
        "device",
        "end",
        "hits",
        "home",
        "host",
        "is_live",
        "key",
        "keys",
        "last_use",
        "parent",
        "pins",
        "tails",
        "tokens",
    )

    def __init__(self, tokens: bytes, end: int, last_use: int, home: Home) -> None:
        """Start unlinked and without pages; made by the index only."""
        self.home = home
        self.keys = b""
        self.tokens = tokens
        self.parent: Node | None = None
        self.key = b""
        self.children: dict[bytes, Node] = {}
        self.crowded = 0
        self.end = end
        self.device = EdgeCopy(self, "device")
        self.host = EdgeCopy(self, "host")
        self.tails: dict[int, Tail] = {}
        self.pins = 0
        self.last_use = last_use
        self.hits = 0
        self.is_live = True
        self.chain: array[int] = array("q")

    @property
    def start(self) -> int:
        """Pages from the root to the start of the edge."""
        return 0 if self.parent is None else self.parent.end

    @property
    def num_pages(self) -> int:
        """Pages on the edge."""
        return self.end - self.start

    @property
    def is_resident(self) -> bool:
        """Whether any tier has a copy, arrived or not."""
        return self.device.pages is not None or self.host.pages is not None

    @property
    def is_settled(self) -> bool:
        """Whether no transfer fills a copy of it."""
        return self.device.arrival is None and self.host.arrival is None

    def copy(self, tier: CacheTier) -> EdgeCopy:
        """Return the copy on `tier`."""
        return self.device if tier == "device" else self.host

    def other(self, tier: CacheTier) -> EdgeCopy:
        """Return the copy on the tier that is not `tier`."""
        return self.host if tier == "device" else self.device


GONE = Node(b"", 0, 0, Home(b""))
"""Stands for no edge; removed edges and tails point to its empty copies, which keeps them free of
reference cycles, so that their memory goes at once even where the collector is off."""
GONE_TAIL = Tail(GONE, 0, 0)
"""Stands for no tail, likewise."""


def evictable_pages(node: Node, tier: CacheTier, gone_below: int = 0) -> int:
    """Count the trailing pages of an edge that may leave `tier` now.

    None while the edge is pinned, while a transfer fills or reads it, or while a child has a copy
    on the tier (`gone_below` of them the caller counts as gone). Where it is the last copy, pages
    up to the last busy tail stay too, since a tail cannot outlive its page. O(1), or O(kept
    tails) for a last copy.
    """
    copy = node.copy(tier)
    is_free = node.is_live and not node.pins and node.is_settled
    if copy.pages is None or not is_free or copy.below != gone_below:
        return 0
    count = len(copy.pages)
    if node.tails and node.other(tier).pages is None:
        count -= max((offset for offset, tail in node.tails.items() if tail.is_busy), default=0)
    return count


@define
class Released:
    """What the index has let go; the caller takes it and returns it to the pools.

    The index holds none of it any more and will not name it again. Pages stand in the order in
    which they were let go, the deepest of an edge first.
    """

    device_pages: Pages = field(factory=no_pages)
    host_pages: Pages = field(factory=no_pages)
    device_tails: list[int] = field(factory=list[int])
    host_tails: list[int] = field(factory=list[int])

    def __bool__(self) -> bool:
        return bool(self.device_pages or self.host_pages or self.device_tails or self.host_tails)

    def pages(self, tier: CacheTier) -> Pages:
        """Return the page ids of one tier."""
        return self.device_pages if tier == "device" else self.host_pages

    def tails(self, tier: CacheTier) -> list[int]:
        """Return the tail slots of one tier."""
        return self.device_tails if tier == "device" else self.host_tails

    def take(self, other: "Released") -> None:
        """Add what `other` holds and leave it empty (moves)."""
        for tier in TIERS:
            self.pages(tier).extend(other.pages(tier))
            self.tails(tier).extend(other.tails(tier))
            del other.pages(tier)[:]
            other.tails(tier).clear()


TIERS: tuple[CacheTier, CacheTier] = ("device", "host")
"""Both tiers, the faster first."""
