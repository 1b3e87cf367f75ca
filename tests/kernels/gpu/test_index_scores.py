"""Indexer scores on the GPU equal their twin, read what is visible and write nothing past it."""

import pytest
import torch
from torch import Tensor

from kvlease.kernels.formats import decode_rows, encode_rows, storage_dtype
from kvlease.kernels.gpu.index_scores import IndexKeys, decode_scores
from kvlease.kernels.gpu.index_scores_prefill import prefill_scores
from kvlease.kernels.indexer import index_scores
from kvlease.kernels.tiling import FAST
from kvlease.protocols.schema import RowFormat

RATIO = 4
POISON = -12345.0
LAYOUTS = ["bf16", "fp8"]


class Pool:
    """Random keys in the pages that tables name; NaN bytes in every other page and row."""

    def __init__(
        self, layout: str, lengths: list[int], page_rows: int, width: int, device: str
    ) -> None:
        self.format = RowFormat("bfloat16" if layout == "bf16" else "fp8_index", width)
        used = [-(-length // page_rows) for length in lengths]
        num_pages = sum(used) + 2
        order = torch.randperm(num_pages)
        rows = torch.randn(num_pages, page_rows, width)
        stored = encode_rows(rows, self.format)
        poison = torch.full_like(stored.view(torch.uint8), 0xFF).view(storage_dtype(self.format))
        self.table = torch.full((len(lengths), max(16, *used)), 2**30, dtype=torch.int32)
        kept = torch.zeros(num_pages, page_rows, dtype=torch.bool)
        start = 0
        for n, length in enumerate(lengths):
            pages = order[start : start + used[n]]
            self.table[n, : used[n]] = pages.int()
            for place, page in enumerate(pages.tolist()):
                kept[page, : length - place * page_rows] = True
            start += used[n]
        self.stored = torch.where(kept.unsqueeze(2), stored, poison)
        self.table = self.table.to(device)
        if layout == "fp8":
            planes = [self.stored[..., :width].flatten(1), self.stored[..., width:].flatten(1)]
            self.keys = IndexKeys.in_planes(torch.cat(planes, 1).to(device), page_rows)
        else:
            self.keys = IndexKeys.in_rows(self.stored.to(device))

    def rows_of(self, sequence: int, length: int) -> Tensor:
        page_rows = self.stored.shape[1]
        pages = self.table[sequence, : -(-length // page_rows)].cpu().long()
        stored = self.stored[pages].flatten(0, 1)[:length]
        return decode_rows(stored, self.format, torch.float32)


def draw_queries(
    rows: int, heads: int, width: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    queries = (torch.randn(rows, heads, width) * 8).to(dtype)
    return queries.to(device), torch.randn(rows, heads).to(device)


def check(got: Tensor, queries: Tensor, weights: Tensor, keys: Tensor) -> None:
    """Compare one query's scores with the twin's, relative to the sum of their terms' sizes.

    Terms of both signs may cancel, and fp8 products are summed with fewer bits than fp32 has.
    """
    queries, weights, keys = queries.float().cpu()[None], weights.cpu()[None], keys[None]
    wanted = index_scores(queries, weights, keys, FAST)[0]
    size = index_scores(queries, weights.abs(), keys, FAST)[0]
    assert (got.cpu() - wanted).abs().max() <= 1e-3 * size.max()


def dtypes_of(layout: str) -> list[torch.dtype]:
    return [torch.bfloat16] if layout == "bf16" else [torch.bfloat16, torch.float8_e4m3fn]


CASES = [(layout, dtype) for layout in LAYOUTS for dtype in dtypes_of(layout)]


@pytest.mark.parametrize(("layout", "dtype"), CASES)
@pytest.mark.parametrize("programs", [1, 3, 15], ids=["one", "shared", "a page each"])
def test_decode_scores_equal_the_twin(
    device: str, layout: str, dtype: torch.dtype, programs: int
) -> None:
    torch.manual_seed(programs)
    lengths = [37, 0, 16, 1, 17]
    pool = Pool(layout, lengths, 16, 32, device)
    queries, weights = draw_queries(len(lengths), 16, 32, dtype, device)
    positions = torch.tensor([RATIO * n + 1 for n in lengths], dtype=torch.int32, device=device)
    positions[1] = -1
    out = torch.full((len(lengths), 48), POISON, device=device)
    decode_scores(
        queries, weights, pool.keys, pool.table, positions, out, ratio=RATIO, programs=programs
    )
    for n, length in enumerate(lengths):
        assert (out[n, length:] == POISON).all()
        if length:
            check(out[n, :length], queries[n], weights[n], pool.rows_of(n, length))


@pytest.mark.parametrize(("layout", "dtype"), CASES)
def test_prefill_scores_equal_the_twin(device: str, layout: str, dtype: torch.dtype) -> None:
    """The first queries see nothing, the later ones one key more every fourth."""
    torch.manual_seed(1)
    num_queries, first = 13, 0
    length = (first + num_queries) // RATIO
    pool = Pool(layout, [length], 16, 32, device)
    queries, weights = draw_queries(num_queries, 16, 32, dtype, device)
    positions = torch.arange(first, first + num_queries, dtype=torch.int32, device=device)
    out = torch.full((num_queries, 16), POISON, device=device)
    prefill_scores(queries, weights, pool.keys, pool.table[0], positions, out, ratio=RATIO)
    keys = pool.rows_of(0, length)
    for n in range(num_queries):
        visible = (first + n + 1) // RATIO
        assert (out[n, visible:] == POISON).all()
        if visible:
            check(out[n, :visible], queries[n], weights[n], keys[:visible])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("layout", "dtype"), CASES)
@pytest.mark.parametrize("programs", [100, 1000])
def test_scores_at_full_size_equal_the_twin(layout: str, dtype: torch.dtype, programs: int) -> None:
    torch.manual_seed(2)
    lengths = [4097, 64, 0, 1000, 63]
    pool = Pool(layout, lengths, 64, 128, "cuda")
    queries, weights = draw_queries(len(lengths), 64, 128, dtype, "cuda")
    positions = torch.tensor([RATIO * n - 1 for n in lengths], dtype=torch.int32, device="cuda")
    out = torch.full((len(lengths), 4352), POISON, device="cuda")
    decode_scores(
        queries, weights, pool.keys, pool.table, positions, out, ratio=RATIO, programs=programs
    )
    for n, length in enumerate(lengths):
        assert (out[n, length:] == POISON).all()
        if length:
            check(out[n, :length], queries[n], weights[n], pool.rows_of(n, length))
    many = queries[:1].expand(300, -1, -1).contiguous()
    each = weights[:1].expand(300, -1).contiguous()
    at = torch.arange(4097 * RATIO - 300, 4097 * RATIO, dtype=torch.int32, device="cuda")
    got = torch.full((300, 4352), POISON, device="cuda")
    prefill_scores(many, each, pool.keys, pool.table[0], at, got, ratio=RATIO)
    for n, position in enumerate(at.tolist()):
        visible = (position + 1) // RATIO
        assert (got[n, visible:] == POISON).all()
    for n in (0, 150, 299):
        visible = (4097 * RATIO - 300 + n + 1) // RATIO
        check(got[n, :visible], queries[0], weights[0], pool.rows_of(0, visible))
