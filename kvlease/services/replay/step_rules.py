"""Rules about steps: what they opened, wrote and published (R1 to R5).

A ``step.done`` costs a few comparisons a row: everything about its openings was settled when the
``step.read`` that it names was read, unless one of its leases depends on a transfer.
"""

from typing import final

from attrs import define

from kvlease.protocols.events import Opening, Row, StepDiscarded, StepDone, StepRan, StepRead
from kvlease.services.replay.findings import rule_of
from kvlease.services.replay.opening_rules import OpeningRules
from kvlease.services.replay.state import Reading, SequenceState, TransferState, World

MAX_STEPS = 1024
"""Steps that have run and are not over; a device has a few of them."""


@final
@define
class StallSum:
    """Exposed stall of one layer by one tier."""

    waits: int = 0
    total_us: int = 0
    longest_us: int = 0


@final
class StepRules:
    """Follows ``step.*``; one method an event. ``stalls`` sums up by (layer, source tier)."""

    def __init__(self, world: World, openings: OpeningRules) -> None:
        """Share the world."""
        self._world = world
        self._openings = openings
        self._findings = world.findings
        self._sequences = world.sequences
        self._waits = world.waits
        self._blocking = world.blocking_steps
        self._num_layers = world.head.num_layers
        self._every_layer = world.head.every_layer
        self._has_tails = world.head.has_tails
        self.stalls: dict[tuple[int, str], StallSum] = {}
        self._ran: dict[int, int] = {}  # of a device that tells: where steps not yet over ended
        self._tells_ran = world.head.tells_ran

    def read(self, event: StepRead) -> None:
        """A step tells what it opened, and after which line each opening came."""
        step, seq, num_layers = event.step, event.seq, self._num_layers
        sequences, reading = self._sequences, Reading(step, seq)
        for opening in event.opens:
            after = opening.after_seq
            if after >= seq:
                self._openings.behind(opening, step, seq)
            try:
                lease = sequences[opening.lease]
            except KeyError:
                self._unopened(opening.lease, step, seq)
                continue
            if opening.num_layers == num_layers and opening.layer == 0:
                lease.whole = reading
                if lease.depends is not None:
                    self._openings.check(lease, self._every_layer, after, step, seq)
                    lease.last = seq
            else:
                self._partly(lease, opening, reading)
        for stall in event.stalls:
            if stall.wait_us < 0 or not 0 <= stall.layer < num_layers:
                what = f"step {step} stood still {stall.wait_us} us for layer {stall.layer}"
                self._findings.violate("R14", what, (seq,), step=step, transfer=stall.transfer)
                continue
            self._stall(stall.transfer, stall.layer, stall.wait_us)
        if self._waits:
            self._waits.pop(step, None)

    def _partly(self, lease: SequenceState, opening: Opening, reading: Reading) -> None:
        """Some of the layers were opened: take them, once they are known to exist."""
        step, seq = reading.step, reading.seq
        mask = self._openings.mask_of(opening, step, seq)
        if not mask:
            return
        if lease.read.step != step:
            lease.mask, lease.part = 0, reading
        lease.mask |= mask
        if lease.mask == self._every_layer:
            lease.whole = lease.read
        if lease.depends is not None:
            self._openings.check(lease, mask, opening.after_seq, step, seq)
            lease.last = seq

    def _unopened(self, lease: int, step: int, seq: int) -> None:
        if not self._world.is_lossy:
            what = f"step {step} opened lease {lease}, which is not open"
            self._findings.violate("R1", what, (seq,), lease=lease, step=step)

    def _stall(self, transfer: int, layer: int, wait_us: int) -> None:
        known = self._world.transfers.get(transfer)
        tier = "unknown" if known is None else known.source_tier
        total = self.stalls.setdefault((layer, tier), StallSum())
        total.waits += 1
        total.total_us += wait_us
        total.longest_us = max(total.longest_us, wait_us)

    def done(self, event: StepDone) -> None:
        """A step's tokens are published and its rows are final."""
        sequences, read = self._sequences, event.read
        for row in event.rows:
            try:
                lease = sequences[row.lease]
            except KeyError:
                self._unopened(row.lease, event.step, event.seq)
                continue
            if (
                lease.whole.step == read
                and lease.is_plain
                and row.request == lease.request
                and (start := row.start) == lease.written
                and (end := start + row.count) > start
                and end <= lease.limit
            ):
                lease.written = end
                lease.published = lease.published + row.published
            else:
                self._row(lease, event, row)
        if self._tells_ran and not self._ran.pop(event.step, 0):
            what = f"step {event.step} was published before its work had ended"
            self._findings.violate("R2", what, (event.seq,), step=event.step)
        if self._blocking or self._waits:
            self._over(event)

    def ran(self, event: StepRan) -> None:
        """The device has come to the end of a step's work."""
        self._ran[event.step] = event.seq
        if len(self._ran) > MAX_STEPS:
            del self._ran[next(iter(self._ran))]

    def _row(self, lease: SequenceState, event: StepDone, row: Row) -> None:
        """Take a row that may not be as it should be, or whose lease needs another look."""
        if lease.whole.step != event.read:
            self._unread(lease, event, row)
        if row.request != lease.request:
            self._not_theirs(lease, event, row)
        start = row.start
        end = start + row.count
        if lease.floor <= start == lease.written and start < end <= lease.limit:
            lease.written = end
        else:
            self._written_elsewhere(lease, event, row)
        lease.published += row.published
        if not lease.is_plain:
            self._look(lease, event, row)

    def _look(self, lease: SequenceState, event: StepDone, row: Row) -> None:
        """Take a row of a lease that begins, or that depends on transfers."""
        if not lease.has_begun:
            lease.has_begun = True
            record = lease.record
            if record is not None and not record.admitted:
                what = f"step {event.step} wrote rows of request {record.id}, not admitted before"
                seqs = (record.seq, lease.seq, event.seq)
                self._contradict(what, seqs, lease, event)
            if row.start and lease.base and self._has_tails:
                self._resumed(lease, event, row)
        if lease.depends is not None:
            self._depending(lease, event, row)
        lease.is_plain = lease.depends is None and lease.floor <= lease.written

    def discarded(self, event: StepDiscarded) -> None:
        """A step published nothing: what it had opened failed, or a guard stopped it."""
        self._ran.pop(event.step, 0)
        if event.rule:
            what = f"a guard tripped in step {event.step}: {event.reason}"
            self._findings.violate(rule_of(event.rule), what, (event.seq,), step=event.step)
        if self._blocking or self._waits:
            self._over(event)

    def _over(self, event: StepDone | StepDiscarded) -> None:
        step = event.step
        if step in self._blocking:
            self._blocking.discard(step)
            self._world.blocker_ns = event.t_ns
        if self._waits:
            self._waits.pop(step, None)

    def _unread(self, lease: SequenceState, event: StepDone, row: Row) -> None:
        read = lease.read
        if read.step != event.read:
            if self._world.is_lossy and not read.step:
                return
            why = f"the latest step.read of its lease {lease.id} is of step {read.step}"
            why = why if read.step else f"no step.read names its lease {lease.id}"
            layer = None
        else:
            missing = self._every_layer & ~lease.mask
            layer = (missing & -missing).bit_length() - 1
            why = f"step.read of step {event.read} has no layer {layer} of its lease {lease.id}"
        what = f"step {event.step} wrote rows of request {row.request}, and {why}"
        self._findings.violate(
            "R1", what, (lease.seq, read.seq, event.seq), request=row.request,
            lease=lease.id, step=event.step, layer=layer,
        )  # fmt: skip

    def _not_theirs(self, lease: SequenceState, event: StepDone, row: Row) -> None:
        what = (
            f"step {event.step} wrote rows of request {row.request} by lease {lease.id}, which is "
            f"request {lease.request}'s"
        )
        self._contradict(what, (lease.seq, event.seq), lease, event)

    def _contradict(
        self, what: str, seqs: tuple[int, ...], lease: SequenceState, event: StepDone
    ) -> None:
        self._findings.violate(
            "R14", what, seqs, request=lease.request, lease=lease.id, step=event.step
        )

    def _written_elsewhere(self, lease: SequenceState, event: StepDone, row: Row) -> None:
        """Take rows that do not follow those before, or that the lease had no room for."""
        end = row.start + row.count
        if row.count < 1:
            what = f"step {event.step} wrote {row.count} rows of request {row.request}"
            self._contradict(what, (lease.seq, event.seq), lease, event)
            return
        if row.start < lease.floor or end > lease.limit:
            self._outside(lease, event, row)
        if row.start <= lease.written < end:
            lease.written = end

    def _outside(self, lease: SequenceState, event: StepDone, row: Row) -> None:
        """Rows outside the lease's own pages, or on those of them that are sealed."""
        start, end, page_tokens = row.start, row.start + row.count, self._world.head.page_tokens
        own = lease.base * page_tokens
        what = f"step {event.step} wrote rows {start} to {end - 1} of lease {lease.id}"
        since = lease.seq
        if start < own or end > lease.limit:
            rule, what = "R3", f"{what}, which reserved pages for {own} to {lease.limit - 1}"
        else:
            rule, what = "R4", f"{what}, whose pages are sealed up to {lease.floor}"
            index = start // page_tokens - lease.base
            since = lease.pages.since[lease.own[index]]
        self._findings.violate(
            rule, what, (since, event.seq), request=row.request, lease=lease.id, step=event.step
        )

    def _resumed(self, lease: SequenceState, event: StepDone, row: Row) -> None:
        """The first step on a cached prefix: the tail at its end has to be there (R5)."""
        tail = lease.tail
        if tail is not None and tail.ended == "done":
            return
        why = "no load brought a tail for it" if tail is None else f"load {tail.id} is not done"
        what = (
            f"step {event.step} resumed request {row.request} at position {row.start} on a cached "
            f"prefix, and {why}"
        )
        self._findings.violate(
            "R5", what, (lease.seq, 0 if tail is None else tail.planned, event.seq),
            request=row.request, lease=lease.id, step=event.step,
            transfer=0 if tail is None else tail.id,
        )  # fmt: skip

    def _depending(self, lease: SequenceState, event: StepDone, row: Row) -> None:
        """Publishing needs every layer that was opened to be done (R2)."""
        before, lease.last = lease.last, event.seq
        depends = lease.depends
        assert depends is not None
        ran = self._ran.get(event.step, 0)
        opened = self._every_layer if lease.whole.step == event.read else lease.mask
        if event.read != event.step:
            self._openings.check(lease, opened, before, event.step, event.seq)
        for transfer in [*depends]:
            bundle = transfer.bundle
            missing = 0 if bundle is None else opened & bundle.layer_mask & ~transfer.done_mask
            if missing:
                layer = (missing & -missing).bit_length() - 1
                what = (
                    f"step {event.step} published tokens of request {row.request} before layer "
                    f"{layer} of transfer {transfer.id} was done"
                )
                self._findings.violate(
                    "R2", what, (transfer.planned, lease.read.seq, transfer.end, event.seq),
                    request=row.request, lease=lease.id, transfer=transfer.id, step=event.step,
                    layer=layer,
                )  # fmt: skip
            if ran and bundle is not None and event.read == event.step:
                self._ran_early(lease, event, transfer, bundle.layer_mask & opened, ran)
            is_landed = transfer.landing is None or not transfer.landing.left
            if transfer.ended == "done" and is_landed and transfer.latest <= before:
                depends.remove(transfer)
                transfer.readers -= 1
                self._openings.dismiss(transfer)
        if not depends:
            lease.depends = None

    def _ran_early(
        self, lease: SequenceState, event: StepDone, transfer: TransferState, mask: int, ran: int
    ) -> None:
        """The step's work is over later than what it read is done: its stream has waited (R2)."""
        for layer in range(mask.bit_length()):
            if mask >> layer & 1 and transfer.done[layer] > ran:
                what = (
                    f"step {event.step} had run before layer {layer} of transfer {transfer.id}, "
                    "which it reads, was done"
                )
                self._findings.violate(
                    "R2", what, (transfer.planned, ran, transfer.done[layer]),
                    request=lease.request, lease=lease.id, transfer=transfer.id,
                    step=event.step, layer=layer,
                )  # fmt: skip
