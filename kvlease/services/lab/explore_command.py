"""`kvlease race --explore`: explore the core scenarios, or replay one run, and report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
from rich.console import Console
from rich.table import Table

from kvlease.services.lab.explore import ExploreResult, Failure, Outcome, explore, run_once
from kvlease.services.lab.explore_options import ExploreOptions
from kvlease.services.lab.scenarios import SCENARIOS
from kvlease.services.lab.schedule import Replay, choices_of, choices_text, policy_of
from kvlease.services.outputs import whole_file

Progress = Callable[[str, int], None]
"""Hears of a scenario's name and of how many of its schedules have been run."""


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run that went wrong, and the command that replays it exactly."""

    seed: int
    kind: str
    problem: str
    choices: str
    command: str


class ScenarioReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the exploration of one scenario did and found."""

    scenario: str
    schedules: int
    distinct: int
    steps: int
    wall_s: float
    schedules_per_minute: int
    failures: list[FailureReport]
    unsteady: list[str]


class ExploreReport(msgspec.Struct, frozen=True, kw_only=True):
    """All scenarios of one command."""

    scenarios: list[ScenarioReport]

    @property
    def is_clean(self) -> bool:
        """Whether nothing failed and every repeated run was the same."""
        return not any(one.failures or one.unsteady for one in self.scenarios)


def run_explore(
    options: ExploreOptions, progress: Progress = lambda _name, _count: None
) -> ExploreReport:
    """Explore, or replay the one run that ``options.choices`` names. Not inside a Trio run.

    Raises BadInput when the policy or the choices cannot be read, or the log cannot be written.
    """
    if options.choices is not None:
        return ExploreReport(scenarios=[_replay(options, options.choices)])
    policy = policy_of(options.policy)
    reports: list[ScenarioReport] = []
    for name in options.scenarios:
        seeds = range(options.seed, options.seed + options.schedules)
        result = explore(
            SCENARIOS[name], seeds=seeds, policy=policy, progress=partial(progress, name)
        )
        reports.append(_report_of(result))
    return ExploreReport(scenarios=reports)


def _report_of(result: ExploreResult) -> ScenarioReport:
    return ScenarioReport(
        scenario=result.scenario,
        schedules=result.schedules,
        distinct=result.distinct,
        steps=result.steps,
        wall_s=round(result.wall_s, 3),
        schedules_per_minute=round(result.schedules_per_minute),
        failures=[_failure_of(failure) for failure in result.failures],
        unsteady=list(result.unsteady),
    )


def _failure_of(failure: Failure) -> FailureReport:
    return FailureReport(
        seed=failure.seed,
        kind=failure.problem.kind,
        problem=failure.problem.text,
        choices=choices_text(failure.choices),
        command=failure.command,
    )


def _replay(options: ExploreOptions, text: str) -> ScenarioReport:
    """Run the recorded choices once, keeping the log if asked for."""
    (name,) = options.scenarios
    chooser = Replay(choices_of(text))
    outcome = run_once(SCENARIOS[name], options.seed, chooser)
    if options.log is not None:
        _write_log(options.log, outcome)
    failures: list[Failure] = []
    if outcome.problem is not None:
        made = outcome.trace.choices
        failures.append(Failure(name, options.seed, outcome.problem, made, len(made), replays=True))
    steps = len(outcome.trace.order)
    return _report_of(ExploreResult(name, 1, 1, steps, 0.0, tuple(failures), ()))


def _write_log(path: str, outcome: Outcome) -> None:
    encode = msgspec.json.Encoder().encode
    with whole_file(path) as file:
        file.writelines(encode(event) + b"\n" for event in outcome.events)


def print_explore(report: ExploreReport, console: Console) -> None:
    """Print one row a scenario, then what was found, each with its command."""
    table = Table(box=None, pad_edge=False)
    table.add_column("scenario")
    for heading in ("schedules", "different", "steps", "a minute", "failures"):
        table.add_column(heading, justify="right")
    for one in report.scenarios:
        counts = (one.schedules, one.distinct, one.steps, one.schedules_per_minute)
        cells = [f"{count:,}" for count in (*counts, len(one.failures))]
        table.add_row(one.scenario, *cells)
    console.print(table)
    for one in report.scenarios:
        for failure in one.failures:
            console.print(f"{one.scenario}, seed {failure.seed}: {failure.problem}", markup=False)
            console.print(f"  {failure.command}", markup=False, soft_wrap=True)
        for sentence in one.unsteady:
            console.print(sentence, markup=False)
