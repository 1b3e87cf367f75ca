"""Frames over a byte stream: whole ones in, coalesced ones out, and no wait without an end.

A frame is four bytes of length, big-endian, and so many bytes. This module does not know what is
in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias, final

import msgspec
import trio

from kvlease.protocols.rpc import HEADER_BYTES, Code

READ_BYTES = 1 << 17
"""Read at once."""
HIGH_WATER_BYTES = 1 << 18
"""Whoever answers waits for the peer to read while more than this is unsent."""

ByteStream: TypeAlias = trio.abc.Stream
"""A connected socket, with or without TLS."""

_encode_into = msgspec.msgpack.Encoder().encode_into


class FrameError(Exception):
    """The peer breaks the framing, or is too slow for it; ``code`` says which."""

    def __init__(self, code: Code, message: str) -> None:
        """Keep the code beside the sentence."""
        super().__init__(message)
        self.code: Code = code


def append_frame(message: msgspec.Struct, buffer: bytearray) -> None:
    """Encode a message behind what is in the buffer, with its length in front."""
    start = len(buffer)
    buffer += b"\0\0\0\0"
    _encode_into(message, buffer, -1)
    buffer[start : start + HEADER_BYTES] = (len(buffer) - start - HEADER_BYTES).to_bytes(4, "big")


def frame_of(message: msgspec.Struct) -> bytearray:
    """Return one message as a frame."""
    buffer = bytearray()
    append_frame(message, buffer)
    return buffer


async def linger(stream: ByteStream) -> None:
    """Read what the peer still sends and drop it, until it closes; the caller bounds the time.

    A socket that is closed with bytes unread resets the connection, and the peer may never see the
    last frame, which says what it did wrong. Checkpoints: always.
    """
    if isinstance(stream, trio.SocketStream):
        await stream.send_eof()
    while await stream.receive_some(READ_BYTES):
        pass


async def receive_one(stream: ByteStream, max_bytes: int) -> bytes | None:
    """Receive exactly one frame and not a byte more; None if the peer has gone before its first.

    For handshakes: nothing is read of what comes behind it. Raises FrameError for one that is too
    long or cut off. Checkpoints: always.
    """
    head = await _exactly(stream, HEADER_BYTES)
    if head is None:
        return None
    length = int.from_bytes(head, "big")
    if length > max_bytes:
        raise FrameError("too_large", f"a frame of {length} bytes; {max_bytes} may be sent here")
    body = await _exactly(stream, length)
    if body is None:
        raise FrameError("protocol", "the connection ended inside a frame")
    return body


async def _exactly(stream: ByteStream, length: int) -> bytes | None:
    got = bytearray()
    while len(got) < length:
        chunk = await stream.receive_some(length - len(got))
        if not chunk:
            if got:
                raise FrameError("protocol", "the connection ended inside a frame")
            return None
        got += chunk
    return bytes(got)


@final
class FrameReader:
    """Whole frames of one stream, with bounds on their size and on the time between and in them.

    Attributes:
        nbytes: received so far.
    """

    def __init__(
        self, stream: ByteStream, *, max_bytes: int, frame_timeout_s: float, idle_timeout_s: float
    ) -> None:
        """Borrow a stream that stands at the beginning of a frame."""
        self.nbytes = 0
        self._stream = stream
        self._max_bytes = max_bytes
        self._frame_timeout_s = frame_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._buffer: bytearray = bytearray()
        self._frame_end_s = math.inf

    async def receive(self) -> list[bytes]:
        """Return the frames that have come whole, at least one; empty when the peer has gone.

        Checkpoints: always. Raises FrameError, and what the stream raises.
        """
        idle_end_s = trio.current_time() + self._idle_timeout_s
        while True:
            end_s = self._frame_end_s if self._buffer else idle_end_s
            chunk: bytes | None = None
            with trio.CancelScope(deadline=end_s):
                chunk = bytes(await self._stream.receive_some(READ_BYTES))
            if chunk is None:
                raise self._too_slow()
            if not chunk:
                if self._buffer:
                    raise FrameError("protocol", "the connection ended inside a frame")
                return []
            self.nbytes += len(chunk)
            if not self._buffer:
                self._frame_end_s = trio.current_time() + self._frame_timeout_s
            self._buffer += chunk
            if frames := self._take():
                return frames

    def _too_slow(self) -> FrameError:
        if self._buffer:
            seconds = self._frame_timeout_s
            return FrameError("idle", f"a frame was not complete after {seconds:g} s")
        return FrameError("idle", f"no frame came in {self._idle_timeout_s:g} s; send pings")

    def _take(self) -> list[bytes]:
        """Cut whole frames off the buffer's front."""
        buffer, frames, start = self._buffer, list[bytes](), 0
        with memoryview(buffer) as view:
            while len(buffer) - start >= HEADER_BYTES:
                body = start + HEADER_BYTES
                length = int.from_bytes(view[start:body], "big")
                if length > self._max_bytes:
                    raise FrameError(
                        "too_large", f"a frame of {length} bytes; {self._max_bytes} may be sent"
                    )
                if len(buffer) < body + length:
                    break
                frames.append(bytes(view[body : body + length]))
                start = body + length
        if start:
            del buffer[:start]
            self._frame_end_s = trio.current_time() + self._frame_timeout_s
        return frames


