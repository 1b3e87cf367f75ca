"""What comes out of the race, as plain data: right answers, rows, and the whole report."""

from __future__ import annotations

import msgspec

from kvlease.services.cold import ColdAnswer
from kvlease.services.lab.race_jobs import Gate, IndexFormat, RaceSetup
from kvlease.services.report import RunReport


class ColdSession(msgspec.Struct, frozen=True):
    """A session's right answers, by format of index keys."""

    number: int
    answers: dict[IndexFormat, list[ColdAnswer]]

    @property
    def reference(self) -> list[ColdAnswer]:
        """The answers that later prompts are made from."""
        return next(iter(self.answers.values()))


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's first line; rows need the cold answers."""

    race: RaceSetup
    cold: list[ColdSession] = []


class RaceRow(RunReport, frozen=True, kw_only=True):
    """One row: the report of a run, of virtual times but for ``wall_s``, and what made it.

    Attributes:
        sessions: served at a time.
        early_reads: openings (step, lease, layer, component) that a completion let through before
            the bytes had landed, by the device's own account.
        simulated_s: from the first request to the last answer.
        ratio: of that to the row of the same format and sessions without a host cache; null there.
    """

    host_cache: bool
    index_k_format: IndexFormat
    gate: Gate
    early_reads: int
    simulated_s: float
    ratio: float | None = None


class RowResult(msgspec.Struct, frozen=True):
    """A finished row, sentences about what went wrong in it, and whether its log is whole."""

    name: str
    row: RaceRow
    complaints: list[str]
    log_complete: bool = True


class RaceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvlease race` found."""

    rows: list[RaceRow]
    setup: RaceSetup
    cold_answers: int
    wall_s: float
