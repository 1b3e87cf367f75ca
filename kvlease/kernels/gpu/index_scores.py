"""Indexer scores over paged keys: scale_s * sum over heads of w_h * relu(q_h . k_s).

Decode: the grid is persistent. Programs share the pages of all sequences evenly, whatever their
lengths, and find their part from the positions on the device, so that a captured graph can be
replayed as sequences grow. A few pages each are found while the kernel in front ends.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.early import early_launch, wait_for_inputs

_FEW_PAGES = 8
"""Pages of a program up to which it starts early. With more it would start before its neighbours
have left, and share a multiprocessor with more of its like than others do."""


@frozen
class IndexKeys:
    """Index keys in pool memory: numbers by (page, row), and fp8 keys' scales beside them.

    Attributes:
        values: [num_pages, rows_per_page, D], bf16 or e4m3.
        scales: [num_pages, rows_per_page] float32 for e4m3 values; None for bf16.
    """

    values: Tensor
    scales: Tensor | None

    @classmethod
    def in_rows(cls, memory: Tensor) -> "IndexKeys":
        """Keys as bf16 rows. Shapes: memory [num_pages, rows_per_page, D] bf16."""
        return cls(memory, None)

    @classmethod
    def in_planes(cls, memory: Tensor, rows_per_page: int) -> "IndexKeys":
        """Keys in pages that hold all e4m3 values first and then all scales (`RowFormat.planes`).

        Shapes: memory [num_pages, rows_per_page * (D + 4)] uint8.
        """
        num_pages, page_bytes = memory.shape
        width = page_bytes // rows_per_page - 4
        values = memory.view(torch.float8_e4m3fn)[:, : rows_per_page * width]
        scales = memory.view(torch.float32)[:, rows_per_page * width // 4 :]
        return cls(values.view(num_pages, rows_per_page, width), scales)

    def layout(self) -> dict[str, int]:
        """Return the strides that kernels take as constants; a scale stride of 0 says none."""
        scales = self.scales
        return {
            "PAGE_STRIDE": self.values.stride(0),
            "ROW_STRIDE": self.values.stride(1),
            "SCALE_PAGE_STRIDE": 0 if scales is None else scales.stride(0),
            "SCALE_ROW_STRIDE": 0 if scales is None else scales.stride(1),
            "PAGE_ROWS": self.values.shape[1],
            "WIDTH": self.values.shape[2],
        }


def programs_each(queries: Tensor, keys: IndexKeys) -> int:
    """Return how many programs of `decode_scores` a multiprocessor runs at once."""
    # conversions take registers
    return 4 if queries.dtype == keys.values.dtype else 3


@triton.jit
def _score(keys, query, weights, scale):
    """Return the scores of one page of keys."""
    if keys.dtype != query.dtype:
        # e4m3 under bf16 queries: half precision holds both, and is one conversion, not two
        keys = keys.to(tl.float16)
        query = query.to(tl.float16)
    products = tl.dot(keys, query)
    # relu(x) = (x + |x|) / 2: an addition issues at twice the rate of a maximum
    return tl.sum((products + tl.abs(products)) * weights[None, :], axis=1) * scale


@triton.jit(do_not_specialize=["num_sequences"])
def _decode_scores(
    queries, head_weights, values, scales, table, positions, out, num_sequences, table_stride,
    out_stride, PAGE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    SCALE_PAGE_STRIDE: tl.constexpr, SCALE_ROW_STRIDE: tl.constexpr, PAGE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, RATIO: tl.constexpr, SEQUENCES: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Score an even share of all sequences' pages, one after the other."""
    lanes = tl.arange(0, SEQUENCES)
    at = tl.load(positions + lanes, mask=lanes < num_sequences, other=-1)
    pages = (tl.maximum(at + 1, 0) // RATIO + PAGE_ROWS - 1) // PAGE_ROWS
    ends = tl.cumsum(pages)
    total = tl.sum(pages).to(tl.int64)
    page = (total * tl.program_id(0) // tl.num_programs(0)).to(tl.int32)
    last = (total * (tl.program_id(0) + 1) // tl.num_programs(0)).to(tl.int32)
    wait_for_inputs(EARLY)
    heads = tl.arange(0, HEADS)
    channels = tl.arange(0, WIDTH)
    rows = tl.arange(0, PAGE_ROWS)
    while page < last:
        sequence = tl.sum((ends <= page).to(tl.int32)).to(tl.int64)
        begin = tl.sum(tl.where(ends <= page, pages, 0))
        visible = (tl.load(positions + sequence) + 1) // RATIO
        stop = tl.minimum(last, begin + (visible + PAGE_ROWS - 1) // PAGE_ROWS)
        query = tl.load(queries + (sequence * HEADS + heads[None, :]) * WIDTH + channels[:, None])
        weights = tl.load(head_weights + sequence * HEADS + heads) * 0.5
        for n in tl.range(page, stop, num_stages=STAGES):
            place = tl.load(table + sequence * table_stride + n - begin).to(tl.int64)
            keys = tl.load(
                values + place * PAGE_STRIDE + rows[:, None] * ROW_STRIDE + channels[None, :]
            )
            scale = 1.0
            if SCALE_ROW_STRIDE > 0:
                scale = tl.load(scales + place * SCALE_PAGE_STRIDE + rows * SCALE_ROW_STRIDE)
            row = (n - begin) * PAGE_ROWS + rows
            scores = _score(keys, query, weights, scale)
            tl.store(out + sequence * out_stride + row, scores, mask=row < visible)
        page = stop


@triton.jit
def _decode_page(
    queries, raw_queries, head_weights, values, scales, table, positions, out, table_stride,
    out_stride, PAGE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    SCALE_PAGE_STRIDE: tl.constexpr, SCALE_ROW_STRIDE: tl.constexpr, PAGE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, RATIO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Score one page of one sequence. Nothing is looked up first: all loads leave together."""
    sequence = tl.program_id(1).to(tl.int64)
    heads = tl.arange(0, HEADS)
    channels = tl.arange(0, WIDTH)
    rows = tl.arange(0, PAGE_ROWS)
    place = tl.load(table + sequence * table_stride + tl.program_id(0)).to(tl.int64)
    visible = tl.maximum(tl.load(positions + sequence) + 1, 0) // RATIO
    is_seen = tl.program_id(0) * PAGE_ROWS < visible
    wait_for_inputs(EARLY)
    # as plain bytes until the keys are on their way: an operand is put in its place at once
    raw = tl.load(raw_queries + (sequence * HEADS + heads[None, :]) * WIDTH + channels[:, None])
    weights = tl.load(head_weights + sequence * HEADS + heads) * 0.5
    if is_seen:
        keys = tl.load(
            values + place * PAGE_STRIDE + rows[:, None] * ROW_STRIDE + channels[None, :]
        )
        scale = 1.0
        if SCALE_ROW_STRIDE > 0:
            scale = tl.load(scales + place * SCALE_PAGE_STRIDE + rows * SCALE_ROW_STRIDE)
        query = raw.to(queries.dtype.element_ty, bitcast=True)
        row = tl.program_id(0) * PAGE_ROWS + rows
        scores = _score(keys, query, weights, scale)
        tl.store(out + sequence * out_stride + row, scores, mask=row < visible)


def decode_scores(
    queries: Tensor,
    head_weights: Tensor,
    keys: IndexKeys,
    table: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    ratio: int,
    programs: int,
) -> None:
    """Write each sequence's scores of its visible keys, and nothing past them.

    The lengths are read on the device: sequence b sees (positions[b] + 1) // ratio keys, none
    where its position is -1. Positions and pages are not written by kernels right before this one:
    they are read before those have ended.

    Shapes: queries [B, H, D], e4m3 (over e4m3 keys only) or bf16, H a multiple of 16;
    head_weights [B, H] float32 with every scale already in, that of e4m3 queries too; table [B, P]
    int32; positions [B] int32; out [B, L] float32. ``programs``: how many share the work, at
    best `programs_each` for each multiprocessor.
    """
    num_sequences, num_heads, _ = queries.shape
    scales = head_weights if keys.scales is None else keys.scales
    memory = (keys.values, scales, table, positions, out)
    strides = (table.stride(0), out.stride(0))
    options = {**keys.layout(), "HEADS": num_heads, "RATIO": ratio, "num_warps": 4}
    pages = triton.cdiv(out.shape[1], keys.values.shape[1])
    if pages * num_sequences <= programs and pages <= table.shape[1]:
        raw = queries.view(torch.int16 if queries.dtype == torch.bfloat16 else torch.int8)
        _decode_page[(pages, num_sequences)](
            queries, raw, head_weights, *memory, *strides, **options, **early_launch(_decode_page)
        )
        return
    early = early_launch(_decode_scores)
    if pages * num_sequences > _FEW_PAGES * programs:
        early.pop("launch_pdl", None)
    _decode_scores[(programs,)](
        queries, head_weights, *memory, num_sequences, *strides, **options,
        SEQUENCES=triton.next_power_of_2(num_sequences),
        STAGES=3 if keys.scales is None else 5, **early,
    )  # fmt: skip
