"""C12: pins and counts that did not add up."""

import random
import tracemalloc
from array import array

import pytest
from attrs import define, field

from kvlease.errors import LedgerImbalance, PagesUnavailable, UsageError
from kvlease.pools.held import Held, PlannedTransfer
from kvlease.pools.page_book import PageBook
from kvlease.pools.prefix_node import Pages
from kvlease.pools.prefix_walk import path_to
from tests.museum.rig import PAGE, ROOT, SCHEMAS, Bench, tokens_of
from tests.pools.prefix_pair import Pair
from tests.pools.test_prefix_hazards import CHAIN, computed, stored_chain

PROMPT = tokens_of(1, 4 * PAGE)


def test_memory_of_the_book_does_not_grow() -> None:
    """K175 sglang#21624 (F16): nodes kept slices of the free list, and so every old list."""
    book, kept = PageBook("pages", 256), list[Pages]()

    def turn(rounds: int) -> None:
        for _ in range(rounds):
            kept.append(book.acquire(8))
            if len(kept) > 16:
                book.release(kept.pop(0))

    turn(1_000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    turn(9_000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000
    assert len(book._free) == 256 - 8 * len(kept)
    assert not book._quarantine


@pytest.mark.parametrize("how", ["close", "lose", "drop"])
def test_matching_again_leaves_no_pin_behind(how: str) -> None:
    """K177 sglang#26560 (F16): a retracted request matched again, and its first lock stayed."""
    bench = Bench(device_pages=8)
    bench.cache_on_host(PROMPT)
    for _ in range(100):
        if how == "drop":
            bench.pool.drop(bench.pool.match(ROOT, PROMPT, 99))
            continue
        held = bench.start(PROMPT)
        if held.load is not None and how == "lose":
            bench.lose(held.load, "late")
        elif held.load is not None:
            bench.bring(held.load)
        bench.close(held)
    counts = bench.pool.index.statistics()
    assert counts.device_pages_pinned == counts.host_pages_pinned == 0
    assert counts.device_tails_pinned == counts.host_tails_pinned == 0
    bench.check()


def test_a_page_above_a_host_copy_is_no_host_leaf() -> None:
    """K179 sglang#23537 (F07): a host leaf was told by what its child has on the device.

    x, y, z on the host; z's copy goes; x and y are loaded, z is computed again and stored.
    """
    pair = Pair(needs_tail=False)
    stored_chain(pair, [0, 1, 2])
    assert pair.evict("host", 1) == 1
    again = pair.match(b"a", [0, 1, 2], 9)
    assert again.match.host_pages == 2
    pair.load(again, "load")
    pair.arrived("load")
    pair.extend(again, [2], whole=True)
    pair.store(again, "store")
    pair.arrived("store")
    pair.release(again)
    assert pair.evict("device", 9, can_drop=False) == 3
    for left in (2, 1, 0):
        assert pair.evict("host", 1) == 1
        found = pair.match(b"a", [0, 1, 2], 9)
        assert found.match.num_pages == left, "an inner page went before its child"
        pair.release(found)


@pytest.mark.parametrize("name", ["v4", "mla with indexer"])
@pytest.mark.parametrize("at", range(5))
def test_a_load_cancelled_at_any_step_lets_go_once(at: int, name: str) -> None:
    """K181 LMCache#2559 (F16): asynchronous loads let go twice; counts were forced back to 0."""
    bench = Bench(SCHEMAS[name])
    bench.cache_on_host(PROMPT)
    held = bench.start(PROMPT)
    planned = held.load
    assert planned is not None
    for step in range(5):
        if step == at:
            bench.close(held)
        match step:
            case 0:
                planned.copies[0].run()
            case 1:
                assert all(order.run() for order in planned.copies[1:])
            case 2:
                bench.pool.transfers.done(planned)
            case 3:
                bench.pool.transfers.settled(planned)
            case _:
                pass
    bench.check()
    counts = bench.pool.index.statistics()
    assert counts.device_pages_pinned == counts.host_pages_pinned == counts.host_tails_pinned == 0
    with pytest.raises((UsageError, LedgerImbalance)):
        bench.pool.transfers.settled(planned)


@pytest.mark.parametrize("used", [0, 1, 2, 4])
def test_what_was_loaded_and_not_used_is_still_whole(used: int) -> None:
    """K183 LMCache#2772 (F16): unused prefetched objects lost one count too many, still indexed."""
    bench = Bench()
    bench.cache_on_host(PROMPT)
    prefetch = bench.start(PROMPT)
    bench.bring(prefetch.load)
    user = bench.start(PROMPT, used)
    if user.load is not None:
        bench.bring(user.load)
    bench.close(prefetch)
    bench.close(user)
    bench.cache(tokens_of(2, 12 * PAGE), tails=False)
    again = bench.start(PROMPT)
    if again.load is not None:
        bench.bring(again.load)
    assert again.lease.sealed == 4
    assert not [*bench.wrong(again, PROMPT, 4)]
    bench.check()


def test_who_pins_unpins_and_nobody_else() -> None:
    """K185 LMCache#5095 (F16): pinned by look-up, unpinned by retrieval and again later."""
    pair = Pair()
    pair.release(computed(pair, CHAIN))
    tail = pair.tails()[0][0]
    pair.index.pin_tail(tail)
    pair.index.unpin_tail(tail)
    with pytest.raises(UsageError, match="more often than pinned"):
        pair.index.unpin_tail(tail)
    match = pair.index.match(b"a", b"", 0)
    pair.index.release(match.cursor)
    with pytest.raises(UsageError, match="after release"):
        pair.index.release(match.cursor)
    bench = Bench()
    held = bench.start(PROMPT)
    bench.close(held)
    with pytest.raises((UsageError, LedgerImbalance)):
        bench.pool.close(held)
    assert tail.pins == 0
    pair.index.check()


@pytest.mark.parametrize("order", [("K", "M"), ("M", "K")])
@pytest.mark.parametrize("is_lost", [False, True])
def test_loads_of_two_components_on_one_edge_end_apart(
    order: tuple[str, str], *, is_lost: bool
) -> None:
    """K189 sglang#36317 (F05): one field for the pending load served several kinds of state."""
    pair = Pair()
    stored_chain(pair, CHAIN)
    pair.evict_tails("device", 1)
    reader = pair.match(b"a", CHAIN, 9)
    tail, twin = reader.match.tail, reader.twin_match.tail
    assert tail is not None
    assert twin is not None
    pair.load(reader, "K")
    pair.load_tail(tail, twin, "device", "M")
    for number, arrival in enumerate(order):
        if is_lost and number == 0:
            pair.lost(arrival, drop_host=False)
        else:
            pair.arrived(arrival)
        pair.compare()
    pair.release(reader)
    pair.compare()


@define
class Fuzz:
    """Random requests, transfers and evictions on one bench, each checked against the truth."""

    bench: Bench
    rng: random.Random
    told: dict[int, bytes] = field(factory=dict)
    loads: list[PlannedTransfer] = field(factory=list)
    stores: list[PlannedTransfer] = field(factory=list)
    late: list[PlannedTransfer] = field(factory=list)

    def step(self) -> None:
        getattr(self, self.rng.choice(_STEPS))()
        self.bench.check()

    def begin(self) -> None:
        if len(self.bench.running) >= 3:
            return
        prompt = tokens_of(self.rng.randrange(3), self.rng.randrange(1, 6) * PAGE)
        held = self.bench.begin(prompt)
        if held is not None:
            self.told[held.lease.id] = prompt
            self.loads += [held.load] if held.load is not None else []

    def load(self) -> None:
        """End a load, well or badly; its request may have left meanwhile."""
        loads = [one for one in self.loads if one not in self.late]
        if not loads:
            return
        planned = self.rng.choice(loads)
        if self.rng.random() < 0.4:
            self.bench.pool.lost(planned, self.rng.choice(("late", "failed", "revoked")), ())
            self.late.append(planned)
            return
        self.loads.remove(planned)
        self.bench.bring(planned)
        for held in self.bench.running:
            if not held.arrivals:
                self._look(held)

    def _look(self, held: Held) -> None:
        assert not [*self.bench.wrong(held, self.told[held.lease.id], held.lease.sealed)]

    def late_writer(self) -> None:
        """A copy of a transfer that was given up long ago writes now, and returns."""
        if self.late:
            planned = self.late.pop(self.rng.randrange(len(self.late)))
            for order in planned.copies:
                order.run()
            self.bench.pool.transfers.settled(planned)
            if planned in self.loads:
                self.loads.remove(planned)

    def compute(self) -> None:
        for held in self.bench.running:
            if held.arrivals:
                continue
            prompt = self.told[held.lease.id]
            pages = min(len(prompt) // (4 * PAGE), held.lease.sealed + self.rng.randrange(3))
            self.bench.compute(held, prompt[: 4 * pages * PAGE])
            self._look(held)

    def end(self) -> None:
        if self.bench.running:
            self.bench.close(self.rng.choice(self.bench.running))

    def store(self) -> None:
        for held in self.bench.running[:1]:
            try:
                kept = [t for node in path_to(held.cursor.node) for t in node.tails.values()]
                planned = self.bench.plan_store(held, kept)
            except PagesUnavailable:
                return
            if planned is not None:
                self.stores.append(planned)

    def end_store(self) -> None:
        if self.stores:
            planned = self.stores.pop(0)
            if self.rng.random() < 0.7:
                self.bench.bring(planned)
            else:
                self.bench.pool.lost(planned, "late", ())
                self.late.append(planned)

    def evict(self) -> None:
        memory, index = self.bench.pool.memory, self.bench.pool.index
        count = self.rng.randrange(1, 5)
        match self.rng.randrange(3):
            case 0:
                memory.take_back(index.evict_host(count))
            case 1:
                memory.take_back(index.evict_device(count))
            case _:
                memory.take_back(index.evict_tails(count, "device"))

    def finish(self) -> None:
        """End everything; then nothing is away, and nothing is lost."""
        while set(self.loads) - set(self.late):
            self.load()
        while self.stores:
            self.end_store()
        while self.late:
            self.late_writer()
        for held in list(self.bench.running):
            self.bench.close(held)
        self.bench.pool.flush()
        self.bench.pool.reclaim()
        self.bench.check()
        for book in self.bench.pool.memory.books:
            assert book.ledger().free == book.total, book.name


_STEPS = (
    "begin", "begin", "load", "load", "compute", "compute", "end", "store", "end_store",
    "late_writer", "evict",
)  # fmt: skip


@pytest.mark.parametrize("name", ["v4", "v4 window over a page", "mla with indexer"])
@pytest.mark.parametrize("seed", range(6))
def test_random_lives_keep_every_count_and_every_byte(seed: int, name: str) -> None:
    """K187 TensorRT-LLM#12834 (F04, F16): slots were swapped between tiers, and counts too.

    After each of 150 operations all counts equal a full scan, and no running request reads a byte
    that is not its own: late writers, evictions and reuse included.
    """
    bench = Bench(SCHEMAS[name], device_pages=12, host_pages=8, slots=4, device_tails=6)
    fuzz = Fuzz(bench, random.Random(seed))
    for _ in range(150):
        fuzz.step()
    fuzz.finish()


def test_a_page_released_twice_is_caught() -> None:
    """K181 LMCache#2559 (F16): an underflow must stop the process, not be mended with a warning."""
    book = PageBook("pages", 4)
    pages = book.acquire(2)
    book.release(pages)
    with pytest.raises(LedgerImbalance):
        book.release(array("i", pages))
    assert book.ledger().free == 4
