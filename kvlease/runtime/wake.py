"""Waking Trio tasks from any thread, without polling and with one hand-over for many wakes.

`park_until` puts the current task to sleep until a hook fires. This module does not know why the
hook fires.

No wake-up is lost. Let P be the task between registering its hook and being parked. P runs on the
Trio thread and does not yield in between, so nothing else runs there. A hook fired in that window
comes from another thread and only queues the waiter; the queue is emptied on the Trio thread, so
not before P is parked. A hook that would have fired earlier is refused at registration, under the
lock that guards the transition, and P does not park. Coalescing loses nothing either: a thread
queues its waiter *before* it reads the flag, and the Trio thread clears the flag *before* it reads
the queue, so of the two at least one sees the other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import final

import trio
from trio.lowlevel import Abort, RaiseCancelT, RunVar, Task

Hook = Callable[[], None]


@final
class TrioWaker:
    """Runs callbacks on the thread of one Trio run, called from any thread."""

    __slots__ = ("_handed_over", "_queue", "_thread", "_token")

    def __init__(self) -> None:
        """Bind to the current Trio run; use `current` instead."""
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._queue: deque[Hook] = deque()
        self._handed_over = False

    @staticmethod
    def current() -> TrioWaker:
        """Return the waker of the current Trio run; raises RuntimeError outside one."""
        try:
            return _run_waker.get()
        except LookupError:
            waker = TrioWaker()
            _run_waker.set(waker)
            return waker

    def post(self, callback: Hook) -> None:
        """Run ``callback`` on the Trio thread: at once if that is this thread, else soon.

        After the run has ended nothing happens: no task is left that could care. An exception in
        the callback ends the run with TrioInternalError; it is never swallowed.
        """
        if threading.get_ident() == self._thread:
            callback()
            return
        self._queue.append(callback)
        if not self._handed_over:
            self._handed_over = True
            try:
                self._token.run_sync_soon(self._drain)
            except trio.RunFinishedError:
                self._queue.clear()

    def _drain(self) -> None:
        # The order of these two lines is half of the argument at the top of this file.
        self._handed_over = False
        while self._queue:
            self._queue.popleft()()


_run_waker: RunVar[TrioWaker] = RunVar("kvlease_waker")


@final
class _Waiter:
    """One parked task; fired at most once, from any thread."""

    __slots__ = ("_task", "_waker")

    def __init__(self, task: Task, waker: TrioWaker) -> None:
        self._task: Task | None = task
        self._waker = waker

    def fire(self) -> None:
        self._waker.post(self._release)

    def _release(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)

    def cancel(self) -> None:
        # On the Trio thread, like `_release`: whichever comes first wins.
        self._task = None


async def park_until(register: Callable[[Hook], bool], forget: Callable[[Hook], None]) -> None:
    """Sleep until the hook given to ``register`` is called, from any thread.

    Args:
        register: keeps the hook and returns True, or returns False if there is nothing to wait
            for; must decide under the lock of the transition that fires the hook.
        forget: drops a hook if it is still kept; called when the wait is cancelled.

    Checkpoints:
        only if it waits. If cancelled, the hook is forgotten and nothing else changes.
    """
    waiter = _Waiter(trio.lowlevel.current_task(), TrioWaker.current())
    hook = waiter.fire
    if not register(hook):
        return

    def abort(_raise_cancel: RaiseCancelT) -> Abort:
        waiter.cancel()
        forget(hook)
        return Abort.SUCCEEDED

    await trio.lowlevel.wait_task_rescheduled(abort)
