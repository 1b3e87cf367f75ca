"""A compressor inside a step: its running state in rings, and the rows it writes to open pages.

The latent rows of sparse and heavy layers and the index keys all come out of this one path.
"""

import torch
from attrs import frozen
from torch import Tensor

from kvlease.errors import LayoutMismatch
from kvlease.kernels.compressors import compressed_rows, overlapping_slots
from kvlease.kernels.formats import encode_rows
from kvlease.kernels.models.step_context import AttentionContext
from kvlease.kernels.models.weights import CompressorWeights
from kvlease.kernels.step_plan import Closings, StepPlan
from kvlease.kernels.views import (
    read_ring_rows,
    ring_rows,
    write_ring_rows,
    write_rows,
)
from kvlease.protocols.schema import AnyLayer, RowFormat
from kvlease.protocols.views import CompressorRows, OpenRows, SlotRows


def format_of(layer: AnyLayer, component: str) -> RowFormat:
    """Return how a layer stores rows of a span component.

    Raises:
        LayoutMismatch: the layer keeps no such component.
    """
    for span in layer.spans:
        if span.name == component:
            return span.format
    raise LayoutMismatch(f"layer {layer.id} keeps no component {component}")


@frozen
class Target:
    """Where a layer's compressed rows of one component go."""

    layer: AnyLayer
    component: str
    rows: OpenRows

    @property
    def format(self) -> RowFormat:
        """How they are stored."""
        return format_of(self.layer, self.component)


def compress(
    projected: list[Tensor],
    weights: CompressorWeights | None,
    target: Target,
    state: CompressorRows,
    ctx: AttentionContext,
) -> None:
    """Keep the rows' (kv, gate) in the rings, and write a row for every group that ends here.

    Ownership: borrows the rings and the open pages through their handles.
    Shapes: projected kv and gate, [N, width] each, in the compute dtype.

    Raises:
        StaleEpoch, SealedPage, LayoutMismatch: from the handles.
    """
    if weights is None:
        raise LayoutMismatch(f"layer {target.layer.id} has no weights for {target.component}")
    plan = ctx.plan
    ratio, width = weights.bias.shape
    row_width = weights.norm.shape[0]
    kv = projected[0]
    gate = projected[1].to(ctx.wide) + weights.bias.index_select(0, plan.phases(ratio))
    ring = ring_rows(state.kv)
    if plan.is_decode:
        _keep(state, kv, gate, ring, plan)
    closings = plan.closings(ratio, ring, overlapping=width != row_width)
    if closings is not None:
        sizes = ratio, row_width
        values = _slots(state.kv, kv, closings, sizes, 0.0, plan)
        gates = _slots(state.gate, gate, closings, sizes, -torch.inf, plan)
        turn = ctx.rotations.closings(ratio, closings.groups)
        rows = compressed_rows(values, gates, weights.norm, ctx.config.norm_eps, turn)
        stored = encode_rows(rows, target.format)
        write_rows(target.rows, closings.sequences, closings.groups, stored, plan.index)
    if not plan.is_decode:
        # only now: a chunk may overwrite ring places that its own first groups still need
        _keep(state, kv, gate, ring, plan)


def _slots(
    handle: SlotRows,
    rows: Tensor,
    closings: Closings,
    sizes: tuple[int, int],
    fill: float,
    plan: StepPlan,
) -> Tensor:
    """Return what goes into each closing group, [G, S, row_width], from rings and this step."""
    ratio, row_width = sizes
    where = closings.ring_sequences, closings.ring_places
    if closings.chunk_rows is None:
        found = read_ring_rows(handle, *where, plan.index)
    else:
        found = rows.index_select(0, closings.chunk_rows)
        if closings.from_ring is not None:
            old = read_ring_rows(handle, *where, plan.index)
            found.index_copy_(0, closings.from_ring, old)
        found = found.view(-1, closings.slots, rows.shape[1])
    if rows.shape[1] == row_width:
        return found
    previous, current = found[:, :ratio, :row_width], found[:, ratio:, row_width:]
    return overlapping_slots(previous, current, closings.first, fill)


def _keep(state: CompressorRows, kv: Tensor, gate: Tensor, ring: int, plan: StepPlan) -> None:
    writes = plan.ring_writes(ring)
    for handle, rows in ((state.kv, kv), (state.gate, gate)):
        real = rows[: plan.num_rows]
        kept = real if writes.rows is None else real.index_select(0, writes.rows)
        write_ring_rows(handle, writes.sequences, writes.places, kept, plan.index)
