"""Putting one engine together: pools and actors made, connected, started and stopped in order.

State that has to survive a restart (pools, index, queues) is made here and belongs to the engine's
scope; actors are made by factories, again and again if need be.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, final

import trio
from attrs import define, evolve, field, frozen

from kvlease.errors import ActorBroken, ActorClosed, KVLeaseError, RequestFailed, kept_rule
from kvlease.pools.unified import UnifiedPool
from kvlease.protocols.config import EngineConfig
from kvlease.protocols.event_base import SCHEMA_VERSION
from kvlease.protocols.events import (
    ActorDied,
    ActorRestart,
    ActorStart,
    ActorStop,
    LogOpen,
    RequestSubmitted,
    component_facts,
)
from kvlease.protocols.identity import CacheIdentity
from kvlease.protocols.ports import Clock, CompilesAhead, Copier, ModelRunner
from kvlease.runtime.actor import ActorEvent, ActorSpec, Inbox
from kvlease.runtime.clock import MonotonicClock
from kvlease.runtime.core import EngineCore
from kvlease.runtime.counters import Counters
from kvlease.runtime.cuda_copies import give_carrier
from kvlease.runtime.cuda_streams import open_cuda_streams
from kvlease.runtime.endings import end_request
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.journal import GateJournal, TransferJournal
from kvlease.runtime.loader import DirectCopier, Loader, loader_mailbox
from kvlease.runtime.mailbox import Mailbox
from kvlease.runtime.messages import (
    Cancel,
    PagesGivenBack,
    SchedulerMessage,
    StepKind,
    StepOrder,
    Submit,
    TransferEnded,
    TransferSettled,
)
from kvlease.runtime.models import compile_kernels, load
from kvlease.runtime.nurseries import open_flat_nursery
from kvlease.runtime.request import Request
from kvlease.runtime.scheduler import Scheduler
from kvlease.runtime.sizing import pool_sizes, sized
from kvlease.runtime.steps import StepWorker
from kvlease.runtime.stream_scope import WaitObserver
from kvlease.runtime.streams import EngineStreams, open_cpu_streams
from kvlease.runtime.supervisor import Supervisor, open_supervisor
from kvlease.runtime.transfer import Transfer
from kvlease.version import __version__

MAX_RESTARTS = 3
RESTART_WINDOW_S = 10.0
_SPARE_MAIL = 1 << 16
"""Room for messages that are no requests; transfers and steps in flight are far fewer."""


M = TypeVar("M")
OpenStreams = Callable[[WaitObserver], AbstractAsyncContextManager[EngineStreams]]
"""Opens an engine's streams; the observer hears of the waits that really held compute."""


class Inboxes(Protocol):
    """Says what an actor reads its messages from."""

    def __call__(self, mailbox: Mailbox[M], /) -> Inbox[M]:
        """Return the reading end for the actor of this mailbox."""
        ...


def _own_mailbox(mailbox: Mailbox[M], /) -> Inbox[M]:
    return mailbox


@frozen
class EnginePorts:
    """The outside world of an engine; replaced to simulate it, and to inject faults and delays.

    Attributes:
        copier: executes copy orders.
        clock: what deadlines and measurements go by.
        streams: opens the three streams for the engine's block; None for those of its device.
        inboxes: may put something between an actor and its mailbox.
        about: what stands behind them, for the head of the log.
        model_name: what to call a model that they wrap; None for its own name.
    """

    copier: Copier | None = None
    clock: Clock | None = None
    streams: OpenStreams | None = None
    inboxes: Inboxes = _own_mailbox
    about: dict[str, object] | None = None
    model_name: str | None = None


@frozen
class TransferReports:
    """Passes the ends of transfers on to the scheduler, if it is still there to care."""

    scheduler: Mailbox[SchedulerMessage]

    def ended(self, transfer: Transfer) -> None:
        """A transfer reached its final state."""
        self._tell(TransferEnded(transfer))

    def settled(self, transfer: Transfer) -> None:
        """No copy of a transfer will touch memory any more."""
        self._tell(TransferSettled(transfer))

    def _tell(self, message: SchedulerMessage) -> None:
        if not self.scheduler.is_closed:
            self.scheduler.send_nowait(message)


