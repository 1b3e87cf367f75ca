"""The page in a headless Chromium: it opens, finds its way, and says so when it cannot."""

import io
import re
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvlease.protocols import events as ev
from kvlease.services.replay.page import write_page
from kvlease.services.replay.verdict import Verdict
from tests.replay.chromium import BINARY, SKIP, Browser, open_browser
from tests.replay.scene import clean, found, numbered, scene, stamped

pytestmark = pytest.mark.skipif(BINARY is None, reason=SKIP)

VIOLATION = "document.querySelector('[data-violation]')"


def write(path: Path, events: Sequence[ev.Event], verdict: Verdict) -> Path:
    file = io.BytesIO()
    write_page(file, numbered(events), verdict, path.stem, {8: "the plan as it was written"})
    path.write_bytes(file.getvalue())
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser, None, None]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def tab(browser: Browser, tmp_path: Path) -> Browser:
    """A tab that shows the scene."""
    events = scene()
    browser.dark(False)
    browser.open(write(tmp_path / "scene.html", events, found(events)))
    assert browser.eval("document.documentElement.dataset.problem") is None
    return browser


def text(tab: Browser, selector: str) -> str:
    return str(tab.eval(f"document.querySelector({selector!r}).innerText"))


def window(tab: Browser) -> tuple[float, float]:
    shown = tab.eval("[page.view.from, page.view.to]")
    return shown[0], shown[1]


def kinds(tab: Browser, kind: str) -> list[Any]:
    """The keys of the rows of a kind that are shown."""
    rows = tab.eval(f"page.view.rows().filter((r) => r.kind === '{kind}').map((r) => r.label)")
    return list(rows)


def fill(tab: Browser, field: str, value: str) -> None:
    tab.eval(f"document.getElementById('by-{field}').value = '', 1")
    tab.eval(f"document.getElementById('by-{field}').focus()")
    tab.type(value)
    tab.eval("document.getElementById('tools').requestSubmit()")
    tab.settle()


def middle_of(tab: Browser, row: str, time: str) -> tuple[float, float]:
    """A point in the window on a row, at a time given as an expression."""
    found = tab.eval(
        "(() => { const box = page.canvas.getBoundingClientRect();"
        f" const row = page.painter.rows.find((r) => {row});"
        f" return [box.left + page.view.x({time}), box.top + row.screen + row.h / 2]; }})()"
    )
    return found[0], found[1]


def ink(tab: Browser) -> int:
    """How many pixels of the picture are not paper."""
    return int(
        tab.eval(
            "(() => { const c = page.canvas.getContext('2d');"
            " const d = c.getImageData(0, 0, page.canvas.width, page.canvas.height).data;"
            " let n = 0; for (let i = 4; i < d.length; i += 4)"
            " if (d[i] !== d[0] || d[i + 1] !== d[1]) n++; return n; })()"
        )
    )


def test_it_says_what_was_found(tab: Browser) -> None:
    assert text(tab, "#verdict") == "✕ 1 violation"
    facts = text(tab, "#facts")
    assert "44 events over 43.0 ms" in facts
    assert "3 requests (1 finished, 1 open, 1 failed)" in facts
    assert "2 transfers (1 not done)" in facts
    assert "1 early read" in facts
    assert "not closed in order" in facts
    assert "R2 layer 1 was opened before <its> bytes had landed" in text(tab, "#violations")
    assert "request 1, layer 1, component latent, transfer 1" in text(tab, "#violations")
    assert "request 2 waits for layer 0 of transfer 2, deadline of loader" in text(tab, "#stuck")
    assert "load 1" in text(tab, "#slowest")
    assert ink(tab) > 5_000


def test_nothing_is_fetched(tab: Browser) -> None:
    assert tab.eval("performance.getEntriesByType('resource').length") == 0


def test_a_violation_leads_to_its_lines(tab: Browser) -> None:
    tab.eval("page.view.move(40, 41), 1")
    box = tab.eval(f"(({VIOLATION}).getBoundingClientRect().toJSON())")
    tab.click(box["x"] + 20, box["y"] + 10)
    tab.settle()
    from_ms, to_ms = window(tab)
    first, last = tab.eval("[page.log.at(8), page.log.at(27)]")
    assert from_ms < first < last < to_ms
    assert to_ms - from_ms < 43
    assert tab.eval(f"{VIOLATION}.getAttribute('aria-current')") == "true"
    assert "the plan as it was written" in text(tab, "#violations")
    assert "Violation 1: R2" in text(tab, "#say")
    row = tab.eval("page.painter.rows.find((r) => r.request === 1).screen")
    assert 0 < row < tab.eval("page.view.bottom")


