"""Every public case is in one place: a test here, a test elsewhere, or the list that waits."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.museum.elsewhere import ELSEWHERE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = ROOT.parent / "shared" / "cases" / "CASES.md"
CASE = re.compile(r"\b(K\d{3}) ([\w./-]+#\d+)")
FAMILY = re.compile(r"\bF\d\d\b")


def known() -> dict[str, str]:
    """Read each case's id and thread."""
    if not CASES.exists():
        pytest.skip("the list of cases lies beside this checkout, and is not there")
    text = CASES.read_text(encoding="utf-8")
    return dict(re.findall(r"^\*\*(K\d{3}) ([\w./-]+#\d+)", text, re.MULTILINE))


def docstrings() -> dict[str, str]:
    """Read the docstring of each test of the museum."""
    found: dict[str, str] = {}
    for path in sorted(HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("test_"):
                found[f"{path.name}::{node.name}"] = ast.get_docstring(node) or ""
    return found


def cited() -> set[tuple[str, str]]:
    """List the cases, with their threads, that tests of the museum cite."""
    return {pair for text in docstrings().values() for pair in CASE.findall(text)}


def pending() -> list[tuple[str, str]]:
    """List the cases, with their threads, that wait."""
    lines = (HERE / "PENDING.md").read_text(encoding="utf-8").splitlines()
    return [pair for line in lines if line.startswith("- K") for pair in CASE.findall(line)]


def test_every_case_is_in_exactly_one_place() -> None:
    """A case that is nowhere is forgotten; one in two places is either done or it is not."""
    places = Counter([*{case for case, _ in cited()}, *ELSEWHERE, *(case for case, _ in pending())])
    missing = set(known()) - set(places)
    assert not missing, f"in no test and not pending: {sorted(missing)}"
    assert set(places) <= set(known())
    assert not [case for case, count in places.items() if count > 1]


def test_threads_are_those_of_the_cases() -> None:
    """A citation that names another thread leads nowhere."""
    threads = known()
    assert all(threads[case] == thread for case, thread in (*cited(), *pending()))


def test_tests_elsewhere_exist() -> None:
    """A test that was renamed or removed takes its case with it."""
    for place in ELSEWHERE.values():
        path, name = place.split("::")
        assert re.search(
            rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.M
        )


def test_every_family_is_swept_at_least_once() -> None:
    """The families are the classes; the cases are samples of them."""
    named = {family for text in docstrings().values() for family in FAMILY.findall(text)}
    assert named == {f"F{number:02}" for number in range(1, 21)}


def test_every_test_of_the_museum_cites_a_case_or_says_why_it_is_there() -> None:
    """The museum holds hazards; what proves that its tools work says "otherwise"."""
    for name, text in docstrings().items():
        if name.startswith(Path(__file__).name):
            continue
        assert CASE.search(text) or "Otherwise" in text, name
