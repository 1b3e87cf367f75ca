"""The client's side of http_door.py, in a process of its own: prints one JSON object."""

import json
import sys
import time
from functools import partial

import trio


async def one(port: int, path: str, body: bytes, seen: list[int]) -> None:
    """Take one stream to its end, and count its events."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    events, tail = 0, b""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(head.encode() + body)
        async for piece in stream:
            tail = tail[-16:] + piece
            events += piece.count(b"data: ")
            if b"[DONE]" in tail:
                break
    seen.append(events)


async def main(port: str, path: str, streams: str, count: str, model: str) -> None:
    """Take so many streams of so many tokens at once."""
    asked = {"model": model, "prompt": "x", "max_tokens": int(count), "stream": True}
    body, seen = json.dumps(asked).encode(), list[int]()
    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(int(streams)):
            nursery.start_soon(one, int(port), path, body, seen)
    print(json.dumps({"events": sum(seen), "wall_s": time.perf_counter() - started}))


trio.run(partial(main, *sys.argv[1:]))
