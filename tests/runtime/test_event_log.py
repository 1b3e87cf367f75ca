"""The event log: order, levels, the file's completeness, and what happens when a disk fails."""

import errno
import io
import math
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from kvlease.errors import BadInput, UsageError
from kvlease.protocols.events import (
    ActorStart,
    AnyEvent,
    LogClose,
    LogGap,
    PageFree,
    RequestSubmitted,
    current_actor,
)
from kvlease.runtime.event_log import FLUSH_BYTES, EventLog, Level, open_event_log


class KeptBytes(io.BytesIO):
    """A file whose content outlives its close."""

    kept = b""

    def close(self) -> None:
        self.kept = self.getvalue()
        super().close()


class FullDisk(io.BytesIO):
    """A file that takes nothing."""

    name = "audit.log"

    def write(self, data: object, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def lines_of(data: bytes) -> list[AnyEvent]:
    return [msgspec.json.decode(line, type=AnyEvent) for line in data.splitlines()]


def page(number: int) -> PageFree:
    return PageFree(pages=[(number, 1, 0)])


def test_events_are_numbered_stamped_and_named() -> None:
    ticks = iter(range(100, 200))
    file = KeptBytes()
    log = EventLog(file, clock_ns=lambda: next(ticks))
    seen = log.remember()
    log.emit(page(3))
    token = current_actor.set("loader")
    log.emit(page(4))
    current_actor.reset(token)
    log.emit(ActorStart(actor="decode"))
    log.close()
    assert [(e.seq, e.t_ns, e.actor) for e in seen] == [
        (1, 100, "engine"),
        (2, 101, "loader"),
        (3, 102, "decode"),
        (4, 103, "log"),
    ]
    assert lines_of(file.kept) == seen


@pytest.mark.parametrize(("level", "kept"), [("off", 0), ("normal", 1), ("audit", 2)])
def test_levels(level: Level, kept: int) -> None:
    log = EventLog(None, level)
    seen = log.remember()
    log.emit(page(1))
    log.emit(RequestSubmitted(request=1, prompt_tokens=3, max_tokens=4))
    assert len(seen) == log.seq == kept


def test_the_last_line_says_that_the_log_is_whole() -> None:
    file = KeptBytes()
    log = EventLog(file)
    log.emit(page(1))
    log.close()
    log.close()
    assert lines_of(file.kept)[-1] == LogClose(events=1, seq=2, t_ns=log_time(file), actor="log")
    assert log.complete


def log_time(file: KeptBytes) -> int:
    return lines_of(file.kept)[-1].t_ns


def test_an_event_after_the_close_is_a_mistake() -> None:
    """It would stand behind the line that says the log is complete."""
    log = EventLog(KeptBytes())
    log.close()
    with pytest.raises(UsageError, match=r"PageFree came after"):
        log.emit(page(1))


async def test_a_full_buffer_reaches_the_file_without_a_close() -> None:
    file = KeptBytes()
    log = EventLog(file, flush_every_s=math.inf)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.run)
            while log.statistics().nbytes < FLUSH_BYTES:
                log.emit(page(1))
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert file.getvalue().count(b"\n") == log.seq


async def test_a_quiet_log_reaches_the_file_in_time(autojump_clock: trio.testing.MockClock) -> None:
    del autojump_clock
    file = KeptBytes()
    log = EventLog(file, flush_every_s=1.0, threads=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        log.emit(page(1))
        await trio.sleep(1.5)
        assert len(lines_of(file.getvalue())) == 1
        nursery.cancel_scope.cancel()


async def test_cancelling_the_writer_loses_nothing() -> None:
    file = KeptBytes()
    log = EventLog(file)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        await trio.testing.wait_all_tasks_blocked()
        log.emit(page(1))
        nursery.cancel_scope.cancel()
    log.emit(page(2))
    log.close()
    assert [e.seq for e in lines_of(file.kept)] == [1, 2, 3]


async def test_a_disk_that_is_too_slow_leaves_a_gap_that_says_so() -> None:
    file = KeptBytes()
    log = EventLog(file, max_bytes=200)
    seen = log.remember()
    while log.complete:
        log.emit(page(1))
    log.emit(page(2))
    lost_from = log.seq - 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    log.emit(page(3))
    log.close()
    lines = lines_of(file.kept)
    gaps = [e for e in lines if isinstance(e, LogGap)]
    assert [(g.first_seq, g.last_seq) for g in gaps] == [(lost_from, lost_from + 1)]
    assert [e.seq for e in lines] == sorted({e.seq for e in lines})
    assert len(seen) == log.seq
    assert not log.complete
    assert log.statistics().lost == 2


def test_a_full_disk_is_told_once_and_the_run_goes_on() -> None:
    told: list[str] = []
    log = EventLog(FullDisk(), tell=told.append)
    seen = log.remember()
    for i in range(3):
        log.emit(page(i))
    log.close()
    assert told == [
        "kvlease: cannot write audit.log (No space left on device); "
        "the run goes on, its event log is incomplete"
    ]
    assert len(seen) == 4
    assert not log.complete


def test_a_path_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "log"
    with (
        pytest.raises(BadInput, match=r"cannot write the event log .*nowhere.*No such file"),
        open_event_log(path),
    ):
        pass


def test_the_file_is_whole_when_the_block_is_left_by_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt), open_event_log(path) as log:
        log.emit(page(1))
        raise KeyboardInterrupt
    assert isinstance(lines_of(path.read_bytes())[-1], LogClose)


def test_level_off_makes_no_file(tmp_path: Path) -> None:
    with open_event_log(tmp_path / "log", "off") as log:
        log.emit(page(1))
    assert not (tmp_path / "log").exists()


async def test_threads_may_emit_and_wake_the_writer() -> None:
    """Stream workers write what they copied; a torn or doubled line would spoil the evidence."""
    file = KeptBytes()
    log = EventLog(file, flush_every_s=math.inf)

    def worker() -> None:
        for number in range(3000):
            log.emit(page(number))

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.run)
            async with trio.open_nursery() as workers:
                for _ in range(3):
                    workers.start_soon(trio.to_thread.run_sync, worker)
            while log.statistics().nbytes < FLUSH_BYTES:  # noqa: ASYNC110 - written by a thread
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    log.close()
    assert [e.seq for e in lines_of(file.kept)] == list(range(1, 9002))
