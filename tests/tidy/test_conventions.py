"""The source keeps its conventions, and the checkers catch what is planted."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tidy import rules

HERE = rules.PACKAGE / "planted.py"


def breaches(check: Callable[[Path, str], Iterator[str]], *folders: str) -> list[str]:
    return [
        sentence
        for path in rules.sources(*folders)
        for sentence in check(path, path.read_text(encoding="utf-8"))
    ]


def test_files_and_functions_stay_short() -> None:
    assert not breaches(rules.length_breaches, "kvlease", "tests", "examples", "benchmarks")


def test_public_names_have_docstrings() -> None:
    assert not breaches(rules.docstring_breaches, "kvlease", "examples")


def test_nothing_is_unfinished_and_no_path_is_of_one_machine() -> None:
    assert not breaches(rules.text_breaches, "kvlease", "tests", "examples", "benchmarks")


def test_rows_are_opened_in_one_module_only() -> None:
    """Whoever reaches the memory behind a handle can read it before it has arrived (R1)."""
    slots = rules.private_slots(rules.VIEWS.read_text(encoding="utf-8"))
    assert {"_base", "_table"} <= slots
    found = [
        sentence
        for path in rules.sources("kvlease")
        if path not in (rules.OPENER, rules.VIEWS)
        for sentence in rules.opening_breaches(path, path.read_text(encoding="utf-8"), slots)
    ]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "rows._base[3]",
        "x = view.latent._table",
        "getattr(rows, '_base')",
        "object.__getattribute__(rows, '_base')",
        "match rows:\n    case PagedRows(_base=memory): pass",
        "class Pool:\n    def leak(self, rows):\n        return rows._base",
        "class Pool:\n    def leak(self):\n        return self.rows._base",
    ],
)
def test_a_planted_opening_is_found(line: str) -> None:
    assert list(rules.opening_breaches(HERE, line, frozenset({"_base", "_table"})))


def test_a_class_may_have_private_names_of_its_own() -> None:
    text = "class Pool:\n    __slots__ = ('_base',)\n    def f(self):\n        self._base = 3\n"
    assert not list(rules.opening_breaches(HERE, text, frozenset({"_base"})))


def test_private_slots_are_read_from_the_class_bodies() -> None:
    text = "class A:\n    __slots__ = ('_base', 'count')\nclass B:\n    __slots__ = ('_cell',)\n"
    assert rules.private_slots(text) == {"_base", "_cell"}


def test_planted_lengths_docstrings_and_marks_are_found() -> None:
    long_function = '"""Doc."""\ndef f() -> None:\n    """Doc."""\n' + "    f()\n" * 60
    assert len(list(rules.length_breaches(HERE, long_function))) == 1
    assert len(list(rules.length_breaches(HERE, "x = 1\n" * 401))) == 1
    undocumented = "class A:\n    def b(self) -> None: ...\n    def _c(self) -> None: ...\n"
    assert len(list(rules.docstring_breaches(HERE, undocumented))) == 3
    assert len(list(rules.text_breaches(HERE, "# TO" + "DO: later\n"))) == 1
    assert len(list(rules.text_breaches(HERE, 'open("/ho' + 'me/me/model")\n'))) == 1