def test_a_violation_of_a_lease_alone_leads_to_its_request(
    browser: Browser, tmp_path: Path
) -> None:
    events = scene()
    verdict = found(events)
    freed = msgspec.structs.replace(
        verdict.violations[0], rule="R6", request=None, transfer=None, lease=10, lines=[7, 37]
    )
    verdict = msgspec.structs.replace(verdict, violations=[freed])
    browser.open(write(tmp_path / "lease.html", events, verdict))
    browser.eval("page.showViolation(0), 1")
    concerned = (
        "page.view.rows().filter((r) => isConcerned(r, page.view.chain.violation, page.log))"
    )
    assert browser.eval(f"{concerned}.map((r) => r.label)") == ["request 1"]


def test_wheel_drag_and_keys_move_the_window(tab: Browser) -> None:
    x, y = middle_of(tab, "r.kind === 'steps'", "20")
    start = window(tab)
    under = tab.eval(f"page.view.timeAt({x})")
    tab.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)
    tab.settle()
    zoomed = window(tab)
    assert zoomed[1] - zoomed[0] < 0.9 * (start[1] - start[0])
    assert tab.eval(f"page.view.timeAt({x})") == pytest.approx(under, abs=0.5)
    tab.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    tab.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    tab.mouse("mouseReleased", x - 100, y, button="left", buttons=0, clickCount=1)
    tab.settle()
    dragged = window(tab)
    assert dragged[0] > zoomed[0]
    tab.eval("page.canvas.focus()")
    tab.key("ArrowLeft")
    tab.key("+")
    tab.settle()
    assert window(tab)[1] - window(tab)[0] < dragged[1] - dragged[0]
    tab.key("0")
    tab.settle()
    assert window(tab) == pytest.approx(start)


def test_keys_reach_violations_rows_and_spans(tab: Browser) -> None:
    tab.eval("page.canvas.focus()")
    tab.key("n")
    assert tab.eval("page.view.chain.violation.rule") == "R2"
    tab.key("Escape")
    assert tab.eval("page.view.chain") is None
    tab.key(".")
    assert "step 1, prefill" in text(tab, "#selected")
    tab.key("]")
    assert "step 2, decode" in text(tab, "#selected")
    tab.key("/")
    assert tab.eval("document.activeElement.id") == "by-request"


def test_filters_leave_what_they_name(tab: Browser) -> None:
    assert kinds(tab, "request") == ["request 1", "request 2", "request 3"]
    fill(tab, "request", "2")
    assert kinds(tab, "request") == ["request 2"]
    assert text(tab, "#matches") == "1 request, 1 transfer"
    fill(tab, "request", "")
    fill(tab, "layer", "7")
    assert text(tab, "#matches") == "3 requests, 0 transfers"
    fill(tab, "layer", "x")
    assert "give one layer" in text(tab, "#matches")
    tab.eval("document.getElementById('clear').click()")
    assert text(tab, "#matches") == ""


def test_a_page_tells_who_held_it_when(tab: Browser) -> None:
    fill(tab, "page", "device 2")
    told = re.sub(r"\s+", " ", text(tab, "#page-history"))
    assert told == (
        "Page 2 of the device tier line 13 held, epoch 0 "
        "line 13 lease 22 (exclusive) of transfer 2, until line 33 "
        "line 14 lease 20 (shared) of request 2, until line 44 "
        "line 34 quarantined, epoch 0 line 35 free, epoch 0"
    )
    assert kinds(tab, "request") == ["request 2"]
    fill(tab, "page", "host 0")
    assert "lease 11 (shared) of transfer 1, until line 25" in text(tab, "#page-history")


def test_pointing_tells_the_event_and_its_lines(tab: Browser) -> None:
    tab.mouse("mouseMoved", *middle_of(tab, "r.kind === 'transfers'", "page.log.at(12)"))
    tip = text(tab, "#tip")
    assert tip.startswith("load 1\n")
    assert "moves: 256 B, 2 pages, 0 tails" in tip
    assert "lines 8, 17, 19, 20, 21, 22 and 2 more" in tip
    tab.mouse("mouseMoved", *middle_of(tab, "r.request === 1", "page.log.at(18) + 0.5"))
    assert "wait for layer 1" in text(tab, "#tip")
    assert "stood still: 1.50 ms" in text(tab, "#tip")
    tab.click(*middle_of(tab, "r.key === 'prefill'", "page.log.at(25)"))
    tab.settle()
    assert "step 1, prefill" in text(tab, "#selected")
    assert "line 28" in text(tab, "#selected")


