"""The reader: JSON lines from a file, a ``.gz`` or standard input, as typed events in blocks.

A block of lines is decoded in one call. Only where that fails is it taken line by line, to find the
line that is of unknown type, no event at all, or cut off at the log's end. This module does not
know what the events mean.
"""

import gzip
import sys
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from io import BufferedIOBase, BufferedReader
from typing import Final, TextIO, TypeAlias, Union, cast, final, get_args

import msgspec

from kvlease.errors import BadInput
from kvlease.protocols.events import SCHEMA_VERSION, AnyEvent, Event, LogOpen
from kvlease.services.replay.bounds import beyond_bounds

BLOCK_BYTES = 1 << 16
"""Read and decoded at once: few enough events that their memory stays in the processor's caches."""

Block: TypeAlias = tuple[int, list[Event]]
"""Number of the first line (from 1), and the events of lines that follow one another."""


class UnknownEvent(Event, kw_only=True, gc=False):
    """A line whose type this version does not know; it has its number and its time."""

    name: str = ""


class BrokenLine(Event, kw_only=True, gc=False):
    """A line that is no event: not JSON, or without a field that its type must have."""

    reason: str = ""


class _Head(msgspec.Struct):
    """As much of a line as can be read without knowing its type."""

    event: str
    seq: int = 0
    t_ns: int = 0
    schema: int | None = None


def _brief(kind: type[Event]) -> type[Event]:
    """Make the same type without ``actor``, and with one empty tuple for all empty lists."""
    fields: list[tuple[str, object, object]] = []
    for known in msgspec.structs.fields(kind):
        default = known.default
        if known.default_factory is not msgspec.NODEFAULT:
            default = ()
        if known.name != "actor":
            fields.append((known.name, known.type, default))
    made = msgspec.defstruct(
        kind.__name__, fields, tag=kind.__struct_config__.tag, tag_field="event", gc=False,
        kw_only=True,
    )  # fmt: skip
    return cast("type[Event]", made)


_decode_event = msgspec.json.Decoder(cast("type[Event]", AnyEvent)).decode
_decode_lines = msgspec.json.Decoder(cast("type[Event]", AnyEvent)).decode_lines
_decode_head = msgspec.json.Decoder(_Head).decode
KINDS: Final = cast("tuple[type[Event], ...]", get_args(AnyEvent))
"""Every type of event that this version knows."""
BRIEF: Final = {
    kind: _brief(kind)
    for kind in KINDS
    if str(kind.__struct_config__.tag).startswith(("lease.", "page.", "step.", "transfer."))
}
"""The commonest types as they are decoded quickest.

Without ``actor``, as a name in each line takes an eighth of its decoding; and a list that is left
out is an empty tuple, which need not be made.
"""
_decode_brief = msgspec.json.Decoder(
    cast("type[Event]", Union[tuple(BRIEF.get(kind, kind) for kind in KINDS)])  # noqa: UP007
).decode_lines
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises; the last for what is nested without end."""
_KNOWN = frozenset(str(kind.__struct_config__.tag) for kind in KINDS)


@final
class LogReader:
    """Blocks of one log, in order.

    Attributes:
        truncated: whether it was found to be cut off: its last line is none, and is dropped.
        damage: what is wrong with its compressed file; empty if nothing was found.
    """

    def __init__(self, file: BufferedIOBase, name: str) -> None:
        """Borrow a binary file that stands at the log's first byte; ``name`` is for errors."""
        self._file = file
        self._name = name
        self.truncated = False
        self.damage = ""

    def blocks(self, *, brief: bool = False) -> Iterator[Block]:
        """Yield the log's events; the first is its head.

        Args:
            brief: whether those of `BRIEF` may come without ``actor``, which is faster.

        Raises:
            BadInput: this is no log, or one of another version.
        """
        line, parts = 1, list[bytes]()  # of a line whose end has not been read
        while chunk := self._read():
            end = chunk.rfind(b"\n") + 1
            if not end:
                parts.append(chunk)
                continue
            whole = b"".join((*parts, chunk[:end])) if parts else chunk[:end]
            parts = [chunk[end:]] if end < len(chunk) else []
            if line == 1:
                self._check_head(whole[: whole.index(b"\n")])
            num_lines = _count_lines(whole)
            yield line, self._decode(whole, num_lines, brief=brief)
            line += num_lines
        rest = b"".join(parts)
        if rest:
            if line == 1:
                self._check_head(rest)
            yield from self._last(rest, line)
        elif line == 1:
            if self.damage:
                raise BadInput(f"{self._name} is not a readable gzip file ({self.damage})")
            raise BadInput(
                f"{self._name} is empty; give an event log (--log of the other commands)"
            )

    def _read(self) -> bytes:
        try:
            return self._file.read1(BLOCK_BYTES)
        except EOFError:  # a compressed log that was cut off
            self.truncated = True
            return b""
        except (gzip.BadGzipFile, zlib.error) as error:  # what was read before is judged
            self.truncated, self.damage = True, str(error)
            return b""
        except OSError as error:
            raise BadInput(f"cannot read {self._name}: {error.strerror or error}") from error

    def _check_head(self, line: bytes) -> None:
        try:
            head = _decode_head(line)
        except _UNREADABLE as error:
            raise BadInput(f"{self._name} is no event log: its first line is no event") from error
        if head.event != "log.open":
            raise BadInput(
                f"{self._name} has no head: its first line is {head.event} and not log.open, so "
                "nothing says what to judge it by; give the log from its first line on"
            )
        if head.schema != SCHEMA_VERSION:
            raise BadInput(
                f"{self._name} is an event log of version {head.schema}, and this kvlease reads "
                f"version {SCHEMA_VERSION}; replay it with the version that wrote it"
            )
        try:
            beyond = beyond_bounds(msgspec.json.decode(line, type=LogOpen))
        except _UNREADABLE as error:
            raise BadInput(f"{self._name} has a head that cannot be read: {error}") from error
        if beyond:
            raise BadInput(f"{self._name} has a head that kvlease cannot judge by: {beyond}")

    def _decode(self, whole: bytes, num_lines: int, *, brief: bool) -> list[Event]:
        try:
            events = (_decode_brief if brief else _decode_lines)(whole)
        except _UNREADABLE:
            events = []
        if len(events) == num_lines:
            return events
        return [_decode_one(text) for text in whole[:-1].split(b"\n")]

    def _last(self, rest: bytes, line: int) -> Iterator[Block]:
        event = _decode_one(rest)
        if isinstance(event, BrokenLine):
            self.truncated = True
        else:
            yield line, [event]


