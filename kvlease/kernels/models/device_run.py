"""One step on a CUDA stream by kernels: layer by layer as leases resolve, or as one graph.

Has the launches of ``StepRun``; every method runs on the stream's worker, in order.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import compress
from typing import cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlease.errors import UsageError
from kvlease.kernels.gpu.compile_ahead import compile_ahead
from kvlease.kernels.gpu.step_rows import StepRows
from kvlease.kernels.models.chunk_state import ChunkState
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.decode_graph import (
    LEAST_PAGES,
    MAX_BUCKET,
    DecodeGraphs,
    DecodeNumbers,
    Layout,
)
from kvlease.kernels.models.device_attention import ChunkWindows
from kvlease.kernels.models.device_rows import Ints, open_layer, paged_rows, place_parts, step_rows
from kvlease.kernels.models.device_step import DeviceLayers, Pending
from kvlease.kernels.models.device_weights import pack_weights, runs_on_kernels
from kvlease.kernels.models.opening import StepView
from kvlease.kernels.models.rehearsal import Rehearsal, rehearse
from kvlease.kernels.models.step_run import Collect, TokensDrawn
from kvlease.kernels.models.weights import ModelWeights
from kvlease.kernels.placing import fetch, place
from kvlease.kernels.sampling_device import PendingDraw
from kvlease.kernels.step_plan import Endings, StepPlan
from kvlease.kernels.tiling import FAST
from kvlease.kernels.views import RowIndex, pages_of, require_open, slots_of
from kvlease.protocols.ports import SampledToken, StepInput
from kvlease.protocols.schema import AnyLayer, Schema
from kvlease.protocols.views import SlidingStepView, SparseStepView


@final
class DeviceRun:
    """The hidden state of one step, and how each launch advances it."""

    def __init__(self, layers: DeviceLayers, graphs: DecodeGraphs, inputs: StepInput) -> None:
        """Borrows everything until the step's last launch has run."""
        self._layers = layers
        self._graphs = graphs
        self._inputs = inputs
        self._device = layers.packed.weights.embed.device
        self._before: Pending | Tensor | None = None
        self._tokens: Tensor | None = None
        self._plan: StepPlan | None = None
        self._chunk: ChunkState | None = None
        self._windows: ChunkWindows | None = None
        self._rows: StepRows | None = None
        self._has_table = False
        self.rounds = 1
        self.result = TokensDrawn()

    @property
    def fits_a_graph(self) -> bool:
        """Whether this is a decode step of a size that graphs are captured for."""
        sequences = self._inputs.sequences
        is_decode = all(len(part.tokens) == 1 for part in sequences)
        return is_decode and len(sequences) <= MAX_BUCKET and self._device.type == "cuda"

    def knows(self, memory: object) -> bool:
        """Whether graphs have the addresses of this memory."""
        return self._graphs.knows(memory)

    def begin(self) -> None:
        """Lay out the step's rows; what needs page tables waits for the first layer."""
        sequences = self._inputs.sequences
        starts = [part.start for part in sequences]
        self._plan = StepPlan(starts, [part.tokens for part in sequences], FAST, self._device)
        if not self._plan.is_decode:
            config = self._layers.config
            lengths = [len(part.tokens) for part in sequences]
            self._chunk = ChunkState(
                self._plan, starts, lengths, config.window, config.sparse_ratio
            )

    @torch.inference_mode()
    def layer(self, layer: AnyLayer, view: StepView) -> None:
        """Run one layer: attention, then experts."""
        plan, rows = self._placed(view)
        self._require_open(view, plan.endings, plan.index)
        assert self._before is not None, "tokens are placed with the rows"
        assert self._tokens is not None, "tokens are placed with the rows"
        self._before = self._layers.layer(
            self._before, self._tokens, layer, open_layer(view), rows, self._windows
        )

    def _placed(self, view: StepView) -> tuple[StepPlan, StepRows]:
        """Return the step's rows on the device, with page tables once a layer has any."""
        plan = self._plan
        if plan is None:
            raise UsageError("the step's launches ran out of order: begin() comes first")
        if self._rows is None:
            self._rows = self._first_rows(plan, view)
        handle = paged_rows(view)
        if handle is not None and not self._has_table:
            if self._chunk is None:
                self._rows = self._first_rows(plan, view)
            else:
                (table,) = place_parts([_filled(pages_of(handle).numpy())], self._device)
                self._rows = self._rows._replace(table=table, table_row=table.stride(0))
            self._has_table = True
        return plan, self._rows

    def _first_rows(self, plan: StepPlan, view: StepView) -> StepRows:
        """Place what does not need page tables. A decode step is as wide as its graph would be."""
        numbers = _numbers(plan.host_positions, plan.host_tokens, [view])
        if self._chunk is None:
            layout = Layout(*numbers.bucket)
            placed = layout.place(numbers).to(self._device, non_blocking=True)
            rows, self._tokens = layout.parts(placed)
            if self._before is None:
                self._before = self._tokens
            return rows
        host = (
            numbers.positions, numbers.tokens, numbers.slots, plan.host_sequences,
            plan.host_starts, self._chunk.lasts, self._chunk.own,
        )  # fmt: skip
        parts = place_parts([part.astype(np.int32) for part in host], self._device)
        positions, self._tokens, slots, sequences, starts, lasts, own = parts
        self._before = self._tokens
        self._windows = self._chunk.windows(own, self._layers.config.head_dim)
        rows = step_rows(positions, positions.unsqueeze(1), slots, sequences, starts, lasts)
        # nobody reads a table yet; kernels are compiled for the width that it will have
        return rows._replace(table_row=LEAST_PAGES)

    def _require_open(self, view: StepView, endings: Endings, index: RowIndex) -> None:
        """Check that the groups which end in this step lie in the sequences' open pages."""
        if isinstance(view, SlidingStepView):
            return
        config = self._layers.config
        ratio, opened = config.heavy_ratio, [view.latent_open]
        if isinstance(view, SparseStepView):
            ratio, opened = config.sparse_ratio, [view.latent_open, view.index_k_open]
        ends = endings.of(ratio)
        if ends is not None:
            for handle in opened:
                require_open(handle, *ends, index)

    @torch.inference_mode()
    def finish(self) -> None:
        """Compute logits of the rows asked for, draw tokens, and drop the hidden state."""
        plan, before = self._plan, self._before
        if plan is None or not isinstance(before, Pending):
            raise UsageError("the step's launches ran out of order: begin() comes first")
        asked = self._asked()
        if any(asked):
            last = place(torch.from_numpy(plan.last_rows[asked]), self._device)
            logits, tokens = self._layers.finish(before.rows(last), None)
            best = partial(_name_tokens, fetch(tokens), range(len(tokens)))
            self._tell(logits, [best], asked)
        else:
            self.result.fill([list[SampledToken]], asked, None)
        self._plan = self._before = self._tokens = self._rows = self._chunk = self._windows = None

    @torch.inference_mode()
    def whole(self, layers: Sequence[tuple[AnyLayer, StepView]], memory: object) -> None:
        """Run a whole decode step, all of whose layers are resolved, by one captured graph.

        Its replays go on from each other's tokens, as many as the step may return.
        """
        sequences = self._inputs.sequences
        count = len(sequences)
        ahead = min(part.may_produce for part in sequences) if self._is_greedy else 1
        positions = np.fromiter((part.start for part in sequences), np.int64, count)
        tokens = np.fromiter((part.tokens[0] for part in sequences), np.int64, count)
        filled = (positions[:, None] + np.arange(ahead)).ravel()
        endings, index = Endings(np.repeat(np.arange(count), ahead), filled), RowIndex()
        for _, view in layers:
            self._require_open(view, endings, index)
        numbers = _numbers(positions, tokens, [view for _, view in layers])
        opened = [(layer, open_layer(view)) for layer, view in layers]
        logits, tokens = self._graphs.run(numbers, self._graphs.of(memory, opened), ahead)
        asked = self._asked()
        rows = [row for row, asks in enumerate(asked) if asks]
        if len(rows) < count:
            logits = logits.index_select(
                0, place(torch.tensor(rows, dtype=torch.int64), self._device)
            )
        self._tell(logits, [partial(_name_tokens, one, rows) for one in tokens], asked)

    @cached_property
    def _is_greedy(self) -> bool:
        """Whether nothing is asked for but the best token of each row."""
        ways = (part.sample for part in self._inputs.sequences)
        return not self._inputs.digests and all(way is None or way.is_greedy for way in ways)

    def _asked(self) -> list[bool]:
        return [part.sample is not None for part in self._inputs.sequences]

    def _tell(self, logits: Tensor, best: Sequence[Collect], asked: Sequence[bool]) -> None:
        """Draw in the stream's order, unless each round's best tokens do; leave the result."""
        if self._is_greedy:
            self.result.fill(best, asked, logits)
        else:
            sequences = self._inputs.sequences
            how = [way for part in sequences if (way := part.sample) is not None]
            places = [part.start + len(part.tokens) for part in compress(sequences, asked)]
            draw = PendingDraw(logits, how, places, digests=self._inputs.digests)
            self.result.fill([draw.collect], asked, logits)


