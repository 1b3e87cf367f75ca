"""A model without arithmetic: all of the runtime, every component kept, rows one byte wide.

For cache studies on whole traces. It resolves every layer of every step, writes every row it should
through the leases, and draws tokens from a fixed mixing function of the last token and its
position; a decode step advances to the end of its page.
"""

from collections.abc import Sequence
from functools import partial
from typing import final

import numpy as np
import torch
from torch import Tensor

from kvlease.kernels.models.one_byte_model import OneByteModel
from kvlease.kernels.models.opening import StepView, open_layer_of
from kvlease.kernels.views import RowIndex, ring_rows, write_ring_rows, write_rows
from kvlease.protocols.geometries import V4Geometry
from kvlease.protocols.ownership import StepLease
from kvlease.protocols.ports import SampledToken, StepInput, Stream
from kvlease.protocols.schema import AnyLayer
from kvlease.protocols.views import (
    CompressorRows,
    HeavyStepView,
    OpenRows,
    SlidingStepView,
    SlotRows,
    SparseStepView,
)

NULL_GEOMETRY = V4Geometry(
    ("sliding", "sparse", "heavy", "sparse"),
    head_dim=64,
    rope_dim=16,
    index_head_dim=32,
    window=64,
    heavy_ratio=32,
)
"""The embedded model's layer kinds and ratios; widths do not matter here."""
VOCAB_SIZE = 129_280
MAX_POSITIONS = 1 << 20
_MULTIPLIER, _STEP = 1_103_515_245, 12_345


def next_token(token: int, position: int) -> int:
    """Return the token that follows ``token`` at ``position``: fixed, and spread over the ids."""
    return (token * _MULTIPLIER + position * _STEP + 1) % VOCAB_SIZE


@final
class _Rows:
    """Which rows and ring places a step fills, worked out once for all layers."""

    def __init__(self, inputs: StepInput) -> None:
        self.spans = [
            (part.start, part.start + len(part.tokens) + (part.may_produce - 1))
            for part in inputs.sequences
        ]
        self.index = RowIndex()
        self._paged: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._ringed: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def paged(self, tokens_per_row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sequences and numbers of rows that become whole within the step, and their bytes."""
        found = self._paged.get(tokens_per_row)
        if found is None:
            bounds = [(start // tokens_per_row, end // tokens_per_row) for start, end in self.spans]
            sequences, numbers = _ranges(bounds)
            found = self._paged[tokens_per_row] = sequences, numbers, _bytes_of(numbers)
        return found

    def ringed(self, ring: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sequences and ring places of the step's last positions, and their bytes."""
        found = self._ringed.get(ring)
        if found is None:
            bounds = [(max(start, end - ring), end) for start, end in self.spans]
            sequences, positions = _ranges(bounds)
            places = positions % ring
            found = self._ringed[ring] = sequences, places, _bytes_of(positions)
        return found


def _bytes_of(numbers: Tensor) -> Tensor:
    return (numbers % 251).to(torch.uint8).unsqueeze(1)


def _ranges(bounds: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    counts = [end - start for start, end in bounds]
    sequences = np.repeat(np.arange(len(bounds)), counts)
    numbers = [np.arange(start, end, dtype=np.int64) for start, end in bounds]
    return torch.from_numpy(sequences), torch.from_numpy(np.concatenate(numbers))


@final
class _Drawn:
    """The tokens of one step; known before its launches have run, read after."""

    def __init__(self, inputs: StepInput) -> None:
        self._tokens: list[list[SampledToken]] = []
        for part in inputs.sequences:
            drawn: list[SampledToken] = []
            if part.sample is not None:
                token, position = part.tokens[-1], part.start + len(part.tokens) - 1
                for _ in range(part.may_produce):
                    token = next_token(token, position)
                    position += 1
                    drawn.append(SampledToken(token))
            self._tokens.append(drawn)

    def tokens(self) -> Sequence[Sequence[SampledToken]]:
        """Return per sequence the tokens drawn."""
        return self._tokens


@final
class NullModel(OneByteModel):
    """A `ModelRunner` that moves bytes and computes nothing."""

    def __init__(self, page_tokens: int) -> None:
        """Raises ConfigError when the ratios do not divide ``page_tokens``."""
        super().__init__(
            "null", NULL_GEOMETRY, page_tokens, vocab_size=VOCAB_SIZE, positions=MAX_POSITIONS
        )
        self._ratios = {
            (layer.id, span.name): span.tokens_per_row
            for layer in self.schema.layers
            for span in layer.spans
        }

    async def forward(self, inputs: StepInput, lease: StepLease, stream: Stream) -> _Drawn:
        """Resolve every layer in turn and launch its writes.

        Checkpoints: only where a layer's lease waits. Raises TransferFailed as the leases do.
        """
        rows = _Rows(inputs)
        for layer in self.schema.layers:
            view = await open_layer_of(lease, layer, stream)
            stream.launch(partial(self._fill, layer, view, rows))
        return _Drawn(inputs)

    def _fill(self, layer: AnyLayer, view: StepView, rows: _Rows) -> None:
        for opened in _opened(view):
            sequences, numbers, stored = rows.paged(self._ratios[layer.id, opened.component])
            if len(numbers):
                write_rows(opened, sequences, numbers, stored, rows.index)
        for ring in _rings(view):
            sequences, places, stored = rows.ringed(ring_rows(ring))
            write_ring_rows(ring, sequences, places, stored, rows.index)


def _opened(view: StepView) -> tuple[OpenRows, ...]:
    match view:
        case SparseStepView():
            return view.latent_open, view.index_k_open
        case HeavyStepView():
            return (view.latent_open,)
        case SlidingStepView():
            return ()


def _rings(view: StepView) -> tuple[SlotRows, ...]:
    def pair(rows: CompressorRows) -> tuple[SlotRows, SlotRows]:
        return rows.kv, rows.gate

    match view:
        case SparseStepView():
            return view.window, *pair(view.compressor), *pair(view.index_compressor)
        case HeavyStepView():
            return view.window, *pair(view.compressor)
        case SlidingStepView():
            return (view.window,)
