"""CPU streams: a FIFO of closures run by one worker thread, or inline on the caller's thread.

This module does not know what the closures do, nor what is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import final

from attrs import frozen

from kvlease.errors import ActorClosed, UsageError
from kvlease.protocols.ports import Clock, Stream
from kvlease.runtime.clock import MonotonicClock
from kvlease.runtime.completions import CompletionBase
from kvlease.runtime.nurseries import open_flat_nursery
from kvlease.runtime.stream_scope import Await, Item, Launch, Mark, StreamBase, WaitObserver
from kvlease.runtime.stream_worker import WorkerStream


@final
class CpuStream(WorkerStream):
    """A stream whose work is done when its closure returns."""

    def _execute(self, item: Item) -> None:
        if isinstance(item, Launch):
            self._run_launch(item)
        elif isinstance(item, Mark):
            self._run_mark(item)
        elif item.scope.problem is None:
            self._hold_for(item)


@asynccontextmanager
async def open_cpu_stream(
    name: str, *, close_timeout_s: float = 5.0, observer: WaitObserver | None = None
) -> AsyncGenerator[CpuStream]:
    """Open a stream with its worker for a block; drained at the end, abandoned on error.

    Checkpoints: on entry and on exit. Raises what `CpuStream.run` raises.
    """
    async with open_flat_nursery() as nursery:
        stream = CpuStream(name, close_timeout_s=close_timeout_s, observer=observer)
        await nursery.start(stream.run)
        yield stream
        await stream.aclose()


@frozen
class EngineStreams:
    """The three streams of an engine: one for compute, one for loads, one for stores."""

    compute: Stream
    load: Stream
    store: Stream


@asynccontextmanager
async def open_cpu_streams(observer: WaitObserver) -> AsyncGenerator[EngineStreams]:
    """Open an engine's streams for a block, a thread each; the observer hears of compute's waits.

    Checkpoints: on entry and on exit. Raises what `CpuStream.run` raises.
    """
    async with (
        open_cpu_stream("compute", observer=observer) as compute,
        open_cpu_stream("load") as load,
        open_cpu_stream("store") as store,
    ):
        yield EngineStreams(compute, load, store)


@final
class InlineStream(StreamBase):
    """A queue run on the thread that launches, for simulation and for use without Trio.

    A wait on an unfinished completion holds the queue; what is launched meanwhile runs when the
    completion ends, on the thread that ends it, in order. One thread at a time, no locks.
    """

    def __init__(
        self,
        name: str = "inline",
        *,
        clock: Clock | None = None,
        observer: WaitObserver | None = None,
    ) -> None:
        """Name the stream; ``clock`` measures waits, so that a simulation's are virtual."""
        super().__init__(name, observer=observer)
        self._now = (clock or MonotonicClock()).now
        self._queue: deque[Item] = deque()
        self._held = False
        self._running = False
        self._closed = False

    def put(self, item: Item) -> None:
        """Run the item now, or queue it behind a wait; raises ActorClosed once closed."""
        if self._closed:
            raise ActorClosed(f"stream {self.name} is closed; it takes no more work")
        if isinstance(item, Await) and not isinstance(item.completion, CompletionBase):
            raise UsageError(
                f"stream {self.name} runs on its caller's thread and cannot wait for"
                f" {item.completion!r}; use a CpuStream"
            )
        self._queue.append(item)
        self._pump()

    def close(self) -> None:
        """Take no more work, and drop what still waits: its records end REVOKED."""
        self._closed = True
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, Mark):
                item.completion.revoke(f"stream {self.name} was abandoned")

    def _num_pending(self) -> int:
        return len(self._queue)

    def _pump(self) -> None:
        # A closure may launch more, or end what the queue waits for: that only lengthens the loop.
        if self._running:
            return
        self._running = True
        try:
            while self._queue and not self._held:
                item = self._queue.popleft()
                if isinstance(item, Launch):
                    self._run_launch(item)
                elif isinstance(item, Mark):
                    self._run_mark(item)
                elif item.scope.problem is None:
                    self._hold_for(item)
        finally:
            self._running = False

    def _hold_for(self, item: Await) -> None:
        completion = item.completion
        assert isinstance(completion, CompletionBase)  # `put` lets no other in
        began = self._now()

        def go_on() -> None:
            self._held = False
            self._check_awaited(item)
            self._count_wait(completion, self._now() - began)
            self._pump()

        self._held = completion.on_final(go_on)
        if not self._held:
            self._check_awaited(item)
