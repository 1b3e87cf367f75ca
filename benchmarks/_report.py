"""What the benchmarks share: medians with their spread, one table, one JSON file with versions."""

import argparse
import json
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
