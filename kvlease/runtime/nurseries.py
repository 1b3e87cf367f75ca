"""Nurseries that hand a single error on as itself, not wrapped in a group.

This module does not know what the tasks do.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import cast

import trio

from kvlease.errors import leaves


def without_cancellation(error: BaseException) -> BaseException | None:
    """Return what is left of an error when cancellation is taken out; None if nothing is.

    One error that is left is returned bare; several stay a group, the same one if it was whole.
    """
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        cancelled, rest = group.split(trio.Cancelled)
        if rest is None:
            return None
        if cancelled is None:
            rest = group  # `split` makes a copy even where there is nothing to split off
        inner = list(leaves(rest))
        return inner[0] if len(inner) == 1 else rest
    return None if isinstance(error, trio.Cancelled) else error


@asynccontextmanager
async def open_flat_nursery() -> AsyncGenerator[trio.Nursery]:
    """Open a nursery whose single error reaches the caller bare.

    Checkpoints: as `trio.open_nursery`. When errors and cancellation come together the errors win.
    """
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        rest = without_cancellation(group)
        if rest is None:
            raise
        raise rest from rest.__cause__


@contextmanager
def one_error() -> Generator[None]:
    """Let one error out of the block where several came together, the others as its notes.

    What is no ordinary error (an interrupt) goes first, then the one that came first: a user's own
    error must not be buried in a group because a worker was slow to stop.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        rest = without_cancellation(group)
        if rest is None:
            raise
        first, *others = sorted(leaves(rest), key=lambda error: isinstance(error, Exception))
        for other in others:
            first.add_note(f"at the same time: {other!r}")
        raise first from first.__cause__
