"""A plain twin of the prefix index: a dictionary of single pages, no tree, no counts, no heaps.

Every rule is written page by page and by full scan. Eviction is judged, not predicted: the twin is
told which page went and says whether it was its turn.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvlease.pools.prefix_node import TIERS, CacheTier, Pages, Released

Key = tuple[bytes, int, bytes]
"""Identity, how often it had been flushed, and the tokens from the root to the page's end."""


@dataclass
class NaiveCopy:
    """A page id or slot on one tier, and the transfer filling it."""

    name: int | None = None
    arrival: object | None = None


@dataclass
class NaiveTail:
    """A resume state at a page's end."""

    last_use: int
    device: NaiveCopy = field(default_factory=NaiveCopy)
    host: NaiveCopy = field(default_factory=NaiveCopy)
    pins: int = 0

    def copy(self, tier: CacheTier) -> NaiveCopy:
        return self.device if tier == "device" else self.host

    @property
    def is_busy(self) -> bool:
        return bool(self.pins or self.device.arrival or self.host.arrival)

    @property
    def is_usable(self) -> bool:
        return any(
            copy.name is not None and copy.arrival is None for copy in (self.device, self.host)
        )


@dataclass
class NaivePage:
    """One page of one prefix."""

    device: NaiveCopy = field(default_factory=NaiveCopy)
    host: NaiveCopy = field(default_factory=NaiveCopy)
    pins: int = 0
    last_use: int = 0
    tail: NaiveTail | None = None

    def copy(self, tier: CacheTier) -> NaiveCopy:
        return self.device if tier == "device" else self.host

    @property
    def is_resident(self) -> bool:
        return self.device.name is not None or self.host.name is not None

    @property
    def is_settled(self) -> bool:
        return self.device.arrival is None and self.host.arrival is None

    @property
    def is_readable(self) -> bool:
        on_host = self.host.name is not None and self.host.arrival is None
        return self.device.name is not None or on_host


@dataclass
class NaiveCursor:
    """A place: a path, given by its last page's key (no tokens at the root)."""

    key: Key
    use: int


@dataclass
class NaiveMatch:
    """What a match must say."""

    cursor: NaiveCursor
    num_pages: int
    matched_pages: int
    pages: list[int]
    arrivals: list[object]
    tail: NaiveTail | None


