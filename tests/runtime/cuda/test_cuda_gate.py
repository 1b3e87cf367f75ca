"""The gate on a device: no read before its bytes, whatever is late, and all without the wait."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import final

import pytest
import torch
import trio

from kvlease.errors import TransferFailed
from kvlease.protocols.ports import CompletionState, Copier, CopyOrder, CopyPart, CopyParts, Stream
from kvlease.protocols.readiness import Readiness
from kvlease.runtime.cuda_stream import CudaStream
from kvlease.runtime.loader import submit
from kvlease.runtime.transfer import Transfer
from kvlease.runtime.transfer_plan import TransferPlan
from kvlease.units import LayerId, LeaseId, TransferId
from tests.runtime.cuda.devices import Barrier, Device, open_streams
from tests.runtime.cuda.loads import NUM_LAYERS, PARTS, Bench, DeviceCopier, Unwaiting
from tests.runtime.loader_rig import Rig
from tests.runtime.rig import PATIENCE_S, Held, PlainCopier

PLANNED, RECORDED = CompletionState.PLANNED, CompletionState.RECORDED
DONE, FAILED, REVOKED = CompletionState.DONE, CompletionState.FAILED, CompletionState.REVOKED
LATE_S = 0.6e-3
"""How much later than its record a copy may come, and than its reader's launch a wait."""


@asynccontextmanager
async def loading(
    device: Device, copier: Copier
) -> AsyncGenerator[tuple[Rig, CudaStream, CudaStream]]:
    """Open a compute stream, another for writers, and a loader on streams of its own."""
    rig = Rig(copier)
    async with open_streams(device, "compute", "load", "store") as (compute, load, store):
        loader = rig.make(load, store)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loader.run)
            yield rig, compute, store
            rig.mailbox.close()


@final
class Reads:
    """Loads that are read layer by layer as they come, and how many of the reads were early."""

    def __init__(self, device: Device, rig: Rig, compute: CudaStream) -> None:
        self.num_reads = 0
        self._bench = Bench(device)
        self._rig, self._compute = rig, compute
        self._lag = partial(device.delay, LATE_S / 40)
        self._bad = torch.zeros((), dtype=torch.int64, device=device.name)

    @property
    def num_early(self) -> int:
        return int(self._bad)

    async def read(self, *, waits: bool = True, barrier: Barrier | None = None) -> None:
        """Load and read once; ``barrier`` is opened when all was read."""
        bench, compute = self._bench, self._compute
        transfer, here, there = bench.load()
        compute.launch(partial(bench.poison, there))
        await compute.record().wait_done()
        reader = bench.reader(here, there, self._bad)
        submit(self._rig.mailbox, transfer)
        readiness = Readiness(NUM_LAYERS, [(LeaseId(1), transfer)])
        scope = compute.scope()
        gate: Stream = scope if waits else Unwaiting(scope)
        for layer in range(NUM_LAYERS):
            scope.launch(self._lag)
            await readiness.settle(LayerId(layer), gate)
            scope.launch(reader.layer(layer))
        await scope.record().wait_done()
        if barrier is not None:
            barrier.open()
        await readiness.verify()
        await transfer.wait_settled()
        self.num_reads += reader.num_reads


async def test_no_read_is_early(device: Device) -> None:
    num_loads = 250 if device.name == "cuda" else 6
    with trio.fail_after(60):
        async with loading(device, DeviceCopier(device, LATE_S)) as (rig, compute, _):
            reads = Reads(device, rig, compute)
            for _ in range(num_loads):
                await reads.read()
    assert reads.num_reads == num_loads * len(PARTS)
    assert reads.num_early == 0


async def test_every_read_is_early_without_the_wait(device: Device) -> None:
    """No copy is made before all reads are over, so that none of them can be in time by chance."""
    copier = DeviceCopier(device)
    with trio.fail_after(60):
        async with loading(device, copier) as (rig, compute, _):
            reads = Reads(device, rig, compute)
            await reads.read()
            assert reads.num_early == 0
            for _ in range(6):
                copier.barrier = device.barrier()
                await reads.read(waits=False, barrier=copier.barrier)
    assert reads.num_reads == 7 * len(PARTS)
    assert reads.num_early == 6 * len(PARTS)


async def test_layers_are_recorded_long_before_they_are_done(device: Device) -> None:
    bench = Bench(device)
    async with loading(device, DeviceCopier(device, 20e-3)) as (rig, _, _):
        transfer, _, _ = bench.load(observer=rig.witness)
        assert transfer.state is PLANNED
        submit(rig.mailbox, transfer)
        await transfer.wait_recorded()
        states = [transfer.layer_completion(LayerId(n)).state for n in range(NUM_LAYERS)]
        assert RECORDED in states
        assert PLANNED not in states
        assert transfer.points()
        with trio.fail_after(PATIENCE_S):
            await transfer.wait_done()
        assert transfer.points() == ()
    assert rig.settled == [transfer]
    heard = rig.witness.names()
    assert heard.count("recorded") == heard.count("layer_done") == NUM_LAYERS
    assert heard[-2:] == ["done", "settled"]


