"""Asking a CUDA event again and again without holding the interpreter, and timers that are on time.

A loop in Python would keep the interpreter's lock from the threads that launch work, or lose it to
them. ``lfind`` of the C library calls a comparison so many times, or until it says 0: with CUDA's
own query as the comparison that is a bounded wait in C, and no compiler is needed. Where the
library has no such function (glibc and musl have it), short sleeps do.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

_PR_SET_TIMERSLACK = 29
_QUERIES = 128
"""About 60 us of them; then other streams get their turn."""
_SLEEP_S = 5e-6


def spinner() -> Callable[[object], None]:
    """Return a function that waits for a ``torch.cuda.Event``, some 60 us at most."""
    version = (torch.version.cuda or "").partition(".")[0]
    try:
        query = ctypes.CDLL(f"libcudart.so.{version}").cudaEventQuery
        lfind = ctypes.CDLL(None).lfind
    except (OSError, AttributeError):
        return lambda _event: time.sleep(_SLEEP_S)
    compare = ctypes.cast(query, ctypes.c_void_p)
    lfind.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t, ctypes.c_void_p]
    lfind.restype = ctypes.c_void_p
    count = ctypes.c_size_t(_QUERIES)
    counted = ctypes.addressof(count)

    def spin(event: object) -> None:
        assert isinstance(event, torch.cuda.Event)
        # The key is the event; elements of no size all lie where the count does, and are not read.
        lfind(event.cuda_event, counted, counted, 0, compare)

    return spin


def fine_timers() -> None:
    """Let this thread's sleeps end on time: by default the system adds 50 us to each (Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
