"""The bounded wait in C: it ends in time, and as soon as the event was passed."""

import sys
import time

import pytest
import torch

from kvlease.runtime.cuda_spin import fine_timers, spinner
from kvlease.runtime.cuda_streams import TURN_S, _short_turns
from tests.runtime.cuda.devices import CYCLES_PER_S


@pytest.mark.gpu
def test_a_spin_ends_with_the_event_or_in_time() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    spin = spinner()
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(100):
        spin(event)
    assert time.perf_counter() - begin < 100 * 20e-6, "it went on although the event was passed"
    torch.cuda._sleep(int(CYCLES_PER_S * 0.05))  # type: ignore[no-untyped-call]
    event.record()
    begin = time.perf_counter()
    while not event.query():  # type: ignore[no-untyped-call]
        before = time.perf_counter()
        spin(event)
        assert time.perf_counter() - before < 5e-3
    assert time.perf_counter() - begin > 0.02


def test_without_cuda_there_are_short_sleeps() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch knows CUDA")
    begin = time.perf_counter()
    spinner()(object())
    assert 5e-6 <= time.perf_counter() - begin < 0.1


def test_sleeps_end_on_time() -> None:
    fine_timers()
    shortest = 1.0
    for _ in range(200):
        begin = time.perf_counter()
        time.sleep(20e-6)
        shortest = min(shortest, time.perf_counter() - begin)
    assert shortest < 60e-6, "50 us are still added to every sleep"


def test_threads_take_shorter_turns_beside_a_device_and_the_usual_ones_after() -> None:
    usual = sys.getswitchinterval()
    with _short_turns():
        assert sys.getswitchinterval() == pytest.approx(TURN_S, abs=2e-6)
        sys.setswitchinterval(TURN_S / 10)
        with _short_turns():
            assert sys.getswitchinterval() == pytest.approx(TURN_S / 10, abs=2e-6), (
                "shorter ones are kept"
            )
    assert sys.getswitchinterval() == pytest.approx(usual, abs=2e-6)
