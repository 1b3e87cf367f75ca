"""The same programs done right: both checkers accept every line and see the types they name."""

from collections.abc import Callable
from typing import assert_type

from torch import Tensor

from kvlease.kernels.views import RowIndex, read_rows, write_rows
from kvlease.protocols.grants import ByteLease
from kvlease.protocols.ownership import Exclusive, LayerLease, Lease, Shared, StepLease
from kvlease.protocols.ports import Stream
from kvlease.protocols.schema import (
    AnyLayer,
    DenseLayer,
    HeavyLayer,
    IndexedLayer,
    SlidingLayer,
    SparseLayer,
)
from kvlease.protocols.views import (
    HeavyStepView,
    OpenRows,
    PagedRows,
    SlidingStepView,
    SparseStepView,
    SparseView,
)


async def views_by_layer_kind(
    lease: StepLease,
    sliding: SlidingLayer,
    sparse: SparseLayer,
    heavy: HeavyLayer,
    stream: Stream,
) -> None:
    assert_type(await lease[sliding].resolve(stream), SlidingStepView)
    assert_type(await lease[sparse].resolve(stream), SparseStepView)
    assert_type(await lease[heavy].resolve(stream), HeavyStepView)
    assert_type((await lease[sparse].resolve(stream)).index_k, PagedRows)
    assert_type((await lease[heavy].resolve(stream)).latent_open, OpenRows)


def freeze_then_read(lease: Lease[Exclusive], layer: SparseLayer) -> LayerLease[SparseView]:
    shared = lease.freeze()
    assert_type(shared, Lease[Shared])
    return shared[layer]


def move_keeps_the_state(lease: Lease[Exclusive]) -> Lease[Exclusive]:
    return lease.move()


def open_in_a_kernel(rows: PagedRows, at: Tensor) -> Tensor:
    return read_rows(rows, at, at, RowIndex())


def write_through_the_open_page(rows: OpenRows, at: Tensor, stored: Tensor) -> None:
    write_rows(rows, at, at, stored, RowIndex())


def lend_bytes(store: Callable[[ByteLease], None], lease: ByteLease) -> None:
    store(lease)


def every_layer_kind(layer: AnyLayer) -> str:
    match layer:
        case SlidingLayer():
            return "sliding"
        case SparseLayer():
            return "sparse"
        case HeavyLayer():
            return "heavy"
        case IndexedLayer():
            return "indexed"
        case DenseLayer():
            return "dense"
