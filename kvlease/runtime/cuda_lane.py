"""When a device will pass the next point of a stream, guessed from how long the last ones took.

Only times: this module asks no device and wakes nobody.
"""

from __future__ import annotations

import math
from collections import deque
from typing import final

FINE_S = 5e-6
"""Between two looks when a point is due; with the system's own delays about 15 us."""
FIRST_LOOK_S = 200e-6
"""When to look again if nothing is known, and at the earliest where nobody waits."""
LATER_LOOKS = 0.5
"""Each later look comes after so much more of the time that has passed already."""
MARGIN_S = 15e-6
MARGIN_SHARE = 0.02
"""How much earlier and later than last time a point may be due."""
STEP_S = 40e-6
"""How much earlier to look the next time where the first look came too late."""
MEMORY = 6
"""Durations that are remembered: steps of a few kinds may alternate on one stream."""


@final
class Pace:
    """How long the last points of one stream took, and when to look for the next one.

    ``since`` is when the device began on the next point, as far as the host knows.
    """

    __slots__ = ("_last_look", "_recent", "since")

    def __init__(self) -> None:
        """Know nothing yet."""
        self.since = 0.0
        self._last_look = 0.0
        self._recent: deque[float] = deque(maxlen=MEMORY)

    def began(self, now: float) -> None:
        """Note that a point was recorded on a stream that had none to pass."""
        self.since = self._last_look = now

    def looked(self, now: float, num_passed: int) -> None:
        """Note what a look has found: so many points passed since the last one."""
        if num_passed:
            elapsed = now - self.since
            # It was passed at some time since the last look; if that is long ago, look earlier.
            step = max(STEP_S, elapsed * MARGIN_SHARE)
            guess = elapsed - min(now - self._last_look, step)
            self._recent.append(max(guess, 0.0) / num_passed)
            self.since = now
        self._last_look = now

    def next_look_s(self, now: float, num_ahead: int, *, may_hurry: bool) -> float:
        """Return how long to sleep before looking for the point ``num_ahead`` places ahead.

        0 places is the next point. If it must not hurry, it looks rarely and late.
        """
        elapsed = now - self.since
        pause = max(FIRST_LOOK_S, elapsed * LATER_LOOKS)
        if not may_hurry:
            return pause
        window = math.inf
        for each in self._recent:
            due = each * (num_ahead + 1)
            margin = MARGIN_S + due * MARGIN_SHARE
            if elapsed < due - margin:
                window = min(window, due - margin - elapsed)
            elif elapsed <= due + margin:
                return FINE_S
        # A look just before the window would cost more than it tells.
        return window if window < 2 * pause else pause
