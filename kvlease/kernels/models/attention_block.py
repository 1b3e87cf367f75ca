"""One layer's attention inside a step: project, keep state, compress, choose, attend.

Reads and writes cached rows only through `views`; what was written in this step is read back
stored, so that a row has the same value to the step that wrote it and to every later one.
"""

from math import lcm

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.attention import KeyBlock, sparse_attention
from kvlease.kernels.formats import decode_rows
from kvlease.kernels.indexer import index_scores
from kvlease.kernels.linear import linear
from kvlease.kernels.models.compress_block import Target, compress, format_of
from kvlease.kernels.models.opening import StepView
from kvlease.kernels.models.step_context import AttentionContext
from kvlease.kernels.models.weights import AttentionWeights
from kvlease.kernels.models.window_block import Window
from kvlease.kernels.norms import rms_norm, rms_normalize
from kvlease.kernels.placing import place
from kvlease.kernels.projection import project_output
from kvlease.kernels.rope import Rotation, rotate_trailing_
from kvlease.kernels.step_plan import RowGroup, StepPlan
from kvlease.kernels.tiling import round_up
from kvlease.kernels.topk import select_topk
from kvlease.kernels.views import read_pages, read_rows, read_selected
from kvlease.protocols.schema import AnyLayer, RowFormat
from kvlease.protocols.views import HeavyStepView, PagedRows, SlidingStepView, SparseStepView

_BLOCK_NBYTES = 64 << 20
"""Gathered keys of one attention call; more rows are taken in several calls."""


def attend(
    hidden: Tensor,
    weights: AttentionWeights,
    layer: AnyLayer,
    view: StepView,
    ctx: AttentionContext,
) -> Tensor:
    """Return the attention's output for every row, writing the rows it computes on the way.

    Ownership: borrows the view's memory through its handles.
    Shapes: hidden [N, hidden] in the compute dtype; result likewise.

    Raises:
        StaleEpoch, SealedPage, LayoutMismatch: from the handles.
    """
    config, plan = ctx.config, ctx.plan
    compressed = not isinstance(view, SlidingStepView)
    turn, unturn = ctx.rotations.rows(compressed=compressed)
    parts = _split(linear(hidden, weights.from_hidden, plan.tiling), weights.hidden_parts)
    rank = rms_norm(parts[0], weights.q_norm, config.norm_eps)
    asked = linear(rank, weights.from_query, plan.tiling)
    head_width = config.num_heads * config.head_dim
    queries = asked[:, :head_width].reshape(-1, config.num_heads, config.head_dim)
    queries = rotate_trailing_(rms_normalize(queries, config.norm_eps).to(ctx.wide), turn)
    kv = rotate_trailing_(rms_norm(parts[1], weights.kv_norm, config.norm_eps), turn)
    window = Window(view.window, kv, ctx)
    step = _Step(queries, asked[:, head_width:], parts, turn, window)
    out = rotate_trailing_(_attend_view(step, weights, layer, view, ctx), unturn)
    window.keep()
    return project_output(out.to(ctx.dtype), weights.out_down, weights.out_up, plan.tiling)


@frozen
class _Step:
    """One layer's projections of the step's rows: heads [N, H, D], index queries, other parts."""

    queries: Tensor
    index_queries: Tensor
    parts: list[Tensor]
    turn: Rotation
    window: Window


def _attend_view(
    step: _Step, weights: AttentionWeights, layer: AnyLayer, view: StepView, ctx: AttentionContext
) -> Tensor:
    """Return attention over what this kind of layer keeps, [N, H, D]."""
    match view:
        case SlidingStepView():
            return _attend_rows(step, weights.sinks, None, ctx)
        case SparseStepView():
            numbers = _choose(step, weights, layer, view, ctx)
            chosen = _Chosen(view.latent, format_of(layer, "latent"), numbers)
            return _attend_rows(step, weights.sinks, chosen, ctx)
        case HeavyStepView():
            target = Target(layer, "latent", view.latent_open)
            compress(step.parts[2:4], weights.compressor, target, view.compressor, ctx)
            return _attend_all(step, weights.sinks, view.latent, layer, ctx)


def _split(joined: Tensor, widths: tuple[int, ...]) -> list[Tensor]:
    parts: list[Tensor] = []
    start = 0
    for width in widths:
        parts.append(joined[:, start : start + width])
        start += width
    return parts


@frozen
class _Chosen:
    """Rows that each query reads beside its window: numbers [N, K], -1 for none."""

    rows: PagedRows
    format: RowFormat
    numbers: Tensor


