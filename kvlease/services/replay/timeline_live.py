"""What a timeline remembers while it is alive: requests, leases, transfers, and lanes for them."""

from heapq import heappop, heappush
from typing import final

from kvlease.protocols import events as ev
from kvlease.services.replay.timeline_spans import Mark, Moment, Phase


@final
class LiveRequest:
    """A request between its submission and its end; its next step begins after ``since``."""

    __slots__ = ("begin", "leases", "phase", "since")

    def __init__(self, at: Moment) -> None:
        """Start waiting."""
        self.begin = at
        self.phase: Phase = "waiting"
        self.since = at
        self.leases: set[int] = set()


@final
class LiveLease:
    """An open lease; ``pending`` are transfers it depends on and that no step has read yet."""

    __slots__ = ("at", "event", "pending", "runs")

    def __init__(self, event: ev.LeaseOpen, at: Moment) -> None:
        """Start with the pages it opened with."""
        self.event = event
        self.at = at
        self.runs = [(at.line, run) for run in event.pages]
        self.pending: list[LiveTransfer] = []


@final
class LiveTransfer:
    """A transfer that has not settled; ``open_ends`` are those of its two leases still open."""

    __slots__ = ("at", "end", "ended", "lane", "marks", "open_ends", "plan", "reason")

    def __init__(self, plan: ev.TransferPlan, at: Moment, lane: int, open_ends: set[int]) -> None:
        """Start as planned."""
        self.plan = plan
        self.at = at
        self.lane = lane
        self.open_ends = open_ends
        self.marks: list[Mark] = []
        self.end: Moment | None = None
        self.ended = "open"
        self.reason = ""


@final
class Lanes:
    """Rows of a picture; whoever enters gets the lowest that nobody is in."""

    def __init__(self) -> None:
        """Start with none."""
        self._free: list[int] = []
        self._total = 0

    def enter(self) -> int:
        """Take a lane."""
        if self._free:
            return heappop(self._free)
        self._total += 1
        return self._total - 1

    def leave(self, lane: int) -> None:
        """Give a lane back."""
        heappush(self._free, lane)
