"""Serves the application: sockets, TLS, and hypercorn in a nursery of the caller's.

hypercorn shields what it writes from cancellation, so the kernel bounds how long a client may take
nothing (TCP_USER_TIMEOUT, where there is one); headers and idle connections have a time-out of its
own, bodies one of ours.
"""

from __future__ import annotations

import importlib
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, cast, final

import trio
from attrs import frozen
from hypercorn.config import Config

from kvlease.errors import ConfigError
from kvlease.protocols.event_base import EventSink
from kvlease.services.chat.encoder import ChatEncoder
from kvlease.services.openai_http.app import make_app
from kvlease.services.openai_http.context import Context
from kvlease.services.rpc.address import TcpAddress
from kvlease.services.serving.limits import Limits
from kvlease.services.serving.metrics import metrics_of
from kvlease.services.serving.service import Service

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


def _config(listening: socket.socket, limits: Limits, certificate: Certificate | None) -> Config:
    config = Config()
    config.bind = [f"fd://{listening.fileno()}"]
    config.backlog = BACKLOG
    config.keep_alive_timeout = limits.idle_timeout_s  # pyright: ignore[reportAttributeAccessIssue]
    config.ssl_handshake_timeout = limits.handshake_timeout_s  # pyright: ignore[reportAttributeAccessIssue]
    config.graceful_timeout = CLOSE_S
    config.include_server_header = False
    config.errorlog = logging.getLogger("kvlease.http")
    if certificate is not None:
        config.certfile, config.keyfile = certificate.chain, certificate.key
    return config


@final
class Entrance:
    """What of a door can be made before there is an engine: its socket, and the chat encoder.

    Ownership: owns the socket until `door` is called, or `close`.
    """

    def __init__(
        self,
        address: TcpAddress,
        limits: Limits,
        model: str | None,
        certificate: Certificate | None = None,
    ) -> None:
        """Read the model's tokenizer and listen; who comes early waits.

        Raises ConfigError if the address cannot be listened at, BadInput for the tokenizer.
        """
        self._encoder = ChatEncoder.of_model(model)
        self._certificate = certificate
        self._socket = _listen(address, limits.write_timeout_s)
        self._limits = limits
        self.port: int = self._socket.getsockname()[1]
        scheme = "http" if certificate is None else "https"
        self.url = f"{scheme}://{address.host}:{self.port}"

    def door(self, service: Service, log: EventSink) -> HttpDoor:
        """Make the door; the socket is its own from here on."""
        context = Context(service, self._encoder, log)
        config = _config(self._socket, self._limits, self._certificate)
        self._socket.detach()
        return HttpDoor(context, config, self.url)

    def close(self) -> None:
        """Stop listening, if that has not become somebody else's."""
        self._socket.close()


@final
class HttpDoor:
    """The door: serves OpenAI's clients, and Prometheus, at one address."""

    def __init__(self, context: Context, config: Config, url: str) -> None:
        """Made by an `Entrance`."""
        self.context = context
        self.addresses = [url]
        self._config = config

    async def run(self) -> None:
        """Serve until the service has drained, or until cancelled. Checkpoints: always."""
        service = self.context.service
        app = make_app(self.context, metrics_of(service, self.context.tool_call_errors))
        serve = cast("_Serve", importlib.import_module("hypercorn.trio").serve)
        await serve(app, self._config, shutdown_trigger=service.drained.wait)
