"""Free pages: whoever gives them out, each once; in runs, as few as one look can find."""

from array import array
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.pools.free_pages import FreePages, FreeRuns, FreeStack

TOTAL = 24


def runs(pages: list[int]) -> list[int]:
    """Lengths of the stretches of neighbours, for pages in ascending order."""
    return [len([*run]) for _, run in groupby(enumerate(pages), lambda one: one[1] - one[0])]


def with_free(free: FreePages, wanted: set[int]) -> FreePages:
    free.take(TOTAL)
    free.give(array("i", sorted(wanted)))
    return free


@pytest.mark.parametrize("kind", [FreeStack, FreeRuns])
@given(st.lists(st.tuples(st.booleans(), st.integers(1, TOTAL)), max_size=30))
def test_every_page_is_given_out_once(
    kind: type[FreeStack | FreeRuns], calls: list[tuple[bool, int]]
) -> None:
    free, out = kind(TOTAL), list[int]()
    for gives, number in calls:
        if gives:
            back = array("i", out[:number])
            del out[:number]
            free.give(back)
        else:
            count = min(number, len(free))
            if count:
                out.extend(free.take(count))
        assert sorted([*free, *out]) == [*range(TOTAL)]
        assert len(free) == TOTAL - len(out)


@given(st.sets(st.integers(0, TOTAL - 1), min_size=1), st.data())
def test_the_shortest_run_that_holds_all_or_the_longest_ones(
    wanted: set[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(wanted)))
    lengths = runs(sorted(wanted))
    free = with_free(FreeRuns(TOTAL), wanted)
    taken = free.take(count).tolist()
    assert taken == sorted(set(taken))
    assert set(taken) <= wanted
    assert len(taken) == count
    left = runs(sorted(free))
    fitting = [length for length in lengths if length >= count]
    if fitting:
        assert runs(taken) == [count]
        shortest = min(fitting)
        expected = [*lengths]
        expected.remove(shortest)
        if shortest > count:
            expected.append(shortest - count)
        assert sorted(left) == sorted(expected)
    else:
        most = sorted(lengths, reverse=True)
        fewest = next(k for k in range(1, len(most) + 1) if sum(most[:k]) >= count)
        assert len(runs(taken)) == fewest


def test_a_new_book_gives_pages_in_order() -> None:
    for free in (FreeStack(TOTAL), FreeRuns(TOTAL)):
        assert [*free.take(5), *free.take(3)] == [*range(8)]