async def test_a_load_that_is_revoked_half_way_settles_only_after_the_device(
    device: Device,
) -> None:
    bench, held = Bench(device), Held()
    async with loading(device, DeviceCopier(device, 10e-3)) as (rig, _, store):
        transfer, _, there = bench.load(held=held)
        submit(rig.mailbox, transfer)
        await transfer.layer_completion(LayerId(3)).wait_done()
        transfer.revoke("the reader has left")
        assert not transfer.is_settled, "what the device was given is still on its way"
        assert held.closed == 0
        await transfer.wait_settled()
        # From here on nobody writes there any more: what is written now stays.
        store.launch(lambda: bench.poison(there))
        await store.record().wait_done()
        await trio.sleep(0.05)
        for part in PARTS:
            pages = bench.pages.rows(*part)[there].view(torch.uint8)
            assert bool((pages == 0xFF).all()), f"{part} was written after the load had settled"
    assert rig.settled == [transfer]
    assert held.closed == 1


async def test_pages_are_loaded_again_right_after_they_were_let_go(device: Device) -> None:
    bench = Bench(device)
    bad = torch.zeros((), dtype=torch.int64, device=device.name)
    there = list(range(8))
    async with loading(device, DeviceCopier(device, 1e-3)) as (rig, compute, _):
        for turn in range(12):
            first = list(range(turn % 8, turn % 8 + 8))
            transfer, here, _ = bench.load((first, there))
            submit(rig.mailbox, transfer)
            if turn % 3 == 1:
                await transfer.wait_recorded()
                transfer.revoke("given up")
                await transfer.wait_settled()
                continue
            reader = bench.reader(here, there, bad)
            readiness = Readiness(NUM_LAYERS, [(LeaseId(turn + 1), transfer)])
            scope = compute.scope()
            for layer in range(NUM_LAYERS):
                await readiness.settle(LayerId(layer), scope)
                scope.launch(reader.layer(layer))
            await scope.record().wait_done()
            await readiness.verify()
            await transfer.wait_settled()
    assert int(bad) == 0


async def test_a_refused_copy_fails_the_load_at_once_and_settles_it_later(device: Device) -> None:
    bench, held = Bench(device), Held()
    layer, name = PARTS[25]
    copier = DeviceCopier(device, 10e-3, (int(layer), name))
    async with loading(device, copier) as (rig, compute, _):
        transfer, _, _ = bench.load(held=held)
        submit(rig.mailbox, transfer)
        with pytest.raises(TransferFailed, match="the link is down"):
            await transfer.wait_done()
        assert not transfer.is_settled, "copies that were given before are still on their way"
        await transfer.wait_settled()
        states = {n: transfer.layer_completion(LayerId(n)).state for n in range(NUM_LAYERS)}
        assert FAILED in states.values()
        with pytest.raises(TransferFailed):
            await Readiness(NUM_LAYERS, [(LeaseId(1), transfer)]).settle(layer, compute.scope())
    assert held.closed == 1
    assert [one.state for one in rig.ended] == [FAILED]


async def test_closing_the_streams_ends_and_settles_what_was_under_way(device: Device) -> None:
    bench, held = Bench(device), Held()
    transfers: list[Transfer] = []
    with trio.CancelScope() as scope:
        async with loading(device, DeviceCopier(device, 5e-3)) as (rig, _, _):
            for _ in range(3):
                transfer, _, _ = bench.load(held=held)
                transfers.append(transfer)
                submit(rig.mailbox, transfer)
            await transfers[0].wait_recorded()
            scope.cancel()
    assert all(one.state in (DONE, REVOKED, FAILED) for one in transfers)
    assert all(one.is_settled for one in transfers)
    assert held.closed == 3


async def test_layers_that_share_copies_are_recorded_behind_the_last_of_them(
    device: Device,
) -> None:
    """A copy of layers 0 to 2 and one of layer 1 make all three true, and neither one alone."""
    number = TransferId(1)
    arrived = torch.zeros(2, dtype=torch.int64, device=device.name)

    def move(place: int, seconds: float) -> int:
        device.delay(seconds)
        device.enqueue(partial(arrived[place].fill_, 1))
        return 8

    def order(layers: tuple[int, ...], place: int, seconds: float) -> CopyOrder:
        parts = CopyParts(tuple(CopyPart(layer, "latent") for layer in layers))
        run, sizes = partial(move, place, seconds), [8 // len(layers)] * len(layers)
        return CopyOrder(number, "load", "host", parts, 8, run, lambda: sizes, list[int], list)

    orders = order((0, 2), 0, 0.0), order((1,), 1, 0.2)
    plan = TransferPlan(number, "load", orders, 3, 10.0, "test")
    seen = torch.zeros_like(arrived)
    async with loading(device, PlainCopier()) as (rig, compute, _):
        transfer = Transfer(plan)
        submit(rig.mailbox, transfer)
        readiness = Readiness(3, [(LeaseId(1), transfer)])
        await readiness.settle(LayerId(0), compute)
        compute.launch(lambda: device.enqueue(partial(seen.copy_, arrived, non_blocking=True)))
        await compute.record().wait_done()
        await readiness.verify()
    assert seen.tolist() == [1, 1]
