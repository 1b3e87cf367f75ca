"""`kvlease race`: run the table's rows in worker processes, and put them side by side."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from attrs import frozen

from kvlease.errors import BadInput
from kvlease.services.doctor import num_cores
from kvlease.services.lab.race_data import (
    ColdSession,
    RaceReport,
    RaceRow,
    RowResult,
    WorkerSetup,
)
from kvlease.services.lab.race_jobs import ColdJob, RaceSetup, RowJob
from kvlease.services.processes import Crew
from kvlease.services.progress import Reporter
from kvlease.services.race_options import RaceOptions

_WORKER = "kvlease.services.lab.race_worker"


@frozen
class RaceOutcome:
    """A finished race: its table, and sentences about what went wrong where it must not."""

    report: RaceReport
    complaints: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether the gate held in every row that has it, and every log is whole."""
        return not self.complaints


async def race(
    options: RaceOptions, reporter: Reporter, setup: RaceSetup | None = None
) -> RaceOutcome:
    """Run every row and return the table.

    ``setup`` is another's than the command's, for smaller races. Checkpoints: always; cancelled, it
    ends the workers. Raises BadInput when logs cannot be written, InternalError when a worker dies.
    """
    began = time.perf_counter()
    shared = setup or RaceSetup(seed=options.seed, num_sessions=max(options.sessions))
    jobs = options.jobs()
    logs = _make_folder(options.log)
    cold = await _cold_answers(options, shared, reporter)
    results = await _run_rows(_simulations(jobs, logs), shared, cold, reporter)
    rows = _table(jobs, results)
    complaints = [
        f"{name}: {complaint}"
        for name, result in results.items()
        if result.row.gate == "full" and not result.row.is_clean
        for complaint in result.complaints or ("not right",)
    ]
    complaints += [
        f"{name}: its log is incomplete"
        for name, result in results.items()
        if not result.log_complete
    ]
    report = RaceReport(
        rows=rows,
        setup=shared,
        cold_answers=sum(len(found) for one in cold for found in one.answers.values()),
        wall_s=round(time.perf_counter() - began, 3),
    )
    return RaceOutcome(report, tuple(complaints))


def _make_folder(path: str | None) -> Path | None:
    if path is None:
        return None
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make the folder {path}: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK):
        raise BadInput(f"cannot write logs into {path}: the folder is read-only")
    return folder


async def _cold_answers(
    options: RaceOptions, setup: RaceSetup, reporter: Reporter
) -> list[ColdSession]:
    """Answer every turn cold with every format, once."""
    cold: list[ColdSession] = []

    def answered(one: ColdSession) -> None:
        cold.append(one)
        reporter.advance(len(cold))

    reporter.begin("cold answers", setup.num_sessions, "sessions")
    jobs = [ColdJob(session=n, formats=options.formats) for n in range(setup.num_sessions)]
    worker = WorkerSetup(race=setup)
    await Crew(_WORKER, "a worker of the race", worker, ColdSession, num_cores()).run(
        jobs, answered
    )
    return sorted(cold, key=lambda one: one.number)


def _simulations(jobs: Sequence[RowJob], logs: Path | None) -> list[RowJob]:
    """List the runs that the rows need.

    Without a host cache nothing crosses the link to be lied about, so one run stands for all gates.
    """
    runs: dict[str, RowJob] = {}
    for job in jobs:
        gate = job.gate if job.host_cache else "full"
        log = None if logs is None else str(logs / f"{job.name}.kvlog")
        runs[job.name] = msgspec.structs.replace(job, gate=gate, log=log)
    return list(runs.values())


async def _run_rows(
    runs: Sequence[RowJob], setup: RaceSetup, cold: list[ColdSession], reporter: Reporter
) -> dict[str, RowResult]:
    results: dict[str, RowResult] = {}

    def finished(result: RowResult) -> None:
        results[result.name] = result
        reporter.advance(len(results))

    reporter.begin("racing", len(runs), "simulations")
    worker = WorkerSetup(race=setup, cold=cold)
    await Crew(_WORKER, "a worker of the race", worker, RowResult, num_cores()).run(runs, finished)
    return results


def _table(jobs: Sequence[RowJob], results: dict[str, RowResult]) -> list[RaceRow]:
    """Return the rows in order, each with its ratio to the one without a host cache."""
    rows: list[RaceRow] = []
    for job in jobs:
        row = results[job.name].row
        base = results[msgspec.structs.replace(job, host_cache=False).name].row
        ratio = round(row.simulated_s / base.simulated_s, 3) if job.host_cache else None
        rows.append(msgspec.structs.replace(row, gate=job.gate, ratio=ratio))
    return rows
