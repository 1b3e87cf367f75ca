"""The loader's ends: killed, cancelled, broken or restarted, every transfer settles once."""

from __future__ import annotations

import random
import threading
import time

import pytest
import trio
import trio.testing

from kvlease.errors import InternalError, LayoutMismatch, TransferFailed
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime.actor import ActorEvent, ActorSpec
from kvlease.runtime.completions import CpuCompletion
from kvlease.runtime.loader import Loader, revoke_unread, submit
from kvlease.runtime.streams import CpuStream, InlineStream, open_cpu_stream
from kvlease.runtime.supervisor import open_supervisor
from kvlease.runtime.transfer import Transfer
from kvlease.runtime.transfer_plan import Kind
from tests.runtime.loader_rig import FAILED, REVOKED, Rig, wait_for
from tests.runtime.rig import (
    PATIENCE_S,
    Held,
    HoldingCopier,
    Witness,
    cancel_at_every_checkpoint,
    grid,
    order,
    plan,
)


async def test_a_loader_that_is_killed_ends_and_settles_everything() -> None:
    """R9: copies in flight when the loader dies; nobody may wait for ever, no page may leak."""
    copier = HoldingCopier((1, "latent"))
    rig, held, unread = Rig(copier), Held(), Held()
    async with open_cpu_stream("load", close_timeout_s=1) as load:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rig.make(load, load).run)
                transfer = rig.transfer(*grid(3, "latent"), held=held)
                submit(rig.mailbox, transfer)
                await wait_for(copier.entered)
                left = rig.transfer(order(0, "latent"), transfer_id=2, held=unread)
                threading.Timer(0.05, copier.go.set).start()
                nursery.cancel_scope.cancel()
                submit(rig.mailbox, left)
        assert transfer.state is REVOKED
        assert rig.ended[0] is rig.settled[0] is transfer
        assert held.closed == 1
        with pytest.raises(TransferFailed) as caught:
            await transfer.wait_done()
        assert caught.value.reason == "revoked"
        rig.mailbox.break_(RuntimeError("gone"))
    assert left.state is REVOKED
    assert unread.closed == 1
    assert rig.ended.count(left) == rig.settled.count(left) == 1
    assert not submit(rig.mailbox, rig.transfer(order(0, "latent"), transfer_id=3))
    assert len(rig.settled) == 3


async def test_a_copy_that_outlives_the_killed_loader_still_settles() -> None:
    copier = HoldingCopier((0, "latent"))
    rig, held = Rig(copier, settle_timeout_s=0.02), Held()
    async with open_cpu_stream("load", close_timeout_s=2) as load:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rig.make(load, load).run)
                transfer = rig.transfer(order(0, "latent"), held=held)
                submit(rig.mailbox, transfer)
                await wait_for(copier.entered)
                nursery.cancel_scope.cancel()
            assert rig.ended == [transfer]
            assert rig.settled == []
            assert held.closed == 0
            copier.go.set()
            await transfer.wait_settled()
            await trio.testing.wait_all_tasks_blocked()
    assert rig.settled == [transfer]
    assert held.closed == 1


async def test_a_closed_stream_fails_the_transfer() -> None:
    rig = Rig()
    stream = InlineStream()
    stream.close()
    transfer = rig.transfer(order(0, "latent"))
    submit(rig.mailbox, transfer)
    rig.mailbox.close()
    await rig.make(stream, stream).run()
    assert transfer.state is FAILED
    assert rig.settled == [transfer]


