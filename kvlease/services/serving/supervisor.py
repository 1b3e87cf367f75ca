"""`kvlease serve`: an engine and its doors in one nursery, from ready to drained.

The first signal drains: answers under way are completed within a limit, new ones refused. The
second one stops at once.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import trio
from attrs import define, frozen

from kvlease.protocols.rpc import ServerStatistics
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.nurseries import open_flat_nursery
from kvlease.services.rpc.door import RpcDoor, open_listeners
from kvlease.services.serving.plan import Plan
from kvlease.services.serving.service import Service

if TYPE_CHECKING:
    from kvlease.runtime.engine import Engine
    from kvlease.services.openai_http.server import Entrance
    from kvlease.services.rpc.address import TcpAddress

FAREWELL_S = 5.0
"""For the doors to see their clients off once nothing is under way any more."""


class Door(Protocol):
    """A way in: it is open when it is made, and serves while it runs."""

    @property
    def addresses(self) -> list[str]:
        """Where it listens, as people write it."""
        ...

    async def run(self) -> None:
        """Serve until the service has drained and every client has gone, or until cancelled."""
        ...


@define
class ServeOutcome:
    """How a server ended: answers cut short, whether it was stopped, and its last figures."""

    cut: int = 0
    is_stopped: bool = False
    """Whether a second signal ended it before it had drained."""
    is_interrupted: bool = False
    """Whether the first signal was an interrupt from the keyboard."""
    statistics: ServerStatistics | None = None

    @property
    def is_whole(self) -> bool:
        """Whether no answer was lost and no page leaked."""
        is_clean = self.statistics is not None and self.statistics.ledger_ok
        return is_clean and not (self.cut or self.is_stopped)


async def serve(plan: Plan, log: EventLog, say: Callable[[str], None]) -> ServeOutcome:
    """Serve until drained or stopped; ``say`` is given the line that tells that it is ready.

    Ownership: borrows the log.
    Checkpoints: always; cancelled, it ends every answer and the engine.

    Raises:
        BadInput: the model cannot be loaded, or an address cannot be listened at.
    """
    from kvlease.runtime.engine import open_engine  # loads torch: what is wrong was told before

    outcome = ServeOutcome()
    config, started_s = plan.config, trio.current_time()
    async with (
        _listening(plan) as listening,
        open_engine(config.model, config.engine, log=log) as engine,
    ):
        loaded_s = trio.current_time()
        service = await _open_service(plan, engine, log)
        with trio.CancelScope() as scope:
            async with open_flat_nursery() as nursery:
                await nursery.start(_heed_signals, service, scope, outcome)
                doors = open_doors(plan, service, listening, log)
                for door in doors:
                    nursery.start_soon(door.run)
                addresses = " ".join(name for door in doors for name in door.addresses)
                say(
                    f"ready at {addresses} (model {engine.model_name}, loaded in"
                    f" {loaded_s - started_s:.1f} s, open {trio.current_time() - loaded_s:.2f} s"
                    " later)"
                )
                await service.drain_asked.wait()
                outcome.cut = (await service.drain()).cut
                with trio.move_on_after(FAREWELL_S):
                    await _until_empty(service)
                nursery.cancel_scope.cancel()
        outcome.statistics = service.statistics(recount=True)
    return outcome


async def _until_empty(service: Service) -> None:
    while True:
        if not service.clients:
            return
        await trio.sleep(0.01)


async def _open_service(plan: Plan, engine: Engine, log: EventLog) -> Service:
    service = Service(engine, plan.tenants, plan.config.limits, log)
    for tenant in plan.tenants.by_name.values():
        if tenant.device_pages is not None or tenant.host_pages is not None:
            await engine.cache.set_quota(
                tenant.salt, device_pages=tenant.device_pages, host_pages=tenant.host_pages
            )
    return service


@frozen
class Listening:
    """Where a server listens before it has a model; who comes early waits."""

    rpc: list[trio.SocketListener]
    http: Entrance | None


@asynccontextmanager
async def _listening(plan: Plan) -> AsyncGenerator[Listening]:
    """Listen at every address for a block.

    An address that is taken is told of before the model is loaded, which may take minutes.
    """
    listeners: list[trio.SocketListener] = []
    entrance: Entrance | None = None
    try:
        for address in plan.addresses:
            listeners += await open_listeners(address)
        if plan.http is not None:
            entrance = _entrance(plan, plan.http)
        yield Listening(listeners, entrance)
    finally:
        if entrance is not None:
            entrance.close()
        with trio.CancelScope(shield=True):
            for listener in listeners:
                await listener.aclose()


def _entrance(plan: Plan, address: TcpAddress) -> Entrance:
    from kvlease.services.openai_http.server import Certificate, Entrance  # an optional part

    config, certificate = plan.config, None
    if config.tls_cert is not None and config.tls_key is not None:
        certificate = Certificate(config.tls_cert, config.tls_key)
    return Entrance(address, config.limits, config.model, certificate)


def open_doors(plan: Plan, service: Service, listening: Listening, log: EventLog) -> list[Door]:
    """Make every door that the configuration asks for."""
    doors: list[Door] = []
    if listening.rpc:
        doors.append(RpcDoor(service, listening.rpc, plan.tls))
    if listening.http is not None:
        doors.append(listening.http.door(service, log))
    return doors


async def _heed_signals(
    service: Service,
    scope: trio.CancelScope,
    outcome: ServeOutcome,
    task_status: trio.TaskStatus[None],
) -> None:
    """Drain at the first signal, stop at the second."""
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                if service.status == "draining":
                    if not service.drained.is_set():
                        outcome.is_stopped, outcome.cut = True, service.num_streams
                    scope.cancel()
                    return
                outcome.is_interrupted = number == signal.SIGINT
                nursery.start_soon(service.drain)
