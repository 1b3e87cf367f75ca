"""The RPC door: listens, greets, and hands every client that proves itself to a connection."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import final

import trio

from kvlease.errors import ConfigError, InternalError, Refused
from kvlease.protocols import rpc
from kvlease.protocols.rpc import MAX_HANDSHAKE_BYTES
from kvlease.services.rpc.address import Address, TcpAddress, UnixAddress, peer_of
from kvlease.services.rpc.connection import GOODBYE_S, Connection, code_of
from kvlease.services.rpc.framing import ByteStream, FrameError, frame_of, linger, receive_one
from kvlease.services.rpc.handshake import greeting, judge_hello
from kvlease.services.serving.service import Client, Service
from kvlease.version import __version__

BACKLOG = 1024
_GONE = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


async def open_listeners(address: Address) -> list[trio.SocketListener]:
    """Listen at an address; the caller owns the listeners. Raises ConfigError."""
    try:
        if isinstance(address, UnixAddress):
            return [_listen_unix(address.path)]
        return list(await trio.open_tcp_listeners(address.port, host=address.host, backlog=BACKLOG))
    except OSError as error:
        raise ConfigError(f"cannot listen at {address}: {error.strerror or error}") from error


def _listen_unix(path: str) -> trio.SocketListener:
    """Listen at a path that only this user may open, in the place of a socket nobody serves."""
    plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_stale(path):
            Path(path).unlink()
        before = os.umask(0o177)
        try:
            plain.bind(path)
        finally:
            os.umask(before)
        plain.listen(BACKLOG)
        return trio.SocketListener(trio.socket.from_stdlib_socket(plain))
    except BaseException:
        plain.close()
        raise


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        Path(path).unlink(missing_ok=True)


def _is_stale(path: str) -> bool:
    """Whether a socket's file is left over from a server that is gone."""
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError as error:
            return error.errno == errno.ECONNREFUSED
    return False


def bound_address(listener: trio.SocketListener) -> Address:
    """Return where a listener really listens."""
    name = listener.socket.getsockname()
    if isinstance(name, str):
        return UnixAddress(name)
    return TcpAddress(name[0], name[1])


@final
class RpcDoor:
    """Serves RPC clients at any number of listeners.

    Attributes:
        num_unknown: connections that have not proven yet who they are.
    """

    def __init__(
        self,
        service: Service,
        listeners: Sequence[trio.SocketListener],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Takes the listeners; with ``tls`` those on TCP speak it."""
        self.num_unknown = 0
        self._service = service
        self._listeners = list(listeners)
        self._bound = [bound_address(listener) for listener in self._listeners]
        self._tls = tls

    @property
    def addresses(self) -> list[str]:
        """Where it listens, as people write it."""
        return [str(address) for address in self._bound]

    async def run(self) -> None:
        """Serve until the service has drained and every client was told, or until cancelled.

        Checkpoints: always. The listeners are closed when it returns.
        """
        paths = [a.path for a in self._bound if isinstance(a, UnixAddress)]
        try:
            async with trio.open_nursery() as clients:
                clients.start_soon(self._listen, clients)
        finally:
            _remove(paths)

    async def _listen(self, clients: trio.Nursery) -> None:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(self._accept, clients)
            await self._service.drain_asked.wait()
            await self._service.drain()
            accepting.cancel_scope.cancel()

    async def _accept(self, clients: trio.Nursery) -> None:
        await trio.serve_listeners(self._serve, self._listeners, handler_nursery=clients)

    async def _serve(self, plain: trio.SocketStream) -> None:
        """Serve one connection from its first byte to its last; whatever it does ends here."""
        peer = peer_of(plain)
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] = plain
        try:
            if self._tls is not None and plain.socket.family != socket.AF_UNIX:
                stream = trio.SSLStream(plain, self._tls, server_side=True, https_compatible=True)
            client = await self._let_in(stream, peer)
            if client is not None:
                await self._serve_client(stream, client)
        except _GONE:
            pass
        except InternalError:
            raise
        except Exception as error:
            self._service.refuse("rpc", peer, Refused("internal", f"a mistake: {error!r}"))
        finally:
            await trio.aclose_forcefully(plain)

    async def _serve_client(self, stream: ByteStream, client: Client) -> None:
        """Serve a client that is known; a mistake of ours ends its connection and no other."""
        reason = "cancelled"
        try:
            reason = await Connection(stream, self._service, client).run()
        except InternalError:
            raise
        except Exception as error:
            reason = f"internal: {error!r}"
            text = "the server made a mistake, which is in its log"
            await _turn_away(stream, self._service.refuse_client(client, "internal", text))
        finally:
            self._service.leave(client, reason)

    async def _let_in(self, stream: ByteStream, peer: str) -> Client | None:
        """Do the handshake, within its time; None for who is turned away or goes.

        Those who have not proven themselves are bounded like those who have, so that they cannot
        keep anybody else out for longer than a handshake may take.
        """
        limits = self._service.limits
        self.num_unknown += 1
        try:
            if self.num_unknown > limits.max_connections:
                text = f"{limits.max_connections} handshakes are under way (max_connections)"
                raise Refused("too_many", text, limits.handshake_timeout_s)
            with trio.move_on_after(limits.handshake_timeout_s):
                return await self._shake_hands(stream, peer)
            seconds = limits.handshake_timeout_s
            raise Refused("idle", f"the handshake was not over after {seconds:g} s")
        except Refused as error:
            refusal = error
        except FrameError as error:
            refusal = Refused(error.code, str(error))
        finally:
            self.num_unknown -= 1
        await _turn_away(stream, self._service.refuse("rpc", peer, refusal))
        return None

    async def _shake_hands(self, stream: ByteStream, peer: str) -> Client | None:
        service, limits = self._service, self._service.limits
        greeted = greeting(service.tenants)
        await stream.send_all(frame_of(greeted))
        body = await receive_one(stream, MAX_HANDSHAKE_BYTES)
        if body is None:
            return None
        tenant, mac = judge_hello(body, greeted, service.tenants)
        client = service.enter("rpc", peer, tenant)
        model = service.engine.model
        welcome = rpc.Welcome(
            mac,
            f"kvlease {__version__}",
            service.engine.model_name,
            model.vocab_size,
            model.schema.page_tokens,
            limits.max_frame_bytes,
            limits.max_streams_per_client,
            limits.idle_timeout_s,
            service.incarnation,
        )
        try:
            await stream.send_all(frame_of(welcome))
        except BaseException:
            service.leave(client, "lost")
            raise
        return client


async def _turn_away(stream: ByteStream, error: Refused) -> None:
    """Say why, if the peer takes it in time."""
    goodbye = rpc.Goodbye(code_of(error), str(error), error.retry_after_s)
    with trio.move_on_after(GOODBYE_S):
        await stream.send_all(frame_of(goodbye))
        await linger(stream)


@asynccontextmanager
async def open_door(
    service: Service, addresses: Sequence[Address], tls: ssl.SSLContext | None = None
) -> AsyncGenerator[RpcDoor]:
    """Open a door at some addresses for a block; leaving it ends every connection.

    Checkpoints: on entry and exit. Raises ConfigError if an address cannot be listened at.
    """
    listeners = [one for address in addresses for one in await open_listeners(address)]
    door = RpcDoor(service, listeners, tls)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(door.run)
        yield door
        nursery.cancel_scope.cancel()
