"""Whole decode steps as CUDA graphs, one for each size of batch and page table.

A graph reads its numbers (positions, tokens, slots, page tables) from one static buffer, so a step
is one copy and one replay, with no allocation. It ends by moving them on, to the tokens that were
drawn and the next positions, so that replays may follow each other. Batches are filled up with rows
at position -1, which read and write nothing.
"""

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from attrs import define, field, frozen
from numpy.typing import NDArray
from torch import Tensor

from kvlease.errors import LayoutMismatch
from kvlease.kernels.gpu.greedy import Following
from kvlease.kernels.gpu.step_rows import StepRows
from kvlease.kernels.models.device_rows import Ints, LayerMemory, step_rows
from kvlease.kernels.models.device_step import DeviceLayers, Pending
from kvlease.kernels.placing import fetch
from kvlease.protocols.schema import AnyLayer
from kvlease.units import LayerId

MAX_BUCKET = 128
LEAST_PAGES = 16
_ALIGNED = 4
"""Rows begin at multiples of 16 bytes, so that kernels are compiled once for every batch."""

Memory = Sequence[tuple[AnyLayer, LayerMemory]]


@cache
def _can_pin() -> bool:
    """Whether there is a device here: asked once, because the driver takes its time to say."""
    return torch.cuda.is_available()


def round_to_power(count: int) -> int:
    """Return the least power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()


@frozen
class DecodeNumbers:
    """A decode step's numbers in host memory: one row a sequence; table [B, P]."""

    positions: NDArray[np.integer]
    tokens: NDArray[np.integer]
    slots: NDArray[np.integer]
    table: NDArray[np.integer]

    @property
    def bucket(self) -> tuple[int, int]:
        """The size that the batch and its page tables are filled up to."""
        count, pages = self.table.shape
        return round_to_power(count), max(LEAST_PAGES, round_to_power(pages))


@frozen
class Layout:
    """Where a bucket's numbers lie in one int32 buffer; rows that are none have position -1."""

    batch: int
    pages: int

    @property
    def size(self) -> int:
        """Numbers of the buffer."""
        return self._row * 3 + self.batch * self.pages

    @property
    def _row(self) -> int:
        return max(self.batch, _ALIGNED)

    def fill(self, buffer: Ints, numbers: DecodeNumbers) -> None:
        """Write a step's numbers, and what stands for no number."""
        count, width = numbers.table.shape
        buffer[:] = 0
        rows = buffer[: 3 * self._row].reshape(3, self._row)
        rows[0] = -1
        rows[0, :count], rows[1, :count] = numbers.positions, numbers.tokens
        rows[2, :count] = numbers.slots
        table = buffer[3 * self._row :].reshape(self.batch, self.pages)
        table[:count, :width] = numbers.table

    def parts(self, buffer: Tensor) -> tuple[StepRows, Tensor]:
        """Return the rows and tokens [B] that a buffer on the device holds."""
        rows = buffer[: 3 * self._row].view(3, self._row)[:, : self.batch]
        table = buffer[3 * self._row :].view(self.batch, self.pages)
        return step_rows(rows[0], table, rows[2]), rows[1]

    def place(self, numbers: DecodeNumbers) -> Tensor:
        """Return a step's numbers in pinned memory, which torch keeps until copies end (R13)."""
        pinned = torch.empty(self.size, dtype=torch.int32, pin_memory=_can_pin())
        self.fill(pinned.numpy(), numbers)
        return pinned


@define
class _Captured:
    """A graph, the buffer it reads, and what it leaves: logits [B, V], tokens [B]."""

    graph: torch.cuda.CUDAGraph
    buffer: Tensor
    logits: Tensor
    tokens: Tensor


@define
class PoolGraphs:
    """The memory of all layers of one pool, and the steps that were captured over it."""

    layers: Memory
    captured: dict[Layout, _Captured] = field(factory=dict[Layout, _Captured])
    places: dict[LayerId, tuple[int, ...]] = field(init=False)
    """Where everything of each layer lies."""

    def __attrs_post_init__(self) -> None:
        """Note it once: every step is held against it."""
        self.places = {layer.id: part.addresses for layer, part in self.layers}


@final
class DecodeGraphs:
    """The captured decode steps of one model; used by one stream's worker.

    A graph belongs to the memory it was captured over, and goes when that does: a step of another
    pool captures its own.
    """

    def __init__(self, layers: DeviceLayers) -> None:
        """Nothing is captured before it is needed."""
        self._layers = layers
        self._pools: WeakKeyDictionary[object, PoolGraphs] = WeakKeyDictionary()

    def knows(self, memory: object) -> bool:
        """Whether all layers of this memory were opened before."""
        return memory in self._pools

    def of(self, memory: object, opened: Memory) -> PoolGraphs:
        """Return what is known of a memory, of which a step has opened some layers (at first: all).

        Raises:
            LayoutMismatch: a layer lies elsewhere than it did.
        """
        known = self._pools.get(memory)
        if known is None:
            known = self._pools[memory] = PoolGraphs(opened)
        if any(known.places[layer.id] != part.addresses for layer, part in opened):
            raise LayoutMismatch("a pool's memory has moved under a captured decode step")
        return known

    def run(
        self, numbers: DecodeNumbers, pool: PoolGraphs, rounds: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Run a step of B rows, each of its rounds on the best tokens of the one before.

        Returns the last logits [B, V] float32, and the best tokens [B] int32 of each round in host
        memory, true once the stream has got there. Ownership: the logits are the graph's own,
        valid in stream order until its next run.
        """
        count, layout = len(numbers.positions), Layout(*numbers.bucket)
        staged = layout.place(numbers)
        found = pool.captured.get(layout)
        if found is None:
            buffer = staged.to(self._layers.packed.weights.embed.device, copy=True)
            found = pool.captured[layout] = self._capture(buffer, layout, pool.layers)
        found.buffer.copy_(staged, non_blocking=True)
        drawn: list[Tensor] = []
        for _ in range(rounds):
            found.graph.replay()
            drawn.append(fetch(found.tokens[:count]))
        return found.logits[:count], drawn

    def _capture(self, buffer: Tensor, layout: Layout, memory: Memory) -> _Captured:
        rows, tokens = layout.parts(buffer)
        # the first run compiles; the step that follows begins anew and leaves the same rows
        self._step(rows, tokens, memory)
        graph = torch.cuda.CUDAGraph()
        # graphs run one at a time, so all may use the same memory
        others = chain.from_iterable(pool.captured.values() for pool in self._pools.values())
        pool = next((other.graph.pool() for other in others), None)
        # other streams go on meanwhile: only this thread's calls belong to the capture
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits, best = self._step(rows, tokens, memory)
        return _Captured(graph, buffer, logits, best)

    def _step(self, rows: StepRows, tokens: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        before: Pending | Tensor = tokens
        for layer, part in memory:
            before = self._layers.layer(before, tokens, layer, part, rows, None)
        assert isinstance(before, Pending), "a model has layers"
        return self._layers.finish(before, Following(rows.positions, tokens))
