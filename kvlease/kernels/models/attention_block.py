"""One layer's attention inside a step: project, keep state, compress, choose, attend.

Reads and writes cached rows only through `views`; what was written in this step is read back
stored, so that a row has the same value to the step that wrote it and to every later one.
"""

import torch
from attrs import frozen
from torch import Tensor

from kvlease.errors import LayoutMismatch
from kvlease.kernels.attention import KeyBlock, sparse_attention
from kvlease.kernels.compressors import compressed_rows, overlapping_slots
from kvlease.kernels.formats import decode_rows, encode_rows
from kvlease.kernels.indexer import index_scores
from kvlease.kernels.linear import linear
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.weights import AttentionWeights, CompressorWeights
from kvlease.kernels.norms import accumulate_dtype, rms_norm, rms_normalize
from kvlease.kernels.projection import project_output
from kvlease.kernels.rope import Rotation, inverse_frequencies, rotate_trailing_, rotation
from kvlease.kernels.step_plan import RowGroup, StepPlan
from kvlease.kernels.topk import select_topk
from kvlease.kernels.views import (
    read_ring_rows,
    read_rings,
    read_rows,
    read_selected,
    ring_rows,
    write_ring_rows,
    write_rows,
)
from kvlease.protocols.schema import AnyLayer, RowFormat
from kvlease.protocols.views import (
    CompressorRows,
    HeavyStepView,
    OpenRows,
    PagedRows,
    SlidingStepView,
    SlotRows,
    SparseStepView,
)

StepView = SlidingStepView | SparseStepView | HeavyStepView
_BLOCK_NBYTES = 64 << 20
"""Gathered keys of one attention call; more rows are taken in several calls."""


class StepRotations:
    """Angles of a step's rows and of the groups it closes, each made once."""

    def __init__(self, config: V4Config, plan: StepPlan, wide: torch.dtype) -> None:
        """No angle is computed before it is asked for."""
        self._plan = plan
        self._frequencies = {
            False: inverse_frequencies(config.main_rope, wide),
            True: inverse_frequencies(config.compress_rope, wide),
        }
        self._rows: dict[bool, tuple[Rotation, Rotation]] = {}
        self._closings: dict[int, Rotation] = {}

    def rows(self, *, compressed: bool) -> tuple[Rotation, Rotation]:
        """Return the rotation of every row and its inverse."""
        if compressed not in self._rows:
            turn = rotation(self._plan.positions, self._frequencies[compressed])
            self._rows[compressed] = turn, turn.inverse()
        return self._rows[compressed]

    def closings(self, ratio: int, groups: Tensor) -> Rotation:
        """Return the rotation of the groups that close in this step, at their first positions."""
        if ratio not in self._closings:
            self._closings[ratio] = rotation(groups * ratio, self._frequencies[True])
        return self._closings[ratio]


@frozen
class AttentionContext:
    """What all layers of a step share."""

    config: V4Config
    plan: StepPlan
    rotations: StepRotations
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """The accumulating dtype."""
        return accumulate_dtype(self.dtype)


