"""One measured figure, and the table of many: what was measured, against what, and how sure.

This module measures nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

Unit = Literal["us", "ms", "s", "GB/s", "TFLOP/s", "tokens/s", "%", "x"]
_SMALLER_IS_BETTER: frozenset[Unit] = frozenset(("us", "ms", "s", "%"))


class Spread(msgspec.Struct, frozen=True):
    """A median with its extremes, and how many samples it is of."""

    median: float
    low: float
    high: float
    samples: int

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        """Describe at least one sample."""
        return Spread(statistics.median(samples), min(samples), max(samples), len(samples))

    def scaled(self, factor: float) -> Spread:
        """Return it in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.samples)

    def rate(self, amount: float) -> Spread:
        """Return ``amount`` over each time: the fastest time is the highest rate."""
        return Spread(amount / self.median, amount / self.high, amount / self.low, self.samples)


class PeerFigure(msgspec.Struct, frozen=True):
    """The same work done by somebody else, timed in turns with ours in the same run."""

    name: str
    value: Spread
    speed: float
    """Our speed over the peer's; above 1 ours is faster."""


class Figure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a benchmark.

    Attributes:
        group, name, case: what was measured, from coarse to fine.
        value: in ``unit``.
        roofline: the share of what the machine's own ceilings of the same run allow, 0 to 1.
        peers: others that did the same work in turns with it.
        noise: the same candidate timed against itself, as a ratio; what differs less is nothing.
        target: the figure asked for, in ``unit``; ``is_met`` says whether it was reached.
        note: what else a reader has to know.
    """

    group: str
    name: str
    case: str
    unit: Unit
    value: Spread
    roofline: float | None = None
    peers: tuple[PeerFigure, ...] = ()
    noise: float | None = None
    target: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the target was reached; None without one."""
        if self.target is None:
            return None
        if self.unit in _SMALLER_IS_BETTER:
            return self.value.median <= self.target
        return self.value.median >= self.target


class Skipped(msgspec.Struct, frozen=True):
    """A part of a benchmark that was not run, and why, in one sentence."""

    group: str
    why: str


_HEADINGS = ("group", "what", "case", "median", "unit", "min .. max", "roofline", "peer", "target")
_LEFT = 3


def _peer_cell(figure: Figure) -> str:
    cells = [
        f"{peer.name} {_short(peer.value.median)} ({peer.speed:.2f}x)" for peer in figure.peers
    ]
    if figure.noise is not None:
        cells.append(f"A/A {figure.noise:.2f}")
    return ", ".join(cells)


def _target_cell(figure: Figure) -> str:
    if figure.target is None:
        return ""
    return f"{_short(figure.target)} {'met' if figure.is_met else 'MISSED'}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cells(figure: Figure) -> tuple[str, ...]:
    value = figure.value
    return (
        figure.group,
        figure.name,
        figure.case,
        _short(value.median),
        figure.unit,
        f"{_short(value.low)} .. {_short(value.high)}",
        "" if figure.roofline is None else f"{figure.roofline:.0%}",
        _peer_cell(figure),
        _target_cell(figure),
    )


def table_lines(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield the figures as a table, headings first, in columns as wide as they need to be."""
    cells = [_HEADINGS, *(_cells(figure) for figure in figures)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        parts = (
            cell.ljust(width) if place < _LEFT or place >= len(line) - 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(parts).rstrip()
