"""Each rule, with faults planted in a log that is valid without them, and their lines."""

import pytest

from kvlease.protocols import events as ev
from kvlease.services.replay.checker import check
from kvlease.services.replay.verdict import Verdict
from tests.replay import plants_end, plants_kept, plants_told, plants_use
from tests.replay.build import place_of, renumbered, story
from tests.replay.plant import Change, all_of, change, drop, landings, put

PLANTS = {
    **plants_use.PLANTS, **plants_end.PLANTS, **plants_told.PLANTS, **plants_kept.PLANTS
}  # fmt: skip


def judged(plant: Change) -> tuple[list[ev.Event], Verdict]:
    events = story().events
    plant(events)
    events = renumbered(events)
    return events, check(events)


def test_the_story_is_clean() -> None:
    verdict = check(story().events)
    assert (verdict.verdict, verdict.violations, verdict.cannot_tell) == ("clean", [], [])
    assert verdict.early_reads is None, "this log does not tell when bytes land"


def test_the_story_is_clean_with_honest_landings() -> None:
    _, verdict = judged(landings(None))
    assert (verdict.verdict, verdict.early_reads) == ("clean", 0)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found_where_it_is(name: str) -> None:
    plant = PLANTS[name]
    events, verdict = judged(plant.change)
    assert verdict.verdict == "violations"
    assert set(verdict.violation_counts) == {plant.rule} | plant.also
    lines = [place_of(events, kind, number) + 1 for kind, number in plant.shown_by]
    found = [
        (one.request, one.layer, one.component, one.lines)
        for one in verdict.violations
        if one.rule == plant.rule
    ]
    assert (plant.request, plant.layer, plant.component, lines) in found


@pytest.mark.parametrize("later_s", [1, 6])
def test_pages_do_not_stay_in_quarantine_for_nothing(later_s: int) -> None:
    """The engine may have no turn any more behind the last end; with seconds to spare it has."""
    events = story().events
    drop(ev.PageFree, 2)(events)
    events = renumbered(events)
    events[-1].t_ns += later_s * 10**9
    verdict = check(events)
    lines = [place_of(events, kind) + 1 for kind in (ev.PageQuarantine, ev.LogClose)]
    assert [(one.rule, one.lines) for one in verdict.violations] == [("R9", lines)] * (later_s > 5)


def _ran(*places: tuple[type[ev.Event], int]) -> Change:
    """A device that tells when it has come to the end of steps 1 to 4: before these events."""
    return all_of(
        change(ev.LogOpen, 0, ports={"tells": ["step.ran"]}),
        *(
            put(kind, number, ev.StepRan(step=step), before=True)
            for step, (kind, number) in enumerate(places, 1)
        ),
    )


def test_a_step_is_published_when_the_device_has_come_to_its_end() -> None:
    first = (ev.StepDone, 0), (ev.StepDone, 1), (ev.StepDone, 2)
    assert judged(_ran(*first, (ev.StepDone, 3)))[1].verdict == "clean"
    events, verdict = judged(_ran(*first, (ev.LeaseOpen, 6)))
    line = place_of(events, ev.StepDone, 3) + 1
    assert [(one.rule, one.lines) for one in verdict.violations] == [("R2", [line])]


def test_a_step_runs_when_what_it_reads_is_done() -> None:
    first = (ev.StepDone, 0), (ev.StepDone, 1), (ev.StepDone, 2)
    events, verdict = judged(_ran(*first, (ev.TransferLayerDone, 1)))
    lines = [
        place_of(events, kind, number) + 1
        for kind, number in ((ev.TransferPlan, 1), (ev.StepRan, 3), (ev.TransferLayerDone, 1))
    ]
    assert [(one.rule, one.lines) for one in verdict.violations] == [("R2", lines)]


def test_every_rule_has_planted_faults() -> None:
    rules = [plant.rule for plant in PLANTS.values()]
    assert all(rules.count(f"R{number}") >= 2 for number in range(1, 13))
