"""One row of the race: the same sessions on one simulated device, with one cache and one gate.

A row is a simulation of its own, deterministic and single-threaded, of the real engine with the
real embedded model. Its prompts are fixed beforehand, so that a wrong answer changes no later
prompt; the answers that they were made from, and against which a row's answers are held, are cold
runs on real streams.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgspec
import trio

from kvlease.kernels.models.deepseek_v4 import ModelOptions, load_model
from kvlease.protocols.config import EngineConfig
from kvlease.protocols.ports import ModelRunner
from kvlease.runtime.engine import open_engine
from kvlease.services.cold import ColdAnswer, cold_config
from kvlease.services.driver import Driver, TurnRecord, ask
from kvlease.services.lab.device import SimulatedDevice, virtual_log
from kvlease.services.lab.faults import gate_plan
from kvlease.services.lab.race_data import ColdSession, RaceRow, RowResult
from kvlease.services.lab.race_jobs import IndexFormat, RaceSetup, RowJob
from kvlease.services.lab.race_sessions import race_sessions, with_answers
from kvlease.services.lab.schedule import run_in_order
from kvlease.services.run_command import report_of
from kvlease.services.sessions import Session, Tokens, pack
from kvlease.services.verify import Mismatch, first_difference


@cache
def _model(index_k_format: IndexFormat, seed: int) -> ModelRunner:
    """Return the embedded model with index keys kept in a format; one per process."""
    options = ModelOptions(kv_format="bf16", index_k_format=index_k_format, page_tokens=64)
    return load_model(None, options, seed)


def row_config(setup: RaceSetup, job: RowJob) -> EngineConfig:
    """Return the engine's configuration of a row.

    The engine always loads what the host has: choosing to compute instead would hide the link.
    """
    return EngineConfig(
        kv_format="bf16",
        index_k_format=job.index_k_format,
        device_pages=setup.device_pages,
        host_pages=setup.host_pages if job.host_cache else 0,
        tail_every=2,
        max_sessions=job.sessions,
        seed=setup.seed,
        digests=True,
        log_prompts=True,
        load_timeout_s=setup.load_timeout_s,
        load_or_recompute=False,
    )


def cold_session(setup: RaceSetup, number: int, formats: Sequence[IndexFormat]) -> ColdSession:
    """Answer one session's turns cold with every format; the first one's answers make the prompts.

    Runs Trio, on real streams.
    """
    session = _sessions(setup)[number]
    answers: dict[IndexFormat, list[ColdAnswer]] = {}
    for index_k_format in formats:
        answers[index_k_format] = found = trio.run(_cold, setup, session, index_k_format)
        if not session.turns[0].is_whole:
            session = with_answers(session, [answer.tokens for answer in found])
    return ColdSession(number, answers)


async def _cold(
    setup: RaceSetup, session: Session, index_k_format: IndexFormat
) -> list[ColdAnswer]:
    job = RowJob(host_cache=False, index_k_format=index_k_format, gate="full", sessions=1)
    config = cold_config(row_config(setup, job))
    found: list[ColdAnswer] = []
    history: Tokens = b""
    async with open_engine(_model(index_k_format, setup.seed), config) as engine:
        for place, turn in enumerate(session.turns):
            prompt = turn.added if turn.is_whole else history + turn.added
            answer, _ = await ask(engine, prompt, turn.sampling)
            found.append(ColdAnswer(place, tuple(answer.tokens), tuple(answer.digests)))
            history = prompt + pack(answer.tokens)
    return found


@cache
def _sessions(setup: RaceSetup) -> list[Session]:
    return race_sessions(setup.num_sessions, _model("bf16", setup.seed).vocab_size, setup.seed)


def whole_sessions(setup: RaceSetup, cold: Iterable[ColdSession]) -> list[Session]:
    """Return the race's sessions with whole prompts, the same for every row."""
    sessions = _sessions(setup)
    return [
        with_answers(sessions[one.number], [answer.tokens for answer in one.reference])
        for one in cold
    ]


def run_row(setup: RaceSetup, job: RowJob, cold: Sequence[ColdSession]) -> RowResult:
    """Serve all sessions, so many at a time, and compare; not inside a Trio run."""
    began = time.perf_counter()
    sessions = whole_sessions(setup, cold)
    made: list[RowResult] = []
    with ExitStack() as files:
        file = None if job.log is None else files.enter_context(Path(job.log).open("wb"))

        async def row() -> None:
            made.append(await _serve(setup, job, sessions, cold, file))

        run_in_order(row)
    wall_s = round(time.perf_counter() - began, 3)
    result = made[0]
    return msgspec.structs.replace(result, row=msgspec.structs.replace(result.row, wall_s=wall_s))


async def _serve(
    setup: RaceSetup,
    job: RowJob,
    sessions: Sequence[Session],
    cold: Sequence[ColdSession],
    file: BinaryIO | None,
) -> RowResult:
    log = virtual_log(file)
    model = _model(job.index_k_format, setup.seed)
    device = SimulatedDevice(model, setup.device, log, gate_plan(job.gate, setup.seed))
    config = row_config(setup, job)
    async with open_engine(device.runner, config, log=log, ports=device.ports) as engine:
        driver = Driver(engine, config.request_timeout_s, keep_records=True)
        began = trio.current_time()
        await driver.serve(sessions, job.sessions)
        simulated_s = trio.current_time() - began
        statistics = engine.statistics()
    log.close()
    mismatches = _compare(job.index_k_format, sessions, cold, driver.records)
    report = report_of(driver.tally, mismatches, statistics, 0.0)
    complaints = [*driver.tally.complaints, *(f"corrupt: {one}" for one in mismatches)]
    if statistics.ledger_error is not None:
        complaints.append(f"ledger: {statistics.ledger_error}")
    early = {(read.step, read.lease, read.layer, read.component) for read in device.truth.early}
    made_by: dict[str, object] = {
        "sessions": job.sessions,
        "host_cache": job.host_cache,
        "index_k_format": job.index_k_format,
        "gate": job.gate,
        "early_reads": len(early),
        "simulated_s": round(simulated_s, 6),
    }
    row = msgspec.convert({**msgspec.structs.asdict(report), **made_by}, RaceRow)
    return RowResult(job.name, row, complaints, log.complete)


def _compare(
    index_k_format: IndexFormat,
    sessions: Sequence[Session],
    cold: Sequence[ColdSession],
    records: Sequence[TurnRecord],
) -> list[Mismatch]:
    """Return the turns whose answers are not the cold ones, bit for bit."""
    right = {
        (session.name, turn): answer
        for session, one in zip(sessions, cold, strict=True)
        for turn, answer in enumerate(one.answers[index_k_format], 1)
    }
    found: list[Mismatch] = []
    for record in records:
        reason = first_difference(record, right[record.session, record.turn])
        if reason is not None:
            found.append(Mismatch(record.session, record.turn, reason))
    return found
