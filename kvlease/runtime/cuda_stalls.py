"""How long a device's stream really stood still for what it was ordered behind.

The device measures: an event with a time before each wait and another behind it. They are read when
the stream's next record has ended, so that nobody waits for them. This module decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, Self, final

from attrs import frozen

from kvlease.protocols.ports import Completion, DevicePoint

HELD_S = 10e-6
"""Waits shorter than this held nothing: that much passes between two events with a wait between."""


class TimedEvent(Protocol):
    """An event that knows its time; ``torch.cuda.Event(enable_timing=True)`` is one."""

    def record(self) -> None:
        """Mark the place behind all that the current stream was given."""
        ...

    def elapsed_time(self, end_event: Self, /) -> float:
        """Return the milliseconds from this event to another, once both were passed."""
        ...


@frozen(eq=False)
class Stretch:
    """One wait of the stream, between two events."""

    completion: Completion
    begin: TimedEvent
    end: TimedEvent


@final
class StallClock:
    """Times a stream's waits; all but `seconds` is for the stream's worker."""

    def __init__(self, new_event: Callable[[], TimedEvent]) -> None:
        """Make no event before the first wait; they are used again."""
        self._new_event = new_event
        self._events: deque[TimedEvent] = deque()
        self._stretches: list[Stretch] = []

    def hold(self, completion: Completion, points: Iterable[DevicePoint]) -> None:
        """Hold the current stream for points, and time it."""
        begin, end = self._event(), self._event()
        begin.record()
        for point in points:
            point.hold()
        end.record()
        self._stretches.append(Stretch(completion, begin, end))

    def take(self) -> list[Stretch]:
        """Return the waits since the last call; they are over when a record behind them is."""
        taken, self._stretches = self._stretches, []
        return taken

    def seconds(self, stretch: Stretch) -> float:
        """Return how long a wait that is over held the stream, 0 if it did not; on any thread."""
        seconds = stretch.begin.elapsed_time(stretch.end) / 1e3
        self._events.extend((stretch.begin, stretch.end))
        return seconds if seconds > HELD_S else 0.0

    def _event(self) -> TimedEvent:
        try:
            return self._events.pop()
        except IndexError:
            return self._new_event()
