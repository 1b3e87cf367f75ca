"""Rules about pages: who gets them, when they are sealed, given up and free again (R3 to R6, R11).

The common case of each event is decided a run at a time; a run that is not as it should be is
looked at page by page, to say what is wrong, and then taken as the log has it.
"""

from typing import final

from kvlease.protocols.events import (
    PageEvict,
    PageFree,
    PageMismatch,
    PageQuarantine,
    PageReserve,
    PageRun,
    PageSeal,
)
from kvlease.services.replay.pages import (
    FREE,
    HELD,
    QUARANTINED,
    SEALED,
    STATE_NAMES,
    UNKNOWN,
    Pages,
)
from kvlease.services.replay.state import Quarantine, SequenceState, TransferState, World


def name_of(pages: Pages, first: int, count: int) -> str:
    """Return what to call a run of pages in a sentence."""
    last = f" to {first + count - 1}" if count > 1 else ""
    return f"{pages.name} page{'s' if count > 1 else ''} {first}{last}"


def explain(
    world: World,
    pages: Pages,
    run: PageRun,
    wanted: int,
    doing: str,
    rule: str,
    seq: int,
    *,
    lease: int = 0,
    request: int = 0,
) -> bool:
    """Say why a run is not of its epoch or not in the ``wanted`` state, once for each reason.

    Returns whether the pages exist at all; they are then of the epoch that the run names.
    """
    first, count, epoch = run
    findings = world.findings
    if not pages.has(first, count):
        findings.violate(
            "R11",
            f"{name_of(pages, first, count)} {doing}, and the tier has {pages.total}",
            (seq,),
            lease=lease,
            request=request,
        )
        return False
    is_stale = is_odd = False
    for page in range(first, first + count):
        state, known, since = pages.state[page], pages.epochs[page], pages.since[page]
        pages.epochs[page] = epoch
        if state == UNKNOWN:
            continue
        if known != epoch and not is_stale:
            is_stale = True
            what = (
                f"{name_of(pages, page, 1)} {doing} under epoch {epoch}, and its epoch is {known}"
            )
            findings.violate("R8", what, (since, seq), lease=lease, request=request)
        if state != wanted and not is_odd:
            is_odd = True
            what = f"{name_of(pages, page, 1)} {doing} while it was {STATE_NAMES[state]}"
            findings.violate(rule, what, (since, seq), lease=lease, request=request)
    return True


