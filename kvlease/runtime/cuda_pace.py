"""When a device will pass the next point of a stream, guessed from how long the last ones took.

Looking costs the waiter's time whatever it sees, so it may look only so often: rarely where nothing
is expected, and as closely as its share of a core allows where a point is due. This module knows
times only: it asks no device and wakes nobody.
"""

from __future__ import annotations

from collections import deque
from typing import final

LOOK_S = 12e-6
"""What one look costs of the waiter's core, its sleep included (measured in a virtual machine)."""
MARGIN_S = 10e-6
MARGIN_SHARE = 0.0025
SPREAD_SHARE = 0.25
"""How much earlier and later than ever before a point may be due."""
SAME_KIND = 1.15
"""Durations that differ less are of one kind of work; those between two kinds are not expected."""
STEP_S = 40e-6
STEP_SHARE = 0.02
"""How much earlier to look the next time where the first look came too late."""
WATCH_S = 30e-6
"""What may be spent on looking when a point is due, at least: where work is short, late is worse
than busy."""
MEMORY = 6
"""Durations that are remembered: steps of a few kinds may alternate on one stream."""
CLOSE_S = 20e-6
"""Looks that may follow each other faster than this are better made without sleeping: that costs
little more then, and sees at once."""

Window = tuple[float, float, float]
"""From when to when a point is due, and how long to sleep between looks there, all in seconds."""


@final
class Pace:
    """How long the last points of one stream took, and when to look for the next one.

    ``since`` is when the device began on the next point, as far as the host knows.
    """

    __slots__ = ("_early_s", "_last_look", "_late_s", "_recent", "_share", "_windows", "since")

    def __init__(self, share: float) -> None:
        """Know nothing yet; ``share`` of a core may be spent on looking."""
        self.since = 0.0
        self._share = share
        self._early_s = 6 * LOOK_S / share
        self._late_s = LOOK_S / share
        self._last_look = 0.0
        self._recent: deque[float] = deque(maxlen=MEMORY)
        self._windows: dict[int, list[Window]] = {}

    def began(self, now: float) -> None:
        """Note that a point was recorded on a stream that had none to pass."""
        self.since = self._last_look = now

    def looked(self, now: float, num_passed: int) -> None:
        """Note what a look has found: so many points passed since the last one."""
        if num_passed:
            elapsed = now - self.since
            # It was passed at some time since the last look; if that is long ago, look earlier.
            late = min((now - self._last_look) / 2, max(STEP_S, elapsed * STEP_SHARE))
            self._recent.append(max(elapsed - late, 0.0) / num_passed)
            self._windows.clear()
            self.since = now
        self._last_look = now

    def next_look_s(self, now: float, num_ahead: int) -> float:
        """Return how long to sleep before looking for the point ``num_ahead`` places ahead.

        0 places is the next point; 0 seconds is to watch it without sleeping.
        """
        elapsed = now - self.since
        windows = self._windows.get(num_ahead)
        if windows is None:
            windows = self._windows[num_ahead] = self._expected(num_ahead + 1)
        for number, (begin, end, gap) in enumerate(windows):
            if elapsed < begin:
                rare = self._late_s if number else self._early_s
                # A look just before the window would cost more than it tells.
                return begin - elapsed if begin - elapsed < 2 * rare else rare
            if elapsed <= end:
                return gap
        return self._late_s

    def rare_look_s(self) -> float:
        """Return how long to sleep where nobody waits."""
        return self._early_s

    def _expected(self, num_points: int) -> list[Window]:
        """Return when so many points will be passed, by kind of work, the shortest kind first."""
        kinds: list[list[float]] = []
        for each in sorted(self._recent):
            if kinds and each < kinds[-1][-1] * SAME_KIND:
                kinds[-1].append(each)
            else:
                kinds.append([each])
        return [self._window(kind[0] * num_points, kind[-1] * num_points) for kind in kinds]

    def _window(self, low: float, high: float) -> Window:
        margin = MARGIN_S + SPREAD_SHARE * (high - low) + MARGIN_SHARE * high
        allowed = max(self._share * high, WATCH_S)
        width = high - low + 2 * margin
        gap = width * LOOK_S / allowed
        return low - margin, high + margin, 0.0 if gap < CLOSE_S else min(gap, self._late_s)
