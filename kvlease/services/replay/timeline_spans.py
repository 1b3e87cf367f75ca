"""What the pictures of a log are made of: spans between two of its lines, and who takes them.

This module does not know how spans are found or drawn.
"""

from typing import Literal, NamedTuple, Protocol, TypeAlias

from kvlease.protocols.events import Event, LayerRun, PageRun, TransferPlan

StepKind: TypeAlias = Literal["prefill", "decode", "mixed", "discarded"]
Phase: TypeAlias = Literal["waiting", "prefill", "decode"]
MarkKind: TypeAlias = Literal["recorded", "landed", "done"]


class Moment(NamedTuple):
    """A line of the log and its time."""

    line: int
    t_ns: int


class Arrival(NamedTuple):
    """A transfer that had ended when a step read it, and the lane it was drawn in."""

    transfer: int
    direction: str
    lane: int
    begin: Moment
    end: Moment


class StepSpan(NamedTuple):
    """One step of a batch. A log tells when a step ended, and only bounds when it began.

    Attributes:
        kind: what the step computed, or that it published nothing.
        begin: the latest moment that the step cannot have begun before.
        requests: whose rows it wrote; of a discarded step, whose leases it opened.
        rows: rows written; published: output tokens.
        read: line of the ``step.read`` that names what it opened; 0 if there is none.
        transfers: those that it was the first to read for one of its leases.
    """

    step: int
    kind: StepKind
    begin: Moment
    end: Moment
    requests: tuple[int, ...]
    rows: int
    published: int
    read: int
    transfers: tuple[Arrival, ...]
    reason: str = ""


class Mark(NamedTuple):
    """Layers of a transfer made progress; without components, all of the plan's did."""

    at: Moment
    kind: MarkKind
    layers: LayerRun
    components: tuple[str, ...]


class TransferSpan(NamedTuple):
    """One movement, from its plan to its end, and on until no copy touches its pages.

    ``lane`` is free of other transfers of the same direction meanwhile. ``ended`` is ``done``,
    ``failed``, ``revoked``, ``late``, or ``open`` if the log stops before.
    """

    plan: TransferPlan
    lane: int
    begin: Moment
    end: Moment
    settled: Moment
    ended: str
    reason: str
    marks: list[Mark]


class PhaseSpan(NamedTuple):
    """What a request was at between two of its transitions; ``ended`` says which came next."""

    request: int
    phase: Phase
    begin: Moment
    end: Moment
    ended: str


class LeaseSpan(NamedTuple):
    """One right to pages; ``runs`` has those it reserved later too, each with its line."""

    lease: int
    mode: str
    tier: str
    request: int
    transfer: int
    begin: Moment
    end: Moment
    is_open: bool
    runs: list[tuple[int, PageRun]]


class WaitSpan(NamedTuple):
    """Compute stood still for a layer; ``wait_us`` is None where nothing told how long."""

    begin: Moment
    end: Moment
    wait_us: int | None
    layer: int
    components: tuple[str, ...]
    transfer: int
    step: int
    owner: str
    requests: tuple[int, ...]
    is_open: bool


class TierCounts(NamedTuple):
    """A tier's pages by state; they sum to ``total``, and each counts once."""

    tier: str
    total: int
    free: int
    cached: int
    leased: int
    quarantined: int


class Canvas(Protocol):
    """Takes spans as they end, and every event before what it ends."""

    def event(self, event: Event, at: Moment) -> None:
        """Take any line of the log."""
        ...

    def step(self, span: StepSpan) -> None:
        """Take a step."""
        ...

    def transfer(self, span: TransferSpan) -> None:
        """Take a transfer that has settled, or that the log leaves unsettled."""
        ...

    def phase(self, span: PhaseSpan) -> None:
        """Take a phase of a request."""
        ...

    def lease(self, span: LeaseSpan) -> None:
        """Take a lease."""
        ...

    def wait(self, span: WaitSpan) -> None:
        """Take a wait at the gate."""
        ...

    def counts(self, counts: TierCounts, at: Moment) -> None:
        """Take the new counts of a tier."""
        ...
