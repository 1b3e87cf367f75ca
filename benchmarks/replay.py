"""How fast `kvlease replay` judges a log: events a second of CPU time, beside decoding alone.

Run from the checkout: ``python benchmarks/replay.py``. A real run of the built-in tool-agent
sessions writes a log, and empties its cache before it closes. The log is then repeated until it
has ``--events`` lines: each repetition continues the numbers, the clock and the pages' epochs of
the one before, so that the whole is a log that one long run could have written, and is clean.

Each sample reads a file of a quarter of that twice: decoding its blocks and dropping them, and
judging it. Both are CPU time of this one thread, with the collector off; what judging took by the
clock is told beside it. Neighbours on the machine take caches and clock all the same, and make a
sample slower and never faster: so the fastest of many short samples is told beside the medians, and
held to the target; the ratio of the two is free of the machine's speed.
"""

import gc
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import trio

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from _report import Report, Spread, make_parser  # noqa: E402  (run from a checkout)

from kvlease.protocols import events as ev  # noqa: E402
from kvlease.protocols.config import EngineConfig  # noqa: E402
from kvlease.runtime.engine import open_engine  # noqa: E402
from kvlease.runtime.event_log import open_event_log  # noqa: E402
from kvlease.services.driver import Driver  # noqa: E402
from kvlease.services.options import PRESSED_PAGES  # noqa: E402
from kvlease.services.replay.checker import check_log  # noqa: E402
from kvlease.services.replay.reader import open_log  # noqa: E402
from kvlease.services.workload import WorkloadShape, tool_agent_sessions  # noqa: E402

IDS = (
    "request",
    "lease",
    "transfer",
    "step",
    "read",
    "source_lease",
    "destination_lease",
    "reader",
)
LISTS = ("leases", "transfers", "steps")
RUNS = ("pages", "source", "destination")
Line = dict[str, object]


async def record(path: Path, sessions: int, turns: int) -> None:
    """Serve the built-in workload once, at level audit, and empty the cache at its end."""
    config = EngineConfig(page_tokens=64, device_pages=PRESSED_PAGES, max_sessions=sessions)
    with open_event_log(path, "audit") as log:
        async with open_engine(None, config, log=log) as engine:
            driver = Driver(engine, config.request_timeout_s)
            shape = WorkloadShape(turns=turns, pause_s=0.0)
            work = list(tool_agent_sessions(sessions, shape, engine.model.vocab_size, 0))
            await driver.serve(work, sessions)
            # What a copy still uses stays: a page goes when it has returned.
            while engine.statistics().device.sealed or engine.statistics().host.sealed:
                await engine.cache.evict(b"")
                await trio.sleep(0.05)
        assert not driver.tally.complaints, driver.tally.complaints


class Repeater:
    """Writes a log again and again, as one."""

    def __init__(self, lines: list[Line]) -> None:
        """Take the lines between the head and the close, and learn what they count up to."""
        self.lines = lines
        self.epochs = {"device": Counter[int](), "host": Counter[int]()}
        self.largest = Counter[str]()
        for line in lines:
            for key in IDS:
                if isinstance(number := line.get(key), int):
                    kind = self._kind(key)
                    self.largest[kind] = max(self.largest[kind], number)
            if line["event"] == "page.free":
                for first, count, epoch in cast("list[list[int]]", line["pages"]):
                    for page in range(first, first + count):
                        self.epochs[self._tier(line, "pages")][page] = epoch + 1
        self.span_ns = cast("int", lines[-1]["t_ns"]) - cast("int", lines[0]["t_ns"]) + 1

    @staticmethod
    def _kind(key: str) -> str:
        return {"read": "step", "source_lease": "lease", "destination_lease": "lease",
                "reader": "lease"}.get(key, key.rstrip("s"))  # fmt: skip

    @staticmethod
    def _tier(line: Line, key: str) -> str:
        name = "tier" if key == "pages" else f"{key}_tier"
        return cast("str", line.get(name, "device"))

    def repetition(self, number: int) -> Iterator[Line]:
        """Yield the lines of one repetition, the first is 0."""
        by = {kind: most * number for kind, most in self.largest.items()}
        shift = len(self.lines) * number
        for line in self.lines:
            new = dict(line)
            new["seq"] = cast("int", line["seq"]) + shift
            for key in ("t_ns", "deadline_ns"):
                if new.get(key):
                    new[key] = cast("int", new[key]) + self.span_ns * number
            for key in IDS:
                if new.get(key):
                    new[key] = cast("int", new[key]) + by[self._kind(key)]
            for key in LISTS:
                if key in new:
                    new[key] = [n + by[self._kind(key)] for n in cast("list[int]", new[key])]
            for key in RUNS:
                if key in new:
                    runs = cast("list[list[int]]", new[key])
                    new[key] = self._runs(runs, self._tier(line, key), number)
            self._rows(new, by, shift)
            yield new

    def _runs(self, runs: list[list[int]], tier: str, number: int) -> list[tuple[int, int, int]]:
        ends = self.epochs[tier]
        pages = [page for first, count, _ in runs for page in range(first, first + count)]
        epochs = [epoch for _, count, epoch in runs for _ in range(count)]
        later = [e + ends[p] * number for p, e in zip(pages, epochs, strict=True)]
        return ev.runs_of(pages, later)

    @staticmethod
    def _rows(new: Line, by: dict[str, int], shift: int) -> None:
        """Shift what stands in rows: openings, stalls, rows of a step."""
        if "opens" in new:
            opens = cast("list[list[int]]", new["opens"])
            new["opens"] = [[a + by["lease"], b, c, d + shift] for a, b, c, d in opens]
        if "stalls" in new:
            stalls = cast("list[list[int]]", new["stalls"])
            new["stalls"] = [[a + by["transfer"], b, c] for a, b, c in stalls]
        if "rows" in new:
            rows = cast("list[list[int]]", new["rows"])
            new["rows"] = [[a + by["request"], b + by["lease"], *rest] for a, b, *rest in rows]


