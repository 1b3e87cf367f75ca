"""Moving scattered pages between a device's pools and records, all components in one launch.

A *record* holds the pieces of one page side by side (``protocols/host_layout.py``). A table with
one line a tile says where each tile of a record lies in its pool: [T, 4] int64 with the address of
page 0, the bytes from page to page, the words before it in the record, and its words. Programs walk
over (record, tile); few of them suffice, so that compute beside them keeps its multiprocessors.
"""

# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
NUM_WARPS = 16
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit(do_not_specialize=["first", "num_tiles", "tiles_per_record", "record_words"])
def _move(
    table_ptr,
    pages_ptr,
    records_ptr,
    first,
    num_tiles,
    tiles_per_record,
    record_words,
    to_records: tl.constexpr,
    pairs: tl.constexpr,
    tile: tl.constexpr,
):
    lane = tl.arange(0, tile)
    work = tl.program_id(0)
    while work < num_tiles:
        record = work // tiles_per_record
        line = table_ptr + (work - record * tiles_per_record) * 4
        address = tl.load(line)
        stride = tl.load(line + 1)
        offset = tl.load(line + 2)
        words = tl.load(line + 3)
        page = tl.load(pages_ptr + first + record).to(tl.int64)
        place = (address + page * stride).to(records_ptr.dtype, bitcast=True)
        start = record.to(tl.int64) * record_words + offset
        if pairs:  # all are multiples of 16 bytes: say so, and words move in pairs
            place = tl.multiple_of(place, 16)
            start = tl.multiple_of(start, 2)
            words = tl.multiple_of(words, 2)
        in_pool = place + lane
        in_record = records_ptr + start + lane
        if to_records:
            tl.store(in_record, tl.load(in_pool, mask=lane < words), mask=lane < words)
        else:
            tl.store(in_pool, tl.load(in_record, mask=lane < words), mask=lane < words)
        work += tl.num_programs(0)


class RecordTable:
    """The tiles of one group's records, on the device.

    Ownership: borrows the pools for as long as it lives. ``word`` is the dtype that records are
    moved in.
    """

    def __init__(self, pools: Sequence[tuple[Tensor, int]], nbytes: int) -> None:
        """Lay out the tiles.

        Args:
            pools: per piece the pool [num_pages, ...], each page in one stretch, and where the
                piece begins in a record, in bytes.
            nbytes: bytes of a record.
        """
        facts = [
            (pool.data_ptr(), pool.stride(0) * pool.itemsize, offset, pool[0].nbytes)
            for pool, offset in pools
        ]
        step = gcd(16, nbytes, *(number for fact in facts for number in fact))
        self.pairs = step == 16
        width = min(step, 8)
        self.word = _WORDS[width]
        self.record_words = nbytes // width
        self.nbytes = nbytes
        self.compiled: dict[tuple[bool, torch.dtype], Any] = {}
        """The kernel by direction and dtype of pages: launching it costs a third of finding it."""
        lines = [
            (address + at * width, stride, offset // width + at, min(TILE, size // width - at))
            for address, stride, offset, size in facts
            for at in range(0, size // width, TILE)
        ]
        self.num_tiles = len(lines)
        self.lines = torch.tensor(lines, dtype=torch.int64).to(pools[0][0].device)


def move_records(
    table: RecordTable,
    pages: Tensor,
    records: Tensor,
    part: tuple[int, int],
    programs: int,
    stream: torch.cuda.Stream,
    *,
    to_records: bool,
) -> None:
    """Move pages[part[0]:part[1]] between the pools and records 0, 1, 2, ... on a stream.

    Shapes: pages [n] int32 or int64 on the device; records one dimension of bytes, 16-byte aligned.
    """
    first, last = part
    num_tiles = (last - first) * table.num_tiles
    grid = max(1, min(programs, num_tiles)), 1, 1
    given = (
        table.lines,
        pages,
        records.view(table.word),
        first,
        num_tiles,
        table.num_tiles,
        table.record_words,
        to_records,
        table.pairs,
        TILE,
    )
    kind = to_records, pages.dtype
    compiled = table.compiled.get(kind)
    if compiled is None:
        with torch.cuda.stream(stream):
            table.compiled[kind] = _move[grid](*given, num_warps=NUM_WARPS)
    else:
        compiled[grid](*given, stream=stream.cuda_stream)
