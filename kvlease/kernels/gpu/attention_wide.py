# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
"""Attention of 64 heads on Hopper, each part of the work by warps of its own (Gluon).

Four warps bring tiles of keys to shared memory, four turn each tile's logits into weights, and
eight sum the keys by these weights: while one tile is summed, the next one's logits and weights
are made, and the one after it arrives. Barriers in shared memory carry tiles from one to the next.
A program takes one share of a row's keys after the other: the next one's keys come while the last
one's are still summed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kvlease.kernels.gpu import attention_gluon as share
from kvlease.kernels.gpu import attention_gluon_packed as packed
from kvlease.kernels.gpu import attention_wide_keys as bringing

HEADS = gl.constexpr(bringing.HEADS.value)
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16]))
SUM_HEADS = gl.constexpr(gl.SliceLayout(1, SUMS.value))
# As SUMS, but a thread holds eight channels that lie together, and a warp stores eight times 64
# bytes at once; no value leaves its warp on the way there.
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 256]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 128]],
        [],
        [64, 512],
    )
)
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def barrier(number: gl.constexpr, count: gl.constexpr):
    """Return so many barriers, each passed when ``count`` threads or copies have arrived."""
    made = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def weigh_tile(matches, seen, scale, peak, total):
    """Take a tile's logits into the running softmax; return weights, fade, peak and total."""
    logits = gl.where(seen[None, :], matches * scale, -float("inf"))
    top = gl.maximum(peak, gl.max(logits, axis=1))
    weights = gl.exp2(logits - top[:, None])
    fade = gl.exp2(peak - top)
    return weights, fade, top, total * fade + gl.sum(weights, axis=1)


