"""Copy orders: a transfer's work, in layer order.

Orders are closures over tensors and index tensors; the runtime runs them on a stream's worker and
learns from each how many bytes it moved. The kinds differ only in which stores they join.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple, cast

import numpy as np
import torch
from attrs import define

from kvlease.pools.carriage import Direction, Move, carry
from kvlease.pools.joined_orders import all_of
from kvlease.pools.prefix_node import CacheTier
from kvlease.pools.records import Records
from kvlease.pools.storage import (
    Part,
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


def span_parts(
    schema: Schema,
    kind: Direction,
    ends: tuple[SpanStore, SpanStore],
    pages: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[Numbered]:
    """Yield what moves pages from ends[0] to ends[1], pages [n] int64 at each end."""
    records = ends[0].records or ends[1].records
    carrier = None if records is None else records.carrier
    move = None if carrier is None else carrier.pages(kind, *pages)
    return _numbered(ends, pages, records, move)


def tail_parts(
    schema: Schema,
    kind: Direction,
    ends: tuple[TailStore, TailStore],
    slots: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[Numbered]:
    """Yield what moves kept tails between tiers, slots [n] int64 at each end."""
    records = ends[1].records
    carrier = None if records is None else records.carrier
    move = None if carrier is None else carrier.tails(kind, *slots)
    return _numbered(ends, slots, records, move)


def _numbered(
    ends: tuple[SpanStore, SpanStore] | tuple[TailStore, TailStore],
    numbers: tuple[torch.Tensor, torch.Tensor],
    records: Records | None,
    move: Move | None,
) -> Iterator[Numbered]:
    """Yield the parts of numbered pages or slots, [n] int64 at each end.

    Planning is mostly this loop: what does not change from one to the next is in the stores.
    """
    source, target = ends
    from_ids, to_ids = numbers
    count = from_ids.numel()  # a tensor's len() costs more than the rest of a part
    for part, name, unit in source.parts:
        rows, nbytes = target.memory[name], count * unit
        if move is None or records is None:
            here = source.memory[name]
            run = partial(mover(here, rows), here, from_ids, rows, to_ids)
        else:
            run = partial(carry, move, records.groups_of[name], nbytes)
        yield Numbered(part, nbytes, run, rows, to_ids)


def span_orders(
    schema: Schema,
    transfer: TransferId,
    kind: Direction,
    ends: tuple[SpanStore, SpanStore],
    pages: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[CopyOrder]:
    """Yield the orders that move pages from ends[0] to ends[1], pages [n] int64 at each end.

    One for each component, or for each group of layers where a carrier moves them.
    """
    records = ends[0].records or ends[1].records
    if records is None or records.carrier is None:
        parts = span_parts(schema, kind, ends, pages)
        return (_order(transfer, kind, (part,)) for part in parts)
    move = records.carrier.pages(kind, *pages)
    ranges = records.ranges(pages[0].numel())
    return _group_orders(transfer, kind, ends, pages, records, ranges, move)


def _group_orders(
    transfer: TransferId,
    kind: Direction,
    ends: tuple[SpanStore, SpanStore] | tuple[TailStore, TailStore],
    numbers: tuple[torch.Tensor, torch.Tensor],
    records: Records,
    ranges: Iterable[tuple[int, int]],
    move: Move,
) -> Iterator[CopyOrder]:
    count, places = numbers[0].numel(), partial(_numbers, numbers[1])
    tier = _tier_read(kind)
    for groups in ranges:
        nbytes, sizes = records.nbytes(groups, count), partial(records.sizes, groups, count)
        run, parts = partial(carry, move, groups[0], nbytes), records.parts(groups)
        target = partial(_grouped_bytes, ends[1].memory, records.names[slice(*groups)], numbers[1])
        yield CopyOrder(transfer, kind, tier, parts, nbytes, run, sizes, places, target)


def _tier_read(kind: Direction) -> CacheTier:
    return "host" if kind == "load" else "device"


def _grouped_bytes(
    memory: Mapping[Part, torch.Tensor], groups: Iterable[Sequence[Part]], ids: torch.Tensor
) -> list[memoryview]:
    names = chain.from_iterable(groups)
    return [piece for name in names for piece in _numbered_bytes(memory[name], ids)]


def tail_orders(
    schema: Schema,
    transfer: TransferId,
    kind: Direction,
    ends: tuple[TailStore, TailStore],
    slots: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[CopyOrder]:
    """Yield the orders that move kept tails between tiers, slots [n] int64 at each end.

    One for each component, or for each group of layers where a carrier moves them.
    """
    records = ends[1].records
    if records is None or records.carrier is None:
        parts = tail_parts(schema, kind, ends, slots)
        return (_order(transfer, kind, (part,)) for part in parts)
    move = records.carrier.tails(kind, *slots)
    each = [(group, group + 1) for group in range(len(records.groups))]
    return _group_orders(transfer, kind, ends, slots, records, each, move)


def store_orders(transfer: TransferId, parts: Iterable[Numbered]) -> tuple[CopyOrder, ...]:
    """Return the one order of a store, or none if there is nothing to move."""
    ordered = sorted(parts, key=lambda one: one.part.each[0].layer)
    return (_order(transfer, "store", ordered),) if ordered else ()


def _order(transfer: TransferId, kind: Direction, parts: Sequence[Numbered]) -> CopyOrder:
    moved = parts[0].part if len(parts) == 1 else all_of(tuple([one.part for one in parts]))
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
    if tails.records is not None and tails.records.carrier is not None:
        tails.records.carrier.keep(slots, tail_slots, boundaries)
        return
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
    schema: Schema,
    transfer: TransferId,
    kind: Direction,
    tails: tuple[CacheTier, TailStore, int],
    rings: tuple[RingStore, int],
    boundary: int,
    ranges: Sequence[tuple[int, int]] = (),
) -> Iterator[CopyOrder]:
    """Yield the orders that fill a sequence's rings from a tier's tail at token ``boundary``.

    One for each component. A carrier moves all at once: then there is one order, or one for each
    of the ``ranges`` of groups that pages of the same load come in.
    """
    tier, store, tail_slot = tails
    ring_store, slot = rings
    places = partial(list[int], (slot,))
    way = partial(_resumption, store, ring_store, (tail_slot, slot, boundary))
    records = store.records
    if records is None or records.carrier is None:
        for parts, part, nbytes in store.parts:
            one, sizes = way(part), partial(list[int], (nbytes,))
            yield CopyOrder(transfer, kind, tier, parts, nbytes, one.run, sizes, places, one.memory)
        return
    move = records.carrier.resume(tier, tail_slot, slot, boundary)
    for groups in ranges or [(0, len(records.groups))]:
        nbytes, sizes = records.nbytes(groups, 1), partial(records.sizes, groups, 1)
        run, parts = partial(carry, move, groups[0], nbytes), records.parts(groups)
        target = partial(_resumed_bytes, way, records.names[slice(*groups)])
        yield CopyOrder(transfer, kind, tier, parts, nbytes, run, sizes, places, target)


def _resumption(
    store: TailStore, rings: RingStore, numbers: tuple[int, int, int], part: Part
) -> _Resumption:
    return _Resumption(store.memory[part], rings.ring(*part), *numbers)


def _resumed_bytes(
    way: Callable[[Part], _Resumption], groups: Iterable[Sequence[Part]]
) -> list[memoryview]:
    return [piece for name in chain.from_iterable(groups) for piece in way(name).memory()]
