"""Show how far a run is: a bar on a terminal, a plain line every few seconds otherwise.

Everything goes to stderr; stdout is the report's. This module counts nothing itself.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from kvlease.services.driver import Tally

LINE_EVERY_S = 5.0
"""Seconds between two plain lines."""


@final
class Reporter:
    """One run's progress, phase by phase; a `Follower` of the driver."""

    def __init__(
        self,
        console: Console,
        bar: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Report on a console: in a bar that is running on it, or in lines of its own."""
        self.console = console
        self._bar = bar
        self._clock = clock
        self._task: TaskID | None = None
        self._phase = ""
        self._unit = ""
        self._total = 0
        self._started_s = self._last_line_s = 0.0

    def begin(self, phase: str, total: int, unit: str = "turns") -> None:
        """Start a phase of ``total`` turns, or of another unit, ending the one before."""
        self._phase, self._total, self._unit = phase, total, unit
        self._started_s = self._last_line_s = self._clock()
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(phase, total=total, note="")
        else:
            self._line(f"{phase}: {total:,} {unit}")

    def turn_ended(self, tally: Tally) -> None:
        """Show the tally of a run under way."""
        done = tally.turns + tally.failed_turns + tally.hung_sessions
        hits = tally.hit_device + tally.hit_host + tally.hit_storage + tally.hit_remote
        note = f"{hits / tally.prompt_tokens:.0%} cached" if tally.prompt_tokens else ""
        for count, word in ((tally.failed_turns, "failed"), (tally.hung_sessions, "hung")):
            note += f", {count} {word}" if count else ""
        self._show(done, note)

    def advance(self, done: int) -> None:
        """Show that so many of the phase's units are over."""
        self._show(done, "")

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _show(self, done: int, note: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, note=note)
            return
        now = self._clock()
        if now - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now
            comma = ", " if note else ""
            self._line(
                f"{self._phase}: {done:,} of {self._total:,} {self._unit}{comma}{note}, "
                f"{now - self._started_s:.0f} s"
            )

    def _line(self, line: str) -> None:
        self.say(f"kvlease: {line}")


@contextmanager
def open_reporter(console: Console) -> Generator[Reporter, None, None]:
    """Open progress on a console; the bar is taken away at the end of the block."""
    if not console.is_terminal:
        yield Reporter(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield Reporter(console, bar=bar)
