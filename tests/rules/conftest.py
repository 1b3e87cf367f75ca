"""Shows at the end of the run what the explored worlds cost."""

from typing import cast

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each world that was explored: states, actions, time."""
    passed = cast("list[pytest.TestReport]", terminalreporter.stats.get("passed", []))
    lines = [value for test in passed for name, value in test.user_properties if name == "world"]
    if lines:
        terminalreporter.section("rules: worlds explored")
        for line in lines:
            terminalreporter.write_line(str(line))
