"""Serves the application: sockets, TLS, and hypercorn in a nursery of the caller's.

hypercorn shields what it writes from cancellation, so the kernel bounds how long a client may take
nothing (TCP_USER_TIMEOUT, where there is one); headers and idle connections have a time-out of its
own, bodies one of ours.
"""

from __future__ import annotations

import importlib
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import trio
from attrs import frozen
from hypercorn.config import Config

from kvlease.errors import ConfigError
from kvlease.services.openai_http.app import make_app
from kvlease.services.openai_http.context import Context
from kvlease.services.rpc.address import TcpAddress
from kvlease.services.serving.limits import Limits

if TYPE_CHECKING:
    from starlette.applications import Starlette

BACKLOG = 1024
SEND_BUFFER = 1 << 18
"""Bytes that the kernel keeps for a client that does not take them."""
CLOSE_S = 3.0
"""How long connections may take to close once every answer has been told."""


class _Serve(Protocol):
    """`hypercorn.trio.serve`, whose own types name every kind of application there is."""

    async def __call__(
        self,
        app: Starlette,
        config: Config,
        *,
        shutdown_trigger: Callable[[], Awaitable[None]],
        task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until the trigger returns."""
        ...


@frozen
class Certificate:
    """Files in PEM that prove who the server is."""

    chain: str
    key: str


@frozen
class HttpDoor:
    """A door that is open.

    Attributes:
        addresses: where it listens.
        context: what its requests share.
    """

    addresses: list[TcpAddress]
    context: Context


def _listen(address: TcpAddress, write_timeout_s: float) -> socket.socket:
    """Listen at an address; connections inherit the bound on writes. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            timeout_ms = round(write_timeout_s * 1000)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        listening.bind((address.host, address.port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen at {address}: {error.strerror or error}") from error
    return listening


def _config(
    sockets: list[socket.socket], limits: Limits, certificate: Certificate | None
) -> Config:
    config = Config()
    config.bind = [f"fd://{one.fileno()}" for one in sockets]
    config.backlog = BACKLOG
    config.keep_alive_timeout = limits.idle_timeout_s  # pyright: ignore[reportAttributeAccessIssue]
    config.ssl_handshake_timeout = limits.handshake_timeout_s  # pyright: ignore[reportAttributeAccessIssue]
    config.graceful_timeout = CLOSE_S
    config.include_server_header = False
    config.errorlog = logging.getLogger("kvlease.http")
    if certificate is not None:
        config.certfile, config.keyfile = certificate.chain, certificate.key
    return config


@asynccontextmanager
async def open_http_door(
    context: Context,
    addresses: list[TcpAddress],
    metrics: Callable[[], bytes],
    certificate: Certificate | None = None,
) -> AsyncGenerator[HttpDoor]:
    """Open the door for a block; leaving it ends every connection.

    It closes by itself once the service has drained, and keeps answering until then.
    Checkpoints: on entry and exit. Raises ConfigError if an address cannot be listened at.
    """
    service = context.service
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            sockets.append(_listen(address, service.limits.write_timeout_s))  # noqa: PERF401 - closed on error
        bound = [TcpAddress(*one.getsockname()[:2]) for one in sockets]
        config = _config(sockets, service.limits, certificate)
    except BaseException:
        for one in sockets:
            one.close()
        raise
    serve = cast("_Serve", importlib.import_module("hypercorn.trio").serve)
    app = make_app(context, metrics)
    async with trio.open_nursery() as nursery:
        for one in sockets:
            one.detach()  # hypercorn's from here on
        await nursery.start(partial(serve, app, config, shutdown_trigger=service.drained.wait))
        yield HttpDoor(bound, context)
        nursery.cancel_scope.cancel()
