"""The race at a small size: the gate holds, lies corrupt, and the log tells as much as the lab."""

import json
from functools import cache
from pathlib import Path

import msgspec
import pytest
import trio
from rich.console import Console

from kvlease.errors import BadInput
from kvlease.services import cli
from kvlease.services.lab.explore_options import ExploreOptions
from kvlease.services.lab.race_data import RaceReport, RaceRow
from kvlease.services.lab.race_jobs import RACE_DEVICE, RaceSetup
from kvlease.services.lab.race_sessions import SHAPE, race_sessions, with_answers
from kvlease.services.lab.rerun import rerun
from kvlease.services.lab.spec import LinkSpec
from kvlease.services.parser import build_parser
from kvlease.services.progress import Reporter
from kvlease.services.race_command import RaceOutcome, race
from kvlease.services.race_options import RaceOptions
from kvlease.services.race_table import foot_lines, table_lines
from kvlease.services.replay.checker import check_log
from kvlease.services.sessions import unpack

SMALL = RaceSetup(
    num_sessions=14,
    device_pages=30,
    device=msgspec.structs.replace(RACE_DEVICE, load=LinkSpec(latency_s=50e-6, bytes_per_s=1.5e6)),
)
OPTIONS = RaceOptions(sessions=(2, 14), formats=("bf16",), gates=("full", "kv-only"))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("race")


@cache
def raced(logs: Path) -> RaceOutcome:
    options = RaceOptions(OPTIONS.sessions, OPTIONS.formats, OPTIONS.gates, log=str(logs / "new"))
    reporter = Reporter(Console(quiet=True))
    return trio.run(race, options, reporter, SMALL)


def row(report: RaceReport, *, host: bool, gate: str, sessions: int) -> RaceRow:
    (found,) = [
        r for r in report.rows if (r.host_cache, r.gate, r.sessions) == (host, gate, sessions)
    ]
    return found


@pytest.mark.slow
def test_the_gate_holds_and_pays_for_itself(logs: Path) -> None:
    """Nothing corrupt, early or hung where it is whole; restores beat computing again."""
    outcome = raced(logs)
    assert outcome.is_right, outcome.complaints
    assert len(outcome.report.rows) == 2 * 2 * 2
    for found in outcome.report.rows:
        assert found.turns == 14 * SHAPE.turns
        assert found.hung_sessions == found.failed_turns == 0
        assert found.ledger_ok
        if found.gate == "full" or not found.host_cache:
            assert found.corrupt_turns == found.early_reads == 0
    pressed = row(outcome.report, host=True, gate="full", sessions=14)
    assert pressed.hit_tokens.host > 0
    assert pressed.ratio is not None
    assert pressed.ratio < 1


def test_index_keys_granted_early_corrupt_more_with_more_sessions(logs: Path) -> None:
    """The incident: none when the device holds all that is asked for, many when it does not."""
    few = row(raced(logs).report, host=True, gate="kv-only", sessions=2)
    many = row(raced(logs).report, host=True, gate="kv-only", sessions=14)
    assert few.corrupt_turns == few.early_reads == 0
    assert many.early_reads > 0
    assert many.corrupt_turns


@pytest.mark.parametrize("name", ["host-bf16-full-14", "nohost-bf16-14"])
def test_replay_finds_a_log_of_the_whole_gate_clean(logs: Path, name: str) -> None:
    raced(logs)
    verdict = check_log(str(logs / "new" / f"{name}.kvlog"))
    assert verdict.verdict == "clean"
    assert verdict.early_reads == 0


def test_replay_counts_the_early_reads_that_the_lab_counted(logs: Path) -> None:
    """Two accounts that share no code: the device's, and the checker's from the log."""
    lab = row(raced(logs).report, host=True, gate="kv-only", sessions=14)
    verdict = check_log(str(logs / "new" / "host-bf16-kv-only-14.kvlog"))
    assert verdict.verdict == "violations"
    assert verdict.early_reads == lab.early_reads > 0
    assert {v.component for v in verdict.violations if v.rule == "R2"} == {"index_k"}


def test_a_log_run_again_gives_the_same_wrong_answers(logs: Path) -> None:
    raced(logs)
    again = rerun(str(logs / "new" / "host-bf16-kv-only-14.kvlog"))
    assert again.same_answers == again.answers == 14 * SHAPE.turns


def test_the_table_and_the_report(logs: Path) -> None:
    report = raced(logs).report
    lines = list(table_lines(report.rows))
    assert len(lines) == 1 + len(report.rows)
    assert lines[0].split()[:4] == ["cache", "keys", "gate", "at"]
    assert any("kv-only" in line and "%" in line for line in lines)
    foot = " ".join(foot_lines(report))
    assert "1.5 MB/s" in foot
    assert "30 device pages" in foot
    decoded = msgspec.json.decode(msgspec.json.encode(report), type=RaceReport)
    assert decoded == report
    (first, *_) = json.loads(msgspec.json.encode(report))["rows"]
    assert {"host_cache", "index_k_format", "gate", "corrupt_turns", "wall_s"} <= set(first)


def test_prompts_are_whole_and_no_answer_changes_them() -> None:
    sessions = race_sessions(2, 256, seed=0)
    assert race_sessions(2, 256, seed=0) == sessions
    answers = [[1, 2], [3], [4, 5, 6]]
    whole = with_answers(sessions[1], answers)
    assert all(turn.is_whole for turn in whole.turns)
    first, second, third = (unpack(turn.added) for turn in whole.turns)
    assert second[: len(first) + 2] == [*first, 1, 2]
    assert third[: len(second) + 1] == [*second, 3]


def test_rows_share_one_simulation_without_a_host_cache() -> None:
    jobs = RaceOptions().jobs()
    assert len(jobs) == 2 * 2 * 3 * 3
    assert len({job.name for job in jobs}) == 2 * 3 + 2 * 3 * 3


@pytest.mark.parametrize(
    ("words", "sessions"),
    [([], (8, 64, 80)), (["--sessions", "4,2", "--sessions", "4"], (4, 2))],
)
def test_sessions_may_be_repeated_or_divided_by_commas(
    words: list[str], sessions: tuple[int, ...]
) -> None:
    space = build_parser().parse_args(["race", *words])
    options: object = space.options(space)
    assert isinstance(options, RaceOptions)
    assert options.sessions == sessions


def test_explore_is_another_mode_of_the_command() -> None:
    space = build_parser().parse_args(["race", "--explore", "--schedules", "7"])
    options: object = space.options(space)
    assert isinstance(options, ExploreOptions)
    assert options.schedules == 7


@pytest.mark.parametrize(
    "words",
    [
        ["--sessions", "many"],
        ["--sessions", "0"],
        ["--gate", "half"],
        ["--choices", "none"],
        ["--log", __file__],
        ["--json", "/nowhere/at/all.json"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["race", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("kvlease: ")


def test_options_refuse_what_cannot_run() -> None:
    with pytest.raises(BadInput, match="--sessions has 0"):
        RaceOptions(sessions=(0,))
