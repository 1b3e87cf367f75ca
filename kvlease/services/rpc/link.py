"""One connection as a client holds it, from the handshake to its end; never used again then.

Whatever ends it ends every call on it: a link does not know which of them the server carried out.
"""

from __future__ import annotations

import ssl
from typing import final

import msgspec
import trio

from kvlease.errors import ConnectionLost, KVLeaseError, Refused
from kvlease.protocols import rpc
from kvlease.protocols.rpc import MAX_HANDSHAKE_BYTES
from kvlease.services.rpc.address import Address, UnixAddress
from kvlease.services.rpc.answers import Waiting
from kvlease.services.rpc.framing import (
    ByteStream,
    FrameError,
    FrameReader,
    FrameWriter,
    frame_of,
    receive_one,
)
from kvlease.services.rpc.handshake import answer_greeting, judge_verdict

MAX_FRAME_BYTES = 1 << 28
"""A server's frames are of its own making; this bounds what a broken one could take."""
_decode = msgspec.msgpack.Decoder(rpc.ServerMessage).decode
_BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError, FrameError, msgspec.MsgspecError)


async def open_stream(address: Address, tls: ssl.SSLContext | None) -> ByteStream:
    """Connect a socket; raises OSError."""
    if isinstance(address, UnixAddress):
        return await trio.open_unix_socket(address.path)
    plain = await trio.open_tcp_stream(address.host, address.port)
    if tls is None:
        return plain
    return trio.SSLStream(plain, tls, server_hostname=address.host, https_compatible=True)


@final
class Link:
    """A live connection and the calls on it.

    Attributes:
        welcome: what the server said of itself.
        lost: why it is of no use any more; None while it is.
    """

    def __init__(self, stream: ByteStream, welcome: rpc.Welcome) -> None:
        """Made by `open_link`; takes the stream."""
        self.welcome = welcome
        self.lost: KVLeaseError | None = None
        self._stream = stream
        idle_s = welcome.idle_timeout_s
        self._reader = FrameReader(
            stream, max_bytes=MAX_FRAME_BYTES, frame_timeout_s=idle_s, idle_timeout_s=idle_s
        )
        self.writer = FrameWriter(stream, timeout_s=idle_s)
        self._calls: dict[int, Waiting] = {}

    def begin(self, call: int, waiting: Waiting, message: rpc.ClientMessage) -> None:
        """Send a call's first message; its answers go to ``waiting`` from now on."""
        if self.lost is not None:
            raise self.lost
        self._calls[call] = waiting
        self.writer.put(message)

    def forget(self, call: int) -> None:
        """Drop what may still come for a call."""
        self._calls.pop(call, None)

    async def run(self) -> None:
        """Carry messages until the connection ends; then every call on it ends. Raises nothing.

        Checkpoints: always.
        """
        error: KVLeaseError = ConnectionLost("the client was closed")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, nursery)
                nursery.start_soon(self._stay)
                error = await self._receive()
                nursery.cancel_scope.cancel()
        finally:
            self.lost = error
            calls, self._calls = self._calls, {}
            for waiting in calls.values():
                waiting.close(error)
            await trio.aclose_forcefully(self._stream)

    async def _send(self, nursery: trio.Nursery) -> None:
        try:
            await self.writer.run()
        except _BROKEN:
            # What the server said last may still be there to be read.
            with trio.move_on_after(1.0):
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()

    async def _stay(self) -> None:
        number = 0
        while True:
            await trio.sleep(self.welcome.idle_timeout_s / 3)
            number += 1
            self.writer.put(rpc.Ping(number))

    async def _receive(self) -> KVLeaseError:
        """Hand messages to their calls; returns why there will be no more."""
        try:
            while frames := await self._reader.receive():
                for body in frames:
                    goodbye = self._take(_decode(body))
                    if goodbye is not None:
                        return Refused(goodbye.code, goodbye.message, goodbye.retry_after_s)
        except _BROKEN as error:
            return ConnectionLost(
                f"the connection broke ({_why(error)}); calls under way may or may not have been"
                " carried out, and are not repeated"
            )
        return ConnectionLost(
            "the server closed the connection; calls under way may or may not have been carried"
            " out, and are not repeated"
        )

    def _take(self, message: rpc.ServerMessage) -> rpc.Goodbye | None:
        calls = self._calls
        match message:
            case rpc.Tokens():
                for piece in message.pieces:
                    waiting = calls.get(piece.call)
                    if waiting is not None:
                        waiting.feed(piece)
            case rpc.Ended() | rpc.Failed():
                waiting = calls.pop(message.call, None)
                if waiting is not None:
                    waiting.close(message)
            case rpc.Goodbye():
                return message
            case rpc.Pong():
                pass
            case rpc.CacheEvents():
                waiting = calls.get(message.call)
                if waiting is not None:
                    waiting.changed(message)
            case _:
                waiting = calls.pop(message.call, None)
                if waiting is not None:
                    waiting.answer(message)
        return None


async def open_link(
    address: Address, tenant: str, secret: bytes, tls: ssl.SSLContext | None
) -> Link:
    """Connect and shake hands; the caller runs the link, which owns the connection.

    Checkpoints: always. Raises OSError if nobody answers, Refused if the server lets nobody in, or
    is not the one that knows the secret, ConnectionLost if it breaks.
    """
    stream = await open_stream(address, tls)
    try:
        body = await _receive_one(stream)
        greeted, hello = answer_greeting(body, tenant, secret)
        await stream.send_all(frame_of(hello))
        welcome = judge_verdict(await _receive_one(stream), greeted, hello, secret)
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        await trio.aclose_forcefully(stream)
        sentence = f"the handshake with {address} broke ({_why(error)})"
        if isinstance(error.__cause__, ssl.SSLError) and not isinstance(
            error.__cause__, ssl.SSLEOFError
        ):
            # It does not speak TLS, or is not the one that it says: trying again changes nothing.
            raise Refused("protocol", sentence) from error
        raise ConnectionLost(sentence) from error
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return Link(stream, welcome)


async def _receive_one(stream: ByteStream) -> bytes:
    try:
        body = await receive_one(stream, MAX_HANDSHAKE_BYTES)
    except FrameError as error:
        raise Refused("protocol", f"no kvlease server answers at this address: {error}") from None
    if body is None:
        raise ConnectionLost(
            "the server closed the connection before the handshake was over; one with a"
            " certificate wants tls="
        )
    return body


def _why(error: BaseException) -> str:
    return str(error.__cause__ or error) or type(error).__name__
