"""Checksums of pages and of kept tails, and which copy on which tier was summed.

A sum is over the rows' 32-bit words: each word times a fixed random odd weight of 64 bits, added
modulo 2**64 (multilinear hashing, Lemire and Kaser, arXiv:1202.4961). Two products and sums in
torch, on any device, without order or carry. What it finds for certain: any change within one word,
because an odd weight times a difference below 2**32 is not 0 modulo 2**64; and two words exchanged,
because no two weights agree in their low 33 bits. Other damage (rows exchanged, many words) passes
with a chance of about one in 2**32. It is no defence against an adversary.
"""

from collections.abc import Iterable
from typing import final

import numpy as np
import torch
from attrs import define, field, frozen

from kvlease.pools.prefix_node import TIERS, CacheTier, Released
from kvlease.pools.storage import (
    RingStore,
    SpanStore,
    TailStore,
    on_device,
    span_components,
    tail_components,
)
from kvlease.protocols.schema import Schema, TailComponent
from kvlease.units import LayerId

_SEED = 0x5EA1
"""Sums are compared within one process only; the weights may as well be the same in all."""
_AT_ONCE = 16
"""Pages summed in one go: their words are widened to 64 bits meanwhile."""


@frozen
class Sums:
    """The sums of one page or of one kept tail, in the order of the summer's components.

    ``key`` is the page's: a keyed hash of everything from the root to its end (R10). A kept tail
    goes by the key of the page that it ends.
    """

    key: bytes
    values: tuple[int, ...]


def _weights(count: int) -> torch.Tensor:
    rng = np.random.default_rng(_SEED)
    low = rng.permutation(np.unique(rng.integers(0, 1 << 32, 2 * count + 64)))[:count]
    high = rng.integers(0, 1 << 31, count)
    return torch.from_numpy((high << 33) + 2 * low + 1)


def _words(rows: torch.Tensor) -> torch.Tensor:
    """View rows [n, ...] as words [n, w]: of 32 bits, or single bytes where they do not fit."""
    flat = rows.flatten(1)
    is_even = flat.shape[1] * flat.itemsize % 4 == 0
    return flat.view(torch.int32 if is_even else torch.uint8)


def _parts_by_layer(parts: list[tuple[LayerId, str]]) -> dict[LayerId, list[int]]:
    places: dict[LayerId, list[int]] = {}
    for place, (layer, _) in enumerate(parts):
        places.setdefault(layer, []).append(place)
    return places


