"""The command line: dispatch, and the one place where errors become sentences and exit statuses.

0: all is well. 1: something was corrupt, hung, failed or leaked, or the log is incomplete. 2: the
input was wrong, and nothing is left behind. 130: interrupted; sessions were ended and the log was
closed, where there were any. Torch is loaded by the commands that serve, not by ``--help``.
"""

import os
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvlease.errors import BadInput, OperatingError, leaves
from kvlease.protocols.event_base import Level
from kvlease.services.bench_options import BenchOptions
from kvlease.services.lab.explore_options import ExploreOptions
from kvlease.services.options import (
    DoctorOptions,
    GenerateOptions,
    ReplayOptions,
    RunOptions,
)
from kvlease.services.outputs import check_apart, check_writable
from kvlease.services.parser import build_parser
from kvlease.services.race_options import RaceOptions
from kvlease.services.serve_options import ServeOptions

if TYPE_CHECKING:
    from kvlease.runtime.event_log import EventLog

OK, WRONG, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
T = TypeVar("T")


def _say(sentence: str) -> None:
    print(f"kvlease: {' '.join(sentence.split())}", file=sys.stderr)


def _judge(error: BaseException) -> int:
    """Say what an error means and return the exit status; a mistake in the code is raised."""
    inner = list(leaves(error))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in inner):
        _say("interrupted; sessions were ended and the log is closed")
        return INTERRUPTED
    if not all(isinstance(leaf, (BadInput, OperatingError)) for leaf in inner):
        raise error
    bad = next((leaf for leaf in inner if isinstance(leaf, BadInput)), None)
    _say(str(bad or inner[0]))
    return BAD_INPUT if bad is not None else WRONG


def _check_replay(options: ReplayOptions) -> None:
    """Refuse files that could not be written, or that would take the place of another."""
    written = {"--json": options.json, "--html": options.html, "--perfetto": options.perfetto}
    for path in written.values():
        check_writable(path)
    check_apart({"LOG": options.log, **written})


def _check(options: RunOptions | GenerateOptions) -> None:
    """Refuse what can be refused before anything is opened."""
    common = options.common
    check_writable(common.json)
    check_writable(common.log)
    check_apart({"--log": common.log, "--json": common.json})
    if common.model is not None and not Path(common.model).is_dir():
        raise BadInput(f"--model {common.model} is no folder; give one with a config.json")
    options.config()


@contextmanager
def _open_log(log_file: str | None, level: Level) -> "Generator[EventLog, None, None]":
    """Open the log for a command; wrong input leaves none behind, and an older log as it was."""
    from kvlease.runtime.event_log import open_event_log

    path = None if log_file is None else Path(log_file).resolve()
    older = _set_aside(path) if path is not None and path.is_file() else None
    try:
        with open_event_log(log_file, level) as log:
            yield log
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        is_refused = any(isinstance(leaf, BadInput) for leaf in leaves(error))
        if is_refused and path is not None:
            if older is not None:
                older.replace(path)
            elif path.is_file():  # and not a device, which is not ours to remove
                path.unlink()
        raise
    finally:
        if older is not None:
            older.unlink(missing_ok=True)


def _set_aside(path: Path) -> Path:
    """Rename an older log until it is clear that the new run begins; return its other name.

    That name has the process in it, so that it is nobody else's file.
    """
    older = path.with_name(f"{path.name}.{os.getpid()}.older")
    try:
        return path.replace(older)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error


def _settle_threads(model: str | None) -> None:
    """Keep the embedded model's arithmetic to one thread, before torch is loaded.

    Its products are too small to be worth sharing out, and threads that wait for each other in
    every one of them lose many times their work on a busy machine.
    """
    if model is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def _run(options: RunOptions) -> int:
    from rich.console import Console

    from kvlease.services.console import people_log
    from kvlease.services.progress import open_reporter
    from kvlease.services.report import print_report, write_json
    from kvlease.services.run_command import run

    common = options.common
    errors = Console(stderr=True)
    with _open_log(common.log, common.log_level) as log, open_reporter(errors) as reporter:
        if common.log is None and common.log_level == "normal":
            log.subscribe(people_log(reporter.say, colors=errors.is_terminal))
        outcome = _to_the_end(partial(run, options, log, reporter))
    for complaint in outcome.complaints:
        _say(complaint)
    print_report(outcome.report, Console())
    if common.json is not None:
        write_json(common.json, outcome.report)
    return OK if outcome.report.is_clean and log.complete else WRONG


def _generate(options: GenerateOptions) -> int:
    from rich.console import Console

    from kvlease.services.console import people_log
    from kvlease.services.generate_command import Generated, generate, lines_of
    from kvlease.services.report import write_json

    common = options.common
    errors = Console(stderr=True)
    with _open_log(common.log, common.log_level) as log:
        if common.log is None and common.log_level == "normal":
            say = partial(errors.print, markup=False, highlight=False, soft_wrap=True)
            log.subscribe(people_log(say, colors=errors.is_terminal))
        answers = _to_the_end(partial(generate, options, log))
    if common.json is not None:
        write_json(common.json, Generated(answers))
    else:
        for line in lines_of(options, answers):
            print(line)
    return OK if log.complete else WRONG


