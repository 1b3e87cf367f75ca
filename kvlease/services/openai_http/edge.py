"""What holds for every request of the door, whichever endpoint it is for.

Headers have a bound, and a request that is answered before its body has come is read to its end
first. Knows ASGI's messages and no protocol above them.
"""

from typing import final

import msgspec
import trio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlease.services.openai_http.replies import ErrorBody, ErrorReply

MAX_HEADER_BYTES = 16_384
LINGER_S = 2.0
"""How long a body that nobody wants is still read, so that its sender hears why."""


@final
class Edge:
    """An application inside the bounds of the door."""

    def __init__(self, app: ASGIApp) -> None:
        """Borrows the application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Checkpoints: always."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not await body.is_taken():
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        if _header_bytes(scope) > MAX_HEADER_BYTES:
            await _refuse_headers(answer)
        else:
            await self._app(scope, body.receive, answer)


@final
class _Body:
    """What is still to come of a request."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_whole = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._is_whole = True
        return message

    async def is_taken(self) -> bool:
        """Read what is left and drop it, for a while; returns whether all of it came.

        A client that is still sending would otherwise see a broken connection and no answer.
        """
        with trio.move_on_after(LINGER_S):
            while not self._is_whole:
                await self.receive()
        return self._is_whole


def _header_bytes(scope: Scope) -> int:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    line: int = len(scope["raw_path"]) + len(scope["query_string"])
    return line + sum(len(name) + len(value) + 4 for name, value in headers)


async def _refuse_headers(send: Send) -> None:
    text = f"the headers are over {MAX_HEADER_BYTES} bytes"
    data = msgspec.json.encode(ErrorReply(ErrorBody(text, "invalid_request_error", None, None)))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": 431, "headers": headers})
    await send({"type": "http.response.body", "body": data})
