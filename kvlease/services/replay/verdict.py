"""What a replay finds: structs with the contract's keys (DESIGN 9), written as JSON as they are."""

from typing import Literal

import msgspec

Decision = Literal["clean", "violations", "cannot tell"]


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One rule broken in one place.

    Attributes:
        rule: ``R1`` to ``R12``, or ``R14`` where the lines contradict each other.
        what: one sentence.
        request, lease, transfer, step, layer, component: whom it concerns, where that is known.
        lines: numbers (from 1) of the lines that show it: the shortest chain, in their order.
    """

    rule: str
    what: str
    lines: list[int]
    request: int | None = None
    lease: int | None = None
    transfer: int | None = None
    step: int | None = None
    layer: int | None = None
    component: str | None = None


class Doubt(msgspec.Struct, frozen=True):
    """Why some rules could not be decided; ``times`` it happened, first at ``line``."""

    rules: list[str]
    why: str
    line: int
    times: int = 1


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """A request that had not ended when the log did, or that outlived its deadline.

    Attributes:
        waits_for: what it waited for when it was last heard of.
        owner: who answers for the deadline of that wait.
        deadline_ns: that deadline on the log's clock; 0 if it had none.
        overdue_s: seconds by which the log goes on behind the deadline; negative before it.
        lines: its submission, its admission and its wait, as far as there are any.
    """

    request: int
    waits_for: str
    owner: str
    deadline_ns: int
    overdue_s: float | None
    lines: list[int]
    transfer: int | None = None
    layer: int | None = None
    components: list[str] = []


class StallShare(msgspec.Struct, frozen=True, kw_only=True):
    """How long steps really stood still for one layer of what came from one tier."""

    layer: int
    tier: str
    waits: int
    total_ms: float
    longest_ms: float


class SlowTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """One of the transfers that took longest from plan to end."""

    transfer: int
    direction: str
    ended: str
    ms: float
    nbytes: int
    pages: int
    lines: list[int]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole log shows.

    Attributes:
        verdict: ``clean`` only if every rule was decided and none was broken.
        violations: the first ones of each rule; ``violation_counts`` has all, by rule.
        cannot_tell: what could not be decided, and why.
        early_reads: openings let through before their bytes had landed, counted by (step, lease,
            layer, component); null where the log does not tell when bytes land.
        stalls: exposed stall by layer and tier, the longest in all first.
        is_closed: whether the log was closed in order.
        span_s: seconds from the first line to the last, on the log's clock.
        wall_s: seconds that the replay took.
    """

    verdict: Decision
    violations: list[Violation]
    violation_counts: dict[str, int]
    cannot_tell: list[Doubt]
    early_reads: int | None
    stuck: list[Stuck]
    stalls: list[StallShare]
    slowest_transfers: list[SlowTransfer]
    events: int
    event_counts: dict[str, int]
    unknown_events: int
    unknown_types: dict[str, int]
    is_closed: bool
    span_s: float
    wall_s: float


class Difference(msgspec.Struct, frozen=True):
    """The first event that came out differently: the log's line, and what each run has there."""

    line: int
    recorded: str
    rerun: str


class RerunReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a run compares with its recording.

    Attributes:
        answers, same_answers: requests with an end in the log; those with the same one again.
        different: requests whose answer is not the same, in their order.
        is_exact: whether events were compared one by one, times included.
    """

    answers: int
    same_answers: int
    different: list[int]
    first_difference: Difference | None
    is_exact: bool
