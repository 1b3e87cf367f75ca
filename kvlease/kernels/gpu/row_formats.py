# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# Triton's language has no types: what a kernel does with them is checked by its tests.
"""Storing one computed row as its page keeps it: plain, or fp8 with scales.

The twin is ``kernels.formats``. The same memory is seen through pointers of several types.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlease.protocols.schema import FP8_TILE, RowFormat


class RowStore(NamedTuple):
    """One component's pages: the memory as its dtype, and for packed rows as other dtypes too.

    plain [pages, rows, W]: numbers, or bytes of packed rows; e4m3, bf16 and fp32 are that memory
    in those types (None where not needed). ``page`` and ``row`` are strides in elements of
    ``plain``, ``rows`` how many a page holds. Index keys' scales follow all keys of a page.
    """

    plain: Tensor
    e4m3: Tensor | None
    bf16: Tensor | None
    fp32: Tensor | None
    page: int
    row: int
    rows: int


def row_store(base: Tensor, fmt: RowFormat) -> RowStore:
    """Describe the memory of one component; borrows it."""
    layout = (*base.stride()[:2], base.shape[1])
    if fmt.is_plain:
        return RowStore(base, None, None, None, *layout)
    e4m3 = base.view(torch.float8_e4m3fn)
    if fmt.encoding == "fp8_index":
        return RowStore(base, e4m3, None, base.view(torch.float32), *layout)
    return RowStore(base, e4m3, base.view(torch.bfloat16), None, *layout)


def row_kind(fmt: RowFormat) -> int:
    """Return the format's number in kernels: 0 plain, 1 packed latent rows, 2 fp8 index keys."""
    return {"fp8_latent": 1, "fp8_index": 2}.get(fmt.encoding, 0)


def pad_bytes(fmt: RowFormat) -> int:
    """Return how many bytes behind a packed latent row's scales are unused."""
    if fmt.encoding != "fp8_latent":
        return 0
    nope = fmt.width - fmt.rope_width
    return fmt.nbytes - nope - 2 * fmt.rope_width - -(-nope // FP8_TILE)


@triton.jit
def store_row(
    x, store, page, row, D: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr, PAD: tl.constexpr
):
    """Store x [D] float32 as row number ``row`` of a page; KIND as `row_kind` gives it."""
    at = page.to(tl.int64) * store.page + row * store.row
    channels = tl.arange(0, D)
    if KIND == 2:
        peak = tl.max(tl.abs(x))
        scale = tl.where(peak == 0.0, 1.0, tl.div_rn(peak, 448.0))
        first = page.to(tl.int64) * store.page
        tl.store(store.e4m3 + first + row * D + channels, tl.div_rn(x, scale).to(tl.float8e4nv))
        tl.store(store.fp32 + (first + store.rows * D) // 4 + row, scale)
    elif KIND == 1:
        TILE: tl.constexpr = min(64, D)
        COUNT: tl.constexpr = D // TILE
        NOPE: tl.constexpr = D - R
        tiles = tl.reshape(tl.where(channels < NOPE, x, 0.0), (COUNT, TILE))
        ratio = tl.div_rn(tl.max(tl.abs(tiles), axis=1), 448.0)
        bits = ratio.to(tl.int32, bitcast=True)
        # the least power of two not below the ratio, so that no value overflows; 1 for zeros
        exponent = (bits >> 23) - 127 + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        exponent = tl.where(bits == 0, 0, tl.minimum(tl.maximum(exponent, -126), 126))
        factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        packed = tl.reshape((tiles * factor[:, None]), (D,)).to(tl.float8e4nv)
        tl.store(store.e4m3 + at + channels, packed, mask=channels < NOPE)
        rope = store.bf16 + (at + NOPE) // 2 + channels - NOPE
        tl.store(rope, x.to(tl.bfloat16), mask=channels >= NOPE)
        USED: tl.constexpr = (NOPE + TILE - 1) // TILE
        scales = store.plain + at + NOPE + 2 * R
        numbers = tl.arange(0, COUNT)
        tl.store(scales + numbers, (exponent + 127).to(tl.uint8), mask=numbers < USED)
        for spare in tl.static_range(PAD):
            tl.store(scales + USED + spare, tl.full([], 0, tl.uint8))
    else:
        tl.store(store.plain + at + channels, x.to(store.plain.dtype.element_ty))
