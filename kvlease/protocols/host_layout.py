"""How pages and kept tails lie in host memory: cut into groups of layers, components side by side.

A copy engine moves one piece of 100 KB and more at the speed of the link, and a piece of 10 KB at a
tenth of it. So the components of some layers of one page lie next to each other in a *record*, and
the records of a group lie in page order: one page is one large piece, and pages with consecutive
numbers are one piece together. The first groups are small, because the first layer's reader waits
for all of its group. What this module does not know: where the memory is, and who copies.

Measured on an H200 (pinned copies 55.3 GB/s): scattered pieces of 46, 94, 141 and 282 KB come at
48.8, 52.4, 52.8 and 53.5 GB/s and go at 45.4, 49.3, 51.1 and 52.9; alignment beyond 16 bytes
changes nothing. Larger groups would gain a few per cent where no two host pages lie together, and
make layers wait longer for each other.
"""

from collections.abc import Iterable, Iterator, Sequence

from attrs import frozen

from kvlease.protocols.schema import Schema
from kvlease.units import LayerId

PIECE_ALIGNMENT = 16
"""Components start at multiples of this, so that 16-byte words can be moved."""
FIRST_GROUP_NBYTES = 32 << 10
GROUP_NBYTES = 128 << 10
"""A group ends with the layer that brings its record to this size; the first ones end earlier."""
MOVE_NBYTES = 4 << 20
"""Groups are moved together up to this size: it takes as long as a move costs the host."""

_Named = tuple[LayerId, str, int]
"""A layer, one of its components, and that component's bytes."""


@frozen
class Piece:
    """One component of one layer inside a record."""

    layer: LayerId
    component: str
    offset: int
    nbytes: int


@frozen
class LayerGroup:
    """Consecutive layers whose pieces make one record; ``nbytes`` is the record's, padding too."""

    pieces: tuple[Piece, ...]
    nbytes: int


def page_groups(schema: Schema) -> tuple[LayerGroup, ...]:
    """Cut one page's span components into groups of layers."""
    layers: list[list[_Named]] = [
        [
            (layer.id, span.name, schema.rows_per_page(span) * span.format.nbytes)
            for span in layer.spans
        ]
        for layer in schema.layers
    ]
    return tuple(_grouped(layers))


def tail_groups(schema: Schema) -> tuple[LayerGroup, ...]:
    """Cut one kept tail into groups of layers: the same layers together as in `page_groups`.

    Layers that keep a tail and no span come with the group before them, or with the first.
    """
    ends = [group.pieces[-1].layer for group in page_groups(schema)]
    groups: list[list[_Named]] = [[] for _ in ends] or [[]]
    for layer in schema.layers:
        number = next((n for n, end in enumerate(ends) if layer.id <= end), len(groups) - 1)
        groups[number].extend(
            (layer.id, tail.name, tail.kept_nbytes) for tail in layer.tails if tail.kept_rows
        )
    return tuple(_record(group) for group in groups)


def move_ranges(nbytes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return which groups are moved together, as first and one past the last, for ``count`` pages.

    ``nbytes`` is of each group's record.
    """
    ranges: list[tuple[int, int]] = []
    first, size = 0, 0
    for number, each in enumerate(nbytes):
        size += each * count
        if size >= MOVE_NBYTES or number == len(nbytes) - 1:
            ranges.append((first, number + 1))
            first, size = number + 1, 0
    return ranges


def _grouped(layers: Iterable[list[_Named]]) -> Iterator[LayerGroup]:
    limit = FIRST_GROUP_NBYTES
    open_group: list[_Named] = []
    closed: list[list[_Named]] = []
    for layer in layers:
        open_group.extend(layer)
        if sum(nbytes for _, _, nbytes in open_group) >= limit:
            closed.append(open_group)
            open_group = []
            limit = min(2 * limit, GROUP_NBYTES)
    if open_group and closed:
        closed[-1].extend(open_group)  # a last group of a few bytes would be a slow one
    elif open_group:
        closed.append(open_group)
    return map(_record, closed)


def _record(pieces: Iterable[_Named]) -> LayerGroup:
    end = 0
    placed: list[Piece] = []
    for layer, component, nbytes in pieces:
        placed.append(Piece(layer, component, end, nbytes))
        end += -(-nbytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
    return LayerGroup(tuple(placed), end)
