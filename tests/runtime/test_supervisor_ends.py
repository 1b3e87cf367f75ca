"""Supervisors' ends: actors stop in order and in time, and nothing stays behind."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import trio
import trio.testing

from kvlease.errors import ActorClosed, LeaseMoved, LedgerImbalance, UsageError
from kvlease.runtime.actor import Actor, ActorEvent, ActorSpec
from kvlease.runtime.mailbox import Mailbox
from kvlease.runtime.supervisor import open_supervisor
from tests.runtime.puppets import Message, Stage, Stubborn, settle
from tests.runtime.rig import cancel_at_every_checkpoint


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
