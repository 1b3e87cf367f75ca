"""One identity's part of the tree: how much it holds, and how some of it is let go.

A tenant has an identity of its own, so this is what quotas, and evicting by prefix, are made of.
"""

from collections.abc import Iterator

from kvlease.pools.eviction import LazyHeap
from kvlease.pools.prefix_node import TIERS, CacheTier, Node, Released, evictable_pages
from kvlease.pools.prefix_tree import PrefixTree


def share(tree: PrefixTree, root: bytes, tier: CacheTier) -> int:
    """Count the pages that one identity holds on a tier; O(1)."""
    top = tree.roots.get(root)
    return 0 if top is None else top.home.pages[tier]


def _edges_from(tree: PrefixTree, root: bytes, prefix: bytes) -> list[Node]:
    """List the edges whose first page is the first one to hold all of `prefix`.

    Everything cached whose tokens begin with `prefix` is on them or below; an edge is split so that
    nothing else is. Unlike a match it goes on through edges that nobody can read now.
    """
    size = tree.page_bytes
    stop = max(0, len(prefix) - 1) // size * size
    head, rest = prefix[:stop], prefix[stop:]
    top = tree.roots.get(root)
    if top is None:
        return []
    node, offset = top, 0
    while offset < stop:
        child = tree.child(node, head, offset)
        if child is None:
            return []
        common = tree.common_pages(child, head, offset, stop)
        offset += common * size
        node = child
        if common < child.num_pages:
            if offset < stop or not child.tokens.startswith(rest, common * size):
                return []
            tree.split(child, common)
            return [child]
    return [child for child in node.children.values() if child.tokens.startswith(rest)]


def _and_below(tops: list[Node]) -> Iterator[Node]:
    nodes = list(tops)
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children.values())
        yield node


def count_below(tree: PrefixTree, root: bytes, prefix: bytes) -> int:
    """Count the copies of pages of one identity whose prefix begins with `prefix`; O(edges)."""
    nodes = _and_below(_edges_from(tree, root, prefix))
    return sum(len(node.copy(tier).pages or ()) for node in nodes for tier in TIERS)


def evict_below(
    tree: PrefixTree, root: bytes, tier: CacheTier, num_pages: int, prefix: bytes = b""
) -> Released:
    """Let up to `num_pages` idle pages of one identity go whose prefix begins with `prefix`.

    Leaves first, by least recent use among them, whatever the policy: it ranks what it is offered,
    and cannot be asked about a part. O(edges below the prefix).
    """
    released = Released()
    members = dict.fromkeys(_and_below(_edges_from(tree, root, prefix)))
    heap = LazyHeap[Node]()
    for node in members:
        if evictable_pages(node, tier):
            heap.push(node, node.last_use)
    while num_pages > 0 and (entry := heap.pop()) is not None:
        node, parent = entry[1], entry[1].parent
        count = min(evictable_pages(node, tier), num_pages)
        if count < node.num_pages:
            tree.split(node, node.num_pages - count)
        tree.drop_copy(node.copy(tier), released)
        tree.settle(node, released)
        num_pages -= count
        if parent in members and evictable_pages(parent, tier):
            heap.push(parent, parent.last_use)
    return released
