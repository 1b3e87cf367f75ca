"""Counts of pages by state, for the ledger strips.

A picture is drawn of wrong logs too: what cannot be is counted as told, and judged elsewhere.
"""

from collections.abc import Iterator, Sequence
from typing import final

from kvlease.protocols.events import PageRun
from kvlease.services.replay.timeline_spans import TierCounts

FREE, HELD, SEALED, QUARANTINED = range(4)
MAX_PAGES = 1 << 24
"""Pages that a line names are believed up to here."""


@final
class TierLedger:
    """One tier's pages: a state and a count of leases each."""

    def __init__(self, name: str, total: int) -> None:
        """Start with ``total`` free pages; more appear as lines name them."""
        self.name = name
        self._state = bytearray()
        self._pins: list[int] = []
        self._totals = [0, 0, 0, 0]
        self._read = 0  # sealed pages that a lease names
        self._grow(total)

    def counts(self) -> TierCounts:
        """Count pages; a sealed page that no lease names is cached, any other held one leased."""
        free, held, sealed, quarantined = self._totals
        cached = sealed - self._read
        return TierCounts(self.name, len(self._state), free, cached, held + self._read, quarantined)

    def move(self, runs: Sequence[PageRun], state: int) -> None:
        """Bring pages into a state."""
        for page in self._pages(runs):
            before = self._state[page]
            self._state[page] = state
            self._totals[before] -= 1
            self._totals[state] += 1
            if self._pins[page]:
                self._read += (state == SEALED) - (before == SEALED)

    def pin(self, runs: Sequence[PageRun], by: int) -> None:
        """Count one lease more (1) or less (-1) that names these pages."""
        for page in self._pages(runs):
            before = self._pins[page]
            now = self._pins[page] = max(0, before + by)
            if self._state[page] == SEALED:
                self._read += (now > 0) - (before > 0)

    def _pages(self, runs: Sequence[PageRun]) -> Iterator[int]:
        """Go over the runs that can be pages, growing the tier to hold them."""
        for first, count, _ in runs:
            if first >= 0 and count > 0 and first + count <= MAX_PAGES:
                self._grow(first + count)
                yield from range(first, first + count)

    def _grow(self, total: int) -> None:
        more = min(total, MAX_PAGES) - len(self._state)
        if more > 0:
            self._state.extend(bytes(more))
            self._pins.extend([0] * more)
            self._totals[FREE] += more
