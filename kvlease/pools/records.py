"""Memory laid out in records: all components of one page, or of one tail, together.

How they lie is `host_layout`'s decision; whoever knows only a component sees an ordinary tensor.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import final

import torch

from kvlease.pools.carriage import Carrier
from kvlease.protocols.host_layout import LayerGroup, move_ranges, record_nbytes
from kvlease.protocols.ports import CopyPart, CopyParts
from kvlease.units import LayerId

Allocate = Callable[[int], torch.Tensor]
"""Returns so many bytes of memory, [n] uint8."""


@final
class Records:
    """[count, nbytes] bytes; a component of a layer is a view.

    ``carrier`` moves them between tiers; set once, by whoever made the memory at both ends.
    """

    def __init__(self, groups: Sequence[LayerGroup], count: int, allocate: Allocate) -> None:
        """Allocate them all; contents are as the allocator leaves them."""
        self.carrier: Carrier | None = None
        self.groups = tuple(groups)
        nbytes = record_nbytes(groups)
        self.memory = allocate(count * nbytes).view(count, nbytes)
        self._pieces = {
            (piece.layer, piece.component): piece for group in groups for piece in group.pieces
        }
        self.groups_of = {
            (piece.layer, piece.component): number
            for number, group in enumerate(groups)
            for piece in group.pieces
        }
        """The number of the group that a component is in."""
        self.names = tuple(
            tuple((piece.layer, piece.component) for piece in group.pieces) for group in groups
        )
        """The components of each group, in layer order."""
        self._parts: dict[tuple[int, int], CopyParts] = {}
        self._group_nbytes = [sum(piece.nbytes for piece in group.pieces) for group in groups]

    def parts(self, groups: tuple[int, int]) -> CopyParts:
        """Return what is in groups[0] to groups[1] - 1, in layer order; one object for each range.

        Remembered: planning a load would spend most of its time on this.
        """
        found = self._parts.get(groups)
        if found is None:
            names = chain.from_iterable(self.names[slice(*groups)])
            found = self._parts[groups] = CopyParts(tuple(CopyPart(*name) for name in names))
        return found

    def ranges(self, count: int) -> list[tuple[int, int]]:
        """Return which groups ``count`` records are moved in, as first and one past the last."""
        return move_ranges([group.nbytes for group in self.groups], count)

    def sizes(self, groups: tuple[int, int], count: int) -> list[int]:
        """Return the bytes of each of these parts in ``count`` records."""
        return [
            count * piece.nbytes for group in self.groups[slice(*groups)] for piece in group.pieces
        ]

    def nbytes(self, groups: tuple[int, int], count: int) -> int:
        """Return the bytes of all these parts in ``count`` records."""
        return count * sum(self._group_nbytes[slice(*groups)])

    def component(
        self, layer: LayerId, component: str, dtype: torch.dtype, shape: tuple[int, int]
    ) -> torch.Tensor:
        """Borrow one component of all records, as [count, *shape] of a dtype."""
        piece = self._pieces[layer, component]
        rows = self.memory.view(dtype)
        first = piece.offset // dtype.itemsize
        values = shape[0] * shape[1]
        return rows[:, first : first + values].view(len(rows), *shape)
