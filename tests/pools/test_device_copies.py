"""Copies between a device's memory and pinned memory: the same rows as on the CPU, whatever way."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlease.pools import pinned
from kvlease.pools.copies import (
    _copy_runs,
    index_tensor,
    keep_tails,
    mover,
    resume_orders,
    span_orders,
    tail_orders,
)
from kvlease.pools.pinned import pinned_bytes
from kvlease.pools.storage import RingStore, SpanStore, TailStore, span_components, tail_components
from kvlease.protocols.geometries import V4Geometry, deepseek_v4_schema
from kvlease.units import TransferId

SCHEMA = deepseek_v4_schema(
    V4Geometry(("sliding", "sparse", "heavy"), 16, 8, 8, window=24, heavy_ratio=16), 16, "float32"
)
ID = TransferId(1)

numbers = st.lists(st.integers(0, 11), unique=True, min_size=1, max_size=12)


@pytest.fixture
def gpu() -> str:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    return "cuda"


@given(numbers, st.randoms(use_true_random=False))
def test_pieces_of_neighbours_are_the_same_as_rows_one_by_one(
    here: list[int], rng: random.Random
) -> None:
    there = rng.sample(range(12), len(here))
    source = torch.arange(12 * 6, dtype=torch.float32).view(12, 2, 3)
    one, other = torch.zeros_like(source), torch.zeros_like(source)
    ends = index_tensor(here), index_tensor(there)
    moved = mover(source, one)(source, ends[0], one, ends[1])
    assert _copy_runs(source, ends[0], other, ends[1]) == moved == len(here) * 24
    assert torch.equal(one, other)


def _filled(store: SpanStore | RingStore | TailStore, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(store, SpanStore):
        parts = [store.rows(layer, span.name) for layer, span in span_components(SCHEMA)]
    elif isinstance(store, RingStore):
        parts = [store.ring(layer, tail.name) for layer, tail in tail_components(SCHEMA)]
    else:
        kept = [(layer, tail.name) for layer, tail in tail_components(SCHEMA) if tail.kept_rows]
        parts = [store.kept(*part) for part in kept]
    for rows in parts:
        rows.copy_(torch.randn(rows.shape, generator=generator))


@pytest.mark.gpu
def test_pages_survive_the_way_to_pinned_memory_and_back(gpu: str) -> None:
    first, second = SpanStore(SCHEMA, 12, gpu), SpanStore(SCHEMA, 12, gpu)
    host = SpanStore(SCHEMA, 12, pinned=True)
    _filled(first, 1)
    second.poison_all()
    here, there, back = ([3, 4, 5, 1, 9], [0, 1, 7, 8, 2], [11, 0, 1, 2, 5])
    way = index_tensor(here), index_tensor(there)
    for order in span_orders(ID, "store", (first, host), way):
        assert order.run() == order.nbytes
    torch.cuda.synchronize()  # a load begins when the store of its pages has ended
    for order in span_orders(ID, "load", (host, second), (way[1], index_tensor(back))):
        assert order.run() == order.nbytes
    torch.cuda.synchronize()
    others = [number for number in range(12) if number not in back]
    for layer, span in span_components(SCHEMA):
        rows, came = first.rows(layer, span.name), second.rows(layer, span.name)
        assert torch.equal(rows[here], came[back])
        assert bool((came[others].view(torch.uint8) == 0xFF).all())


@pytest.mark.gpu
@pytest.mark.parametrize("boundary", [16, 32, 48, 80])
def test_tails_are_kept_and_resumed_as_on_the_cpu(gpu: str, boundary: int) -> None:
    found: list[list[torch.Tensor]] = []
    for where in ("cpu", gpu):
        pinned = where != "cpu"
        rings, tails = RingStore(SCHEMA, 3, where), TailStore(SCHEMA, 4, where)
        host, resumed = TailStore(SCHEMA, 4, pinned=pinned), RingStore(SCHEMA, 3, where)
        _filled(rings, 1)
        _filled(tails, 2)
        _filled(host, 3)
        _filled(resumed, 4)
        ends = index_tensor([2, 0]), index_tensor([1, 3]), index_tensor([boundary, 16])
        keep_tails(SCHEMA, (rings, tails), *ends)
        moves = index_tensor([1, 3]), index_tensor([0, 2])
        for order in tail_orders(ID, "store", (tails, host), moves):
            assert order.run() == order.nbytes
        if pinned:
            torch.cuda.synchronize()  # a load begins when the store of its tail has ended
        orders = [*resume_orders(ID, "load", ("host", host, 0), (resumed, 1), boundary)]
        orders += resume_orders(ID, "load", ("device", tails, 3), (resumed, 0), 16)
        for order in orders:
            assert order.run() == order.nbytes
        if pinned:
            torch.cuda.synchronize()
        found.append(
            [resumed.ring(layer, tail.name).cpu() for layer, tail in tail_components(SCHEMA)]
        )
    names = [(layer, tail.name) for layer, tail in tail_components(SCHEMA)]
    for name, one, other in zip(names, *found, strict=True):
        rows = (one != other).any(-1).nonzero().tolist()
        assert not rows, f"{name}: [slot, row] {rows} differ"


@pytest.mark.gpu
def test_pinned_memory_is_pinned_and_let_go(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unpins: list[weakref.finalize[..., object]] = []

    def noted(of: object, call: Callable[[int], object], address: int) -> object:
        unpins.append(weakref.finalize(of, call, address))
        return unpins[-1]

    monkeypatch.setattr(pinned, "finalize", noted)
    memory = pinned_bytes(5_000_000)
    assert memory.is_pinned()
    assert not bool(memory.any())
    on_device = torch.ones_like(memory, device=gpu)
    memory.copy_(on_device, non_blocking=True)
    torch.cuda.synchronize()
    assert bool(memory.all())
    (unpin,) = unpins
    assert unpin.alive
    del memory
    assert not unpin.alive, "it is still registered"
