# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Packed rows in the Gluon kernels: copied to shared memory as they are, then scaled to bf16.

``raw`` holds the quantised channels of several tiles, a place for each cut of CUT channels, and
``tail`` their RoPE channels. Places of their own, since the compiler lets a write to one wait for
those before it to the same.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kvlease.kernels.gpu import attention_gluon as share

CUT = gl.constexpr(64)
RAW_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
TAIL_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.jit
def room(TILES: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, ROPE: gl.constexpr):
    """Return where tiles of packed rows can lie as they come."""
    raw = ()
    for _ in gl.static_range((D - ROPE) // CUT):
        place = gl.allocate_shared_memory(gl.uint8, [TILES, KEYS, CUT], RAW_SHARED)
        raw = raw + (place,)  # noqa: RUF005 - Triton knows no unpacking
    return raw, gl.allocate_shared_memory(gl.bfloat16, [TILES, KEYS, ROPE], TAIL_SHARED)


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
def copy_packed(
    raw, tail, place, rows, seen, D: gl.constexpr, ROPE: gl.constexpr, COPY: gl.constexpr
):
    """Start copying packed rows to shared memory: quantised channels and RoPE channels."""
    columns = gl.arange(0, CUT, layout=gl.SliceLayout(0, COPY))
    for cut in gl.static_range((D - ROPE) // CUT):
        async_copy.async_copy_global_to_shared(
            raw[cut].index(place),
            rows[:, None] + (cut * CUT + columns)[None, :],
            mask=seen[:, None],
        )
    rows = (rows + (D - ROPE)).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    columns = gl.arange(0, ROPE, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(
        tail.index(place), rows[:, None] + columns[None, :], mask=seen[:, None]
    )
    async_copy.commit_group()


@gluon.jit
def scaled(stored, scales, cut: gl.constexpr):
    """Scale a cut's quantised channels to bf16, exactly: scales are powers of two."""
    exponents = ((scales >> (8 * cut)) & 0xFF).to(gl.int16)
    factors = (exponents << 7).to(gl.bfloat16, bitcast=True)[:, None]
    values = stored.to(gl.float8e4nv, bitcast=True)
    # by way of float32, since the direct cast is four times slower
    return values.to(gl.float16).to(gl.float32).to(gl.bfloat16) * factors


@gluon.jit
def side_by_side(parts):
    """Put parts of equal width next to each other two by two; threads keep what they hold."""
    wider = ()
    for i in gl.static_range(0, len(parts), 2):
        pair = gl.permute(gl.join(parts[i], parts[i + 1]), (0, 2, 1))
        pair = gl.reshape(pair, [pair.shape[0], 2 * pair.shape[2]])
        wider = wider + (pair,)  # noqa: RUF005 - Triton knows no unpacking
    return wider


@gluon.jit
def unpack(
    keys, raw, tail, place, scales, D: gl.constexpr, ROPE: gl.constexpr, COPY: gl.constexpr,
    CUTS: gl.constexpr,
):  # fmt: skip
    """Scale a tile of packed rows to bf16; CUTS cuts (2, 4, 8) are stored at once.

    A store waits for the one before it, while more cuts at once need more registers.
    """
    for first in gl.static_range(0, D // CUT, CUTS):
        parts = ()
        for cut in gl.static_range(first, first + CUTS):
            if cut * CUT < D - ROPE:
                part = scaled(raw[cut].index(place).load(COPY), scales, cut)
            else:
                part = tail.index(place).load(COPY)
            parts = parts + (part,)  # noqa: RUF005 - Triton knows no unpacking
        for _ in gl.static_range(CUTS // 4 + 1):
            parts = side_by_side(parts)
        keys.slice(first * CUT, CUTS * CUT, dim=1).store(parts[0])


@gluon.jit
def copy_near(
    keys, window, address, start, D: gl.constexpr, NEAR: gl.constexpr, COPY: gl.constexpr
):
    """Start copying a tile of the window to where it is read, if its rows are plain."""
    if NEAR == "ring" or NEAR == "span":
        share.copy_rows(keys, window.base + (start + address) * D, address >= 0, D, COPY)
        async_copy.commit_group()


@gluon.jit
def is_packed(mine, tile, NEAR: gl.constexpr):
    """Return whether a tile's rows are packed: chosen ones are, and those of a listed window."""
    if NEAR == "list":
        return tile >= 0
    else:
        return tile < mine.far


@gluon.jit
def copy_tiles(
    keys, raw, tail, window, chosen, addresses, start, mine, D: gl.constexpr, ROPE: gl.constexpr,
    NEAR: gl.constexpr, ROW: gl.constexpr, SCALE_ROW: gl.constexpr, PAGED: gl.constexpr,
    NEAR_PAGED: gl.constexpr, TILES: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Start copying every tile of a share, each as a group of its own; return their scales.

    Rows of a plain window go to where they are read.
    """
    for t in gl.static_range(TILES):
        tile = mine.first + t
        if is_packed(mine, tile, NEAR):
            rows = row_pointers(window, chosen, addresses[t], tile >= mine.far, NEAR, ROW, PAGED,
                                NEAR_PAGED)  # fmt: skip
            copy_packed(raw, tail, t, rows, addresses[t] >= 0, D, ROPE, COPY)
        else:
            copy_near(keys[t], window, addresses[t], start, D, NEAR, COPY)
    scales = ()
    for t in gl.static_range(TILES):
        tile = mine.first + t
        address = gl.where(is_packed(mine, tile, NEAR), addresses[t], -1)
        scale = load_scales(window, chosen, address, tile >= mine.far, NEAR, SCALE_ROW, PAGED,
                            NEAR_PAGED)  # fmt: skip
        scales = scales + (scale,)  # noqa: RUF005 - Triton knows no unpacking
    return scales
