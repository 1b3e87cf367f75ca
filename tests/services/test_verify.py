"""A wrong answer is found and named, a right one is not, and equal requests are run once."""

from collections.abc import Callable, Sequence

import pytest
from attrs import evolve

from kvlease.errors import InternalError
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.services.cold import ColdAnswer, ColdRequest, ColdSetup, cold_config, run_cold
from kvlease.services.driver import Driver, ask
from kvlease.services.sessions import Session, Turn, pack
from kvlease.services.verify import verify
from tests.services.fakes import FakeEngine


def two_sessions() -> list[Session]:
    turn = Turn(pack([1, 2]), SamplingParams(max_tokens=3))
    return [Session("a", (turn, turn)), Session("b", (turn,))]


async def served() -> Driver:
    driver = Driver(FakeEngine(token_s=0), deadline_s=9, keep_records=True)
    await driver.serve(two_sessions(), 1)
    return driver


async def fake_cold(
    requests: Sequence[ColdRequest], on_answer: Callable[[ColdAnswer], None]
) -> None:
    """Answer as the fake engine does, last request first."""
    for request in reversed(requests):
        answer, _ = await ask(FakeEngine(token_s=0), request.prompt, request.sampling)
        on_answer(ColdAnswer(request.number, tuple(answer.tokens), tuple(answer.digests)))


async def test_right_answers_pass_and_equal_requests_are_run_once() -> None:
    driver = await served()
    seen: list[int] = []
    assert await verify(driver.records, fake_cold, seen.append) == []
    assert (len(driver.records), seen) == (3, [1, 3])


async def test_the_first_difference_is_named() -> None:
    driver = await served()
    first, second, third = driver.records
    other = (second.tokens[0], 256, second.tokens[2])
    found = await verify(
        [
            evolve(first, digests=(first.digests[0], b"other", first.digests[2])),
            evolve(second, tokens=other),
            evolve(third, tokens=third.tokens[:2]),
        ],
        fake_cold,
    )
    assert [str(m) for m in found] == [
        "a, turn 1: the logits of token 2 differ from a cold run's",
        f"a, turn 2: token 2 is 256, a cold run gives {second.tokens[1]}",
        "b, turn 1: 2 tokens, a cold run gives 3",
    ]


def test_a_cold_engine_shares_nothing() -> None:
    cold = cold_config(EngineConfig(max_sessions=64, host_pages=100, seed=5))
    assert not cold.prefix_cache
    assert (cold.max_sessions, cold.host_pages, cold.seed, cold.digests) == (1, 0, 5, True)


async def test_cold_runs_answer_in_processes_of_their_own() -> None:
    setup = ColdSetup(None, cold_config(EngineConfig(device_pages=8)))
    requests = [
        ColdRequest(n, pack(range(n, n + 40)), SamplingParams(max_tokens=2, ignore_eos=True))
        for n in (3, 4, 3)
    ]
    answers: list[ColdAnswer] = []
    await run_cold(setup, requests, 2, answers.append)
    assert sorted(answer.number for answer in answers) == [3, 3, 4]
    assert all(len(a.tokens) == len(a.digests) == 2 and all(a.digests) for a in answers)
    first, second = (a for a in answers if a.number == 3)
    assert first == second


async def test_a_cold_run_that_dies_ends_the_verification(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Silence from a dead worker must not pass for agreement."""
    setup = ColdSetup("/nowhere/at/all", EngineConfig())
    request = ColdRequest(0, pack([1]), SamplingParams())
    with pytest.RaisesGroup(pytest.RaisesExc(InternalError, match="cold run ended")):
        await run_cold(setup, [request], 1, lambda answer: None)
    assert "/nowhere/at/all" in capfd.readouterr().err
