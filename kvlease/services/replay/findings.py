"""What has been found so far: violations and doubts, bounded in memory and counted in full."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import final

from attrs import define, field

from kvlease.services.replay.verdict import Doubt, Violation

MAX_KEPT = 100
"""Violations of one rule that are kept whole; the rest is counted."""
ALL_RULES = tuple(f"R{number}" for number in range(1, 13))
_KNOWN_RULES = {*ALL_RULES, "R13", "R14"}


def rule_of(told: str) -> str:
    """Return the rule that a line says a guard kept; a name that is none contradicts the format."""
    return told if told in _KNOWN_RULES else "R14"


@final
@define
class LineMap:
    """Which line has which ``seq``: the same number behind a constant offset, between gaps."""

    seqs: list[int] = field(factory=lambda: [0])
    offsets: list[int] = field(factory=lambda: [0])

    def note(self, seq: int, line: int) -> None:
        """The event ``seq`` and those that follow stand on ``line`` and those that follow."""
        if line - seq != self.offsets[-1]:
            self.seqs.append(seq)
            self.offsets.append(line - seq)

    def line_of(self, seq: int) -> int:
        """Return the line of an event."""
        return seq + self.offsets[bisect_right(self.seqs, seq) - 1]


@final
@define
class Findings:
    """Collects violations and doubts; chains are given as ``seq`` and kept as line numbers."""

    lines: LineMap = field(factory=LineMap)
    violations: list[Violation] = field(factory=list[Violation])
    counts: Counter[str] = field(factory=Counter[str])
    early_reads: int = 0
    _doubts: dict[str, Doubt] = field(factory=dict[str, Doubt])

    def violate(
        self,
        rule: str,
        what: str,
        seqs: Iterable[int],
        *,
        request: int = 0,
        lease: int = 0,
        transfer: int = 0,
        step: int = 0,
        layer: int | None = None,
        component: str | None = None,
    ) -> None:
        """A rule was broken; ``seqs`` are the events that show it, 0 for one that never came."""
        self.counts[rule] += 1
        if self.counts[rule] > MAX_KEPT:
            return
        found = Violation(
            rule=rule,
            what=what,
            lines=sorted({self.lines.line_of(seq) for seq in seqs if seq > 0}),
            request=request or None,
            lease=lease or None,
            transfer=transfer or None,
            step=step or None,
            layer=layer,
            component=component,
        )
        self.violations.append(found)

    def doubt(self, why: str, line: int, rules: Iterable[str] = ALL_RULES) -> None:
        """Some rules cannot be decided, and why; the same reason is kept once and counted."""
        known = self._doubts.get(why)
        if known is None:
            self._doubts[why] = Doubt(list(rules), why, line)
        else:
            self._doubts[why] = Doubt(known.rules, why, known.line, known.times + 1)

    @property
    def doubts(self) -> list[Doubt]:
        """Why what could not be decided."""
        return list(self._doubts.values())
