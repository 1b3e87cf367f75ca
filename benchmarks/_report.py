"""What the benchmarks share: medians with their spread, one table, one JSON file with versions."""

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from attrs import asdict, define, field, frozen

from kvlease.version import __version__

_PACKAGES = ("torch", "trio", "transformers", "numpy", "msgspec")


@frozen
class Spread:
    """A median with its quartiles, and how many samples it is of."""

    median: float
    low: float
    high: float
    samples: int

    @staticmethod
    def of(samples: Sequence[float]) -> "Spread":
        """Take the quartiles of at least one sample."""
        if len(samples) == 1:
            return Spread(samples[0], samples[0], samples[0], 1)
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Spread(middle, low, high, len(samples))


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the narrowest interval that holds the median with 95 % certainty, or the whole range.

    Its ends are samples, so that nothing is assumed of how they scatter: fewer than k of n samples
    lie below the median no more often than fewer than k of n coins fall heads.
    """
    ordered, num = sorted(samples), len(samples)
    skipped, below = 0, 0.0
    while skipped < num // 2:
        below += math.comb(num, skipped) / 2**num
        if below > 0.025:
            break
        skipped += 1
    skipped = max(0, skipped - 1)
    return ordered[skipped], ordered[-1 - skipped]


@define
class Report:
    """Rows of one benchmark, printed as they come and written as one object at the end."""

    name: str
    about: dict[str, object]
    rows: list[dict[str, object]] = field(factory=list[dict[str, object]])
    missed: list[str] = field(factory=list[str])

    def __attrs_post_init__(self) -> None:
        """Print the headline."""
        print(f"{self.name}: " + ", ".join(f"{key} {value}" for key, value in self.about.items()))

    def row(self, what: str, spread: Spread, unit: str) -> None:
        """Print and keep one figure."""
        place = f"({spread.low:.4g} .. {spread.high:.4g}, {spread.samples} samples)"
        print(f"  {what:<58} {spread.median:>9.4g} {unit:<6} {place}", flush=True)
        self.rows.append({"what": what, "unit": unit, **asdict(spread)})

    def target(self, what: str, figure: float, bound: float, *, at_least: bool = False) -> None:
        """Print and keep whether a figure keeps to its bound."""
        is_met = figure >= bound if at_least else figure <= bound
        word = "at least" if at_least else "at most"
        print(f"  {what}: {figure:.4g}, {word} {bound:g} asked: {'met' if is_met else 'MISSED'}")
        self.rows.append({"target": what, "figure": figure, word: bound, "met": is_met})
        if not is_met:
            self.missed.append(what)

    def shown(
        self, what: str, samples: Sequence[float], bound: float, equal: Sequence[float]
    ) -> None:
        """Print and keep whether samples show that the median is at most ``bound``.

        ``equal`` are the same differences between runs that do not differ. Missed only if more is
        shown than those differ by. Where they scatter too widely to show either, that is what is
        said: more samples, or a quieter machine, decide it.
        """
        low, high = interval(samples)
        median, noise = statistics.median(samples), interval(equal)
        met = True if high <= bound else False if low > bound + max(map(abs, noise)) else None
        why = f"equal runs differ by {noise[0]:.3g} to {noise[1]:.3g}"
        words = {True: "met", False: "MISSED", None: f"not decided: {why}"}
        place = f"{median:.3g}, with 95 % certainty {low:.3g} to {high:.3g}"
        print(f"  {what}: {place}, at most {bound:g} asked: {words[met]}", flush=True)
        self.rows.append(
            {
                "target": what,
                "figure": median,
                "low": low,
                "high": high,
                "equal": noise,
                "at most": bound,
                "met": met,
            }
        )
        if met is False:
            self.missed.append(what)

    def finish(self, path: Path | None) -> int:
        """Write the JSON file if one was asked for; return the exit status."""
        if path is not None:
            found = {
                "benchmark": self.name,
                "about": self.about,
                "rows": self.rows,
                "versions": _versions(),
                "cores": len(os.sched_getaffinity(0)),
                "torch_threads": torch.get_num_threads(),
            }
            path.write_text(json.dumps(found, indent=2) + "\n")
        return 1 if self.missed else 0


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark takes."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=plain)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as one object")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="torch's threads inside one operation (default: %(default)s; with more, whoever else "
        "uses a core is measured too, because every operation waits for its slowest thread)",
    )
    return parser


def _versions() -> dict[str, str]:
    found = {"kvlease": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            print(f"{package} is not installed", file=sys.stderr)
    return found