@define(eq=False)
class Assembly:
    """The parts of one engine before its actors run, and the mailboxes they are reached by."""

    core: EngineCore
    model_name: str
    log: EventLog
    ports: EnginePorts
    scheduler: Mailbox[SchedulerMessage]
    loader: Mailbox[Transfer]
    workers: dict[StepKind, Mailbox[StepOrder]]
    open_requests: dict[Request, None] = field(factory=dict[Request, None])
    """Requests whose callers have not left yet, as they came; whatever the engine's actors lose."""
    num_submitted: int = 0
    is_closing: bool = False

    def submit(self, request: Request) -> None:
        """Queue a request; raises ActorClosed when nobody would serve it any more (R9)."""
        if self.is_closing:
            raise ActorClosed("the engine is closed; it takes no more requests")
        self.scheduler.send_nowait(Submit(request))
        self.num_submitted += 1
        self.open_requests[request] = None
        if self.core.sink.normal:
            self.core.sink.emit(_submitted(request, with_prompt=self.core.config.log_prompts))

    def pages_given_back(self) -> None:
        """Let the scheduler plan again; on the Trio thread, nothing happens once it has gone."""
        if not self.scheduler.is_closed:
            self.scheduler.send_nowait(PagesGivenBack())

    def num_queued(self) -> int:
        """Count requests that wait their turn, those that the scheduler has not seen yet too."""
        core = self.core
        unseen = self.num_submitted - core.counters.requests
        places = core.config.max_sessions - len(core.running) - len(core.waiting)
        return len(core.waiting) + max(0, unseen - max(0, places))

    def abandon(self, error: KVLeaseError) -> None:
        """End every request that is still open: the engine is going away (R9)."""
        self.is_closing = True
        for request in self.open_requests:
            end_request(self.core, request, "failed", error)

    def cancel(self, request: Request) -> None:
        """End a request early; if the scheduler is gone, end it here (R9)."""
        try:
            self.scheduler.send_nowait(Cancel(request))
        except (ActorClosed, ActorBroken) as error:
            end_request(self.core, request, "failed", error)


def _submitted(request: Request, *, with_prompt: bool) -> RequestSubmitted:
    return RequestSubmitted(
        request=request.id,
        prompt_tokens=request.num_prompt,
        max_tokens=request.params.max_tokens,
        deadline_ns=round(request.deadline_s * 1e9),
        parent=request.parent,
        prompt=request.prompt if with_prompt else b"",
        params=request.params if with_prompt else None,
    )


async def assemble(
    model: str | Path | ModelRunner | None,
    config: EngineConfig,
    log: EventLog | None,
    ports: EnginePorts,
) -> Assembly:
    """Load the model, in a thread unless it is here already, and make every part; starts nothing.

    Raises ModelLoadError and ConfigError.
    """
    if model is None or isinstance(model, str | Path):
        loaded = await trio.to_thread.run_sync(load, model, config)
    else:
        loaded = load(model, config)
    runner, model_name = loaded.runner, ports.model_name or loaded.name
    config = sized(config, runner.schema)
    sink = log or EventLog(level="off")
    counters = Counters()
    identity = CacheIdentity(
        runner.fingerprint, runner.schema.digest, tenant_salt=config.tenant_salt
    )
    make_pool = partial(
        UnifiedPool,
        runner.schema,
        pool_sizes(config, needs_tail=runner.schema.needs_tail),
        sink,
        eviction=config.eviction,
        poison=config.poison,
        observer=GateJournal(sink, counters),
        audit_rate=config.audit_rate if config.prefix_cache else 0.0,
        device=config.device,
    )
    if config.device == "cpu":
        pool = make_pool()
    else:
        pool = await trio.to_thread.run_sync(_device_pool, make_pool)
    if config.compile_ahead and isinstance(runner, CompilesAhead):
        await trio.to_thread.run_sync(compile_kernels, runner, config)
    pool.spares_last_copies = config.write_policy == "back" and config.host_pages > 0
    core = EngineCore(
        config, runner, pool, sink, ports.clock or MonotonicClock(), identity, counters
    )
    core.transfer_observer = TransferJournal(sink, pool.memory, core.planned)
    scheduler: Mailbox[SchedulerMessage]
    refuse = partial(_refuse, core)
    scheduler = Mailbox("scheduler", config.max_queue + _SPARE_MAIL, dispose=refuse)
    reports = TransferReports(scheduler)
    core.loader = loader_mailbox(_SPARE_MAIL, reports.ended, reports.settled)
    if sink.normal:
        sink.emit(_log_open(core, model_name, ports))
    return Assembly(
        core=core,
        model_name=model_name,
        log=sink,
        ports=ports,
        scheduler=scheduler,
        loader=core.loader,
        workers={"prefill": Mailbox("prefill", 2), "decode": Mailbox("decode", 2)},
    )


