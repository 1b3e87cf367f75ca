"""A log as one HTML page that needs no network: verdict, violations, and a timeline to look into.

The page is a template with its style, its script and the packed data put in. What it shows is in
`page_data`; how it is drawn is in the scripts beside this file.
"""

import base64
import html
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import BinaryIO

import msgspec

from kvlease.protocols import events as ev
from kvlease.services.replay.page_data import PageData
from kvlease.services.replay.timeline import Numbered, Timeline
from kvlease.services.replay.verdict import Verdict

MAX_LINES = 2_000_000
"""Lines that one page draws: a browser holds them, and they are some 30 MB of page."""

_SCRIPTS = (
    "page_data.js",
    "page_rows.js",
    "page_pen.js",
    "page_spans.js",
    "page_draw.js",
    "page_panel.js",
    "page_hit.js",
    "page_main.js",
)


class PageHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a page says in words.

    Attributes:
        source: name of the log.
        verdict: what the check found.
        texts: lines of the log by number, for those that violations and the stuck name.
        left_out: lines behind the last that is drawn.
        log: the log's own head, without the configuration.
    """

    source: str
    verdict: Verdict
    texts: dict[int, str]
    left_out: int
    log: ev.LogOpen | None


def write_page(
    file: BinaryIO,
    events: Iterable[Numbered],
    verdict: Verdict,
    source: str,
    texts: Mapping[int, str],
) -> None:
    """Write a whole log as one page.

    Args:
        file: opened for writing bytes; borrowed.
        events: the log, in order.
        verdict: what a check of the same log found.
        source: the log's name, as people know it.
        texts: lines by number, as far as they are to be shown as they were written.
    """
    data = PageData()
    timeline = Timeline(data)
    log: ev.LogOpen | None = None
    left_out = 0
    for line, event in events:
        if line > MAX_LINES:
            left_out += 1
            continue
        if isinstance(event, ev.LogOpen) and log is None:
            log = msgspec.structs.replace(event, config=None, ports=None)
        timeline.feed(event, line)
    timeline.finish()
    head = PageHead(source=source, verdict=verdict, texts=dict(texts), left_out=left_out, log=log)
    file.write(_fill(source, base64.b64encode(data.pack(head))))


def _fill(title: str, data: bytes) -> bytes:
    """Put the parts into the template."""
    folder = files(__name__.rpartition(".")[0])
    parts = {
        "TITLE": html.escape(title).encode(),
        "STYLE": (folder / "page.css").read_bytes(),
        "SCRIPT": b"\n".join((folder / name).read_bytes() for name in _SCRIPTS),
        "DATA": data,
    }
    page = (folder / "page.html").read_bytes()
    return re.sub(rb"\{\{([A-Z]+)\}\}", lambda found: parts[found[1].decode()], page)
