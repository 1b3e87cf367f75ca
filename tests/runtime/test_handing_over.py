"""Callers get their tokens while a device is busy with the next step, and never later than that."""

import pytest
import trio

from kvlease.errors import DeadlineExceeded
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.ownership import StepLease
from kvlease.protocols.ports import StepInput, StepResult, Stream
from kvlease.runtime.engine import open_engine
from kvlease.runtime.request import TokenEvent
from tests.runtime.toy import PAGE, prompt_of, toy_config, toy_model

PROMPT = prompt_of(1, 2 * PAGE + 3)


async def test_tokens_go_out_behind_the_launch_of_the_next_step() -> None:
    told: list[tuple[int, bool | None]] = []
    async with open_engine(toy_model(), toy_config()) as engine:

        def listen(events: tuple[TokenEvent, ...]) -> None:
            step = engine._core.steps["decode"]
            told.append((len(events), None if step is None else step.is_launched))

        params = SamplingParams(max_tokens=5, ignore_eos=True)
        async with engine.generate(PROMPT, params, listener=listen) as stream:
            assert await stream.ended() is None
    assert told == [(1, True)] * 4 + [(1, None)]


async def test_an_answer_that_ends_early_has_all_that_was_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first decode step never gets to its launch: the deadline brings what was published."""
    model = toy_model()
    forward, go_on = model.forward, trio.Event()

    async def stuck(inputs: StepInput, lease: StepLease, stream: Stream) -> StepResult:
        if len(inputs.sequences[0].tokens) == 1:
            await go_on.wait()
        return await forward(inputs, lease, stream)

    monkeypatch.setattr(model, "forward", stuck)
    async with open_engine(model, toy_config()) as engine:
        params, tokens = SamplingParams(max_tokens=9, ignore_eos=True), list[int]()
        async with engine.generate(PROMPT, params, timeout_s=0.5) as stream:
            with pytest.raises(DeadlineExceeded):
                async for event in stream:
                    tokens.append(event.token)
        go_on.set()
    assert len(tokens) == 1
