"""Schedules: one task a pass, recorded, replayed, and Trio left as it was found."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import trio
from trio._core import _run as trio_run

from kvlease.errors import InternalError
from kvlease.services.lab.schedule import (
    Chooser,
    Priorities,
    RandomWalk,
    Replay,
    Trace,
    check_private_names,
    one_task_a_pass,
    run_scheduled,
)


def test_canary_this_trio_has_the_private_names_and_uses_them() -> None:
    """If this fails after an upgrade of trio: read how its loop picks tasks, mend schedule.py."""
    check_private_names()
    batches: list[list[str]] = []

    class Spy:
        def shuffle(self, batch: list[trio.lowlevel.Task]) -> None:
            if batch:
                batches.append([task.name for task in batch])

        def random(self) -> float:
            raise AssertionError("with the flag set, trio shuffles its batches by itself")

    names: dict[str, object] = trio_run.__dict__
    before = names["_ALLOW_DETERMINISTIC_SCHEDULING"], names["_r"]
    names["_ALLOW_DETERMINISTIC_SCHEDULING"], names["_r"] = True, Spy()
    try:

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                for number in (1, 2, 3):
                    nursery.start_soon(trio.lowlevel.checkpoint, name=f"child {number}")

        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        names["_ALLOW_DETERMINISTIC_SCHEDULING"], names["_r"] = before
    assert ["child 1", "child 2", "child 3"] in batches, "a batch is sorted before it is shuffled"


@pytest.mark.parametrize("name", ["_r", "GLOBAL_RUN_CONTEXT"])
def test_a_trio_without_the_names_is_refused_in_one_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(trio_run, name)
    with pytest.raises(InternalError, match=f"has no {name} .* mend"):
        check_private_names()


@pytest.mark.parametrize("fails", [False, True])
def test_trio_is_itself_again_after_the_block(fails: bool) -> None:
    names: dict[str, object] = trio_run.__dict__
    before = names["_ALLOW_DETERMINISTIC_SCHEDULING"], names["_r"]
    try:
        with one_task_a_pass(RandomWalk(0), Trace()):
            assert names["_r"] is not before[1]
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert (names["_ALLOW_DETERMINISTIC_SCHEDULING"], names["_r"]) == before


class Overtaking:
    """One task takes eight steps while another, runnable all along, takes none."""

    def __init__(self) -> None:
        self.found = False
        self._steps = 0

    async def __call__(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._slow)
            nursery.start_soon(self._fast)

    async def _slow(self) -> None:
        await trio.lowlevel.checkpoint()
        self.found = self._steps >= 8

    async def _fast(self) -> None:
        for _ in range(8):
            await trio.lowlevel.checkpoint()
            self._steps += 1
        for _ in range(8):
            await trio.lowlevel.checkpoint()


def hits(chooser: Callable[[int], Chooser], seeds: Sequence[int]) -> int:
    found = 0
    for seed in seeds:
        program = Overtaking()
        assert run_scheduled(program, chooser(seed)).error is None
        found += program.found
    return found


def test_one_task_a_pass_reaches_what_batches_cannot() -> None:
    """In Trio's own batches both take a step a pass, so eight to nothing cannot happen."""
    stock = 0
    for _ in range(100):
        program = Overtaking()
        trio.run(program)
        stock += program.found
    assert stock == 0
    assert hits(RandomWalk, range(1000)) >= 1
    assert hits(lambda seed: Priorities(seed, 2, 20), range(200)) >= 20


@pytest.mark.parametrize("seed", range(10))
def test_recorded_choices_replay_the_run_exactly(seed: int) -> None:
    async def program() -> None:
        async def child(number: int) -> None:
            for _ in range(number):
                await trio.sleep(number % 3)

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(child, number)

    chooser = RandomWalk(seed) if seed % 2 else Priorities(seed, 3, 60)
    first = run_scheduled(program, chooser).trace
    again = run_scheduled(program, Replay(first.choices)).trace
    assert again == first
    assert again.digest() == first.digest()
    other = run_scheduled(program, RandomWalk(seed + 100)).trace
    assert other.digest() != first.digest()


def test_the_default_takes_whoever_has_waited_longest() -> None:
    order: list[int] = []

    async def program() -> None:
        async def child(number: int) -> None:
            for _ in range(3):
                await trio.lowlevel.checkpoint()
                order.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(child, number)

    ran = run_scheduled(program, Replay({}))
    assert order == [0, 1, 2] * 3
    assert ran.trace.choices == {}
    assert ran.trace.decisions > 0


def test_priorities_change_where_they_should() -> None:
    """Depth 1 never changes: one task runs to its end before the next begins."""
    chooser = Priorities(5, 1, 100)
    assert {chooser.choose(["a", "b", "c"]) for _ in range(50)} == {chooser.choose(["a", "b", "c"])}
    places = [Priorities(5, 4, 30) for _ in range(2)]
    runs = [[one.choose(["a", "b", "c"]) for _ in range(30)] for one in places]
    assert runs[0] == runs[1], "the seed decides"
    assert 1 < len(list(itertools.groupby(runs[0]))) <= 4, "three changes, four stretches at most"


def test_a_run_that_cannot_go_on_is_broken_off_and_says_so() -> None:
    async def stuck() -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()

    async def bounded() -> None:
        with trio.move_on_after(5):
            await stuck()

    ran = run_scheduled(bounded, RandomWalk(0))
    assert isinstance(ran.error, InternalError)
    assert "every task waits" in str(ran.error)

    async def circles() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    ran = run_scheduled(circles, RandomWalk(0), max_steps=200)
    assert "200 steps were not enough" in str(ran.error)


def test_errors_come_back_with_the_run() -> None:
    async def fails() -> None:
        raise KeyError("here")

    assert isinstance(run_scheduled(fails, RandomWalk(0)).error, KeyError)
