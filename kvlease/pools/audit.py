"""The audit: sampled pages are summed when they seal and compared when a sequence first reads them.

A page is sampled by its key, so that the same prefix is sampled on every run, and only sampled
pages are ever summed. One comparison for each sequence lease is enough: sealed pages never change
(R4), the lease pins them where they are, and what arrives later belongs to a later lease. Damage to
memory at rest is found by the next reader. This module takes no page and launches no work.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import cast, final

import torch
from attrs import define, field, frozen

from kvlease.errors import PageMismatch
from kvlease.pools.copies import index_tensor
from kvlease.pools.prefix_node import CacheTier, Tail
from kvlease.pools.prefix_results import Match
from kvlease.pools.storage import RingStore, SpanStore, TailStore
from kvlease.pools.sums import SumBook, Summer, Sums
from kvlease.protocols.checks import Finding
from kvlease.protocols.identity import page_hash
from kvlease.protocols.ownership import SequenceLease
from kvlease.protocols.schema import Schema
from kvlease.units import LayerId, LeaseId

IDENTITY = "key"
"""What a finding names as its component where the page belongs to another prefix altogether."""


@define(eq=False)
class Trail:
    """One running sequence in the audit.

    ``last`` is the key of the sequence's ``num_pages``-th page, the root's before the first.
    ``pages`` (by number) and ``tails`` (by boundary, in tokens) are sums that were taken after a
    step and wait for their page to be sealed, or their tail to be shown.
    """

    last: bytes
    num_pages: int = 0
    pages: dict[int, Sums] = field(factory=dict[int, Sums])
    tails: dict[int, Sums] = field(factory=dict[int, Sums])


@frozen
class Resumed:
    """A kept tail that a sequence resumes from: its boundary in tokens, and its sums."""

    boundary: int
    sums: Sums | None


def tail_place(tail: Tail) -> tuple[CacheTier, int]:
    """Return where a usable tail is read from: the nearest tier on which it has arrived."""
    if tail.device.slot is not None and tail.device.arrival is None:
        return "device", tail.device.slot
    assert tail.host.slot is not None, "a usable tail has arrived on some tier"
    return "host", tail.host.slot


@final
class Audit:
    """Decides what is sampled, and makes the work that sums and compares."""

    def __init__(
        self, schema: Schema, spans: SpanStore, rings: RingStore, tails: TailStore, rate: float
    ) -> None:
        """Borrows the device's memory for life; ``rate`` is the share of pages, 0 to 1."""
        self.book = SumBook()
        self._summer = Summer(schema, spans, rings, tails)
        self._page_tokens = schema.page_tokens
        self._bound = min(round(rate * 2**64), 2**64 - 1).to_bytes(8, "big")

    def begin(self, lease: SequenceLease, match: Match, root: bytes, tokens: bytes) -> Trail:
        """Start a sequence's trail, and give its lease the check of what it matched, if any.

        ``tokens`` are the sequence's own, ``root`` the key of its tree: a page that stands under
        another prefix's tokens in the index does not pass for this one's.
        """
        trail = Trail(root)
        keys = self._follow(trail, tokens, match.num_pages)
        if keys:
            resumed = None
            if match.tail is not None and match.num_pages - 1 in keys:
                tier, slot = tail_place(match.tail)
                boundary = match.num_pages * self._page_tokens
                resumed = Resumed(boundary, self.book.tails[tier].get(slot))
            known = self.book.pages["device"]
            sums = {number: known.get(lease.pages[number]) for number in keys}
            lease.checks = (Check(self._summer, lease, keys, sums, resumed),)
        return trail

    def _follow(self, trail: Trail, tokens: bytes, num_pages: int) -> dict[int, bytes]:
        """Hash on to ``num_pages``, from the tokens behind the trail; return the sampled keys."""
        size = 4 * self._page_tokens
        key, bound = trail.last, self._bound
        sampled: dict[int, bytes] = {}
        for place, number in enumerate(range(trail.num_pages, num_pages)):
            key = page_hash(key, tokens[place * size : (place + 1) * size])
            if key < bound:
                sampled[number] = key
        trail.last, trail.num_pages = key, max(trail.num_pages, num_pages)
        return sampled

    def after_step(
        self,
        trail: Trail,
        lease: SequenceLease,
        tokens: array[int],
        tail: tuple[int, int] | None,
    ) -> Taking | None:
        """Return the work that sums what a step has completed; None if nothing of it is sampled.

        Launch it on the compute stream when the step is verified and before it is reported: until
        then the pages and the tail's slot belong to the step. Once it has ended, `finish` it.

        Args:
            trail: the sequence's.
            lease: likewise.
            tokens: all tokens that have rows now.
            tail: the boundary in tokens and the slot of a tail that the step kept, if any.
        """
        full = len(tokens) // self._page_tokens
        if full <= trail.num_pages:
            return None
        behind = tokens[trail.num_pages * self._page_tokens : full * self._page_tokens]
        keys = self._follow(trail, behind.tobytes(), full)
        if not keys:
            return None
        pages = index_tensor([lease.pages[number] for number in keys])
        if tail is not None and tail[0] // self._page_tokens - 1 not in keys:
            tail = None
        tail_key = b"" if tail is None else keys[tail[0] // self._page_tokens - 1]
        return Taking(self._summer, trail, keys, pages, tail, tail_key)

    def sealed(self, trail: Trail, number: int, page: int, *, taken: bool) -> None:
        """Enter the sums of a page that was sealed, if it is sampled and the index took it."""
        sums = trail.pages.pop(number, None)
        if taken and sums is not None:
            self.book.pages["device"][page] = sums

    def tail_shown(self, trail: Trail, boundary: int, slot: int, unused: int | None) -> None:
        """Enter the sums of a kept tail, and drop those of the slot that it replaced or left."""
        tails = self.book.tails["device"]
        if unused is not None:
            tails.pop(unused, None)
        sums = trail.tails.pop(boundary, None)
        if sums is not None and unused != slot:
            tails[slot] = sums


@frozen(eq=False)
class _TakenPart:
    """Sums of one component [n] int64, and what they should be by page number; None if unknown."""

    layer: LayerId
    name: str
    wanted: Mapping[int, int | None]
    found: torch.Tensor


@define(eq=False)
class Taking:
    """Sums of the pages and of the kept tail that a step has completed, being taken.

    ``pages`` [n] int64 are those of ``keys``; ``tail`` is the boundary and the slot of a tail.
    """

    _summer: Summer
    _trail: Trail
    _keys: dict[int, bytes]
    _pages: torch.Tensor
    _tail: tuple[int, int] | None
    _tail_key: bytes
    _page_sums: torch.Tensor | None = None
    _tail_sums: torch.Tensor | None = None

    def __call__(self) -> None:
        """Sum, on the stream's worker."""
        self._page_sums = self._summer.pages(self._pages)
        if self._tail is not None:
            self._tail_sums = self._summer.tail(self._tail[1])

    def finish(self) -> None:
        """Enter the sums in the trail, once the stream's work has ended."""
        assert self._page_sums is not None, "the work has run"
        sums = cast("list[list[int]]", self._page_sums.tolist())
        for (number, key), values in zip(self._keys.items(), sums, strict=True):
            self._trail.pages[number] = Sums(key, tuple(values))
        if self._tail is not None and self._tail_sums is not None:
            values = cast("list[int]", self._tail_sums.tolist())
            self._trail.tails[self._tail[0]] = Sums(self._tail_key, tuple(values))


@final
class Check:
    """The comparison of one sequence's sampled pages; implements `checks.PageCheck`.

    It recomputes from the device's memory what was taken when the pages sealed, wherever they have
    been meanwhile. A kept tail is compared as it arrived in the sequence's rings.
    """

    def __init__(
        self,
        summer: Summer,
        lease: SequenceLease,
        keys: dict[int, bytes],
        sums: dict[int, Sums | None],
        resumed: Resumed | None,
    ) -> None:
        """Takes the sampled pages' keys and sums, by page number."""
        self.lease: LeaseId = lease.id
        self.num_pages = len(keys)
        self.findings: list[Finding] = []
        self._slot = lease.slot
        self._ids = {number: lease.pages[number] for number in keys}
        known = {n: s for n, s in sums.items() if s is not None and s.key == keys[n]}
        self._strangers = [number for number in keys if number not in known]
        self._sums = known
        self._pages = index_tensor([self._ids[number] for number in known])
        self._resumed = resumed
        self._summer = summer
        self._taken: list[_TakenPart] = []

    def run(self, layer: LayerId) -> None:
        """Sum one layer, and compare it at once where the sums are; raises as `conclude` does."""
        for part in self._summer.pages_of(layer):
            wanted = {number: sums.values[part] for number, sums in self._sums.items()}
            found = self._summer.page_part(part, self._pages)
            self._taken.append(_TakenPart(layer, self._summer.spans[part][1], wanted, found))
        if self._resumed is not None:
            self._take_tail(layer, self._resumed)
        if layer == 0:
            for number in self._strangers:
                self._find(number, layer, IDENTITY)
        if self._summer.device.type == "cpu":
            self.conclude()

    def conclude(self) -> None:
        """Compare what was summed and not yet compared, once the stream's work has ended.

        Raises PageMismatch when anything is wrong.
        """
        for part in self._taken:
            found = cast("list[int]", part.found.tolist())
            for (number, wanted), value in zip(part.wanted.items(), found, strict=True):
                if value != wanted:
                    self._find(number, part.layer, part.name)
        self._taken.clear()
        if self.findings:
            first = self.findings[0]
            raise PageMismatch(
                f"lease {self.lease}: {first.component} of page {first.page}, layer {first.layer},"
                " is not what it was when the page was sealed; it is dropped and computed again"
            )

    def _take_tail(self, layer: LayerId, resumed: Resumed) -> None:
        number = max(self._ids)
        for part in self._summer.tails_of(layer):
            wanted = None if resumed.sums is None else resumed.sums.values[part]
            found = self._summer.ring_part(part, self._slot, resumed.boundary)
            name = self._summer.tails[part][1]
            self._taken.append(_TakenPart(layer, name, {number: wanted}, found))

    def _find(self, number: int, layer: LayerId, component: str) -> None:
        self.findings.append(Finding(number, self._ids[number], layer, component))
