"""C08: bytes that went to, or came from, another place than the one they were meant for."""

from collections.abc import Callable

import pytest
import torch

from kvlease.pools.copies import index_tensor, span_orders
from kvlease.pools.storage import SpanStore, span_components, tail_components
from kvlease.protocols.ports import CompletionState
from kvlease.runtime.transfer import Transfer
from kvlease.units import TransferId
from tests.museum.rig import PAGE, SCHEMAS, Bench, is_same, tokens_of, v4_schema
from tests.runtime.rig import PlainCopier, plan


@pytest.mark.parametrize("ends", [("bf16", "fp8"), ("fp8", "bf16"), ("same", "bf16")])
def test_ends_of_another_row_width_move_nothing(ends: tuple[str, str]) -> None:
    """K113 sglang#37534 (F10): host rows of a nominal width, device rows packed with scales.

    A copy between stores of two formats fails its transfer and leaves the destination as it was.
    """
    source_schema, target_schema = (v4_schema(index_k=end) for end in ends)  # type: ignore[arg-type]
    source, target = SpanStore(source_schema, 4), SpanStore(target_schema, 4)
    source.poison_all()
    for layer, span in span_components(target_schema):
        target.rows(layer, span.name).zero_()
    pages = index_tensor([1, 2])
    orders = span_orders(TransferId(1), "load", (source, target), (pages, pages))
    copies = [order for order in orders if order.component == "index_k"]
    transfer = Transfer(plan(*copies, num_layers=4, empty=frozenset({0, 2})))
    for index in range(len(copies)):
        transfer.run_copy(index, PlainCopier())
    assert transfer.state is CompletionState.FAILED
    for layer, span in span_components(target_schema):
        if span.name == "index_k":
            assert not bool(target.rows(layer, span.name).view(torch.uint8).any())


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_two_components_share_a_byte(name: str) -> None:
    """K119 vllm#48412 (F10): in a cross-layer allocation the scales of all layers collided.

    Every component of every layer, in every store, is filled with a tag of its own; all read back.
    """
    bench = Bench(SCHEMAS[name])
    memory, places = bench.pool.memory, list[torch.Tensor]()
    for layer, span in span_components(bench.schema):
        places += [store.rows(layer, span.name) for store in (memory.spans, memory.host_spans)]
    for layer, tail in tail_components(bench.schema):
        places.append(memory.rings.ring(layer, tail.name))
        if tail.kept_rows:
            places += [s.kept(layer, tail.name) for s in (memory.tails, memory.host_tails)]
    for tag, place in enumerate(places):
        place.view(torch.uint8).fill_(tag)
    for tag, place in enumerate(places):
        assert bool((place.view(torch.uint8) == tag).all())
    spans = memory.spans.nbytes
    assert spans == bench.device_pages * bench.schema.page_nbytes


def _zero(bench: Bench, page: int) -> None:
    bench.pool.memory.spans.poison_pages(index_tensor([page]))


def _copy_out(bench: Bench, page: int) -> None:
    memory, pages = bench.pool.memory, index_tensor([page])
    stores = (memory.spans, memory.host_spans)
    for order in span_orders(TransferId(1), "store", stores, (pages, pages)):
        order.run()


def _copy_in(bench: Bench, page: int) -> None:
    memory, pages = bench.pool.memory, index_tensor([page])
    memory.host_spans.poison_all()
    stores = (memory.host_spans, memory.spans)
    for order in span_orders(TransferId(1), "load", stores, (pages, pages)):
        order.run()


def _poison_ring(bench: Bench, page: int) -> None:
    bench.pool.memory.rings.poison_slot(page % bench.slots)


def _poison_tail(bench: Bench, page: int) -> None:
    bench.pool.memory.tails.poison_slot(page % bench.device_tails)


WRITERS: dict[str, tuple[str, Callable[[Bench, int], None]]] = {
    "poison a page": ("device", _zero),
    "store a page": ("host", _copy_out),
    "load a page": ("device", _copy_in),
    "poison a ring": ("ring", _poison_ring),
    "poison a tail": ("tail", _poison_tail),
}


@pytest.mark.parametrize("page", [0, 7, 15])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["v4", "v4 fp8 index keys", "gqa"])
def test_a_write_stays_in_its_page(name: str, writer: str, page: int) -> None:
    """K119 vllm#48412 (F11): zeroing or copying one page damaged its neighbours.

    The first, a middle and the last page are written; nothing outside of the one place changes.
    """
    bench = Bench(SCHEMAS[name])
    if writer.endswith(("ring", "tail")) and not bench.schema.needs_tail:
        return
    memory = bench.pool.memory
    for layer, span in span_components(bench.schema):
        for store in (memory.spans, memory.host_spans):
            store.rows(layer, span.name).view(torch.uint8).random_(0, 250)
    for layer, tail in tail_components(bench.schema):
        memory.rings.ring(layer, tail.name).view(torch.uint8).random_(0, 250)
        if tail.kept_rows:
            memory.tails.kept(layer, tail.name).view(torch.uint8).random_(0, 250)
    before = bench.snapshot()
    where, write = WRITERS[writer]
    write(bench, page)
    after = bench.snapshot()
    touched = 0
    for key, old in before.items():
        changed = [i for i in range(len(old)) if not is_same(old[i], after[key][i])]
        if key[0] == where:
            assert len(changed) == 1, key
            touched += 1
        elif not (writer == "load a page" and key[0] == "host"):
            assert not changed, key
    assert touched


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_layer_of_a_plan_has_bytes_or_none_by_construction(name: str, count: int) -> None:
    """K109 sglang#37870 (F10): arrays sized by the number of cached layers, indexed by global id.

    Every layer with spans is planned, copied and waited for; the sum is the schema's to the byte.
    """
    bench = Bench(SCHEMAS[name])
    prompt = tokens_of(1, count * PAGE)
    bench.cache_on_host(prompt)
    held = bench.start(prompt)
    assert held.load is not None
    transfer = bench.carry(held.load)
    planned = {(order.layer, order.component) for order in held.load.copies}
    spans = {(layer, span.name) for layer, span in span_components(bench.schema)}
    kept = {(layer, t.name) for layer, t in tail_components(bench.schema) if t.kept_rows}
    assert planned == spans | kept
    assert held.load.nbytes == count * bench.schema.page_nbytes + bench.schema.tail_nbytes
    for layer in range(bench.schema.num_layers):
        assert transfer.layer_completion(bench.schema.layers[layer].id).state.value == "planned"
    bench.run_all(transfer)
    assert transfer.state is CompletionState.DONE
