"""How pages leave the prefix index: evicted leaf first, listed for storing first, or flushed.

The policy ranks; the edges say what may go; the tree lets it go.
"""

from kvlease.pools.prefix_node import CacheTier, Node, Released, evictable_pages
from kvlease.pools.prefix_tree import PrefixTree
from kvlease.pools.prefix_walk import edge_at


def evict(tree: PrefixTree, tier: CacheTier, num_pages: int, *, copied_only: bool) -> Released:
    """Let up to `num_pages` pages of a tier go, the trailing ones of each edge first."""
    released = Released()
    order = tree.orders[tier]

    def admits(node: Node) -> int:
        return evictable_pages(node, tier)

    while num_pages > 0 and (node := order.take(admits, copied_only=copied_only)) is not None:
        count = min(admits(node), num_pages)
        if count < node.num_pages:
            tree.split(node, node.num_pages - count)
        tree.drop_copy(node.copy(tier), released)
        tree.settle(node, released)
        num_pages -= count
    return released


def next_unstored(tree: PrefixTree, num_pages: int) -> list[Node]:
    """List the last copies among the next `num_pages` device evictions, in eviction order.

    Plays the evictions through without doing them: taken edges count as gone, so that their
    parents come into play, and are offered again at the end. O(log n) amortised for each edge.
    """
    order = tree.orders["device"]
    gone: dict[Node, None] = {}
    gone_below: dict[Node, int] = {}
    unstored: list[Node] = []

    def admits(node: Node) -> int:
        return 0 if node in gone else evictable_pages(node, "device", gone_below.get(node, 0))

    while num_pages > 0 and (node := order.take(admits, copied_only=False)) is not None:
        count = min(admits(node), num_pages)
        gone[node] = None
        is_whole = count == node.num_pages
        num_pages -= count
        if node.host.pages is None:
            if not is_whole:
                tree.split(node, node.num_pages - count)
            unstored.append(node)
        parent = node.parent
        if is_whole and parent is not None and parent.parent is not None:
            below = gone_below[parent] = gone_below.get(parent, 0) + 1
            if below == parent.device.below and parent.device.pages is not None:
                order.offer(parent)
    for node in gone:
        tree.offer(node)
    return unstored


def flush(tree: PrefixTree, identity: bytes | None) -> Released:
    """Let all idle entries of an identity (or of all) go and make the others unreachable."""
    released = Released()
    identities = list(tree.roots) if identity is None else [identity]
    for name in identities:
        root = tree.roots.pop(name, None)
        if root is None:
            continue
        tree.flushed[root] = None
        _let_go_below(tree, root, released)
    return released


def condemn(tree: PrefixTree, node: Node, number: int) -> Released:
    """Flush the page with this number on the path to `node`, and everything below it."""
    released = Released()
    top = edge_at(node, number + 1)
    if top.is_live and top.parent is not None:
        if top.start < number:
            tree.split(top, number - top.start)
        tree.hide(top)
        _let_go_below(tree, top, released)
    return released


def _let_go_below(tree: PrefixTree, top: Node, released: Released) -> None:
    """Make all from `top` down unreachable; what is pinned or in flight follows when it is not."""
    nodes = [top]
    for node in nodes:
        node.is_live = False
        nodes.extend(node.children.values())
    # Children before parents, so that empty parents follow at once.
    for node in reversed(nodes):
        tree.settle(node, released)
