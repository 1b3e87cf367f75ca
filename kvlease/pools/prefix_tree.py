"""The radix tree under the prefix index: links, splits and joins of edges, copies and counts.

Every change of structure or residency goes through here, so that counts, transfers in flight and
eviction orders cannot disagree with the edges. It knows nothing of requests or of their tokens'
meaning; it never allocates or frees a page.
"""

from typing import Protocol, final

from kvlease.errors import UsageError
from kvlease.pools.eviction import EvictionOrder
from kvlease.pools.prefix_node import (
    GONE,
    TIERS,
    CacheTier,
    EdgeCopy,
    Home,
    Node,
    Pages,
    Released,
    Tail,
    TailCopy,
)
from kvlease.pools.prefix_tails import TailStore, TierCount, move_tails
from kvlease.protocols.identity import page_hash
from kvlease.protocols.rpc import Change

KEY_BYTES = 16
"""Children are found by the last tokens of their first page: hashing a whole page costs more than
the rest of a match. Children that agree there are keyed by the whole page instead."""
PAGE_KEY_BYTES = 16


class CacheObserver(Protocol):
    """Hears of pages that came to a tier or left it, by the keys of their prefixes."""

    def __call__(self, change: Change, tier: CacheTier, identity: bytes, keys: bytes, /) -> None:
        """Take note; `keys` has 16 bytes for each page."""
        ...


