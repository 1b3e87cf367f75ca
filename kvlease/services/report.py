"""The report of a run: one struct with the contract's keys, as JSON, a table, or plain lines.

Other programs read the keys, so they and their meanings stay. This module does not know how the
figures came about.
"""

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from kvlease.services.outputs import whole_file


class TierTokens(msgspec.Struct, frozen=True):
    """Prompt tokens by the tier that held them."""

    device: int = 0
    host: int = 0
    storage: int = 0
    remote: int = 0

    @property
    def total(self) -> int:
        """Tokens served from any tier."""
        return self.device + self.host + self.storage + self.remote


class Percentiles(msgspec.Struct, frozen=True):
    """Median and 99th percentile in milliseconds; null where there was no sample."""

    p50: float | None
    p99: float | None


class RunReport(msgspec.Struct, frozen=True):
    """What `kvlease run` found; counts are over the whole run.

    Attributes:
        corrupt_turns: answers that differ from a cold run; null unless verified.
        hung_sessions: sessions that had no terminal event after their deadline.
        failed_turns: requests that ended without an answer.
        transfer_timeouts: transfers that outlived their deadline.
        tool_call_errors: answers whose tool-call markup leaks.
        hit_tokens, computed_tokens: the buckets of prompt_tokens (R12).
        recomputed_tokens: work done again, outside those buckets.
        gate_waits, gate_wait_ms: how often and how long compute really waited for a layer.
        ttft_ms: request to first token; tpot_ms: time per further token, per request.
        audited_pages, audit_mismatches: pages compared with their sums, and those found changed.
        ledger_ok: whether every pool's pages added up at the end, with none left leased.
    """

    sessions: int
    turns: int
    corrupt_turns: int | None
    hung_sessions: int
    failed_turns: int
    transfer_timeouts: int
    tool_call_errors: int
    prompt_tokens: int
    output_tokens: int
    hit_tokens: TierTokens
    computed_tokens: int
    recomputed_tokens: int
    restored_bytes: int
    stored_bytes: int
    gate_waits: int
    gate_wait_ms: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    wall_s: float
    device_pages: int
    host_pages: int
    ledger_ok: bool
    audited_pages: int = 0
    audit_mismatches: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was corrupt, hung, failed or leaked: exit status 0."""
        return (
            not self.corrupt_turns
            and not self.hung_sessions
            and not self.failed_turns
            and self.ledger_ok
        )


def percentiles(samples_s: Sequence[float]) -> Percentiles:
    """Return nearest-rank percentiles of seconds, in milliseconds."""
    if not samples_s:
        return Percentiles(None, None)
    ordered = sorted(samples_s)

    def rank(percent: int) -> float:
        place = max(1, -(-len(ordered) * percent // 100))
        return round(ordered[place - 1] * 1e3, 3)

    return Percentiles(rank(50), rank(99))


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _span(found: Percentiles) -> str:
    if found.p50 is None or found.p99 is None:
        return "no sample"
    return f"p50 {found.p50:.1f} ms, p99 {found.p99:.1f} ms"


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"


def rows_of(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield the report as label and value, in the order people read it."""
    r = report
    verdict = "not verified" if r.corrupt_turns is None else f"{r.corrupt_turns:,}"
    yield "sessions, turns", f"{r.sessions:,}, {r.turns:,}"
    yield "corrupt turns", verdict
    yield "hung sessions, failed turns", f"{r.hung_sessions:,}, {r.failed_turns:,}"
    yield "tool-call errors", f"{r.tool_call_errors:,}"
    yield "prompt tokens", f"{r.prompt_tokens:,}"
    yield "  from the device", _share(r.hit_tokens.device, r.prompt_tokens)
    yield "  from the host", _share(r.hit_tokens.host, r.prompt_tokens)
    if r.hit_tokens.storage or r.hit_tokens.remote:
        yield "  from storage", _share(r.hit_tokens.storage, r.prompt_tokens)
        yield "  from other engines", _share(r.hit_tokens.remote, r.prompt_tokens)
    yield "  computed", _share(r.computed_tokens, r.prompt_tokens)
    yield "computed again", f"{r.recomputed_tokens:,}"
    yield "restored, stored", f"{_bytes(r.restored_bytes)}, {_bytes(r.stored_bytes)}"
    yield "waits at the gate", f"{r.gate_waits:,}, {r.gate_wait_ms:.1f} ms in all"
    yield "transfers out of time", f"{r.transfer_timeouts:,}"
    yield "time to first token", _span(r.ttft_ms)
    yield "time per further token", _span(r.tpot_ms)
    rate = r.output_tokens / r.wall_s if r.wall_s > 0 else 0.0
    yield "output tokens", f"{r.output_tokens:,} in {r.wall_s:.1f} s ({rate:,.0f} a second)"
    yield "pages, device and host", f"{r.device_pages:,}, {r.host_pages:,}"
    yield "pages audited, found changed", f"{r.audited_pages:,}, {r.audit_mismatches:,}"
    yield "ledger", "adds up" if r.ledger_ok else "does NOT add up"


def print_report(report: RunReport, console: Console) -> None:
    """Print a table on a terminal, one plain line a figure otherwise."""
    if console.is_terminal:
        table = Table(show_header=False, title="kvlease run", title_justify="left")
        for label, value in rows_of(report):
            table.add_row(label, value)
        console.print(table)
        return
    for label, value in rows_of(report):
        console.print(f"{label.strip()}: {value}", markup=False, highlight=False, soft_wrap=True)


def write_json(path: str, value: object) -> None:
    """Write one JSON object to a file.

    Raises:
        BadInput: the file cannot be written.
    """
    body = msgspec.json.format(msgspec.json.encode(value), indent=2)
    with whole_file(path) as file:
        file.write(body + b"\n")
