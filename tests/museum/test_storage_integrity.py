"""C14: a lower tier that said it had what it had not. The host tier stands for all lower ones."""

import pytest

from kvlease.pools.held import PlannedTransfer
from tests.museum.rig import PAGE, SCHEMAS, Bench, tokens_of


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["v4", "mla with indexer"])
def test_a_failed_batch_is_a_hole_and_the_rest_is_written(name: str, bad: int) -> None:
    """K211 sglang#39444 (F18): the backup loop stopped at the first failed batch.

    Eight pages are stored in four batches, one of which fails. The other three are on the host; no
    page without an acknowledged copy leaves the device; the hole is what is stored next.
    """
    bench = Bench(SCHEMAS[name])
    prompt = tokens_of(1, 8 * PAGE)
    held = bench.start(prompt)
    batches: list[PlannedTransfer] = []
    for end in (2, 4, 6, 8):
        bench.compute(held, prompt[: 4 * end * PAGE], tails=end == 8)
        planned = bench.plan_store(held)
        assert planned is not None
        batches.append(planned)
    hole = list(batches[bad].source)
    for number, planned in enumerate(batches):
        if number == bad:
            bench.lose(planned)
        else:
            bench.bring(planned)
    assert bench.pool.index.statistics().host_pages == 6
    again = bench.plan_store(held)
    assert again is not None
    assert list(again.source) == hole
    bench.lose(again)
    bench.close(held)
    bench.pool.memory.take_back(bench.pool.index.evict_device(99, can_drop=False))
    left = bench.pool.index.statistics().device_pages
    assert left == 2 * (bad + 1), "what has no copy stays, and what stands above it"
    bench.check()


@pytest.mark.parametrize("name", ["v4", "mla with indexer"])
@pytest.mark.parametrize("done", [0, 1, 0.5, 1.0])
def test_what_a_dead_writer_left_is_never_read_and_can_be_written_again(
    name: str, done: float
) -> None:
    """K215 Mooncake#974 (F18): after its writer had died a key could be neither read nor written.

    The writer dies before its first copy, after one, halfway, and after the last one, unsaid.
    """
    bench = Bench(SCHEMAS[name])
    prompt = tokens_of(1, 4 * PAGE)
    bench.cache(prompt)
    planned = bench.store(prompt)
    assert planned is not None
    count = done if isinstance(done, int) else int(done * len(planned.copies))
    for order in planned.copies[:count]:
        order.run()
    memory, index = bench.pool.memory, bench.pool.index
    memory.take_back(index.evict_tails(99, "device"))
    memory.take_back(index.evict_device(99))
    assert index.statistics().device_pages == 4, "the only good copy stays while it is being stored"
    bench.lose(planned, "revoked")
    bench.pool.memory.host_spans.poison_all()
    assert bench.hit(prompt)[1] == 0
    second = bench.store(prompt)
    assert second is not None
    assert len(second.destination) == 4
    bench.bring(second)
    bench.drop_device()
    held = bench.start(prompt)
    bench.bring(held.load)
    assert not [*bench.wrong(held, prompt, 4)]
    bench.check()


def test_saved_is_what_the_store_has_said() -> None:
    """K129 vllm-ascend#12046 (F18): pages were marked saved although the save had been skipped."""
    bench = Bench(SCHEMAS["mla with indexer"])
    prompt = tokens_of(1, 4 * PAGE)
    bench.cache(prompt)
    planned = bench.store(prompt)
    assert planned is not None
    host = bench.pool.index.statistics()
    assert host.host_pages == 4, "planned"
    bench.pool.memory.take_back(bench.pool.index.evict_device(99, can_drop=False))
    assert bench.hit(prompt) == (4, 0), "and not counted as a copy"
    bench.lose(planned)
    assert bench.pool.index.statistics().host_pages == 0
    assert bench.store(prompt) is not None
