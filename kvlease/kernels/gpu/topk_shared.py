"""A program's own shared memory: counters of keys in 2048 bins, sums of warps, and a list.

Triton has no words for shared memory of one's own, so it is reached by its addresses, in the
machine's language. Interpreted kernels have none (``space`` is None) and go other ways.

Bins are read from the highest down, some side by side by each thread. So that those of a warp lie
in different banks, one word in nine is left out; in the list it is one in 33.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# Triton's language has no types: what a kernel does with them is checked by its tests.

import triton
import triton.language as tl

BINS = tl.constexpr(2048)
_RESERVE = tl.constexpr("{ .shared .align 16 .b32 space[4528]; mov.u32 $0, space; }")
_ADD = tl.constexpr("red.shared.add.u32 [$1], 1; mov.u32 $0, 0;")
_TAKE = tl.constexpr("{ ld.shared.u32 $0, [$1]; st.shared.u32 [$1], 0; }")
_LOAD = tl.constexpr("ld.shared.u32 $0, [$1];")
_LOAD_SUM = tl.constexpr(
    "{ .reg .b32 a, b, c; ld.shared.v4.u32 {$0, a, b, c}, [$1]; add.u32 $0, $0, a;"
    " add.u32 b, b, c; add.u32 $0, $0, b; }"
)
_LOAD_LOW = tl.constexpr(
    "{ .reg .b32 a, b, c; ld.shared.v4.u32 {$0, a, b, c}, [$1]; min.u32 $0, $0, a;"
    " min.u32 b, b, c; min.u32 $0, $0, b; }"
)
_LOAD_HIGH = tl.constexpr(
    "{ .reg .b32 a, b, c; ld.shared.v4.u32 {$0, a, b, c}, [$1]; max.u32 $0, $0, a;"
    " max.u32 b, b, c; max.u32 $0, $0, b; }"
)
_ONES = tl.constexpr("popc.b32 $0, $1;")
# lanes of eight swap fours of bits, then words go to the lanes that they are in order for
_TURN = tl.constexpr(
    "{ .reg .pred p; .reg .b32 l, t, s, x, y; mov.u32 l, %laneid;"
    " shfl.sync.bfly.b32 y, $1, 4, 31, -1; and.b32 t, l, 4; setp.eq.u32 p, t, 0;"
    " selp.b32 s, 0x5410, 0x3276, p; prmt.b32 x, $1, y, s;"
    " shfl.sync.bfly.b32 y, x, 2, 31, -1; and.b32 t, l, 2; setp.eq.u32 p, t, 0;"
    " selp.b32 s, 0x6240, 0x3715, p; prmt.b32 x, x, y, s;"
    " shfl.sync.bfly.b32 y, x, 1, 31, -1; and.b32 t, l, 1; setp.eq.u32 p, t, 0;"
    " selp.b32 s, 0x0f0f0f0f, 0xf0f0f0f0, p; shl.b32 t, y, 4; shr.u32 y, y, 4;"
    " selp.b32 y, t, y, p; lop3.b32 x, s, x, y, 0xca;"
    " and.b32 t, $2, 3; shl.b32 t, t, 3; shr.u32 l, $2, 2; add.u32 t, t, l;"
    " shfl.sync.idx.b32 $0, x, t, 31, -1; }"
)
# bit after bit, so that a thread spends time on what is marked only
_ENTER = tl.constexpr(
    "{ .reg .pred p; .reg .b32 w, n, a, b; mov.b32 w, $2; mov.u32 n, $3;"
    " setp.eq.u32 p, w, 0; @p bra END; NEXT: neg.s32 b, w; and.b32 b, b, w; xor.b32 w, w, b;"
    " bfind.u32 b, b; add.u32 b, b, $4; shr.u32 a, n, 5; add.u32 a, a, n; shl.b32 a, a, 2;"
    " add.u32 a, a, $1; st.shared.u32 [a], b; add.u32 n, n, 1; setp.ne.u32 p, w, 0;"
    " @p bra NEXT; END: mov.u32 $0, 0; }"
)
_STORE_ALL = tl.constexpr("st.shared.u32 [$1], $2; mov.u32 $0, 0;")
_STORE_THREE = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p st.shared.v4.u32 [$1], {$2, $3, $4, $4};"
    " mov.u32 $0, 0; }"
)
_PUT = tl.constexpr(
    "{ .reg .pred p; .reg .u64 a; mad.wide.s32 a, $2, 4, $1; setp.ne.s32 p, $4, 0;"
    " @p st.global.u32 [a], $3; mov.u32 $0, 0; }"
)
_GET = tl.constexpr(
    "{ .reg .pred p; .reg .u64 a; mad.wide.s32 a, $2, 4, $1; setp.ne.s32 p, $3, 0;"
    " mov.u32 $0, 0; @p ld.global.u32 $0, [a]; }"
)
# byte offsets
_RESULT = tl.constexpr(2304 * 4)
_SUMS = tl.constexpr(2308 * 4)
_SPARE = tl.constexpr(2344 * 4)
_LIST = tl.constexpr(2384 * 4)
_HIGHS = tl.constexpr((2384 + 2112) * 4)


@triton.jit
def _run(CODE: tl.constexpr, WHAT: tl.constexpr, operands):
    return tl.inline_asm_elementwise(CODE, WHAT, operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def shared_space(ON_CHIP: tl.constexpr):
    """Return where this program's shared memory lies; call it once."""
    if ON_CHIP:
        return _run(_RESERVE, "=r,r", [tl.program_id(0)])