@gluon.jit
def hand_on(weights, fades, bars, j, parts, fade):
    """Leave a tile's weights, and by how much they shrink the sums before, where they are read."""
    mbarrier.wait(bars.taken.index(j % 2), ((j // 2) & 1) ^ 1)
    if parts is not None:
        weights.index(j % 2).store(parts.to(gl.bfloat16))
    fades.index(j % 2).store(fade)
    fence_async_shared()
    mbarrier.arrive(bars.ready.index(j % 2))


@gluon.jit
def weigh(
    q, keys, seen, weights, fades, bars, queries, window, chosen, partial, items, groups,
    WINDOW: gl.constexpr, NEAR: gl.constexpr, CHOSEN: gl.constexpr, SPLITS: gl.constexpr,
    KEYS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Turn each tile's logits into weights, relative to the highest logit so far."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    i = items * 0
    j, turns = i, i
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, first_head, split = bringing.item_of(item, groups, SPLITS)
        mine = share.share_of(
            queries, chosen, n, split, WINDOW, NEAR, CHOSEN, SPLITS, KEYS)  # fmt: skip
        peak, total = share.first_stats(
            queries, first_head, SPLITS, HEADS, gl.SliceLayout(1, LOGITS))  # fmt: skip
        mbarrier.wait(bars.q_here.index(0), turns & 1)
        if mine.first == mine.last:
            mbarrier.arrive(bars.q_free.index(0))
        for tile in range(mine.first, mine.last):
            slot = i % SLOTS
            mbarrier.wait(bars.full.index(slot), (i // SLOTS) & 1)
            fence_async_shared()
            nothing = gl.full([HEADS, KEYS], 0.0, gl.float32, LOGITS)
            logits = warpgroup_mma(
                q, keys.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            here = seen.index(slot).load(gl.SliceLayout(0, LOGITS)) != 0
            matches = warpgroup_mma_wait(0, deps=[logits])
            if tile + 1 == mine.last:
                mbarrier.arrive(bars.q_free.index(0))
            parts, fade, peak, total = weigh_tile(matches, here, queries.scale, peak, total)
            hand_on(weights, fades, bars, j, parts, fade)
            i += 1
            j += 1
        if SPLITS == 1:
            hand_on(weights, fades, bars, j, None, 1.0 / total)
            j += 1
        else:
            row = n.to(gl.int64) * SPLITS + split
            share.leave_stats(partial, peak, total, row, first_head, queries.num_heads, HEADS,
                              LOGITS)  # fmt: skip
        turns += 1


@gluon.jit
def add_up(
    keys, weights, fades, bars, queries, window, chosen, partial, turn, items, groups,
    WINDOW: gl.constexpr, NEAR: gl.constexpr, CHOSEN: gl.constexpr, D: gl.constexpr,
    ROPE: gl.constexpr, SPLITS: gl.constexpr, TURN: gl.constexpr, KEYS: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Sum the keys by their weights, and store each share's sums."""
    i = items * 0
    j = i
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, first_head, split = bringing.item_of(item, groups, SPLITS)
        mine = share.share_of(
            queries, chosen, n, split, WINDOW, NEAR, CHOSEN, SPLITS, KEYS)  # fmt: skip
        acc = gl.full([HEADS, D], 0.0, gl.float32, SUMS)
        for _ in range(mine.first, mine.last):
            mbarrier.wait(bars.ready.index(j % 2), (j // 2) & 1)
            acc = acc * fades.index(j % 2).load(SUM_HEADS)[:, None]
            sums = warpgroup_mma(weights.index(j % 2), keys.index(i % SLOTS), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(bars.free.index(i % SLOTS))
            mbarrier.arrive(bars.taken.index(j % 2))
            i += 1
            j += 1
        row = n.to(gl.int64) * SPLITS + split
        if SPLITS == 1:
            mbarrier.wait(bars.ready.index(j % 2), (j // 2) & 1)
            acc = acc * fades.index(j % 2).load(SUM_HEADS)[:, None]
            mbarrier.arrive(bars.taken.index(j % 2))
            j += 1
            if TURN:
                acc = share.rotate_back(acc, turn, mine.position, D, ROPE, HEADS, SUMS)
            out = gl.convert_layout(acc.to(gl.bfloat16), STORED)
            share.put(queries.out, out, row, first_head, queries.num_heads, D, HEADS, STORED)
        else:
            share.put(partial.sums, acc, row, first_head, queries.num_heads, D, HEADS, SUMS)


@gluon.jit(do_not_specialize=["items", "groups"])
def attend_wide(
    queries, window, chosen, turn, partial, items, groups, D: gl.constexpr, ROPE: gl.constexpr,
    SPLITS: gl.constexpr, WINDOW: gl.constexpr, NEAR: gl.constexpr, CHOSEN: gl.constexpr,
    PAGE: gl.constexpr, PAGED: gl.constexpr, TURN: gl.constexpr, EARLY: gl.constexpr,
    ROW: gl.constexpr = 0, SCALE_ROW: gl.constexpr = 0, NEAR_PAGED: gl.constexpr = 0,
):  # fmt: skip
    """Attend 64 heads of each query row to each share of its keys: ``items`` in all.

    Takes eight warps, and eight more for its other parts. ROW, SCALE_ROW and NEAR_PAGED describe
    packed rows, which need room for what has come and is not yet scaled: their tiles are shorter.
    """
    KEYS: gl.constexpr = 64 if ROW == 0 else 32
    SLOTS: gl.constexpr = 2 if ROW == 0 else 3
    WEIGH_REGISTERS: gl.constexpr = 120 if ROW == 0 else 96
    BRING_REGISTERS: gl.constexpr = 176 - WEIGH_REGISTERS
    share.wait_for_inputs(EARLY)
    q = gl.allocate_shared_memory(gl.bfloat16, [HEADS, D], share.SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, KEYS, D], share.SHARED)
    seen = gl.allocate_shared_memory(gl.int16, [SLOTS, KEYS], LINE)
    weights = gl.allocate_shared_memory(
        gl.bfloat16, [2, HEADS, KEYS], gl.NVMMASharedLayout(2 * KEYS, 16, 2))  # fmt: skip
    fades = gl.allocate_shared_memory(gl.float32, [2, HEADS], LINE)
    bars = bringing.Bars(barrier(1, 128), barrier(1, 1), barrier(SLOTS, 129), barrier(SLOTS, 1),
                         barrier(2, 1), barrier(2, 1))  # fmt: skip
    if ROW == 0:
        raw, tail = None, None
    else:
        raw, tail = packed.room(3, KEYS, D, ROPE)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (add_up, (keys, weights, fades, bars, queries, window, chosen, partial, turn, items,
                      groups, WINDOW, NEAR, CHOSEN, D, ROPE, SPLITS, TURN, KEYS, SLOTS)),
            (weigh, (q, keys, seen, weights, fades, bars, queries, window, chosen, partial,
                     items, groups, WINDOW, NEAR, CHOSEN, SPLITS, KEYS, SLOTS)),
            (bringing.bring, (
                q, keys, raw, tail, seen, bars, queries, window, chosen, items, groups, WINDOW, D,
                ROPE, NEAR, CHOSEN, PAGE, PAGED, NEAR_PAGED, ROW, SCALE_ROW, SPLITS, KEYS, SLOTS)),
        ],
        [4, 4],
        [WEIGH_REGISTERS, BRING_REGISTERS],
    )  # fmt: skip
