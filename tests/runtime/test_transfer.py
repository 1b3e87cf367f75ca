"""Transfers: layers gate their own readers, bad plans end badly, late writers keep their pages."""

import random
import threading

import pytest
import trio
import trio.testing

from kvlease.errors import NotReady, TransferFailed, UsageError
from kvlease.protocols.ports import CompletionState, CopyOrder
from kvlease.protocols.readiness import PendingTransfer, Readiness
from kvlease.runtime.completions import CompletionBase
from kvlease.runtime.streams import open_cpu_stream
from kvlease.runtime.transfer import Transfer
from kvlease.units import LayerId, LeaseId
from tests.runtime.rig import (
    PATIENCE_S,
    Held,
    HoldingCopier,
    PlainCopier,
    Witness,
    cancel_at_every_checkpoint,
    grid,
    order,
    plan,
)

PLANNED, RECORDED = CompletionState.PLANNED, CompletionState.RECORDED
DONE, FAILED, REVOKED = CompletionState.DONE, CompletionState.FAILED, CompletionState.REVOKED


def states(transfer: Transfer) -> list[CompletionState]:
    layers = range(transfer.plan.num_layers)
    return [transfer.layer_completion(LayerId(layer)).state for layer in layers]


def run_all(transfer: Transfer) -> None:
    for index in range(len(transfer.plan.copies)):
        transfer.run_copy(index, PlainCopier())


def test_it_is_what_readers_expect() -> None:
    pending: PendingTransfer = Transfer(plan(*grid(1, "latent")))
    assert pending.name == "load 1"


async def test_a_good_life() -> None:
    witness = Witness()
    held = Held()
    transfer = Transfer(plan(*grid(2, "latent", "index_k"), holds=(held,)), observer=witness)
    assert transfer.state is PLANNED
    transfer.record_layers([0])
    assert states(transfer) == [RECORDED, PLANNED]
    assert transfer.state is PLANNED
    transfer.record_layers([1])
    assert transfer.state is RECORDED
    run_all(transfer)
    assert transfer.state is DONE
    await transfer.wait_done()
    await transfer.wait_settled()
    transfer.release()
    transfer.release()
    assert held.closed == 1
    assert transfer.bytes_done == 32
    assert [name for name, _, _ in witness.heard] == [
        "planned", "recorded", "recorded", "layer_done", "layer_done", "done", "settled",
    ]  # fmt: skip
    assert witness.heard[3][2] == (0, 16)
    for timing in transfer.timings():
        assert timing.recorded_s is not None
        assert timing.done_s is not None
        assert 0 <= timing.recorded_s <= timing.done_s


def test_a_copy_run_before_its_layer_was_recorded_records_itself() -> None:
    """A worker may be faster than the launching thread; being run proves the order."""
    witness = Witness()
    transfer = Transfer(plan(*grid(1, "latent", "index_k")), observer=witness)
    transfer.run_copy(0, PlainCopier())
    assert states(transfer) == [PLANNED]
    transfer.record_layers([0])
    assert states(transfer) == [RECORDED]
    transfer.run_copy(1, PlainCopier())
    assert witness.names() == ["planned", "recorded", "layer_done", "done", "settled"]


def test_a_plan_without_copies_is_failed() -> None:
    """F02 (sglang#39699): a load that matched no layer reported success with 0 bytes."""
    witness = Witness()
    transfer = Transfer(plan(num_layers=2, empty=frozenset({0, 1})), observer=witness)
    assert transfer.state is FAILED
    assert states(transfer) == [FAILED, FAILED]
    assert transfer.is_settled
    assert witness.names() == ["planned", "failed", "settled"]


def test_a_layer_the_plan_forgot_is_failed() -> None:
    """F02 (sglang#24878): a component unknown to the backend must fail, not be skipped."""
    transfer = Transfer(plan(order(0, "latent"), order(2, "latent"), num_layers=3))
    assert transfer.state is FAILED
    assert transfer.problem is not None
    assert "layers [1]" in transfer.problem.message


def test_a_layer_without_bytes_by_construction_is_done_from_the_start() -> None:
    witness = Witness()
    transfer = Transfer(
        plan(order(1, "latent"), num_layers=3, empty=frozenset({0, 2})), observer=witness
    )
    assert states(transfer) == [DONE, PLANNED, DONE]
    assert transfer.state is PLANNED
    run_all(transfer)
    assert transfer.state is DONE
    assert witness.names() == ["planned", "recorded", "layer_done", "done", "settled"]


def test_plans_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(UsageError, match="out of order"):
        plan(order(1, "latent"), order(0, "latent"))
    with pytest.raises(UsageError, match="not below"):
        plan(order(3, "latent"), num_layers=3)
    with pytest.raises(UsageError, match="called empty"):
        plan(order(0, "latent"), empty=frozenset({0}))


