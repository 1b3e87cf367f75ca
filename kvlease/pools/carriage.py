"""What pools ask of whoever moves bytes between a device and its host: whole groups of layers.

Where there is none (on the CPU), copies go one component at a time. This module moves nothing.
"""

from typing import Literal, Protocol

import torch

from kvlease.pools.prefix_node import CacheTier

Direction = Literal["load", "store"]


class Move(Protocol):
    """The pages, or tails, of one transfer on their way."""

    def queue(self, group: int) -> None:
        """Queue at least this group of layers in the calling worker's stream, each group once."""
        ...


class Carrier(Protocol):
    """Moves records between one memory's tiers, and tails between rings and records.

    All numbers are int64 in host memory. A move keeps what it was given until it is dropped; it is
    made on any thread and queued on the worker of the stream that carries it.
    """

    def pages(self, direction: Direction, from_pages: torch.Tensor, to_pages: torch.Tensor) -> Move:
        """Return the move of pages [n] to the device or to the host."""
        ...

    def resume(self, tier: CacheTier, tail: int, slot: int, boundary: int) -> Move:
        """Return the move of a tier's kept tail into the rings of a slot."""
        ...

    def tails(self, direction: Direction, from_tails: torch.Tensor, to_tails: torch.Tensor) -> Move:
        """Return the move of kept tails [n] to the device or to the host."""
        ...

    def keep(self, slots: torch.Tensor, tails: torch.Tensor, boundaries: torch.Tensor) -> None:
        """Keep running sequences' state [K] at page boundaries, in the calling worker's stream."""
        ...


def carry(move: Move, group: int, nbytes: int) -> int:
    """Run one component's order: its group's move is queued by the first of them."""
    move.queue(group)
    return nbytes
