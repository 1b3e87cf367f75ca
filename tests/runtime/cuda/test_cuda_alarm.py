"""The waiter's alarm: on time, sooner if another thread says so, and never missed."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

import pytest

from kvlease.runtime.cuda_alarm import Alarm, BellTimer, SystemTimer, Timer
from tests.runtime.rig import PATIENCE_S

AGES_S = 1000.0


@pytest.fixture(params=["system", "bell"])
def alarm(request: pytest.FixtureRequest) -> Alarm:
    return Alarm(_system_timer() if request.param == "system" else BellTimer())


def _system_timer() -> Timer:
    try:
        return SystemTimer()
    except (OSError, AttributeError):
        pytest.skip("this system has no such timers")


def from_another_thread(call: Callable[[], None], after_s: float = 0.02) -> threading.Timer:
    timer = threading.Timer(after_s, call)
    timer.start()
    return timer


def test_it_goes_off_in_time(alarm: Alarm) -> None:
    at = time.perf_counter() + 0.02
    alarm.set(at)
    assert alarm.wait() == at
    assert at <= time.perf_counter() < at + PATIENCE_S


@pytest.mark.parametrize("planned_s", [AGES_S, math.inf])
def test_another_thread_brings_it_forward(alarm: Alarm, planned_s: float) -> None:
    alarm.set(time.perf_counter() + planned_s)
    at = time.perf_counter() + 0.05
    other = from_another_thread(lambda: alarm.bring_forward(at))
    assert alarm.wait() == at
    assert at <= time.perf_counter() < at + PATIENCE_S
    other.join()


@pytest.mark.parametrize("planned_s", [AGES_S, math.inf])
def test_another_thread_sets_it_off(alarm: Alarm, planned_s: float) -> None:
    alarm.set(time.perf_counter() + planned_s)
    other = from_another_thread(lambda: alarm.bring_forward(0.0))
    assert alarm.wait() == 0.0
    other.join()


def test_what_is_later_changes_nothing(alarm: Alarm) -> None:
    at = time.perf_counter() + 0.05
    alarm.set(at)
    other = from_another_thread(lambda: alarm.bring_forward(at + AGES_S))
    assert alarm.wait() == at
    other.join()


def test_it_does_not_go_off_for_what_came_while_its_sleeper_was_awake(alarm: Alarm) -> None:
    alarm.set(time.perf_counter() + AGES_S)
    alarm.bring_forward(0.0)
    alarm.unset()
    alarm.bring_forward(0.0)
    at = time.perf_counter() + 0.05
    alarm.set(at)
    assert alarm.wait() == at
    assert time.perf_counter() >= at


def test_nothing_shown_before_it_was_brought_forward_is_missed(alarm: Alarm) -> None:
    """A sleeper that would sleep for ever, and somebody who shows it one thing after another."""
    shown = seen = 0
    count = 2000
    asks = threading.Semaphore(1)

    def show() -> None:
        nonlocal shown
        for _ in range(count):
            assert asks.acquire(timeout=PATIENCE_S), "the sleeper slept on"
            shown += 1
            alarm.bring_forward(0.0)

    other = threading.Thread(target=show)
    other.start()
    while (seen < count and other.is_alive()) or seen < shown:
        alarm.set(time.perf_counter() + PATIENCE_S)
        if seen == shown:
            alarm.wait()
        alarm.unset()
        if seen != shown:
            seen += 1
            asks.release()
    other.join()
    assert seen == count


def test_a_timer_is_given_back() -> None:
    _system_timer()
    before = os.listdir("/proc/self/fd")
    timers = [_system_timer() for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == len(before) + 5
    timers.clear()
    assert len(os.listdir("/proc/self/fd")) == len(before)
