"""People see what happened in lines; progress without a terminal is plain and not too chatty."""

import io

from rich.console import Console

from kvlease.protocols.events import PageFree, RequestFailed, RequestSubmitted, Usage
from kvlease.runtime.event_log import EventLog
from kvlease.services.console import people_log
from kvlease.services.driver import Tally
from kvlease.services.progress import Reporter, open_reporter


def test_events_become_lines_and_audit_events_do_not() -> None:
    lines: list[str] = []
    ticks = iter([1_000_000_000, 1_000_000_000, 2_500_000_000])
    log = EventLog(clock_ns=lambda: next(ticks))
    log.subscribe(people_log(lines.append, colors=False))
    log.emit(RequestSubmitted(request=4, prompt_tokens=9, max_tokens=2, actor="door"))
    log.emit(PageFree(pages=[(1, 1, 0)]))
    log.emit(RequestFailed(request=4, reason="late", usage=Usage(prompt=9)))
    submitted, failed = lines
    assert submitted.startswith("[info     ] request.submitted")
    assert "prompt_tokens=9" in submitted
    assert failed.startswith("[warning  ] request.failed")
    assert "at_s=1.5" in failed


def test_plain_progress_prints_a_line_every_few_seconds() -> None:
    file = io.StringIO()
    times = iter([0.0, 1.0, 6.0, 7.0])
    reporter = Reporter(Console(file=file, width=20), clock=lambda: next(times))
    reporter.begin("serving", 1200)
    tally = Tally(turns=3, prompt_tokens=100, hit_host=40)
    reporter.turn_ended(tally)
    tally.failed_turns = 1
    reporter.turn_ended(tally)
    reporter.turn_ended(tally)
    assert file.getvalue().splitlines() == [
        "kvlease: serving: 1,200 turns",
        "kvlease: serving: 4 of 1,200 turns, 40% cached, 1 failed, 6 s",
    ]


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with open_reporter(console) as reporter:
        reporter.begin("serving", 10)
        reporter.turn_ended(Tally(turns=3))
        reporter.begin("verifying", 10)
        reporter.advance(4)
        reporter.say("a line above [the bar]")
    assert "a line above [the bar]" in file.getvalue()
    assert "verifying" in file.getvalue()
