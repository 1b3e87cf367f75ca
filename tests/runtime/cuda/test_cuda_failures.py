"""A device that fails, and a waiter that breaks: everything still ends, and says why."""

from __future__ import annotations

from typing import final

import pytest
import trio

from kvlease.errors import InternalError, TransferFailed
from kvlease.protocols.ports import Completion, CompletionState
from kvlease.runtime.cuda_waiter import CudaWaiter
from kvlease.runtime.loader import submit
from tests.runtime.cuda.devices import ThreadDevice, ThreadEvent, open_streams
from tests.runtime.cuda.loads import Bench, DeviceCopier
from tests.runtime.loader_rig import Rig
from tests.runtime.rig import PATIENCE_S, Held

FAILED, REVOKED = CompletionState.FAILED, CompletionState.REVOKED


@final
class BrokenDevice:
    """Hands out events of a device that fails for good once it is `broken`."""

    def __init__(self, device: ThreadDevice) -> None:
        self._device = device
        self.asks = self.records = self.waits = True

    def event(self) -> BrokenEvent:
        return BrokenEvent(self, self._device.event())


@final
class BrokenEvent:
    def __init__(self, device: BrokenDevice, event: ThreadEvent) -> None:
        self._device = device
        self._event = event

    def record(self) -> None:
        if not self._device.records:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._event.record()

    def wait(self) -> None:
        if not self._device.waits:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._event.wait()

    def query(self) -> bool:
        if not self._device.asks:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self._event.query()


@pytest.fixture
def threads() -> ThreadDevice:
    return ThreadDevice()


@pytest.mark.parametrize("fails", ["asks", "records", "both"])
async def test_a_device_that_fails_fails_what_waits_for_it(
    threads: ThreadDevice, fails: str
) -> None:
    broken = BrokenDevice(threads)
    with trio.fail_after(PATIENCE_S):
        async with open_streams(threads, "compute", waiter=CudaWaiter(broken.event)) as (stream,):
            await stream.record().wait_done()
            broken.asks, broken.records = fails == "records", fails == "asks"
            for _ in range(3):
                with pytest.raises(TransferFailed, match="illegal memory access"):
                    await stream.record().wait_done()
    threads.close()


@pytest.mark.parametrize("timed", [False, True])
async def test_a_reader_that_could_not_be_ordered_behind_its_rows_reads_nothing(
    threads: ThreadDevice, timed: bool
) -> None:
    broken = BrokenDevice(threads)
    waiter = CudaWaiter(broken.event)
    held: list[Completion] = []

    def observe(completion: Completion, _seconds: float) -> None:
        held.append(completion)

    with trio.fail_after(PATIENCE_S):
        async with open_streams(
            threads, "load", "compute", waiter=waiter, observer=observe if timed else None
        ) as (
            load,
            compute,
        ):
            load.launch(lambda: threads.delay(0.05))
            loaded = load.record()
            await loaded.wait_recorded()
            broken.waits = False
            scope, other = compute.scope(), compute.scope()
            scope.wait(loaded)
            scope.launch(lambda: pytest.fail("read what may not have come"))
            with pytest.raises(TransferFailed, match="illegal memory access"):
                await scope.record().wait_done()
            await other.record().wait_done()
    assert not held
    threads.close()


@pytest.mark.parametrize("fails", ["asks", "records"])
async def test_a_device_that_fails_fails_loads_and_settles_them(
    threads: ThreadDevice, fails: str
) -> None:
    broken, bench, held = BrokenDevice(threads), Bench(threads), Held()
    rig = Rig(DeviceCopier(threads))
    waiter = CudaWaiter(broken.event)
    with trio.fail_after(PATIENCE_S):
        async with (
            open_streams(threads, "load", "store", waiter=waiter) as (load, store),
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(rig.make(load, store).run)
            broken.asks, broken.records = fails == "records", fails == "asks"
            transfer, _, _ = bench.load(held=held)
            submit(rig.mailbox, transfer)
            await transfer.wait_settled()
            assert transfer.state is FAILED
            rig.mailbox.close()
    assert held.closed == 1
    threads.close()


async def test_a_waiter_that_breaks_ends_everything_and_says_so(threads: ThreadDevice) -> None:
    def breaks() -> None:
        raise AssertionError("a hook that must not raise")

    with (
        trio.fail_after(PATIENCE_S),
        pytest.RaisesGroup(pytest.RaisesExc(InternalError), flatten_subgroups=True),
    ):
        async with open_streams(threads, "compute", close_timeout_s=0.2) as (stream,):
            end = stream.record()
            end.on_final(breaks)
            later = stream.record()
            await trio.sleep_forever()
    assert end.state.is_final
    assert later.state.is_final
    threads.close()
