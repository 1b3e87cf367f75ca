"""Orders of one transfer brought together: by layer, as one, or held against the whole bundle.

The parts of orders are the same objects in every plan that moves them, so that what is found out
about them once is remembered: planning a load would be mostly this.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from operator import attrgetter

from kvlease.protocols.ports import CopyOrder, CopyParts

_REMEMBERED = 1024


def in_layer_order(orders: Iterable[CopyOrder]) -> tuple[CopyOrder, ...]:
    """Return the orders sorted by layer, keeping the order of components within a layer.

    Groups of layers that overlap, of pages and of a tail, become one order: a layer is there when
    all of it is.
    """
    joined: list[CopyOrder] = []
    for order in sorted(orders, key=_layer_of):
        if joined and _overlap(joined[-1].parts.ends, order.parts.ends):
            joined[-1] = _both(joined[-1], order)
        else:
            joined.append(order)
    return tuple(joined)


_layer_of = attrgetter("layer")


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two runs of layers do, the first of which begins no later; one layer is no run."""
    return other[0] <= one[1] and (one != other or one[0] < one[1])


def _both(one: CopyOrder, other: CopyOrder) -> CopyOrder:
    parts, order = _joined(one.parts, other.parts)
    return CopyOrder(
        one.transfer,
        one.kind,
        "host" if "host" in (one.source, other.source) else "device",
        parts,
        one.nbytes + other.nbytes,
        lambda: one.run() + other.run(),
        lambda: [(*one.sizes(), *other.sizes())[place] for place in order],
        lambda: [*one.places(), *other.places()],
        lambda: [*one.target(), *other.target()],
    )


@lru_cache(_REMEMBERED)
def _joined(one: CopyParts, other: CopyParts) -> tuple[CopyParts, tuple[int, ...]]:
    """Return both in layer order, and where each was in one's followed by other's."""
    both = (*one, *other)
    order = tuple(sorted(range(len(both)), key=lambda place: both[place].layer))
    return CopyParts(tuple(both[place] for place in order)), order


@lru_cache(_REMEMBERED)
def all_of(parts: tuple[CopyParts, ...]) -> CopyParts:
    """Return the parts of several orders, which come in layer order, as those of one."""
    return CopyParts(tuple(chain.from_iterable(parts)))


@lru_cache(_REMEMBERED)
def odd_parts(
    parts: tuple[CopyParts, ...], whole: frozenset[tuple[int, str]]
) -> tuple[tuple[int, str], ...]:
    """Return the parts of some orders that are not in the whole, and those that are missing."""
    return tuple(sorted(frozenset(chain.from_iterable(parts)) ^ whole))
