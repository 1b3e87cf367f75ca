"""Completions: no wait passes too early, none is lost, none hangs."""

import gc
import random
import threading
import time

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.errors import IllegalTransition, TransferFailed, UsageError
from kvlease.protocols.machines import joint_state
from kvlease.protocols.ports import Completion, CompletionState
from kvlease.runtime.completions import CpuCompletion, JointCompletion
from tests.runtime.rig import PATIENCE_S, cancel_at_every_checkpoint

PLANNED, RECORDED = CompletionState.PLANNED, CompletionState.RECORDED
DONE, FAILED, REVOKED = CompletionState.DONE, CompletionState.FAILED, CompletionState.REVOKED


def recorded(nbytes: int = 0) -> CpuCompletion:
    completion = CpuCompletion("work", nbytes)
    completion.set_recorded()
    return completion


def joint(*nbytes: int) -> JointCompletion:
    lock = threading.Lock()
    parts = tuple(CpuCompletion(f"part {n}", n, lock) for n in nbytes)
    return JointCompletion("layer", parts, lock)


def test_it_is_a_completion_port() -> None:
    port: Completion = CpuCompletion("work")
    assert port.state is PLANNED


async def test_a_completion_nobody_recorded_is_not_ready() -> None:
    """R2, F02: an event nobody recorded must not pass for one that has fired."""
    completion = CpuCompletion("work", 8)
    for wait in (completion.wait_recorded, completion.wait_done, completion.wait_final):
        with trio.move_on_after(0.01) as scope:
            await wait()
        assert scope.cancelled_caught
    with pytest.raises(IllegalTransition):
        completion.finish(8)


async def test_finishing_wakes_waiters_of_both_kinds() -> None:
    completion = CpuCompletion("work", 8)
    seen: list[str] = []

    async def wait_recorded() -> None:
        await completion.wait_recorded()
        seen.append("recorded")

    async def wait_done() -> None:
        await completion.wait_done()
        seen.append("done")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_recorded)
        nursery.start_soon(wait_done)
        await trio.testing.wait_all_tasks_blocked()
        completion.set_recorded()
        await trio.testing.wait_all_tasks_blocked()
        assert seen == ["recorded"]
        assert completion.finish(8)
    assert seen == ["recorded", "done"]


@pytest.mark.parametrize("nbytes", [0, 7, 9])
async def test_other_than_planned_bytes_is_failed(nbytes: int) -> None:
    """R5: a short copy that passes for a whole one serves rows that never came."""
    completion = recorded(8)
    assert not completion.finish(nbytes)
    assert completion.state is FAILED
    with pytest.raises(TransferFailed, match=f"moved {nbytes} of 8") as caught:
        await completion.wait_done()
    assert caught.value.reason == "short"


async def test_failure_carries_reason_and_cause() -> None:
    completion = recorded(8)
    cause = OSError("bus")
    assert completion.fail(cause)
    with pytest.raises(TransferFailed, match="bus") as first:
        await completion.wait_done()
    assert first.value.reason == "failed"
    assert first.value.__cause__ is cause
    with pytest.raises(TransferFailed) as second:
        completion.block_until_final()
    assert second.value is not first.value


async def test_revoking_a_planned_completion_ends_every_wait() -> None:
    completion = CpuCompletion("work", 8)
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            with pytest.raises(TransferFailed) as caught:
                await completion.wait_recorded()
            assert caught.value.reason == "revoked"

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert completion.revoke()
    assert completion.state is REVOKED


def test_the_first_end_counts_and_a_late_one_is_told_so() -> None:
    completion = recorded(8)
    assert completion.fail("too late", reason="late")
    assert not completion.finish(8)
    assert not completion.revoke()
    assert not completion.fail("again")
    completion.set_recorded()  # recording after the end is late, not wrong
    assert completion.state is FAILED
    assert completion.problem is not None
    assert completion.problem.reason == "late"


def test_finishing_or_recording_twice_is_a_bug() -> None:
    completion = recorded()
    with pytest.raises(IllegalTransition):
        completion.set_recorded()
    completion.finish()
    with pytest.raises(IllegalTransition):
        completion.finish()


async def test_waiting_for_what_has_ended_is_no_checkpoint() -> None:
    completion = recorded()
    completion.finish()
    with trio.CancelScope() as scope:
        scope.cancel()
        await completion.wait_recorded()
        await completion.wait_done()
        await completion.wait_final()
    assert not scope.cancelled_caught


async def test_blocking_on_the_trio_thread_is_refused() -> None:
    with pytest.raises(UsageError, match="wait_done"):
        recorded().block_until_final()
    ended = recorded()
    ended.finish()
    ended.block_until_final()


async def test_cancelled_waits_leave_nothing_behind() -> None:
    completion = CpuCompletion("work")

    async def trial() -> None:
        await completion.wait_recorded()

    def check(cancelled: bool) -> None:
        assert completion._recorded_hooks == []
        if cancelled:
            # The next round finds it recorded, and the trial comes to its end.
            completion.set_recorded()

    assert await cancel_at_every_checkpoint(trial, check) == 1
    assert completion._final_hooks == []


async def test_cancelling_one_waiter_does_not_cost_the_other_its_wake() -> None:
    completion = recorded()
    woken = trio.Event()

    async def wait() -> None:
        await completion.wait_done()
        woken.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        with trio.CancelScope() as scope:
            scope.cancel()
            await completion.wait_done()
        await trio.testing.wait_all_tasks_blocked()
        completion.finish()
        with trio.fail_after(1):
            await woken.wait()


