"""The pictures of a log on disk: written beside their place and moved there when they are whole.

A log is read once more for each picture, so that neither the check nor a trace holds it in memory.
"""

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kvlease.errors import BadInput
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
    with _whole(target) as file:
        write_page(file, _numbered(log), verdict, Path(log).name, texts_of(log, named))


def save_trace(log: str, target: str, verdict: Verdict) -> None:
    """Write a log and the violations found in it as a trace for ui.perfetto.dev.

    Raises:
        BadInput: a file cannot be read or written.
    """
    with _whole(target) as file:
        write_trace(file, _numbered(log), verdict.violations)


def need_a_file(log: str, flag: str) -> None:
    """Refuse standard input, before the check and not after it.

    Raises:
        BadInput: ``log`` is standard input.
    """
    if log == "-":
        raise BadInput(
            f"{flag} reads the log a second time, which standard input cannot be; give a file"
        )


def _numbered(log: str) -> Iterator[Numbered]:
    with open_log(log) as reader:
        for first, events in reader.blocks():
            yield from enumerate(events, first)


@contextmanager
def _whole(target: str) -> Generator[BinaryIO, None, None]:
    """Open a file that takes its place only when everything was written."""
    part = f"{target}.part"
    try:
        with open(part, "wb") as file:
            yield file
        os.replace(part, target)
    except OSError as error:
        raise BadInput(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            os.unlink(part)
