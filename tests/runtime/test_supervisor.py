"""Supervisors: what may be restarted is, and what is wrong goes up."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvlease.errors import (
    ActorBroken,
    ActorClosed,
    LeaseMoved,
    LedgerImbalance,
    PagesUnavailable,
    UsageError,
)
from kvlease.runtime.actor import Actor, ActorSpec
from kvlease.runtime.mailbox import Mailbox
from kvlease.runtime.supervisor import Strategy, open_supervisor
from tests.runtime.puppets import Message, Puppet, Stage, settle


@pytest.mark.parametrize("error", [PagesUnavailable("full"), OSError("bus"), KeyError("x")])
async def test_operating_and_unexpected_errors_are_restarted(error: Exception) -> None:
    stage = Stage()
    async with open_supervisor(on_event=stage.events.append) as supervisor:
        await stage.start(supervisor, "a")
        stage.boxes["a"].send_nowait(error)
        stage.boxes["a"].send_nowait("unread before the death")
        await settle()
        assert "a unread before the death" in stage.notes
    assert stage.told() == ["start a 1", "died a 1", "restart a 2", "stop a 2"]
    assert stage.events[1].cause is error


@pytest.mark.parametrize(
    "error", [LeaseMoved("wrong"), LedgerImbalance("wrong"), AssertionError("wrong")]
)
async def test_wrong_code_is_never_restarted(error: Exception) -> None:
    """Restarting on a broken invariant would serve on with wrong pages."""
    stage = Stage()
    with trio.fail_after(5), pytest.raises(type(error), match="wrong") as caught:
        async with open_supervisor(on_event=stage.events.append) as supervisor:
            await stage.start(supervisor, "a", "b")
            stage.boxes["a"].send_nowait(error)
            await trio.sleep_forever()
    assert caught.value is error  # bare, not in a group
    assert stage.told() == ["start a 1", "start b 1", "died a 1", "stop b 1"]
    with pytest.raises(ActorBroken):
        stage.boxes["a"].send_nowait("more")
    with pytest.raises(ActorClosed):
        stage.boxes["b"].send_nowait("more")


async def test_wrong_code_inside_a_group_goes_up_too() -> None:
    stage = Stage()
    group = ExceptionGroup("two", [OSError("bus"), UsageError("wrong")])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_supervisor() as supervisor:
            await stage.start(supervisor, "a")
            stage.boxes["a"].send_nowait(group)
            await trio.sleep_forever()
    assert caught.value is group


async def test_a_group_of_one_is_unwrapped() -> None:
    stage = Stage()
    bus = OSError("bus")
    async with open_supervisor(on_event=stage.events.append) as supervisor:
        await stage.start(supervisor, "a")
        stage.boxes["a"].send_nowait(ExceptionGroup("one", [bus]))
        await settle()
    assert stage.events[1].cause is bus


async def test_an_interrupt_goes_up() -> None:
    stage = Stage()
    with pytest.raises(KeyboardInterrupt):
        async with open_supervisor() as supervisor:
            await stage.start(supervisor, "a")
            stage.boxes["a"].send_nowait(KeyboardInterrupt())
            await trio.sleep_forever()


@pytest.mark.parametrize(
    ("strategy", "restarted"), [("one_for_one", ["b"]), ("rest_for_one", ["b", "c"])]
)
async def test_the_strategy_says_who_is_restarted(strategy: Strategy, restarted: list[str]) -> None:
    stage = Stage()
    async with open_supervisor(strategy=strategy, on_event=stage.events.append) as supervisor:
        await stage.start(supervisor, "a", "b", "c")
        stage.boxes["b"].send_nowait(OSError("bus"))
        await settle()
        assert [e.actor for e in stage.events if e.kind == "restart"] == restarted
        assert all(statistics.is_running for statistics in supervisor.statistics())
        stage.boxes["c"].send_nowait("still here")
        await settle()
    assert "c still here" in stage.notes


async def test_too_many_restarts_in_the_window_are_fatal(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    error = OSError("bus")
    with pytest.raises(ActorBroken, match="2 restarts within 10 s are used up") as caught:
        async with open_supervisor(max_restarts=2, window_s=10) as supervisor:
            await stage.start(supervisor, "a")
            for _ in range(3):
                stage.boxes["a"].send_nowait(error)
            await trio.sleep_forever()
    assert caught.value.__cause__ is error
    assert stage.notes == ["a left"] * 3


async def test_restarts_outside_the_window_do_not_count(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    async with open_supervisor(max_restarts=1, window_s=10) as supervisor:
        await stage.start(supervisor, "a")
        for _ in range(4):
            stage.boxes["a"].send_nowait(OSError("bus"))
            await trio.sleep(11)
        assert supervisor.statistics()[0].restarts == 4


async def test_a_factory_that_fails_counts_as_a_death() -> None:
    tries: list[int] = []

    def factory(own: Mailbox[Message]) -> Puppet:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("no memory")
        return Puppet(own, [])

    async with open_supervisor() as supervisor:
        await supervisor.start(ActorSpec(Mailbox[Message]("a", 1), factory))
        await settle()
        assert supervisor.statistics()[0].is_running
    assert len(tries) == 2


async def test_unread_messages_may_be_discarded_at_a_restart() -> None:
    disposed: list[Message] = []
    notes: list[str] = []
    mailbox = Mailbox[Message]("a", 8, dispose=disposed.append)
    async with open_supervisor() as supervisor:
        await supervisor.start(ActorSpec(mailbox, lambda own: Puppet(own, notes), unread="discard"))
        mailbox.send_nowait(OSError("bus"))
        mailbox.send_nowait("lost")
        await settle()
        mailbox.send_nowait("kept")
    assert disposed == ["lost"]
    assert notes == ["a left", "a kept", "a left"]


class Sour(Actor[Message]):
    """Fails in its own cleanup, which takes a second."""

    def __init__(self, mailbox: Mailbox[Message], error: Exception | None) -> None:
        super().__init__(mailbox)
        self.error = error

    async def run(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1)
            if self.error is not None:
                raise self.error


async def test_a_death_while_being_restarted_is_not_mended_twice(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A second restart for the same cause would use up the allowance of the next one."""
    stage = Stage()
    async with open_supervisor(max_restarts=1, on_event=stage.events.append) as supervisor:
        await stage.start(supervisor, "a")
        box = Mailbox[Message]("sour", 1)
        sour = ActorSpec(box, lambda own: Sour(own, OSError("cleanup")), stop_timeout_s=0.1)
        await supervisor.start(sour)
        await trio.testing.wait_all_tasks_blocked()
        stage.boxes["a"].send_nowait(OSError("bus"))
        await trio.sleep(2)
        assert [s.restarts for s in supervisor.statistics()] == [1, 1]
        assert all(s.is_running for s in supervisor.statistics())
    assert stage.told() == [
        "start a 1", "start sour 1", "died a 1", "died sour 1", "restart a 2", "restart sour 2",
        "died sour 2", "stop a 2",
    ]  # fmt: skip