def enlarge(short: Path, long: Path, num_events: int) -> Counter[str]:
    """Repeat a log until it has at least so many lines; return how many of each type it has."""
    lines = [cast("Line", msgspec.json.decode(text)) for text in short.read_bytes().splitlines()]
    head, inner, last = lines[0], lines[1:-1], lines[-1]
    assert last["event"] == "log.close", "the run closed its log"
    repeater, number = Repeater(inner), 0
    encode = msgspec.json.Encoder().encode_lines
    counts = Counter[str](cast("str", line["event"]) for line in inner)
    with long.open("wb") as file:
        file.write(encode([head]))
        while number == 0 or number * len(inner) < num_events:
            file.write(encode(list(repeater.repetition(number))))
            number += 1
        seq = number * len(inner) + 2
        t_ns = cast("int", last["t_ns"]) + repeater.span_ns * number
        file.write(encode([{**last, "seq": seq, "t_ns": t_ns, "events": seq - 1}]))
    return Counter({name: count * number for name, count in counts.items()})


def decode(path: Path) -> int:
    """Decode a log and drop it; return how many events it has."""
    with open_log(str(path)) as log:
        return sum(len(events) for _, events in log.blocks())


def judge(path: Path) -> int:
    """Judge a log, which has to be clean; return how many events it has."""
    verdict = check_log(str(path))
    assert verdict.verdict == "clean", (verdict.violation_counts, verdict.violations[:1])
    return verdict.events


def rate(work: Callable[[Path], int], path: Path) -> tuple[float, float]:
    """Return events a second of CPU time, and by the clock."""
    gc.collect()
    gc.disable()
    began, started = time.perf_counter(), time.process_time()
    events = work(path)
    took, passed = time.process_time() - started, time.perf_counter() - began
    gc.enable()
    return events / took, events / passed


def peak_kb(path: Path) -> float:
    """Return the most memory that judging held at a time, in kilobytes."""
    tracemalloc.start()
    judge(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e3


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--events", type=int, default=400_000, help="lines (default 400,000)")
    parser.add_argument("--samples", type=int, default=25, help="how often (default 25)")
    parser.add_argument("--sessions", type=int, default=64, help="of the run (default 64)")
    options = parser.parse_args()
    report = Report("replay", {"events": options.events, "sessions": options.sessions})
    with tempfile.TemporaryDirectory() as folder:
        short, middle, long = (Path(folder) / name for name in ("short", "middle", "long"))
        trio.run(record, short, options.sessions, 3)
        enlarge(short, middle, options.events // 4)
        counts = enlarge(short, long, options.events)
        total = sum(counts.values())
        mix = ", ".join(f"{name} {n / total:.0%}" for name, n in counts.most_common(9))
        print(f"  mix: {mix}; {long.stat().st_size / total:.0f} bytes a line")
        pairs = [(rate(decode, middle), rate(judge, middle)) for _ in range(options.samples)]
        report.row("decoding alone", Spread.of([alone for (alone, _), _ in pairs]), "/s")
        report.row("judging, decoding included", Spread.of([cpu for _, (cpu, _) in pairs]), "/s")
        report.row("judging, by the clock", Spread.of([wall for _, (_, wall) in pairs]), "/s")
        fastest = max(cpu for _, (cpu, _) in pairs)
        ratio = max(alone for (alone, _), _ in pairs) / fastest
        report.row("the fastest of each: judging, of decoding alone", Spread.of([ratio]), "times")
        report.target("events a second of CPU time, fastest", fastest, 400_000, at_least=True)
        growth = peak_kb(long) / peak_kb(middle)
        report.target("peak memory at 4 times the length", growth, 1.1)
    return report.finish(cast("Path | None", options.json))


if __name__ == "__main__":
    sys.exit(main())
