"""What the gate costs: one resolve, and all gating of a step beside the step itself.

Run from the checkout: ``python benchmarks/gate.py``. Sequences of 600 to 800 tokens are prefilled
on the embedded model; then decode steps and the same gating without arithmetic (lease the step with
its page tables, index every layer, resolve it, build its view, verify, close) take turns, so that
both meet the same noise. Everything runs on one thread, as the gate does in an engine: on the Trio
thread, off the compute path.
"""

import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast, final

import torch
import trio

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from _report import Report, Spread, make_parser  # noqa: E402  (run from a checkout)

from kvlease.kernels.models.deepseek_v4 import ModelOptions, load_model  # noqa: E402
from kvlease.kernels.models.opening import handle_of  # noqa: E402
from kvlease.pools.memory import PoolSizes  # noqa: E402
from kvlease.pools.unified import UnifiedPool  # noqa: E402
from kvlease.protocols.ownership import StepLease  # noqa: E402
from kvlease.protocols.ports import Sampling, SequenceInput, StepInput  # noqa: E402
from kvlease.runtime.event_log import EventLog  # noqa: E402
from kvlease.runtime.streams import CpuStream, InlineStream, open_cpu_stream  # noqa: E402
from kvlease.units import RequestId, StepId  # noqa: E402

PAGE_TOKENS = 64
PROMPT_TOKENS = (600, 800)
CALLS = 1000
"""Resolves timed together: one is too short for the clock."""
BATCH = 8
"""Sequences prefilled together."""


