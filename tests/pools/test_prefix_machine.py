"""Any legal sequence of calls: the index equals its plain twin after each one."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlease.pools.prefix_node import CacheTier, Tail
from tests.pools.naive_index import NaiveTail
from tests.pools.prefix_pair import Pair, Sequence

VALUES = st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=6)
PICK = st.integers(0, 50)
TIER: st.SearchStrategy[CacheTier] = st.sampled_from(["device", "host"])


class PrefixMachine(RuleBasedStateMachine):
    """Sequences, transfers, tails, evictions and flushes in any order.

    If this fails, the engine serves wrong pages, leaks some, or evicts what is being read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pair = self.make_pair()
        self.sequences: list[Sequence] = []
        self.transfers: list[str] = []
        self.pinned: list[tuple[Tail, NaiveTail]] = []
        self.named = 0
        self.served: list[list[int]] = []

    def make_pair(self) -> Pair:
        return Pair()

    def new_transfer(self) -> str:
        self.named += 1
        self.transfers.append(f"transfer {self.named}")
        return self.transfers[-1]

    def pick(self, number: int) -> Sequence:
        return self.sequences[number % len(self.sequences)]

    @invariant()
    def equals_twin(self) -> None:
        self.pair.compare()

    @rule(identity=st.sampled_from([b"a", b"a", b"b"]), values=VALUES, limit=st.integers(0, 7))
    def start(self, identity: bytes, values: list[int], limit: int) -> None:
        self.sequences.append(self.pair.match(identity, values, limit))

    @precondition(lambda self: self.served)
    @rule(pick=PICK, more=VALUES, limit=st.integers(1, 7))
    def start_again(self, pick: int, more: list[int], limit: int) -> None:
        """A prompt that begins with one already served."""
        values = [*self.served[pick % len(self.served)], *more]
        self.sequences.append(self.pair.match(b"a", values, limit))

    @rule(values=VALUES, tails=st.booleans(), whole=st.booleans())
    def serve(self, values: list[int], tails: bool, whole: bool) -> None:
        """A whole request: match, compute the rest, keep tails, end."""
        self.served.append(values)
        sequence = self.pair.match(b"a", values, 6)
        self.pair.extend(sequence, values[sequence.match.num_pages :], whole=whole)
        if tails and self.pair.index._needs_tail:
            for boundary in range(1, len(values) + 1):
                self.pair.put_tail(sequence, boundary)
        self.pair.release(sequence)

    @precondition(lambda self: self.sequences)
    @rule(pick=PICK, values=VALUES, whole=st.booleans())
    def extend(self, pick: int, values: list[int], whole: bool) -> None:
        if self.pick(pick).cursor.num_pages + len(values) <= 12:
            self.pair.extend(self.pick(pick), values, whole=whole)

    @precondition(lambda self: self.sequences)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        self.pair.release(self.sequences.pop(pick % len(self.sequences)))

    @precondition(lambda self: self.sequences)
    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        old = self.pick(pick)
        cursor, twin = self.pair.index.fork(old.cursor), self.pair.twin.fork(old.twin)
        self.sequences.append(Sequence(cursor, twin, old.match, old.twin_match))

    @precondition(lambda self: self.sequences)
    @rule(pick=PICK)
    def touch(self, pick: int) -> None:
        self.pair.index.touch(self.pick(pick).cursor)
        self.pair.twin.touch(self.pick(pick).twin)

    @precondition(lambda self: self.sequences)
    @rule(pick=PICK, pages=st.integers(0, 12))
    def rewind(self, pick: int, pages: int) -> None:
        sequence = self.pick(pick)
        self.pair.rewind(sequence, pages % (sequence.cursor.num_pages + 1))

    @precondition(lambda self: self.sequences)
    @rule(pick=PICK, number=st.integers(0, 11))
    def condemn(self, pick: int, number: int) -> None:
        sequence = self.pick(pick)
        if pages := sequence.cursor.num_pages:
            self.pair.condemn(sequence, number % pages, self.sequences)

    @precondition(lambda self: self.sequences)
    @rule(pick=PICK, with_tail=st.booleans())
    def load(self, pick: int, with_tail: bool) -> None:
        sequence = self.pick(pick)
        match = sequence.match
        if match.cursor is not sequence.cursor or match.cursor.num_pages != match.num_pages:
            return
        arrival = self.new_transfer()
        self.pair.load(sequence, arrival)
        tail, twin = match.tail, sequence.twin_match.tail
        if not with_tail or tail is None or twin is None or tail.node is None:
            return
        if tail.device.slot is None:
            self.pair.load_tail(tail, twin, "device", arrival)

    @precondition(lambda self: self.sequences)
    @rule(pick=PICK)
    def store(self, pick: int) -> None:
        self.pair.store(self.pick(pick), self.new_transfer())

    @rule(pick=PICK)
    def store_tail(self, pick: int) -> None:
        tails = [pair for pair in self.pair.tails() if pair[0].host.slot is None]
        if tails:
            self.pair.load_tail(*tails[pick % len(tails)], "host", self.new_transfer())

    @precondition(lambda self: self.transfers)
    @rule(pick=PICK)
    def arrived(self, pick: int) -> None:
        self.pair.arrived(self.transfers.pop(pick % len(self.transfers)))

    @precondition(lambda self: self.transfers)
    @rule(pick=PICK, drop_host=st.booleans())
    def lost(self, pick: int, drop_host: bool) -> None:
        self.pair.lost(self.transfers.pop(pick % len(self.transfers)), drop_host=drop_host)

    @precondition(lambda self: self.sequences and self.pair.index._needs_tail)
    @rule(pick=PICK, boundary=st.integers(0, 12))
    def put_tail(self, pick: int, boundary: int) -> None:
        sequence = self.pick(pick)
        if sequence.cursor.num_pages:
            self.pair.put_tail(sequence, 1 + boundary % sequence.cursor.num_pages)

    @rule(pick=PICK)
    def pin_tail(self, pick: int) -> None:
        if tails := self.pair.tails():
            tail, twin = tails[pick % len(tails)]
            self.pair.index.pin_tail(tail)
            twin.pins += 1
            self.pinned.append((tail, twin))

    @precondition(lambda self: self.pinned)
    @rule(pick=PICK)
    def unpin_tail(self, pick: int) -> None:
        tail, twin = self.pinned.pop(pick % len(self.pinned))
        twin.pins -= 1
        self.pair.take_back(self.pair.index.unpin_tail(tail), self.pair.twin.settle())

    @rule(tier=TIER, count=st.integers(1, 4), can_drop=st.booleans())
    def evict(self, tier: CacheTier, count: int, can_drop: bool) -> None:
        self.pair.evict(tier, count, can_drop=can_drop or tier == "host")

    @rule(tier=TIER, count=st.integers(1, 3))
    def evict_tails(self, tier: CacheTier, count: int) -> None:
        self.pair.evict_tails(tier, count)

    @rule(count=st.integers(1, 6))
    def plan_write_back(self, count: int) -> None:
        for node in self.pair.index.evictable_unstored(count):
            assert node.host.pages is None
            assert not node.pins
            assert node.device.arrival is None

    @rule(identity=st.sampled_from([None, b"a"]))
    def clear(self, identity: bytes | None) -> None:
        self.pair.clear(identity)

    def teardown(self) -> None:
        """End everything: nothing may be left, and nothing lost."""
        for sequence in self.sequences:
            self.pair.release(sequence)
        for arrival in self.transfers:
            self.pair.arrived(arrival)
        while self.pinned:
            self.unpin_tail(0)
        self.pair.clear(None)
        assert not any(self.pair.held.values()), "a page or slot was leaked"
        assert not self.pair.index.tree.flushed, "a flushed root outlived its last user"
        assert self.pair.index.statistics().num_nodes == 0


class NoTailMachine(PrefixMachine):
    """The same for models that can resume at any page."""

    def make_pair(self) -> Pair:
        return Pair(needs_tail=False)


class S3FifoMachine(PrefixMachine):
    """The same under S3-FIFO, whose order the twin does not predict."""

    def make_pair(self) -> Pair:
        return Pair("s3fifo")


_SETTINGS = settings(max_examples=60, stateful_step_count=40)
TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(_SETTINGS, max_examples=120)
TestNoTailMachine = NoTailMachine.TestCase
TestNoTailMachine.settings = _SETTINGS
TestS3FifoMachine = S3FifoMachine.TestCase
TestS3FifoMachine.settings = _SETTINGS
