"""Input that no run wrote: nested, endless, absurd, damaged. One sentence, or *cannot tell*."""

import gzip
import io
import sys
import time
from pathlib import Path
from typing import cast

import msgspec
import pytest

from kvlease.errors import BadInput
from kvlease.protocols import events as ev
from kvlease.services.replay.checker import check, check_log
from kvlease.services.replay.reader import BrokenLine, LogReader, open_log
from kvlease.services.replay.verdict import Verdict
from tests.replay.build import head, lines_of, place_of, story

WHOLE = story().events
LINES = lines_of(WHOLE).splitlines()
TEXT = lines_of(WHOLE)
DEEP = b"[" * 100_000 + b"]" * 100_000


def judged(folder: Path, text: bytes) -> Verdict:
    path = folder / "log"
    path.write_bytes(text)
    return check_log(str(path))


def doubts(folder: Path, text: bytes) -> str:
    verdict = judged(folder, text)
    assert verdict.verdict == "cannot tell"
    return "; ".join(doubt.why for doubt in verdict.cannot_tell)


def refused(folder: Path, text: bytes) -> str:
    with pytest.raises(BadInput) as caught:
        judged(folder, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", [b"request.submitted", b"page.zeroed", b"weather"])
def test_a_line_nested_without_end_is_no_event(kind: bytes, tmp_path: Path) -> None:
    lines = [*LINES]
    lines[5] = b'{"event":"%s","seq":6,"t_ns":6000,"actor":"a","more":%s}' % (kind, DEEP)
    assert "a line is no event" in doubts(tmp_path, b"\n".join(lines) + b"\n")


def test_a_head_nested_without_end_is_refused(tmp_path: Path) -> None:
    nested = LINES[0][:-1] + b',"ports":{"deep":' + DEEP + b"}}"
    for first in (nested, DEEP, b'{"event":"log.open","x":' + DEEP + b"}"):
        refused(tmp_path, first + b"\n" + b"\n".join(LINES[1:]))


def test_a_line_without_end_costs_as_much_as_it_is_long() -> None:
    def took(nbytes: int) -> float:
        log = LogReader(io.BytesIO(LINES[0] + b"\n" + b"x" * nbytes + b"\n"), "here")
        started = time.process_time()
        [_, (_, [line])] = log.blocks()
        assert isinstance(line, BrokenLine)
        return time.process_time() - started

    assert took(30_000_000) < 2.0  # as joined again at every block it was minutes


@pytest.mark.parametrize(
    "changes",
    [
        {"device_pages": 1 << 40},
        {"device_pages": -1},
        {"host_pages": -1},
        {"host_pages": 1 << 63},
        {"num_layers": 1 << 31},
        {"num_layers": 0},
        {"num_layers": -1},
        {"page_tokens": 0},
        {"page_tokens": 1 << 40},
    ],
    ids=str,
)
def test_a_head_of_no_real_model_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    first = head(**changes)
    first.seq, first.t_ns = 1, 1
    assert str(*changes) in refused(tmp_path, lines_of([first, *WHOLE[1:]]))
    with pytest.raises(BadInput, match=str(*changes)):
        check([first])


@pytest.mark.parametrize("changes", [{"layers": [-1]}, {"layers": [0, 1 << 31]}, {"nbytes": -8}])
def test_a_head_with_an_absurd_component_is_refused(
    changes: dict[str, object], tmp_path: Path
) -> None:
    plain: dict[str, object] = {"name": "latent", "kind": "span", "layers": [0], "nbytes": 8}
    part = msgspec.convert({**plain, **changes}, ev.ComponentFacts)
    assert "component latent" in refused(tmp_path, lines_of([head(components=[part])]))


def test_numbers_of_hundreds_of_digits_are_refused(tmp_path: Path) -> None:
    lines = [*LINES]
    for at in (7, place_of(WHOLE, ev.LogClose)):
        line = cast("dict[str, object]", msgspec.json.decode(LINES[at]))
        lines[at] = msgspec.json.encode({**line, "t_ns": 10**400})
    assert "hundreds of digits" in refused(tmp_path, b"\n".join(lines) + b"\n")


@pytest.mark.parametrize("rest", [b"x", b'{"event":"request.su', b" ", b"\0" * 512])
def test_bytes_behind_the_end_are_a_doubt(rest: bytes, tmp_path: Path) -> None:
    assert "bytes that are no line follow log.close" in doubts(tmp_path, TEXT + rest)
    assert "cut off" in doubts(tmp_path, TEXT[: -len(LINES[-1]) - 1] + rest), "as before"


def test_lines_behind_the_end_are_a_doubt(tmp_path: Path) -> None:
    last = WHOLE[-1]
    more = ev.ActorStop(seq=last.seq + 1, t_ns=last.t_ns, actor="test")
    assert "lines follow log.close" in doubts(tmp_path, lines_of([*WHOLE, more]))


def test_a_damaged_gzip_file_is_judged_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    whole = gzip.compress(TEXT)
    wrong_sum = bytes([*whole[:-8], whole[-8] ^ 1, *whole[-7:]])
    wrong_length = bytes([*whole[:-1], whole[-1] ^ 1])
    for text in (wrong_sum, wrong_length, whole + b"trailing"):
        assert "its compressed file is damaged" in doubts(tmp_path, text)
    assert "follow log.close" in doubts(tmp_path, whole[:-6]), "its sum is cut off"
    assert judged(tmp_path, whole + b"\0" * 64).verdict == "clean", "padding, as tape drives do"


def test_a_damaged_gzip_file_does_not_hide_what_is_wrong(tmp_path: Path) -> None:
    events = [*WHOLE]
    at = place_of(events, ev.TransferPlan)
    events[at] = msgspec.structs.replace(events[at], nbytes=1)
    verdict = judged(tmp_path, gzip.compress(lines_of(events)) + b"trailing")
    assert verdict.verdict == "violations"
    assert any("damaged" in doubt.why for doubt in verdict.cannot_tell)


def test_a_gzip_file_of_nothing_readable_is_refused(tmp_path: Path) -> None:
    assert "gzip" in refused(tmp_path, b"\x1f\x8b" + b"\xff" * 40)


def test_a_standard_input_that_is_closed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    for stdin in (None, closed):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stdin)
            with pytest.raises(BadInput, match="standard input, which is closed"), open_log("-"):
                pass
