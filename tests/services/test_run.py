"""`kvlease run` and `generate` against the real engine, small: right, verified, interruptible."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import trio
from rich.console import Console

from kvlease.protocols.config import EngineConfig
from kvlease.protocols.events import AnyEvent, LogClose, LogOpen, RequestFinished, RequestSubmitted
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.event_log import EventLog
from kvlease.services import cli
from kvlease.services.options import RunOptions
from kvlease.services.parser import build_parser
from kvlease.services.progress import Reporter
from kvlease.services.run_command import EngineOpener, RunOutcome, run
from kvlease.units import LayerId
from tests.tidy.rules import ROOT

PRESSED = "--sessions 5 --turns 2 --device-pages 24"
"""The longest session needs 20 pages of the 24, so every session evicts the others."""


def events_of(path: Path) -> list[AnyEvent]:
    return [msgspec.json.decode(line, type=AnyEvent) for line in path.read_bytes().splitlines()]


def test_a_verified_run_restores_and_ends_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, log = tmp_path / "report.json", tmp_path / "log"
    argv = f"run --verify {PRESSED} --json {report} --log {log}".split()
    assert cli.main(argv) == 0, capsys.readouterr().err
    found = json.loads(report.read_text())
    assert (found["sessions"], found["turns"], found["corrupt_turns"]) == (5, 10, 0)
    assert found["hit_tokens"]["host"] > 0
    assert found["restored_bytes"] > 0
    buckets = sum(found["hit_tokens"].values()) + found["computed_tokens"]
    assert buckets == found["prompt_tokens"]
    assert found["ledger_ok"] is True
    assert "corrupt turns: 0" in capsys.readouterr().out
    events = events_of(log)
    assert isinstance(events[0], LogOpen)
    assert isinstance(events[-1], LogClose)
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    finished = {e.request for e in events if isinstance(e, RequestFinished)}
    assert finished == {e.request for e in events if isinstance(e, RequestSubmitted)}
    assert len(finished) == 10


def test_an_audited_run_says_what_it_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert cli.main(f"run {PRESSED} --audit-rate 1 --json {report}".split()) == 0
    found = json.loads(report.read_text())
    assert found["audited_pages"] > 10
    assert found["audit_mismatches"] == 0
    said = f"pages audited, found changed: {found['audited_pages']}, 0"
    assert said in capsys.readouterr().out


class FlippingCopier:
    """Copies honestly, and flips the sign of one restored page behind the runtime's back."""

    engine: Engine | None = None
    flipped = False

    def copy(self, order: CopyOrder) -> int:
        if order.kind != "load" or order.component != "latent" or self.flipped:
            return order.run()
        assert self.engine is not None
        rows = self.engine._core.pool.memory.spans.rows(LayerId(order.layer), "latent")
        before = rows.clone()
        nbytes = order.run()
        # Bits, because poison is not equal to itself.
        moved = (rows.view(torch.int32) != before.view(torch.int32)).flatten(1).any(dim=1)
        page = int(moved.nonzero()[0])
        rows[page].neg_()
        self.flipped = True
        return nbytes

    @asynccontextmanager
    async def open(
        self, model: str | None, config: EngineConfig, *, log: EventLog | None
    ) -> AsyncIterator[Engine]:
        async with open_engine(model, config, log=log, ports=EnginePorts(self)) as engine:
            self.engine = engine
            yield engine


async def test_a_flipped_page_is_found_and_the_turn_is_named() -> None:
    """The verification is worth nothing if it passes a run whose pages were spoiled."""
    copier = FlippingCopier()
    outcome = await outcome_of(f"run --verify {PRESSED}", copier.open)
    assert copier.flipped
    assert outcome.report.corrupt_turns
    assert not outcome.report.is_clean
    named = [c for c in outcome.complaints if c.startswith("corrupt: session ")]
    assert len(named) == outcome.report.corrupt_turns
    assert all(", turn " in c and "cold run" in c for c in named)


