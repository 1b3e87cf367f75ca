"""A model whose every answer depends on every byte it may read: a witness, not a language model.

Integer mixing stands where a transformer has arithmetic. Each position is mixed with the oldest
and the newest state that its rings still hold and with an earlier row of each span, as attention
and compressors would; an answer's digest covers every row and every ring of its sequence. So a
row that was read too early, reused too early or restored wrongly shows itself in the digest, or at
the latest in all that follows, at a cost of microseconds a token: thousands of runs a minute.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import cast, final

import torch
from attrs import define, frozen
from torch import Tensor

from kvlease.kernels.models.one_byte_model import OneByteModel
from kvlease.kernels.models.opening import StepView, open_layer_of
from kvlease.kernels.views import (
    RowIndex,
    read_pages,
    read_rings,
    write_ring_rows,
    write_rows,
)
from kvlease.protocols.geometries import V4Geometry
from kvlease.protocols.ownership import StepLease
from kvlease.protocols.ports import SampledToken, SequenceInput, StepInput, Stream
from kvlease.protocols.schema import (
    AnyLayer,
    SpanComponent,
    TailComponent,
)
from kvlease.protocols.views import (
    HeavyStepView,
    OpenRows,
    PagedRows,
    SlidingStepView,
    SlotRows,
    SparseStepView,
)

PAGE_TOKENS = 4
WITNESS_GEOMETRY = V4Geometry(
    ("sparse", "sliding"),
    head_dim=2,
    rope_dim=0,
    index_head_dim=2,
    window=6,
    sparse_ratio=2,
    heavy_ratio=4,
)
"""One layer with spans and one without; the window is longer than a page, so a tail covers two."""
VOCAB_SIZE = 97
MAX_POSITIONS = 1 << 16
_PRIME = 251
"""Rows hold values below this; the pools' poison is 255, so no row can equal it."""


@define
class _Ring:
    """One tail component of one sequence during a step, as plain numbers."""

    values: list[int]
    kept_rows: int
    salt: int

    def seen_from(self, position: int) -> int:
        """Mix the oldest value that a resumed sequence still has with the newest."""
        size = len(self.values)
        back = self.kept_rows or position % size
        if back == 0 or position < back:
            return 0
        return 3 * self.values[(position - back) % size] + self.values[(position - 1) % size]

    def put(self, position: int, value: int) -> None:
        """Write one position."""
        self.values[position % len(self.values)] = (value * self.salt + self.salt) % _PRIME

    def window(self, end: int) -> bytes:
        """Return the last positions before ``end``, oldest first."""
        size = len(self.values)
        kept = self.kept_rows or end % size
        return bytes(self.values[p % size] for p in range(max(0, end - kept), end))


@define
class _Span:
    """One span component of one sequence during a step: all its rows from the start."""

    rows: list[int]
    tokens_per_row: int
    salt: int

    def seen_from(self, position: int) -> int:
        """Return one earlier row, a different one for each position, as sparse attention would."""
        return self.rows[(7 * position + self.salt) % len(self.rows)] if self.rows else 0

    def put(self, position: int, value: int) -> None:
        """Close a row where one ends."""
        if (position + 1) % self.tokens_per_row == 0:
            self.rows.append((value * self.salt + position) % _PRIME)


@define
class _Running:
    """What one sequence of a step carries from layer to layer."""

    part: SequenceInput
    values: list[int]
    digest: hashlib.blake2b

    @property
    def end(self) -> int:
        """Tokens computed when the step is over."""
        return self.part.start + len(self.values)


