"""A CUDA stream behind the `Stream` port: closures enqueue kernels, the device runs them in order.

One worker thread a stream runs the closures; its current torch stream is set once. Waiting for
other streams is done by the device; the worker is held only for work that no device knows of. What
ends is seen by the waiter. This module does not know what the closures do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import final

from kvlease.runtime.completions import CompletionBase, Problem
from kvlease.runtime.cuda_stalls import StallClock, Stretch
from kvlease.runtime.cuda_waiter import Lane, Passed, Point
from kvlease.runtime.stream_scope import Await, CopyWork, Item, Mark, WaitObserver
from kvlease.runtime.stream_worker import WorkerStream


@final
class CudaStream(WorkerStream):
    """A stream of a device; work is in order once it is recorded there, not when it is launched."""

    orders_at_launch = False

    def __init__(
        self,
        name: str,
        lane: Lane,
        enter: Callable[[], None],
        *,
        close_timeout_s: float = 5.0,
        observer: WaitObserver | None = None,
        stalls: StallClock | None = None,
    ) -> None:
        """Prepare the queue; no thread before `run`.

        Args:
            name: for errors, statistics and the thread.
            lane: where the waiter looks for this stream's points; nobody else's.
            enter: makes a device stream the current one of the calling thread.
            close_timeout_s: as for every stream; what the device has begun is waited for as well.
            observer: hears of each wait that held the worker or, if there are ``stalls``, the
                device's stream; on the worker or the waiter's thread.
            stalls: times the waits of the device's stream.
        """
        super().__init__(name, close_timeout_s=close_timeout_s, observer=observer)
        self._lane = lane
        self._enter_stream = enter
        self._stalls = stalls

    def _enter(self) -> None:
        if self._thread is not None:
            self._enter_stream()

    def _leave(self) -> None:
        """Hold the worker until the device has done all that it was given."""
        if self._thread is not None:
            gate: SimpleQueue[None] = SimpleQueue()
            self._record(lambda _error: gate.put(None), hurry=True)
            gate.get()

    def _execute(self, item: Item) -> None:
        if isinstance(item, Mark):
            self._record_mark(item)
        elif isinstance(item, Await):
            if item.scope.problem is None:
                self._wait_for(item)
        elif isinstance(item.work, CopyWork) and item.scope.problem is None:
            self._launches += 1
            self._record(item.work.begin(), hurry=False, heard=item.work.recorded)
        else:
            self._run_launch(item)

    def _record(
        self, passed: Passed, *, hurry: bool, heard: Callable[[Point], None] | None = None
    ) -> None:
        """Record a point here; what fails is told like a point that the device never passed."""
        try:
            point = self._lane.record(passed, hurry=hurry)
        except Exception as error:
            passed(error)
            return
        if heard is not None:
            heard(point)
        self._lane.watch(point)

    def _record_mark(self, item: Mark) -> None:
        scope = item.scope
        stretches = self._stalls.take() if self._stalls is not None else []
        ended = partial(self._end_mark, item, scope.problem, stretches)
        if scope.renews:
            scope.problem = None
        self._record(ended, hurry=True, heard=item.completion.set_recorded)

    def _end_mark(
        self,
        item: Mark,
        problem: Problem | None,
        stretches: list[Stretch],
        error: BaseException | None,
    ) -> None:
        """End a record; on the waiter's thread. What it waited for is told of before."""
        if error is not None:
            item.completion.fail(error)
            return
        if self._stalls is not None:
            for stretch in stretches:
                seconds = self._stalls.seconds(stretch)
                if seconds:
                    self._count_wait(stretch.completion, seconds)
        if problem is not None:
            item.completion.fail_with(problem)
        else:
            item.completion.finish()

    def _wait_for(self, item: Await) -> None:
        completion = item.completion
        points = completion.points() if isinstance(completion, CompletionBase) else None
        if points is None or completion.state.is_final:
            self._hold_for(item)
            return
        try:
            if points and self._stalls is not None:
                self._stalls.hold(completion, points)
                return
            for point in points:
                point.hold()
        except Exception as error:
            # The stream does not stand behind them, so what would read them must not run.
            self._work_failed(item.scope, error)

    def _drop(self, item: Item) -> None:
        """Let go of an item; a record ends only when the device is done with what came before."""
        if isinstance(item, Mark) and self._thread is not None:
            problem = Problem(f"stream {self.name} was abandoned", "revoked")
            ended = partial(_end_dropped, item, problem)
            self._record(ended, hurry=True, heard=item.completion.set_recorded)
        else:
            super()._drop(item)


def _end_dropped(item: Mark, problem: Problem, _error: BaseException | None) -> None:
    item.completion.revoke(problem.message)
