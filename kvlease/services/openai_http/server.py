"""Serves the application: sockets, TLS, and one of hypercorn's connections for each client.

Connections are accepted here and not by hypercorn, whose own loop ends the server with an exception
that one connection raises, and clients can make it raise several. hypercorn shields what it writes
from cancellation, so the kernel bounds how long a client may take nothing (TCP_USER_TIMEOUT, where
there is one), and at the end sockets are closed under it; headers and idle connections have a
time-out of its own, bodies one of ours.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast, final

import trio
from attrs import frozen
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext

from kvlease.errors import ConfigError, Refused, leaves
from kvlease.protocols.event_base import EventSink
from kvlease.services.chat.encoder import ChatEncoder
from kvlease.services.openai_http.app import make_app
from kvlease.services.openai_http.context import DOOR, Context
from kvlease.services.openai_http.edge import Edge
from kvlease.services.rpc.address import TcpAddress, peer_of
from kvlease.services.rpc.connection import GOODBYE_S
from kvlease.services.rpc.framing import linger
from kvlease.services.serving.limits import Limits
from kvlease.services.serving.metrics import metrics_of
from kvlease.services.serving.service import Service

if TYPE_CHECKING:
    from hypercorn.typing import ASGIFramework
    from starlette.types import ASGIApp

    _Connect: TypeAlias = Callable[..., Awaitable[None]]

BACKLOG = 1024
SEND_BUFFER = 1 << 18
"""Bytes that the kernel keeps for a client that does not take them."""
READ_AHEAD = 4
"""Pieces of MAX_RECV bytes that may have come and not been understood."""
CLOSE_S = 3.0
"""How long connections may take to close once every answer has been told."""
TOO_MANY = (
    b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 0\r\n\r\n"
)


@final
class _Connection(TCPServer):
    """One of hypercorn's connections, which notices at once that its client has gone.

    hypercorn's own reads nothing while it answers, if a request or only a line end has come behind
    the one that is answered; and an idle one outlives its client until it is idle for too long.
    """

    _is_gone = False

    async def protocol_send(self, event: Event) -> None:
        """Send what the protocol has to say; whoever has gone is not waited for any more.

        It is not cancelled half-way: hypercorn would forget to tell other requests that the client
        has gone.
        """
        if not (self._is_gone and isinstance(event, Updated)):
            # Busy: it is being closed meanwhile. No attribute: another request on the connection,
            # which its head has ended already, and hypercorn cannot close what it has not begun.
            with suppress(trio.BusyResourceError, AttributeError), trio.CancelScope(shield=True):
                await super().protocol_send(event)

    async def _read_data(self) -> None:
        ahead, behind = trio.open_memory_channel[bytes](READ_AHEAD)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hand_on, behind)
            async with ahead:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    while data := bytes(await self.stream.receive_some(MAX_RECV)):
                        await ahead.send(data)
            self._is_gone = True
            await self.idle_task.stop()
            await self.protocol.handle(Closed())
            nursery.cancel_scope.deadline = trio.current_time() + CLOSE_S
        # What was read ahead may have begun another request.
        await self.protocol.handle(Closed())

    async def _hand_on(self, behind: trio.MemoryReceiveChannel[bytes]) -> None:
        async for data in behind:
            await self.protocol.handle(RawData(data))


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


def _config(limits: Limits, certificate: Certificate | None) -> Config:
    config = Config()
    config.keep_alive_timeout = limits.idle_timeout_s  # pyright: ignore[reportAttributeAccessIssue]
    config.ssl_handshake_timeout = limits.handshake_timeout_s  # pyright: ignore[reportAttributeAccessIssue]
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
        self._is_taken = False
        self._limits = limits
        self.port: int = self._socket.getsockname()[1]
        scheme = "http" if certificate is None else "https"
        self.url = f"{scheme}://{address.host}:{self.port}"

    def door(self, service: Service, log: EventSink) -> HttpDoor:
        """Make the door; the socket is its own from here on."""
        context = Context(service, self._encoder, log)
        config = _config(self._limits, self._certificate)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._socket))
        self._is_taken = True
        return HttpDoor(context, config, listener, self.url)

    def close(self) -> None:
        """Stop listening, if that has not become somebody else's."""
        if not self._is_taken:
            self._socket.close()


@final
class HttpDoor:
    """The door: serves OpenAI's clients, and Prometheus, at one address."""

    def __init__(
        self, context: Context, config: Config, listener: trio.SocketListener, url: str
    ) -> None:
        """Made by an `Entrance`; takes the listener."""
        self.context = context
        self.addresses = [url]
        self._config = config
        self._listener = listener
        self._num_open = 0

    async def run(self) -> None:
        """Serve until the service has drained, or until cancelled. Checkpoints: always."""
        service = self.context.service
        app = make_app(self.context, metrics_of(service))
        await self.serve(Edge(app, service.limits.slow_reader_timeout_s))

    async def serve(self, app: ASGIApp) -> None:
        """Serve an application, until the same; the listener is closed when it returns."""
        worker = WorkerContext(None)
        wrapped = ASGIWrapper(cast("ASGIFramework", app))
        connect = partial(_Connection, wrapped, self._config, worker, {})
        serve_one = partial(self._serve_one, connect, self._config.create_ssl_context())
        service = self.context.service
        async with trio.open_nursery() as connections:
            async with self._listener, trio.open_nursery() as accepting:
                listen = partial(trio.serve_listeners, handler_nursery=connections)
                accepting.start_soon(listen, serve_one, [self._listener])
                await service.cutting.wait()
                # Who takes nothing is not waited for, however long his answer is.
                connections.cancel_scope.deadline = trio.current_time() + CLOSE_S
                await service.drained.wait()
                accepting.cancel_scope.cancel()
            await worker.terminated.set()
            connections.cancel_scope.deadline = trio.current_time() + CLOSE_S

    async def _serve_one(
        self, connect: _Connect, tls: ssl.SSLContext | None, plain: trio.SocketStream
    ) -> None:
        """Serve one connection; whatever its client makes of it ends here."""
        stream: trio.abc.Stream = plain
        if tls is not None:
            stream = trio.SSLStream(plain, tls, server_side=True, https_compatible=True)
        peer, most = peer_of(plain), self.context.service.limits.max_connections
        self._num_open += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_close_at_end, plain)
                if self._num_open > most:
                    error = Refused("too_many", f"{most} connections are open (max_connections)")
                    self.context.service.refuse(DOOR, peer, error)
                    await _turn_away(stream)
                else:
                    await connect(stream=cast("trio.SSLStream[trio.SocketStream]", stream))
                nursery.cancel_scope.cancel()
        except* Exception as broken:
            why = ", ".join(repr(leaf) for leaf in leaves(broken))
            error = Refused("protocol", f"a connection made no sense: {why}")
            self.context.service.refuse(DOOR, peer, error)
        finally:
            self._num_open -= 1


async def _turn_away(stream: trio.abc.Stream) -> None:
    """Say that there are too many, if the peer takes it in time."""
    with trio.move_on_after(GOODBYE_S), suppress(trio.BrokenResourceError):
        await stream.send_all(TOO_MANY)
        await linger(stream)


async def _close_at_end(stream: trio.SocketStream) -> None:
    """Close a socket as soon as this is cancelled; writes that hypercorn shields end with it."""
    try:
        await trio.sleep_forever()
    finally:
        await trio.aclose_forcefully(stream)
