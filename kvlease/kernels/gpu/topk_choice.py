"""The best k of keys that a program holds in registers, exact and without sorting.

Keys are spread as [WARPS, CHUNKS, 128], warp after warp, chunk after chunk in the order of rows.

1. *Floor*: at least k keys reach the k-th best of the maxima of 128 groups a warp. On most rows
   about 1.5 k do.
2. *List*: they are put side by side, in order.
3. *Bar*: they are counted in finer and finer bins, until the lower end of a bin is reached by just
   k, or the bin is a single key, of which the first are taken.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import triton
import triton.language as tl

from kvlease.kernels.gpu.topk_shared import BINS, find_bin, listed, sums_before

_COARSE = tl.constexpr(21)
"""Bins that so many bits fit into cover all keys."""
_FINE = tl.constexpr(15)
"""Bins of the first count above a floor: narrow enough that few keys share one."""


@triton.jit
def sortable(scores):
    """Return unsigned keys in the order of the scores; zeros are equal, and no key is 0."""
    bits = scores.to(tl.uint32, bitcast=True)
    bits = tl.where(bits == 0x80000000, 0, bits)
    return bits ^ tl.where(bits >= 0x80000000, 0xFFFFFFFF, 0x80000000)


@triton.jit
def _find_bar(keys, lanes, low, shift, k, enough, space, KEYS: tl.constexpr, THREADS: tl.constexpr):
    """Return a bar that k keys reach, how many do, and how many of those do not lie at it.

    Not more than ``enough`` reach it, or it is a single key, above which fewer than k lie. At least
    k keys reach ``low``; where fewer do, all are taken.
    """
    # keys from low to low + span are counted, those past the last bin in it
    span = 0xFFFFFFFF - low
    above = tl.full([], 0, tl.int32)
    reach = above
    searching = above == 0
    while searching:
        far = keys - low
        bins = tl.minimum(far >> shift.to(tl.uint32), BINS - 1).to(tl.int32)
        bin, reach, beyond = find_bin(space, bins, far <= span, lanes, k - above, KEYS, THREADS)
        step = bin.to(tl.uint32) << shift.to(tl.uint32)
        low += step
        if (bin == BINS - 1) & ((span >> shift.to(tl.uint32)) >= BINS):
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
def _places(mask, space, WARPS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return each marked key's place among the marked, in order, and how many are marked.

    Counts travel as bytes of words: those of a thread's four neighbours, and those of four chunks.
    """
    PACK: tl.constexpr = min(4, CHUNKS)
    each = tl.arange(0, 4) * 8
    by = tl.arange(0, PACK) * 8
    fours = tl.reshape(mask.to(tl.int32), [WARPS, CHUNKS, 32, 4]) << each[None, None, None, :]
    # times 1 + 2^8 + 2^16 + 2^24: each byte becomes the sum of those up to it
    inside = tl.sum(fours, axis=3) * 0x01010101
    mine = inside >> 24
    words = tl.reshape(mine, [WARPS, CHUNKS // PACK, PACK, 32]) << by[None, None, :, None]
    words = tl.sum(words, axis=2)
    upto = tl.trans(tl.cumsum(tl.trans(words, [1, 0, 2]), axis=2), [1, 0, 2])
    upto = (upto[:, :, None, :] >> by[None, None, :, None]) & 255
    upto = tl.reshape(upto, [WARPS, CHUNKS, 32])
    totals = tl.sum(words, axis=2, keep_dims=True)[:, :, None, :] >> by[None, None, :, None]
    totals = tl.reshape(totals & 255, [WARPS, CHUNKS, 1])
    chunk = tl.arange(0, CHUNKS)[None, :, None]
    before = totals * 0
    for one in tl.static_range(CHUNKS - 1):
        total = tl.sum(tl.where(chunk == one, totals, 0), axis=1, keep_dims=True)
        before += tl.where(chunk > one, total, 0)
    sums = tl.sum(tl.sum(totals, axis=2), axis=1)
    others, all_marked = sums_before(space, sums, WARPS)
    first = upto - mine + before + others[:, None, None] - 1
    place = first[:, :, :, None] + ((inside[:, :, :, None] >> each[None, None, None, :]) & 255)
    return tl.reshape(place, [WARPS, CHUNKS, 128]), all_marked


@triton.jit
def choose(
    keys, rows, count, k, space, WARPS: tl.constexpr, CHUNKS: tl.constexpr, LIST: tl.constexpr
):
    """Return the best k of ``count`` keys above 0, or all of them, with their rows.

    Returns places, keys, rows and which of them are chosen, each [LIST / threads, threads]; places
    are in order of rows. Of equal keys the first are chosen.
    """
    THREADS: tl.constexpr = WARPS * 32
    KEYS: tl.constexpr = THREADS * CHUNKS * 4
    lanes = tl.arange(0, 128) // 4
    low = tl.full([], 1, tl.uint32)
    if count > k:
        shift = tl.full([], _COARSE, tl.int32)
        tops = tl.max(keys, axis=1)
        low, _, _ = _find_bar(
            tops, lanes[None, :], low, shift, k, k + k // 8, space, WARPS * 128, THREADS
        )
    mask = keys >= low
    place, total = _places(mask, space, WARPS, CHUNKS)
    shift = tl.full([], _FINE, tl.int32)
    if total > LIST:
        # many equal keys, or the best side by side
        low, reach, above = _find_bar(
            keys, lanes[None, None, :], low, shift, k, k, space, KEYS, THREADS
        )
        mask = keys >= low
        if reach > k:
            level = keys == low
            place, _ = _places(level, space, WARPS, CHUNKS)
            mask = (keys > low) | (level & (place < k - above))
        place, total = _places(mask, space, WARPS, CHUNKS)
    few, names = listed(space, place, keys, rows, mask, KEYS, LIST, THREADS)
    EACH: tl.constexpr = LIST // THREADS
    slot = tl.arange(0, THREADS)[None, :] * EACH + tl.arange(0, EACH)[:, None]
    few = tl.where(slot < total, few, 0)
    chosen = slot < total
    if total > k:
        few_lanes = (tl.arange(0, THREADS) % 32)[None, :]
        low, reach, above = _find_bar(few, few_lanes, low, shift, k, k, space, LIST, THREADS)
        chosen = few >= low
        if reach > k:
            level = (few == low).to(tl.int32)
            chosen = (few > low) | ((level > 0) & (_upto(level) <= k - above))
    return _upto(chosen.to(tl.int32)) - 1, few, names, chosen


@triton.jit
def _upto(marks):
    """Return how many are marked up to each one, itself included; thread after thread."""
    each = tl.sum(marks, axis=0)
    return tl.cumsum(marks, axis=0) + (tl.cumsum(each) - each)[None, :]
