# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
"""Attention of few heads over a short share of packed rows: one trip to memory (Gluon).

As over plain rows, but each tile is scaled to bf16 when it has come; the window's plain rows go
straight to where the multiplication reads them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kvlease.kernels.gpu import attention_gluon as share
from kvlease.kernels.gpu import attention_gluon_packed as packed
from kvlease.kernels.gpu import attention_narrow as narrow


@gluon.jit
def copy_near(
    keys, window, address, start, D: gl.constexpr, NEAR: gl.constexpr, COPY: gl.constexpr
):
    """Start copying a tile of the window to where it is read, if its rows are plain."""
    if NEAR == "ring" or NEAR == "span":
        share.copy_rows(keys, window.base + (start + address) * D, address >= 0, D, COPY)
        async_copy.commit_group()


@gluon.jit
def copy_tiles(
    keys, raw, tail, window, chosen, addresses, start, first, far, end, D: gl.constexpr,
    ROPE: gl.constexpr, NEAR: gl.constexpr, ROW: gl.constexpr, PAGED: gl.constexpr,
    NEAR_PAGED: gl.constexpr, TILES: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Start copying every tile of the share, each as a group of its own; packed before ``end``."""
    for t in gl.static_range(TILES):
        if first + t < end:
            rows = packed.row_pointers(window, chosen, addresses[t], first + t >= far, NEAR, ROW,
                                       PAGED, NEAR_PAGED)  # fmt: skip
            packed.copy_packed(raw.index(t), tail.index(t), rows, addresses[t] >= 0, D, ROPE, COPY)
        else:
            copy_near(keys.index(t), window, addresses[t], start, D, NEAR, COPY)


@gluon.jit
def attend_narrow_packed(
    queries, window, chosen, turn, partial, D: gl.constexpr, ROPE: gl.constexpr,
    SPLITS: gl.constexpr, WINDOW: gl.constexpr, NEAR: gl.constexpr, CHOSEN: gl.constexpr,
    PAGE: gl.constexpr, PAGED: gl.constexpr, NEAR_PAGED: gl.constexpr, ROW: gl.constexpr,
    SCALE_ROW: gl.constexpr, TURN: gl.constexpr, PDL: gl.constexpr, HEADS: gl.constexpr,
    KEYS: gl.constexpr, TILES: gl.constexpr,
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
    raw = gl.allocate_shared_memory(gl.uint8, [TILES, KEYS, D], packed.RAW_SHARED)
    tail = gl.allocate_shared_memory(gl.bfloat16, [TILES, KEYS, ROPE], packed.TAIL_SHARED)
    addresses = narrow.all_addresses(window, chosen, n, count, limit, first, last, far, NEAR,
                                     CHOSEN, PAGE, KEYS, TILES,
                                     gl.SliceLayout(1, COPY))  # fmt: skip
    share.copy_queries(q, queries, n, first_head, D, HEADS, COPY)
    # where the window is listed its rows are packed too
    end = first + TILES if NEAR == "list" else far
    copy_tiles(keys, raw, tail, window, chosen, addresses, start, first, far, end, D, ROPE, NEAR,
               ROW, PAGED, NEAR_PAGED, TILES, COPY)  # fmt: skip
    scales = ()
    for t in gl.static_range(TILES):
        address = gl.where(first + t < end, addresses[t], -1)
        scale = packed.load_scales(window, chosen, address, first + t >= far, NEAR, SCALE_ROW,
                                   PAGED, NEAR_PAGED)  # fmt: skip
        scales = scales + (scale,)  # noqa: RUF005 - Triton knows no unpacking
    seen = narrow.all_addresses(window, chosen, n, count, limit, first, last, far, NEAR, CHOSEN,
                                PAGE, KEYS, TILES, gl.SliceLayout(0, LOGITS))  # fmt: skip
    matches = ()
    for t in gl.static_range(TILES):
        async_copy.wait_group(TILES - 1 - t)
        gl.thread_barrier()
        if first + t < end:
            packed.unpack(keys.index(t), raw.index(t), tail.index(t), scales[t], D, ROPE, COPY)
        gl.thread_barrier()
        logits = narrow.logits_of(q, keys.index(t), HEADS, KEYS, D, LOGITS) * queries.scale
        logits = gl.where((seen[t] >= 0)[None, :], logits, -float("inf"))
        matches = matches + (logits,)  # noqa: RUF005 - Triton knows no unpacking
    acc, top, total = narrow.weigh_all(queries, keys, matches, first_head, D, SPLITS, HEADS, KEYS,
                                       TILES, LOGITS)  # fmt: skip
    share.finish(acc, top, total, queries, partial, turn, n, position, first_head, D, ROPE,
                 SPLITS, TURN, HEADS, LOGITS, LOGITS)  # fmt: skip
