"""What the audit costs: runs that sum and compare sampled pages, against runs that do not.

Run from the checkout: ``python benchmarks/audit.py``. The built-in tool-agent sessions are served
on the embedded model in pairs of runs, audited and not, in alternating order, so that both meet the
same noise. The device tier is pressed, so that pages are evicted, restored and read again.

Where other processes share the cores, wall times of two equal runs differ by more than the audit
costs, and so do CPU times, by less. So the pairs are many and short, and each gives two ratios,
whose medians are told with the interval that they show, and with what equal runs show that follow
one another; and the audited runs have a figure of their own: the CPU time inside the audit's own
calls (hashing, summing, comparing, on whichever thread), over the wall time of the run or the CPU
time of the process, whichever is less. The bound is held against all three. The last is what the
audit would cost if nothing of it overlapped with anything.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import torch
import trio
from attrs import define, frozen

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from _report import Report, Spread, make_parser  # noqa: E402  (run from a checkout)

from kvlease.pools.audit import Audit, Check, Taking  # noqa: E402
from kvlease.protocols.config import EngineConfig  # noqa: E402
from kvlease.protocols.ports import ModelRunner  # noqa: E402
from kvlease.runtime.counters import Counters  # noqa: E402
from kvlease.runtime.engine import open_engine  # noqa: E402
from kvlease.runtime.models import load  # noqa: E402
from kvlease.services.driver import Driver  # noqa: E402
from kvlease.services.options import PRESSED_PAGES  # noqa: E402
from kvlease.services.workload import WorkloadShape, tool_agent_sessions  # noqa: E402

PAGE_TOKENS = 64
RATE = 0.01
P = ParamSpec("P")
T = TypeVar("T")


@define
class Meter:
    """CPU seconds inside the audit's calls, over all threads."""

    seconds: float = 0.0
    calls: int = 0

    def around(self, call: Callable[P, T]) -> Callable[P, T]:
        """Return the call, measured on the thread that makes it."""
        lock = threading.Lock()

        def measured(*args: P.args, **kwargs: P.kwargs) -> T:
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                spent = time.thread_time() - began
                with lock:
                    self.seconds += spent
                    self.calls += 1

        return measured


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Measure every call of the audit for a block."""
    places: list[tuple[type, Callable[..., object]]] = [
        (Audit, Audit.begin),
        (Audit, Audit.after_step),
        (Taking, Taking.__call__),
        (Taking, Taking.finish),
        (Check, Check.run),
    ]
    for owner, call in places:
        setattr(owner, call.__name__, meter.around(call))
    try:
        yield
    finally:
        for owner, call in places:
            setattr(owner, call.__name__, call)


@frozen
class Served:
    """One run: seconds by the clock, CPU seconds of the process and of the audit, its counters."""

    wall_s: float
    cpu_s: float
    audit_s: float
    counters: Counters


async def serve(runner: ModelRunner, sessions: int, rate: float) -> Served:
    """Serve all sessions on a fresh engine."""
    config = EngineConfig(
        page_tokens=PAGE_TOKENS,
        device_pages=PRESSED_PAGES if sessions >= 64 else 48 + PRESSED_PAGES * sessions // 64,
        max_sessions=sessions,
        audit_rate=rate,
    )
    meter = Meter()
    async with open_engine(runner, config) as engine:
        driver = Driver(engine, config.request_timeout_s)
        shape = WorkloadShape(turns=3, pause_s=0.0)
        work = list(tool_agent_sessions(sessions, shape, engine.model.vocab_size, 0))
        with metered(meter):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            await driver.serve(work, sessions)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        counters = engine.statistics().counters
    assert not driver.tally.complaints, driver.tally.complaints
    assert counters.audit_mismatches == 0, "a false alarm"
    assert rate or not meter.calls, "without a rate nothing of the audit is called"
    return Served(wall_s, cpu_s, meter.seconds, counters)


async def compare(
    runner: ModelRunner, sessions: int, rate: float, pairs: int
) -> list[tuple[Served, Served]]:
    """Serve in pairs, audited and not, in alternating order; the first pair warms up."""
    found: list[tuple[Served, Served]] = []
    for number in range(pairs + 1):
        both: dict[float, Served] = {}
        for one in (rate, 0.0) if number % 2 else (0.0, rate):
            both[one] = await serve(runner, sessions, one)
        if number:
            found.append((both[rate], both[0.0]))
    return found


def added(
    pairs: Iterable[tuple[Served, Served]], seconds: Callable[[Served], float]
) -> list[float]:
    """Return what the first of each pair took more than the second, in per cent."""
    return [100 * (seconds(one) / seconds(other) - 1) for one, other in pairs]


def tell(rate: float, pairs: list[tuple[Served, Served]], report: Report) -> None:
    """Print one comparison, and hold the bound against it unless every page is audited."""
    name = f"rate {rate:g}"
    of_wall, of_cpu = attrgetter("wall_s"), attrgetter("cpu_s")
    wall, cpu = added(pairs, of_wall), added(pairs, of_cpu)
    inside = Spread.of([100 * on.audit_s / min(on.wall_s, on.cpu_s) for on, _ in pairs])
    report.row(f"{name}: a run without the audit", Spread.of([o.wall_s for _, o in pairs]), "s")
    report.row(f"{name}: added to wall time", Spread.of(wall), "%")
    report.row(f"{name}: added to CPU time", Spread.of(cpu), "%")
    report.row(f"{name}: CPU inside the audit, of wall or CPU", inside, "%")
    compared = [float(on.counters.audited_pages) for on, _ in pairs]
    report.row(f"{name}: pages compared", Spread.of(compared), "")
    if rate < 1:
        equal = list(pairwise(off for _, off in pairs))
        report.shown(f"{name}: added to wall time, %", wall, 1.0, added(equal, of_wall))
        report.shown(f"{name}: added to CPU time, %", cpu, 1.0, added(equal, of_cpu))
        report.target(f"{name}: CPU inside the audit, %", inside.median, 1.0)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of runs (default 20)")
    parser.add_argument("--sessions", type=int, default=4, help="of those pairs (default 4)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = {"pairs": options.pairs, "sessions": options.sessions, "page tokens": PAGE_TOKENS}
    report = Report("audit", about)
    runner = load(None, EngineConfig(page_tokens=PAGE_TOKENS)).runner
    tell(RATE, trio.run(compare, runner, options.sessions, RATE, options.pairs), report)
    tell(1.0, trio.run(compare, runner, options.sessions, 1.0, max(1, options.pairs // 8)), report)
    return report.finish(cast("Path | None", options.json))


if __name__ == "__main__":
    sys.exit(main())
