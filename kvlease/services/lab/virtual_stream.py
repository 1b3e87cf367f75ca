"""Streams in virtual time: a queue run by a Trio task, so that a simulation needs no thread.

The queue behaves as a worker thread's does; how long a piece of work takes, and what happens
meanwhile, is said by whoever performs it. This module does not know what the work is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import final

import trio

from kvlease.errors import ActorClosed, InternalError
from kvlease.protocols.ports import Completion
from kvlease.runtime.completions import CompletionBase
from kvlease.runtime.nurseries import open_flat_nursery
from kvlease.runtime.stream_scope import (
    Await,
    Item,
    Launch,
    Mark,
    StreamBase,
    WaitObserver,
    Work,
)

Perform = Callable[[Work], Awaitable[None]]
"""Does a piece of work in virtual time; an ordinary error fails the scope it came from."""


def _as_it_is(work: Work) -> Work:
    return work


def _always(_completion: Completion) -> bool:
    return True


@final
class SimulatedStream(StreamBase):
    """A FIFO run by one task; on the Trio thread only."""

    def __init__(
        self,
        name: str,
        perform: Perform,
        *,
        accept: Callable[[Work], Work] = _as_it_is,
        holds: Callable[[Completion], bool] = _always,
        observer: WaitObserver | None = None,
    ) -> None:
        """Start with an empty queue; nothing runs before `run`.

        Args:
            name: for errors and statistics.
            perform: does the work.
            accept: sees work as it is launched and returns what is to be performed in its place.
            holds: whether a wait really holds the queue; where it does not, it passes at once.
            observer: hears of each wait that held, with virtual seconds.
        """
        super().__init__(name, observer=observer)
        self._perform = perform
        self._accept = accept
        self._holds = holds
        self._queue: deque[Item] = deque()
        self._news = trio.Event()
        self._closed = False
        self.ended = trio.Event()

    def put(self, item: Item) -> None:
        """Queue an item; raises ActorClosed once the stream is closed."""
        if self._closed:
            raise ActorClosed(f"stream {self.name} is closed; it takes no more work")
        if isinstance(item, Launch):
            item = Launch(item.scope, self._accept(item.work))
        self._queue.append(item)
        self._news.set()

    def add(self, work: Work) -> None:
        """Queue work of the device's own, behind all that is queued now."""
        self._queue.append(Launch(self._own, work))
        self._news.set()

    def _num_pending(self) -> int:
        return len(self._queue)

    def close(self) -> None:
        """Take no more work; what is queued is still done. Never waits."""
        self._closed = True
        self._news.set()

    async def run(self) -> None:
        """Run the queue until it is closed and empty; cancelled, drop the rest of it.

        Dropped launches are skipped and dropped records end REVOKED.
        """
        try:
            while True:
                while self._queue:
                    await self._execute(self._queue.popleft())
                if self._closed:
                    return
                self._news = trio.Event()
                await self._news.wait()
        finally:
            self._closed = True
            while self._queue:
                self._drop(self._queue.popleft())
            self.ended.set()

    async def _execute(self, item: Item) -> None:
        if isinstance(item, Launch):
            await self._launch(item)
        elif isinstance(item, Mark):
            self._run_mark(item)
        elif item.scope.problem is None:
            await self._hold_for(item)

    async def _launch(self, item: Launch) -> None:
        if item.scope.problem is not None:
            self._skipped += 1
            return
        self._launches += 1
        try:
            await self._perform(item.work)
        except Exception as error:
            self._work_failed(item.scope, error)

    async def _hold_for(self, item: Await) -> None:
        completion = item.completion
        if not isinstance(completion, CompletionBase):
            raise InternalError(f"stream {self.name} is simulated; it cannot wait for {completion}")
        if not self._holds(completion):
            return
        if not completion.state.is_final:
            began = trio.current_time()
            try:
                await completion.wait_final()
            except trio.Cancelled:
                self._drop(item)
                raise
            self._count_wait(completion, trio.current_time() - began)
        self._check_awaited(item)


@asynccontextmanager
async def open_simulated_stream(
    stream: SimulatedStream, *, close_timeout_s: float = 5.0
) -> AsyncGenerator[SimulatedStream]:
    """Run a stream for a block; drained at the end, for so many virtual seconds, or abandoned."""
    async with open_flat_nursery() as nursery:
        nursery.start_soon(stream.run, name=f"stream {stream.name}")
        try:
            yield stream
            stream.close()
            with trio.move_on_after(close_timeout_s):
                await stream.ended.wait()
        finally:
            nursery.cancel_scope.cancel()
