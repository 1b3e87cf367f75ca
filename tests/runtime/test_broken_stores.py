"""Stores whose ends were let go while somebody still needed them held."""

import time

import trio
from attrs import evolve

from kvlease.protocols.config import SamplingParams
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import open_engine
from tests.runtime.test_engine import assert_whole, at_rest
from tests.runtime.toy import (
    COLD,
    TOY,
    Cold,
    FaultyCopier,
    Hold,
    answer,
    prompt_of,
    same,
    toy_config,
    toy_model,
)

PARAMS = SamplingParams(max_tokens=4)


async def test_pages_that_a_late_write_back_still_reads_are_not_given_away() -> None:
    """R6, R7: the index forgets a store that came too late; its copy still reads the source."""
    hold = Hold(lambda order: order.kind == "store")
    config = toy_config(device_pages=14, device_tails=1, write_policy="back", load_timeout_s=0.2)
    ports = EnginePorts(copier=FaultyCopier(hold))
    async with open_engine(toy_model(), config, ports=ports) as engine:
        pool = engine._core.pool
        results = {}

        async def run(seed: int) -> None:
            results[seed] = await answer(engine, prompt_of(seed, 60), PARAMS)

        try:
            await answer(engine, prompt_of(0, 100), PARAMS)
            await answer(engine, prompt_of(1, 100), PARAMS)
            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run, 2)
                    assert await trio.to_thread.run_sync(hold.reached.wait, 10)
                    (store,) = pool.transfers.unsettled
                    epochs = [pool.memory.device.epochs[page] for page in store.source]
                    assert epochs
                for seed in range(3, 6):
                    await run(seed)
            assert store.is_lost
            assert epochs == [pool.memory.device.epochs[page] for page in store.source]
        finally:
            hold.go.set()
        for seed, result in results.items():
            assert same(result, await COLD.answer(prompt_of(seed, 60), PARAMS))
        assert_whole(await at_rest(engine))


async def test_a_store_that_comes_to_nothing_lets_its_host_pages_go() -> None:
    """Sliding layers keep no spans: without a free tail slot a store of their pages moves nothing.

    Its pages would wait for an arrival for ever, on both tiers, and could never be evicted.
    """
    config = evolve(TOY, layer_kinds=("sliding", "sliding"), mlp_kinds=("hash", "score"))
    cold = Cold(config)
    tiny = toy_config(device_pages=32, host_pages=40, host_tails=1)
    ports = EnginePorts(copier=FaultyCopier(lambda _order: time.sleep(0.05)))
    async with open_engine(toy_model(config), tiny, ports=ports) as engine:

        async def run(seed: int) -> None:
            prompt = prompt_of(seed, 100)
            result = await answer(engine, prompt, PARAMS)
            assert same(result, await cold.answer(prompt, PARAMS))

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for seed in range(12):
                    nursery.start_soon(run, seed)
        assert_whole(await at_rest(engine))
        assert not engine._core.pool.transfers.unsettled
        await engine.flush()
        left = await at_rest(engine)
        assert left.host.free == left.host.total
        assert left.device.free == left.device.total
