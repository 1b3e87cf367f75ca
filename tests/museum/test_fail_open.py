"""C07: something failed, and the rest went on as if it had not."""

import random
import time

import pytest
import trio

from kvlease.errors import TransferFailed
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.ports import CopyOrder
from kvlease.protocols.schema import IndexedLayer
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.request import GenerateResult
from kvlease.runtime.streams import InlineStream
from tests.museum.held_steps import until
from tests.museum.rig import MLA, SCHEMAS, Bench, tokens_of
from tests.museum.rig import PAGE as BENCH_PAGE
from tests.runtime.test_engine import assert_whole, at_rest
from tests.runtime.test_gate import PARTS, make_host_only
from tests.runtime.toy import (
    COLD,
    PAGE,
    FaultyCopier,
    Hold,
    answer,
    prompt_of,
    same,
    toy_config,
    toy_model,
)

PARAMS = SamplingParams(max_tokens=4)
PROMPT = prompt_of(1, 6 * PAGE + 5)
FAULTS = ("raises", "short", "nothing", "long")


class FailingPart:
    """A fault at one component of one layer of loads; ``part`` None lets all go well."""

    def __init__(self) -> None:
        self.part: tuple[int, str] | None = None
        self.how = "raises"
        self.times = 0

    def __call__(self, order: CopyOrder) -> int | None:
        if order.kind != "load" or (order.layer, order.component) != self.part:
            return None
        self.times += 1
        match self.how:
            case "raises":
                raise OSError("the link is down")
            case "short":
                return order.run() - 1
            case "nothing":
                return 0
            case _:
                return order.run() + 1


async def test_a_link_that_dies_at_any_part_of_a_load_costs_time_only() -> None:
    """K091 wtdcode/vllm-backport#33 (F08): the link died in the middle; the node served on.

    Each component of each layer fails in each way: the answer is the cold one, and the failure is
    counted.
    """
    fault = FailingPart()
    config = toy_config(device_pages=12, host_pages=40)
    ports = EnginePorts(copier=FaultyCopier(fault))
    cold = await COLD.answer(PROMPT, PARAMS)
    async with open_engine(toy_model(), config, ports=ports) as engine:
        for number, part in enumerate(PARTS):
            fault.part, fault.how, fault.times = None, FAULTS[number % len(FAULTS)], 0
            await make_host_only(engine, PROMPT)
            before = engine.statistics().counters.failed_transfers
            fault.part = part
            with trio.fail_after(10):
                result = await answer(engine, PROMPT, PARAMS)
            assert fault.times == 1, f"{part} was not loaded, or tried again"
            assert same(result, cold)
            assert (result.usage.hit_host, result.usage.computed) == (0, len(PROMPT))
            assert engine.statistics().counters.failed_transfers == before + 1
        assert_whole(await at_rest(engine))


@pytest.mark.parametrize("bad", range(4))
async def test_a_step_ordered_behind_a_load_that_then_fails_is_not_published(bad: int) -> None:
    """K091 wtdcode/vllm-backport#33 (F02): being ordered behind a copy proves no bytes.

    A step resolves all layers while they are recorded; one layer's copies fail afterwards. Whoever
    asks before publishing is told.
    """
    bench = Bench(MLA)
    prompt = tokens_of(1, 4 * BENCH_PAGE)
    bench.cache_on_host(prompt)
    held = bench.start(prompt)
    assert held.load is not None
    transfer = bench.carry(held.load)
    held.lease.pending.append(transfer)
    step = bench.pool.lease_step([held.lease])
    for layer in MLA.layers:
        transfer.record_layers([layer.id])
        assert isinstance(layer, IndexedLayer)
        await step[layer].resolve(InlineStream().scope())
    bench.run_all(transfer, skip=range(2 * bad, 8))
    transfer.fail("the link is down")
    with pytest.raises(TransferFailed, match="the link is down"):
        await step.verify()


@pytest.mark.parametrize("room", [0, 1, 3, 5])
def test_an_allocation_that_fails_midway_hands_out_nothing(room: int) -> None:
    """K093 LMCache#3006 (F15): objects allocated before a failure were hits, unfilled.

    The load of six pages finds room for fewer: it takes none, and pins nothing.
    """
    bench = Bench(device_pages=8)
    prompt = tokens_of(1, 6 * BENCH_PAGE)
    bench.cache_on_host(prompt)
    wall = bench.start(tokens_of(2, (8 - room) * BENCH_PAGE))
    bench.compute(wall, tokens_of(2, (8 - room) * BENCH_PAGE), tails=False)
    before = [book.ledger() for book in bench.pool.memory.books]
    for _ in range(3):
        assert bench.begin(prompt) is None
    assert [book.ledger() for book in bench.pool.memory.books] == before
    assert bench.hit(prompt) == (0, 6)
    bench.check()
    bench.close(wall)
    held = bench.start(prompt)
    bench.bring(held.load)
    assert not [*bench.wrong(held, prompt, 6)]