def attend(
    hidden: Tensor, weights: AttentionWeights, layer: AnyLayer, view: StepView, ctx: AttentionContext
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
    parts = linear(hidden, weights.from_hidden, plan.tiling).split(weights.hidden_parts, dim=1)
    rank = rms_norm(parts[0], weights.q_norm, config.norm_eps)
    asked = linear(rank, weights.from_query, plan.tiling)
    head_width = config.num_heads * config.head_dim
    queries = asked[:, :head_width].reshape(-1, config.num_heads, config.head_dim)
    queries = rotate_trailing_(rms_normalize(queries, config.norm_eps).to(ctx.wide), turn)
    kv = rotate_trailing_(rms_norm(parts[1], weights.kv_norm, config.norm_eps), turn)
    window = _Window(view.window, kv, ctx)
    match view:
        case SlidingStepView():
            out = _attend_rows(queries, weights.sinks, window, None, ctx)
        case SparseStepView():
            chosen = _choose(parts, asked[:, head_width:], weights, layer, view, turn, ctx)
            latent = _Chosen(view.latent, _format(layer, "latent"), chosen)
            out = _attend_rows(queries, weights.sinks, window, latent, ctx)
        case HeavyStepView():
            _compress(parts[2:4], weights.compressor, layer, "latent", view.latent_open,
                      view.compressor, ctx)  # fmt: skip
            out = _attend_all(queries, weights.sinks, window, view.latent, layer, ctx)
    window.keep()
    heads = rotate_trailing_(out, unturn).to(ctx.dtype)
    return project_output(heads, weights.out_down, weights.out_up, plan.tiling)


def _format(layer: AnyLayer, component: str) -> RowFormat:
    for span in layer.spans:
        if span.name == component:
            return span.format
    raise LayoutMismatch(f"layer {layer.id} keeps no component {component}")


class _Window:
    """The last raw tokens of every row, and the duty to leave this step's rows in the rings."""

    def __init__(self, handle: SlotRows, kv: Tensor, ctx: AttentionContext) -> None:
        self._handle = handle
        self._kv = kv
        self._plan = ctx.plan
        self._wide = ctx.wide
        self._ring = ring_rows(handle)
        self._reads = ctx.plan.window_reads(ctx.config.window, self._ring)
        self._old: Tensor | None = None
        if ctx.plan.is_decode:
            self._write()
        else:
            # a chunk may overwrite ring places that its own first rows still look back to
            everyone = torch.arange(ctx.plan.num_sequences)
            old = read_rings(handle, everyone).flatten(0, 1)
            self._old = torch.cat([old, kv[: ctx.plan.num_rows]])

    def block(self, rows: slice | Tensor) -> KeyBlock:
        """Return the windows of some rows of the step."""
        reads, plan = self._reads, self._plan
        if self._old is not None and reads.rows is not None:
            wanted = reads.rows[rows]
            keys = self._old.index_select(0, wanted.flatten()).view(*wanted.shape, -1)
        elif reads.rows is None:
            keys = read_rings(self._handle, plan.sequences[rows])
        else:
            keys = read_ring_rows(self._handle, plan.sequence_column[rows], reads.rows[rows])
        return KeyBlock(keys.to(self._wide), None if reads.seen is None else reads.seen[rows])

    @property
    def num_keys(self) -> int:
        """Keys that each row's window takes, seen or not."""
        return self._ring

    def keep(self) -> None:
        """Leave the step's last rows in the rings, once nothing reads the old ones any more."""
        if self._old is not None:
            self._write()

    def _write(self) -> None:
        writes = self._plan.ring_writes(self._ring)
        rows = self._kv[: self._plan.num_rows]
        kept = rows if writes.rows is None else rows.index_select(0, writes.rows)
        write_ring_rows(self._handle, writes.sequences, writes.places, kept)


@frozen
class _Chosen:
    """Rows that each query reads beside its window: numbers [N, K], -1 for none."""

    rows: PagedRows
    format: RowFormat
    numbers: Tensor


def _attend_rows(
    queries: Tensor, sinks: Tensor, window: _Window, chosen: _Chosen | None, ctx: AttentionContext
) -> Tensor:
    """Attend over each row's window and, where given, its chosen rows."""
    plan = ctx.plan
    num_keys = window.num_keys + (0 if chosen is None else chosen.numbers.shape[1])
    step = _rows_per_block(num_keys * queries.shape[2] * queries.element_size(), plan)
    parts: list[Tensor] = []
    for low in range(0, plan.num_padded, step):
        high = min(low + step, plan.num_padded)
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
    stored = read_selected(chosen.rows.select(numbers), plan.sequence_column[low:high])
    keys = decode_rows(stored, chosen.format, ctx.wide)
    visible = plan.visible(ctx.config.sparse_ratio)
    if visible.blind is not None:
        mine = visible.blind[(visible.blind >= low) & (visible.blind < high)] - low
        keys.index_fill_(0, mine, 0.0)
    return KeyBlock(keys, None if visible.least >= numbers.shape[1] else numbers >= 0)


def _choose(
    parts: tuple[Tensor, ...],
    asked: Tensor,
    weights: AttentionWeights,
    layer: AnyLayer,
    view: SparseStepView,
    turn: Rotation,
    ctx: AttentionContext,
) -> Tensor:
    """Write the step's compressed rows and return each row's chosen ones, [N, K]."""
    config, plan = ctx.config, ctx.plan
    _compress(parts[2:4], weights.compressor, layer, "latent", view.latent_open,
              view.compressor, ctx)  # fmt: skip
    _compress(parts[4:6], weights.index_compressor, layer, "index_k", view.index_k_open,
              view.index_compressor, ctx)  # fmt: skip
    queries = asked.reshape(-1, config.index_heads, config.index_dim).to(ctx.wide)
    queries = rotate_trailing_(queries, turn)
    scale = (config.index_heads * config.index_dim) ** -0.5
    head_weights = parts[6].to(ctx.wide) * scale
    fmt = _format(layer, "index_k")
    groups = plan.visible(config.sparse_ratio).groups
    result = torch.empty((plan.num_padded, config.index_topk), dtype=torch.int64)
    for group in groups:
        keys = _group_keys(view.index_k, group, fmt, ctx)
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


def _group_keys(
    rows: PagedRows, group: RowGroup, fmt: RowFormat, ctx: AttentionContext
) -> Tensor:
    keys = decode_rows(
        read_rows(rows, group.sequences, group.places, ctx.plan.index), fmt, ctx.wide
    )
    if group.blank is not None:
        keys.index_fill_(0, group.blank, 0.0)
    return keys


def _attend_all(
    queries: Tensor,
    sinks: Tensor,
    window: _Window,
    latent: PagedRows,
    layer: AnyLayer,
    ctx: AttentionContext,
) -> Tensor:
    """Attend over each row's window and every compressed row it sees."""
    config, plan = ctx.config, ctx.plan
    fmt = _format(layer, "latent")
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


def _compress(
    projected: tuple[Tensor, ...],
    weights: CompressorWeights | None,
    layer: AnyLayer,
    component: str,
    target: OpenRows,
    state: CompressorRows,
    ctx: AttentionContext,
) -> None:
    """Keep the rows' (kv, gate) in the rings, and write a row for every group that ends here."""
    if weights is None:
        raise LayoutMismatch(f"layer {layer.id} has no weights to compress {component}")
    plan = ctx.plan
    ratio, width = weights.bias.shape
    row_width = weights.norm.shape[0]
    kv = projected[0]
    gate = projected[1].to(ctx.wide) + weights.bias.index_select(0, plan.phases(ratio))
    ring = ring_rows(state.kv)
    closings = plan.closings(ratio, ring, overlapping=width != row_width)
    if plan.is_decode:
        _keep(state, kv, gate, ring, plan)
    if closings is not None:
        slots = []
        for handle, rows, fill in ((state.kv, kv, 0.0), (state.gate, gate, -torch.inf)):
            if closings.chunk_rows is None:
                found = read_ring_rows(handle, closings.ring_sequences, closings.ring_places)
            else:
                found = rows.index_select(0, closings.chunk_rows)
                if closings.from_ring is not None:
                    old = read_ring_rows(handle, closings.ring_sequences, closings.ring_places)
                    found.index_copy_(0, closings.from_ring, old)
                found = found.view(-1, closings.slots, width)
            if width != row_width:
                found = overlapping_slots(
                    found[:, :ratio, :row_width], found[:, ratio:, row_width:], closings.first, fill
                )
            slots.append(found)
        turn = ctx.rotations.closings(ratio, closings.groups)
        rows = compressed_rows(slots[0], slots[1], weights.norm, ctx.config.norm_eps, turn)
        stored = encode_rows(rows, _format(layer, component))
        write_rows(target, closings.sequences, closings.groups, stored, plan.index)
    if not plan.is_decode:
        _keep(state, kv, gate, ring, plan)


def _keep(state: CompressorRows, kv: Tensor, gate: Tensor, ring: int, plan: StepPlan) -> None:
    writes = plan.ring_writes(ring)
    for handle, rows in ((state.kv, kv), (state.gate, gate)):
        real = rows[: plan.num_rows]
        kept = real if writes.rows is None else real.index_select(0, writes.rows)
        write_ring_rows(handle, writes.sequences, writes.places, kept)
