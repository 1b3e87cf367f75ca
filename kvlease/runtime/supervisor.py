"""Supervisors: restart actors that failed in operation, give up on those that are wrong.

Actors run in shielded scopes, so that the supervisor alone decides in which order they stop. This
module does not know what the actors do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal, Protocol, TypeAlias, TypeVar, final

import trio
from attrs import frozen

from kvlease.errors import ActorBroken, ActorClosed, InternalError, UsageError, leaves
from kvlease.protocols.event_base import current_actor
from kvlease.runtime.actor import ActorEvent, ActorSpec
from kvlease.runtime.mailbox import Mailbox
from kvlease.runtime.nurseries import without_cancellation

M = TypeVar("M")
Strategy: TypeAlias = Literal["one_for_one", "rest_for_one"]
"""Whom a death restarts: that actor, or also all started after it, which may rely on it."""


def escalates(error: BaseException) -> bool:
    """Whether an error means that code is wrong, so that a restart would only hide it."""
    wrong = (UsageError, InternalError, AssertionError)
    return any(isinstance(leaf, wrong) or not isinstance(leaf, Exception) for leaf in leaves(error))


class _AnyMailbox(Protocol):
    """A mailbox whose messages the supervisor never looks at."""

    def close(self) -> None: ...
    def break_(self, cause: BaseException) -> None: ...
    def discard(self, cause: BaseException | None = None) -> None: ...
    def fail_unanswered(self, cause: BaseException | None = None) -> None: ...


@final
class _Child:
    """One supervised actor over all its incarnations; knows no type of message."""

    def __init__(self, spec: ActorSpec[M]) -> None:
        self.name = spec.name
        self.mailbox: _AnyMailbox = spec.mailbox
        self.unread = spec.unread
        self.stop_timeout_s = spec.stop_timeout_s
        self.incarnation = 0
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.is_stopping = False

        async def live() -> None:
            await spec.factory(spec.mailbox).run()

        self.live: Callable[[], Awaitable[None]] = live

    def renew(self) -> None:
        """Get ready for the next incarnation."""
        self.incarnation += 1
        self.scope = trio.CancelScope(shield=True)
        self.ended = trio.Event()
        self.is_stopping = False


@frozen
class _Death:
    """An actor's end that may be mended by a restart."""

    child: _Child
    cause: BaseException


@frozen
class ActorStatistics:
    """A snapshot of one supervised actor."""

    name: str
    restarts: int
    is_running: bool


