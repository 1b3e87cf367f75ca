# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
"""What the attention kernels in Gluon share: where a row's keys lie, copies, and how it ends.

Each row reads a share of its key tiles: chosen rows first, since where they lie needs no
position, then the window.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

NO_KEY = gl.constexpr(-1.0e30)
LOG2_E = gl.constexpr(1.4426950408889634)
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def wait_for_inputs(EARLY: gl.constexpr):
    """Wait for the kernel in front to end, and then let the next one be set up meanwhile.

    Not before: kernels that only wait would let one another fill the device.
    """
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


class Share(NamedTuple):
    """A row's position, how many keys it has in the window and chosen, and a share of its tiles.

    The first ``far`` tiles of a row hold chosen keys, the rest the window; the share is tiles
    first .. last.
    """

    position: gl.tensor
    count: gl.tensor
    limit: gl.tensor
    far: gl.tensor
    first: gl.tensor
    last: gl.tensor


@gluon.jit
def share_of(
    queries, chosen, n, split, WINDOW: gl.constexpr, NEAR: gl.constexpr, CHOSEN: gl.constexpr,
    SPLITS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Return the share number ``split`` of a row's tiles of KEYS keys."""
    position = gl.load(queries.positions + n)
    count = gl.minimum(position + 1, WINDOW)
    if CHOSEN == "none":
        limit = count * 0
    elif CHOSEN == "list":
        limit = count * 0 + chosen.limit
    else:
        limit = (position + 1) // chosen.ratio
    far = (limit + KEYS - 1) // KEYS
    tiles = far
    if NEAR != "none":
        tiles += WINDOW // KEYS
    first, last = tiles * split // SPLITS, tiles * (split + 1) // SPLITS
    return Share(position, count, limit, far, first, last)


@gluon.jit
def window_start(window, n, count, NEAR: gl.constexpr, WINDOW: gl.constexpr):
    """Return the first of a window's rows, which lie one after the other."""
    if NEAR == "ring":
        return gl.load(window.at + n).to(gl.int64) * WINDOW
    elif NEAR == "span":
        return gl.load(window.at + n).to(gl.int64) + 1 - count
    else:
        return count.to(gl.int64) * 0


@gluon.jit
def fetch(
    window, chosen, n, mine, tile, end, NEAR: gl.constexpr, CHOSEN: gl.constexpr,
    PAGE: gl.constexpr, KEYS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return where a tile's rows lie (in the window or the pool); -1 for none, as from ``end`` on.

    Listed rows are asked for before the position is known, which says only whether they count.
    """
    slots = gl.arange(0, KEYS, layout=layout)
    count = gl.where(tile < end, mine.count, 0)
    if CHOSEN == "none":
        slots += tile * KEYS
        return gl.where(slots < count, slots, -1)
    else:
        near = tile >= mine.far
        slots += gl.where(near, tile - mine.far, tile) * KEYS
        wanted = (slots < mine.limit) & (near == 0) & (tile < end)
        if CHOSEN == "list":
            at = chosen.rows + n.to(gl.int64) * chosen.limit + slots
            address = gl.where(count > 0, gl.load(at, mask=wanted, other=-1), -1)
        else:
            row = n if chosen.sequence is None else gl.load(chosen.sequence + n)
            at = chosen.rows + row.to(gl.int64) * chosen.limit + slots // PAGE
            page = gl.load(at, mask=wanted, other=-1)
            address = gl.where(page < 0, page, page * PAGE + slots % PAGE)
        if NEAR == "none":
            return address
        elif NEAR == "list":
            at = window.at + n.to(gl.int64) * window.limit + slots
            return gl.where(near, gl.load(at, mask=near & (slots < count), other=-1), address)
        else:
            return gl.where(near & (slots < count), slots, address)


@gluon.jit
def copy_rows(buffer, rows, seen, D: gl.constexpr, COPY: gl.constexpr):
    """Start copying plain rows to shared memory; rows not seen become zeros."""
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(
        buffer, rows[:, None] + columns[None, :], mask=seen[:, None]
    )


@gluon.jit
def copy_tile(
    buffer,
    window,
    chosen,
    address,
    start,
    is_near,
    D: gl.constexpr,
    NEAR: gl.constexpr,
    CHOSEN: gl.constexpr,
    PAGED: gl.constexpr,
    COPY: gl.constexpr,
):
    """Start copying one tile of plain rows, and close the group of copies."""
    wide = address.to(gl.int64)
    if CHOSEN == "none":
        rows = window.base + (start + wide) * D
    else:
        if PAGED == 0:
            rows = chosen.base + wide * D
        else:
            rows = chosen.base + (wide // PAGED) * chosen.page_stride + (wide % PAGED) * D
        if NEAR != "none":
            rows = gl.where(is_near, window.base + (start + wide) * D, rows)
    copy_rows(buffer, rows, address >= 0, D, COPY)
    async_copy.commit_group()


@gluon.jit
def copy_queries(
    buffer, queries, n, first_head, D: gl.constexpr, HEADS: gl.constexpr, COPY: gl.constexpr
):
    """Start copying a row's heads; heads past the last become zeros."""
    heads = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, COPY))
    rows = queries.q + (n.to(gl.int64) * queries.num_heads + heads) * D
    copy_rows(buffer, rows, heads < queries.num_heads, D, COPY)


