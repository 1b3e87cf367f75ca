"""What a transfer will move, and who hears of it.

This module does not know how a transfer runs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from attrs import Factory, field, frozen

from kvlease.errors import UsageError
from kvlease.protocols.ports import Completion, CopyOrder, CopyParts
from kvlease.units import TransferId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvlease.runtime.transfer import Transfer

Kind = Literal["load", "store", "tail"]


class Hold(Protocol):
    """Something held for the whole of a transfer: the lease at one of its ends."""

    def close(self) -> None:
        """End the hold."""
        ...


class Joint(NamedTuple):
    """Copies ``first`` to ``stop - 1`` of a plan: all that it has for some layers.

    They share one completion: layers that are moved in one piece are there together.
    """

    layers: range
    first: int
    stop: int


@frozen
class Layout:
    """What follows from what a plan's copies are of; the same for every plan of its kind.

    Attributes:
        joints: of all layers, in order; one that nothing is planned for has a joint of its own.
        places: per layer its place among the joints.
        unplanned: layers that have no copy though they are not empty by construction.
    """

    joints: tuple[Joint, ...]
    places: tuple[int, ...]
    unplanned: tuple[int, ...]

    @staticmethod
    @lru_cache(1024)
    def of(copies: tuple[CopyParts, ...], num_layers: int, empty: frozenset[int]) -> Layout:
        """Raise UsageError when copies are out of order or in a layer that is called empty."""
        _check_order(copies, num_layers, empty)
        joints: list[Joint] = []
        unplanned: list[int] = []
        layer = place = 0
        while layer < num_layers:
            first, stop = place, layer + 1
            while place < len(copies) and copies[place].ends[0] < stop:
                stop = max(stop, copies[place].ends[1] + 1)
                place += 1
            joints.append(Joint(range(layer, stop), first, place))
            planned = empty.union(*[parts.layers for parts in copies[first:place]])
            unplanned += [each for each in range(layer, stop) if each not in planned]
            layer = stop
        places = [place for place, joint in enumerate(joints) for _ in joint.layers]
        return Layout(tuple(joints), tuple(places), tuple(unplanned))


def _check_order(copies: tuple[CopyParts, ...], num_layers: int, empty: frozenset[int]) -> None:
    first = 0
    for parts in copies:
        layer, last = parts.ends
        if not first <= layer <= last < num_layers:
            raise UsageError(
                f"a transfer's {parts.name} is out of order or not below {num_layers}; list the"
                " copies by layer"
            )
        first = layer
        if not empty.isdisjoint(parts.layers):
            raise UsageError(
                f"layer {min(empty & parts.layers)} of a transfer is called empty by construction,"
                f" but something is to be copied there ({parts.name})"
            )


@frozen
class TransferPlan:
    """What a transfer will move, and what it needs.

    Attributes:
        copies: by their first layers; one component of a layer may have several.
        deadline_s: seconds from planning within which every byte must be true.
        owner: who answers for the deadline; its name is in the error.
        holds: leases of source and destination, closed when the transfer has settled.
        empty_layers: layers that hold no bytes by construction (a sliding layer keeps no span).
        after: work that must be done before the first copy may begin.

    Raises UsageError when the copies are out of order or in a layer that is called empty.
    """

    id: TransferId
    kind: Kind
    copies: tuple[CopyOrder, ...]
    num_layers: int
    deadline_s: float
    owner: str
    holds: tuple[Hold, ...] = ()
    empty_layers: frozenset[int] = frozenset()
    after: tuple[Completion, ...] = ()
    layout: Layout = field(
        init=False, default=Factory(lambda plan: _laid_out(plan), takes_self=True)
    )

    @property
    def name(self) -> str:
        """What to call the transfer in errors and logs."""
        return f"{self.kind} {self.id}"

    @property
    def layers(self) -> tuple[int, int]:
        """The run of layers, (first, count), in which there is something to copy."""
        first = self.copies[0].layer
        return first, max(order.last_layer for order in self.copies) - first + 1

    @property
    def nbytes(self) -> int:
        """Planned bytes over all layers and components."""
        return sum(order.nbytes for order in self.copies)


def _laid_out(plan: TransferPlan) -> Layout:
    copies = tuple([order.parts for order in plan.copies])
    return Layout.of(copies, plan.num_layers, plan.empty_layers)


class TransferObserver(Protocol):
    """Hears of every transition before any reader can see it, for the log (R14).

    Calls come from whichever thread makes the transition (Trio's or a stream worker's), one at a
    time per transfer, with the transfer's lock held: keep them short and thread-safe, and call no
    transition of the transfer from within. Layers that are empty by construction are not told of.
    """

    def planned(self, transfer: Transfer) -> None:
        """The transfer exists, with both ends held."""
        ...

    def recorded(self, transfer: Transfer, layers: tuple[int, int]) -> None:
        """Readers may order a stream behind these layers, (first, count), from now on."""
        ...

    def layer_done(self, transfer: Transfer, layers: tuple[int, int], nbytes: int) -> None:
        """All components of these layers, (first, count), have arrived."""
        ...

    def done(self, transfer: Transfer, nbytes: int) -> None:
        """Everything planned has arrived."""
        ...

    def failed(self, transfer: Transfer, reason: str, message: str) -> None:
        """The transfer ended without all its bytes: failed, short, late or revoked."""
        ...

    def settled(self, transfer: Transfer) -> None:
        """Every copy that began has returned; both ends may be let go."""
        ...


@frozen
class LayerTiming:
    """When one layer was recorded and done, in seconds after planning; None if it never was."""

    layer: int
    recorded_s: float | None
    done_s: float | None


def adjoined(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join runs (first, count) that follow one another."""
    first = end = -1
    for start, count in runs:
        if start != end:
            if end > first:
                yield first, end - first
            first = start
        end = start + count
    if end > first:
        yield first, end - first
