"""Rules about leases: what they may be opened on, and what their end means (R1, R3, R7, R10)."""

from typing import final

import msgspec

from kvlease.protocols.events import (
    LeaseClose,
    LeaseMove,
    LeaseOpen,
    LeaseWait,
    Opening,
    PageRun,
)
from kvlease.services.replay.opening_rules import OpeningRules, depend
from kvlease.services.replay.page_rules import name_of
from kvlease.services.replay.pages import HELD, SEALED, STATE_NAMES, UNKNOWN, Pages
from kvlease.services.replay.state import SequenceState, TransferState, World, compute_again


@final
class LeaseRules:
    """Follows ``lease.*``; one method an event."""

    def __init__(self, world: World, openings: OpeningRules) -> None:
        """Share the world."""
        self._world = world
        self._openings = openings
        self._findings = world.findings
        self._tiers = world.tiers
        self._ends = world.ends
        self._reserved = world.reserved
        self._sequences = world.sequences
        self._transfers = world.transfers
        self._quarantines = world.quarantines
        self._page_tokens = world.head.page_tokens

    def open(self, event: LeaseOpen) -> None:
        """A right to pages begins: to sealed ones, or to ones that a transfer is filling."""
        number, runs = event.lease, event.pages
        if number in self._ends or number in self._sequences:
            self._twice(event)
        if event.transfer:
            self._ends[number] = event
            if runs and (odd := self._tiers[event.tier].pin_sealed(runs)):
                runs = self._hold_odd(event, None, odd)
                if runs is not event.pages:
                    self._ends[number] = msgspec.structs.replace(event, pages=runs)
        else:
            lease = self._open_sequence(event)
            if runs:
                odd = lease.pages.pin_sealed(runs)
                if odd:
                    runs = self._hold_odd(event, lease, odd)
                if runs:
                    lease.prefix = runs
                    self._prefix(lease, lease.pages, odd, event.seq)
        if runs and event.mode == "exclusive":
            what = f"lease {number} was opened exclusive on pages that it had not reserved"
            self._findings.violate("R3", what, (event.seq,), lease=number, request=event.request)

    def _hold_odd(
        self, event: LeaseOpen, lease: SequenceState | None, odd: list[PageRun]
    ) -> list[PageRun]:
        """A lease pins pages that are not all sealed; returns all its pages that there are."""
        pages, runs, known = self._tiers[event.tier], event.pages, 0
        held: list[PageRun] = []
        for run in odd:
            arrives = 0 if lease is None else self._arrival(pages, run)
            if arrives and lease is not None:
                if arrives != known:  # as a rule one transfer fills all of them
                    self._depend(lease, arrives, event.seq)
                    known = arrives
            elif not self._unsealed(event, lease, pages, run):
                runs = [one for one in runs if one != run]
                continue
            held.append(run)
        pages.pins.up(held)
        return runs

    def _twice(self, event: LeaseOpen) -> None:
        number, before = event.lease, self._world.opened_at(event.lease)
        what = f"lease {number} was opened while it was open"
        self._findings.violate("R14", what, (before, event.seq), lease=number)
        self._sequences.pop(number, None)
        self._ends.pop(number, None)

    def _open_sequence(self, event: LeaseOpen) -> SequenceState:
        lease = self._sequences[event.lease] = SequenceState(event, self._tiers[event.tier])
        if event.request:
            lease.record = self._world.requests.get(event.request)
            if lease.record is not None:
                lease.record.lease = lease.id
        return lease

    def _prefix(
        self, lease: SequenceState, pages: Pages, arriving: list[PageRun], seq: int
    ) -> None:
        """The pages that a sequence begins with: each sealed one at its place (R10)."""
        place, page_tokens, runs, places = 0, self._page_tokens, lease.prefix, pages.places
        told = set(arriving) if arriving else ()
        for run in runs:
            first, count, _ = run
            if run in told:
                if lease.arriving is None:
                    lease.arriving = []
                lease.arriving.append((run, place))
            elif places[first] != place or (
                count > 1 and not pages.are_placed(first, count, place, page_tokens)
            ):
                self.misplaced(lease, pages, run, place, seq)
            place += count * page_tokens
        lease.base = place // page_tokens
        lease.floor = lease.limit = lease.written = place
        if pages.unlanded:
            self._unlanded(lease, pages, runs, seq)

    def _arrival(self, pages: Pages, run: PageRun) -> int:
        """Return which transfer is filling all pages of a run; 0 for none."""
        first = run[0]
        if not 0 <= first < pages.total:
            return 0
        holder = pages.holders[first]
        end = self._ends.get(holder)
        return 0 if end is None or not pages.is_held_by(run, holder) else end.transfer

    def _depend(self, lease: SequenceState, number: int, seq: int) -> None:
        transfer = self._transfers.get(number)
        if transfer is None:
            transfer = self._transfers[number] = TransferState(number)
        depend(lease, transfer, seq)

    def _unsealed(
        self, event: LeaseOpen, lease: SequenceState | None, pages: Pages, run: PageRun
    ) -> bool:
        """Look at pages that are not all sealed: find what fills them, or say what is wrong."""
        first, count, epoch = run
        told: set[str] = set()
        if not pages.has(first, count):
            self._wrong("R11", f"{name_of(pages, first, count)}: no such page", (), event)
            return False
        for page in range(first, first + count):
            state, known, since = pages.state[page], pages.epochs[page], pages.since[page]
            pages.epochs[page] = epoch
            if state == UNKNOWN:
                continue
            name = name_of(pages, page, 1)
            if known != epoch and "R8" not in told:
                told.add("R8")
                what = f"{name} under epoch {epoch}, and its epoch is {known}"
                self._wrong("R8", what, (since,), event)
            if state == HELD:
                told |= self._held(event, lease, pages, page, told)
            elif state != SEALED and "R11" not in told:
                told.add("R11")
                what = f"{name} while it was {STATE_NAMES[state]}"
                self._wrong("R11", what, (since,), event)
        return True

    def _held(
        self, event: LeaseOpen, lease: SequenceState | None, pages: Pages, page: int, told: set[str]
    ) -> set[str]:
        """Look at a page that somebody may still write: a transfer, on which the lease depends."""
        holder = pages.holders[page]
        end = self._ends.get(holder)
        if end is not None:
            if lease is not None:
                self._depend(lease, end.transfer, event.seq)
            return set()
        if "R3" in told or (holder not in self._sequences and self._world.is_lossy):
            return set()
        what = f"{name_of(pages, page, 1)} while lease {holder} may still write it"
        self._wrong("R3", what, (pages.since[page],), event)
        return {"R3"}

    def _wrong(self, rule: str, what: str, before: tuple[int, ...], event: LeaseOpen) -> None:
        what = f"lease {event.lease} was opened on {what}"
        self._findings.violate(
            rule, what, (*before, event.seq), lease=event.lease, request=event.request
        )

    def _unlanded(self, lease: SequenceState, pages: Pages, runs: list[PageRun], seq: int) -> None:
        """Depend on transfers that said they were done and whose bytes have not landed yet."""
        world = self._world
        for first, count, _ in runs:
            for page in range(first, first + count):
                number = pages.unlanded.get(page, 0)
                transfer = world.transfers.get(number) or world.limbo.get(number)
                if transfer is not None:
                    depend(lease, transfer, seq)

    def misplaced(
        self, lease: SequenceState, pages: Pages, run: PageRun, place: int, seq: int
    ) -> None:
        """Say which page of a run is not at its place in the prefix, if one is not (R10)."""
        first, count, _ = run
        for page in range(first, first + count):
            known = pages.places[page]
            if known not in (-1, place):
                what = (
                    f"lease {lease.id} has {name_of(pages, page, 1)} at position {place}, and it "
                    f"was sealed at position {known}"
                )
                seqs = (pages.since[page], lease.seq, seq)
                self._findings.violate("R10", what, seqs, lease=lease.id, request=lease.request)
                return
            place += self._page_tokens

    def wait(self, event: LeaseWait) -> None:
        """Readers begin to wait; kept until the step, or the lease, says how it went on."""
        waits = self._world.waits
        if not self._world.is_lossy:
            self._check_wait(event)
        if event.step:
            waits.setdefault(event.step, []).append(event)
        else:
            for lease in event.leases:
                waits.setdefault(-lease, []).append(event)

    def _check_wait(self, event: LeaseWait) -> None:
        """Who waits has an open lease, and one of them depends on what they wait for."""
        depends, num_layers = False, self._world.head.num_layers
        if not 0 <= event.layer < num_layers:
            what = f"layer {event.layer} of {num_layers} was waited for"
            self._findings.violate("R14", what, (event.seq,), transfer=event.transfer)
        for number in event.leases:
            lease = self._sequences.get(number)
            if lease is None:
                what = f"lease {number}, which is not open, waited for transfer {event.transfer}"
                seqs = (event.seq,)
                self._findings.violate("R14", what, seqs, lease=number, transfer=event.transfer)
            elif lease.depends is not None:
                depends = depends or any(one.id == event.transfer for one in lease.depends)
        if not depends:
            leases = ", ".join(map(str, event.leases)) or "none"
            what = f"transfer {event.transfer} was waited for by leases that need no such: {leases}"
            self._findings.violate("R14", what, (event.seq,), transfer=event.transfer)

    def move(self, event: LeaseMove) -> None:
        """A right changes hands; its number stays."""
        number = event.lease
        sequence, end = self._sequences.get(number), self._ends.get(number)
        if sequence is not None:
            sequence.is_shared = sequence.is_shared or event.freezes
        elif end is not None:
            if event.freezes:
                self._ends[number] = msgspec.structs.replace(end, mode="shared")
        elif not self._world.is_lossy:
            what = f"lease {number} was moved and is not open"
            self._findings.violate("R14", what, (event.seq,), lease=number)

    def close(self, event: LeaseClose) -> None:
        """A right ends: its pages are not pinned by it any more."""
        number, ends = event.lease, self._ends
        if self._quarantines:
            self._world.blocker_ns = event.t_ns
        end = ends.pop(number, None)
        if end is None:
            self._close_sequence(number, event)
            return
        if runs := end.pages:
            self._tiers[end.tier].pins.down(runs)
        if number in self._reserved:
            self._tiers[end.tier].pins.down(self._reserved.pop(number))
        transfer = self._transfers.get(end.transfer)
        if transfer is None or (plan := transfer.plan) is None:
            self._no_end_of(end, event.seq)
            return
        other = plan.destination_lease
        if number == other:
            transfer.closed = event.seq
            other = plan.source_lease
        elif number != plan.source_lease:
            self._no_end_of(end, event.seq)
            return
        if not transfer.ended:
            self._closed_early(end, transfer, event.seq)
        elif other not in ends and not transfer.readers:
            self._openings.drop(transfer)

    def _no_end_of(self, end: LeaseOpen, seq: int) -> None:
        """A lease was held by a transfer whose plan does not name it."""
        if not self._world.is_lossy:
            what = f"no plan of transfer {end.transfer} names lease {end.lease}, opened for it"
            self._findings.violate(
                "R14", what, (end.seq, seq), lease=end.lease, transfer=end.transfer
            )

    def _close_sequence(self, number: int, event: LeaseClose) -> None:
        lease = self._sequences.pop(number, None)
        if lease is None:
            if not self._world.is_lossy:
                what = f"lease {number} was closed and is not open"
                self._findings.violate("R14", what, (event.seq,), lease=number)
            return
        pins = lease.pages.pins
        pins.down(lease.prefix)
        pins.down_each(lease.own)
        self._leave(lease, event)

    def _leave(self, lease: SequenceState, event: LeaseClose) -> None:
        """A sequence, or another reader, is done."""
        for opening in event.opens:
            self._opened(lease, opening, event)
        if lease.depends is not None:
            for transfer in lease.depends:
                transfer.readers -= 1
                self._openings.dismiss(transfer)
        record = lease.record
        if record is not None:
            record.published += lease.published
            compute_again(record, lease, self._page_tokens)
            if record.lease == lease.id:
                record.lease = 0
        if self._world.waits:
            self._world.waits.pop(-lease.id, None)

    def _opened(self, lease: SequenceState, opening: Opening, event: LeaseClose) -> None:
        """A reader outside steps tells, at its end, what it had opened."""
        seq = event.seq
        if opening.after_seq >= seq:
            self._openings.behind(opening, 0, seq, lease.id)
        if opening.lease != lease.id:
            what = f"lease {lease.id} tells of an opening of lease {opening.lease}"
            self._findings.violate("R14", what, (lease.seq, seq), lease=lease.id)
        mask = self._openings.mask_of(opening, 0, seq)
        if mask and lease.depends is not None:
            self._openings.check(lease, mask, opening.after_seq, 0, seq)
            if event.at_once:
                self._openings.check_done(lease, mask, opening.after_seq, seq)

    def _closed_early(self, end: LeaseOpen, transfer: TransferState, seq: int) -> None:
        """One end of a transfer is let go before the transfer has ended (R7)."""
        number = end.lease
        what = f"lease {number} was closed before transfer {transfer.id}, which it holds, ended"
        self._findings.violate(
            "R7", what, (end.seq, transfer.planned, seq), lease=number, transfer=transfer.id,
            request=transfer.request,
        )  # fmt: skip
