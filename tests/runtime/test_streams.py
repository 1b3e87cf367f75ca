"""Streams: order holds, garbage is never computed on, no thread stays behind."""

import random
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import trio
import trio.testing

from kvlease.errors import (
    ActorClosed,
    DeadlineExceeded,
    InternalError,
    NotReady,
    TransferFailed,
    UsageError,
)
from kvlease.protocols.ports import Completion, CompletionState, Stream
from kvlease.runtime.completions import CpuCompletion
from kvlease.runtime.streams import CpuStream, InlineStream, open_cpu_stream
from tests.runtime.rig import PATIENCE_S, cancel_at_every_checkpoint

DONE, FAILED, REVOKED = CompletionState.DONE, CompletionState.FAILED, CompletionState.REVOKED


def recorded(nbytes: int = 0) -> CpuCompletion:
    completion = CpuCompletion("load", nbytes)
    completion.set_recorded()
    return completion


def stream_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("kvlease-")]


def hold(go: threading.Event) -> None:
    assert go.wait(PATIENCE_S)


def miss() -> None:
    raise KeyError("missing")


class ForeignCompletion:
    """A completion of another kind, as a device's would be: it can only be blocked on."""

    def __init__(self, state: CompletionState) -> None:
        self.state = state
        self.go = threading.Event()

    async def wait_recorded(self) -> None: ...

    async def wait_done(self) -> None: ...

    def block_until_final(self) -> None:
        assert self.go.wait(PATIENCE_S)
        self.state = DONE


async def test_work_runs_in_order_on_one_other_thread() -> None:
    ran: list[tuple[int, int]] = []

    def note(number: int) -> None:
        ran.append((number, threading.get_ident()))

    async with open_cpu_stream("s") as stream:
        port: Stream = stream
        for number in range(100):
            scope = port.scope() if number % 3 == 0 else port
            scope.launch(partial(note, number))
        await port.record().wait_done()
    assert [number for number, _ in ran] == list(range(100))
    assert {thread for _, thread in ran}.isdisjoint({threading.get_ident()})
    assert stream_threads() == []


async def test_launching_never_holds_the_trio_thread() -> None:
    go = threading.Event()
    async with open_cpu_stream("s") as stream:
        stream.launch(partial(hold, go))
        began = time.perf_counter()
        for _ in range(200):
            stream.launch(lambda: None)
        assert time.perf_counter() - began < 0.5
        assert stream.statistics().pending >= 200
        go.set()
    assert stream.statistics().launches == 201


async def test_later_work_stays_behind_an_awaited_completion() -> None:
    waits: list[tuple[Completion, float]] = []
    load = recorded(8)
    ran: list[str] = []
    async with open_cpu_stream("s", observer=lambda c, s: waits.append((c, s))) as stream:
        stream.launch(lambda: ran.append("before"))
        stream.wait(load)
        stream.launch(lambda: ran.append("after"))
        end = stream.record()
        await trio.sleep(0.03)
        assert ran == ["before"]
        assert end.state is CompletionState.RECORDED
        load.finish(8)
        await end.wait_done()
    assert ran == ["before", "after"]
    statistics = stream.statistics()
    assert statistics.waits == 1
    assert statistics.wait_ms >= 20
    assert [c for c, _ in waits] == [load]


async def test_a_wait_that_need_not_hold_is_not_counted() -> None:
    """The exposed stall is what compute really waited, not how often it asked."""
    load = recorded()
    load.finish()
    async with open_cpu_stream("s") as stream:
        stream.wait(load)
        await stream.record().wait_done()
    assert stream.statistics().waits == 0


@pytest.mark.parametrize("kind", ["cpu", "inline"])
async def test_a_stream_cannot_be_ordered_behind_work_nobody_recorded(kind: str) -> None:
    """R2, F02: an unissued fence must be refused, not pass, and not deadlock the queue."""
    stream = CpuStream("s") if kind == "cpu" else InlineStream()
    with pytest.raises(NotReady, match="wait_recorded"):
        stream.wait(CpuCompletion("load", 8))
    stream.close()


async def fails(stream: Stream) -> str:
    try:
        await stream.record().wait_done()
    except TransferFailed as error:
        return error.reason
    return "done"


