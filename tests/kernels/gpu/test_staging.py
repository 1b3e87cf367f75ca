"""Pages go through the staging ring and arrive whole, wherever they lie at both ends."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from kvlease.kernels.gpu import staging
from kvlease.kernels.gpu.page_copy import RecordTable
from kvlease.kernels.gpu.staging import Direction, MovedPages, PageMover, StagingRing

pytestmark = pytest.mark.usefixtures("streams")


def host_memory(shape: Sequence[int], device: str) -> Tensor:
    made = torch.randint(0, 256, tuple(shape), dtype=torch.uint8)
    return made.pin_memory() if device == "cuda" else made


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


PIECES = ((96, 33 * 1024, 48), (160,), (16, 32))
"""Bytes of the pieces of each group."""
GROUPS = [sum(pieces) for pieces in PIECES]


@pytest.mark.parametrize("least", [0, 1 << 40], ids=["rows", "batches"])
@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("ranges", [[(0, 1), (1, 2), (2, 3)], [(0, 3)], [(2, 3), (0, 2)]])
@pytest.mark.parametrize(
    "host_pages",
    [[5], [0, 1, 2, 3, 4, 5, 6], [9, 2, 3, 4, 0, 8, 7, 6], [3, 4, 5, 1, 2]],
    ids=["one", "run", "scattered", "two-runs"],
)
def test_records_arrive_whole_and_alone(
    device: str,
    direction: Direction,
    ranges: list[tuple[int, int]],
    host_pages: list[int],
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "LEAST_COPY_NBYTES", least)
    host = host_memory((10, sum(GROUPS)), device)
    pools = [
        [torch.randint(0, 256, (12, size), dtype=torch.uint8, device=device) for size in sizes]
        for sizes in PIECES
    ]
    offsets = [
        [sum(GROUPS[:g]) + sum(sizes[:n]) for n in range(len(sizes))]
        for g, sizes in enumerate(PIECES)
    ]
    table = RecordTable(
        [(list(zip(pools[g], offsets[g], strict=True)), GROUPS[g]) for g in range(3)],
        torch.device(device),
    )
    ring = StagingRing(torch.device(device), 3 * sum(GROUPS), 2, -1)
    mover = PageMover(direction, host, table, ring, programs=2)
    device_pages = torch.randperm(12)[: len(host_pages)]
    pages = MovedPages(np.array(host_pages, dtype=np.int64), device_pages.to(device))
    old_host = host.clone()
    old_pools = [[pool.clone() for pool in group] for group in pools]

    settle(device)
    main = torch.cuda.current_stream()
    mover.begin(main)
    for groups in ranges:
        mover.move(groups, pages, main)
    settle(device)

    for g in range(3):
        for pool, old, offset in zip(pools[g], old_pools[g], offsets[g], strict=True):
            size = pool.shape[1]
            if direction == "load":
                old[device_pages.to(device)] = host[host_pages, offset : offset + size].to(device)
            else:
                old_host[host_pages, offset : offset + size] = pool[device_pages.to(device)].cpu()
            assert torch.equal(pool, old)
    assert torch.equal(host, old_host)
