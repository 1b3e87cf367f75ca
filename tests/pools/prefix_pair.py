"""The prefix index and its plain twin, driven together and compared after every call.

Also the account of everything given: each page id and slot is held or was released exactly once.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvlease.pools.prefix_index import Policy, PrefixIndex
from kvlease.pools.prefix_node import TIERS, CacheTier, Node, Pages, Released, Tail
from kvlease.pools.prefix_results import Cursor, Match
from kvlease.protocols.rpc import Change
from tests.pools.naive_index import Key, NaiveCursor, NaiveIndex, NaiveMatch, NaivePage, NaiveTail

PAGE_BYTES = 32
PAGES = [bytes([value]) + bytes(31) for value in range(2)] + [bytes(30) + b"zz"]
"""Three pages; the first two end alike, so that their short keys collide."""


def tokens_of(values: list[int]) -> bytes:
    return b"".join(PAGES[value] for value in values)


def ordered(released: Released) -> list[list[int]]:
    parts = [released.device_pages, released.host_pages]
    return [*map(sorted, parts), sorted(released.device_tails), sorted(released.host_tails)]


@dataclass
class Sequence:
    """One running sequence on both sides."""

    cursor: Cursor
    twin: NaiveCursor
    match: Match
    twin_match: NaiveMatch


class Pair:
    """Both indexes, with ids from one counter for each kind and tier."""

    def __init__(self, policy: Policy = "lru", *, needs_tail: bool = True) -> None:
        self.index = PrefixIndex(PAGE_BYTES, needs_tail, policy)
        self.twin = NaiveIndex(PAGE_BYTES, needs_tail)
        self.by_use = policy == "lru"
        self.index.tree.observer = self.hear
        self.told: Counter[CacheTier] = Counter()
        self.held: dict[tuple[str, CacheTier], set[int]] = {}
        self.given = 0

    # Accounts

    def hear(self, change: Change, tier: CacheTier, identity: bytes, keys: bytes) -> None:
        """Count what the index tells of pages that came and went."""
        assert identity in self.twin.flushes
        assert len(keys) % 16 == 0
        self.told[tier] += (-1 if change == "evicted" else 1) * len(keys) // 16

    def give(self, kind: str, tier: CacheTier, count: int) -> Pages:
        names = array("i", range(self.given, self.given + count))
        self.given += count
        self.held.setdefault((kind, tier), set()).update(names)
        return names

    def give_back(self, kind: str, tier: CacheTier, names: Iterable[int]) -> None:
        for name in names:
            self.held[kind, tier].remove(name)

    def take_back(self, released: Released, expected: Released) -> None:
        assert ordered(released) == ordered(expected)
        for tier in TIERS:
            self.give_back("page", tier, released.pages(tier))
            self.give_back("tail", tier, released.tails(tier))

    # Calls

    def match(self, identity: bytes, values: list[int], limit: int) -> Sequence:
        tokens = tokens_of(values) + b"\1\2\3\4"
        match = self.index.match(identity, tokens, limit)
        twin = self.twin.match(identity, tokens[:-4], limit)
        assert list(match.pages) == twin.pages
        assert match.arrivals == twin.arrivals
        assert (match.num_pages, match.matched_pages) == (twin.num_pages, twin.matched_pages)
        assert (
            match.host_pages
            == twin.pages.count(-1)
            == sum(node.num_pages for node in match.to_load)
        )
        assert match.device_pages + match.host_pages == match.num_pages
        assert (match.tail is None) == (twin.tail is None)
        if match.tail is not None:
            assert twin.tail is not None
            assert match.tail.device.slot == twin.tail.device.name
            assert match.tail.host.slot == twin.tail.host.name
        return Sequence(match.cursor, twin.cursor, match, twin)

    def load(self, sequence: Sequence, arrival: object) -> None:
        pages = self.give("page", "device", list(sequence.match.pages).count(-1))
        attached = self.index.attach_device(sequence.match, pages, arrival)
        assert list(attached.unused) == self.twin.load(sequence.twin_match, pages, arrival)
        assert list(sequence.match.pages) == sequence.twin_match.pages
        self.give_back("page", "device", attached.unused)

    def load_tail(self, tail: Tail, twin: NaiveTail, tier: CacheTier, arrival: object) -> None:
        slot = self.give("tail", tier, 1)[0]
        attach = {
            "device": self.index.attach_tail_device,
            "host": self.index.attach_tail_host,
        }[tier]
        attach(tail, slot, arrival)
        twin.copy(tier).name, twin.copy(tier).arrival = slot, arrival

    def extend(self, sequence: Sequence, values: list[int], *, whole: bool) -> None:
        tokens = tokens_of(values)
        prefix = sequence.twin.key[2] if whole else b""
        pages = self.give("page", "device", len(values))
        extended = self.index.extend(sequence.cursor, prefix + tokens, pages)
        assert list(extended.not_taken) == self.twin.extend(sequence.twin, tokens, pages)
        assert extended.num_taken == len(pages) - len(extended.not_taken)
        self.give_back("page", "device", extended.not_taken)

    def release(self, sequence: Sequence) -> None:
        expected = self.twin.rewind(sequence.twin, 0)
        self.take_back(self.index.release(sequence.cursor), expected)

    def rewind(self, sequence: Sequence, num_pages: int) -> None:
        expected = self.twin.rewind(sequence.twin, num_pages)
        self.take_back(self.index.rewind(sequence.cursor, num_pages), expected)

    def store(self, sequence: Sequence, arrival: object) -> None:
        nodes = self.index.plan_store(sequence.cursor)
        unstored = self.twin.unstored(sequence.twin)
        names = [page for node in nodes for page in node.device.pages or ()]
        assert names == [page.device.name for page in unstored]
        pages = self.give("page", "host", len(names))
        self.index.attach_host(nodes, pages, arrival)
        for page, name in zip(unstored, pages, strict=True):
            page.host.name, page.host.arrival = name, arrival

    def put_tail(self, sequence: Sequence, boundary: int) -> None:
        slot = self.give("tail", "device", 1)[0]
        unused = self.index.put_tail(sequence.cursor, boundary, slot).unused
        assert unused == self.twin.put_tail(sequence.twin, boundary, slot)
        if unused is not None:
            self.give_back("tail", "device", [unused])

    def arrived(self, arrival: object) -> None:
        self.take_back(self.index.arrived(arrival), self.twin.arrived(arrival))

    def lost(self, arrival: object, *, drop_host: bool) -> None:
        expected = self.twin.lost(arrival, drop_host=drop_host)
        self.take_back(self.index.lost(arrival, drop_host=drop_host), expected)

    def clear(self, identity: bytes | None) -> None:
        self.take_back(self.index.clear(identity), self.twin.flush(identity))

    def condemn(self, sequence: Sequence, number: int, running: list[Sequence]) -> None:
        cursors = [one.twin for one in running] + [one.twin_match.cursor for one in running]
        expected = self.twin.condemn(sequence.twin, number, cursors)
        self.take_back(self.index.condemn(sequence.cursor, number), expected)

    def evict(self, tier: CacheTier, count: int, *, can_drop: bool = True) -> int:
        if tier == "device":
            released = self.index.evict_device(count, can_drop=can_drop)
        else:
            released = self.index.evict_host(count)
        names = released.pages(tier)
        copied_only = not can_drop
        expected = self.twin.evict(tier, names, copied_only=copied_only, by_use=self.by_use)
        assert len(names) == count or not self.twin.evictable(tier, copied_only=copied_only)
        evicted = len(names)
        self.take_back(released, expected)
        return evicted

    def evict_tails(self, tier: CacheTier, count: int) -> None:
        released = self.index.evict_tails(count, tier)
        expected = self.twin.evict_tails(tier, list(released.tails(tier)))
        self.take_back(released, expected)

    # Comparison

    def nodes(self) -> list[tuple[Key, Node]]:
        """List the index's edges with the key of each one's end, flushed ones as they are."""
        tree = self.index.tree
        todo = [((name, self.twin.flushes[name], b""), root) for name, root in tree.roots.items()]
        found: list[tuple[Key, Node]] = []
        for key, node in todo:
            for child in node.children.values():
                if not child.is_live:
                    continue
                entry = ((*key[:2], key[2] + child.tokens), child)
                todo.append(entry)
                found.append(entry)
        return found

    def tails(self) -> list[tuple[Tail, NaiveTail]]:
        pairs: list[tuple[Tail, NaiveTail]] = []
        for key, node in self.nodes():
            start = len(key[2]) - len(node.tokens)
            for offset, tail in node.tails.items():
                page = self.twin.pages[(*key[:2], key[2][: start + offset * PAGE_BYTES])]
                assert page.tail is not None
                pairs.append((tail, page.tail))
        return pairs

    def compare(self) -> None:
        """Hold every reachable page, tail, stamp and count of the index against the twin."""
        self.index.check()
        seen: set[Key] = set()
        for key, node in self.nodes():
            start = len(key[2]) - len(node.tokens)
            for index in range(node.num_pages):
                path = (*key[:2], key[2][: start + (index + 1) * PAGE_BYTES])
                tail = node.tails.get(index + 1)
                if node.is_resident or node.pins or tail is not None:
                    seen.add(path)
                    self._compare_page(node, index, tail, self.twin.pages[path])
        assert seen == {key for key in self.twin.pages if self.twin.is_live(key)}
        self._compare_counts()

    def _compare_page(self, node: Node, index: int, tail: Tail | None, page: NaivePage) -> None:
        for tier in TIERS:
            copy = node.copy(tier)
            name = None if copy.pages is None else copy.pages[index]
            assert (name, copy.arrival) == (page.copy(tier).name, page.copy(tier).arrival)
        assert (node.pins, node.last_use) == (page.pins, page.last_use)
        assert (tail is None) == (page.tail is None)
        if tail is not None and page.tail is not None:
            assert (tail.pins, tail.last_use) == (page.tail.pins, page.tail.last_use)
            for tier in TIERS:
                place, twin = tail.copy(tier), page.tail.copy(tier)
                assert (place.slot, place.arrival) == (twin.name, twin.arrival)

    def _compare_counts(self) -> None:
        counts = self.index.statistics()
        pages, tails = list(self.twin.pages.values()), self.twin.all_tails()
        for tier in TIERS:
            held = [page for page in pages if page.copy(tier).name is not None]
            kept = [tail for tail in tails if tail.copy(tier).name is not None]
            expected = (
                len(held), sum(page.pins > 0 for page in held),
                len(kept), sum(tail.pins > 0 for tail in kept),
            )  # fmt: skip
            names = ("pages", "pages_pinned", "tails", "tails_pinned")
            assert tuple(getattr(counts, f"{tier}_{name}") for name in names) == expected
            assert len(held) == len(self.held.get(("page", tier), ()))
            assert self.told[tier] == sum(page.copy(tier).arrival is None for page in held)
            assert len(kept) == len(self.held.get(("tail", tier), ()))
