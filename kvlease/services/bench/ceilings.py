"""What this machine can do at best, measured first: every roofline share is against these.

This module knows nothing of caches or models.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch

from kvlease.services.bench.figure import Figure, Spread
from kvlease.services.bench.graphs import GraphTimer, Work, time_once

_COPY_NBYTES = 2 << 30
_PINNED_NBYTES = 256 << 20
_MATMUL = 8192


class Ceilings(msgspec.Struct, frozen=True):
    """Rates of one run: bytes a second read and written on the device, across the link, and FLOPs.

    ``copy_bytes_s`` counts what is read and what is written.
    """

    copy_bytes_s: float
    matmul_flops: float
    to_device_bytes_s: float
    to_host_bytes_s: float

    def floor_us(self, nbytes: float, flops: float = 0.0) -> float:
        """Return the microseconds below which no kernel moves the bytes and does the sums."""
        return max(nbytes / self.copy_bytes_s, flops / self.matmul_flops) * 1e6


def _copy() -> Spread:
    source = torch.randint(0, 100, (_COPY_NBYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = time_once(lambda: target.copy_(source), 10)
    return times.scaled(1e-3).rate(2 * _COPY_NBYTES)


def _matmul() -> Spread:
    left = torch.randn(_MATMUL, _MATMUL, dtype=torch.bfloat16, device="cuda")
    right = torch.randn_like(left)
    out = torch.empty_like(left)
    times = time_once(lambda: torch.mm(left, right, out=out), 20)
    return times.scaled(1e-3).rate(2.0 * _MATMUL**3)


def _pinned(*, to_device: bool) -> Spread:
    host = torch.empty(_PINNED_NBYTES, dtype=torch.uint8, pin_memory=True).fill_(7)
    device = torch.empty(_PINNED_NBYTES, dtype=torch.uint8, device="cuda")
    source, target = (host, device) if to_device else (device, host)
    times = time_once(lambda: target.copy_(source, non_blocking=True), 10)
    return times.scaled(1e-3).rate(_PINNED_NBYTES)


def measure() -> tuple[Ceilings, list[Figure]]:
    """Measure the machine; a few seconds, and some gigabytes of device memory for as long."""
    copy, matmul = _copy(), _matmul()
    down, up = _pinned(to_device=True), _pinned(to_device=False)
    ceilings = Ceilings(copy.median, matmul.median, down.median, up.median)
    return ceilings, list(_figures(copy, matmul, down, up))


def _figures(copy: Spread, matmul: Spread, down: Spread, up: Spread) -> Iterator[Figure]:
    size = f"{_COPY_NBYTES >> 30} GiB, read + written"
    yield Figure("ceilings", "device copy", size, "GB/s", copy.scaled(1e-9))
    cube = f"bf16, {_MATMUL} cubed"
    yield Figure("ceilings", "matmul", cube, "TFLOP/s", matmul.scaled(1e-12))
    pinned = f"{_PINNED_NBYTES >> 20} MiB"
    yield Figure("ceilings", "pinned host to device", pinned, "GB/s", down.scaled(1e-9))
    yield Figure("ceilings", "pinned device to host", pinned, "GB/s", up.scaled(1e-9))
    empty = GraphTimer(calls=100, cold=False).time({"one": _one_element()})["one"]
    yield Figure("ceilings", "graph node", "one-element add", "us", empty)


def _one_element() -> Work:
    one = torch.zeros(1, device="cuda")
    return lambda _: one.add_(1)
