"""The data of a page: columns of numbers, one table a kind of span, every time a line of the log.

A span is a few numbers of four bytes: the lines where it begins and ends, and who it is of. Times
are kept once, with the lines. Lists that repeat (who is in a batch, which components) are kept once
and named by number. The browser reads the columns as they lie, so opening a page parses nothing.
"""

import struct
import sys
import zlib
from array import array
from typing import final

import msgspec

from kvlease.protocols import events as ev
from kvlease.services.replay.timeline_spans import (
    LeaseSpan,
    Moment,
    PhaseSpan,
    StepSpan,
    TierCounts,
    TransferSpan,
    WaitSpan,
)

MAGIC = b"kvpage1\n"
_MAX = {"B": (1 << 8) - 1, "I": (1 << 32) - 1, "Q": (1 << 64) - 1}
_NO_TIME = _MAX["I"]
_PAGE_STATES: dict[type[ev.Event], int] = {
    ev.PageReserve: 0, ev.PageSeal: 1, ev.PageEvict: 2, ev.PageQuarantine: 3, ev.PageFree: 4,
}  # fmt: skip


class Table:
    """Columns of one length. ``B``, ``I`` and ``Q`` are unsigned of one, four and eight bytes.

    A number that its column cannot hold becomes the nearest that it can.
    """

    def __init__(self, **codes: str) -> None:
        """Start without rows; ``codes`` has the columns in the order of `add`."""
        self.columns: dict[str, array[int]] = {name: array(code) for name, code in codes.items()}
        self._appends = [column.append for column in self.columns.values()]
        self._codes = list(codes.values())

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def add(self, *values: int) -> None:
        """Append one row."""
        for place, (append, value) in enumerate(zip(self._appends, values, strict=True)):
            try:
                append(value)
            except OverflowError:
                append(min(max(value, 0), _MAX[self._codes[place]]))


class Names:
    """Strings by number: each is kept once."""

    def __init__(self) -> None:
        """Start with the empty string as number 0."""
        self._numbers: dict[str, int] = {"": 0}

    def number(self, name: str) -> int:
        """Return the number of a name."""
        return self._numbers.setdefault(name, len(self._numbers))

    def all(self) -> list[str]:
        """Return the names in the order of their numbers."""
        return list(self._numbers)


