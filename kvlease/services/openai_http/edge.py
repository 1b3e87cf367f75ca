"""What holds for every request of the door, whichever endpoint it is for.

Headers have a bound; a request that is answered before its body has come is read to its end first;
and a client that has gone, or takes nothing, takes its request with it. hypercorn alone would wait
for ever to send what a client of HTTP/2 has left no window for. Knows ASGI's messages and no
protocol above them.
"""

from contextlib import suppress
from typing import final

import msgspec
import trio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlease.runtime.nurseries import open_flat_nursery
from kvlease.services.openai_http.replies import ErrorBody, ErrorReply

MAX_HEADER_BYTES = 16_384
LINGER_S = 2.0
"""How long a body that nobody wants is still read, so that its sender hears why."""
TOO_SLOW = 408
"""The status of a body that has had its time."""
ENDING_S = 1.0
"""How long an answer's last piece may still take when its client is told to have gone."""


@final
class Edge:
    """An application inside the bounds of the door."""

    def __init__(self, app: ASGIApp, patience_s: float) -> None:
        """Borrows the application; a client may take so long for one piece of an answer."""
        self._app = app
        self._patience_s = patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Checkpoints: always."""
        exchange = _Exchange(receive, send)
        async with open_flat_nursery() as nursery:
            nursery.start_soon(exchange.cancel_when_gone, nursery.cancel_scope)
            nursery.start_soon(exchange.cancel_when_stuck, self._patience_s, nursery.cancel_scope)
            if scope["type"] != "http":
                await _refuse_socket(exchange.send)
            elif _header_bytes(scope) > MAX_HEADER_BYTES:
                await _refuse_headers(exchange.send)
            else:
                await self._app(scope, exchange.receive, exchange.send)
            nursery.cancel_scope.cancel()


@final
class _Exchange:
    """A request as it comes, and its answer as it goes."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_whole = trio.Event()
        self._is_gone = self._is_ending = False
        self._writing_since_s: float | None = None

    async def receive(self) -> Message:
        """Return what comes next; once the request is whole there is nothing more."""
        if self._is_whole.is_set():
            await trio.sleep_forever()
        message = await self._receive()
        self._is_gone = message["type"].endswith(".disconnect")
        if not message.get("more_body", False):
            self._is_whole.set()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if not await self._take_body(0.0 if message["status"] == TOO_SLOW else LINGER_S):
                message["headers"] = [*message["headers"], (b"connection", b"close")]
        elif message["type"] == "http.response.body":
            self._is_ending = not message.get("more_body", False)
        self._writing_since_s = trio.current_time()
        try:
            await self._send(message)
        finally:
            self._writing_since_s = None

    async def _take_body(self, patience_s: float) -> bool:
        """Read what is left and drop it, for a while; returns whether all of it came.

        A client that is still sending would otherwise see a broken connection and no answer.
        """
        with trio.move_on_after(patience_s):
            while not self._is_whole.is_set():
                await self.receive()
            return True
        self._is_whole.set()  # for the application, which reads no more
        return False

    async def cancel_when_gone(self, scope: trio.CancelScope) -> None:
        """Wait for the client to go, once the application reads no more of its request."""
        await self._is_whole.wait()
        while not self._is_gone:
            self._is_gone = (await self._receive())["type"].endswith(".disconnect")
        if self._is_ending:
            # hypercorn says the same when the answer has been sent and it closes the connection.
            await trio.sleep(ENDING_S)
        scope.cancel()

    async def cancel_when_stuck(self, limit_s: float, scope: trio.CancelScope) -> None:
        """Wait for a piece of the answer that the client takes too long for.

        Over HTTP/2 a stream can stand still on a connection that is alive.
        """
        while True:
            await trio.sleep(limit_s / 4)
            since_s = self._writing_since_s
            if since_s is not None and trio.current_time() - since_s > limit_s:
                scope.cancel()


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


async def _refuse_socket(send: Send) -> None:
    """Answer who asks for a web socket; what a broken handshake makes of that is no news."""
    with suppress(Exception):
        await send({"type": "websocket.close"})
