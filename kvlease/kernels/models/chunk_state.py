"""The running state around a chunk: windows before its rows are computed, rings after.

A chunk may overwrite ring places that its own first rows still look back to; so the windows are
laid out in a buffer first, and the rings are filled last. Rows are reached through the views.
"""

from typing import cast

import numpy as np
import torch
from torch import Tensor

from kvlease.kernels.models.device_attention import ChunkWindows
from kvlease.kernels.models.device_choice import Stretch
from kvlease.kernels.models.opening import StepView
from kvlease.kernels.models.weights import AttentionWeights, CompressorWeights
from kvlease.kernels.placing import place
from kvlease.kernels.step_plan import StepPlan
from kvlease.kernels.views import read_ring_rows, ring_rows, write_ring_rows
from kvlease.protocols.views import CompressorRows, SlidingStepView, SparseStepView


class ChunkState:
    """Index tensors of one chunk step, made once and shared by its layers."""

    def __init__(
        self, plan: StepPlan, starts: list[int], lengths: list[int], window: int, ratio: int
    ) -> None:
        """Lay out B sequences' windows: up to window - 1 rows before each, then its own rows."""
        self._plan = plan
        first = np.array(starts)
        count = np.array(lengths)
        before = np.minimum(first, window - 1)
        ends = np.cumsum(before + count)
        offsets = ends - count
        self.num_rows = int(ends[-1])
        sequences = np.repeat(np.arange(len(starts)), before)
        steps = np.arange(len(sequences)) - np.repeat(np.cumsum(before) - before, before)
        positions = np.repeat(first - before, before) + steps
        self._old = torch.from_numpy(sequences), torch.from_numpy(positions % window)
        into = np.repeat(offsets - before, before) + steps
        self._into = place(torch.from_numpy(into), plan.device) if len(into) else None
        self.own = np.concatenate([
            np.arange(offset, offset + length, dtype=np.int32)
            for offset, length in zip(offsets, lengths, strict=True)
        ])  # fmt: skip
        row = np.cumsum(count) - count
        self.stretches = tuple(
            Stretch(b, int(row[b]), int(row[b] + count[b]), int(first[b] + count[b]) // ratio)
            for b in range(len(starts))
        )

    def windows(self, view: StepView, own: Tensor, width: int) -> ChunkWindows:
        """Return a buffer with the rows before the chunk; ``own`` [N] int32 is on the device."""
        dtype = torch.bfloat16
        rows = torch.empty((self.num_rows, width), dtype=dtype, device=own.device)
        if self._into is not None:
            old = read_ring_rows(view.window, *self._old, self._plan.index)
            rows.index_copy_(0, self._into, old)
        return ChunkWindows(rows, own, self.stretches)

    def keep(
        self, view: StepView, windows: ChunkWindows, joined: Tensor, weights: AttentionWeights,
        column: int,
    ) -> None:  # fmt: skip
        """Leave the chunk's last rows in the rings.

        ``joined`` [N, M] is the attention's projection, where compressors begin at ``column``.
        """
        plan = self._plan
        writes = plan.ring_writes(ring_rows(view.window))
        own = windows.own if writes.rows is None else windows.own.index_select(0, writes.rows)
        rows = windows.rows.index_select(0, own)
        write_ring_rows(view.window, writes.sequences, writes.places, rows, plan.index)
        match view:
            case SlidingStepView():
                return
            case SparseStepView():
                states = view.compressor, view.index_compressor
            case _:
                states = (view.compressor,)
        for state, part in zip(
            states, (weights.compressor, weights.index_compressor), strict=False
        ):
            self._keep_compressor(state, cast("CompressorWeights", part), joined, column)
            column += 2 * cast("CompressorWeights", part).bias.shape[1]

    def _keep_compressor(
        self, state: CompressorRows, weights: CompressorWeights, joined: Tensor, column: int
    ) -> None:
        plan = self._plan
        ratio, width = weights.bias.shape
        writes = plan.ring_writes(ring_rows(state.kv))
        rows = joined if writes.rows is None else joined.index_select(0, writes.rows)
        phases = plan.phases(ratio)
        phases = phases if writes.rows is None else phases.index_select(0, writes.rows)
        kv = rows[:, column : column + width].bfloat16()
        gate = rows[:, column + width : column + 2 * width].float()
        gate = gate + weights.bias.index_select(0, phases)
        write_ring_rows(state.kv, writes.sequences, writes.places, kv, plan.index)
        write_ring_rows(state.gate, writes.sequences, writes.places, gate, plan.index)
