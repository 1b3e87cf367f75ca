"""Typed bounded mailboxes: how actors are reached.

A mailbox outlives the actor that reads it, so that addresses stay good over a restart. It can be
*closed* (its owner is done with it) or *broken* (its owner failed, and the cause is attached). This
module does not know what the messages mean, nor who reads them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar, final

import trio
from attrs import frozen
from trio.lowlevel import Abort, RaiseCancelT, Task

from kvlease.errors import ActorBroken, ActorClosed, OperatingError, UsageError
from kvlease.runtime.deadlines import deadline
from kvlease.runtime.replies import PendingReply, Reply

M = TypeVar("M")
R = TypeVar("R")


class MailboxFull(OperatingError):
    """The mailbox holds as many messages as it may; `Mailbox.send` waits for room instead."""


@frozen
class MailboxStatistics:
    """A snapshot of a mailbox.

    Attributes:
        unread: messages waiting. unanswered: requests read, with no answer yet.
        waiting_senders, waiting_readers: tasks parked now.
        received, dropped: messages read, and messages disposed of unread, so far.
        state: ``open``, ``closed`` or ``broken``.
    """

    name: str
    capacity: int
    unread: int
    unanswered: int
    waiting_senders: int
    waiting_readers: int
    received: int
    dropped: int
    state: str


@final
class _Waiter(Generic[M]):
    """A parked sender's message, or what a parked reader is woken with."""

    __slots__ = ("_messages", "error")

    def __init__(self, *messages: M) -> None:
        # A tuple, because None may be a message.
        self._messages = messages
        self.error: OperatingError | None = None

    def put(self, message: M) -> None:
        self._messages = (message,)

    def take(self) -> M:
        return self._messages[0]


