"""The pictures of a log on disk.

A log is read once more for each picture, so that neither the check nor a trace holds it in memory.
"""

from collections.abc import Iterator
from pathlib import Path

from kvlease.errors import BadInput
from kvlease.services.outputs import whole_file
from kvlease.services.replay.page import write_page
from kvlease.services.replay.perfetto import write_trace
from kvlease.services.replay.reader import open_log, texts_of
from kvlease.services.replay.timeline import Numbered
from kvlease.services.replay.verdict import Verdict


def save_page(log: str, target: str, verdict: Verdict) -> None:
    """Write a log and what a check of it found as one HTML page.

    Raises:
        BadInput: a file cannot be read or written.
    """
    named = {line for found in verdict.violations for line in found.lines}
    named.update(line for found in verdict.stuck for line in found.lines)
    with whole_file(target) as file:
        write_page(file, _numbered(log), verdict, Path(log).name, texts_of(log, named))


def save_trace(log: str, target: str, verdict: Verdict) -> None:
    """Write a log and the violations found in it as a trace for ui.perfetto.dev.

    Raises:
        BadInput: a file cannot be read or written.
    """
    with whole_file(target) as file:
        write_trace(file, _numbered(log), verdict.violations)


def need_a_file(log: str, flag: str) -> None:
    """Refuse what cannot be read twice, before the check and not after it.

    Raises:
        BadInput: ``log`` is standard input or a pipe.
    """
    if not is_read_again(log):
        what = "standard input" if log == "-" else f"{log}, a pipe or a device,"
        raise BadInput(f"{flag} reads the log a second time, which {what} cannot be; give a file")


def is_read_again(log: str) -> bool:
    """Whether a log can be opened a second time; what is not there is for the first to say."""
    path = Path(log)
    return log != "-" and (path.is_file() or path.is_dir() or not path.exists())


def _numbered(log: str) -> Iterator[Numbered]:
    with open_log(log) as reader:
        for first, events in reader.blocks():
            yield from enumerate(events, first)