@final
class PageData:
    """A canvas that keeps what the page draws; some 60 bytes a line before compression."""

    def __init__(self) -> None:
        """Start before the first line."""
        self.lines = Table(
            low="I", high="I", kind="B", actor="B", request="I", lease="I", transfer="I", step="I"
        )
        self.batches = Table(end="I")
        self.members = Table(request="I")
        self.steps = Table(
            step="I", kind="B", begin="I", end="I", batch="I", rows="I", published="I", read="I",
            reason="I",
        )  # fmt: skip
        self.flows = Table(transfer="I", step="I")
        self.transfers = Table(
            transfer="I", direction="B", lane="I", begin="I", end="I", settled="I", ended="B",
            reason="I", nbytes="Q", source="B", destination="B", request="I", reader="I",
            first="I", count="I", pages="I", tails="I", components="I", owner="I", marks="I",
        )  # fmt: skip
        self.marks = Table(line="I", kind="B", first="I", count="I")
        self.phases = Table(request="I", phase="B", begin="I", end="I", ended="I")
        self.leases = Table(
            lease="I", mode="B", tier="B", request="I", transfer="I", begin="I", end="I",
            open="B", runs="I",
        )  # fmt: skip
        self.runs = Table(line="I", first="I", count="I", epoch="I")
        self.waits = Table(
            begin="I", end="I", us="I", layer="I", components="I", transfer="I", step="I",
            owner="I", batch="I", open="B",
        )  # fmt: skip
        self.ledger = Table(line="I", tier="B", total="I", cached="I", leased="I", quarantined="I")
        self.moves = Table(line="I", tier="B", state="B", first="I", count="I", epoch="I")
        self.names = Names()
        self._batches: dict[tuple[int, ...], int] = {}
        self._last_ns = 0
        self._bytes: dict[str, Names] = {
            name: Names() for name in ("kind", "actor", "step", "phase", "direction", "ended",
                                       "tier", "mode", "mark")
        }  # fmt: skip

    def _small(self, family: str, name: str) -> int:
        """Return a name's number in a column of one byte; the last is shared by all that follow."""
        return min(self._bytes[family].number(name), 255)

    def _batch(self, requests: tuple[int, ...]) -> int:
        number = self._batches.get(requests)
        if number is None:
            number = self._batches[requests] = len(self._batches)
            for request in requests:
                self.members.add(request)
            self.batches.add(len(self.members))
        return number

    # Of `Canvas`.

    def event(self, event: ev.Event, at: Moment) -> None:
        """Keep a line's time and whom it names; lines that nobody gave are left blank."""
        while len(self.lines) < at.line - 1:
            self.lines.add(0, 0, 0, 0, 0, 0, 0, 0)
        step_ns = 0 if len(self.lines) == 0 else max(0, at.t_ns - self._last_ns)
        self._last_ns = max(self._last_ns, at.t_ns)
        kind = str(type(event).__struct_config__.tag or "?")
        self.lines.add(
            step_ns & _NO_TIME, step_ns >> 32, self._small("kind", kind),
            self._small("actor", event.actor), getattr(event, "request", 0), _lease_of(event),
            getattr(event, "transfer", 0), getattr(event, "step", 0),
        )  # fmt: skip
        state = _PAGE_STATES.get(type(event))
        if state is not None:
            tier = self._small("tier", getattr(event, "tier", ""))
            for first, count, epoch in getattr(event, "pages", ()):
                self.moves.add(at.line, tier, state, first, count, epoch)

    def step(self, span: StepSpan) -> None:
        """Keep a step and the flows that lead to it."""
        for arrival in span.transfers:
            self.flows.add(arrival.transfer, len(self.steps))
        self.steps.add(
            span.step, self._small("step", span.kind), max(1, span.begin.line), span.end.line,
            self._batch(span.requests), span.rows, span.published, span.read,
            self.names.number(span.reason),
        )  # fmt: skip

    def transfer(self, span: TransferSpan) -> None:
        """Keep a transfer and its layers' progress."""
        plan = span.plan
        for mark in span.marks:
            self.marks.add(mark.at.line, self._small("mark", mark.kind), *mark.layers)
        self.transfers.add(
            plan.transfer, self._small("direction", plan.direction), span.lane, span.begin.line,
            span.end.line, span.settled.line, self._small("ended", span.ended),
            self.names.number(span.reason), plan.nbytes, self._small("tier", plan.source_tier),
            self._small("tier", plan.destination_tier), plan.request, plan.reader, *plan.layers,
            sum(count for _, count, _ in plan.destination), plan.tails,
            self.names.number(", ".join(plan.components)), self.names.number(plan.owner),
            len(self.marks),
        )  # fmt: skip

    def phase(self, span: PhaseSpan) -> None:
        """Keep a phase of a request."""
        self.phases.add(
            span.request, self._small("phase", span.phase), span.begin.line, span.end.line,
            self.names.number(span.ended),
        )  # fmt: skip

    def lease(self, span: LeaseSpan) -> None:
        """Keep a lease and its pages."""
        for line, run in span.runs:
            self.runs.add(line, *run)
        self.leases.add(
            span.lease, self._small("mode", span.mode), self._small("tier", span.tier),
            span.request, span.transfer, span.begin.line, span.end.line, span.is_open,
            len(self.runs),
        )  # fmt: skip

    def wait(self, span: WaitSpan) -> None:
        """Keep a wait at the gate."""
        self.waits.add(
            span.begin.line, span.end.line, _NO_TIME if span.wait_us is None else span.wait_us,
            span.layer, self.names.number(", ".join(span.components)), span.transfer, span.step,
            self.names.number(span.owner), self._batch(span.requests), span.is_open,
        )  # fmt: skip

    def counts(self, counts: TierCounts, at: Moment) -> None:
        """Keep a tier's counts; of one line, the last."""
        tier = self._small("tier", counts.tier)
        self.ledger.add(
            at.line, tier, counts.total, counts.cached, counts.leased, counts.quarantined
        )

    def pack(self, head: object) -> bytes:
        """Return everything as one compressed block.

        Args:
            head: what the page says beside the picture; anything msgspec can encode.
        """
        tables = {name: table for name, table in vars(self).items() if isinstance(table, Table)}
        places: dict[str, dict[str, tuple[str, int, int]]] = {}
        body: list[bytes] = []
        offset = 0
        for name, table in tables.items():
            places[name] = {}
            for column, values in table.columns.items():
                places[name][column] = (values.typecode, offset, len(values))
                data = _little(values)
                body.append(data + bytes(-len(data) % 8))
                offset += len(body[-1])
        text = msgspec.json.encode(
            {
                "head": head, "tables": places, "names": self.names.all(),
                "bytes": {family: names.all() for family, names in self._bytes.items()},
            }
        )  # fmt: skip
        text += b" " * (-len(text) % 8)
        start = MAGIC + struct.pack("<II", len(text), offset)
        return zlib.compress(b"".join((start, text, *body)), 6)


def _lease_of(event: ev.Event) -> int:
    if isinstance(event, ev.LeaseWait):
        return event.leases[0] if event.leases else 0
    return getattr(event, "lease", 0)


def _little(values: "array[int]") -> bytes:
    if sys.byteorder == "little":
        return values.tobytes()
    swapped = values[:]
    swapped.byteswap()
    return swapped.tobytes()
