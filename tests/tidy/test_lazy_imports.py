"""Starting the command line costs no torch: a cold import of it takes seconds."""

import subprocess
import sys

import pytest

from tests.tidy.rules import ROOT

REPORT = "import sys; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{REPORT}"],
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
        "import contextlib\nwith contextlib.suppress(SystemExit):\n"
        "    from kvlease.services.cli import main; main(['--help'])",
        "import contextlib\nwith contextlib.suppress(SystemExit):\n"
        "    from kvlease.services.cli import main; main(['run', '--help'])",
    ],
    ids=["package", "events", "help", "run help"],
)
def test_no_torch_is_loaded(code: str) -> None:
    assert run(code) == "[]"