@final
class PageRules:
    """Follows ``page.*``; one method an event."""

    def __init__(self, world: World) -> None:
        """Share the world."""
        self._world = world
        self._findings = world.findings
        self._tiers = world.tiers
        self._ends = world.ends
        self._reserved = world.reserved
        self._sequences = world.sequences
        self._page_tokens = world.head.page_tokens

    def reserve(self, event: PageReserve) -> None:
        """Free pages become a lease's own, behind those it had (R3)."""
        pages, seq, number, runs = self._tiers[event.tier], event.seq, event.lease, event.pages
        odd = pages.reserve(runs, number, seq)
        if odd:
            for run in odd:
                if self._explain(pages, run, FREE, "was reserved", "R3", event):
                    pages.pins.up([run])
                    pages.move(run, HELD, number, seq)
            runs = [run for run in runs if pages.has(run[0], run[1])]
        sequence = self._sequences.get(number)
        if sequence is None:
            end = self._ends.get(number)
            if end is not None:
                if end.tier != event.tier:
                    self._elsewhere(event, end.seq, end.tier)
                    return
                reserved = self._reserved
                reserved[number] = [*reserved[number], *runs] if number in reserved else runs
            elif not self._world.is_lossy:
                what = f"pages were reserved for lease {number}, which is not open"
                self._findings.violate("R3", what, (seq,), lease=number, request=event.request)
            return
        if event.request != sequence.request:
            self._not_theirs(sequence, event)
        if pages is not sequence.pages:
            self._elsewhere(event, sequence.seq, sequence.pages.name)
            return
        own = sequence.own
        for first, count, _ in runs:
            if count == 1:
                own.append(first)
            else:
                own.extend(range(first, first + count))
        sequence.limit = (sequence.base + len(own)) * self._page_tokens

    def _explain(
        self, pages: Pages, run: PageRun, state: int, doing: str, rule: str,
        event: PageReserve | PageSeal,
    ) -> bool:  # fmt: skip
        return explain(
            self._world, pages, run, state, doing, rule, event.seq,
            lease=event.lease, request=event.request,
        )  # fmt: skip

    def seal(self, event: PageSeal) -> None:
        """Held pages become immutable, once what fills them is known to be complete (R2, R4)."""
        pages, seq, number, runs = self._tiers[event.tier], event.seq, event.lease, event.pages
        odd = pages.seal(runs, number, seq)
        if odd:
            for run in odd:
                if pages.are(*run, HELD):
                    self._not_owner(pages, run[0], run[1], event)
                elif not self._explain(pages, run, HELD, "was sealed", "R4", event):
                    continue
                pages.move(run, SEALED, 0, seq)
            runs = [run for run in runs if pages.has(run[0], run[1])]
        sequence = self._sequences.get(number)
        if sequence is not None:
            if event.request != sequence.request:
                self._not_theirs(sequence, event)
            if pages is not sequence.pages:
                self._elsewhere(event, sequence.seq, sequence.pages.name)
                return
            self._seal_written(pages, runs, sequence, event.start, seq)
            return
        end = self._ends.get(number)
        if end is not None:
            transfer = self._world.transfers.get(end.transfer)
            if transfer is not None and (transfer.ended != "done" or transfer.landing is not None):
                self._seal_arrived(pages, runs, transfer, seq)
            return
        pages.place(runs, event.start, self._page_tokens, 0)
        if not self._world.is_lossy:
            what = f"pages were sealed by lease {number}, which is not open"
            self._findings.violate("R3", what, (seq,), lease=number, request=event.request)

    def _elsewhere(self, event: PageReserve | PageSeal, opened: int, tier: str) -> None:
        what = (
            f"lease {event.lease} is on the {tier} tier, and pages of it are told of {event.tier}"
        )
        self._findings.violate(
            "R14", what, (opened, event.seq), lease=event.lease, request=event.request
        )

    def _not_theirs(self, lease: SequenceState, event: PageReserve | PageSeal) -> None:
        what = (
            f"lease {lease.id} is request {lease.request}'s, and pages of it are told as request "
            f"{event.request}'s"
        )
        seqs = (lease.seq, event.seq)
        self._findings.violate("R14", what, seqs, lease=lease.id, request=lease.request)

    def _not_owner(self, pages: Pages, first: int, count: int, event: PageSeal) -> None:
        if self._world.is_lossy:
            return
        owners = pages.holders[first : first + count]
        owner = next(holder for holder in owners if holder != event.lease)
        what = (
            f"{name_of(pages, first, count)} sealed by lease {event.lease}, held by lease {owner}"
        )
        seqs = (pages.since[first], event.seq)
        self._findings.violate("R3", what, seqs, lease=event.lease, request=event.request)

    def _seal_written(
        self, pages: Pages, runs: list[PageRun], lease: SequenceState, place: int, seq: int
    ) -> None:
        """Seal a sequence's pages, at their place, and written to their end by published steps."""
        record, own, page_tokens = lease.record, lease.own, self._page_tokens
        pages.place(runs, place, page_tokens, 0 if record is None else record.root)
        base, known = lease.base, len(own)
        index = place // page_tokens - base
        if place % page_tokens or not runs:
            what = f"pages were sealed at position {place}, where no page of {page_tokens} begins"
            what = what if runs else "a seal names no page that the tier has"
            self._findings.violate(
                "R10", what, (lease.seq, seq), lease=lease.id, request=lease.request
            )
            if not runs:
                return
        for first, count, _ in runs:
            if (
                not 0 <= index < known
                or own[index] != first
                or (count > 1 and own[index : index + count] != [*range(first, first + count)])
            ):
                place = (index + base) * page_tokens
                what = f"{name_of(pages, first, count)} sealed at position {place}, not theirs"
                self._findings.violate(
                    "R10", what, (lease.seq, seq), lease=lease.id, request=lease.request
                )
            index += count
        end = (index + base) * page_tokens
        if end > lease.written:
            what = (
                f"{name_of(pages, *runs[-1][:2])} sealed up to position {end}, and published steps "
                f"have written up to {lease.written}"
            )
            seqs = (lease.seq, lease.read.seq, seq)
            self._findings.violate("R2", what, seqs, lease=lease.id, request=lease.request)
            lease.is_plain = False
        if end > lease.floor:
            lease.floor = min(end, lease.limit)

    def _seal_arrived(
        self, pages: Pages, runs: list[PageRun], transfer: TransferState, seq: int
    ) -> None:
        """Seal a transfer's destination: when it is done."""
        if transfer.ended != "done":
            end = f"had ended: {transfer.ended}" if transfer.ended else "had not ended"
            what = f"pages were sealed while transfer {transfer.id}, which fills them, {end}"
            self._findings.violate(
                "R2", what, (transfer.planned, transfer.end, seq),
                transfer=transfer.id, request=transfer.request,
            )  # fmt: skip
        landing = transfer.landing
        if landing is not None and landing.left:
            for run in runs:
                landing.pages.append((pages, run))
                for page in range(run[0], run[0] + run[1]):
                    pages.unlanded[page] = transfer.id

    def evict(self, event: PageEvict) -> None:
        """A tier gives up sealed pages; what follows says where they go."""
        pages = self._tiers[event.tier]
        for run in pages.odd(event.pages, SEALED):
            explain(self._world, pages, run, SEALED, "was evicted", "R11", event.seq)

    def mismatch(self, event: PageMismatch) -> None:
        """An audit found a page that is not what it was when it was sealed (R4).

        Where it found another prefix's page, that page was used under a key not its own (R10).
        """
        pages, seq = self._tiers[event.tier], event.seq
        is_other = event.component == "key"
        for first, count, _ in event.pages:
            what = f"{name_of(pages, first, count)} was found changed in layer {event.layer}"
            what = f"{what}: {event.component} is not what was sealed"
            if is_other:
                what = f"{name_of(pages, first, count)} was found under another prefix's tokens"
            is_sealed = pages.has(first, count) and pages.state[first] == SEALED
            self._findings.violate(
                "R10" if is_other else "R4", what, (pages.since[first] if is_sealed else 0, seq),
                request=event.request, layer=event.layer, component=event.component,
            )  # fmt: skip

    def quarantine(self, event: PageQuarantine) -> None:
        """Released pages wait for what may still touch them (R6)."""
        pages, seq, world = self._tiers[event.tier], event.seq, self._world
        waiting = Quarantine(seq, event.transfers, event.steps, event.leases)
        for run in event.pages:
            if not pages.are(*run, SEALED) and not pages.are(*run, HELD):
                is_held = pages.has(run[0], 1) and pages.state[run[0]] == HELD
                wanted = HELD if is_held else SEALED
                if not explain(world, pages, run, wanted, "was released", "R11", seq):
                    continue
            pages.release(run, QUARANTINED, seq, seq)
            waiting.num_pages += run[1]
        if pages.unlanded:
            self._forget_landing(pages, event.pages)
        if waiting.num_pages:
            world.quarantines[seq] = waiting
            world.blocking_steps.update(event.steps)

    def free(self, event: PageFree) -> None:
        """Released pages may be reused: nobody holds them and nothing can touch them (R6)."""
        pages, seq = self._tiers[event.tier], event.seq
        for run in pages.free(event.pages, seq):
            first, count, _ = run
            is_owned = pages.are(*run, HELD) or pages.are(*run, SEALED)  # but pinned
            if not is_owned and not self._quarantined(pages, run, seq):
                continue
            if not pages.pins.are_free(first, count):
                self._still_leased(pages, first, count, seq)
            pages.release(run, FREE, 0, seq)
        if pages.unlanded:
            self._forget_landing(pages, event.pages)

    def _quarantined(self, pages: Pages, run: PageRun, seq: int) -> bool:
        """Free pages from quarantine, or say why they cannot be; returns whether they exist."""
        first, count, epoch = run
        state = pages.state[first] if pages.has(first, count) else HELD
        if state == QUARANTINED:
            if not pages.are(first, count, epoch + 1, QUARANTINED):
                later = first, count, epoch + 1
                explain(self._world, pages, later, QUARANTINED, "was freed", "R6", seq)
            self._leave(pages, first, count, seq)
            return True
        wanted = SEALED if state == SEALED else HELD
        return explain(self._world, pages, run, wanted, "was freed", "R6", seq)

    def _leave(self, pages: Pages, first: int, count: int, seq: int) -> None:
        """Check what the quarantines of these pages waited for, a quarantine at a time."""
        quarantines = self._world.quarantines
        holders = pages.holders[first : first + count]
        for number in set(holders):
            waiting = quarantines.get(number)
            if waiting is None:
                continue
            self._check_over(waiting, pages, first, count, seq)
            waiting.num_pages -= holders.count(number)
            if waiting.num_pages <= 0:
                del quarantines[number]

    def _check_over(
        self, waiting: Quarantine, pages: Pages, first: int, count: int, seq: int
    ) -> None:
        world, what = self._world, f"{name_of(pages, first, count)} freed before"
        seqs = (waiting.seq, seq)
        for transfer in waiting.transfers:
            known = world.transfers.get(transfer)
            if known is not None and world.is_held(known):
                self._findings.violate(
                    "R6", f"{what} transfer {transfer} had settled", (known.planned, *seqs),
                    transfer=transfer,
                )  # fmt: skip
        for step in waiting.steps:
            if step in world.blocking_steps:
                self._findings.violate("R6", f"{what} step {step} was over", seqs, step=step)
        for lease in waiting.leases:
            opened = world.opened_at(lease)
            if opened:
                sentence = f"{what} lease {lease} was closed"
                self._findings.violate("R6", sentence, (opened, *seqs), lease=lease)

    def _still_leased(self, pages: Pages, first: int, count: int, seq: int) -> None:
        """Name the open leases on pages that were freed; rare, so all leases are looked through."""
        end = first + count
        for number, opened, runs in self._world.holdings(pages.name):
            if any(at < end and first < at + length for at, length, _ in runs):
                what = f"{name_of(pages, first, count)} freed under lease {number}, which is open"
                self._findings.violate("R6", what, (opened, seq), lease=number)
                return

    def _forget_landing(self, pages: Pages, runs: list[PageRun]) -> None:
        for first, count, _ in runs:
            if pages.has(first, count):
                for page in range(first, first + count):
                    pages.unlanded.pop(page, None)
