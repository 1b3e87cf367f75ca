"""The list of mutants fits the tree, and a few of them, others each day, are really caught."""

import random
from collections import Counter
from datetime import UTC, datetime

import pytest

from tests.mutants.__main__ import try_all
from tests.mutants.hunt import hunt
from tests.mutants.mutant import MUTANTS, ROOT, Guard, Mutant, Test, Types
from tests.mutants.plays import PLAYS
from tests.mutants.scratch import open_scratch

QUICK = ("tests/protocols/", "tests/pools/", "tests/kernels/", "tests/runtime/test_transfer.py")
"""Where tests take no second, the start of their process aside."""
A_DAY = 3


def of_today() -> list[Mutant]:
    """Choose a few by the date, so that all have had their turn after some weeks."""
    quick = [
        one for one in MUTANTS if isinstance(one.by, Guard | Test) and one.by.test.startswith(QUICK)
    ]
    return random.Random(datetime.now(UTC).toordinal()).sample(quick, A_DAY)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_the_guard_that_a_mutant_takes_out_is_there(mutant: Mutant) -> None:
    """If a guard was reworded, its mutant has to follow, or nobody notices when the guard goes."""
    source = (ROOT / mutant.file).read_text()
    assert mutant.apply(source) != source
    compile(mutant.apply(source), mutant.file, "exec")
    by = mutant.by
    test = by.file if isinstance(by, Types) else by.test
    assert (ROOT / test.partition("::")[0]).is_file()
    assert isinstance(by, Types) is (mutant.witness is None and not mutant.no_witness)
    assert mutant.witness is None or mutant.witness.play in PLAYS


def test_the_list_is_as_wide_as_the_rules() -> None:
    """Forty at least, each once, and every rule that a guard of this process keeps."""
    assert len(MUTANTS) >= 40
    assert max(Counter(one.id for one in MUTANTS).values()) == 1
    assert {one.rule for one in MUTANTS} == {f"R{number}" for number in range(1, 15)}


@pytest.mark.parametrize("number", range(A_DAY))
async def test_a_mutant_of_the_day_is_caught(number: int) -> None:
    """A test that passes without the guard that it is there for says nothing.

    By number: processes that collect on either side of midnight must collect the same tests.
    """
    mutant = of_today()[number]
    with open_scratch() as scratch, scratch.without_guard(mutant):
        caught = await hunt(scratch, mutant)
    assert caught.is_killed, f"{mutant.id}: {caught.why_not}"


async def test_a_guard_that_nobody_misses_is_told() -> None:
    """Else a hunt that calls everything killed would pass for a good suite."""
    harmless = Mutant(
        id="nothing is taken out",
        rule="R14",
        file="kvlease/protocols/machines.py",
        old='"""Where a page stands.',
        new='"""Where it stands.',
        by=Test(test="tests/protocols/test_machines.py::test_a_released_page_is_not_free"),
    )
    with open_scratch() as scratch, scratch.without_guard(harmless):
        caught = await hunt(scratch, harmless)
    assert not caught.is_killed
    assert "passed" in caught.why_not


async def test_every_mutant_is_caught(is_full: bool) -> None:
    """All of them with --full, as `make mutants` does it."""
    if not is_full:
        pytest.skip("minutes; run with --full")
    assert await try_all(MUTANTS, jobs=2, witness=True)
