"""What is alive at one point of a log: leases, transfers, requests, and what depends on them.

Records are dropped as soon as no later line can refer to them, so memory follows what is alive and
not how long the log is. This module decides no rule.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final, final

from kvlease.protocols.events import (
    LeaseOpen,
    LeaseWait,
    LogOpen,
    PageFlush,
    PagePin,
    PageRun,
    TransferPlan,
)
from kvlease.services.replay.findings import Findings
from kvlease.services.replay.head import Bundle, Head
from kvlease.services.replay.pages import NO_RUNS, Pages

GRACE_NS = 5_000_000_000
"""How long after its deadline a request or a transfer may still end: who ends it may be at work."""
MAX_FLUSHED = 1 << 16
"""Identities of before a flush that are known again."""
MAX_LIMBO = 1024
"""Settled transfers that are kept because some of their bytes have not landed yet."""
NO_SEQS: Final[list[int]] = []
NO_HITS: Final[tuple[int, int, int, int]] = (0, 0, 0, 0)


@final
class PendingOpening:
    """One layer opened by one lease in one step, kept while bytes of it have not landed."""

    __slots__ = ("after", "counted", "layer", "lease", "request", "seq", "step")

    def __init__(self, layer: int, lease: "SequenceState", step: int, after: int, seq: int) -> None:
        """Keep what a violation has to name; ``counted`` are components found to be early."""
        self.layer = layer
        self.counted: set[str] = set()
        self.lease = lease.id
        self.request = lease.request
        self.step = step
        self.after = after
        self.seq = seq


@final
class Landing:
    """What is known of a transfer's bytes where the log tells when they land.

    Attributes:
        left: how many (layer, component) have not landed.
        seqs: where those that have did.
        openings: let through before everything had landed.
        pages: sealed pages that are named in `Pages.unlanded` because of this transfer.
    """

    __slots__ = ("left", "openings", "pages", "seqs")

    def __init__(self, left: int) -> None:
        """Start with nothing landed."""
        self.left = left
        self.seqs: dict[tuple[int, str], int] = {}
        self.openings: list[PendingOpening] = []
        self.pages: list[tuple[Pages, PageRun]] = []


@final
class TransferState:
    """One transfer, from its plan, or from its first reader, until nobody can refer to it.

    Attributes:
        plan: its plan, once it has one; ``planned`` is the plan's ``seq``.
        ended, end: how and where it ended; empty and 0 while it has not.
        closed: ``seq`` at which its destination was let go.
        latest: ``seq`` of the last thing that happened to its bytes.
        recorded, done: ``seq`` by layer, 0 before; ``done_mask`` has one bit a layer.
        landing: None unless the log tells when bytes land.
        readers: open leases that depend on it.
        partial: components that are not yet recorded, or done, of layers told in parts.
    """

    __slots__ = (
        "bundle", "closed", "done", "done_mask", "end", "ended", "id", "landing", "latest",
        "num_pages", "num_tails", "partial", "plan", "planned", "readers", "recorded",
    )  # fmt: skip

    def __init__(self, transfer: int) -> None:
        """Know its number only; the plan follows."""
        self.id = transfer
        self.plan: TransferPlan | None = None
        self.planned = self.end = self.closed = self.latest = 0
        self.ended = ""
        self.readers = self.num_pages = self.num_tails = self.done_mask = 0
        self.landing: Landing | None = None
        self.partial: dict[tuple[str, int], set[str]] | None = None
        self.bundle: Bundle | None = None
        self.recorded: list[int] = NO_SEQS
        self.done: list[int] = NO_SEQS

    @property
    def request(self) -> int:
        """The request that it was planned for; 0 for none."""
        return 0 if self.plan is None else self.plan.request

    @property
    def source_tier(self) -> str:
        """Where its bytes come from."""
        return "unknown" if self.plan is None else self.plan.source_tier


@final
class Reading:
    """What is kept of a ``step.read``: its step, and where it came."""

    __slots__ = ("seq", "step")

    def __init__(self, step: int, seq: int) -> None:
        """Keep both."""
        self.step = step
        self.seq = seq


NOT_READ: Final = Reading(0, 0)


@final
class SequenceState:
    """The open lease of a running sequence, or of another reader; no transfer's end.

    Attributes:
        seq: where it was opened.
        prefix: the ``base`` pages that it was opened with, in table order.
        arriving: runs of them that were not all sealed then, each with its position.
        own: pages that it reserved, in table order behind the prefix.
        floor, limit: positions between which it may write rows.
        written: position up to which published steps have written without a hole.
        whole: the latest ``step.read`` that names it with all layers.
        part, mask: the latest that names it with some of them, and these layers.
        is_plain: its next row needs no look at its tail or at what it depends on, and may be
            written at ``written``, which is not below ``floor``.
        depends: transfers whose bytes its pages or its running state wait for.
        tail: the load that brings the tail at its prefix's end.
        last: ``seq`` of the latest ``step.read`` or ``step.done`` of a lease that depends.
    """

    __slots__ = (
        "arriving", "base", "depends", "floor", "has_begun", "id", "is_plain", "is_shared", "last",
        "limit", "mask", "own", "pages", "part", "prefix", "published", "record",
        "request", "seq", "tail", "whole", "written",
    )  # fmt: skip

    def __init__(self, event: LeaseOpen, pages: Pages) -> None:
        """Open it without pages."""
        self.id = event.lease
        self.pages = pages
        self.is_shared = event.mode == "shared"
        self.seq = event.seq
        self.request = event.request
        self.prefix = NO_RUNS
        self.arriving: list[tuple[PageRun, int]] | None = None
        self.record: RequestState | None = None
        self.own: list[int] = []
        self.base = self.floor = self.limit = self.written = 0
        self.depends: list[TransferState] | None = None
        self.tail: TransferState | None = None
        self.mask = self.last = self.published = 0
        self.whole = self.part = NOT_READ
        self.is_plain = self.has_begun = False

    @property
    def read(self) -> Reading:
        """The latest ``step.read`` that names it."""
        return self.part if self.part.seq > self.whole.seq else self.whole

    def runs(self) -> Iterator[PageRun]:
        """Yield its pages in table order."""
        return chain(self.prefix, ((page, 1, 0) for page in self.own))


@final
class RequestState:
    """One request that has not ended: what it asked for, and where it was seen.

    Attributes:
        hits: pages that it hit by tier, as the admission said that counts.
        is_lost: what it had hit turned out to be none, and it was not admitted since.
        was_preempted: for another reason than that what it had hit was lost.
        failed_loads: loads in a row that took it off its pages.
        highest, again: up to which position it was computed before its present lease, and how many
            tokens have been computed again.
    """

    __slots__ = (
        "admitted", "again", "deadline_ns", "failed_loads", "highest", "hits", "id", "is_lost",
        "lease", "max_tokens", "prompt", "published", "root", "seq", "was_preempted",
    )  # fmt: skip

    def __init__(self, request: int, seq: int) -> None:
        """It was submitted."""
        self.id = request
        self.seq = seq
        self.admitted = self.lease = self.published = self.root = 0
        self.prompt = self.max_tokens = self.deadline_ns = 0
        self.failed_loads = self.highest = self.again = 0
        self.hits: tuple[int, int, int, int] = NO_HITS
        self.is_lost = self.was_preempted = False


def compute_again(record: RequestState, lease: SequenceState, page_tokens: int) -> None:
    """Count what a lease's steps computed that had been computed before (R12)."""
    again = min(lease.written, record.highest) - lease.base * page_tokens
    if again > 0:
        record.again += again
    record.highest = max(record.highest, lease.written)


