"""What planning a load costs the host: the caller, and the worker that queues its copies.

The parts are an engine's own (pool, index, loader, streams), put together as an engine does it; no
model runs. A prefix of Flash's geometry lies on the host with its tail; again and again it is
matched, planned and handed to the loader, as the scheduler does it for a request.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, final

import numpy as np
import trio
from attrs import frozen

from kvlease.errors import UsageError
from kvlease.protocols.config import EngineConfig
from kvlease.protocols.geometries import deepseek_v4_schema
from kvlease.protocols.ownership import StepLease
from kvlease.protocols.ports import StepInput, StepResult, Stream
from kvlease.protocols.schema import Schema
from kvlease.runtime.assembly import Assembly, EnginePorts, OpenStreams, assemble
from kvlease.runtime.cuda_streams import open_cuda_streams
from kvlease.runtime.loader import DirectCopier, Loader
from kvlease.runtime.settlement import Settlement
from kvlease.runtime.streams import EngineStreams
from kvlease.runtime.transfer import Transfer
from kvlease.services.bench.answers import PAGE_TOKENS
from kvlease.services.bench.ceilings import Ceilings
from kvlease.services.bench.figure import Figure, Spread
from kvlease.services.bench.flash import flash_config

NUM_PAGES: Final = 128
_ROUNDS, _WARM_UP = 30, 6
_CALLER_US, _ALL_US = 100.0, 1000.0


@final
class Shapes:
    """A `ModelRunner` that is never run: the cached state of Flash's 43 layers, and no weights."""

    vocab_size, max_positions = 1 << 17, 1 << 20
    eos_tokens: frozenset[int] = frozenset()
    fingerprint = "shapes"

    def __init__(self) -> None:
        """Lay out pages as the other groups do."""
        geometry = flash_config().geometry
        self.schema: Schema = deepseek_v4_schema(geometry, PAGE_TOKENS, "bfloat16", "fp8", "fp8")

    async def forward(self, inputs: StepInput, lease: StepLease, stream: Stream) -> StepResult:
        """Raise UsageError: nobody asks for tokens here."""
        raise UsageError("this model has shapes only, and computes no tokens")


@frozen
class Cost:
    """Seconds of one load: on the caller, and of the worker that queues its copies."""

    caller: float
    worker: float


def measure(_: Ceilings) -> Iterator[Figure]:
    """Yield the figures; some hundred megabytes on either side for as long."""
    config = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        device_pages=NUM_PAGES + 8,
        host_pages=NUM_PAGES,
        max_sessions=2,
        exact=False,
    )
    for where, scattered in (("in a run", False), ("one by one", True)):
        costs = trio.run(
            partial(cost_of_loads, config, open_cuda_streams, rounds=_ROUNDS, scattered=scattered)
        )
        case = f"{NUM_PAGES} pages of 43 layers and a tail, host pages {where}"
        caller = Spread.of([cost.caller * 1e6 for cost in costs])
        whole = Spread.of([(cost.caller + cost.worker) * 1e6 for cost in costs])
        yield Figure("copy", "planning a load", f"{case}: caller", "us", caller, target=_CALLER_US)
        both = f"{case}: caller and worker"
        yield Figure("copy", "planning a load", both, "us", whole, target=_ALL_US)


async def cost_of_loads(
    config: EngineConfig, streams: OpenStreams, *, rounds: int, scattered: bool
) -> list[Cost]:
    """Load the same pages so many times, and return what the host spent on each load.

    Host pages are neighbours, as one store leaves them, or ``scattered``. The first loads, which
    allocate what is used again, do not count.
    """
    assembly = await assemble(Shapes(), config, None, EnginePorts())
    if scattered:
        book = assembly.core.pool.memory.host
        pages = book.acquire(book.total)
        random.Random(0).shuffle(pages)
        book.release(pages)
    opened: AbstractAsyncContextManager[EngineStreams] = streams(assembly.core.stalls)
    async with opened as engine, trio.open_nursery() as nursery:
        world = _World(assembly, engine)
        nursery.start_soon(world.loader.run)
        await world.leave_on_host()
        costs = [await world.load() for _ in range(_WARM_UP + rounds)]
        assembly.loader.close()
    return costs[_WARM_UP:]


@final
class _World:
    """One prefix, the loader that moves it, and what the scheduler would do for both."""

    def __init__(self, assembly: Assembly, streams: EngineStreams) -> None:
        self._core = assembly.core
        settlement = Settlement(assembly.core)
        self.loader = Loader(
            assembly.loader,
            load_stream=streams.load,
            store_stream=streams.store,
            copier=DirectCopier(),
            on_end=settlement.transfer_ended,
            on_settled=partial(self._settled, settlement.transfer_settled),
        )
        self._has_settled = trio.Event()
        self._tokens = np.arange(NUM_PAGES * PAGE_TOKENS, dtype=np.int32).tobytes()

    def _settled(self, tell: Callable[[Transfer], None], transfer: Transfer) -> None:
        tell(transfer)
        self._has_settled.set()

    async def leave_on_host(self) -> None:
        """Cache the prefix and its tail, store them, and evict them from the device."""
        pool = self._core.pool
        held = pool.open(pool.match(self._core.root, b"", 0), NUM_PAGES, 1)
        slot = pool.tail_slot()
        assert held is not None, "the pool was made for this"
        assert slot is not None, "the pool was made for this"
        pool.grow(held, NUM_PAGES, 1)
        pool.seal(held, self._tokens, NUM_PAGES, 1)
        tail = pool.put_tail(held, NUM_PAGES * PAGE_TOKENS, slot, rolling=False)
        planned = pool.transfers.plan_store(held, 1, 0, [] if tail is None else [tail])
        assert planned is not None, "nothing of it is on the host yet"
        self._core.start_transfer(planned)
        await self._has_settled.wait()
        pool.close(held)
        self._evict()

    def _evict(self) -> None:
        self._core.pool.controls.evict(self._core.root, b"", "device")
        self._core.pool.reclaim()

    async def load(self) -> Cost:
        """Plan and carry out one load, and evict it again."""
        core, pool = self._core, self._core.pool
        self._has_settled = trio.Event()
        match = pool.match(core.root, self._tokens, NUM_PAGES)
        worked, began = _worker_s(), time.perf_counter()
        held = pool.open(match, 1, 2)
        assert held is not None, "the pool was made for this"
        assert held.load is not None, "its pages are on the host"
        core.start_transfer(held.load)
        caller = time.perf_counter() - began
        await self._has_settled.wait()
        worker = _worker_s() - worked
        pool.close(held)
        self._evict()
        return Cost(caller, worker)


def _worker_s() -> float:
    """Return the processor's seconds that the load stream's worker has had."""
    idents = [t.ident for t in threading.enumerate() if t.name == "kvlease-load"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident)