@pytest.mark.parametrize("kind", ["cpu", "inline"])
@pytest.mark.parametrize("end", ["fail", "revoke", "short", "late", "before"])
async def test_nothing_is_computed_from_rows_that_never_came(kind: str, end: str) -> None:
    """F02, F08: work behind a load that ended badly must be skipped, and its record must say so."""
    load = recorded(8)
    ran: list[str] = []

    def finish_badly() -> None:
        match end:
            case "fail":
                load.fail("bus error")
            case "late":
                load.fail("too late", reason="late")
            case "short":
                load.finish(7)
            case _:
                load.revoke()

    async with open_cpu_stream("s") as worker:
        stream: CpuStream | InlineStream = worker if kind == "cpu" else InlineStream()
        step, other = stream.scope(), stream.scope()
        step.launch(lambda: ran.append("layer 0"))
        if end == "before":
            finish_badly()
        step.wait(load)
        step.launch(lambda: ran.append("garbage"))
        other.launch(lambda: ran.append("other"))
        middle = step.record()
        if end != "before":
            finish_badly()
        reason = {"fail": "failed", "revoke": "revoked", "before": "revoked"}.get(end, end)
        with pytest.raises(TransferFailed) as caught:
            await middle.wait_done()
        assert caught.value.reason == reason
        assert middle.state is FAILED
        step.launch(lambda: ran.append("more garbage"))
        assert await fails(step) == reason  # a record in the middle does not wash the step clean
        assert await fails(other) == "done"
        assert await fails(stream.scope()) == "done"
        assert stream.statistics().failures == 1
        assert stream.statistics().skipped == 2
    assert ran == ["layer 0", "other"]


@pytest.mark.parametrize("kind", ["cpu", "inline"])
async def test_work_that_raises_fails_its_scope_with_the_cause(kind: str) -> None:
    async with open_cpu_stream("s") as worker:
        stream: CpuStream | InlineStream = worker if kind == "cpu" else InlineStream()
        ran: list[str] = []
        scope = stream.scope()
        scope.launch(miss)
        scope.launch(lambda: ran.append("after"))
        with pytest.raises(TransferFailed) as caught:
            await scope.record().wait_done()
        assert isinstance(caught.value.__cause__, KeyError)
        assert ran == []


@pytest.mark.parametrize("kind", ["cpu", "inline"])
async def test_the_streams_own_scope_starts_afresh_after_reporting(kind: str) -> None:
    """One failed load must not stop a stream that many use for ever (R9)."""
    async with open_cpu_stream("s") as worker:
        stream: CpuStream | InlineStream = worker if kind == "cpu" else InlineStream()
        stream.launch(miss)
        assert await fails(stream) == "failed"
        assert await fails(stream) == "done"


async def test_a_foreign_completion_is_blocked_on_by_the_worker() -> None:
    foreign = ForeignCompletion(CompletionState.RECORDED)
    async with open_cpu_stream("s") as stream:
        stream.wait(foreign)
        end = stream.record()
        await trio.sleep(0.01)
        assert not end.state.is_final
        foreign.go.set()
        await end.wait_done()
    assert stream.statistics().waits == 1
    with pytest.raises(UsageError, match="CpuStream"):
        InlineStream().wait(ForeignCompletion(CompletionState.RECORDED))


async def test_closing_drains() -> None:
    ran: list[int] = []
    async with open_cpu_stream("s") as stream:
        for number in range(50):
            stream.launch(partial(ran.append, number))
    assert len(ran) == 50
    for call in (stream.record, lambda: stream.launch(lambda: None)):
        with pytest.raises(ActorClosed):
            call()
    await stream.aclose()
    stream.close()


async def test_closing_abandons_a_wait_that_never_ends_within_its_bound() -> None:
    """F14: a completion that is never finished must not keep a stream, or its thread, for ever."""
    load = recorded(8)
    ran: list[str] = []
    with trio.fail_after(5):
        async with open_cpu_stream("s", close_timeout_s=0.05) as stream:
            stream.wait(load)
            stream.launch(lambda: ran.append("garbage"))
            end = stream.record()
    assert end.state is REVOKED
    assert ran == []
    assert load._final_hooks == []
    assert stream_threads() == []


@pytest.mark.parametrize("when", ["waiting", "working", "idle"])
async def test_cancelling_leaves_no_thread_behind(when: str) -> None:
    go = threading.Event()
    entered = threading.Event()
    load = recorded(8)
    ends: list[CpuCompletion] = []

    def work() -> None:
        entered.set()
        go.wait(PATIENCE_S)

    with trio.fail_after(5), trio.CancelScope() as scope:
        async with open_cpu_stream("s", close_timeout_s=2) as stream:
            if when == "waiting":
                stream.wait(load)
            if when == "working":
                stream.launch(work)
                await trio.to_thread.run_sync(entered.wait)
                threading.Timer(0.05, go.set).start()
            ends.append(stream.record())
            if when == "idle":
                await ends[0].wait_done()
            scope.cancel()
            await trio.sleep_forever()
    assert ends[0].state is (DONE if when == "idle" else REVOKED)
    assert stream_threads() == []