class NaiveIndex:
    """The prefix index, slowly."""

    def __init__(self, page_bytes: int, needs_tail: bool) -> None:
        self.size = page_bytes
        self.needs_tail = needs_tail
        self.pages: dict[Key, NaivePage] = {}
        self.flushes: dict[bytes, int] = {}
        self.condemned: list[bytes] = []
        self.clock = 0

    def is_live(self, key: Key) -> bool:
        is_condemned = any(mark in key[2] for mark in self.condemned)
        return key[1] == self.flushes.get(key[0], 0) and not is_condemned

    def path(self, key: Key) -> list[Key]:
        ends = range(self.size, len(key[2]) + 1, self.size)
        return [(key[0], key[1], key[2][:end]) for end in ends]

    def match(self, identity: bytes, tokens: bytes, limit: int) -> NaiveMatch:
        self.clock += 1
        generation = self.flushes.setdefault(identity, 0)
        keys = self.path((identity, generation, tokens[: limit * self.size]))
        matched = 0
        for key in keys:
            if key not in self.pages or not self.pages[key].is_readable:
                break
            matched += 1
        count = matched
        if self.needs_tail:
            usable = [
                index + 1
                for index, key in enumerate(keys[:matched])
                if (tail := self.pages[key].tail) is not None and tail.is_usable
            ]
            count = max(usable, default=0)
        found = [self.pages[key] for key in keys[:count]]
        arrivals: list[object] = []
        for page in found:
            page.pins += 1
            page.last_use = self.clock
            if page.device.arrival is not None and page.device.arrival not in arrivals:
                arrivals.append(page.device.arrival)
        tail = found[-1].tail if found and self.needs_tail else None
        if tail is not None:
            tail.last_use = self.clock
        names = [-1 if page.device.name is None else page.device.name for page in found]
        cursor = NaiveCursor((identity, generation, tokens[: count * self.size]), self.clock)
        return NaiveMatch(cursor, count, matched, names, arrivals, tail)

    def fork(self, cursor: NaiveCursor) -> NaiveCursor:
        for key in self.path(cursor.key):
            self.pages[key].pins += 1
        return NaiveCursor(cursor.key, cursor.use)

    def touch(self, cursor: NaiveCursor) -> None:
        self.clock += 1
        cursor.use = self.clock
        for key in self.path(cursor.key):
            self.pages[key].last_use = self.clock

    def rewind(self, cursor: NaiveCursor, num_pages: int) -> Released:
        keep = num_pages * self.size
        for key in self.path(cursor.key):
            if len(key[2]) > keep:
                self.pages[key].pins -= 1
        cursor.key = (*cursor.key[:2], cursor.key[2][:keep])
        return self.settle()

    def extend(self, cursor: NaiveCursor, tokens: bytes, pages: Pages) -> list[int]:
        if not self.is_live(cursor.key):
            return list(pages)
        refused: list[int] = []
        whole = (*cursor.key[:2], cursor.key[2] + tokens)
        known = len(cursor.key[2]) // self.size
        for key, name in zip(self.path(whole)[known:], pages, strict=True):
            page = self.pages.setdefault(key, NaivePage())
            page.pins += 1
            page.last_use = max(page.last_use, cursor.use)
            if page.device.name is None:
                page.device.name = name
            else:
                refused.append(name)
        cursor.key = whole
        return refused

    def load(self, match: NaiveMatch, pages: Pages, arrival: object) -> list[int]:
        """Attach to a match; return unused pages, and bring ``match.pages`` up to date."""
        unused: list[int] = []
        names = iter(pages)
        for index, key in enumerate(self.path(match.cursor.key)):
            if match.pages[index] != -1:
                continue
            page, name = self.pages[key], next(names)
            if page.device.name is None and page.host.name is not None and not page.host.arrival:
                page.device.name, page.device.arrival = name, arrival
            else:
                unused.append(name)
            match.pages[index] = -1 if page.device.name is None else page.device.name
        return unused

    def unstored(self, cursor: NaiveCursor) -> list[NaivePage]:
        found = [self.pages[key] for key in self.path(cursor.key)]
        return [
            page
            for page in found
            if page.device.name is not None
            and page.device.arrival is None
            and page.host.name is None
        ]

    def put_tail(self, cursor: NaiveCursor, boundary: int, slot: int) -> int | None:
        """Return the unused slot."""
        key = self.path(cursor.key)[boundary - 1]
        page = self.pages[key]
        if not (self.is_live(key) and page.is_resident):
            return slot
        if page.tail is None:
            page.tail = NaiveTail(cursor.use)
        tail = page.tail
        tail.last_use = max(tail.last_use, cursor.use)
        if tail.device.name is not None and tail.is_busy:
            return slot
        unused, tail.device.name = tail.device.name, slot
        return unused

    def all_tails(self) -> list[NaiveTail]:
        return [page.tail for page in self.pages.values() if page.tail is not None]

    def owners(self) -> "list[NaivePage | NaiveTail]":
        return [*self.pages.values(), *self.all_tails()]

    def arrived(self, arrival: object) -> Released:
        for owner in self.owners():
            for tier in TIERS:
                if owner.copy(tier).arrival == arrival:
                    owner.copy(tier).arrival = None
        return self.settle()

    def lost(self, arrival: object, *, drop_host: bool) -> Released:
        released = Released()
        for owner in self.owners():
            is_page = isinstance(owner, NaivePage)
            hit = {tier: owner.copy(tier).arrival == arrival for tier in TIERS}
            if hit["device"]:
                _drop(owner.device, released, is_page=is_page, tier="device")
            if hit["host"] or (hit["device"] and drop_host and owner.host.arrival is None):
                _drop(owner.host, released, is_page=is_page, tier="host")
        released.take(self.settle())
        return released

    def flush(self, identity: bytes | None) -> Released:
        for name in list(self.flushes) if identity is None else [identity]:
            self.flushes[name] = self.flushes.get(name, 0) + 1
        return self.settle()

    def condemn(self, cursor: NaiveCursor, number: int, cursors: Iterable[NaiveCursor]) -> Released:
        """Rename a page, and so all prefixes with it, to tokens that nobody asks for."""
        start, end = number * self.size, (number + 1) * self.size
        old = (*cursor.key[:2], cursor.key[2][:end])
        if self.is_live(old):
            name = struct.pack("I", len(self.condemned))
            marked = b"condemned".ljust(self.size - len(name)) + name
            self.condemned.append(marked)

            def renamed(key: Key) -> Key:
                if key[:2] != old[:2] or not key[2].startswith(old[2]):
                    return key
                return (*key[:2], key[2][:start] + marked + key[2][end:])

            for one in {id(one): one for one in cursors}.values():
                one.key = renamed(one.key)
            self.pages = {renamed(key): page for key, page in self.pages.items()}
        return self.settle()

    def settle(self) -> Released:
        """Let go whatever nobody can reach or use any more."""
        released = Released()
        for key, page in list(self.pages.items()):
            if not self.is_live(key) and not page.pins and page.is_settled:
                for tier in TIERS:
                    _drop(page.copy(tier), released, is_page=True, tier=tier)
            tail = page.tail
            if tail is not None and not page.is_resident and not tail.is_busy:
                for tier in TIERS:
                    _drop(tail.copy(tier), released, is_page=False, tier=tier)
            if tail is not None and tail.device.name is None and tail.host.name is None:
                page.tail = None
            if not page.is_resident and not page.pins and page.tail is None:
                del self.pages[key]
        return released

    def evictable(self, tier: CacheTier, *, copied_only: bool) -> dict[int, NaivePage]:
        """Find the pages that may leave a tier now, by page id."""
        found: dict[int, NaivePage] = {}
        parents = {
            (*key[:2], key[2][: -self.size])
            for key, page in self.pages.items()
            if page.copy(tier).name is not None
        }
        for key, page in self.pages.items():
            name = page.copy(tier).name
            other = page.copy("host" if tier == "device" else "device").name
            is_free = page.is_settled and not page.pins and self.is_live(key)
            is_kept = other is None and page.tail is not None and page.tail.is_busy
            if name is None or not is_free or key in parents or is_kept:
                continue
            if other is not None or not copied_only:
                found[name] = page
        return found

    def evict(self, tier: CacheTier, names: Pages, *, copied_only: bool, by_use: bool) -> Released:
        """Follow an eviction page by page, and refuse one that was not next."""
        released = Released()
        for name in names:
            found = self.evictable(tier, copied_only=copied_only)
            assert name in found, f"{tier} page {name} may not be evicted"
            if by_use:
                assert found[name].last_use == min(page.last_use for page in found.values())
            _drop(found[name].copy(tier), released, is_page=True, tier=tier)
            released.take(self.settle())
        return released

    def evict_tails(self, tier: CacheTier, slots: list[int]) -> Released:
        """Follow an eviction of tails slot by slot, and refuse one that was not next."""
        released = Released()
        for slot in slots:
            idle = {
                tail.copy(tier).name: tail
                for tail in self.all_tails()
                if not tail.is_busy and tail.copy(tier).name is not None
            }
            assert slot in idle, f"{tier} tail {slot} may not be evicted"
            assert idle[slot].last_use == min(tail.last_use for tail in idle.values())
            _drop(idle[slot].copy(tier), released, is_page=False, tier=tier)
            released.take(self.settle())
        return released


def _drop(copy: NaiveCopy, released: Released, *, is_page: bool, tier: CacheTier) -> None:
    if copy.name is not None:
        (released.pages(tier) if is_page else released.tails(tier)).append(copy.name)
        copy.name = copy.arrival = None
