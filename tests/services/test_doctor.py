"""The doctor finds what is there, and a broken torch is a finding, not the doctor's end."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvlease.services import doctor
from kvlease.services.doctor import Diagnosis, examine, print_diagnosis
from kvlease.services.report import write_json

TORCH = json.dumps(
    {
        "version": "2.9.0",
        "threads": 8,
        "cuda": "13.0",
        "devices": [
            {
                "name": "Some GPU",
                "memory": 140_000_000_000,
                "free": 120_000_000_000,
                "capability": "9.0",
                "processors": 132,
            }
        ],
        "unpinned": None,
    }
)


def diagnose(monkeypatch: pytest.MonkeyPatch, torch: tuple[bool, str], exact: bool) -> Diagnosis:
    def probe(code: str) -> tuple[bool, str]:
        return torch if "import json, torch" in code else (exact, "rows differ at 3")

    monkeypatch.setattr(doctor, "_probe", probe)
    return examine()


def states(diagnosis: Diagnosis) -> dict[str, str]:
    return {finding.name: finding.state for finding in diagnosis.findings}


def test_a_machine_with_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = diagnose(monkeypatch, (True, TORCH), exact=True)
    assert found.can_serve
    assert states(found)["cuda"] == states(found)["pinned memory"] == "ok"
    assert states(found)["cuda engine"] == "ok"
    assert states(found)["exactness"] == "ok"
    write_json(str(tmp_path / "found.json"), found)
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["can_serve"] is True
    assert {"name": "torch", "state": "ok", "detail": "2.9.0, 8 threads"} in written["findings"]


def test_a_broken_torch_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnose(monkeypatch, (False, "ImportError: libtorch.so"), exact=False)
    assert not found.can_serve
    assert states(found)["torch"] == "broken"
    assert states(found)["exactness"] == "broken"


@pytest.mark.parametrize("terminal", [True, False])
def test_findings_are_printed(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    found = diagnose(monkeypatch, (True, TORCH), exact=True)
    file = io.StringIO()
    print_diagnosis(found, Console(file=file, force_terminal=terminal, width=120))
    assert "Some GPU, 140 GB" in file.getvalue()


def test_memory_that_cannot_be_pinned_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = json.dumps({**json.loads(TORCH), "unpinned": "CUDA error: out of memory"})
    found = diagnose(monkeypatch, (True, torch), exact=False)
    assert states(found)["pinned memory"] == states(found)["cuda engine"] == "broken"


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_no_device_is_no_fault(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> None:
    torch = json.dumps({**json.loads(TORCH), "cuda": cuda, "devices": []})
    found = diagnose(monkeypatch, (True, torch), exact=True)
    assert states(found)["cuda"] == "absent"
    assert "hypercorn" in states(found)
    assert "pinned memory" not in states(found)


def test_a_probe_runs_apart_and_says_its_last_line() -> None:
    assert doctor._probe("print('a'); print('b')") == (True, "b")
    well, said = doctor._probe("import nothing_of_this_name")
    assert not well
    assert said == "ModuleNotFoundError: No module named 'nothing_of_this_name'"
    assert doctor._probe("import os; os._exit(7)") == (False, "ended with status 7")


def test_an_absent_package_is_absent() -> None:
    assert doctor._package("nothing-of-this-name", "x").state == "absent"
    assert doctor._package("trio", "x").state == "ok"
