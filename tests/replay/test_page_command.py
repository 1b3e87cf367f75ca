"""`kvlease replay --html --perfetto`: files that are whole or not there, and one sentence then."""

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from kvlease.services.cli import main
from tests.replay.scene import scene
from tests.replay.test_page_data import unpack


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.kvlog"
    path.write_bytes(msgspec.json.Encoder().encode_lines(scene()))
    return path


def test_both_pictures_are_written_beside_the_verdict(log: Path, tmp_path: Path) -> None:
    page, trace, verdict = (tmp_path / name for name in ("a.html", "a.trace", "a.json"))
    status = main(
        ["replay", str(log), "--html", str(page), "--perfetto", str(trace), "--json", str(verdict)]
    )
    found = json.loads(verdict.read_text())
    assert status == (0 if found["verdict"] == "clean" else 1)
    meta, tables = unpack(page.read_text(encoding="utf-8"))
    assert meta["head"]["source"] == "run.kvlog"
    assert meta["head"]["verdict"]["violations"] == found["violations"]
    named = {str(line) for one in found["violations"] for line in one["lines"]}
    assert named <= set(meta["head"]["texts"])
    assert len(tables["lines"]["low"]) == 44
    assert len(json.loads(trace.read_text())["traceEvents"]) > 44
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.html", "a.json", "a.trace", "run.kvlog",
    ]  # fmt: skip


def test_a_zipped_log_that_breaks_off_is_drawn(log: Path, tmp_path: Path) -> None:
    zipped = tmp_path / "run.kvlog.gz"
    zipped.write_bytes(gzip.compress(log.read_bytes())[:-60])
    page = tmp_path / "a.html"
    assert main(["replay", str(zipped), "--html", str(page)]) == 1
    _, tables = unpack(page.read_text(encoding="utf-8"))
    assert 0 < len(tables["lines"]["low"]) < 44


@pytest.mark.parametrize("flag", ["--html", "--perfetto"])
def test_standard_input_is_refused_at_once(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "-", flag, str(tmp_path / "a")]) == 2
    assert f"{flag} reads the log a second time" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--html", "run.kvlog"], "LOG and --html both name run.kvlog"),
        (["--perfetto", "./a", "--html", "a"], "--html and --perfetto both name"),
        (["--html", "nowhere/a.html"], "the folder"),
    ],
    ids=["the log", "each other", "no folder"],
)
def test_a_picture_takes_the_place_of_nothing(
    arguments: list[str],
    said: str,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(log.parent)
    before = log.read_bytes()
    assert main(["replay", "run.kvlog", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert log.read_bytes() == before
    assert list(log.parent.iterdir()) == [log]


def test_a_bad_log_leaves_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad"
    bad.write_text("no log\n")
    assert main(["replay", str(bad), "--html", str(tmp_path / "a.html")]) == 2
    assert "bad" in capsys.readouterr().err
    assert not (tmp_path / "a.html").exists()
