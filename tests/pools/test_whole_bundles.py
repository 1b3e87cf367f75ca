"""The pool refuses what would be half a bundle, and steps over leases that have ended."""

from collections.abc import Iterator
from typing import cast

import pytest
from torch import Tensor

from kvlease.errors import InternalError, LeaseMoved
from kvlease.pools import orders
from kvlease.pools.carriage import Carrier, Direction
from kvlease.pools.copies import span_orders
from kvlease.pools.storage import SpanStore
from kvlease.protocols.ports import CopyOrder
from kvlease.units import TransferId
from tests.museum.rig import PAGE, SCHEMAS, Bench, tokens_of

PROMPT = tokens_of(1, 4 * PAGE)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_plan_without_a_component_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that does not know a component must not skip it (R5)."""
    bench = Bench(SCHEMAS[name])
    bench.cache_on_host(PROMPT)
    skipped = next(span.name for layer in SCHEMAS[name].layers for span in layer.spans)

    def forgetful(
        transfer: TransferId,
        kind: Direction,
        ends: tuple[SpanStore, SpanStore],
        pages: tuple[Tensor, Tensor],
    ) -> Iterator[CopyOrder]:
        whole = span_orders(transfer, kind, ends, pages)
        return (order for order in whole if order.component != skipped)

    monkeypatch.setattr(orders, "span_orders", forgetful)
    with pytest.raises(InternalError, match=skipped):
        bench.start(PROMPT)


@pytest.mark.parametrize("is_carried", [False, True])
def test_a_load_of_nothing_has_no_orders(is_carried: bool) -> None:
    """Such is a prefetch whose pages are there when no slot is free for its tail."""
    memory = Bench(SCHEMAS["v4"]).pool.memory
    if is_carried:
        memory.carrier = cast("Carrier", object())  # not asked for anything
    nothing: tuple[list[int], list[int]] = [], []
    ordered = orders.Orders(memory)
    assert ordered.load(TransferId(1), nothing, None) == ()
    assert ordered.store(TransferId(2), nothing, nothing) == ()


def test_the_parts_of_a_schema_are_those_of_its_layers() -> None:
    schema = SCHEMAS["v4"]
    spans, tails = schema.parts(spans=True, tails=False), schema.parts(spans=False, tails=True)
    assert (1, "index_k") in spans
    assert not spans & tails
    assert schema.parts(spans=True, tails=True) == spans | tails
    assert SCHEMAS["gqa"].parts(spans=False, tails=True) == frozenset()


def test_a_step_over_a_lease_that_has_ended_is_refused() -> None:
    """Its pages may be somebody else's by now (R8)."""
    bench = Bench(SCHEMAS["v4"])
    held = bench.start(PROMPT)
    lease = held.lease
    bench.pool.lease_step([lease]).close()
    bench.compute(held, PROMPT)
    bench.close(held)
    with pytest.raises(LeaseMoved, match=str(lease.id)):
        bench.pool.lease_step([lease])
