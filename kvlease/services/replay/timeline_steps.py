"""Steps and the waits inside them, as a timeline finds them.

A log says when a step ended. It began after the last step of its kind, after whatever its requests
did before, and after the line that its first opening names: the latest of these is drawn.
"""

from collections import deque
from collections.abc import Iterable
from typing import final

from kvlease.protocols import events as ev
from kvlease.services.replay.timeline_live import LiveLease, LiveRequest
from kvlease.services.replay.timeline_spans import (
    Arrival,
    Canvas,
    Moment,
    PhaseSpan,
    StepKind,
    StepSpan,
    WaitSpan,
)

RECENT = 1 << 15
"""Lines whose times are kept, for openings that say which line they came after."""


@final
class Steps:
    """Steps of the requests and leases that a timeline knows."""

    def __init__(
        self, canvas: Canvas, requests: dict[int, LiveRequest], leases: dict[int, LiveLease]
    ) -> None:
        """Borrow the timeline's canvas, requests and leases."""
        self._canvas = canvas
        self._requests = requests
        self._leases = leases
        self._waits: dict[int, list[tuple[Moment, ev.LeaseWait]]] = {}
        self._reads: dict[int, tuple[Moment, ev.StepRead]] = {}
        self._latest_reads: deque[int] = deque()
        self._step_ends: dict[str, Moment] = {}
        self._recent: deque[tuple[int, Moment]] = deque(maxlen=RECENT)

    def passed(self, seq: int, at: Moment) -> None:
        """Remember when the log reached a ``seq``."""
        self._recent.append((seq, at))

    def finish(self, at: Moment) -> None:
        """Give away the waits that nothing ended."""
        for waits in self._waits.values():
            for begin, wait in waits:
                self._give_wait(begin, wait, at, None, is_open=True)

    def wait(self, event: ev.LeaseWait, at: Moment) -> None:
        """Begin a wait; one outside steps has one reader, and ends with its lease."""
        key = event.step or -(event.leases[0] if event.leases else 0)
        self._waits.setdefault(key, []).append((at, event))

    def lease_closed(self, lease: int, at: Moment) -> None:
        """End the waits of a reader of its own."""
        for begin, wait in self._waits.pop(-lease, ()):
            self._give_wait(begin, wait, at, None, is_open=False)

    def read(self, event: ev.StepRead, at: Moment) -> None:
        """Keep what a step opened, and end its waits."""
        self._reads[event.step] = (at, event)
        self._latest_reads.append(event.step)
        if len(self._latest_reads) > RECENT:
            self._reads.pop(self._latest_reads.popleft(), None)
        stalls = {(stall.transfer, stall.layer): stall.wait_us for stall in event.stalls}
        for begin, wait in self._waits.pop(event.step, ()):
            us = stalls.pop((wait.transfer, wait.layer), None)
            self._give_wait(begin, wait, at, us, is_open=False)
        for (transfer, layer), us in stalls.items():
            leases = [opening.lease for opening in event.opens]
            untold = ev.LeaseWait(
                leases=leases, layer=layer, components=[], transfer=transfer, owner="",
                deadline_ns=0, step=event.step,
            )  # fmt: skip
            self._give_wait(at, untold, at, us, is_open=False)

    def done(self, event: ev.StepDone, at: Moment) -> None:
        """Give a step away, and move its requests on."""
        requests = [self._requests.get(row.request) for row in event.rows]
        begin = self._begin(event.kind, event.step, event.read, requests)
        read = self._reads.get(event.read)
        self._canvas.step(
            StepSpan(
                event.step, event.kind, begin, at,
                tuple(row.request for row in event.rows),
                sum(row.count for row in event.rows),
                sum(row.published for row in event.rows),
                read[0].line if read is not None else 0,
                self._arrived(row.lease for row in event.rows),
            )
        )  # fmt: skip
        self._step_ends[event.kind] = at
        for row, request in zip(event.rows, requests, strict=True):
            if request is None:
                continue
            if row.published and request.phase == "prefill":
                self._canvas.phase(
                    PhaseSpan(row.request, "prefill", request.begin, at, "first token")
                )
                request.phase, request.begin = "decode", at
            request.since = at

    def discarded(self, event: ev.StepDiscarded, at: Moment) -> None:
        """Give a step away that published nothing; who was in it is told by its read or waits."""
        read = self._reads.get(event.read)
        leases = [opening.lease for opening in read[1].opens] if read is not None else []
        for begin, wait in self._waits.pop(event.step, ()):
            leases += wait.leases
            self._give_wait(begin, wait, at, None, is_open=False)
        requests = self._requests_of(leases)
        known = [self._requests.get(request) for request in requests]
        begin = self._begin("discarded", event.step, event.read, known) if any(known) else at
        self._canvas.step(
            StepSpan(
                event.step, "discarded", begin, at, requests, 0, 0,
                read[0].line if read is not None else 0, (), event.reason,
            )
        )  # fmt: skip
        self._step_ends["discarded"] = at
        for request in known:
            if request is not None:
                request.since = at

    def _begin(
        self, kind: StepKind, step: int, read: int, requests: Iterable[LiveRequest | None]
    ) -> Moment:
        latest = self._step_ends.get(kind, Moment(0, 0))
        for request in requests:
            if request is not None and request.since > latest:
                latest = request.since
        found = self._reads.get(read)
        if step == read and found is not None and found[1].opens:
            opened = self._reached(min(opening.after_seq for opening in found[1].opens))
            latest = max(latest, opened)
        return latest

    def _reached(self, seq: int) -> Moment:
        recent = self._recent
        if not recent or not recent[0][0] <= seq <= recent[-1][0]:
            return Moment(0, 0)
        place = len(recent) - 1 - (recent[-1][0] - seq)  # a log has no gaps, as a rule
        if place >= 0 and recent[place][0] == seq:
            return recent[place][1]
        return Moment(0, 0)

    def _arrived(self, leases: Iterable[int]) -> tuple[Arrival, ...]:
        """Return the transfers that these leases waited for and now read, each lease's once."""
        found: dict[int, Arrival] = {}
        for number in leases:
            lease = self._leases.get(number)
            if lease is None or not lease.pending:
                continue
            for transfer in lease.pending:
                if transfer.end is not None and transfer.ended == "done":
                    plan = transfer.plan
                    found[plan.transfer] = Arrival(
                        plan.transfer, plan.direction, transfer.lane, transfer.at, transfer.end
                    )
            lease.pending = [transfer for transfer in lease.pending if transfer.end is None]
        return tuple(found.values())

    def _requests_of(self, leases: Iterable[int]) -> tuple[int, ...]:
        found = (self._leases.get(number) for number in leases)
        return tuple(sorted({f.event.request for f in found if f is not None and f.event.request}))

    def _give_wait(
        self, begin: Moment, wait: ev.LeaseWait, at: Moment, us: int | None, *, is_open: bool
    ) -> None:
        self._canvas.wait(
            WaitSpan(
                begin, at, us, wait.layer, tuple(wait.components), wait.transfer, wait.step,
                wait.owner, self._requests_of(wait.leases), is_open,
            )
        )  # fmt: skip
