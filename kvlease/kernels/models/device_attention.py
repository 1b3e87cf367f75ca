"""One layer's attention by kernels: the same steps as ``attention_block``, in few launches.

What differs between a decode step and a chunk is where a row's window lies.
"""

import torch
from attrs import frozen
from torch import Tensor

from kvlease.errors import LayoutMismatch
from kvlease.kernels.gpu.after_projection import Heads, Near, Pooling, after_projection
from kvlease.kernels.gpu.attention_core import Turn
from kvlease.kernels.gpu.attention_launch import Listed, Ring, Rows, Span, Visible, pool_of
from kvlease.kernels.gpu.compress_row import Compressor
from kvlease.kernels.gpu.decode_attention import decode_attention
from kvlease.kernels.gpu.prefill_attention import prefill_attention
from kvlease.kernels.gpu.products import multiply, multiply_whole
from kvlease.kernels.gpu.query_heads import query_heads
from kvlease.kernels.gpu.rotation import Turns
from kvlease.kernels.gpu.row_formats import pad_bytes, row_kind, row_store
from kvlease.kernels.gpu.step_rows import StepRows, projected
from kvlease.kernels.gpu.streams import BlockOutput
from kvlease.kernels.models.compress_block import format_of
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.device_choice import Stretch, choose
from kvlease.kernels.models.device_rows import LayerMemory, Rings
from kvlease.kernels.models.weights import AttentionWeights, CompressorWeights
from kvlease.protocols.schema import AnyLayer, RowFormat


@frozen
class ChunkWindows:
    """A chunk's windows: all rows in one buffer [., D], row n's own at ``own`` [N] int32.

    Every layer fills the buffer anew. ``stretches`` are the chunk's rows by sequence.
    """

    rows: Tensor
    own: Tensor
    stretches: tuple[Stretch, ...]


@frozen
class LayerStep:
    """One layer of a step: what it is, its weights, its opened memory, and its rows' angles."""

    layer: AnyLayer
    weights: AttentionWeights
    memory: LayerMemory
    turns: Turns
    config: V4Config


def attend(
    hidden: Tensor, step: LayerStep, rows: StepRows, windows: ChunkWindows | None
) -> BlockOutput:
    """Return the attention's output. Rings and pages are written, in a chunk also its windows.

    Shapes: hidden [N, hidden] bf16. ``windows`` None: a decode step.
    """
    config, weights, memory = step.config, step.weights, step.memory
    joined = multiply(hidden, weights.from_hidden)
    rank = hidden.new_empty((len(hidden), config.q_rank))
    index_weights = _project(joined, rank, step, rows, windows)
    asked = multiply_whole(rank, weights.from_query)
    has_index = weights.index_compressor is not None
    queries, index_queries = query_heads(
        asked, rows.positions, step.turns, config.rope_dim, config.norm_eps,
        (config.num_heads, config.head_dim),
        (config.index_heads, config.index_dim) if has_index else None,
    )  # fmt: skip
    chosen: Listed | Visible | None = None
    if memory.latent is not None:
        pool = pool_of(memory.latent, config.head_dim, config.rope_dim)
        if index_queries is not None and index_weights is not None and memory.index_k is not None:
            numbers = choose(
                index_queries, index_weights, memory.index_k, rows, config,
                None if windows is None else windows.stretches,
            )  # fmt: skip
            chosen = Listed(pool, numbers)
        else:
            chosen = Visible(pool, rows.table, config.heavy_ratio, rows.sequences)
    out = torch.empty_like(queries)
    scale = config.head_dim**-0.5
    query_rows = Rows(queries, out, weights.sinks, rows.positions, scale)
    turn = Turn(step.turns.cos, step.turns.sin)
    if windows is None:
        ring = Ring(memory.window, rows.slots)
        decode_attention(query_rows, ring, chosen, turn, window_keys=config.window)
    else:
        span = Span(windows.rows, windows.own)
        prefill_attention(query_rows, span, chosen, turn, window_keys=config.window)
    low = multiply_whole(out.flatten(1), weights.out_down)
    return BlockOutput(multiply(low, weights.out_up))


def _project(
    joined: Tensor, rank: Tensor, step: LayerStep, rows: StepRows, windows: ChunkWindows | None
) -> Tensor | None:
    """Launch all that follows the joined projection; return the indexer's head weights."""
    config, weights, memory = step.config, step.weights, step.memory
    near = Near(
        weights.q_norm, weights.kv_norm, rank, memory.window,
        None if windows is None else windows.rows,
        None if windows is None else windows.own, step.turns, config.norm_eps,
    )  # fmt: skip
    main = inner = heads = None
    at = config.q_rank + config.head_dim
    if weights.compressor is not None:
        latent = format_of(step.layer, "latent")
        state = memory.compressor, memory.latent, latent, at
        main = _compressor(weights.compressor, *state, step)
        at += 2 * weights.compressor.bias.shape[1]
    if weights.index_compressor is not None:
        index_k = format_of(step.layer, "index_k")
        state = memory.index_compressor, memory.index_k, index_k, at
        inner = _compressor(weights.index_compressor, *state, step)
        at += 2 * weights.index_compressor.bias.shape[1]
        out = joined.new_empty((len(rows.positions), config.index_heads), dtype=torch.float32)
        heads = Heads(out, (config.index_heads * config.index_dim) ** -0.5), at
    after_projection(rows, projected(joined), near, main, inner, heads, config.rope_dim)
    return None if heads is None else heads[0].out


def _compressor(
    weights: CompressorWeights,
    rings: Rings | None,
    memory: Tensor | None,
    fmt: RowFormat,
    column: int,
    step: LayerStep,
) -> tuple[Compressor, Pooling]:
    if rings is None or memory is None:
        raise LayoutMismatch(f"layer {step.layer.id} has weights for rows that it does not keep")
    ratio, joined = weights.bias.shape
    width = weights.norm.shape[0]
    work = Compressor(
        weights.bias, weights.norm, rings.kv, rings.gate, row_store(memory, fmt), step.turns,
        step.config.norm_eps,
    )  # fmt: skip
    return work, Pooling(
        column, column + joined, width, step.config.rope_dim, ratio, rings.kv.shape[1],
        joined != width, memory.shape[1], row_kind(fmt), pad_bytes(fmt),
    )  # fmt: skip
