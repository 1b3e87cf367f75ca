"""A log as a Chrome trace, which ui.perfetto.dev opens: written as it is read, nothing held back.

Four groups of tracks: steps by kind and actors, transfers by direction in lanes that do not
overlap, requests and leases as asynchronous spans, and a counter a tier. A flow leads from the end
of a load to the step that read it. Times are microseconds from the first line.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO, final

import msgspec

from kvlease.protocols import events as ev
from kvlease.services.replay.timeline import Numbered, Timeline
from kvlease.services.replay.timeline_spans import (
    Arrival,
    LeaseSpan,
    Moment,
    PhaseSpan,
    StepSpan,
    TierCounts,
    TransferSpan,
    WaitSpan,
)
from kvlease.services.replay.verdict import Violation

_STEPS, _TRANSFERS, _REQUESTS, _LEDGER, _VERDICT = 1, 2, 3, 4, 5
_GROUPS = {
    _STEPS: "steps and actors",
    _TRANSFERS: "transfers",
    _REQUESTS: "requests and leases",
    _LEDGER: "ledger",
    _VERDICT: "violations",
}
_FLUSH_BYTES = 1 << 16
_NS = 0.001
_ACTOR_EVENTS = (ev.ActorStart, ev.ActorStop, ev.ActorDied, ev.ActorRestart)

_Fields = Mapping[str, object]


@final
class TraceWriter:
    """A canvas that writes trace events. Call `finish` once, at the end.

    Ownership: borrows ``file``.
    """

    def __init__(self, file: BinaryIO, violations: Sequence[Violation]) -> None:
        """Begin the trace; ``violations`` become instants at the last line of their chain."""
        self._file = file
        self._buffer = bytearray(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        self._encode = msgspec.json.Encoder().encode
        self._is_first = True
        self._zero: int | None = None
        self._tracks: dict[tuple[int, str], int] = {}
        self._at: dict[int, list[Violation]] = {}
        for violation in violations:
            if violation.lines:
                self._at.setdefault(violation.lines[-1], []).append(violation)
        self._num_flows = 0
        for number, name in _GROUPS.items():
            self._name(number, 0, "process_name", name)

    def finish(self) -> None:
        """Close the trace."""
        self._file.write(bytes(self._buffer) + b"\n]}\n")

    # Of `Canvas`.

    def event(self, event: ev.Event, at: Moment) -> None:
        """Write what a line alone shows: an actor's turns, and violations found at it."""
        if self._zero is None:
            self._zero = at.t_ns
        if isinstance(event, _ACTOR_EVENTS):
            name = str(type(event).__struct_config__.tag)
            fields = {"line": at.line} | (
                {"error": event.error} if isinstance(event, ev.ActorDied) else {}
            )
            self._instant(_STEPS, f"actor {event.actor}", name, at, fields)
        for found in self._at.get(at.line, ()):
            fields = {
                key: value
                for key, value in msgspec.structs.asdict(found).items()
                if value is not None
            }
            self._instant(_VERDICT, "violations", f"{found.rule}: {found.what}", at, fields, "g")

    def step(self, span: StepSpan) -> None:
        """Write a step, and the ends of the flows that lead to it."""
        tid = self._track(_STEPS, f"{span.kind} steps")
        fields = {
            "requests": span.requests, "rows": span.rows, "published": span.published,
            "lines": (span.read, span.end.line), "began": "not before this",
        } | ({"reason": span.reason} if span.reason else {})  # fmt: skip
        self._slice(_STEPS, tid, f"{span.kind} {span.step}", span.begin, span.end, fields)
        for arrival in span.transfers:
            self._flow(arrival, tid, span)

    def transfer(self, span: TransferSpan) -> None:
        """Write a transfer, and in it each layer from its turn in the stream to its end."""
        plan = span.plan
        tid = self._track(_TRANSFERS, _lane_name(plan.direction, span.lane))
        fields = {
            "bytes": plan.nbytes, "pages": sum(count for _, count, _ in plan.destination),
            "tails": plan.tails, "components": plan.components, "from": plan.source_tier,
            "to": plan.destination_tier, "request": plan.request, "ended": span.ended,
            "reason": span.reason, "lines": (span.begin.line, span.end.line),
            "settled line": span.settled.line,
        }  # fmt: skip
        name = f"{plan.direction} {plan.transfer}"
        self._slice(_TRANSFERS, tid, name, span.begin, span.end, fields)
        recorded = [mark for mark in span.marks if mark.kind == "recorded"]
        turn = recorded[0].at if recorded else span.begin
        for mark in span.marks:
            if mark.kind != "done" or mark.at > span.end:
                continue
            first, count = mark.layers
            name = f"layer {first}" if count == 1 else f"layers {first} to {first + count - 1}"
            self._slice(
                _TRANSFERS, tid, " ".join((name, *mark.components)), turn, mark.at,
                {"transfer": plan.transfer, "line": mark.at.line},
            )  # fmt: skip
            turn = mark.at

    def phase(self, span: PhaseSpan) -> None:
        """Write a phase of a request."""
        name, number = span.phase, span.request
        fields = {"request": number, "ended": span.ended, "lines": (span.begin.line, span.end.line)}
        self._span(
            "request", f"r{number}", f"request {number} {name}", span.begin, span.end, fields
        )

    def lease(self, span: LeaseSpan) -> None:
        """Write a lease."""
        fields = {
            "request": span.request, "transfer": span.transfer, "tier": span.tier,
            "pages": sum(run[1] for _, run in span.runs), "open at the end": span.is_open,
            "lines": (span.begin.line, span.end.line),
        }  # fmt: skip
        name = f"lease {span.lease} {span.mode}"
        self._span("lease", f"l{span.lease}", name, span.begin, span.end, fields)

    def wait(self, span: WaitSpan) -> None:
        """Write a wait at the gate."""
        fields = {
            "transfer": span.transfer, "components": span.components, "owner": span.owner,
            "requests": span.requests, "stood still (us)": span.wait_us,
            "open at the end": span.is_open, "lines": (span.begin.line, span.end.line),
        }  # fmt: skip
        number = f"w{span.begin.line}.{span.layer}.{span.transfer}"
        self._span("wait", number, f"wait for layer {span.layer}", span.begin, span.end, fields)

    def counts(self, counts: TierCounts, at: Moment) -> None:
        """Write a tier's counters."""
        columns = {
            "leased": counts.leased, "cached": counts.cached,
            "quarantined": counts.quarantined, "free": counts.free,
        }  # fmt: skip
        self._write({"ph": "C", "pid": _LEDGER, "name": f"{counts.tier} pages",
                     "ts": self._us(at), "args": columns})  # fmt: skip

    # How it is written.

    def _us(self, at: Moment) -> float:
        return (at.t_ns - (self._zero or 0)) / 1000 if at.line else 0.0

    def _slice(
        self, pid: int, tid: int, name: str, begin: Moment, end: Moment, fields: _Fields
    ) -> None:
        start = self._us(begin)
        self._write({"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start,
                     "dur": max(0.0, round(self._us(end) - start, 3)), "args": fields})  # fmt: skip

    def _span(
        self, kind: str, number: str, name: str, begin: Moment, end: Moment, fields: _Fields
    ) -> None:
        head = {"cat": kind, "id": number, "pid": _REQUESTS, "tid": 0, "name": name}
        start = self._us(begin)
        self._write({"ph": "b", "ts": start, "args": fields} | head)
        self._write({"ph": "e", "ts": max(start, self._us(end))} | head)

    def _instant(
        self, pid: int, track: str, name: str, at: Moment, fields: _Fields, scope: str = "t"
    ) -> None:
        self._write({"ph": "i", "s": scope, "pid": pid, "tid": self._track(pid, track),
                     "name": name, "ts": self._us(at), "args": fields})  # fmt: skip

    def _flow(self, arrival: Arrival, tid: int, span: StepSpan) -> None:
        """Lead from a transfer's end to a step's: a flow's ends bind to the slices around them."""
        self._num_flows += 1
        head = {"cat": "arrival", "id": self._num_flows, "name": f"transfer {arrival.transfer}"}
        lane = self._track(_TRANSFERS, _lane_name(arrival.direction, arrival.lane))
        start = self._inside(arrival.begin, arrival.end)
        end = self._inside(span.begin, span.end)
        self._write({"ph": "s", "pid": _TRANSFERS, "tid": lane, "ts": start} | head)
        self._write({"ph": "f", "bp": "e", "pid": _STEPS, "tid": tid, "ts": end} | head)

    def _inside(self, begin: Moment, end: Moment) -> float:
        """Return the last moment inside a slice."""
        return max(self._us(begin), round(self._us(end) - _NS, 3))

    def _track(self, pid: int, name: str) -> int:
        tid = self._tracks.get((pid, name))
        if tid is None:
            tid = self._tracks[pid, name] = len(self._tracks) + 1
            self._name(pid, tid, "thread_name", name)
        return tid

    def _name(self, pid: int, tid: int, what: str, name: str) -> None:
        self._write({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}})

    def _write(self, fields: _Fields) -> None:
        if not self._is_first:
            self._buffer += b",\n"
        self._is_first = False
        self._buffer += self._encode(fields)
        if len(self._buffer) > _FLUSH_BYTES:
            self._file.write(self._buffer)
            self._buffer = bytearray()


def _lane_name(direction: str, lane: int) -> str:
    return f"{direction}s, lane {lane + 1}" if lane else f"{direction}s"


def write_trace(
    file: BinaryIO, events: Iterable[Numbered], violations: Sequence[Violation]
) -> None:
    """Write a whole log as a trace, in memory that does not grow with it.

    Args:
        file: opened for writing bytes; borrowed.
        events: the log, in order.
        violations: what a check of the same log found.
    """
    writer = TraceWriter(file, violations)
    timeline = Timeline(writer)
    for line, event in events:
        timeline.feed(event, line)
    timeline.finish()
    writer.finish()