def test_a_component_may_have_several_copies() -> None:
    """One store may keep several tails; the layer is done when all of them are."""
    transfer = Transfer(plan(order(0, "window"), order(0, "window")))
    one, two = transfer.parts(0, "window")
    transfer.run_copy(0, PlainCopier())
    assert (one.state, two.state) == (DONE, PLANNED)
    assert states(transfer) == [PLANNED]
    transfer.run_copy(1, PlainCopier())
    assert states(transfer) == [DONE]


@pytest.mark.parametrize("component", ["latent", "index_k", "window"])
@pytest.mark.parametrize("held", [0, 1, 2, 3])
async def test_a_held_component_holds_its_layers_reader_and_no_other(
    held: int, component: str
) -> None:
    """F01 (sglang#22811): index keys that arrive late must hold the indexer, and only it."""
    names = ("latent", "index_k", "window")
    transfer = Transfer(plan(*grid(4, *names)))
    index = next(
        i
        for i, each in enumerate(transfer.plan.copies)
        if (each.layer, each.component) == (held, component)
    )
    read: list[int] = []

    async def reader(layer: int) -> None:
        await transfer.layer_completion(LayerId(layer)).wait_done()
        read.append(layer)

    async def whole_reader() -> None:
        await transfer.wait_done()
        read.append(-1)

    async with trio.open_nursery() as nursery:
        for layer in range(4):
            nursery.start_soon(reader, layer)
        nursery.start_soon(whole_reader)
        for i in range(len(transfer.plan.copies)):
            if i != index:
                transfer.run_copy(i, PlainCopier())
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(read) == [layer for layer in range(4) if layer != held]
        transfer.run_copy(index, PlainCopier())
    assert sorted(read) == [-1, 0, 1, 2, 3]


async def test_a_reader_of_an_unrecorded_layer_waits_and_then_its_stream_does() -> None:
    """R2 end to end: the task waits for RECORDED, the stream for DONE."""
    transfer = Transfer(plan(*grid(2, "latent")))
    readiness = Readiness(2, [(LeaseId(1), transfer)])
    order_of_events: list[str] = []
    async with open_cpu_stream("compute") as stream, trio.open_nursery() as nursery:

        async def read() -> None:
            await readiness.settle(LayerId(0), stream)
            order_of_events.append("ordered")
            stream.launch(lambda: order_of_events.append("computed"))

        with pytest.raises(NotReady):
            readiness.check(LayerId(0))
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        assert order_of_events == []
        transfer.record_layers([0])
        await trio.sleep(0.02)
        assert order_of_events == ["ordered"]
        with pytest.raises(NotReady):
            readiness.check(LayerId(0))
        transfer.run_copy(0, PlainCopier())
        await stream.record().wait_done()
        assert order_of_events == ["ordered", "computed"]
        await readiness.verify()


@pytest.mark.parametrize("fault", ["short", "long", "raises"])
def test_the_first_bad_copy_ends_the_transfer(fault: str) -> None:
    """Readers of every layer that has not arrived must go on to recompute, none may wait on."""

    def bad() -> int:
        if fault == "raises":
            raise OSError("bus")
        return 7 if fault == "short" else 9

    witness = Witness()
    ran: list[int] = []

    def good() -> int:
        ran.append(1)
        return 8

    orders = (order(0, "latent"), order(1, "latent", run=bad), order(2, "latent", run=good))
    transfer = Transfer(plan(*orders), observer=witness)
    run_all(transfer)
    assert states(transfer) == [DONE, FAILED, FAILED]
    assert transfer.state is FAILED
    assert ran == []
    assert witness.names() == [
        "planned", "recorded", "layer_done", "recorded", "failed", "settled",
    ]  # fmt: skip
    with pytest.raises(TransferFailed) as caught:
        transfer.layer_completion(LayerId(2)).block_until_final()
    assert caught.value.reason == ("failed" if fault == "raises" else "short")
    assert transfer.bytes_done < 24


async def test_a_late_writer_keeps_both_ends_until_it_returns() -> None:
    """F06 (sglang#24527): after an abort the pages must wait for the write still in the air."""
    witness, held, copier = Witness(), Held(), HoldingCopier((0, "latent"))
    transfer = Transfer(plan(*grid(2, "latent"), holds=(held,)), observer=witness)
    thread = threading.Thread(target=transfer.run_copy, args=(0, copier))
    thread.start()
    assert copier.entered.wait(PATIENCE_S)
    assert transfer.revoke("client went away")
    assert transfer.state is REVOKED
    with pytest.raises(TransferFailed, match="client went away"):
        await transfer.wait_done()
    assert not transfer.is_settled
    with pytest.raises(UsageError, match="still moving"):
        transfer.release()
    transfer.run_copy(1, PlainCopier())
    assert not transfer.is_settled
    assert "settled" not in witness.names()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transfer.wait_settled)
        await trio.testing.wait_all_tasks_blocked()
        copier.go.set()
    thread.join()
    transfer.release()
    assert held.closed == 1
    assert transfer.state is REVOKED
    assert transfer.bytes_done == 0
    assert witness.names() == ["planned", "recorded", "failed", "settled"]


