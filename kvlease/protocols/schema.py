"""What a page is made of for one model: components, layers, and the schema that joins them.

Everything that moves, counts, frees, hashes or checks pages derives from the schema; nothing else
lists components by hand. This module does not know where rows lie or how they are computed.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from enum import Enum
from functools import cached_property
from typing import Generic, Literal, Protocol, TypeVar

import msgspec
from attrs import field, frozen

from kvlease.errors import ConfigError
from kvlease.protocols.views import (
    CompressorRows,
    DenseStepView,
    DenseView,
    HeavyStepView,
    HeavyView,
    IndexedStepView,
    IndexedView,
    OpenRows,
    PagedRows,
    SlidingStepView,
    SlidingView,
    SlotRows,
    SparseStepView,
    SparseView,
)
from kvlease.units import LayerId

Encoding = Literal["float64", "float32", "bfloat16", "fp8_latent", "fp8_index", "byte"]
"""How one row lies in memory; the fp8 kinds carry their scales inside the row, or the page."""

_PLAIN_NBYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "byte": 1}
FP8_TILE = 64
"""Channels that share one power-of-two scale in an fp8 latent row."""


class Sharing(Enum):
    """How tensor-parallel ranks hold a component."""

    REPLICATED = "replicated"
    BY_HEAD = "by_head"
    BY_ROW = "by_row"


@frozen
class RowFormat:
    """The format of one row: ``width`` values, of which the last ``rope_width`` carry RoPE."""

    encoding: Encoding
    width: int
    rope_width: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one stored row, scales and padding included."""
        if self.encoding == "fp8_latent":
            nope = self.width - self.rope_width
            scales = -(-nope // FP8_TILE)
            return nope + 2 * self.rope_width + -(-scales // 8) * 8
        if self.encoding == "fp8_index":
            return self.width + 4
        return self.width * _PLAIN_NBYTES[self.encoding]

    @property
    def planes(self) -> tuple[int, ...]:
        """Bytes of a row's parts, where a page keeps each part of all its rows together; else ().

        Index keys are read by whole pages, and their scales beside them would leave no key aligned.
        """
        return (self.width, 4) if self.encoding == "fp8_index" else ()

    @property
    def is_plain(self) -> bool:
        """Whether a row is simply ``width`` values of one dtype."""
        return self.encoding in _PLAIN_NBYTES


@frozen
class SpanComponent:
    """State that every page of a prefix needs: one row per ``tokens_per_row`` tokens."""

    name: str
    format: RowFormat
    tokens_per_row: int
    sharing: Sharing = Sharing.REPLICATED


@frozen
class TailComponent:
    """State needed only where computing resumes.

    A running sequence keeps a ring of ``ring_rows`` rows (position p at p % ring_rows). At a page
    boundary b the tail keeps the rows of positions b - kept_rows .. b - 1, and of each row the
    first ``kept_width`` values. ``rewind_tokens`` is how many tokens the ring can be taken back
    without a kept tail.
    """

    name: str
    format: RowFormat
    ring_rows: int
    kept_rows: int
    kept_width: int
    rewind_tokens: int = 0
    sharing: Sharing = Sharing.REPLICATED

    @cached_property
    def kept_nbytes(self) -> int:
        """Bytes this component adds to one kept tail."""
        return self.kept_rows * (self.format.nbytes // self.format.width) * self.kept_width


class ViewSource(Protocol):
    """What a pool offers a layer for building its view; each call names a component."""

    def paged(self, name: str) -> PagedRows:
        """Rows of a span component, read only."""
        ...

    def opened(self, name: str) -> OpenRows:
        """Rows of a span component above the sealed ones, for writing."""
        ...

    def ring(self, name: str) -> SlotRows:
        """State rings of a tail component."""
        ...


R = TypeVar("R")
W = TypeVar("W")


@frozen
class Layer(ABC, Generic[R, W]):
    """One layer's cached state; R is the view of a shared lease, W the view inside a step."""

    id: LayerId
    spans: tuple[SpanComponent, ...]
    tails: tuple[TailComponent, ...]

    @abstractmethod
    def read_view(self, source: ViewSource) -> R:
        """Build what a shared lease of this layer resolves to."""

    @abstractmethod
    def step_view(self, source: ViewSource) -> W:
        """Build what a step's lease of this layer resolves to."""


def _compressor(source: ViewSource, prefix: str) -> CompressorRows:
    return CompressorRows(source.ring(f"{prefix}_kv"), source.ring(f"{prefix}_gate"))


@frozen
class SlidingLayer(Layer[SlidingView, SlidingStepView]):
    """Keeps the last ``window`` raw tokens and nothing per page."""

    def read_view(self, source: ViewSource) -> SlidingView:
        """Nothing per page: an empty view."""
        return SlidingView()

    def step_view(self, source: ViewSource) -> SlidingStepView:
        """The window rings."""
        return SlidingStepView(source.ring("window"))


@frozen
class SparseLayer(Layer[SparseView, SparseStepView]):
    """Compressed-sparse: latent rows and index keys, one each per ``ratio`` tokens."""

    def read_view(self, source: ViewSource) -> SparseView:
        """Latent rows and index keys."""
        return SparseView(source.paged("latent"), source.paged("index_k"))

    def step_view(self, source: ViewSource) -> SparseStepView:
        """Rows, the open page, the window and both compressors' running state."""
        return SparseStepView(
            window=source.ring("window"),
            latent=source.paged("latent"),
            index_k=source.paged("index_k"),
            latent_open=source.opened("latent"),
            index_k_open=source.opened("index_k"),
            compressor=_compressor(source, "compressor"),
            index_compressor=_compressor(source, "index_compressor"),
        )


@frozen
class HeavyLayer(Layer[HeavyView, HeavyStepView]):
    """Heavily compressed: one latent row per ``ratio`` tokens, all of them read."""

    def read_view(self, source: ViewSource) -> HeavyView:
        """Latent rows."""
        return HeavyView(source.paged("latent"))

    def step_view(self, source: ViewSource) -> HeavyStepView:
        """Rows, the open page, the window and the compressor's running state."""
        return HeavyStepView(
            window=source.ring("window"),
            latent=source.paged("latent"),
            latent_open=source.opened("latent"),
            compressor=_compressor(source, "compressor"),
        )


@frozen
class IndexedLayer(Layer[IndexedView, IndexedStepView]):
    """Multi-head latent attention with an indexer (DeepSeek-V3.2, GLM-5): a row per token."""

    def read_view(self, source: ViewSource) -> IndexedView:
        """Latent rows and index keys."""
        return IndexedView(source.paged("latent"), source.paged("index_k"))

    def step_view(self, source: ViewSource) -> IndexedStepView:
        """Rows and the open page."""
        return IndexedStepView(
            latent=source.paged("latent"),
            index_k=source.paged("index_k"),
            latent_open=source.opened("latent"),
            index_k_open=source.opened("index_k"),
        )


@frozen
class DenseLayer(Layer[DenseView, DenseStepView]):
    """Grouped-query attention: keys and values per token, shared by head."""

    def read_view(self, source: ViewSource) -> DenseView:
        """Keys and values."""
        return DenseView(source.paged("k"), source.paged("v"))

    def step_view(self, source: ViewSource) -> DenseStepView:
        """Keys, values and the open page."""
        return DenseStepView(
            k=source.paged("k"),
            v=source.paged("v"),
            k_open=source.opened("k"),
            v_open=source.opened("v"),
        )


AnyLayer = SlidingLayer | SparseLayer | HeavyLayer | IndexedLayer | DenseLayer
"""The closed set of layer kinds, for ``match``."""


@frozen
class Schema:
    """All layers of one model, and the page size that cuts them.

    Raises ConfigError when ``page_tokens`` is not a positive multiple of every compression ratio,
    or when layer ids are not 0, 1, 2, ... in order.
    """

    family: str
    page_tokens: int
    layers: tuple[AnyLayer, ...]
    digest: str = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Check the geometry once, where it is made."""
        if self.page_tokens <= 0:
            raise ConfigError(f"page_tokens is {self.page_tokens}; give a positive number")
        if [layer.id for layer in self.layers] != list(range(len(self.layers))):
            raise ConfigError(f"{self.family}: layer ids must be 0, 1, 2, ... in order")
        for layer in self.layers:
            for span in layer.spans:
                if self.page_tokens % span.tokens_per_row:
                    raise ConfigError(
                        f"page_tokens {self.page_tokens} is not a multiple of"
                        f" {span.tokens_per_row}, the tokens per row of {span.name} in layer"
                        f" {layer.id}; choose a multiple of {span.tokens_per_row}"
                    )
        object.__setattr__(self, "digest", _digest(self))

    @property
    def num_layers(self) -> int:
        """How many layers the schema has."""
        return len(self.layers)

    @cached_property
    def needs_tail(self) -> bool:
        """Whether computing can resume only at a boundary that holds a tail."""
        return any(tail.kept_rows for layer in self.layers for tail in layer.tails)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page's span over all layers."""
        return sum(self.span_nbytes(layer) for layer in self.layers)

    @property
    def tail_nbytes(self) -> int:
        """Bytes of one kept tail over all layers."""
        return sum(tail.kept_nbytes for layer in self.layers for tail in layer.tails)

    def rows_per_page(self, span: SpanComponent) -> int:
        """Rows that one page holds of a span component."""
        return self.page_tokens // span.tokens_per_row

    def span_nbytes(self, layer: AnyLayer) -> int:
        """Bytes of one page's span in one layer."""
        return sum(self.rows_per_page(span) * span.format.nbytes for span in layer.spans)

    def parts(self, *, spans: bool, tails: bool) -> frozenset[tuple[int, str]]:
        """Return every (layer, component) that moves with pages, with kept tails, or with both."""
        return frozenset(
            (layer.id, name)
            for layer in self.layers
            for name in (
                *(span.name for span in layer.spans if spans),
                *(tail.name for tail in layer.tails if tails and tail.kept_rows),
            )
        )

    def component_names(self) -> tuple[str, ...]:
        """Names of all components, each once, in order of first appearance."""
        names: dict[str, None] = {}
        for layer in self.layers:
            for span in layer.spans:
                names.setdefault(span.name)
            for tail in layer.tails:
                names.setdefault(tail.name)
        return tuple(names)


def _digest(schema: Schema) -> str:
    """Hash of everything that decides the bytes of a page: part of the cache identity (R10)."""
    facts = [
        [
            type(layer).__name__,
            [[s.name, s.format.encoding, s.format.width, s.format.rope_width, s.tokens_per_row]
             for s in layer.spans],
            [[t.name, t.format.encoding, t.format.width, t.ring_rows, t.kept_rows, t.kept_width]
             for t in layer.tails],
        ]
        for layer in schema.layers
    ]  # fmt: skip
    body = msgspec.json.encode([schema.family, schema.page_tokens, facts])
    return hashlib.blake2b(body, digest_size=16).hexdigest()
