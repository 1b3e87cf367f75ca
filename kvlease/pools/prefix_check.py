"""A full recount of the prefix index, to hold its running counts and structure against.

Written apart from the code that keeps the counts, and from the edges alone.
"""

from collections import Counter

from attrs import frozen

from kvlease.errors import LedgerImbalance
from kvlease.pools.prefix_node import TIERS, CacheTier, Home, Node
from kvlease.pools.prefix_tails import TierCount
from kvlease.pools.prefix_tree import PrefixTree


@frozen
class Holdings:
    """Every page and every tail slot that the index names, by tier."""

    pages: dict[CacheTier, list[int]]
    tails: dict[CacheTier, list[int]]


def check_tree(tree: PrefixTree) -> Holdings:
    """Return what the index holds, found from its edges alone; O(bytes).

    Raises `LedgerImbalance` for the first count or rule that does not hold.
    """
    pages = {tier: TierCount() for tier in TIERS}
    slots = {tier: TierCount() for tier in TIERS}
    seen: dict[CacheTier, Counter[int]] = {tier: Counter() for tier in TIERS}
    seen_slots: dict[CacheTier, Counter[int]] = {tier: Counter() for tier in TIERS}
    shares: dict[CacheTier, Counter[Home]] = {tier: Counter() for tier in TIERS}
    in_flight = 0
    edges = 0
    roots = [*tree.roots.values(), *tree.flushed]
    for identity, root in tree.roots.items():
        _require(root.is_live and root.key == identity, "a root is not under its identity")
    nodes = list(roots)
    for node in nodes:
        nodes.extend(node.children.values())
        _check_links(tree, node)
        if node.parent is None:
            continue
        edges += 1
        _check_edge(tree, node)
        for tier in TIERS:
            copy = node.copy(tier)
            in_flight += copy.arrival is not None
            _require(
                copy.arrival is None or copy in tree.flights.get(copy.arrival, ()),
                "a filling copy is not booked under its transfer",
            )
            if copy.pages is not None:
                pages[tier].total += len(copy.pages)
                pages[tier].pinned += len(copy.pages) if node.pins else 0
                seen[tier].update(copy.pages)
                shares[tier][node.home] += len(copy.pages)
        for tail in node.tails.values():
            for tier in TIERS:
                place = tail.copy(tier)
                in_flight += place.arrival is not None
                if place.slot is not None:
                    slots[tier].total += 1
                    slots[tier].pinned += tail.pins > 0
                    seen_slots[tier][place.slot] += 1
    _require(edges == tree.num_nodes, f"{edges} edges, counted as {tree.num_nodes}")
    _require(
        in_flight == sum(map(len, tree.flights.values())),
        "transfers are booked for copies that do not wait for them",
    )
    for tier in TIERS:
        for home in {root.home for root in roots}:
            _require(home.pages[tier] == shares[tier][home], "an identity's share is off")
        _require(pages[tier] == tree.counts[tier], f"{tier}: {pages[tier]} {tree.counts[tier]}")
        kept = tree.tails.counts[tier]
        _require(slots[tier] == kept, f"{tier} tails: {slots[tier]} counted as {kept}")
        for held in (seen[tier], seen_slots[tier]):
            twice = [name for name, count in held.items() if count > 1]
            _require(not twice, f"{tier}: held twice: {twice}")
    return Holdings({t: list(seen[t]) for t in TIERS}, {t: list(seen_slots[t]) for t in TIERS})


def _check_links(tree: PrefixTree, node: Node) -> None:
    """Hold what an edge says of its children against the children."""
    size, short = tree.page_bytes, tree.key_bytes
    shown = [child for key, child in node.children.items() if len(key) <= size]
    firsts = {child.tokens[:size] for child in shown}
    _require(len(firsts) == len(shown), "two children start with the same page")
    long_keys = 0
    for key, child in node.children.items():
        _require(child.parent is node and child.key == key, "a child is not linked both ways")
        long_keys += len(key) != short
        if len(key) > size:
            _require(not child.is_live, "a hidden child is live")
            continue
        expected = child.tokens[:size] if len(key) != short else child.tokens[size - short : size]
        _require(key == expected, "a child is under a key that is not its first page's")
    _require(node.crowded == long_keys, f"{long_keys} long keys, counted as {node.crowded}")
    _require(
        node.pins >= sum(child.pins for child in node.children.values()),
        "an edge has fewer pins than its children",
    )
    for tier in TIERS:
        below = sum(child.copy(tier).pages is not None for child in node.children.values())
        _require(node.copy(tier).below == below, f"{below} {tier} copies below, counted otherwise")


def _check_edge(tree: PrefixTree, node: Node) -> None:
    """Check one edge's lengths, residency, order of use and tails."""
    count = node.num_pages
    parent = node.parent
    assert parent is not None, "a root is no edge"
    _require(count > 0 and len(node.tokens) == count * tree.page_bytes, "an edge's length is off")
    _require(len(node.chain) in (0, count), "an edge's hashes are off")
    _require(node.keys == tree.keys(parent, node.tokens), "an edge's keys are off")
    _require(node.home is parent.home, "an edge is of another identity than its parent")
    _require(parent.is_live or not node.is_live, "a live edge hangs below a flushed one")
    _require(
        parent.parent is None or parent.last_use >= node.last_use,
        "an edge was used later than its parent",
    )
    _require(node.is_resident or node.children or node.pins or node.tails, "an empty edge was left")
    _require(
        node.is_live or node.pins or not node.is_settled or not node.is_resident,
        "a flushed edge holds pages for nobody",
    )
    for tier in TIERS:
        copy = node.copy(tier)
        _require(copy.pages is None or len(copy.pages) == count, f"{tier} pages do not fit")
        _require(copy.pages is not None or copy.arrival is None, "an absent copy is arriving")
    for offset, tail in node.tails.items():
        _require(tail.node is node and tail.offset == offset, "a tail is not linked both ways")
        _require(0 < offset <= count, "a tail lies outside its edge")
        _require(tail.device.slot is not None or tail.host.slot is not None, "a tail without slots")
        _require(node.is_resident or tail.is_busy, "a tail outlived its page")


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise LedgerImbalance(f"prefix index: {otherwise}")
