"""An engine of Flash's geometry, prompts that share nothing, and answers to them."""

from __future__ import annotations

import random
from contextlib import AbstractAsyncContextManager
from typing import Final

import torch
import trio
from attrs import frozen

import kvlease
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.ports import ModelRunner
from kvlease.runtime.engine import Engine
from kvlease.runtime.request import GenerateResult
from kvlease.services.bench.figure import Skipped

PAGE_TOKENS: Final = 256
LONG: Final = 32_768
"""Tokens of the long prefixes."""
_FREE_NBYTES = 60 << 30
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
    model: ModelRunner,
    device_pages: int,
    host_pages: int,
    sessions: int,
    *,
    decode_ahead: int | None = None,
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
        decode_ahead=decode_ahead,
    )
    return kvlease.open_engine(model, options)


async def answer(engine: Engine, prompt: list[int], max_tokens: int) -> GenerateResult:
    """Answer one prompt to the given length."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    async with engine.generate(prompt, params) as stream:
        return await stream.drain()


async def together(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[float]:
    """Answer prompts at once; return each one's seconds between tokens."""
    found: list[float] = []

    async def one(prompt: list[int]) -> None:
        result = await answer(engine, prompt, max_tokens)
        if result.tpot_s is not None:
            found.append(result.tpot_s)

    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(one, prompt)
    return found


def without_room(group: str) -> Skipped | None:
    """Say that a group is left out where the device has no room for Flash's 43 layers."""
    if torch.cuda.mem_get_info()[0] >= _FREE_NBYTES:
        return None
    return Skipped(group, f"43 layers need {_FREE_NBYTES >> 30} GiB of free device memory")


async def leave_on_host(engine: Engine) -> None:
    """Evict all that is cached from the device, once stores have come to rest."""
    stored, now = -1, engine.statistics().counters.stored_bytes
    while stored != now:
        await trio.sleep(_REST_S)
        stored, now = now, engine.statistics().counters.stored_bytes
    await engine.cache.evict(b"", "device")
