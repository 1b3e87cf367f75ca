"""C04: what a copy reads from was given away before the copy had ended."""

import pytest

from kvlease.errors import PagesUnavailable
from kvlease.pools.held import PlannedTransfer
from tests.museum.rig import MLA, PAGE, ROOT, SCHEMAS, Bench, tokens_of

PROMPT = tokens_of(1, 4 * PAGE)


@pytest.mark.parametrize("name", ["v4", "mla with indexer"])
@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("copied", [0, 1, 3])
def test_host_pages_of_a_running_load_are_not_evicted(
    name: str, copied: int, *, is_closed: bool
) -> None:
    """K035 sglang#31427 (F05): only the device end was locked; the host anchor was evicted.

    Part of the load has been copied when the host needs all its pages; its request may be gone.
    """
    bench = Bench(SCHEMAS[name], host_pages=6, host_tails=6)
    bench.cache_on_host(PROMPT)
    held = bench.start(PROMPT)
    planned = held.load
    assert planned is not None
    for order in planned.copies[:copied]:
        order.run()
    if is_closed:
        bench.close(held)
    memory, index = bench.pool.memory, bench.pool.index
    memory.take_back(index.evict_tails(9, "host"))
    memory.take_back(index.evict_host(9))
    assert memory.host.ledger().free == 2
    other = tokens_of(2, 4 * PAGE)
    bench.cache(other)
    with pytest.raises(PagesUnavailable):
        bench.store(other)
    for order in planned.copies[copied:]:
        order.run()
    if not is_closed:
        assert not [*bench.wrong(held, PROMPT, 4)]
    bench.pool.transfers.done(planned)
    bench.pool.transfers.settled(planned)
    if is_closed:
        assert bench.hit(PROMPT)[0] in (0, 4)


def test_a_nested_eviction_does_not_take_the_planned_pages() -> None:
    """K037 sglang#26728 (F05): host indices were listed, then an allocation evicted them.

    Both tiers are full and write-back is on: making room on the device asks for room on the host.
    """
    bench = Bench(MLA, device_pages=6, host_pages=6)
    bench.cache_on_host(PROMPT)
    dirty = tokens_of(2, 6 * PAGE)
    bench.cache(dirty)
    bench.pool.spares_last_copies = True
    match = bench.pool.match(ROOT, PROMPT, 99)
    assert (match.device_pages, match.host_pages) == (0, 4)
    assert bench.pool.open(match, 0, 1) is None, "last copies are spared"
    assert bench.pool.unstored_pages == 4
    with pytest.raises(PagesUnavailable):
        bench.pool.transfers.plan_write_back(4)
    assert bench.pool.open(match, 0, 1) is None
    bench.pool.spares_last_copies = False
    held = bench.pool.open(match, 0, 1)
    assert held is not None
    bench.running.append(held)
    bench.bring(held.load)
    assert not [*bench.wrong(held, PROMPT, 4)]
    bench.close(held)
    bench.check()


def test_a_failed_plan_leaves_nothing_pinned() -> None:
    """K037 sglang#26728 (F16): after the failure everything must be free to go again."""
    bench = Bench(device_pages=6, host_pages=4)
    bench.cache_on_host(PROMPT)
    wall = bench.start(tokens_of(2, 5 * PAGE))
    assert bench.begin(PROMPT) is None
    bench.close(wall)
    counts = bench.pool.index.statistics()
    assert counts.device_pages_pinned == counts.host_pages_pinned == 0
    assert counts.device_tails_pinned == counts.host_tails_pinned == 0
    bench.check()


@pytest.mark.parametrize("reason", ["late", "revoked", "failed"])
def test_the_source_of_a_load_that_was_given_up_stays_while_a_copy_runs(reason: str) -> None:
    """K041 Mooncake#850 (F05, F06): a transfer outlived the time lease on its source.

    The load is late, or given up; its last copy still reads. Its host pages must not be rewritten.
    """
    bench = Bench(MLA, host_pages=4)
    bench.cache_on_host(PROMPT)
    held = bench.start(PROMPT)
    planned = held.load
    assert planned is not None
    source = list(planned.source)
    bench.pool.lost(planned, reason, ())
    bench.close(held)
    other = tokens_of(2, 4 * PAGE)
    bench.cache(other)
    with pytest.raises(PagesUnavailable):
        bench.store(other)
    for page, where in enumerate(source):
        assert not [*bench.wrong_rows(where, PROMPT, page, "host")]
    bench.pool.transfers.settled(planned)


