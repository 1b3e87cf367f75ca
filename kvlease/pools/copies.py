"""Copy orders: a transfer's work, in layer order.

Orders are closures over tensors and index tensors; the runtime runs them on a stream's worker and
learns from each how many bytes it moved. The kinds differ only in which stores they join.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import NamedTuple, cast

import numpy as np
import torch
from attrs import define

from kvlease.pools.carriage import Direction
from kvlease.pools.prefix_node import CacheTier
from kvlease.pools.storage import (
    RingStore,
    SpanStore,
    TailStore,
    on_device,
    tail_components,
)
from kvlease.protocols.ports import CopyOrder, CopyParts
from kvlease.protocols.schema import Schema, TailComponent
from kvlease.units import TransferId


def index_tensor(numbers: Sequence[int]) -> torch.Tensor:
    """Return page or slot numbers as [n] int64, owned by the caller (R13)."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


Mover = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], int]
"""Copies rows source[from_ids] to target[to_ids], numbers [n] int64 in host memory; returns bytes.

Called with source, from_ids, target, to_ids on the worker of the stream that carries the transfer.
On a device the bytes are there when the stream has come so far; numbers and memory stay until then.
"""


def mover(source: torch.Tensor, target: torch.Tensor) -> Mover:
    """Return how rows get from one memory to the other: the one place that asks where they lie."""
    return _copy_runs if source.is_cuda or target.is_cuda else _copy_indexed


def _copy_indexed(
    source: torch.Tensor, from_ids: torch.Tensor, target: torch.Tensor, to_ids: torch.Tensor
) -> int:
    rows = source.index_select(0, from_ids)
    target.index_copy_(0, to_ids, rows)
    return rows.nbytes


def _copy_runs(
    source: torch.Tensor, from_ids: torch.Tensor, target: torch.Tensor, to_ids: torch.Tensor
) -> int:
    """Copy by the device's copy engine, one piece for each stretch of neighbours at both ends."""
    here, there = from_ids.numpy(), to_ids.numpy()
    cuts = np.flatnonzero((np.diff(here) != 1) | (np.diff(there) != 1)) + 1
    bounds = [0, *cuts.tolist(), len(here)]
    for first, end in pairwise(bounds):
        begin, to = int(here[first]), int(there[first])
        rows = source[begin : begin + end - first]
        target[to : to + end - first].copy_(rows, non_blocking=True)
    return len(here) * source[0].nbytes


class Numbered(NamedTuple):
    """A part whose target rows are numbered pages or slots, [n] int64, and what moves it."""

    part: CopyParts
    nbytes: int
    run: Callable[[], int]
    target: torch.Tensor
    to_ids: torch.Tensor


