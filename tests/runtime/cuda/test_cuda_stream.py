"""Streams of a device: order, readiness, failures and ends, on threads and on a GPU."""

from __future__ import annotations

import sys
import threading
from functools import partial

import pytest
import torch
import trio

from kvlease.errors import NotReady, TransferFailed
from kvlease.protocols.ports import Completion, CompletionState
from kvlease.runtime.completions import CpuCompletion
from kvlease.runtime.cuda_waiter import CudaWaiter, DeviceEvent, Point
from tests.runtime.cuda.devices import Device, open_streams
from tests.runtime.rig import PATIENCE_S

PLANNED, RECORDED = CompletionState.PLANNED, CompletionState.RECORDED
DONE, FAILED, REVOKED = CompletionState.DONE, CompletionState.FAILED, CompletionState.REVOKED


def wait_on_worker(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


async def test_a_record_is_planned_until_the_worker_records_it_then_recorded_then_done(
    device: Device,
) -> None:
    hold, entered = threading.Event(), threading.Event()

    def work() -> None:
        device.delay(0.2)
        entered.set()
        wait_on_worker(hold)

    async with open_streams(device, "compute") as (stream,):
        stream.launch(work)
        end = stream.record()
        assert await trio.to_thread.run_sync(entered.wait, PATIENCE_S)
        assert end.state is PLANNED, "nothing was recorded on the device yet"
        hold.set()
        await end.wait_recorded()
        assert end.state is RECORDED, "the device still sleeps"
        with trio.fail_after(PATIENCE_S):
            await end.wait_done()


async def test_planned_work_of_a_device_is_nothing_to_be_ordered_behind(device: Device) -> None:
    hold = threading.Event()
    async with open_streams(device, "load", "compute") as (load, compute):
        load.launch(partial(wait_on_worker, hold))
        end = load.record()
        with pytest.raises(NotReady, match="not recorded yet"):
            compute.wait(end)
        hold.set()
        await end.wait_done()


async def test_a_reader_behind_a_recorded_point_reads_what_comes_late(device: Device) -> None:
    source = torch.arange(1000, device=device.name)
    target = torch.zeros_like(source)
    seen = torch.zeros_like(source)
    async with open_streams(device, "load", "compute") as (load, compute):
        for _ in range(20):
            load.launch(lambda: device.delay(0.01))
            load.launch(lambda: device.enqueue(lambda: target.copy_(source, non_blocking=True)))
            loaded = load.record()
            await loaded.wait_recorded()
            compute.wait(loaded)
            compute.launch(lambda: device.enqueue(lambda: seen.copy_(target, non_blocking=True)))
            read = compute.record()
            await read.wait_done()
            assert torch.equal(seen, source)
            compute.launch(lambda: device.enqueue(lambda: target.zero_()))
            compute.launch(lambda: device.enqueue(lambda: seen.zero_()))
            await compute.record().wait_done()


async def test_waiting_for_a_device_does_not_hold_the_worker(device: Device) -> None:
    launched = threading.Event()
    async with open_streams(device, "load", "compute") as (load, compute):
        load.launch(lambda: device.delay(0.3))
        loaded = load.record()
        await loaded.wait_recorded()
        compute.wait(loaded)
        compute.launch(launched.set)
        assert await trio.to_thread.run_sync(launched.wait, PATIENCE_S)
        assert loaded.state is RECORDED, "the closure ran while the device was still waiting"
        await compute.record().wait_done()
        assert loaded.state is DONE


async def test_the_device_tells_how_long_a_stream_stood_still(device: Device) -> None:
    held: list[tuple[Completion, float]] = []

    def observe(completion: Completion, seconds: float) -> None:
        held.append((completion, seconds))

    async with open_streams(device, "load", "compute", observer=observe) as (load, compute):
        for seconds in (0.1, 0.05):
            held.clear()
            load.launch(partial(device.delay, seconds))
            late, last = load.record(), load.record()
            await last.wait_recorded()
            scope = compute.scope()
            scope.wait(late)
            scope.wait(last)
            await scope.record().wait_done()
            assert [completion for completion, _ in held][:1] == [late]
            assert held[0][1] > 0.5 * seconds
            assert sum(each for _, each in held[1:]) < 0.5 * held[0][1]
        held.clear()
        before = load.record()
        await before.wait_done()
        compute.wait(before)
        await compute.record().wait_done()
        assert not held, "what is done holds nobody"
        assert compute.statistics().waits >= 2


async def test_work_of_no_device_holds_the_worker(device: Device) -> None:
    outside = CpuCompletion("outside")
    outside.set_recorded()
    ran = threading.Event()
    async with open_streams(device, "compute") as (compute,):
        compute.wait(outside)
        compute.launch(ran.set)
        await trio.sleep(0.05)
        assert not ran.is_set()
        outside.finish()
        await compute.record().wait_done()
        assert ran.is_set()


async def test_a_failed_launch_fails_its_own_scope_after_the_device_is_done(
    device: Device,
) -> None:
    def fails() -> None:
        device.delay(0.1)
        raise ValueError("no kernel of that name")

    async with open_streams(device, "compute") as (stream,):
        bad, good = stream.scope(), stream.scope()
        bad.launch(fails)
        bad.launch(lambda: pytest.fail("skipped work ran"))
        end, other = bad.record(), good.record()
        await end.wait_recorded()
        assert end.state is RECORDED, "what it gave to the device before is not over"
        with pytest.raises(TransferFailed, match="no kernel of that name"):
            await end.wait_done()
        await other.wait_done()


async def test_awaiting_what_has_failed_skips_the_work(device: Device) -> None:
    lost = CpuCompletion("lost")
    lost.set_recorded()
    async with open_streams(device, "compute") as (stream,):
        scope = stream.scope()
        scope.wait(lost)
        scope.launch(lambda: pytest.fail("read what never came"))
        end = scope.record()
        lost.fail("the link broke")
        with pytest.raises(TransferFailed, match="the link broke"):
            await end.wait_done()


async def test_an_abandoned_record_ends_only_after_the_device(device: Device) -> None:
    began, held = threading.Event(), threading.Event()
    flag = torch.zeros(1, device=device.name)
    found: list[float] = []

    def work() -> None:
        device.delay(0.3)
        device.enqueue(lambda: flag.fill_(1))
        began.set()

    with trio.CancelScope() as scope:
        async with open_streams(device, "compute") as (stream,):
            stream.launch(work)
            stream.launch(partial(wait_on_worker, held))
            dropped = stream.record()
            dropped.on_final(lambda: found.append(flag.item()))
            assert await trio.to_thread.run_sync(began.wait, PATIENCE_S)
            letting_go = threading.Timer(0.05, held.set)
            letting_go.start()
            scope.cancel()
    letting_go.join()
    assert scope.cancelled_caught
    assert dropped.state is REVOKED
    assert found == [1], "it ended while the device was still at work"


async def test_a_waiter_that_is_started_under_cancellation_does_not_wait_for_its_closing(
    device: Device,
) -> None:
    waiter = CudaWaiter(device.event)
    rescue = threading.Timer(PATIENCE_S, waiter.close)
    rescue.start()
    with trio.CancelScope() as scope:
        scope.cancel()
        async with trio.open_nursery() as nursery:
            await nursery.start(waiter.run)
            pytest.fail("it was started")
    assert scope.cancelled_caught
    assert rescue.is_alive(), "only its closing ended it"
    rescue.cancel()


async def test_events_are_used_again(device: Device) -> None:
    made: list[DeviceEvent] = []

    def make() -> DeviceEvent:
        made.append(device.event())
        return made[-1]

    async with open_streams(device, "compute", waiter=CudaWaiter(make)) as (stream,):
        for _ in range(50):
            await stream.record().wait_done()
    assert len(made) <= 3


async def test_thousands_of_records_all_end_in_order(device: Device) -> None:
    ends: list[int] = []
    async with open_streams(device, "a", "b") as streams:
        last: list[CpuCompletion] = []
        for number in range(2000):
            stream = streams[number % 2]
            end = stream.record()
            note = partial(ends.append, number)
            if number % 2 == 0 and not end.on_final(note):
                note()  # it has ended already
            last = [*last[-1:], end]
        with trio.fail_after(PATIENCE_S):
            for end in last:
                await end.wait_done()
    assert ends == list(range(0, 2000, 2))


def test_a_waiter_looks_while_a_worker_records(device: Device) -> None:
    """Points come in while the waiter seeks the first that somebody waits for."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    waiter = CudaWaiter(device.event)
    lane = waiter.lane()
    first = Point(device.event(), lambda _error: None, hurry=False)

    def record() -> None:
        for _ in range(3000):
            lane.watch(first)

    worker = threading.Thread(target=record)
    worker.start()
    try:
        while worker.is_alive():
            lane.next_look(0.0)
    finally:
        sys.setswitchinterval(usual)
        worker.join()
    assert len(lane.points) == 3000
    assert lane.next_look(0.0)[1] is None
