"""What a step's kernels find on the device: its rows, page tables and slots, and opened memory.

Numbers go there in one copy, from pinned memory that torch keeps until the copy is done (R13).
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from kvlease.kernels.gpu.step_rows import StepRows
from kvlease.kernels.models.opening import StepView
from kvlease.kernels.placing import place
from kvlease.kernels.views import memory_of
from kvlease.protocols.views import (
    CompressorRows,
    HeavyStepView,
    PagedRows,
    SlidingStepView,
    SparseStepView,
)

Ints = NDArray[np.int32]
_ALIGNED = 4
"""Parts begin at multiples of 16 bytes, so that kernels are compiled once for every batch."""


@frozen
class Rings:
    """A compressor's rings: kv [slots, ring, width] bf16 and gate float32."""

    kv: Tensor
    gate: Tensor


@frozen
class LayerMemory:
    """One layer's memory, opened for the kernels of one step or of one captured graph."""

    window: Tensor
    latent: Tensor | None = None
    index_k: Tensor | None = None
    compressor: Rings | None = None
    index_compressor: Rings | None = None

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where everything lies: equal for two steps if one graph can serve both."""
        rings = (self.compressor, self.index_compressor)
        parts = [self.window, self.latent, self.index_k]
        parts += [part for ring in rings if ring is not None for part in (ring.kv, ring.gate)]
        return tuple(part.data_ptr() for part in parts if part is not None)


def open_layer(view: StepView) -> LayerMemory:
    """Open everything that a layer's kernels touch.

    Raises:
        StaleEpoch: the step's right has ended.
    """
    window = memory_of(view.window)
    match view:
        case SlidingStepView():
            return LayerMemory(window)
        case SparseStepView():
            return LayerMemory(
                window,
                memory_of(view.latent_open),
                memory_of(view.index_k_open),
                _rings(view.compressor),
                _rings(view.index_compressor),
            )
        case HeavyStepView():
            return LayerMemory(
                window, memory_of(view.latent_open), compressor=_rings(view.compressor)
            )


def _rings(state: CompressorRows) -> Rings:
    return Rings(memory_of(state.kv), memory_of(state.gate))


def paged_rows(view: StepView) -> PagedRows | None:
    """Return a handle that knows the step's page tables, None if the layer keeps nothing a page."""
    return None if isinstance(view, SlidingStepView) else view.latent


def joined(parts: Sequence[Ints]) -> tuple[Ints, list[slice]]:
    """Lay arrays of numbers one after another; return them and where each is."""
    sizes = [-(-part.size // _ALIGNED) * _ALIGNED for part in parts]
    ends = list(accumulate(sizes))
    whole = np.zeros(ends[-1], dtype=np.int32)
    places = [slice(end - size, end - size + part.size) for part, size, end in zip(
        parts, sizes, ends, strict=True
    )]  # fmt: skip
    for part, where in zip(parts, places, strict=True):
        whole[where] = part.ravel()
    return whole, places


def place_parts(parts: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Return arrays of numbers on the device, by one copy."""
    whole, places = joined(parts)
    there = place(torch.from_numpy(whole), device)
    return [there[where].view(part.shape) for part, where in zip(parts, places, strict=True)]


def step_rows(
    positions: Tensor,
    table: Tensor,
    slots: Tensor,
    sequences: Tensor | None = None,
    starts: Tensor | None = None,
    lasts: Tensor | None = None,
) -> StepRows:
    """Describe rows on the device; an empty table stands for layers that keep nothing a page."""
    return StepRows(positions, table, slots, sequences, starts, lasts, table.stride(0))
