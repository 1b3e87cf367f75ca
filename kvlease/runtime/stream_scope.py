"""Scopes and items of a stream: what every stream does, however its queue is run.

A scope is one user's handle on the queue. After a failure the rest of that scope's work is skipped,
so that nothing is computed from rows that never came; other scopes go on. This module does not
know which thread runs the items.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, final

from attrs import frozen

from kvlease.errors import NotReady, TransferFailed
from kvlease.protocols.ports import Completion, CompletionState, DevicePoint
from kvlease.runtime.completions import CpuCompletion, Problem

Work = Callable[[], None]
WaitObserver = Callable[[Completion, float], None]
"""Called where the stream runs, with a completion and the seconds it really waited for it."""


class CopyWork(ABC):
    """Work that makes a transfer's bytes true, and has to say where it stands meanwhile."""

    @abstractmethod
    def __call__(self) -> None:
        """Move all bytes on the calling worker; they are there when it returns."""

    @abstractmethod
    def begin(self) -> Callable[[BaseException | None], None]:
        """Give all copies to the device stream of the calling worker; never raises.

        Whoever calls it calls what it returns once the device is done with them, or has failed.
        """

    @abstractmethod
    def recorded(self, point: DevicePoint | None) -> None:
        """Hear that the work is in its stream's order; a device's stream gives the place."""


@frozen
class StreamStatistics:
    """What a stream has done so far.

    Attributes:
        launches: closures that ran. skipped: closures that did not, because their scope had failed.
        failures: scopes that failed. waits, wait_ms: waits that really held the stream.
        pending: items in the queue now.
    """

    name: str
    launches: int
    skipped: int
    failures: int
    waits: int
    wait_ms: float
    pending: int


@final
class Launch:
    """An item: run a closure."""

    __slots__ = ("scope", "work")

    def __init__(self, scope: StreamScope, work: Work) -> None:
        """Take the closure."""
        self.scope = scope
        self.work = work


@final
class Await:
    """An item: hold the queue until a completion is final."""

    __slots__ = ("completion", "scope")

    def __init__(self, scope: StreamScope, completion: Completion) -> None:
        """Borrow the completion."""
        self.scope = scope
        self.completion = completion


@final
class Mark:
    """An item: end a completion that stands for everything before it."""

    __slots__ = ("completion", "scope")

    def __init__(self, scope: StreamScope, completion: CpuCompletion) -> None:
        """Take the completion."""
        self.scope = scope
        self.completion = completion


Item = Launch | Await | Mark