async def test_an_audited_run_gives_right_answers_on_spoiled_pages() -> None:
    """The same spoiled run as above: the page is found, and every turn is the cold one."""
    copier = FlippingCopier()
    outcome = await outcome_of(f"run --verify --audit-rate 1 {PRESSED}", copier.open)
    assert copier.flipped
    assert outcome.report.corrupt_turns == 0
    assert outcome.report.is_clean
    assert outcome.report.audit_mismatches >= 1


async def outcome_of(line: str, opener: EngineOpener = open_engine) -> RunOutcome:
    space = build_parser().parse_args(line.split())
    options = space.options(space)
    assert isinstance(options, RunOptions)
    log = EventLog(level="off")
    reporter = Reporter(Console(file=io.StringIO()))
    return await run(options, log, reporter, opener)


async def test_a_trace_is_served_without_arithmetic(tmp_path: Path) -> None:
    lines = [
        {"timestamp": n, "input_length": 1100, "output_length": 9, "hash_ids": [0, n, 7]}
        for n in (1, 2, 1)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = await outcome_of(
        f"run --trace {trace} --compute none --sessions 1 --page-tokens 512 --tail-every 1"
    )
    report = outcome.report
    assert (report.sessions, report.turns, report.output_tokens) == (3, 3, 27)
    assert report.hit_tokens.total == 512 + 1024
    assert report.corrupt_turns is None
    assert report.is_clean


def test_too_long_a_line_is_named_before_anything_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, log = tmp_path / "trace.jsonl", tmp_path / "log"
    trace.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n'
    )
    argv = f"run --trace {trace} --compute none --device-pages 2 --log {log}".split()
    assert cli.main(argv) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith(f"kvlease: {trace}:1: 602 tokens are over the 512 that device_pages 2")
    assert not log.exists()


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["generate", "--text", ""], "--text: prompt 1: the prompt is empty"),
        (["generate", "--text", "a", "--page-tokens", "48"], "page_tokens 48 is not a multiple of"),
        (["generate", "--text", "a", "--device-pages", "1", "--max-tokens", "64"], "device_pages"),
        (["run", "--device-pages", "9"], "session 1 reaches"),
        (["run", "--audit-rate", "2"], "audit_rate is 2.0; give a share from 0 to 1"),
        (["generate", "--text", "a", "--device", "cuda"], "cuda"),
    ],
)
def test_what_the_engine_refuses_is_bad_input(
    argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_prompts_of_a_file_are_answered_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, answers = tmp_path / "prompts.json", tmp_path / "answers.json"
    prompts.write_text(json.dumps([[n] * n for n in range(1, 6)]))
    common = ["generate", "--tokens-file", str(prompts), "--max-tokens", "4", "--ignore-eos"]
    assert cli.main([*common, "--json", str(answers)]) == 0
    outputs = json.loads(answers.read_text())["outputs"]
    assert [len(output) for output in outputs] == [4] * 5
    assert cli.main([*common, "--sessions", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in printed] == outputs


def test_a_token_outside_the_vocabulary_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text("[[1, 2], [3, 264]]")
    assert cli.main(["generate", "--tokens-file", str(prompts)]) == 2
    err = capsys.readouterr().err
    assert f"{prompts}: prompt 2: token 264 at position 1 is outside the vocabulary" in err


def test_an_interrupt_ends_the_sessions_and_completes_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = f"run --sessions 8 --turns 50 --device-pages 400 --log {log}"
    with subprocess.Popen(
        [sys.executable, "-m", "kvlease", *line.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            assert "serving" in process.stderr.readline()
            while not log.exists() or log.read_bytes().count(b"request.finished") < 4:
                assert process.poll() is None, process.stderr.read()
                trio.run(trio.sleep, 0.1)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "kvlease: interrupted; sessions were ended and the log is closed"
    assert "Traceback" not in err
    events = events_of(log)
    assert isinstance(events[-1], LogClose)
    submitted = {e.request for e in events if isinstance(e, RequestSubmitted)}
    ended = {e.request for e in events if isinstance(e, RequestFinished)}
    assert ended == submitted
