# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
"""Attention of few heads over a short share of plain rows: one trip to memory (Gluon).

For small batches, where latency is all: every tile of the share is asked for at once, and the
softmax is taken once over all of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kvlease.kernels.gpu import attention_gluon as share

CUT = gl.constexpr(128)


@gluon.jit
def logits_of(
    q, keys, HEADS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, LOGITS: gl.constexpr
):
    """Multiply the queries with a tile's keys."""
    logits = gl.full([HEADS, KEYS], 0.0, gl.float32, LOGITS)
    for cut in gl.static_range(0, D, CUT):
        a = q.slice(cut, CUT, dim=1).load(gl.DotOperandLayout(0, LOGITS, 2))
        b = keys.slice(cut, CUT, dim=1).permute((1, 0)).load(gl.DotOperandLayout(1, LOGITS, 2))
        logits = mma_v2(a, b, logits)
    return logits


@gluon.jit
def all_addresses(
    window, chosen, n, count, limit, first, last, far, NEAR: gl.constexpr, CHOSEN: gl.constexpr,
    PAGE: gl.constexpr, KEYS: gl.constexpr, TILES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return where the rows of each tile of the share lie; -1 for none."""
    addresses = ()
    for t in gl.static_range(TILES):
        is_mine = first + t < last
        address = share.fetch(window, chosen, n, gl.where(is_mine, count, 0),
                              gl.where(is_mine, limit, 0), first + t, far, NEAR, CHOSEN, PAGE,
                              KEYS, layout)  # fmt: skip
        addresses = addresses + (address,)  # noqa: RUF005 - Triton knows no unpacking
    return addresses


@gluon.jit
def weigh_all(
    queries, keys, matches, first_head, D: gl.constexpr, SPLITS: gl.constexpr,
    HEADS: gl.constexpr, KEYS: gl.constexpr, TILES: gl.constexpr, LOGITS: gl.constexpr,
):  # fmt: skip
    """Return the softmax over all tiles at once times their keys, its peak and its total."""
    peak, total = share.first_stats(queries, first_head, SPLITS, HEADS, gl.SliceLayout(1, LOGITS))
    best = matches[0]
    for t in gl.static_range(1, TILES):
        best = gl.maximum(best, matches[t])
    top = gl.maximum(peak, gl.max(best, axis=1))
    mass = gl.full([HEADS, KEYS], 0.0, gl.float32, LOGITS)
    acc = gl.full([HEADS, D], 0.0, gl.float32, LOGITS)
    for t in gl.static_range(TILES):
        weights = gl.exp2(matches[t] - top[:, None])
        mass += weights
        p = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, LOGITS, 2))
        acc = mma_v2(p, keys.index(t).load(gl.DotOperandLayout(1, LOGITS, 2)), acc)
    return acc, top, total * gl.exp2(peak - top) + gl.sum(mass, axis=1)


@gluon.jit
def attend_narrow(
    queries, window, chosen, turn, partial, D: gl.constexpr, ROPE: gl.constexpr,
    SPLITS: gl.constexpr, WINDOW: gl.constexpr, NEAR: gl.constexpr, CHOSEN: gl.constexpr,
    PAGE: gl.constexpr, PAGED: gl.constexpr, TURN: gl.constexpr, PDL: gl.constexpr,
    HEADS: gl.constexpr, KEYS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Attend HEADS heads of one query row to one share of its keys, TILES tiles at most."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    share.let_next_start(PDL)
    first_head = gl.program_id(1) * HEADS
    n, position, count, start, limit, far, first, last = share.share_of(
        queries, window, chosen, WINDOW, NEAR, CHOSEN, SPLITS, KEYS)  # fmt: skip
    q = gl.allocate_shared_memory(gl.bfloat16, [HEADS, D], share.SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [TILES, KEYS, D], share.SHARED)
    addresses = all_addresses(window, chosen, n, count, limit, first, last, far, NEAR, CHOSEN,
                              PAGE, KEYS, TILES, gl.SliceLayout(1, COPY))  # fmt: skip
    share.copy_queries(q, queries, n, first_head, D, HEADS, COPY)
    for t in gl.static_range(TILES):
        share.copy_tile(keys.index(t), window, chosen, addresses[t], start, first + t >= far, D,
                        NEAR, CHOSEN, PAGED, COPY)  # fmt: skip
    seen = all_addresses(window, chosen, n, count, limit, first, last, far, NEAR, CHOSEN, PAGE,
                         KEYS, TILES, gl.SliceLayout(0, LOGITS))  # fmt: skip
    matches = ()
    for t in gl.static_range(TILES):
        async_copy.wait_group(TILES - 1 - t)
        gl.thread_barrier()
        logits = logits_of(q, keys.index(t), HEADS, KEYS, D, LOGITS) * queries.scale
        logits = gl.where((seen[t] >= 0)[None, :], logits, -float("inf"))
        matches = matches + (logits,)  # noqa: RUF005 - Triton knows no unpacking
    acc, top, total = weigh_all(queries, keys, matches, first_head, D, SPLITS, HEADS, KEYS, TILES,
                                LOGITS)  # fmt: skip
    share.finish(acc, top, total, queries, partial, turn, n, position, first_head, D, ROPE,
                 SPLITS, TURN, HEADS, LOGITS, LOGITS)  # fmt: skip
