"""Whole answers: decode and prefill of Flash's geometry through the engine, and its restores.

The engine is the one that users embed, scheduler, streams and all; weights are random, which no
time depends on. Prompts are random tokens, so that nothing is shared unless it is meant to be.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
import trio

from kvlease.kernels.models.config import V4Config
from kvlease.runtime.engine import Engine
from kvlease.services.bench.answers import (
    LONG,
    PAGE_TOKENS,
    Prompts,
    answer,
    leave_on_host,
    open_bench_engine,
    together,
    without_room,
)
from kvlease.services.bench.ceilings import Ceilings
from kvlease.services.bench.figure import Figure, Skipped, Spread
from kvlease.services.bench.flash import FOUR_LAYERS, flash_config, random_model, step_nbytes

_CONTEXT = 4096
_DECODE_MS = {1: 1.5, 8: 3.0, 64: None}
_PREFILL_MS = {4096: 62.0, 16_384: 307.0}
"""A third of transformers' times for the same sizes on the same kind of device."""
_RESTORE_SPEED = 10.0


def measure(ceilings: Ceilings) -> Iterator[Figure | Skipped]:
    """Yield the figures; tens of gigabytes of device memory for as long."""
    yield from trio.run(_four_layers)
    torch.cuda.empty_cache()
    if (skipped := without_room("serve")) is not None:
        yield skipped
        return
    yield from trio.run(_all_layers, ceilings)


async def _four_layers() -> list[Figure]:
    figures: list[Figure] = []
    model = random_model(FOUR_LAYERS, "fp8")
    async with open_bench_engine(model, 2400, 64, 64) as engine:
        prompts = Prompts.for_model(model)
        await answer(engine, prompts.of(_CONTEXT), 16)  # compile and capture
        for batch, target in _DECODE_MS.items():
            cached = [prompts.of(_CONTEXT) for _ in range(batch)]
            await together(engine, cached, 2)  # prefill once; what follows only decodes
            rounds = [await together(engine, cached, 96) for _ in range(3)]
            spread = Spread.of([seconds * 1e3 for found in rounds for seconds in found])
            case = f"4 layers, B {batch}, context {_CONTEXT}, through the engine"
            figures.append(Figure("serve", "decode step", case, "ms", spread, target=target))
        for length, limit in _PREFILL_MS.items():
            times: list[float] = []
            for _ in range(4):
                result = await answer(engine, prompts.of(length), 1)
                times.append((result.ttft_s or 0.0) * 1e3)
            spread = Spread.of(times[1:])
            case = f"4 layers, {length} tokens, through the engine"
            figures.append(Figure("serve", "prefill", case, "ms", spread, target=limit))
    return figures


async def _all_layers(ceilings: Ceilings) -> list[Figure]:
    figures: list[Figure] = []
    pages = 3 * LONG // PAGE_TOKENS
    model = random_model(flash_config(), "fp8")
    async with open_bench_engine(model, pages, 2 * pages, 64) as engine:
        prompts = Prompts.for_model(model)
        base = prompts.of(LONG)
        await answer(engine, base, 4)
        for batch in (1, 64):
            heads = [base + prompts.of(16) for _ in range(batch)]
            await together(engine, heads, 2)
            found = await together(engine, heads, 64)
            figures.append(_decode_rate(ceilings, model.config, batch, found))
        figures += await _restores(engine, prompts)
    return figures


def _decode_rate(ceilings: Ceilings, config: V4Config, batch: int, between: list[float]) -> Figure:
    rates = Spread.of([batch / seconds for seconds in between])
    floor_s = step_nbytes(config, batch, LONG) / ceilings.copy_bytes_s
    case = f"43 layers, 8 experts, fp8 cache, context {LONG}, B {batch}, through the engine"
    share = floor_s / statistics.median(between)
    return Figure("serve", "decode", case, "tokens/s", rates, roofline=share)


async def _restores(engine: Engine, prompts: Prompts) -> list[Figure]:
    """Time to first token of 256 tokens behind a 32K prefix: computed, and from the host."""
    computed: list[float] = []
    restored: list[float] = []
    for _ in range(2):
        prefix = prompts.of(LONG)
        first = await answer(engine, prefix + prompts.of(256), 1)
        computed.append((first.ttft_s or 0.0) * 1e3)
        for _ in range(3):
            await leave_on_host(engine)
            again = await answer(engine, prefix + prompts.of(256), 1)
            if again.usage.hit_host:
                restored.append((again.ttft_s or 0.0) * 1e3)
    if not restored:
        return []
    speed = Spread.of([slow / fast for slow in computed for fast in restored])
    case = f"43 layers, {LONG} tokens on the host + 256 new, over computing them"
    return [
        Figure("serve", "first token", case, "x", speed, target=_RESTORE_SPEED),
        Figure("serve", "first token", "the same, from the host", "ms", Spread.of(restored)),
        Figure("serve", "first token", "the same, computed", "ms", Spread.of(computed)),
    ]
