# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Attention of 64 heads over plain rows on Hopper, with the schedule written out (Gluon).

Two tiles of 64 keys are in shared memory: while one is multiplied the other arrives. All eight
warps do the same: logits (a warpgroup takes half the keys), softmax, sums (half the channels).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kvlease.kernels.gpu import attention_gluon as share

HEADS = gl.constexpr(64)
KEYS = gl.constexpr(64)
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
ROWS = gl.constexpr(gl.SliceLayout(1, COPY.value))
SEEN = gl.constexpr(gl.SliceLayout(0, LOGITS.value))
PER_HEAD = gl.constexpr(gl.SliceLayout(1, LOGITS.value))
SUM_HEADS = gl.constexpr(gl.SliceLayout(1, SUMS.value))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))


@gluon.jit
def logits_of(q, keys):
    """Start multiplying the queries with a tile's keys."""
    nothing = gl.full([HEADS, KEYS], 0.0, gl.float32, LOGITS)
    return warpgroup_mma(q, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def absorb(logits, keys, acc, peak, total, seen, scale):
    """Take a tile into the running softmax once its logits are there."""
    logits = warpgroup_mma_wait(0, deps=[logits])
    logits = gl.where(seen[None, :], logits * scale, -float("inf"))
    top = gl.maximum(peak, gl.max(logits, axis=1))
    weights = gl.exp2(logits - top[:, None])
    fade = gl.exp2(peak - top)
    total = total * fade + gl.sum(weights, axis=1)
    acc = acc * gl.convert_layout(fade, SUM_HEADS)[:, None]
    p = gl.convert_layout(weights.to(gl.bfloat16), WEIGHTS)
    return warpgroup_mma(p, keys, acc), top, total


@gluon.jit
def attend_wide(
    queries, window, chosen, turn, partial, D: gl.constexpr, ROPE: gl.constexpr,
    SPLITS: gl.constexpr, WINDOW: gl.constexpr, NEAR: gl.constexpr, CHOSEN: gl.constexpr,
    PAGE: gl.constexpr, PAGED: gl.constexpr, TURN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend 64 heads of one query row to one share of its keys."""
    share.let_next_start(PDL)
    first_head = gl.program_id(1) * HEADS
    n, position, count, start, limit, far, first, last = share.share_of(
        queries, window, chosen, WINDOW, NEAR, CHOSEN, SPLITS, KEYS)  # fmt: skip
    q = gl.allocate_shared_memory(gl.bfloat16, [HEADS, D], share.SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, D], share.SHARED)
    share.copy_queries(q, queries, n, first_head, D, HEADS, COPY)
    address = share.fetch(
        window, chosen, n, count, limit, first, far, NEAR, CHOSEN, PAGE, KEYS, ROWS)  # fmt: skip
    share.copy_tile(keys.index(0), window, chosen, address, start, first >= far, D, NEAR, CHOSEN,
                    PAGED, COPY)  # fmt: skip
    seen = share.fetch(
        window, chosen, n, count, limit, first, far, NEAR, CHOSEN, PAGE, KEYS, SEEN)  # fmt: skip
    address = share.fetch(
        window, chosen, n, count, limit, first + 1, far, NEAR, CHOSEN, PAGE, KEYS,
        ROWS)  # fmt: skip
    peak, total = share.first_stats(queries, first_head, SPLITS, HEADS, PER_HEAD)
    acc = gl.full([HEADS, D], 0.0, gl.float32, SUMS)
    for tile in range(first, last):
        own = keys.index((tile - first) % 2)
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        logits = logits_of(q, own)
        # the barrier says that every warp is done with the other buffer
        address = gl.where(tile + 1 < last, address, -1)
        share.copy_tile(keys.index((tile - first + 1) % 2), window, chosen, address, start,
                        tile + 1 >= far, D, NEAR, CHOSEN, PAGED, COPY)  # fmt: skip
        address = share.fetch(window, chosen, n, count, limit, tile + 2, far, NEAR, CHOSEN, PAGE,
                              KEYS, ROWS)  # fmt: skip
        later = share.fetch(window, chosen, n, count, limit, tile + 1, far, NEAR, CHOSEN, PAGE,
                            KEYS, SEEN)  # fmt: skip
        acc, peak, total = absorb(logits, own, acc, peak, total, seen >= 0, queries.scale)
        seen = later
    async_copy.wait_group(0)
    share.finish(acc, peak, total, queries, partial, turn, n, position, first_head, D, ROPE,
                 SPLITS, TURN, HEADS, LOGITS, SUMS)  # fmt: skip
