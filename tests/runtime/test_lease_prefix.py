"""Leases for readers beside the scheduler: the library's way to cached rows."""

import threading

import pytest
import torch
import trio

from kvlease.errors import TransferFailed
from kvlease.kernels.views import RowIndex, read_rows
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.ports import CopyOrder
from kvlease.protocols.schema import SparseLayer
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.streams import InlineStream, open_cpu_stream
from tests.runtime.toy import PAGE, FaultyCopier, Hold, answer, prompt_of, toy_config, toy_model

PARAMS = SamplingParams(max_tokens=2)
PROMPT = prompt_of(1, 4 * PAGE + 3)


async def latent_rows(engine: Engine, prompt: list[int]) -> list[torch.Tensor]:
    """Read all cached latent rows of the sparse layers through a lease."""
    stream = InlineStream()
    found = []
    with engine.lease_prefix(prompt) as lease:
        count = lease.num_pages * PAGE // 4
        for layer in engine.model.schema.layers:
            match layer:
                case SparseLayer():
                    view = await lease[layer].resolve(stream)
                    rows = torch.arange(count)
                    zeros = torch.zeros_like(rows)
                    found.append(read_rows(view.latent, zeros, rows, RowIndex()))
                case _:
                    pass
    return found


async def test_cached_rows_can_be_read_and_pin_their_pages() -> None:
    """A lease keeps its pages through any pressure and shows finite rows only."""
    async with open_engine(toy_model(), toy_config(device_pages=24, host_pages=0)) as engine:
        await answer(engine, PROMPT, PARAMS)
        before = await latent_rows(engine, PROMPT)
        assert before[0].isfinite().all()
        assert len(before[0]) == 4 * PAGE // 4
        with engine.lease_prefix(PROMPT) as lease:
            for seed in range(10, 16):
                await answer(engine, prompt_of(seed, 6 * PAGE), PARAMS)
            assert lease.num_pages == 4
            assert torch.equal((await latent_rows(engine, PROMPT))[0], before[0])
        for seed in range(10, 18):
            await answer(engine, prompt_of(seed, 6 * PAGE), PARAMS)
        with engine.lease_prefix(PROMPT) as lease:
            assert lease.num_pages == 0
        assert engine.statistics().ledger_ok


async def test_a_reader_beside_waits_for_a_load_in_flight() -> None:
    """A second reader of loading pages is gated by the same transfer (C01), layer by layer."""
    hold = Hold(lambda o: (o.kind, o.component) == ("load", "latent"))
    copied: list[str] = []

    def fault(order: CopyOrder) -> int | None:
        hold(order)
        copied.append(order.kind)
        return None

    ports = EnginePorts(copier=FaultyCopier(fault))
    async with (
        open_engine(toy_model(), toy_config(device_pages=24), ports=ports) as engine,
        open_cpu_stream("reader") as stream,
        trio.open_nursery() as nursery,
    ):
        await answer(engine, PROMPT, PARAMS)
        for seed in range(100, 104):
            await answer(engine, prompt_of(seed, 6 * PAGE), PARAMS)
        nursery.start_soon(answer, engine, PROMPT, PARAMS)
        assert await trio.to_thread.run_sync(hold.reached.wait, 10)
        layer = engine.model.schema.layers[1]
        assert isinstance(layer, SparseLayer)
        scope = stream.scope()
        finite: list[bool] = []
        with engine.lease_prefix(PROMPT) as lease:
            assert lease.num_pages == 4
            view = await lease[layer].resolve(scope)

            def read() -> None:
                rows = torch.arange(4 * PAGE // 4)
                found = read_rows(view.latent, torch.zeros_like(rows), rows, RowIndex())
                finite.append(bool(found.isfinite().all()))

            scope.launch(read)
            await trio.sleep(0.05)
            assert not finite, "the reader's stream ran ahead of the load"
            hold.go.set()
            with trio.fail_after(10):
                await scope.record().wait_done()
        assert finite == [True]


async def test_a_reader_hears_that_what_it_was_ordered_behind_has_failed() -> None:
    """What a device computes behind a copy that fails looks like any result: `verify` tells."""
    hold = Hold(lambda o: (o.kind, o.component) == ("load", "latent"))

    def fault(order: CopyOrder) -> int | None:
        hold(order)
        if (order.kind, order.component) == ("load", "latent"):
            raise OSError("the link broke")
        return None

    ports = EnginePorts(copier=FaultyCopier(fault))
    async with (
        open_engine(toy_model(), toy_config(device_pages=24), ports=ports) as engine,
        open_cpu_stream("reader") as stream,
        trio.open_nursery() as nursery,
    ):
        await answer(engine, PROMPT, PARAMS)
        for seed in range(100, 104):
            await answer(engine, prompt_of(seed, 6 * PAGE), PARAMS)
        nursery.start_soon(answer, engine, PROMPT, PARAMS)
        assert await trio.to_thread.run_sync(hold.reached.wait, 10)
        layer = engine.model.schema.layers[1]
        assert isinstance(layer, SparseLayer)
        with engine.lease_prefix(PROMPT) as lease:
            await lease[layer].resolve(stream.scope())
            hold.go.set()
            with trio.fail_after(10), pytest.raises(TransferFailed, match="the link broke"):
                await lease.verify()


async def test_pages_stay_until_the_streams_that_read_them_have_come_so_far() -> None:
    """Leaving the block is not the end of the reading: what was launched may still run (R6)."""
    go, running = threading.Event(), threading.Event()

    def slow_read() -> None:
        running.set()
        assert go.wait(10)

    async with (
        open_engine(toy_model(), toy_config(device_pages=24, host_pages=0)) as engine,
        open_cpu_stream("reader") as stream,
        open_cpu_stream("other") as other,
    ):
        await answer(engine, PROMPT, PARAMS)
        layer = engine.model.schema.layers[1]
        assert isinstance(layer, SparseLayer)
        with engine.lease_prefix(PROMPT) as lease:
            moved = lease.move()
        await moved[layer].resolve(stream)
        with moved:
            await moved[layer].resolve(other)
            stream.launch(slow_read)
        assert await trio.to_thread.run_sync(running.wait, 10)
        assert engine.statistics().ledger_ok
        await other.record().wait_done()
        engine._core.pool.flush()
        assert engine._core.pool.ledgers()["device pages"].free < 24, "a reader is still at work"
        go.set()
        await stream.record().wait_done()
        engine._core.pool.reclaim()
        assert engine._core.pool.ledgers()["device pages"].free == 24
        assert engine.statistics().ledger_ok
