"""`kvlease run`: serve a workload, verify it if asked, and report.

This module puts the parts together: workload, engine, driver, verification, log, progress.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import trio
from attrs import define, field, frozen

from kvlease.errors import ConfigError, TraceError
from kvlease.protocols.config import EngineConfig
from kvlease.runtime.event_log import EventLog
from kvlease.services.cold import ColdAnswer, ColdRequest, ColdSetup, cold_config, run_cold
from kvlease.services.collector import collecting_less
from kvlease.services.doctor import num_cores
from kvlease.services.driver import Driver, Tally, prompt_lengths
from kvlease.services.options import RunOptions
from kvlease.services.progress import Reporter
from kvlease.services.report import RunReport, TierTokens, percentiles
from kvlease.services.sessions import Session
from kvlease.services.trace import TraceRequest, read_trace, trace_sessions
from kvlease.services.verify import Mismatch, verify
from kvlease.services.workload import WorkloadShape, tool_agent_sessions

if TYPE_CHECKING:
    from kvlease.runtime.counters import Statistics
    from kvlease.runtime.engine import Engine


class EngineOpener(Protocol):
    """How an engine is opened; tests and fault injection put their own in its place."""

    def __call__(
        self, model: str | None, config: EngineConfig, *, log: EventLog | None
    ) -> "AbstractAsyncContextManager[Engine]":
        """Open an engine for a block."""
        ...


@frozen
class RunOutcome:
    """A finished run: its figures, and sentences about what went wrong."""

    report: RunReport
    complaints: tuple[str, ...]


@define
class _Workload:
    """What is to be served, known before an engine is opened as far as possible."""

    options: RunOptions
    requests: list[TraceRequest] = field(factory=list[TraceRequest])

    @property
    def turns(self) -> int:
        """How many requests there are."""
        if self.options.trace is not None:
            return len(self.requests)
        return self.options.common.sessions * self.options.turns

    def sessions(self, vocab_size: int) -> Iterable[Session]:
        """Make the sessions for a model's vocabulary."""
        if self.options.trace is not None:
            return trace_sessions(iter(self.requests), vocab_size)
        shape = WorkloadShape(turns=self.options.turns)
        common = self.options.common
        return tool_agent_sessions(common.sessions, shape, vocab_size, common.seed)

    def check(self, engine: "Engine") -> None:
        """Refuse what this engine can never serve before anything is served.

        Raises TraceError or ConfigError with the line or the session, and what would help.
        """
        positions = engine.model.max_positions
        page_tokens = engine.model.schema.page_tokens
        room = min(positions, engine.config.device_pages * page_tokens)
        limit = (
            f"the model's {positions} positions"
            if room == positions
            else f"the {room} that device_pages {engine.config.device_pages} can hold"
        )
        for request in self.requests:
            total = request.prompt_tokens + request.output_tokens
            if total > room:
                raise TraceError(
                    f"{self.options.trace}:{request.line}: {total} tokens are over {limit}; "
                    "divide the lengths with --scale or give more pages"
                )
        if self.options.trace is None:
            for session in self.sessions(engine.model.vocab_size):
                total = max(whole for _, whole in prompt_lengths(session))
                if total > room:
                    raise ConfigError(
                        f"{session.name} reaches {total} tokens, over {limit}; "
                        "give fewer turns or more pages"
                    )


def _prepare(options: RunOptions) -> _Workload:
    """Read and check the workload's file, or check the built-in one's size."""
    if options.trace is None:
        WorkloadShape(turns=options.turns)
        return _Workload(options)
    return _Workload(options, list(read_trace(options.trace, options.limit, options.scale)))


def report_of(
    tally: Tally, mismatches: Sequence[Mismatch] | None, statistics: "Statistics", wall_s: float
) -> RunReport:
    """Put a run's figures together; ``mismatches`` is None where nothing was compared."""
    counters = statistics.counters
    return RunReport(
        sessions=tally.sessions,
        turns=tally.turns + tally.failed_turns + tally.hung_sessions,
        corrupt_turns=None if mismatches is None else len(mismatches),
        hung_sessions=tally.hung_sessions,
        failed_turns=tally.failed_turns,
        transfer_timeouts=counters.transfer_timeouts,
        tool_call_errors=tally.tool_call_errors,
        prompt_tokens=tally.prompt_tokens,
        output_tokens=tally.output_tokens,
        hit_tokens=TierTokens(
            tally.hit_device, tally.hit_host, tally.hit_storage, tally.hit_remote
        ),
        computed_tokens=tally.computed_tokens,
        recomputed_tokens=tally.recomputed_tokens,
        restored_bytes=counters.restored_bytes,
        stored_bytes=counters.stored_bytes,
        gate_waits=counters.gate_waits,
        gate_wait_ms=round(counters.gate_wait_s * 1e3, 3),
        ttft_ms=percentiles(tally.ttft_s),
        tpot_ms=percentiles(tally.tpot_s),
        wall_s=round(wall_s, 3),
        device_pages=statistics.device.total,
        host_pages=statistics.host.total,
        ledger_ok=statistics.ledger_ok,
        audited_pages=counters.audited_pages,
        audit_mismatches=counters.audit_mismatches,
    )


async def _run_requests(
    setup: ColdSetup,
    processes: int,
    requests: Sequence[ColdRequest],
    on_answer: Callable[[ColdAnswer], None],
) -> None:
    await run_cold(setup, requests, processes, on_answer)


async def run(
    options: RunOptions,
    log: EventLog,
    reporter: Reporter,
    opener: EngineOpener | None = None,
) -> RunOutcome:
    """Serve the workload and return the report.

    Ownership: borrows log and reporter.
    Checkpoints: always; cancelled, it ends the sessions and the engine.

    Raises:
        BadInput: model, options or workload cannot work together.
    """
    workload = _prepare(options)
    open_served = opener
    if open_served is None:  # loading torch takes a while: wrong files are told of before
        from kvlease.runtime.engine import open_engine

        open_served = open_engine
    config = options.config()
    model = options.common.model
    async with open_served(model, config, log=log) as engine:
        workload.check(engine)
        driver = Driver(engine, config.request_timeout_s, options.verify, reporter)
        reporter.begin("serving", workload.turns)
        started_s = trio.current_time()
        with collecting_less():
            await driver.serve(workload.sessions(engine.model.vocab_size), options.common.sessions)
        wall_s = trio.current_time() - started_s
        statistics = engine.statistics()
    complaints = list(driver.tally.complaints)
    mismatches: list[Mismatch] | None = None
    if options.verify:
        reporter.begin("verifying", len(driver.records))
        setup = ColdSetup(model, cold_config(config))
        # Each process holds a model of its own, so only the small one is held more than once.
        processes = num_cores() if model is None else 1
        run_requests = partial(_run_requests, setup, processes)
        mismatches = await verify(driver.records, run_requests, reporter.advance)
        complaints += [f"corrupt: {mismatch}" for mismatch in mismatches]
    if statistics.ledger_error is not None:
        complaints.append(f"ledger: {statistics.ledger_error}")
    return RunOutcome(report_of(driver.tally, mismatches, statistics, wall_s), tuple(complaints))