@final
class Mailbox(Generic[M]):
    """A bounded FIFO of messages for one actor.

    Ownership: a message sent moves into the mailbox, and to the reader with `receive`; one that is
    never read goes to ``dispose``, so that a lease inside it is not lost. Trio thread only.
    """

    def __init__(
        self, name: str, capacity: int, *, dispose: Callable[[M], None] | None = None
    ) -> None:
        """Open it for the actor called ``name``; raises UsageError unless capacity is positive."""
        if capacity < 1:
            raise UsageError(f"mailbox {name}: capacity {capacity} holds nothing; give at least 1")
        self.name = name
        self.capacity = capacity
        self._dispose = dispose
        self._unread: deque[M] = deque()
        self._senders: OrderedDict[Task, _Waiter[M]] = OrderedDict()
        self._readers: OrderedDict[Task, _Waiter[M]] = OrderedDict()
        self._replies: dict[int, PendingReply] = {}
        self._unanswered: dict[PendingReply, None] = {}  # in order: so they fail
        self._closed = False
        self._cause: BaseException | None = None
        self._received = 0
        self._dropped = 0

    def _refusal(self) -> OperatingError:
        if self._cause is None:
            return ActorClosed(f"{self.name} is closed; its mailbox takes no more messages")
        error = ActorBroken(f"{self.name} has failed and was not restarted: {self._cause!r}")
        error.__cause__ = self._cause
        return error

    def send_nowait(self, message: M) -> None:
        """Put a message in; never waits.

        Takes the message unless it raises: MailboxFull, ActorClosed, ActorBroken.
        """
        if self._closed:
            raise self._refusal()
        if self._readers:
            reader, waiter = self._readers.popitem(last=False)
            waiter.put(self._delivered(message))
            trio.lowlevel.reschedule(reader)
        elif len(self._unread) < self.capacity:
            self._unread.append(message)
        else:
            raise MailboxFull(
                f"the mailbox of {self.name} holds {self.capacity} messages, as many as it may"
            )

    async def send(self, message: M) -> None:
        """Put a message in, waiting for room; senders get it in the order they came.

        Checkpoints: always. If cancelled, or if it raises ActorClosed or ActorBroken, the message
        was not taken.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            self.send_nowait(message)
        except MailboxFull:
            pass
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        await self._park(self._senders, _Waiter(message))

    def receive_nowait(self) -> M:
        """Take the next message; never waits.

        Raises trio.WouldBlock when there is none, ActorClosed or ActorBroken when there never will
        be. A closed mailbox still gives what was sent before.
        """
        if not self._unread:
            if self._closed:
                raise self._refusal()
            raise trio.WouldBlock
        message = self._unread.popleft()
        if self._senders:
            self._admit_sender()
        return self._delivered(message)

    def _admit_sender(self) -> None:
        sender, waiter = self._senders.popitem(last=False)
        self._unread.append(waiter.take())
        trio.lowlevel.reschedule(sender)

    async def receive(self) -> M:
        """Take the next message, waiting for one.

        Checkpoints: always. If cancelled, no message was taken. Raises ActorClosed once closed and
        empty, ActorBroken once broken.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            message = self.receive_nowait()
        except trio.WouldBlock:
            pass
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return message
        waiter: _Waiter[M] = _Waiter()
        await self._park(self._readers, waiter)
        return waiter.take()

    @staticmethod
    async def _park(waiting: OrderedDict[Task, _Waiter[M]], waiter: _Waiter[M]) -> None:
        task = trio.lowlevel.current_task()
        waiting[task] = waiter

        def abort(_raise_cancel: RaiseCancelT) -> Abort:
            del waiting[task]
            return Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        if waiter.error is not None:
            raise waiter.error

    def __aiter__(self) -> Mailbox[M]:
        """Iterate over messages until the mailbox is closed and empty."""
        return self

    async def __anext__(self) -> M:
        """As `receive`; ends on ActorClosed, raises ActorBroken."""
        try:
            return await self.receive()
        except ActorClosed:
            raise StopAsyncIteration from None

    def _delivered(self, message: M) -> M:
        self._received += 1
        reply = self._replies.pop(id(message), None)
        if reply is not None and not reply.is_over:
            self._unanswered[reply] = None
            reply.when_over(partial(self._unanswered.pop, reply, None))
        return message

    def expect(self, message: M, reply: Reply[R]) -> None:
        """Tie a reply to a message about to be sent, so that it fails when its reader does."""
        key = id(message)
        self._replies[key] = reply
        reply.when_over(lambda: self._replies.pop(key, None))

    def close(self) -> None:
        """Take no more messages; those sent before can still be read.

        Waiting senders and readers get ActorClosed. Nothing happens if it is closed already.
        """
        if not self._closed:
            self._closed = True
            self._refuse_waiters()

    def break_(self, cause: BaseException) -> None:
        """Say that the owner failed for good: all waits, now and later, raise ActorBroken.

        Unread messages are disposed of, and requests without an answer fail.
        """
        if self._cause is None:
            self._closed = True
            self._cause = cause
            self._refuse_waiters()
            self.discard(cause)
            self.fail_unanswered(cause)

    def _refuse_waiters(self) -> None:
        for waiting in (self._senders, self._readers):
            for task, waiter in waiting.items():
                waiter.error = self._refusal()
                trio.lowlevel.reschedule(task)
            waiting.clear()

    def discard(self, cause: BaseException | None = None) -> None:
        """Dispose of every unread message; requests among them fail with ActorBroken."""
        while self._unread:
            message = self._unread.popleft()
            self._dropped += 1
            reply = self._replies.pop(id(message), None)
            if reply is not None:
                reply.fail(self._lost(cause))
            self.dispose(message)
        while self._senders and not self._closed:
            self._admit_sender()
            if len(self._unread) == self.capacity:
                return

    def dispose(self, message: M) -> None:
        """End a message that no reader will get; takes it. Nothing happens without a disposer."""
        if self._dispose is not None:
            self._dispose(message)

    def fail_unanswered(self, cause: BaseException | None = None) -> None:
        """Fail the requests that were read and not answered: their reader is gone."""
        for reply in tuple(self._unanswered):
            reply.fail(self._lost(cause))
        self._unanswered.clear()

    def _lost(self, cause: BaseException | None) -> OperatingError:
        if cause is None:
            return ActorClosed(f"{self.name} ended without answering the request")
        error = ActorBroken(f"{self.name} failed before it answered the request: {cause!r}")
        error.__cause__ = cause
        return error

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more messages."""
        return self._closed

    def statistics(self) -> MailboxStatistics:
        """Return a snapshot."""
        state = "broken" if self._cause is not None else "closed" if self._closed else "open"
        return MailboxStatistics(
            self.name,
            self.capacity,
            len(self._unread),
            len(self._unanswered),
            len(self._senders),
            len(self._readers),
            self._received,
            self._dropped,
            state,
        )


async def ask(
    mailbox: Mailbox[M], make: Callable[[Reply[R]], M], *, request: str, deadline_s: float
) -> R:
    """Send a request and return its answer.

    Args:
        mailbox: the actor asked.
        make: builds the message around the reply handle, which moves to the actor with it.
        request: what is asked, for the error.
        deadline_s: for sending and answering together.

    Checkpoints: always. If cancelled or late, the answer is refused when it comes (`Reply.send`
    returns False), so that the actor can take back what was in it.

    Raises:
        DeadlineExceeded: no answer in time; names owner, request and seconds.
        ActorClosed, ActorBroken: the actor ended, or died while it held the request.
        Exception: what the actor gave to `Reply.fail`.
    """
    reply: Reply[R] = Reply()
    message = make(reply)
    mailbox.expect(message, reply)
    try:
        with deadline(deadline_s, owner=mailbox.name, request=request):
            await mailbox.send(message)
            await reply.wait()
    finally:
        reply.abandon()
    return reply.result()
