"""Nurseries that hand a single error on as itself, not wrapped in a group.

This module does not know what the tasks do.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import cast

import trio


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside nested groups, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        # isinstance cannot name the type argument.
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from leaves(inner)
    else:
        yield error


def without_cancellation(error: BaseException) -> BaseException | None:
    """Return what is left of an error when cancellation is taken out; None if nothing is.

    One error that is left is returned bare; several stay a group.
    """
    rest = [leaf for leaf in leaves(error) if not isinstance(leaf, trio.Cancelled)]
    if len(rest) == 1:
        return rest[0]
    if not rest:
        return None
    return BaseExceptionGroup("several tasks failed", rest)


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
