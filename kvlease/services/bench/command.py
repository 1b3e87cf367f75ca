"""`kvlease bench`: run groups of measurements, hand out figures as they come, and keep them.

This module does not know what the groups measure.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import IO

import msgspec
import torch

from kvlease.errors import BadInput
from kvlease.services.bench import ceilings
from kvlease.services.bench.ceilings import Ceilings
from kvlease.services.bench.figure import Figure, Skipped
from kvlease.services.bench_options import BenchOptions, Group
from kvlease.version import __version__

_PACKAGES = ("torch", "triton", "trio", "msgspec")
Measure = Callable[[Ceilings], Iterator[Figure | Skipped]]


def _groups() -> dict[Group, tuple[Measure, ...]]:
    """Return what measures each group; loads Triton, which only comes with a CUDA device."""
    from kvlease.services.bench import attention, copies, gate, indexer, overlap, planning, serving

    return {
        "copy": (copies.measure, planning.measure),
        "gate": (gate.measure,),
        "kernels": (attention.measure, indexer.measure),
        "overlap": (overlap.measure,),
        "serve": (serving.measure,),
    }


class BenchReport(msgspec.Struct):
    """Everything one call measured, with the machine that it was measured on."""

    machine: dict[str, str]
    ceilings: Ceilings | None = None
    figures: list[Figure] = []
    skipped: list[Skipped] = []


def bench(options: BenchOptions, say: Callable[[str], None]) -> BenchReport:
    """Measure the groups asked for; ``say`` hears what is under way.

    Raises BadInput when the lines cannot be written.
    """
    report = BenchReport(_machine())
    with _open(options.lines) as lines:
        for item in _measure(options.groups, report, say):
            if lines is not None:
                lines.write(msgspec.json.encode(item) + b"\n")
                lines.flush()
            match item:
                case Figure():
                    report.figures.append(item)
                case Skipped():
                    report.skipped.append(item)
                    say(f"{item.group}: {item.why}")
    return report


def _measure(
    groups: tuple[Group, ...], report: BenchReport, say: Callable[[str], None]
) -> Iterator[Figure | Skipped]:
    if not torch.cuda.is_available():
        for group in groups:
            yield Skipped(group, "there is no CUDA device here")
        return
    say("ceilings of this machine")
    report.ceilings, figures = ceilings.measure()
    yield from figures
    measures = _groups()
    for group in groups:
        for measure in measures.get(group, ()):
            say(group)
            yield from measure(report.ceilings)
            torch.cuda.empty_cache()


def _open(path: str | None) -> IO[bytes] | nullcontext[None]:
    if path is None:
        return nullcontext()
    try:
        return open(path, "wb")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error


def _machine() -> dict[str, str]:
    found = {
        "kvlease": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda or "unknown"
    return found