@pytest.mark.parametrize("why", ["declined", "failed", "late"])
async def test_a_load_that_does_not_come_is_no_hit(why: str) -> None:
    """K095 sglang#31881 (F20): a prefetch that never ran left its hit length behind.

    The host has the prefix: the load is declined for its cost, fails, or is late. The tokens count
    as computed, none as hit.
    """

    def fault(order: CopyOrder) -> int | None:
        if order.kind == "load" and order.layer == 1 and why != "declined":
            if why == "failed":
                raise OSError("down")
            time.sleep(0.6)
        return None

    config = toy_config(device_pages=12, load_timeout_s=0.4 if why == "late" else 5.0)
    async with open_engine(
        toy_model(), config, ports=EnginePorts(copier=FaultyCopier(fault))
    ) as engine:
        estimates = engine._core.estimates
        estimates.is_choosing = why == "declined"
        await make_host_only(engine, PROMPT)
        estimates.bytes_per_s, estimates.tokens_per_s = 1.0, 1e9
        result = await answer(engine, PROMPT, PARAMS)
        assert same(result, await COLD.answer(PROMPT, PARAMS))
        assert result.usage.hit_host == result.usage.hit_device == 0
        assert result.usage.computed == len(PROMPT)
        chosen = engine.statistics().counters.recompute_choices
        assert (chosen > 0) == (why == "declined")


async def test_who_shares_a_failed_load_does_not_go_on_with_its_pages() -> None:
    """K097 vllm#49250 (F08): the sharer resumed while the owner was still computing them again.

    Two requests wait for one load; its last layer is held, then fails.
    """
    hold = Hold(lambda o: (o.kind, o.layer, o.component) == ("load", 2, "latent"))

    def fault(order: CopyOrder) -> int | None:
        hold(order)
        if hold.matches(order):
            raise OSError("down")
        return None

    prompts = [PROMPT, [*PROMPT[: 6 * PAGE], *prompt_of(7, 9)]]
    results: dict[int, GenerateResult] = {}
    config = toy_config(device_pages=24)
    async with open_engine(
        toy_model(), config, ports=EnginePorts(copier=FaultyCopier(fault))
    ) as engine:
        await make_host_only(engine, PROMPT)

        async def run(number: int) -> None:
            results[number] = await answer(engine, prompts[number], PARAMS)

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run, 0)
                assert await trio.to_thread.run_sync(hold.reached.wait, 10)
                nursery.start_soon(run, 1)
                await until(lambda: len(engine._core.running) == 2)
                shared = [seq.require_held().arrivals for seq in engine._core.running]
                assert len(shared) == 2
                assert set(shared[0]) & set(shared[1]), "one load serves both"
                hold.go.set()
        for number, prompt in enumerate(prompts):
            assert same(results[number], await COLD.answer(prompt, PARAMS))
            assert results[number].usage.hit_host == 0
        assert_whole(await at_rest(engine))


async def _serve_twice(engine: Engine, prompts: list[list[int]]) -> None:
    for _ in range(2):
        for prompt in prompts:
            assert same(await answer(engine, prompt, PARAMS), await COLD.answer(prompt, PARAMS))


@pytest.mark.parametrize("rate", [0.02, 0.2])
async def test_a_flaky_link_gives_slower_answers_never_wrong_ones(rate: float) -> None:
    """K103 SemiAnalysisAI/InferenceX#1944 (F08): a flaky link turned output into garbage."""
    rng, lost = random.Random(3), [0]

    def drop(order: CopyOrder) -> int | None:
        if rng.random() < rate:
            lost[0] += 1
            return 0
        return None

    config = toy_config(device_pages=14, tail_every=1)
    async with open_engine(
        toy_model(), config, ports=EnginePorts(copier=FaultyCopier(drop))
    ) as engine:
        await _serve_twice(engine, [prompt_of(seed, 70) for seed in range(6)])
        counters = (await at_rest(engine)).counters
        assert 0 < counters.failed_transfers <= lost[0]


@pytest.mark.parametrize("pages", [1, 3, 6])
def test_what_a_restore_says_is_what_a_match_finds(pages: int) -> None:
    """K105 llama.cpp#26676: a restore reported success; the next request computed all."""
    bench = Bench()
    prompt = tokens_of(1, 6 * BENCH_PAGE)
    bench.cache_on_host(prompt)
    held = bench.start(prompt, pages)
    planned = held.load
    assert planned is not None
    assert len(planned.destination) == pages
    bench.bring(planned)
    bench.close(held)
    match = bench.pool.match(b"museum", prompt[: 4 * pages * BENCH_PAGE], 99)
    assert (match.num_pages, match.device_pages, match.arrivals) == (pages, pages, [])
    bench.pool.drop(match)


@pytest.mark.parametrize("name", ["v4", "mla with indexer"])
@pytest.mark.parametrize("why", ["failed", "late", "revoked"])
def test_a_slot_of_a_load_that_came_to_nothing_is_seen_by_nobody(name: str, why: str) -> None:
    """K107 sglang#30986 (F08): a request decoded from a slot whose load had been called off.

    The request leaves; the next one does not find the pages, and the slot is back and poisoned.
    """
    bench = Bench(SCHEMAS[name], slots=1)
    prompt = tokens_of(1, 6 * BENCH_PAGE)
    bench.cache_on_host(prompt)
    held = bench.start(prompt)
    planned = held.load
    assert planned is not None
    planned.copies[0].run()
    bench.pool.lost(planned, why, ())
    assert held.is_lost
    assert bench.hit(prompt) == (0, 0 if why == "failed" else 6)
    bench.close(held)
    assert bench.begin(tokens_of(2, BENCH_PAGE)) is None or name != "v4"
    for open_one in list(bench.running):
        bench.close(open_one)
    bench.pool.transfers.settled(planned)
    bench.pool.reclaim()
    assert bench.pool.memory.slots.ledger().free == 1
    again = bench.start(prompt)
    bench.compute(again, prompt) if why == "failed" else bench.bring(again.load)
    assert not [*bench.wrong(again, prompt, 6)]
