"""Actors: one task, one mailbox, state that nobody else touches.

This module does not know who supervises them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Generic, Literal, Protocol, TypeVar

from attrs import frozen

from kvlease.runtime.mailbox import Mailbox

M = TypeVar("M")
R = TypeVar("R", covariant=True)


class Inbox(Protocol[R]):
    """The reading end of a mailbox: all that an actor sees of it."""

    @property
    def name(self) -> str:
        """The actor's name."""
        ...

    async def receive(self) -> R:
        """Take the next message, waiting for one."""
        ...

    def receive_nowait(self) -> R:
        """Take the next message; never waits."""
        ...

    def __aiter__(self) -> AsyncIterator[R]:
        """Iterate over messages until the mailbox is closed and empty."""
        ...


class Actor(ABC, Generic[M]):
    """Something that reads one mailbox until that is closed.

    Ownership: owns what is in the messages it has received. What has to outlive a restart belongs
    to whoever makes the actor, never to the actor.
    """

    def __init__(self, mailbox: Inbox[M]) -> None:
        """Borrow the mailbox; it outlives the actor."""
        self.mailbox = mailbox

    @abstractmethod
    async def run(self) -> None:
        """Work until the mailbox is closed and empty, then return.

        Raises OperatingError, or anything unexpected, to be restarted; UsageError, InternalError or
        AssertionError to bring its supervisor down. When cancelled, cleanup that has to wait is
        shielded and bounded by the actor itself.
        """


@frozen
class ActorSpec(Generic[M]):
    """How to make an actor, again and again.

    Attributes:
        mailbox: kept over restarts; its name is the actor's.
        factory: makes a fresh actor around the mailbox.
        unread: what a restart does with messages nobody has read yet.
        stop_timeout_s: how long the actor may take to return once its mailbox is closed.
    """

    mailbox: Mailbox[M]
    factory: Callable[[Mailbox[M]], Actor[M]]
    unread: Literal["keep", "discard"] = "keep"
    stop_timeout_s: float = 5.0

    @property
    def name(self) -> str:
        """The actor's name, in errors and logs."""
        return self.mailbox.name


@frozen
class ActorEvent:
    """Something that happened to an actor.

    Attributes:
        kind: ``start`` (of the first incarnation), ``restart`` (of a later one), ``stop`` (it
            returned, or was stopped) or ``died`` (it raised ``cause``).
        incarnation: 1 for the first actor of that name.
    """

    kind: Literal["start", "restart", "stop", "died"]
    actor: str
    incarnation: int
    cause: BaseException | None = None