def _attend_rows(
    step: _Step, sinks: Tensor, chosen: _Chosen | None, ctx: AttentionContext
) -> Tensor:
    """Attend over each row's window and, where given, its chosen rows."""
    plan, queries, window = ctx.plan, step.queries, step.window
    num_keys = window.num_keys + (0 if chosen is None else chosen.numbers.shape[1])
    size = _rows_per_block(num_keys * queries.shape[2] * queries.element_size(), plan)
    parts: list[Tensor] = []
    for low in range(0, plan.num_padded, size):
        high = min(low + size, plan.num_padded)
        blocks = [window.block(slice(low, high))]
        if chosen is not None:
            blocks.append(_chosen_block(chosen, low, high, ctx))
        parts.append(
            sparse_attention(
                queries[low:high], sinks, blocks, ctx.config.head_dim**-0.5, plan.tiling
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows_per_block(nbytes_per_row: int, plan: StepPlan) -> int:
    """Return how many rows' keys fit the block, in whole tiles of at least 32 rows."""
    tile = max(plan.tiling.rows, 32)
    return max(_BLOCK_NBYTES // (nbytes_per_row * tile), 1) * tile


def _chosen_block(chosen: _Chosen, low: int, high: int, ctx: AttentionContext) -> KeyBlock:
    plan = ctx.plan
    numbers = chosen.numbers[low:high]
    selected = chosen.rows.select(numbers)
    stored = read_selected(selected, plan.sequence_column[low:high], plan.index)
    keys = decode_rows(stored, chosen.format, ctx.wide)
    visible = plan.visible(ctx.config.sparse_ratio)
    if visible.blind is not None:
        mine = visible.blind[(visible.blind >= low) & (visible.blind < high)] - low
        keys.index_fill_(0, place(mine, plan.device), 0.0)
    return KeyBlock(keys, None if visible.least >= numbers.shape[1] else numbers >= 0)


def _choose(
    step: _Step,
    weights: AttentionWeights,
    layer: AnyLayer,
    view: SparseStepView,
    ctx: AttentionContext,
) -> Tensor:
    """Write the step's compressed rows and return each row's chosen ones, [N, K]."""
    config, plan, parts = ctx.config, ctx.plan, step.parts
    latent = Target(layer, "latent", view.latent_open)
    compress(parts[2:4], weights.compressor, latent, view.compressor, ctx)
    index_k = Target(layer, "index_k", view.index_k_open)
    compress(parts[4:6], weights.index_compressor, index_k, view.index_compressor, ctx)
    queries = step.index_queries.reshape(-1, config.index_heads, config.index_dim).to(ctx.wide)
    queries = rotate_trailing_(queries, step.turn)
    scale = (config.index_heads * config.index_dim) ** -0.5
    head_weights = parts[6].to(ctx.wide) * scale
    result = torch.empty(
        (plan.num_padded, config.index_topk), dtype=torch.int64, device=plan.device
    )
    for group in plan.visible(config.sparse_ratio).groups:
        keys = _index_keys(view.index_k, group, index_k.format, ctx)
        if group.whole:
            scores = index_scores(queries, head_weights, keys, plan.tiling)
            return select_topk(scores, group.visible, config.index_topk)
        scores = index_scores(queries[group.rows], head_weights[group.rows], keys, plan.tiling)
        picked = select_topk(scores, group.visible, config.index_topk)
        result[group.rows[: group.count]] = picked[: group.count]
    return _fill_padding(result, plan)


def _fill_padding(result: Tensor, plan: StepPlan) -> Tensor:
    """Give padding rows, which repeat row 0, row 0's value."""
    result[plan.num_rows :] = result[0]
    return result


def _index_keys(rows: PagedRows, group: RowGroup, fmt: RowFormat, ctx: AttentionContext) -> Tensor:
    """Return index keys of the group's sequences; those that no row sees may be poison.

    Each key is scored by itself and unseen scores are never compared, so poison goes nowhere.
    """
    step = lcm(rows.rows_per_page, ctx.plan.tiling.keys)
    num_rows = round_up(max(group.places.shape[1], 1), step)
    stored = read_pages(rows, group.sequences, num_rows, ctx.plan.index)
    return decode_rows(stored, fmt, ctx.wide)


def _group_keys(rows: PagedRows, group: RowGroup, fmt: RowFormat, ctx: AttentionContext) -> Tensor:
    keys = decode_rows(
        read_rows(rows, group.sequences, group.places, ctx.plan.index), fmt, ctx.wide
    )
    if group.blank is not None:
        keys.index_fill_(0, group.blank, 0.0)
    return keys


def _attend_all(
    step: _Step, sinks: Tensor, latent: PagedRows, layer: AnyLayer, ctx: AttentionContext
) -> Tensor:
    """Attend over each row's window and every compressed row it sees."""
    config, plan, queries, window = ctx.config, ctx.plan, step.queries, step.window
    fmt = format_of(layer, "latent")
    result = torch.empty_like(queries)
    scale = config.head_dim**-0.5
    for group in plan.visible(config.heavy_ratio).groups:
        keys = KeyBlock(_group_keys(latent, group, fmt, ctx), group.seen)
        if group.whole:
            blocks = [window.block(slice(None)), keys]
            return sparse_attention(queries, sinks, blocks, scale, plan.tiling)
        blocks = [window.block(group.rows), keys]
        part = sparse_attention(queries[group.rows], sinks, blocks, scale, plan.tiling)
        result[group.rows[: group.count]] = part[: group.count]
    return _fill_padding(result, plan)
