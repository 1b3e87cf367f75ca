"""The report's keys are a contract; the verdict and the figures hold."""

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvlease.errors import BadInput
from kvlease.services.report import (
    Percentiles,
    RunReport,
    TierTokens,
    percentiles,
    print_report,
    write_json,
)

REPORT = RunReport(
    sessions=64,
    turns=192,
    corrupt_turns=0,
    hung_sessions=0,
    failed_turns=0,
    transfer_timeouts=0,
    tool_call_errors=0,
    prompt_tokens=1000,
    output_tokens=100,
    hit_tokens=TierTokens(device=500, host=250),
    computed_tokens=250,
    recomputed_tokens=12,
    restored_bytes=1_500_000,
    stored_bytes=999,
    gate_waits=3,
    gate_wait_ms=1.25,
    ttft_ms=Percentiles(10.0, 20.0),
    tpot_ms=Percentiles(None, None),
    wall_s=2.0,
    device_pages=512,
    host_pages=2048,
    ledger_ok=True,
)


def printed(report: RunReport, *, terminal: bool) -> str:
    file = io.StringIO()
    print_report(report, Console(file=file, force_terminal=terminal, width=90, color_system=None))
    return file.getvalue()


def test_the_keys_are_the_contract(tmp_path: Path) -> None:
    """Other programs read these names; a changed one breaks them silently."""
    path = tmp_path / "report.json"
    write_json(str(path), REPORT)
    found = json.loads(path.read_text())
    names = (
        "sessions turns corrupt_turns hung_sessions failed_turns transfer_timeouts "
        "tool_call_errors prompt_tokens output_tokens hit_tokens computed_tokens "
        "recomputed_tokens restored_bytes stored_bytes gate_waits gate_wait_ms ttft_ms tpot_ms "
        "wall_s device_pages host_pages ledger_ok audited_pages audit_mismatches"
    )
    assert list(found) == names.split()
    assert found["hit_tokens"] == {"device": 500, "host": 250, "storage": 0, "remote": 0}
    assert found["tpot_ms"] == {"p50": None, "p99": None}


@pytest.mark.parametrize(
    ("change", "clean"),
    [
        ({}, True),
        ({"corrupt_turns": None}, True),
        ({"corrupt_turns": 1}, False),
        ({"hung_sessions": 1}, False),
        ({"failed_turns": 1}, False),
        ({"ledger_ok": False}, False),
        ({"transfer_timeouts": 5}, True),
    ],
)
def test_the_verdict(change: dict[str, int], clean: bool) -> None:
    assert msgspec.structs.replace(REPORT, **change).is_clean is clean


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles([]) == Percentiles(None, None)
    assert percentiles([0.003]) == Percentiles(3.0, 3.0)
    assert percentiles([i / 1000 for i in range(100, 0, -1)]) == Percentiles(50.0, 99.0)


def test_plain_lines_without_a_terminal_and_a_table_on_one() -> None:
    plain = printed(REPORT, terminal=False)
    assert "corrupt turns: 0\n" in plain
    assert "from the host: 250 (25.0%)\n" in plain
    assert "restored, stored: 1.5 MB, 999 B\n" in plain
    assert "time per further token: no sample\n" in plain
    assert "│" not in plain
    assert "│" in printed(REPORT, terminal=True)


def test_an_unverified_run_does_not_say_zero() -> None:
    report = msgspec.structs.replace(REPORT, corrupt_turns=None)
    assert "corrupt turns: not verified" in printed(report, terminal=False)


def test_a_report_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot write .*: No such file"):
        write_json(str(tmp_path / "nowhere" / "report.json"), REPORT)
