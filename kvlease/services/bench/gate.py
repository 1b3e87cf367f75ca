"""What the gate costs in a decode step: the host opens the step, beside the step itself.

Measured inside a running engine, on the thread that does it there, by the function that does it
there, with all layers ready; the step is the time between two tokens, each of a step of its own.
``benchmarks/gate.py`` measures the same on a CPU, with the rest of what gating does.
"""

from __future__ import annotations

from collections.abc import Iterator

import trio

from kvlease.services.bench.answers import (
    Prompts,
    answer,
    open_bench_engine,
    together,
    without_room,
)
from kvlease.services.bench.ceilings import Ceilings
from kvlease.services.bench.figure import Figure, Skipped, Spread
from kvlease.services.bench.flash import flash_config, random_model
from kvlease.services.bench.wrapped import TimesTheGate

_BATCHES = (1, 8, 64, 128)
_CONTEXT, _TOKENS = 4096, 48
_OWN = 8
"""Tokens of each prompt behind the shared context: all that has to be prefilled for it."""
_SHARE = 0.5


def measure(_: Ceilings) -> Iterator[Figure | Skipped]:
    """Yield the figures; tens of gigabytes of device memory for as long."""
    if (skipped := without_room("gate")) is not None:
        yield skipped
        return
    yield from trio.run(_measure)


async def _measure() -> list[Figure]:
    model = TimesTheGate(random_model(flash_config(), "fp8"))
    figures: list[Figure] = []
    sessions = max(_BATCHES)
    async with open_bench_engine(model, 512, 64, sessions, decode_ahead=1) as engine:
        prompts = Prompts.for_model(model)
        base = prompts.of(_CONTEXT)
        await answer(engine, base + prompts.of(1), 1)  # so that a tail is kept behind the context
        for batch in _BATCHES:
            heads = [base + prompts.of(_OWN) for _ in range(batch)]
            await together(engine, heads, 3)  # captures the graphs of this batch
            model.seconds.clear()
            between = await together(engine, heads, _TOKENS)
            step = Spread.of(between)
            cost = Spread.of(model.seconds)
            case = f"43 layers, B {batch}, context {_CONTEXT}"
            share = cost.scaled(100 / step.median)
            note = f"of {step.median * 1e3:.2f} ms between tokens"
            figures.append(Figure("gate", "opening a step", case, "us", cost.scaled(1e6)))
            figures.append(Figure("gate", "its share", case, "%", share, target=_SHARE, note=note))
    return figures
