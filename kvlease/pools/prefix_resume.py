"""How resume states (tails) enter and leave the prefix index.

Slots only; what a slot holds, and when a state is worth keeping, is the caller's.
"""

from kvlease.errors import UsageError
from kvlease.pools.prefix_node import CacheTier, Released, Tail
from kvlease.pools.prefix_results import Cursor, KeptTail
from kvlease.pools.prefix_tree import PrefixTree
from kvlease.pools.prefix_walk import edge_at


def put_tail(tree: PrefixTree, cursor: Cursor, boundary: int, slot: int) -> KeptTail:
    """Keep `slot` at a boundary of the cursor's path; hand back the slot it replaces, or itself."""
    if not 0 < boundary <= cursor.num_pages:
        raise UsageError(f"no page boundary {boundary} on a path of {cursor.num_pages} pages")
    node = edge_at(cursor.node, boundary)
    if not (node.is_live and node.is_resident):
        return KeptTail(None, slot)
    tail = tree.tails.find_or_make(node, boundary - node.start, cursor.use)
    device = tail.device
    if device.slot is None:
        tree.tails.place(tail, "device", slot, None)
        return KeptTail(tail, None)
    if tail.is_busy:
        # Somebody reads or fills the old slot; the new one holds the same state.
        return KeptTail(tail, slot)
    unused, device.slot = device.slot, slot
    tree.tails.offer(tail)
    return KeptTail(tail, unused)


def attach_tail(
    tree: PrefixTree, tail: Tail, tier: CacheTier, slot: int, arrival: object | None
) -> None:
    """Give a tail a slot on a tier where it has none, to be filled by a transfer."""
    if tail.node is None or tail.copy(tier).slot is not None:
        raise UsageError(f"the tail is gone or has a {tier} slot; pin it before planning")
    tree.place_tail(tail, tier, slot, arrival)


def drop_tail(tree: PrefixTree, tail: Tail) -> Released:
    """Let an idle tail go on both tiers."""
    released = Released()
    node = tail.node
    if node is None:
        return released
    if tail.is_busy:
        raise UsageError("a tail was dropped while pinned or in flight; wait for its transfer")
    for copy in (tail.device, tail.host):
        tree.tails.drop_copy(copy, released)
    tree.reconsider(node, released)
    return released
