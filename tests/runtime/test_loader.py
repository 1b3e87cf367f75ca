"""The loader: every transfer ends once and settles once, whatever the copies do."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import final

import pytest
import trio
import trio.testing

from kvlease.errors import InternalError, LayoutMismatch, TransferFailed
from kvlease.protocols.ports import CompletionState, Copier, CopyOrder, Stream
from kvlease.runtime.actor import ActorEvent, ActorSpec
from kvlease.runtime.clock import TrioClock
from kvlease.runtime.completions import CpuCompletion
from kvlease.runtime.loader import Loader, loader_mailbox, revoke_unread, submit
from kvlease.runtime.streams import CpuStream, InlineStream, open_cpu_stream
from kvlease.runtime.supervisor import open_supervisor
from kvlease.runtime.transfer import Transfer
from kvlease.runtime.transfer_plan import Kind, TransferPlan
from kvlease.units import LayerId, TransferId
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

DONE, FAILED, REVOKED = CompletionState.DONE, CompletionState.FAILED, CompletionState.REVOKED


@final
class Rig:
    """A loader's surroundings: its mailbox, its reports and what they said."""

    def __init__(self, copier: Copier | None = None, settle_timeout_s: float = 1.0) -> None:
        self.copier = copier
        self.settle_timeout_s = settle_timeout_s
        self.ended: list[Transfer] = []
        self.settled: list[Transfer] = []
        self.witness = Witness()
        self.mailbox = loader_mailbox(16, self.ended.append, self.settled.append)
        self.loader: Loader | None = None

    def make(self, load: Stream, store: Stream) -> Loader:
        self.loader = Loader(
            self.mailbox,
            load_stream=load,
            store_stream=store,
            on_end=self.ended.append,
            on_settled=self.settled.append,
            copier=self.copier,
            settle_timeout_s=self.settle_timeout_s,
        )
        return self.loader

    def transfer(
        self,
        *orders: CopyOrder,
        transfer_id: int = 1,
        kind: Kind = "load",
        deadline_s: float = 5.0,
        held: Held | None = None,
        after: tuple[CpuCompletion, ...] = (),
    ) -> Transfer:
        it = TransferPlan(
            TransferId(transfer_id),
            kind,
            orders,
            1 + max(each.layer for each in orders),
            deadline_s,
            "scheduler",
            holds=() if held is None else (held,),
            after=after,
        )
        return Transfer(it, observer=self.witness)


@asynccontextmanager
async def running(rig: Rig) -> AsyncGenerator[Loader]:
    """Run the rig's loader on worker threads; it is asked to finish at the end of the block."""
    async with (
        open_cpu_stream("load", close_timeout_s=1) as load,
        open_cpu_stream("store", close_timeout_s=1) as store,
        trio.open_nursery() as nursery,
    ):
        loader = rig.make(load, store)
        nursery.start_soon(loader.run)
        yield loader
        rig.mailbox.close()


async def wait_for(what: threading.Event) -> None:
    assert await trio.to_thread.run_sync(what.wait, PATIENCE_S)


async def test_a_load_is_carried_out_and_reported_once() -> None:
    rig, held = Rig(), Held()
    with trio.fail_after(PATIENCE_S):
        async with running(rig) as loader:
            transfer = rig.transfer(*grid(4, "latent", "index_k"), held=held)
            assert submit(rig.mailbox, transfer)
            await transfer.layer_completion(LayerId(0)).wait_recorded()
            await transfer.wait_done()
            await transfer.wait_settled()
    assert rig.ended == rig.settled == [transfer]
    assert held.closed == 1
    assert rig.witness.names().count("done") == 1
    assert rig.witness.names()[-1] == "settled"
    statistics = loader.statistics()
    assert (statistics.done, statistics.in_flight, statistics.unsettled) == (1, 0, 0)
    assert statistics.bytes_done == 64


async def test_a_held_last_component_holds_its_layers_reader_and_no_other() -> None:
    """F01 (sglang#22811) through the loader and its stream, with real threads."""
    copier = HoldingCopier((3, "index_k"))
    rig = Rig(copier)
    with trio.fail_after(PATIENCE_S):
        async with running(rig):
            transfer = rig.transfer(*grid(4, "latent", "index_k"))
            submit(rig.mailbox, transfer)
            for layer in range(3):
                await transfer.layer_completion(LayerId(layer)).wait_done()
            await wait_for(copier.entered)
            assert transfer.layer_completion(LayerId(3)).state is CompletionState.RECORDED
            assert transfer.parts(3, "latent")[0].state is DONE
            assert transfer.state is CompletionState.RECORDED
            copier.go.set()
            await transfer.layer_completion(LayerId(3)).wait_done()


async def test_a_load_does_not_wait_behind_a_store() -> None:
    copier = HoldingCopier((0, "window"))
    rig = Rig(copier)
    with trio.fail_after(PATIENCE_S):
        async with running(rig):
            store = rig.transfer(order(0, "window"), kind="store")
            submit(rig.mailbox, store)
            await wait_for(copier.entered)
            load = rig.transfer(order(0, "latent"), transfer_id=2)
            submit(rig.mailbox, load)
            await load.wait_done()
            assert not store.state.is_final
            copier.go.set()


async def test_loads_that_wait_are_launched_before_stores() -> None:
    rig = Rig()
    queue: list[str] = []
    stream = InlineStream()
    loader = rig.make(stream, stream)
    kinds: tuple[Kind, ...] = ("store", "tail", "load", "store", "load")

    def run(name: str) -> int:
        queue.append(name)
        return 8

    for number, kind in enumerate(kinds):
        copy = order(0, "latent", run=partial(run, f"{kind} {number}"))
        submit(rig.mailbox, rig.transfer(copy, transfer_id=number, kind=kind))
    rig.mailbox.close()
    await loader.run()
    assert queue == ["load 2", "load 4", "store 0", "tail 1", "store 3"]
    assert len(rig.settled) == 5


