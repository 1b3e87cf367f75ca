"""A wrong answer is found and named, a right one is not, and equal requests are run once."""

from attrs import evolve

from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.services.driver import Driver
from kvlease.services.sessions import Session, Turn, pack
from kvlease.services.verify import cold_config, verify
from tests.services.fakes import FakeEngine


def two_sessions() -> list[Session]:
    turn = Turn(pack([1, 2]), SamplingParams(max_tokens=3))
    return [Session("a", (turn, turn)), Session("b", (turn,))]


async def served() -> Driver:
    driver = Driver(FakeEngine(token_s=0), deadline_s=9, keep_records=True)
    await driver.serve(two_sessions(), 1)
    return driver


async def test_right_answers_pass_and_equal_requests_are_run_once() -> None:
    driver = await served()
    cold = FakeEngine(token_s=0)
    seen: list[int] = []
    assert await verify(cold, driver.records, seen.append) == []
    assert (len(driver.records), len(cold.prompts), seen) == (3, 2, [1, 2, 3])


async def test_the_first_difference_is_named() -> None:
    driver = await served()
    first, second, third = driver.records
    other = (second.tokens[0], 256, second.tokens[2])
    found = await verify(
        FakeEngine(token_s=0),
        [
            evolve(first, digests=(first.digests[0], b"other", first.digests[2])),
            evolve(second, tokens=other),
            evolve(third, tokens=third.tokens[:2]),
        ],
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