def test_groups_fold(tab: Browser) -> None:
    tab.click(*middle_of(tab, "r.key === 'requests' && r.kind === 'head'", "10"))
    tab.settle()
    assert kinds(tab, "request") == []
    tab.eval("page.canvas.focus()")
    tab.key("f")
    assert len(kinds(tab, "request")) == 3, "the key undoes what was folded last"
    tab.key(".")
    tab.key("f")
    assert kinds(tab, "steps") == []


def test_it_follows_the_systems_colours(tab: Browser) -> None:
    corner = "Array.from(page.canvas.getContext('2d').getImageData(1, 1, 1, 1).data.slice(0, 3))"
    assert tab.eval(corner) == [255, 255, 255]
    tab.dark(True)
    tab.settle()
    assert max(tab.eval(corner)) < 40


def test_a_narrow_window_stacks_the_findings_below(tab: Browser) -> None:
    tab.size(700, 900)
    try:
        tab.settle()
        below = "document.getElementById('panel').getBoundingClientRect().top"
        assert tab.eval(below) > 300
        assert tab.eval("document.documentElement.scrollWidth") <= 700
    finally:
        tab.size(1440, 900)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda data: data[: len(data) // 2], "it is"),
        (lambda data: "?" + data[1:], "it is not complete"),
        (lambda data: data[:200] + "AAAAAAAA" + data[208:], "it is cut off or was changed"),
        (lambda data: "", "it is cut off or was changed"),
    ],
    ids=["half", "no base64", "changed", "empty"],
)
def test_damaged_data_is_a_sentence_and_no_blank(
    browser: Browser, tmp_path: Path, broken: Callable[[str], str], said: str
) -> None:
    path = write(tmp_path / "damaged.html", scene(), clean(scene()))
    page = path.read_text(encoding="utf-8")
    path.write_text(
        re.sub(r'(id="data">)([^<]*)', lambda m: m[1] + broken(m[2]), page), encoding="utf-8"
    )
    browser.open(path)
    told = text(browser, "#problem")
    assert told.startswith(f"This page cannot show its log: {said}")
    assert "kvlease replay LOG --html FILE" in told


def test_a_log_of_its_head_alone_opens(browser: Browser, tmp_path: Path) -> None:
    events = stamped(scene()[:1])
    browser.open(write(tmp_path / "head.html", events, clean(events)))
    assert browser.eval("document.documentElement.dataset.problem") is None
    assert text(browser, "#verdict") == "✓ clean"


def _many(count: int) -> list[ev.Event]:
    """The scene again and again, each time with numbers of its own."""
    events: list[ev.Event] = list(scene())
    while len(events) < count:
        k = len(events)
        for event in scene()[2:]:
            numbers: dict[str, Any] = {
                name: getattr(event, name) + k
                for name in ("request", "lease", "transfer", "step", "read", "source_lease",
                             "destination_lease")
                if getattr(event, name, 0)
            }  # fmt: skip
            if isinstance(event, ev.LeaseWait):
                numbers["leases"] = [lease + k for lease in event.leases]
            if isinstance(event, ev.StepDone):
                numbers["rows"] = [
                    msgspec.structs.replace(row, request=row.request + k, lease=row.lease + k)
                    for row in event.rows
                ]
            events.append(msgspec.structs.replace(event, **numbers))
    return stamped(events)


@pytest.mark.slow
def test_two_hundred_thousand_events_open_in_three_seconds(
    browser: Browser, tmp_path: Path
) -> None:
    events = _many(200_000)
    path = write(tmp_path / "many.html", events, found(events))
    assert path.stat().st_size < 12_000_000
    opened = []
    for _ in range(3):
        browser.open(path)
        opened.append(browser.drawn_ms())
    assert browser.eval("page.log.lines.length") >= 200_000
    assert min(opened) < 3_000
    frames = browser.eval(
        "(() => { const start = performance.now();"
        " for (let k = 0; k < 10; k++) { page.view.zoom(0.9); page.painter.draw(); }"
        " return (performance.now() - start) / 10; })()"
    )
    assert frames < 150  # a bound for a loaded machine; a quiet one draws in about a tenth
