"""The page's data is the log's: columns read back say what the events said."""

import base64
import io
import re
import struct
import tomllib
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.protocols import events as ev
from kvlease.services.replay import page
from kvlease.services.replay.page_data import MAGIC, PageData, Table
from kvlease.services.replay.timeline import Timeline
from kvlease.services.replay.timeline_ledger import FREE, HELD, QUARANTINED, SEALED, TierLedger
from kvlease.services.replay.verdict import Verdict
from tests.replay.scene import START_NS, clean, found, numbered, scene, stamped

ROOT = Path(__file__).resolve().parents[2]


def page_of(events: Sequence[ev.Event], verdict: Verdict | None = None, name: str = "a.log") -> str:
    file = io.BytesIO()
    texts = {8: '{"event":"transfer.plan"}'}
    page.write_page(file, numbered(events), verdict or clean(events), name, texts)
    return file.getvalue().decode()


def unpack(text: str) -> tuple[dict[str, Any], dict[str, dict[str, list[int]]]]:
    """What the page's script does first."""
    match = re.search(r'id="data">([^<]*)</script>', text)
    assert match is not None
    body = zlib.decompress(base64.b64decode(match[1]))
    assert body[:8] == MAGIC
    size, _ = struct.unpack_from("<II", body, 8)
    meta = msgspec.json.decode(body[16 : 16 + size])
    tables: dict[str, dict[str, list[int]]] = {}
    for name, columns in meta["tables"].items():
        tables[name] = {}
        for column, (code, offset, length) in columns.items():
            values = array(code)
            start = 16 + size + offset
            assert start % 8 == 0
            values.frombytes(body[start : start + length * values.itemsize])
            tables[name][column] = list(values)
    return meta, tables


def test_every_line_keeps_its_time_its_kind_and_its_actor() -> None:
    events = scene()
    meta, tables = unpack(page_of(events))
    lines = tables["lines"]
    times, now = [], 0
    for low, high in zip(lines["low"], lines["high"], strict=True):
        now += low + (high << 32)
        times.append(now + START_NS + 1_000_000)
    assert times == [event.t_ns for event in events]
    kinds = [meta["bytes"]["kind"][kind] for kind in lines["kind"]]
    assert kinds == [type(event).__struct_config__.tag for event in events]
    actors = [meta["bytes"]["actor"][actor] for actor in lines["actor"]]
    assert actors == [event.actor for event in events]
    assert lines["transfer"][7] == 1
    assert lines["lease"][17] == 10  # a wait is of its first lease


def test_spans_name_the_lines_that_bound_them() -> None:
    meta, tables = unpack(page_of(scene()))
    transfers, steps, waits = tables["transfers"], tables["steps"], tables["waits"]
    assert transfers["transfer"] == [1, 2]
    assert list(zip(transfers["begin"], transfers["end"], transfers["settled"], strict=True)) == [
        (8, 23, 26), (15, 30, 33),
    ]  # fmt: skip
    assert [meta["bytes"]["ended"][ended] for ended in transfers["ended"]] == ["done", "failed"]
    assert transfers["lane"] == [0, 1]  # they overlap
    assert steps["step"] == [1, 2, 3]
    assert steps["begin"][0] == 20  # the line that its opening names is the latest bound
    assert steps["begin"][2] == 31  # nothing tells who was in it, so nothing bounds its beginning
    assert (steps["end"], steps["read"]) == ([28, 29, 31], [27, 27, 0])
    assert list(zip(waits["begin"], waits["end"], waits["open"], strict=True)) == [
        (18, 27, 0), (43, 44, 1),
    ]  # fmt: skip
    marks = [meta["bytes"]["mark"][kind] for kind in tables["marks"]["kind"]]
    assert marks == ["recorded", "landed", "done", "landed", "done"]


def test_the_words_travel_with_the_page() -> None:
    events = scene()
    meta, _ = unpack(page_of(events, found(events)))
    head = msgspec.convert(meta["head"], page.PageHead, strict=False)
    assert head.verdict == found(events)
    assert head.texts == {8: '{"event":"transfer.plan"}'}
    assert head.log is not None
    assert head.log.config is None  # a page tells no more than it shows