@final
class Summer:
    """Sums what lies in a device's memory, on the worker of the stream that may read it.

    Sums are returned in host memory. A GPU's are on their way: read them once the stream's work has
    ended.

    Attributes:
        device: where the memory is.
        spans: (layer, component) of a page's sums, in their order.
        tails: (layer, component) of a kept tail's sums, in their order.
    """

    def __init__(
        self, schema: Schema, spans: SpanStore, rings: RingStore, tails: TailStore
    ) -> None:
        """Borrows the stores for life."""
        self.spans = [(layer, span.name) for layer, span in span_components(schema)]
        kept = [(layer, tail) for layer, tail in tail_components(schema) if tail.kept_rows]
        self.tails = [(layer, tail.name) for layer, tail in kept]
        self._pages = [_words(spans.rows(layer, name)) for layer, name in self.spans]
        self._kept = [_words(tails.kept(layer, name)) for layer, name in self.tails]
        self._rings = [(rings.ring(layer, tail.name), tail) for layer, tail in kept]
        self._by_layer = [_parts_by_layer(self.spans), _parts_by_layer(self.tails)]
        widest = max((words.shape[1] for words in (*self._pages, *self._kept)), default=0)
        self.device = rings.device
        self._weights = _weights(widest).to(self.device)

    def pages_of(self, layer: LayerId) -> list[int]:
        """Return which parts of a page's sums are of one layer."""
        return self._by_layer[0].get(layer, [])

    def tails_of(self, layer: LayerId) -> list[int]:
        """Return which parts of a kept tail's sums are of one layer."""
        return self._by_layer[1].get(layer, [])

    def _sum(self, words: torch.Tensor) -> torch.Tensor:
        return (words.to(torch.int64) * self._weights[: words.shape[1]]).sum(1)

    def _page_part(self, part: int, pages: torch.Tensor) -> torch.Tensor:
        words = self._pages[part]
        pieces = torch.split(pages, _AT_ONCE)
        return torch.cat([self._sum(words.index_select(0, some)) for some in pieces])

    def page_part(self, part: int, pages: torch.Tensor) -> torch.Tensor:
        """Sum one component of pages [n] int64 on either side; returns [n] int64."""
        return _to_host(self._page_part(part, on_device(pages, self.device)))

    def pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Sum all components of pages [n] int64; returns [n, components] int64."""
        here = on_device(pages, self.device)
        parts = [self._page_part(part, here) for part in range(len(self.spans))]
        return _to_host(torch.stack(parts, 1))

    def tail(self, slot: int) -> torch.Tensor:
        """Sum all components of one kept tail; returns [components] int64."""
        found = [self._sum(words[slot : slot + 1]) for words in self._kept]
        return _to_host(torch.cat(found) if found else torch.empty(0, dtype=torch.int64))

    def ring_part(self, part: int, slot: int, boundary: int) -> torch.Tensor:
        """Sum one component as a tail kept of a sequence's rings at token ``boundary`` would be.

        Returns [1] int64.
        """
        rings, tail = self._rings[part]
        return _to_host(self._sum(_words(_as_kept(rings[slot], tail, boundary).unsqueeze(0))))


def _to_host(sums: torch.Tensor) -> torch.Tensor:
    if not sums.is_cuda:
        return sums
    return torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)


def _as_kept(ring: torch.Tensor, tail: TailComponent, boundary: int) -> torch.Tensor:
    """Copy the rows before a boundary out of a ring; those before position 0 are zeros."""
    positions = torch.arange(boundary - tail.kept_rows, boundary, dtype=torch.int64)
    places = on_device(positions % tail.ring_rows, ring.device)
    kept = ring[places, : tail.kept_width].contiguous()
    return kept.masked_fill(on_device(positions.unsqueeze(1) < 0, ring.device), 0)


def _by_tier() -> dict[CacheTier, dict[int, Sums]]:
    return {tier: {} for tier in TIERS}


@define
class SumBook:
    """The sums of the copies that the index holds: they come, move on and go with the copies.

    Bound to copies and not to keys alone: where batches may change the last bits of a row, two
    copies of one page, computed twice, are both right and differ. A page id is in here for as long
    as the index holds it, so no sum is ever met under an id that was given to another page.
    """

    pages: dict[CacheTier, dict[int, Sums]] = field(factory=_by_tier)
    tails: dict[CacheTier, dict[int, Sums]] = field(factory=_by_tier)

    def copied(self, source: CacheTier, pages: Iterable[tuple[int, int]]) -> None:
        """Note that pages were given copies on the other tier: (from, to) each."""
        _copy(self.pages, source, pages)

    def tails_copied(self, source: CacheTier, slots: Iterable[tuple[int, int]]) -> None:
        """Note that kept tails were given copies on the other tier: (from, to) each."""
        _copy(self.tails, source, slots)

    def forget(self, released: Released) -> None:
        """Drop the sums of everything that the index let go."""
        for tier in TIERS:
            for page in released.pages(tier):
                self.pages[tier].pop(page, None)
            for slot in released.tails(tier):
                self.tails[tier].pop(slot, None)


def _copy(
    book: dict[CacheTier, dict[int, Sums]], source: CacheTier, ends: Iterable[tuple[int, int]]
) -> None:
    known, others = book[source], book["host" if source == "device" else "device"]
    for here, there in ends:
        sums = known.get(here)
        if sums is not None:
            others[there] = sums
