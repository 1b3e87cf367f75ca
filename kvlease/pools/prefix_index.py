"""The prefix index: which pages of which prefix are cached, where, for whom, and what goes next.

A path-compressed radix tree over token bytes, edges cut at page boundaries, one root for each
cache identity, over the device and host tiers. It keeps structure and residency only: callers
hand it page ids and get the released ones back. It knows nothing of memory, of transfers beyond
their identity, or of waiting.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, final

from kvlease.errors import UsageError
from kvlease.pools.eviction import EvictionOrder, LruOrder
from kvlease.pools.eviction_s3fifo import S3FifoOrder
from kvlease.pools.prefix_check import Holdings, check_tree
from kvlease.pools.prefix_evict import condemn, evict, flush, next_unstored
from kvlease.pools.prefix_extend import extend
from kvlease.pools.prefix_join import join_path
from kvlease.pools.prefix_node import TIERS, CacheTier, Node, Pages, Released, Tail, no_pages
from kvlease.pools.prefix_results import (
    Attached,
    Cursor,
    Extended,
    IndexStatistics,
    KeptTail,
    Match,
)
from kvlease.pools.prefix_resume import attach_tail, drop_tail, put_tail
from kvlease.pools.prefix_transfers import attach, attach_match, end_flight, lose_flight
from kvlease.pools.prefix_tree import PrefixTree
from kvlease.pools.prefix_walk import cut_to_tail, edge_at, enter, path_to, walk

Policy: TypeAlias = Literal["lru", "s3fifo"]
"""Eviction policy of both tiers."""


def _order(policy: Policy, tier: CacheTier) -> EvictionOrder:
    return LruOrder() if policy == "lru" else S3FifoOrder(tier)


@final
class PrefixIndex:
    """Prefixes of all cache identities over the device and host tiers. Not thread-safe.

    Every page id and slot given to it is either held or has been released exactly once.

    Attributes:
        tree: the edges, for those who look after one identity's part of them.
    """

    __slots__ = ("_clock", "_needs_tail", "tree")

    def __init__(self, page_bytes: int, needs_tail: bool, policy: Policy = "lru") -> None:
        """Start empty.

        Args:
            page_bytes: bytes of one page's tokens (4 for each token).
            needs_tail: whether computing can resume only where a tail is kept.
            policy: which pages go first on both tiers.
        """
        if page_bytes <= 0 or page_bytes % 4:
            raise UsageError(f"page_bytes is {page_bytes}; give 4 times the tokens of a page")
        self.tree = PrefixTree(page_bytes, {tier: _order(policy, tier) for tier in TIERS})
        self._needs_tail = needs_tail
        self._clock = 0

    # Requests

    def match(self, root: bytes, tokens: bytes, limit_pages: int) -> Match:
        """Find, pin and stamp the usable prefix of a prompt.

        Usable are the leading pages that are on the device (loading ones too: one load serves
        many) or have arrived on the host, up to the first gap and to `limit_pages`; with tails,
        cut back to the deepest usable one. The last edge is split so that the path ends there.

        Ownership:
            borrows `tokens`; returns a cursor that the caller must release. The tail is not
            pinned.
        Units:
            `tokens` are int32 bytes; `limit_pages` counts pages.
        Complexity:
            one memory comparison of the prefix + O(edges); O(bytes) more where an edge is split.
        """
        tree = self.tree
        self._clock = use = self._clock + 1
        size = tree.page_bytes
        stop = min(len(tokens) // size, limit_pages) * size
        top = tree.add_root(root)
        path, matched = walk(tree, top, tokens, stop)
        count, tail = matched, None
        if self._needs_tail:
            count, tail = cut_to_tail(path, matched)
            if tail is not None:
                tail.last_use = use
        if path and path[-1].end > count:
            path[-1] = tree.split(path[-1], count - path[-1].start)
        cursor = Cursor(path[-1] if path else top, use)
        match = Match(cursor, count, no_pages(), [], [], tail, matched, 0, 0)
        top.pins += 1
        enter(tree, path, match)
        return match

    def fork(self, where: Cursor | Node) -> Cursor:
        """Return a second cursor at the same place, or one at an edge's end. O(edges).

        It pins the path like any other and is released on its own.
        """
        end, use = (where.node, where.use) if isinstance(where, Cursor) else (where, where.last_use)
        node: Node | None = end
        while node is not None:
            self.tree.pin(node)
            node = node.parent
        return Cursor(end, use)

    def touch(self, cursor: Cursor) -> None:
        """Stamp the path as used now, as a new request would; for sequences that run long."""
        self._clock += 1
        cursor.use = self._clock
        node: Node | None = cursor.node
        while node is not None:
            node.last_use = cursor.use
            node = node.parent

    def release(self, cursor: Cursor) -> Released:
        """End a cursor (moves it): unpin its path and join edges that nothing tells apart.

        Returns what nobody can reach any more: pages of flushed paths, otherwise nothing.
        O(edges + bytes joined).
        """
        released = Released()
        node = cursor.node
        cursor.move(None)
        tree = self.tree
        root = node
        while root.parent is not None:
            root = root.parent
        tree.unpin_path(node, None, released)
        tree.prune_root(root)
        if node.is_live and node.parent is not None:
            below = next(iter(node.children.values())) if len(node.children) == 1 else node
            join_path(tree, below)
        return released

    def abandon(self, cursor: Cursor) -> Released:
        """End a cursor whose match came to nothing: as `release`, and it counts as no hit."""
        for node in path_to(cursor.node):
            node.hits = max(0, node.hits - 1)
        return self.release(cursor)

    def rewind(self, cursor: Cursor, num_pages: int) -> Released:
        """Move a cursor up to a boundary on its own path; what was below loses its pin.

        For a sequence that recomputes a span after a failed load: extend from there refills the
        holes. Returns as `release` does.
        """
        node = cursor.node
        if not 0 <= num_pages <= node.end:
            raise UsageError(f"cannot rewind to page {num_pages} of {node.end}; go up only")
        released = Released()
        target = edge_at(node, num_pages)
        if target.end > num_pages:
            target = self.tree.split(target, num_pages - target.start)
        cursor.move(target)
        self.tree.unpin_path(node, target, released)
        return released

    def extend(self, cursor: Cursor, tokens_so_far: bytes, pages: Pages) -> Extended:
        """Add sealed pages below a cursor and move it, with its pin, to their end.

        Pages that are cached on the device already are not taken; a hole, or an edge on the host
        only, takes them. A flushed path takes none, and the cursor stays.

        Ownership:
            borrows `pages`; the index holds those it takes, the caller keeps the others.

        Args:
            cursor: the sequence's place.
            tokens_so_far: all tokens up to the end of `pages`, or those of `pages` alone.
            pages: device page ids, sealed and arrived.

        Raises:
            UsageError: the tokens have another length.
        Complexity:
            O(bytes of the pages, and of an edge that grows or is split).
        """
        return extend(self.tree, cursor, tokens_so_far, pages)

    def path_pages(self, cursor: Cursor) -> Pages:
        """Return the device page ids from the root to the cursor; -1 where the device has none."""
        pages = no_pages()
        for node in path_to(cursor.node):
            held = node.device.pages
            pages.extend(held if held is not None else [-1] * node.num_pages)
        return pages

    # Transfers

    def attach_device(
        self, where: Match | Sequence[Node], pages: Pages, arrival: object | None
    ) -> Attached:
        """Give device pages to edges on the host only, to be filled by one transfer.

        With a match, `pages` stand for its -1 entries, in order, and the match is brought up to
        date: where another load was first, its pages and its arrival are used instead; an entry
        whose host copy was lost meanwhile stays -1.

        Ownership:
            borrows `pages`; the index holds all but the `unused` ones.

        Raises:
            UsageError: the number of pages is wrong, an edge is gone or has pages there already,
                or the match's cursor was moved.
        """
        if isinstance(where, Match):
            return attach_match(self.tree, where, pages, arrival)
        attach(self.tree, [node.device for node in where], pages, arrival)
        return Attached(list(where), no_pages())

    def plan_store(self, where: Cursor | Sequence[Node], min_hits: int = 0) -> list[Node]:
        """List edges to copy to the host: arrived on the device, without a host copy.

        Args:
            where: a cursor (its path is searched, from the root down) or edges.
            min_hits: leave out edges found by fewer requests than this.
        """
        nodes = path_to(where.node) if isinstance(where, Cursor) else where
        return [
            node
            for node in nodes
            if node.device.pages is not None
            and node.device.arrival is None
            and node.host.pages is None
            and node.hits >= min_hits
        ]

    def attach_host(self, nodes: Sequence[Node], pages: Pages, arrival: object | None) -> None:
        """Give host pages to edges without a host copy, to be filled by one transfer.

        Ownership:
            borrows `pages`; the index holds them.

        Raises:
            UsageError: the number of pages is wrong, or an edge is gone or has pages there.
        """
        attach(self.tree, [node.host for node in nodes], pages, arrival)

    def arrived(self, arrival: object) -> Released:
        """Note that a transfer has filled everything it was attached to.

        A transfer that fills nothing (any more) is fine. Returns what only waited for it: copies
        flushed meanwhile.
        """
        return end_flight(self.tree, arrival)

    def lost(self, arrival: object, *, drop_host: bool = False) -> Released:
        """Note that a transfer failed: let go what it should have filled, even if pinned.

        Readers of pinned pages must not use them and recompute; pages return to the pools through
        quarantine, so their memory outlives those readers. An edge with another copy keeps it;
        an edge with none becomes a hole, and everything below it stays for when it is refilled.

        Args:
            arrival: the failed transfer.
            drop_host: the host copies that it read are bad too.
        """
        return lose_flight(self.tree, arrival, drop_host=drop_host)

    # Tails

    def put_tail(self, cursor: Cursor, page_boundary: int, device_slot: int) -> KeptTail:
        """Keep a resume state at a boundary on the cursor's path.

        An idle older slot is replaced; one that a transfer reads or fills stays.

        Ownership:
            takes `device_slot`; the `unused` slot of the result belongs to the caller.

        Args:
            cursor: whose path it is.
            page_boundary: pages from the root, 1 to the cursor's.
            device_slot: the slot that holds the state.
        """
        if not self._needs_tail:
            raise UsageError("put_tail on an index without tails; make it with needs_tail=True")
        return put_tail(self.tree, cursor, page_boundary, device_slot)

    def attach_tail_device(self, tail: Tail, slot: int, arrival: object | None) -> None:
        """Give a tail on the host a device slot, filled by a transfer. Takes `slot`."""
        attach_tail(self.tree, tail, "device", slot, arrival)

    def attach_tail_host(self, tail: Tail, slot: int, arrival: object | None) -> None:
        """Give a tail on the device a host slot, filled by a transfer. Takes `slot`."""
        attach_tail(self.tree, tail, "host", slot, arrival)

    def pin_tail(self, tail: Tail) -> None:
        """Keep a tail's slots where they are, while a transfer or a restore reads them."""
        self.tree.tails.pin(tail)

    def unpin_tail(self, tail: Tail) -> Released:
        """End one `pin_tail`. Returns slots that only waited for it."""
        self.tree.tails.unpin(tail)
        released = Released()
        if tail.node is not None:
            self.tree.reconsider(tail.node, released)
        return released

    def drop_tail(self, tail: Tail) -> Released:
        """Let a tail go on both tiers.

        Raises:
            UsageError: a transfer reads or fills it.
        """
        return drop_tail(self.tree, tail)

    def evict_tails(self, num_tails: int, tier: CacheTier) -> Released:
        """Let up to `num_tails` idle slots of a tier go, least recently used first."""
        released = Released()
        for node in self.tree.tails.evict(tier, num_tails, released):
            self.tree.reconsider(node, released)
        return released

    # Eviction

    def evict_device(self, num_pages: int, can_drop: bool = True) -> Released:
        """Let up to `num_pages` device pages go, leaves first, in the policy's order.

        Never pages that are pinned, being filled, or being read by a store. Where it was the last
        copy, the page's tail goes too.

        Args:
            num_pages: pages wanted; fewer come back if fewer may go.
            can_drop: whether last copies may go; if not, only pages that the host has as well.
        Complexity:
            O(log n) amortised for each edge; O(bytes) more for the one that is cut.
        """
        return evict(self.tree, "device", num_pages, copied_only=not can_drop)

    def evict_host(self, num_pages: int) -> Released:
        """Let up to `num_pages` host pages go; as `evict_device`."""
        return evict(self.tree, "host", num_pages, copied_only=False)

    def evictable_unstored(self, num_pages: int) -> list[Node]:
        """List the edges without a host copy among the next `num_pages` device evictions.

        A write-back cache stores these first. Edges are cut so that no page beyond is listed.
        """
        return next_unstored(self.tree, num_pages)

    def clear(self, identity: bytes | None = None) -> Released:
        """Flush one identity or all: unpinned entries go, pinned ones become unreachable.

        What is pinned or in flight is released later, by the call that ends the pin or the
        transfer. O(edges).
        """
        return flush(self.tree, identity)

    def condemn(self, cursor: Cursor, number: int) -> Released:
        """Flush one page of a cursor's path, by its number, and everything below it.

        For a page whose bytes are wrong: nothing computed from it is right. As `clear` otherwise.
        """
        return condemn(self.tree, cursor.node, number)

    # Accounts

    def statistics(self) -> IndexStatistics:
        """Return the counts of this moment; O(1)."""
        pages, tails = self.tree.counts, self.tree.tails.counts
        return IndexStatistics(
            num_nodes=self.tree.num_nodes,
            device_pages=pages["device"].total,
            device_pages_pinned=pages["device"].pinned,
            host_pages=pages["host"].total,
            host_pages_pinned=pages["host"].pinned,
            device_tails=tails["device"].total,
            device_tails_pinned=tails["device"].pinned,
            host_tails=tails["host"].total,
            host_tails_pinned=tails["host"].pinned,
        )

    def check(self) -> Holdings:
        """Recount everything by full scan and return what is held; O(bytes).

        Raises:
            LedgerImbalance: a count is off or a structural rule is broken.
        """
        return check_tree(self.tree)
