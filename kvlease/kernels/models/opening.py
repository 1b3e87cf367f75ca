"""How every model opens a layer inside a step, kind by kind, and what it gets.

This module does not know what a model does with the rows.
"""

from kvlease.errors import UsageError
from kvlease.protocols.ownership import StepLease
from kvlease.protocols.ports import Stream
from kvlease.protocols.schema import AnyLayer, HeavyLayer, SlidingLayer, SparseLayer
from kvlease.protocols.views import HeavyStepView, SlidingStepView, SparseStepView

StepView = SlidingStepView | SparseStepView | HeavyStepView


async def open_layer_of(lease: StepLease, layer: AnyLayer, stream: Stream) -> StepView:
    """Return one layer's view once its bytes are in the stream's order.

    Ownership: borrows the lease. Checkpoints: only if the layer waits.

    Raises:
        TransferFailed: the layer's transfer failed; discard the step.
        UsageError: models of this family have no layer of this kind.
    """
    match layer:
        case SlidingLayer():
            return await lease[layer].resolve(stream)
        case SparseLayer():
            return await lease[layer].resolve(stream)
        case HeavyLayer():
            return await lease[layer].resolve(stream)
        case _:
            raise UsageError(f"{type(layer).__name__} is no layer of this model")
