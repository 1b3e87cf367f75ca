"""Timing work on a CUDA device: candidates in turns, each as a captured graph over rotating inputs.

Two figures of one comparison come from one run, taken alternately, so that both meet the same
clocks and the same power limit. "Cold" empties the second-level cache before each replay. This
module does not know what the candidates compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, cast, final

import torch
from attrs import frozen

from kvlease.services.bench.figure import Spread

Work = Callable[[int], object]
"""Launch one call's kernels on the current stream, for input set ``i`` (0, 1, 2, ...)."""

_FLUSH_NBYTES = 256 << 20


@final
class GraphTimer:
    """Times candidates on the current device; one at a time per device."""

    def __init__(self, *, calls: int = 20, replays: int = 20, cold: bool = True) -> None:
        """Choose calls in one graph, replays of it, and whether the cache is emptied before."""
        self._calls = calls
        self._replays = replays
        self._flush = (
            torch.empty(_FLUSH_NBYTES // 4, dtype=torch.int32, device="cuda") if cold else None
        )

    def time(self, candidates: Mapping[str, Work]) -> dict[str, Spread]:
        """Return microseconds a call of each candidate, replayed in turns."""
        graphs = {name: self._capture(work) for name, work in candidates.items()}
        samples: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(self._replays):
            for name, graph in graphs.items():
                samples[name].append(self._replay(graph))
        return {name: Spread.of(found) for name, found in samples.items()}

    def _capture(self, work: Work) -> torch.cuda.CUDAGraph:
        side = cast("Callable[[], torch.cuda.Stream]", torch.cuda.Stream)()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in range(3):  # compile, and make handles and workspaces
                work(call)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(self._calls):
                work(call)
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        if self._flush is not None:
            self._flush.add_(1)
        return elapsed_ms(graph.replay) * 1e3 / self._calls


class _Event(Protocol):
    """What torch leaves untyped of an event."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: _Event) -> float: ...


@frozen
class Span:
    """Work on a stream between two timed events; read it once the work is done."""

    begin: _Event
    end: _Event

    @staticmethod
    def around(work: Callable[[], object]) -> Span:
        """Queue work on the current stream, with an event on either side."""
        make = cast("Callable[..., _Event]", torch.cuda.Event)
        span = Span(make(enable_timing=True), make(enable_timing=True))
        span.begin.record()
        work()
        span.end.record()
        return span

    @property
    def seconds(self) -> float:
        """How long the device took from one event to the other."""
        return self.begin.elapsed_time(self.end) / 1e3

    def begins_before(self, other: Span) -> bool:
        """Whether it begins no later than another one."""
        return self.begin.elapsed_time(other.begin) >= 0

    def ends_before(self, other: Span) -> bool:
        """Whether it ends no later than another one."""
        return self.end.elapsed_time(other.end) >= 0


def elapsed_ms(work: Callable[[], object]) -> float:
    """Return the device's milliseconds for work on the current stream, waiting for it."""
    span = Span.around(work)
    span.end.synchronize()
    return span.seconds * 1e3


def time_once(work: Callable[[], object], repeats: int) -> Spread:
    """Return milliseconds of work that is no graph, each call on an idle device."""
    samples: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        samples.append(elapsed_ms(work))
    return Spread.of(samples)


class _Properties(Protocol):
    multi_processor_count: int


def num_processors() -> int:
    """Return how many multiprocessors the current device has."""
    look = cast("Callable[[], _Properties]", torch.cuda.get_device_properties)
    return look().multi_processor_count