async def test_an_actor_stopped_for_good_is_not_restarted_for_an_earlier_death(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    async with open_supervisor(on_event=stage.events.append) as supervisor:
        await stage.start(supervisor, "b", "a")
        await supervisor.start(
            ActorSpec(Mailbox[Message]("slow", 1), lambda own: Sour(own, None), stop_timeout_s=0.1)
        )
        await trio.testing.wait_all_tasks_blocked()
        stage.boxes["a"].send_nowait(OSError("bus"))
        await trio.sleep(0.5)  # the supervisor waits for slow, which a's restart takes along
        stage.boxes["b"].send_nowait(OSError("bus"))
        await trio.testing.wait_all_tasks_blocked()
        await supervisor.stop("b")
        await trio.sleep(2)
        assert [s.name for s in supervisor.statistics()] == ["a", "slow"]
    assert "restart b 2" not in stage.told()


async def test_supervisors_nest() -> None:
    """A supervisor that gives up is an actor that died: its own supervisor mends it."""
    inner = Stage()
    lives: list[int] = []

    class Department(Actor[Message]):
        async def run(self) -> None:
            lives.append(1)
            async with open_supervisor(max_restarts=0) as supervisor:
                await supervisor.start(inner.spec(f"clerk {len(lives)}"))
                async for message in self.mailbox:
                    inner.boxes[f"clerk {len(lives)}"].send_nowait(message)

    with trio.fail_after(5):
        async with open_supervisor() as supervisor:
            box = Mailbox[Message]("department", 4)
            await supervisor.start(ActorSpec(box, Department))
            box.send_nowait(OSError("bus"))
            while len(lives) < 2:
                await settle()
    assert len(lives) == 2
