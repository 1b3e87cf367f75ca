"""`kvlease replay` as people run it: exit status, one JSON object, what is printed."""

import gzip
import io
import json
import sys
from pathlib import Path

import msgspec
import pytest

from kvlease.protocols import events as ev
from kvlease.services.cli import main
from tests.replay.build import lines_of, place_of, renumbered, story


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.kvlog"
    path.write_bytes(lines_of(story().events))
    return path


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A log in which a page is freed under an open lease."""
    events = story().events
    close = events.pop(place_of(events, ev.LeaseClose, 2))
    events.insert(place_of(events, ev.PageFree, 0) + 1, close)
    path = tmp_path / "broken.kvlog"
    path.write_bytes(lines_of(renumbered(events)))
    return path


def test_a_clean_log_ends_with_0_and_has_the_contract_s_keys(log: Path, tmp_path: Path) -> None:
    found = tmp_path / "verdict.json"
    assert main(["replay", str(log), "--json", str(found)]) == 0
    verdict = json.loads(found.read_text())
    assert verdict["verdict"] == "clean"
    assert verdict["events"] == len(story().events)
    assert {"violations", "stuck", "unknown_events", "events", "wall_s"} <= set(verdict)
    assert (verdict["violations"], verdict["stuck"], verdict["unknown_events"]) == ([], [], 0)


def test_a_violation_ends_with_1_and_is_shown_by_its_lines(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "verdict.json"
    assert main(["replay", str(broken), "--json", str(found)]) == 1
    said = capsys.readouterr().out
    assert "verdict: violations" in said
    assert "R6: device page 2 freed under lease 1, which is open" in said
    assert '{"event":"page.free"' in said, "the lines themselves are printed"
    [violation] = json.loads(found.read_text())["violations"]
    assert {"rule", "request", "layer", "component", "lines"} <= set(violation)
    texts = broken.read_text().splitlines()
    kinds = [json.loads(texts[line - 1])["event"] for line in violation["lines"]]
    assert (violation["rule"], kinds) == ("R6", ["lease.open", "page.free"])


def test_what_cannot_be_told_ends_with_1(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = log.read_bytes()
    log.write_bytes(whole[: whole.index(b'"lease.wait"') + 500])
    assert main(["replay", str(log)]) == 1
    said = capsys.readouterr().out
    assert "verdict: cannot tell" in said
    assert "cannot tell R9: the log breaks off" in said
    assert "stuck: request 2 waits for index_k, latent of layer 0 by transfer 2" in said
    assert "the deadline is the loader's" in said


def test_gzip_and_standard_input(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zipped = log.with_suffix(".gz")
    zipped.write_bytes(gzip.compress(log.read_bytes()))
    assert main(["replay", str(zipped)]) == 0
    for path in (log, zipped):
        stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(path.read_bytes())))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["replay", "-"]) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is empty"),
        (b"hello\n", "is no event log"),
        (lines_of([msgspec.structs.replace(story().events[0], schema=1)]), "of version 1"),
        (lines_of(story().events[3:]), "has no head"),
    ],
)
def test_bad_input_is_one_line_and_ends_with_2(
    text: bytes, words: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.write_bytes(text)
    assert main(["replay", str(log)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert words in said.err


def test_an_absent_log_and_an_unwritable_result(log: Path, tmp_path: Path) -> None:
    assert main(["replay", str(tmp_path / "absent")]) == 2
    assert main(["replay", str(log), "--json", str(tmp_path / "no" / "folder.json")]) == 2


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    said = capsys.readouterr().out
    assert "cannot tell" in said
    assert "kvlease replay run.kvlog.gz --json verdict.json" in said