@final
class PrefixTree:
    """Edges of all identities, their copies, and everything derived from them.

    Attributes:
        page_bytes: bytes of tokens in a page.
        key_bytes: bytes in a short child key.
        roots: the reachable root of each identity.
        flushed: roots that were flushed and still hold something pinned or in flight.
        counts: pages held on each tier.
        flights: what each unfinished transfer fills.
        observer: hears of pages that come and go, if set before the first page comes.
        num_nodes: edges, reachable or not, without roots.
    """

    __slots__ = (
        "_num_hidden",
        "counts",
        "flights",
        "flushed",
        "key_bytes",
        "num_nodes",
        "observer",
        "orders",
        "page_bytes",
        "roots",
        "tails",
    )

    def __init__(self, page_bytes: int, orders: dict[CacheTier, EvictionOrder]) -> None:
        """Start empty; takes `orders`."""
        self.page_bytes = page_bytes
        self.key_bytes = min(KEY_BYTES, page_bytes)
        self.orders = orders
        self.roots: dict[bytes, Node] = {}
        self.flushed: dict[Node, None] = {}
        self.counts: dict[CacheTier, TierCount] = {tier: TierCount() for tier in TIERS}
        self.flights: dict[object, list[EdgeCopy | TailCopy]] = {}
        self.tails = TailStore()
        self.num_nodes = 0
        self.observer: CacheObserver | None = None
        self._num_hidden = 0

    # Finding

    def child(self, node: Node, tokens: bytes, offset: int) -> Node | None:
        """Return the child whose first page stands at `offset` in `tokens`; O(page)."""
        end = offset + self.page_bytes
        found = node.children.get(tokens[end - self.key_bytes : end])
        if found is not None and tokens.startswith(
            memoryview(found.tokens)[: self.page_bytes], offset
        ):
            return found
        return node.children.get(tokens[offset:end]) if node.crowded else None

    def common_pages(self, node: Node, tokens: bytes, offset: int, stop: int) -> int:
        """Count the leading pages of an edge that stand at `offset` in `tokens`, before `stop`.

        The first page is known to. Bisects with whole comparisons: O(bytes compared).
        """
        size = self.page_bytes
        edge = memoryview(node.tokens)
        high = min(len(edge), stop - offset) // size
        if tokens.startswith(edge[: high * size], offset):
            return high
        low = 1
        while high - low > 1:
            middle = (low + high) // 2
            if tokens.startswith(edge[low * size : middle * size], offset + low * size):
                low = middle
            else:
                high = middle
        return low

    # Structure

    def add_root(self, identity: bytes) -> Node:
        """Return the root of an identity, made if need be."""
        root = self.roots.get(identity)
        if root is None:
            root = self.roots[identity] = Node(b"", 0, 0, Home(identity))
            root.key = root.keys = identity
        return root

    def add_child(self, parent: Node, tokens: bytes, last_use: int) -> Node:
        """Add an edge without pages below `parent`."""
        end = parent.end + len(tokens) // self.page_bytes
        node = Node(tokens, end, last_use, parent.home)
        node.is_live = parent.is_live
        node.keys = self.keys(parent, tokens)
        node.chain = self.orders["device"].chain(parent, tokens, self.page_bytes)
        self._link(parent, node)
        self.num_nodes += 1
        return node

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut the first pages off an edge and return them as a new edge above it.

        `node` stays the lower half, so cursors at its end stay true. O(bytes + tails).
        """
        parent = node.parent
        if parent is None or not 0 < num_pages < node.num_pages:
            raise UsageError("an edge can be split only between its pages")
        cut = num_pages * self.page_bytes
        upper = Node(node.tokens[:cut], parent.end + num_pages, node.last_use, node.home)
        cut_keys = num_pages * PAGE_KEY_BYTES
        upper.keys, node.keys = node.keys[:cut_keys], node.keys[cut_keys:]
        upper.parent, upper.key = parent, node.key
        upper.pins, upper.hits, upper.is_live = node.pins, node.hits, node.is_live
        upper.chain, node.chain = node.chain[:num_pages], node.chain[num_pages:]
        parent.children[node.key] = upper
        node.tokens = node.tokens[cut:]
        self._link(upper, node)
        for tier in TIERS:
            copy, above = node.copy(tier), upper.copy(tier)
            if copy.pages is None:
                continue
            above.pages, copy.pages = copy.pages[:num_pages], copy.pages[num_pages:]
            above.arrival, above.below = copy.arrival, 1
            if copy.arrival is not None:
                self.flights[copy.arrival].append(above)
            self.orders[tier].split(upper, node)
        move_tails(node, upper, num_pages)
        self.num_nodes += 1
        return upper

    def hide(self, node: Node) -> None:
        """Put an edge where no look-up finds it; it stays linked for those at work below it.

        Look-ups use keys of `key_bytes` or of a page; a hidden one is longer, and of its own.
        """
        parent = node.parent
        assert parent is not None, "a root is not among anybody's children"
        del parent.children[node.key]
        parent.crowded += len(node.key) == self.key_bytes
        self._num_hidden += 1
        node.key = node.tokens[: self.page_bytes] + self._num_hidden.to_bytes(8, "big")
        parent.children[node.key] = node

    def settle(self, node: Node, released: Released) -> None:
        """Let go what `node` can no longer justify, and remove it and its parents if now empty.

        A flushed edge keeps its pages while pinned or in flight; a tail stays with its page, or
        while busy; an edge without pages stays while it has children, pins or tails.
        """
        while (parent := node.parent) is not None:
            if not node.is_live and not node.pins and node.is_settled:
                for tier in TIERS:
                    self.drop_copy(node.copy(tier), released)
            if node.is_resident:
                return
            if node.tails:
                self.tails.drop_idle(node, released)
            if node.children or node.pins or node.tails:
                return
            self._unlink(parent, node)
            node = parent
        self.prune_root(node)

    def prune_root(self, root: Node) -> None:
        """Forget a root without edges and pins."""
        if not root.children and not root.pins:
            if self.roots.get(root.key) is root:
                del self.roots[root.key]
            self.flushed.pop(root, None)
            retire(root)

    # Pins

    def pin(self, node: Node) -> None:
        """Pin one edge (not its path) once more."""
        if not node.pins:
            self._count_pinned(node, 1)
        node.pins += 1

    def unpin_path(self, node: Node, stop: Node | None, released: Released) -> None:
        """Unpin from `node` up to, but without, `stop`; settle and offer what became free."""
        freed: list[Node] = []
        above: Node | None = node
        while above is not stop:
            assert above is not None, "`stop` is on the path"
            above.pins -= 1
            if not above.pins:
                freed.append(above)
                self._count_pinned(above, -1)
            above = above.parent
        for edge in freed:
            self.reconsider(edge, released)

    # Copies

    def place(self, copy: EdgeCopy, pages: Pages, arrival: object | None) -> None:
        """Give an edge a copy on a tier that has none. Takes `pages`."""
        node = copy.node
        copy.pages, copy.arrival = pages, arrival
        if arrival is not None:
            self.flights.setdefault(arrival, []).append(copy)
        count = self.counts[copy.tier]
        count.total += len(pages)
        node.home.pages[copy.tier] += len(pages)
        if node.pins:
            count.pinned += len(pages)
        if arrival is None:
            self.tell("sealed", copy, node.keys)
        if node.parent is not None:
            node.parent.copy(copy.tier).below += 1
        self.orders[copy.tier].placed(node)
        self.offer(node)

    def append(self, node: Node, tokens: bytes, pages: Pages) -> None:
        """Make an edge longer that has pages on the device only, and no children."""
        copy = node.device
        if copy.pages is None or node.host.pages is not None or node.children:
            raise UsageError("only a leaf with a copy on the device alone can grow")
        order = self.orders["device"]
        node.chain.extend(order.chain(node, tokens, self.page_bytes))
        keys = self.keys(node, tokens)
        node.keys += keys
        self.tell("sealed", copy, keys)
        node.home.pages["device"] += len(pages)
        node.tokens += tokens
        node.end += len(pages)
        copy.pages.extend(pages)
        count = self.counts["device"]
        count.total += len(pages)
        if node.pins:
            count.pinned += len(pages)
        order.appended(node, len(pages))

    def drop_copy(self, copy: EdgeCopy, released: Released) -> None:
        """Let one tier's copy of an edge go, whatever its state; the caller settles the edge."""
        pages, node = copy.pages, copy.node
        if pages is None:
            return
        self.orders[copy.tier].dropped(node)
        node.home.pages[copy.tier] -= len(pages)
        if copy.arrival is None:
            self.tell("evicted", copy, node.keys)
        pages.reverse()
        released.pages(copy.tier).extend(pages)
        copy.pages = copy.arrival = None
        count = self.counts[copy.tier]
        count.total -= len(pages)
        if node.pins:
            count.pinned -= len(pages)
        if (parent := node.parent) is not None:
            parent.copy(copy.tier).below -= 1
            self.offer(parent)
        self.offer(node)

    def place_tail(self, tail: Tail, tier: CacheTier, slot: int, arrival: object | None) -> None:
        """Give a tail a copy on a tier that has none. Takes `slot`."""
        self.tails.place(tail, tier, slot, arrival)
        if arrival is not None:
            self.flights.setdefault(arrival, []).append(tail.copy(tier))

    def offer(self, node: Node) -> None:
        """Let the eviction orders consider an edge, on each tier where it may be a leaf."""
        device, host = node.device, node.host
        is_leaf = device.pages is not None and not device.below
        is_host_leaf = host.pages is not None and not host.below
        if not (is_leaf or is_host_leaf) or node.pins or not (node.is_live and node.is_settled):
            return
        if is_leaf:
            self.orders["device"].offer(node)
        if is_host_leaf:
            self.orders["host"].offer(node)

    def reconsider(self, node: Node, released: Released) -> None:
        """Look again at an edge that something kept from going: offer it, or let it go now."""
        if node.parent is None:
            return
        if node.is_live and node.is_resident:
            self.offer(node)
        else:
            self.settle(node, released)

    # Keys

    def tell(self, change: Change, copy: EdgeCopy, keys: bytes) -> None:
        """Tell the observer, if there is one, what became of pages."""
        if self.observer is not None:
            self.observer(change, copy.tier, copy.node.home.identity, keys)

    def keys(self, above: Node, tokens: bytes) -> bytes:
        """Chain the keys of pages that follow `above`; nothing where nobody would hear of them."""
        if self.observer is None:
            return b""
        size, key, keys = self.page_bytes, above.keys[-PAGE_KEY_BYTES:], list[bytes]()
        for start in range(0, len(tokens), size):
            key = page_hash(key, tokens[start : start + size])
            keys.append(key)
        return b"".join(keys)

    # Inside

    def _count_pinned(self, node: Node, sign: int) -> None:
        for tier in TIERS:
            pages = node.copy(tier).pages
            if pages is not None:
                self.counts[tier].pinned += sign * len(pages)

    def _link(self, parent: Node, node: Node) -> None:
        key = node.tokens[self.page_bytes - self.key_bytes : self.page_bytes]
        if key in parent.children:
            key = node.tokens[: self.page_bytes]
            parent.crowded += 1
        node.parent, node.key = parent, key
        parent.children[key] = node

    def _unlink(self, parent: Node, node: Node) -> None:
        del parent.children[node.key]
        if len(node.key) != self.key_bytes:
            parent.crowded -= 1
        retire(node)
        self.num_nodes -= 1


def retire(node: Node) -> None:
    """Make a removed edge recognisable to whoever still refers to it."""
    node.parent = None
    node.is_live = False
    node.tokens = b""
    node.children = {}
    node.tails = {}
    node.device, node.host = GONE.device, GONE.host
