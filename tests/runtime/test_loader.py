"""The loader: transfers are carried out in order, and one that goes wrong ends alone."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

from kvlease.errors import TransferFailed
from kvlease.protocols.ports import CompletionState, CopyOrder
from kvlease.runtime.clock import TrioClock
from kvlease.runtime.completions import CpuCompletion
from kvlease.runtime.loader import submit
from kvlease.runtime.streams import InlineStream
from kvlease.runtime.transfer import Transfer
from kvlease.runtime.transfer_plan import Kind
from kvlease.units import LayerId
from tests.runtime.loader_rig import DONE, FAILED, Rig, running, wait_for
from tests.runtime.rig import PATIENCE_S, Held, HoldingCopier, grid, order, plan


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
