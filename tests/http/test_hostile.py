"""Connections that make no sense, in both versions of HTTP: each ends alone, and nobody notices."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress

import hpack
import hyperframe.frame as h2
import pytest
import trio

from tests.http.rig import ENDLESS, Server, open_server
from tests.http.test_clients import asks
from tests.rpc.rig import RESETS, connect_and_reset, until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + h2.SettingsFrame(0).serialize()
UPGRADE = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: "
POST = {":method": "POST", ":path": "/v1/chat/completions", ":scheme": "http", ":authority": "x"}
NO_END = frozenset[str]()
END = frozenset(["END_STREAM"])


def head(fields: Mapping[str, str | bytes], stream: int = 1, flags: frozenset[str] = END) -> bytes:
    frame = h2.HeadersFrame(stream)
    encoded = {k.encode(): v if isinstance(v, bytes) else v.encode() for k, v in fields.items()}
    frame.data = hpack.Encoder().encode(encoded.items())
    for flag in {"END_HEADERS", *flags}:
        frame.flags.add(flag)
    return bytes(frame.serialize())


def asks_body(max_tokens: int) -> bytes:
    return asks(max_tokens).partition(b"\r\n\r\n")[2]


def data(body: bytes, stream: int = 1, flags: frozenset[str] = END) -> bytes:
    frame = h2.DataFrame(stream, body)
    for flag in flags:
        frame.flags.add(flag)
    return bytes(frame.serialize())


def reset(stream: int) -> bytes:
    return bytes(h2.RstStreamFrame(stream, error_code=8).serialize())


def priorities() -> Iterator[bytes]:
    for stream in range(1, 2600, 2):
        frame = h2.PriorityFrame(stream + 2, depends_on=0, stream_weight=5)
        yield bytes(frame.serialize())


def resets() -> Iterator[bytes]:
    for stream in range(1, 400, 2):
        yield head(POST, stream, NO_END) + reset(stream)


def headers_without_end() -> Iterator[bytes]:
    yield bytes(h2.HeadersFrame(1, data=b"").serialize())
    for _ in range(2000):
        yield bytes(h2.ContinuationFrame(1, data=b"").serialize())


def bomb() -> bytes:
    """One long field, named again ten thousand times in a byte each."""
    coder = hpack.Encoder()
    first = coder.encode(
        [*((k.encode(), v.encode()) for k, v in POST.items()), (b"x", b"y" * 3900)]
    )
    frame = h2.HeadersFrame(1, data=first + coder.encode([(b"x", b"y" * 3900)]) * 10_000)
    frame.flags.add("END_HEADERS")
    return bytes(frame.serialize())


HTTP2: dict[str, bytes] = {
    "a path that is no ASCII": head({**POST, ":path": b"/\xff"}),
    "a method that is no ASCII": head({**POST, ":method": b"P\xff"}),
    "a tunnel to nowhere": head({":method": "CONNECT", ":authority": "x"}, 1, NO_END) + data(b"x"),
    "priorities of streams that are none": b"".join(priorities()),
    "a stream behind itself": bytes(h2.PriorityFrame(3, depends_on=3).serialize()),
    "streams that are reset at once": b"".join(resets()),
    "headers without an end": b"".join(headers_without_end()),
    "headers that unpack to much": bomb(),
    "a body without headers": data(b"x"),
    "a body longer than it says": head({**POST, "content-length": "1"}, 1, NO_END) + data(b"xxx"),
    "no method": head({"x": "y"}),
    "a stream of the server's": head(POST, 2),
    "a window over its bound": bytes(h2.WindowUpdateFrame(0, 2**31 - 1).serialize()) * 2,
    "an answer reset": head(POST, 1, NO_END) + data(asks_body(9)) + reset(1),
    "settings without end": bytes(h2.SettingsFrame(0).serialize()) * 2000,
}  # fmt: skip
HTTP1: dict[str, bytes] = {
    "an upgrade with settings that are none": UPGRADE + b"h2c\r\nHTTP2-Settings: !!!\r\n\r\n",
    "an upgrade to HTTP/2 and no more of it": UPGRADE + b"h2c\r\n\r\n" + b"x" * 200,
    "a web socket and noise": UPGRADE + b"websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n\x81\xff" + b"\xff" * 200,
    "half of a preface": b"PRI * HTTP/2.0\r\n\r\n" + b"x" * 200,
}


async def is_served(server: Server) -> None:
    async with server.plain() as client:
        assert (await client.get("/health")).status_code == 200


async def test_a_connection_that_makes_no_sense_ends_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Several of these raise in hypercorn, which would have ended the whole server."""
    async with open_server(*[ENDLESS] * 9, idle_timeout_s=0.5, frame_timeout_s=0.5) as server:
        attacks = {**{name: PREFACE + sent for name, sent in HTTP2.items()}, **HTTP1}
        for name, sent in attacks.items():
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
            try:
                await stream.send_all(sent)
                with trio.move_on_after(0.05):
                    async for _ in stream:
                        pass
            except trio.BrokenResourceError:
                pass
            await trio.aclose_forcefully(stream)
            try:
                await is_served(server)
            except OSError as error:
                raise AssertionError(name) from error
        assert server.service.refused["protocol"] >= 5, "they are in the access log"
    assert not caplog.records, "strangers write no tracebacks"


