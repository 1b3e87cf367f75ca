"""Completions: the end of work done by threads or a device, waited for by tasks and by threads.

`CompletionBase` holds the state and the waits; a subclass decides the transitions, always through
the pure machine. Any thread may make a transition and any thread may read `state`. This module
does not know what the work is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from queue import SimpleQueue
from typing import final

import trio
from attrs import frozen

from kvlease.errors import TransferFailed, UsageError
from kvlease.protocols.machines import Copy, CopyEvent, joint_state, step_copy
from kvlease.protocols.ports import CompletionState, DevicePoint
from kvlease.runtime.wake import Hook, park_until

# Bound once: looking a member up in its Enum costs more than the rest of a transition.
_PLANNED = CompletionState.PLANNED
BAD_STATES = (CompletionState.FAILED, CompletionState.REVOKED)
FINAL_STATES = (CompletionState.DONE, *BAD_STATES)


@frozen
class Problem:
    """Why a completion did not end DONE; each wait renders a fresh TransferFailed from it."""

    message: str
    reason: str
    cause: BaseException | None = None

    @staticmethod
    def of(name: str, cause: BaseException | str, reason: str) -> Problem:
        """Render a problem of ``name`` from an error, or from a ready sentence."""
        if isinstance(cause, str):
            return Problem(cause, reason)
        return Problem(f"{name} failed: {cause!r}", reason, cause)

    def error(self) -> TransferFailed:
        """Return a new error, so that no two raisers share a traceback."""
        error = TransferFailed(self.message, self.reason)
        error.__cause__ = self.cause
        return error


class CompletionBase:
    """State, hooks and waits of a completion; implements the `Completion` port.

    Ownership: shared by everyone who waits; only its maker makes transitions. ``state`` is a plain
    slot, so reading it is one attribute access; nobody outside this class writes it.
    """

    __slots__ = ("_final_hooks", "_lock", "_problem", "_recorded_hooks", "name", "state")

    def __init__(self, name: str, lock: threading.Lock | None = None) -> None:
        """Start PLANNED; completions that change together share one lock."""
        self.name = name
        self.state = CompletionState.PLANNED
        self._lock = lock or threading.Lock()
        self._problem: Problem | None = None
        self._recorded_hooks: list[Hook] = []
        self._final_hooks: list[Hook] = []

    def points(self) -> tuple[DevicePoint, ...] | None:
        """Return the places in a device's order behind which all of this is done.

        None if the device does not know all of it: then only waiting on the host tells.
        """
        return None

    @property
    def problem(self) -> Problem | None:
        """Why it ended FAILED or REVOKED, else None; ``problem.cause`` is the original error."""
        return self._problem

    def _enter(self, state: CompletionState, due: list[Hook], problem: Problem | None) -> None:
        """Change state with the lock held; hooks that are due are appended for the caller.

        The caller fires them after it has let the lock go: a hook may run anything.
        """
        self._problem = problem
        self.state = state
        if self._recorded_hooks:
            due += self._recorded_hooks
            self._recorded_hooks.clear()
        if self._final_hooks and state in FINAL_STATES:
            due += self._final_hooks
            self._final_hooks.clear()

    def on_recorded(self, hook: Hook) -> bool:
        """Call ``hook`` once, when the state has left PLANNED, on the thread that changed it.

        Returns False, and keeps nothing, if that has happened already. Hooks must not raise.
        """
        with self._lock:
            if self.state is not _PLANNED:
                return False
            self._recorded_hooks.append(hook)
            return True

    def on_final(self, hook: Hook) -> bool:
        """Call ``hook`` once, when the state is final, on the thread that changed it.

        Returns False, and keeps nothing, if it is final already. Hooks must not raise.
        """
        with self._lock:
            if self.state in FINAL_STATES:
                return False
            self._final_hooks.append(hook)
            return True

    def forget(self, hook: Hook) -> None:
        """Drop a hook that is still kept; nothing happens if it has fired."""
        with self._lock:
            for hooks in (self._recorded_hooks, self._final_hooks):
                if hook in hooks:
                    hooks.remove(hook)

    def raise_if_failed(self) -> None:
        """Raise TransferFailed if the state is FAILED or REVOKED; never waits."""
        if self.state in BAD_STATES:
            problem = self._problem or Problem(f"{self.name} {self.state.value}", "failed")
            raise problem.error()

    async def wait_recorded(self) -> None:
        """Wait until the work is in its stream's order, or has ended.

        Checkpoints: only if it waits; if cancelled nothing changes. Raises TransferFailed.
        """
        if self.state is _PLANNED:
            await park_until(self.on_recorded, self.forget)
        self.raise_if_failed()

    async def wait_done(self) -> None:
        """Wait until the bytes are true.

        Checkpoints: only if it waits; if cancelled nothing changes. Raises TransferFailed.
        """
        if self.state not in FINAL_STATES:
            await park_until(self.on_final, self.forget)
        self.raise_if_failed()

    async def wait_final(self) -> None:
        """Wait until nothing more will happen, well or badly; does not raise for failure.

        Checkpoints: only if it waits; if cancelled nothing changes.
        """
        if self.state not in FINAL_STATES:
            await park_until(self.on_final, self.forget)

    def block_until_final(self) -> None:
        """Hold the calling thread until the work has ended.

        Raises TransferFailed if it ended badly, UsageError on a Trio thread if it would wait.
        """
        if self.state not in FINAL_STATES:
            if trio.lowlevel.in_trio_run():
                raise UsageError(
                    f"block_until_final() on {self.name} would hold the Trio thread;"
                    " await wait_done() instead"
                )
            # A one-shot queue is the cheapest thing a thread can sleep on.
            gate: SimpleQueue[None] = SimpleQueue()
            if self.on_final(lambda: gate.put(None)):
                gate.get()
        self.raise_if_failed()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.state.value}>"


def joint_points(parts: Iterable[CompletionBase]) -> tuple[DevicePoint, ...] | None:
    """Return where a device has done all of the parts; None if it does not know one of them."""
    found: dict[DevicePoint, None] = {}
    for part in parts:
        if part.state is CompletionState.DONE:
            continue
        points = part.points()
        if points is None:
            return None
        found.update(dict.fromkeys(points))
    return tuple(found)


def fire(due: list[Hook]) -> None:
    """Call hooks that a transition has collected, with no lock held."""
    for hook in due:
        hook()


@final
class CpuCompletion(CompletionBase):
    """One piece of work with its planned bytes: a single `Copy` of the pure machine."""

    __slots__ = ("_copy", "_parent", "_point")

    def __init__(
        self, name: str, planned_nbytes: int = 0, lock: threading.Lock | None = None
    ) -> None:
        """Start PLANNED with the bytes that must arrive for it to end DONE."""
        super().__init__(name, lock)
        self._copy = Copy(planned_nbytes)
        self._parent: JointCompletion | None = None
        self._point: DevicePoint | None = None

    @property
    def copy(self) -> Copy:
        """The machine's record: planned bytes, bytes done, state."""
        return self._copy

    def points(self) -> tuple[DevicePoint, ...] | None:
        """Return the place of device work that is recorded or done, else None."""
        return None if self._point is None else (self._point,)

    def set_recorded(self, point: DevicePoint | None = None) -> None:
        """Say that the work is in its stream's order now; a device's work comes with its place.

        Raises IllegalTransition when it was recorded before. A completion that was revoked or
        failed in the meantime stays so.
        """
        due: list[Hook] = []
        with self._lock:
            if self.state not in BAD_STATES:
                self._record(point, due)
        fire(due)

    def finish(self, nbytes: int = 0) -> bool:
        """Say that the work has ended with so many bytes; fewer than planned ends FAILED (R5).

        Returns whether the state is DONE now; False also when somebody failed or revoked it
        before, which a late writer finds out this way. Raises IllegalTransition when it was never
        recorded (R2), or finished before.
        """
        due: list[Hook] = []
        with self._lock:
            if self.state not in BAD_STATES:
                short = None
                if nbytes != self._copy.planned_nbytes:
                    planned = self._copy.planned_nbytes
                    short = Problem(f"{self.name} moved {nbytes} of {planned} bytes", "short")
                self._step(CopyEvent.FINISH, nbytes, short, due)
            done = self.state is CompletionState.DONE
        fire(due)
        return done

    def fail(self, cause: BaseException | str, reason: str = "failed") -> bool:
        """End it FAILED; returns False if it had ended before, whichever way."""
        return self._end(CopyEvent.FAIL, Problem.of(self.name, cause, reason))

    def fail_with(self, problem: Problem) -> bool:
        """End it FAILED for a reason known already; returns False if it had ended before."""
        return self._end(CopyEvent.FAIL, problem)

    def revoke(self, message: str | None = None) -> bool:
        """End it REVOKED; returns False if it had ended before, whichever way."""
        return self._end(
            CopyEvent.REVOKE, Problem(message or f"{self.name} was revoked", "revoked")
        )

    def _end(self, event: CopyEvent, problem: Problem) -> bool:
        due: list[Hook] = []
        with self._lock:
            if self.state in FINAL_STATES:
                return False
            self._step(event, 0, problem, due)
        fire(due)
        return True

    def _record(self, point: DevicePoint | None, due: list[Hook]) -> None:
        """Take the step to RECORDED with the lock held; the place is there before the state."""
        self._point = point
        self._step(CopyEvent.RECORD, 0, None, due)

    def _step(
        self, event: CopyEvent, nbytes: int, problem: Problem | None, due: list[Hook]
    ) -> None:
        """Take one step of the machine with the lock held; ``problem`` counts if it ends badly."""
        self._copy = copy = step_copy(self._copy, event, nbytes)
        self._enter(copy.state, due, problem if copy.state in BAD_STATES else None)
        if self._parent is not None:
            self._parent._part_moved(self, due)


