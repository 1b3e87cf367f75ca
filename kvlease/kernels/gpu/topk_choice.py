"""The best k of keys that a program holds in registers, exact and without sorting.

Keys are spread as [WARPS, CHUNKS, 128], warp after warp, chunk after chunk in the order of rows.

1. *Floor*: at least k keys reach the k-th best of the maxima of 128 groups a warp. On most rows
   not many more do.
2. *List*: those are marked by bits, and the indices of the marked put side by side, in order. Only
   these are handled one by one from here on.
3. *Bar*: they are counted in finer and finer bins, until the lower end of a bin is reached by just
   k, or the bin is a single key, of which the first are taken.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import triton
import triton.language as tl

from kvlease.kernels.gpu.topk_shared import (
    BINS,
    ends,
    find_bin,
    listed,
    ones,
    running,
    upto,
    words_of,
)

_COARSE = tl.constexpr(21)
"""Bins that so many bits fit into cover all keys."""
_ZOOM = tl.constexpr(2)
"""Powers of two by which bins are narrower where the bar is near the lower end."""
_GUESS = tl.constexpr(1 << 25)
"""How far below the best key the floor is looked for first where little is known: 4 octaves."""


@triton.jit
def sortable(scores):
    """Return unsigned keys in the order of the scores; zeros are equal, and no key is 0."""
    # -0 + 0 is 0
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def _find_bar(keys, low, shift, k, enough, space, WARPS: tl.constexpr):
    """Return a bar that k keys reach, how many do, and how many of those do not lie at it.

    Not more than ``enough`` reach it, or it is a single key, above which fewer than k lie. Where
    fewer than k reach ``low`` all keys are searched, and where fewer are above 0 all are taken.
    """
    # keys from low to low + span are counted, those past the last bin in it
    span = 0xFFFFFFFF - low
    above = tl.full([], 0, tl.int32)
    reach = above
    searching = above == 0
    while searching:
        far = keys - low
        bins = tl.minimum(far >> shift.to(tl.uint32), BINS - 1).to(tl.int32)
        bin, reach, beyond = find_bin(space, bins, far <= span, k - above, WARPS)
        step = bin.to(tl.uint32) << shift.to(tl.uint32)
        low += step
        if (reach < k - above) & (low > 1):
            low = tl.full([], 1, tl.uint32)
            span = 0xFFFFFFFF - low
            above = tl.full([], 0, tl.int32)
            shift = tl.full([], _COARSE, tl.int32)
        elif (bin == BINS - 1) & ((span >> shift.to(tl.uint32)) >= BINS):
            span -= step
            shift = tl.full([], _COARSE, tl.int32)
        else:
            reach += above
            above += beyond
            searching = (reach > enough) & (shift > 0)
            span = (tl.full([], 1, tl.uint32) << shift.to(tl.uint32)) - 1
            shift = tl.maximum(shift - 11, 0)
    return low, reach, above


@triton.jit
def _shift(span):
    """Return with how many bits left out a span fits into all bins."""
    # the exponent of a float is the place of a number's highest bit, or the one above
    bits = (span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return tl.maximum(bits - 11, 0)


@triton.jit
def _bounds(tops, k, space, WARPS: tl.constexpr):
    """Return a key that k of the tops [WARPS, 128] reach, or 0, and the highest of them."""
    THREADS: tl.constexpr = WARPS * 32
    fours = tl.reshape(tops, [WARPS, 32, 2, 2])
    high = tl.max(fours, axis=3)
    low = tl.min(fours, axis=3)
    first = tl.max(high, axis=2)
    last = tl.min(low, axis=2)
    # of two pairs, the second is the lower high or the higher low
    second = tl.maximum(tl.min(high, axis=2), tl.max(low, axis=2))
    lows = last
    if k <= THREADS:
        lows = first
    elif k <= THREADS * 2:
        lows = second
    return ends(space, lows, first, WARPS)


@triton.jit
def _lowest(words, count, space):
    """Keep the lowest ``count`` bits that are set in each word, or all of fewer."""
    end = words * 0
    for power in tl.static_range(4, -1, -1):
        held = ones((words >> end) & ((1 << (1 << power)) - 1), space)
        fits = held <= count
        count -= tl.where(fits, held, 0)
        end += tl.where(fits, 1 << power, 0)
    # where all others fit the last one may too
    return words & ((tl.where(count > 0, 2, 1) << end) - 1)


@triton.jit
def candidates(
    keys, count, k, space, WARPS: tl.constexpr, CHUNKS: tl.constexpr, LIST: tl.constexpr,
    FOURS: tl.constexpr,
):  # fmt: skip
    """Return the indices of keys that hold the best k of ``count`` above 0, or all of them.

    Returns indices in order, as `slots`, how many they are, and between which keys they lie. Of
    equal keys the first are taken. ``FOURS``: keys were loaded four by four (`words_of`).
    """
    low = tl.full([], 1, tl.uint32)
    high = low
    if count > k:
        tops = tl.max(keys, axis=1)
        low, high = _bounds(tops, k, space, WARPS)
        if low == 0:
            low = tl.maximum(high, _GUESS + 1) - _GUESS
        shift = _shift(high - low)
        low, _, _ = _find_bar(tops, low, shift, k, k + k // 8, space, WARPS)
    words = words_of(keys >= low, WARPS, CHUNKS, FOURS)
    places, total = running(space, ones(words, space), WARPS)
    if total > LIST:
        # many equal keys, or the best side by side
        shift = _shift(high - low)
        low, reach, above = _find_bar(keys, low, shift, k, k, space, WARPS)
        words = words_of(keys >= low, WARPS, CHUNKS, FOURS)
        if reach > k:
            level = words_of(keys == low, WARPS, CHUNKS, FOURS)
            places, _ = running(space, ones(level, space), WARPS)
            if space is not None:
                tl.debug_barrier()
            words = (words ^ level) | _lowest(level, tl.maximum(k - above - places, 0), space)
        places, total = running(space, ones(words, space), WARPS)
    return listed(space, words, places, WARPS, CHUNKS, LIST), total, low, high


@triton.jit
def best(few, total, low, high, k, space, WARPS: tl.constexpr):
    """Return which of ``total`` keys are the best k, and the places of those among them.

    ``few`` is in order, as `slots`, 0 behind ``total``; all others are from ``low`` to ``high``.
    """
    chosen = few > 0
    if total > k:
        # the bar is low among these
        shift = tl.maximum(_shift(high - low) - _ZOOM, 0)
        low, reach, above = _find_bar(few, low, shift, k, k, space, WARPS)
        chosen = few >= low
        if reach > k:
            level = few == low
            rank = upto(space, level.to(tl.int32), WARPS)
            chosen = (few > low) | (level & (rank <= k - above))
            if space is not None:
                tl.debug_barrier()
    return chosen, upto(space, chosen.to(tl.int32), WARPS) - 1
