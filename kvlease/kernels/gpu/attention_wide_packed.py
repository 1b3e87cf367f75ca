# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Attention of 64 heads over packed rows on Hopper, with the schedule written out (Gluon).

Packed rows arrive in shared memory while the tile before is multiplied; each tile is then scaled
to bf16 into the one buffer that the tensor cores read. The window's plain rows go there directly.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from kvlease.kernels.gpu import attention_gluon as share
from kvlease.kernels.gpu import attention_wide as wide

HEADS = gl.constexpr(64)
KEYS = gl.constexpr(64)
CUT = gl.constexpr(64)
ROWS = gl.constexpr(wide.ROWS.value)
RAW_SHARED = gl.constexpr(gl.SwizzledSharedLayout(64, 1, 8, [1, 0]))
TAIL_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.jit
def row_offsets(address, page_stride, ROW: gl.constexpr, PAGED: gl.constexpr):
    """Return where rows start, in bytes; PAGED 0: rows follow each other throughout."""
    far = address.to(gl.int64)
    if PAGED == 0:
        return far * ROW
    else:
        return (far // PAGED) * page_stride + (far % PAGED) * ROW


@gluon.jit
def copy_packed(
    raw, tail, base, page_stride, address, D: gl.constexpr, ROPE: gl.constexpr,
    ROW: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Start copying packed rows to shared memory: quantised channels and RoPE channels."""
    seen = (address >= 0)[:, None]
    rows = base + row_offsets(address, page_stride, ROW, PAGED)
    columns = gl.arange(0, CUT, layout=gl.SliceLayout(0, wide.COPY))
    for cut in gl.static_range(0, D - ROPE, CUT):
        async_copy.async_copy_global_to_shared(
            raw.slice(cut, CUT, dim=1), rows[:, None] + (cut + columns)[None, :], mask=seen
        )
    rows = (rows + (D - ROPE)).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    columns = gl.arange(0, ROPE, layout=gl.SliceLayout(0, wide.COPY))
    async_copy.async_copy_global_to_shared(tail, rows[:, None] + columns[None, :], mask=seen)
    async_copy.commit_group()


@gluon.jit
def load_scales(base, page_stride, scale_at, address, SCALE_ROW: gl.constexpr, PAGED: gl.constexpr):
    """Load the eight scale bytes of each row as one number."""
    rows = base + (row_offsets(address, page_stride, SCALE_ROW, PAGED) + scale_at)
    rows = rows.to(gl.pointer_type(gl.int64), bitcast=True)
    return gl.load(rows, mask=address >= 0, other=0)


@gluon.jit
def unpack(keys, raw, tail, scales, D: gl.constexpr, ROPE: gl.constexpr):
    """Scale a tile of packed rows to bf16, exactly: scales are powers of two."""
    for cut in gl.static_range((D - ROPE) // CUT):
        stored = raw.slice(cut * CUT, CUT, dim=1).load(wide.COPY)
        exponents = ((scales >> (8 * cut)) & 0xFF).to(gl.int16)
        factors = (exponents << 7).to(gl.bfloat16, bitcast=True)[:, None]
        values = stored.to(gl.float8e4nv, bitcast=True)
        # by way of float32, since the direct cast is four times slower
        values = values.to(gl.float16).to(gl.float32).to(gl.bfloat16) * factors
        keys.slice(cut * CUT, CUT, dim=1).store(values)
    keys.slice(D - ROPE, ROPE, dim=1).store(tail.load(wide.COPY))


@gluon.jit
def near_tiles(
    q, keys, acc, peak, total, window, start, count, first, last, scale, D: gl.constexpr
):
    """Take tiles of the window, plain rows that lie together, into the running softmax."""
    for tile in range(first, last):
        gl.thread_barrier()
        slots = tile * KEYS + gl.arange(0, KEYS, layout=ROWS)
        share.copy_rows(keys, window.base + (start + slots) * D, slots < count, D, wide.COPY)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        logits = wide.logits_of(q, keys)
        seen = tile * KEYS + gl.arange(0, KEYS, layout=wide.SEEN) < count
        acc, peak, total = wide.absorb(logits, keys, acc, peak, total, seen, scale)
    return acc, peak, total


@gluon.jit
def attend_wide_packed(
    queries, window, chosen, turn, partial, D: gl.constexpr, ROPE: gl.constexpr,
    SPLITS: gl.constexpr, WINDOW: gl.constexpr, NEAR: gl.constexpr, CHOSEN: gl.constexpr,
    PAGE: gl.constexpr, PAGED: gl.constexpr, ROW: gl.constexpr, SCALE_ROW: gl.constexpr,
    TURN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend 64 heads of one query row to one share of its keys."""
    share.let_next_start(PDL)
    first_head = gl.program_id(1) * HEADS
    n, position, count, start, limit, far, first, last = share.share_of(
        queries, window, chosen, WINDOW, NEAR, CHOSEN, SPLITS, KEYS)  # fmt: skip
    q = gl.allocate_shared_memory(gl.bfloat16, [HEADS, D], share.SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [KEYS, D], share.SHARED)
    raw = gl.allocate_shared_memory(gl.uint8, [2, KEYS, D], RAW_SHARED)
    tail = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, ROPE], TAIL_SHARED)
    share.copy_queries(q, queries, n, first_head, D, HEADS, wide.COPY)
    end = gl.minimum(last, far)
    stride = chosen.page_stride
    address = share.fetch(
        window, chosen, n, count, limit, first, far, "none", CHOSEN, PAGE, KEYS, ROWS)  # fmt: skip
    copy_packed(raw.index(0), tail.index(0), chosen.base, stride, address, D, ROPE, ROW, PAGED)
    scales = load_scales(chosen.base, stride, chosen.scale_at, address, SCALE_ROW, PAGED)
    address = share.fetch(
        window, chosen, n, count, limit, first + 1, far, "none", CHOSEN, PAGE, KEYS,
        ROWS)  # fmt: skip
    peak, total = share.first_stats(queries, first_head, SPLITS, HEADS, wide.PER_HEAD)
    acc = gl.full([HEADS, D], 0.0, gl.float32, wide.SUMS)
    for tile in range(first, end):
        slot = (tile - first) % 2
        seen = share.fetch(window, chosen, n, count, limit, tile, far, "none", CHOSEN, PAGE, KEYS,
                           wide.SEEN)  # fmt: skip
        async_copy.wait_group(0)
        gl.thread_barrier()
        unpack(keys, raw.index(slot), tail.index(slot), scales, D, ROPE)
        fence_async_shared()
        gl.thread_barrier()
        logits = wide.logits_of(q, keys)
        address = gl.where(tile + 1 < end, address, -1)
        copy_packed(raw.index(1 - slot), tail.index(1 - slot), chosen.base, stride, address, D,
                    ROPE, ROW, PAGED)  # fmt: skip
        scales = load_scales(chosen.base, stride, chosen.scale_at, address, SCALE_ROW, PAGED)
        address = share.fetch(window, chosen, n, count, limit, tile + 2, far, "none", CHOSEN, PAGE,
                              KEYS, ROWS)  # fmt: skip
        acc, peak, total = wide.absorb(logits, keys, acc, peak, total, seen >= 0, queries.scale)
    if NEAR != "none":
        near = gl.maximum(first - far, 0)
        acc, peak, total = near_tiles(q, keys, acc, peak, total, window, start, count, near,
                                      last - far, queries.scale, D)  # fmt: skip
    async_copy.wait_group(0)
    share.finish(acc, peak, total, queries, partial, turn, n, position, first_head, D, ROPE,
                 SPLITS, TURN, HEADS, wide.LOGITS, wide.SUMS)  # fmt: skip
