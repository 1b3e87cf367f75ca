"""Exploration: a scenario of the real runtime under thousands of schedules, each checked.

A seed decides everything that is left to chance: sizes, delays and faults, which the scenario
draws, and the schedule, which the policy draws. Whatever one run does, the same seed and choices
do again; runs that do not are reported, because then something outside has a say. A failure is
shrunk to the fewest choices that still show it, and says the command that replays it.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Final, final

import msgspec
import trio
from attrs import field, frozen

from kvlease.errors import leaves
from kvlease.protocols.events import (
    Event,
    LogOpen,
    RequestFailed,
    RequestFinished,
    RequestSubmitted,
)
from kvlease.runtime.event_log import EventLog
from kvlease.services.lab.schedule import (
    Choices,
    Chooser,
    Policy,
    Replay,
    Trace,
    choices_text,
    mixed,
    run_scheduled,
)
from kvlease.services.replay.checker import check as judge_log
from kvlease.units import RequestId

HORIZON_S: Final = 10_000.0
"""Virtual seconds after which a run counts as hung; far above every deadline of a scenario."""
SHRINK_RUNS: Final = 400
"""Runs spent on shrinking one failure."""
_COLLECT_EVERY: Final = 50

Check = Callable[[Sequence[Event]], str | None]
"""Judges a run by its log: returns what is wrong in one sentence, or None."""


@frozen
class Problem:
    """What went wrong in a run. ``kind`` is what a shrunk run must have in common with it."""

    kind: str
    text: str


@frozen
class Answer:
    """A whole answer that a scenario got, to be compared with the cold one."""

    request: RequestId
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    digests: tuple[bytes, ...]


@final
class World:
    """What a scenario is given for one run, and what it leaves behind for its judges."""

    def __init__(self, seed: int) -> None:
        """Start with nothing logged and nothing wrong."""
        self.seed = seed
        self.rng = random.Random(seed)
        self.log = EventLog(
            flush_every_s=math.inf,
            clock_ns=lambda: round(trio.current_time() * 1e9),
            threads=False,
        )
        self.events = self.log.remember()
        self.answers: list[Answer] = []
        self.problems: list[Problem] = []

    def complain(self, kind: str, text: str) -> None:
        """Say that something is wrong; the first complaint is reported."""
        self.problems.append(Problem(kind, text))


@frozen
class Scenario:
    """A small program of the runtime, with every size and delay drawn from ``world.rng``.

    ``play`` runs under the schedule; ``judge`` is called after it, outside of Trio.
    """

    name: str
    about: str
    play: Callable[[World], Awaitable[None]]
    judge: Callable[[World], None] = lambda _: None


def every_request_ends(events: Sequence[Event]) -> str | None:
    """Check R9 in the log: a request that was submitted has one terminal event."""
    ends: dict[int, int] = {}
    for event in events:
        match event:
            case RequestSubmitted():
                ends[event.request] = 0
            case RequestFinished() | RequestFailed():
                ends[event.request] = ends.get(event.request, 0) + 1
            case _:
                pass
    wrong = [
        f"request {request} ended {count} times" for request, count in ends.items() if count != 1
    ]
    return "; ".join(wrong) or None


def the_log_breaks_no_rule(events: Sequence[Event]) -> str | None:
    """Let `kvlease replay` judge the run, R1 to R12; a run without an engine has no such log."""
    if not (events and isinstance(events[0], LogOpen)):
        return None
    verdict = judge_log(events)
    if verdict.verdict == "clean":
        return None
    for violation in verdict.violations:
        return f"replay finds {violation.rule} broken: {violation.what} (lines {violation.lines})"
    return f"replay says {verdict.verdict}: {verdict.cannot_tell or verdict.stuck}"


CHECKS: tuple[Check, ...] = (every_request_ends, the_log_breaks_no_rule)
"""What every run's log is checked for."""


@frozen
class Outcome:
    """One run: what it did, and what was wrong with it, if anything was."""

    trace: Trace
    events: Sequence[Event] = field(repr=False)
    problem: Problem | None

    def digest(self) -> str:
        """Hash the order of tasks and the log; equal for equal runs in any process."""
        encode = msgspec.json.Encoder().encode
        return self.trace.digest(*(encode(event) for event in self.events))


def run_once(
    scenario: Scenario, seed: int, chooser: Chooser, checks: Iterable[Check] = CHECKS
) -> Outcome:
    """Run a scenario under one schedule and judge it."""
    world = World(seed)

    async def body() -> None:
        before = trio.lowlevel.current_statistics().tasks_living
        with trio.fail_after(HORIZON_S):
            await scenario.play(world)
        left = trio.lowlevel.current_statistics().tasks_living - before
        if left:
            world.complain("tasks left", f"{left} tasks were left behind")
        world.log.close()

    ran = run_scheduled(body, chooser)
    for event in world.events:
        if isinstance(event, LogOpen):
            event.started_at = ""  # the wall clock's, and no part of what happened
    if ran.error is not None:
        world.problems.insert(0, _problem_of(ran.error, ran.trace))
    else:
        scenario.judge(world)
        for check in checks:
            said = check(world.events)
            if said is not None:
                world.complain(getattr(check, "__name__", "check"), said)
    return Outcome(ran.trace, world.events, world.problems[0] if world.problems else None)


def _problem_of(error: BaseException, trace: Trace) -> Problem:
    leaf = next(iter(leaves(error)))
    if trace.stuck is not None:
        return Problem("hung", str(leaf))
    if isinstance(leaf, trio.TooSlowError):
        return Problem("hung", f"the run was not over after {HORIZON_S:g} virtual seconds")
    return Problem(type(leaf).__name__, f"{type(leaf).__name__}: {leaf}")


