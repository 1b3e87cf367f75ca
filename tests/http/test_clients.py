"""Clients that go, dawdle or attack: their pages come back, and nobody else is kept waiting."""

from __future__ import annotations

import json
import random
import socket

import h2.connection
import h2.events
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.protocols.events import RpcCall
from kvlease.services.openai_http import server as http_server
from tests.http.rig import ENDLESS, MODEL, Server, open_server, user
from tests.rpc.rig import until

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def asks(max_tokens: int, **extra: object) -> bytes:
    asked = {"model": MODEL, "stream": True, "max_tokens": max_tokens, **extra}
    body = json.dumps({**asked, "messages": [user("x")]}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("behind", [b"", b"\r\n", HEAD[:20], HEAD + b"\r\n" + b"x" * 200_000])
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_closing_a_request_ends_its_work(is_streamed: bool, behind: bytes) -> None:
    """Pages come back, and the engine computes no further token for it."""
    async with open_server(ENDLESS) as server:
        server.model.pause_s = 0.005
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        await stream.send_all(asks(10_000, stream=is_streamed) + behind)
        await until(lambda: server.model.num_drawn >= 3)
        await stream.aclose()
        await until(lambda: server.service.num_streams == 0)
        drawn = server.model.num_drawn
        await trio.sleep(0.1)
        assert server.model.num_drawn == drawn
        after = server.engine.statistics()
        assert (after.running, after.counters.cancelled) == (0, 1)
        assert after.device.held == 0
        assert after.ledger_ok
        (call,) = [e for e in server.events if isinstance(e, RpcCall)]
        assert call.code == "cancelled"


async def test_closing_the_clients_stream_ends_its_work() -> None:
    """The same through the real client: leaving the block is all that a user does."""
    async with open_server(ENDLESS) as server, server.client() as client:
        server.model.pause_s = 0.005
        async with await client.chat.completions.create(
            model=MODEL, messages=[user("x")], stream=True
        ) as stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
        await until(lambda: server.service.num_streams == 0)
        assert server.engine.statistics().counters.cancelled == 1


async def that_takes_little(port: int) -> trio.socket.SocketType:
    """Connect with a receive buffer so small that an answer soon has no way to go."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock = trio.socket.from_stdlib_socket(plain)
    await sock.connect(("127.0.0.1", port))
    return sock


async def test_a_client_that_takes_nothing_ends_within_the_limit_and_delays_nobody() -> None:
    async with (
        open_server(ENDLESS * 20_000, write_timeout_s=1) as server,
        server.client() as client,
    ):
        sock = await that_takes_little(server.port)
        await sock.send(asks(16_000, logprobs=True, top_logprobs=2))
        await until(lambda: server.service.num_streams == 1)
        for _ in range(3):
            with trio.fail_after(5):
                done = await client.chat.completions.create(
                    model=MODEL, messages=[user("x")], max_tokens=4
                )
            assert done.choices[0].message.content in ("ok", "tick")
        with trio.fail_after(40):
            await until(lambda: server.service.num_streams == 0)
        (call,) = [e for e in server.events if isinstance(e, RpcCall) and e.output_tokens > 4]
        assert call.code == "cancelled"
        sock.close()


async def test_a_client_that_takes_nothing_cannot_hold_a_drain_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answer is cut in time, although what is being written to it cannot be cancelled."""
    monkeypatch.setattr(http_server, "SEND_BUFFER", 1 << 12)
    monkeypatch.setattr(http_server, "CLOSE_S", 0.3)
    async with open_server(ENDLESS * 20_000, drain_timeout_s=0.2) as server:
        sock = await that_takes_little(server.port)
        await sock.send(asks(300, logprobs=True, top_logprobs=2))
        await until(lambda: server.model.num_drawn == 300)
        await trio.sleep(0.1)  # for what was drawn to be in the way of what has to be said
        with trio.fail_after(10):
            assert (await server.service.drain()).cut == 1
        sock.close()


async def test_a_stream_of_http2_that_stands_still_holds_nothing_and_loses_nothing() -> None:
    """Flow control is the client's: who opens no window would be a client for ever."""
    async with open_server(ENDLESS, slow_reader_timeout_s=2.0) as server:
        client = h2.connection.H2Connection()
        client.initiate_connection()
        body = asks(400, logprobs=True, top_logprobs=2).partition(b"\r\n\r\n")[2]
        head = [(":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", "http")]
        client.send_headers(1, [*head, (":authority", "x")])
        client.send_data(1, body, end_stream=True)
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
            await stream.send_all(client.data_to_send())
            seen: list[h2.events.Event] = []

            async def listen() -> None:
                async for piece in stream:
                    seen.extend(client.receive_data(piece))
                    await stream.send_all(client.data_to_send())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                await until(lambda: server.service.clients)
                with trio.fail_after(20):
                    await until(lambda: not server.service.clients)
                assert not any(isinstance(e, h2.events.StreamEnded) for e in seen)
                client.increment_flow_control_window(1 << 24)
                client.increment_flow_control_window(1 << 24, 1)
                await stream.send_all(client.data_to_send())
                await until(lambda: any(isinstance(e, h2.events.StreamEnded) for e in seen))
                got = b"".join(e.data for e in seen if isinstance(e, h2.events.DataReceived))
                assert got.endswith(b"[DONE]\n\n")
                nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET",
        HEAD,
        HEAD + b"Content-Length: 100\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5",
    ],
)
async def test_half_open_connections_end_within_their_limits(sent: bytes) -> None:
    """Slow-loris writers hold a socket for as long as it says here, and no stream at all."""
    async with open_server(idle_timeout_s=0.5, frame_timeout_s=0.5) as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        await stream.send_all(sent)
        with trio.fail_after(10):
            async for _ in stream:
                pass
        assert server.service.num_streams == 0
        await stream.aclose()


