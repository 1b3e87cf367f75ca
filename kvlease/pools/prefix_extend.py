"""How newly sealed pages enter the tree below a running sequence's cursor.

It decides where pages go; the tree keeps the counts.
"""

from kvlease.errors import UsageError
from kvlease.pools.prefix_node import Node, Pages, no_pages
from kvlease.pools.prefix_results import Cursor, Extended
from kvlease.pools.prefix_tree import PrefixTree

GROWING_BYTES = 1 << 16
"""An edge longer than this does not grow: growing copies it, and a running sequence may seal a page
every few steps. The pieces are joined when the sequence ends."""


def extend(tree: PrefixTree, cursor: Cursor, tokens_so_far: bytes, pages: Pages) -> Extended:
    """Do what `PrefixIndex.extend` promises."""
    node = cursor.node
    if not node.is_live:
        return Extended(0, pages[:])
    size = tree.page_bytes
    length = len(pages) * size
    if len(tokens_so_far) not in (length, length + node.end * size):
        raise UsageError(
            f"{len(tokens_so_far)} bytes of tokens do not end {len(pages)} pages below page "
            f"{node.end}; pass all tokens up to the pages' end, or theirs alone"
        )
    tokens = tokens_so_far[len(tokens_so_far) - length :]
    not_taken = no_pages()
    done = 0
    while done < len(pages):
        child = tree.child(node, tokens, done * size)
        if child is None:
            break
        node = _follow(tree, child, tokens, done * size, cursor.use)
        common = node.num_pages
        if node.device.pages is None:
            tree.place(node.device, pages[done : done + common], None)
        else:
            not_taken.extend(pages[done : done + common])
        done += common
    while done < len(pages):
        node, count = _grow(tree, node, tokens[done * size :], pages[done:], cursor.use)
        done += count
    cursor.move(node)
    return Extended(len(pages) - len(not_taken), not_taken)


def _follow(tree: PrefixTree, child: Node, tokens: bytes, offset: int, use: int) -> Node:
    """Pin and stamp the part of an existing edge that stands at `offset`, and return it."""
    common = tree.common_pages(child, tokens, offset, len(tokens))
    if common < child.num_pages:
        child = tree.split(child, common)
    tree.pin(child)
    # Another request may have stamped it since; a parent is never staler than its child.
    child.last_use = max(child.last_use, use)
    child.hits += 1
    return child


def _grow(tree: PrefixTree, node: Node, tokens: bytes, pages: Pages, use: int) -> tuple[Node, int]:
    """Add the leading pages that the policy places alike; return their edge and their number.

    The edge itself grows if it is a short leaf of this sequence alone, on the device alone, and of
    the same use; otherwise a new edge hangs below it.
    """
    order = tree.orders["device"]
    chain = order.chain(node, tokens, tree.page_bytes)
    count = order.alike_run(chain, len(pages))
    tokens, pages = tokens[: count * tree.page_bytes], pages[:count]
    device = node.device
    if (
        device.pages is not None
        and device.arrival is None
        and node.host.pages is None
        and not node.children
        and node.pins == 1
        and node.last_use == use
        and len(node.tokens) < GROWING_BYTES
        and order.may_append(node, chain)
    ):
        tree.append(node, tokens, pages)
        return node, count
    child = tree.add_child(node, tokens, use)
    tree.pin(child)
    tree.place(child.device, pages, None)
    return child, count
