"""What pools ask of whoever moves bytes between a device and its host: whole groups of layers.

Where there is none (on the CPU), copies go one component at a time. This module moves nothing.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch

from kvlease.pools.prefix_node import CacheTier

Direction = Literal["load", "store"]
Numbers = Sequence[int]
Ends = tuple[Numbers, Numbers]
"""Pages, or slots of kept tails, at the source and at the destination, in the same order."""


class Resumed(NamedTuple):
    """A tier's kept ``tail`` that fills the rings of a sequence's ``slot``.

    ``boundary`` is where it was kept, in tokens.
    """

    tier: CacheTier
    tail: int
    slot: int
    boundary: int


class Move(Protocol):
    """The pages, or tails, of one transfer on their way."""

    def queue(self, groups: tuple[int, int]) -> None:
        """Queue groups of layers, first and one past the last, in the calling worker's stream.

        Each once; what has no groups moves with the first of them.
        """
        ...


class Carrier(Protocol):
    """Moves records between one memory's tiers, and tails between rings and records.

    A move copies the numbers that it is given (R13); it is made on any thread and queued on the
    worker of the stream that carries it.
    """

    def load(self, pages: Ends, tail: Resumed | None) -> Move:
        """Return the move of host pages, if any, and of a kept tail into the rings of its slot."""
        ...

    def store(self, pages: Ends) -> Move:
        """Return the move of pages to the host."""
        ...

    def tails(self, direction: Direction, tails: Ends) -> Move:
        """Return the move of kept tails [n] to the device or to the host."""
        ...

    def keep(self, slots: torch.Tensor, tails: torch.Tensor, boundaries: torch.Tensor) -> None:
        """Keep running sequences' state at page boundaries, in the calling worker's stream.

        Shapes: [K] int64 each, in host memory.
        """
        ...


def carry(moves: Sequence[Move], groups: tuple[int, int], nbytes: int) -> int:
    """Run an order: queue its groups of everything that moves."""
    for move in moves:
        move.queue(groups)
    return nbytes
