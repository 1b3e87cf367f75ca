"""Moving scattered pages between a device's pools and records, all components in one launch.

A *record* holds the pieces of one page side by side (``protocols/host_layout.py``). A table with
one line a tile says where each tile of a record lies in its pool: [T, 6] int64 with the address of
page 0, the bytes from page to page, the words before it in the record, its words, the words of the
record, and those of the records of earlier groups. Programs walk over (page, tile); few of them
suffice, so that compute beside them keeps its multiprocessors. Several groups may be moved at once:
then all records of a group lie before those of the next.
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


_COLUMNS = tl.constexpr(6)


@triton.jit(do_not_specialize=["first_page", "count", "first_tile", "tiles_per_page"])
def _move(
    table_ptr,
    pages_ptr,
    records_ptr,
    first_page,
    count,
    first_tile,
    tiles_per_page,
    to_records: tl.constexpr,
    pairs: tl.constexpr,
    tile: tl.constexpr,
):
    lane = tl.arange(0, tile)
    skipped = tl.load(table_ptr + first_tile * _COLUMNS + 5)
    work = tl.program_id(0)
    while work < count * tiles_per_page:
        record = work // tiles_per_page
        line = table_ptr + (first_tile + work - record * tiles_per_page) * _COLUMNS
        address = tl.load(line)
        stride = tl.load(line + 1)
        offset = tl.load(line + 2)
        words = tl.load(line + 3)
        record_words = tl.load(line + 4)
        before = tl.load(line + 5) - skipped
        page = tl.load(pages_ptr + first_page + record).to(tl.int64)
        place = (address + page * stride).to(records_ptr.dtype, bitcast=True)
        start = before * count + record * record_words + offset
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


Pools = Sequence[tuple[Tensor, int]]
"""Per piece its pool [num_pages, ...], each page in one stretch, and where it is in a record."""


class RecordTable:
    """The tiles of all groups' records, on the device.

    Ownership: borrows the pools for as long as it lives. ``word`` is the dtype that records are
    moved in, ``nbytes`` is of each group's record; edges[g] is the first of group g's tiles.
    """

    def __init__(self, groups: Sequence[tuple[Pools, int]], device: torch.device) -> None:
        """Lay out the tiles; per group its pools, and the bytes of a record."""
        self.nbytes = [nbytes for _, nbytes in groups]
        facts = [
            [
                (pool.data_ptr(), pool.stride(0) * pool.itemsize, offset, pool[0].nbytes)
                for pool, offset in pools
            ]
            for pools, _ in groups
        ]
        numbers = (number for group in facts for fact in group for number in fact)
        step = gcd(16, *self.nbytes, *numbers)
        self.pairs = step == 16
        width = min(step, 8)
        self.word = _WORDS[width]
        self.compiled: dict[tuple[bool, torch.dtype], Any] = {}
        """The kernel by direction and dtype of pages: launching it costs less than finding it."""
        lines: list[tuple[int, ...]] = []
        self.edges = [0]
        before = 0
        for group, nbytes in zip(facts, self.nbytes, strict=True):
            record = nbytes // width, before // width
            for address, stride, offset, size in group:
                for at in range(0, size // width, TILE):
                    words = min(TILE, size // width - at)
                    place = address + at * width, stride, offset // width + at, words
                    lines.append((*place, *record))
            self.edges.append(len(lines))
            before += nbytes
        self.lines = torch.tensor(lines, dtype=torch.int64).to(device)


def move_records(
    table: RecordTable,
    groups: tuple[int, int],
    pages: Tensor,
    records: Tensor,
    part: tuple[int, int],
    programs: int,
    stream: torch.cuda.Stream,
    *,
    to_records: bool,
) -> None:
    """Move pages[part[0]:part[1]] between the pools of groups and their records, on a stream.

    Shapes: pages [n] int32 or int64 on the device; records one dimension of bytes, 16-byte aligned.
    """
    first, last = part
    first_tile, end = table.edges[groups[0]], table.edges[groups[1]]
    grid = max(1, min(programs, (last - first) * (end - first_tile))), 1, 1
    given = (
        table.lines,
        pages,
        records.view(table.word),
        first,
        last - first,
        first_tile,
        end - first_tile,
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
