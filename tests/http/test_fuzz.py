"""Bodies that nobody means: every one gets an answer or a refusal, and none leaves anything."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
import trio

from kvlease.services.tool_calls.markup import SEPARATOR, Call, write_block
from tests.http.rig import MODEL, Server, open_server

GROWTH_BYTES = 40 << 20
ALLOWED = {200, 400, 404, 405, 408, 413, 429, 431}
CHAT: dict[str, object] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": "b"}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "user", "content": "q"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "max_tokens": 5,
    "n": 1,
    "stop": ["x"],
    "stream": False,
    "logprobs": True,
    "top_logprobs": 2,
    "temperature": 0.5,
}
TEXT: dict[str, object] = {"model": MODEL, "prompt": ["a", [1, 2]], "max_tokens": 3, "logprobs": 1}
ODD: list[object] = [
    None, True, -1, 0, 2**70, 1e308, "", "\x00", "\ud800", "x" * 5000, [], {}, [[]], {"$ref": "#"},
    {"role": "user"}, [None], "</think>", "<\uff5cDSML\uff5ctool_calls>",
    {"type": "array", "items": {"$ref": "#"}},
]  # fmt: skip


def mutated(value: object, chance: random.Random) -> object:
    """Replace, drop or double parts of a JSON value at random."""
    if chance.random() < 0.06:
        return chance.choice(ODD)
    if isinstance(value, dict):
        kept = {k: mutated(v, chance) for k, v in value.items() if chance.random() > 0.05}
        if chance.random() < 0.05:
            kept[chance.choice(["functions", "seed", "suffix", "stream_options", "n"])] = (
                chance.choice(ODD)
            )
        return kept
    if isinstance(value, list):
        items = [mutated(v, chance) for v in value if chance.random() > 0.05]
        return items * chance.choice([1, 1, 1, 2])
    return value


def body_of(chance: random.Random) -> tuple[str, bytes]:
    path, base = chance.choice([("chat/completions", CHAT), ("completions", TEXT)])
    body = bytearray(json.dumps(mutated(base, chance)).encode())
    while body and chance.random() < 0.3:
        place = chance.randrange(len(body))
        body[place : place + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
    return path, bytes(body)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def worker(server: Server, seed: int, until_s: float, seen: list[int]) -> None:
    chance = random.Random(seed)
    async with server.plain() as client:
        while time.monotonic() < until_s:
            path, body = body_of(chance)
            got = await client.post(f"/v1/{path}", content=body)
            seen.append(got.status_code)
            if got.status_code == 500:
                error = got.json()["error"]
                assert str(error["code"]).startswith("malformed_tool_call"), (body, error)
                continue
            assert got.status_code in ALLOWED, (body, got.text)
            if got.status_code != 200:
                assert got.json()["error"]["message"], body


@pytest.mark.slow
async def test_bodies_that_nobody_means(fuzz_seconds: float) -> None:
    """CI runs it for --fuzz-seconds 60."""
    garbled = [SEPARATOR + write_block([Call("f", '{"a": 1}')])[:cut] for cut in range(0, 90, 3)]
    async with open_server(max_frame_bytes=100_000) as server:
        server.model.scripts.extend(garbled * 30)
        seen: list[int] = []

        async def run(seconds: float, seed: int) -> None:
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    until_s = time.monotonic() + seconds
                    nursery.start_soon(worker, server, seed + number, until_s, seen)

        await run(min(fuzz_seconds, 10) / 2, 100)
        before = resident_bytes()
        await run(fuzz_seconds, 200)
        assert resident_bytes() - before < GROWTH_BYTES
        assert {200, 400} <= set(seen)
        assert len(seen) > 20 * fuzz_seconds