@frozen
class Failure:
    """A run that went wrong, with the fewest choices that were found to make it do so."""

    scenario: str
    seed: int
    problem: Problem
    choices: Choices
    num_drawn: int
    """How many choices the run had made that first failed."""
    replays: bool
    """Whether the same choices gave the same run again."""

    @property
    def command(self) -> str:
        """The command line that replays it exactly."""
        return (
            f"kvlease race --explore --scenario {self.scenario} --seed {self.seed}"
            f" --choices {choices_text(self.choices)}"
        )

    def __str__(self) -> str:
        """Say what failed and how to see it again."""
        shrunk = f"{len(self.choices)} of {self.num_drawn} choices are enough"
        return (
            f"{self.scenario}, seed {self.seed}: {self.problem.text} ({shrunk})\n  {self.command}"
        )


@frozen
class ExploreResult:
    """What an exploration did and found.

    ``unsteady`` holds a sentence for each run that the same choices did not repeat: then something
    that no seed decides has a say (a thread, a wall clock, the order of a set of addresses).
    """

    scenario: str
    schedules: int
    distinct: int
    """How many different orders of tasks there were."""
    steps: int
    wall_s: float
    failures: tuple[Failure, ...]
    unsteady: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Whether nothing failed and every repeated run was the same."""
        return not self.failures and not self.unsteady

    @property
    def schedules_per_minute(self) -> float:
        """Speed, shrinking and repeats included."""
        return 60 * self.schedules / self.wall_s if self.wall_s else 0.0


def explore(
    scenario: Scenario,
    *,
    seeds: Iterable[int],
    policy: Policy = mixed,
    checks: Sequence[Check] = CHECKS,
    max_failures: int = 1,
    repeat_every: int = 100,
    shrink_runs: int = SHRINK_RUNS,
    progress: Callable[[int], None] = lambda _: None,
) -> ExploreResult:
    """Run a scenario under one schedule a seed, until the seeds or ``max_failures`` are used up.

    Args:
        scenario: what to run.
        seeds: each decides sizes, delays, faults and the schedule of one run.
        policy: how schedules are drawn.
        checks: what each run's log is checked for.
        max_failures: stop after so many.
        repeat_every: every so many runs one is repeated, and must be the same (0: never).
        shrink_runs: most runs spent on making a failure smaller.
        progress: hears how many schedules have been run, after each.

    Not for use inside a Trio run: each schedule is one of its own.
    """
    began = time.perf_counter()
    failures: list[Failure] = []
    unsteady: list[str] = []
    orders: set[int] = set()
    schedules = steps = 0
    with _collected_between_runs() as tidy:
        expected = run_once(scenario, 0, Replay({}), ()).trace.decisions
        for seed in seeds:
            outcome = run_once(scenario, seed, policy(seed, expected), checks)
            schedules += 1
            steps += len(outcome.trace.order)
            orders.add(hash(tuple(outcome.trace.order)))
            if outcome.problem is not None:
                failures.append(_shrunk(scenario, seed, outcome, checks, shrink_runs))
            if repeat_every and (schedules - 1) % repeat_every == 0:
                unsteady += _differs(scenario, seed, outcome, checks)
            progress(schedules)
            tidy(schedules)
            if len(failures) >= max_failures:
                break
    wall_s = time.perf_counter() - began
    return ExploreResult(
        scenario.name, schedules, len(orders), steps, wall_s, tuple(failures), tuple(unsteady)
    )


@contextmanager
def _collected_between_runs() -> Generator[Callable[[int], None], None, None]:
    """Keep the collector out of the runs, where it would be a source of chance, and of time."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()

    def tidy(schedules: int) -> None:
        if schedules % _COLLECT_EVERY == 0:
            gc.collect()

    try:
        yield tidy
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def _differs(scenario: Scenario, seed: int, first: Outcome, checks: Sequence[Check]) -> list[str]:
    """Run it once more by its choices; say where the two runs part, if they do."""
    again = run_once(scenario, seed, Replay(first.trace.choices), checks)
    if again.digest() == first.digest():
        return []
    what = f"{scenario.name}, seed {seed}: the same choices gave another run"
    pairs = zip(first.trace.order, again.trace.order, strict=False)
    for step, (one, other) in enumerate(pairs):
        if one != other:
            return [f"{what}: step {step} ran {one}, then {other}"]
    encode = msgspec.json.encode
    for one_event, other_event in zip(first.events, again.events, strict=False):
        if encode(one_event) != encode(other_event):
            return [f"{what}: event {one_event.seq} was {one_event}, then {other_event}"]
    return [f"{what}: one is longer than the other"]


def _shrunk(
    scenario: Scenario, seed: int, first: Outcome, checks: Sequence[Check], max_runs: int
) -> Failure:
    """Drop choices, many at a time and then one by one, while the run still fails the same way."""
    assert first.problem is not None
    best, drawn = first, first.trace.choices
    replays = not _differs(scenario, seed, first, checks)
    runs, stride = 0, max(1, len(drawn) // 2)
    choices = sorted(drawn.items()) if replays else []
    while choices and runs < max_runs:
        start = 0
        before = len(choices)
        while start < len(choices) and runs < max_runs:
            fewer = choices[:start] + choices[start + stride :]
            outcome = run_once(scenario, seed, Replay(dict(fewer)), checks)
            runs += 1
            if outcome.problem is not None and outcome.problem.kind == first.problem.kind:
                best = outcome
                choices = sorted(outcome.trace.choices.items())
            else:
                start += stride
        if stride == 1 and len(choices) == before:
            break
        stride = max(1, stride // 2)
    assert best.problem is not None
    return Failure(scenario.name, seed, best.problem, best.trace.choices, len(drawn), replays)
