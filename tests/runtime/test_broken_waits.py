"""Waits that had no end: nobody left to plan, a host that is down, an engine that is closing."""

from contextlib import suppress

import pytest
import trio

from kvlease.errors import (
    ActorClosed,
    DeadlineExceeded,
    EngineFull,
    InternalError,
    RequestFailed,
)
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.messages import SchedulerMessage, StepEnded
from kvlease.runtime.scheduler import Scheduler
from tests.runtime.test_engine import assert_whole, at_rest
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


async def test_the_only_sequence_left_is_planned_again_after_its_own_preemption() -> None:
    """Equal prompts side by side: the second owns copies of pages that it pins in the index too.

    When the first is done the second needs more than the pool has, and has itself to preempt.
    Nothing else is under way then, so no message would ever tell the scheduler to admit it again.
    """
    prompt = prompt_of(3, 10)
    long = SamplingParams(max_tokens=8 * PAGE - 10, ignore_eos=True)
    config = toy_config(device_pages=8, host_pages=0, max_sessions=4)
    async with open_engine(toy_model(), config) as engine:
        results = {}

        async def run(name: str, params: SamplingParams) -> None:
            results[name] = await answer(engine, prompt, params)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run, "short", SamplingParams(max_tokens=50, ignore_eos=True))
                while not engine.statistics().running:
                    await trio.lowlevel.checkpoint()
                nursery.start_soon(run, "long", long)
        assert same(results["long"], await COLD.answer(prompt, long))
        assert_whole(await at_rest(engine))


def _fails(order: CopyOrder) -> int | None:
    raise OSError(f"{order.kind} refused")


@pytest.mark.parametrize("host_pages", [2, 128])
async def test_a_dead_host_does_not_hold_up_write_back(host_pages: int) -> None:
    """C07 with write-back: pages that cannot be stored are dropped, not stored again for ever."""
    config = toy_config(device_pages=12, host_pages=host_pages, write_policy="back")
    ports = EnginePorts(copier=FaultyCopier(_fails))
    async with open_engine(toy_model(), config, ports=ports) as engine:
        for seed in range(6):
            prompt = prompt_of(seed, 100)
            with trio.fail_after(10):
                result = await answer(engine, prompt, PARAMS)
            assert same(result, await COLD.answer(prompt, PARAMS))
        done = await at_rest(engine)
        assert 0 < done.counters.failed_transfers < 20
        assert_whole(done)


async def test_a_request_that_comes_while_the_engine_closes_ends() -> None:
    """R9: callers outside the block race with its end; each hears of it, none waits for ever."""
    ends: list[str] = []

    async def run(engine: Engine, number: int) -> None:
        await trio.sleep(0.001 * number)
        with suppress(ActorClosed, RequestFailed):
            await answer(engine, prompt_of(number, 60), SamplingParams(max_tokens=30))
        ends.append("ended")

    async def flush(engine: Engine) -> None:
        await trio.sleep(0.02)
        with suppress(ActorClosed):
            for _ in range(20):
                await engine.flush()
        ends.append("flushed")

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery, open_engine(toy_model(), toy_config()) as engine:
            for number in range(40):
                nursery.start_soon(run, engine, number)
            nursery.start_soon(flush, engine)
            await trio.sleep(0.02)
    assert len(ends) == 41


async def test_a_scheduler_that_dies_in_the_middle_of_a_message_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step's end that was lost left its members in the step for ever, past any cancellation."""
    apply = Scheduler.apply

    def dies(self: Scheduler, message: SchedulerMessage) -> None:
        if isinstance(message, StepEnded):
            raise ConnectionError("killed by the test")
        apply(self, message)

    monkeypatch.setattr(Scheduler, "apply", dies)
    ends: list[str] = []
    with trio.fail_after(10), pytest.raises(InternalError, match="in the middle of its work"):
        async with (
            open_engine(toy_model(), toy_config()) as engine,
            engine.generate(prompt_of(1, 40), PARAMS) as stream,
        ):
            try:
                await stream.drain()
            finally:
                ends.append("left")
    assert ends == ["left"]


async def test_a_burst_cannot_pass_the_queue_before_it_is_counted() -> None:
    """Overload: requests that the scheduler has not seen yet wait in the queue as well."""
    outcomes: list[str] = []

    async def run(engine: Engine, number: int) -> None:
        try:
            await answer(engine, prompt_of(number, 20), PARAMS)
        except EngineFull:
            outcomes.append("refused")
        else:
            outcomes.append("served")

    async with open_engine(toy_model(), toy_config(max_queue=2, max_sessions=1)) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(run, engine, number)
        assert outcomes.count("served") == 3
        assert engine.statistics().counters.rejected == 17


async def test_a_deadline_does_not_wait_for_a_load_that_has_a_later_one() -> None:
    """The caller hears at its own deadline; the pages come back when the step has ended."""
    hold = Hold(lambda order: order.kind == "load")
    ports = EnginePorts(copier=FaultyCopier(hold))
    config = toy_config(device_pages=24, load_timeout_s=8.0, request_timeout_s=1.0)
    prompt = prompt_of(1, 6 * PAGE + 5)
    async with open_engine(toy_model(), config, ports=ports) as engine:
        for seed in (1, 100, 101, 102, 103):
            await answer(engine, prompt if seed == 1 else prompt_of(seed, 6 * PAGE), PARAMS)
        try:
            with trio.fail_after(4), pytest.raises(DeadlineExceeded):
                await answer(engine, prompt, PARAMS)
            assert hold.reached.is_set()
        finally:
            hold.go.set()
        assert_whole(await at_rest(engine))
