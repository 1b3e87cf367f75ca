# mypy: disable-error-code="no-untyped-call"
# torch has no types for what it knows of CUDA.
"""How soon the host sees that a GPU is done, and what looking costs: several ways, and the waiter.

Run from the checkout on a machine with a CUDA device: ``python benchmarks/waiter.py``. A sleeping
kernel stands for a step's work; an event with a time behind it says when it really ended. The
device's clock is set by the host's before and after each row. The thread that waits is timed by its
own.
"""

import ctypes
import random
import statistics
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import final

import torch

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from _report import Report, Spread, make_parser  # noqa: E402  (run from a checkout)

from kvlease.runtime.cuda_spin import fine_timers, spinner  # noqa: E402
from kvlease.runtime.cuda_waiter import CudaWaiter  # noqa: E402

CYCLES = 10_000_000
SEEN_S = 2e-6
"""How late a spinning loop sees an event at best: what the device's clock is set by."""
SETTINGS = 20
"""How often the clocks are compared at a time; only the quickest look counts."""
WARM = 10
PLANS = ((0.3e-3, 60), (2e-3, 80), (20e-3, 20))
"""How long the work takes, and how often each way waits for it."""
LATE_US = 20.0
CPU_SHARE = 5.0


class Way(ABC):
    """A way to wait on a thread of its own."""

    def __init__(self) -> None:
        """Start the thread."""
        self._outbox: SimpleQueue[float] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @abstractmethod
    def _run(self) -> None: ...

    @abstractmethod
    def mark(self) -> None:
        """Record an event on the current stream and have the thread wait for it."""

    def seen(self) -> float:
        """Return when the thread saw it."""
        return self._outbox.get()

    def spent(self) -> float:
        """Return the seconds of a core that the thread has used, by its own clock."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    @abstractmethod
    def _stop(self) -> None: ...

    def close(self) -> None:
        """End the thread."""
        self._stop()
        self._thread.join()


@final
class PlainWay(Way):
    """Waits for one event after another by a function."""

    def __init__(
        self,
        wait: Callable[[torch.cuda.Event], None],
        *,
        fine: bool = False,
        blocking: bool = False,
    ) -> None:
        """Start the thread; ``fine`` is without the system's slack on sleeps."""
        self._wait = wait
        self._fine = fine
        self._event = torch.cuda.Event(blocking=blocking)
        self._inbox: SimpleQueue[bool] = SimpleQueue()
        super().__init__()

    def _run(self) -> None:
        if self._fine:
            fine_timers()
        while self._inbox.get():
            self._wait(self._event)
            self._outbox.put(time.perf_counter())

    def mark(self) -> None:
        """Record the event, and let the thread go on."""
        self._event.record()
        self._inbox.put(True)

    def _stop(self) -> None:
        self._inbox.put(False)


@final
class WaiterWay(Way):
    """The waiter of an engine, without the Trio task that owns it there."""

    def __init__(self) -> None:
        """Start the thread."""
        self._waiter = CudaWaiter(torch.cuda.Event, spin=spinner())
        self._lane = self._waiter.lane()
        super().__init__()

    def _run(self) -> None:
        self._waiter._work()

    def mark(self) -> None:
        """Record a point as a stream's worker does."""
        self._lane.watch(self._lane.record(self._passed, hurry=True))

    def _passed(self, _error: BaseException | None) -> None:
        self._outbox.put(time.perf_counter())

    def _stop(self) -> None:
        self._waiter.close()


def spin_until(event: torch.cuda.Event) -> float:
    """Return when a spinning loop sees an event."""
    while not event.query():
        pass
    return time.perf_counter()


def cycles_per_s() -> float:
    """Return how fast a sleeping kernel counts."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds: list[float] = []
    for _ in range(9):
        start.record()
        torch.cuda._sleep(CYCLES)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return CYCLES / statistics.median(seconds)


@final
class DeviceClock:
    """The times of events on the host's clock."""

    def __init__(self) -> None:
        """Begin the device's time."""
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record()
        self._marks: list[tuple[float, float]] = []

    def device_s(self, event: torch.cuda.Event) -> float:
        """Return when the device has passed an event, on its own clock."""
        elapsed: float = self._zero.elapsed_time(event)
        return elapsed / 1e3

    def set(self) -> None:
        """Compare the clocks; the stream must be idle, and the interpreter."""
        event = torch.cuda.Event(enable_timing=True)
        looks: list[tuple[float, float]] = []
        for _ in range(SETTINGS):
            event.record()
            seen_s, at_s = spin_until(event), self.device_s(event)
            looks.append((seen_s - SEEN_S - at_s, at_s))
        self._marks = [*self._marks[-1:], min(looks)]

    def host_s(self, at_s: float) -> float:
        """Return the host's time for a time of the device between the last two settings."""
        (before, first), (after, last) = self._marks
        return at_s + before + (after - before) * (at_s - first) / (last - first)