@triton.jit
def put(to, places, values, mask, space):
    """Store values at places of ``to`` from the threads that hold them.

    The compiler would first move them between threads.
    """
    if space is None:
        tl.store(to + places, values, mask=mask)
    else:
        _run(_PUT, "=r,l,r,r,r", [to.to(tl.int64), places, values, mask.to(tl.int32)])


@triton.jit
def get(source, places, mask, space):
    """Return the words at places of ``source`` to the threads that ask; 0 where unmarked."""
    if space is None:
        return tl.load(source + places, mask=mask, other=0).to(tl.int32, bitcast=True)
    else:
        return _run(_GET, "=r,l,r,r", [source.to(tl.int64), places, mask.to(tl.int32)])


@triton.jit
def _counter(space, bins):
    return space + (bins + (bins >> 3)) * 4


@triton.jit
def slots(COUNT: tl.constexpr, WARPS: tl.constexpr):
    """Return 0 .. COUNT - 1, some side by side for each thread, [a thread's, WARPS, 32]."""
    EACH: tl.constexpr = COUNT // (WARPS * 32)
    thread = tl.arange(0, WARPS)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    return thread * EACH + tl.arange(0, EACH)[:, None, None]


@triton.jit
def clear(space, WARPS: tl.constexpr):
    """Set all counters to zero; `find_bin` leaves them so."""
    if space is not None:
        _run(_TAKE, "=r,r", [_counter(space, slots(BINS, WARPS))])
        # words of warps that are not there
        _run(_TAKE, "=r,r", [space + _SUMS + tl.arange(0, 32) * 4])
        _run(_TAKE, "=r,r", [space + _HIGHS + tl.arange(0, 32) * 4])
        tl.debug_barrier()


