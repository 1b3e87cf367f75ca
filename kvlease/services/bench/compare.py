"""One candidate beside its peers and beside itself, as one figure."""

from __future__ import annotations

from collections.abc import Mapping

from kvlease.services.bench.figure import Figure, PeerFigure, Spread
from kvlease.services.bench.graphs import GraphTimer, Work

_OURS, _AGAIN = "ours", "ours again"


def compared(
    about: tuple[str, str, str],
    ours: Work,
    peers: Mapping[str, Work],
    *,
    floor_us: float,
    target_us: float | None = None,
    timer: GraphTimer | None = None,
    note: str = "",
) -> Figure:
    """Time a candidate, itself once more, and its peers in turns; microseconds a call.

    Args:
        about: group, name and case.
        ours: our work.
        peers: the same work by others.
        floor_us: what the ceilings of this run allow; the roofline share is against it.
        target_us: the time to reach.
        timer: how to time; default cold, 20 calls a graph.
        note: what else a reader has to know.
    """
    spreads = (timer or GraphTimer()).time({_OURS: ours, _AGAIN: ours, **peers})
    mine = spreads[_OURS]
    return Figure(
        *about,
        unit="us",
        value=mine,
        roofline=floor_us / mine.median,
        peers=tuple(_beside(name, spreads[name], mine) for name in peers),
        noise=spreads[_AGAIN].median / mine.median,
        target=target_us,
        note=note,
    )


def _beside(name: str, spread: Spread, mine: Spread) -> PeerFigure:
    return PeerFigure(name, spread, spread.median / mine.median)
