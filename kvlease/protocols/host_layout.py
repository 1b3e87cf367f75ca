"""How pages and kept tails lie in host memory: a record each, cut into groups of layers.

A copy engine moves one piece of 100 KB and more at the speed of the link, and a piece of 10 KB at a
tenth of it. So all components of a page lie side by side in one *record*, layer after layer, and a
load moves some layers of it at once: a *group*. The first groups are small, because the first
layer's reader waits for all of its group. Nobody reads a store before its end, so a store moves
whole records. What this module does not know: where the memory is, and who copies.

Measured on an H200 (pinned copies 55.3 GB/s): scattered pieces of 46, 94, 141, 282 and 564 KB come
at 48.8, 52.4, 52.8, 53.5 and 53.8 GB/s and go at 45.4, 49.3, 51.1, 52.9 and 53.5; alignment beyond
16 bytes changes nothing. With records, loads come at 94 % of the link (host pages one by one) or 95
(in runs of 8) and stores go at 93 or 96. With a record for each group of layers, pages in runs were
pieces together: loads came at 96 or 97 %, stores went at 87 or 95. A full pool that has been in use
for a while has no long runs.
"""

from collections.abc import Iterable, Sequence

from attrs import frozen

from kvlease.protocols.schema import Schema
from kvlease.units import LayerId

PIECE_ALIGNMENT = 16
"""Components start at multiples of this, so that 16-byte words can be moved."""
FIRST_GROUP_NBYTES = 32 << 10
GROUP_NBYTES = 128 << 10
"""A group ends with the layer that brings it to this size; the first ones end earlier."""
MOVE_NBYTES = 4 << 20
"""The least that groups are moved together for: it takes as long as a move costs the host."""
LARGEST_MOVE_NBYTES = 64 << 20
"""Groups are moved together up to this size: more copies in less of the host's time."""

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
    """Consecutive layers: bytes ``offset`` to ``offset + nbytes - 1`` of a record, padding too."""

    pieces: tuple[Piece, ...]
    offset: int
    nbytes: int


def record_nbytes(groups: Sequence[LayerGroup]) -> int:
    """Return the bytes of a whole record."""
    return sum(group.nbytes for group in groups)


def page_groups(schema: Schema) -> tuple[LayerGroup, ...]:
    """Cut one page's span components into groups of layers."""
    layers: list[list[_Named]] = [
        [
            (layer.id, span.name, schema.rows_per_page(span) * span.format.nbytes)
            for span in layer.spans
        ]
        for layer in schema.layers
    ]
    return _placed(_grouped(layers))


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
    return _placed(groups)


def move_ranges(nbytes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return which groups are moved together, as first and one past the last, for ``count`` pages.

    ``nbytes`` is of each group. The first move is as small as pays, because a reader waits for it;
    each later one is up to twice as large as the one before, because what is computed meanwhile
    hides it. Of one record no move takes much more than `MOVE_NBYTES`.
    """
    ranges: list[tuple[int, int]] = []
    first, size, enough = 0, 0, MOVE_NBYTES
    for number, each in enumerate(nbytes):
        size += each
        if size * count >= enough or size >= MOVE_NBYTES or number == len(nbytes) - 1:
            ranges.append((first, number + 1))
            first, size, enough = number + 1, 0, min(2 * enough, LARGEST_MOVE_NBYTES)
    return ranges


def _grouped(layers: Iterable[list[_Named]]) -> list[list[_Named]]:
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
    return closed


def _placed(groups: Iterable[list[_Named]]) -> tuple[LayerGroup, ...]:
    """Lay the pieces of all groups out, one after the other."""
    end = 0
    placed: list[LayerGroup] = []
    for group in groups:
        offset = end
        pieces: list[Piece] = []
        for layer, component, nbytes in group:
            pieces.append(Piece(layer, component, end, nbytes))
            end += -(-nbytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
        placed.append(LayerGroup(tuple(pieces), offset, end - offset))
    return tuple(placed)
