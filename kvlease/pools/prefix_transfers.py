"""How transfers show in the prefix index: attached when planned, then arrived or lost.

A transfer is any object; the index only compares its identity and never waits for it.
"""

from collections.abc import Sequence

from kvlease.errors import UsageError
from kvlease.pools.prefix_node import EdgeCopy, Node, Pages, Released, TailCopy, no_pages
from kvlease.pools.prefix_results import Attached, Match
from kvlease.pools.prefix_tree import PrefixTree
from kvlease.pools.prefix_walk import path_to


def attach(
    tree: PrefixTree, copies: Sequence[EdgeCopy], pages: Pages, arrival: object | None
) -> None:
    """Give each of `copies` its share of `pages`, in order; all or, on an error, none."""
    counts = [copy.node.num_pages for copy in copies]
    for copy in copies:
        if copy.node.parent is None or copy.pages is not None:
            raise UsageError("an edge is gone or has pages on this tier; plan again", "R7")
    if sum(counts) != len(pages) or len(set(copies)) != len(copies):
        raise UsageError(f"{len(pages)} pages given for edges of {counts} pages; name each once")
    done = 0
    for copy, count in zip(copies, counts, strict=True):
        tree.place(copy, pages[done : done + count], arrival)
        done += count


def attach_match(tree: PrefixTree, match: Match, pages: Pages, arrival: object | None) -> Attached:
    """Give `pages` to the missing entries of a match that are still missing."""
    missing = match.pages.count(-1)
    if match.cursor.num_pages != match.num_pages or missing != len(pages):
        raise UsageError(
            f"{len(pages)} pages for {missing} missing ones of a match of {match.num_pages}, "
            f"cursor at {match.cursor.num_pages}; attach before moving the cursor"
        )
    attached = Attached([], no_pages())
    used = 0
    for node in path_to(match.cursor.node):
        start, end = node.start, node.end
        wanted = match.pages[start:end].count(-1)
        if not wanted:
            continue
        given = pages[used : used + wanted]
        used += wanted
        if wanted == end - start and _is_loadable(node):
            tree.place(node.device, given, arrival)
            attached.nodes.append(node)
        else:
            attached.unused.extend(given)
        device = node.device
        if device.pages is not None:
            match.pages[start:end] = device.pages
            if device.arrival is not None and device.arrival not in match.arrivals:
                match.arrivals.append(device.arrival)
    match.to_load.clear()
    return attached


def _is_loadable(node: Node) -> bool:
    host = node.host
    return node.device.pages is None and host.pages is not None and host.arrival is None


def end_flight(tree: PrefixTree, arrival: object) -> Released:
    """Mark everything that the transfer filled as arrived."""
    released = Released()
    copies = tree.flights.pop(arrival, [])
    for copy in copies:
        copy.arrival = None
        if isinstance(copy, EdgeCopy):
            tree.tell("restored" if copy.tier == "device" else "stored", copy, copy.node.keys)
    for copy in copies:
        _reconsider(tree, copy, released)
    return released


def lose_flight(tree: PrefixTree, arrival: object, *, drop_host: bool) -> Released:
    """Let go everything that the transfer should have filled, and its host sources if bad."""
    released = Released()
    copies = tree.flights.pop(arrival, [])
    # A tail forgets its edge when its last copy goes, and the edge has to be looked at after that.
    nodes = [copy.node if isinstance(copy, EdgeCopy) else copy.tail.node for copy in copies]
    for copy in copies:
        if isinstance(copy, EdgeCopy):
            tree.drop_copy(copy, released)
            if drop_host and copy.node.host.arrival is None:
                tree.drop_copy(copy.node.host, released)
        else:
            tree.tails.drop_copy(copy, released)
            if drop_host and copy.tail.host.arrival is None:
                tree.tails.drop_copy(copy.tail.host, released)
    for copy, node in zip(copies, nodes, strict=True):
        _reconsider(tree, copy, released)
        if node is not None:
            tree.reconsider(node, released)
    return released


def _reconsider(tree: PrefixTree, copy: EdgeCopy | TailCopy, released: Released) -> None:
    """Look again at what a transfer kept from going."""
    if isinstance(copy, TailCopy):
        tree.tails.offer(copy.tail)
        if copy.tail.node is not None:
            tree.reconsider(copy.tail.node, released)
    else:
        tree.reconsider(copy.node, released)