class JointCompletion(CompletionBase):
    """The completion of several: ready only when all its parts are.

    Shares one lock with its parts, so that a part and its whole change in one step for every
    reader. With no parts it is FAILED from the start: nothing never passes for something.
    """

    __slots__ = ("_parts", "_steps_left")

    def __init__(self, name: str, parts: tuple[CpuCompletion, ...], lock: threading.Lock) -> None:
        """Adopt the parts, which must share ``lock`` and have no other whole."""
        super().__init__(name, lock)
        self._parts = parts
        # Each part takes two steps in a good life. The joint state leaves PLANNED once every part
        # has taken one, so before as many steps as parts only a bad step can change it.
        self._steps_left = 2 * len(parts)
        for part in parts:
            part._parent = self
        if not parts:
            self._enter(
                CompletionState.FAILED, [], Problem(f"{name} has nothing planned", "failed")
            )

    def points(self) -> tuple[DevicePoint, ...] | None:
        """Return the places of the parts that are not done yet, each once."""
        return joint_points(self._parts)

    @property
    def parts(self) -> tuple[CpuCompletion, ...]:
        """The parts, in the order given."""
        return self._parts

    def _part_moved(self, part: CpuCompletion, due: list[Hook]) -> None:
        """Follow a part's transition, with the lock held. A final state never changes."""
        if self.state in FINAL_STATES:
            return
        self._steps_left -= 1
        if self._steps_left > len(self._parts) and part.state not in BAD_STATES:
            return
        after = joint_state([each._copy for each in self._parts])
        if after is not self.state:
            self._entering(after, part)
            self._enter(after, due, part.problem)
            self._entered(after, part, due)

    def _entering(self, state: CompletionState, part: CpuCompletion) -> None:
        """Hear of a transition before anyone can see it, with the lock held."""

    def _entered(self, state: CompletionState, part: CpuCompletion, due: list[Hook]) -> None:
        """Hear of a transition after it is visible, with the lock held."""
