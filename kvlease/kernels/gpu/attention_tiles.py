# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""Pieces of the attention kernels: tiles of keys from memory, and softmax over tile after tile.

A tile is BK keys of D channels, held in up to four parts whose widths are powers of two, because a
packed fp8 row has 448 quantised channels and 64 plain ones. Plain rows are one part.
"""

import triton
import triton.language as tl

# Stands for a softmax that has seen no key: finite, so that two of them still subtract to zero.
NO_KEY = tl.constexpr(-1.0e30)


@triton.jit
def plain_tile(rows, seen, START: tl.constexpr, WIDTH: tl.constexpr):
    """Load channels START.. of rows (pointers to their first channel); unseen rows are zeros."""
    columns = START + tl.arange(0, WIDTH)
    return tl.load(rows[:, None] + columns[None, :], mask=seen[:, None], other=0.0)


@triton.jit
def fp8_tile(rows, scales, seen, START: tl.constexpr, WIDTH: tl.constexpr):
    """Load quantised channels START.. of rows (byte pointers) and scale them to bf16, exactly.

    ``scales`` [BK] int64 holds a row's scale bytes, lowest channels first: powers of two, biased
    as a float's exponent.
    """
    columns = START + tl.arange(0, WIDTH)
    stored = tl.load(rows[:, None] + columns[None, :], mask=seen[:, None], other=0)
    values = stored.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    TILES: tl.constexpr = (WIDTH + 63) // 64
    tiles = START // 64 + tl.arange(0, TILES)
    exponents = (scales[:, None] >> (8 * tiles[None, :])) & 0xFF
    factors = (exponents.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
    BK: tl.constexpr = values.shape[0]
    grouped = tl.reshape(values, (BK, TILES, WIDTH // TILES))
    return tl.reshape(grouped * factors[:, :, None], (BK, WIDTH))


@triton.jit
def weigh(logits, peak, total, seen, scale):
    """Return a tile's softmax weights and the new peak and total; ``fade`` shrinks what was."""
    logits = tl.where(seen[None, :], logits * scale, -float("inf"))
    top = tl.maximum(peak, tl.max(logits, 1))
    weights = tl.exp2(logits - top[:, None])
    fade = tl.exp2(peak - top)
    return weights, fade, top, total * fade + tl.sum(weights, 1)


@triton.jit
def angles(cos, sin, position, first, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """Load the angles of the pairs of WIDTH channels whose first one is rotated channel number
    ``first``; channels before number 0 are not rotated.
    """
    pairs = tl.arange(0, WIDTH // 2) + first // 2
    at = position.to(tl.int64) * (ROPE // 2) + pairs
    c = tl.load(cos + at, mask=pairs >= 0, other=1.0)
    return c[None, :], tl.load(sin + at, mask=pairs >= 0, other=0.0)[None, :]


@triton.jit
def rotate_back(values, cos, sin):
    """Undo RoPE, interleaved pairs, on [BLOCK_H, WIDTH]: cos, sin [1, WIDTH / 2] are `angles`."""
    BLOCK_H: tl.constexpr = values.shape[0]
    WIDTH: tl.constexpr = values.shape[1]
    even, odd = tl.split(tl.reshape(values, (BLOCK_H, WIDTH // 2, 2)))
    turned = tl.join(even * cos + odd * sin, odd * cos - even * sin)
    return tl.reshape(turned, (BLOCK_H, WIDTH))


@triton.jit
def put(target, at, heads, num_heads, values, START: tl.constexpr, D: tl.constexpr):
    """Store channels START.. of one row's heads; ``at`` is the row's first element in target."""
    columns = START + tl.arange(0, values.shape[1])
    where = at + heads[:, None] * D + columns[None, :]
    tl.store(target + where, values.to(target.dtype.element_ty), mask=(heads < num_heads)[:, None])
