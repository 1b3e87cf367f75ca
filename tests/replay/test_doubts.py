"""What cannot be decided is said, and never called clean; what is wrong besides is still found."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import BadInput
from kvlease.protocols import events as ev
from kvlease.services.replay.checker import Checker, check
from kvlease.services.replay.reader import UnknownEvent
from tests.replay.build import Builder, head, place_of, renumbered, story

WHOLE = story().events
R9_ONLY = [["R9"]]


def rules_in_doubt(events: list[ev.Event]) -> list[list[str]]:
    verdict = check(events)
    assert verdict.verdict == "cannot tell"
    return [doubt.rules for doubt in verdict.cannot_tell]


@given(st.integers(1, len(WHOLE) - 1))
def test_no_line_can_go_missing_unseen(at: int) -> None:
    events = [msgspec.structs.replace(event) for event in WHOLE]
    del events[at]
    verdict = check(events)
    assert verdict.verdict == "cannot tell", "the numbers tell, and nothing is made up"
    assert verdict.cannot_tell


@given(st.data())
def test_no_two_lines_can_change_places_unseen(data: st.DataObject) -> None:
    events = [msgspec.structs.replace(event) for event in WHOLE]
    first = data.draw(st.integers(1, len(WHOLE) - 2))
    second = data.draw(st.integers(first + 1, len(WHOLE) - 1))
    events[first], events[second] = events[second], events[first]
    verdict = check(events)
    assert verdict.verdict == "cannot tell"


def test_a_log_without_its_first_line_is_refused() -> None:
    with pytest.raises(BadInput, match=r"log\.open"):
        check(WHOLE[1:])


@pytest.mark.parametrize("length", [1, 9, 24, 40, len(WHOLE) - 1])
def test_a_log_that_breaks_off_leaves_the_endings_open(length: int) -> None:
    assert rules_in_doubt(WHOLE[:length]) == R9_ONLY


def test_level_normal_decides_requests_alone() -> None:
    log = Builder().add(head(level="normal"))
    log.submit(1)
    log.admit(1)
    log.finish(1, 3)
    rules = rules_in_doubt(log.close_log().events)
    assert rules == [[f"R{n}" for n in range(1, 12) if n != 9]]


def test_level_normal_still_sees_a_request_that_never_ends() -> None:
    log = Builder().add(head(level="normal"))
    log.submit(1)
    verdict = check(log.close_log().events)
    assert verdict.violation_counts == {"R9": 1}


def test_a_gap_that_the_log_admits_is_a_doubt_and_not_a_fault() -> None:
    events = [msgspec.structs.replace(event) for event in WHOLE]
    at = place_of(events, ev.PageReserve)
    lost = events[at : at + 3]
    gap = ev.LogGap(first_seq=lost[0].seq, last_seq=lost[-1].seq, reason="the disk was too slow")
    gap.seq, gap.t_ns = lost[-1].seq, lost[-1].t_ns
    events[at : at + 3] = [gap]
    verdict = check(events)
    assert verdict.verdict == "cannot tell"
    [doubt] = verdict.cannot_tell
    assert "the disk was too slow" in doubt.why
    assert (doubt.line, len(doubt.rules)) == (at + 1, 12)


def test_faults_behind_a_gap_are_found_with_their_lines() -> None:
    events = [msgspec.structs.replace(event) for event in WHOLE]
    plan = place_of(events, ev.TransferPlan, 1)
    events[plan] = msgspec.structs.replace(events[plan], components=["latent", "window"])
    del events[3:6]
    verdict = check(events)
    assert verdict.verdict == "violations"
    assert [(one.rule, one.lines) for one in verdict.violations] == [("R5", [plan + 1 - 3])]
    assert verdict.cannot_tell


@pytest.mark.parametrize("name", ["page.zeroed", "rpc.paid"])
def test_unknown_types_are_counted(name: str) -> None:
    events = [msgspec.structs.replace(event) for event in WHOLE]
    events.insert(20, UnknownEvent(name=name))
    events.insert(30, UnknownEvent(name=name))
    verdict = check(renumbered(events))
    assert verdict.verdict == "cannot tell"
    assert (verdict.unknown_events, verdict.unknown_types) == (2, {name: 2})
    assert verdict.events == len(events)


def test_lost_lines_that_only_the_last_line_tells_of() -> None:
    events = [msgspec.structs.replace(event) for event in WHOLE]
    events[-1] = msgspec.structs.replace(events[-1], lost=3)
    assert len(rules_in_doubt(events)) == 1


def test_a_clock_that_falls_is_a_doubt_about_deadlines() -> None:
    events = [msgspec.structs.replace(event) for event in WHOLE]
    events[20].t_ns = 5
    assert rules_in_doubt(events) == R9_ONLY


def test_a_second_log_behind_the_first_is_not_judged_with_it() -> None:
    events = [*WHOLE, *(msgspec.structs.replace(event) for event in WHOLE)]
    verdict = check(events)
    assert verdict.verdict == "cannot tell"
    assert any("another log" in doubt.why for doubt in verdict.cannot_tell)


def test_a_request_past_its_deadline_breaks_a_rule_even_without_the_log_s_end() -> None:
    log = Builder().add(head())
    log.submit(1)
    log.submit(2)
    events = renumbered(log.events, tick_ns=4 * 10**9)
    verdict = check(events)
    assert verdict.violation_counts == {"R9": 2}
    assert [stuck.request for stuck in verdict.stuck] == [1, 2]
    assert [stuck.overdue_s for stuck in verdict.stuck] == [11.0, 11.0]


def test_a_request_that_ends_long_after_its_deadline_breaks_it_too() -> None:
    log = Builder().add(head(level="normal"))
    log.submit(1)
    log.finish(1, 1)
    verdict = check(renumbered(log.close_log().events, tick_ns=4 * 10**9))
    assert verdict.violation_counts == {"R9": 1}


def test_a_stuck_request_names_its_wait_and_who_owns_the_deadline() -> None:
    at = place_of(WHOLE, ev.LeaseWait)
    verdict = check(WHOLE[: at + 1])
    [stuck] = verdict.stuck
    assert (stuck.request, stuck.transfer, stuck.layer, stuck.owner) == (2, 2, 0, "loader")
    assert stuck.components == ["index_k", "latent"]
    submitted, admitted = (
        place_of(WHOLE, ev.RequestSubmitted, 1),
        place_of(WHOLE, ev.RequestAdmitted, 1),
    )
    assert stuck.lines == [submitted + 1, admitted + 1, at + 1]


def test_stalls_and_slow_transfers_are_told() -> None:
    verdict = check(WHOLE)
    [stall] = verdict.stalls
    assert (stall.layer, stall.tier, stall.waits, stall.total_ms) == (0, "host", 1, 0.07)
    assert [(one.transfer, one.ended) for one in verdict.slowest_transfers] == [
        (2, "done"),
        (1, "done"),
    ]


def test_what_is_kept_of_violations_is_bounded() -> None:
    log = Builder().add(head())
    log.add(*(ev.LeaseClose(lease=number) for number in range(500)))
    verdict = check(log.close_log().events)
    assert (len(verdict.violations), verdict.violation_counts) == (100, {"R14": 500})


def test_events_may_be_fed_one_by_one() -> None:
    checker = Checker()
    for line, event in enumerate(WHOLE, 1):
        checker.feed(event, line)
    fed, whole = checker.verdict(), check(WHOLE)
    assert msgspec.structs.replace(fed, wall_s=0.0) == msgspec.structs.replace(whole, wall_s=0.0)