@final
class Bench:
    """Measures ways, with one clock for host and device."""

    def __init__(self, report: Report) -> None:
        """Start the device."""
        self._report = report
        self._cycles_per_s = cycles_per_s()
        self._clock = DeviceClock()

    def measure(
        self,
        name: str,
        way: Way,
        seconds: tuple[float, ...],
        count: int,
        jitter: float = 0.01,
        beside: Callable[[threading.Event], None] | None = None,
    ) -> tuple[float, float]:
        """Wait for work of those lengths in turn; return us late and % of a core."""
        self._clock.set()
        stop = threading.Event()
        thread = threading.Thread(target=beside or threading.Event.wait, args=(stop,), daemon=True)
        thread.start()
        turns, spent = self._turns(way, seconds, count, jitter)
        stop.set()
        thread.join()
        way.close()
        torch.cuda.synchronize()
        self._clock.set()
        late = [(seen - self._clock.host_s(end)) * 1e6 for _, end, seen in turns]
        waited = sum(seen - self._clock.host_s(start) for start, _, seen in turns)
        share = 100 * spent / waited
        what = f"{name}, {' and '.join(f'{1e3 * each:g}' for each in seconds)} ms"
        self._report.row(f"{what}: late", Spread.of(late), "us")
        self._report.row(f"{what}: of a core", Spread(share, share, share, 1), "%")
        return statistics.median(late), share

    def _turns(
        self, way: Way, seconds: tuple[float, ...], count: int, jitter: float
    ) -> tuple[list[tuple[float, float, float]], float]:
        """Return begin and end on the device, when the end was seen, and the thread's seconds."""
        rng = random.Random(1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        turns: list[tuple[float, float, float]] = []
        spent = 0.0
        for number in range(count + WARM):
            before = way.spent()
            start.record()
            length = seconds[number % len(seconds)] * rng.uniform(1 - jitter, 1 + jitter)
            torch.cuda._sleep(int(self._cycles_per_s * length))
            end.record()
            way.mark()
            seen = way.seen()
            time.sleep(300e-6)
            torch.cuda.current_stream().synchronize()
            if number >= WARM:
                turns.append((self._clock.device_s(start), self._clock.device_s(end), seen))
                spent += way.spent() - before
        return turns, spent


def poll(pause_s: float) -> Callable[[torch.cuda.Event], None]:
    """Return a loop that asks and sleeps."""

    def wait(event: torch.cuda.Event) -> None:
        while not event.query():
            time.sleep(pause_s)

    return wait


def other_ways() -> dict[str, Callable[[], Way]]:
    """Return the ways that the waiter is measured against."""
    runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")

    def spin(event: torch.cuda.Event) -> None:
        runtime.cudaEventSynchronize(ctypes.c_void_p(event.cuda_event))

    def synchronize(event: torch.cuda.Event) -> None:
        event.synchronize()

    return {
        "blocking synchronize": lambda: PlainWay(synchronize, blocking=True),
        "spinning synchronize, without the interpreter": lambda: PlainWay(spin),
        "query and sleep 20 us": lambda: PlainWay(poll(20e-6)),
        "the same, exact timers": lambda: PlainWay(poll(20e-6), fine=True),
    }


def compute(stop: threading.Event) -> None:
    """Be a thread that never lets the interpreter's lock go by itself."""
    while not stop.is_set():
        sum(range(200))


def launch(stop: threading.Event) -> None:
    """Be a worker that launches small kernels on a stream of its own."""
    values = torch.zeros(1024, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        while not stop.is_set():
            for _ in range(100):
                values.add_(1)
            torch.cuda.current_stream().synchronize()


def beside(bench: Bench, name: str, work: Callable[[threading.Event], None]) -> None:
    """Measure the waiter beside a busy thread, with several turns of the interpreter's lock."""
    usual = sys.getswitchinterval()
    for turn_s in (usual, 5e-4, 1e-4):
        sys.setswitchinterval(turn_s)
        what = f"beside {name}, turns of {1e3 * turn_s:g} ms"
        bench.measure(what, WaiterWay(), (2e-3,), 50, beside=work)
    sys.setswitchinterval(usual)


def main() -> int:
    """Measure; exit 1 if the waiter is too late or too busy."""
    args = make_parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("waiter: skipped, there is no CUDA device here")
        return 0
    report = Report("waiter", {"device": torch.cuda.get_device_name()})
    bench = Bench(report)
    for name, make in other_ways().items():
        for seconds, count in PLANS:
            bench.measure(name, make(), (seconds,), count)
    for jitter in (0.01, 0.03, 0.1, 0.5):
        for seconds, count in PLANS:
            name = f"waiter, +-{100 * jitter:.0f} %"
            late, share = bench.measure(name, WaiterWay(), (seconds,), count, jitter)
            if jitter == 0.01 and seconds > 1e-3:
                report.target(f"late at {1e3 * seconds:g} ms, us", late, LATE_US)
                report.target(f"of a core at {1e3 * seconds:g} ms, %", share, CPU_SHARE)
    bench.measure("waiter, in turn", WaiterWay(), (2e-3, 20e-3), 40)
    beside(bench, "launches", launch)
    beside(bench, "pure Python", compute)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
