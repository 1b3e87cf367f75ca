"""Supervisors: what may be restarted is, what is wrong goes up, nothing stays behind."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

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
from kvlease.runtime.actor import Actor, ActorEvent, ActorSpec
from kvlease.runtime.mailbox import Mailbox
from kvlease.runtime.supervisor import Strategy, Supervisor, open_supervisor
from tests.runtime.rig import cancel_at_every_checkpoint

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


async def test_a_good_end_drains_mailboxes_in_reverse_order() -> None:
    stage = Stage()
    async with open_supervisor(on_event=stage.events.append) as supervisor:
        await stage.start(supervisor, "a", "b")
        stage.boxes["a"].send_nowait("last words")
        stage.boxes["b"].send_nowait("last words")
    assert stage.notes == ["b last words", "b left", "a last words", "a left"] or (
        stage.notes == ["a last words", "b last words", "b left", "a left"]
    )
    assert stage.told() == ["start a 1", "start b 1", "stop b 1", "stop a 1"]
    with pytest.raises(ActorClosed):
        stage.boxes["a"].send_nowait("more")


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


async def test_an_actor_that_returns_is_done_and_its_senders_learn_it() -> None:
    disposed: list[Message] = []
    mailbox = Mailbox[Message]("a", 8, dispose=disposed.append)

    class Brief(Actor[Message]):
        async def run(self) -> None:
            await self.mailbox.receive()

    stage = Stage()
    async with open_supervisor(on_event=stage.events.append) as supervisor:
        await supervisor.start(ActorSpec(mailbox, Brief))
        mailbox.send_nowait("one")
        mailbox.send_nowait("two")
        await settle()
        with pytest.raises(ActorClosed):
            mailbox.send_nowait("three")
    assert disposed == ["two"]
    assert stage.told() == ["start a 1", "stop a 1"]


async def test_names_are_unique_and_start_ends_with_the_supervisor() -> None:
    stage = Stage()
    async with open_supervisor() as supervisor:
        await stage.start(supervisor, "a")
        with pytest.raises(UsageError, match="already"):
            await supervisor.start(stage.spec("a"))
        with pytest.raises(UsageError, match="no actor"):
            await supervisor.stop("b")
        await supervisor.stop("a")
        await stage.start(supervisor, "a")
    with pytest.raises(ActorClosed, match="stopping"):
        await supervisor.start(stage.spec("c"))


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


async def test_an_actor_that_does_not_stop_is_cancelled_after_its_bound(
    autojump_clock: trio.testing.MockClock,
) -> None:
    notes: list[str] = []
    async with open_supervisor() as supervisor:
        for name, bound in (("a", 3.0), ("b", 2.0)):
            await supervisor.start(
                ActorSpec(
                    Mailbox[Message](name, 1),
                    lambda own: Stubborn(own, notes),
                    stop_timeout_s=bound,
                )
            )
    assert notes == ["b at 2", "a at 5"]


@pytest.mark.parametrize("how", ["error", "cancelled"])
async def test_a_bad_end_cancels_at_once_in_reverse_order(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    notes: list[str] = []

    def expected() -> AbstractContextManager[object]:
        if how == "error":
            return pytest.raises(ValueError, match="mine")
        return nullcontext()

    with trio.CancelScope() as scope, expected():
        async with open_supervisor() as supervisor:
            for name in ("a", "b", "c"):
                await supervisor.start(
                    ActorSpec(Mailbox[Message](name, 1), lambda own: Stubborn(own, notes))
                )
            await settle()
            if how == "error":
                raise ValueError("mine")
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught == (how == "cancelled")
    assert notes == ["c at 0", "b at 0", "a at 0"]


async def test_deaths_while_stopping_are_told_and_not_mended() -> None:
    stage = Stage()
    async with open_supervisor(on_event=stage.events.append) as supervisor:
        await stage.start(supervisor, "a")
        stage.boxes["a"].send_nowait(OSError("bus"))
    assert stage.told() in (
        ["start a 1", "died a 1"],
        ["start a 1", "died a 1", "restart a 2", "stop a 2"],
    )


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


async def test_wrong_code_found_while_stopping_still_goes_up() -> None:
    class Late(Actor[Message]):
        async def run(self) -> None:
            async for _ in self.mailbox:
                pass
            raise LedgerImbalance("one page too many")

    with pytest.raises(LedgerImbalance):
        async with open_supervisor() as supervisor:
            await supervisor.start(ActorSpec(Mailbox[Message]("a", 1), Late))
            await settle()


async def test_an_error_of_the_block_is_the_context_of_the_fatal_one() -> None:
    stage = Stage()
    with pytest.raises(LeaseMoved) as caught:
        async with open_supervisor() as supervisor:
            await stage.start(supervisor, "a")
            stage.boxes["a"].send_nowait(LeaseMoved("wrong"))
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("consequence")
    assert isinstance(caught.value.__context__, ValueError)


@pytest.mark.parametrize("kind", ["start", "died", "stop"])
async def test_a_listener_that_fails_is_fatal(kind: str) -> None:
    stage = Stage()

    def listen(event: ActorEvent) -> None:
        if event.kind == kind:
            raise RuntimeError("log is gone")

    with trio.fail_after(5), pytest.raises(RuntimeError, match="log is gone"):
        async with open_supervisor(on_event=listen) as supervisor:
            await stage.start(supervisor, "a")
            stage.boxes["a"].send_nowait(OSError("bus"))
            await settle()


async def test_a_disposer_that_fails_keeps_nobody_running() -> None:
    stage = Stage()

    def dispose(_message: Message) -> None:
        raise RuntimeError("disposer")

    with trio.fail_after(5), pytest.raises(RuntimeError, match="disposer"):
        async with open_supervisor() as supervisor:
            await stage.start(supervisor, "a")
            mailbox = Mailbox[Message]("b", 2, dispose=dispose)
            await supervisor.start(
                ActorSpec(mailbox, lambda own: Stubborn(own, []), stop_timeout_s=0.01)
            )
            mailbox.send_nowait("unread")
    assert stage.notes == ["a left"]


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


async def test_cancellation_at_every_checkpoint() -> None:
    """No task may stay behind, wherever the cancellation falls (a restart included)."""
    stage = Stage()

    async def trial() -> None:
        stage.events.clear()
        async with open_supervisor(on_event=stage.events.append) as supervisor:
            await supervisor.start(stage.spec("a"))
            await supervisor.start(stage.spec("b"))
            await trio.lowlevel.checkpoint()
            stage.boxes["a"].send_nowait(OSError("bus"))
            for _ in range(8):
                await trio.lowlevel.checkpoint()
            await supervisor.stop("b")

    tasks_before = trio.lowlevel.current_statistics().tasks_living

    def check(_cancelled: bool) -> None:
        assert trio.lowlevel.current_statistics().tasks_living == tasks_before
        begun = sum(event.kind in ("start", "restart") for event in stage.events)
        ended = sum(event.kind in ("stop", "died") for event in stage.events)
        assert begun == ended

    assert await cancel_at_every_checkpoint(trial, check) > 8