def _serve(options: ServeOptions) -> int:
    from kvlease.services.serving.plan import make_plan

    plan = make_plan(options.config())
    config = plan.config
    check_apart({"--log": config.log, "--json": options.json})
    if options.check:
        print("kvlease: the configuration is good")
        return OK
    _settle_threads(config.model)
    import trio
    from rich.console import Console

    from kvlease.services.console import people_log
    from kvlease.services.report import write_json
    from kvlease.services.serving.supervisor import serve

    errors = Console(stderr=True)

    def say(sentence: str) -> None:
        print(f"kvlease: {sentence}", flush=True)

    with _open_log(config.log, config.level) as log:
        if config.log is None and config.level == "normal":
            tell = partial(errors.print, markup=False, highlight=False, soft_wrap=True)
            log.subscribe(people_log(tell, colors=errors.is_terminal))
        outcome = trio.run(partial(serve, plan, log, say))
    if options.json is not None and outcome.statistics is not None:
        write_json(options.json, outcome.statistics)
    if outcome.cut or outcome.is_stopped:
        _say(f"{outcome.cut} answers were cut short")
    if outcome.is_interrupted:
        _say("interrupted; the log is closed")
        return INTERRUPTED
    return OK if outcome.is_whole and log.complete else WRONG


def _to_the_end(serve: Callable[[], Awaitable[T]]) -> T:
    """Run what has sessions; an interrupt reaches its first task, which then ends them all.

    Anywhere else it would kill an actor of the engine, and its requests would have no end.
    """
    import trio

    return trio.run(serve, restrict_keyboard_interrupt_to_checkpoints=True)


def _serving_nothing(command: Callable[[], int]) -> int:
    """Run a command without sessions that an interrupt would end, or a log that it would close."""
    try:
        return command()
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if not any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error)):
            raise
        _say("interrupted")
        return INTERRUPTED


def _replay(options: ReplayOptions) -> int:
    from rich.console import Console

    from kvlease.services.replay_command import replay

    return OK if replay(options, Console()) else WRONG


def _race(options: RaceOptions) -> int:
    import trio
    from rich.console import Console

    from kvlease.services.progress import open_reporter
    from kvlease.services.race_command import race
    from kvlease.services.race_table import foot_lines, table_lines
    from kvlease.services.report import write_json

    with open_reporter(Console(stderr=True)) as reporter:
        outcome = trio.run(partial(race, options, reporter))
    for complaint in outcome.complaints:
        _say(complaint)
    print("\n".join([*table_lines(outcome.report.rows), "", *foot_lines(outcome.report)]))
    if options.json is not None:
        write_json(options.json, outcome.report)
    return OK if outcome.is_right else WRONG


def _explore(options: ExploreOptions) -> int:
    from rich.console import Console

    from kvlease.services.lab.explore_command import print_explore, run_explore
    from kvlease.services.progress import open_reporter
    from kvlease.services.report import write_json

    with open_reporter(Console(stderr=True)) as reporter:
        told = ""

        def progress(name: str, count: int) -> None:
            nonlocal told
            if name != told:
                told = name
                reporter.begin(f"exploring {name}", options.schedules, "schedules")
            reporter.advance(count)

        report = run_explore(options, progress)
    print_explore(report, Console())
    if options.json is not None:
        write_json(options.json, report)
    return OK if report.is_clean else WRONG


def _bench(options: BenchOptions) -> int:
    from rich.console import Console

    from kvlease.services.bench.command import bench
    from kvlease.services.bench.figure import table_lines
    from kvlease.services.report import write_json

    errors = Console(stderr=True)
    report = bench(options, partial(errors.print, markup=False, highlight=False, soft_wrap=True))
    if report.figures:
        print("\n".join(table_lines(report.figures)))
    if options.json is not None:
        write_json(options.json, report)
    return OK


def _doctor(options: DoctorOptions) -> int:
    from rich.console import Console

    from kvlease.services.doctor import examine, print_diagnosis
    from kvlease.services.report import write_json

    diagnosis = examine()
    print_diagnosis(diagnosis, Console())
    if options.json is not None:
        write_json(options.json, diagnosis)
    return OK if diagnosis.can_serve else WRONG


def _dispatch(argv: Sequence[str] | None) -> int:
    space = build_parser().parse_args(argv)
    options: object = space.options(space)
    match options:
        case RunOptions():
            _check(options)
            _settle_threads(options.common.model)
            return _run(options)
        case GenerateOptions():
            _check(options)
            _settle_threads(options.common.model)
            return _generate(options)
        case ServeOptions():
            check_writable(options.json)
            return _serve(options)
        case ReplayOptions():
            _check_replay(options)
            if options.rerun:
                _settle_threads(options.model)
            return _serving_nothing(partial(_replay, options))
        case RaceOptions():
            check_writable(options.json)
            _settle_threads(None)
            return _race(options)
        case ExploreOptions():
            check_writable(options.json)
            check_writable(options.log)
            check_apart({"--json": options.json, "--log": options.log})
            _settle_threads(None)
            return _explore(options)
        case BenchOptions():
            check_writable(options.json)
            check_writable(options.lines)
            check_apart({"--json": options.json, "--lines": options.lines})
            return _serving_nothing(partial(_bench, options))
        case DoctorOptions():
            check_writable(options.json)
            return _serving_nothing(partial(_doctor, options))
        case _:
            raise AssertionError(f"no command takes {options!r}")


def _open_standard_streams() -> None:
    """Put the null device where a stream was closed before us, which Python shows as None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the end


def _drop_output() -> None:
    """Keep the interpreter from complaining at its exit about output that nobody takes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status; arguments default to the process's own."""
    _open_standard_streams()
    try:
        status = _dispatch(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()  # its reader has gone
        return WRONG
    except OSError as error:
        if error.filename is not None:
            raise
        # Opening a file names it: this is a write to what was open all the time, our output.
        _drop_output()
        _say(f"cannot write the output: {error.strerror or error}")
        return WRONG
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        return _judge(error)
    else:
        return status
