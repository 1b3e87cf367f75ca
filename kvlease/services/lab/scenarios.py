"""The scenarios: load under eviction pressure, abort in flight, shared load, preempt, cache calls.

Each runs the real engine on the witness model and a simulated device. The seed draws sizes, the
order and the delays of requests, policies, and faults of copies; prompts come from a small world,
so that prefixes are shared and cold answers known already. A run is some twenty steps of a model.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Final, Protocol, final

import trio
import trio.testing
from attrs import evolve, frozen

from kvlease.errors import ActorBroken, PagesUnavailable, TransferFailed
from kvlease.kernels.models.witness_model import VOCAB_SIZE, WitnessModel
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.rpc import CacheTier
from kvlease.runtime.counters import Statistics
from kvlease.runtime.engine import Engine, open_engine
from kvlease.services.lab.device import SimulatedDevice
from kvlease.services.lab.explore import Answer, Scenario, World
from kvlease.services.lab.faults import (
    CopyFault,
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
from kvlease.services.lab.spec import DeviceSpec, LinkSpec

MAX_TOKENS: Final = 16
"""The longest answer of any scenario; cold answers are this long, served ones may be shorter."""
SETTLE_S: Final = 100.0
"""Virtual seconds after the last request within which every page must have come back."""
TICK_S: Final = 0.001
"""The grain of delays; times are whole ticks, so that much falls on the same instant."""
DELAYS_S: Final = (0.0, 0.0, TICK_S, 3 * TICK_S)
LOAD_TIMEOUT_S: Final = 0.05
REQUEST_TIMEOUT_S: Final = 20.0
BAD_COPIES: Final = 0.1
"""Share of copies that go wrong, in runs that have such a link."""
LENGTHS: Final = (9, 13, 14, 17, 21)
"""Prompt lengths, in tokens: on both sides of a page's end, three to six pages."""
LONGEST: Final = max(LENGTHS)
"""Six pages: next to nothing else stays on the device."""
FAMILIES: Final = 4
SHARED: Final = 16
"""Tokens that the first two families have in common: four pages."""


@cache
def witness() -> WitnessModel:
    """Return the model; one for the whole process."""
    return WitnessModel()


@cache
def prompt_of(family: int, length: int) -> tuple[int, ...]:
    """Return the first tokens of a family's endless prompt."""
    own, common = random.Random(family), random.Random(1000)
    tokens = [own.randrange(VOCAB_SIZE) for _ in range(LONGEST)]
    if family < 2:
        tokens[:SHARED] = [common.randrange(VOCAB_SIZE) for _ in range(SHARED)]
    return tuple(tokens[:length])


@frozen
class Client:
    """One request: when it comes, what it asks, and when its caller goes away (None: never)."""

    prompt: tuple[int, ...]
    max_tokens: int
    delay_s: float = 0.0
    leaves_after_s: float | None = None
    leaves_after_tokens: int | None = None

    async def run(self, world: World, engine: Engine) -> None:
        """Ask, and note the answer if it was waited for."""
        await trio.sleep(self.delay_s)
        params = SamplingParams(max_tokens=self.max_tokens)
        patience = float("inf") if self.leaves_after_s is None else self.leaves_after_s
        with trio.move_on_after(patience):
            async with engine.generate(self.prompt, params) as stream:
                taken = 0
                async for _ in stream:
                    taken += 1
                    if taken == self.leaves_after_tokens:
                        return
                result = stream.result
                world.answers.append(
                    Answer(stream.request.id, self.prompt, result.tokens, result.digests)
                )
                if len(result.tokens) != self.max_tokens:
                    world.complain("short answer", f"an answer ended as {result.finish_reason}")


@frozen
class Keeper:
    """Somebody who looks after the cache while others ask: a few calls, each after a while."""

    prompts: tuple[tuple[int, ...], ...]
    seed: int

    async def run(self, world: World, engine: Engine) -> None:
        """Prefetch, pin, unpin, evict and flush in a drawn order; being refused is fine."""
        rng, cache = random.Random(self.seed), engine.cache
        for prompt in self.prompts:
            await trio.sleep(rng.choice(DELAYS_S))
            tokens = array("i", prompt).tobytes()
            with suppress(PagesUnavailable, TransferFailed, ActorBroken):
                match rng.randrange(8):
                    case 0 | 1 | 2:
                        await cache.prefetch(tokens, rng.choice(("device", "device", "host")))
                    case 3 | 4:
                        pin = await cache.pin(tokens, rng.choice((TICK_S, 5.0)))
                        await trio.sleep(rng.choice(DELAYS_S))
                        if rng.random() < 0.5:
                            await cache.unpin(pin.pin)
                    case 5 | 6:
                        tier: CacheTier | None = rng.choice((None, "device", "host"))
                        await cache.evict(tokens[: 4 * rng.randrange(len(prompt))], tier)
                    case _:
                        await engine.flush()