@final
class Quarantine:
    """What some released pages wait for."""

    __slots__ = ("leases", "num_pages", "seq", "steps", "transfers")

    def __init__(self, seq: int, transfers: list[int], steps: list[int], leases: list[int]) -> None:
        """Keep what ``page.quarantine`` names."""
        self.seq = seq
        self.num_pages = 0
        self.transfers = transfers
        self.steps = steps
        self.leases = leases


@final
class World:
    """Everything alive; the rules' modules share one.

    Attributes:
        is_lossy: lines are missing or of a lower level: what is unknown is not therefore wrong.
        keeps_landings: whether settled transfers are kept until their bytes have landed.
        has_landings: whether the log tells when bytes land.
        sequences: all open leases that are no transfer's end.
        ends: open leases that are one, as they were opened; ``reserved`` are the pages that they
            reserved since.
        limbo: settled transfers some of whose bytes have not landed, oldest first.
        waits: waits that have not ended, by step, or by minus the lease outside steps.
        blocking_steps: steps not over yet that quarantined pages wait for.
        roots: a number for each cache identity and tenant, in the order in which they came.
        flushed: identities that were there before the latest flush, oldest first.
        pins, flushed_pins: those that have not ended, and the flush that came since, if one did.
        blocker_ns: when something last ended that quarantined pages may have waited for.
    """

    def __init__(self, head: LogOpen, findings: Findings) -> None:
        """Start as the head says, with all pages free."""
        self.head = Head(head)
        self.findings = findings
        self.is_lossy = head.level != "audit"
        self.keeps_landings = head.ports is not None
        self.has_landings = False
        self.tiers: dict[str, Pages] = {
            "device": Pages("device", head.device_pages),
            "host": Pages("host", head.host_pages),
            "storage": Pages("storage", None),
        }
        self.ends: dict[int, LeaseOpen] = {}
        self.reserved: dict[int, list[PageRun]] = {}
        self.sequences: dict[int, SequenceState] = {}
        self.transfers: dict[int, TransferState] = {}
        self.limbo: dict[int, TransferState] = {}
        self.requests: dict[int, RequestState] = {}
        self.quarantines: dict[int, Quarantine] = {}
        self.waits: dict[int, list[LeaseWait]] = {}
        self.blocking_steps: set[int] = set()
        self.roots: dict[tuple[str, str], int] = {(head.identity, ""): 0}
        self.flushed: dict[str, None] = {}
        self.pins: dict[int, PagePin] = {}
        self.flushed_pins: dict[int, PageFlush] = {}
        self._num_roots = 1
        self.blocker_ns = 0

    def forget(self) -> None:
        """Know nothing of what was before this line: lines are missing."""
        self.is_lossy = True
        for pages in self.tiers.values():
            pages.forget()
        for alive in (
            self.ends, self.reserved, self.sequences, self.transfers, self.limbo,
            self.requests, self.quarantines, self.waits, self.pins, self.flushed_pins,
        ):  # fmt: skip
            alive.clear()
        self.blocking_steps.clear()

    def opened_at(self, lease: int) -> int:
        """Return where an open lease was opened; 0 if none is open under this number."""
        sequence, end = self.sequences.get(lease), self.ends.get(lease)
        if sequence is not None:
            return sequence.seq
        return 0 if end is None else end.seq

    def holdings(self, tier: str) -> Iterator[tuple[int, int, Iterable[PageRun]]]:
        """Yield number, opening and pages of every open lease of a tier."""
        for sequence in self.sequences.values():
            if sequence.pages.name == tier:
                yield sequence.id, sequence.seq, sequence.runs()
        for number, end in self.ends.items():
            if end.tier == tier:
                yield number, end.seq, [*end.pages, *self.reserved.get(number, ())]

    def is_held(self, transfer: TransferState) -> bool:
        """Whether a transfer still holds one of its ends: it has not settled."""
        plan = transfer.plan
        return plan is not None and (
            plan.source_lease in self.ends or plan.destination_lease in self.ends
        )

    def root_of(self, identity: str, tenant: str) -> int:
        """Return the number of a tenant under a cache identity; an empty one is the head's."""
        key = identity or self.head.event.identity, tenant
        root = self.roots.get(key)
        if root is None:
            for pages in self.tiers.values():
                pages.is_mixed = True
            root = self.roots[key] = self._num_roots
            self._num_roots += 1
        return root

    def forget_roots(self, identity: str) -> None:
        """Take all identities but this one as flushed; the oldest of many are forgotten."""
        self.flushed.update(dict.fromkeys(known for known, _ in self.roots))
        self.flushed.pop(identity, None)
        while len(self.flushed) > MAX_FLUSHED:
            del self.flushed[next(iter(self.flushed))]
        self.roots.clear()
        self.root_of(identity, "")

    def is_over(self, waiting: Quarantine) -> bool:
        """Whether all that quarantined pages wait for has come to its end."""
        for transfer in waiting.transfers:
            known = self.transfers.get(transfer)
            if known is not None and self.is_held(known):
                return False
        return self.blocking_steps.isdisjoint(waiting.steps) and not any(
            map(self.opened_at, waiting.leases)
        )
