"""Every request that the log saw begin has exactly one end in it, whatever ended it (R9, R14)."""

import pytest
import trio

from kvlease.errors import KVLeaseError
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import (
    Event,
    LeaseClose,
    LeaseOpen,
    RequestFailed,
    RequestFinished,
    RequestSubmitted,
)
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.event_log import EventLog
from tests.runtime.test_gate import make_host_only
from tests.runtime.toy import PAGE, FaultyCopier, Hold, prompt_of, toy_config, toy_model

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


def ends_by_request(events: list[Event]) -> dict[int, list[Event]]:
    """Terminal events of every request that was submitted."""
    ends: dict[int, list[Event]] = {}
    for event in events:
        match event:
            case RequestSubmitted():
                ends[event.request] = []
            case RequestFinished() | RequestFailed():
                ends[event.request].append(event)
            case _:
                pass
    return ends


async def ask(engine: Engine, seed: int, length: int = 40) -> None:
    """Ask and read to the end; an engine that goes away is no error here."""
    try:
        async with engine.generate(prompt_of(seed, length), LONG) as stream:
            await stream.drain()
    except KVLeaseError:
        pass


async def test_an_engine_that_is_closed_ends_what_runs_and_what_waits() -> None:
    log = EventLog()
    events = log.remember()
    config = toy_config(max_sessions=2)
    async with trio.open_nursery() as nursery, open_engine(toy_model(), config, log=log) as engine:
        for seed in range(6):
            nursery.start_soon(ask, engine, seed)
        await trio.sleep(0.1)
    ends = ends_by_request(events)
    assert len(ends) == 6
    assert all(len(its) == 1 for its in ends.values())
    assert any(isinstance(its[0], RequestFailed) for its in ends.values())
    opened = [event.lease for event in events if isinstance(event, LeaseOpen)]
    closed = [event.lease for event in events if isinstance(event, LeaseClose)]
    assert sorted(opened) == sorted(closed)


async def test_a_cancel_and_a_completion_are_told_once() -> None:
    log = EventLog()
    events = log.remember()
    async with open_engine(toy_model(), toy_config(), log=log) as engine:
        await ask(engine, 1)
        async with engine.generate(prompt_of(2, 40), LONG) as stream:
            await anext(stream)
    ends = ends_by_request(events)
    reasons = [its[0].reason for its in ends.values() if isinstance(its[0], RequestFinished)]
    assert reasons == ["length", "cancelled"]


async def test_a_deadline_is_told_at_once_while_the_step_still_waits() -> None:
    """The step waits for a held load; its caller, and the log, hear of the deadline before."""
    hold = Hold(lambda order: order.kind == "load")
    prompt = prompt_of(1, 6 * PAGE + 5)
    log = EventLog()
    events = log.remember()
    config = toy_config(device_pages=24, request_timeout_s=0.5, load_timeout_s=3.0)
    ports = EnginePorts(copier=FaultyCopier(hold))
    async with open_engine(toy_model(), config, log=log, ports=ports) as engine:
        await make_host_only(engine, prompt)
        with pytest.raises(KVLeaseError, match=r"its 0\.5 s"):
            async with engine.generate(prompt, LONG) as stream:
                await stream.drain()
        failed = [event for event in events if isinstance(event, RequestFailed)]
        assert len(failed) == 1
        assert failed[0].t_ns < trio.current_time() * 1e9
        hold.go.set()
    assert all(len(its) == 1 for its in ends_by_request(events).values())


async def test_a_caller_who_leaves_is_let_go_at_the_deadline_at_the_latest() -> None:
    """Its step stands still for longer; the pages follow when the step is over."""
    hold = Hold(lambda order: order.kind == "load")
    prompt = prompt_of(1, 6 * PAGE + 5)
    log = EventLog()
    events = log.remember()
    config = toy_config(device_pages=24, request_timeout_s=0.6, load_timeout_s=20.0)
    ports = EnginePorts(copier=FaultyCopier(hold))
    async with open_engine(toy_model(), config, log=log, ports=ports) as engine:
        await make_host_only(engine, prompt)
        with trio.fail_after(10), trio.move_on_after(0.2):
            async with engine.generate(prompt, LONG) as stream:
                await stream.drain()
        assert not hold.go.is_set()
        last = [event for event in events if isinstance(event, RequestFinished)][-1]
        assert last.reason == "cancelled"
        hold.go.set()
    assert all(len(its) == 1 for its in ends_by_request(events).values())


def _never(_order: CopyOrder) -> int | None:
    raise OSError("the link is down")


async def test_a_load_that_fails_adds_no_second_end() -> None:
    prompt = prompt_of(1, 6 * PAGE + 5)
    log = EventLog()
    events = log.remember()
    ports = EnginePorts(copier=FaultyCopier(lambda o: _never(o) if o.kind == "load" else None))
    async with open_engine(
        toy_model(), toy_config(device_pages=24), log=log, ports=ports
    ) as engine:
        await make_host_only(engine, prompt)
        async with engine.generate(prompt, SamplingParams(max_tokens=3)) as stream:
            await stream.drain()
    assert all(len(its) == 1 for its in ends_by_request(events).values())
