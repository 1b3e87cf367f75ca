"""Programs that must not type-check; each marked line has to be an error under both checkers.

The name of a function is the misuse. Those that can be run at all raise at run time too
(test_typing runs them).
"""

from collections.abc import Callable
from typing import assert_never

from torch import Tensor

from kvlease.kernels.views import RowIndex, read_rows, write_rows
from kvlease.protocols.grants import ByteLease
from kvlease.protocols.ownership import Exclusive, LayerLease, Lease, Shared, StepLease
from kvlease.protocols.ports import Stream
from kvlease.protocols.schema import AnyLayer, HeavyLayer, SlidingLayer, SparseLayer
from kvlease.protocols.views import PagedRows, SparseStepView
from kvlease.units import PageId, SlotId


async def index_keys_of_a_sliding_layer(
    lease: StepLease, layer: SlidingLayer, stream: Stream
) -> object:
    view = await lease[layer].resolve(stream)
    return view.index_k  # rejected


async def index_keys_of_a_heavy_layer(
    lease: StepLease, layer: HeavyLayer, stream: Stream
) -> object:
    view = await lease[layer].resolve(stream)
    return view.index_k  # rejected


def read_pages_still_being_written(lease: Lease[Exclusive], layer: SparseLayer) -> object:
    return lease[layer]  # rejected


def freeze_what_is_shared(lease: Lease[Shared]) -> object:
    return lease.freeze()  # rejected


def freeze_twice(lease: Lease[Exclusive]) -> object:
    shared = lease.freeze()
    return shared.freeze()  # rejected


def take_shared_pages_for_writing(lease: Lease[Shared]) -> int:
    def fill(pages: Lease[Exclusive]) -> int:
        return pages.num_pages

    return fill(lease)  # rejected


def hand_out_more_than_was_granted(lease: Lease[Exclusive]) -> int:
    def read(pages: Lease[Shared]) -> int:
        return pages.num_pages

    return read(lease)  # rejected


def rows_without_resolving(lease: StepLease, layer: SparseLayer) -> object:
    return lease[layer].latent  # rejected


def rows_without_awaiting(lease: StepLease, layer: SparseLayer, stream: Stream) -> object:
    return lease[layer].resolve(stream).latent  # rejected


def memory_of_a_handle(rows: PagedRows) -> object:
    return rows.base  # rejected


def write_through_a_reading_handle(rows: PagedRows, at: Tensor, stored: Tensor) -> None:
    write_rows(rows, at, at, stored, RowIndex())  # rejected


def read_an_unresolved_layer(layer_lease: LayerLease[SparseStepView], at: Tensor) -> Tensor:
    return read_rows(layer_lease, at, at, RowIndex())  # rejected


def one_layers_right_for_another(lease: StepLease, layer: HeavyLayer) -> LayerLease[SparseStepView]:
    return lease[layer]  # rejected


def a_slot_for_a_page(slot: SlotId) -> PageId:
    return slot  # rejected


def tensors_for_a_storage_backend(store: Callable[[ByteLease], None], rows: Tensor) -> None:
    store(rows)  # rejected


def forget_a_layer_kind(layer: AnyLayer) -> str:
    match layer:
        case SlidingLayer():
            return "sliding"
        case SparseLayer():
            return "sparse"
        case _:
            assert_never(layer)  # rejected
