"""An engine of Flash's geometry, prompts that share nothing, and answers to them."""

from __future__ import annotations

import random
from contextlib import AbstractAsyncContextManager
from typing import Final

import trio
from attrs import frozen

import kvlease
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.ports import ModelRunner
from kvlease.runtime.engine import Engine
from kvlease.runtime.request import GenerateResult

PAGE_TOKENS: Final = 256
LONG: Final = 32_768
"""Tokens of the long prefixes."""
_REST_S = 0.2
"""Many times what storing a long prefix takes."""


@frozen
class Prompts:
    """Random prompts that share nothing."""

    vocab: int
    draw: random.Random

    @staticmethod
    def for_model(model: ModelRunner) -> Prompts:
        """Draw from a model's vocabulary, the same prompts in every run."""
        return Prompts(model.vocab_size, random.Random(0))

    def of(self, length: int) -> list[int]:
        """Return so many tokens."""
        return self.draw.choices(range(self.vocab), k=length)


def open_bench_engine(
    model: ModelRunner, device_pages: int, host_pages: int, sessions: int
) -> AbstractAsyncContextManager[Engine]:
    """Open an engine on the current CUDA device that always restores what the host has."""
    options = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        device_pages=device_pages,
        host_pages=host_pages,
        max_sessions=sessions,
        chunk_tokens=4096,
        exact=False,
        load_or_recompute=False,
    )
    return kvlease.open_engine(model, options)


async def answer(engine: Engine, prompt: list[int], max_tokens: int) -> GenerateResult:
    """Answer one prompt to the given length."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    async with engine.generate(prompt, params) as stream:
        return await stream.drain()


async def leave_on_host(engine: Engine) -> None:
    """Evict all that is cached from the device, once stores have come to rest."""
    stored, now = -1, engine.statistics().counters.stored_bytes
    while stored != now:
        await trio.sleep(_REST_S)
        stored, now = now, engine.statistics().counters.stored_bytes
    await engine.cache.evict(b"", "device")