def _device_pool(make_pool: Callable[[], UnifiedPool]) -> UnifiedPool:
    """Make the pool of a device, with what carries its pages.

    For a thread: pinning takes a second for a few gigabytes, and kernels are compiled.
    """
    pool = make_pool()
    give_carrier(pool.memory)
    return pool


def _refuse(core: EngineCore, message: SchedulerMessage) -> None:
    """End a request that nobody will ever take up."""
    if isinstance(message, Submit):
        error = RequestFailed("the engine ended before the request began")
        end_request(core, message.request, "failed", error)


def _log_open(core: EngineCore, model_name: str, ports: EnginePorts) -> LogOpen:
    return LogOpen(
        schema=SCHEMA_VERSION,
        program=f"kvlease {__version__}",
        level="audit" if core.sink.audit else "normal",
        model=model_name,
        identity=core.root.hex(),
        num_layers=core.schema.num_layers,
        page_tokens=core.schema.page_tokens,
        components=component_facts(core.schema),
        device_pages=core.config.device_pages,
        host_pages=core.config.host_pages,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        config=evolve(core.config, tenant_salt=b""),
        ports=ports.about,
    )


@asynccontextmanager
async def run_services(assembly: Assembly) -> AsyncGenerator[None]:
    """Run an engine's streams and actors for a block; the log is written until all have stopped."""
    async with open_flat_nursery() as nursery:
        nursery.start_soon(assembly.log.run)
        try:
            async with (
                _open_streams(assembly) as streams,
                open_supervisor(
                    strategy="one_for_one",
                    max_restarts=MAX_RESTARTS,
                    window_s=RESTART_WINDOW_S,
                    on_event=_ActorJournal(assembly.core),
                ) as supervisor,
            ):
                await _start(assembly, supervisor, streams)
                async with open_flat_nursery() as inside:
                    inside.start_soon(_abandon_at_end, assembly)
                    yield
                    inside.cancel_scope.cancel()
        finally:
            nursery.cancel_scope.cancel()


def _open_streams(assembly: Assembly) -> AbstractAsyncContextManager[EngineStreams]:
    core = assembly.core
    of_device = open_cpu_streams if core.config.device == "cpu" else open_cuda_streams
    return (assembly.ports.streams or of_device)(core.stalls)


async def _abandon_at_end(assembly: Assembly) -> None:
    """End what is still open when the engine goes, before anyone waits for it in vain (R9)."""
    try:
        await trio.sleep_forever()
    finally:
        assembly.abandon(RequestFailed("the engine was closed before the answer was complete"))


async def _start(assembly: Assembly, supervisor: Supervisor, streams: EngineStreams) -> None:
    core, ports = assembly.core, assembly.ports
    reports = TransferReports(assembly.scheduler)
    await supervisor.start(
        ActorSpec(
            assembly.loader,
            lambda mailbox: Loader(
                ports.inboxes(mailbox),
                load_stream=streams.load,
                store_stream=streams.store,
                copier=ports.copier or DirectCopier(),
                on_end=reports.ended,
                on_settled=reports.settled,
            ),
        )
    )
    await supervisor.start(
        ActorSpec(
            assembly.scheduler,
            lambda mailbox: Scheduler(core, ports.inboxes(mailbox), assembly.workers),
        )
    )
    for mailbox in assembly.workers.values():
        await supervisor.start(
            ActorSpec(
                mailbox,
                lambda own: StepWorker(
                    ports.inboxes(own), assembly.scheduler, core.model, core.pool, streams.compute
                ),
            )
        )


@final
class _ActorJournal:
    """Writes what happens to actors into the log, and counts restarts."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def __call__(self, event: ActorEvent) -> None:
        sink = self._core.sink
        if event.kind == "restart":
            self._core.counters.actor_restarts += 1
        if not sink.normal:
            return
        match event.kind:
            case "start":
                sink.emit(ActorStart(actor=event.actor))
            case "stop":
                sink.emit(ActorStop(actor=event.actor))
            case "died":
                rule = "" if event.cause is None else kept_rule(event.cause)
                sink.emit(ActorDied(actor=event.actor, error=repr(event.cause), rule=rule))
            case "restart":
                sink.emit(ActorRestart(actor=event.actor, restarts=event.incarnation - 1))
