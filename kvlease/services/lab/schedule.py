"""Trio's scheduler in our hands: one task a pass, chosen by a policy, recorded and replayed.

Trio runs every runnable task once a pass, in whatever order, so an interleaving in which one task
takes two steps while another that could run takes none is out of reach, whatever the seed. Here a
pass runs one task; the rest wait in the order in which they became runnable. Taking the first of
them is the default, and the numbers of all others taken are the *choices* that replay a run.

This is the one module that knows Trio's private names: the flag and the random number generator
that Hypothesis uses to make batches deterministic, and the queue of runnable tasks. It holds for
runs without threads, under a mock clock; `check_private_names` says whether it fits this Trio.
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol, cast, final

import trio
import trio.testing
from attrs import define, field, frozen
from trio._core import _run as trio_run

from kvlease.errors import BadInput, InternalError

MAX_STEPS: Final = 50_000
"""Steps of one run; a run that takes more goes round in circles."""
_LONG_RUN: Final = 100_000_000
"""Steps of a whole workload under the default schedule."""
_IDLE_PASSES: Final = 100
"""Passes in a row with nothing to run. A jump of the mock clock takes two of them."""

Choices = dict[int, int]
"""Decision number to the place taken in the queue of runnable tasks; decisions for place 0, the
task that has waited longest, are left out. Only passes with two or more tasks decide anything."""


NO_CHOICES: Final = "none"
"""How a command line says that every decision is the default."""


class Chooser(Protocol):
    """Decides a run's schedule, one task at a time."""

    def choose(self, tasks: Sequence[str]) -> int:
        """Return the place of the task to run; ``tasks`` are two or more, longest waiting first."""
        ...


@final
class RandomWalk:
    """Every runnable task is as likely as any other, at each decision."""

    def __init__(self, seed: int) -> None:
        """Draw from a generator of its own."""
        self._rng = random.Random(seed)

    def choose(self, tasks: Sequence[str]) -> int:
        """Return a random place."""
        return self._rng.randrange(len(tasks))


@final
class Priorities:
    """PCT: random priorities, and the highest runs; at ``depth - 1`` decisions the running falls.

    A bug that needs ``depth`` things in order, among n tasks and k decisions, is found with a
    chance of at least 1 / (n * k ** (depth - 1)) a run.
    """

    def __init__(self, seed: int, depth: int, expected_decisions: int) -> None:
        """Draw the points of change over so many decisions."""
        self._rng = random.Random(seed)
        self._priority: dict[str, float] = {}
        points = range(max(1, expected_decisions))
        self._changes = {self._rng.choice(points) for _ in range(depth - 1)}
        self._taken = 0

    def choose(self, tasks: Sequence[str]) -> int:
        """Return the place of the highest priority, after a change if one is due."""
        for name in tasks:
            if name not in self._priority:
                self._priority[name] = 1 + self._rng.random()
        best = max(range(len(tasks)), key=self._rank(tasks))
        if self._taken in self._changes:
            self._priority[tasks[best]] = -float(self._taken)
            best = max(range(len(tasks)), key=self._rank(tasks))
        self._taken += 1
        return best

    def _rank(self, tasks: Sequence[str]) -> Callable[[int], float]:
        return lambda place: self._priority[tasks[place]]


Policy = Callable[[int, int], Chooser]
"""Makes the chooser of one run from its seed and the decisions that a run is expected to take."""


def random_walk(seed: int, _expected: int) -> Chooser:
    """Policy: every runnable task is as likely as any other."""
    return RandomWalk(seed)


def pct(depth: int) -> Policy:
    """Return the policy of random priorities that change ``depth - 1`` times a run."""
    return lambda seed, expected: Priorities(seed, depth, expected)


def mixed(seed: int, expected: int) -> Chooser:
    """Policy: a random walk for one seed in four, priorities of depth 2, 3 and 5 for the others."""
    depth = (0, 2, 3, 5)[seed % 4]
    return Priorities(seed, depth, expected) if depth else RandomWalk(seed)


