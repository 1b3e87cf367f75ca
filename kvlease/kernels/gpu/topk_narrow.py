"""Narrowing scores held in registers to a few that hold the best k, without sorting.

1. *Floor*: the scores are dealt into groups, and the k-th best of the groups' maxima is a floor
   that at least k reach. On random rows about 1.4 k do.
2. *Bar*: the k-th best of any keys is found by counting how many reach three bars in between, until
   the bracket is empty or a bar is reached by just enough.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import triton
import triton.language as tl


@triton.jit
def sortable(scores):
    """Return unsigned keys in the order of the scores; zeros are equal, and no key is 0."""
    bits = scores.to(tl.uint32, bitcast=True)
    bits = tl.where(bits == 0x80000000, 0, bits)
    return bits ^ tl.where(bits >= 0x80000000, 0xFFFFFFFF, 0x80000000)


@triton.jit
def score_of(key):
    """Return the score that has this key."""
    bits = key ^ tl.where(key >= 0x80000000, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def top_of(scores):
    """Return signed keys in the order of the scores, as tops are kept; none is the lowest."""
    return (sortable(scores) ^ 0x80000000).to(tl.int32, bitcast=True)


@triton.jit
def _counts(keys, low, shift, FEW: tl.constexpr):
    """Return how many keys reach low + 1, 2 and 3 << shift; FEW: fewer than 1024 do.

    Written without conditions, which the compiler passes through one predicate, one by one.
    """
    quarter = tl.minimum((tl.maximum(keys, low) - low) >> shift.to(tl.uint32), 3)
    if FEW:
        # a word of three counts: 0, 1, 1 << 10 or 1 << 20
        packed = tl.sum((tl.full([], 1 << 20, tl.uint32) >> (30 - 10 * quarter)).to(tl.int32))
        n3 = packed >> 20
        n2 = n3 + ((packed >> 10) & 1023)
        return n2 + (packed & 1023), n2, n3
    else:
        packed = tl.sum((quarter == 1).to(tl.uint32) + ((quarter == 2).to(tl.uint32) << 16))
        n3 = tl.sum((quarter == 3).to(tl.int32))
        n2 = n3 + (packed >> 16).to(tl.int32)
        return n2 + (packed & 0xFFFF).to(tl.int32), n2, n3


@triton.jit
def find_bar(keys, low, high, count, k, enough, FEW: tl.constexpr):
    """Return the highest bar that k keys reach, or one that few enough do, and how many reach it.

    ``count`` keys, at least k, reach ``low``; fewer than k reach ``high``.
    """
    # the exponent of the bracket's size: four steps of this shift cover it
    size = (high - low).to(tl.float32).to(tl.int32, bitcast=True)
    shift = tl.maximum((size >> 23) - 128, 0)
    while (count > enough) & (shift >= 0):
        n1, n2, n3 = _counts(keys, low, shift, FEW)
        steps = (n1 >= k).to(tl.uint32) + (n2 >= k).to(tl.uint32) + (n3 >= k).to(tl.uint32)
        low += steps << shift.to(tl.uint32)
        count = tl.where(n3 >= k, n3, tl.where(n2 >= k, n2, tl.where(n1 >= k, n1, count)))
        shift = tl.where(shift == 0, -1, tl.maximum(shift - 2, 0))
    return low, count


@triton.jit
def lanes_of(PAIRS: tl.constexpr, GROUPS: tl.constexpr):
    """Return a part's indices, [PAIRS, 2, GROUPS]: rows in pairs, the groups as columns."""
    pair = tl.arange(0, PAIRS)[:, None, None] * (2 * GROUPS)
    return pair + tl.arange(0, 2)[None, :, None] * GROUPS + tl.arange(0, GROUPS)[None, None, :]


@triton.jit
def pointers_of(source, PAIRS: tl.constexpr, GROUPS: tl.constexpr):
    """Return pointers to a part's scores, constants last, where loads carry them."""
    columns = (source + tl.arange(0, GROUPS))[None, None, :]
    halves = columns + tl.arange(0, 2)[None, :, None] * GROUPS
    return halves + tl.arange(0, PAIRS)[:, None, None] * (2 * GROUPS)


@triton.jit
def words_of(mask):
    """Return how many are marked in each column of each pair of rows, two counts a word."""
    return tl.sum(mask.to(tl.int32) << (tl.arange(0, 2)[None, :, None] * 16), axis=1)


