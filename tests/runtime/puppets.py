"""Actors that do what they are told, for tests of their supervisors."""

from __future__ import annotations

import trio
import trio.testing

from kvlease.runtime.actor import Actor, ActorEvent, ActorSpec
from kvlease.runtime.mailbox import Mailbox
from kvlease.runtime.supervisor import Supervisor

Message = BaseException | str


class Puppet(Actor[Message]):
    """Does what its messages say: raises an error, or notes a word."""

    def __init__(self, mailbox: Mailbox[Message], notes: list[str]) -> None:
        super().__init__(mailbox)
        self.notes = notes

    async def run(self) -> None:
        try:
            async for message in self.mailbox:
                if isinstance(message, BaseException):
                    raise message
                self.notes.append(f"{self.mailbox.name} {message}")
        finally:
            self.notes.append(f"{self.mailbox.name} left")


class Stage:
    """Puppets, their notes, and what the supervisor told of them."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.events: list[ActorEvent] = []
        self.boxes: dict[str, Mailbox[Message]] = {}

    def told(self) -> list[str]:
        return [f"{event.kind} {event.actor} {event.incarnation}" for event in self.events]

    def spec(self, name: str, stop_timeout_s: float = 5.0) -> ActorSpec[Message]:
        self.boxes[name] = Mailbox[Message](name, 8)
        return ActorSpec(
            self.boxes[name], lambda own: Puppet(own, self.notes), stop_timeout_s=stop_timeout_s
        )

    async def start(self, supervisor: Supervisor, *names: str) -> None:
        for name in names:
            await supervisor.start(self.spec(name))
        await trio.testing.wait_all_tasks_blocked()


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


class Stubborn(Actor[Message]):
    """Does not care that its mailbox is closed."""

    def __init__(self, mailbox: Mailbox[Message], notes: list[str]) -> None:
        super().__init__(mailbox)
        self.notes = notes

    async def run(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.notes.append(f"{self.mailbox.name} at {trio.current_time():g}")