async def test_a_head_that_makes_no_sense_is_no_news_to_the_requests_beside_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are being answered when the connection breaks: hypercorn ends them all, that one too."""
    rng = random.Random(1)
    get = {**POST, ":method": "GET", ":path": "/health"}
    good, bad = (
        b"".join(head(get, n) for n in range(1, 81, 2)),
        head({**get, ":path": b"/\xff"}, 99),
    )
    async with open_server() as server:
        for _ in range(60):
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
            with suppress(trio.BrokenResourceError):
                await stream.send_all(PREFACE + good)
                await trio.sleep(rng.random() * 0.01)
                await stream.send_all(bad)
            stream.socket.setsockopt(socket.SOL_SOCKET, *RESETS)
            await trio.aclose_forcefully(stream)
        await is_served(server)
    assert not caplog.records


async def test_who_has_gone_before_being_accepted_is_nobody() -> None:
    """A socket that was reset while it waited has no peer, which ends no server."""
    async with open_server() as server:
        connect_and_reset(server.port, 5)
        await is_served(server)


@pytest.mark.parametrize("path", ["/nowhere", "/v1/chat/completions"])
async def test_a_body_that_nobody_wants_is_read_and_its_connection_lives(path: str) -> None:
    """Answered before it had come, it would end the connection, and every stream on it."""
    async with open_server(max_frame_bytes=100) as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        early = head({**POST, ":path": path, "content-length": "300"}, 1, NO_END)
        await stream.send_all(PREFACE + early)
        for place in range(3):
            await trio.sleep(0.05)
            await stream.send_all(data(b"x" * 100, 1, END if place == 2 else NO_END))
        await stream.send_all(head({**POST, ":method": "GET", ":path": "/health"}, 3))
        got = b""
        with trio.fail_after(5):
            while b'"serving"' not in got:
                piece = await stream.receive_some()
                assert piece, got
                got += piece
        assert b"invalid_request_error" in got
        await stream.aclose()
    assert not server.service.refused["protocol"]


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/chat/completions"])
async def test_who_leaves_no_window_and_goes_leaves_nothing_behind(path: str) -> None:
    """An answer that can never be sent would hold its connection, and its file, for ever."""
    async with open_server(slow_reader_timeout_s=0.3) as server:
        before = len(os.listdir("/proc/self/fd"))
        no_window = h2.SettingsFrame(0, settings={4: 0}).serialize()
        method = {":method": "GET" if path == "/health" else "POST"}
        for leaves in (True, False):
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
            await stream.send_all(PREFACE + bytes(no_window))
            await stream.send_all(head({**POST, **method, ":path": path}))
            await trio.sleep(0.1)
            if leaves:
                await trio.aclose_forcefully(stream)
            else:
                await until(lambda: not server.service.clients)
                await trio.sleep(0.5)
                await trio.aclose_forcefully(stream)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_a_stream_that_is_reset_ends_its_work_and_not_its_neighbours() -> None:
    """Twenty answers on one connection; half are reset when they have begun."""
    async with open_server(*[ENDLESS] * 20) as server:
        server.model.pause_s = 0.002
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        asked = b"".join(head(POST, n, NO_END) + data(asks_body(150), n) for n in range(1, 40, 2))
        await stream.send_all(PREFACE + asked)
        await until(lambda: server.model.num_drawn > 100)
        await stream.send_all(b"".join(reset(number) for number in range(1, 40, 4)))
        await until(lambda: server.engine.statistics().counters.cancelled == 10)
        window = h2.WindowUpdateFrame(0, 1 << 24).serialize()
        windows = [h2.WindowUpdateFrame(n, 1 << 24).serialize() for n in range(3, 40, 4)]
        await stream.send_all(bytes(window) + b"".join(map(bytes, windows)))
        got = b""
        with trio.fail_after(20):
            while got.count(b"[DONE]") < 10:
                piece = await stream.receive_some()
                assert piece, got[-300:]
                got += piece
        assert server.engine.statistics().counters.output_tokens < 20 * 150
        await trio.aclose_forcefully(stream)
