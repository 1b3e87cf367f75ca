"""Log events of pages and of the leases on them: ``page.*`` and ``lease.*``."""

from typing import Literal

from kvlease.protocols.event_base import Event, NormalEvent, PageRun, Tier


class PageReserve(Event, tag="page.reserve", kw_only=True, gc=False):
    """Free pages became one holder's, under a new epoch; ``lease`` is exclusive (R3)."""

    pages: list[PageRun]
    lease: int
    tier: Tier = "device"
    request: int = 0


class PageSeal(Event, tag="page.seal", kw_only=True, gc=False):
    """Pages written to their end became immutable and shareable (R4).

    Attributes:
        start: position of the first page's first token in its sequence.
        tails: those of the pages at whose end a tail is held (R5).
        keys: chained page hashes, where a tier needed them.
    """

    pages: list[PageRun]
    tier: Tier = "device"
    lease: int = 0
    request: int = 0
    start: int = 0
    tails: list[PageRun] = []
    keys: list[str] = []


class PageEvict(Event, tag="page.evict", kw_only=True, gc=False):
    """A tier gave up cached state: whole bundles, or only the tails kept at the pages' ends."""

    pages: list[PageRun]
    tier: Tier
    part: Literal["bundle", "tail"] = "bundle"


class PageQuarantine(Event, tag="page.quarantine", kw_only=True, gc=False):
    """Released pages wait for work that may still touch them (R6)."""

    pages: list[PageRun]
    tier: Tier = "device"
    transfers: list[int] = []
    steps: list[int] = []


class PageFree(Event, tag="page.free", kw_only=True, gc=False):
    """Pages became free; runs carry the epoch that ends here."""

    pages: list[PageRun]
    tier: Tier = "device"


class PageLedger(Event, tag="page.ledger", kw_only=True, gc=False):
    """A pool's own count, to be compared with the one that follows from the log (R11)."""

    tier: Tier
    quarantined: int
    leased: int
    cached: int
    reserved: int
    free: int


class LeaseOpen(Event, tag="lease.open", kw_only=True, gc=False):
    """A right to pages began. Pages reserved later under the same lease join it."""

    lease: int
    mode: Literal["shared", "exclusive"]
    pages: list[PageRun]
    tier: Tier = "device"
    request: int = 0
    transfer: int = 0
    """The transfer that holds it as one of its ends, if any (R7)."""


class LeaseWait(Event, tag="lease.wait", kw_only=True, gc=False):
    """A reader reached a layer whose bytes were not there and began to wait (R9).

    ``owner`` answers for the deadline. The end of the wait is told by ``step.read``.
    """

    lease: int
    layer: int
    components: list[str]
    transfer: int
    owner: str
    deadline_ns: int


class LeaseClose(Event, tag="lease.close", kw_only=True, gc=False):
    """A right ended in order; ``after_step`` is the last step that may still read (R6)."""

    lease: int
    after_step: int = 0


class LeaseMove(Event, tag="lease.move", kw_only=True, gc=False):
    """A right moved: ``lease`` is dead and ``to_lease`` lives, with the same pages."""

    lease: int
    to_lease: int
    to_actor: str


class LeaseRevoke(NormalEvent, tag="lease.revoke", kw_only=True, gc=False):
    """A right ended because its holder died or its deadline passed."""

    lease: int
    reason: str


class LeaseRefuse(NormalEvent, tag="lease.refuse", kw_only=True, gc=False):
    """A stale reference was presented and refused (R8); the only event that may name old epochs."""

    pages: list[PageRun]
    tier: Tier = "device"
    lease: int = 0
    request: int = 0
