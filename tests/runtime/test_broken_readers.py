"""Leases beside the scheduler and long answers: what came free too early, or was never noticed."""

import threading

import pytest
import trio

from kvlease.errors import TransferFailed
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import open_engine
from kvlease.runtime.steps import StepWorker
from kvlease.runtime.stream_scope import StreamScope
from kvlease.runtime.streams import CpuStream
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


async def test_pages_of_a_failed_load_stay_while_a_lease_is_open_on_them() -> None:
    """R2, R6: a reader may have opened the layers that came; nobody else may write there yet."""
    reached, go = threading.Event(), threading.Event()

    def fault(order: CopyOrder) -> int | None:
        if (order.kind, order.layer, order.component) == ("load", 2, "latent"):
            reached.set()
            assert go.wait(10)
            raise OSError("the link is down")
        return None

    ports = EnginePorts(copier=FaultyCopier(fault))
    async with open_engine(toy_model(), toy_config(device_pages=24), ports=ports) as engine:
        await make_host_only(engine, PROMPT)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer, engine, PROMPT, PARAMS)
            assert await trio.to_thread.run_sync(reached.wait, 10)
            with engine.lease_prefix(PROMPT) as lease:
                num_pages = lease.num_pages
                go.set()
                for seed in range(3):
                    await answer(engine, prompt_of(seed + 20, 100), PARAMS)
                assert engine.statistics().device.quarantined == num_pages > 0
        assert_whole(await at_rest(engine))


async def test_closing_a_lease_lets_those_who_wait_for_its_pages_begin() -> None:
    """R9: pages that come free outside of the scheduler are noticed when they do."""
    config = toy_config(device_pages=8, host_pages=0)
    async with open_engine(toy_model(), config) as engine:
        await answer(engine, prompt_of(1, 80), PARAMS)
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                with engine.lease_prefix(prompt_of(1, 80)) as lease:
                    assert lease.num_pages > 0
                    nursery.start_soon(answer, engine, prompt_of(2, 100), PARAMS)
                    await trio.sleep(0.2)
                    assert engine.statistics().waiting == 1
        assert_whole(await at_rest(engine))


async def test_failures_that_were_overcome_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """F18: a long answer survives any number of lost steps, as long as it gets on in between."""
    forward, calls = StepWorker._forward, [0]

    async def sometimes_fails(self: StepWorker, *args: object) -> object:
        calls[0] += 1
        if calls[0] % 4 == 0:
            raise TransferFailed("lost by the test")
        return await forward(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(StepWorker, "_forward", sometimes_fails)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    async with open_engine(toy_model(), toy_config()) as engine:
        result = await answer(engine, prompt_of(1, 20), params)
        assert engine.statistics().counters.discarded_steps > 4
        assert_whole(await at_rest(engine))
    monkeypatch.setattr(StepWorker, "_forward", forward)
    assert same(result, await COLD.answer(prompt_of(1, 20), params))


async def test_a_step_whose_stream_gives_no_scope_is_reported_and_done_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R9: the order in a worker's hand is reported whatever raises; its phase is never lost."""
    scope, refusals = CpuStream.scope, [2]

    def refuses(self: CpuStream) -> StreamScope:
        if self.name == "compute" and refusals[0]:
            refusals[0] -= 1
            raise ConnectionError("no scope")
        return scope(self)

    monkeypatch.setattr(CpuStream, "scope", refuses)
    async with open_engine(toy_model(), toy_config()) as engine:
        with trio.fail_after(20):
            result = await answer(engine, PROMPT, PARAMS)
        assert same(result, await COLD.answer(PROMPT, PARAMS))
        assert (await at_rest(engine)).counters.actor_restarts == 2
