"""Runs of the real engine in the lab, one log a seed; started with a mutated tree under it.

`python -m tests.mutants.plays PLAY FIRST SEEDS FOLDER` writes a log for each seed from FIRST on,
FOLDER/PLAY-SEED.jsonl, and then its path on a line. Who judges them is another process, whose code
is whole.
"""

import sys
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec
import trio
from attrs import evolve

from kvlease.errors import KVLeaseError, NotReady
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.events import Event
from kvlease.protocols.schema import Layer
from kvlease.runtime.engine import Engine, open_engine
from kvlease.services.lab.device import SimulatedDevice
from kvlease.services.lab.explore import HORIZON_S, Scenario, World
from kvlease.services.lab.faults import (
    CopyRule,
    Delay,
    Drop,
    Fail,
    FaultPlan,
    KillActor,
    Rule,
    Shorten,
    StallMailbox,
    Which,
)
from kvlease.services.lab.scenarios import SCENARIOS, prompt_of, witness
from kvlease.services.lab.schedule import mixed, run_scheduled
from kvlease.services.lab.spec import DeviceSpec, LinkSpec

EXPECTED_CHOICES = 300
"""About how many decisions a run takes; priorities change within so many."""
CONFIG = EngineConfig(
    device_pages=16,
    host_pages=48,
    tail_every=2,
    max_sessions=3,
    chunk_tokens=32,
    poison=True,
    load_or_recompute=False,
    load_timeout_s=0.05,
    request_timeout_s=20.0,
)
LENGTHS = (14, 16, 17, 20)
"""Prompt lengths in tokens: inside a page, and at a page's end."""
SLOW = DeviceSpec(
    load=LinkSpec(latency_s=0.004, bytes_per_s=1e9),
    store=LinkSpec(latency_s=0.004, bytes_per_s=1e9),
    step_s=0.002,
    token_s=0.0,
)
"""A copy and a step take long enough for something to happen meanwhile."""


async def _ask(
    engine: Engine,
    prompt: Sequence[int],
    max_tokens: int,
    leaves_after: int,
    salt: bytes | None = None,
) -> None:
    """Take an answer, or its beginning."""
    params = SamplingParams(max_tokens=max_tokens)
    with suppress(KVLeaseError):
        async with engine.generate(prompt, params, salt=salt) as stream:
            taken = 0
            async for _ in stream:
                taken += 1
                if taken == leaves_after:
                    return


async def _read_beside(engine: Engine, prompt: Sequence[int], stays_s: float) -> None:
    """Open what is there of a cached prefix, beside the scheduler, a few times."""
    for _ in range(4):
        with engine.lease_prefix(prompt) as lease:
            with suppress(NotReady):
                for layer in engine.model.schema.layers:
                    lease[cast("Layer[object, object]", layer)].resolve_nowait()
            await trio.sleep(stays_s)
        await trio.sleep(0.002)


async def _serve(
    world: World, rules: list[Rule], config: EngineConfig = CONFIG, *, may_leave: bool = True
) -> None:
    """Three rounds of requests, some called off, with readers beside; the last after a flush."""
    rng = world.rng
    plan = FaultPlan(seed=world.seed, rules=tuple(rules))
    device = SimulatedDevice(witness(), SLOW, world.log, plan)
    async with open_engine(device.runner, config, log=world.log, ports=device.ports) as engine:
        for number in range(3):
            async with trio.open_nursery() as nursery:
                for family in rng.sample(range(4), 3):
                    prompt = prompt_of(family, rng.choice(LENGTHS))
                    leaves_after = rng.choice((0, 0, 1, 2)) * may_leave
                    nursery.start_soon(_ask, engine, prompt, 3, leaves_after)
                    if rng.random() < 0.5:
                        await trio.sleep(rng.choice((0.0, 0.001, 0.006)))
                        nursery.start_soon(_read_beside, engine, prompt, rng.choice((0.0, 0.08)))
            await trio.sleep(rng.choice((0.0, 0.1)))
            if number == 1:
                await engine.flush()
        await trio.sleep(100)


async def _life(world: World) -> None:
    """Everything at once, with links that fail now and then."""
    rules: list[Rule] = [
        CopyRule(fault, Which(probability=0.03)) for fault in (Fail(), Shorten(), Delay(0.004))
    ]
    await _serve(world, rules if world.seed % 2 else [])


async def _late(world: World) -> None:
    """Links on which every third load comes long after its deadline, or never."""
    rules: list[Rule] = [
        CopyRule(Delay(0.2), Which(direction="load", probability=0.1)),
        CopyRule(Drop(), Which(direction="load", probability=0.02)),
        CopyRule(Delay(0.2), Which(direction="store", probability=0.05)),
    ]
    await _serve(world, rules, evolve(CONFIG, device_pages=10))


async def _overdue(world: World) -> None:
    """Requests that get a short while, and a decode worker that stands still for longer."""
    rules: list[Rule] = [StallMailbox("decode", 60.0, message=1 + world.seed % 3)]
    await _serve(world, rules, evolve(CONFIG, request_timeout_s=1.0), may_leave=False)


