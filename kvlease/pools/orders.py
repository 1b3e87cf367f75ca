"""The copy orders of loads and stores over one memory.

Without a carrier a load has an order for each component. A carrier moves some layers of all pages
at once, and of the tail with them, because a layer is there when all of it is: then there is one
for each such share. Nobody reads a store before its end, so it is one order. What a share consists
of does not depend on the transfer, and is found out once: planning would be mostly that.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import final

import torch
from attrs import frozen

from kvlease.pools.carriage import Direction, Ends, Move, Numbers, Resumed, carry
from kvlease.pools.copies import (
    Numbered,
    index_tensor,
    numbered_parts,
    resume_orders,
    span_orders,
    store_orders,
    tail_orders,
)
from kvlease.pools.memory import Memory
from kvlease.pools.prefix_node import CacheTier
from kvlease.pools.storage import TailStore
from kvlease.protocols.host_layout import LayerGroup, move_ranges
from kvlease.protocols.ports import CopyOrder, CopyPart, CopyParts
from kvlease.units import TransferId


@frozen
class Lifted:
    """A kept ``tail`` of the host that goes to a ``slot`` for tails on the device."""

    tail: int
    slot: int
    tier: CacheTier = "host"


@frozen(eq=False)
class _Share:
    """What moves at once: groups of layers, first and one past the last, and what is in them.

    ``nbytes`` are of one page and of one tail, ``each`` is that for each part.
    """

    groups: tuple[int, int]
    parts: CopyParts
    each: tuple[tuple[int, int], ...]
    nbytes: tuple[int, int]

    def order(
        self,
        transfer: TransferId,
        kind: Direction,
        tier: CacheTier,
        moves: Sequence[Move],
        counts: tuple[int, int],
        places: Callable[[], list[int]],
    ) -> CopyOrder:
        """Return the order that moves it, for so many pages and tails."""
        nbytes = counts[0] * self.nbytes[0] + counts[1] * self.nbytes[1]
        run = partial(carry, moves, self.groups, nbytes)
        sizes = partial(self._sizes, counts)
        return CopyOrder(transfer, kind, tier, self.parts, nbytes, run, sizes, places, list)

    def _sizes(self, counts: tuple[int, int]) -> list[int]:
        return [counts[0] * page + counts[1] * tail for page, tail in self.each]


@final
class Orders:
    """Lists what is to be copied for the transfers of one memory."""

    def __init__(self, memory: Memory) -> None:
        """Borrow the memory; it may get its carrier later."""
        self._memory = memory
        self._runs = lru_cache(1024)(self._cut)
        self._share = lru_cache(1024)(self._made)

    def load(
        self, transfer: TransferId, pages: Ends, tail: Resumed | Lifted | None
    ) -> tuple[CopyOrder, ...]:
        """Return the orders, by layer, that move host pages to device pages, and a tail.

        Nothing has no orders: a prefetch may find no slot for the tail that it was for.
        """
        carrier = self._memory.carrier
        if carrier is None:
            return tuple(sorted(self._plain(transfer, pages, tail), key=attrgetter("layer")))
        count = len(pages[1])
        if not count and tail is None:
            return ()
        resumed = None if isinstance(tail, Lifted) else tail
        moves = [carrier.load(pages, resumed)] if count or resumed is not None else []
        if isinstance(tail, Lifted):
            moves.append(carrier.tails("load", ([tail.tail], [tail.slot])))
        tier: CacheTier = "host" if tail is None or count else tail.tier
        places = partial(_all_numbers, pages[1], () if tail is None else (tail.slot,))
        counts = count, int(tail is not None)
        return tuple(
            [
                self._share(run, count > 0, tail is not None).order(
                    transfer, "load", tier, moves, counts, places
                )
                for run in self._runs(count)
            ]
        )

    def _plain(
        self, transfer: TransferId, pages: Ends, tail: Resumed | Lifted | None
    ) -> Iterator[CopyOrder]:
        memory = self._memory
        if pages[1]:
            stores = memory.host_spans, memory.spans
            yield from span_orders(transfer, "load", stores, _tensors(pages))
        if isinstance(tail, Lifted):
            stores, slots = (memory.host_tails, memory.tails), _tensors(([tail.tail], [tail.slot]))
            yield from tail_orders(transfer, "load", stores, slots)
        elif tail is not None:
            store = memory.tails if tail.tier == "device" else memory.host_tails
            kept: tuple[CacheTier, TailStore, int] = tail.tier, store, tail.tail
            rings = memory.rings, tail.slot
            yield from resume_orders(transfer, "load", kept, rings, tail.boundary)

    def store(self, transfer: TransferId, pages: Ends, tails: Ends) -> tuple[CopyOrder, ...]:
        """Return the one order that moves pages and kept tails to the host; none for nothing."""
        memory, carrier = self._memory, self._memory.carrier
        counts = len(pages[1]), len(tails[1])
        if carrier is not None and any(counts):
            moves = [carrier.store(pages)] if pages[1] else []
            if tails[1]:
                moves.append(carrier.tails("store", tails))
            share = self._share(self._whole, counts[0] > 0, counts[1] > 0)
            places = partial(_all_numbers, pages[1], tails[1])
            return (share.order(transfer, "store", "device", moves, counts, places),)
        parts: list[Iterator[Numbered]] = []
        if pages[1]:
            stores = memory.spans, memory.host_spans
            parts.append(numbered_parts(stores, _tensors(pages)))
        if tails[1]:
            stores = memory.tails, memory.host_tails
            parts.append(numbered_parts(stores, _tensors(tails)))
        return store_orders(transfer, chain.from_iterable(parts))

    @property
    def _groups(self) -> tuple[tuple[LayerGroup, ...], tuple[LayerGroup, ...]]:
        """How records of pages and of tails are cut: into the same layers."""
        spans, tails = self._memory.host_spans.records, self._memory.host_tails.records
        assert spans is not None, "a carrier moves records"
        assert tails is not None, "a carrier moves records"
        return spans.groups, tails.groups

    @property
    def _whole(self) -> tuple[int, int]:
        return 0, max(len(groups) for groups in self._groups)

    def _cut(self, count: int) -> tuple[tuple[int, int], ...]:
        """Return the groups that a load of so many pages moves at once; a tail alone is one."""
        ranges = move_ranges([group.nbytes for group in self._groups[0]], count) if count else ()
        return tuple(ranges) or (self._whole,)

    def _made(self, groups: tuple[int, int], has_pages: bool, has_tail: bool) -> _Share:
        spans, tails = (which[slice(*groups)] for which in self._groups)
        pieces = [
            (piece, (piece.nbytes, 0)) for group in spans if has_pages for piece in group.pieces
        ]
        pieces += [
            (piece, (0, piece.nbytes)) for group in tails if has_tail for piece in group.pieces
        ]
        pieces.sort(key=lambda entry: entry[0].layer)
        parts = CopyParts(tuple(CopyPart(piece.layer, piece.component) for piece, _ in pieces))
        each = tuple(nbytes for _, nbytes in pieces)
        page_nbytes, tail_nbytes = (sum(column) for column in zip(*each, strict=True))
        return _Share(groups, parts, each, (page_nbytes, tail_nbytes))


def _all_numbers(pages: Numbers, slots: Numbers) -> list[int]:
    return [*pages, *slots]


def _tensors(ends: Ends) -> tuple[torch.Tensor, torch.Tensor]:
    return index_tensor(ends[0]), index_tensor(ends[1])


@lru_cache(1024)
def odd_parts(
    parts: tuple[CopyParts, ...], whole: frozenset[tuple[int, str]]
) -> tuple[tuple[int, str], ...]:
    """Return the parts of some orders that are not in the whole, and those that are missing.

    Remembered: the parts are the same objects in every plan that moves them.
    """
    return tuple(sorted(frozenset(chain.from_iterable(parts)) ^ whole))
