"""Rules about requests: they end in time (R9), use their own pages (R10), and add up (R12)."""

from typing import final

from kvlease.protocols.events import (
    PageFlush,
    PageRun,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
)
from kvlease.services.replay.lease_rules import LeaseRules
from kvlease.services.replay.page_rules import name_of
from kvlease.services.replay.state import (
    GRACE_NS,
    RequestState,
    SequenceState,
    World,
    compute_again,
)

MAX_FAILED_LOADS = 8
"""In a row: a request that loses its cached pages as often makes no progress, and shall compute."""
LOST = ("load_failed", "page_mismatch")
"""Why a request is preempted whose cached pages turned out to be none."""


@final
class RequestRules:
    """Follows ``request.*``; one method an event."""

    def __init__(self, world: World, leases: LeaseRules) -> None:
        """Share the world."""
        self._world = world
        self._findings = world.findings
        self._requests = world.requests
        self._page_tokens = world.head.page_tokens
        self._identity = world.head.event.identity
        self._lease_rules = leases

    def submitted(self, event: RequestSubmitted) -> None:
        """A request passes the door."""
        number, seq = event.request, event.seq
        before = self._requests.get(number)
        if before is not None:
            what = f"request {number} was submitted twice"
            self._findings.violate("R14", what, (before.seq, seq), request=number)
        record = self._requests[number] = RequestState(number, seq)
        record.prompt, record.max_tokens = event.prompt_tokens, event.max_tokens
        record.deadline_ns = event.deadline_ns

    def _known(self, number: int, seq: int, doing: str) -> RequestState | None:
        record = self._requests.get(number)
        if record is None and not self._world.is_lossy:
            what = f"request {number} {doing}, and it was not submitted or has ended"
            self._findings.violate("R14", what, (seq,), request=number)
        return record

    def admitted(self, event: RequestAdmitted) -> None:
        """It has pages now: all of them sealed under its identity and at their places (R10)."""
        record = self._known(event.request, event.seq, "was admitted")
        if record is None:
            return
        record.admitted = event.seq
        self._check_counts(record, event)
        record.root = self._world.root_of(event.identity, event.tenant)
        if not event.again:
            record.hits, record.is_lost = event.hit_pages, False
        elif record.is_lost:
            what = f"request {record.id} was admitted again, and what it had hit before was lost"
            self._findings.violate("R12", what, (record.seq, event.seq), request=record.id)
        if self._world.flushed and (event.identity or self._identity) in self._world.flushed:
            what = f"request {record.id} was admitted under an identity from before a flush"
            self._findings.violate("R10", what, (record.seq, event.seq), request=record.id)
        lease = self._world.sequences.get(record.lease)
        if lease is None:
            return
        if lease.base * self._page_tokens != event.used_tokens:
            what = (
                f"request {record.id} was admitted with {event.used_tokens} tokens used, and its "
                f"lease {lease.id} was opened on {lease.base} pages"
            )
            seqs = (record.seq, lease.seq, event.seq)
            self._findings.violate("R14", what, seqs, request=record.id, lease=lease.id)
        if lease.pages.is_mixed:
            for first, count, _ in lease.prefix:
                self._check_root(lease, first, count, record.root, event.seq)
        # What was sealed then was looked at when the lease was opened.
        if lease.arriving is not None:
            self._check_arriving(lease, lease.arriving, event.seq)

    def _check_counts(self, record: RequestState, event: RequestAdmitted) -> None:
        """No count is negative, and no more is used than matched, or matched than there is."""
        tokens = record.prompt + (record.max_tokens if event.again else 0)
        used, matched = event.used_tokens, event.matched_tokens
        device, host, storage, remote = event.hit_pages
        hit, wrong = device + host + storage + remote, ""
        if not used <= matched <= tokens:
            wrong = f"with {used} tokens used, {matched} matched and {tokens} there"
        elif hit * self._page_tokens != used:
            wrong = f"with {used} tokens used, and {hit} pages hit"
        elif used < 0 or min(device, host, storage, remote, *event.reasons.values()) < 0:
            wrong = "with a negative count"
        if wrong:
            what = f"request {record.id} was admitted {wrong}"
            self._findings.violate("R14", what, (record.seq, event.seq), request=record.id)

    def _check_arriving(
        self, lease: SequenceState, arriving: list[tuple[PageRun, int]], seq: int
    ) -> None:
        pages, page_tokens = lease.pages, self._page_tokens
        places = pages.places
        for run, place in arriving:
            first, count, _ = run
            if places[first] != place or (
                count > 1 and not pages.are_placed(first, count, place, page_tokens)
            ):
                self._lease_rules.misplaced(lease, pages, run, place, seq)

    def _check_root(
        self, lease: SequenceState, first: int, count: int, root: int, seq: int
    ) -> None:
        pages = lease.pages
        if pages.roots[first : first + count].count(root) == count:
            return
        for page in range(first, first + count):
            if pages.roots[page] != root and pages.places[page] >= 0:
                what = (
                    f"request {lease.request} uses {name_of(pages, page, 1)}, which was sealed "
                    "under another identity, or for another tenant"
                )
                self._findings.violate(
                    "R10", what, (pages.since[page], lease.seq, seq), request=lease.request,
                    lease=lease.id,
                )  # fmt: skip
                return

    def flushed(self, event: PageFlush) -> None:
        """What is cached is forgotten: names of before are not used again (R10)."""
        world = self._world
        known = [identity for identity, _ in world.roots]
        if event.identity in known or event.identity in world.flushed:
            what = "a flush kept the identity, under which old pages would be found"
            if event.identity != self._identity:
                what = "a flush took an identity that had been used before"
            self._findings.violate("R10", what, (event.seq,))
        world.forget_roots(event.identity)
        for pin in world.pins:
            world.flushed_pins.setdefault(pin, event)

    def preempted(self, event: RequestPreempted) -> None:
        """It gave its pages back and waits."""
        record = self._known(event.request, event.seq, "was preempted")
        if record is None:
            return
        record.admitted = 0
        lease = self._world.sequences.get(record.lease)
        is_lost = event.reason in LOST and lease is not None
        if is_lost and lease is not None and not record.published + lease.published:
            if not record.was_preempted:
                record.is_lost = True  # its hits were none; the next admission's are counted
            record.failed_loads += 1
            if record.failed_loads == MAX_FAILED_LOADS:
                what = f"request {record.id} lost what it had hit {MAX_FAILED_LOADS} times in a row"
                self._findings.violate("R9", what, (record.seq, event.seq), request=record.id)
        else:
            record.was_preempted, record.failed_loads = True, 0

    def finished(self, event: RequestFinished) -> None:
        """It has its answer, or as much of it as its caller wanted."""
        self._ended(event)

    def failed(self, event: RequestFailed) -> None:
        """It got no answer."""
        self._ended(event)

    def _ended(self, event: RequestFinished | RequestFailed) -> None:
        record = self._known(event.request, event.seq, "ended")
        if record is None:
            return
        del self._requests[record.id]
        lease = self._world.sequences.get(record.lease)
        if lease is not None:
            record.published += lease.published
            compute_again(record, lease, self._page_tokens)
        if record.deadline_ns and event.t_ns > record.deadline_ns + GRACE_NS:
            over = (event.t_ns - record.deadline_ns) / 1e9
            what = f"request {record.id} ended {over:.1f} s after its deadline"
            self._findings.violate("R9", what, (record.seq, event.seq), request=record.id)
        for why in self._accounts(record, event):
            what = f"request {record.id} {why}"
            seqs = (record.seq, record.admitted, event.seq)
            self._findings.violate("R12", what, seqs, request=record.id)

    def _accounts(self, record: RequestState, event: RequestFinished | RequestFailed) -> list[str]:
        """Return what does not add up."""
        usage = event.usage
        wrong: list[str] = []
        device, host, storage, remote = (
            usage.hit_device, usage.hit_host, usage.hit_storage, usage.hit_remote
        )  # fmt: skip
        if usage.prompt != record.prompt:
            wrong.append(f"was submitted with {record.prompt} tokens and ended with {usage.prompt}")
        buckets = device + host + storage + remote + usage.computed
        if (
            device < 0 or host < 0 or storage < 0 or remote < 0 or usage.computed < 0
            or usage.recomputed < 0 or usage.output < 0 or usage.prompt < 0
        ):  # fmt: skip
            wrong.append("has a negative count in its usage")
        if record.admitted and buckets != usage.prompt:
            wrong.append(f"has {usage.prompt} prompt tokens and {buckets} in its buckets")
        if record.admitted and usage.computed < 1:
            wrong.append("computed no token of its prompt")
        if usage.output > record.max_tokens:
            wrong.append(f"asked for {record.max_tokens} tokens and got {usage.output}")
        if usage.output != record.published and not self._world.is_lossy:
            wrong.append(f"got {usage.output} tokens, and its steps published {record.published}")
        pages, page_tokens = record.hits, self._page_tokens
        if record.admitted and (
            device != pages[0] * page_tokens or host != pages[1] * page_tokens
            or storage != pages[2] * page_tokens or remote != pages[3] * page_tokens
        ):  # fmt: skip
            told = f"{device}, {host}, {storage} and {remote} tokens hit by tier"
            wrong.append(f"counts {told}, and the admission that counts hit pages {[*pages]}")
        if usage.recomputed != record.again and not self._world.is_lossy:
            wrong.append(
                f"counts {usage.recomputed} tokens computed again, and its steps did {record.again}"
            )
        return wrong
