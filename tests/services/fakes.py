"""A serving engine of a few lines: its answers are a function of the prompt."""

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio
from attrs import define, field

from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import Usage
from kvlease.runtime.request import GenerateResult, TokenEvent
from kvlease.services.sessions import Tokens, num_tokens


class FakeStream:
    def __init__(self, prompt: Tokens, sampling: SamplingParams, token_s: float) -> None:
        self._prompt = prompt
        self._sampling = sampling
        self._token_s = token_s
        usage = Usage(prompt=num_tokens(prompt), hit_device=1, hit_host=2, computed=3, recomputed=4)
        self.result = GenerateResult((), "length", usage, None, None)

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        for place in range(self._sampling.max_tokens):
            await trio.sleep(self._token_s)
            digest = hashlib.sha256(self._prompt + bytes([place])).digest()
            yield TokenEvent(place, digest[0], digest=digest)


@define
class FakeEngine:
    """Answers ``max_tokens`` tokens; ``before`` may raise or wait in a request's stead."""

    token_s: float = 0.01
    before: Callable[[Tokens], None] = field(default=lambda prompt: None)
    prompts: list[Tokens] = field(factory=list[Tokens])
    at_once: int = 0
    most_at_once: int = 0

    def generate(
        self, tokens: Tokens, sampling: SamplingParams, /
    ) -> AbstractAsyncContextManager[FakeStream]:
        return self._generate(tokens, sampling)

    @asynccontextmanager
    async def _generate(
        self, tokens: Tokens, sampling: SamplingParams
    ) -> AsyncIterator[FakeStream]:
        self.prompts.append(tokens)
        self.before(tokens)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            yield FakeStream(tokens, sampling, self.token_s)
        finally:
            self.at_once -= 1
