"""Logs that cannot be run again say so, before their answers are called different."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvlease.errors import BadInput
from kvlease.services.lab.faults import FaultPlan
from kvlease.services.lab.recording import read_recording
from tests.lab.test_rerun import recorded

Lines = list[bytes]


def submitted(lines: Lines, number: int) -> int:
    return [at for at, line in enumerate(lines) if b'"request.submitted"' in line][number]


def lose(lines: Lines) -> Lines:
    del lines[submitted(lines, 3)]
    return lines


def repeat(lines: Lines) -> Lines:
    at = submitted(lines, 3)
    return [*lines[:at], lines[at], *lines[at:]]


def swap(lines: Lines) -> Lines:
    at, other = submitted(lines, 2), submitted(lines, 3)
    lines[at], lines[other] = lines[other], lines[at]
    return lines


def join_another(lines: Lines) -> Lines:
    return lines + lines


def head_again(lines: Lines) -> Lines:
    return [*lines[:9], lines[0], *lines[9:]]


@pytest.mark.parametrize("break_it", [lose, repeat, swap, join_another, head_again])
def test_a_log_with_lines_lost_or_out_of_order_is_refused(
    tmp_path: Path, break_it: Callable[[Lines], Lines]
) -> None:
    """Prompts that are missing or there twice would make every later answer another one."""
    path = tmp_path / "run.jsonl"
    recorded(path, FaultPlan())
    assert len(read_recording(str(path)).arrivals) > 10
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(break_it(lines)))
    with pytest.raises(BadInput, match="lost or are out of order"):
        read_recording(str(path))
