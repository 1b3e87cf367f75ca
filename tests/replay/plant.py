"""Faults to plant in the story: changes of its events, and what has to be found then."""

from collections.abc import Callable

import msgspec
from attrs import frozen

from kvlease.protocols import events as ev
from tests.replay.build import place_of

Change = Callable[[list[ev.Event]], None]
Place = tuple[type[ev.Event], int]


def change(kind: type[ev.Event], number: int, **fields: object) -> Change:
    """Give the ``number``-th event of a type other fields."""

    def apply(events: list[ev.Event]) -> None:
        at = place_of(events, kind, number)
        events[at] = msgspec.structs.replace(events[at], **fields)

    return apply


def drop(kind: type[ev.Event], number: int) -> Change:
    def apply(events: list[ev.Event]) -> None:
        del events[place_of(events, kind, number)]

    return apply


def put(kind: type[ev.Event], number: int, *new: ev.Event, before: bool = False) -> Change:
    """Put events behind (or before) the ``number``-th event of a type."""

    def apply(events: list[ev.Event]) -> None:
        at = place_of(events, kind, number) + (not before)
        events[at:at] = [msgspec.structs.replace(event) for event in new]

    return apply


def swap(first: Place, second: Place) -> Change:
    """Move the second event before the first."""

    def apply(events: list[ev.Event]) -> None:
        event = events.pop(place_of(events, *second))
        events.insert(place_of(events, *first), event)

    return apply


def all_of(*changes: Change) -> Change:
    def apply(events: list[ev.Event]) -> None:
        for one in changes:
            one(events)

    return apply


def landings(late: tuple[int, str] | None, *, never: bool = False) -> Change:
    """Tell when the bytes of load 2 (and of the store before it) landed, one part of it late."""

    def apply(events: list[ev.Event]) -> None:
        parts = [(0, "latent"), (0, "window"), (1, "latent"), (1, "index_k"), (1, "window")]
        told = {part: ev.TransferLanded(transfer=2, layer=part[0], component=part[1], nbytes=8)
                for part in parts}  # fmt: skip
        honest = [event for part, event in told.items() if part != late]
        put(ev.TransferRecord, 1, *honest, before=True)(events)
        stored = (msgspec.structs.replace(event, transfer=1) for event in told.values())
        put(ev.TransferRecord, 0, *stored)(events)
        if late is not None and not never:
            put(ev.StepRead, 2, told[late])(events)

    return apply


@frozen
class Plant:
    """A fault, the rule that it breaks, and the events that show it.

    ``also`` are rules that the same fault breaks as well.
    """

    rule: str
    change: Change
    shown_by: list[Place]
    request: int | None = None
    layer: int | None = None
    component: str | None = None
    also: frozenset[str] = frozenset()