async def test_an_abandoned_stream_ends_the_transfers_queued_on_it() -> None:
    rig = Rig()
    stream = CpuStream("load")
    transfer = rig.transfer(*grid(2, "latent"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.make(stream, stream).run)
        submit(rig.mailbox, transfer)
        await trio.testing.wait_all_tasks_blocked()
        stream.close()  # it never ran: everything is dropped
        with trio.fail_after(PATIENCE_S):
            await transfer.wait_settled()
        rig.mailbox.close()
    assert transfer.state is FAILED
    assert transfer.problem is not None
    assert transfer.problem.reason == "revoked"


async def test_a_transfer_that_was_over_before_it_came_is_only_reported() -> None:
    rig = Rig()
    stream = InlineStream()
    transfer = Transfer(plan(num_layers=2))
    submit(rig.mailbox, transfer)
    rig.mailbox.close()
    await rig.make(stream, stream).run()
    assert rig.ended == [transfer]
    assert rig.settled == [transfer]
    assert transfer.state is FAILED


async def test_wrong_code_in_a_copy_or_observer_is_not_swallowed() -> None:
    def wrong() -> int:
        raise LayoutMismatch("rows are 8 wide, the pool's are 4")

    class BrokenWitness(Witness):
        def layer_done(self, transfer: Transfer, layers: tuple[int, int], nbytes: int) -> None:
            raise RuntimeError("disk full")

    rig = Rig()
    stream = InlineStream()
    submit(rig.mailbox, rig.transfer(order(0, "latent", run=wrong)))
    with pytest.raises(LayoutMismatch):
        await rig.make(stream, stream).run()
    rig.witness = BrokenWitness()
    submit(rig.mailbox, rig.transfer(order(0, "latent"), transfer_id=2))
    with pytest.raises(InternalError, match="observer"):
        await rig.make(stream, stream).run()
    assert [t.plan.id for t in rig.settled] == [1, 2]


async def test_a_broken_report_still_settles() -> None:
    rig = Rig()
    stream = InlineStream()

    def report(_transfer: Transfer) -> None:
        raise RuntimeError("report")

    loader = Loader(
        rig.mailbox,
        load_stream=stream,
        store_stream=stream,
        on_end=report,
        on_settled=rig.settled.append,
    )
    transfer = rig.transfer(order(0, "latent"))
    submit(rig.mailbox, transfer)
    rig.mailbox.close()
    with pytest.raises(RuntimeError, match="report"):
        await loader.run()
    assert rig.settled == [transfer]


async def test_a_restarted_loader_takes_the_unread_transfers() -> None:
    """The mailbox outlives the loader; a load still unread is carried out by the next one."""
    rig = Rig()
    stream = InlineStream()
    made: list[Loader] = []
    events: list[ActorEvent] = []

    def report(transfer: Transfer) -> None:
        rig.ended.append(transfer)
        if len(rig.ended) == 1:
            raise OSError("first report fails")

    def make(_mailbox: object) -> Loader:
        made.append(
            Loader(
                rig.mailbox,
                load_stream=stream,
                store_stream=stream,
                on_end=report,
                on_settled=rig.settled.append,
            )
        )
        return made[-1]

    with trio.fail_after(PATIENCE_S):
        async with open_supervisor(on_event=events.append) as supervisor:
            await supervisor.start(ActorSpec(rig.mailbox, make))
            first = rig.transfer(order(0, "latent"))
            submit(rig.mailbox, first)
            while len(made) < 2:
                await trio.testing.wait_all_tasks_blocked()
            second = rig.transfer(order(0, "latent"), transfer_id=2)
            submit(rig.mailbox, second)
            await second.wait_done()
    assert rig.settled == [first, second]
    assert [event.kind for event in events] == ["start", "died", "restart", "stop"]


async def test_cancellation_at_every_checkpoint() -> None:
    lives: list[tuple[Rig, list[Transfer]]] = []

    async def trial() -> None:
        rig = Rig()
        stream, held_back = InlineStream(), InlineStream()
        hold = CpuCompletion("hold")
        hold.set_recorded()
        held_back.wait(hold)
        transfers = [
            rig.transfer(*grid(2, "latent"), transfer_id=1),
            rig.transfer(*grid(2, "latent"), transfer_id=2, kind="store"),
        ]
        lives.append((rig, transfers))
        for transfer in transfers:
            submit(rig.mailbox, transfer)
        loader = rig.make(stream, held_back)

        async def driver() -> None:
            for _ in range(4):
                await trio.lowlevel.checkpoint()
            hold.finish()
            rig.mailbox.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(driver)
            await loader.run()

    def check(_cancelled: bool) -> None:
        rig, transfers = lives[-1]
        rig.mailbox.break_(RuntimeError("over"))
        for transfer in transfers:
            assert transfer.state.is_final
            assert rig.ended.count(transfer) == 1
            assert rig.settled.count(transfer) == 1

    assert await cancel_at_every_checkpoint(trial, check) >= 2


async def test_random_faults_and_kills_never_lose_a_transfer() -> None:
    """Threads, delays, short copies, tight deadlines, a kill: one end and one settling each."""
    for seed in range(25):
        rng = random.Random(seed)

        class Erratic:
            def copy(self, order: CopyOrder, rng: random.Random = rng) -> int:
                if rng.random() < 0.3:
                    time.sleep(rng.random() * 3e-4)
                if rng.random() < 0.03:
                    raise OSError("bus")
                return order.nbytes - (rng.random() < 0.02)

        rig = Rig(Erratic())
        transfers: list[Transfer] = []
        with trio.fail_after(PATIENCE_S):
            async with open_cpu_stream("load") as load, open_cpu_stream("store") as store:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(rig.make(load, store).run)
                    for number in range(12):
                        kind: Kind = "load" if rng.random() < 0.6 else "store"
                        transfer = rig.transfer(
                            *grid(4, "latent", "index_k"),
                            transfer_id=number,
                            kind=kind,
                            deadline_s=0.001 if rng.random() < 0.2 else 5,
                        )
                        transfers.append(transfer)
                        submit(rig.mailbox, transfer)
                        if rng.random() < 0.5:
                            await trio.sleep(rng.random() * 1e-3)
                    if seed % 2:
                        nursery.cancel_scope.cancel()
                    else:
                        rig.mailbox.close()
                rig.mailbox.break_(RuntimeError("over"))
        for transfer in transfers:
            assert transfer.state.is_final
            assert transfer.is_settled
            assert rig.ended.count(transfer) == 1
            assert rig.settled.count(transfer) == 1
            names = rig.witness.names(transfer.plan.id)
            assert names.count("done") + names.count("failed") == 1
            assert names.count("settled") == 1


def test_revoking_unread_lets_both_ends_go() -> None:
    held = Held()
    transfer = Transfer(plan(*grid(1, "latent"), holds=(held,)))
    revoke_unread(transfer)
    assert transfer.state is REVOKED
    assert held.closed == 1
