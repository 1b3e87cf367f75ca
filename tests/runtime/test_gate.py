"""The gate: a reader waits for exactly the bytes it needs, and bad loads are never read."""

import math
import time
from contextlib import suppress

import pytest
import trio

from kvlease.errors import RequestFailed
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.ports import CopyOrder
from kvlease.protocols.readiness import Readiness
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.request import GenerateResult
from tests.runtime.toy import (
    COLD,
    PAGE,
    TOY,
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
PARTS = [
    (layer.id, name)
    for layer in toy_model().schema.layers
    for name in (*(s.name for s in layer.spans), *(t.name for t in layer.tails if t.kept_rows))
]


async def make_host_only(engine: Engine, prompt: list[int]) -> None:
    """Cache a prompt on both tiers, then push it off the device."""
    await answer(engine, prompt, PARAMS)
    await trio.testing.wait_all_tasks_blocked(0.02)
    for seed in range(100, 100 + engine.config.device_pages // 6):
        await answer(engine, prompt_of(seed, 6 * PAGE), PARAMS)


@pytest.mark.parametrize(("layer", "component"), PARTS)
async def test_reader_waits_for_exactly_the_held_component(layer: int, component: str) -> None:
    """Index keys late (sglang#22811) and every other part: hold one, and only its layer waits.

    The layers before it have been launched, the layer itself has not, and the answer is the cold
    one after it is let go.
    """
    hold = Hold(lambda o: (o.kind, o.layer, o.component) == ("load", layer, component))
    ports = EnginePorts(copier=FaultyCopier(hold))
    config = toy_config(device_pages=24)
    async with open_engine(toy_model(), config, ports=ports) as engine:
        began_s = trio.current_time()
        await make_host_only(engine, PROMPT)
        answers_s = trio.current_time() - began_s
        got = []

        async def run() -> None:
            got.append(await answer(engine, PROMPT, PARAMS))

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                assert await trio.to_thread.run_sync(hold.reached.wait, 10)
                await trio.sleep(answers_s)  # five cold ones came in this time
                assert not got, "the answer came although a component was held"
                hold.go.set()
        assert got[0].usage.hit_host > 0
        assert same(got[0], await COLD.answer(PROMPT, PARAMS))
        assert engine.statistics().ledger_ok


async def test_without_the_wait_a_held_layer_is_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation check: with the gate's wait removed, poisoned bytes reach the answer."""

    async def no_wait(self: Readiness, *_: object) -> None:
        self.ready_through = math.inf  # type: ignore[assignment]

    hold = Hold(lambda o: (o.kind, o.component) == ("load", "index_k"))
    ports = EnginePorts(copier=FaultyCopier(hold))
    async with open_engine(toy_model(), toy_config(device_pages=24), ports=ports) as engine:
        await make_host_only(engine, PROMPT)
        monkeypatch.setattr(Readiness, "settle", no_wait)
        ended = trio.Event()
        got: list[GenerateResult] = []

        async def run() -> None:
            # Poison may also stop a kernel; either way the bytes were read before they came.
            with suppress(RequestFailed):
                got.append(await answer(engine, PROMPT, PARAMS))
            ended.set()

        try:
            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run)
                    assert await trio.to_thread.run_sync(hold.reached.wait, 10)
                    await ended.wait()
        finally:
            hold.go.set()
        assert not got or not same(got[0], await COLD.answer(PROMPT, PARAMS))


def _raise(order: CopyOrder) -> int | None:
    if order.kind == "load" and order.component == "latent" and order.layer == 2:
        raise OSError("the link is down")
    return None


def _short(order: CopyOrder) -> int | None:
    if order.kind == "load" and order.component == "index_k":
        return order.run() - 1
    return None


def _late(order: CopyOrder) -> int | None:
    if order.kind == "load" and order.component == "latent":
        time.sleep(0.4)
    return None


@pytest.mark.parametrize("fault", [_raise, _short, _late])
async def test_a_bad_load_is_recomputed_and_counted_never_read(fault: object) -> None:
    """Failed, short or late loads (K003, K093, K101): slower, never wrong, never stuck (R9)."""
    assert callable(fault)
    ports = EnginePorts(copier=FaultyCopier(fault))
    config = toy_config(device_pages=24, load_timeout_s=0.2)
    async with open_engine(toy_model(), config, ports=ports) as engine:
        await make_host_only(engine, PROMPT)
        before = engine.statistics().counters.failed_transfers
        with trio.fail_after(20):
            result = await answer(engine, PROMPT, PARAMS)
        assert same(result, await COLD.answer(PROMPT, PARAMS))
        counters = engine.statistics().counters
        assert counters.failed_transfers > before
        assert counters.transfer_timeouts == (counters.failed_transfers if fault is _late else 0)
        assert result.usage.recomputed > 0
        assert result.usage.hit_host == 0
        await trio.sleep(0.6)  # a late copy returns, and its pages leave quarantine
        final = engine.statistics()
        assert final.ledger_ok, final.ledger_error
        assert final.device.quarantined == 0


async def test_a_step_that_resolved_a_load_that_then_fails_publishes_nothing() -> None:
    """R2: resolving at RECORDED is a promise; when it is broken the step is discarded."""
    hold = Hold(lambda o: (o.kind, o.layer) == ("load", len(TOY.layer_kinds) - 1))

    def fault(order: CopyOrder) -> int | None:
        hold(order)
        if hold.matches(order):
            raise OSError("failed after it was recorded")
        return None

    ports = EnginePorts(copier=FaultyCopier(fault))
    async with open_engine(toy_model(), toy_config(device_pages=24), ports=ports) as engine:
        await make_host_only(engine, PROMPT)
        seen: list[int] = []
        take = seen.append  # one by one: a list made at the end would be empty until then anyway

        async def run() -> None:
            async with engine.generate(PROMPT, PARAMS) as stream:
                async for event in stream:
                    take(event.token)

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                assert await trio.to_thread.run_sync(hold.reached.wait, 10)
                await trio.sleep(0.05)
                assert seen == []
                hold.go.set()
        assert tuple(seen) == (await COLD.answer(PROMPT, PARAMS)).tokens
        assert engine.statistics().counters.discarded_steps >= 1


async def test_one_load_serves_many() -> None:
    """Two requests for one evicted prefix (vllm#44294): its pages are loaded once."""
    copier = FaultyCopier(lambda _order: time.sleep(0.02))
    config = toy_config(device_pages=32)
    async with open_engine(toy_model(), config, ports=EnginePorts(copier=copier)) as engine:
        await make_host_only(engine, PROMPT)
        copier.seen.clear()
        results = []

        async def run() -> None:
            results.append(await answer(engine, PROMPT, PARAMS))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            nursery.start_soon(run)
        cold = await COLD.answer(PROMPT, PARAMS)
        assert all(same(result, cold) for result in results)
        assert copier.seen.count(("load", 1, "latent")) == 1
