"""The command line's grammar and its refusals: one sentence on stderr, status 2, nothing left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlease import __main__ as entry
from kvlease.errors import BadInput, LedgerImbalance, RequestFailed
from kvlease.services import cli
from kvlease.services.options import RunOptions
from kvlease.services.parser import build_parser
from kvlease.version import __version__
from tests.tidy.rules import ROOT


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command line that must be refused; return its one sentence."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvlease: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.strip()


def options_of(line: str) -> RunOptions:
    space = build_parser().parse_args(line.split())
    options = space.options(space)
    assert isinstance(options, RunOptions)
    return options


def test_every_option_reaches_the_configuration() -> None:
    options = options_of(
        "run --dtype float64 --kv-format fp8 --index-k-format bf16 --page-tokens 128 "
        "--device-pages 33 --host-pages 44 --tail-every 2 --write-policy back --eviction s3fifo "
        "--sessions 5 --seed 9 --no-exact --compute none"
    )
    config = options.config()
    assert (config.dtype, config.kv_format, config.index_k_format) == ("float64", "fp8", "bf16")
    assert (config.page_tokens, config.device_pages, config.host_pages) == (128, 33, 44)
    assert (config.tail_every, config.write_policy, config.eviction) == (2, "back", "s3fifo")
    assert (config.max_sessions, config.seed, config.exact) == (5, 9, False)
    assert config.compute == "none"


@pytest.mark.parametrize(
    ("line", "exact"),
    [
        ("run", True),
        ("run --no-exact", False),
        ("run --device cuda", False),
        ("run --device cuda --exact", True),
        ("run --device cuda --verify", True),
    ],
)
def test_exact_is_the_default_on_the_cpu_and_follows_verify(line: str, exact: bool) -> None:
    options = options_of(line)
    assert options.config().exact is exact


@pytest.mark.parametrize(
    ("line", "device", "host"),
    [
        ("run", 192, 2048),
        ("run --device-pages 70 --host-pages 0", 70, 0),
        ("run --compute none", 16384, 65536),
        ("run --compute none --device-pages 70 --host-pages 0", 70, 0),
        ("run --trace x", 512, 2048),
        ("run --model x", 512, 2048),
    ],
)
def test_the_tiers_press_the_built_in_workload_and_fit_whole_traces(
    line: str, device: int, host: int
) -> None:
    config = options_of(line).config()
    assert (config.device_pages, config.host_pages) == (device, host)


@pytest.mark.parametrize(
    ("line", "level"),
    [("run", "off"), ("run --log x", "audit"), ("run --log-level normal", "normal")],
)
def test_a_log_file_is_an_audit_log_by_default(line: str, level: str) -> None:
    assert options_of(line).common.log_level == level


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("walk", "invalid choice: 'walk'"),
        ("run --sessions many", "--sessions: invalid int value: 'many'"),
        ("run --sess 4", "unrecognized arguments: --sess 4"),
        ("run --sessions 0", "sessions is 0"),
        ("run --sessions -4", "sessions is -4"),
        ("run --device-pages -1", "device_pages is -1"),
        ("run --host-pages -1", "host_pages is -1"),
        ("run --host-pages 99999999999", "host_pages is 99999999999; give 2147483647 or fewer"),
        ("run --decode-ahead 0", "decode_ahead is 0; give a number of 1 or more"),
        ("run --decode-ahead 99999999999", "give 2147483647 or fewer"),
        ("run --device-pages 2147483647 --page-tokens 32768", "cache on cpu: give fewer"),
        ("run --page-tokens 0", "page_tokens is 0"),
        ("run --tail-every 0", "tail_every is 0"),
        ("run --turns 0", "turns is 0"),
        ("run --dtype int8", "--dtype: invalid choice: 'int8'"),
        ("run --model nowhere", "--model nowhere is no folder"),
        ("run --trace nowhere", "cannot read the trace nowhere: No such file"),
        ("run --limit 4", "--limit and --scale are about a trace"),
        ("run --trace x --verify --compute none", "--verify compares answers"),
        ("run --verify --no-exact", "--verify needs the exact mode"),
        ("run --log-level audit", "say which with --log FILE"),
        ("run --json nowhere/report.json", "cannot write nowhere/report.json: the folder"),
        ("run --log nowhere/log", "cannot write nowhere/log: the folder"),
        ("run --log x --json x", "--log and --json both name x"),
        ("generate", "one of the arguments --text --tokens-file is required"),
        ("generate --text a --tokens-file b", "not allowed with argument"),
        ("generate --tokens-file nowhere", "cannot read nowhere: No such file"),
        ("generate --text a --max-tokens 0", "max_tokens is 0"),
        ("generate --text a --min-tokens 65", "min_tokens is 65"),
        ("doctor --json .", "cannot write .: it is a folder"),
    ],
)
def test_bad_input_is_one_sentence(
    line: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert why in refused(line.split(), capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is no JSON list of lists of token ids"),
        ('{"a": 1}', "Expected `array`, got `object`"),
        ('[[1, "x"]]', "Expected `int`, got `str` - at `$[0][1]`"),
        ("[[1], [2.5]]", "Expected `int`, got `float` - at `$[1][0]`"),
        ("[]", "holds no prompt"),
        ("[[1], [99999999999]]", "prompt 2: 99999999999 is no token id"),
    ],
)
def test_a_bad_tokens_file_is_one_sentence(
    content: str, why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(content)
    log = tmp_path / "log"
    sentence = refused(["generate", "--tokens-file", str(path), "--log", str(log)], capsys)
    assert why in sentence
    assert str(path) in sentence
    assert not log.exists()


def test_a_bad_trace_line_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, log, report = (tmp_path / name for name in ("trace.jsonl", "log", "report.json"))
    path.write_text("[]\n")
    argv = ["run", "--trace", str(path), "--log", str(log), "--json", str(report)]
    assert f"{path}:1: Expected `object`" in refused(argv, capsys)
    assert not log.exists()
    assert not report.exists()


def test_an_interrupt_while_the_command_line_loads_is_one_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str, *_args: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("builtins.__import__", interrupted)
        status = entry.main()
    assert status == 130
    assert capsys.readouterr().err == "kvlease: interrupted before anything was begun\n"


def test_help_teaches_and_version_tells(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (
        (["--help"], ("first steps:", "kvlease doctor", "130 interrupted")),
        (["run", "--help"], ("examples:", "--compute none", "Mooncake")),
        (["generate", "--help"], ("prompts.json", "--ignore-eos")),
        (["--version"], (f"kvlease {__version__}",)),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(argv)
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (BadInput("no  such\nthing"), 2, "kvlease: no such thing\n"),
        (BaseExceptionGroup("", [ExceptionGroup("", [BadInput("inner")])]), 2, "kvlease: inner\n"),
        (RequestFailed("the worker died"), 1, "kvlease: the worker died\n"),
        (
            BaseExceptionGroup("", [BadInput("x"), KeyboardInterrupt()]),
            130,
            "kvlease: interrupted; sessions were ended and the log is closed\n",
        ),
    ],
)
def test_errors_become_statuses(
    error: BaseException,
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(argv: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main([]) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("line", ["replay run.kvlog", "doctor"])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), BaseExceptionGroup("", [KeyboardInterrupt()])], ids=["one", "in"]
)
def test_an_interrupt_of_what_serves_nothing_claims_nothing(
    line: str,
    error: BaseException,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(options: object) -> int:
        raise error

    monkeypatch.setattr(cli, f"_{line.split()[0]}", fail)
    assert cli.main(line.split()) == 130
    assert capsys.readouterr().err == "kvlease: interrupted\n"


def test_a_false_invariant_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: object) -> int:
        raise LedgerImbalance("one page counted twice")

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(LedgerImbalance):
        cli.main([])


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "kvlease", "--version"],
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
            timeout=60,
        )
    assert b"Traceback" not in done.stderr


def test_wrong_input_leaves_an_older_log_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped flag must not cost the log of the incident that is being looked into."""
    log = tmp_path / "incident.jsonl"
    log.write_text("the only copy\n")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("not json\n")
    line = ["run", "--trace", str(trace), "--compute", "none", "--log", str(log)]
    assert "trace.jsonl:1:" in refused(line, capsys)
    assert log.read_text() == "the only copy\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["incident.jsonl", "trace.jsonl"]
