"""Devices that run work behind the host's back: a real GPU, and one made of threads.

The thread device keeps what matters of a GPU: work is enqueued and runs later, in order within a
queue and in no order between queues, unless an event is recorded and waited for.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import Protocol, final

import torch
import trio

from kvlease.runtime.cuda_stalls import StallClock, TimedEvent
from kvlease.runtime.cuda_stream import CudaStream
from kvlease.runtime.cuda_waiter import CudaWaiter, DeviceEvent
from kvlease.runtime.stream_scope import WaitObserver

CYCLES_PER_S = 1.7e9
"""Of a GPU's clock, for its sleeping kernel; somewhat less than the clock's maximum."""
_IS_EQUAL = 1
"""The driver's CU_STREAM_WAIT_VALUE_EQ."""


class Barrier(Protocol):
    """Lets nothing pass until it is open; whoever closes the device opens it at the latest."""

    is_open: bool

    def hold(self) -> None:
        """Let the current queue stand still here until it is open."""
        ...

    def open(self) -> None:
        """Let everything pass from now on; on any thread."""
        ...


class Device(Protocol):
    """What the tests need of a device; all but `queue` and `barrier` is for a stream's worker."""

    name: str

    def queue(self) -> Callable[[], None]:
        """Make a queue; the result makes it the current one of the calling thread."""
        ...

    def event(self) -> DeviceEvent:
        """Make an event."""
        ...

    def timed(self) -> TimedEvent:
        """Make an event that knows its time."""
        ...

    def enqueue(self, work: Callable[[], object]) -> None:
        """Put work behind all that the current queue was given."""
        ...

    def delay(self, seconds: float) -> None:
        """Let the current queue take so long here."""
        ...

    def barrier(self) -> Barrier:
        """Make a barrier, closed."""
        ...


@final
class ThreadDevice:
    """A thread a queue; `close` ends them."""

    name = "cpu"

    def __init__(self) -> None:
        self._local = threading.local()
        self._queues: list[SimpleQueue[Callable[[], object] | None]] = []
        self._threads: list[threading.Thread] = []
        self._barriers: list[Barrier] = []

    def queue(self) -> Callable[[], None]:
        mine: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        thread = threading.Thread(target=_run, args=(mine,), daemon=True)
        thread.start()
        self._queues.append(mine)
        self._threads.append(thread)

        def enter() -> None:
            self._local.queue = mine

        return enter

    def event(self) -> ThreadEvent:
        return ThreadEvent(self)

    def timed(self) -> ThreadEvent:
        return ThreadEvent(self)

    def enqueue(self, work: Callable[[], object]) -> None:
        self._local.queue.put(work)

    def delay(self, seconds: float) -> None:
        self.enqueue(partial(time.sleep, seconds))

    def barrier(self) -> Barrier:
        self._barriers.append(ThreadBarrier(self))
        return self._barriers[-1]

    def close(self) -> None:
        for barrier in self._barriers:
            barrier.open()
        for queue, thread in zip(self._queues, self._threads, strict=True):
            queue.put(None)
            thread.join()


@final
class ThreadBarrier:
    """A barrier of the thread device."""

    def __init__(self, device: ThreadDevice) -> None:
        self._device = device
        self._opened = threading.Event()
        self.is_open = False

    def hold(self) -> None:
        self._device.enqueue(self._opened.wait)

    def open(self) -> None:
        self.is_open = True
        self._opened.set()


def _run(queue: SimpleQueue[Callable[[], object] | None]) -> None:
    while (work := queue.get()) is not None:
        work()


@final
class ThreadEvent:
    """An event of the thread device; as with CUDA, a wait means the latest record before it."""

    def __init__(self, device: ThreadDevice) -> None:
        self._device = device
        self._passed = threading.Event()
        self._passed.set()
        self._at_s = 0.0

    def record(self) -> None:
        self._passed = threading.Event()
        self._device.enqueue(partial(self._pass, self._passed))

    def _pass(self, passed: threading.Event) -> None:
        self._at_s = time.perf_counter()
        passed.set()

    def elapsed_time(self, end_event: ThreadEvent, /) -> float:
        return (end_event._at_s - self._at_s) * 1e3

    def wait(self) -> None:
        passed = self._passed
        self._device.enqueue(partial(passed.wait, 10.0))

    def query(self) -> bool:
        return self._passed.is_set()


@final
class CudaDevice:
    """The GPU that torch sees."""

    name = "cuda"

    def __init__(self) -> None:
        self._barriers: list[Barrier] = []

    def queue(self) -> Callable[[], None]:
        return partial(torch.cuda.set_stream, torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def event(self) -> DeviceEvent:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def timed(self) -> TimedEvent:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def enqueue(self, work: Callable[[], object]) -> None:
        work()

    def delay(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))  # type: ignore[no-untyped-call]

    def barrier(self) -> Barrier:
        self._barriers.append(CudaBarrier())
        return self._barriers[-1]

    def close(self) -> None:
        for barrier in self._barriers:
            barrier.open()
        torch.cuda.synchronize()


@final
class CudaBarrier:
    """A word of host memory that streams wait for; no clock decides when they go on.

    While it is closed nothing may be used for the first time: loading a kernel may take an idle
    device.
    """

    def __init__(self) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._wait_value = driver.cuStreamWaitValue32_v2
        self._wait_value.argtypes = [ctypes.c_void_p, ctypes.c_uint64, *[ctypes.c_uint32] * 2]
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.is_open = False

    def hold(self) -> None:
        stream = torch.cuda.current_stream()
        stream.query()  # makes the device's context the thread's current one
        status = self._wait_value(stream.cuda_stream, self._word.data_ptr(), 1, _IS_EQUAL)
        assert status == 0, f"the driver cannot wait for a word of memory: error {status}"

    def open(self) -> None:
        self.is_open = True
        self._word.fill_(1)


@asynccontextmanager
async def open_streams(
    device: Device,
    *names: str,
    observer: WaitObserver | None = None,
    close_timeout_s: float = 5.0,
    waiter: CudaWaiter | None = None,
) -> AsyncGenerator[list[CudaStream]]:
    """Open streams of a device with their waiter; closed at the end of the block."""
    waiter = waiter or CudaWaiter(device.event)
    streams = [
        CudaStream(
            name,
            waiter.lane(),
            device.queue(),
            observer=observer,
            stalls=None if observer is None else StallClock(device.timed),
            close_timeout_s=close_timeout_s,
        )
        for name in names
    ]
    async with trio.open_nursery() as outside:
        await outside.start(waiter.run)
        try:
            async with trio.open_nursery() as nursery:
                for stream in streams:
                    await nursery.start(stream.run)
                yield streams
                for stream in streams:
                    await stream.aclose()
        finally:
            waiter.close()
