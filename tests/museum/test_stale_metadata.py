"""C09: numbers about memory that were true when they were written down, and used later."""

from collections.abc import Callable

import pytest
import torch

from kvlease.errors import KVLeaseError, LeaseMoved, StaleEpoch, UsageError
from kvlease.kernels.views import RowIndex, read_pages
from kvlease.pools.step_views import StepTables
from kvlease.protocols.schema import IndexedLayer
from tests.museum.rig import MLA, PAGE, ROOT, SCHEMAS, Bench, tokens_of

PROMPT = tokens_of(1, 4 * PAGE)


@pytest.mark.parametrize("order", [(4, 16, 1), (1, 4, 16), (16, 16, 4)])
def test_the_floor_of_a_step_is_that_of_each_ratio(order: tuple[int, ...]) -> None:
    """K131 TensorRT-LLM#16219: tokens per block were kept from another manager; 4 times too far.

    One step serves layers of several ratios: each gets the first writable row in its own rows.
    """
    bench = Bench(MLA)
    bench.cache(PROMPT)
    held = bench.start(PROMPT + tokens_of(2, PAGE))
    tables = StepTables([held.lease])
    for rows_per_page in order:
        assert tables.floor(rows_per_page).tolist() == [4 * rows_per_page]


def test_a_step_reads_the_table_that_it_was_given() -> None:
    """K133 sglang#18746 (F12): the next step's preparation overwrote a row the forward still read.

    A ends and its row goes to B, while A's step is held: A's step sees A's pages and slot.
    """
    bench = Bench(MLA)
    bench.cache(PROMPT)
    a = bench.start(PROMPT)
    pages, slot = list(a.lease.pages), a.lease.slot
    tables = StepTables([a.lease])
    first = tables.table.clone()
    a.lease.pages[:] = type(a.lease.pages)("i", [9, 8, 7, 6])
    a.lease.slot, a.lease.sealed = 5, 0
    assert torch.equal(tables.table, first)
    assert tables.table.tolist() == [pages]
    assert tables.slots.tolist() == [slot]
    assert tables.floor(PAGE).tolist() == [4 * PAGE]


@pytest.mark.parametrize("name", ["v4", "mla with indexer"])
def test_a_transfer_keeps_the_numbers_it_was_planned_with(name: str) -> None:
    """K135 LMCache#2916 (F12): page numbers were copied on one stream and used on another.

    Two transfers are planned; the arrays they were planned from are overwritten before any copy.
    """
    bench = Bench(SCHEMAS[name], device_pages=24)
    prompts = [PROMPT, tokens_of(2, 4 * PAGE)]
    for prompt in prompts:
        bench.cache_on_host(prompt)
    held = [bench.start(prompt) for prompt in prompts]
    loads = [one.load for one in held]
    for one, load in zip(held, loads, strict=True):
        assert load is not None
        tables = list(one.lease.pages)
        for numbers in (load.source, load.destination):
            for index in range(len(numbers)):
                numbers[index] = 0
        assert list(one.lease.pages) == tables
    for load in loads:
        bench.bring(load)
    for one, prompt in zip(held, prompts, strict=True):
        assert not [*bench.wrong(one, prompt, 4)]


def _after_close(bench: Bench) -> Callable[[], object]:
    layer = MLA.layers[2]
    assert isinstance(layer, IndexedLayer)
    with bench.pool.lease_prefix(ROOT, PROMPT) as lease:
        view = lease[layer].resolve_nowait()
    one = torch.zeros(1, 1, dtype=torch.int64)
    return lambda: read_pages(view.index_k, one, PAGE, RowIndex())


def _after_move(bench: Bench) -> Callable[[], object]:
    layer = MLA.layers[2]
    assert isinstance(layer, IndexedLayer)
    lease = bench.pool.lease_prefix(ROOT, PROMPT)
    right = lease[layer]
    lease.move().close()
    return right.resolve_nowait


def _layer_of_a_closed_lease(bench: Bench) -> Callable[[], object]:
    layer = MLA.layers[0]
    assert isinstance(layer, IndexedLayer)
    lease = bench.pool.lease_prefix(ROOT, PROMPT)
    lease.close()
    return lambda: lease[layer]


def _cursor(bench: Bench) -> Callable[[], object]:
    match = bench.pool.match(ROOT, PROMPT, 99)
    bench.pool.drop(match)
    return lambda: bench.pool.index.path_pages(match.cursor)


def _page(bench: Bench) -> Callable[[], object]:
    book = bench.pool.memory.device
    match = bench.pool.match(ROOT, PROMPT, 99)
    page = match.pages[0]
    epoch = book.epochs[page]
    bench.pool.drop(match)

    def use() -> None:
        if not book.is_current(page, epoch):
            raise StaleEpoch("refused")

    return use


REFERENCES = {
    "rows of a closed lease": (_after_close, StaleEpoch),
    "a layer of a moved lease": (_after_move, LeaseMoved),
    "a closed lease": (_layer_of_a_closed_lease, LeaseMoved),
    "a released cursor": (_cursor, UsageError),
    "a page's number": (_page, StaleEpoch),
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_reference_kept_past_its_right_is_refused(kind: str) -> None:
    """K133 sglang#18746 (F09): whoever keeps a number reads the next owner's rows.

    Each kind of reference is kept, the pages get another owner with other bytes, and it is used.
    """
    make, error = REFERENCES[kind]
    bench = Bench(MLA, device_pages=4)
    bench.cache(PROMPT)
    use = make(bench)
    bench.pool.reclaim()
    bench.cache(tokens_of(2, 4 * PAGE))
    assert bench.hit(PROMPT) == (0, 0), "the pages have another owner"
    assert issubclass(error, KVLeaseError)
    with pytest.raises(error):
        use()
