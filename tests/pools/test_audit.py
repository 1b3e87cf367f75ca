"""Checksums find what they promise to, and sums go where the copies go."""

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.pools.copies import index_tensor, keep_tails
from kvlease.pools.prefix_node import Released
from kvlease.pools.storage import RingStore, SpanStore, TailStore, span_components, tail_components
from kvlease.pools.sums import SumBook, Summer, Sums
from kvlease.protocols.geometries import V4Geometry, deepseek_v4_schema, gqa_schema, one_byte_rows
from kvlease.protocols.schema import Schema

PAGE = 16
GEOMETRY = V4Geometry(
    layer_kinds=("sliding", "sparse", "heavy"),
    head_dim=72,
    rope_dim=8,
    index_head_dim=8,
    window=24,
    sparse_ratio=4,
    heavy_ratio=16,
)
SCHEMAS: dict[str, Schema] = {
    "float32": deepseek_v4_schema(GEOMETRY, PAGE, "float32", "same", "same"),
    "fp8": deepseek_v4_schema(GEOMETRY, PAGE, "bfloat16", "fp8", "fp8"),
    "bytes": one_byte_rows(deepseek_v4_schema(GEOMETRY, PAGE, "float32", "same", "same")),
    "gqa": gqa_schema(2, 2, 4, PAGE),
}


class Stores:
    """A device's memory, full of random bytes, and its summer."""

    def __init__(self, schema: Schema, seed: int = 0) -> None:
        self.schema = schema
        self.spans, self.rings = SpanStore(schema, 3), RingStore(schema, 2)
        self.tails = TailStore(schema, 2)
        self.summer = Summer(schema, self.spans, self.rings, self.tails)
        random = torch.Generator().manual_seed(seed)
        for layer, span in span_components(schema):
            self.spans.rows(layer, span.name).view(torch.uint8).random_(generator=random)
        for layer, tail in tail_components(schema):
            self.rings.ring(layer, tail.name).view(torch.uint8).random_(generator=random)
            if tail.kept_rows:
                self.tails.kept(layer, tail.name).view(torch.uint8).random_(generator=random)

    def pages(self) -> list[tuple[int, ...]]:
        return [tuple(sums) for sums in self.summer.pages(index_tensor(range(3))).tolist()]


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_single_bit_of_a_page_is_found_in_its_own_sum_alone(schema: Schema) -> None:
    stores = Stores(schema)
    before = stores.pages()
    for part, (layer, span) in enumerate(span_components(schema)):
        rows = stores.spans.rows(layer, span.name)[1].view(torch.uint8).view(-1)
        for place in range(0, len(rows), max(1, len(rows) // 97)):
            for bit in range(8):
                rows[place] ^= 1 << bit
                found = stores.summer.page_part(part, index_tensor([0, 1, 2])).tolist()
                assert [found[n] == before[n][part] for n in range(3)] == [True, False, True]
                rows[place] ^= 1 << bit
    assert stores.pages() == before


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_single_bit_of_a_kept_tail_is_found(schema: Schema) -> None:
    stores = Stores(schema)
    before = stores.summer.tail(1).tolist()
    kept = [(layer, tail) for layer, tail in tail_components(schema) if tail.kept_rows]
    for part, (layer, tail) in enumerate(kept):
        rows = stores.tails.kept(layer, tail.name)[1].view(torch.uint8).view(-1)
        for place in range(0, len(rows), max(1, len(rows) // 17)):
            rows[place] ^= 1 << (place % 8)
            after = stores.summer.tail(1).tolist()
            assert [p for p in range(len(kept)) if after[p] != before[p]] == [part]
            rows[place] ^= 1 << (place % 8)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.permutations(range(4)), signs=st.booleans())
def test_rows_in_another_order_are_found(seed: int, rows: list[int], signs: bool) -> None:
    """Rows that differ in their signs alone too: a weight that is odd does not see to that."""
    stores = Stores(SCHEMAS["float32"], seed)
    latent = stores.spans.rows(stores.summer.spans[0][0], "latent")
    if signs:
        latent.view(torch.int32).bitwise_and_(-(2**31)).bitwise_or_(0x3F800000)
    before = stores.pages()
    same = torch.equal(latent[1][rows].view(torch.int32), latent[1].view(torch.int32))
    latent[1] = latent[1][rows]
    assert (stores.pages() == before) == same


def test_the_weights_are_odd_and_no_two_agree_where_words_differ() -> None:
    weights = Stores(SCHEMAS["float32"]).summer._weights
    assert bool((weights % 2 == 1).all())
    assert len({weight % 2**33 for weight in weights.tolist()}) == len(weights)


@pytest.mark.parametrize("name", ["float32", "bytes"])
@pytest.mark.parametrize("boundary", [PAGE, 2 * PAGE, 5 * PAGE])
def test_a_ring_sums_as_the_tail_kept_of_it(name: str, boundary: int) -> None:
    """Before position 0 there are no rows: at the first boundary a window is longer than that."""
    stores = Stores(SCHEMAS[name])
    ends = index_tensor([1]), index_tensor([0]), index_tensor([boundary])
    keep_tails(stores.schema, (stores.rings, stores.tails), *ends)
    summer = stores.summer
    kept = [int(summer.ring_part(part, 1, boundary)) for part in range(len(summer.tails))]
    assert kept == summer.tail(0).tolist()
    assert [int(summer.ring_part(part, 0, boundary)) for part in range(len(kept))] != kept


def test_sums_follow_copies_and_go_with_them() -> None:
    book = SumBook()
    one, other = Sums(b"one", (1,)), Sums(b"other", (2,))
    book.pages["device"] = {4: one, 5: other}
    book.copied("device", [(4, 9), (6, 8)])
    assert book.pages["host"] == {9: one}
    book.forget(Released(array("i", [4, 5])))
    assert book.pages == {"device": {}, "host": {9: one}}
    book.copied("host", [(9, 5)])
    book.tails["device"] = {0: one}
    book.tails_copied("device", [(0, 3)])
    book.forget(Released(array("i", [5]), array("i", [9]), [0], [3]))
    assert not any((*book.pages.values(), *book.tails.values()))
