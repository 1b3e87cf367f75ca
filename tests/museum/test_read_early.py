"""C01: rows that were read before their bytes had come."""

import random

import pytest
import torch
import trio
import trio.testing

from kvlease.errors import TransferFailed
from kvlease.kernels.views import RowIndex, read_pages
from kvlease.pools.held import Held
from kvlease.pools.storage import span_components
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.ownership import Lease, Shared
from kvlease.protocols.ports import CompletionState, CopyOrder, Stream
from kvlease.protocols.schema import IndexedLayer
from kvlease.protocols.views import PagedRows
from kvlease.runtime.engine import open_engine
from kvlease.runtime.streams import InlineStream
from kvlease.runtime.transfer import Transfer
from kvlease.units import LayerId
from tests.museum.rig import MLA, PAGE, ROOT, Bench, is_same, own_bytes, tokens_of
from tests.runtime.rig import PlainCopier
from tests.runtime.toy import COLD, answer, prompt_of, same, toy_config, toy_model

PAGES = 6
PROMPT = tokens_of(1, PAGES * PAGE)
PARTS = [(layer, span.name) for layer, span in span_components(MLA)]


def loading() -> tuple[Bench, Held, Transfer]:
    """Return a prompt of six pages on its way from the host, with nothing copied yet."""
    bench = Bench(MLA)
    bench.cache_on_host(PROMPT)
    held = bench.start(PROMPT)
    assert held.load is not None
    return bench, held, bench.carry(held.load)


def looks_right(layer: int, rows: PagedRows) -> bool:
    """Open all pages of one component, as a kernel does, and hold them against the truth."""
    got = read_pages(rows, torch.zeros(1, 1, dtype=torch.int64), PAGES * PAGE, RowIndex())[0]
    pages = got.view(PAGES, PAGE, *got.shape[1:])
    return all(
        is_same(each, own_bytes(layer, rows.component, PROMPT[: 4 * (page + 1) * PAGE], each))
        for page, each in enumerate(pages)
    )


class Readers:
    """A reader of each layer, and one of the whole object; ``seen`` says who has read what."""

    def __init__(self, lease: Lease[Shared], transfer: Transfer) -> None:
        self.lease = lease
        self.transfer = transfer
        self.seen: dict[int, bool] = {}

    async def read(self, layer: IndexedLayer, stream: Stream) -> None:
        view = await self.lease[layer].resolve(stream)

        def look() -> None:
            right = looks_right(layer.id, view.latent) and looks_right(layer.id, view.index_k)
            self.seen[layer.id] = right

        stream.launch(look)

    async def read_whole(self) -> None:
        await self.transfer.wait_done()
        self.seen[-1] = True

    def start(self, nursery: trio.Nursery) -> None:
        for layer in MLA.layers:
            assert isinstance(layer, IndexedLayer)
            nursery.start_soon(self.read, layer, InlineStream())
        nursery.start_soon(self.read_whole)


@pytest.mark.parametrize(("layer", "component"), PARTS)
async def test_index_keys_that_come_late_hold_exactly_their_layer(
    layer: int, component: str
) -> None:
    """K001 sglang#22811 (F01): the main pool's accessors waited, the indexer's did not.

    Each component of each layer is held in turn; all is recorded, so that readers wait on streams.
    """
    bench, _, transfer = loading()
    held = next(
        index
        for index, order in enumerate(transfer.plan.copies)
        if (order.layer, order.component) == (layer, component)
    )
    with bench.pool.lease_prefix(ROOT, PROMPT) as lease:
        readers = Readers(lease, transfer)
        async with trio.open_nursery() as nursery:
            readers.start(nursery)
            for number in range(4):
                transfer.record_layers([number])
            bench.run_all(transfer, skip=[held])
            await trio.testing.wait_all_tasks_blocked()
            assert readers.seen == {each: True for each in range(4) if each != layer}
            bench.run_all(transfer, skip=set(range(8)) - {held})
        assert readers.seen == dict.fromkeys(range(-1, 4), True)


@pytest.mark.parametrize("held", range(4))
async def test_a_reader_of_the_whole_waits_for_the_last_layer(held: int) -> None:
    """K011 sglang#36743 (F01): a whole-slot copy took a slot whose layers were still coming."""
    bench, _, transfer = loading()
    with bench.pool.lease_prefix(ROOT, PROMPT) as lease:
        readers = Readers(lease, transfer)
        async with trio.open_nursery() as nursery:
            readers.start(nursery)
            bench.run_all(transfer, skip=[2 * held, 2 * held + 1])
            await trio.testing.wait_all_tasks_blocked()
            assert -1 not in readers.seen
            assert set(readers.seen) == set(range(4)) - {held}
            bench.run_all(transfer, skip=set(range(8)) - {2 * held, 2 * held + 1})
    assert readers.seen == dict.fromkeys(range(-1, 4), True)


async def test_a_forward_that_is_quicker_than_the_loader_waits_for_each_record() -> None:
    """K005 sglang#38472 (F02): with a slow loader thread the forward ran past waits not recorded.

    Nothing is recorded at first; then layer after layer is, and copied. No reader passes early.
    """
    bench, _, transfer = loading()
    with bench.pool.lease_prefix(ROOT, PROMPT) as lease:
        readers = Readers(lease, transfer)
        async with trio.open_nursery() as nursery:
            readers.start(nursery)
            await trio.testing.wait_all_tasks_blocked()
            assert readers.seen == {}
            for layer in range(4):
                transfer.record_layers([layer])
                await trio.testing.wait_all_tasks_blocked()
                assert len(readers.seen) == layer
                bench.run_all(transfer, skip=set(range(8)) - {2 * layer, 2 * layer + 1})
                await trio.testing.wait_all_tasks_blocked()
                assert set(readers.seen) >= set(range(layer + 1))
    assert all(readers.seen.values())


