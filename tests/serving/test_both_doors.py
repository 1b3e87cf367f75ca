"""Many clients at both doors of one engine, some of which die: the others get their answers."""

from __future__ import annotations

import json
import random
import time

import trio

import kvlease
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.services.rpc.address import TcpAddress
from kvlease.services.rpc.door import open_door
from tests.http.rig import ENDLESS, MODEL, Server, open_server

STREAMS, SECONDS = 40, 3
FULL_STREAMS, FULL_SECONDS = 500, 60
TOKENS = 24
CONFIG = EngineConfig(device_pages=512, host_pages=0, max_sessions=64)


class Seen:
    """What all clients together saw."""

    def __init__(self) -> None:
        self.whole = {"rpc": 0, "http": 0}
        self.died = 0


async def by_rpc(address: str, chance: random.Random, seen: Seen) -> None:
    """Take an answer on a connection of its own, or leave at some point of it."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    prompt = [chance.randrange(200) for _ in range(30)]
    async with kvlease.connect(address) as client, client.generate(prompt, params) as answer:
        if chance.random() < 0.2:
            for _ in range(chance.randrange(TOKENS)):
                await answer.__anext__()
            seen.died += 1
            return
        assert len((await answer.drain()).tokens) == TOKENS
        seen.whole["rpc"] += 1


async def by_http(port: int, chance: random.Random, seen: Seen) -> None:
    """The same over HTTP."""
    asked = {
        "model": MODEL,
        "prompt": [chance.randrange(200) for _ in range(30)],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    limit = chance.randrange(3000) if chance.random() < 0.2 else 1 << 30
    got = b""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(head.encode() + body)
        async for piece in stream:
            got += piece
            if b"[DONE]" in got or len(got) > limit:
                break
    if limit < 3000:
        seen.died += 1
        return
    assert b"[DONE]" in got, got
    seen.whole["http"] += 1


async def client(server: Server, rpc: str, number: int, until_s: float, seen: Seen) -> None:
    chance = random.Random(number)
    while time.monotonic() < until_s:
        if number % 2:
            await by_rpc(rpc, chance, seen)
        else:
            await by_http(server.port, chance, seen)


async def test_clients_that_die_disturb_nobody_at_either_door(is_full: bool) -> None:
    """Nothing leaks (the rig recounts every pool), nothing hangs, every other answer is whole."""
    streams = FULL_STREAMS if is_full else STREAMS
    seconds = FULL_SECONDS if is_full else SECONDS
    async with (
        open_server(*[ENDLESS] * 100_000, config=CONFIG) as server,
        open_door(server.service, [TcpAddress("127.0.0.1", 0)]) as door,
    ):
        seen = Seen()
        until_s = time.monotonic() + seconds
        with trio.fail_after(seconds + 120):
            async with trio.open_nursery() as nursery:
                for number in range(streams):
                    nursery.start_soon(client, server, door.addresses[0], number, until_s, seen)
        assert seen.whole["rpc"] > streams // 2
        assert seen.whole["http"] > streams // 2
        assert seen.died > streams // 10
