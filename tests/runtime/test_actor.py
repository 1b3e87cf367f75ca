"""Actors under a supervisor, as users write them."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from attrs import frozen

from kvlease.errors import ActorBroken, DeadlineExceeded
from kvlease.protocols.event_base import current_actor
from kvlease.runtime.actor import Actor, ActorSpec
from kvlease.runtime.deadlines import deadline
from kvlease.runtime.mailbox import Mailbox, ask
from kvlease.runtime.replies import Reply
from kvlease.runtime.supervisor import open_supervisor


@frozen
class Add:
    number: int
    reply: Reply[int]


class Adder(Actor[Add]):
    """Adds up what it is sent; its sum dies with it, the ledger does not."""

    def __init__(self, mailbox: Mailbox[Add], ledger: list[int]) -> None:
        super().__init__(mailbox)
        self.ledger = ledger
        self.total = 0

    async def run(self) -> None:
        assert current_actor.get() == self.mailbox.name
        async for message in self.mailbox:
            if message.number < 0:
                raise OSError("negative")
            self.ledger.append(message.number)
            self.total += message.number
            message.reply.send(self.total)


async def add(mailbox: Mailbox[Add], number: int) -> int:
    return await ask(mailbox, lambda r: Add(number, r), request=f"add {number}", deadline_s=5)


async def test_an_actor_keeps_its_address_over_a_restart() -> None:
    ledger: list[int] = []
    with trio.fail_after(5):
        async with open_supervisor() as supervisor:
            address = await supervisor.start(
                ActorSpec(Mailbox[Add]("adder", 8), lambda own: Adder(own, ledger))
            )
            assert await add(address, 2) == 2
            assert await add(address, 3) == 5
            with pytest.raises(ActorBroken, match="before it answered"):
                await add(address, -1)
            assert await add(address, 4) == 4
            (statistics,) = supervisor.statistics()
            assert (statistics.restarts, statistics.is_running) == (1, True)
    assert ledger == [2, 3, 4]
    assert current_actor.get() == "engine"


async def test_a_deadline_says_who_what_and_how_long(
    autojump_clock: trio.testing.MockClock,
) -> None:
    with (
        pytest.raises(DeadlineExceeded, match=r"loader did not answer 'load 7' within 2\.5 s"),
        deadline(2.5, owner="loader", request="load 7"),
    ):
        await trio.sleep_forever()
    with deadline(2.5, owner="loader", request="load 7") as scope:
        scope.deadline += 10
        await trio.sleep(5)
    with trio.move_on_after(1) as outer, deadline(2, owner="loader", request="load 7"):
        await trio.sleep_forever()
    assert outer.cancelled_caught
