"""One pass over a log that finds what its pictures show: spans, each given away when it ends.

Only what is alive is remembered, so memory does not grow with the log. Nothing is judged here: a
log that breaks the rules is drawn as it is, and lines that do not fit together are passed over.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias, cast, final

from kvlease.protocols import events as ev
from kvlease.services.replay.timeline_ledger import (
    FREE,
    HELD,
    QUARANTINED,
    SEALED,
    TierLedger,
)
from kvlease.services.replay.timeline_live import Lanes, LiveLease, LiveRequest, LiveTransfer
from kvlease.services.replay.timeline_spans import (
    Canvas,
    LeaseSpan,
    Mark,
    Moment,
    Phase,
    PhaseSpan,
    TransferSpan,
)
from kvlease.services.replay.timeline_steps import Steps

Numbered: TypeAlias = tuple[int, ev.Event]
"""An event and its line, from 1."""


def _overlap(left: Iterable[ev.PageRun], right: Iterable[ev.PageRun]) -> bool:
    others = list(right)
    return any(
        first < there + many and there < first + count
        for first, count, _ in left
        for there, many, _ in others
    )


@final
class Timeline:
    """Feeds a canvas. Call `feed` with each event in order, then `finish`."""

    def __init__(self, canvas: Canvas) -> None:
        """Start before the first line."""
        self._canvas = canvas
        self._at = Moment(0, 0)
        self._requests: dict[int, LiveRequest] = {}
        self._leases: dict[int, LiveLease] = {}
        self._transfers: dict[int, LiveTransfer] = {}
        self._holding: dict[int, LiveTransfer] = {}
        self._lanes: dict[str, Lanes] = {}
        self._tiers: dict[str, TierLedger] = {}
        self._steps = Steps(canvas, self._requests, self._leases)
        self._routes = cast(
            "dict[type[ev.Event], Callable[[ev.Event, Moment], None]]",
            {
                ev.LogOpen: self._log_open,
                ev.RequestSubmitted: self._submitted,
                ev.RequestAdmitted: self._admitted,
                ev.RequestPreempted: self._preempted,
                ev.RequestFinished: self._over,
                ev.RequestFailed: self._over,
                ev.PageReserve: self._reserve,
                ev.PageSeal: self._seal,
                ev.PageQuarantine: self._quarantine,
                ev.PageFree: self._free,
                ev.LeaseOpen: self._lease_open,
                ev.LeaseClose: self._lease_close,
                ev.LeaseWait: self._steps.wait,
                ev.TransferPlan: self._plan,
                ev.TransferRecord: self._record,
                ev.TransferLanded: self._landed,
                ev.TransferLayerDone: self._layer_done,
                ev.TransferDone: self._done,
                ev.TransferFail: self._fail,
                ev.TransferRevoke: self._revoke,
                ev.TransferLate: self._late,
                ev.StepRead: self._steps.read,
                ev.StepDone: self._steps.done,
                ev.StepDiscarded: self._steps.discarded,
            },
        )

    def feed(self, event: ev.Event, line: int) -> None:
        """Take one line."""
        at = self._at = Moment(line, event.t_ns)
        self._steps.passed(event.seq, at)
        self._canvas.event(event, at)
        route = self._routes.get(type(event))
        if route is not None:
            route(event, at)

    def finish(self) -> None:
        """Give away what the log leaves open, as ending with its last line."""
        at = self._at
        for number, request in self._requests.items():
            self._canvas.phase(PhaseSpan(number, request.phase, request.begin, at, "open"))
        self._steps.finish(at)
        for transfer in list({id(t): t for t in self._transfers.values()}.values()):
            self._give_transfer(transfer, at)
        for lease in self._leases.values():
            self._give_lease(lease, at, is_open=True)

    # Requests.

    def _phase(self, number: int, at: Moment, ended: str, then: Phase | None) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        self._canvas.phase(PhaseSpan(number, request.phase, request.begin, at, ended))
        if then is None:
            del self._requests[number]
            return
        request.phase, request.begin, request.since = then, at, at

    def _log_open(self, event: ev.LogOpen, at: Moment) -> None:
        for name, total in (("device", event.device_pages), ("host", event.host_pages)):
            self._tiers[name] = TierLedger(name, total)
            self._canvas.counts(self._tiers[name].counts(), at)

    def _submitted(self, event: ev.RequestSubmitted, at: Moment) -> None:
        self._requests[event.request] = LiveRequest(at)

    def _admitted(self, event: ev.RequestAdmitted, at: Moment) -> None:
        self._phase(event.request, at, "admitted", "prefill")

    def _preempted(self, event: ev.RequestPreempted, at: Moment) -> None:
        self._phase(event.request, at, "preempted", "waiting")

    def _over(self, event: ev.RequestFinished | ev.RequestFailed, at: Moment) -> None:
        ended = "finished" if isinstance(event, ev.RequestFinished) else "failed"
        self._phase(event.request, at, f"{ended}: {event.reason}", None)

    # Pages and leases.

    def _tier(self, name: str) -> TierLedger:
        return self._tiers.setdefault(name, TierLedger(name, 0))

    def _move(self, name: str, runs: list[ev.PageRun], state: int, at: Moment) -> None:
        tier = self._tier(name)
        tier.move(runs, state)
        self._canvas.counts(tier.counts(), at)

    def _reserve(self, event: ev.PageReserve, at: Moment) -> None:
        lease = self._leases.get(event.lease)
        if lease is not None:
            lease.runs.extend((at.line, run) for run in event.pages)
            self._tier(event.tier).pin(event.pages, 1)
        self._move(event.tier, event.pages, HELD, at)

    def _seal(self, event: ev.PageSeal, at: Moment) -> None:
        self._move(event.tier, event.pages, SEALED, at)

    def _quarantine(self, event: ev.PageQuarantine, at: Moment) -> None:
        self._move(event.tier, event.pages, QUARANTINED, at)

    def _free(self, event: ev.PageFree, at: Moment) -> None:
        self._move(event.tier, event.pages, FREE, at)

    def _lease_open(self, event: ev.LeaseOpen, at: Moment) -> None:
        lease = self._leases[event.lease] = LiveLease(event, at)
        tier = self._tier(event.tier)
        tier.pin(event.pages, 1)
        if event.pages:
            self._canvas.counts(tier.counts(), at)
        if event.transfer or event.tier != "device":
            return
        request = self._requests.get(event.request)
        if request is not None:
            request.leases.add(event.lease)
        for transfer in self._transfers.values():
            if transfer.plan.destination_tier == "device" and _overlap(
                event.pages, transfer.plan.destination
            ):
                lease.pending.append(transfer)

    def _lease_close(self, event: ev.LeaseClose, at: Moment) -> None:
        lease = self._leases.pop(event.lease, None)
        if lease is not None:
            tier = self._tier(lease.event.tier)
            runs = [run for _, run in lease.runs]
            tier.pin(runs, -1)
            if runs:
                self._canvas.counts(tier.counts(), at)
            self._give_lease(lease, at, is_open=False)
            request = self._requests.get(lease.event.request)
            if request is not None:
                request.leases.discard(event.lease)
        self._steps.lease_closed(event.lease, at)
        transfer = self._holding.pop(event.lease, None)
        if transfer is not None:
            transfer.open_ends.discard(event.lease)
            self._settle(transfer, at)

    def _give_lease(self, lease: LiveLease, at: Moment, *, is_open: bool) -> None:
        e = lease.event
        self._canvas.lease(
            LeaseSpan(
                e.lease, e.mode, e.tier, e.request, e.transfer, lease.at, at, is_open, lease.runs
            )
        )

    # Transfers.

    def _plan(self, event: ev.TransferPlan, at: Moment) -> None:
        lane = self._lanes.setdefault(event.direction, Lanes()).enter()
        ends = {n for n in (event.source_lease, event.destination_lease) if n in self._leases}
        transfer = self._transfers[event.transfer] = LiveTransfer(event, at, lane, ends)
        for number in ends:
            self._holding[number] = transfer
        if event.destination_tier != "device":
            return
        request = self._requests.get(event.request)
        for number in (request.leases if request is not None else set[int]()) | {event.reader}:
            lease = self._leases.get(number)
            if lease is not None and (
                number == event.reader or _overlap(lease.event.pages, event.destination)
            ):
                lease.pending.append(transfer)

    def _mark(self, number: int, mark: Mark) -> None:
        transfer = self._transfers.get(number)
        if transfer is not None:
            transfer.marks.append(mark)

    def _record(self, event: ev.TransferRecord, at: Moment) -> None:
        mark = Mark(at, "recorded", event.layers, tuple(event.components))
        self._mark(event.transfer, mark)

    def _landed(self, event: ev.TransferLanded, at: Moment) -> None:
        self._mark(event.transfer, Mark(at, "landed", (event.layer, 1), (event.component,)))

    def _layer_done(self, event: ev.TransferLayerDone, at: Moment) -> None:
        self._mark(event.transfer, Mark(at, "done", event.layers, tuple(event.components)))

    def _end(self, number: int, at: Moment, ended: str, reason: str) -> None:
        transfer = self._transfers.get(number)
        if transfer is None:
            return
        if transfer.end is None:
            transfer.end, transfer.ended, transfer.reason = at, ended, reason
        self._settle(transfer, at)

    def _done(self, event: ev.TransferDone, at: Moment) -> None:
        self._end(event.transfer, at, "done", "")

    def _fail(self, event: ev.TransferFail, at: Moment) -> None:
        self._end(event.transfer, at, "failed", event.reason)

    def _revoke(self, event: ev.TransferRevoke, at: Moment) -> None:
        self._end(event.transfer, at, "revoked", event.reason)

    def _late(self, event: ev.TransferLate, at: Moment) -> None:
        self._end(event.transfer, at, "late", f"the deadline of {event.owner} passed")

    def _settle(self, transfer: LiveTransfer, at: Moment) -> None:
        if transfer.end is None or transfer.open_ends:
            return
        if self._transfers.pop(transfer.plan.transfer, None) is None:
            return
        self._lanes[transfer.plan.direction].leave(transfer.lane)
        self._give_transfer(transfer, at)

    def _give_transfer(self, transfer: LiveTransfer, at: Moment) -> None:
        t = transfer
        end = t.end or at
        self._canvas.transfer(
            TransferSpan(t.plan, t.lane, t.at, end, at, t.ended, t.reason, t.marks)
        )
