# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Packed rows in the Gluon kernels: copied to shared memory as they are, then scaled to bf16."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

CUT = gl.constexpr(64)
RAW_SHARED = gl.constexpr(gl.SwizzledSharedLayout(64, 1, 8, [1, 0]))
TAIL_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.jit
def offsets_in(address, page_stride, ROW: gl.constexpr, PAGED: gl.constexpr):
    """Return where rows start, in bytes; PAGED 0: rows follow each other throughout."""
    far = address.to(gl.int64)
    if PAGED == 0:
        return far * ROW
    else:
        return (far // PAGED) * page_stride + (far % PAGED) * ROW


@gluon.jit
def row_pointers(
    window, chosen, address, is_near, NEAR: gl.constexpr, ROW: gl.constexpr, PAGED: gl.constexpr,
    NEAR_PAGED: gl.constexpr,
):  # fmt: skip
    """Return pointers to packed rows of the pool or, where the window is listed, of its pool."""
    rows = chosen.base + offsets_in(address, chosen.page_stride, ROW, PAGED)
    if NEAR == "list":
        near = window.base + offsets_in(address, window.page_stride, ROW, NEAR_PAGED)
        return gl.where(is_near, near, rows)
    else:
        return rows


@gluon.jit
def load_scales(
    window, chosen, address, is_near, NEAR: gl.constexpr, SCALE_ROW: gl.constexpr,
    PAGED: gl.constexpr, NEAR_PAGED: gl.constexpr,
):  # fmt: skip
    """Load the eight scale bytes of each row as one number."""
    rows = row_pointers(window, chosen, address, is_near, NEAR, SCALE_ROW, PAGED, NEAR_PAGED)
    if NEAR == "list":
        rows += gl.where(is_near, window.scale_at, chosen.scale_at)
    else:
        rows += chosen.scale_at
    return gl.load(rows.to(gl.pointer_type(gl.int64), bitcast=True), mask=address >= 0, other=0)


@gluon.jit
def copy_packed(raw, tail, rows, seen, D: gl.constexpr, ROPE: gl.constexpr, COPY: gl.constexpr):
    """Start copying packed rows to shared memory: quantised channels and RoPE channels."""
    columns = gl.arange(0, CUT, layout=gl.SliceLayout(0, COPY))
    for cut in gl.static_range(0, D - ROPE, CUT):
        async_copy.async_copy_global_to_shared(
            raw.slice(cut, CUT, dim=1), rows[:, None] + (cut + columns)[None, :], mask=seen[:, None]
        )
    rows = (rows + (D - ROPE)).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    columns = gl.arange(0, ROPE, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(
        tail, rows[:, None] + columns[None, :], mask=seen[:, None]
    )
    async_copy.commit_group()


@gluon.jit
def unpack(keys, raw, tail, scales, D: gl.constexpr, ROPE: gl.constexpr, COPY: gl.constexpr):
    """Scale a tile of packed rows to bf16, exactly: scales are powers of two."""
    for cut in gl.static_range((D - ROPE) // CUT):
        stored = raw.slice(cut * CUT, CUT, dim=1).load(COPY)
        exponents = ((scales >> (8 * cut)) & 0xFF).to(gl.int16)
        factors = (exponents << 7).to(gl.bfloat16, bitcast=True)[:, None]
        values = stored.to(gl.float8e4nv, bitcast=True)
        # by way of float32, since the direct cast is four times slower
        values = values.to(gl.float16).to(gl.float32).to(gl.bfloat16) * factors
        keys.slice(cut * CUT, CUT, dim=1).store(values)
    keys.slice(D - ROPE, ROPE, dim=1).store(tail.load(COPY))
