"""Whole answers: decode and prefill of Flash's geometry through the engine, and its restores.

The engine is the one that users embed, scheduler, streams and all; weights are random, which no
time depends on. Prompts are random tokens, so that nothing is shared unless it is meant to be.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Final

import torch
import trio
from attrs import frozen

import kvlease
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.deepseek_v4 import DeepseekV4
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.runtime.engine import Engine
from kvlease.runtime.request import GenerateResult
from kvlease.services.bench.ceilings import Ceilings
from kvlease.services.bench.figure import Figure, Skipped, Spread
from kvlease.services.bench.flash import FOUR_LAYERS, flash_config, random_model, step_nbytes

PAGE_TOKENS: Final = 256
_CONTEXT, _LONG = 4096, 32_768
_DECODE_MS = {1: 1.5, 8: 3.0, 64: None}
_PREFILL_MS = {4096: 62.0, 16_384: 307.0}
"""A third of transformers' times for the same sizes on the same kind of device."""
_RESTORE_SPEED = 10.0


def measure(ceilings: Ceilings) -> Iterator[Figure | Skipped]:
    """Yield the figures; tens of gigabytes of device memory for as long."""
    yield from trio.run(_four_layers)
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        yield Skipped("serve", "43 layers need 60 GiB of free device memory")
        return
    yield from trio.run(_all_layers, ceilings)


@frozen
class _Prompts:
    """Random prompts that share nothing."""

    vocab: int
    draw: random.Random

    def of(self, length: int) -> list[int]:
        """Return so many tokens."""
        return self.draw.choices(range(self.vocab), k=length)


@asynccontextmanager
async def _engine(
    config: V4Config, device_pages: int, host_pages: int, sessions: int
) -> AsyncGenerator[tuple[Engine, DeepseekV4, _Prompts]]:
    model = random_model(config, "fp8")
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
    async with kvlease.open_engine(model, options) as engine:
        yield engine, model, _Prompts(config.vocab_size, random.Random(0))


async def _answer(engine: Engine, prompt: list[int], max_tokens: int) -> GenerateResult:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    async with engine.generate(prompt, params) as stream:
        return await stream.drain()


async def _together(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[float]:
    """Answer prompts at once; return each one's seconds between tokens."""
    found: list[float] = []

    async def one(prompt: list[int]) -> None:
        result = await _answer(engine, prompt, max_tokens)
        if result.tpot_s is not None:
            found.append(result.tpot_s)

    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(one, prompt)
    return found


async def _four_layers() -> list[Figure]:
    figures: list[Figure] = []
    async with _engine(FOUR_LAYERS, 2400, 64, 64) as (engine, _, prompts):
        await _answer(engine, prompts.of(_CONTEXT), 16)  # compile and capture
        for batch, target in _DECODE_MS.items():
            cached = [prompts.of(_CONTEXT) for _ in range(batch)]
            await _together(engine, cached, 2)  # prefill once; what follows only decodes
            rounds = [await _together(engine, cached, 96) for _ in range(3)]
            spread = Spread.of([seconds * 1e3 for found in rounds for seconds in found])
            case = f"4 layers, B {batch}, context {_CONTEXT}, through the engine"
            figures.append(Figure("serve", "decode step", case, "ms", spread, target=target))
        for length, limit in _PREFILL_MS.items():
            times: list[float] = []
            for _ in range(4):
                result = await _answer(engine, prompts.of(length), 1)
                times.append((result.ttft_s or 0.0) * 1e3)
            spread = Spread.of(times[1:])
            case = f"4 layers, {length} tokens, through the engine"
            figures.append(Figure("serve", "prefill", case, "ms", spread, target=limit))
    return figures


async def _all_layers(ceilings: Ceilings) -> list[Figure]:
    figures: list[Figure] = []
    pages = 3 * _LONG // PAGE_TOKENS
    async with _engine(flash_config(), pages, 2 * pages, 64) as (engine, model, prompts):
        base = prompts.of(_LONG)
        await _answer(engine, base, 4)
        for batch in (1, 64):
            heads = [base + prompts.of(16) for _ in range(batch)]
            await _together(engine, heads, 2)
            found = await _together(engine, heads, 64)
            figures.append(_decode_rate(ceilings, model.config, batch, found))
        figures += await _restores(ceilings, engine, prompts)
    return figures


def _decode_rate(ceilings: Ceilings, config: V4Config, batch: int, between: list[float]) -> Figure:
    rates = Spread.of([batch / seconds for seconds in between])
    floor_s = step_nbytes(config, batch, _LONG) / ceilings.copy_bytes_s
    case = f"43 layers, 8 experts, fp8 cache, context {_LONG}, B {batch}, through the engine"
    share = floor_s / statistics.median(between)
    return Figure("serve", "decode", case, "tokens/s", rates, roofline=share)


async def _restores(ceilings: Ceilings, engine: Engine, prompts: _Prompts) -> list[Figure]:
    """Time to first token of 256 tokens behind a 32K prefix: computed, and from the host."""
    computed: list[float] = []
    restored: list[float] = []
    for _ in range(2):
        prefix = prompts.of(_LONG)
        first = await _answer(engine, prefix + prompts.of(256), 1)
        computed.append(first.ttft_s or 0.0)
        for _ in range(3):  # pushes the prefix out of the device's pages
            await _answer(engine, prompts.of(_LONG), 1)
        again = await _answer(engine, prefix + prompts.of(256), 1)
        if again.usage.hit_host:
            restored.append(again.ttft_s or 0.0)
    if not restored:
        return []
    speed = Spread.of([slow / fast for slow in computed for fast in restored])
    case = f"43 layers, {_LONG} tokens on the host + 256 new, over computing them"
    return [
        Figure("serve", "first token", case, "x", speed, target=_RESTORE_SPEED),
        Figure("serve", "first token", "the same, from the host", "ms", _ms(restored)),
        Figure("serve", "first token", "the same, computed", "ms", _ms(computed)),
    ]


def _ms(seconds: list[float]) -> Spread:
    return Spread.of([each * 1e3 for each in seconds])
