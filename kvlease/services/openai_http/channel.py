"""One exchange of the door: the body comes in within its bounds, the answer goes out.

Knows ASGI's messages and no protocol above them.
"""

from collections.abc import Sequence
from typing import final

import msgspec
import trio
from starlette.types import Receive, Scope, Send

from kvlease.errors import Refused
from kvlease.services.openai_http.errors import HttpError, ParameterError

Header = tuple[bytes, bytes]
_JSON: Header = (b"content-type", b"application/json")
_EVENTS: Sequence[Header] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@final
class Channel:
    """A request, and what was answered so far; Trio thread only."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Borrows all three for the exchange."""
        self.scope = scope
        self._receive = receive
        self._send = send
        self._lock = trio.Lock()
        self.has_begun = False
        self._is_whole = False

    @property
    def peer(self) -> str:
        """The client's address, without its port."""
        client = self.scope.get("client")
        return str(client[0]) if client else "unknown"

    def header(self, name: bytes) -> bytes | None:
        """Return the value of a header."""
        headers: list[Header] = self.scope["headers"]
        return next((value for key, value in headers if key.lower() == name), None)

    async def body(self, max_bytes: int, timeout_s: float) -> bytes:
        """Read the body; raises Refused for one that is too large, ParameterError for a slow one.

        Checkpoints: always.
        """
        announced = self.header(b"content-length") or b""
        if announced.isdigit() and int(announced) > max_bytes:
            raise self._too_large(max_bytes)
        pieces: list[bytes] = []
        size = 0
        with trio.move_on_after(timeout_s):
            while not self._is_whole:
                piece = await self._next_piece()
                size += len(piece)
                if size > max_bytes:
                    raise self._too_large(max_bytes)
                pieces.append(piece)
            return b"".join(pieces)
        raise ParameterError(
            f"the body was not there after {timeout_s:g} s (frame_timeout_s)", None, "too_slow"
        )

    def _too_large(self, max_bytes: int) -> Refused:
        return Refused("too_large", f"the body is over {max_bytes} bytes (max_frame_bytes)")

    async def _next_piece(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise Gone
        self._is_whole = not message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece

    async def begin_events(self) -> None:
        """Begin to answer with a stream of events, unless that has begun."""
        async with self._lock:
            if not self.has_begun:
                self.has_begun = True
                await self._start(200, _EVENTS)

    async def _start(self, status: int, headers: Sequence[Header]) -> None:
        await self._send(
            {"type": "http.response.start", "status": status, "headers": list(headers)}
        )

    async def write(self, data: bytes) -> None:
        """Send a piece of the answer; several tasks may."""
        try:
            self._lock.acquire_nowait()  # without the checkpoint that acquiring it always is
        except trio.WouldBlock:
            await self._lock.acquire()
        try:
            await self._send_body(data, is_last=False)
        finally:
            self._lock.release()

    async def end(self, data: bytes = b"") -> None:
        """Send the answer's last piece."""
        await self._send_body(data, is_last=True)

    async def _send_body(self, data: bytes, *, is_last: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def reply(
        self, data: bytes, *, status: int = 200, headers: Sequence[Header] = ()
    ) -> None:
        """Answer in one piece of JSON."""
        self.has_begun = True
        length = (b"content-length", b"%d" % len(data))
        await self._start(status, [_JSON, length, *headers])
        await self.end(data)

    async def fail(self, error: HttpError) -> None:
        """Answer with an error, or end the stream that has begun with one."""
        data = msgspec.json.encode(error.body)
        if self.has_begun:
            await self.end(b"data: " + data + b"\n\n")
        else:
            await self.reply(data, status=error.status, headers=error.headers)


class Gone(Exception):
    """The client has gone before its request was whole: nobody is left to answer."""
