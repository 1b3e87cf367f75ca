"""Whole decode steps as CUDA graphs, one for each size of batch and page table.

A graph reads its numbers (positions, tokens, slots, page tables) from one static buffer, so a step
is one copy and one replay, with no allocation. Batches are filled up with rows at position -1,
which read and write nothing.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from attrs import define, frozen
from torch import Tensor

from kvlease.kernels.gpu.step_rows import StepRows
from kvlease.kernels.models.device_rows import Ints, LayerMemory, joined, step_rows
from kvlease.kernels.models.device_step import DeviceLayers, Pending
from kvlease.protocols.schema import AnyLayer

MAX_BUCKET = 128
_LEAST_PAGES = 16

Memory = Sequence[tuple[AnyLayer, LayerMemory]]


@frozen
class DecodeNumbers:
    """A decode step's numbers in host memory, int32: one row a sequence; table [B, P]."""

    positions: Ints
    tokens: Ints
    slots: Ints
    table: Ints

    def padded(self, batch: int, pages: int) -> "DecodeNumbers":
        """Return the numbers of a batch filled up with rows that are none."""
        more = batch - len(self.positions)
        positions = np.concatenate([self.positions, np.full(more, -1, dtype=np.int32)])
        tokens, slots = (
            np.concatenate([part, np.zeros(more, dtype=np.int32)])
            for part in (self.tokens, self.slots)
        )
        table = np.zeros((batch, pages), dtype=np.int32)
        table[: len(self.table), : self.table.shape[1]] = self.table
        return DecodeNumbers(positions, tokens, slots, table)

    @property
    def parts(self) -> list[Ints]:
        """In the order of the static buffer."""
        return [self.positions, self.tokens, self.slots, self.table]


@define
class _Captured:
    """A graph, the buffer it reads, and what it leaves: logits [B, V], tokens [B]."""

    graph: torch.cuda.CUDAGraph
    buffer: Tensor
    logits: Tensor
    tokens: Tensor


@final
class DecodeGraphs:
    """The captured decode steps of one model; used by one stream's worker.

    A graph belongs to the memory it was captured over: a step of another pool captures its own.
    """

    def __init__(self, layers: DeviceLayers) -> None:
        """Nothing is captured before it is needed."""
        self._layers = layers
        self._captured: dict[tuple[object, ...], _Captured] = {}
        self._shared: torch.cuda.CUDAGraph | None = None

    def run(self, numbers: DecodeNumbers, memory: Memory) -> tuple[Tensor, Tensor]:
        """Run a step; return logits [B, V] float32 and best tokens [B] int32 of its B rows.

        Ownership: the results are the graph's own, valid in stream order until its next run.
        """
        count, pages = numbers.table.shape
        batch = 1 << (count - 1).bit_length()
        width = max(_LEAST_PAGES, 1 << (pages - 1).bit_length())
        whole, places = joined(numbers.padded(batch, width).parts)
        staged = torch.from_numpy(whole).pin_memory()
        key = batch, width, *(part.addresses for _, part in memory)
        found = self._captured.get(key)
        if found is None:
            buffer = staged.to(self._layers.packed.weights.embed.device)
            found = self._captured[key] = self._capture(buffer, places, (batch, width), memory)
        else:
            found.buffer.copy_(staged, non_blocking=True)
        found.graph.replay()
        return found.logits[:count], found.tokens[:count]

    def _capture(
        self, buffer: Tensor, places: list[slice], shape: tuple[int, int], memory: Memory
    ) -> _Captured:
        positions, tokens, slots, table = (buffer[where] for where in places)
        rows = step_rows(positions, table.view(shape), slots)
        # the first run compiles; a step that runs twice leaves the same rows
        self._step(rows, tokens, memory)
        graph = torch.cuda.CUDAGraph()
        # graphs run one at a time, so all use the memory of the first
        pool = None if self._shared is None else self._shared.pool()
        # other streams go on meanwhile: only this thread's calls belong to the capture
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits, best = self._step(rows, tokens, memory)
        self._shared = self._shared or graph
        return _Captured(graph, buffer, logits, best)

    def _step(self, rows: StepRows, tokens: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        before: Pending | Tensor = tokens
        for layer, part in memory:
            before, _ = self._layers.layer(before, tokens, layer, part, rows, None)
        assert isinstance(before, Pending), "a model has layers"
        return self._layers.finish(before)
