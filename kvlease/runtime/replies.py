"""One answer to one request, with both ends able to give up.

This module does not know how the request travels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, final

import trio

from kvlease.errors import UsageError

R = TypeVar("R")


class PendingReply(Protocol):
    """A reply as the mailbox sees it: something that can fail, whatever its answer's type."""

    @property
    def is_over(self) -> bool:
        """Whether it was answered, or nobody waits for the answer any more."""
        ...

    def fail(self, error: Exception) -> bool:
        """Answer with an error."""
        ...

    def when_over(self, hook: Callable[[], object]) -> None:
        """Call ``hook`` once, when `is_over` becomes true."""
        ...


@final
class Reply(Generic[R]):
    """The right and duty to answer one request; moves to the actor inside its message.

    Answered at most once. Trio thread only.
    """

    __slots__ = ("_abandoned", "_error", "_event", "_value", "_when_over")

    def __init__(self) -> None:
        """Open; the asker waits for it."""
        self._event = trio.Event()
        self._value: tuple[R] | None = None
        self._error: Exception | None = None
        self._abandoned = False
        self._when_over: list[Callable[[], object]] = []

    @property
    def is_over(self) -> bool:
        """Whether it was answered, or nobody waits for the answer any more."""
        return self._abandoned or self._event.is_set()

    def send(self, value: R) -> bool:
        """Answer; returns False, and does not take the value, when nobody waits for it."""
        if self.is_over:
            return False
        self._value = (value,)
        self._answered()
        return True

    def fail(self, error: Exception) -> bool:
        """Answer with an error, raised in the asker; returns False when nobody waits for it."""
        if self.is_over:
            return False
        self._error = error
        self._answered()
        return True

    def _answered(self) -> None:
        self._event.set()
        self._end()

    def abandon(self) -> None:
        """Stop waiting for the answer; nothing happens if it has come."""
        if not self.is_over:
            self._abandoned = True
            self._end()

    def when_over(self, hook: Callable[[], object]) -> None:
        """Call ``hook`` once, when `is_over` becomes true."""
        self._when_over.append(hook)

    def _end(self) -> None:
        for hook in self._when_over:
            hook()
        self._when_over.clear()

    async def wait(self) -> None:
        """Wait until it is answered; a checkpoint always. If cancelled, it stays open."""
        await self._event.wait()

    def result(self) -> R:
        """Return the answer or raise the error it was failed with; after `wait`."""
        if self._error is not None:
            raise self._error
        if self._value is None:
            raise UsageError("the reply has not come yet; await wait() before result()")
        return self._value[0]
