"""What the HTTP door costs a streamed token, beside a minimal Starlette app that yields constants.

Both are served by the same hypercorn, in this process; the client is another one. CPU time is this
whole process's, so that busy cores do not decide the figures. The door gets its tokens from a
stand-in for the engine that has them at once, because it is the door that is measured.
"""

import json
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import trio
from _report import Report, Spread, make_parser
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.events import Usage
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.request import GenerateResult, TokenEvent
from kvlease.services.openai_http.server import Entrance, HttpDoor
from kvlease.services.rpc.address import TcpAddress
from kvlease.services.serving.limits import Limits
from kvlease.services.serving.service import Service
from kvlease.services.serving.tenants import Tenants

STREAMS, COUNT, TIMES = 32, 400, 7
MOST_RATIO = 2.0
AT_ONCE = {"an event a token": 1, "four tokens that came together": 4}
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef01234567","object":"text_completion","created":1700000000,'
    b'"model":"null","system_fingerprint":"fp_null","choices":[{"index":0,"text":"x",'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
"""As long as the door's own."""


class Inbox:
    """Tokens as the minimal app has them: there at once, behind a checkpoint."""

    def __init__(self, output: list[TokenEvent], count: int, at_once: int) -> None:
        """Give ``count`` tokens, so many at once."""
        self._output, self._left, self._at_once = output, count, at_once

    async def receive(self) -> tuple[TokenEvent, ...]:
        """Give the next ones."""
        await trio.lowlevel.checkpoint()
        if not self._left:
            raise trio.EndOfChannel
        batch = (TokenEvent(0, ord("x")),) * min(self._at_once, self._left)
        self._left -= len(batch)
        self._output.extend(batch)
        return batch

    def receive_nowait(self) -> tuple[TokenEvent, ...]:
        """Have no more than that."""
        raise trio.WouldBlock


class Source:
    """In an engine's place: every answer is constant."""

    def __init__(self, engine: Engine, at_once: int) -> None:
        """Pass for the engine in everything else."""
        self.model, self.model_name, self.config = engine.model, engine.model_name, engine.config
        self._at_once = at_once

    @asynccontextmanager
    async def generate(
        self, prompt: bytes, params: SamplingParams, **_: object
    ) -> AsyncGenerator[Any]:
        """Pass for an answer."""
        output = list[TokenEvent]()
        inbox = Inbox(output, params.max_tokens, self._at_once)
        usage = Usage(prompt=len(prompt) // 4)
        request = SimpleNamespace(id=0, output=output, inbox=inbox, usage=lambda: usage)
        result = GenerateResult((), "length", usage, None, None)

        async def ended() -> None:
            """Nothing ends it early."""

        yield SimpleNamespace(request=request, ended=ended, result=result)


async def constants(_request: Request) -> StreamingResponse:
    """Yield the same event so many times."""

    async def events() -> AsyncGenerator[bytes]:
        for _ in range(COUNT):
            await trio.lowlevel.checkpoint()
            yield EVENT
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def run_client(port: int, path: str, model: str) -> dict[str, float]:
    """Run a client to its end; adds the CPU microseconds spent here for each token."""
    script = str(Path(__file__).with_name("_http_client.py"))
    arguments = [str(port), path, str(STREAMS), str(COUNT), model]
    before = time.process_time()
    done = await trio.run_process([sys.executable, script, *arguments], capture_stdout=True)
    spent = time.process_time() - before
    found: dict[str, float] = json.loads(done.stdout)
    return {**found, "us": spent / (STREAMS * COUNT) * 1e6}


async def serve_constants(door: HttpDoor) -> None:
    """Serve the minimal app at the sockets and with the settings that the door is served at."""
    await door.serve(Starlette(routes=[Route("/constants", constants, methods=["POST"])]))


async def measure(report: Report) -> None:
    """Open both servers and take every figure from them, in turns."""
    log, limits = EventLog(level="off"), Limits()
    async with open_engine(None, EngineConfig(compute="none"), log=log) as engine:
        service = Service(engine, Tenants(), limits, log)
        bound = TcpAddress("127.0.0.1", 0)
        entrance, plain = Entrance(bound, limits, None), Entrance(bound, limits, None)
        door = entrance.door(service, log)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(door.run)
            nursery.start_soon(serve_constants, plain.door(service, log))
            ask = partial(run_client, model=engine.model_name)
            rows: dict[str, list[float]] = {name: [] for name in ("constants", *AT_ONCE)}
            for _ in range(TIMES):
                found = await ask(plain.port, "/constants")
                rows["constants"].append(found["us"])
                for name, at_once in AT_ONCE.items():
                    service.engine = cast("Engine", Source(engine, at_once))
                    found = await ask(entrance.port, "/v1/completions")
                    service.engine = engine
                    rows[name].append(found["us"])
                    assert round(found["events"] / (STREAMS * COUNT) * at_once) == 1
            nursery.cancel_scope.cancel()
    tell(report, rows)


def tell(report: Report, rows: dict[str, list[float]]) -> None:
    """Print the figures."""
    report.row("minimal Starlette app: CPU a token", Spread.of(rows["constants"]), "us")
    for name in AT_ONCE:
        report.row(f"door, {name}: CPU a token", Spread.of(rows[name]), "us")
        ratios = [a / b for a, b in zip(rows[name], rows["constants"], strict=True)]
        report.row(f"door, {name}: over the minimal app", Spread.of(ratios), "")
        if AT_ONCE[name] == 1:
            figure = Spread.of(ratios).median
            report.target("an event a token, over the minimal app", figure, MOST_RATIO)


def main() -> int:
    parser = make_parser(__doc__)
    space = parser.parse_args()
    about: dict[str, object] = {"streams": STREAMS, "tokens a stream": COUNT}
    report = Report("http_door", about)
    trio.run(measure, report)
    return report.finish(space.json)


if __name__ == "__main__":
    sys.exit(main())
