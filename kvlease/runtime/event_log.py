"""The event log: numbers and stamps events, encodes each once, and writes them from a thread.

Three decisions:

- Events are never held back for the disk. They go to a buffer that a task (`EventLog.run`) hands to
  a worker thread; when the disk is so slow that the buffer is full, events are dropped, counted,
  and a ``log.gap`` takes their place, because a hole that says so is better than a server that
  stands still, and a checker answers *cannot tell*.
- A write that fails (a full disk) is told once, in one sentence. The run goes on without its log,
  `EventLog.complete` is false from then on, and commands that were asked for a log exit with 1.
- Subscribers get the same objects, in order, whatever happens to the file.

This module does not know what the events mean.
"""

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from os import PathLike, fspath
from typing import BinaryIO, final

import msgspec
import trio
from attrs import frozen

from kvlease.errors import BadInput, UsageError
from kvlease.protocols.event_base import Level as Level
from kvlease.protocols.events import Event, LogClose, LogGap, current_actor

FLUSH_BYTES = 1 << 16
"""A buffer of this size is handed to the writer at once (some 600 events)."""
MAX_BYTES = 1 << 26
"""Events are dropped while this many bytes wait for the disk (some 600,000 events)."""
FLUSH_EVERY_S = 1.0
"""A quiet log still reaches its file after this time."""


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr)


@frozen
class LogStatistics:
    """What a log has done so far.

    Attributes:
        events: events numbered, the lost ones included.
        lost: events that subscribers saw and the file does not have.
        nbytes: bytes written to the file.
        failure: the sentence about the write that failed, if one did.
    """

    events: int
    lost: int
    nbytes: int
    failure: str | None


