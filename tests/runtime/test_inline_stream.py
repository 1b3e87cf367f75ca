"""Inline streams: the order of a worker's queue, on the caller's thread, without Trio."""

import threading

import pytest

from kvlease.errors import ActorClosed
from kvlease.protocols.ports import CompletionState
from kvlease.runtime.completions import CpuCompletion
from kvlease.runtime.streams import InlineStream

DONE, FAILED, REVOKED = CompletionState.DONE, CompletionState.FAILED, CompletionState.REVOKED


def recorded(nbytes: int = 0) -> CpuCompletion:
    completion = CpuCompletion("load", nbytes)
    completion.set_recorded()
    return completion


def test_inline_runs_at_launch_without_trio_or_threads() -> None:
    ran: list[int] = []
    stream = InlineStream()
    stream.launch(lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]
    assert stream.record().state is DONE


def test_inline_defers_behind_an_unfinished_completion() -> None:
    class Ticks:
        def __init__(self) -> None:
            self.time = 0.0

        def now(self) -> float:
            return self.time

    clock = Ticks()
    waits: list[float] = []
    stream = InlineStream(clock=clock, observer=lambda _c, s: waits.append(s))
    ran: list[str] = []
    first, second = recorded(8), recorded(8)
    stream.wait(first)
    stream.launch(lambda: ran.append("one"))
    stream.wait(second)
    stream.launch(lambda: ran.append("two"))
    end = stream.record()
    assert ran == []
    assert stream.statistics().pending == 4
    second.finish(8)
    assert ran == []
    clock.time = 2.5
    first.finish(8)
    assert ran == ["one", "two"]
    assert end.state is DONE
    assert waits == [2.5]
    assert stream.statistics().wait_ms == 2500


def test_inline_work_may_launch_and_may_end_what_the_queue_waits_for() -> None:
    stream = InlineStream()
    load = recorded(8)
    ran: list[str] = []

    def outer() -> None:
        stream.launch(lambda: ran.append("inner"))
        stream.wait(load)
        stream.launch(lambda: ran.append("behind"))
        ran.append("outer")
        load.finish(8)

    stream.launch(outer)
    assert ran == ["outer", "inner", "behind"]


def test_closing_an_inline_stream_revokes_what_waits() -> None:
    stream = InlineStream()
    load = recorded(8)
    stream.wait(load)
    ran: list[str] = []
    stream.launch(lambda: ran.append("x"))
    end = stream.record()
    stream.close()
    assert end.state is REVOKED
    load.finish(8)
    assert ran == []
    with pytest.raises(ActorClosed):
        stream.launch(lambda: None)


def test_inline_lets_an_interrupt_through() -> None:
    stream = InlineStream()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream.launch(interrupt)
    assert stream.record().state is FAILED