def policy_of(text: str) -> Policy:
    """Return the policy that a command line names; raises BadInput."""
    match text.split(":"):
        case ["mixed"]:
            return mixed
        case ["random"]:
            return random_walk
        case ["pct", depth] if depth.isdecimal() and 1 <= int(depth) <= 100:
            return pct(int(depth))
        case _:
            raise BadInput(f"policy {text} is not known; give mixed, random, or pct:N, N its depth")


def choices_of(text: str) -> Choices:
    """Read choices as `choices_text` writes them; raises BadInput."""
    choices: Choices = {}
    for pair in text.split(",") if text != NO_CHOICES else ():
        decision, colon, place = pair.partition(":")
        if not (colon and decision.isdecimal() and place.isdecimal()):
            raise BadInput(
                f"choices are written DECISION:PLACE,..., or {NO_CHOICES}; '{pair}' is not one"
            )
        choices[int(decision)] = int(place)
    return choices


def choices_text(choices: Choices) -> str:
    """Write choices for a command line."""
    pairs = (f"{decision}:{place}" for decision, place in sorted(choices.items()))
    return ",".join(pairs) or NO_CHOICES


@final
class Replay:
    """Takes recorded choices; the default where there is none, or where it no longer fits."""

    def __init__(self, choices: Choices) -> None:
        """Borrow the choices."""
        self._choices = choices
        self._taken = 0

    def choose(self, tasks: Sequence[str]) -> int:
        """Return the recorded place."""
        place = self._choices.get(self._taken, 0)
        self._taken += 1
        return place if place < len(tasks) else 0


@define
class Trace:
    """What a run did: its choices, and the names of the tasks in the order of their steps."""

    choices: Choices = field(factory=Choices)
    decisions: int = 0
    order: list[str] = field(factory=list[str])
    stuck: str | None = None
    """Why the run was broken off, if it could not go on."""

    def digest(self, *evidence: bytes) -> str:
        """Hash the order of tasks, with more evidence; equal for equal runs in any process."""
        whole = hashlib.blake2b("\n".join(self.order).encode(), digest_size=16)
        for one in evidence:
            whole.update(one)
        return whole.hexdigest()


class _Stuck(Exception):
    """Carries a run that cannot go on out of Trio's loop."""


class _Task(Protocol):
    """What is read of a Trio task: the name it was started under."""

    @property
    def name(self) -> str: ...


@final
class _OneTaskAPass:
    """Stands in for Trio's generator; its ``shuffle`` leaves one task in the batch."""

    def __init__(self, chooser: Chooser, trace: Trace, max_steps: int) -> None:
        self._chooser = chooser
        self._trace = trace
        self._max_steps = max_steps
        self._waiting: dict[_Task, str] = {}
        self._names: dict[_Task, str] = {}
        self._numbers: dict[str, int] = {}
        self._idle = 0

    def shuffle(self, batch: list[_Task]) -> None:
        """Keep one task, and put the rest back on the queue."""
        if not batch:
            self._idle += 1
            if self._idle > _IDLE_PASSES:
                self._give_up("every task waits, and no deadline will wake one")
            return
        self._idle = 0
        waiting, trace = self._waiting, self._trace
        for task in batch:  # sorted by Trio in the order of their making
            if task not in waiting:
                waiting[task] = self._name(task)
        place = 0
        if len(waiting) > 1:
            place = self._chooser.choose(list(waiting.values()))
            if place:
                trace.choices[trace.decisions] = place
            trace.decisions += 1
        chosen = list(waiting)[place]
        trace.order.append(waiting.pop(chosen))
        if len(trace.order) > self._max_steps:
            self._give_up(f"{self._max_steps} steps were not enough")
        batch[:] = [chosen]
        if waiting:
            trio_run.GLOBAL_RUN_CONTEXT.runner.runq.extend(cast("list[trio_run.Task]", [*waiting]))

    def random(self) -> float:
        """Answer as the generator would that this one stands in for."""
        return 0.0

    def uniform(self, low: float, high: float) -> float:
        """As `random`; Trio asks for a real clock's offset."""
        return (low + high) / 2

    def _give_up(self, why: str) -> None:
        self._trace.stuck = why
        raise _Stuck(why)

    def _name(self, task: _Task) -> str:
        """Name a task by what it runs and its number among those: the same in every run."""
        name = self._names.get(task)
        if name is None:
            number = self._numbers[task.name] = self._numbers.get(task.name, 0) + 1
            name = task.name if number == 1 else f"{task.name} {number}"
            self._names[task] = name
        return name


