"""Log events of pages and of the leases on them: ``page.*`` and ``lease.*``."""

from typing import Literal, TypeAlias

from kvlease.protocols.event_base import Event, NormalEvent, Opening, PageRun, Tier

UnpinReason: TypeAlias = Literal["expired", "asked", "flushed", "closed"]
"""Why a pin ended: its time, its caller, a flush, or the engine's end."""


class PageReserve(Event, tag="page.reserve", kw_only=True, gc=False):
    """Free pages became one holder's, under a new epoch; ``lease`` is exclusive (R3)."""

    pages: list[PageRun]
    lease: int
    tier: Tier = "device"
    request: int = 0


class PageSeal(Event, tag="page.seal", kw_only=True, gc=False):
    """Pages written to their end became immutable and shareable (R4).

    ``start`` is the position of the first page's first token in its sequence. A transfer's
    destination seals when everything planned has arrived; its pages keep their source's start.
    """

    pages: list[PageRun]
    tier: Tier = "device"
    lease: int = 0
    request: int = 0
    start: int = 0


class PageEvict(Event, tag="page.evict", kw_only=True, gc=False):
    """A tier gave up cached state: pages, and ``tails`` kept at the ends of these or others."""

    pages: list[PageRun]
    tier: Tier
    tails: int = 0


class PageQuarantine(Event, tag="page.quarantine", kw_only=True, gc=False):
    """Released pages wait for work that may still touch them (R6): all that is named here."""

    pages: list[PageRun]
    tier: Tier = "device"
    transfers: list[int] = []
    steps: list[int] = []
    leases: list[int] = []


class PageFree(Event, tag="page.free", kw_only=True, gc=False):
    """Pages became free; runs carry the epoch that ends here."""

    pages: list[PageRun]
    tier: Tier = "device"


class PageMismatch(NormalEvent, tag="page.mismatch", kw_only=True, gc=False):
    """A sampled page was found changed before a step read it: it and what follows it are dropped.

    Found on ``tier``, whatever it had been copied from; both tiers' copies go. ``component`` is
    ``key`` where a page stood under another prefix's tokens. A kept tail counts as its page's.
    """

    pages: list[PageRun]
    layer: int
    component: str
    tier: Tier = "device"
    request: int = 0


class PageFlush(NormalEvent, tag="page.flush", kw_only=True, gc=False):
    """Everything cached is to be forgotten, as the weights changed.

    ``identity`` is the engine's from now on: it, and any other that comes later, is a new one.
    """

    identity: str


class PagePin(NormalEvent, tag="page.pin", kw_only=True, gc=False):
    """A caller keeps so many cached pages of a prompt, on the tiers that have them, for a while.

    ``identity`` is the cache identity that they are cached under, ``deadline_ns`` when the pin ends
    at the latest (R9).
    """

    pin: int
    identity: str
    pages: int
    deadline_ns: int


class PageUnpin(NormalEvent, tag="page.unpin", kw_only=True, gc=False):
    """A pin ended: its time was up, its caller asked, all was forgotten, or the engine closed.

    ``identity`` is that under which whoever asked is known; empty if nobody did (R10).
    """

    pin: int
    reason: UnpinReason
    identity: str = ""


class PageLedger(Event, tag="page.ledger", kw_only=True, gc=False):
    """A pool's own count, to be compared with the one that follows from the log (R11).

    Each page counts once, by this precedence. ``leased`` pages have a holder, who may be one that
    pins a path without reading it; ``reserved`` counts promises, which name no page. ``pins`` are
    those that callers asked for and that have not ended, -1 where the writer does not tell.
    """

    tier: Tier
    quarantined: int
    leased: int
    cached: int
    reserved: int
    free: int
    pins: int = -1


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
    """Readers reached a layer whose bytes were not there and began to wait (R9).

    The end of the wait is told by the step's ``step.read`` or ``step.discarded``.

    Attributes:
        leases: who waits: members of one step, or one reader of its own.
        step: the step they wait in; 0 outside steps.
        components: what of the layer had not arrived.
        owner: who answers for the deadline.
    """

    leases: list[int]
    layer: int
    components: list[str]
    transfer: int
    owner: str
    deadline_ns: int
    step: int = 0


class LeaseMove(Event, tag="lease.move", kw_only=True, gc=False):
    """A right changed hands: the earlier handle is dead, the number stays.

    ``freezes`` if it also gave up writing: the lease is shared from now on.
    """

    lease: int
    freezes: bool = False


class LeaseClose(Event, tag="lease.close", kw_only=True, gc=False):
    """A right ended. ``opens`` names what it opened outside steps.

    ``at_once`` if no stream was there to wait: what it opened had to be done, not only recorded.
    """

    lease: int
    opens: list[Opening] = []
    at_once: bool = False
