"""`kvlease bench`: what its table says, what it refuses, and what it does without a device."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import trio

from kvlease.protocols.config import EngineConfig
from kvlease.runtime.streams import open_cpu_streams
from kvlease.services.bench import planning
from kvlease.services.bench.ceilings import Ceilings
from kvlease.services.bench.figure import Figure, PeerFigure, Spread, table_lines
from kvlease.services.bench.peers import deep_gemm, flash_mla
from kvlease.services.cli import main

no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def test_a_rate_turns_the_extremes_round() -> None:
    """The slowest sample is the lowest rate; a table that mixes them up flatters."""
    spread = Spread.of([2.0, 4.0, 8.0])
    assert spread == Spread(4.0, 2.0, 8.0, 3)
    assert spread.rate(16.0) == Spread(4.0, 2.0, 8.0, 3)
    assert spread.scaled(1e3).high == 8000.0


def test_the_floor_is_the_slower_of_bytes_and_sums() -> None:
    ceilings = Ceilings(4e12, 8e14, 5e10, 5e10)
    assert ceilings.floor_us(4e6) == pytest.approx(1.0)
    assert ceilings.floor_us(4e6, 16e8) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("unit", "target", "is_met"), [("us", 9.0, False), ("us", 10.0, True), ("GB/s", 11.0, False)]
)
def test_a_target_is_judged_by_its_unit(unit: str, target: float, is_met: bool) -> None:
    """Of times less is better, of rates more."""
    value = Spread(10.0, 9.0, 11.0, 3)
    figure = Figure("g", "n", "c", unit, value, target=target)  # type: ignore[arg-type]
    assert figure.is_met is is_met
    assert Figure("g", "n", "c", "us", value).is_met is None


def test_the_table_has_a_line_a_figure_with_peer_noise_and_target() -> None:
    peer = PeerFigure("FlashMLA", Spread(15.0, 14.0, 16.0, 3), 1.5)
    value = Spread(10.0, 9.0, 11.0, 3)
    figure = Figure("kernels", "decode", "B 8", "us", value, 0.25, (peer,), noise=1.01, target=9.0)
    headings, line = table_lines([figure])
    assert headings.split()[:3] == ["group", "what", "case"]
    assert "25%" in line
    assert "FlashMLA 15 (1.50x), A/A 1.01" in line
    assert line.endswith("9 MISSED")


@no_device
def test_without_a_device_every_group_is_skipped_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, whole = tmp_path / "lines.jsonl", tmp_path / "bench.json"
    assert main(["bench", "copy", "--lines", str(lines), "--json", str(whole)]) == 0
    skipped = {"group": "copy", "why": "there is no CUDA device here"}
    assert [json.loads(line) for line in lines.read_text().splitlines()] == [skipped]
    assert json.loads(whole.read_text())["skipped"] == [skipped]
    assert "copy: there is no CUDA device here" in capsys.readouterr().err


def test_loads_are_planned_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device too: every round finds the pages on the host again, and loads them."""
    monkeypatch.setattr(planning, "NUM_PAGES", 2)
    config = EngineConfig(dtype="bfloat16", device_pages=10, host_pages=2, max_sessions=2)
    cost_of_loads = partial(planning.cost_of_loads, config, open_cpu_streams, rounds=2)
    costs = trio.run(partial(cost_of_loads, scattered=True))
    assert len(costs) == 2
    assert all(cost.caller > 0 and cost.worker > 0 for cost in costs)


def test_an_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speed"]) == 2
    assert "speed is no group; give any of ceilings, gate" in capsys.readouterr().err


def test_peers_that_are_not_here_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert flash_mla() == "FlashMLA is not here (vllm's package carries it)"
    assert deep_gemm() == "DeepGEMM is not here (its own package or vllm's carries it)"
