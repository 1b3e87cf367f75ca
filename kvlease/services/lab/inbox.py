"""Faults between an actor and its mailbox: it dies before a message, or gets it late."""

from __future__ import annotations

from typing import Generic, TypeVar, final

import trio

from kvlease.errors import ActorClosed
from kvlease.runtime.mailbox import Mailbox
from kvlease.services.lab.faults import Injector

M = TypeVar("M")


@final
class FaultyInbox(Generic[M]):
    """The reading end that an actor gets; messages are counted over all the actor's lives."""

    def __init__(self, mailbox: Mailbox[M], injector: Injector) -> None:
        """Borrow the mailbox."""
        self._mailbox = mailbox
        self._injector = injector

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._mailbox.name

    async def receive(self) -> M:
        """As the mailbox; raises InjectedFault where the actor is to die."""
        late_s = self._injector.before_message(self.name)
        message = await self._mailbox.receive()
        self._injector.took(self.name)
        if late_s:
            try:
                await trio.sleep(late_s)
            except trio.Cancelled:
                self._mailbox.dispose(message)
                raise
        return message

    def receive_nowait(self) -> M:
        """As the mailbox; a message with which something goes wrong is left to `receive`."""
        if not self._injector.is_plain(self.name):
            raise trio.WouldBlock
        message = self._mailbox.receive_nowait()
        self._injector.took(self.name)
        return message

    def __aiter__(self) -> FaultyInbox[M]:
        """Iterate as the mailbox does."""
        return self

    async def __anext__(self) -> M:
        """As `receive`; ends on ActorClosed."""
        try:
            return await self.receive()
        except ActorClosed:
            raise StopAsyncIteration from None
