"""The command line's grammar: subcommands, their options, and help that teaches.

This module starts nothing and loads no torch.
"""

import argparse
from collections.abc import Callable
from typing import NoReturn

from attrs import frozen

from kvlease.errors import BadInput
from kvlease.services.bench_options import BENCH, BENCH_EXAMPLES, add_bench, bench_options
from kvlease.services.options import (
    DoctorOptions,
    GenerateOptions,
    ReplayOptions,
    RunOptions,
    add_common,
    add_json,
    common_of,
)
from kvlease.services.race_options import RACE, RACE_EXAMPLES, add_race, race_options
from kvlease.services.serve_options import SERVE, SERVE_EXAMPLES, add_serve, serve_options
from kvlease.version import __version__

_ABOUT = """\
Serve sparse-attention language models from a hierarchical KV cache whose pages
cannot be read before they have arrived, nor reused while somebody reads them.
"""
_FIRST_STEPS = """\
first steps:
  kvlease run --verify --sessions 16      serve 16 agent sessions, check every answer
  kvlease generate --text "Hello"         one answer from the embedded model
  kvlease serve --listen unix://k.sock    serve other programs over RPC
  kvlease replay run.kvlog                judge the event log of a run (--log FILE)
  kvlease race                            see the bug that this ends, and that it is ended
  kvlease bench                           how fast it is here, beside ceilings and peers
  kvlease doctor                          what this machine can do

`kvlease COMMAND --help` lists a command's options. Exit status: 0 all is well,
1 something was corrupt, hung or leaked, 2 the input was wrong, 130 interrupted.
"""
_RUN = """\
Serve a workload and print a report. The built-in workload is --sessions tool-calling
agents that share a long system prompt and work turn by turn on tasks of their own;
--trace replays the requests of a file instead, --sessions at a time.
"""
_RUN_EXAMPLES = """\
examples:
  kvlease run --verify --json report.json
      check every answer, tokens and logits, against a cold run of it alone
  kvlease run --device-pages 128 --host-pages 4096 --log run.kvlog
      press the device tier harder, and keep the full event log
  kvlease run --trace trace.jsonl --compute none --page-tokens 512 --device-pages 10000
      what a cache of that size would hit on a whole trace, without a model's work
"""
_GENERATE_EXAMPLES = """\
examples:
  kvlease generate --text "def main():" --max-tokens 32
  kvlease generate --model DIR --tokens-file prompts.json --ignore-eos --json answers.json
      prompts.json: [[1, 2, 3], [4, 5]]   answers.json: {"outputs": [[...], [...]]}
"""
_REPLAY = """\
Judge an event log after the fact: rebuild pages, leases, transfers and requests from its
lines alone, and decide the rules R1 to R12 (docs/rules.md, docs/log-format.md). Prints the
verdict (clean, violations, or cannot tell), each violation with the lines that show it,
requests that were stuck and who owned the deadline, where compute stood still, and the
slowest transfers. Exit status: 0 clean, 1 anything else, 2 the log cannot be read.
"""
_REPLAY_EXAMPLES = """\
examples:
  kvlease run --sessions 16 --log run.kvlog && kvlease replay run.kvlog
  kvlease replay run.kvlog.gz --json verdict.json
  kvlease replay run.kvlog --html run.html    what happened when, in a browser
  zcat old.kvlog.gz | kvlease replay -
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose refusals are errors of ours: one sentence, exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise BadInput(f"{message} (see {self.prog} --help)")


def _run_options(space: argparse.Namespace) -> RunOptions:
    return RunOptions(
        common=common_of(space),
        trace=space.trace,
        limit=space.limit,
        scale=space.scale,
        turns=space.turns,
        compute=space.compute,
        verify=space.verify,
    )


def _generate_options(space: argparse.Namespace) -> GenerateOptions:
    return GenerateOptions(
        common=common_of(space),
        text=space.text,
        tokens_file=space.tokens_file,
        max_tokens=space.max_tokens,
        min_tokens=space.min_tokens,
        ignore_eos=space.ignore_eos,
    )


def _replay_options(space: argparse.Namespace) -> ReplayOptions:
    return ReplayOptions(
        log=space.LOG,
        json=space.json,
        html=space.html,
        perfetto=space.perfetto,
        rerun=space.rerun,
        model=space.model,
    )


def _doctor_options(space: argparse.Namespace) -> DoctorOptions:
    return DoctorOptions(json=space.json)


def _add_run(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--verify",
        action="store_true",
        help="compare every answer with a cold run of the same request alone (implies --exact)",
    )
    work.add_argument(
        "--turns",
        type=int,
        metavar="N",
        default=3,
        help="requests of each built-in session (default: %(default)s)",
    )
    work.add_argument("--trace", metavar="FILE", help="a trace in the Mooncake JSONL format")
    work.add_argument("--limit", type=int, metavar="N", help="only the first N requests of it")
    work.add_argument(
        "--scale", type=int, metavar="K", default=1, help="divide its lengths by K (default: 1)"
    )
    work.add_argument(
        "--compute",
        choices=["model", "none"],
        default="model",
        help="none: everything but the model's arithmetic, for cache studies",
    )
    add_common(parser, sessions=64)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_argument_group("prompt (one of them)").add_mutually_exclusive_group(
        required=True
    )
    prompt.add_argument("--text", metavar="STR", help="one prompt as text")
    prompt.add_argument("--tokens-file", metavar="FILE", help="prompts: a JSON list of int lists")
    answer = parser.add_argument_group("answer (greedy)")
    answer.add_argument("--max-tokens", type=int, metavar="N", default=64)
    answer.add_argument(
        "--min-tokens", type=int, metavar="N", default=0, help="no EOS before so many"
    )
    answer.add_argument("--ignore-eos", action="store_true", help="go on through EOS")
    add_common(parser, sessions=16)


def _add_replay(replay: argparse.ArgumentParser) -> None:
    replay.add_argument("LOG", help="the event log, plain or gzip; - for standard input")
    add_json(replay)
    replay.add_argument(
        "--html",
        metavar="FILE",
        help="write one page with the findings and a timeline to look into; it needs no network",
    )
    replay.add_argument(
        "--perfetto", metavar="FILE", help="write a trace that ui.perfetto.dev opens"
    )
    replay.add_argument(
        "--rerun",
        action="store_true",
        help="serve the recorded requests again on a simulated device, at the recorded times, and "
        "compare events and answers (a log with prompts: --log-prompts, or one of `race`)",
    )
    replay.add_argument(
        "--model", metavar="DIR", help="the checkpoint that served them (default: the embedded one)"
    )


@frozen
class _Command:
    """One subcommand: what its help says, the flags it takes, and how they become options."""

    name: str
    help: str
    about: str
    add: Callable[[argparse.ArgumentParser], None]
    options: Callable[[argparse.Namespace], object]
    examples: str | None = None


_COMMANDS = (
    _Command("run", "serve a workload, with a report", _RUN, _add_run, _run_options, _RUN_EXAMPLES),
    _Command(
        "generate",
        "answer one prompt, or a file of them",
        "Answer prompts, greedily, and print the answers in input order.",
        _add_generate,
        _generate_options,
        _GENERATE_EXAMPLES,
    ),
    _Command(
        "serve",
        "serve a model to other programs, over RPC",
        SERVE,
        add_serve,
        serve_options,
        SERVE_EXAMPLES,
    ),
    _Command(
        "replay",
        "judge an event log after the fact",
        _REPLAY,
        _add_replay,
        _replay_options,
        _REPLAY_EXAMPLES,
    ),
    _Command(
        "race",
        "show what the gate is for: with it, and with completions that lie",
        RACE,
        add_race,
        race_options,
        RACE_EXAMPLES,
    ),
    _Command(
        "bench",
        "measure the product on this machine, beside its ceilings and its peers",
        BENCH,
        add_bench,
        bench_options,
        BENCH_EXAMPLES,
    ),
    _Command(
        "doctor",
        "what this machine can do, and which optional parts are installed",
        "Tell what this machine can do, and which optional parts are installed.",
        add_json,
        _doctor_options,
    ),
)


def build_parser() -> argparse.ArgumentParser:
    """Build the whole grammar; a parsed namespace holds ``command`` and the command's options."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="kvlease", description=_ABOUT, epilog=_FIRST_STEPS, formatter_class=plain)
    parser.add_argument("--version", action="version", version=f"kvlease {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        own = commands.add_parser(
            command.name,
            help=command.help,
            description=command.about,
            epilog=command.examples,
            formatter_class=plain,
            allow_abbrev=False,
        )
        command.add(own)
        own.set_defaults(options=command.options)
    return parser
