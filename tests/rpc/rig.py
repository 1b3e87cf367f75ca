"""A server in the test's own Trio run: an engine without arithmetic behind a real RPC door."""

from __future__ import annotations

import socket
import ssl
import struct
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import trio
from attrs import evolve, field, frozen

from kvlease.protocols.config import EngineConfig
from kvlease.protocols.events import Event
from kvlease.runtime.counters import Statistics
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.event_log import EventLog
from kvlease.services.rpc.address import TcpAddress
from kvlease.services.rpc.door import RpcDoor, open_door
from kvlease.services.serving.limits import Limits
from kvlease.services.serving.service import Service
from kvlease.services.serving.tenants import Tenant, Tenants
from tests.rpc.raw import Raw

SECRET = b"a secret of more than sixteen bytes"
CONFIG = EngineConfig(compute="none", device_pages=256, host_pages=512, page_tokens=64)
PATIENCE_S = 30.0


@frozen
class Server:
    """A running server, seen from inside and from outside."""

    engine: Engine
    service: Service
    door: RpcDoor
    events: list[Event] = field(repr=False)
    raws: list[Raw] = field(factory=list[Raw])

    async def raw(self) -> Raw:
        """Open a plain socket to it, closed at the end of the server's block."""
        self.raws.append(Raw(await trio.open_tcp_stream("127.0.0.1", self.port)))
        return self.raws[-1]

    @property
    def address(self) -> str:
        return self.door.addresses[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@asynccontextmanager
async def open_server(
    *,
    config: EngineConfig = CONFIG,
    tenants: Sequence[Tenant] = (),
    tls: ssl.SSLContext | None = None,
    **limits: float,
) -> AsyncGenerator[Server]:
    """Open a server for a block; when it is left without an error, nothing may have leaked."""
    log = EventLog(level="normal", flush_every_s=3600)
    events = log.remember()
    async with open_engine(None, config, log=log) as engine:
        service = Service(engine, Tenants(tenants), msgspec.convert(limits, Limits), log)
        async with open_door(service, [TcpAddress("127.0.0.1", 0)], tls) as door:
            server = Server(engine, service, door, events)
            try:
                yield server
            finally:
                for raw in server.raws:
                    await trio.aclose_forcefully(raw.stream)
        await assert_nothing_left(engine, service)
    log.close()


async def assert_nothing_left(engine: Engine, service: Service) -> Statistics:
    """Fail unless every stream is over and every page came back."""
    with trio.fail_after(PATIENCE_S):
        while True:
            now = engine.statistics()
            busy = now.running + now.waiting + now.device.quarantined + now.slots.quarantined
            if not (busy or service.num_streams or service.clients):
                break
            await trio.sleep(0.01)
    assert now.ledger_ok, now.ledger_error
    assert not service.refused["internal"]
    assert now.device.held == now.device.reserved == 0
    assert now.slots.free == now.slots.total
    return now


def prompt_of(number: int, length: int = 100) -> list[int]:
    return [(number * 7919 + place) % 250 for place in range(length)]


def pack(prompt: Sequence[int]) -> bytes:
    return array("i", prompt).tobytes()


config_of = partial(evolve, CONFIG)
"""Return the configuration, changed as given."""


RESETS = socket.SO_LINGER, struct.pack("ii", 1, 0)
"""The option with which closing a socket resets its connection."""


def connect_and_reset(port: int, times: int) -> None:
    """Connect so many times, and reset each socket before it can have been accepted."""
    for _ in range(times):
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, *RESETS)
        plain.connect(("127.0.0.1", port))
        plain.close()


async def until(holds: Callable[[], object]) -> None:
    """Wait until something holds; fails if it never does."""
    with trio.fail_after(PATIENCE_S):
        while True:
            if holds():
                return
            await trio.sleep(0.01)
