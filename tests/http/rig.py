"""A served engine and the real client: a model whose tokens are scripted, everything else real."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import httpx
import msgspec
import openai
import trio
from attrs import field, frozen

from kvlease.kernels.models.null_model import NullModel
from kvlease.kernels.models.tokenizer import EOS, VOCAB_SIZE
from kvlease.protocols.config import EngineConfig
from kvlease.protocols.events import Event
from kvlease.protocols.ownership import StepLease
from kvlease.protocols.ports import ModelRunner, SampledToken, StepInput, StepResult, Stream
from kvlease.protocols.schema import Schema
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.event_log import EventLog
from kvlease.services.openai_http.context import Context
from kvlease.services.openai_http.server import Certificate, Entrance
from kvlease.services.rpc.address import TcpAddress
from kvlease.services.serving.limits import Limits
from kvlease.services.serving.service import Service
from kvlease.services.serving.tenants import Tenant, Tenants
from tests.rpc.rig import assert_nothing_left

MODEL = "ScriptedModel"
CONFIG = EngineConfig(device_pages=256, host_pages=512, prefix_cache=True)
ENDLESS = "tick "


class ScriptedModel:
    """Answers one request after the other with the texts it was given, and "ok" after those.

    A script that ends in ENDLESS goes on with it until the request's limit.
    """

    eos_tokens = frozenset([EOS])
    vocab_size = VOCAB_SIZE
    fingerprint = "scripted"

    def __init__(self) -> None:
        self._inner = NullModel(64)
        self.scripts: list[str] = []
        self.pause_s = 0.0
        self.gate: trio.Event | None = None
        self.num_drawn = 0
        self._tokens: dict[int, tuple[int, bytes]] = {}

    @property
    def schema(self) -> Schema:
        return self._inner.schema

    @property
    def max_positions(self) -> int:
        return self._inner.max_positions

    async def forward(self, inputs: StepInput, lease: StepLease, stream: Stream) -> StepResult:
        if self.gate is not None:
            await self.gate.wait()
        if self.pause_s:
            await trio.sleep(self.pause_s)
        await self._inner.forward(inputs, lease, stream)
        return _Scripted(
            [
                [self._token(p.request, p.start + len(p.tokens), p.sample.logprobs)]
                if p.sample is not None
                else []
                for p in inputs.sequences
            ]
        )

    def _token(self, request: int, position: int, logprobs: int | None) -> SampledToken:
        if request not in self._tokens:
            script = self.scripts.pop(0) if self.scripts else "ok"
            self._tokens[request] = position, script.encode()
        self.num_drawn += 1
        first, script = self._tokens[request]
        place = position - first
        token = EOS
        if place < len(script):
            token = script[place]
        elif script.endswith(ENDLESS.encode()):
            token = ENDLESS.encode()[(place - len(script)) % len(ENDLESS)]
        if logprobs is None:
            return SampledToken(token)
        return SampledToken(token, -0.5, ((token, -0.5), (65, -1.5))[:logprobs])


class _Scripted:
    def __init__(self, tokens: list[list[SampledToken]]) -> None:
        self._tokens = tokens

    def tokens(self) -> Sequence[Sequence[SampledToken]]:
        return self._tokens


@frozen
class Server:
    """A running server, seen from inside and from outside."""

    engine: Engine
    service: Service
    context: Context
    port: int
    model: ScriptedModel
    events: list[Event] = field(repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, key: str = "unused") -> openai.AsyncOpenAI:
        """The real client, on this Trio run."""
        return openai.AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=30)

    def plain(self) -> httpx.AsyncClient:
        """A client that checks nothing."""
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=30)


@asynccontextmanager
async def open_server(
    *scripts: str,
    config: EngineConfig = CONFIG,
    tenants: Sequence[Tenant] = (),
    model: ModelRunner | None = None,
    certificate: Certificate | None = None,
    **limits: float,
) -> AsyncGenerator[Server]:
    """Serve for a block; when it is left without an error, nothing may have leaked."""
    log = EventLog(level="normal", flush_every_s=3600)
    events = log.remember()
    scripted = ScriptedModel()
    scripted.scripts.extend(scripts)
    async with open_engine(model or scripted, config, log=log) as engine:
        service = Service(engine, Tenants(tenants), msgspec.convert(limits, Limits), log)
        entrance = Entrance(TcpAddress("127.0.0.1", 0), service.limits, None, certificate)
        door = entrance.door(service, log)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(door.run)
            yield Server(engine, service, door.context, entrance.port, scripted, events)
            await assert_nothing_left(engine, service)
            nursery.cancel_scope.cancel()
    log.close()


def user(text: str) -> openai.types.chat.ChatCompletionUserMessageParam:
    return {"role": "user", "content": text}
