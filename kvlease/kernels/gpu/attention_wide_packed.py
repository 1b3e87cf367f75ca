# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
"""Attention of 64 heads over packed rows on Hopper, with the schedule written out (Gluon).

Packed rows arrive in shared memory while the tile before is multiplied; each tile is then scaled
to bf16 into the one buffer that the tensor cores read. The window's plain rows go there directly.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from kvlease.kernels.gpu import attention_gluon as share
from kvlease.kernels.gpu import attention_gluon_packed as packed
from kvlease.kernels.gpu import attention_wide as wide

HEADS = gl.constexpr(64)
KEYS = gl.constexpr(64)
ROWS = gl.constexpr(wide.ROWS.value)


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
    PAGE: gl.constexpr, PAGED: gl.constexpr, NEAR_PAGED: gl.constexpr, ROW: gl.constexpr,
    SCALE_ROW: gl.constexpr, TURN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend 64 heads of one query row to one share of its keys."""
    KIND: gl.constexpr = "list" if NEAR == "list" else "none"  # of window among the packed tiles
    share.let_next_start(PDL)
    first_head = gl.program_id(1) * HEADS
    n, position, count, start, limit, far, first, last = share.share_of(
        queries, window, chosen, WINDOW, NEAR, CHOSEN, SPLITS, KEYS)  # fmt: skip
    q = gl.allocate_shared_memory(gl.bfloat16, [HEADS, D], share.SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [KEYS, D], share.SHARED)
    raw = gl.allocate_shared_memory(gl.uint8, [2, KEYS, D], packed.RAW_SHARED)
    tail = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, ROPE], packed.TAIL_SHARED)
    share.copy_queries(q, queries, n, first_head, D, HEADS, wide.COPY)
    end = last if NEAR == "list" else gl.minimum(last, far)
    address = share.fetch(
        window, chosen, n, count, limit, first, far, KIND, CHOSEN, PAGE, KEYS, ROWS)  # fmt: skip
    rows = packed.row_pointers(
        window, chosen, address, first >= far, KIND, ROW, PAGED, NEAR_PAGED)  # fmt: skip
    packed.copy_packed(raw.index(0), tail.index(0), rows, address >= 0, D, ROPE, wide.COPY)
    scales = packed.load_scales(
        window, chosen, address, first >= far, KIND, SCALE_ROW, PAGED, NEAR_PAGED)  # fmt: skip
    peak, total = share.first_stats(queries, first_head, SPLITS, HEADS, wide.PER_HEAD)
    acc = gl.full([HEADS, D], 0.0, gl.float32, wide.SUMS)
    for tile in range(first, end):
        slot = (tile - first) % 2
        seen = share.fetch(window, chosen, n, count, limit, tile, far, KIND, CHOSEN, PAGE, KEYS,
                           wide.SEEN)  # fmt: skip
        address = share.fetch(window, chosen, n, count, limit, tile + 1, far, KIND, CHOSEN, PAGE,
                              KEYS, ROWS)  # fmt: skip
        async_copy.wait_group(0)
        gl.thread_barrier()
        packed.unpack(keys, raw.index(slot), tail.index(slot), scales, D, ROPE, wide.COPY)
        fence_async_shared()
        gl.thread_barrier()
        logits = wide.logits_of(q, keys)
        address = gl.where(tile + 1 < end, address, -1)
        rows = packed.row_pointers(
            window, chosen, address, tile + 1 >= far, KIND, ROW, PAGED, NEAR_PAGED)  # fmt: skip
        other = 1 - slot
        packed.copy_packed(
            raw.index(other), tail.index(other), rows, address >= 0, D, ROPE, wide.COPY
        )
        scales = packed.load_scales(window, chosen, address, tile + 1 >= far, KIND, SCALE_ROW,
                                    PAGED, NEAR_PAGED)  # fmt: skip
        acc, peak, total = wide.absorb(logits, keys, acc, peak, total, seen >= 0, queries.scale)
    if NEAR == "ring" or NEAR == "span":
        near = gl.maximum(first - far, 0)
        acc, peak, total = near_tiles(q, keys, acc, peak, total, window, start, count, near,
                                      last - far, queries.scale, D)  # fmt: skip
    async_copy.wait_group(0)
    share.finish(acc, peak, total, queries, partial, turn, n, position, first_head, D, ROPE,
                 SPLITS, TURN, HEADS, wide.LOGITS, wide.SUMS)  # fmt: skip