@pytest.mark.parametrize("fault", ["short", "raises"])
async def test_a_bad_copy_ends_its_transfer_and_no_other(fault: str) -> None:
    """F08: the component that went wrong fails its transfer; the loader lives on."""

    class Faulty:
        def copy(self, order: CopyOrder) -> int:
            if order.component == "bad":
                if fault == "raises":
                    raise OSError("bus")
                return order.nbytes - 1
            return order.run()

    rig = Rig(Faulty())
    with trio.fail_after(PATIENCE_S):
        async with running(rig) as loader:
            bad = rig.transfer(order(0, "latent"), order(1, "bad"), order(2, "latent"))
            good = rig.transfer(order(0, "latent"), transfer_id=2)
            submit(rig.mailbox, bad)
            submit(rig.mailbox, good)
            await good.wait_done()
            with pytest.raises(TransferFailed) as caught:
                await bad.wait_done()
            assert caught.value.reason == ("failed" if fault == "raises" else "short")
    assert loader.statistics().failed == 1
    assert sorted(t.plan.id for t in rig.settled) == [1, 2]


async def test_a_copy_that_never_ends_is_late_and_keeps_its_pages() -> None:
    """F06, F14: readers go on to recompute; the pages wait for the writer, however long."""
    copier = HoldingCopier((1, "latent"))
    rig, held = Rig(copier), Held()
    with trio.fail_after(PATIENCE_S):
        async with running(rig) as loader:
            transfer = rig.transfer(*grid(3, "latent"), held=held, deadline_s=0.05)
            behind = rig.transfer(order(0, "latent"), transfer_id=2, deadline_s=0.05)
            submit(rig.mailbox, transfer)
            submit(rig.mailbox, behind)
            with pytest.raises(TransferFailed, match=r"scheduler allowed 0\.05 s") as caught:
                await transfer.wait_done()
            assert caught.value.reason == "late"
            assert transfer.layer_completion(LayerId(0)).state is DONE
            assert transfer.layer_completion(LayerId(2)).state is FAILED
            with pytest.raises(TransferFailed):
                await behind.wait_done()
            await behind.wait_settled()
            await trio.sleep(0.02)
            assert set(rig.ended) == {transfer, behind}
            assert len(rig.ended) == 2
            assert rig.settled == [behind]  # it never began: nothing can touch its pages
            assert held.closed == 0
            assert loader.statistics().late == 2
            copier.go.set()
            await transfer.wait_settled()
    assert held.closed == 1
    assert rig.settled == [behind, transfer]
    assert transfer.bytes_done == 8
    assert (2, "latent") not in copier.copied


async def test_finishing_just_before_the_deadline_is_not_late(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """F14: no false time-out for a transfer that came to its end in time, however narrowly."""
    rig = Rig()
    stream = InlineStream()
    gate = CpuCompletion("gate")
    gate.set_recorded()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.make(stream, stream).run)
        stream.wait(gate)
        transfer = Transfer(plan(*grid(1, "latent"), deadline_s=1.0), clock=TrioClock())
        submit(rig.mailbox, transfer)
        await trio.sleep(1.0 - 1e-6)
        gate.finish()
        await transfer.wait_settled()
        rig.mailbox.close()
    assert transfer.state is DONE
    assert [t.state for t in rig.ended] == [DONE]


async def test_the_deadline_counts_from_planning(autojump_clock: trio.testing.MockClock) -> None:
    """Time spent in the mailbox is time its readers have waited."""
    rig = Rig()
    stream = InlineStream()
    ran: list[int] = []

    def run() -> int:
        ran.append(1)
        return 8

    transfer = Transfer(plan(order(0, "latent", run=run), deadline_s=1.0), clock=TrioClock())
    submit(rig.mailbox, transfer)
    await trio.sleep(1.5)
    rig.mailbox.close()
    await rig.make(stream, stream).run()
    assert transfer.problem is not None
    assert transfer.problem.reason == "late"
    assert ran == []


async def test_recorded_late_means_readers_wait_for_the_record() -> None:
    """F02: the copies of a store that must wait for a step are not recorded before it is done."""
    rig = Rig()
    step = CpuCompletion("step")
    with trio.fail_after(PATIENCE_S):
        async with running(rig):
            store = rig.transfer(order(0, "latent"), kind="store", after=(step,))
            other = rig.transfer(order(0, "latent"), kind="store", transfer_id=2)
            submit(rig.mailbox, store)
            submit(rig.mailbox, other)
            await other.wait_done()  # a store that waits holds no other
            assert store.state is CompletionState.PLANNED
            step.set_recorded()
            await trio.sleep(0.01)
            assert store.state is CompletionState.PLANNED
            step.finish()
            await store.wait_done()


async def test_a_store_of_a_step_that_failed_fails() -> None:
    """F03 (vllm#45704): rows of a discarded step must never reach the host."""
    rig = Rig()
    step = CpuCompletion("step")
    ran: list[int] = []

    def run() -> int:
        ran.append(1)
        return 8

    with trio.fail_after(PATIENCE_S):
        async with running(rig):
            store = rig.transfer(order(0, "latent", run=run), kind="store", after=(step,))
            submit(rig.mailbox, store)
            step.fail("the step was discarded")
            with pytest.raises(TransferFailed):
                await store.wait_done()
            await store.wait_settled()
    assert ran == []
    assert rig.settled == [store]


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
        def layer_done(self, transfer: Transfer, layer: LayerId, nbytes: int) -> None:
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
