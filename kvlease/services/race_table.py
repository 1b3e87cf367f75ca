"""The race's table for people: plain columns that a document can quote, and what they stand on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvlease.services.lab.race_data import RaceReport, RaceRow

_HEADINGS: Final = (
    "cache", "keys", "gate", "at once", "corrupt", "early", "hung", "late", "host hits",
    "computed", "again", "stall ms", "ttft ms p50", "p99", "time s", "ratio", "wall s",
)  # fmt: skip
_LEFT: Final = 3


def _cells(row: RaceRow) -> tuple[str, ...]:
    corrupt = row.corrupt_turns or 0
    share = f"{corrupt / row.turns:.1%}" if row.turns else ""
    ttft = row.ttft_ms
    return (
        "host" if row.host_cache else "off",
        row.index_k_format,
        row.gate,
        f"{row.sessions}",
        f"{corrupt} ({share})" if corrupt else "0",
        f"{row.early_reads:,}",
        f"{row.hung_sessions}",
        f"{row.transfer_timeouts}",
        f"{row.hit_tokens.host / max(1, row.prompt_tokens):.0%}",
        f"{row.computed_tokens:,}",
        f"{row.recomputed_tokens:,}",
        f"{row.gate_wait_ms:.0f}",
        "" if ttft.p50 is None else f"{ttft.p50:.0f}",
        "" if ttft.p99 is None else f"{ttft.p99:.0f}",
        f"{row.simulated_s:.2f}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        f"{row.wall_s:.1f}",
    )


def table_lines(rows: Sequence[RaceRow]) -> Iterator[str]:
    """Yield the table, headings first, in columns as wide as they need to be."""
    cells = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        parts = (
            cell.ljust(width) if place < _LEFT else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(parts).rstrip()


def foot_lines(report: RaceReport) -> Iterator[str]:
    """Yield what the table stands on: sizes, speeds, and what its words mean."""
    setup, rows = report.setup, report.rows
    device = setup.device
    turns = rows[0].turns if rows else 0
    yield (
        f"Each row: the same {turns} turns of {setup.num_sessions} sessions, so many at once, held"
        f" against {report.cold_answers} cold answers; {setup.device_pages} device pages of 64"
        " tokens, embedded model, bf16 latent rows."
    )
    yield (
        f"Device (simulated): loads {_link(device.load.latency_s, device.load.bytes_per_s)}, stores"
        f" {_link(device.store.latency_s, device.store.bytes_per_s)}, a step"
        f" {device.step_s * 1e3:g} ms and {device.token_s * 1e6:g} us a token, over the layers;"
        f" transfers may take {setup.load_timeout_s * 1e3:g} ms."
    )
    yield (
        "Gate: full is the product's. kv-only and off are lies of the device: index keys, or all"
        " that the host sends, are called done at launch, and travel all the same."
    )
    yield (
        "corrupt: answers that are not the cold ones, bit for bit. early: openings let through"
        " before their bytes. late: transfers out of time. again: tokens computed twice."
        " stall, ttft and time are simulated; ratio: time to that with the cache off."
    )
    if any(not row.host_cache for row in rows):
        yield "With the cache off nothing crosses the link, so one simulation stands for its gates."
    yield f"{report.wall_s:.0f} s in all."


def _link(latency_s: float, bytes_per_s: float) -> str:
    return f"{latency_s * 1e6:g} us a layer and {bytes_per_s / 1e6:g} MB/s"
