"""Waits with an owner, a name and an end (R9).

A deadline that passes says who was waited for, for what, and how long. This module does not know
what is being waited for.
"""

from collections.abc import Generator
from contextlib import contextmanager

import trio

from kvlease.errors import DeadlineExceeded


@contextmanager
def deadline(seconds: float, *, owner: str, request: str) -> Generator[trio.CancelScope]:
    """Bound the waits inside the block; yields the scope, whose deadline may be moved.

    Args:
        seconds: how long the block may take.
        owner: who has to bring the wait to its end.
        request: what is waited for.

    Raises:
        DeadlineExceeded: the time was up before the block ended. Cancellation from outside passes
            through unchanged.
    """
    with trio.move_on_after(seconds) as scope:
        yield scope
    if scope.cancelled_caught:
        raise DeadlineExceeded(
            f"{owner} did not answer '{request}' within {seconds:g} s; the wait was given up"
        )
