"""Memory laid out in records: all components of one page, or of one tail, together.

How they lie is `host_layout`'s decision; whoever knows only a component sees an ordinary tensor.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch

from kvlease.pools.carriage import Carrier
from kvlease.protocols.host_layout import LayerGroup, record_nbytes
from kvlease.protocols.ports import CopyPart
from kvlease.units import LayerId

Allocate = Callable[[int], torch.Tensor]
"""Returns so many bytes of memory, [n] uint8."""
_REMEMBERED = 1000
"""Ranges of groups for which `Records.parts` remembers the answer."""


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
        self._parts: dict[tuple[int, int, int], tuple[CopyPart, ...]] = {}

    def parts(self, groups: tuple[int, int], count: int) -> tuple[CopyPart, ...]:
        """Return what ``count`` records have in groups[0] to groups[1] - 1, in layer order.

        Remembered: planning a load would spend most of its time on this.
        """
        key = (*groups, count)
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) == _REMEMBERED:
                self._parts.clear()
            found = self._parts[key] = tuple(
                CopyPart(piece.layer, piece.component, count * piece.nbytes)
                for group in self.groups[slice(*groups)]
                for piece in group.pieces
            )
        return found

    def component(
        self, layer: LayerId, component: str, dtype: torch.dtype, shape: tuple[int, int]
    ) -> torch.Tensor:
        """Borrow one component of all records, as [count, *shape] of a dtype."""
        piece = self._pieces[layer, component]
        rows = self.memory.view(dtype)
        first = piece.offset // dtype.itemsize
        values = shape[0] * shape[1]
        return rows[:, first : first + values].view(len(rows), *shape)
