"""Moving scattered pages between a device's pools and records, all components in one launch.

A *record* holds the pieces of one page side by side (``protocols/host_layout.py``). A table with
one line a tile says where each tile of a record lies in its pool: [T, 4] int64 with the address of
page 0, the bytes from page to page, the words before it in the record, and its words. Programs walk
over (page, tile); few of them suffice, so that compute beside them keeps its multiprocessors. Some
groups of layers, a part of each record, may be moved without the rest.
"""

# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

from collections.abc import Sequence
from itertools import accumulate
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlease.kernels.gpu.launches import Launches

TILE = 4096
NUM_WARPS = 16
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


_COLUMNS = tl.constexpr(4)


@triton.jit(
    do_not_specialize=[
        "first_page",
        "count",
        "first_tile",
        "tiles_per_page",
        "first_word",
        "page_words",
    ]
)
def _move(
    table_ptr,
    pages_ptr,
    records_ptr,
    first_page,
    count,
    first_tile,
    tiles_per_page,
    first_word,
    page_words,
    to_records: tl.constexpr,
    pairs: tl.constexpr,
    tile: tl.constexpr,
):
    lane = tl.arange(0, tile)
    work = tl.program_id(0)
    while work < count * tiles_per_page:
        record = work // tiles_per_page
        line = table_ptr + (first_tile + work - record * tiles_per_page) * _COLUMNS
        address = tl.load(line)
        stride = tl.load(line + 1)
        offset = tl.load(line + 2)
        words = tl.load(line + 3)
        page = tl.load(pages_ptr + first_page + record).to(tl.int64)
        place = (address + page * stride).to(records_ptr.dtype, bitcast=True)
        start = record.to(tl.int64) * page_words + offset - first_word
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
    """The tiles of a record, on the device, group by group.

    Ownership: borrows the pools for as long as it lives. ``word`` is the dtype that records are
    moved in, ``width`` its bytes. Group g is bytes bounds[g] to bounds[g + 1] - 1 of a record, and
    its tiles are edges[g] to edges[g + 1] - 1.
    """

    def __init__(self, groups: Sequence[tuple[Pools, int]], device: torch.device) -> None:
        """Lay out the tiles; per group its pools, and its bytes of a record."""
        self.bounds = [0, *accumulate(nbytes for _, nbytes in groups)]
        self.nbytes = self.bounds[-1]
        """Bytes of a whole record."""
        facts = [
            [
                (pool.data_ptr(), pool.stride(0) * pool.itemsize, offset, pool[0].nbytes)
                for pool, offset in pools
            ]
            for pools, _ in groups
        ]
        numbers = (number for group in facts for fact in group for number in fact)
        step = gcd(16, *self.bounds, *numbers)
        self.pairs = step == 16
        self.width = min(step, 8)
        self.word = _WORDS[self.width]
        self.launches = {to_records: Launches(_move, NUM_WARPS) for to_records in (False, True)}
        """The kernel by direction."""
        lines: list[tuple[int, ...]] = []
        self.edges = [0]
        for group in facts:
            for address, stride, offset, size in group:
                for at in range(0, size // self.width, TILE):
                    words = min(TILE, size // self.width - at)
                    place = address + at * self.width, stride
                    lines.append((*place, offset // self.width + at, words))
            self.edges.append(len(lines))
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
    """Move groups[0] to groups[1] - 1 of pages[part[0]:part[1]], on a stream.

    Between the pools and that part of each record, packed: what lies beside it does not come along.
    Shapes: pages [n] int64 on the device, 16-byte aligned; so are records, [n] of the table's word.
    """
    first, last = part
    first_tile, end = table.edges[groups[0]], table.edges[groups[1]]
    begin, stop = table.bounds[groups[0]], table.bounds[groups[1]]
    table.launches[to_records](
        max(1, min(programs, (last - first) * (end - first_tile))),
        stream,
        table.lines,
        pages,
        records,
        first,
        last - first,
        first_tile,
        end - first_tile,
        begin // table.width,
        (stop - begin) // table.width,
        to_records,
        table.pairs,
        TILE,
    )