@final
class Batch:
    """Sequences on the embedded model, one token further with every decode step."""

    def __init__(self, sessions: int, room: int) -> None:
        """Take pages for the longest prompt and ``room`` tokens more in every sequence."""
        self.model = load_model(None, ModelOptions(page_tokens=PAGE_TOKENS))
        pages = -(-(PROMPT_TOKENS[1] + room) // PAGE_TOKENS)
        sizes = PoolSizes(sessions * pages, 0, 0, 0, sessions)
        self.pool = UnifiedPool(self.model.schema, sizes, EventLog(level="off"))
        self.stream = InlineStream()
        self.layers = self.model.schema.layers
        random_lengths = random.Random(7)
        self.lengths = [random_lengths.randint(*PROMPT_TOKENS) for _ in range(sessions)]
        self.leases = []
        for request in range(sessions):
            held = self.pool.open(self.pool.match(b"gate", b"", 0), pages, request)
            assert held is not None, "the pool was made for these"
            self.pool.grow(held, pages, request)
            self.leases.append(held.lease)

    async def fill(self) -> None:
        """Prefill every prompt."""
        draw = random.Random(11)
        for low in range(0, len(self.leases), BATCH):
            members = range(low, min(low + BATCH, len(self.leases)))
            prompts = [[draw.randrange(256) for _ in range(self.lengths[m])] for m in members]
            parts = [
                SequenceInput(RequestId(m), 0, tokens, None)
                for m, tokens in zip(members, prompts, strict=True)
            ]
            lease = self.pool.lease_step([self.leases[m] for m in members])
            await self._run(parts, lease)

    async def decode(self) -> None:
        """Run one whole decode step, gating included, as the step worker does."""
        parts = [
            SequenceInput(RequestId(m), length, [65], Sampling())
            for m, length in enumerate(self.lengths)
        ]
        await self._run(parts, self.pool.lease_step(self.leases))
        self.lengths = [length + 1 for length in self.lengths]

    async def _run(self, parts: list[SequenceInput], lease: StepLease) -> None:
        result = await self.model.forward(StepInput(StepId(1), tuple(parts)), lease, self.stream)
        await self.stream.record().wait_done()
        await lease.verify()
        lease.close()
        result.tokens()

    async def gate(self) -> None:
        """Do all the gating of a decode step, and nothing else of it."""
        lease = self.pool.lease_step(self.leases)
        for layer in self.layers:
            await handle_of(lease, layer).resolve(self.stream)
        await lease.verify()
        lease.close()


async def timed_us(action: Callable[[], Awaitable[object]]) -> float:
    """Return the microseconds of one awaited call."""
    start = time.perf_counter()
    await action()
    return 1e6 * (time.perf_counter() - start)


async def time_resolve(batch: Batch, report: Report, times: int) -> None:
    """Time resolves of layers that are ready: the first of a step, and repeated ones."""
    lease = batch.pool.lease_step(batch.leases)
    kinds = {type(layer): layer for layer in batch.layers}
    firsts: dict[str, list[float]] = {kind.__name__: [] for kind in kinds}
    repeated: list[float] = []
    empty: list[float] = []

    async def nothing(stream: InlineStream) -> InlineStream:
        return stream

    for _ in range(times):
        for kind, layer in kinds.items():
            handle, stream = handle_of(lease, layer), batch.stream
            start = time.perf_counter()
            await handle.resolve(stream)
            firsts[kind.__name__].append(1e6 * (time.perf_counter() - start))
            start = time.perf_counter()
            for _ in range(CALLS):
                await handle.resolve(stream)
            repeated.append(1e6 * (time.perf_counter() - start) / CALLS)
        start = time.perf_counter()
        for _ in range(CALLS):
            await nothing(batch.stream)
        empty.append(1e6 * (time.perf_counter() - start) / CALLS)
    lease.close()
    for name, samples in firsts.items():
        report.row(f"first resolve of a ready {name}, its view built", Spread.of(samples), "us")
    report.row("repeated resolve of a ready layer", Spread.of(repeated), "us")
    report.row("an async function that does nothing", Spread.of(empty), "us")
    report.target("repeated resolve, us", statistics.median(repeated), 0.5)


async def time_step(batch: Batch, report: Report, steps: int) -> None:
    """Time decode steps and their gating, in turns."""
    whole: list[float] = []
    gating: list[float] = []
    shares: list[float] = []
    await batch.decode()
    for _ in range(steps):
        step_us = await timed_us(batch.decode)
        # Right behind a step, caches are as cold for the gate as they are in an engine.
        gate_us = await timed_us(batch.gate)
        whole.append(step_us / 1e3)
        gating.append(gate_us)
        shares.append(100 * gate_us / step_us)
    report.row("a decode step", Spread.of(whole), "ms")
    report.row("all gating of a decode step", Spread.of(gating), "us")
    report.row("gating over decode step, pair by pair", Spread.of(shares), "%")
    report.target("gating over decode step, %", statistics.median(shares), 1.0)


async def time_beside_work(batch: Batch, report: Report, times: int) -> None:
    """Time the gating while a stream's worker computes and takes the interpreter's lock."""
    left = torch.randn(64, 128)
    right = torch.randn(128, 128)
    samples: list[float] = []

    async def launch_and_gate(stream: CpuStream) -> None:
        is_over: list[bool] = []

        def work() -> None:
            while not is_over:
                torch.mm(left, right)

        stream.launch(work)
        await trio.sleep(0.002)
        samples.append(await timed_us(batch.gate))
        is_over.append(True)
        await stream.record().wait_done()

    async with open_cpu_stream("busy") as stream:
        for _ in range(times):
            await launch_and_gate(stream)
    report.row("all gating, beside a worker busy in small torch calls", Spread.of(samples), "us")


async def measure(sessions: int, steps: int, report: Report) -> None:
    """Fill the sequences, then time everything on them."""
    batch = Batch(sessions, steps + 1)
    await batch.fill()
    await time_resolve(batch, report, 200)
    await time_step(batch, report, steps)
    await time_beside_work(batch, report, 100)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--sessions", type=int, default=64, help="sequences of a step (default 64)")
    parser.add_argument("--steps", type=int, default=100, help="decode steps timed (default 100)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = {
        "sessions": options.sessions,
        "prompt tokens": f"{PROMPT_TOKENS[0]} to {PROMPT_TOKENS[1]}",
        "page tokens": PAGE_TOKENS,
        "decode steps": options.steps,
    }
    report = Report("gate", about)
    trio.run(measure, options.sessions, options.steps, report)
    return report.finish(cast("Path | None", options.json))


if __name__ == "__main__":
    sys.exit(main())
