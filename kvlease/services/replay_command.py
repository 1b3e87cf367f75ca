"""`kvlease replay`: judge a log and tell what it shows."""

from rich.console import Console

from kvlease.services.options import ReplayOptions
from kvlease.services.replay.checker import check_log
from kvlease.services.replay.page_files import need_a_file, save_page, save_trace
from kvlease.services.replay.reader import texts_of
from kvlease.services.replay.report import lines_shown, print_verdict
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
    verdict = check_log(options.log)
    print_verdict(verdict, texts_of(options.log, lines_shown(verdict)), console)
    if options.json is not None:
        write_json(options.json, verdict)
    if options.html is not None:
        save_page(options.log, options.html, verdict)
    if options.perfetto is not None:
        save_trace(options.log, options.perfetto, verdict)
    return verdict.verdict == "clean"