def numbered_parts(
    ends: tuple[SpanStore, SpanStore] | tuple[TailStore, TailStore],
    numbers: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[Numbered]:
    """Yield what moves pages, or kept tails, from ends[0] to ends[1]; numbers [n] int64 at each.

    Planning is mostly this loop: what does not change from one to the next is in the stores.
    """
    source, target = ends
    from_ids, to_ids = numbers
    count = from_ids.numel()  # a tensor's len() costs more than the rest of a part
    for part, name, unit in source.parts:
        rows, here = target.memory[name], source.memory[name]
        run = partial(mover(here, rows), here, from_ids, rows, to_ids)
        yield Numbered(part, count * unit, run, rows, to_ids)


def span_orders(
    transfer: TransferId,
    kind: Direction,
    ends: tuple[SpanStore, SpanStore],
    pages: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[CopyOrder]:
    """Yield the orders that move pages from ends[0] to ends[1], pages [n] int64 at each end.

    One for each component.
    """
    return (_order(transfer, kind, (part,)) for part in numbered_parts(ends, pages))


def _tier_read(kind: Direction) -> CacheTier:
    return "host" if kind == "load" else "device"


def tail_orders(
    transfer: TransferId,
    kind: Direction,
    ends: tuple[TailStore, TailStore],
    slots: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[CopyOrder]:
    """Yield the orders that move kept tails between tiers, slots [n] int64 at each end.

    One for each component.
    """
    return (_order(transfer, kind, (part,)) for part in numbered_parts(ends, slots))


def store_orders(transfer: TransferId, parts: Iterable[Numbered]) -> tuple[CopyOrder, ...]:
    """Return the one order of a store, or none if there is nothing to move."""
    ordered = sorted(parts, key=lambda one: one.part.each[0].layer)
    return (_order(transfer, "store", ordered),) if ordered else ()


def _order(transfer: TransferId, kind: Direction, parts: Sequence[Numbered]) -> CopyOrder:
    moved = parts[0].part if len(parts) == 1 else _all_of(tuple([one.part for one in parts]))
    return CopyOrder(
        transfer,
        kind,
        _tier_read(kind),
        moved,
        sum([one.nbytes for one in parts]),
        partial(_run_all, parts),
        partial(_sizes, parts),
        partial(_places, parts),
        partial(_target, parts),
    )


@lru_cache(1024)
def _all_of(parts: tuple[CopyParts, ...]) -> CopyParts:
    """Return the parts of several orders, which come in layer order, as those of one.

    Remembered: the parts are the same objects in every plan that moves them.
    """
    return CopyParts(tuple(chain.from_iterable(parts)))


def _run_all(parts: Sequence[Numbered]) -> int:
    return sum([one.run() for one in parts])


def _sizes(parts: Sequence[Numbered]) -> list[int]:
    return [one.nbytes for one in parts]


def _places(parts: Sequence[Numbered]) -> list[int]:
    return [number for one in parts for number in _numbers(one.to_ids)]


def _target(parts: Sequence[Numbered]) -> list[memoryview]:
    return [piece for one in parts for piece in _numbered_bytes(one.target, one.to_ids)]


def _numbers(ids: torch.Tensor) -> list[int]:
    return cast("list[int]", ids.tolist())


def _numbered_bytes(target: torch.Tensor, ids: torch.Tensor) -> list[memoryview]:
    return [_bytes_of(target[number]) for number in _numbers(ids)]


def _bytes_of(rows: torch.Tensor) -> memoryview:
    """Borrow contiguous rows in CPU memory as bytes."""
    return rows.view(torch.uint8).numpy().data.cast("B")


def keep_tails(
    schema: Schema,
    stores: tuple[RingStore, TailStore],
    slots: torch.Tensor,
    tail_slots: torch.Tensor,
    boundaries: torch.Tensor,
) -> None:
    """Copy running sequences' state at page boundaries into kept tails, in the stream's order.

    Runs on the compute stream right after the step that reached the boundaries, before the next
    step overwrites the rings. Kept row i holds position boundary - kept_rows + i; positions below
    0 do not exist and are kept as zeros. Shapes: slots, tail_slots, boundaries (tokens) [K] int64,
    in host memory.
    """
    rings, tails = stores
    device = rings.device
    to_slots = on_device(tail_slots, device)
    places: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor | None]] = {}
    for layer, tail in tail_components(schema):
        if not tail.kept_rows:
            continue
        key = tail.ring_rows, tail.kept_rows
        if key not in places:
            places[key] = _kept_places(tail, slots, boundaries, device)
        flat, missing = places[key]
        ring = rings.ring(layer, tail.name).flatten(0, 1)
        rows = ring.index_select(0, flat)[:, : tail.kept_width]
        kept = rows.reshape(len(slots), tail.kept_rows, tail.kept_width)
        if missing is not None:
            kept = kept.masked_fill(missing, 0)
        tails.kept(layer, tail.name).index_copy_(0, to_slots, kept)


def _kept_places(
    tail: TailComponent, slots: torch.Tensor, boundaries: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ring rows [K * kept_rows] of the kept positions, and which of them do not exist, if any."""
    positions = boundaries.unsqueeze(1) + torch.arange(-tail.kept_rows, 0, dtype=torch.int64)
    flat = (slots.unsqueeze(1) * tail.ring_rows + positions % tail.ring_rows).flatten()
    missing = (positions < 0).unsqueeze(2)
    some = on_device(missing, device) if bool(missing.any()) else None
    return on_device(flat, device), some


@define
class _Resumption:
    """One component's way from a kept tail into a ring, worked out when it is asked for.

    Shapes: kept [num_tails, kept_rows, kept_width], rings [num_slots, ring_rows, width].
    """

    kept: torch.Tensor
    rings: torch.Tensor
    tail_slot: int
    slot: int
    boundary: int

    @property
    def ring(self) -> torch.Tensor:
        """The part of the slot's ring that is kept."""
        return self.rings[self.slot, :, : self.kept.shape[2]]

    @property
    def rows(self) -> torch.Tensor:
        """The ring's rows that existed at the boundary, in order of position."""
        first = max(0, self.boundary - self.kept.shape[1])
        return torch.arange(first, self.boundary, dtype=torch.int64) % self.rings.shape[1]

    def run(self) -> int:
        """Copy the kept rows that exist into their ring rows, which go once around the end."""
        kept, ring, rows = self.kept[self.tail_slot], self.ring, self.rows
        existing = kept[len(kept) - len(rows) :]
        start = int(rows[0])
        until_end = min(len(rows), len(ring) - start)
        ring[start : start + until_end].copy_(existing[:until_end], non_blocking=True)
        ring[: len(rows) - until_end].copy_(existing[until_end:], non_blocking=True)
        return kept.nbytes

    def memory(self) -> list[memoryview]:
        """Borrow what is written, row by row."""
        return _numbered_bytes(self.ring, self.rows)


def resume_orders(
    transfer: TransferId,
    kind: Direction,
    tails: tuple[CacheTier, TailStore, int],
    rings: tuple[RingStore, int],
    boundary: int,
) -> Iterator[CopyOrder]:
    """Yield the orders that fill a sequence's rings from a tier's tail at token ``boundary``.

    One for each component.
    """
    tier, store, tail_slot = tails
    ring_store, slot = rings
    places = partial(list[int], (slot,))
    for parts, part, nbytes in store.parts:
        kept, ring = store.memory[part], ring_store.ring(*part)
        one = _Resumption(kept, ring, tail_slot, slot, boundary)
        sizes = partial(list[int], (nbytes,))
        yield CopyOrder(transfer, kind, tier, parts, nbytes, one.run, sizes, places, one.memory)