async def test_a_closure_that_never_returns_is_reported_and_its_record_stays_open() -> None:
    """R6: memory that a running closure may still touch must not look free."""
    go = threading.Event()
    end: list[CpuCompletion] = []
    with trio.fail_after(5), pytest.raises(DeadlineExceeded, match="still running"):
        async with open_cpu_stream("s", close_timeout_s=0.03) as stream:
            stream.launch(partial(hold, go))
            end.append(stream.record())
            await trio.sleep(0.01)
    assert not end[0].state.is_final
    go.set()
    with trio.fail_after(5), pytest.raises(TransferFailed):
        await end[0].wait_done()
    assert end[0].state is REVOKED
    for thread in threading.enumerate():
        if thread.name.startswith("kvlease-"):
            thread.join(PATIENCE_S)
    assert stream_threads() == []


async def test_an_error_in_the_block_reaches_the_caller_bare() -> None:
    with pytest.raises(ValueError, match="mine"):
        async with open_cpu_stream("s"):
            raise ValueError("mine")
    assert stream_threads() == []


async def test_a_broken_observer_is_not_swallowed() -> None:
    load = recorded()

    def observer(_completion: Completion, _seconds: float) -> None:
        raise RuntimeError("observer")

    ends: list[CpuCompletion] = []
    began = time.perf_counter()
    with trio.fail_after(5), pytest.raises(InternalError) as caught:
        async with open_cpu_stream("s", observer=observer) as stream:
            stream.wait(load)
            ends.append(stream.record())
            await trio.sleep(0.01)
            load.finish()
            await trio.sleep_forever()
    assert time.perf_counter() - began < 3  # nothing to drain: well under the closing bound
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert ends[0].state is REVOKED
    assert stream_threads() == []


async def test_a_stream_runs_once() -> None:
    async with open_cpu_stream("s") as stream:
        with pytest.raises(UsageError, match="run before"):
            await stream.run()


async def test_closing_a_stream_that_never_ran_ends_its_records() -> None:
    stream = CpuStream("s")
    ran: list[int] = []
    stream.launch(lambda: ran.append(1))
    end = stream.record()
    await stream.aclose()
    assert end.state is REVOKED
    assert ran == []


async def test_cancellation_at_every_checkpoint() -> None:
    ends: list[CpuCompletion] = []

    async def trial() -> None:
        async with open_cpu_stream("s", close_timeout_s=1) as stream:
            stream.launch(lambda: time.sleep(1e-4))
            ends.append(stream.record())
            await ends[-1].wait_done()
            stream.launch(lambda: time.sleep(1e-4))
            ends.append(stream.record())

    def check(_cancelled: bool) -> None:
        assert stream_threads() == []
        assert all(end.state.is_final for end in ends)

    assert await cancel_at_every_checkpoint(trial, check) >= 3


async def test_two_streams_and_random_delays_never_compute_early() -> None:
    """Hunt for early reads: a copy stream fills, a compute stream reads what it waited for."""
    rng = random.Random(5)
    bad: list[int] = []
    async with open_cpu_stream("load") as loads, open_cpu_stream("compute") as compute:
        for _ in range(40):
            rows = [0] * 8
            step = compute.scope()
            for layer in range(8):
                pause = rng.choice((0.0, 0.0, 1e-4, 3e-4))

                def fill(layer: int = layer, rows: list[int] = rows, pause: float = pause) -> None:
                    if pause:
                        time.sleep(pause)
                    rows[layer] = 1

                def read(layer: int = layer, rows: list[int] = rows) -> None:
                    if not rows[layer]:
                        bad.append(layer)

                loads.launch(fill)
                step.wait(loads.record())
                step.launch(read)
            if rng.random() < 0.3:
                await trio.lowlevel.checkpoint()
        await compute.scope().record().wait_done()
    assert bad == []
    assert compute.statistics().launches == 320


@pytest.mark.parametrize("make", [lambda: InlineStream("in"), lambda: CpuStream("cpu")])
def test_statistics_name_the_stream(make: Callable[[], InlineStream | CpuStream]) -> None:
    stream = make()
    assert stream.statistics().name == stream.name
    stream.close()
