"""The client's side of rpc.py, in a process of its own: prints one JSON object of what it saw."""

import json
import sys
import time
from array import array
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import Any

import trio

import kvlease
from kvlease.protocols.config import SamplingParams

PROMPT = list(range(64))


async def tokens(address: str, streams: int, count: int, times: int) -> dict[str, object]:
    """Take ``count`` tokens of each of so many streams, ``times`` times over."""
    wall: list[float] = []
    cpu: list[float] = []
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    async with kvlease.connect(address) as client:

        async def one(number: int) -> None:
            async with client.generate([number, 2, 3], params) as answer:
                assert len((await answer.drain()).tokens) == count

        for _ in range(times):
            started, spent = time.perf_counter(), time.process_time()
            async with trio.open_nursery() as nursery:
                for number in range(streams):
                    nursery.start_soon(one, number)
            wall.append((time.perf_counter() - started) / (streams * count))
            cpu.append((time.process_time() - spent) / (streams * count))
    return {"wall": wall, "cpu": cpu}


async def first_token(address: str, times: int) -> dict[str, object]:
    """Ask for one token at a time, of a prompt that is cached."""
    params, seconds = SamplingParams(max_tokens=1, ignore_eos=True), list[float]()
    async with kvlease.connect(address) as client:
        for _ in range(times):
            started = time.perf_counter()
            async with client.generate(PROMPT, params) as answer:
                await answer.drain()
            seconds.append(time.perf_counter() - started)
    return {"seconds": seconds}


async def ask(address: str, times: int) -> dict[str, object]:
    """Ask how the server is, one question at a time."""
    seconds: list[float] = []
    async with kvlease.connect(address) as client:
        for _ in range(times):
            started = time.perf_counter()
            await client.health()
            seconds.append(time.perf_counter() - started)
    return {"seconds": seconds}


async def echo(address: str, times: int) -> dict[str, object]:
    """Send as many bytes as a call has over a bare socket, and wait for them."""
    seconds: list[float] = []
    message = array("i", PROMPT).tobytes() + bytes(120)
    async with await trio.open_unix_socket(address) as stream:
        for _ in range(times):
            started = time.perf_counter()
            await stream.send_all(message)
            left = len(message)
            while left:
                left -= len(await stream.receive_some(left))
            seconds.append(time.perf_counter() - started)
    return {"seconds": seconds}


def zmq_echo(address: str, times: int) -> dict[str, object]:
    """Send msgspec's MessagePack over ZeroMQ, and wait for the answer."""
    import importlib

    import msgspec

    zmq: Any = importlib.import_module("zmq")
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.connect(address)
    seconds: list[float] = []
    message = [16, 1, array("i", PROMPT).tobytes(), {"max_tokens": 1}, 4096]
    for _ in range(times):
        started = time.perf_counter()
        socket.send(msgspec.msgpack.encode(message))
        msgspec.msgpack.decode(socket.recv())
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds}


def has_zmq() -> bool:
    """Whether pyzmq is installed."""
    return find_spec("zmq") is not None


def main() -> None:
    """Run what the command line names: kind, address, numbers."""
    kind, address, *rest = sys.argv[1:]
    numbers = [int(text) for text in rest]
    if kind == "zmq":
        found = zmq_echo(address, *numbers)
    else:
        kinds: dict[str, Callable[..., Awaitable[dict[str, object]]]]
        kinds = {"tokens": tokens, "first_token": first_token, "ask": ask, "echo": echo}
        found = trio.run(kinds[kind], address, *numbers)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