async def _hopeless(world: World) -> None:
    """Every load fails; prompts come back that have gone to the host meanwhile."""
    plan = FaultPlan(seed=world.seed, rules=(CopyRule(Fail(), Which(direction="load")),))
    device = SimulatedDevice(witness(), SLOW, world.log, plan)
    config = evolve(CONFIG, device_pages=8)
    async with open_engine(device.runner, config, log=world.log, ports=device.ports) as engine:
        for family in (0, 1, 2, 0, 1):
            await _ask(engine, prompt_of(family, world.rng.choice(LENGTHS)), 2, 0)
        await trio.sleep(100)


async def _prefetch(world: World) -> None:
    """What has gone to the host, with its kept tail, is prefetched and asked for."""
    device = SimulatedDevice(witness(), SLOW, world.log)
    config = evolve(CONFIG, device_pages=24, device_tails=4, max_sessions=1)
    async with open_engine(device.runner, config, log=world.log, ports=device.ports) as engine:
        first, *others = (prompt_of(family, world.rng.choice((17, 20))) for family in range(4))
        for prompt in (first, *others):
            await _ask(engine, prompt, 3, 0)
        await engine.cache.prefetch(array("i", first).tobytes())
        await _ask(engine, first, 3, 0)
        await trio.sleep(100)


async def _tenants(world: World) -> None:
    """Equal prompts of three tenants, again and again, with a flush in between."""
    device = SimulatedDevice(witness(), SLOW, world.log)
    async with open_engine(device.runner, CONFIG, log=world.log, ports=device.ports) as engine:
        prompt = prompt_of(0, world.rng.choice(LENGTHS))
        for salt in (None, b"one", b"two", None, b"flush", b"one", None):
            if salt == b"flush":
                await engine.flush()
            else:
                await _ask(engine, prompt, 2, 0, salt)
        await trio.sleep(100)


async def _pins(world: World) -> None:
    """Two tenants pin what they have cached, try to end each other's pins, and a flush comes."""
    device = SimulatedDevice(witness(), SLOW, world.log)
    tokens = prompt_of(0, world.rng.choice((17, 20)))
    prompt = array("i", tokens).tobytes()
    async with open_engine(device.runner, CONFIG, log=world.log, ports=device.ports) as engine:
        for salt in (b"one", b"two"):
            await _ask(engine, tokens, 3, 0, salt)
        await _ask(engine, prompt_of(1, 20), 3, 0)
        await engine.cache.pin(prompt, 1.0, salt=b"one")
        second = await engine.cache.pin(prompt, 1.0, salt=b"two")
        await engine.cache.unpin(second.pin, salt=b"one")
        await trio.sleep(world.rng.choice((0.0, 60.0)))
        await engine.cache.pin(prompt, 30.0, salt=b"one")
        await engine.flush()
        await trio.sleep(100)
        for family in (0, 1, 2, 0):
            await _ask(engine, prompt_of(family, 20), 3, 0)


async def _killed(world: World) -> None:
    """The loader dies with copies in hand, of which some never return."""
    dies = KillActor("loader", 1 + world.seed % 4, in_hand=world.seed % 2 == 0)
    await _serve(world, [dies, CopyRule(Drop(), Which(probability=0.2))])


PLAYS = {
    **SCENARIOS,
    "life": Scenario("life", "requests, readers beside, callers that leave, a flush", _life),
    "late": Scenario("late", "loads and stores that come after their deadline", _late),
    "hopeless": Scenario("hopeless", "links on which every load fails", _hopeless),
    "tenants": Scenario("tenants", "equal prompts of several tenants, and a flush", _tenants),
    "prefetch": Scenario("prefetch", "evicted prefixes are prefetched, then used", _prefetch),
    "pins": Scenario("pins", "pins of two tenants, and a flush", _pins),
    "killed": Scenario("killed", "a loader that dies with copies in hand", _killed),
    "overdue": Scenario("overdue", "a worker that stands still past the requests' time", _overdue),
}
"""The lab's core scenarios, and what they leave out."""


def play(scenario: Scenario, seed: int) -> Sequence[Event]:
    """Run it once under the seed's schedule; return its log, closed in order however it ended."""
    world = World(seed)

    async def body() -> None:
        try:
            with trio.fail_after(HORIZON_S):
                await scenario.play(world)
        finally:
            world.log.close()

    run_scheduled(body, mixed(seed, EXPECTED_CHOICES))
    return world.events


def main(name: str, first: str, seeds: str, folder: str) -> None:
    """Write one log for each of so many seeds, from ``first`` on."""
    for seed in range(int(first), int(first) + int(seeds)):
        path = Path(folder) / f"{name}-{seed}.jsonl"
        events = play(PLAYS[name], seed)
        lines = [msgspec.json.encode(event) for event in events]
        path.write_bytes(b"\n".join([*lines, b""]))
        print(path, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
