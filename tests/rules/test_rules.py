"""Every state that small worlds can reach keeps the rules, and can end; guards are not idle.

The worlds step the product's page and copy machines, with the guards of the pools and the runtime
around them (`guards.py`). R1 to R8 and R11 are asked of every state, R9 of every way on from it.
Three pages, two layers, and in turn all that may happen to them.
"""

import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from inspect import getsource

import pytest

from tests.rules import remote, sequences, transfers
from tests.rules.explore import Found, explore
from tests.rules.guards import Guards
from tests.rules.planted import BESIDE, GRANT, LOAD, PLANTED, STORE, WRITE, Planted
from tests.rules.state import Size

THREE_PAGES = Size("three pages", device_pages=2, host_pages=1, cached=1)
WHOLE = THREE_PAGES._replace(
    name="two readers, a writer, loads and stores",
    num_readers=2, has_writer=True, transfers=1, loads=True, stores=True,
)  # fmt: skip
"""All of one process at once."""

WORLDS = (
    WHOLE._replace(name=f"{WHOLE.name}, no deaths", has_deaths=False),
    WHOLE._replace(name="a reader, a writer, loads and stores", num_readers=1, cached=0),
    THREE_PAGES._replace(
        name="a reader, two transfers at a time",
        num_readers=1, transfers=2, loads=True, stores=True,
    ),
    THREE_PAGES._replace(
        name="a reader, a writer and a remote writer",
        host_pages=0, cached=0, num_readers=1, has_writer=True, has_remote=True,
    ),
)  # fmt: skip

LARGE_WORLDS = (
    WHOLE,
    THREE_PAGES._replace(
        name="a reader, a load and a remote writer, no deaths",
        num_readers=1, transfers=1, loads=True, has_remote=True, has_deaths=False,
    ),
    THREE_PAGES._replace(
        name="a reader, a writer and a remote writer on three device pages",
        device_pages=3, host_pages=0, cached=0, num_readers=1, has_writer=True, has_remote=True,
    ),
)  # fmt: skip
"""Explored with ``--full``."""

Recorder = Callable[[str, object], None]


ACTORS = (sequences, transfers, remote)


@cache
def unbroken(size: Size) -> Found:
    """Explore a world with all guards in place, once."""
    return explore(size)


def keeps_the_rules(size: Size, record_property: Recorder) -> None:
    found = explore(size)
    record_property("counted", str(found))
    assert found.rule is None, found.told()
    assert found.num_quiet > 1, "a world that never rests again shows nothing about its ends"


@pytest.mark.parametrize("size", WORLDS, ids=lambda size: size.name)
def test_every_state_keeps_the_rules_and_can_end(size: Size, record_property: Recorder) -> None:
    keeps_the_rules(size, record_property)


@pytest.mark.parametrize("size", LARGE_WORLDS, ids=lambda size: size.name)
def test_every_state_of_larger_worlds(size: Size, is_full: bool, record_property: Recorder) -> None:
    if not is_full:
        pytest.skip("explored with --full")
    keeps_the_rules(size, record_property)


def test_the_worlds_have_every_kind_of_action() -> None:
    """An action that never happens in any world is a part of the check that checks nothing."""
    seen = set[str | int]()
    for size in (LOAD, STORE, GRANT, BESIDE, WRITE):
        seen.update(unbroken(size).actions)
    named = set(re.findall(r'yield \("(.+?)"', "".join(map(getsource, ACTORS))))
    assert named - seen == {
        # These happen only where a guard is gone.
        "copy is said to have ended",
        "late write is let in",
        "writer's forgotten step runs",
    }


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_guard_that_is_gone_is_missed(planted: Planted) -> None:
    """Without the guard the exploration finds the rule broken, by the shortest way."""
    found = explore(planted.size, planted.guards)
    print(f"{planted.name}: {found.rule}, {len(found.trace)} actions, {found.num_states} states")
    assert found.rule is not None, f"{planted.name} was not found in {found}"
    assert found.rule.startswith(f"{planted.rule}:"), found.told()
    assert unbroken(planted.size).rule is None


def test_each_guard_is_planted_once() -> None:
    """Nobody adds a guard to the worlds without showing that it is needed."""
    gone = {
        field.name
        for field in fields(Guards)
        for planted in PLANTED
        if getattr(planted.guards, field.name) != field.default
    }
    assert gone == {field.name for field in fields(Guards)}


def test_the_way_to_a_breach_is_told_action_by_action() -> None:
    planted = next(one for one in PLANTED if one.name == "a short copy counts as done")
    told = explore(planted.size, planted.guards).told().splitlines()
    assert told[0].startswith("a load: R5: ")
    assert told[1].startswith("  plan load 0 2 0")
    assert told[2].startswith("    pages free 000, sealed loading by 0 000, sealed 111 | transfer")
    assert len(told) == 1 + 2 * 8
