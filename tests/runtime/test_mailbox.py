"""Mailboxes: bounded, in order, and nobody waits for an owner that is gone."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing
from attrs import frozen

from kvlease.errors import ActorBroken, ActorClosed, DeadlineExceeded, UsageError
from kvlease.runtime.mailbox import Mailbox, MailboxFull, ask
from kvlease.runtime.replies import Reply
from tests.runtime.rig import cancel_at_checkpoint, cancel_at_every_checkpoint


@frozen
class Double:
    number: int
    reply: Reply[int]


async def wait_blocked() -> None:
    await trio.testing.wait_all_tasks_blocked()


def test_capacity_must_hold_something() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        Mailbox[int]("m", 0)


async def test_messages_come_in_order_and_room_is_bounded() -> None:
    mailbox = Mailbox[int]("m", 2)
    mailbox.send_nowait(1)
    await mailbox.send(2)
    with pytest.raises(MailboxFull, match="holds 2 messages"):
        mailbox.send_nowait(3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.send, 3)
        await wait_blocked()
        nursery.start_soon(mailbox.send, 4)
        await wait_blocked()
        statistics = mailbox.statistics()
        assert (statistics.unread, statistics.waiting_senders) == (2, 2)
        assert [await mailbox.receive() for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(trio.WouldBlock):
        mailbox.receive_nowait()
    assert mailbox.statistics().received == 4


async def test_a_waiting_reader_gets_the_message_at_once() -> None:
    mailbox = Mailbox[int | None]("m", 1)
    got: list[int | None] = []

    async def read() -> None:
        got.append(await mailbox.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_blocked()
        mailbox.send_nowait(None)
        assert mailbox.statistics().unread == 0
    assert got == [None]


async def test_closing_lets_the_reader_finish() -> None:
    mailbox = Mailbox[int]("m", 4)
    for number in range(3):
        mailbox.send_nowait(number)
    mailbox.close()
    mailbox.close()
    assert mailbox.is_closed
    with pytest.raises(ActorClosed, match="m is closed"):
        mailbox.send_nowait(3)
    assert [message async for message in mailbox] == [0, 1, 2]
    with pytest.raises(ActorClosed):
        await mailbox.receive()
    assert mailbox.statistics().state == "closed"


async def test_closing_wakes_waiting_senders_and_readers() -> None:
    full, empty = Mailbox[int]("full", 1), Mailbox[int]("empty", 1)
    full.send_nowait(0)

    async def send() -> None:
        with pytest.raises(ActorClosed):
            await full.send(1)

    async def read() -> None:
        assert [message async for message in empty] == []

    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            nursery.start_soon(read)
            await wait_blocked()
            full.close()
            empty.close()
    assert full.statistics().unread == 1


async def test_breaking_tells_everyone_the_cause_and_loses_no_lease() -> None:
    """A lease in a message nobody will read must be given back, not forgotten."""
    disposed: list[int] = []
    mailbox = Mailbox[int]("m", 1, dispose=disposed.append)
    mailbox.send_nowait(1)
    cause = OSError("died")

    async def send() -> None:
        with pytest.raises(ActorBroken, match="died") as caught:
            await mailbox.send(2)
        assert caught.value.__cause__ is cause

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await wait_blocked()
        mailbox.break_(cause)
        mailbox.break_(OSError("again"))
    assert disposed == [1]  # the message of the waiting sender was never taken
    for call in (lambda: mailbox.send_nowait(3), mailbox.receive_nowait):
        with pytest.raises(ActorBroken):
            call()
    with pytest.raises(ActorBroken):
        async for _ in mailbox:
            pass
    assert mailbox.statistics().state == "broken"
    assert mailbox.statistics().dropped == 1


async def test_discarding_keeps_it_open_and_admits_waiting_senders() -> None:
    disposed: list[int] = []
    mailbox = Mailbox[int]("m", 2, dispose=disposed.append)
    mailbox.send_nowait(1)
    mailbox.send_nowait(2)
    async with trio.open_nursery() as nursery:
        for number in (3, 4, 5):
            nursery.start_soon(mailbox.send, number)
            await wait_blocked()
        mailbox.discard()
        await wait_blocked()
        assert mailbox.statistics().waiting_senders == 1
        assert [await mailbox.receive() for _ in range(3)] == [3, 4, 5]
    assert disposed == [1, 2]


async def test_cancelled_sends_and_receives_take_nothing() -> None:
    mailbox = Mailbox[int]("m", 1)
    mailbox.send_nowait(0)

    async def send() -> None:
        await mailbox.send(1)

    def sent(cancelled: bool) -> None:
        assert mailbox.statistics().waiting_senders == 0
        if cancelled:
            # Room for the next round, which then comes to its end.
            assert mailbox.receive_nowait() == 0
            assert mailbox.statistics().unread == 0

    assert await cancel_at_every_checkpoint(send, sent) == 1
    assert mailbox.receive_nowait() == 1
    got: list[int] = []

    async def receive() -> None:
        got.append(await mailbox.receive())

    def received(cancelled: bool) -> None:
        assert mailbox.statistics().waiting_readers == 0
        assert len(got) == (not cancelled)
        if cancelled:
            mailbox.send_nowait(7)

    assert await cancel_at_every_checkpoint(receive, received) == 1
    assert got == [7]


async def test_random_traffic_loses_and_doubles_nothing() -> None:
    """Many senders and readers, cancelled at random: what was taken is read exactly once."""
    rng = random.Random(2)
    mailbox = Mailbox[int]("m", 3)
    taken: list[int] = []
    read: list[int] = []

    async def send(number: int) -> None:
        with trio.move_on_after(rng.random() * 2e-3):
            await mailbox.send(number)
            taken.append(number)

    async def receive() -> None:
        for _ in range(10):
            with trio.move_on_after(rng.random() * 2e-3):
                read.append(await mailbox.receive())

    async with trio.open_nursery() as nursery:
        for number in range(120):
            nursery.start_soon(send, number)
        for _ in range(10):
            nursery.start_soon(receive)
    while mailbox.statistics().unread:
        read.append(mailbox.receive_nowait())
    assert sorted(read) == sorted(taken)


async def serve(mailbox: Mailbox[Double]) -> None:
    async for message in mailbox:
        message.reply.send(2 * message.number)


async def test_asking_returns_the_answer() -> None:
    mailbox = Mailbox[Double]("doubler", 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, mailbox)
        assert await ask(mailbox, lambda r: Double(4, r), request="double 4", deadline_s=1) == 8
        assert mailbox.statistics().unanswered == 0
        mailbox.close()


async def test_an_answer_that_does_not_come_names_owner_request_and_seconds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """R9: every wait has an owner and a deadline with a name."""
    mailbox = Mailbox[Double]("doubler", 1)
    with pytest.raises(DeadlineExceeded, match=r"doubler did not answer 'double 4' within 3 s"):
        await ask(mailbox, lambda r: Double(4, r), request="double 4", deadline_s=3)
    assert trio.current_time() == 3
    late = mailbox.receive_nowait()
    assert late.reply.is_over
    assert not late.reply.send(8)  # the actor learns that it must take the answer back
    assert not late.reply.fail(ValueError())
    assert mailbox.statistics().unanswered == 0


async def test_a_request_may_be_answered_with_an_error() -> None:
    mailbox = Mailbox[Double]("doubler", 1)

    async def refuse() -> None:
        assert (await mailbox.receive()).reply.fail(ValueError("odd"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(refuse)
        with pytest.raises(ValueError, match="odd"):
            await ask(mailbox, lambda r: Double(4, r), request="double", deadline_s=1)


@pytest.mark.parametrize("when", ["unread", "read", "broken", "closed", "discarded"])
async def test_an_asker_learns_at_once_that_the_actor_is_gone(when: str) -> None:
    """F14: lose the request at any point; the asker must not sit out its whole deadline."""
    mailbox = Mailbox[Double]("doubler", 1)
    cause = OSError("died")
    error = ActorClosed if when == "closed" else ActorBroken

    async def asker() -> None:
        with pytest.raises(error):
            await ask(mailbox, lambda r: Double(4, r), request="double", deadline_s=60)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asker)
            await wait_blocked()
            match when:
                case "unread":
                    mailbox.break_(cause)
                case "read":
                    mailbox.receive_nowait()
                    mailbox.fail_unanswered(cause)
                case "broken":
                    mailbox.receive_nowait()
                    mailbox.break_(cause)
                case "closed":
                    mailbox.close()
                    mailbox.discard()
                case _:
                    mailbox.discard(cause)
    assert mailbox.statistics().unanswered == 0


async def test_a_cancelled_ask_refuses_its_answer() -> None:
    mailbox = Mailbox[Double]("doubler", 1)
    answers: list[bool] = []

    async def trial() -> None:
        assert await ask(mailbox, lambda r: Double(4, r), request="d", deadline_s=9) == 8

    async def check(cancelled: bool) -> None:
        assert cancelled
        answers.append((await mailbox.receive()).reply.send(8))
        assert mailbox._replies == {}
        assert mailbox.statistics().unanswered == 0

    for step in (1, 2):
        await cancel_at_checkpoint(step, trial, check)
    assert answers == [False, False]


async def test_a_reply_read_before_it_came_is_a_misuse() -> None:
    with pytest.raises(UsageError, match="wait"):
        Reply[int]().result()
