"""Starting the command line costs no torch: a cold import of it takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.replay.build import lines_of, story
from tests.tidy.rules import ROOT

HEAVY = "'torch', 'numpy', 'transformers'"
REPORT = "import sys; print(sorted({{{}}} & set(sys.modules)))"


def run(code: str, unwanted: str = HEAVY) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{REPORT.format(unwanted)}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        "import kvlease; dir(kvlease); kvlease.EngineConfig; kvlease.EventLog",
        "import kvlease.protocols.events",
        "import kvlease; kvlease.connect; kvlease.Client",
        "import contextlib\nwith contextlib.suppress(SystemExit):\n"
        "    from kvlease.services.cli import main; main(['--help'])",
        "import contextlib\nwith contextlib.suppress(SystemExit):\n"
        "    from kvlease.services.cli import main; main(['run', '--help'])",
    ],
    ids=["package", "events", "client", "help", "run help"],
)
def test_no_torch_is_loaded(code: str) -> None:
    assert run(code) == "[]"


def test_replay_loads_neither_torch_nor_trio(tmp_path: Path) -> None:
    """It is run where a log was brought to, and on machines without either."""
    log = tmp_path / "log"
    log.write_bytes(lines_of(story().events))
    code = f"from kvlease.services.cli import main; assert main(['replay', {str(log)!r}]) == 0"
    assert run(code, f"{HEAVY}, 'trio'") == "[]"