@gluon.jit
def first_stats(
    queries, first_head, SPLITS: gl.constexpr, HEADS: gl.constexpr, layout: gl.constexpr
):
    """Return the peak and total to start from: the sink's where there is one share, else none."""
    if SPLITS == 1:
        heads = first_head + gl.arange(0, HEADS, layout=layout)
        sink = gl.load(queries.sinks + heads, mask=heads < queries.num_heads, other=0.0)
        return sink * LOG2_E, gl.full([HEADS], 1.0, gl.float32, layout)
    else:
        none = gl.full([HEADS], NO_KEY, gl.float32, layout)
        return none, gl.full([HEADS], 0.0, gl.float32, layout)


@gluon.jit
def rotate_back(
    values,
    turn,
    position,
    D: gl.constexpr,
    ROPE: gl.constexpr,
    HEADS: gl.constexpr,
    layout: gl.constexpr,
):
    """Undo RoPE on the last ROPE channels, interleaved pairs: a thread holds both of a pair."""
    even, odd = gl.split(gl.reshape(values, [HEADS, D // 2, 2]))
    pairs = gl.arange(0, D // 2, layout=gl.SliceLayout(0, even.type.layout)) - (D - ROPE) // 2
    at = gl.maximum(position, 0).to(gl.int64) * (ROPE // 2) + pairs
    cos = gl.load(turn.cos + at, mask=pairs >= 0, other=1.0)[None, :]
    sin = gl.load(turn.sin + at, mask=pairs >= 0, other=0.0)[None, :]
    turned = gl.join(even * cos + odd * sin, odd * cos - even * sin)
    return gl.convert_layout(gl.reshape(turned, [HEADS, D]), layout)


@gluon.jit
def leave_stats(
    partial, peak, total, row, first_head, num_heads, HEADS: gl.constexpr, STATS: gl.constexpr
):
    """Store a share's peak and total for `combine`."""
    heads = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, STATS))
    stats = partial.stats + (row * num_heads + heads) * 2
    gl.store(stats, peak, mask=heads < num_heads)
    gl.store(stats + 1, total, mask=heads < num_heads)


@gluon.jit
def put(
    target, values, row, first_head, num_heads, D: gl.constexpr, HEADS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store heads of a row of the target."""
    heads = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    where = row * num_heads * D + (heads * D)[:, None] + columns[None, :]
    values = values.to(target.dtype.element_ty)
    gl.store(target + where, values, mask=(heads < num_heads)[:, None])
