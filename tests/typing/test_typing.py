"""Misuse of ownership must not type-check, under mypy and under pyright, and must fail when run."""

import json
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from kvlease.errors import LeaseMoved, StaleEpoch
from kvlease.kernels.views import RowIndex, read_rows
from kvlease.protocols.geometries import V4Geometry, deepseek_v4_schema
from kvlease.protocols.ownership import Exclusive, Lease, SequenceLease
from kvlease.protocols.readiness import Openings, Readiness
from kvlease.protocols.schema import SparseLayer
from kvlease.protocols.views import EpochCell, PagedRows
from kvlease.units import LayerId, LeaseId

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAMS = (HERE / "accept.py", HERE / "reject.py")


def marked_lines() -> set[int]:
    lines = (HERE / "reject.py").read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# rejected")}


def mypy_error_lines() -> dict[str, set[int]]:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--output", "json"]
    done = subprocess.run(
        [*command, *map(str, PROGRAMS)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return by_program((row["file"], row["line"]) for row in found if row["severity"] == "error")


def pyright_error_lines() -> dict[str, set[int]]:
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(
        [*command, *map(str, PROGRAMS)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    return by_program(
        (row["file"], row["range"]["start"]["line"] + 1)
        for row in found
        if row["severity"] == "error"
    )


def by_program(errors: Iterable[tuple[str, int]]) -> dict[str, set[int]]:
    lines: dict[str, set[int]] = {path.name: set() for path in PROGRAMS}
    for file, line in errors:
        if Path(file).name in lines:
            lines[Path(file).name].add(line)
    return lines


@pytest.mark.parametrize("checker", [mypy_error_lines, pyright_error_lines])
def test_every_misuse_is_an_error_and_nothing_else_is(
    checker: Callable[[], dict[str, set[int]]],
) -> None:
    """If a marked line stops being an error, some guard is no longer held by the types.

    If an accepted line becomes one, the types refuse what users need.
    """
    pytest.importorskip("mypy")
    pytest.importorskip("basedpyright")
    assert len(marked_lines()) >= 16
    assert checker() == {"accept.py": set(), "reject.py": marked_lines()}


class _Grantor:
    """Builds views over one small tensor, as a pool would."""

    def view_source(self, pages: object, layer: LayerId, cell: EpochCell) -> "_Source":
        return _Source(cell)

    def lease_moved(self, lease: LeaseId, *, freezes: bool) -> None:
        """Nobody listens here."""


class _Source:
    def __init__(self, cell: EpochCell) -> None:
        self._cell = cell

    def paged(self, name: str) -> PagedRows:
        table = torch.zeros(1, 1, dtype=torch.int64)
        return PagedRows(name, torch.zeros(1, 4, 2), table, self._cell, 4)

    def opened(self, name: str) -> object:
        raise AssertionError("a shared lease opens nothing for writing")

    ring = opened


def exclusive_lease(closed: list[object]) -> "Lease[Exclusive]":
    openings = Openings(lambda: 0)
    return Lease(LeaseId(1), [0], _Grantor(), Readiness(1), openings, closed.append)  # type: ignore[arg-type]


def sparse_layer() -> SparseLayer:
    schema = deepseek_v4_schema(V4Geometry(("sparse",), 2, 0, 2, 4), 16, "float32")
    layer = schema.layers[0]
    assert isinstance(layer, SparseLayer)
    return layer


def test_a_moved_lease_is_dead() -> None:
    """Use after move: the checkers are silent, so the run time must not be."""
    lease = exclusive_lease([])
    shared = lease.freeze()
    with pytest.raises(LeaseMoved):
        lease.freeze()
    with pytest.raises(LeaseMoved):
        lease.close()
    assert shared.num_pages == 1


def test_a_closed_lease_is_closed_once_and_gives_pages_back_once() -> None:
    """A double close would give the same pages back twice."""
    closed: list[object] = []
    lease = exclusive_lease(closed)
    with lease:
        pass
    with pytest.raises(LeaseMoved):
        lease.close()
    assert closed == [()]


def test_a_view_kept_past_its_lease_opens_nothing() -> None:
    """An escaped view: refused by the epoch when rows are opened (R8)."""
    lease = exclusive_lease([]).freeze()
    view = lease[sparse_layer()].resolve_nowait()
    at = torch.zeros(1, dtype=torch.int64)
    assert read_rows(view.latent, at, at, RowIndex()).shape == (1, 2)
    lease.close()
    with pytest.raises(StaleEpoch):
        read_rows(view.latent, at, at, RowIndex())


def test_a_layer_lease_dies_with_its_lease() -> None:
    """A right to a layer must not outlive the right to the pages."""
    lease = exclusive_lease([]).freeze()
    layer_lease = lease[sparse_layer()]
    moved = lease.move()
    with pytest.raises(LeaseMoved):
        layer_lease.resolve_nowait()
    assert moved[sparse_layer()].resolve_nowait().index_k.component == "index_k"


def test_a_view_has_no_way_to_memory() -> None:
    """No public attribute of a handle is memory: the private slots are for kernels only (R1)."""
    rows = PagedRows("latent", torch.zeros(1, 4, 2), torch.zeros(1, 1), EpochCell(), 4)
    public = [getattr(rows, name) for name in dir(rows) if not name.startswith("_")]
    assert not any(isinstance(value, torch.Tensor) for value in public)


def test_a_sequence_lease_commits_forward_only() -> None:
    """Committed rows are final: a smaller commit must not hand them back to the writer."""
    lease = SequenceLease(LeaseId(1), array("i", [0]), 0, 0)
    lease.commit(8)
    lease.commit(4)
    assert lease.committed == 8
