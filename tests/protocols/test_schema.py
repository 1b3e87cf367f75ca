"""Schemas: what a page is made of, and that everything that changes its bytes changes its key."""

import pytest
from attrs import evolve

from kvlease.errors import ConfigError
from kvlease.protocols.geometries import (
    V4Geometry,
    deepseek_v4_schema,
    gqa_schema,
    mla_indexer_schema,
    one_byte_rows,
)
from kvlease.protocols.identity import CacheIdentity, page_hash
from kvlease.protocols.schema import Schema, Sharing, SparseLayer

FLASH = V4Geometry(
    ("sliding", "sliding", *("sparse", "heavy") * 20, "sparse"),
    head_dim=512,
    rope_dim=64,
    index_head_dim=128,
    window=128,
)
SMALL = V4Geometry(("sliding", "sparse", "heavy"), 64, 16, 32, 64, heavy_ratio=32)


def test_flash_sizes_are_those_of_the_design() -> None:
    """A tail of 5.9 MB; rows of 584 and 132 bytes in fp8."""
    schema = deepseek_v4_schema(FLASH, 256, "bfloat16", "fp8", "fp8")
    assert schema.num_layers == 43
    assert round(schema.tail_nbytes / 1e6, 1) == 5.9
    sparse = schema.layers[2]
    assert isinstance(sparse, SparseLayer)
    assert [span.format.nbytes for span in sparse.spans] == [584, 132]
    assert schema.rows_per_page(sparse.spans[0]) == 64


@pytest.mark.parametrize("page_tokens", [0, -1, 16, 48])
def test_a_page_that_the_ratios_do_not_divide_is_refused(page_tokens: int) -> None:
    """A group across two pages could never be sealed (R4)."""
    with pytest.raises(ConfigError, match="page_tokens"):
        deepseek_v4_schema(SMALL, page_tokens, "float32")


def test_doubling_a_row_changes_nothing_else() -> None:
    """bf16 index keys are a first-class choice: same rows, twice the bytes, another key."""
    fp8 = deepseek_v4_schema(SMALL, 64, "bfloat16", "fp8", "fp8")
    bf16 = deepseek_v4_schema(SMALL, 64, "bfloat16", "fp8", "bf16")
    assert fp8.component_names() == bf16.component_names()
    assert fp8.tail_nbytes == bf16.tail_nbytes
    assert fp8.digest != bf16.digest


def test_schemas_without_tails() -> None:
    """MLA with an indexer and plain GQA resume anywhere; GQA is shared by head."""
    mla, gqa = mla_indexer_schema(2, 512, 64, 128, 64), gqa_schema(2, 8, 128, 64)
    assert not mla.needs_tail
    assert not gqa.needs_tail
    assert mla.page_nbytes == 2 * 64 * 2 * (576 + 128)
    assert {span.sharing for layer in gqa.layers for span in layer.spans} == {Sharing.BY_HEAD}


def test_one_byte_rows_keep_every_component() -> None:
    """Compute none moves everything, one byte a row."""
    full = deepseek_v4_schema(SMALL, 64, "float32")
    narrow = one_byte_rows(full)
    assert narrow.component_names() == full.component_names()
    assert narrow.needs_tail
    assert narrow.page_nbytes == sum(
        full.rows_per_page(span) for layer in full.layers for span in layer.spans
    )


def test_layer_ids_are_dense() -> None:
    """Gaps in layer ids (sglang#37870) are refused where the schema is made."""
    schema = gqa_schema(3, 1, 8, 16)
    with pytest.raises(ConfigError, match="0, 1, 2"):
        Schema("gqa", 16, (schema.layers[0], schema.layers[2]))


BASE = CacheIdentity("weights", "schema")


@pytest.mark.parametrize(
    "other",
    [
        evolve(BASE, fingerprint="other"),
        evolve(BASE, schema_digest="other"),
        evolve(BASE, weights_version=1),
        evolve(BASE, adapter="lora"),
        evolve(BASE, tenant_salt=b"tenant"),
        evolve(BASE, parallel_layout="tp2"),
    ],
    ids=["fingerprint", "schema_digest", "weights_version", "adapter", "salt", "layout"],
)
def test_every_identity_field_splits_the_tree(other: CacheIdentity) -> None:
    """F17: change one field and nothing may be hit; the same identity hits."""
    assert other.root() != BASE.root()
    assert CacheIdentity("weights", "schema").root() == BASE.root()


def test_page_hashes_are_chained_and_keyed() -> None:
    """Equal pages behind different prefixes, or of different tenants, have different keys."""
    first = page_hash(BASE.root(), b"a" * 64)
    assert page_hash(first, b"b" * 64) != page_hash(BASE.root(), b"b" * 64)
    assert page_hash(evolve(BASE, tenant_salt=b"x").root(), b"a" * 64) != first
    assert page_hash(BASE.root(), b"a" * 64) == first