@pytest.mark.parametrize("recorded", [0, 2, 4])
async def test_a_loader_that_dies_ends_every_wait(recorded: int) -> None:
    """K005 sglang#38472 (F14): whoever waits for a loader that is gone must hear of it."""
    bench, _, transfer = loading()
    failed: list[int] = []
    with bench.pool.lease_prefix(ROOT, PROMPT) as lease:

        async def read(layer: IndexedLayer) -> None:
            stream = InlineStream().scope()
            try:
                await lease[layer].resolve(stream)
                await stream.record().wait_done()
            except TransferFailed:
                failed.append(layer.id)

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                for layer in MLA.layers:
                    assert isinstance(layer, IndexedLayer)
                    nursery.start_soon(read, layer)
                for number in range(recorded):
                    transfer.record_layers([number])
                await trio.testing.wait_all_tasks_blocked()
                transfer.revoke("the loader died")
    assert sorted(failed) == [0, 1, 2, 3]


@pytest.mark.parametrize("end", ["failed", "late", "revoked", "done", "no pages", "no slot"])
def test_a_reservation_comes_back_on_every_way_out(end: str) -> None:
    """K003 sglang#8901 (F16): a missing page left the function without returning its slot."""
    bench = Bench(device_pages=8, slots=2)
    bench.cache_on_host(PROMPT)
    if end == "no pages":
        wall = bench.start(tokens_of(2, 3 * PAGE))
        assert bench.begin(PROMPT) is None
        bench.close(wall)
    elif end == "no slot":
        walls = [bench.start(tokens_of(seed, PAGE)) for seed in (2, 3)]
        assert bench.begin(PROMPT) is None
        for wall in walls:
            bench.close(wall)
    else:
        held = bench.start(PROMPT + tokens_of(2, PAGE))
        assert held.load is not None
        if end == "done":
            bench.bring(held.load)
        else:
            bench.lose(held.load, end)
        bench.close(held)
    bench.check()
    memory = bench.pool.memory
    assert memory.slots.ledger().free == 2
    assert memory.device.ledger().reserved == memory.device.ledger().held == 0
    bench.pool.flush()
    bench.pool.reclaim()
    assert [book.ledger().free for book in memory.books] == [book.total for book in memory.books]


def test_progress_is_told_by_the_copy_that_has_returned() -> None:
    """K003 sglang#8901 (F08): progress was raised before the copy into the page was made."""
    bench, _, transfer = loading()
    moved = 0

    class Watching:
        def copy(self, order: CopyOrder) -> int:
            assert transfer.bytes_done == moved
            nbytes = order.run()
            assert transfer.bytes_done == moved, "told before the copy had returned"
            assert not transfer.layer_completion(LayerId(order.layer)).state.is_final
            return nbytes

    for index, order in enumerate(transfer.plan.copies):
        transfer.run_copy(index, Watching())
        moved += order.nbytes
        assert transfer.bytes_done == moved
    assert transfer.state is CompletionState.DONE
    bench.check()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("forced", [False, True])
async def test_a_wait_is_left_out_only_where_it_is_over(seed: int, *, forced: bool) -> None:
    """K029 ik_llama.cpp#2083 (F02): an optimisation left out waits, and one backend read too early.

    Several streams resolve the same layers of one lease while copies end in random order. What is
    only recorded is ready for the stream that was ordered behind it, and for no other.
    """
    rng = random.Random(seed)
    bench, _, transfer = loading()
    for layer in range(4):
        transfer.record_layers([layer])
    todo: list[int] = list(range(8))
    rng.shuffle(todo)
    right: list[bool] = []
    streams = [InlineStream(f"stream {number}") for number in range(3)]
    with bench.pool.lease_prefix(ROOT, PROMPT) as lease:
        lease_layers = [layer for layer in MLA.layers if isinstance(layer, IndexedLayer)]
        rights = [lease[layer] for layer in lease_layers]
        for turn in range(24):
            layer = rng.randrange(4)
            stream = streams[turn % 3]
            if forced:
                await transfer.layer_completion(lease_layers[layer].id).wait_recorded()
                stream.wait(transfer.layer_completion(lease_layers[layer].id))
            view = await rights[layer].resolve(stream)
            stream.launch(
                lambda layer=layer, view=view: right.append(  # type: ignore[misc]
                    looks_right(layer, view.latent) and looks_right(layer, view.index_k)
                )
            )
            if todo and rng.random() < 0.5:
                transfer.run_copy(todo.pop(), PlainCopier())
        while todo:
            transfer.run_copy(todo.pop(), PlainCopier())
    assert right == [True] * 24


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 33])
async def test_leftovers_of_another_state_in_a_reused_page_do_not_count(length: int) -> None:
    """K009 vllm#35219: a page of recurrent state was reused; its bits read as NaN for ever after.

    All memory reads as NaN but what this request writes: the valid length decides, not the page's.
    """
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    prompt = prompt_of(1, length)
    async with open_engine(toy_model(), toy_config(prefix_cache=False, device_pages=8)) as engine:
        memory = engine._core.pool.memory
        for _ in range(2):
            memory.spans.poison_all()
            for slot in range(memory.sizes.slots):
                memory.rings.poison_slot(slot)
            assert same(await answer(engine, prompt, params), await COLD.answer(prompt, params))
