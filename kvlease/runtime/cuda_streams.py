"""An engine's CUDA streams: one for compute, one for loads, one for stores, and their waiter.

Also what has to be true of a machine for this, in one sentence if it is not.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import torch

from kvlease.errors import ConfigError
from kvlease.protocols.config import EngineConfig
from kvlease.runtime.cuda_spin import spinner
from kvlease.runtime.cuda_stalls import StallClock
from kvlease.runtime.cuda_stream import CudaStream
from kvlease.runtime.cuda_waiter import CudaWaiter
from kvlease.runtime.nurseries import open_flat_nursery
from kvlease.runtime.stream_scope import WaitObserver
from kvlease.runtime.streams import EngineStreams

TURN_S = 5e-4
"""After so long a thread that computes lets another have the interpreter."""
COPY_PRIORITY = -1
"""Copies go before compute where both want a multiprocessor: they need few, and compute waits."""


def require_cuda(config: EngineConfig) -> None:
    """Refuse a configuration for a GPU where there is none, or nothing for it to do.

    Raises ConfigError.
    """
    if config.device != "cuda":
        return
    if config.compute == "none":
        raise ConfigError(
            "device is cuda and compute is none: without arithmetic there is nothing for a GPU;"
            " give device cpu"
        )
    if not torch.cuda.is_available():
        has = "this torch was built without CUDA" if torch.version.cuda is None else "none is found"
        raise ConfigError(f"device is cuda, but {has}; give device cpu, or see kvlease doctor")


@asynccontextmanager
async def open_cuda_streams(observer: WaitObserver) -> AsyncGenerator[EngineStreams]:
    """Open an engine's streams on the current CUDA device for a block, a thread each and a waiter.

    Checkpoints: on entry and on exit. Raises what `CudaStream.run` and `CudaWaiter.run` raise.
    """
    waiter = CudaWaiter(_Event, spin=spinner())
    compute = _stream("compute", waiter, observer=observer)
    load = _stream("load", waiter, priority=COPY_PRIORITY)
    store = _stream("store", waiter, priority=COPY_PRIORITY)
    with _short_turns():
        async with open_flat_nursery() as outside:
            await outside.start(waiter.run)
            try:
                async with open_flat_nursery() as nursery:
                    for stream in (compute, load, store):
                        await nursery.start(stream.run)
                    yield EngineStreams(compute, load, store)
                    for stream in (compute, load, store):
                        await stream.aclose()
            finally:
                waiter.close()


@contextmanager
def _short_turns() -> Generator[None]:
    """Let the interpreter's threads take turns sooner than usual.

    A thread that computes in Python would keep the waiter, or a worker with kernels to launch, from
    theirs for milliseconds (measured: 10 ms instead of 0.05 until the host sees that a step ended).
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, TURN_S))
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _stream(
    name: str, waiter: CudaWaiter, *, priority: int = 0, observer: WaitObserver | None = None
) -> CudaStream:
    torch_stream = torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]
    timed = partial(torch.cuda.Event, enable_timing=True)
    return CudaStream(
        name,
        waiter.lane(),
        partial(_enter, torch_stream),
        observer=observer,
        stalls=None if observer is None else StallClock(timed),
    )


class _Worker(threading.local):
    """The stream of the calling worker: torch takes 10 us to say which is the current one."""

    stream: torch.cuda.Stream | None = None


_worker = _Worker()


class _Event(torch.cuda.Event):
    """An event of workers, each on its own stream."""

    def record(self, stream: torch.Stream | None = None) -> None:
        """Mark the place behind all that the stream was given."""
        super().record(stream or _worker.stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make the stream wait for the marked place."""
        super().wait(stream or _worker.stream)


def _enter(stream: torch.cuda.Stream) -> None:
    """Make the worker's stream current, behind all that filled weights and pools elsewhere."""
    torch.cuda.synchronize()
    torch.cuda.set_stream(stream)
    _worker.stream = stream
