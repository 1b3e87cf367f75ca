"""What ends long after its deadline was waited for without an owner who kept it (R9)."""

import msgspec

from kvlease.protocols import events as ev
from kvlease.services.replay.checker import check
from tests.replay.build import place_of, renumbered, story

SECOND = 10**9


def with_deadlines(at_ns: int, transfer_ns: int) -> list[ev.Event]:
    """The story at one line a second, requests due at ``at_ns`` and the load at ``transfer_ns``."""
    events = [*story().close_log().events]
    load = place_of(events, ev.TransferPlan)
    for place, event in enumerate(events):
        if isinstance(event, ev.RequestSubmitted | ev.LeaseWait | ev.TransferPlan):
            due = transfer_ns if place == load else at_ns
            events[place] = msgspec.structs.replace(event, deadline_ns=due)
    return renumbered(events, tick_ns=SECOND)


def test_a_transfer_that_ends_long_after_its_deadline_is_named() -> None:
    events = with_deadlines(10**15, SECOND)
    planned, ended = place_of(events, ev.TransferPlan) + 1, place_of(events, ev.TransferDone) + 1
    verdict = check(events)
    (found,) = verdict.violations
    assert (found.rule, found.transfer, found.lines) == ("R9", 1, [planned, ended])
    assert "after its deadline" in found.what


def test_an_end_soon_after_the_deadline_is_in_time() -> None:
    events = with_deadlines(10**15, 10**15)
    ended = place_of(events, ev.TransferDone) + 1
    assert check(events).verdict == "clean"
    assert check(with_deadlines(10**15, (ended - 4) * SECOND)).verdict == "clean"
