# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
"""Attention of few heads over a short share of a row's keys: one trip to memory (Gluon).

For small batches, where latency is all: every tile of the share is asked for at once, and the
softmax is taken once over all of them. The queries stay in registers, since each warp multiplies
all of them with each tile. Packed rows are scaled to bf16 when they have come.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kvlease.kernels.gpu import attention_gluon as share
from kvlease.kernels.gpu import attention_gluon_packed as packed

CUT = gl.constexpr(128)
WEIGHTS_SHARED = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))


@gluon.jit
def room(TILES: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr):
    """Return where tiles of keys can lie: places of their own, so that none waits for another."""
    places = ()
    for _ in gl.static_range(TILES):
        place = gl.allocate_shared_memory(gl.bfloat16, [KEYS, D], share.SHARED)
        places = places + (place,)  # noqa: RUF005 - Triton knows no unpacking
    return places


@gluon.jit
def load_queries(q, D: gl.constexpr, LOGITS: gl.constexpr):
    """Load the queries, CUT channels a part."""
    parts = ()
    for cut in gl.static_range(0, D, CUT):
        part = q.slice(cut, CUT, dim=1).load(gl.DotOperandLayout(0, LOGITS, 2))
        parts = parts + (part,)  # noqa: RUF005 - Triton knows no unpacking
    return parts


@gluon.jit
def logits_of(
    q, keys, HEADS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, LOGITS: gl.constexpr
):
    """Multiply the queries with a tile's keys, each part for itself: short chains of products."""
    nothing = gl.full([HEADS, KEYS], 0.0, gl.float32, LOGITS)
    logits = nothing
    for cut in gl.static_range(0, D, CUT):
        b = keys.slice(cut, CUT, dim=1).permute((1, 0)).load(gl.DotOperandLayout(1, LOGITS, 2))
        logits += mma_v2(q[cut // CUT], b, nothing)
    return logits


@gluon.jit
def all_addresses(
    window, chosen, n, mine, NEAR: gl.constexpr, CHOSEN: gl.constexpr, PAGE: gl.constexpr,
    KEYS: gl.constexpr, TILES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return where the rows of each tile of the share lie; -1 for none."""
    addresses = ()
    for t in gl.static_range(TILES):
        address = share.fetch(window, chosen, n, mine, mine.first + t, mine.last, NEAR, CHOSEN,
                              PAGE, KEYS, layout)  # fmt: skip
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
    weights = ()
    for t in gl.static_range(TILES):
        each = gl.exp2(matches[t] - top[:, None])
        mass += each
        place = gl.allocate_shared_memory(
            gl.bfloat16, [HEADS, KEYS], WEIGHTS_SHARED, each.to(gl.bfloat16))  # fmt: skip
        weights = weights + (place,)  # noqa: RUF005 - Triton knows no unpacking
    for t in gl.static_range(TILES):
        p = weights[t].load(gl.DotOperandLayout(0, LOGITS, 2))
        acc = mma_v2(p, keys[t].load(gl.DotOperandLayout(1, LOGITS, 2)), acc)
    return acc, top, total * gl.exp2(peak - top) + gl.sum(mass, axis=1)


@gluon.jit
def copy_plain(
    keys, window, chosen, addresses, start, mine, D: gl.constexpr, NEAR: gl.constexpr,
    CHOSEN: gl.constexpr, PAGED: gl.constexpr, TILES: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Start copying every tile of the share, each as a group of its own."""
    for t in gl.static_range(TILES):
        is_near = mine.first + t >= mine.far
        share.copy_tile(keys[t], window, chosen, addresses[t], start, is_near, D, NEAR,
                        CHOSEN, PAGED, COPY)  # fmt: skip


@gluon.jit
def finish(
    acc, top, total, queries, partial, turn, n, split, position, first_head, D: gl.constexpr,
    ROPE: gl.constexpr, SPLITS: gl.constexpr, TURN: gl.constexpr, HEADS: gl.constexpr,
    LOGITS: gl.constexpr,
):  # fmt: skip
    """Store a row's result, or what its share leaves for `combine`."""
    row = n.to(gl.int64) * SPLITS + split
    if SPLITS == 1:
        acc = acc * (1.0 / total)[:, None]
        if TURN:
            acc = share.rotate_back(acc, turn, position, D, ROPE, HEADS, LOGITS)
        share.put(queries.out, acc, row, first_head, queries.num_heads, D, HEADS, LOGITS)
    else:
        share.put(partial.sums, acc, row, first_head, queries.num_heads, D, HEADS, LOGITS)
        share.leave_stats(
            partial, top, total, row, first_head, queries.num_heads, HEADS, LOGITS)  # fmt: skip


@gluon.jit
def attend_narrow(
    queries, window, chosen, turn, partial, D: gl.constexpr, ROPE: gl.constexpr,
    SPLITS: gl.constexpr, WINDOW: gl.constexpr, NEAR: gl.constexpr, CHOSEN: gl.constexpr,
    PAGE: gl.constexpr, PAGED: gl.constexpr, TURN: gl.constexpr, EARLY: gl.constexpr,
    HEADS: gl.constexpr, KEYS: gl.constexpr, TILES: gl.constexpr, ROW: gl.constexpr = 0,
    SCALE_ROW: gl.constexpr = 0, NEAR_PAGED: gl.constexpr = 0,
):  # fmt: skip
    """Attend HEADS heads of one query row to one share of its keys, TILES tiles at most.

    Takes a warp for each four heads. ROW, SCALE_ROW and NEAR_PAGED describe packed rows.
    """
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [HEADS // 16, 4], [16, 8])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [HEADS // 4, 1], [1, 0])
    share.wait_for_inputs(EARLY)
    n, first_head, split = gl.program_id(0), gl.program_id(1) * HEADS, gl.program_id(2)
    mine = share.share_of(
        queries, chosen, n, split, WINDOW, NEAR, CHOSEN, SPLITS, KEYS)  # fmt: skip
    start = share.window_start(window, n, mine.count, NEAR, WINDOW)
    q = gl.allocate_shared_memory(gl.bfloat16, [HEADS, D], share.SHARED)
    keys = room(TILES, KEYS, D)
    addresses = all_addresses(window, chosen, n, mine, NEAR, CHOSEN, PAGE, KEYS, TILES,
                              gl.SliceLayout(1, COPY))  # fmt: skip
    share.copy_queries(q, queries, n, first_head, D, HEADS, COPY)
    if ROW == 0:
        raw, tail, scales = None, None, ()
        copy_plain(keys, window, chosen, addresses, start, mine, D, NEAR, CHOSEN, PAGED, TILES,
                   COPY)  # fmt: skip
    else:
        raw, tail = packed.room(TILES, KEYS, D, ROPE)
        scales = packed.copy_tiles(keys, raw, tail, window, chosen, addresses, start, mine, D,
                                   ROPE, NEAR, ROW, SCALE_ROW, PAGED, NEAR_PAGED, TILES,
                                   COPY)  # fmt: skip
    seen = all_addresses(window, chosen, n, mine, NEAR, CHOSEN, PAGE, KEYS, TILES,
                         gl.SliceLayout(0, LOGITS))  # fmt: skip
    parts = ()
    matches = ()
    if ROW != 0:
        # all before the first product, since they come at about the same time
        for t in gl.static_range(TILES):
            async_copy.wait_group(TILES - 1 - t)
            if packed.is_packed(mine, mine.first + t, NEAR):
                packed.unpack(keys[t], raw, tail, t, scales[t], D, ROPE, COPY, 8)
    for t in gl.static_range(TILES):
        async_copy.wait_group(TILES - 1 - t)
        gl.thread_barrier()
        if t == 0:
            parts = load_queries(q, D, LOGITS)
        logits = logits_of(parts, keys[t], HEADS, KEYS, D, LOGITS) * queries.scale
        logits = gl.where((seen[t] >= 0)[None, :], logits, -float("inf"))
        matches = matches + (logits,)  # noqa: RUF005 - Triton knows no unpacking
    acc, top, total = weigh_all(queries, keys, matches, first_head, D, SPLITS, HEADS, KEYS, TILES,
                                LOGITS)  # fmt: skip
    finish(acc, top, total, queries, partial, turn, n, split, mine.position, first_head, D, ROPE,
           SPLITS, TURN, HEADS, LOGITS)  # fmt: skip
