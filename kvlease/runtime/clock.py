"""Clocks behind the `Clock` port: the wall's, and the Trio run's (real or mocked).

Nothing here sleeps; waiting for a time is Trio's business.
"""

import time
from typing import final

import trio


@final
class MonotonicClock:
    """Seconds of the process's monotonic clock; usable from any thread, with or without Trio."""

    __slots__ = ()

    def now(self) -> float:
        """Return seconds since an arbitrary start."""
        return time.perf_counter()


@final
class TrioClock:
    """Seconds of the Trio run it was made in; usable from that run's worker threads too.

    Under a mocked clock it shows virtual time. Raises RuntimeError when made outside a Trio run.
    """

    __slots__ = ("_clock",)

    def __init__(self) -> None:
        """Bind to the current run's clock."""
        self._clock = trio.lowlevel.current_clock()

    def now(self) -> float:
        """Return seconds since the run's arbitrary start."""
        return self._clock.current_time()
