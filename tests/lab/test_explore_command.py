"""`kvlease race --explore` as data: options, report, replay, and what is refused."""

from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvlease.errors import BadInput
from kvlease.protocols.readiness import Readiness
from kvlease.services.lab.explore_command import ExploreReport, print_explore, run_explore
from kvlease.services.lab.explore_options import SCENARIO_NAMES, ExploreOptions
from kvlease.services.lab.scenarios import SCENARIOS


def text_of(report: ExploreReport) -> str:
    console = Console(width=120, record=True, quiet=False, file=None, force_terminal=False)
    with console.capture() as captured:
        print_explore(report, console)
    return captured.get()


def test_a_clean_exploration_is_reported() -> None:
    heard: list[tuple[str, int]] = []
    options = ExploreOptions(scenarios=("abort", "preempt"), schedules=3, seed=7)
    report = run_explore(options, lambda name, count: heard.append((name, count)))
    assert report.is_clean
    assert heard == [(name, count) for name in ("abort", "preempt") for count in (1, 2, 3)]
    assert [(one.scenario, one.schedules) for one in report.scenarios] == [
        ("abort", 3),
        ("preempt", 3),
    ]
    assert all(one.steps > 100 and one.schedules_per_minute > 0 for one in report.scenarios)
    assert "preempt" in text_of(report)
    assert msgspec.json.decode(msgspec.json.encode(report), type=ExploreReport) == report


def test_what_is_found_is_replayed_by_its_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def settle(*_: object) -> None:
        """Open a layer whatever has become of its bytes."""

    with monkeypatch.context() as patch:
        patch.setattr(Readiness, "settle", settle)
        report = run_explore(ExploreOptions(scenarios=("pressure",), schedules=50))
        assert not report.is_clean
        (failure,) = report.scenarios[0].failures
        assert failure.command in text_of(report)
        assert failure.command.startswith("kvlease race --explore --scenario pressure --seed ")
        log = tmp_path / "run.kvlog"
        options = ExploreOptions(
            scenarios=("pressure",), seed=failure.seed, choices=failure.choices, log=str(log)
        )
        (again,) = run_explore(options).scenarios[0].failures
        assert again == failure
    first, *_, last = log.read_bytes().splitlines()
    assert b'"log.open"' in first
    assert b'"log.close"' in last
    assert run_explore(options).is_clean, "without the planted bug the same run is well"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"scenarios": ("nothing",)}, "--scenario nothing is not known"),
        ({"schedules": 0}, "--schedules is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"choices": "none"}, "--choices replays one run"),
        ({"log": "x.kvlog"}, "--log with --explore"),
    ],
)
def test_options_that_mean_nothing_are_refused(fields: dict[str, object], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        ExploreOptions(**fields)  # type: ignore[arg-type]


def test_a_policy_or_choices_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(BadInput, match="policy best"):
        run_explore(ExploreOptions(policy="best"))
    with pytest.raises(BadInput, match="DECISION:PLACE"):
        run_explore(ExploreOptions(scenarios=("abort",), choices="1"))
    with pytest.raises(BadInput, match="cannot write"):
        run_explore(ExploreOptions(scenarios=("abort",), choices="none", log="nowhere/x"))


def test_the_flags_know_every_scenario() -> None:
    assert tuple(SCENARIOS) == SCENARIO_NAMES
    assert all(scenario.about for scenario in SCENARIOS.values())
