"""Steps that draw several tokens of each answer: the same answers, and nothing kept past their end.

What such a step computes behind an answer's end must be seen by nobody: not in the answer, not in
a page or a tail that others are served from.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from attrs import evolve

from kvlease.errors import ConfigError, DeadlineExceeded
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.events import Event, StepDone
from kvlease.protocols.ports import StepInput
from kvlease.runtime.core import DECODE_AHEAD
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.request import GenerateResult, Request
from kvlease.services.replay.checker import check
from tests.museum.held_steps import HeldSteps
from tests.runtime.test_engine import assert_whole, at_rest
from tests.runtime.toy import COLD, PAGE, answer, prompt_of, same, toy_config, toy_model

AHEAD = 4
PROMPT = prompt_of(1, 2 * PAGE + 4)
"""Steps of an answer to it end at the page's end: prefill draws a token, and twelve rows are left.
"""
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
CONFIG = toy_config(decode_ahead=AHEAD, tail_every=1)


@asynccontextmanager
async def running_ahead(
    config: EngineConfig = CONFIG, model: HeldSteps | None = None
) -> AsyncGenerator[tuple[Engine, list[Event]]]:
    """Open an engine; afterwards every page has come back, and its log is clean."""
    log = EventLog(level="audit", flush_every_s=3600)
    events: list[Event] = log.remember()
    async with open_engine(model or toy_model(), config, log=log) as engine:
        yield engine, events
        assert_whole(await at_rest(engine))
    log.close()
    assert check(events).verdict == "clean"


def counts(events: list[Event]) -> list[int]:
    """Return how many rows each decode step computed of its first sequence."""
    steps = [e for e in events if isinstance(e, StepDone) and e.kind == "decode"]
    return [step.rows[0].count for step in steps]


async def test_a_step_draws_several_tokens_up_to_the_page_and_the_answer_end() -> None:
    async with running_ahead() as (engine, events):
        params = SamplingParams(max_tokens=25, ignore_eos=True)
        assert same(await answer(engine, PROMPT[1:], params), await COLD.answer(PROMPT[1:], params))
    # the first token was drawn by prefill; thirteen rows are left of the page
    assert counts(events) == [4, 4, 4, 1, 4, 4, 3]


async def test_the_defaults_are_those_of_the_device() -> None:
    async with open_engine(toy_model(), toy_config()) as engine:
        assert engine._core.decode_ahead == 1
    assert DECODE_AHEAD > 1
    with pytest.raises(ConfigError, match="decode_ahead is 0"):
        EngineConfig(decode_ahead=0)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9, temperature=0.8, seed=3),
        SamplingParams(max_tokens=9, logprobs=1),
        SamplingParams(max_tokens=9, min_tokens=9, stop_tokens=frozenset({5})),
    ],
)
async def test_what_the_best_logit_does_not_settle_is_drawn_one_by_one(
    params: SamplingParams,
) -> None:
    async with running_ahead() as (engine, events):
        assert same(await answer(engine, PROMPT, params), await COLD.answer(PROMPT, params))
    assert set(counts(events)) <= {1}


async def test_no_prefill_waits_for_a_step_that_runs_ahead() -> None:
    """While a prompt is computed chunk by chunk, every decode step that begins draws one token."""
    config = evolve(CONFIG, chunk_tokens=PAGE)
    async with (
        running_ahead(config) as (engine, events),
        engine.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True)) as first,
    ):
        for _ in range(3 * AHEAD):
            await anext(first)
        await answer(engine, prompt_of(2, 8 * PAGE), SamplingParams(max_tokens=1))
        await first.drain()
    steps = [event for event in events if isinstance(event, StepDone)]
    chunks = [step.step for step in steps if step.kind == "prefill" and step.rows[0].request == 2]
    decodes = [step for step in steps if step.kind == "decode"]
    beside = [step for step in decodes if chunks[0] < step.step < chunks[-1]]
    assert len(chunks) == 8
    assert beside
    assert all(step.rows[0].count == 1 for step in beside)
    assert decodes[0].rows[0].count == AHEAD


@pytest.mark.parametrize("audit_rate", [0.0, 1.0])
async def test_an_answer_that_ends_inside_a_step_leaves_no_row_behind_its_end(
    audit_rate: float,
) -> None:
    """At every place before, at and behind the page's end, with the step's end at the page's.

    Then its next turns, with the token that came next in the step and with another one: both are
    served from what is cached, and equal cold answers. Audited, what was kept is compared.
    """
    cold = await COLD.answer(PROMPT, LONG)
    async with running_ahead(evolve(CONFIG, audit_rate=audit_rate)) as (engine, _):
        for place in range(8, 14):
            stop = frozenset({cold.tokens[place]})
            end = cold.tokens.index(cold.tokens[place])
            params = SamplingParams(max_tokens=40, ignore_eos=True, stop_tokens=stop)
            result = await answer(engine, PROMPT, params)
            assert result.finish_reason == "stop"
            assert result.tokens == cold.tokens[: end + 1]
            assert result.digests == cold.digests[: end + 1]
            for behind in (cold.tokens[end + 1], cold.tokens[end + 1] ^ 1):
                turn = [*PROMPT, *result.tokens, behind, *prompt_of(place, 20)]
                short = SamplingParams(max_tokens=3)
                again = await answer(engine, turn, short)
                assert same(again, await COLD.answer(turn, short))
                full = (len(PROMPT) + end) // PAGE
                assert again.usage.hit_device >= full * PAGE
        assert engine.statistics().counters.audit_mismatches == 0


async def test_a_page_that_an_ended_answer_only_filled_in_passing_is_not_cached() -> None:
    """The step ends at a page's end, the answer before it: that page's tokens were never said."""
    cold = await COLD.answer(PROMPT, LONG)
    boundary = 3 * PAGE - len(PROMPT)
    ends = [cold.tokens.index(token) for token in cold.tokens[boundary - 3 : boundary - 1]]
    async with running_ahead() as (engine, _):
        for end in ends:
            stop = frozenset({cold.tokens[end]})
            params = SamplingParams(max_tokens=40, ignore_eos=True, stop_tokens=stop)
            await answer(engine, PROMPT, params)
        turn = [*PROMPT, *cold.tokens[:boundary], 1]
        again = await answer(engine, turn, SamplingParams(max_tokens=3))
        assert again.usage.hit_device == 2 * PAGE
        assert same(again, await COLD.answer(turn, SamplingParams(max_tokens=3)))


def draws_several(inputs: StepInput) -> bool:
    """Whether a step may return more than one token of each sequence."""
    return inputs.sequences[0].may_produce > 1


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
async def test_an_answer_called_off_inside_a_step_ends_with_it(how: str) -> None:
    """Nothing of the step is published, and the next one asks as if it had never been."""
    held = HeldSteps(draws_several)
    async with running_ahead(model=held) as (engine, _):
        asked: list[Request] = []
        timeout_s = 0.3 if how == "deadline" else None
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with suppress(DeadlineExceeded):
                    async with engine.generate(PROMPT, LONG, timeout_s=timeout_s) as stream:
                        asked.append(stream.request)
                        await stream.drain()

            nursery.start_soon(ask)
            assert await trio.to_thread.run_sync(held.reached.wait, 10)
            if how == "deadline":
                await trio.sleep(0.4)
            nursery.cancel_scope.cancel()
            held.go.set()
        assert len(asked[0].output) == 1, "that of prefill"
        assert same(await answer(engine, PROMPT, LONG), await COLD.answer(PROMPT, LONG))


async def test_preempted_answers_go_on_where_they_were() -> None:
    """Pages run out while all decode, several tokens a step: all still get the cold answer."""
    prompts = [prompt_of(seed, 70) for seed in range(3)]
    config = evolve(CONFIG, device_pages=16, host_pages=60)
    async with running_ahead(config) as (engine, events):
        results: dict[int, GenerateResult] = {}

        async def run(number: int) -> None:
            results[number] = await answer(engine, prompts[number], LONG)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(len(prompts)):
                    nursery.start_soon(run, number)
        for number, prompt in enumerate(prompts):
            assert same(results[number], await COLD.answer(prompt, LONG))
        assert engine.statistics().counters.preempted > 0
    assert max(counts(events)) == AHEAD
