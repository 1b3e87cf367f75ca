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
STEP_S = 10e-6
"""How much earlier than planned a point was passed, at a guess, if it and the one before it were
passed before the first look; each further time it is more than twice that."""
LOOKS_S = 30e-6
"""What may be spent on looking when a point is due, at least: where work is short, late is worse
than busy."""
FIXED_S = 35e-6
"""What a point costs in any case, with nothing to look for."""
WATCH_SHARE = 0.5
WATCH_LEAST_S = 15e-6
"""Of what is allowed, how long a point may be watched without sleeping before its usual time."""
RARE_EARLY, RARE_LATE = 8, 6
"""One duration of so many may be shorter, or longer, than is expected."""
MEMORY = 12
"""Durations that are remembered: steps of a few kinds may alternate on one stream."""
CLOSE_S = 20e-6
"""Looks that may follow each other faster than this are better made without sleeping: that costs
little more then, and sees at once."""
OVERDUE_SHARE = 0.5
"""How long to sleep where a point is overdue, of the time that it is overdue by."""
RISE, FALL = 0.2, 0.1
"""How fast it is learnt that sleeps end later than they did, and earlier: late costs more."""

Window = tuple[float, float, float]
"""From when to when a point is due, and how long to sleep between looks there, all in seconds."""


@final
class Pace:
    """How long the last points of one stream took, and when to look for the next one.

    ``since`` is when the device began on the next point, as far as the host knows; ``first_look_s``
    how long after that to look first, if it has nothing else to pass before (0 is at once).
    """

    __slots__ = (
        "_early_s", "_is_due", "_is_watched", "_last_look", "_late_s", "_num_missed", "_planned",
        "_recent", "_share", "_windows", "first_look_s", "since",
    )  # fmt: skip

    def __init__(self, share: float) -> None:
        """Know nothing yet; ``share`` of a core may be spent on looking."""
        self.since = self.first_look_s = 0.0
        self._is_due = False
        """Whether something is expected by the first look."""
        self._share = share
        self._early_s = 6 * LOOK_S / share
        self._late_s = LOOK_S / share
        self._last_look = 0.0
        self._planned: float | None = None
        """When a point began to be due, if the next look is the first one there."""
        self._num_missed = 0
        self._is_watched = False
        """Whether a point is seen at the moment that it is passed."""
        self._recent: deque[float] = deque(maxlen=MEMORY)
        self._windows: dict[int, list[Window]] = {}

    def began(self, now: float) -> None:
        """Note that a point was recorded on a stream that had none to pass."""
        self.since = self._last_look = now
        self._planned = self.first_look_s if self._is_due else None

    def looked(self, now: float, num_passed: int) -> None:
        """Note what a look has found: so many points passed since the last one."""
        if num_passed:
            self._recent.append(self._took(now) / num_passed)
            windows = self._expected(1)
            self._windows = {0: windows}
            begin = windows[0][0]
            self._is_due = begin < 2 * self._early_s
            self.first_look_s = begin if self._is_due else self._early_s
            self.since = now
        self._last_look, self._planned, self._is_watched = now, None, False

    def _took(self, now: float) -> float:
        """Return how long points took that a look has found passed.

        Where that was the first look it tells little: they were passed at any time before. To learn
        the time of the look would make the next one no earlier, and so for ever.
        """
        before, elapsed = self._last_look - self.since, now - self.since
        if self._is_watched or self._planned is None or elapsed - before < 2 * CLOSE_S:
            self._num_missed = 0
            return elapsed if self._is_watched else (before + elapsed) / 2
        step = STEP_S * (2.0 ** min(self._num_missed, 16) - 1.0)
        self._num_missed += 1
        return max(min(self._planned, elapsed) - step, before)

    def next_look_s(self, now: float, num_ahead: int) -> float:
        """Return how long to sleep before looking for the point ``num_ahead`` places ahead.

        0 places is the next point; 0 seconds is to watch it without sleeping.
        """
        elapsed = now - self.since
        windows = self._windows.get(num_ahead)
        if windows is None:
            windows = self._windows[num_ahead] = self._expected(num_ahead + 1)
        after = 0.0
        for begin, end, gap in windows:
            if elapsed < begin:
                # What is shorter than ever is seen at twice its time at the latest.
                rare = self._overdue_s(elapsed - after) if after else max(self._early_s, elapsed)
                # A look just before the window would cost more than it tells.
                if begin - elapsed >= 2 * rare:
                    return rare
                self._planned = begin
                return begin - elapsed
            if elapsed <= end:
                self._is_watched = not gap
                return gap
            after = end
        return self._overdue_s(elapsed - after)

    def rare_look_s(self) -> float:
        """Return how long to sleep where nobody waits."""
        return self._early_s

    def _overdue_s(self, overdue: float) -> float:
        return min(max(overdue * OVERDUE_SHARE, CLOSE_S), self._late_s)

    def _expected(self, num_points: int) -> list[Window]:
        """Return when so many points will be passed, by kind of work, the shortest kind first."""
        kinds: list[list[float]] = []
        for each in sorted(self._recent):
            if kinds and each < kinds[-1][-1] * SAME_KIND:
                kinds[-1].append(each)
            else:
                kinds.append([each])
        return [self._window([each * num_points for each in kind]) for kind in kinds]

    def _window(self, kind: list[float]) -> Window:
        # What comes once in a while tells of the machine, and would widen the window for all.
        num = len(kind)
        low, high = kind[num // RARE_EARLY], kind[num - 1 - num // RARE_LATE]
        margin = MARGIN_S + SPREAD_SHARE * (high - low) + MARGIN_SHARE * high
        allowed = self._share * high
        width = high - low + 2 * margin
        if width * LOOK_S >= CLOSE_S * max(allowed, LOOKS_S):
            gap = width * LOOK_S / max(allowed - FIXED_S, LOOKS_S)
            return low - margin, high + margin, min(gap, self._late_s)
        # What is passed before is seen at the beginning: late by less than watching would cost.
        watched = max(WATCH_SHARE * allowed - FIXED_S, WATCH_LEAST_S)
        return max(low - MARGIN_S, kind[num // 2] - watched), high + margin, 0.0


@final
class Oversleep:
    """How late sleeps of about one length end: what to end them earlier by."""

    __slots__ = ("_most_s", "late_s")

    def __init__(self, most_s: float) -> None:
        """Know nothing yet; sleeps that end later than ``most_s`` have other causes."""
        self._most_s = most_s
        self.late_s = 0.0

    def ended(self, late_s: float) -> None:
        """Note how late a sleep has ended."""
        change = min(late_s, self._most_s) - self.late_s
        self.late_s += change * (RISE if change > 0.0 else FALL)