@triton.jit
def _before(space, each, WARPS: tl.constexpr):
    """Return for each thread the sum of those before it, [WARPS, 32].

    Between two calls threads must meet.
    """
    if space is None:
        return tl.reshape(tl.cumsum(tl.reshape(each, [WARPS * 32])), [WARPS, 32]) - each
    else:
        warp = tl.arange(0, WARPS)
        lane = tl.arange(0, 32)[None, :] + warp[:, None] * 0
        # every lane stores what its warp has: a column would be moved to other threads first
        own = tl.sum(each, axis=1, keep_dims=True) + lane * 0
        _run(_STORE_ALL, "=r,r,r", [space + _SUMS + warp[:, None] * 4 + lane * 0, own])
        upto = tl.cumsum(each, axis=1)
        tl.debug_barrier()
        sums = _run(_LOAD, "=r,r", [space + _SUMS + lane * 4])
        others = tl.sum(tl.where(lane < warp[:, None], sums, 0), axis=1)
        return upto - each + others[:, None]


@triton.jit
def running(space, each, WARPS: tl.constexpr):
    """Return for each thread the sum of those before it, and the sum of all. Shape [WARPS, 32].

    Between two calls threads must meet.
    """
    before = _before(space, each, WARPS)
    if space is None:
        return before, tl.sum(tl.sum(each, axis=1))
    else:
        total = tl.full([], 0, tl.int32)
        for four in tl.static_range((WARPS + 3) // 4):
            total += _run(_LOAD_SUM, "=r,r", [space + _SUMS + four * 16])
        return before, total


@triton.jit
def upto(space, marks, WARPS: tl.constexpr):
    """Return the sums of numbers up to each one, itself included, in the order of `slots`."""
    before = _before(space, tl.sum(marks, axis=0), WARPS)
    return tl.cumsum(marks, axis=0) + before[None, :, :]


@triton.jit
def ends(space, lows, highs, WARPS: tl.constexpr):
    """Return the lowest of ``lows`` and the highest of ``highs``, unsigned, [WARPS, any].

    With fewer than four warps the lowest is 0. Threads must meet before the next sums.
    """
    if space is None:
        return tl.min(tl.min(lows, axis=1)), tl.max(tl.max(highs, axis=1))
    else:
        lane = tl.arange(0, 32)[None, :]
        at = space + tl.arange(0, WARPS)[:, None] * 4 + lane * 0
        own = tl.min(lows, axis=1, keep_dims=True).to(tl.int32, bitcast=True) + lane * 0
        _run(_STORE_ALL, "=r,r,r", [at + _SUMS, own])
        own = tl.max(highs, axis=1, keep_dims=True).to(tl.int32, bitcast=True) + lane * 0
        _run(_STORE_ALL, "=r,r,r", [at + _HIGHS, own])
        tl.debug_barrier()
        low = tl.full([], 0xFFFFFFFF, tl.uint32)
        high = tl.full([], 0, tl.uint32)
        for four in tl.static_range((WARPS + 3) // 4):
            held = _run(_LOAD_LOW, "=r,r", [space + _SUMS + four * 16])
            low = tl.minimum(low, held.to(tl.uint32, bitcast=True))
            held = _run(_LOAD_HIGH, "=r,r", [space + _HIGHS + four * 16])
            high = tl.maximum(high, held.to(tl.uint32, bitcast=True))
        return low, high


@triton.jit
def find_bin(space, bins, mask, k, WARPS: tl.constexpr):
    """Return the highest bin that k marked keys reach, how many do, and how many are beyond it.

    Where fewer than k keys are marked it is bin 0.
    """
    own = slots(BINS, WARPS) ^ (BINS - 1)
    if space is None:
        held = tl.histogram(tl.ravel(bins) ^ (BINS - 1), BINS, mask=tl.ravel(mask))
        counts = tl.reshape(held, [WARPS, 32, BINS // (WARPS * 32)])
        counts = tl.trans(counts, [2, 0, 1])
    else:
        # unmarked keys count too, where no one looks: a branch for each key takes longer, and
        # those of a warp that count in one place do so at once
        _run(_ADD, "=r,r", [tl.where(mask, _counter(space, bins), space + _SPARE)])
        tl.debug_barrier()
        counts = _run(_TAKE, "=r,r", [_counter(space, own)])
    reach = upto(space, counts, WARPS)
    beyond = reach - counts
    here = ((beyond < k) & ((reach >= k) | (own == 0))).to(tl.int32)
    if space is None:
        flat: tl.constexpr = [BINS]
        own, here = tl.reshape(own, flat), tl.reshape(here, flat)
        reach, beyond = tl.reshape(reach, flat), tl.reshape(beyond, flat)
        return tl.sum(own * here), tl.sum(reach * here), tl.sum(beyond * here)
    else:
        at = space + _RESULT
        _run(_STORE_THREE, "=r,r,r,r,r,r", [at + own * 0, own, reach, beyond, here])
        tl.debug_barrier()
        bin = _run(_LOAD, "=r,r", [at])
        return bin, _run(_LOAD, "=r,r", [at + 4]), _run(_LOAD, "=r,r", [at + 8])


@triton.jit
def ones(words, space):
    """Return how many bits of each word are set."""
    if space is None:
        words = words.to(tl.uint32, bitcast=True)
        words -= (words >> 1) & 0x55555555
        words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
        words = (words + (words >> 4)) & 0x0F0F0F0F
        return ((words * 0x01010101) >> 24).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(_ONES, "=r,r", [words], tl.int32, is_pure=True, pack=1)


@triton.jit
def words_of(mask, WARPS: tl.constexpr, CHUNKS: tl.constexpr, FOURS: tl.constexpr):
    """Return marks as bits in the order of rows, CHUNKS * 4 in each word, [WARPS, 32].

    ``FOURS``: lane l of a warp holds marks 4 l to 4 l + 3 of each of its chunks.
    """
    if not FOURS:
        bits = tl.reshape(mask.to(tl.int32), [WARPS, 32, CHUNKS * 4])
        return tl.sum(bits << tl.arange(0, CHUNKS * 4)[None, None, :], axis=2)
    else:
        fours = tl.reshape(mask.to(tl.int32), [WARPS, CHUNKS, 32, 4])
        fours = tl.sum(fours << tl.arange(0, 4)[None, None, None, :], axis=3)
        own = tl.sum(fours << (tl.arange(0, CHUNKS) * 4)[None, :, None], axis=1)
        first = (tl.arange(0, 32) * (CHUNKS * 4))[None, :] + own * 0
        words = _run(_TURN, "=r,r,r", [own, first >> 5])
        if CHUNKS < 8:
            words = (words >> (first & 31)) & ((1 << (CHUNKS * 4)) - 1)
        return words


@triton.jit
def listed(space, words, places, WARPS: tl.constexpr, CHUNKS: tl.constexpr, LIST: tl.constexpr):
    """Return the indices of the marked by their places, as `slots`.

    What has no place is anything.
    """
    slot = slots(LIST, WARPS)
    BITS: tl.constexpr = CHUNKS * 4
    first = (tl.arange(0, WARPS)[:, None] * 32 + tl.arange(0, 32)[None, :]) * BITS
    if space is None:
        bit = tl.arange(0, BITS)[None, None, :]
        marks = (words[:, :, None] >> bit) & 1
        place = places[:, :, None] + tl.cumsum(marks, axis=2) - marks
        index = tl.reshape(first[:, :, None] + bit, [WARPS * 32 * BITS])
        hit = tl.reshape(place, [WARPS * 32 * BITS])[:, None] == tl.reshape(slot, [LIST])[None, :]
        hit = (hit & (tl.reshape(marks, [WARPS * 32 * BITS])[:, None] > 0)).to(tl.int32)
        index = tl.sum(index[:, None] * hit, axis=0).to(tl.int32)
        return tl.reshape(index, [LIST // (WARPS * 32), WARPS, 32])
    else:
        _run(_ENTER, "=r,r,r,r,r", [space + _LIST + first * 0, words, places, first])
        tl.debug_barrier()
        return _run(_LOAD, "=r,r", [space + (slot + (slot >> 5)) * 4 + _LIST])
