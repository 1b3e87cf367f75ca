"""One mutant's end: what was to notice it does, and replay sees it in the log of a run."""

import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kvlease.services.replay.checker import check_log
from tests.mutants.mutant import Guard, Mutant, Types, Witness
from tests.mutants.scratch import Ended, Scratch

LIMIT_S = 120.0
"""Of one command; a test that hangs with its guard gone has not failed, so it names no killer."""
_FAILED = 1
"""Of pytest: tests ran and some failed. Nothing else counts, least of all that it found no test."""


@dataclass(frozen=True)
class Seen:
    """What replay said of the logs of a play: the rule it named, in which log, and in what words.

    ``rule`` is None if it named none of those wanted; ``text`` then says what came instead.
    """

    rule: str | None
    text: str


@dataclass(frozen=True)
class Caught:
    """Whether a mutant was caught, and if not, what happened instead."""

    is_killed: bool
    why_not: str = ""


def pytest_command(*tests: str) -> list[str]:
    """Return the command that runs tests and says of each that failed which it was."""
    return ["-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", *tests]


def types_command(by: Types) -> list[str]:
    """Return the command that checks one file as strictly as the project does."""
    if by.checker == "mypy":
        return ["-m", "mypy", "--no-error-summary", "--cache-dir", ".mypy_cache", by.file]
    return ["-m", "basedpyright", "--pythonpath", sys.executable, by.file]


async def hunt(scratch: Scratch, mutant: Mutant) -> Caught:
    """Run what shall catch a mutant whose guard is gone from the scratch copy."""
    by = mutant.by
    if isinstance(by, Types):
        ended = await scratch.run(types_command(by), LIMIT_S)
        is_refused = ended.status == 1 and "error" in ended.output and by.file in ended.output
        return Caught(is_refused, f"{by.checker} ended with {ended.status}")
    ended = await scratch.run(pytest_command(by.test), LIMIT_S)
    if not _is_failure_of(ended, by.test):
        return Caught(False, _how_it_ended(ended))
    if isinstance(by, Guard) and by.error not in ended.output:
        return Caught(False, f"the test failed, but not with {by.error}")
    return Caught(True)


def _is_failure_of(ended: Ended, test: str) -> bool:
    lines = ended.output.splitlines()
    return ended.status == _FAILED and any(
        line.startswith((f"FAILED {test}", f"ERROR {test}")) for line in lines
    )


def _how_it_ended(ended: Ended) -> str:
    if ended.status is None:
        return f"nothing had failed after {LIMIT_S:g} s"
    return f"pytest ended with {ended.status}: {ended.output.strip().splitlines()[-1:]}"


async def see(scratch: Scratch, log: Witness) -> Seen:
    """Play in the scratch copy until replay, whose code is whole, names a rule that is wanted."""
    said: dict[str, int] = {}
    with TemporaryDirectory(prefix="kvlease-logs-") as folder:
        seeds = str(log.first), str(log.seeds)
        command = ["-m", "tests.mutants.plays", log.play, *seeds, folder]
        async with scratch.lines_of(command) as paths:
            async for path in paths:
                try:
                    verdict = check_log(path)
                except Exception as error:  # whatever it is, the other mutants have their turn
                    return Seen(None, f"{Path(path).stem}: replay ended with {error!r}")
                for violation in verdict.violations:
                    if violation.rule in log.rules:
                        return Seen(violation.rule, f"{Path(path).stem}: {violation.what}")
                for what in verdict.violation_counts or [verdict.verdict]:
                    said[what] = said.get(what, 0) + 1
    return Seen(None, f"{log.play}: replay said {said or 'nothing, for no log came'}")