@final
class Supervisor:
    """Starts actors, restarts those that die in operation, and stops all of them.

    Ownership: owns its actors' tasks. Made by `open_supervisor`; Trio thread only.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        strategy: Strategy,
        max_restarts: int,
        window_s: float,
        on_event: Callable[[ActorEvent], None] | None,
    ) -> None:
        """Use `open_supervisor`."""
        self._nursery = nursery
        self._strategy = strategy
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._on_event = on_event
        self._children: list[_Child] = []
        self._restarts: deque[float] = deque()
        self._deaths: deque[_Death] = deque()
        self._news = trio.Event()
        self._is_stopping = False
        self._body = trio.CancelScope()
        self._fatal: BaseException | None = None

    async def start(self, spec: ActorSpec[M]) -> Mailbox[M]:
        """Start an actor and return its address.

        Checkpoints: always; if cancelled, the actor runs and is supervised all the same. Raises
        UsageError when the name is taken, ActorClosed when the supervisor is stopping.
        """
        if self._is_stopping:
            raise ActorClosed(f"the supervisor is stopping; it starts no {spec.name}")
        if any(child.name == spec.name for child in self._children):
            raise UsageError(f"an actor called {spec.name} is supervised already; rename one")
        child = _Child(spec)
        self._children.append(child)
        self._spawn(child)
        await trio.lowlevel.checkpoint()
        return spec.mailbox

    async def stop(self, name: str) -> None:
        """Stop one actor for good: close its mailbox, wait for it, and cancel it if it is late.

        Checkpoints: only if it runs; if cancelled, the actor's mailbox is closed and its end is
        awaited when the supervisor ends. Raises UsageError when there is no such actor.
        """
        child = next((child for child in self._children if child.name == name), None)
        if child is None:
            raise UsageError(f"no actor called {name} is supervised here")
        await self._stop(child, graceful=True)
        self._children.remove(child)

    def statistics(self) -> tuple[ActorStatistics, ...]:
        """Return a snapshot of every actor, in the order they were started."""
        return tuple(
            ActorStatistics(child.name, child.incarnation - 1, not child.ended.is_set())
            for child in self._children
        )

    def _spawn(self, child: _Child) -> None:
        child.renew()
        self._tell(ActorEvent(
            "start" if child.incarnation == 1 else "restart", child.name, child.incarnation
        ))  # fmt: skip
        self._nursery.start_soon(self._live, child, name=child.name)

    async def _live(self, child: _Child) -> None:
        """Run one incarnation; no error leaves this task, all of them are judged in `_ended`."""
        current_actor.set(child.name)
        error: BaseException | None = None
        with child.scope:
            try:
                await child.live()
            except BaseException as raised:
                error = without_cancellation(raised)
                if error is None:
                    raise
        self._ended(child, error)

    def _ended(self, child: _Child, error: BaseException | None) -> None:
        """Account for the end of an incarnation, in one step without a checkpoint."""
        child.ended.set()
        child.mailbox.fail_unanswered(error)
        if error is None:
            self._tell(ActorEvent("stop", child.name, child.incarnation))
            if not child.scope.cancel_called:
                # It returned by itself: whoever still writes to it has to learn that.
                self._dispose_unread(child, None)
            return
        self._tell(ActorEvent("died", child.name, child.incarnation, error))
        if escalates(error):
            self._give_up(child, error)
        elif not (child.is_stopping or self._is_stopping):
            self._deaths.append(_Death(child, error))
            self._news.set()

    def _dispose_unread(self, child: _Child, cause: BaseException | None) -> None:
        """Close a mailbox for good; a disposer that fails must not keep the others running."""
        try:
            child.mailbox.close()
            child.mailbox.discard(cause)
        except Exception as error:
            self._escalate(error)

    def _give_up(self, child: _Child, error: BaseException) -> None:
        self._escalate(error)
        child.mailbox.break_(error)

    def _escalate(self, error: BaseException) -> None:
        if self._fatal is None:
            self._fatal = error
        self._body.cancel()

    def _tell(self, event: ActorEvent) -> None:
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception as error:
                # A listener that fails must not be taken for the actor's own failure.
                self._escalate(error)

    async def _oversee(self) -> None:
        """Mend deaths, one after the other, for as long as the supervisor is open."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            while self._deaths:
                await self._mend(self._deaths.popleft())

    async def _mend(self, death: _Death) -> None:
        child = death.child
        if child not in self._children:
            return  # stopped for good meanwhile
        now = trio.current_time()
        while self._restarts and self._restarts[0] <= now - self._window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            broken = ActorBroken(
                f"{child.name} died, and {self._max_restarts} restarts within"
                f" {self._window_s:g} s are used up: {death.cause!r}"
            )
            broken.__cause__ = death.cause
            self._give_up(child, broken)
            return
        self._restarts.append(now)
        affected = [child]
        if self._strategy == "rest_for_one":
            later = self._children[self._children.index(child) + 1 :]
            affected += [other for other in later if not other.ended.is_set()]
        for other in reversed(affected):
            await self._stop(other, graceful=False)
        for other in affected:
            if other.unread == "discard":
                other.mailbox.discard(death.cause)
            self._spawn(other)

    async def _stop(self, child: _Child, *, graceful: bool) -> None:
        """Bring one incarnation to its end; graceful also closes its mailbox for good."""
        child.is_stopping = True
        if graceful:
            child.mailbox.close()
            with trio.move_on_after(child.stop_timeout_s):
                await child.ended.wait()
        child.scope.cancel()
        await child.ended.wait()

    async def _stop_all(self, *, graceful: bool) -> None:
        """Stop in reverse order of starting; shielded, bounded by the actors' own bounds."""
        self._is_stopping = True
        with trio.CancelScope(shield=True):
            for child in reversed(self._children):
                # An error while stopping is fatal too, and cuts the grace of the others short.
                await self._stop(child, graceful=graceful and self._fatal is None)
                self._dispose_unread(child, self._fatal)


@asynccontextmanager
async def open_supervisor(
    *,
    strategy: Strategy = "rest_for_one",
    max_restarts: int = 3,
    window_s: float = 10.0,
    on_event: Callable[[ActorEvent], None] | None = None,
) -> AsyncGenerator[Supervisor]:
    """Open a scope for actors; when the block ends they are stopped in reverse order.

    After a good end each actor may finish what is in its mailbox, within its ``stop_timeout_s``;
    after an error or a cancellation they are cancelled, in the same order. No task stays behind.

    Args:
        strategy: whom a death restarts.
        max_restarts: deaths that are mended within any ``window_s`` seconds; one more is fatal.
        window_s: see there.
        on_event: called on the Trio thread at every start, restart, stop and death, in the same
            step; it must not wait. An error in it is fatal.

    Raises:
        UsageError, InternalError, AssertionError: an actor's code is wrong; never restarted. The
            block is cancelled; an error that the block raised then is the context of this one.
        ActorBroken: an actor died too often; its last error is the cause.
    """
    ends: list[BaseException] = []
    supervisor: Supervisor | None = None
    try:
        async with trio.open_nursery() as nursery:
            supervisor = Supervisor(nursery, strategy, max_restarts, window_s, on_event)
            nursery.start_soon(supervisor._oversee)
            try:
                with supervisor._body:
                    yield supervisor
            except BaseException as error:
                ends.append(error)
            await supervisor._stop_all(graceful=not ends)
            nursery.cancel_scope.cancel()
    except BaseException as error:
        ends.append(error)
    _raise_outcome(supervisor._fatal if supervisor else None, ends)


def _raise_outcome(fatal: BaseException | None, ends: list[BaseException]) -> None:
    """Raise the one error that tells what happened: the fatal one, the block's, or cancellation."""
    errors = [rest for end in ends if (rest := without_cancellation(end)) is not None]
    if fatal is not None:
        # Python itself makes the block's error, if there is one, the context of this one.
        raise fatal
    if errors:
        raise errors[0]
    if ends:
        raise ends[0]
