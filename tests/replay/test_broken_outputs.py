"""Where results go: no name costs a file, no failure leaves half of one or a traceback."""

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlease.services.cli import main
from tests.replay.build import lines_of, story

PICTURES = ("--json", "--html", "--perfetto")
COMMAND = [sys.executable, "-m", "kvlease", "replay"]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.kvlog"
    path.write_bytes(lines_of(story().events))
    return path


def link_symbolic(log: Path) -> str:
    os.symlink(log.name, "other")
    return "other"


def link_hard(log: Path) -> str:
    os.link(log.name, "other")
    return "other"


def walk_round(log: Path) -> str:
    return f"../{log.parent.name}/run.kvlog"


@pytest.mark.parametrize("flag", PICTURES)
@pytest.mark.parametrize("name", [link_symbolic, link_hard, walk_round])
def test_another_name_of_the_log_is_refused(
    flag: str, name: Callable[[Path], str], log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = log.read_bytes()
    assert main(["replay", "run.kvlog", flag, name(log)]) == 2
    assert f"LOG and {flag} both name" in capsys.readouterr().err
    assert log.read_bytes() == before


@pytest.mark.parametrize("flag", PICTURES)
def test_a_file_beside_the_result_stays_as_it_was(flag: str, log: Path) -> None:
    beside = log.rename("result.part")
    before = beside.read_bytes()
    assert main(["replay", "result.part", flag, "result"]) == 0
    assert beside.read_bytes() == before
    assert sorted(os.listdir()) == ["result", "result.part"]


@pytest.mark.parametrize("flag", PICTURES)
def test_a_link_is_followed_and_a_pipe_is_written(flag: str, log: Path) -> None:
    os.symlink("target", "link")
    assert main(["replay", str(log), flag, "link"]) == 0
    assert Path("link").is_symlink()
    whole = Path("target").stat().st_size
    assert whole > 1000
    os.mkfifo("pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(Path("pipe").read_bytes()))
    reader.start()
    assert main(["replay", str(log), flag, "pipe"]) == 0
    reader.join(timeout=10)
    assert Path("pipe").is_fifo()
    assert len(got[0]) > whole * 0.9, "times differ in their digits"


@pytest.mark.parametrize("flag", PICTURES)
def test_a_full_disk_leaves_the_older_result(flag: str, log: Path) -> None:
    Path("result").write_text("older")
    done = subprocess.run(
        [*COMMAND, str(log), flag, "result"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500)),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONDONTWRITEBYTECODE": "1",  # Python would keep the 500 bytes that it got written
        },
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot write result" in done.stderr
    assert Path("result").read_text() == "older"
    assert sorted(os.listdir()) == ["result", "run.kvlog"]


@pytest.mark.parametrize("flag", ["--html", "--perfetto", "--rerun"])
def test_a_pipe_is_refused_where_the_log_is_read_twice(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be waited for without end, as nobody writes it a second time."""
    os.mkfifo(tmp_path / "pipe")
    value = [] if flag == "--rerun" else [str(tmp_path / "a")]
    assert main(["replay", str(tmp_path / "pipe"), flag, *value]) == 2
    assert f"{flag} reads the log a second time" in capsys.readouterr().err


def test_a_log_from_a_pipe_is_judged_without_its_lines(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo("pipe")
    whole = log.read_bytes()
    cut = whole[: whole.index(b'"lease.wait"')]
    writer = threading.Thread(target=lambda: Path("pipe").write_bytes(cut))
    writer.start()
    assert main(["replay", "pipe"]) == 1
    writer.join(timeout=10)
    assert "verdict: cannot tell" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("line", [["replay", "run.kvlog"], ["doctor"]], ids=["replay", "doctor"])
def test_output_that_cannot_be_written_is_one_sentence(line: list[str], log: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND[:-1], *line],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "cannot write the output: No space left" in done.stderr


@pytest.mark.parametrize(
    ("closed", "path", "status"), [(0, "-", 2), (1, "run.kvlog", 0), (2, "nowhere", 2)]
)
def test_a_stream_closed_before_us_is_no_traceback(
    closed: int, path: str, status: int, log: Path
) -> None:
    done = subprocess.run(
        [*COMMAND, path],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.close(closed),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
        timeout=60,
    )
    assert "Traceback" not in done.stderr + done.stdout
    assert done.returncode == status
    if closed == 2:
        assert done.stdout == "", "what is wrong is not said among the results"


def test_a_run_that_is_refused_removes_no_pipe_and_no_file_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace").write_text("not json\n")
    Path("log").write_text("incident")
    Path("log.older").write_text("older incident")
    os.symlink("log", "link")
    os.symlink(os.devnull, "null")
    for name in ("log", "link", "null"):
        assert main(["run", "--trace", "trace", "--compute", "none", "--log", name]) == 2
    assert Path("log").read_text() == "incident"
    assert Path("log.older").read_text() == "older incident"
    assert Path("link").is_symlink()
    assert sorted(os.listdir()) == ["link", "log", "log.older", "null", "trace"]
    assert (
        main(["run", "--trace", "trace", "--compute", "none", "--log", "log", "--json", "link"])
        == 2
    )
