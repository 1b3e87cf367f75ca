"""Memory laid out in records: all components of one page, or of one tail, together.

How they lie is `host_layout`'s decision; whoever knows only a component sees an ordinary tensor.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch

from kvlease.protocols.host_layout import LayerGroup, record_nbytes
from kvlease.units import LayerId

Allocate = Callable[[int], torch.Tensor]
"""Returns so many bytes of memory, [n] uint8."""


@final
class Records:
    """[count, nbytes] bytes; a component of a layer is a view."""

    def __init__(self, groups: Sequence[LayerGroup], count: int, allocate: Allocate) -> None:
        """Allocate them all; contents are as the allocator leaves them."""
        self.groups = tuple(groups)
        nbytes = record_nbytes(groups)
        self.memory = allocate(count * nbytes).view(count, nbytes)
        self._pieces = {
            (piece.layer, piece.component): piece for group in groups for piece in group.pieces
        }

    def component(
        self, layer: LayerId, component: str, dtype: torch.dtype, shape: tuple[int, int]
    ) -> torch.Tensor:
        """Borrow one component of all records, as [count, *shape] of a dtype."""
        piece = self._pieces[layer, component]
        rows = self.memory.view(dtype)
        first = piece.offset // dtype.itemsize
        values = shape[0] * shape[1]
        return rows[:, first : first + values].view(len(rows), *shape)