@final
class FrameWriter:
    """Sends frames from one task, so that what is ready together goes out in one write.

    ``refill`` is asked for more right before each write: it appends to the buffer what has become
    ready while the last one was under way.

    Attributes:
        nbytes: handed to the stream so far.
    """

    def __init__(
        self,
        stream: ByteStream,
        *,
        timeout_s: float,
        refill: Callable[[bytearray], None] | None = None,
    ) -> None:
        """Borrow a stream; nothing is sent before `run`."""
        self.nbytes = 0
        self._stream = stream
        self._timeout_s = timeout_s
        self._refill = refill
        self._buffer: bytearray = bytearray()
        self._wake = trio.Event()
        self._sent = trio.Event()
        self._is_finishing = False
        self._is_over = False

    def put(self, message: msgspec.Struct) -> None:
        """Send a message soon, behind those put before; nothing happens after `finish`."""
        if not self._is_finishing:
            append_frame(message, self._buffer)
            self._wake.set()

    def wake(self) -> None:
        """Ask `refill` soon."""
        self._wake.set()

    def finish(self, message: msgspec.Struct) -> None:
        """Send what is ready now, then this, and nothing more: `run` returns."""
        if not self._is_finishing:
            self._fill()
            self.put(message)
            self._is_finishing = True

    def _fill(self) -> None:
        if self._refill is not None and not self._is_finishing:
            self._refill(self._buffer)

    async def room(self) -> None:
        """Wait until the peer has read enough, or `run` has ended: a peer that never does ends it.

        Checkpoints: only if it waits.
        """
        while len(self._buffer) > HIGH_WATER_BYTES and not self._is_over:
            await self._sent.wait()

    async def run(self) -> None:
        """Send until finished.

        Checkpoints: always. Raises FrameError if the peer does not read, and what the stream does.
        """
        try:
            await self._run()
        finally:
            self._is_over = True
            self._sent.set()

    async def _run(self) -> None:
        while True:
            self._wake = trio.Event()
            self._fill()
            if self._buffer:
                await self._write()
            elif self._is_finishing:
                return
            else:
                await self._wake.wait()

    async def _write(self) -> None:
        chunk, self._buffer = self._buffer, bytearray()
        with trio.move_on_after(self._timeout_s) as scope:
            await self._stream.send_all(chunk)
        if scope.cancelled_caught:
            raise FrameError(
                "slow_reader", f"what was sent was not read within {self._timeout_s:g} s"
            )
        self.nbytes += len(chunk)
        self._sent.set()
        self._sent = trio.Event()
