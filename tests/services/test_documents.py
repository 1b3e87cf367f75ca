"""What the README and the examples show runs as shown."""

import os
import re
import subprocess
import sys

import pytest

from tests.tidy.rules import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(code: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, *code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_example_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    library, *_clients = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "hit_device" in run(["-c", library])


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/rules.md"])
def test_every_path_that_a_document_names_is_there(name: str) -> None:
    """A rule whose place has moved away is a rule that nobody can check."""
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"`((?:kvlease|tests|docs|examples|benchmarks)/[\w/.]+)`", text)
    linked = re.findall(r"\]\((?!https?:)([^)]+)\)", text)
    assert [path for path in named if not (ROOT / path).exists()] == []
    folder = (ROOT / name).parent
    assert [path for path in linked if not (folder / path).exists()] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs(path: object) -> None:
    assert "384 of 401 prompt tokens were cached" in run([str(path)])
