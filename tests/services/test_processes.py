"""Worker processes: what they do when nobody is left to hear them."""

import subprocess
import sys

_WORKER = """
import sys
from kvlease.services.processes import answers_alone_on_stdout
from kvlease.services.doctor import Finding
with answers_alone_on_stdout() as answer:
    sys.stdin.readline()
    answer(Finding("a", "ok", "b"))
"""


def test_a_worker_whose_caller_is_gone_ends_without_a_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stderr is not None
        worker.stdout.close()
        worker.stdin.write(b"\n")
        worker.stdin.close()
        assert worker.stderr.read() == b""
        assert worker.wait() == 0
