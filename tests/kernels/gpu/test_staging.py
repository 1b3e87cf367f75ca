"""Pages go through the staging ring and arrive whole, wherever they lie at both ends."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from kvlease.kernels.gpu.page_copy import RecordTable
from kvlease.kernels.gpu.staging import Direction, GroupEnds, MovedPages, PageMover, StagingRing

pytestmark = pytest.mark.usefixtures("streams")


def host_memory(shape: Sequence[int], device: str) -> Tensor:
    made = torch.randint(0, 256, tuple(shape), dtype=torch.uint8)
    return made.pin_memory() if device == "cuda" else made


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


PIECES = (96, 33 * 1024, 48)
RECORD = sum(PIECES)


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize(
    "host_pages",
    [[5], [0, 1, 2, 3, 4, 5, 6], [9, 2, 3, 4, 0, 8, 7, 6], [3, 4, 5, 1, 2]],
    ids=["one", "run", "scattered", "two-runs"],
)
def test_records_arrive_whole_and_alone(
    device: str, direction: Direction, host_pages: list[int]
) -> None:
    host = host_memory((10, RECORD), device)
    pools = [torch.randint(0, 256, (12, size), dtype=torch.uint8, device=device) for size in PIECES]
    offsets = [sum(PIECES[:n]) for n in range(len(PIECES))]
    table = RecordTable(list(zip(pools, offsets, strict=True)), RECORD)
    ring = StagingRing(torch.device(device), 3 * RECORD, 2, -1)
    mover = PageMover(direction, [GroupEnds(host, table)], ring, programs=2)
    device_pages = torch.randperm(12)[: len(host_pages)]
    pages = MovedPages(np.array(host_pages, dtype=np.int64), device_pages.int().to(device))
    old_host = host.clone()
    old_pools = [pool.clone() for pool in pools]

    settle(device)
    main = torch.cuda.current_stream()
    mover.begin(main)
    assert mover.move(0, pages, main) == len(host_pages) * RECORD
    settle(device)

    if direction == "load":
        assert torch.equal(host, old_host)
        for pool, old, offset, size in zip(pools, old_pools, offsets, PIECES, strict=True):
            old[device_pages.to(device)] = host[host_pages, offset : offset + size].to(device)
            assert torch.equal(pool, old)
    else:
        for pool, old, offset, size in zip(pools, old_pools, offsets, PIECES, strict=True):
            assert torch.equal(pool, old)
            old_host[host_pages, offset : offset + size] = pool[device_pages.to(device)].cpu()
        assert torch.equal(host, old_host)