async def test_requests_that_are_sent_together_are_answered_in_turn() -> None:
    async with open_server("Hi.") as server:
        get = b"GET /health HTTP/1.1\r\nHost: x\r\n"
        last = get + b"Connection: close\r\n\r\n"
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        await stream.send_all(get + b"\r\n" + asks(9) + get + b"\r\n" + last)
        with trio.fail_after(5):
            got = b"".join([piece async for piece in stream])
        assert got.count(b"HTTP/1.1 200") == 4
        assert 0 < got.index(b"serving") < got.index(b"[DONE]") < got.rindex(b"serving")
        await stream.aclose()


async def test_connections_have_a_bound_though_nobody_asks_anything() -> None:
    async with open_server(max_connections=2) as server:
        idle = [await trio.open_tcp_stream("127.0.0.1", server.port) for _ in range(2)]
        await trio.sleep(0.05)
        one_more = await trio.open_tcp_stream("127.0.0.1", server.port)
        with trio.fail_after(5):
            got = b"".join([piece async for piece in one_more])
        assert got.startswith(b"HTTP/1.1 429")
        assert b"retry-after" in got
        assert server.service.refused == {"too_many": 1}
        for stream in (*idle, one_more):
            await stream.aclose()
        await trio.sleep(0.05)
        async with server.plain() as client:
            assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_that_wants_no_other_answer_sees_the_end(is_streamed: bool) -> None:
    async with open_server("Hi.") as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        whole = asks(9, stream=is_streamed)
        await stream.send_all(whole.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        with trio.fail_after(5):
            got = b"".join([piece async for piece in stream])
        assert got.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" in got or not is_streamed
        await stream.aclose()


@pytest.mark.parametrize("length", [20_000, 100_000])
@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
async def test_headers_have_a_bound(length: int, end: bytes) -> None:
    """Whole or not, however they are sent."""
    async with open_server() as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        head = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nx: "
        await stream.send_all(head + b"y" * length + end)
        with trio.fail_after(10):
            got = b"".join([piece async for piece in stream])
        assert got.startswith(b"HTTP/1.1 431")
        await stream.aclose()


async def one_client(server: Server, seed: int, whole: list[int]) -> None:
    """Stream an answer; every fifth client dies at some point of it."""
    chance = random.Random(seed)
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    async with stream:
        await stream.send_all(asks(24))
        got = b""
        dies = chance.random() < 0.2
        limit = chance.randrange(1, 3000) if dies else 1 << 30
        async for piece in stream:
            got += piece
            if len(got) > limit or b"[DONE]" in got:
                break
        if not dies:
            assert b"[DONE]" in got, got[-300:]
            whole.append(seed)
        elif chance.random() < 0.5:
            linger = b"\x01\0\0\0\0\0\0\0"
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


async def test_clients_that_die_leave_nothing_and_disturb_nobody(is_full: bool) -> None:
    count = 500 if is_full else 60
    async with open_server(*[ENDLESS] * count) as server:
        whole: list[int] = []
        with trio.fail_after(240):
            async with trio.open_nursery() as nursery:
                for seed in range(count):
                    nursery.start_soon(one_client, server, seed, whole)
        assert len(whole) > count // 2


PIECES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            HEAD,
            asks(3),
            asks(3)[:-5],
            b"\r\n\r\n",
            b"Content-Length: 3\r\n\r\n",
            b"Content-Length: -1\r\n\r\n",
            b"Transfer-Encoding: chunked\r\n\r\n",
            b"5\r\nhello\r\n0\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
            b"GET /%ff HTTP/1.1\r\nHost: x\r\n\r\n",
        ]
    ),
)


@settings(max_examples=20)
@given(st.lists(PIECES, max_size=6))
async def test_whatever_is_sent_the_next_client_is_served(pieces: list[bytes]) -> None:
    async with (
        open_server(idle_timeout_s=0.3, frame_timeout_s=0.3) as server,
        server.plain() as client,
    ):
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        try:
            for piece in pieces:
                await stream.send_all(piece)
            with trio.move_on_after(0.05):
                async for _ in stream:
                    pass
        except trio.BrokenResourceError:
            pass
        await trio.aclose_forcefully(stream)
        assert (await client.get("/health")).status_code == 200
