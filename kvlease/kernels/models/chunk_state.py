"""How a chunk's windows lie in one buffer: the rows before each sequence's chunk, then its own.

A chunk may overwrite ring places that its own first rows still look back to; so windows are laid
out apart from the rings, and the rings are filled when every row has looked back.
"""

import numpy as np
import torch

from kvlease.kernels.models.device_attention import ChunkWindows
from kvlease.kernels.models.device_choice import Stretch
from kvlease.kernels.models.device_rows import Ints
from kvlease.kernels.step_plan import StepPlan


class ChunkState:
    """What one chunk step's layers share, made once."""

    def __init__(
        self, plan: StepPlan, starts: list[int], lengths: list[int], window: int, ratio: int
    ) -> None:
        """Lay out B sequences' windows: up to window - 1 rows before each, then its own rows.

        ``ratio`` is that of the rows that are chosen among.
        """
        first, count = np.array(starts), np.array(lengths)
        ends = np.cumsum(np.minimum(first, window - 1) + count)
        row = np.cumsum(count) - count
        sequences = plan.host_sequences
        self._num_rows = int(ends[-1])
        self.own: Ints = (
            (ends - count - row)[sequences] + np.arange(len(sequences))
        ).astype(np.int32)  # fmt: skip
        self.lasts: Ints = (first + count - 1)[sequences].astype(np.int32)
        self._stretches = tuple(
            Stretch(b, int(row[b]), int(row[b] + count[b]), int(first[b] + count[b]) // ratio)
            for b in range(len(starts))
        )

    def windows(self, own: torch.Tensor, width: int) -> ChunkWindows:
        """Return the buffer; ``own`` [N] int32 is on the device."""
        rows = torch.empty((self._num_rows, width), dtype=torch.bfloat16, device=own.device)
        return ChunkWindows(rows, own, self._stretches)
