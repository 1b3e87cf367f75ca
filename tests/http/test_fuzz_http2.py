"""Frames of HTTP/2 in any order, from clients that leave at any time: nothing of them stays."""

from __future__ import annotations

import os
import random
import time

import hyperframe.frame as h2
import pytest
import trio

from tests.http.rig import Server, open_server
from tests.http.test_hostile import (
    END,
    NO_END,
    POST,
    PREFACE,
    UPGRADE,
    asks_body,
    data,
    head,
    is_served,
    reset,
)
from tests.rpc.rig import until

SETTINGS = (0, 1, 100, 16_384, 65_535, 2**31 - 1, 2**32 - 1)
METHODS: tuple[str | bytes, ...] = ("GET", "POST", "CONNECT", b"\xff")
PATHS: tuple[str | bytes, ...] = (
    "/health",
    "/",
    "*",
    b"/\xff",
    "/metrics?" + "x" * 300,
    "/v1/models/%00",
)


def some_frame(chance: random.Random, stream: int) -> bytes:
    """Make a frame that means something, somewhere."""
    flags = chance.choice([END, NO_END])
    method = chance.choice(METHODS)
    body = chance.choice([asks_body(chance.randrange(1, 40)), b"x" * chance.randrange(2000)])
    to = chance.choice([0, stream])
    setting = {chance.choice([1, 2, 3, 4, 5, 6, 8, 77]): chance.choice(SETTINGS)}
    priority = h2.PriorityFrame(stream, depends_on=chance.choice([0, stream, 1, 9]))
    whole = bytearray(head(POST, stream, NO_END) + data(asks_body(5), stream))
    whole[chance.randrange(len(whole))] = chance.randrange(256)
    kinds = [
        head(POST, stream, flags),
        head({**POST, ":method": method, ":path": chance.choice(PATHS)}, stream, flags),
        head({**POST, chance.choice(["te", "content-length", "x"]): "y" * 300}, stream, flags),
        data(body, stream, flags),
        reset(stream),
        priority.serialize(),
        h2.SettingsFrame(0, settings=setting).serialize(),
        h2.WindowUpdateFrame(to, chance.choice([1, 100, 2**31 - 1])).serialize(),
        h2.PingFrame(0, opaque_data=bytes(8)).serialize(),
        h2.GoAwayFrame(0, last_stream_id=chance.randrange(9)).serialize(),
        h2.ContinuationFrame(stream, data=chance.randbytes(9)).serialize(),
        chance.randbytes(chance.randrange(60)),
        bytes(whole),
    ]
    return bytes(chance.choice(kinds))


async def vandal(server: Server, chance: random.Random, until_s: float) -> None:
    """Open connections, throw frames at them, and leave."""
    beginnings = [PREFACE] * 8 + [b"", UPGRADE + b"h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"]
    while time.monotonic() < until_s:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        number = 1
        try:
            await stream.send_all(chance.choice(beginnings))
            for _ in range(chance.randrange(30)):
                await stream.send_all(some_frame(chance, number))
                number += chance.choice([0, 2, 2])
                if chance.random() < 0.2:
                    with trio.move_on_after(0.01):
                        await stream.receive_some()
        except trio.BrokenResourceError:
            pass
        await trio.aclose_forcefully(stream)


@pytest.mark.slow
async def test_clients_of_http2_that_mean_nothing_leave_nothing(
    fuzz_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A sixth of --fuzz-seconds. Neither clients nor files stay, and nobody else notices."""
    async with open_server(frame_timeout_s=1, slow_reader_timeout_s=1) as server:
        await is_served(server)
        before = len(os.listdir("/proc/self/fd"))
        seed = time.time_ns()
        until_s = time.monotonic() + fuzz_seconds / 6
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(vandal, server, random.Random(f"{seed}/{number}"), until_s)
        await is_served(server)
        await until(lambda: not server.service.clients)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert not caplog.records, seed
