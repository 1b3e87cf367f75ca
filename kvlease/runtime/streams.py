"""CPU streams: a FIFO of closures run by one worker thread, or inline on the caller's thread.

This module does not know what the closures do, nor what is waited for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import final

import trio
from attrs import frozen

from kvlease.errors import ActorClosed, DeadlineExceeded, InternalError, UsageError
from kvlease.protocols.ports import Clock, Stream
from kvlease.runtime.clock import MonotonicClock
from kvlease.runtime.completions import CompletionBase, CpuCompletion
from kvlease.runtime.nurseries import open_flat_nursery
from kvlease.runtime.stream_scope import Await, Item, Launch, Mark, StreamBase, WaitObserver


@final
class CpuStream(StreamBase):
    """A queue run by one thread that lives as long as `run`.

    Ownership: the task in `run` owns the thread. Launching is allowed before the thread starts;
    the work then waits for it.
    """

    def __init__(
        self, name: str, *, close_timeout_s: float = 5.0, observer: WaitObserver | None = None
    ) -> None:
        """Prepare the queue; no thread before `run`.

        Args:
            name: for errors, statistics and the thread.
            close_timeout_s: how long closing may drain, and again how long it may take one
                running closure to return.
            observer: hears, on the worker, of each wait that really held the stream.
        """
        super().__init__(name, observer=observer)
        self._close_timeout_s = close_timeout_s
        self._queue: SimpleQueue[Item | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._abandoned = False
        self._gate: SimpleQueue[None] | None = None
        self._crash: BaseException | None = None
        self._leaving = CpuCompletion(f"closing of {name}")
        self._leaving.set_recorded()
        self._ended = CpuCompletion(f"thread of {name}")
        self._ended.set_recorded()
        self._left = CpuCompletion(f"end of {name}")
        self._left.set_recorded()

    def put(self, item: Item) -> None:
        """Queue an item; raises ActorClosed once the stream is closed."""
        # The lock keeps an item from slipping in behind the end mark, where nobody would end it.
        with self._lock:
            if self._closed:
                raise ActorClosed(f"stream {self.name} is closed; it takes no more work")
            self._queue.put(item)

    def _num_pending(self) -> int:
        return self._queue.qsize()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the worker until `close`; start it with ``await nursery.start(stream.run)``.

        Checkpoints: always. Returns when closed and drained. If draining takes longer than
        ``close_timeout_s``, or if cancelled, the rest of the queue is abandoned: launches are
        skipped and records end REVOKED. Raises DeadlineExceeded when a closure has still not
        returned after another ``close_timeout_s``: only then does the (daemon) thread stay behind,
        and records behind that closure stay open until it returns (R6).
        """
        if self._thread is not None:
            raise UsageError(f"stream {self.name} was run before; open a new one")
        self._thread = threading.Thread(target=self._work, name=f"kvlease-{self.name}", daemon=True)
        self._thread.start()
        task_status.started()
        try:
            await self._leaving.wait_final()
            self.close()  # not closed yet if the worker crashed
            with trio.move_on_after(self._close_timeout_s):
                await self._ended.wait_final()
        finally:
            self._abandon()
            with trio.move_on_after(self._close_timeout_s, shield=True):
                await self._ended.wait_final()
            self._left.finish()
            self._say_how_it_ended(self._thread)

    def _say_how_it_ended(self, thread: threading.Thread) -> None:
        """Raise unless the thread is gone in good order; an error here outweighs cancellation."""
        if not self._ended.state.is_final:
            raise DeadlineExceeded(
                f"stream {self.name}: a closure is still running {self._close_timeout_s:g} s after"
                " the stream was abandoned; its thread is left behind"
            )
        # The thread has only its last return statement left to do.
        thread.join(self._close_timeout_s)
        if self._crash is not None:
            raise InternalError(f"the worker of stream {self.name} crashed") from self._crash

    def close(self) -> None:
        """Take no more work; what is queued is still done. Never waits."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._leaving.finish()
        if self._thread is None:
            self._abandoned = True
            self._work()

    async def aclose(self) -> None:
        """Close, and wait until the worker is gone or given up; the bound is that of `run`.

        Checkpoints: only if it waits. If cancelled, the closing goes on.
        """
        self.close()
        if self._thread is not None:
            await self._left.wait_final()

    def _abandon(self) -> None:
        self._abandoned = True
        # The flag is written before the gate is read; the worker writes the gate before it reads
        # the flag. So one of them sees the other, and no wait outlives the stream.
        gate = self._gate
        if gate is not None:
            gate.put(None)
        self.close()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if self._abandoned:
                    self._drop(item)
                else:
                    self._execute(item)
            except BaseException as error:
                # Not a closure's fault. What is queued is dropped, not run, until `run` closes.
                self._crash = error
                self._abandoned = True
                self._leaving.fail(error)
            # A finished closure may hold pages and tensors; do not keep it while idle (R13).
            del item
        self._ended.finish()

    def _execute(self, item: Item) -> None:
        if isinstance(item, Launch):
            self._run_launch(item)
        elif isinstance(item, Mark):
            self._run_mark(item)
        elif item.scope.problem is None:
            self._hold_for(item)

    def _hold_for(self, item: Await) -> None:
        completion = item.completion
        if completion.state.is_final:
            self._check_awaited(item)
            return
        began = time.perf_counter()
        if isinstance(completion, CompletionBase):
            self._block_on(completion)
            if not completion.state.is_final:
                return  # abandoned: whatever follows is dropped
        # Device work of another kind ends by itself; this blocks until it does.
        self._check_awaited(item)
        self._count_wait(completion, time.perf_counter() - began)

    def _block_on(self, completion: CompletionBase) -> None:
        gate: SimpleQueue[None] = SimpleQueue()

        def open_gate() -> None:
            gate.put(None)

        self._gate = gate
        if not self._abandoned and completion.on_final(open_gate):
            gate.get()
            completion.forget(open_gate)
        self._gate = None


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
