"""How much of a restore hides behind prefill: gated layer by layer, and by a wait for all layers.

A prefix of 32K tokens lies on the host, and 4K tokens behind it are new. What a first token takes
longer than with the prefix on the device is the exposed stall; its share is of the longer of the
load by itself and the computation by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import trio

from kvlease.kernels.models.deepseek_v4 import DeepseekV4
from kvlease.protocols.ports import ModelRunner
from kvlease.protocols.schema import Schema
from kvlease.services.bench.answers import (
    LONG,
    PAGE_TOKENS,
    Prompts,
    answer,
    leave_on_host,
    open_bench_engine,
    without_room,
)
from kvlease.services.bench.ceilings import Ceilings
from kvlease.services.bench.figure import Figure, Skipped, Spread
from kvlease.services.bench.flash import flash_config, random_model
from kvlease.services.bench.wrapped import WaitsForAll

_NEW = 4096
_ROUNDS = 4
_STALL_SHARE = 5.0


def measure(ceilings: Ceilings) -> Iterator[Figure | Skipped]:
    """Yield the figures; tens of gigabytes of device memory for as long."""
    if (skipped := without_room("overlap")) is not None:
        yield skipped
        return
    model = random_model(flash_config(), "fp8")
    gates: dict[str, Callable[[DeepseekV4], ModelRunner]] = {
        "layer by layer": lambda one: one,
        "wait for all": WaitsForAll,
    }
    for name, gate in gates.items():
        yield from trio.run(_gate, ceilings, model.schema, gate(model), name)


async def _gate(ceilings: Ceilings, schema: Schema, model: ModelRunner, name: str) -> list[Figure]:
    pages = (LONG + 2 * _NEW) // PAGE_TOKENS
    load_ms = LONG // PAGE_TOKENS * schema.page_nbytes / ceilings.to_device_bytes_s * 1e3
    near: list[float] = []
    far: list[float] = []
    async with open_bench_engine(model, 2 * pages, 4 * pages, 2) as engine:
        prompts = Prompts.for_model(model)
        prefix = prompts.of(LONG)
        await answer(engine, prefix + prompts.of(_NEW), 1)
        for _ in range(_ROUNDS):
            warm = await answer(engine, prefix + prompts.of(_NEW), 1)
            near.append((warm.ttft_s or 0.0) * 1e3)
            await leave_on_host(engine)
            cold = await answer(engine, prefix + prompts.of(_NEW), 1)
            if cold.usage.hit_host >= LONG - 2 * PAGE_TOKENS:
                far.append((cold.ttft_s or 0.0) * 1e3)
    if not far:
        return []
    whole = max(load_ms, Spread.of(near).median)
    exposed = Spread.of([(cold - Spread.of(near).median) / whole * 100 for cold in far])
    case = f"43 layers, {LONG} tokens restored + {_NEW} new, gate: {name}"
    target = _STALL_SHARE if name == "layer by layer" else None
    note = f"load alone {load_ms:.1f} ms"
    return [
        Figure("overlap", "exposed stall", case, "%", exposed, target=target, note=note),
        Figure("overlap", "first token", case, "ms", Spread.of(far)),
        Figure("overlap", "first token", f"{case}, prefix on the device", "ms", Spread.of(near)),
    ]
