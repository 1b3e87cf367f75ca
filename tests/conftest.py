"""What every test shares: hypothesis profiles, and one thread for torch's small products."""

import os
import random
import signal
from typing import TYPE_CHECKING, Protocol, cast

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from kvlease.services.lab.explore import ExploreResult, Scenario

# Before torch is loaded: threads that wait for each other in every small product lose many times
# their work on a busy machine, and a suite is small products.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell lets its background jobs ignore interrupts, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine under load must not turn into a failing test: no deadlines.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the session test run at full size on demand; the suite runs it smaller."""
    parser.addoption("--sessions", type=int, default=16, help="sessions of the many-sessions test")
    parser.addoption("--full", action="store_true", help="tests at full size")
    parser.addoption("--fuzz-seconds", type=float, default=2.0, help="how long each fuzzer runs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of long tests: one that begins last leaves other cores without work."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests counted: states of the worlds explored, schedules that a bug stayed hidden.

    Here, as the process that prints runs no test, and reads no other conftest, on several cores.
    """
    passed = cast("list[pytest.TestReport]", terminalreporter.stats.get("passed", []))
    lines = [value for test in passed for name, value in test.user_properties if name == "counted"]
    if lines:
        terminalreporter.section("counted")
        for line in lines:
            terminalreporter.write_line(str(line))


@pytest.fixture
def num_sessions(request: pytest.FixtureRequest) -> int:
    """How many concurrent sessions the many-sessions test runs."""
    chosen: int = request.config.getoption("--sessions")
    return chosen


@pytest.fixture
def fuzz_seconds(request: pytest.FixtureRequest) -> float:
    """How long a fuzzer throws things at a door."""
    chosen: float = request.config.getoption("--fuzz-seconds")
    return chosen


@pytest.fixture
def is_full(request: pytest.FixtureRequest) -> bool:
    """Whether tests run at full size: longest prompts, largest worlds, most schedules."""
    chosen: bool = request.config.getoption("--full")
    return chosen


class ExploreSchedules(Protocol):
    """What the fixture `explore_schedules` gives."""

    def __call__(self, scenario: "Scenario", schedules: int = 60) -> "ExploreResult":
        """Run a scenario under so many schedules, or fail with how to replay what was found."""
        ...


@pytest.fixture
def explore_schedules(is_full: bool) -> ExploreSchedules:
    """Explore a scenario: seeds that are always the same, and a few fresh ones; more with --full.

    For plain functions, not for async ones: every schedule is a Trio run of its own.
    """

    def run(scenario: "Scenario", schedules: int = 60) -> "ExploreResult":
        from kvlease.services.lab.explore import explore

        fresh = random.SystemRandom().sample(range(1 << 20, 1 << 30), 4)
        seeds = [*range(2500 if is_full else schedules), *fresh]
        result = explore(scenario, seeds=seeds)
        assert result.is_clean, "\n".join([*map(str, result.failures), *result.unsteady])
        return result

    return run
