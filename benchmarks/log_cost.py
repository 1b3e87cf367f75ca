"""What the event log costs: a run with its log at level audit in a file, against one without.

Run from the checkout: ``python benchmarks/log_cost.py``. The built-in tool-agent sessions are
served in pairs of runs, audit and off, in alternating order, so that both meet the same noise: with
the embedded model's arithmetic, and without any (``compute none``), where the log stands out most.

Where other processes share the cores, wall times of two equal runs differ by more than the log
costs. So the pairs are many and short, and each gives two figures: what audit adds to wall time and
what it adds to the CPU time of all threads but the one that computes, over the wall or the CPU time
of the run without a log, whichever is less. Logging is done by those threads; the second figure is
what the log would cost if nothing of it overlapped with computing. The bound is held against both,
by the medians with the interval that the pairs show; what equal runs show that follow one another
is told beside it.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch
import trio
from attrs import define, frozen

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from _report import Report, Spread, make_parser  # noqa: E402  (run from a checkout)

from kvlease.protocols.config import Compute, EngineConfig  # noqa: E402
from kvlease.protocols.ports import ModelRunner  # noqa: E402
from kvlease.runtime.engine import open_engine  # noqa: E402
from kvlease.runtime.event_log import Level, open_event_log  # noqa: E402
from kvlease.runtime.models import load  # noqa: E402
from kvlease.services.driver import Driver  # noqa: E402
from kvlease.services.options import PRESSED_PAGES  # noqa: E402
from kvlease.services.workload import WorkloadShape, tool_agent_sessions  # noqa: E402

PAGE_TOKENS = 64
PAIR: tuple[Level, Level] = ("audit", "off")


@define
class Served:
    """One run: seconds by the clock, CPU seconds, those beside compute, events, tokens."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    beside_s: float = 0.0
    events: int = 0
    output_tokens: int = 0


def cpu_beside_compute() -> float:
    """Return the CPU seconds of this process less those of the stream worker that computes."""
    named = (thread for thread in threading.enumerate() if thread.name == "kvlease-compute")
    ident = next(named).ident
    assert ident is not None, "an open engine's worker is running"
    return time.process_time() - time.clock_gettime(time.pthread_getcpuclockid(ident))


@contextmanager
def timing(served: Served) -> Iterator[None]:
    """Add a block's times to a run."""
    wall_s, cpu_s, beside_s = time.perf_counter(), time.process_time(), cpu_beside_compute()
    yield
    served.cpu_s += time.process_time() - cpu_s
    served.wall_s += time.perf_counter() - wall_s
    served.beside_s += cpu_beside_compute() - beside_s


@frozen
class Workload:
    """What every run serves: sessions, their shape, and the engine they are served by."""

    sessions: int
    shape: WorkloadShape
    runner: ModelRunner | None
    config: EngineConfig

    async def serve(self, level: Level, folder: Path) -> Served:
        """Serve all sessions on a fresh engine."""
        path = None if level == "off" else folder / "events.kvlog"
        served = Served()
        with open_event_log(path, level) as log:
            async with open_engine(self.runner, self.config, log=log) as engine:
                driver = Driver(engine, self.config.request_timeout_s)
                vocab_size = engine.model.vocab_size
                sessions = list(tool_agent_sessions(self.sessions, self.shape, vocab_size, 0))
                with timing(served):
                    await driver.serve(sessions, self.sessions)
            assert not driver.tally.complaints, driver.tally.complaints
            assert log.complete, "the file has to have every event"
            served.events = log.statistics().events
        served.output_tokens = driver.tally.output_tokens
        return served


def make_workload(sessions: int, turns: int, compute: Compute) -> Workload:
    """Press the device tier as `kvlease run` does; fewer sessions need a larger share of it."""
    config = EngineConfig(
        compute=compute,
        page_tokens=PAGE_TOKENS,
        device_pages=PRESSED_PAGES if sessions >= 64 else 48 + PRESSED_PAGES * sessions // 64,
        max_sessions=sessions,
    )
    # Loaded once: the built-in runner of ``compute none`` is made by the engine itself.
    runner = load(None, config).runner if compute == "model" else None
    return Workload(sessions, WorkloadShape(turns=turns, pause_s=0.0), runner, config)


async def compare(workload: Workload, pairs: int) -> dict[Level, list[Served]]:
    """Serve in pairs, in the order audit, off, off, audit, and so on; the first pair warms up."""
    runs: dict[Level, list[Served]] = {level: [] for level in PAIR}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(pairs + 1):
            for level in PAIR if number % 2 else reversed(PAIR):
                served = await workload.serve(level, Path(folder))
                if number:
                    runs[level].append(served)
    return runs


def added_wall(pairs: Iterable[tuple[Served, Served]]) -> list[float]:
    """Return what the first of each pair took more than the second by the clock, in per cent."""
    return [100 * (one.wall_s / other.wall_s - 1) for one, other in pairs]


def added_beside(pairs: Iterable[tuple[Served, Served]]) -> list[float]:
    """Return the same of CPU time beside compute, of the second's wall or CPU time."""
    return [
        100 * (one.beside_s - other.beside_s) / min(other.wall_s, other.cpu_s)
        for one, other in pairs
    ]


def tell(name: str, runs: dict[Level, list[Served]], report: Report, bound: float | None) -> None:
    """Print one comparison, and hold the bound, if there is one, against it."""
    both = list(zip(runs["audit"], runs["off"], strict=True))
    wall, beside = added_wall(both), added_beside(both)
    report.row(f"{name}: a run without the log", Spread.of([off.wall_s for _, off in both]), "s")
    report.row(f"{name}: added to wall time", Spread.of(wall), "%")
    report.row(f"{name}: CPU added beside compute, of wall or CPU", Spread.of(beside), "%")
    per_token = [audit.events / audit.output_tokens for audit, _ in both]
    report.row(f"{name}: events an output token", Spread.of(per_token), "")
    if bound is not None:
        equal = list(pairwise(off for _, off in both))
        report.shown(f"{name}: added to wall time, %", wall, bound, added_wall(equal))
        report.shown(f"{name}: CPU added beside compute, %", beside, bound, added_beside(equal))


async def count_events(workload: Workload) -> float:
    """Return the events an output token of one run at level audit."""
    with tempfile.TemporaryDirectory() as folder:
        served = await workload.serve("audit", Path(folder))
    return served.events / served.output_tokens


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of runs (default 20)")
    parser.add_argument("--sessions", type=int, default=4, help="of those pairs (default 4)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = {"pairs": options.pairs, "sessions": options.sessions, "page tokens": PAGE_TOKENS}
    report = Report("log_cost", about)
    per_token = trio.run(count_events, make_workload(64, 3, "model"))
    report.target("kvlease run, 64 sessions: events an output token", per_token, 2.0)
    pairs = trio.run(compare, make_workload(options.sessions, 3, "model"), options.pairs)
    tell("compute on", pairs, report, 3.0)
    pairs = trio.run(compare, make_workload(64, 3, "none"), max(1, options.pairs // 4))
    tell("compute none", pairs, report, None)
    return report.finish(cast("Path | None", options.json))


if __name__ == "__main__":
    sys.exit(main())
