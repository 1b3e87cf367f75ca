"""Sessions are served as their users would, and whatever ends a turn is counted as what it is."""

import math

import pytest
import trio
from trio.testing import MockClock

from kvlease.errors import EngineFull, PromptError, RequestFailed
from kvlease.protocols.config import SamplingParams
from kvlease.services.driver import Driver, Tally, prompt_lengths
from kvlease.services.sessions import Session, Tokens, Turn, num_tokens, pack
from tests.services.fakes import FakeEngine


def session(name: str, *, turns: int = 2, answer: int = 3, pause_s: float = 0.5) -> Session:
    return Session(
        name,
        tuple(
            Turn(pack([7, n, *name.encode()]), SamplingParams(max_tokens=answer), pause_s)
            for n in range(turns)
        ),
    )


async def serve(driver: Driver, *sessions: Session, workers: int = 8) -> Tally:
    await driver.serve(sessions, workers)
    return driver.tally


async def test_a_turn_adds_to_the_prompt_and_the_answer_before(autojump_clock: MockClock) -> None:
    del autojump_clock
    engine = FakeEngine()
    driver = Driver(engine, deadline_s=9, keep_records=True)
    one = session("a")
    await serve(driver, one)
    first, second = driver.records
    assert first.prompt == one.turns[0].added
    assert second.prompt == first.prompt + pack(first.tokens) + one.turns[1].added
    assert all(len(r.tokens) == len(r.digests) == 3 for r in driver.records)


async def test_the_tally_adds_up(autojump_clock: MockClock) -> None:
    del autojump_clock
    engine = FakeEngine(token_s=0.25)
    tally = await serve(Driver(engine, deadline_s=9), session("a"), session("b"))
    assert (tally.sessions, tally.turns, tally.output_tokens) == (2, 4, 12)
    assert tally.prompt_tokens == sum(map(num_tokens, engine.prompts))
    assert (tally.hit_device, tally.hit_host, tally.computed_tokens) == (4, 8, 12)
    assert tally.ttft_s == pytest.approx([0.25] * 4)
    assert tally.tpot_s == pytest.approx([0.25] * 4)


async def test_no_more_sessions_at_once_than_asked_for(autojump_clock: MockClock) -> None:
    del autojump_clock
    engine = FakeEngine()
    driver = Driver(engine, deadline_s=9)
    tally = await serve(driver, *(session(str(n)) for n in range(7)), workers=3)
    assert (tally.sessions, engine.most_at_once) == (7, 3)
    assert not driver.records


async def test_a_full_engine_is_asked_again(autojump_clock: MockClock) -> None:
    del autojump_clock
    left = [0.5, 0.5]

    def refuse(prompt: Tokens) -> None:
        if left:
            raise EngineFull("64 sessions run", retry_after_s=left.pop())

    tally = await serve(Driver(FakeEngine(before=refuse), deadline_s=9), session("a"))
    assert (tally.turns, tally.failed_turns) == (2, 0)


async def test_a_failed_turn_ends_its_session_only(autojump_clock: MockClock) -> None:
    del autojump_clock

    def fail(prompt: Tokens) -> None:
        if prompt.endswith(pack(b"a")):
            raise RequestFailed("the worker died")

    tally = await serve(Driver(FakeEngine(before=fail), deadline_s=9), session("a"), session("b"))
    assert (tally.turns, tally.failed_turns) == (2, 1)
    assert tally.complaints == ["a, turn 1: the worker died"]


async def test_a_request_without_an_end_is_a_hung_session(autojump_clock: MockClock) -> None:
    """A session that waits for ever must end the run in exit 1, not keep it from ending."""
    del autojump_clock
    engine = FakeEngine(token_s=math.inf)
    with trio.fail_after(100):
        tally = await serve(Driver(engine, deadline_s=9), session("a"))
    assert (tally.hung_sessions, tally.turns, engine.at_once) == (1, 0, 0)
    assert tally.complaints == ["a, turn 1: no end 9 s after it began"]


async def test_a_request_that_cannot_be_served_is_bad_input_with_its_name() -> None:
    def refuse(prompt: Tokens) -> None:
        raise PromptError("the prompt is empty")

    with pytest.RaisesGroup(pytest.RaisesExc(PromptError, match="a, turn 1: the prompt is empty")):
        await serve(Driver(FakeEngine(before=refuse), deadline_s=9), session("a"))


def test_the_lengths_a_session_may_reach() -> None:
    assert list(prompt_lengths(session("a"))) == [(3, 6), (9, 12)]
