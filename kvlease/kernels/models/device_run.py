"""One step on a CUDA stream by kernels: layer by layer as leases resolve, or as one graph.

Has the launches of ``StepRun``; every method runs on the stream's worker, in order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import cast, final

import numpy as np
import torch
from torch import Tensor

from kvlease.errors import UsageError
from kvlease.kernels.gpu.step_rows import StepRows
from kvlease.kernels.models.attention_block import StepView
from kvlease.kernels.models.chunk_state import ChunkState
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.decode_graph import MAX_BUCKET, DecodeGraphs, DecodeNumbers
from kvlease.kernels.models.device_rows import open_layer, paged_rows, place_parts, step_rows
from kvlease.kernels.models.device_step import DeviceLayers, Pending
from kvlease.kernels.models.device_weights import pack_weights, runs_on_kernels
from kvlease.kernels.models.step_run import TokensDrawn
from kvlease.kernels.models.weights import ModelWeights
from kvlease.kernels.placing import fetch, place
from kvlease.kernels.sampling_device import PendingDraw
from kvlease.kernels.step_plan import StepPlan
from kvlease.kernels.tiling import FAST
from kvlease.kernels.views import pages_of, require_open, slots_of
from kvlease.protocols.ports import SampledToken, Sampling, StepInput
from kvlease.protocols.schema import AnyLayer
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
        self._plan: StepPlan | None = None
        self._chunk: ChunkState | None = None
        self._own: Tensor | None = None
        self._rows: StepRows | None = None
        self._has_table = False
        self.result = TokensDrawn()

    @property
    def fits_a_graph(self) -> bool:
        """Whether this is a decode step of a size that graphs are captured for."""
        sequences = self._inputs.sequences
        is_decode = all(len(part.tokens) == 1 for part in sequences)
        return is_decode and len(sequences) <= MAX_BUCKET and self._device.type == "cuda"

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
        self._require_open(view, plan)
        config = self._layers.config
        windows = None
        if self._chunk is not None and self._own is not None:
            windows = self._chunk.windows(view, self._own, config.head_dim)
        before = plan.tokens.int() if self._before is None else self._before
        self._before, joined = self._layers.layer(
            before, plan.tokens, layer, open_layer(view), rows, windows
        )
        if self._chunk is not None and windows is not None:
            weights = self._layers.packed.layers[layer.id].weights.attention
            column = config.q_rank + config.head_dim
            whole = joined[0] if len(joined) == 1 else joined.sum(0)
            self._chunk.keep(view, windows, whole, weights, column)

    def _placed(self, view: StepView) -> tuple[StepPlan, StepRows]:
        """Return the step's rows on the device, with page tables once a layer has any."""
        plan = self._plan
        if plan is None:
            raise UsageError("the step's launches ran out of order: begin() comes first")
        if self._rows is None:
            numbers = [plan.host_positions, slots_of(view.window).numpy()]
            if self._chunk is not None:
                numbers += [plan.host_sequences, plan.host_starts, self._chunk.own]
            parts = place_parts([part.astype(np.int32) for part in numbers], self._device)
            positions, slots, *of_chunk = parts
            sequences, starts, self._own = of_chunk or (None, None, None)
            no_table = positions.unsqueeze(1)
            self._rows = step_rows(positions, no_table, slots, sequences, starts)
        handle = paged_rows(view)
        if handle is not None and not self._has_table:
            table = place(pages_of(handle).int(), self._device)
            self._rows = self._rows._replace(table=table, table_row=table.stride(0))
            self._has_table = True
        return plan, self._rows

    def _require_open(self, view: StepView, plan: StepPlan) -> None:
        """Check that the groups which end in this step lie in the sequences' open pages."""
        if isinstance(view, SlidingStepView):
            return
        config = self._layers.config
        ratio, opened = config.heavy_ratio, [view.latent_open]
        if isinstance(view, SparseStepView):
            ratio, opened = config.sparse_ratio, [view.latent_open, view.index_k_open]
        ends = plan.endings(ratio)
        if ends is not None:
            for handle in opened:
                require_open(handle, *ends, plan.index)

    @torch.inference_mode()
    def finish(self) -> None:
        """Compute logits of the rows asked for, draw tokens, and drop the hidden state."""
        plan, before = self._plan, self._before
        if plan is None or not isinstance(before, Pending):
            raise UsageError("the step's launches ran out of order: begin() comes first")
        asked = self._asked()
        if any(asked):
            last = place(torch.from_numpy(plan.last_rows[asked]), self._device)
            logits, tokens = self._layers.finish(before.rows(last))
            self._tell(logits, tokens, asked)
        else:
            self.result.fill(list[SampledToken], asked, None)
        self._plan = self._before = self._rows = self._chunk = None

    @torch.inference_mode()
    def whole(self, layers: Sequence[tuple[AnyLayer, StepView]]) -> None:
        """Run a whole decode step, all of whose layers are resolved, by one captured graph."""
        self.begin()
        plan = self._plan
        assert plan is not None
        for _, view in layers:
            self._require_open(view, plan)
        tables = [handle for _, view in layers if (handle := paged_rows(view)) is not None]
        count = len(self._inputs.sequences)
        numbers = DecodeNumbers(
            plan.host_positions.astype(np.int32),
            plan.host_tokens.astype(np.int32),
            slots_of(layers[0][1].window).numpy().astype(np.int32),
            pages_of(tables[0]).numpy().astype(np.int32) if tables else np.zeros((count, 1), "i4"),
        )
        memory = [(layer, open_layer(view)) for layer, view in layers]
        logits, tokens = self._graphs.run(numbers, memory)
        asked = self._asked()
        if not all(asked):
            rows = place(torch.tensor([n for n, asks in enumerate(asked) if asks]), self._device)
            logits, tokens = logits.index_select(0, rows), tokens.index_select(0, rows)
        self._tell(logits, tokens, asked)

    def _asked(self) -> list[bool]:
        return [part.sample is not None for part in self._inputs.sequences]

    def _tell(self, logits: Tensor, tokens: Tensor, asked: Sequence[bool]) -> None:
        """Draw in the stream's order and leave the result."""
        sequences = self._inputs.sequences
        how = [way for part in sequences if (way := part.sample) is not None]
        places = [part.start + len(part.tokens) for part in compress(sequences, asked)]
        if self._inputs.digests or not all(map(_is_greedy, how)):
            draw = PendingDraw(logits, how, places, digests=self._inputs.digests)
            self.result.fill(draw.collect, asked, logits)
        else:
            self.result.fill(partial(_name_tokens, fetch(tokens)), asked, logits)


def _name_tokens(tokens: Tensor) -> list[SampledToken]:
    return [SampledToken(token) for token in cast("list[int]", tokens.tolist())]


def _is_greedy(way: Sampling) -> bool:
    return way.temperature == 0 and not way.banned and way.logprobs is None


def kernel_runs(
    config: V4Config, weights: ModelWeights, dtype: torch.dtype
) -> Callable[[StepInput], DeviceRun] | None:
    """Return what begins a step of this model by kernels, None if they cannot run it."""
    if not runs_on_kernels(config, weights, dtype):
        return None
    layers = DeviceLayers(config, pack_weights(config, weights))
    return partial(DeviceRun, layers, DecodeGraphs(layers))