@pytest.mark.parametrize("reason", ["late", "revoked"])
def test_the_source_of_a_store_that_was_given_up_stays_while_a_copy_runs(reason: str) -> None:
    """K049 llm-d/llm-d-kv-cache#504 (F05, F06): I/O threads read tensors that had been let go.

    The store is late; its last copy still reads pages and kept tails of the device. The device is
    under pressure: neither may go to anybody before the copy has returned.
    """
    bench = Bench()
    bench.cache(PROMPT)
    planned = bench.store(PROMPT)
    assert planned is not None
    memory, index = bench.pool.memory, bench.pool.index
    kept = memory.device_tail_slots.ledger().sealed
    assert kept == 4
    bench.pool.lost(planned, reason, ())
    memory.take_back(index.evict_tails(99, "device"))
    memory.take_back(index.evict_device(99))
    assert index.statistics().device_pages == 4
    assert memory.device_tail_slots.ledger().sealed == kept
    assert memory.host.ledger().quarantined == 4
    bench.pool.transfers.settled(planned)
    memory.take_back(index.evict_tails(99, "device"))
    memory.take_back(index.evict_device(99))
    assert memory.device.ledger().free == memory.device.total
    bench.check()


def test_looking_up_changes_no_lifetime() -> None:
    """K043 Mooncake#730: the first get of an object scheduled its deletion.

    What one match found stays for the second, under any pressure, while the first is held.
    """
    bench = Bench(MLA, device_pages=4)
    bench.cache(PROMPT)
    first = bench.pool.match(ROOT, PROMPT, 99)
    bench.pool.memory.take_back(bench.pool.index.evict_device(9))
    second = bench.pool.match(ROOT, PROMPT, 99)
    assert second.pages == first.pages
    assert second.num_pages == 4
    bench.pool.drop(first)
    bench.pool.memory.take_back(bench.pool.index.evict_device(9))
    assert bench.hit(PROMPT) == (4, 0)
    bench.pool.drop(second)
    bench.pool.memory.take_back(bench.pool.index.evict_device(9))
    assert bench.hit(PROMPT) == (0, 0)


@pytest.mark.parametrize("name", ["v4", "mla with indexer"])
def test_sources_of_queued_stores_stay_and_failed_ones_are_holes(name: str) -> None:
    """K049 llm-d/llm-d-kv-cache#504 (F05, F08): the engine let go what I/O threads still read.

    Sixteen stores are queued, every request is over and the device is under pressure. Every third
    store fails: exactly those prefixes are nowhere afterwards, the others are true to the byte.
    """
    prompts = [tokens_of(seed, 2 * PAGE) for seed in range(20, 36)]
    bench = Bench(SCHEMAS[name], device_pages=34, host_pages=40, device_tails=40, host_tails=40)
    stores = list[PlannedTransfer]()
    for prompt in prompts:
        bench.cache(prompt)
        planned = bench.store(prompt)
        assert planned is not None
        stores.append(planned)
    memory, index = bench.pool.memory, bench.pool.index
    memory.take_back(index.evict_tails(99, "device"))
    memory.take_back(index.evict_device(99))
    assert index.statistics().device_pages == 32
    for number, planned in enumerate(stores):
        if number % 3 == 0:
            bench.lose(planned)
        else:
            bench.bring(planned)
    memory.take_back(index.evict_tails(99, "device"))
    memory.take_back(index.evict_device(99))
    for number, prompt in enumerate(prompts):
        assert bench.hit(prompt) == (0, 0 if number % 3 == 0 else 2)
        if number % 3:
            held = bench.start(prompt)
            bench.bring(held.load)
            assert not [*bench.wrong(held, prompt, 2)]
            bench.close(held)
    bench.check()
