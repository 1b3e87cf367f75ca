"""A sleep whose end another thread may bring forward without waking the sleeper.

Who is told of something that is due in two milliseconds only goes to sleep again: being woken for
that costs a thread a quarter of all it does. Linux has timers that another thread may set anew; in
their absence the sleeper is woken and looks.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
import weakref
from queue import Empty, SimpleQueue
from typing import Protocol, final

_MONOTONIC = 1
_CLOSE_ON_EXEC = 0o2000000
_ABSOLUTE = 1
_AT_ONCE_S = 1e-9
"""A time long past; 0 would stop a timer."""


@final
class Alarm:
    """The alarm clock of one sleeper; its times are those of ``time.perf_counter``.

    The sleeper sets it, looks once more for what is new, and then waits. Who has something new
    shows it first and then brings the alarm forward. So one of them sees the other.
    """

    def __init__(self, timer: Timer | None = None) -> None:
        """Be unset; ``timer`` is the system's best if not given."""
        self.at = 0.0
        """When it goes off; 0 is at once, or that the sleeper is awake."""
        self._timer = timer or open_timer()
        self._lock = threading.Lock()

    def set(self, at: float) -> None:
        """Have it go off then, never if that is infinite; the sleeper's own."""
        with self._lock:
            self.at = at
            self._timer.set(at)

    def bring_forward(self, at: float) -> None:
        """Have it go off then if that is earlier; nothing happens while the sleeper is awake."""
        if at < self.at:
            with self._lock:
                if at < self.at:
                    self.at = at
                    self._timer.reset(at)

    def wait(self) -> float:
        """Sleep until it goes off; return when it should have: 0 if it was to be at once."""
        self._timer.wait()
        return self.at

    def unset(self) -> None:
        """Be awake."""
        self.at = 0.0


class Timer(Protocol):
    """What an alarm is made of; only `reset` is called by others than the sleeper."""

    def set(self, at: float) -> None:
        """Go off then."""
        ...

    def reset(self, at: float) -> None:
        """Go off then although somebody may be waiting already."""
        ...

    def wait(self) -> None:
        """Sleep until then."""
        ...


def open_timer() -> Timer:
    """Return the best that this system has."""
    try:
        return SystemTimer()
    except (OSError, AttributeError):
        return BellTimer()


@final
class SystemTimer:
    """A timer of Linux; raises OSError or AttributeError where there is none."""

    def __init__(self) -> None:
        """Open it."""
        if sys.platform != "linux":
            raise OSError("only Linux has such timers")
        # Both calls are shorter than letting the interpreter's lock go and getting it back.
        library = ctypes.PyDLL(None, use_errno=True)
        self._settime = library.timerfd_settime
        self._times = (ctypes.c_long * 4)()
        self._fd: int = library.timerfd_create(_MONOTONIC, _CLOSE_ON_EXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "no timer is left")
        weakref.finalize(self, os.close, self._fd)

    def set(self, at: float) -> None:
        """Go off then."""
        # The interval is zero; so is the time of a timer that is stopped.
        at = 0.0 if at == math.inf else max(at, _AT_ONCE_S)
        seconds = int(at)
        self._times[2], self._times[3] = seconds, int((at - seconds) * 1e9)
        if self._settime(self._fd, _ABSOLUTE, ctypes.byref(self._times), None):
            raise OSError(ctypes.get_errno(), "a timer could not be set")

    reset = set

    def wait(self) -> None:
        """Sleep until then."""
        os.read(self._fd, 8)


@final
class BellTimer:
    """A timer for every system: who resets it wakes the sleeper, who looks and sleeps on."""

    def __init__(self) -> None:
        """Ring at once."""
        self._at = 0.0
        self._bell: SimpleQueue[None] = SimpleQueue()

    def set(self, at: float) -> None:
        """Go off then."""
        self._at = at

    def reset(self, at: float) -> None:
        """Go off then although somebody may be waiting already."""
        self._at = at
        self._bell.put(None)

    def wait(self) -> None:
        """Sleep until then."""
        while (pause := self._at - time.perf_counter()) > 0.0:
            try:
                self._bell.get(timeout=None if pause == math.inf else pause)
            except Empty:
                return
