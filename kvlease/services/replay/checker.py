"""The checker: feeds a log's events to the rules and says what they show.

`check` judges a sequence of events, `check_log` a file, `Checker` takes events as they come. Memory
follows what is alive in the log, not its length.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, final

from kvlease.errors import BadInput
from kvlease.protocols import events as ev
from kvlease.services.replay.bounds import beyond_bounds
from kvlease.services.replay.endings import check_end, stuck_requests
from kvlease.services.replay.findings import Findings, rule_of
from kvlease.services.replay.lease_rules import LeaseRules
from kvlease.services.replay.ledger_rules import LedgerRules
from kvlease.services.replay.opening_rules import OpeningRules
from kvlease.services.replay.page_rules import PageRules
from kvlease.services.replay.pin_rules import PinRules
from kvlease.services.replay.reader import (
    BRIEF,
    KINDS,
    BrokenLine,
    UnknownEvent,
    open_log,
)
from kvlease.services.replay.request_rules import RequestRules
from kvlease.services.replay.state import World
from kvlease.services.replay.step_rules import StepRules
from kvlease.services.replay.transfer_rules import TransferRules
from kvlease.services.replay.verdict import Decision, SlowTransfer, StallShare, Verdict

Handler = Callable[[Any], None]
"""Takes the one type of event that it is listed under."""

NORMAL_RULES = ("R1", "R2", "R3", "R4", "R5", "R6", "R7", "R8", "R10", "R11")
"""What level ``normal`` has no lines for."""
_STATEFUL = ("request.", "page.", "lease.", "transfer.", "step.")


def _ignore(_event: ev.Event) -> None:
    """What doors and most actors do, and that a request was called off, breaks no rule."""


@final
class Checker:
    """Judges one log, event by event; `verdict` may be asked once, at its end."""

    def __init__(self) -> None:
        """Start before the first line."""
        self._started = time.perf_counter()
        self._findings = Findings()
        self._world: World | None = None
        self._handlers: dict[type[ev.Event], Handler] = {ev.LogOpen: self._open}
        self._expected: int = 1
        self._last_ns: int = 0
        self._first_ns = 0
        self._counts = Counter[type[ev.Event]]()
        self._unknown = Counter[str]()
        self._is_closed = False
        self._closed_line = self._closed_seq = 0

    def feed(self, event: ev.Event, line: int) -> None:
        """Take the event of one line."""
        self.feed_block(line, (event,))

    def feed_block(self, first_line: int, block: Sequence[ev.Event]) -> None:
        """Take the events of lines that follow one another.

        Raises:
            BadInput: the first event is no ``log.open``.
        """
        if not block:
            return
        if self._world is None and not isinstance(block[0], ev.LogOpen):
            raise BadInput("a log begins with log.open; without it nothing can be judged")
        self._counts.update(map(type, block))
        self._findings.lines.note(block[0].seq, first_line)
        handlers, expected, last_ns = self._handlers, self._expected, self._last_ns
        for seq, event in enumerate(block, expected):
            if event.seq != seq or last_ns > (last_ns := event.t_ns):
                done = seq - expected
                self._expected = seq
                if done:
                    self._last_ns = block[done - 1].t_ns
                self._feed_disordered(first_line + done, block[done:])
                return
            handlers[type(event)](event)
        self._expected, self._last_ns = expected + len(block), last_ns

    def _feed_disordered(self, first_line: int, block: Sequence[ev.Event]) -> None:
        """Take a block some of whose events are not next in number or in time."""
        for line, event in enumerate(block, first_line):
            seq, t_ns = event.seq, event.t_ns
            is_next = seq == self._expected and t_ns >= self._last_ns
            if is_next or self._disorder(event, line, self._expected, self._last_ns):
                self._expected, self._last_ns = seq + 1, max(t_ns, self._last_ns)
                self._handlers[type(event)](event)

    def _disorder(self, event: ev.Event, line: int, expected: int, last_ns: int) -> bool:
        """Judge an event that is not the next one; returns whether it can be used."""
        findings, seq = self._findings, event.seq
        if isinstance(event, BrokenLine) and not seq:
            findings.doubt(f"a line is no event ({event.reason})", line)
            self._forget()
            findings.lines.note(expected, line + 1)
            return False
        if isinstance(event, ev.LogGap) and event.first_seq == expected <= seq:
            findings.lines.note(seq, line)
            return True  # it says itself what is missing
        if seq < expected:
            why = "another log begins behind the first, which alone is judged"
            if not isinstance(event, ev.LogOpen):
                why = "lines are out of order or there twice"
            findings.doubt(why, line)
            findings.lines.note(expected, line + 1)
            return False
        if seq > expected:
            findings.doubt("lines are missing: numbers were left out", line)
            findings.lines.note(seq, line)
            self._forget()
        if event.t_ns < last_ns:
            findings.doubt("the clock falls", line, ("R9",))
        return True

    def _forget(self) -> None:
        if self._world is not None:
            self._world.forget()

    def _open(self, event: ev.LogOpen) -> None:
        if self._world is not None:
            self._findings.doubt("another log.open in the middle of the log", self._line(event))
            return
        if beyond := beyond_bounds(event):
            raise BadInput(f"the log has a head that kvlease cannot judge by: {beyond}")
        self._first_ns = event.t_ns
        world = self._world = World(event, self._findings)
        openings = self._openings = OpeningRules(world)
        pages, leases = PageRules(world), LeaseRules(world, openings)
        self._transfers = transfers = TransferRules(world, openings)
        self._steps = steps = StepRules(world, openings)
        requests, pins = RequestRules(world, leases), PinRules(world)
        if event.level != "audit":
            why = f"the log is of level {event.level}, which leaves these rules' lines out"
            self._findings.doubt(why, self._line(event), NORMAL_RULES)
        self._handlers.update(dict.fromkeys(KINDS, _ignore))
        self._handlers.update({
            ev.LogOpen: self._open,
            UnknownEvent: self._unknown_event, BrokenLine: self._broken_line,
            ev.LogGap: self._gap, ev.LogClose: self._close,
            ev.RequestSubmitted: requests.submitted, ev.RequestAdmitted: requests.admitted,
            ev.RequestPreempted: requests.preempted, ev.RequestFinished: requests.finished,
            ev.RequestFailed: requests.failed,
            ev.PageReserve: pages.reserve, ev.PageSeal: pages.seal, ev.PageEvict: pages.evict,
            ev.PageQuarantine: pages.quarantine, ev.PageFree: pages.free,
            ev.PageLedger: LedgerRules(world).ledger, ev.PageMismatch: pages.mismatch,
            ev.PageFlush: requests.flushed, ev.ActorDied: self._died,
            ev.PagePin: pins.pinned, ev.PageUnpin: pins.unpinned,
            ev.LeaseOpen: leases.open, ev.LeaseWait: leases.wait, ev.LeaseMove: leases.move,
            ev.LeaseClose: leases.close,
            ev.TransferPlan: transfers.plan, ev.TransferRecord: transfers.record,
            ev.TransferLayerDone: transfers.layer_done, ev.TransferDone: transfers.done,
            ev.TransferFail: transfers.fail, ev.TransferRevoke: transfers.revoke,
            ev.TransferLate: transfers.late, ev.TransferLanded: transfers.landed,
            ev.StepRead: steps.read, ev.StepRan: steps.ran, ev.StepDone: steps.done,
            ev.StepDiscarded: steps.discarded,
        })  # fmt: skip
        for kind, brief in BRIEF.items():
            self._handlers[brief] = self._handlers[kind]

    def _line(self, event: ev.Event) -> int:
        return self._findings.lines.line_of(event.seq)

    def _died(self, event: ev.ActorDied) -> None:
        """An actor failed: if a guard made it fail, a rule would have been broken behind it."""
        if event.rule:
            what = f"a guard tripped in actor {event.actor}: {event.error}"
            self._findings.violate(rule_of(event.rule), what, (event.seq,))

    def _gap(self, event: ev.LogGap) -> None:
        why = f"the log says itself that lines are missing: {event.reason}"
        self._findings.doubt(why, self._line(event))
        self._forget()

    def _close(self, event: ev.LogClose) -> None:
        self._is_closed = True
        self._closed_line = self._line(event)
        self._closed_seq = event.seq
        if event.events != event.seq - 1:
            what = f"the log was closed with {event.events} events before, and {event.seq - 1} are"
            self._findings.violate("R14", what, (event.seq,))
        if event.lost:
            why = f"{event.lost} lines were lost, the last line says"
            self._findings.doubt(why, self._closed_line)

    def _unknown_event(self, event: UnknownEvent) -> None:
        self._unknown[event.name] += 1
        why = f"events of unknown type {event.name}"
        self._findings.doubt(why, self._line(event))
        if event.name.startswith(_STATEFUL):
            self._forget()

    def _broken_line(self, event: BrokenLine) -> None:
        self._findings.doubt(f"a line is no event ({event.reason})", self._line(event))
        self._forget()

    def verdict(self, *, truncated: bool = False, damage: str = "") -> Verdict:
        """Say what the log shows, as far as it was fed.

        Args:
            truncated: whether its last line was cut off and dropped.
            damage: what is wrong with the file that it was read from, if anything is.

        Raises:
            BadInput: nothing was fed.
        """
        world = self._world
        if world is None:
            raise BadInput("a log has at least one line, log.open")
        findings, last = self._findings, self._expected - 1
        check_end(world, self._openings, last, self._last_ns, self._is_closed)
        if not self._is_closed:
            how = "its last line is cut off" if truncated else "there is no log.close"
            findings.doubt(
                f"the log breaks off ({how}), so how things ended is not told",
                findings.lines.line_of(last), ("R9",),
            )  # fmt: skip
        elif truncated or last != self._closed_seq:
            what = "lines" if last != self._closed_seq else "bytes that are no line"
            findings.doubt(f"{what} follow log.close, which ends a log", self._closed_line)
        if damage:
            why = f"its compressed file is damaged ({damage})"
            findings.doubt(why, findings.lines.line_of(last))
        decision: Decision = "violations" if findings.counts else "clean"
        if not findings.counts and findings.doubts:
            decision = "cannot tell"
        counts = Counter[str]()  # one type may have come as two: see `BRIEF`
        for kind, times in self._counts.items():
            counts[str(kind.__struct_config__.tag)] += times
        unknown = sum(self._unknown.values())
        return Verdict(
            verdict=decision,
            violations=sorted(findings.violations, key=lambda one: one.lines[-1:]),
            violation_counts=dict(findings.counts),
            cannot_tell=findings.doubts,
            early_reads=findings.early_reads if world.has_landings else None,
            stuck=stuck_requests(world, self._last_ns),
            stalls=self._stall_shares(),
            slowest_transfers=self._slowest(),
            events=sum(self._counts.values()),
            event_counts=dict(sorted(counts.items())),
            unknown_events=unknown,
            unknown_types=dict(self._unknown),
            is_closed=self._is_closed,
            span_s=(self._last_ns - self._first_ns) / 1e9,
            wall_s=time.perf_counter() - self._started,
        )

    def _stall_shares(self) -> list[StallShare]:
        shares = [
            StallShare(
                layer=layer,
                tier=tier,
                waits=total.waits,
                total_ms=total.total_us / 1e3,
                longest_ms=total.longest_us / 1e3,
            )
            for (layer, tier), total in self._steps.stalls.items()
        ]
        return sorted(shares, key=lambda share: -share.total_ms)

    def _slowest(self) -> list[SlowTransfer]:
        line_of = self._findings.lines.line_of
        return [
            SlowTransfer(
                transfer=transfer.id,
                direction=transfer.plan.direction,
                ended=transfer.ended,
                ms=took / 1e6,
                nbytes=transfer.plan.nbytes,
                pages=transfer.num_pages,
                lines=[line_of(transfer.planned), line_of(transfer.end)],
            )
            for took, _, transfer in sorted(self._transfers.slowest, reverse=True)
            if transfer.plan is not None
        ]


def check(events: Iterable[ev.Event]) -> Verdict:
    """Judge a whole log given as events, the first on line 1.

    Raises:
        BadInput: it does not begin with ``log.open``.
    """
    checker = Checker()
    checker.feed_block(1, [*events])
    return checker.verdict()


def check_log(path: str) -> Verdict:
    """Judge a log: a file of JSON lines, plain or gzip, or ``-`` for standard input.

    Raises:
        BadInput: the file cannot be read, is no log, or is of another version.
    """
    checker = Checker()
    with open_log(path) as log, _without_collector():
        try:
            for first_line, block in log.blocks(brief=True):
                checker.feed_block(first_line, block)
            return checker.verdict(truncated=log.truncated, damage=log.damage)
        except OverflowError as error:  # JSON takes them, and no second or millisecond does
            raise BadInput(f"{path} has times of hundreds of digits; it is no event log") from error


@contextmanager
def _without_collector() -> Generator[None, None, None]:
    """Let nobody look for cycles: judging makes none, and many small lists that are looked at."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
