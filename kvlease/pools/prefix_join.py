"""How edges that nothing tells apart any more become one again.

It changes structure only: what is cached, pinned and in flight stays as it is.
"""

from array import array

from kvlease.pools.prefix_node import TIERS, Node
from kvlease.pools.prefix_tree import PrefixTree, retire


def join_path(tree: PrefixTree, bottom: Node) -> None:
    """Join single-child edges that are cached, pinned and used alike, from `bottom` up.

    The lowest edge of each run absorbs the others; no cursor ends at those, since pins are equal.
    O(path + bytes of the runs).
    """
    run = [bottom]
    node = bottom
    while (parent := node.parent) is not None and parent.parent is not None:
        if _may_join(tree, parent, node):
            run.append(parent)
        else:
            if len(run) > 1:
                _join(tree, run)
            run = [parent]
        node = parent
    if len(run) > 1:
        _join(tree, run)


def _may_join(tree: PrefixTree, upper: Node, lower: Node) -> bool:
    return (
        len(upper.children) == 1
        and upper.pins == lower.pins
        and upper.last_use == lower.last_use
        and upper.is_live
        and lower.is_live
        and upper.is_settled
        and lower.is_settled
        and (upper.device.pages is None) == (lower.device.pages is None)
        and (upper.host.pages is None) == (lower.host.pages is None)
        and all(order.may_join(upper, lower) for order in tree.orders.values())
    )


def _join(tree: PrefixTree, run: list[Node]) -> None:
    """Let ``run[0]`` absorb the edges above it, given from the bottom up."""
    lower, top = run[0], run[-1]
    parent = top.parent
    assert parent is not None, "a root is never joined"
    for upper in run[1:]:
        for order in tree.orders.values():
            order.joined(upper, lower)
        lower.hits = max(lower.hits, upper.hits)
    shift = lower.start - parent.end
    for tail in lower.tails.values():
        tail.offset += shift
    lower.tails = {tail.offset: tail for tail in lower.tails.values()}
    for upper in run[1:]:
        base = upper.start - parent.end
        for tail in upper.tails.values():
            tail.node, tail.offset = lower, tail.offset + base
            lower.tails[tail.offset] = tail
    downward = run[::-1]
    lower.tokens = b"".join([node.tokens for node in downward])
    lower.keys = b"".join([node.keys for node in downward])
    for tier in TIERS:
        if lower.copy(tier).pages is not None:
            lower.copy(tier).pages = _concatenate([node.copy(tier).pages for node in downward])
    lower.chain = _concatenate([node.chain for node in downward])
    parent.children[top.key] = lower
    lower.parent, lower.key = parent, top.key
    for upper in run[1:]:
        retire(upper)
    tree.num_nodes -= len(run) - 1


def _concatenate(parts: "list[array[int] | None]") -> "array[int]":
    whole = parts[0]
    assert whole is not None, "joined edges have their copies on the same tiers"
    for part in parts[1:]:
        assert part is not None, "joined edges have their copies on the same tiers"
        whole.extend(part)
    return whole