@final
class EventLog:
    """An `EventSink` that writes JSON lines and feeds subscribers.

    Ownership: takes the events it is given; owns ``file`` until `close`.
    """

    def __init__(
        self,
        file: BinaryIO | None = None,
        level: Level = "audit",
        *,
        max_bytes: int = MAX_BYTES,
        flush_every_s: float = FLUSH_EVERY_S,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        threads: bool = True,
        tell: Callable[[str], None] = _tell,
    ) -> None:
        """Make a log; without a file only subscribers see events.

        Args:
            file: where lines go, opened for writing bytes.
            level: what is kept.
            max_bytes: bound of the buffer that waits for the disk.
            flush_every_s: longest time a line stays in the buffer; infinity under a mock clock.
            clock_ns: source of ``t_ns``.
            threads: write from a worker thread; false under simulation, which has none.
            tell: is given the one sentence about a failed write.
        """
        self.seq = 0
        self.level: Level = level
        self.normal = level != "off"
        self.audit = level == "audit"
        self._file = file
        self._max_bytes = max_bytes
        self._flush_every_s = flush_every_s
        self._clock_ns = clock_ns
        self._threads = threads
        self._tell = tell
        self._encode_into = msgspec.json.Encoder().encode_into
        self._buffer = bytearray()
        self._subscribers: list[Callable[[Event], None]] = []
        self._wake = trio.Event()
        self._woken = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._gap_from = 0
        self._lost = 0
        self._nbytes = 0
        self._failure: str | None = None

    @property
    def complete(self) -> bool:
        """Whether the file has, or will have, every event so far."""
        return self._lost == 0 and self._failure is None

    def statistics(self) -> LogStatistics:
        """Count what happened so far."""
        return LogStatistics(self.seq, self._lost, self._nbytes, self._failure)

    def subscribe(self, subscriber: Callable[[Event], None]) -> None:
        """Call ``subscriber`` with every event kept at this level, numbered and stamped."""
        self._subscribers.append(subscriber)

    def remember(self) -> list[Event]:
        """Return a list that grows with the log; for tests and short runs."""
        events: list[Event] = []
        self.subscribe(events.append)
        return events

    def emit(self, event: Event) -> None:
        """Number, stamp and keep an event.

        Ownership: takes the event.
        Checkpoints: none. Any thread may call it: a stream's worker tells of its own transitions.

        Raises:
            UsageError: the log is closed.
        """
        if not (self.audit if event.audit else self.normal):
            return
        if self._closed:
            msg = f"event {type(event).__name__} came after the log was closed; close the log last"
            raise UsageError(msg)
        if not event.actor:
            event.actor = current_actor.get()
        with self._lock:
            self.seq += 1
            event.seq = self.seq
            event.t_ns = self._clock_ns()
            if self._file is not None:
                self._append(event)
            for subscriber in self._subscribers:
                subscriber(event)

    def _append(self, event: Event) -> None:
        """Encode an event behind the others, or count it as lost."""
        buffer = self._buffer
        if self._failure is not None or len(buffer) >= self._max_bytes:
            self._gap_from = self._gap_from or event.seq
            self._lost += 1
            return
        if self._gap_from:
            gap = LogGap(
                first_seq=self._gap_from,
                last_seq=event.seq - 1,
                reason="the disk was too slow",
                seq=event.seq - 1,
                t_ns=event.t_ns,
                actor="log",
            )
            self._gap_from = 0
            self._encode_into(gap, buffer, -1)
            buffer += b"\n"
        self._encode_into(event, buffer, -1)
        buffer += b"\n"
        if len(buffer) >= FLUSH_BYTES and not self._woken and self._token is not None:
            self._woken = True
            self._token.run_sync_soon(self._wake_up)

    def _wake_up(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Write what is emitted until cancelled; what is buffered then is still written.

        The engine starts one such task a log. Without it events wait for `close`.
        Checkpoints: always.
        """
        self._token = trio.lowlevel.current_trio_token()
        try:
            while True:
                with trio.move_on_after(self._flush_every_s):
                    await self._wake.wait()
                self._wake, self._woken = trio.Event(), False
                await self._write_out()
        finally:
            self._token = None
            # A write in its thread cannot be called off; the last one is waited for, however long.
            with trio.CancelScope(shield=True):
                await self._write_out()

    async def _write_out(self) -> None:
        """Hand the buffer to the disk; one chunk is under way at a time, so order is kept."""
        if not self._buffer:
            return
        with self._lock:
            chunk, self._buffer = self._buffer, bytearray()
        if self._threads:
            await trio.to_thread.run_sync(self._write, chunk)
        else:
            self._write(chunk)

    def _write(self, chunk: bytearray) -> None:
        if self._file is None or self._failure is not None:
            return
        try:
            self._file.write(chunk)
            self._file.flush()
            self._nbytes += len(chunk)
        except OSError as error:
            name = getattr(self._file, "name", "the event log")
            self._failure = (
                f"cannot write {name} ({error.strerror or error}); "
                "the run goes on, its event log is incomplete"
            )
            self._tell(f"kvlease: {self._failure}")

    def close(self) -> None:
        """Write the last line and the rest of the buffer, and close the file.

        Call it after `run` has ended. Calling it again does nothing.
        """
        if self._closed:
            return
        if self.normal:
            # The last line has to fit even behind a full buffer.
            self._max_bytes += FLUSH_BYTES
            self.emit(LogClose(events=self.seq, lost=self._lost, actor="log"))
        self._closed = True
        self._write(self._buffer)
        self._buffer = bytearray()
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._failure = self._failure or f"cannot close the event log ({error})"


@contextmanager
def open_event_log(
    path: str | PathLike[str] | None, level: Level = "audit"
) -> Generator[EventLog, None, None]:
    """Open a log on a file, or one without a file, and close it at the end of the block.

    Raises:
        BadInput: the file cannot be opened for writing.
    """
    file: BinaryIO | None = None
    if path is not None and level != "off":
        try:
            file = open(path, "wb")  # noqa: SIM115 - the log owns it until its close
        except OSError as error:
            msg = f"cannot write the event log {fspath(path)}: {error.strerror or error}"
            raise BadInput(msg) from error
    log = EventLog(file, level)
    try:
        yield log
    finally:
        log.close()
