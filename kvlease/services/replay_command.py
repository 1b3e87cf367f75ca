"""`kvlease replay`: judge a log and tell what it shows."""

from rich.console import Console

from kvlease.services.options import ReplayOptions
from kvlease.services.replay.checker import check_log
from kvlease.services.replay.reader import texts_of
from kvlease.services.replay.report import lines_shown, print_verdict
from kvlease.services.report import write_json


def replay(options: ReplayOptions, console: Console) -> bool:
    """Judge the log, print the verdict and write the JSON file; returns whether it is clean.

    Raises:
        BadInput: the log cannot be read, is none, or is of another version.
    """
    verdict = check_log(options.log)
    print_verdict(verdict, texts_of(options.log, lines_shown(verdict)), console)
    if options.json is not None:
        write_json(options.json, verdict)
    return verdict.verdict == "clean"