def _count_lines(whole: bytes) -> int:
    """Count line ends: by what is left without them, a quarter of the time of ``bytes.count``."""
    return len(whole) - len(whole.replace(b"\n", b""))


def _decode_one(line: bytes) -> Event:
    try:
        return _decode_event(line)
    except _UNREADABLE as error:
        reason = str(error)
    try:
        head = _decode_head(line)
    except _UNREADABLE:
        return BrokenLine(reason=reason)
    if head.event in _KNOWN:
        return BrokenLine(seq=head.seq, t_ns=head.t_ns, reason=f"{head.event}: {reason}")
    return UnknownEvent(seq=head.seq, t_ns=head.t_ns, name=head.event)


def _plain(file: BufferedReader) -> BufferedIOBase:
    """Return the file itself, or what is compressed in it."""
    is_zipped = file.peek(2)[:2] == b"\x1f\x8b"
    return gzip.GzipFile(fileobj=file) if is_zipped else file


@contextmanager
def open_log(path: str) -> Generator[LogReader, None, None]:
    """Open a log for reading; ``-`` is standard input, and gzip is known by its first bytes.

    Raises:
        BadInput: the file cannot be opened.
    """
    name = "standard input" if path == "-" else path
    if path == "-" and (cast("TextIO | None", sys.stdin) is None or sys.stdin.closed):
        raise BadInput("cannot read standard input, which is closed; name a file instead")
    try:
        raw = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    file = cast("BufferedReader", raw)
    try:
        yield LogReader(_plain(file), name)
    except OSError as error:
        raise BadInput(f"cannot read {name}: {error.strerror or error}") from error
    finally:
        if path != "-":
            file.close()


def texts_of(path: str, lines: set[int]) -> dict[int, str]:
    """Return the text of some lines of a log, by number; nothing for standard input."""
    found: dict[int, str] = {}
    if path == "-" or not lines:
        return found
    last = max(lines)
    with open(path, "rb") as file:
        try:
            for number, text in enumerate(_plain(file), 1):
                if number in lines:
                    found[number] = text.decode("utf-8", "replace").rstrip()
                if number >= last:
                    break
        except (EOFError, OSError, zlib.error):
            pass  # cut off behind what was readable
    return found