@final
class _Step:
    """What the layers of one step share: its sequences, and the places that they fill.

    Also its result, once its last launch has run.
    """

    def __init__(self, inputs: StepInput) -> None:
        self.index = RowIndex()
        self.everyone = torch.arange(len(inputs.sequences))
        self.column = self.everyone.unsqueeze(1)
        self._before: list[tuple[SampledToken, ...]] = [()] * len(inputs.sequences)
        self._begin(inputs)

    def _begin(self, inputs: StepInput) -> None:
        self._inputs = inputs
        self.running = [
            _Running(part, list(part.tokens), hashlib.blake2b(digest_size=8))
            for part in inputs.sequences
        ]
        self.longest = max(part.start for part in inputs.sequences)
        self._rows: dict[int, _Places] = {}
        self._rings: dict[int, _Places] = {}

    def go_on(self) -> None:
        """Begin another round on the tokens that this one has drawn."""
        self._before = self.tokens()
        self._begin(self._inputs.following(mine[-1].token for mine in self._before))

    def tokens(self) -> list[tuple[SampledToken, ...]]:
        """Return per sequence the tokens drawn, each with a digest of all that it depends on."""
        return [
            (*before, *self._draw(one))
            for before, one in zip(self._before, self.running, strict=True)
        ]

    def _draw(self, one: _Running) -> tuple[SampledToken, ...]:
        if one.part.sample is None:
            return ()
        digest = one.digest.digest()
        token = int.from_bytes(digest[:4], "little") % VOCAB_SIZE
        return (SampledToken(token, digest=digest if self._inputs.digests else None),)

    def rows(self, tokens_per_row: int) -> "_Places":
        """Return which rows of a span the step completes."""
        found = self._rows.get(tokens_per_row)
        if found is None:
            numbers = [
                list(range(one.part.start // tokens_per_row, one.end // tokens_per_row))
                for one in self.running
            ]
            found = self._rows[tokens_per_row] = _Places(numbers)
        return found

    def rings(self, size: int) -> "_Places":
        """Return which places of a ring the step's last positions have."""
        found = self._rings.get(size)
        if found is None:
            numbers = [
                [p % size for p in range(max(one.part.start, one.end - size), one.end)]
                for one in self.running
            ]
            found = self._rings[size] = _Places(numbers)
        return found


@final
class _Places:
    """Numbers of rows or places per sequence, and the same as index tensors [G] int64."""

    def __init__(self, numbers: list[list[int]]) -> None:
        self.numbers = numbers
        self.sequences = torch.tensor([n for n, mine in enumerate(numbers) for _ in mine])
        self.flat = torch.tensor([number for mine in numbers for number in mine])

    def stored(self, values: Sequence[list[int]]) -> Tensor:
        """Pick the values at the places of each sequence, [G, 1] bytes."""
        picked = [
            its[number] for its, mine in zip(values, self.numbers, strict=True) for number in mine
        ]
        return torch.tensor(picked, dtype=torch.uint8).unsqueeze(1)


@frozen
class _Handles:
    """One layer's components in a fixed order: spans (to read, to write) and rings."""

    spans: tuple[tuple[PagedRows, OpenRows], ...]
    rings: tuple[SlotRows, ...]


@final
class WitnessModel(OneByteModel):
    """A `ModelRunner` that reads everything it may and mixes it into its answers; greedy only."""

    def __init__(
        self, geometry: V4Geometry = WITNESS_GEOMETRY, page_tokens: int = PAGE_TOKENS
    ) -> None:
        """Raises ConfigError when the ratios do not divide ``page_tokens``."""
        super().__init__(
            "witness", geometry, page_tokens, vocab_size=VOCAB_SIZE, positions=MAX_POSITIONS
        )

    async def forward(self, inputs: StepInput, lease: StepLease, stream: Stream) -> _Step:
        """Resolve every layer in turn and launch its work.

        Checkpoints: only where a layer's lease waits. Raises TransferFailed as the leases do.
        """
        step = _Step(inputs)
        opened: list[tuple[AnyLayer, _Handles]] = []
        for layer in self.schema.layers:
            handles = _handles(await open_layer_of(lease, layer, stream))
            opened.append((layer, handles))
            stream.launch(partial(_run_layer, layer, handles, step))
        for _ in range(1, min(part.may_produce for part in inputs.sequences)):
            stream.launch(step.go_on)
            for layer, handles in opened:
                stream.launch(partial(_run_layer, layer, handles, step))
        return step


def _handles(view: StepView) -> _Handles:
    match view:
        case SparseStepView():
            spans = ((view.latent, view.latent_open), (view.index_k, view.index_k_open))
            main, index = view.compressor, view.index_compressor
            return _Handles(spans, (view.window, main.kv, main.gate, index.kv, index.gate))
        case HeavyStepView():
            rings = (view.window, view.compressor.kv, view.compressor.gate)
            return _Handles(((view.latent, view.latent_open),), rings)
        case SlidingStepView():
            return _Handles((), (view.window,))


def _run_layer(layer: AnyLayer, handles: _Handles, step: _Step) -> None:
    """Read everything, mix, and write what the step computed; on the compute stream."""
    spans = [
        _read_span(span, rows, salt, step)
        for salt, (span, (rows, _)) in enumerate(zip(layer.spans, handles.spans, strict=True), 3)
    ]
    rings = [
        _read_ring(tail, ring, salt, step)
        for salt, (tail, ring) in enumerate(zip(layer.tails, handles.rings, strict=True), 5)
    ]
    for number, one in enumerate(step.running):
        _mix(one, [its[number] for its in spans], [its[number] for its in rings])
    for its, (_, opened) in zip(spans, handles.spans, strict=True):
        places = step.rows(its[0].tokens_per_row)
        if len(places.flat):
            stored = places.stored([span.rows for span in its])
            write_rows(opened, places.sequences, places.flat, stored, step.index)
    for mine, ring in zip(rings, handles.rings, strict=True):
        places = step.rings(len(mine[0].values))
        stored = places.stored([one.values for one in mine])
        write_ring_rows(ring, places.sequences, places.flat, stored, step.index)


def _mix(one: _Running, spans: Sequence[_Span], rings: Sequence[_Ring]) -> None:
    """Carry the sequence's positions through one layer, in order, and digest what it reads."""
    components: tuple[_Span | _Ring, ...] = (*spans, *rings)
    for offset, position in enumerate(range(one.part.start, one.end)):
        value = one.values[offset] + position
        for component in components:
            value = (31 * value + component.seen_from(position)) % _PRIME
        for component in components:
            component.put(position, value)
        one.values[offset] = value
    for ring in rings:
        one.digest.update(ring.window(one.end))
    for span in spans:
        one.digest.update(bytes(span.rows))


def _read_span(span: SpanComponent, rows: PagedRows, salt: int, step: _Step) -> list[_Span]:
    """Read all rows that each sequence had before this step."""
    most = step.longest // span.tokens_per_row
    stored: list[list[int]] = [[]] * len(step.running)
    if most:
        stored = _numbers(read_pages(rows, step.column, most, step.index))
    return [
        _Span(mine[: one.part.start // span.tokens_per_row], span.tokens_per_row, salt)
        for one, mine in zip(step.running, stored, strict=True)
    ]


def _read_ring(tail: TailComponent, ring: SlotRows, salt: int, step: _Step) -> list[_Ring]:
    values = _numbers(read_rings(ring, step.everyone))
    return [_Ring(mine, tail.kept_rows, salt) for mine in values]


def _numbers(rows: Tensor) -> list[list[int]]:
    """Return rows of one byte, [M, L, 1], as numbers per sequence."""
    return cast("list[list[int]]", rows.squeeze(2).tolist())