class Guest(Protocol):
    """Who comes to a scenario."""

    async def run(self, world: World, engine: Engine) -> None:
        """Do what he came for."""
        ...


@final
class ColdAnswers:
    """Answers of the same model alone: nothing cached, nobody beside."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: dict[tuple[int, ...], Answer] = {}

    def judge(self, world: World) -> None:
        """Complain of each answer that differs from the cold one in a token or a digest."""
        for answer in world.answers:
            cold = self._known.get(answer.prompt) or self._learn(answer.prompt)
            count = len(answer.tokens)
            if (answer.tokens, answer.digests) != (cold.tokens[:count], cold.digests[:count]):
                pairs = enumerate(zip(answer.digests, cold.digests, strict=False))
                where = next((place for place, (one, other) in pairs if one != other), count)
                world.complain(
                    "answer differs",
                    f"the answer to request {answer.request} differs from the cold one"
                    f" from token {where} on",
                )

    def _learn(self, prompt: tuple[int, ...]) -> Answer:
        world = World(0)
        config = EngineConfig(
            device_pages=16,
            host_pages=0,
            prefix_cache=False,
            max_sessions=1,
            chunk_tokens=1024,
            digests=True,
        )

        async def alone() -> None:
            device = SimulatedDevice(witness())
            async with open_engine(device.runner, config, ports=device.ports) as engine:
                await Client(prompt, MAX_TOKENS).run(world, engine)

        trio.run(alone, clock=trio.testing.MockClock(autojump_threshold=0))
        self._known[prompt] = world.answers[0]
        return world.answers[0]


COLD: Final = ColdAnswers()


def _client(rng: random.Random, family: int, lengths: Sequence[int] = LENGTHS) -> Client:
    """Draw a request; delays are few and small, so that much happens at the same instant."""
    prompt = prompt_of(family, rng.choice(lengths))
    return Client(prompt, rng.randint(1, 3), rng.choice(DELAYS_S))


def _before(rng: random.Random, family: int, length: int = 0) -> Client:
    """Draw a request that only sets the scene: a long prompt, and one token."""
    return Client(prompt_of(family, length or rng.choice((14, 17))), 1)


def _leaving(rng: random.Random, client: Client) -> Client:
    """Let the caller go away: after a while, or in the middle of its answer."""
    if rng.random() < 0.6:
        return evolve(client, leaves_after_s=rng.randrange(12) * TICK_S)
    return evolve(client, leaves_after_tokens=1, max_tokens=client.max_tokens + 1)


def _config(rng: random.Random) -> EngineConfig:
    """Draw a small pool and its policies; pages are poisoned, answers have digests."""
    return EngineConfig(
        device_pages=rng.choice((7, 8)),
        host_pages=rng.choice((12, 24)),
        tail_every=rng.choice((2, 2, 4)),
        write_policy=rng.choice(("through", "through", "through", "back", "selective")),
        eviction=rng.choice(("lru", "s3fifo")),
        max_sessions=rng.choice((2, 3)),
        chunk_tokens=rng.choice((8, 32)),
        digests=True,
        poison=True,
        load_or_recompute=False,
        load_timeout_s=LOAD_TIMEOUT_S,
        request_timeout_s=REQUEST_TIMEOUT_S,
        decode_ahead=rng.choice((None, 3)),
    )


def _spec(rng: random.Random) -> DeviceSpec:
    """Draw a device: loads from instant to slower than their deadline."""
    load, store = rng.choice((0, 1, 2, 4, 30)), rng.choice((0, 1, 3))
    return DeviceSpec(
        load=LinkSpec(latency_s=load * TICK_S, bytes_per_s=math.inf),
        store=LinkSpec(latency_s=store * TICK_S, bytes_per_s=math.inf),
        shares_link=rng.random() < 0.3,
        step_s=rng.choice((0, 0, 2, 4)) * TICK_S,
        token_s=0.0,
    )


def _faults(rng: random.Random) -> FaultPlan:
    """Draw what goes wrong, if anything does: copies, now and then an actor or its mailbox."""
    rules: list[Rule] = []
    if rng.random() < 0.4:
        fault: CopyFault = rng.choice((Fail(), Shorten(), Delay(2 * TICK_S), Drop()))
        rules.append(CopyRule(fault, Which(direction="load", probability=BAD_COPIES)))
    if rng.random() < 0.2:
        rules.append(CopyRule(Fail(), Which(direction="store", probability=BAD_COPIES)))
    if rng.random() < 0.1:
        rules.append(KillActor(rng.choice(("loader", "prefill", "decode")), rng.randint(1, 4)))
    if rng.random() < 0.1:
        actor = rng.choice(("loader", "scheduler", "prefill", "decode"))
        rules.append(StallMailbox(actor, rng.choice((1, 5)) * TICK_S, rng.randint(1, 9)))
    return FaultPlan(seed=rng.randrange(1 << 30), rules=tuple(rules))


async def _serve(world: World, rounds: Sequence[Sequence[Guest]]) -> None:
    """Serve the rounds one after another, their requests together; then see that all came back."""
    rng = world.rng
    device = SimulatedDevice(witness(), _spec(rng), world.log, _faults(rng))
    config = _config(rng)
    async with open_engine(device.runner, config, log=world.log, ports=device.ports) as engine:
        for clients in rounds:
            async with trio.open_nursery() as nursery:
                for number, client in enumerate(clients):
                    nursery.start_soon(client.run, world, engine, name=f"client {number}")
        await trio.sleep(SETTLE_S)
        _check_whole(world, engine.statistics())


def _check_whole(world: World, now: Statistics) -> None:
    """Complain unless the ledger adds up and everything has come back (R11)."""
    if now.ledger_error is not None:
        world.complain("ledger", now.ledger_error)
    away = {
        "running": now.running,
        "waiting": now.waiting,
        "device held": now.device.held,
        "device reserved": now.device.reserved,
        "host held": now.host.held,
        "slots": now.slots.total - now.slots.free,
        "device quarantined": now.device.quarantined,
        "host quarantined": now.host.quarantined,
        "device tails quarantined": now.device_tails.quarantined,
        "host tails quarantined": now.host_tails.quarantined,
    }
    left = {name: count for name, count in away.items() if count}
    if left:
        world.complain("leak", f"after the last request there are still {left}")


async def _pressure(world: World) -> None:
    rng = world.rng
    first, second, *others = rng.sample(range(FAMILIES), FAMILIES)
    rounds: list[Sequence[Guest]] = [
        [_before(rng, first)],
        [_before(rng, second, LONGEST)],
        [_client(rng, first), _client(rng, rng.choice((second, *others)))],
    ]
    await _serve(world, rounds)


async def _abort(world: World) -> None:
    rng = world.rng
    first, second, third, _ = rng.sample(range(FAMILIES), FAMILIES)
    rounds: list[Sequence[Guest]] = [
        [_before(rng, first)],
        [_before(rng, second, LONGEST)],
        [_leaving(rng, _client(rng, first)), _client(rng, third)],
        [_client(rng, first)],
    ]
    await _serve(world, rounds)


async def _shared(world: World) -> None:
    rng = world.rng
    together = [_client(rng, family, lengths=LENGTHS[-2:]) for family in rng.sample((0, 1), 2)]
    if rng.random() < 0.6:
        who = rng.randrange(2)
        together[who] = _leaving(rng, together[who])
    rounds: list[Sequence[Guest]] = [
        [_before(rng, rng.choice((0, 1)), LENGTHS[-2])],
        [_before(rng, rng.choice((2, 3)), LONGEST)],
        together,
    ]
    await _serve(world, rounds)


async def _preempt(world: World) -> None:
    rng = world.rng
    families = rng.sample(range(FAMILIES), 3)
    rounds: list[Sequence[Guest]] = [
        [
            Client(prompt_of(family, rng.choice((13, 14))), rng.randint(5, 9), rng.choice(DELAYS_S))
            for family in families[: rng.choice((2, 2, 3))]
        ],
        [_client(rng, families[0])],
    ]
    await _serve(world, rounds)


async def _keeping(world: World) -> None:
    rng = world.rng
    first, second, third, _ = rng.sample(range(FAMILIES), FAMILIES)
    prompts = tuple(
        prompt_of(rng.choice((first, first, second)), rng.choice(LENGTHS)) for _ in range(5)
    )
    rounds: list[Sequence[Guest]] = [
        [_before(rng, first)],
        [_before(rng, second, LONGEST)],
        [Keeper(prompts, rng.randrange(1 << 30)), _client(rng, first), _client(rng, third)],
        [_client(rng, first)],
    ]
    await _serve(world, rounds)


_PLAYS: Final = (
    ("pressure", "prefixes are loaded again after eviction, while others want pages", _pressure),
    ("abort", "a caller leaves while its prefix is loading or being computed", _abort),
    ("shared", "two requests on one load, which may fail under them", _shared),
    ("preempt", "answers outgrow the pool, one is preempted and restored", _preempt),
    ("keeping", "somebody prefetches, pins, evicts and flushes while others ask", _keeping),
)
SCENARIOS: Final = {name: Scenario(name, about, play, COLD.judge) for name, about, play in _PLAYS}
"""The scenarios, by name."""
