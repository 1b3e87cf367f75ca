"""Copy orders: a transfer's work, one order per component of a layer, in layer order.

Orders are closures over tensors and index tensors; the runtime runs them on a stream's worker and
learns from each how many bytes it moved. The kinds differ only in which stores they join.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch

from kvlease.pools.storage import RingStore, SpanStore, TailStore, span_components, tail_components
from kvlease.protocols.ports import CopyOrder
from kvlease.protocols.schema import Schema, TailComponent


def index_tensor(numbers: Iterable[int]) -> torch.Tensor:
    """Return page or slot numbers as [n] int64, owned by the caller (R13)."""
    return torch.tensor(list(numbers), dtype=torch.int64)


def _copy_pages(
    source: torch.Tensor, source_pages: torch.Tensor, target: torch.Tensor, pages: torch.Tensor
) -> int:
    rows = source.index_select(0, source_pages)
    target.index_copy_(0, pages, rows)
    return rows.nbytes


def span_orders(
    schema: Schema,
    name: str,
    kind: str,
    ends: tuple[SpanStore, SpanStore],
    pages: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[CopyOrder]:
    """Yield the orders that move pages from ends[0] to ends[1], pages [n] int64 at each end."""
    source, target = ends
    from_pages, to_pages = pages
    for layer, span in span_components(schema):
        nbytes = len(from_pages) * schema.rows_per_page(span) * span.format.nbytes
        run = partial(
            _copy_pages,
            source.rows(layer, span.name),
            from_pages,
            target.rows(layer, span.name),
            to_pages,
        )
        yield CopyOrder(name, kind, layer, span.name, nbytes, run)


def kept_positions(tail: TailComponent, boundary: int) -> tuple[int, torch.Tensor]:
    """Return how many leading kept rows are empty, and the ring rows of the others.

    Kept row i holds position boundary - kept_rows + i; positions below 0 do not exist.
    """
    first = max(0, boundary - tail.kept_rows)
    skipped = tail.kept_rows - (boundary - first)
    return skipped, torch.arange(first, boundary, dtype=torch.int64) % tail.ring_rows


def _keep(ring: torch.Tensor, kept: torch.Tensor, tail: TailComponent, boundary: int) -> int:
    skipped, rows = kept_positions(tail, boundary)
    kept[:skipped].zero_()
    kept[skipped:] = ring.index_select(0, rows)[:, : tail.kept_width]
    return kept.nbytes


def _resume(kept: torch.Tensor, ring: torch.Tensor, tail: TailComponent, boundary: int) -> int:
    skipped, rows = kept_positions(tail, boundary)
    ring[rows, : tail.kept_width] = kept[skipped:]
    return kept.nbytes


def keep_tail(
    schema: Schema, rings: RingStore, slot: int, tails: TailStore, tail_slot: int, boundary: int
) -> None:
    """Copy a running sequence's state at a page boundary into a kept tail, now.

    Runs on the compute stream right after the step that reached the boundary, before the next step
    overwrites the rings.
    """
    for layer, tail in tail_components(schema):
        if tail.kept_rows:
            ring = rings.ring(layer, tail.name)[slot]
            _keep(ring, tails.kept(layer, tail.name)[tail_slot], tail, boundary)


def resume_orders(
    schema: Schema,
    name: str,
    kind: str,
    tails: tuple[TailStore, int],
    rings: tuple[RingStore, int],
    boundary: int,
) -> Iterator[CopyOrder]:
    """Yield the orders that fill a sequence's rings from a kept tail at token ``boundary``."""
    store, tail_slot = tails
    ring_store, slot = rings
    for layer, tail in tail_components(schema):
        if tail.kept_rows:
            kept = store.kept(layer, tail.name)[tail_slot]
            ring = ring_store.ring(layer, tail.name)[slot]
            run = partial(_resume, kept, ring, tail, boundary)
            yield CopyOrder(name, kind, layer, tail.name, tail.kept_nbytes, run)


def _copy_slot(source: torch.Tensor, target: torch.Tensor) -> int:
    target.copy_(source)
    return target.nbytes


def tail_orders(
    schema: Schema,
    name: str,
    kind: str,
    ends: tuple[TailStore, TailStore],
    slots: tuple[int, int],
) -> Iterator[CopyOrder]:
    """Yield the orders that move one kept tail between tiers."""
    for layer, tail in tail_components(schema):
        if tail.kept_rows:
            source = ends[0].kept(layer, tail.name)[slots[0]]
            target = ends[1].kept(layer, tail.name)[slots[1]]
            run = partial(_copy_slot, source, target)
            yield CopyOrder(name, kind, layer, tail.name, tail.kept_nbytes, run)


def in_layer_order(orders: Iterable[CopyOrder]) -> tuple[CopyOrder, ...]:
    """Return the orders sorted by layer, keeping the order of components within a layer."""
    return tuple(sorted(orders, key=lambda order: order.layer))
