"""Loads of real pages onto a device, with delays where they hurt, and readers that look closely."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch

from kvlease.pools.copies import index_tensor, span_orders
from kvlease.pools.storage import SpanStore, span_components
from kvlease.protocols.geometries import LayerKind, V4Geometry, deepseek_v4_schema
from kvlease.protocols.ports import Completion, CopyOrder, Stream
from kvlease.runtime.transfer import Transfer
from kvlease.runtime.transfer_plan import TransferObserver, TransferPlan
from kvlease.units import LayerId, TransferId
from tests.runtime.cuda.devices import Barrier, Device
from tests.runtime.rig import Held

NUM_LAYERS = 20
PAGES = 8
SPARSE: LayerKind = "sparse"
SCHEMA = deepseek_v4_schema(
    V4Geometry((SPARSE,) * NUM_LAYERS, 64, 8, 32, window=16), 16, "bfloat16"
)
PARTS = [(layer, span.name) for layer, span in span_components(SCHEMA)]


@final
class Bench:
    """Host pages with known contents, device pages to load them into, and what readers found."""

    def __init__(self, device: Device, seed: int = 0) -> None:
        self.device = device
        self.rng = random.Random(seed)
        self.host = SpanStore(SCHEMA, 2 * PAGES, pinned=device.name == "cuda")
        self.pages = SpanStore(SCHEMA, 2 * PAGES, device.name)
        generator = torch.Generator().manual_seed(seed)
        for layer, name in PARTS:
            rows = self.host.rows(layer, name)
            rows.copy_(torch.randn(rows.shape, generator=generator, dtype=torch.float32))
        self.wanted = {part: self.host.rows(*part).to(device.name) for part in PARTS}
        self.pages.poison_all()
        self._num_loads = 0

    def load(
        self,
        numbers: tuple[list[int], list[int]] | None = None,
        *,
        observer: TransferObserver | None = None,
        held: Held | None = None,
    ) -> tuple[Transfer, list[int], list[int]]:
        """Plan a load of scattered pages; return it with the host's and the device's numbers."""
        here, there = numbers or (self._some(), self._some())
        self._num_loads += 1
        number = TransferId(self._num_loads)
        ends = index_tensor(here), index_tensor(there)
        orders = tuple(span_orders(number, "load", (self.host, self.pages), ends))
        holds = () if held is None else (held,)
        plan = TransferPlan(number, "load", orders, NUM_LAYERS, 10.0, "test", holds=holds)
        return Transfer(plan, observer=observer), here, there

    def _some(self) -> list[int]:
        """Return pages in two stretches, in any order."""
        first, second = self.rng.sample(range(4), 2)
        half = PAGES // 2
        return [
            *range(half * first, half * (first + 1)),
            *range(half * second, half * (second + 1)),
        ]

    def poison(self, there: Sequence[int]) -> None:
        """Fill device pages with NaN bytes, in the order of the calling worker's queue."""
        pages = index_tensor(there)
        for part in PARTS:
            rows = self.pages.rows(*part)
            self.device.enqueue(partial(_fill, rows, pages.to(rows.device)))

    def reader(self, here: list[int], there: list[int], bad: torch.Tensor) -> Reader:
        """Return what reads a load's pages, layer by layer, and counts in ``bad``."""
        ends = index_tensor(here).to(self.device.name), index_tensor(there).to(self.device.name)
        return Reader(self, ends, bad)


def _fill(rows: torch.Tensor, pages: torch.Tensor) -> None:
    rows.view(torch.uint8).index_fill_(0, pages, 0xFF)


@final
class Reader:
    """Compares a layer's rows with what was stored; adds 1 where anything differs."""

    def __init__(
        self, bench: Bench, ends: tuple[torch.Tensor, torch.Tensor], bad: torch.Tensor
    ) -> None:
        self._bench = bench
        self._ends = ends
        self._bad = bad
        self.num_reads = 0

    def layer(self, layer: int) -> Callable[[], None]:
        """Return the closure that reads one layer, for the compute stream."""
        parts = [part for part in PARTS if part[0] == layer]
        self.num_reads += len(parts)
        return partial(self._launch, parts)

    def _launch(self, parts: list[tuple[LayerId, str]]) -> None:
        for part in parts:
            self._bench.device.enqueue(partial(self._compare, part))

    def _compare(self, part: tuple[LayerId, str]) -> None:
        here, there = self._ends
        found = self._bench.pages.rows(*part).index_select(0, there).view(torch.int16)
        wanted = self._bench.wanted[part].index_select(0, here).view(torch.int16)
        self._bad += (found != wanted).any()


@final
class DeviceCopier:
    """Gives copies to a device, late by up to ``delay_s``, and refuses some.

    From now on all copies stand behind ``barrier``, if there is one.
    """

    def __init__(
        self, device: Device, delay_s: float = 0.0, refused: tuple[int, str] | None = None
    ) -> None:
        self._device = device
        self._delay_s = delay_s
        self._refused = refused
        self._rng = random.Random(1)
        self.barrier: Barrier | None = None

    def copy(self, order: CopyOrder) -> int:
        if self.barrier is not None:
            self.barrier.hold()
        if self._delay_s:
            self._device.delay(self._rng.uniform(0, self._delay_s))
        if (order.layer, order.component) == self._refused:
            raise ValueError("the link is down")
        self._device.enqueue(order.run)
        return order.nbytes


@final
class Unwaiting:
    """A stream without its wait: what the gate is measured against."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def launch(self, work: Callable[[], None]) -> None:
        self._stream.launch(work)

    def wait(self, completion: Completion) -> None:
        pass

    def record(self) -> Completion:
        return self._stream.record()

    def scope(self) -> Stream:
        return Unwaiting(self._stream.scope())
