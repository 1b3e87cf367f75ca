"""Load or recompute: which is quicker for a span, from what this engine has measured.

Two moving averages, of bytes loaded per second and of prompt tokens computed per second. Until both
exist a span is loaded. The choice and both estimates go into the log.
"""

from attrs import define, field, frozen

_WEIGHT = 0.2
"""Share of the newest measurement in the average: about the last ten count."""


@frozen
class Choice:
    """What to do with a span, and the seconds each way is estimated to take (0.0: unknown)."""

    load: bool
    load_s: float
    recompute_s: float


@define
class Estimates:
    """Measured rates; ``is_choosing`` False means a span on the host is always loaded."""

    is_choosing: bool = True
    bytes_per_s: float | None = field(default=None)
    tokens_per_s: float | None = field(default=None)
    request_s: float | None = field(default=None)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Learn from a finished load."""
        if nbytes and seconds > 0:
            self.bytes_per_s = _mix(self.bytes_per_s, nbytes / seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """Learn from a finished prefill step."""
        if tokens and seconds > 0:
            self.tokens_per_s = _mix(self.tokens_per_s, tokens / seconds)

    def served(self, seconds: float) -> None:
        """Learn from a request that ended, from submission to end."""
        self.request_s = _mix(self.request_s, seconds)

    def queue_s(self, waiting: int, at_once: int) -> float:
        """Return seconds until a queue of ``waiting`` should have moved on; at least 0.1."""
        return max(0.1, (self.request_s or 1.0) * waiting / at_once)

    def choose(self, nbytes: int, tokens: int) -> Choice:
        """Decide for a span of ``tokens`` whose load moves ``nbytes``."""
        load_s = nbytes / self.bytes_per_s if self.bytes_per_s else 0.0
        recompute_s = tokens / self.tokens_per_s if self.tokens_per_s else 0.0
        unknown = not (load_s and recompute_s)
        return Choice(unknown or not self.is_choosing or load_s <= recompute_s, load_s, recompute_s)


def _mix(average: float | None, value: float) -> float:
    return value if average is None else (1 - _WEIGHT) * average + _WEIGHT * value
