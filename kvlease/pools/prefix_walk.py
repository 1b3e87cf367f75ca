"""How a prompt finds its cached prefix: down the edges, then back to where computing can resume.

It finds paths and enters them; it changes neither structure nor residency.
"""

from kvlease.pools.prefix_node import Node, Tail
from kvlease.pools.prefix_results import Match
from kvlease.pools.prefix_tree import PrefixTree


def walk(tree: PrefixTree, root: Node, tokens: bytes, stop: int) -> tuple[list[Node], int]:
    """Follow `tokens` down to `stop` (in bytes) for as long as the edges can be read.

    An edge can be read if it is on the device, arrived or on its way, or has arrived on the host;
    the first gap ends the walk.

    Returns:
        The edges, and how many pages of them match; the last edge may be longer.

    Whole edges are compared in place, so the cost is one memory comparison of the prefix, one
    short look-up for each edge, and one bisection at the end.
    """
    size = tree.page_bytes
    skip = size - tree.key_bytes
    startswith = tokens.startswith
    path: list[Node] = []
    node = root
    offset = 0
    while offset < stop:
        child = node.children.get(tokens[offset + skip : offset + size])
        common = -1
        if child is None or not startswith(child.tokens, offset):
            child = tree.child(node, tokens, offset)
            if child is None:
                break
            common = tree.common_pages(child, tokens, offset, stop) * size
        if child.device.pages is None and (
            child.host.pages is None or child.host.arrival is not None
        ):
            break
        path.append(child)
        length = len(child.tokens)
        if 0 <= common < length:
            offset += common
            break
        offset += length
        node = child
    # The last edge may lead past `stop`: its bytes are in `tokens`, but the caller wants fewer.
    return path, min(offset, stop) // size


def cut_to_tail(path: list[Node], num_pages: int) -> tuple[int, Tail | None]:
    """Find the deepest usable tail within the first `num_pages` of a path.

    Shortens `path` so that its last edge holds the tail. Returns the boundary and the tail, or 0
    and None. O(edges given up + tails of the edge searched).
    """
    while path:
        node = path[-1]
        start = node.start
        tails = node.tails
        if tails:
            best = tails.get(num_pages - start)
            if best is None or not best.is_usable:
                best = None
                limit = num_pages - start
                for offset, tail in tails.items():
                    if (
                        offset <= limit
                        and tail.is_usable
                        and (best is None or offset > best.offset)
                    ):
                        best = tail
            if best is not None:
                return start + best.offset, best
        path.pop()
        num_pages = start
    return 0, None


def enter(tree: PrefixTree, path: list[Node], match: Match) -> None:
    """Pin and stamp the edges of a match and note where their pages are."""
    use = match.cursor.use
    pages, arrivals = match.pages, match.arrivals
    device_pinned = host_pinned = 0
    for node in path:
        device = node.device
        held = device.pages
        if held is None:
            count = node.num_pages
            pages.extend([-1] * count)
            match.host_pages += count
            match.to_load.append(node)
        else:
            pages += held
            if device.arrival is not None and device.arrival not in arrivals:
                arrivals.append(device.arrival)
        if not node.pins:
            device_pinned += len(held) if held is not None else 0
            on_host = node.host.pages
            host_pinned += len(on_host) if on_host is not None else 0
        node.pins += 1
        node.hits += 1
        node.last_use = use
    match.device_pages = match.num_pages - match.host_pages
    counts = tree.counts
    counts["device"].pinned += device_pinned
    counts["host"].pinned += host_pinned


def path_to(node: Node) -> list[Node]:
    """List the edges from the root down to `node`."""
    path: list[Node] = []
    while (parent := node.parent) is not None:
        path.append(node)
        node = parent
    path.reverse()
    return path


def edge_at(node: Node, boundary: int) -> Node:
    """Find the edge on the path to `node` that holds a page boundary; the root holds 0."""
    while node.parent is not None and node.start >= boundary:
        node = node.parent
    return node
