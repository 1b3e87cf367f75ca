"""What the RPC door costs: tokens through one connection, and one token's way there and back.

The server, with an engine without arithmetic, runs here; clients run in processes of their own, one
after another. CPU time is the server's whole process, so that busy cores do not decide the figures.
"""

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import trio
from _report import Report, Spread, make_parser
from _rpc_client import has_zmq

from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.events import Usage
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.request import GenerateResult, Listener, TokenEvent
from kvlease.services.rpc.address import UnixAddress
from kvlease.services.rpc.door import open_door
from kvlease.services.serving.limits import Limits
from kvlease.services.serving.service import Service
from kvlease.services.serving.tenants import Tenants

STREAMS, COUNT, TIMES = 64, 4000, 5
TOKENS_A_SECOND = 100_000
ONE = SamplingParams(max_tokens=1, ignore_eos=True)
CONFIG = EngineConfig(
    compute="none",
    page_tokens=64,
    device_pages=STREAMS * (COUNT // 64 + 3),
    host_pages=0,
    max_sessions=STREAMS,
)


class OneEach:
    """In an engine's place: gives every stream one token in turn, as a decode step does."""

    def __init__(self, engine: Engine) -> None:
        """Pass for the engine in everything else."""
        self.model, self.model_name = engine.model, engine.model_name
        self.statistics, self.cache = engine.statistics, engine.cache
        self.open: dict[Listener, tuple[list[TokenEvent], int, trio.Event]] = {}

    def retry_after_s(self) -> float:
        """Nothing is ever full."""
        return 0.0

    @asynccontextmanager
    async def generate(
        self, prompt: bytes, params: SamplingParams, *, listener: Listener, **_: object
    ) -> AsyncGenerator[Any]:
        """Pass for an answer."""
        output, ended = list[TokenEvent](), trio.Event()
        self.open[listener] = (output, params.max_tokens, ended)
        usage = Usage(prompt=len(prompt) // 4)
        request = SimpleNamespace(id=0, output=output, usage=lambda: usage)
        result = GenerateResult((), "length", usage, None, None)

        async def wait() -> None:
            await ended.wait()

        yield SimpleNamespace(request=request, ended=wait, result=result)
        self.open.pop(listener, None)

    async def run(self) -> None:
        """Step for ever."""
        token = TokenEvent(0, 1)
        while True:
            await trio.lowlevel.checkpoint()
            for listener, (output, count, ended) in list(self.open.items()):
                listener((token,))
                output.append(token)
                if len(output) == count:
                    ended.set()
                    del self.open[listener]


async def run_client(*arguments: object) -> dict[str, list[float]]:
    """Run a client to its end; returns what it saw, and the CPU time spent here meanwhile."""
    path = str(Path(__file__).with_name("_rpc_client.py"))
    before = time.process_time()
    done = await trio.run_process([sys.executable, path, *map(str, arguments)], capture_stdout=True)
    found: dict[str, list[float]] = json.loads(done.stdout)
    found["here"] = [time.process_time() - before]
    return found


async def engine_alone(engine: Engine) -> tuple[float, float]:
    """Return CPU and wall seconds of a token that nobody carries anywhere."""
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True)

    async def one(number: int) -> None:
        async with engine.generate([number, 2, 3], params, listener=lambda _: None) as stream:
            await stream.ended()

    started, spent = time.perf_counter(), time.process_time()
    async with trio.open_nursery() as nursery:
        for number in range(STREAMS):
            nursery.start_soon(one, number)
    total = STREAMS * COUNT
    return (time.process_time() - spent) / total, (time.perf_counter() - started) / total


async def throughput(report: Report, engine: Engine, service: Service, address: str) -> None:
    """Tokens of 64 streams through one connection, pair by pair with the engine alone."""
    alone, through, client, wall = [], [], [], []
    for _ in range(TIMES):
        alone.append((await engine_alone(engine))[0] * 1e6)
        found = await run_client("tokens", address, STREAMS, COUNT, 1)
        through.append(found["here"][0] / (STREAMS * COUNT) * 1e6)
        client += [seconds * 1e6 for seconds in found["cpu"]]
        wall += [1 / seconds for seconds in found["wall"]]
    report.row("engine alone: CPU a token", Spread.of(alone), "us")
    report.row("engine and door: CPU a token", Spread.of(through), "us")
    ratios = [a / b for a, b in zip(through, alone, strict=True)]
    report.row("engine and door over engine alone", Spread.of(ratios), "")
    report.row("client: CPU a token", Spread.of(client), "us")
    report.row("tokens a second at the client, by the wall", Spread.of(wall), "")
    both = [1e6 / (a + b) for a, b in zip(through, client, strict=True)]
    report.row("tokens a second of one core, client and server on it", Spread.of(both), "")
    figure = statistics.median(both)
    report.target("tokens a second of one core", figure, TOKENS_A_SECOND, at_least=True)


async def one_by_one(report: Report, service: Service, address: str) -> None:
    """The door alone, with steps of one token a stream, as a model's decode steps are."""
    real = service.engine
    source = OneEach(real)
    service.engine = cast("Engine", source)
    count, costs = 1000, list[float]()
    try:
        for _ in range(TIMES):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(source.run)
                found = await run_client("tokens", address, STREAMS, count, 1)
                nursery.cancel_scope.cancel()
            costs.append(found["wall"][0] * 1e6)
    finally:
        service.engine = real
    report.row("door, steps of 64 streams x 1 token: wall a token", Spread.of(costs), "us")
    report.row(
        "tokens a second, steps of 64 streams x 1 token", Spread.of([1e6 / c for c in costs]), ""
    )


async def serve_echo(stream: trio.SocketStream) -> None:
    """Send back what comes."""
    async for chunk in stream:
        await stream.send_all(chunk)


def serve_zmq(address: str) -> None:
    """Answer MessagePack over ZeroMQ, from a thread of its own, until told to end."""
    import importlib

    import msgspec

    zmq: Any = importlib.import_module("zmq")
    socket = zmq.Context.instance().socket(zmq.REP)
    socket.bind(address)
    while True:
        msgspec.msgpack.decode(socket.recv())
        socket.send(msgspec.msgpack.encode([32, [[1, 0, bytes(4), None, None]]]))


async def latency(report: Report, engine: Engine, address: str, folder: str) -> None:
    """One token's way, beside a question's, a bare socket's, and ZeroMQ's."""
    bare = f"{folder}/echo"
    times = 1000
    async with trio.open_nursery() as nursery:
        import socket

        plain = socket.socket(socket.AF_UNIX)
        plain.bind(bare)
        plain.listen()
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(plain))
        nursery.start_soon(partial(trio.serve_listeners, serve_echo, [listener]))
        base = (await run_client("echo", bare, times))["seconds"]
        nursery.cancel_scope.cancel()
    rows = {"bare Trio socket echo": base}
    alone: list[float] = []
    for _ in range(200):
        started = time.perf_counter()
        async with engine.generate(list(range(64)), ONE) as stream:
            await stream.drain()
        alone.append(time.perf_counter() - started)
    rows["one token of a cached prompt, engine alone"] = alone
    rows["a question (health)"] = (await run_client("ask", address, times))["seconds"]
    rows["one token of a cached prompt"] = (await run_client("first_token", address, times))[
        "seconds"
    ]
    if has_zmq():
        ipc = f"ipc://{folder}/zmq"
        threading.Thread(target=serve_zmq, args=(ipc,), daemon=True).start()
        rows["ZeroMQ REQ and REP with msgspec"] = (await run_client("zmq", ipc, times))["seconds"]
    else:
        print("  pyzmq is not installed: no row of ZeroMQ")
    for name, seconds in rows.items():
        micros = sorted(value * 1e6 for value in seconds)
        report.row(f"{name}: round trip", Spread.of(micros), "us")
        p99 = micros[int(len(micros) * 0.99)]
        report.row(f"{name}: p99", Spread(p99, p99, p99, len(micros)), "us")
        ratio = statistics.median(seconds) / statistics.median(base)
        report.row(f"{name}, over the bare echo", Spread(ratio, ratio, ratio, len(micros)), "")


async def measure(report: Report) -> None:
    """Open one server and take every figure from it."""
    log = EventLog(level="off")
    with tempfile.TemporaryDirectory() as folder:
        async with open_engine(None, CONFIG, log=log) as engine:
            service = Service(engine, Tenants(), Limits(), log)
            async with open_door(service, [UnixAddress(f"{folder}/door")]) as door:
                (address,) = door.addresses
                await throughput(report, engine, service, address)
                await one_by_one(report, service, address)
                await latency(report, engine, address, folder)


def main() -> int:
    parser = make_parser(__doc__)
    space = parser.parse_args()
    about = {"streams": STREAMS, "tokens a stream": COUNT, "page tokens": CONFIG.page_tokens}
    report = Report("rpc", dict(about))
    trio.run(measure, report)
    return report.finish(space.json)


if __name__ == "__main__":
    sys.exit(main())
