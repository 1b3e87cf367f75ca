"""Pins have lines of their own: each ends in its time, by its own tenant, and with a flush."""

import pytest

from kvlease.protocols import events as ev
from kvlease.services.replay.checker import check
from kvlease.services.replay.verdict import Verdict
from tests.replay.build import place_of, renumbered, story
from tests.replay.plant import change, put

SECOND = 10**9
DUE_S = 10**6
"""Of a pin that has all the time in the world: the story ends long before."""


def pinned(until_s: int = DUE_S) -> ev.PagePin:
    return ev.PagePin(pin=1, identity="root", pages=2, deadline_ns=until_s * SECOND)


def unpinned(identity: str = "root") -> ev.PageUnpin:
    return ev.PageUnpin(pin=1, reason="asked", identity=identity)


def judged(*new: ev.Event, last_s: int = 0) -> tuple[list[ev.Event], Verdict]:
    """The story with these lines behind its first freed pages, its end so many seconds later."""
    events = [*story().close_log().events]
    put(ev.PageFree, 0, *new)(events)
    events = renumbered(events)
    events[-1].t_ns += last_s * SECOND
    return events, check(events)


@pytest.mark.parametrize("ends", [True, False])
def test_a_pin_that_ends_or_has_time_left_is_clean(ends: bool) -> None:
    _, verdict = judged(pinned(), *([unpinned()] if ends else []))
    assert verdict.verdict == "clean"


@pytest.mark.parametrize(
    ("rule", "new", "shown_by"),
    [
        ("R10", [pinned(), unpinned("other")], [ev.PagePin, ev.PageUnpin]),
        ("R14", [unpinned()], [ev.PageUnpin]),
        ("R14", [pinned(), pinned()], [ev.PagePin, ev.PagePin]),
    ],
)
def test_what_a_pin_must_not_do_is_named(
    rule: str, new: list[ev.Event], shown_by: list[type[ev.Event]]
) -> None:
    events, verdict = judged(*new)
    first = place_of(events, shown_by[0]) + 1
    (found,) = verdict.violations
    assert (found.rule, found.lines) == (rule, list(range(first, first + len(shown_by))))


@pytest.mark.parametrize("last_s", [4, 6])
def test_a_pin_does_not_outlast_its_time(last_s: int) -> None:
    events, verdict = judged(pinned(0), last_s=last_s)
    lines = [place_of(events, ev.PagePin) + 1, len(events)]
    assert [(one.rule, one.lines) for one in verdict.violations] == [("R9", lines)] * (last_s > 5)


@pytest.mark.parametrize("last_s", [4, 6])
def test_a_pin_does_not_outlast_a_flush(last_s: int) -> None:
    """The flush ends it in the scheduler's next turn; a pin of after the flush is another."""
    events = [*story().close_log().events]
    end = [pinned(), ev.PageFlush(identity="new"), ev.PagePin(
        pin=2, identity="new", pages=1, deadline_ns=DUE_S * SECOND
    )]  # fmt: skip
    events[-1:-1] = end
    events = renumbered(events)
    events[-1].t_ns += last_s * SECOND
    first = place_of(events, ev.PagePin) + 1
    found = [(one.rule, one.lines) for one in check(events).violations]
    assert found == [("R10", [first, first + 1, len(events)])] * (last_s > 5)


@pytest.mark.parametrize(("told", "rules"), [(0, ["R11"]), (1, []), (-1, [])])
def test_a_pool_that_lost_a_pin_says_so_in_its_ledger(told: int, rules: list[str]) -> None:
    """A writer that does not count pins says -1."""
    events = [*story().close_log().events]
    put(ev.LogOpen, 0, pinned())(events)
    change(ev.PageLedger, 0, pins=told)(events)
    events = renumbered(events)
    found = check(events).violations
    assert [one.rule for one in found] == rules
    assert all(one.lines == [place_of(events, ev.PageLedger) + 1] for one in found)
