"""`kvlease replay`: judge a log and tell what it shows."""

from pathlib import Path
from typing import cast

import msgspec
from rich.console import Console

from kvlease.services.options import ReplayOptions
from kvlease.services.replay.checker import check_log
from kvlease.services.replay.page_files import (
    is_read_again,
    need_a_file,
    save_page,
    save_trace,
)
from kvlease.services.replay.reader import texts_of
from kvlease.services.replay.report import lines_shown, print_rerun, print_verdict
from kvlease.services.replay.verdict import RerunReport
from kvlease.services.report import write_json


def replay(options: ReplayOptions, console: Console) -> bool:
    """Judge the log, print the verdict and write what was asked for; returns whether it is clean.

    Raises:
        BadInput: the log cannot be read, is none, or is of another version; or a picture is asked
            of standard input, which cannot be read twice.
    """
    for flag, target in (("--html", options.html), ("--perfetto", options.perfetto)):
        if target is not None:
            need_a_file(options.log, flag)
    if options.rerun:
        need_a_file(options.log, "--rerun")
    verdict = check_log(options.log)
    again = _rerun(options) if options.rerun else None
    # Files come first: whoever reads what is printed may stop reading.
    if options.json is not None:
        found = cast("dict[str, object]", msgspec.to_builtins(verdict))
        write_json(options.json, found if again is None else {**found, "rerun": again})
    if options.html is not None:
        save_page(options.log, options.html, verdict)
    if options.perfetto is not None:
        save_trace(options.log, options.perfetto, verdict)
    shown = lines_shown(verdict) if is_read_again(options.log) else set[int]()
    print_verdict(verdict, texts_of(options.log, shown), console)
    if again is not None:
        print_rerun(again, console)
    return verdict.verdict == "clean" and (again is None or not again.different)


def _rerun(options: ReplayOptions) -> RerunReport:
    from kvlease.services.lab.rerun import rerun  # loads torch, which judging a log does not need

    return rerun(options.log, None if options.model is None else Path(options.model))
