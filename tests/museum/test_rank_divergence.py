"""C10: two that ought to decide alike, and did not. Pools stand for ranks, which are pending."""

import random
from array import array

import pytest
from attrs import asdict

from kvlease.errors import PagesUnavailable
from kvlease.pools.held import Held, PlannedTransfer
from kvlease.pools.prefix_node import Released
from tests.museum.rig import PAGE, SCHEMAS, Bench, tokens_of


def facts(bench: Bench) -> object:
    """What must be equal on both: tables, ledgers, and the counts of the index."""
    tables = [list(held.lease.pages) for held in bench.running]
    return tables, bench.pool.ledgers(), bench.pool.index.statistics()


@pytest.mark.parametrize("name", ["v4", "gqa"])
@pytest.mark.parametrize("seed", range(8))
def test_twins_decide_alike_whatever_their_copies_take(seed: int, name: str) -> None:
    """K149 sglang#11005 (F13): releases counted by message let free counts drift apart.

    Two pools get the same calls; one copies at once, the other only when a transfer is to end. One
    of them is told of empty releases as well. Page tables, ledgers and evictions stay equal.
    """
    rng = random.Random(seed)
    twins = [Bench(SCHEMAS[name], device_pages=14, host_pages=10) for _ in range(2)]
    stores: list[list[PlannedTransfer]] = [[], []]
    for _ in range(30):
        prompt = tokens_of(rng.randrange(3), rng.randrange(1, 7) * PAGE)
        what = rng.choice(("run", "run", "end store", "evict"))
        for number, bench in enumerate(twins):
            _step(bench, what, prompt, stores[number], is_slow=bool(number))
        assert facts(twins[0]) == facts(twins[1])
    for bench in twins:
        bench.check()


def _step(
    bench: Bench, what: str, prompt: bytes, stores: list[PlannedTransfer], *, is_slow: bool
) -> None:
    if is_slow:
        bench.pool.memory.take_back(Released())
        for book in bench.pool.memory.books:
            book.release(array("i"))
    if what == "evict":
        bench.pool.memory.take_back(bench.pool.index.evict_device(3))
    elif what == "end store" and stores:
        planned = stores.pop(0)
        if is_slow:
            for order in planned.copies:
                order.run()
        bench.pool.transfers.done(planned)
        bench.pool.transfers.settled(planned)
    elif what == "run":
        held: Held | None = bench.begin(prompt)
        if held is None:
            return
        if held.load is not None:
            bench.bring(held.load)
        bench.compute(held, prompt)
        planned_store = _store(bench, held)
        if planned_store is not None:
            stores.append(planned_store)
            if not is_slow:
                for order in planned_store.copies:
                    order.run()
        bench.close(held)


def _store(bench: Bench, held: Held) -> PlannedTransfer | None:
    try:
        return bench.plan_store(held)
    except PagesUnavailable:
        return None


def test_a_release_of_nothing_counts_as_nothing() -> None:
    """K149 sglang#11005 (F16): an empty chunk was counted as a release."""
    bench = Bench()
    bench.cache(tokens_of(1, 3 * PAGE))
    before = [asdict(book.ledger()) for book in bench.pool.memory.books]
    for _ in range(1000):
        for book in bench.pool.memory.books:
            book.release(array("i"))
        bench.pool.memory.take_back(Released())
    assert [asdict(book.ledger()) for book in bench.pool.memory.books] == before
    bench.check()