@triton.jit
def first_marked(mask, lanes, room, END: tl.constexpr):
    """Return the mask of the first ``room`` marked lanes; more are marked."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], END, tl.int32)
    while high - low > 1:
        middle = (low + high) // 2
        count = tl.sum((mask & (lanes < middle)).to(tl.int32))
        low = tl.where(count <= room, middle, low)
        high = tl.where(count <= room, high, middle)
    return mask & (lanes < low)


@triton.jit
def pack_marked(pack, values, mask, words, totals, ROOM: tl.constexpr):
    """Store the values of the marked lanes side by side in row-major order, the first ``ROOM``."""
    both = (totals & 0xFFFF) + (totals >> 16)
    running = tl.cumsum(words, axis=1)
    before = (tl.cumsum(both) - both)[:, None] - 1
    half = tl.arange(0, 2)[None, :, None]
    places = (running[:, None, :] >> (half * 16)) & 0xFFFF
    places += before[:, :, None] + half * (totals & 0xFFFF)[:, None, None]
    mask = mask & (places < ROOM)
    # the compiler spreads a store whose addresses follow no order over threads by its first axis:
    # turned, that is as the scores lie, and nothing moves between threads
    turned = pack + tl.permute(places, (2, 1, 0))
    tl.store(turned, tl.permute(values, (2, 1, 0)), mask=tl.permute(mask, (2, 1, 0)))


@triton.jit
def choose(few, count, low, high, K: tl.constexpr, GROUPS: tl.constexpr):
    """Return which of the first ``count`` scores are the best k, and each one's rank in order.

    All of them reach ``low``; fewer than k reach ``high``. At most k are chosen.
    """
    keys = tl.where(tl.arange(0, GROUPS) < count, sortable(few), 0)
    bar, reach = find_bar(keys, low, high, count, K, K, GROUPS <= 1024)
    chosen = keys >= bar
    if reach > K:
        level = keys == bar
        room = K - tl.sum((keys > bar).to(tl.int32))
        chosen = (keys > bar) | (level & (tl.cumsum(level.to(tl.int32)) <= room))
    return chosen, tl.cumsum(chosen.to(tl.int32)) - 1


@triton.jit
def pages_of(row, sequences, table, table_stride, BY_SEQUENCE: tl.constexpr):
    """Return where the page table of a query lies."""
    if BY_SEQUENCE:
        return table + tl.load(sequences + row).to(tl.int64) * table_stride
    else:
        return table + row * table_stride


@triton.jit
def list_all(visible, pages, out, K: tl.constexpr, LANES: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """Write the addresses of all of at most k visible rows, then -1."""
    lanes = tl.arange(0, LANES)
    page = tl.load(pages + lanes // PAGE_ROWS, mask=lanes < visible, other=0)
    flat = tl.where(lanes < visible, page * PAGE_ROWS + lanes % PAGE_ROWS, -1)
    tl.store(out + lanes, flat, mask=lanes < K)


@triton.jit
def narrow(x, pack, K: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr):
    """Pack the indices of fewer than GROUPS scores, the best k among them, in order.

    x [PAIRS, 2, GROUPS] is -inf where no score counts. Returns how many were packed, a bar that
    they all reach and one that fewer than k do.
    """
    tops = sortable(tl.max(tl.max(x, axis=1), axis=0))
    high = tl.max(tops) + 1
    # the k-th best of the groups' maxima: at least k scores reach it
    all_groups = tl.full([], GROUPS, tl.int32)
    low, _ = find_bar(tops, tl.min(tops), high, all_groups, K, K + K // 16, GROUPS <= 1024)
    words = words_of(x >= score_of(low))
    totals = tl.sum(words, axis=1)
    count = tl.sum((totals & 0xFFFF) + (totals >> 16))
    lanes = lanes_of(PAIRS, GROUPS)
    if count >= GROUPS:
        keys = sortable(x)
        if tl.sum((keys > low).to(tl.int32)) >= K:
            low, count = find_bar(keys, low, high, count, K, GROUPS - 1, False)
        if count >= GROUPS:
            # too many level with the bar: the first of them fill what is left of k
            above = keys > low
            room = K - tl.sum(above.to(tl.int32))
            first = first_marked(keys == low, lanes, room, 2 * PAIRS * GROUPS)
            x = tl.where(above | first, x, float("-inf"))
            count = tl.full([], K, tl.int32)
        words = words_of(x >= score_of(low))
        totals = tl.sum(words, axis=1)
    mask = x >= score_of(low)
    pack_marked(pack, lanes, mask, words, totals, GROUPS)
    tl.debug_barrier()
    return count, low, high