@contextmanager
def one_task_a_pass(
    chooser: Chooser, trace: Trace, max_steps: int = MAX_STEPS
) -> Generator[None, None, None]:
    """Let ``chooser`` schedule the one Trio run inside the block; Trio is itself again after it.

    Raises InternalError when this Trio lacks a name that is needed.
    """
    check_private_names()
    names: dict[str, object] = trio_run.__dict__
    before = names["_ALLOW_DETERMINISTIC_SCHEDULING"], names["_r"]
    names["_ALLOW_DETERMINISTIC_SCHEDULING"] = True
    names["_r"] = _OneTaskAPass(chooser, trace, max_steps)
    try:
        yield
    finally:
        names["_ALLOW_DETERMINISTIC_SCHEDULING"], names["_r"] = before


def check_private_names() -> None:
    """Raise InternalError, with what to do, unless Trio has the private names this relies on."""
    names = vars(trio_run)
    missing = [
        name
        for name in ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r", "GLOBAL_RUN_CONTEXT", "Runner")
        if name not in names
    ]
    if not missing and "runq" not in trio_run.Runner.__annotations__:
        missing.append("Runner.runq")
    if missing:
        raise InternalError(
            f"trio {trio.__version__} has no {', '.join(missing)} in trio._core._run: schedules"
            " cannot be explored with it; read how its loop picks tasks now and mend"
            " kvlease/services/lab/schedule.py, or pin the trio before"
        )


@frozen
class Ran:
    """One scheduled run: what it did, and the error that ended it, if one did."""

    trace: Trace
    error: BaseException | None


def run_scheduled(
    body: Callable[[], Awaitable[None]], chooser: Chooser, max_steps: int = MAX_STEPS
) -> Ran:
    """Run a Trio program under a schedule and a mock clock that jumps when all wait.

    Errors are returned, not raised; KeyboardInterrupt and the like are raised.
    """
    trace = Trace()
    error: BaseException | None = None
    wreck: list[BaseException] = []
    clock = trio.testing.MockClock(autojump_threshold=0)
    with one_task_a_pass(chooser, trace, max_steps):
        try:
            trio.run(body, clock=clock)
        except trio.TrioInternalError as raised:
            if trace.stuck is None:
                raise
            wreck.append(raised)
        except (Exception, BaseExceptionGroup) as raised:
            if isinstance(raised, BaseExceptionGroup) and raised.subgroup(KeyboardInterrupt):
                raise
            error = raised
    if wreck:
        error = InternalError(f"the run cannot go on: {trace.stuck}")
        _sweep_up(wreck)
    return Ran(trace, error)


def run_in_order(body: Callable[[], Awaitable[None]]) -> None:
    """Run a long Trio program in virtual time under the default schedule; raise what it raises."""
    ran = run_scheduled(body, Replay(Choices()), _LONG_RUN)
    if ran.error is not None:
        raise ran.error


def _sweep_up(wreck: list[BaseException]) -> None:
    """Let the tasks of a run that was broken off go; what they say in dying is of no interest."""
    told, sys.unraisablehook = sys.unraisablehook, _say_nothing
    try:
        wreck.clear()
        gc.collect()
    finally:
        sys.unraisablehook = told


def _say_nothing(_error: object) -> None:
    pass
