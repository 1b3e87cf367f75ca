"""A log is run again: the same events and answers, corrupt ones too, or the first difference."""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import trio
from attrs import evolve

from kvlease.errors import BadInput
from kvlease.protocols.config import SamplingParams
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.event_log import open_event_log
from kvlease.services.cli import main
from kvlease.services.lab.faults import CopyRule, Fail, FaultPlan, Which, gate_plan
from kvlease.services.lab.rerun import rerun
from kvlease.services.lab.spec import DeviceSpec, LinkSpec
from kvlease.services.replay.verdict import RerunReport
from tests.lab.rig import Lab
from tests.runtime.toy import answer, prompt_of, toy_config, toy_model

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)
CONFIG = toy_config(device_pages=40, host_pages=400, log_prompts=True, poison=False)
SLOW = DeviceSpec(load=LinkSpec(latency_s=2e-3, bytes_per_s=1e6), step_s=1e-3)
PROMPTS = [prompt_of(seed, 60 + 7 * (seed % 9), shared=20) for seed in range(10)]


async def conversation(engine: Engine) -> None:
    """Ask every prompt and then its continuation, a few callers at a time, one of whom leaves."""

    async def caller(first: int) -> None:
        for number in range(first, len(PROMPTS), 4):
            await trio.sleep_until(round((0.1 * number + 1e-3) * 1e9) / 1e9)
            await answer(engine, PROMPTS[number], PARAMS)
        for number in range(first, len(PROMPTS), 4):
            await trio.sleep_until(round((10 + 0.02 * number) * 1e9) / 1e9)
            await answer(engine, [*PROMPTS[number], *prompt_of(3, 21)], PARAMS)

    async with trio.open_nursery() as nursery:
        for first in range(4):
            nursery.start_soon(caller, first)
        await trio.sleep_until(10.011)
        with trio.move_on_after(0.005):
            await answer(engine, prompt_of(99, 90), SamplingParams(max_tokens=60, ignore_eos=True))


@cache
def held_with(faults: FaultPlan) -> Lab:
    """Run the conversation in the lab; once, as every run with the same faults is the same."""
    lab = Lab(SLOW, CONFIG, faults)
    lab.run(conversation)
    return lab


def recorded(path: Path, faults: FaultPlan) -> Lab:
    """Return the run with these faults, its log in a file."""
    lab = held_with(faults)
    path.write_bytes(lab.file.getvalue())
    return lab


def tampered(path: Path, change: Callable[[dict[str, object]], None], event: str) -> int:
    """Change the last line of one kind; return its number."""
    lines = path.read_text().splitlines()
    number = max(n for n, line in enumerate(lines) if f'"event":"{event}"' in line)
    fields = json.loads(lines[number])
    change(fields)
    lines[number] = json.dumps(fields, separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")
    return number + 1


def assert_same(report: RerunReport) -> None:
    assert report.first_difference is None
    assert report.different == []
    assert report.same_answers == report.answers == 2 * len(PROMPTS) + 1


@pytest.mark.parametrize(
    "faults",
    [
        FaultPlan(),
        FaultPlan(seed=5, rules=(CopyRule(Fail(), Which(direction="load", probability=0.2)),)),
    ],
    ids=["no faults", "failing loads"],
)
def test_a_run_of_the_lab_is_repeated_event_for_event(tmp_path: Path, faults: FaultPlan) -> None:
    path = tmp_path / "run.jsonl"
    lab = recorded(path, faults)
    assert lab.statistics is not None
    assert lab.statistics.counters.loads > 3
    report = rerun(str(path), toy_model())
    assert report.is_exact
    assert_same(report)


def test_corrupt_answers_come_out_corrupt_again(tmp_path: Path) -> None:
    """With index keys granted early some answers are garbled; the same ones, bit for bit."""
    whole, gated = tmp_path / "full.jsonl", tmp_path / "kv-only.jsonl"
    recorded(whole, gate_plan("full"))
    lab = recorded(gated, gate_plan("kv-only"))
    assert lab.device is not None
    assert lab.device.truth.early

    def answers(path: Path) -> dict[int, str]:
        events = map(json.loads, path.read_text().splitlines())
        return {e["request"]: e["answer"] for e in events if e["event"] == "request.finished"}

    right, got = answers(whole), answers(gated)
    assert any(right[request] != answer for request, answer in got.items() if request in right)
    report = rerun(str(gated), toy_model())
    assert report.is_exact
    assert_same(report)


def test_a_run_of_a_real_machine_gives_the_same_answers(tmp_path: Path) -> None:
    path = tmp_path / "real.jsonl"

    async def real() -> None:
        with open_event_log(path) as log:
            async with open_engine(toy_model(), CONFIG, log=log) as engine:
                async with trio.open_nursery() as nursery:
                    for prompt in PROMPTS:
                        nursery.start_soon(answer, engine, prompt, PARAMS)
                for prompt in PROMPTS:
                    await answer(engine, [*prompt, 1, 2, 3], PARAMS)

    trio.run(real)
    report = rerun(str(path), toy_model())
    assert not report.is_exact
    assert report.same_answers == report.answers == 2 * len(PROMPTS)


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, FaultPlan())
    line = tampered(path, lambda fields: fields.update(answer="0000"), "request.finished")
    report = rerun(str(path), toy_model())
    assert len(report.different) == 1
    assert report.first_difference is not None
    assert report.first_difference.line == line
    assert '"answer":"0000"' in report.first_difference.recorded
    assert "request.finished" in report.first_difference.rerun


def test_a_log_that_cannot_be_run_again_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    silent = Lab(SLOW, evolve(CONFIG, log_prompts=False))
    silent.run(partial(answer, prompt=PROMPTS[0], params=PARAMS))
    path.write_bytes(silent.file.getvalue())
    with pytest.raises(BadInput, match="prompts"):
        rerun(str(path), toy_model())
    recorded(path, FaultPlan())
    with pytest.raises(BadInput, match="other weights"):
        rerun(str(path), toy_model(seed=1))
    with pytest.raises(BadInput, match="cannot read"):
        rerun(str(tmp_path / "none.jsonl"), toy_model())


def test_the_command_reruns_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, found = tmp_path / "run.jsonl", tmp_path / "found.json"
    asked = ["run", "--sessions", "3", "--turns", "1", "--log", str(log), "--log-prompts"]
    assert main(asked) == 0
    assert main(["replay", str(log), "--rerun", "--json", str(found)]) == 0
    report = json.loads(found.read_text())
    assert report["verdict"] == "clean"
    assert report["rerun"]["same_answers"] == report["rerun"]["answers"] == 3
    assert "3 of 3 answers are the same bit for bit" in capsys.readouterr().out
    assert main(["replay", "-", "--rerun"]) == 2