def _numbers(
    positions: NDArray[np.int64], tokens: NDArray[np.int64], views: Sequence[StepView]
) -> DecodeNumbers:
    """Return a step's numbers; an empty table where none of the views has pages."""
    slots = slots_of(views[0].window).numpy()
    handle = next((h for view in views if (h := paged_rows(view)) is not None), None)
    table = np.zeros((len(slots), 1), np.int64) if handle is None else pages_of(handle).numpy()
    return DecodeNumbers(positions, tokens, slots, table)


def _filled(table: NDArray[np.int64]) -> Ints:
    """Return a chunk's page table as wide as a decode step's would be at least.

    Kernels are compiled once for all widths that are multiples of 16.
    """
    count, width = table.shape
    filled = np.zeros((count, -(-width // LEAST_PAGES) * LEAST_PAGES), np.int32)
    filled[:, :width] = table
    return filled


def _name_tokens(tokens: Tensor, rows: Sequence[int]) -> list[SampledToken]:
    names = cast("list[int]", tokens.tolist())
    return [SampledToken(names[row]) for row in rows]


@final
class KernelRuns:
    """Begins one model's steps; its graphs are shared by them all."""

    def __init__(self, layers: DeviceLayers) -> None:
        """Share the weights."""
        self.layers = layers
        self.graphs = DecodeGraphs(layers)

    def __call__(self, inputs: StepInput) -> DeviceRun:
        """Begin a step; borrows the inputs until its last launch has run."""
        return DeviceRun(self.layers, self.graphs, inputs)

    def compile_ahead(
        self, schema: Schema, sessions: int, pages: int, told: Callable[[int, int], None]
    ) -> int:
        """Compile what steps of up to so many sequences of so many pages launch."""
        sizes = Rehearsal.of(sessions, pages)
        return compile_ahead(partial(rehearse, self.layers, schema, sizes), told)


def kernel_runs(config: V4Config, weights: ModelWeights, dtype: torch.dtype) -> KernelRuns | None:
    """Return what begins a step of this model by kernels, None if they cannot run it."""
    if not runs_on_kernels(config, weights, dtype):
        return None
    return KernelRuns(DeviceLayers(config, pack_weights(config, weights)))
