"""Many concurrent sessions over several turns with jittered copies: the incident itself.

Full size: ``pytest tests/runtime/test_many_sessions.py --sessions 80``.
"""

import random

import pytest
import trio

from kvlease.protocols.config import SamplingParams
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import open_engine
from kvlease.runtime.scheduler import Scheduler
from tests.runtime.toy import (
    COLD,
    FaultyCopier,
    answer,
    prompt_of,
    random_delays,
    same,
    toy_config,
    toy_model,
)

TURNS = 3
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.mark.slow
async def test_sessions_with_restores_and_jitter(
    num_sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 corrupt, 0 hung, and every book adds up after every step of the scheduler (R11)."""
    checked = [0]
    plan = Scheduler.plan

    def plan_and_check(self: Scheduler) -> None:
        plan(self)
        core = self._core
        held = [seq.held for seq in core.running if seq.held is not None]
        slots = [keep.tail_slot for step in core.steps.values() if step for keep in step.keeps]
        core.pool.check(held, slots)
        checked[0] += 1

    monkeypatch.setattr(Scheduler, "plan", plan_and_check)
    turns: dict[int, list[tuple[list[int], object]]] = {n: [] for n in range(num_sessions)}

    config = toy_config(
        device_pages=80, host_pages=40 * num_sessions, max_sessions=min(num_sessions, 64)
    )
    copier = FaultyCopier(random_delays(0, 0.003))
    async with open_engine(toy_model(), config, ports=EnginePorts(copier=copier)) as engine:

        async def session(number: int) -> None:
            rng = random.Random(number)
            prompt = prompt_of(number, 90 + rng.randrange(60), 64)
            for turn in range(TURNS):
                result = await answer(engine, prompt, PARAMS)
                turns[number].append((prompt, result))
                tool = prompt_of(1000 * turn + number, 20 + rng.randrange(40))
                prompt = [*prompt, *result.tokens, *tool]

        with trio.fail_after(20 + 3 * num_sessions):
            async with trio.open_nursery() as nursery:
                for number in range(num_sessions):
                    nursery.start_soon(session, number)
        statistics = engine.statistics()
    assert checked[0] > num_sessions
    assert statistics.counters.hit_host > 0, "no prefix was restored, so nothing was tested"
    assert statistics.ledger_ok, statistics.ledger_error
    everything = [(prompt, result) for done in turns.values() for prompt, result in done]
    assert len(everything) == TURNS * num_sessions
    await COLD.learn([(prompt, PARAMS) for prompt, _ in everything])
    for prompt, result in everything:
        assert same(result, COLD.known[tuple(prompt), PARAMS])  # type: ignore[arg-type]
