"""A verdict for people: what broke with the lines that show it, who is stuck, where time went."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from kvlease.services.replay.verdict import RerunReport, Verdict, Violation

MAX_SHOWN = 20
"""Violations that are printed; ``--json`` has more."""
MAX_TEXT = 160
"""Characters of a line that are printed."""


def lines_shown(verdict: Verdict) -> set[int]:
    """Return the numbers of the lines whose text `print_verdict` prints."""
    shown = {line for one in verdict.violations[:MAX_SHOWN] for line in one.lines}
    return shown | {line for one in verdict.stuck[:MAX_SHOWN] for line in one.lines}


def print_verdict(verdict: Verdict, texts: dict[int, str], console: Console) -> None:
    """Print everything; ``texts`` are lines by number, as far as they can be read again."""
    for line in _summary(verdict):
        _say(console, line)
    for violation in verdict.violations[:MAX_SHOWN]:
        _violation(violation, texts, console)
    hidden = sum(verdict.violation_counts.values()) - min(len(verdict.violations), MAX_SHOWN)
    if hidden:
        _say(console, f"... and {hidden:,} more violations (--json FILE keeps up to 100 of a rule)")
    for stuck in verdict.stuck[:MAX_SHOWN]:
        due = "" if stuck.overdue_s is None else f", {_due(stuck.overdue_s)}"
        _say(console, "")
        _say(console, f"stuck: request {stuck.request} waits for {stuck.waits_for}")
        _say(console, f"  the deadline is the {stuck.owner}'s{due}")
        _chain(stuck.lines, texts, console)
    if len(verdict.stuck) > MAX_SHOWN:
        _say(console, f"... and {len(verdict.stuck) - MAX_SHOWN:,} more stuck requests")
    _stalls(verdict, console)
    _slowest(verdict, console)


def print_rerun(report: RerunReport, console: Console) -> None:
    """Print how a run compares with its recording."""
    _say(console, "")
    same = f"{report.same_answers:,} of {report.answers:,} answers are the same bit for bit"
    how = "times included" if report.is_exact else "each actor's by themselves, times left out"
    first = report.first_difference
    if first is None:
        _say(console, f"rerun: {same}, and so are all events ({how})")
        return
    _say(console, f"rerun: {same}; events differ from line {first.line:,} on ({how}):")
    _say(console, f"  recorded: {_short(first.recorded)}")
    _say(console, f"  now:      {_short(first.rerun)}")
    if report.different:
        named = ", ".join(map(str, report.different[:MAX_SHOWN]))
        _say(console, f"  requests answered differently: {named}")


def _summary(verdict: Verdict) -> Iterator[str]:
    yield f"verdict: {verdict.verdict}"
    rate = verdict.events / verdict.wall_s if verdict.wall_s > 0 else 0.0
    yield (
        f"events: {verdict.events:,} over {verdict.span_s:.1f} s, judged in "
        f"{verdict.wall_s:.1f} s ({rate:,.0f} a second)"
    )
    if verdict.violation_counts:
        counts = sorted(verdict.violation_counts.items(), key=lambda one: int(one[0][1:]))
        yield "violations: " + ", ".join(f"{rule} {count:,}" for rule, count in counts)
    if verdict.early_reads is not None:
        yield f"reads before their bytes had landed: {verdict.early_reads:,}"
    for doubt in verdict.cannot_tell:
        rules = "any rule" if len(doubt.rules) == 12 else ", ".join(doubt.rules)
        times = f", {doubt.times:,} times" if doubt.times > 1 else ""
        yield f"cannot tell {rules}: {doubt.why} (line {doubt.line}{times})"


def _violation(violation: Violation, texts: dict[int, str], console: Console) -> None:
    where = [
        f"{name} {value}"
        for name, value in (
            ("request", violation.request),
            ("layer", violation.layer),
            ("component", violation.component),
        )
        if value is not None
    ]
    _say(console, "")
    _say(
        console, f"{violation.rule}: {violation.what}" + (f" [{', '.join(where)}]" if where else "")
    )
    _chain(violation.lines, texts, console)


def _chain(lines: list[int], texts: dict[int, str], console: Console) -> None:
    for line in lines:
        _say(console, f"  line {line:<8} {_short(texts.get(line, ''))}".rstrip())


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 4]} ..."


def _due(overdue_s: float) -> str:
    if overdue_s >= 0:
        return f"passed {overdue_s:.1f} s before the log ends"
    return f"{-overdue_s:.1f} s behind the log's end"


def _stalls(verdict: Verdict, console: Console) -> None:
    rows = [
        (str(s.layer), s.tier, f"{s.waits:,}", f"{s.total_ms:,.1f}", f"{s.longest_ms:,.1f}")
        for s in verdict.stalls
    ]
    _table(console, "exposed stall", ("layer", "tier", "waits", "ms in all", "longest ms"), rows)


def _slowest(verdict: Verdict, console: Console) -> None:
    rows = [
        (
            f"{t.direction} {t.transfer}",
            t.ended,
            f"{t.ms:,.1f}",
            f"{t.nbytes:,}",
            f"{t.pages:,}",
            ", ".join(map(str, t.lines)),
        )
        for t in verdict.slowest_transfers
    ]
    heads = ("transfer", "ended", "ms", "bytes", "pages", "lines")
    _table(console, "slowest transfers", heads, rows)


def _table(
    console: Console, title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> None:
    if not rows:
        return
    _say(console, "")
    if console.is_terminal:
        table = Table(title=title, title_justify="left")
        for head in heads:
            table.add_column(head, justify="left" if head in ("tier", "transfer") else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    _say(console, f"{title}:")
    for row in rows:
        cells = ", ".join(f"{head} {cell}" for head, cell in zip(heads, row, strict=True))
        _say(console, f"  {cells}")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