async def test_cancel_and_finish_from_a_thread_at_once_never_wake_twice() -> None:
    """A task rescheduled twice ends the whole run with an internal error of Trio's."""
    rng = random.Random(7)
    for _ in range(300):
        completion = recorded()
        pause = rng.random() * 2e-4

        def finish(completion: CpuCompletion = completion, pause: float = pause) -> None:
            time.sleep(pause)
            completion.finish()

        thread = threading.Thread(target=finish)
        thread.start()
        with trio.move_on_after(rng.random() * 2e-3):
            await completion.wait_done()
        thread.join()


async def test_no_wake_up_is_lost_against_threads() -> None:
    """Hunt for the window between check and park: many waits, random delays, three threads."""
    rng = random.Random(3)
    rounds = [[recorded() for _ in range(20)] for _ in range(60)]
    delays = [[rng.choice((0.0, 0.0, 1e-5, 1e-4)) for _ in batch] for batch in rounds]
    start = [threading.Event() for _ in rounds]

    def finish(first: int) -> None:
        for batch, waits, go in zip(rounds, delays, start, strict=True):
            assert go.wait(PATIENCE_S)
            for completion, delay in list(zip(batch, waits, strict=True))[first::3]:
                if delay:
                    time.sleep(delay)
                completion.finish()

    threads = [threading.Thread(target=finish, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    with trio.fail_after(PATIENCE_S):
        for batch, go in zip(rounds, start, strict=True):
            async with trio.open_nursery() as nursery:
                go.set()
                for completion in batch:
                    nursery.start_soon(completion.wait_done)
    for thread in threads:
        thread.join()


def test_a_completion_that_ends_after_the_run_hurts_nobody() -> None:
    completion = recorded()

    async def main() -> None:
        with trio.move_on_after(0.01):
            await completion.wait_done()

    trio.run(main)
    completion.finish()

    async def again() -> None:
        await completion.wait_done()

    trio.run(again)


def test_a_wake_posted_to_a_run_that_ended_is_dropped() -> None:
    from kvlease.runtime.wake import TrioWaker

    wakers: list[TrioWaker] = []

    async def main() -> None:
        wakers.append(TrioWaker.current())
        assert TrioWaker.current() is wakers[0]

    trio.run(main)
    thread = threading.Thread(target=wakers[0].post, args=(pytest.fail,))
    thread.start()
    thread.join()


def test_threads_block_until_the_end_and_learn_of_failure() -> None:
    for end, outcome in (("finish", None), ("revoke", "revoked")):
        completion = recorded()
        seen: list[str | None] = []

        def block(completion: CpuCompletion = completion, seen: list[str | None] = seen) -> None:
            try:
                completion.block_until_final()
                seen.append(None)
            except TransferFailed as error:
                seen.append(error.reason)

        threads = [threading.Thread(target=block) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        assert seen == []
        getattr(completion, end)()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert seen == [outcome] * 3


async def test_many_ends_share_one_hand_over() -> None:
    from kvlease.runtime.wake import TrioWaker

    waker = TrioWaker.current()
    handed: list[int] = []
    drain = waker._token.run_sync_soon

    completions = [recorded() for _ in range(50)]
    ready = threading.Event()

    def finish() -> None:
        for completion in completions:
            completion.finish()
        ready.set()

    class CountingToken:
        def run_sync_soon(self, call: object) -> None:
            handed.append(1)
            drain(call)  # type: ignore[arg-type]

    waker._token = CountingToken()  # type: ignore[assignment]
    async with trio.open_nursery() as nursery:
        for completion in completions:
            nursery.start_soon(completion.wait_done)
        await trio.testing.wait_all_tasks_blocked()
        threading.Thread(target=finish).start()
        # Holding the Trio thread while all of them end makes the count certain.
        ready.wait(PATIENCE_S)
    assert len(handed) == 1


def test_a_joint_without_parts_is_failed() -> None:
    """F02, test 5 (sglang#39699): a fence over nothing must not report success."""
    nothing = joint()
    assert nothing.state is FAILED
    with pytest.raises(TransferFailed, match="nothing planned"):
        nothing.raise_if_failed()


async def test_a_joint_is_ready_only_when_all_parts_are() -> None:
    layer = joint(8, 4)
    one, two = layer.parts
    one.set_recorded()
    assert layer.state is PLANNED
    one.finish(8)
    assert layer.state is PLANNED
    two.set_recorded()
    assert layer.state is RECORDED
    await layer.wait_recorded()
    two.finish(4)
    assert layer.state is DONE
    await layer.wait_done()


def test_one_bad_part_makes_the_joint_bad_for_good() -> None:
    layer = joint(8, 4)
    one, two = layer.parts
    one.revoke()
    assert layer.state is REVOKED
    two.fail("later")
    assert layer.state is REVOKED
    assert layer.problem is not None
    assert layer.problem.reason == "revoked"


STEPS = ("record", "finish", "short", "fail", "revoke")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(STEPS)), max_size=14))
def test_the_joint_follows_the_pure_machine(steps: list[tuple[int, str]]) -> None:
    layer = joint(8, 4, 0)
    expected: CompletionState = PLANNED
    for index, step in steps:
        part = layer.parts[index]
        size = part.copy.planned_nbytes
        try:
            match step:
                case "record":
                    part.set_recorded()
                case "finish":
                    part.finish(size)
                case "short":
                    part.finish(size + 1)
                case "fail":
                    part.fail("x")
                case _:
                    part.revoke()
        except IllegalTransition:
            pass
        if not expected.is_final:
            expected = joint_state([each.copy for each in layer.parts])
        assert layer.state is expected


async def test_hooks_hold_no_finished_waiter() -> None:
    completion = recorded()
    with trio.move_on_after(0):
        await completion.wait_done()
    gc.collect()
    assert completion._final_hooks == []
    assert not completion.on_recorded(lambda: None)
