"""Schemas of the model families kvlease knows, from a few numbers each.

A family that is not here is built the same way from the classes of ``schema``. This module reads
no checkpoint.
"""

from collections.abc import Sequence
from typing import Literal

from attrs import evolve, frozen

from kvlease.errors import ConfigError
from kvlease.protocols.schema import (
    AnyLayer,
    DenseLayer,
    Encoding,
    HeavyLayer,
    IndexedLayer,
    RowFormat,
    Schema,
    Sharing,
    SlidingLayer,
    SpanComponent,
    SparseLayer,
    TailComponent,
)
from kvlease.units import LayerId

LayerKind = Literal["sliding", "sparse", "heavy"]
ComputeDtype = Literal["float64", "float32", "bfloat16"]
StoreFormat = Literal["bf16", "fp8", "same"]


@frozen
class V4Geometry:
    """The numbers of a DeepSeek-V4 model that decide its cached state (tokens and channels)."""

    layer_kinds: tuple[LayerKind, ...]
    head_dim: int
    rope_dim: int
    index_head_dim: int
    window: int
    sparse_ratio: int = 4
    heavy_ratio: int = 128


def _latent_format(fmt: StoreFormat, dtype: ComputeDtype, width: int, rope: int) -> RowFormat:
    match fmt:
        case "fp8":
            return RowFormat("fp8_latent", width, rope)
        case "bf16":
            return RowFormat("bfloat16", width, rope)
        case "same":
            return RowFormat(dtype, width, rope)


def _index_format(fmt: StoreFormat, dtype: ComputeDtype, width: int) -> RowFormat:
    match fmt:
        case "fp8":
            return RowFormat("fp8_index", width)
        case "bf16":
            return RowFormat("bfloat16", width)
        case "same":
            return RowFormat(dtype, width)


def _overlapping(prefix: str, width: int, ratio: int, dtype: ComputeDtype) -> list[TailComponent]:
    """State of an overlapping compressor: two groups in the ring, the first series of one kept."""
    gate: Encoding = "float64" if dtype == "float64" else "float32"
    series: tuple[tuple[str, Encoding], ...] = (("kv", dtype), ("gate", gate))
    return [
        TailComponent(f"{prefix}_{what}", RowFormat(kind, 2 * width), 2 * ratio, ratio, width)
        for what, kind in series
    ]


def _heavy(width: int, ratio: int, dtype: ComputeDtype) -> list[TailComponent]:
    """State of a plain compressor: one group in the ring, nothing kept at a page boundary."""
    gate: Encoding = "float64" if dtype == "float64" else "float32"
    series: tuple[tuple[str, Encoding], ...] = (("kv", dtype), ("gate", gate))
    return [
        TailComponent(f"compressor_{what}", RowFormat(kind, width), ratio, 0, 0)
        for what, kind in series
    ]


def deepseek_v4_schema(
    geometry: V4Geometry,
    page_tokens: int,
    dtype: ComputeDtype,
    kv_format: StoreFormat = "same",
    index_k_format: StoreFormat = "same",
) -> Schema:
    """Return the schema of a DeepSeek-V4 model (geometry: transformers, `deepseek_v4`).

    Raises ConfigError when the ratios do not divide ``page_tokens``.
    """
    g = geometry
    latent = _latent_format(kv_format, dtype, g.head_dim, g.rope_dim)
    index_k = _index_format(index_k_format, dtype, g.index_head_dim)
    window = TailComponent(
        "window", RowFormat(dtype, g.head_dim, g.rope_dim), g.window, g.window - 1, g.head_dim
    )
    layers: list[AnyLayer] = []
    for number, kind in enumerate(g.layer_kinds):
        layer_id = LayerId(number)
        match kind:
            case "sliding":
                layers.append(SlidingLayer(layer_id, (), (window,)))
            case "sparse":
                spans = (
                    SpanComponent("latent", latent, g.sparse_ratio),
                    SpanComponent("index_k", index_k, g.sparse_ratio),
                )
                tails = (
                    window,
                    *_overlapping("compressor", g.head_dim, g.sparse_ratio, dtype),
                    *_overlapping("index_compressor", g.index_head_dim, g.sparse_ratio, dtype),
                )
                layers.append(SparseLayer(layer_id, spans, tails))
            case "heavy":
                spans_h = (SpanComponent("latent", latent, g.heavy_ratio),)
                tails_h = (window, *_heavy(g.head_dim, g.heavy_ratio, dtype))
                layers.append(HeavyLayer(layer_id, spans_h, tails_h))
    return Schema("deepseek_v4", page_tokens, tuple(layers))


def mla_indexer_schema(
    num_layers: int,
    latent_dim: int,
    rope_dim: int,
    index_head_dim: int,
    page_tokens: int,
    dtype: ComputeDtype = "bfloat16",
) -> Schema:
    """Return the schema of DeepSeek-V3.2 / GLM-5: a latent row and an index key per token."""
    spans = (
        SpanComponent("latent", RowFormat(dtype, latent_dim + rope_dim, rope_dim), 1),
        SpanComponent("index_k", RowFormat(dtype, index_head_dim), 1),
    )
    layers = tuple(IndexedLayer(LayerId(i), spans, ()) for i in range(num_layers))
    return Schema("mla_indexer", page_tokens, layers)


def gqa_schema(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    page_tokens: int,
    dtype: ComputeDtype = "bfloat16",
) -> Schema:
    """Return the schema of plain grouped-query attention: keys and values, shared by head."""
    row = RowFormat(dtype, num_kv_heads * head_dim)
    spans = tuple(SpanComponent(name, row, 1, Sharing.BY_HEAD) for name in ("k", "v"))
    layers = tuple(DenseLayer(LayerId(i), spans, ()) for i in range(num_layers))
    return Schema("gqa", page_tokens, layers)


def one_byte_rows(schema: Schema) -> Schema:
    """Return the schema with every component kept and each row one byte wide (compute none)."""
    layers: Sequence[AnyLayer] = [
        evolve(
            layer,
            spans=tuple(evolve(s, format=RowFormat("byte", 1)) for s in layer.spans),
            tails=tuple(
                evolve(t, format=RowFormat("byte", 1), kept_width=min(t.kept_width, 1))
                for t in layer.tails
            ),
        )
        for layer in schema.layers
    ]
    if not layers:
        raise ConfigError(f"{schema.family}: a schema needs at least one layer")
    return Schema(schema.family, schema.page_tokens, tuple(layers))
