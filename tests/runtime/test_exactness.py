"""Exactness: an answer is the same bit for bit, whatever happened to its prefix on the way.

500 random answers: 25 engines serve 10 requests twice.
"""

import random

import pytest
import trio
from attrs import evolve

from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import open_engine
from tests.runtime.toy import (
    TOY,
    Cold,
    FaultyCopier,
    answer,
    prompt_of,
    random_delays,
    same,
    toy_config,
    toy_model,
)

GEOMETRIES = {
    "three kinds": TOY,
    "two sparse": evolve(
        TOY, layer_kinds=("sparse", "sparse"), mlp_kinds=("hash", "score"), window=8
    ),
    "heavy first": evolve(TOY, layer_kinds=("heavy", "sparse", "sliding"), index_topk=6),
}
COLD = {name: Cold(config) for name, config in GEOMETRIES.items()}
ENGINES = 25
REQUESTS = 10
SAMPLING = (
    SamplingParams(max_tokens=5),
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(max_tokens=6, temperature=1.2, top_k=5, seed=4, min_tokens=3),
)


def cases(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Draw requests from a small world, so that prefixes are shared and cold answers reused."""
    return [
        (
            prompt_of(rng.randrange(6), rng.choice((1, 15, 16, 33, 97, 160, 250, 401, 600)), 64),
            SAMPLING[rng.randrange(len(SAMPLING))],
        )
        for _ in range(REQUESTS)
    ]


def random_config(rng: random.Random) -> EngineConfig:
    """Draw pools from roomy to so tight that requests are preempted, and any policy."""
    return toy_config(
        device_pages=rng.choice((40, 45, 60, 120)),
        host_pages=rng.choice((0, 40, 200)),
        chunk_tokens=rng.choice((16, 31, 48, 100, 1000)),
        tail_every=rng.choice((1, 2, 5)),
        max_sessions=rng.choice((1, 3, 8)),
        write_policy=rng.choice(("through", "through", "selective", "back")),
        eviction=rng.choice(("lru", "s3fifo")),
        load_or_recompute=rng.random() < 0.3,
        decode_ahead=rng.choice((None, 2, 4, 20)),
    )


@pytest.mark.parametrize("seed", range(ENGINES))
async def test_answers_equal_cold_runs_bit_for_bit(seed: int) -> None:
    """Chunks, batch mixes, restores, shared loads and preemptions must not show in an answer.

    Each engine serves ten requests twice, so that the second round finds the first one's pages on
    whatever tier they ended up (sglang#32214, #34562: answers that depend on what was cached).
    """
    rng = random.Random(seed)
    name = rng.choice(list(GEOMETRIES))
    todo = cases(rng)
    with trio.fail_after(100):
        await COLD[name].learn(todo)
        copier = FaultyCopier(random_delays(seed, 0.004))
        model = toy_model(GEOMETRIES[name])
        config = random_config(rng)
        async with open_engine(model, config, ports=EnginePorts(copier=copier)) as engine:
            wrong: list[int] = []

            async def check(number: int, prompt: list[int], params: SamplingParams) -> None:
                await trio.sleep(rng.random() * 0.05)
                result = await answer(engine, prompt, params)
                usage = result.usage
                assert usage.prompt == usage.hit_device + usage.hit_host + usage.computed
                if not same(result, COLD[name].known[tuple(prompt), params]):
                    wrong.append(number)

            for _ in range(2):
                async with trio.open_nursery() as nursery:
                    for number, (prompt, params) in enumerate(todo):
                        nursery.start_soon(check, number, prompt, params)
                assert not wrong
            statistics = engine.statistics()
            assert statistics.ledger_ok, statistics.ledger_error
            assert statistics.running == statistics.waiting == 0
