"""A carrier's orders move the same bytes as plain copies, over an engine's own memory."""

from collections.abc import Sequence
from itertools import pairwise
from typing import get_args

import pytest
import torch
from torch import Tensor

from kvlease.kernels.gpu import carrier
from kvlease.pools.carriage import Resumed
from kvlease.pools.copies import index_tensor, keep_tails
from kvlease.pools.memory import Memory, PoolSizes
from kvlease.pools.orders import Lifted, Orders
from kvlease.pools.prefix_node import CacheTier
from kvlease.pools.storage import RingStore, SpanStore, TailStore, span_components, tail_components
from kvlease.protocols import host_layout
from kvlease.protocols.config import Device
from kvlease.protocols.geometries import V4Geometry, deepseek_v4_schema, gqa_schema
from kvlease.protocols.ports import CopyOrder
from kvlease.protocols.schema import Schema
from kvlease.runtime.cuda_copies import give_carrier
from kvlease.runtime.event_log import EventLog
from kvlease.units import LayerId, TransferId

pytestmark = pytest.mark.usefixtures("streams")

ID = TransferId(1)
SIZES = PoolSizes(9, 9, 4, 4, 3)
Part = tuple[LayerId, str]


GEOMETRY = V4Geometry(
    ("sliding", "sparse", "heavy", "sparse"), 96, 32, 36, window=24, heavy_ratio=16
)
SCHEMAS = {
    "fp8": deepseek_v4_schema(GEOMETRY, 16, "float32", "fp8", "fp8"),
    "plain": deepseek_v4_schema(GEOMETRY, 16, "float32", "bf16", "same"),
}


def made_memory(schema: Schema, device: str, sizes: PoolSizes) -> Memory:
    """Memory with a carrier; on the CPU its stores get the layout that a device's have."""
    where: Device = "cuda" if device == "cuda" else "cpu"
    memory = Memory(schema, sizes, EventLog(level="off"), poison=False, where=where)
    if where == "cpu":
        memory.host_spans = SpanStore(schema, sizes.host_pages, in_records=True)
        memory.tails = TailStore(schema, sizes.device_tails, in_records=True)
        memory.host_tails = TailStore(schema, sizes.host_tails, in_records=True)
    give_carrier(memory)
    return memory


