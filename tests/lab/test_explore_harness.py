"""The explorer itself: it finds, repeats and shrinks failures, and tells what it cannot control."""

import itertools
from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio

from kvlease.errors import BadInput
from kvlease.protocols.events import Event
from kvlease.services.lab.explore import Scenario, World, explore, run_once
from kvlease.services.lab.schedule import (
    Policy,
    Replay,
    choices_of,
    choices_text,
    mixed,
    pct,
    policy_of,
    random_walk,
)


async def _overtaking(world: World) -> None:
    """Fails if one task takes six steps while another, runnable all along, takes none."""
    steps = 0

    async def fast() -> None:
        nonlocal steps
        for _ in range(6):
            await trio.lowlevel.checkpoint()
            steps += 1
        await trio.sleep(world.rng.random())

    async def slow() -> None:
        await trio.lowlevel.checkpoint()
        if steps == 6:
            world.complain("overtaken", "six steps to none")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow)
        nursery.start_soon(fast)
        for _ in range(3):
            nursery.start_soon(trio.sleep, world.rng.random())


OVERTAKING = Scenario("overtaking", "one task overtakes another", _overtaking)


@pytest.mark.parametrize("policy", [random_walk, pct(2), pct(3), mixed])
def test_it_finds_shrinks_and_replays(policy: Policy) -> None:
    found = explore(OVERTAKING, seeds=range(3000), policy=policy)
    (failure,) = found.failures
    assert found.schedules < 3000
    assert failure.problem.text == "six steps to none"
    assert failure.replays
    assert len(failure.choices) <= min(failure.num_drawn, 9), "about one a step that overtakes"
    assert f"--seed {failure.seed} --choices {choices_text(failure.choices)}" in str(failure)
    again = run_once(OVERTAKING, failure.seed, Replay(choices_of(choices_text(failure.choices))))
    assert again.problem == failure.problem
    for dropped in failure.choices:
        fewer = {at: place for at, place in failure.choices.items() if at != dropped}
        outcome = run_once(OVERTAKING, failure.seed, Replay(fewer))
        assert outcome.problem is None, "no choice is left that is not needed"


def test_a_seed_is_a_run() -> None:
    results = [explore(OVERTAKING, seeds=range(50), max_failures=99) for _ in range(2)]
    assert results[0].failures == results[1].failures
    assert results[0].steps == results[1].steps
    assert results[0].is_clean == (not results[0].failures)
    assert results[0].distinct > 25


def test_what_no_seed_decides_is_told() -> None:
    counter = itertools.count()

    async def unsteady(_world: World) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(1 + next(counter) % 2):
                nursery.start_soon(trio.lowlevel.checkpoint, name=f"child {number}")

    result = explore(Scenario("unsteady", "", unsteady), seeds=range(3), repeat_every=1)
    assert not result.is_clean
    assert not result.failures
    assert "the same choices gave another run" in result.unsteady[0]


def test_how_runs_go_wrong_is_told_apart() -> None:
    async def hangs(_world: World) -> None:
        await trio.sleep_forever()

    async def hangs_shielded(_world: World) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()

    async def raises(_world: World) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, 1)
            raise KeyError("lost")

    async def leaves_a_task(_world: World) -> None:
        trio.lowlevel.spawn_system_task(trio.sleep, 10)

    async def is_well(_world: World) -> None:
        await trio.sleep(5)

    def kind(play: Callable[[World], Awaitable[None]]) -> str | None:
        problem = run_once(Scenario("one", "", play), 0, Replay({})).problem
        return None if problem is None else problem.kind

    assert kind(hangs) == "hung"
    assert kind(hangs_shielded) == "hung"
    assert kind(raises) == "KeyError"
    assert kind(leaves_a_task) == "tasks left"
    assert kind(is_well) is None


def test_checks_judge_the_log() -> None:
    seen: list[int] = []

    def says_no(events: Sequence[Event]) -> str | None:
        seen.append(len(events))
        return "it is not as it should be"

    async def quiet(_world: World) -> None:
        await trio.lowlevel.checkpoint()

    problem = run_once(Scenario("quiet", "", quiet), 0, Replay({}), (says_no,)).problem
    assert problem is not None
    assert problem.kind == "says_no"
    assert seen == [1], "the log has its last line"


@pytest.mark.parametrize("text", ["", "1", "1:", ":1", "1:2,", "a:1", "1:-2"])
def test_choices_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="DECISION:PLACE"):
        choices_of(text)


def test_choices_and_policies_are_read_as_written() -> None:
    assert choices_of(choices_text({})) == {}
    assert choices_of("12:3,4:1") == {4: 1, 12: 3}
    assert choices_text({12: 3, 4: 1}) == "4:1,12:3"
    assert policy_of("mixed") is mixed
    assert policy_of("random") is random_walk
    assert policy_of("pct:3")(1, 10).choose(["a", "b"]) in (0, 1)
    for text in ("pct", "pct:0", "pct:x", "best"):
        with pytest.raises(BadInput, match="give mixed, random, or pct:N"):
            policy_of(text)
