"""C11: waits without an end, and ends that came although the work was done."""

import threading
import time

import pytest
import trio

from kvlease.errors import PagesUnavailable, TransferFailed
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import open_engine
from kvlease.runtime.loader import submit
from kvlease.runtime.transfer import Transfer
from kvlease.units import LayerId
from tests.museum.held_steps import all_stored
from tests.museum.rig import MLA, ROOT, Bench, tokens_of
from tests.museum.rig import PAGE as BENCH_PAGE
from tests.runtime.loader_rig import Rig, running
from tests.runtime.rig import PATIENCE_S, Held, HoldingCopier, PlainCopier, grid, plan
from tests.runtime.test_engine import assert_whole, at_rest
from tests.runtime.test_gate import make_host_only
from tests.runtime.toy import (
    COLD,
    PAGE,
    FaultyCopier,
    answer,
    prompt_of,
    same,
    toy_config,
    toy_model,
)

PARAMS = SamplingParams(max_tokens=4)
PROMPT = prompt_of(1, 6 * PAGE + 5)


async def test_stores_end_while_nobody_asks_for_anything() -> None:
    """K157 sglang#20560 (F14): backups never ended while the server was idle."""
    copier = FaultyCopier(lambda _order: time.sleep(0.005))
    config = toy_config(tail_every=1)
    async with open_engine(toy_model(), config, ports=EnginePorts(copier)) as engine:
        await answer(engine, PROMPT, PARAMS)
        await all_stored(engine)
        memory = engine._core.pool.memory
        assert engine.statistics().host.sealed == 6
        memory.take_back(engine._core.pool.index.evict_tails(99, "device"))
        memory.take_back(engine._core.pool.index.evict_device(99, can_drop=False))
        assert (await answer(engine, PROMPT, PARAMS)).usage.hit_host == 6 * PAGE


@pytest.mark.parametrize("stage", range(6))
async def test_a_receive_that_stalls_at_any_point_is_late_and_no_more(stage: int) -> None:
    """K161 TensorRT-LLM#12471 (F14): the receiving side had no time-out, and waited for ever.

    Each copy of a load in turn does not come back. Whoever waits hears of it in the bound; layers
    that have arrived stay; the pages are kept until the copy returns.
    """
    orders = grid(3, "latent", "index_k")
    stuck = orders[stage]
    copier, held = HoldingCopier((stuck.layer, stuck.component)), Held()
    rig = Rig(copier)
    ended: list[int] = []
    with trio.fail_after(PATIENCE_S):
        async with running(rig):
            transfer = rig.transfer(*orders, held=held, deadline_s=0.25)

            async def wait(layer: int) -> None:
                try:
                    await transfer.layer_completion(LayerId(layer)).wait_done()
                except TransferFailed as error:
                    assert error.reason == "late"  # noqa: PT017
                    ended.append(layer)

            async with trio.open_nursery() as nursery:
                for layer in range(3):
                    nursery.start_soon(wait, layer)
                submit(rig.mailbox, transfer)
            assert sorted(ended) == list(range(stuck.layer, 3))
            assert held.closed == 0
            copier.go.set()
            await transfer.wait_settled()
    assert held.closed == 1


@pytest.mark.parametrize("device_pages", [11, 16, 20])
async def test_two_loads_that_each_need_most_of_the_pool_take_turns(device_pages: int) -> None:
    """K163 vllm#44560 (F15): each of two loads held a part of its pages and waited for the rest."""
    prompts = [prompt_of(seed, 9 * PAGE + 3) for seed in (1, 2)]
    config = toy_config(device_pages=device_pages, host_pages=60, tail_every=3)
    copier = FaultyCopier(lambda _order: time.sleep(0.002))
    async with open_engine(toy_model(), config, ports=EnginePorts(copier)) as engine:
        for seed in (1, 2, 3):
            await answer(engine, prompt_of(seed, 9 * PAGE + 3), PARAMS)
        await all_stored(engine)
        hits = list[int]()

        async def run(number: int) -> None:
            result = await answer(engine, prompts[number], PARAMS)
            assert same(result, await COLD.answer(prompts[number], PARAMS))
            hits.append(result.usage.hit_host)

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run, 0)
                nursery.start_soon(run, 1)
        assert max(hits) > 0
        assert_whole(await at_rest(engine))


def test_an_allocation_among_pinned_pages_says_no_at_once() -> None:
    """K165 LMCache#2942 (F15): an endless loop waited for space that nobody would ever free."""
    bench = Bench(MLA, device_pages=8, host_pages=4)
    pinned = tokens_of(1, 4 * BENCH_PAGE)
    bench.cache_on_host(pinned)
    match = bench.pool.match(ROOT, pinned, 99)
    other = tokens_of(2, 4 * BENCH_PAGE)
    bench.cache(other)
    with pytest.raises(PagesUnavailable, match="4 wanted for a store, 0 available"):
        bench.store(other)
    assert not bench.pool.room(9)
    assert bench.hit(other) == (4, 0), "the cache was emptied for nothing"
    wall = bench.start(other)
    assert not bench.pool.room(5)
    assert bench.begin(tokens_of(3, 5 * BENCH_PAGE)) is None
    bench.close(wall)
    bench.pool.drop(match)
    bench.check()


async def test_loads_that_are_always_late_are_tried_a_few_times_only() -> None:
    """K169 sglang#39283 (F14): phantom hits were tried again without a bound."""
    tries = [0]

    def late(order: CopyOrder) -> int | None:
        if order.kind == "load" and order.layer == 0:
            tries[0] += 1
            time.sleep(0.5)
        return None

    config = toy_config(device_pages=24, load_timeout_s=0.3)
    ports = EnginePorts(copier=FaultyCopier(late))
    async with open_engine(toy_model(), config, ports=ports) as engine:
        await make_host_only(engine, PROMPT)
        with trio.fail_after(5):
            result = await answer(engine, PROMPT, PARAMS)
        assert same(result, await COLD.answer(PROMPT, PARAMS))
        assert 1 <= tries[0] <= 2
        assert result.usage.hit_host == 0
        assert engine.statistics().counters.transfer_timeouts == 2
        await trio.sleep(0.6)
        assert_whole(await at_rest(engine))


def test_what_hears_of_an_end_may_call_back() -> None:
    """K173 LMCache#4676: releasing called out while it held a lock, and deadlocked.

    Whoever hears of an end asks the same transfer, waits on it and lets its leases go, while
    others end it at the same time from other threads: 200 times, released once each.
    """

    def rounds() -> None:
        for _ in range(200):
            held = Held()
            transfer = Transfer(plan(*grid(2, "latent"), holds=(held,)))

            def heard(transfer: Transfer = transfer) -> None:
                assert not transfer.revoke()
                assert not transfer.on_final(lambda: None)
                transfer.layer_completion(LayerId(1)).forget(heard)

            assert transfer.on_final(heard)
            assert transfer.on_settled(transfer.release)
            ends = [
                threading.Thread(target=transfer.revoke),
                threading.Thread(target=transfer.run_copy, args=(0, PlainCopier())),
            ]
            for thread in ends:
                thread.start()
            transfer.run_copy(1, PlainCopier())
            for thread in ends:
                thread.join(5)
                assert not thread.is_alive()
            transfer.release()
            assert held.closed == 1

    whole = threading.Thread(target=rounds, daemon=True)
    whole.start()
    whole.join(20)
    assert not whole.is_alive(), "two ends of one transfer wait for each other"
