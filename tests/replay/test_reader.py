"""Logs as files: plain, gzip, piped, cut off, damaged, of another version, or no log at all."""

import gzip
import io
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import BadInput
from kvlease.protocols import events as ev
from kvlease.services.replay import reader
from kvlease.services.replay.checker import Checker, check, check_log
from kvlease.services.replay.reader import BrokenLine, LogReader, UnknownEvent, open_log, texts_of
from tests.replay.build import head, lines_of, story

WHOLE = story().events
TEXT = lines_of(WHOLE)


def read(text: bytes) -> tuple[list[ev.Event], bool]:
    log = LogReader(io.BytesIO(text), "here")
    events: list[ev.Event] = []
    for first_line, block in log.blocks():
        assert first_line == len(events) + 1
        events += block
    return events, log.truncated


@given(st.integers(1, 5000))
def test_events_come_back_as_they_were_written_in_blocks_of_any_size(size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BLOCK_BYTES", size)
        assert read(TEXT) == (WHOLE, False)


@given(st.integers(len(lines_of(WHOLE[:1])), len(TEXT) - 2))
def test_a_truncated_last_line_is_dropped_and_said(length: int) -> None:
    events, truncated = read(TEXT[:length])
    whole = TEXT[:length].count(b"\n")
    ends_whole = TEXT[length : length + 1] == b"\n"
    assert events == WHOLE[: whole + ends_whole]
    assert truncated is (not ends_whole and TEXT[length - 1 : length] != b"\n")


def test_unknown_types_and_broken_lines_keep_their_places() -> None:
    lines = TEXT.splitlines()
    lines[5] = b'{"event":"page.zeroed","seq":6,"t_ns":6000,"pages":[]}'
    lines[8] = b"not json"
    lines[9] = b'{"event":"lease.close","seq":10}'
    events, _ = read(b"\n".join(lines) + b"\n")
    assert events[5] == UnknownEvent(seq=6, t_ns=6000, name="page.zeroed")
    assert isinstance(events[8], BrokenLine)
    assert isinstance(events[9], BrokenLine)
    assert "lease.close" in events[9].reason
    assert events[:5] == WHOLE[:5]
    assert events[10:] == WHOLE[10:]


def refused(text: bytes) -> str:
    with pytest.raises(BadInput) as caught:
        read(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_log_is_refused_in_one_sentence() -> None:
    assert "empty" in refused(b"")
    assert "no event log" in refused(b"# Readme\n")
    assert "no event log" in refused(b'{"answer": 42}\n')
    assert "no event log" in refused(bytes(range(256)))
    assert "log.open" in refused(lines_of(WHOLE[1:]))
    assert "version 1" in refused(lines_of([head(schema=1)]))
    broken = msgspec.json.encode({"event": "log.open", "schema": ev.SCHEMA_VERSION})
    assert "head" in refused(broken + b"\n")


def test_files_plain_and_gzip_give_the_same_verdict(tmp_path: Path) -> None:
    plain, zipped = tmp_path / "log", tmp_path / "zipped"
    plain.write_bytes(TEXT)
    zipped.write_bytes(gzip.compress(TEXT))
    verdicts = [check_log(str(path)) for path in (plain, zipped)]
    assert [verdict.verdict for verdict in verdicts] == ["clean", "clean"]
    assert texts_of(str(zipped), {2, 4}) == texts_of(str(plain), {2, 4})
    assert texts_of(str(plain), {2})[2] == TEXT.splitlines()[1].decode()


@pytest.mark.parametrize("cut", [40, 200])
def test_a_gzip_file_that_breaks_off_is_judged_as_far_as_it_goes(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log.gz"
    stream = gzip.compress(TEXT, compresslevel=0)
    path.write_bytes(stream[:-cut])
    verdict = check_log(str(path))
    assert verdict.verdict == "cannot tell"
    assert any("cut off" in doubt.why for doubt in verdict.cannot_tell)


def test_a_file_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(BadInput, match="cannot read"), open_log(str(path)) as log:
            list(log.blocks())


def test_events_are_counted_once_however_they_were_decoded() -> None:
    """Lines beside one that is no event are decoded as other types than those further on."""
    half = len(WHOLE) // 2
    ((_, brief),) = LogReader(io.BytesIO(TEXT), "here").blocks(brief=True)
    checker = Checker()
    checker.feed_block(1, brief[:half])
    checker.feed_block(half + 1, WHOLE[half:])
    verdict = checker.verdict()
    assert verdict.event_counts == check(WHOLE).event_counts
    assert sum(verdict.event_counts.values()) == verdict.events == len(WHOLE)
