"""When the waiter looks: how late it sees points and what it spends, on a model of its clock."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest

from kvlease.runtime.cuda_pace import LOOK_S, Oversleep, Pace

SHARE = 0.05
SLEEP_S = 6e-6
"""What a sleep adds to its time, and costs of the core."""
ASK_S = 5e-6
SPIN_S = 30e-6


LONG_S = 250e-6


def watch(
    durations: Sequence[float],
    *,
    share: float = SHARE,
    wakes_late_s: float = 0.0,
    allows: bool = True,
) -> tuple[list[float], float]:
    """Wait for points one by one; return how late each was seen, and the share of a core spent.

    Long sleeps end late by about ``wakes_late_s``, which is allowed for or not.
    """
    rng = random.Random(0)
    pace, oversleep = Pace(share), Oversleep(300e-6)
    now = spent = 0.0
    late: list[float] = []
    for duration in durations:
        passed_at = now + duration
        pace.began(now)
        now += 20e-6  # until the thread was woken
        spent += 2 * ASK_S
        while now < passed_at:
            now += ASK_S
            spent += ASK_S
            pace.looked(now, 0)
            pause = pace.next_look_s(now, 0)
            if pause > LONG_S + oversleep.late_s:
                over = wakes_late_s * rng.uniform(0.7, 1.3)
                wakes = now + pause - (oversleep.late_s if allows else 0.0)
                oversleep.ended(over)
                now = max(wakes + over, now + pause if allows else 0.0)
                spent += 2 * SLEEP_S
            elif pause:
                now += pause + SLEEP_S * rng.uniform(0.8, 1.5)
                spent += SLEEP_S
            else:
                moment = min(SPIN_S, max(passed_at - now, 0.0) + 1e-6)
                now += moment
                spent += moment
        pace.looked(now, 1)
        late.append(now - passed_at)
    return late[10:], spent / now


def spread(seconds: float, share: float, count: int = 200) -> list[float]:
    rng = random.Random(1)
    return [seconds * rng.uniform(1 - share, 1 + share) for _ in range(count)]


@pytest.mark.parametrize("seconds", [2e-3, 5e-3, 20e-3])
def test_steps_of_steady_length_are_seen_at_once_and_for_little(seconds: float) -> None:
    late, spent = watch(spread(seconds, 0.01))
    assert statistics.median(late) < 20e-6
    assert spent < SHARE


@pytest.mark.parametrize("seconds", [2e-3, 20e-3])
@pytest.mark.parametrize("wakes_late_s", [80e-6, 200e-6])
def test_a_machine_that_wakes_late_is_woken_earlier(seconds: float, wakes_late_s: float) -> None:
    late, spent = watch(spread(seconds, 0.01), wakes_late_s=wakes_late_s)
    assert statistics.median(late) < 20e-6
    assert spent < SHARE


def test_a_point_that_was_passed_before_the_first_look_does_not_teach_to_look_later() -> None:
    late, _ = watch(spread(2e-3, 0.01, 400), wakes_late_s=100e-6, allows=False)
    assert statistics.median(late[-50:]) < 100e-6


def test_what_sleeps_are_late_by_is_learnt_fast_and_forgotten_slowly() -> None:
    oversleep = Oversleep(300e-6)
    for _ in range(15):
        oversleep.ended(100e-6)
    assert oversleep.late_s > 90e-6
    oversleep.ended(10e-6)
    assert oversleep.late_s > 80e-6, "one sleep on time is no proof"
    oversleep.ended(5e-3)
    assert oversleep.late_s < 200e-6, "one that was kept from its core is none either"
    for _ in range(100):
        oversleep.ended(10e-6)
    assert oversleep.late_s < 20e-6


@pytest.mark.parametrize("seconds", [2e-3, 20e-3])
def test_steps_that_vary_by_a_tenth_are_seen_soon(seconds: float) -> None:
    late, spent = watch(spread(seconds, 0.1))
    assert statistics.median(late) < 50e-6
    assert spent < SHARE


def test_a_step_in_ten_that_takes_longer_costs_the_others_nothing() -> None:
    steady = spread(2e-3, 0.01)
    durations = [each * (1.1 if number % 10 == 0 else 1.0) for number, each in enumerate(steady)]
    late, spent = watch(durations)
    assert statistics.median(late) < 10e-6
    assert max(late) < 200e-6
    assert spent < SHARE


def test_what_nobody_could_foresee_is_seen_as_soon_as_the_share_allows() -> None:
    late, spent = watch(spread(5e-3, 0.5))
    assert statistics.median(late) < LOOK_S / SHARE
    assert max(late) < 8 * LOOK_S / SHARE
    assert spent < 1.5 * SHARE


def test_steps_of_two_kinds_are_both_expected() -> None:
    durations = [2e-3 if number % 2 else 20e-3 for number in range(100)]
    late, _ = watch(durations)
    assert statistics.median(late) < 50e-6


def test_a_kind_that_was_never_seen_is_not_waited_out() -> None:
    late, _ = watch([20e-3] * 20 + [1e-3])
    assert late[-1] < 8 * LOOK_S / SHARE


def test_where_nothing_is_known_the_first_look_does_not_wait_for_ever() -> None:
    pace = Pace(SHARE)
    pace.began(1.0)
    assert 0 < pace.next_look_s(1.0, 0) <= LOOK_S / SHARE
    assert pace.rare_look_s() == 6 * LOOK_S / SHARE


def test_a_point_behind_others_is_expected_after_them() -> None:
    pace = Pace(SHARE)
    for number in range(6):
        pace.began(number * 1.0)
        pace.looked(number * 1.0 + 1e-3 - 1e-6, 0)
        pace.looked(number * 1.0 + 1e-3, 1)
    pace.began(10.0)
    assert pace.next_look_s(10.0 + 0.99e-3, 0) < 2 * LOOK_S
    assert pace.next_look_s(10.0 + 0.99e-3, 9) > 10 * LOOK_S
    assert pace.next_look_s(10.0 + 9.99e-3, 9) < 2 * LOOK_S