class StreamBase(ABC):
    """Common part of all streams; implements the `Stream` port through its own scope.

    The stream's own scope is everybody's, so it starts afresh after the record that reported a
    failure. A scope from `scope()` stays failed, so that a record in the middle of a step cannot
    hide from its end that the step read nothing good. One step, one scope.
    """

    orders_at_launch: ClassVar[bool] = True
    """Whether launching puts work in order; if not, the stream's worker says when it is (R2)."""

    def __init__(self, name: str, *, observer: WaitObserver | None = None) -> None:
        """Name the stream for errors and threads; ``observer`` hears of waits that really held."""
        self.name = name
        self._observer = observer
        self._launches = 0
        self._skipped = 0
        self._failures = 0
        self._waits = 0
        self._wait_s = 0.0
        self._num_scopes = 0
        self._own = StreamScope(self, name, renews=True)

    @abstractmethod
    def put(self, item: Item) -> None:
        """Queue an item; raises ActorClosed once the stream is closed."""

    @abstractmethod
    def _num_pending(self) -> int: ...

    def launch(self, work: Work) -> None:
        """Queue work on the stream's own scope; never waits. Raises ActorClosed."""
        self._own.launch(work)

    def wait(self, completion: Completion) -> None:
        """Order later work behind a recorded completion; raises NotReady if it is only planned."""
        self._own.wait(completion)

    def record(self) -> CpuCompletion:
        """Return the completion of everything launched so far on the stream's own scope."""
        return self._own.record()

    def scope(self) -> StreamScope:
        """Return a handle on the same queue whose failures stay its own."""
        self._num_scopes += 1
        return StreamScope(self, f"{self.name}#{self._num_scopes}", renews=False)

    def statistics(self) -> StreamStatistics:
        """Return a snapshot; callable from any thread."""
        return StreamStatistics(
            self.name,
            self._launches,
            self._skipped,
            self._failures,
            self._waits,
            self._wait_s * 1e3,
            self._num_pending(),
        )

    def _run_launch(self, item: Launch) -> None:
        scope = item.scope
        if scope.problem is not None:
            self._skipped += 1
            return
        self._launches += 1
        try:
            item.work()
        except BaseException as error:
            self._work_failed(scope, error)
            if not isinstance(error, Exception):
                raise

    def _work_failed(self, scope: StreamScope, error: BaseException) -> None:
        scope.problem = Problem(f"work on {scope.name} failed: {error!r}", "failed", error)
        self._failures += 1

    def _check_awaited(self, item: Await) -> None:
        """Fail the scope unless what it waited for is DONE; called once that is final."""
        try:
            item.completion.block_until_final()
        except TransferFailed as error:
            if item.scope.problem is None:
                self._failures += 1
                item.scope.problem = Problem(
                    f"{item.scope.name} skipped its work: {error}", error.reason, error
                )

    def _count_wait(self, completion: Completion, seconds: float) -> None:
        self._waits += 1
        self._wait_s += seconds
        if self._observer is not None:
            self._observer(completion, seconds)

    def _drop(self, item: Item) -> None:
        """Let go of an item that will not be run any more."""
        if isinstance(item, Launch):
            self._skipped += 1
        elif isinstance(item, Mark):
            item.completion.revoke(f"stream {self.name} was abandoned")

    def _run_mark(self, item: Mark) -> None:
        scope = item.scope
        if scope.problem is None:
            item.completion.finish()
            return
        item.completion.fail_with(scope.problem)
        if scope.renews:
            scope.problem = None


@final
class StreamScope:
    """One user's handle on a stream's queue; implements the `Stream` port.

    ``problem`` belongs to whoever runs the queue; it says why this scope's work is skipped.
    """

    __slots__ = ("_stream", "name", "problem", "renews")

    def __init__(self, stream: StreamBase, name: str, *, renews: bool) -> None:
        """Made by a stream; ``renews`` is whether a reported failure is forgotten."""
        self._stream = stream
        self.name = name
        self.renews = renews
        self.problem: Problem | None = None

    def launch(self, work: Work) -> None:
        """Queue work; it starts after all work queued before it has ended.

        Never waits. Raises ActorClosed once the stream is closed. If ``work`` raises, what was
        launched later on this scope is skipped and `record` ends FAILED.
        """
        self._stream.put(Launch(self, work))
        if self._stream.orders_at_launch and isinstance(work, CopyWork):
            work.recorded(None)

    def wait(self, completion: Completion) -> None:
        """Order all later work of the queue behind a recorded completion.

        If it ends FAILED or REVOKED the later work of this scope is skipped. Raises NotReady when
        it is only planned: work that nobody recorded is not ready (R2).
        """
        state = completion.state
        if state is CompletionState.DONE:
            return
        if state is CompletionState.PLANNED:
            raise NotReady(
                f"{self.name} cannot be ordered behind work that is not recorded yet;"
                " await wait_recorded() first"
            )
        self._stream.put(Await(self, completion))

    def record(self) -> CpuCompletion:
        """Return the completion of everything launched so far on this scope.

        It ends FAILED if any of that failed or was skipped, REVOKED if the stream was abandoned
        before, and in no case before the work launched earlier has returned.
        """
        completion = CpuCompletion(f"record of {self.name}")
        if self._stream.orders_at_launch:
            completion.set_recorded()
        self._stream.put(Mark(self, completion))
        return completion

    def scope(self) -> StreamScope:
        """Return another handle on the same queue, with failures of its own."""
        return self._stream.scope()
