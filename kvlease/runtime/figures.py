"""What an engine counts by kind: how requests ended, and how long their tokens took.

Written where a request becomes terminal, once for each; this module does not know who reads it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import final

from attrs import frozen

from kvlease.runtime.request import Request

TTFT_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
TPOT_BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


@final
class Histogram:
    """Samples by upper bound, and their sum; what is above the last bound is a bucket too."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Start without samples; ``bounds`` rise."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a sample."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@final
class Figures:
    """Totals of one engine.

    Attributes:
        ended: requests by the reason of their end (`GenerateResult.finish_reason`).
        ttft_s: time to the first token, of requests that had one.
        tpot_s: mean time of a later token, of requests that had two.
    """

    def __init__(self) -> None:
        """Start at nothing."""
        self.ended: Counter[str] = Counter()
        self.ttft_s = Histogram(TTFT_BOUNDS_S)
        self.tpot_s = Histogram(TPOT_BOUNDS_S)

    def note_end(self, request: Request, reason: str) -> None:
        """Count a request that has just become terminal."""
        self.ended[reason] += 1
        result = request.result
        if result is None:
            return
        if result.ttft_s is not None:
            self.ttft_s.add(result.ttft_s)
        if result.tpot_s is not None:
            self.tpot_s.add(result.tpot_s)


@frozen
class StallTotal:
    """How often and how long compute stood still for one tier's transfers of one layer."""

    waits: int
    seconds: float
