"""What really happened on a simulated device: which bytes are there, and who read before.

The device tells of copies that were asked for and of bytes that landed; the model's wrapper tells
of layers as steps open them. From both follows, without the log's checker, which openings were let
through too early: a completion said that the layer was done, and a component had not landed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, final

import msgspec
from attrs import define, field

from kvlease.protocols.event_base import Event, EventSink
from kvlease.protocols.events import PageReserve, StepRan, TransferLanded, TransferPlan
from kvlease.protocols.ownership import SequenceLease
from kvlease.protocols.ports import Completion, CompletionState, CopyOrder
from kvlease.protocols.schema import Schema
from kvlease.runtime.transfer import LayerCompletion, Transfer
from kvlease.units import LayerId, LeaseId, StepId, TransferId


class EarlyRead(msgspec.Struct, frozen=True, order=True):
    """A step opened a component of a layer for a lease before that component's bytes had landed."""

    step: StepId
    lease: LeaseId
    layer: int
    component: str
    transfer: TransferId


Part: TypeAlias = tuple[int, str]
"""A component of a layer."""


@define(eq=False)
class _Arrival:
    """Bytes of one load that have not landed, and the openings that depend on them."""

    transfer: Transfer
    layer: int
    openings: list[EarlyRead] = field(factory=list[EarlyRead])

    def said(self) -> CompletionState:
        """What the layer's completion says."""
        return self.transfer.layer_completion(LayerId(self.layer)).state


@final
class Truth:
    """Keeps account of loads' bytes; on the Trio thread, like everything simulated.

    Pages and slots that go to somebody else are forgotten: ``watch`` is to hear the audit log,
    which says when they do.
    """

    def __init__(self, schema: Schema, sink: EventSink | None = None) -> None:
        """Start with nothing on its way; landings are written to the sink."""
        self.early: set[EarlyRead] = set()
        self.num_landed = 0
        self.unheld: set[tuple[Transfer, int]] = set()
        """Layers whose waits pass although their copies are not done: a lie of the device's."""
        self._sink = sink
        self._is_span = {
            (int(layer.id), span.name) for layer in schema.layers for span in layer.spans
        }
        self._missing: dict[Part, dict[int, _Arrival]] = {}
        self._readers: dict[int, int] = {}

    def watch(self, event: Event) -> None:
        """Hear one event of the log; a subscriber."""
        if isinstance(event, PageReserve) and event.tier == "device":
            for part in self._missing:
                if part in self._is_span:
                    self._forget(part, event)
        elif isinstance(event, TransferPlan) and event.reader:
            self._readers[event.transfer] = event.reader

    def _forget(self, part: Part, event: PageReserve) -> None:
        places = self._missing[part]
        if places:
            for first, count, _ in event.pages:
                for page in range(first, first + count):
                    arrival = places.pop(page, None)
                    if arrival is not None:
                        self._judge(arrival)  # it never landed for those who read it

    def asked(self, transfer: Transfer, orders: Iterable[CopyOrder]) -> None:
        """A load's copies were launched: from now on their bytes are missing."""
        for order in orders:
            arrival = _Arrival(transfer, order.layer)
            places = self._missing.setdefault((order.layer, order.component), {})
            places.update(dict.fromkeys(order.places(), arrival))

    def opened(self, step: StepId, members: Sequence[SequenceLease], layer: int) -> None:
        """A step opened a layer for its members."""
        for part, places in self._missing.items():
            if part[0] == layer and places:
                for lease in members:
                    self._note(step, lease, part, places)

    def _note(
        self, step: StepId, lease: SequenceLease, part: Part, places: dict[int, _Arrival]
    ) -> None:
        reads = lease.pages if part in self._is_span else (lease.slot,)
        for arrival in dict.fromkeys(places[place] for place in reads if place in places):
            transfer = arrival.transfer.plan.id
            if part in self._is_span or self._readers.get(transfer, lease.id) == lease.id:
                arrival.openings.append(EarlyRead(step, lease.id, *part, transfer))

    def holds(self, completion: Completion) -> bool:
        """Whether a stream's wait holds it; where it does not, what is opened there is early."""
        if not isinstance(completion, LayerCompletion):
            return True
        if (completion.transfer, completion.layer) not in self.unheld:
            return True
        self._let_through(completion.transfer, completion.layer)
        return False

    def _let_through(self, transfer: Transfer, layer: int) -> None:
        for part, places in self._missing.items():
            if part[0] == layer:
                for arrival in dict.fromkeys(places.values()):
                    if arrival.transfer is transfer:
                        self.early.update(arrival.openings)

    def ran(self, step: StepId) -> None:
        """The device has come to the end of a step's work."""
        if self._sink is not None and self._sink.audit:
            self._sink.emit(StepRan(step=step, actor="device"))

    def landed(self, transfer: Transfer, order: CopyOrder, nbytes: int) -> None:
        """Bytes are there now; called before their completion can say so."""
        self.num_landed += 1
        if self._sink is not None and self._sink.audit:
            left = nbytes
            for part, size in zip(order.parts, order.sizes(), strict=True):
                moved = min(left, size)
                left -= moved
                self._sink.emit(
                    TransferLanded(
                        transfer=transfer.plan.id,
                        layer=part.layer,
                        component=part.component,
                        nbytes=moved,
                        actor="device",
                    )
                )
        places = self._missing.get((order.layer, order.component))
        for place in order.places() if places else ():
            assert places is not None
            arrival = places.get(place)
            if arrival is not None and arrival.transfer is transfer:
                del places[place]
                self._judge(arrival)

    def _judge(self, arrival: _Arrival) -> None:
        """Openings that the completion had let through by now came too early."""
        if arrival.said() is CompletionState.DONE:
            self.early.update(arrival.openings)

    def close(self) -> None:
        """The device stops: what has not landed by now never will."""
        for places in self._missing.values():
            for arrival in places.values():
                self._judge(arrival)
        self._missing.clear()