@pytest.fixture(params=["fp8", "plain", "fp8-together", "plain-small"])
def memory(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setattr(host_layout, "FIRST_GROUP_NBYTES", 1)
    monkeypatch.setattr(host_layout, "GROUP_NBYTES", 1)
    name, _, how = str(request.param).partition("-")
    if how != "together":
        monkeypatch.setattr(host_layout, "MOVE_NBYTES", 1)
    if how == "small":  # a slot holds a group, not a record
        monkeypatch.setattr(carrier, "MOVE_NBYTES", 0)
        monkeypatch.setattr(carrier, "SLOT_NBYTES", 1)
    made = made_memory(SCHEMAS[name], device, SIZES)
    assert made.host_spans.records is not None
    assert len(made.host_spans.records.groups) == 3
    return made


def spans(store: SpanStore, schema: Schema) -> dict[Part, Tensor]:
    return {(n, span.name): store.rows(n, span.name) for n, span in span_components(schema)}


def kept(store: TailStore, schema: Schema) -> dict[Part, Tensor]:
    return {
        (n, tail.name): store.kept(n, tail.name)
        for n, tail in tail_components(schema)
        if tail.kept_rows
    }


def rings(store: RingStore, schema: Schema) -> dict[Part, Tensor]:
    return {(n, tail.name): store.ring(n, tail.name) for n, tail in tail_components(schema)}


def scramble(parts: dict[Part, Tensor]) -> dict[Part, Tensor]:
    """Fill with numbers; return a copy in CPU memory."""
    for rows in parts.values():
        rows.copy_(torch.randint(0, 100, rows.shape))
    return copies(parts)


def copies(parts: dict[Part, Tensor]) -> dict[Part, Tensor]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {part: rows.cpu().clone() for part, rows in parts.items()}


def run(orders: Sequence[CopyOrder]) -> None:
    assert orders
    for order in orders:
        assert order.run() == order.nbytes


def same(one: dict[Part, Tensor], other: dict[Part, Tensor]) -> None:
    assert one.keys() == other.keys()
    for part, rows in one.items():
        assert torch.equal(rows, other[part]), part


@pytest.mark.parametrize("pages", [[4], [8, 2, 3, 0], [1, 2, 3, 4, 5, 6, 7]])
def test_pages_go_to_the_host_and_come_back_elsewhere(memory: Memory, pages: list[int]) -> None:
    schema = memory.schema
    on_host, on_device = spans(memory.host_spans, schema), spans(memory.spans, schema)
    host, device = scramble(on_host), scramble(on_device)
    places, back = [5, 6, 0, 2, 8, 7, 1][: len(pages)], [3, 1, 4, 0, 2, 6, 8][: len(pages)]
    orders = Orders(memory)
    run(orders.store(ID, (pages, places), ((), ())))
    for part, rows in host.items():
        rows[places] = device[part][pages]
    same(copies(on_host), host)
    same(copies(on_device), device)
    run(orders.load(ID, (places, back), None))
    for part, rows in device.items():
        rows[back] = host[part][places]
    same(copies(on_device), device)
    same(copies(on_host), host)


@pytest.mark.parametrize("tier", [*get_args(CacheTier)])
@pytest.mark.parametrize("boundary", [16, 80])
def test_tails_are_kept_stored_lifted_and_resumed(
    memory: Memory, tier: CacheTier, boundary: int
) -> None:
    schema = memory.schema
    plain = RingStore(schema, SIZES.slots), TailStore(schema, SIZES.device_tails)
    on_device, running = kept(memory.tails, schema), rings(memory.rings, schema)
    scramble(on_device)
    for part, rows in scramble(running).items():
        plain[0].ring(*part).copy_(rows)
    before = copies(on_device)
    slots, tails, boundaries = (index_tensor(n) for n in ([2, 0], [1, 3], [boundary, 32]))
    assert memory.carrier is not None
    memory.carrier.keep(slots, tails, boundaries)
    keep_tails(schema, plain, slots, tails, boundaries)
    for part, rows in before.items():
        rows[[1, 3]] = plain[1].kept(*part)[[1, 3]]
    same(copies(on_device), before)

    on_host = kept(memory.host_tails, schema)
    host = scramble(on_host)
    orders, none = Orders(memory), ((), ())
    run(orders.store(ID, none, ([1], [2])))
    for part, rows in host.items():
        rows[2] = before[part][1]
    same(copies(on_host), host)
    run(orders.load(ID, none, Lifted(2, 0)))
    for part, rows in before.items():
        rows[0] = host[part][2]
    same(copies(on_device), before)

    after = scramble(running)
    tail = 0 if tier == "device" else 2
    run(orders.load(ID, none, Resumed(tier, tail, 1, boundary)))
    for (layer, name), rows in after.items():
        found = next(t for n, t in tail_components(schema) if (n, t.name) == (layer, name))
        positions = torch.arange(max(0, boundary - found.kept_rows), boundary)
        old = plain[0].ring(layer, name)[2]
        at = positions % found.ring_rows
        rows[1, at, : found.kept_width] = old[at, : found.kept_width]
    same(copies(running), after)


@pytest.mark.parametrize("where", ["rings", "tails"])
def test_a_load_of_pages_and_a_tail_has_one_order_for_each_group(
    memory: Memory, where: str
) -> None:
    schema = memory.schema
    tail = Resumed("device", 2, 1, 32) if where == "rings" else Lifted(1, 0)
    orders = Orders(memory).load(ID, ([3, 1], [0, 5]), tail)
    num_groups = 3 if host_layout.MOVE_NBYTES == 1 else 1
    assert len({order.layer for order in orders}) == num_groups
    parts = [(part.layer, part.component) for order in orders for part in order.parts]
    assert len(parts) == len(set(parts))
    assert set(parts) == schema.parts(spans=True, tails=True)
    assert [layer for layer, _ in parts] == sorted(layer for layer, _ in parts)
    for one, other in pairwise(orders):
        assert one.last_layer < other.layer
    on_host = scramble(spans(memory.host_spans, schema))
    run(orders)
    for part, rows in copies(spans(memory.spans, schema)).items():
        assert torch.equal(rows[[0, 5]], on_host[part][[3, 1]])


def test_loads_that_are_queued_in_turns_keep_their_pages_apart(memory: Memory) -> None:
    """What the device knows of one load's pages is not what the next one moves (R13)."""
    on_host = scramble(spans(memory.host_spans, memory.schema))
    on_device = spans(memory.spans, memory.schema)
    wanted, orders = scramble(on_device), Orders(memory)
    ways = [([3, 1], [0, 5]), ([7, 2], [6, 8])]
    loads = [orders.load(ID, way, None) for way in ways]
    for both in zip(*loads, strict=True):
        run(both)
    for part, rows in wanted.items():
        for here, there in ways:
            rows[there] = on_host[part][here]
    same(copies(on_device), wanted)


def test_a_model_without_tails_and_a_host_without_pages_have_a_carrier(device: str) -> None:
    dense = made_memory(gqa_schema(3, 2, 16, 8, "float32"), device, PoolSizes(4, 4, 0, 0, 2))
    on_host = scramble(spans(dense.host_spans, dense.schema))
    run(Orders(dense).load(ID, ([2], [3]), None))
    for part, rows in copies(spans(dense.spans, dense.schema)).items():
        assert torch.equal(rows[3], on_host[part][2])
    made_memory(SCHEMAS["fp8"], device, PoolSizes(4, 0, 2, 0, 2))
