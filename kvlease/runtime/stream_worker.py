"""The stream worker: a FIFO of items run by one thread that a Trio task owns.

Shared by CPU and CUDA streams. This module does not know what executing an item means, nor what is
waited for.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import trio

from kvlease.errors import ActorClosed, DeadlineExceeded, InternalError, UsageError
from kvlease.runtime.completions import CompletionBase, CpuCompletion
from kvlease.runtime.stream_scope import Await, Item, StreamBase, WaitObserver


class WorkerStream(StreamBase):
    """A queue run by one thread that lives as long as `run`; a subclass executes its items.

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
        self._guarded(self._enter)
        while (item := self._queue.get()) is not None:
            self._guarded(partial(self._drop if self._abandoned else self._execute, item))
            # A finished closure may hold pages and tensors; do not keep it while idle (R13).
            del item
        self._guarded(self._leave)
        self._ended.finish()

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            # Not a closure's fault. What is queued is dropped, not run, until `run` closes.
            self._crash = error
            self._abandoned = True
            self._leaving.fail(error)

    @abstractmethod
    def _execute(self, item: Item) -> None:
        """Do what an item says, on the worker."""

    def _enter(self) -> None:
        """Prepare the worker's thread, before its first item."""

    def _leave(self) -> None:
        """Wait, on the worker, for what the items have begun and not ended."""

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
