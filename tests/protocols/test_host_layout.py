"""Records hold every component once, in layer order, and are large enough to move fast."""

from itertools import pairwise

import pytest

from kvlease.protocols.geometries import V4Geometry, deepseek_v4_schema
from kvlease.protocols.host_layout import (
    FIRST_GROUP_NBYTES,
    GROUP_NBYTES,
    LARGEST_MOVE_NBYTES,
    MOVE_NBYTES,
    PIECE_ALIGNMENT,
    LayerGroup,
    move_ranges,
    page_groups,
    record_nbytes,
    tail_groups,
)
from kvlease.protocols.schema import Schema

FLASH = V4Geometry(
    ("sliding", "sliding", *("sparse", "heavy") * 20, "sparse"),
    head_dim=512,
    rope_dim=64,
    index_head_dim=128,
    window=128,
)
SMALL = V4Geometry(("heavy", "sliding", "sparse"), 16, 8, 8, window=8, heavy_ratio=8)
SLIDING = V4Geometry(("sliding", "sliding"), 16, 8, 8, window=8)


def schemas() -> list[Schema]:
    return [
        deepseek_v4_schema(FLASH, 256, "bfloat16", "fp8", "fp8"),
        deepseek_v4_schema(FLASH, 256, "bfloat16", "bf16", "fp8"),
        deepseek_v4_schema(SMALL, 8, "float32"),
        deepseek_v4_schema(SLIDING, 8, "float64"),
    ]


def check_records(groups: tuple[LayerGroup, ...]) -> None:
    end = 0
    for group in groups:
        assert group.offset % PIECE_ALIGNMENT == 0
        assert 0 <= group.offset - end < PIECE_ALIGNMENT
        end = group.offset
        for piece in group.pieces:
            assert piece.offset % PIECE_ALIGNMENT == 0
            assert 0 <= piece.offset - end < PIECE_ALIGNMENT
            end = piece.offset + piece.nbytes
        assert 0 <= group.offset + group.nbytes - end < PIECE_ALIGNMENT
    assert record_nbytes(groups) == (groups[-1].offset + groups[-1].nbytes if groups else 0)
    layers = [piece.layer for group in groups for piece in group.pieces]
    assert layers == sorted(layers)
    for one, other in pairwise(groups):
        assert one.pieces[-1].layer < other.pieces[0].layer


@pytest.mark.parametrize("schema", schemas(), ids=["fp8", "bf16", "small", "sliding"])
def test_records_hold_each_component_once_in_layer_order(schema: Schema) -> None:
    groups, tails = page_groups(schema), tail_groups(schema)
    check_records(groups)
    check_records(tails)
    moved = [(piece.layer, piece.component) for group in groups for piece in group.pieces]
    assert len(moved) == len(set(moved))
    assert set(moved) == schema.parts(spans=True, tails=False)
    kept = [(piece.layer, piece.component) for group in tails for piece in group.pieces]
    assert len(kept) == len(set(kept))
    assert set(kept) == schema.parts(spans=False, tails=True)
    nbytes = sum(piece.nbytes for group in groups for piece in group.pieces)
    assert nbytes == schema.page_nbytes
    assert sum(p.nbytes for group in tails for p in group.pieces) == schema.tail_nbytes


@pytest.mark.parametrize("schema", schemas()[:2], ids=["fp8", "bf16"])
def test_one_page_is_a_large_piece_and_the_first_layer_waits_for_no_other(schema: Schema) -> None:
    groups = page_groups(schema)
    assert {piece.layer for piece in groups[0].pieces} == {2}
    assert groups[0].nbytes >= FIRST_GROUP_NBYTES
    assert all(group.nbytes >= GROUP_NBYTES for group in groups[2:])


@pytest.mark.parametrize("schema", schemas()[:2], ids=["fp8", "bf16"])
def test_a_layers_tail_comes_no_later_than_its_pages(schema: Schema) -> None:
    number_of = {
        piece.layer: number
        for number, group in enumerate(page_groups(schema))
        for piece in group.pieces
    }
    for number, group in enumerate(tail_groups(schema)):
        assert all(number_of.get(piece.layer, number) == number for piece in group.pieces)


@pytest.mark.parametrize(("count", "moves"), [(1, 1), (8, 2), (40, 4), (128, 5), (1000, 8)])
def test_small_moves_go_together_and_large_ones_apart(count: int, moves: int) -> None:
    """Each move but the last is enough by its last group, and enough doubles up to a limit."""
    nbytes = [group.nbytes for group in page_groups(schemas()[0])]
    ranges = move_ranges(nbytes, count)
    assert [number for pair in ranges for number in range(*pair)] == [*range(len(nbytes))]
    assert len(ranges) == moves
    enough = MOVE_NBYTES
    for first, last in ranges[:-1]:
        assert sum(nbytes[first:last]) * count >= enough
        assert sum(nbytes[first : last - 1]) * count < enough
        enough = min(2 * enough, LARGEST_MOVE_NBYTES)


def test_a_move_takes_no_more_of_one_record_than_a_staging_slot_holds() -> None:
    nbytes = [3 << 20] * 20
    ranges = move_ranges(nbytes, 1)
    assert [number for pair in ranges for number in range(*pair)] == [*range(20)]
    assert all(sum(nbytes[first : last - 1]) < MOVE_NBYTES for first, last in ranges)


def test_nothing_moves_in_no_range() -> None:
    assert move_ranges([], 3) == []
