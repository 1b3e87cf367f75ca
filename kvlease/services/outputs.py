"""Results as files: what they may be named, and that they are written whole or not at all.

This module does not know what is in them.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kvlease.errors import BadInput


def check_writable(path: str | None) -> None:
    """Refuse a result file that could not be written, before the work and not after it.

    Raises:
        BadInput: it has no folder, is one, or may not be written.
    """
    if path is None:
        return
    folder = Path(path).absolute().parent
    if not os.path.isdir(folder):  # which takes a name that is too long for one that is not there
        raise BadInput(f"cannot write {path}: the folder {folder} does not exist")
    if os.path.isdir(path):
        raise BadInput(f"cannot write {path}: it is a folder")
    if not os.access(folder, os.W_OK):
        raise BadInput(f"cannot write {path}: the folder is read-only")


def check_apart(files: dict[str, str | None]) -> None:
    """Refuse two names of one file, by whatever links and folders they lead to it.

    Args:
        files: the path that each flag names, if it was given.

    Raises:
        BadInput: one would take the place of another.
    """
    taken: dict[str, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        for other, name in taken.items():
            if _is_same(path, name):
                raise BadInput(f"{other} and {flag} both name {path}; give each a file of its own")
        taken[flag] = path


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # at least one is not there yet
        return os.path.realpath(path) == os.path.realpath(other)


@contextmanager
def whole_file(target: str) -> Generator[BinaryIO, None, None]:
    """Open a file that takes its place only when everything was written.

    A link is followed; a device or a pipe is no place to take and is written as it is.

    Raises:
        BadInput: it cannot be written; what was there before is there still.
    """
    place = os.path.realpath(target)
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            with open(target, "wb") as file:
                yield file
            return
        part = f"{place}.{os.getpid()}.part"
        with open(part, "xb") as file, _removed(part):
            yield file
            file.flush()
            os.replace(part, place)
    except OSError as error:
        raise BadInput(f"cannot write {target}: {error.strerror or error}") from error


@contextmanager
def _removed(part: str) -> Generator[None, None, None]:
    """Leave no part of a file behind; one that has taken its place is not there any more."""
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(part)