def test_ending_twice_is_told_and_changes_nothing() -> None:
    witness = Witness()
    transfer = Transfer(plan(*grid(2, "latent")), observer=witness)
    assert transfer.fail("too slow", reason="late")
    assert not transfer.revoke()
    assert not transfer.fail("again")
    run_all(transfer)
    transfer.record_layers([0])
    assert transfer.problem is not None
    assert transfer.problem.reason == "late"
    assert witness.names() == ["planned", "failed", "settled"]


def test_revoking_one_part_revokes_the_transfer() -> None:
    transfer = Transfer(plan(*grid(2, "latent")))
    transfer.parts(1, "latent")[0].revoke()
    assert transfer.state is REVOKED
    assert states(transfer) == [REVOKED, REVOKED]


def test_an_error_of_the_observer_is_kept_and_costs_no_wake_up() -> None:
    class Broken(Witness):
        def layer_done(self, transfer: Transfer, layers: tuple[int, int], nbytes: int) -> None:
            raise RuntimeError("disk full")

    transfer = Transfer(plan(*grid(1, "latent")), observer=Broken())
    run_all(transfer)
    assert transfer.state is DONE
    assert isinstance(transfer.observer_error, RuntimeError)


def test_the_observer_hears_before_any_reader_sees() -> None:
    """R14: replay decides from the log alone; a read logged before its arrival is a violation."""
    seen: list[CompletionState] = []

    class Peeking(Witness):
        def layer_done(self, transfer: Transfer, layers: tuple[int, int], nbytes: int) -> None:
            seen.append(transfer.layer_completion(LayerId(layers[0])).state)

        def recorded(self, transfer: Transfer, layers: tuple[int, int]) -> None:
            seen.append(transfer.layer_completion(LayerId(layers[0])).state)

        def done(self, transfer: Transfer, nbytes: int) -> None:
            seen.append(transfer.state)

    run_all(Transfer(plan(*grid(1, "latent")), observer=Peeking()))
    assert seen == [PLANNED, RECORDED, RECORDED]


def test_a_system_exit_in_a_copy_fails_it_and_goes_on_up() -> None:
    def leave() -> int:
        raise SystemExit(3)

    transfer = Transfer(plan(order(0, "latent", run=leave)))
    with pytest.raises(SystemExit):
        transfer.run_copy(0, PlainCopier())
    assert transfer.state is FAILED
    assert transfer.is_settled


async def test_cancelled_waits_change_nothing() -> None:
    waits = ("wait_recorded", "wait_done", "wait_settled", "wait_final")
    for name in waits:
        transfer = Transfer(plan(*grid(1, "latent")))

        async def trial(transfer: Transfer = transfer, name: str = name) -> None:
            await getattr(transfer, name)()

        def check(cancelled: bool, transfer: Transfer = transfer) -> None:
            if cancelled:
                assert transfer.state is PLANNED
                run_all(transfer)

        assert await cancel_at_every_checkpoint(trial, check) == 1


def test_random_lives_end_once_and_settle_once() -> None:
    """Copies, faults and revocations from several threads: one end, one settling, no half state."""
    rng = random.Random(11)
    for _ in range(120):
        witness = Witness()
        layers = rng.randint(1, 4)

        def moved(order: CopyOrder, rng: random.Random = rng) -> int:
            return order.nbytes - (rng.random() < 0.05)

        class Faulty:
            def copy(self, order: CopyOrder) -> int:
                return moved(order)

        transfer = Transfer(plan(*grid(layers, "latent", "index_k")), observer=witness)
        jobs = list(range(len(transfer.plan.copies)))

        def work(transfer: Transfer = transfer, jobs: list[int] = jobs) -> None:
            while True:
                try:
                    index = jobs.pop(0)
                except IndexError:
                    return
                transfer.run_copy(index, Faulty())

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for layer in range(layers):
            transfer.record_layers([layer])
        if rng.random() < 0.4:
            transfer.revoke()
        for thread in threads:
            thread.join()
        names = witness.names()
        assert transfer.is_settled
        assert names.count("settled") == 1
        assert names.count("done") + names.count("failed") == 1
        assert names[-1] == "settled"
        whole: CompletionBase = transfer
        assert (whole.state is DONE) == all(state is DONE for state in states(transfer))
        assert names.count("layer_done") <= names.count("recorded") <= layers