def test_what_a_column_cannot_hold_becomes_the_nearest_it_can() -> None:
    table = Table(small="B", large="I")
    table.add(300, -1)
    table.add(7, 1 << 40)
    assert list(table.columns["small"]) == [255, 7]
    assert list(table.columns["large"]) == [0, (1 << 32) - 1]


def test_long_gaps_and_clocks_that_fall_do_not_break_times() -> None:
    events = scene()[:3]
    events[1].t_ns = events[0].t_ns + 3 * (1 << 33)
    events[2].t_ns = events[0].t_ns  # a clock must not, and this one did
    _, tables = unpack(page_of(events))
    assert (tables["lines"]["low"], tables["lines"]["high"]) == ([0, 0, 0], [0, 6, 0])


def test_lines_that_nobody_gave_are_blank_and_the_others_keep_their_numbers() -> None:
    data = PageData()
    timeline = Timeline(data)
    for line, event in numbered(scene()):
        if line not in (4, 5):
            timeline.feed(event, line)
    assert len(data.lines) == 44
    assert data.lines.columns["kind"][3] == data.lines.columns["kind"][4] == 0
    assert data.lines.columns["transfer"][7] == 1


def test_a_page_says_how_many_lines_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_LINES", 30)
    meta, tables = unpack(page_of(scene()))
    assert meta["head"]["left_out"] == 14
    assert len(tables["lines"]["low"]) == 30


def test_the_page_needs_nothing_from_elsewhere_and_trusts_no_name() -> None:
    name = '<script>alert(1)</script>{{DATA}}".log'
    text = page_of(scene(), name=name)
    assert "<script>alert" not in text
    assert text.count("</script>") == 2
    assert not re.search(r"""(?:src|href)=|url\(|@import|https?://|import\(""", text)
    assert "default-src 'none'" in text
    assert not re.search(r"\{\{[A-Z]+\}\}", text.replace("{{DATA}}&quot;.log", ""))


def test_a_built_package_has_the_parts_of_the_page() -> None:
    parts = {path.name for path in (ROOT / "kvlease/services/replay").glob("page*.*")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["kvlease.services.replay"]
    packed = {p.name for glob in patterns for p in (ROOT / "kvlease/services/replay").glob(glob)}
    assert {part for part in parts if not part.endswith(".py")} == packed
    assert {"page.html", "page.css", *page._SCRIPTS} == packed


STATES = st.sampled_from([FREE, HELD, SEALED, QUARANTINED])
RUN = st.tuples(st.integers(0, 20), st.integers(1, 6), st.just(0))


@given(st.lists(st.tuples(st.one_of(STATES, st.sampled_from([-1, -2])), RUN), max_size=30))
def test_a_ledger_counts_what_a_look_at_every_page_counts(moves: list[tuple[int, Any]]) -> None:
    ledger = TierLedger("device", 4)
    states, pins = dict.fromkeys(range(26), FREE), dict.fromkeys(range(26), 0)
    size = 4
    for move, run in moves:
        first, count, _ = run
        size = max(size, first + count)
        if move >= 0:
            ledger.move([run], move)
        else:
            ledger.pin([run], 1 if move == -1 else -1)
        for number in range(first, first + count):
            if move >= 0:
                states[number] = move
            else:
                pins[number] = max(0, pins[number] + (1 if move == -1 else -1))
    look = [(states[n], pins[n] > 0) for n in range(size)]
    counts = ledger.counts()
    assert counts.total == size == counts.free + counts.cached + counts.leased + counts.quarantined
    assert counts.free == sum(state == FREE for state, _ in look)
    assert counts.cached == look.count((SEALED, False))
    assert counts.quarantined == sum(state == QUARANTINED for state, _ in look)


def test_a_log_of_its_head_alone_is_a_page() -> None:
    meta, tables = unpack(page_of(stamped(scene()[:1])))
    assert tables["ledger"]["total"] == [8, 16]
    assert meta["head"]["verdict"]["events"] == 1
