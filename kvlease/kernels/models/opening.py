"""How every model opens a layer inside a step, kind by kind, and what it gets.

This module does not know what a model does with the rows.
"""

from collections.abc import Iterable, Sequence

from kvlease.errors import UsageError
from kvlease.protocols.ownership import LayerLease, StepLease
from kvlease.protocols.ports import Stream
from kvlease.protocols.schema import AnyLayer, HeavyLayer, SlidingLayer, SparseLayer
from kvlease.protocols.views import HeavyStepView, SlidingStepView, SparseStepView

StepView = SlidingStepView | SparseStepView | HeavyStepView


def handle_of(
    lease: StepLease, layer: AnyLayer
) -> LayerLease[SlidingStepView] | LayerLease[SparseStepView] | LayerLease[HeavyStepView]:
    """Index a step's lease with a layer, kind by kind; the handle has yet to be resolved.

    Raises UsageError: models of this family have no layer of this kind.
    """
    match layer:
        case SlidingLayer():
            return lease[layer]
        case SparseLayer():
            return lease[layer]
        case HeavyLayer():
            return lease[layer]
        case _:
            raise UsageError(f"{type(layer).__name__} is no layer of this model")


async def open_layer_of(lease: StepLease, layer: AnyLayer, stream: Stream) -> StepView:
    """Return one layer's view once its bytes are in the stream's order.

    Ownership: borrows the lease. Checkpoints: only if the layer waits.

    Raises:
        TransferFailed: the layer's transfer failed; discard the step.
        UsageError: models of this family have no layer of this kind.
    """
    return await handle_of(lease, layer).resolve(stream)


def stand_for_all(layers: Sequence[AnyLayer]) -> tuple[AnyLayer, ...]:
    """Return the fewest layers by which a step over known memory is opened, at least one.

    All layers share the step's tables, slots and epoch, and no row may be written below the open
    page. A row of a layer ends where one of a layer with shorter rows does, if the lengths divide:
    then checking the shorter ones checks both.
    """
    chosen: dict[int, AnyLayer] = {}
    rows = {span.tokens_per_row: layer for layer in reversed(layers) for span in layer.spans}
    for length in sorted(rows):
        if all(length % shorter for shorter in chosen):
            chosen[length] = rows[length]
    return tuple(chosen.values()) or tuple(layers[:1])


def open_ready_step(
    lease: StepLease, layers: Iterable[AnyLayer]
) -> list[tuple[AnyLayer, StepView]]:
    """Open a step all of whose layers are ready, and return the views of some; never waits.

    To whoever knows all memory already, some layers `stand_for_all`. The lease is told of every
    layer in any case.

    Raises:
        NotReady: a layer is still being filled.
    """
    lease.open_all()
    return [(layer, handle_of(lease, layer).resolve_nowait()) for layer in layers]
