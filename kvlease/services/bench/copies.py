"""Pages across the link: restores and stores of scattered pages, alone and beside a matmul.

Pages are Flash's, all components of 43 layers, moved as an engine's transfers move them. Device
pages lie scattered; host pages lie as stores leave them, in runs of consecutive numbers, or
scattered one by one. Rates count the components' bytes once.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from kvlease.kernels.gpu.carrier import Carrier, PageEnds
from kvlease.kernels.gpu.staging import Direction
from kvlease.protocols.geometries import StoreFormat, deepseek_v4_schema
from kvlease.protocols.host_layout import move_ranges, page_groups, record_nbytes
from kvlease.services.bench.ceilings import Ceilings
from kvlease.services.bench.figure import Figure, Spread
from kvlease.services.bench.flash import flash_config
from kvlease.services.bench.graphs import Span, time_once

_NUM_PAGES, _HOST_PAGES, _PAGE_TOKENS = 1024, 1536, 256
_RUN = 8
"""Pages with consecutive host numbers: what one store of a turn leaves together."""
_LINK_SHARE, _BESIDE_GB_S, _KEPT = 0.93, 45.0, 0.85
_ROUNDS = 5
_DIRECTIONS: tuple[Direction, ...] = ("load", "store")


def measure(ceilings: Ceilings) -> Iterator[Figure]:
    """Yield the figures; some gigabytes on either side for as long."""
    world = _World("fp8")
    for direction in _DIRECTIONS:
        link = ceilings.to_device_bytes_s if direction == "load" else ceilings.to_host_bytes_s
        for run in (_RUN, 1):
            yield world.alone(direction, run, link)
    matmul = _Matmuls()
    for direction in _DIRECTIONS:
        yield from world.beside(direction, matmul)


class _World:
    """Pages of one format at both ends, and what carries them."""

    def __init__(self, formats: StoreFormat) -> None:
        geometry = flash_config().geometry
        schema = deepseek_v4_schema(geometry, _PAGE_TOKENS, "bfloat16", formats, formats)
        self._formats = formats
        groups = page_groups(schema)
        self._num_groups = len(groups)
        self._ranges = move_ranges([group.nbytes for group in groups], _NUM_PAGES)
        self._host = torch.empty(
            _HOST_PAGES, record_nbytes(groups), dtype=torch.uint8, pin_memory=True
        )
        self._host.random_(0, 256)
        pools = [
            ([(_pool(piece.nbytes), piece.offset) for piece in group.pieces], group.nbytes)
            for group in groups
        ]
        device = pools[0][0][0][0].device
        self._carrier = Carrier(PageEnds(self._host, tuple(pools)), None, device)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._nbytes = _NUM_PAGES * sum(p.nbytes for group in groups for p in group.pieces)

    def _mover(self, direction: Direction, run: int) -> Callable[[], None]:
        """Return what queues one whole move, of other pages each time, on the copies' stream."""
        starts = torch.randperm(_HOST_PAGES // run)[: _NUM_PAGES // run] * run
        host = (starts.unsqueeze(1) + torch.arange(run)).flatten()
        device = torch.randperm(_NUM_PAGES)
        on_host = array("i", cast("list[int]", host.tolist()))
        on_device = array("i", cast("list[int]", device.tolist()))

        def move() -> None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                if direction == "load":
                    load = self._carrier.load((on_host, on_device), None)
                    for groups in self._ranges:
                        load.queue(groups)
                else:
                    self._carrier.store((on_device, on_host)).queue((0, self._num_groups))
            torch.cuda.current_stream().wait_stream(self._stream)

        return move

    def alone(self, direction: Direction, run: int, link: float) -> Figure:
        """Time the move with nothing beside it."""
        times = time_once(self._mover(direction, run), 8)
        rate = times.scaled(1e-3).rate(self._nbytes)
        how = f"in runs of {run}" if run > 1 else "one by one"
        return Figure(
            "copy",
            "restore" if direction == "load" else "store",
            f"{_NUM_PAGES} pages, {self._formats}, host pages {how}",
            "GB/s",
            rate.scaled(1e-9),
            roofline=rate.median / link,
            target=_LINK_SHARE * link / 1e9,
        )

    def beside(self, direction: Direction, matmul: _Matmuls) -> Iterator[Figure]:
        """Time the move while matmuls run, and the matmuls while it moves, in turns with alone."""
        move = self._mover(direction, _RUN)
        rates: list[float] = []
        kept: list[float] = []
        for _ in range(_ROUNDS):
            alone = matmul.rate_alone()
            seconds, rate = matmul.rate_beside(move)
            rates.append(self._nbytes / seconds / 1e9)
            kept.append(rate / alone)
        name = "restore" if direction == "load" else "store"
        case = f"{_NUM_PAGES} pages, {self._formats}, beside a matmul loop"
        yield Figure("copy", name, case, "GB/s", Spread.of(rates), target=_BESIDE_GB_S)
        case = f"matmul's rate beside a {name}, over alone"
        yield Figure("copy", name, case, "x", Spread.of(kept), target=_KEPT)


def _pool(nbytes: int) -> Tensor:
    return torch.randint(0, 256, (_NUM_PAGES, nbytes), dtype=torch.uint8, device="cuda")


class _Matmuls:
    """A loop of bf16 matmuls (8192 x 4096 x 4096) whose every turn is timed by the device."""

    def __init__(self) -> None:
        bf16 = torch.bfloat16
        self._left = torch.randn(8192, 4096, dtype=bf16, device="cuda")
        self._right = torch.randn(4096, 4096, dtype=bf16, device="cuda")
        self._out = torch.empty(8192, 4096, dtype=bf16, device="cuda")
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._run(4)
        torch.cuda.synchronize()

    def _run(self, turns: int) -> list[Span]:
        def one() -> Tensor:
            return torch.mm(self._left, self._right, out=self._out)

        with torch.cuda.stream(self._stream):
            return [Span.around(one) for _ in range(turns)]

    def rate_alone(self) -> float:
        """Return matmuls a second with nothing beside them."""
        spans = self._run(60)
        torch.cuda.synchronize()
        return 1.0 / statistics.median(span.seconds for span in spans[10:])

    def rate_beside(self, move: Callable[[], None]) -> tuple[float, float]:
        """Return how long a move takes beside the loop, and the loop's rate meanwhile."""
        torch.cuda.synchronize()
        spans = self._run(160)
        moved = [Span.around(move) for _ in range(2)]
        torch.cuda.synchronize()
        begin, end = moved[0], moved[-1]
        inside = [span for span in spans if begin.begins_before(span) and span.ends_before(end)]
        seconds = statistics.median(one.seconds for one in moved)
        return seconds, 1.0 / statistics.median(span.seconds for span in inside)
