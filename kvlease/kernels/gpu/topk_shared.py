"""A program's own shared memory: counters of keys in 2048 bins, and a list of keys and rows.

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
_RESERVE = tl.constexpr("{ .shared .align 16 .b32 space[6608]; mov.u32 $0, space; }")
_ADD = tl.constexpr("red.shared.add.u32 [$1], 1; mov.u32 $0, 0;")
_TAKE = tl.constexpr("{ ld.shared.u32 $0, [$1]; st.shared.u32 [$1], 0; }")
_LOAD = tl.constexpr("ld.shared.u32 $0, [$1];")
_STORE = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.u32 [$1], $2; mov.u32 $0, 0; }"
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
# byte offsets
_RESULT = tl.constexpr(2304 * 4)
_SUMS = tl.constexpr(2308 * 4)
_SPARE = tl.constexpr(2344 * 4)
_KEYS = tl.constexpr(2384 * 4)
_ROWS = tl.constexpr((2384 + 2112) * 4)


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
def _counter(space, bins):
    return space + (bins + (bins >> 3)) * 4


@triton.jit
def _own_bins(THREADS: tl.constexpr):
    """Return each thread's bins, [a thread's, THREADS], from the highest down."""
    EACH: tl.constexpr = BINS // THREADS
    place = tl.arange(0, THREADS)[None, :] * EACH + tl.arange(0, EACH)[:, None]
    return place ^ (BINS - 1)


@triton.jit
def clear(space, THREADS: tl.constexpr):
    """Set all counters to zero; `find_bin` leaves them so."""
    if space is not None:
        _run(_TAKE, "=r,r", [_counter(space, _own_bins(THREADS))])
        tl.debug_barrier()


@triton.jit
def _counted(space, bins, mask, lanes, KEYS: tl.constexpr, THREADS: tl.constexpr):
    """Return how many marked keys are in each of a thread's bins, as `_own_bins`."""
    if space is None:
        downwards = tl.reshape(bins ^ (BINS - 1), [KEYS])
        held = tl.histogram(downwards, BINS, mask=tl.reshape(mask, [KEYS]))
        return tl.trans(tl.reshape(held, [THREADS, BINS // THREADS]))
    else:
        # unmarked keys count too, where no one looks: a branch for each key takes longer
        spare = space + _SPARE + lanes * 4
        _run(_ADD, "=r,r", [tl.where(mask, _counter(space, bins), spare)])
        tl.debug_barrier()
        return _run(_TAKE, "=r,r", [_counter(space, _own_bins(THREADS))])


@triton.jit
def find_bin(space, bins, mask, lanes, k, KEYS: tl.constexpr, THREADS: tl.constexpr):
    """Return the highest bin that k marked keys reach, how many do, and how many are beyond it.

    Where fewer than k keys are marked it is bin 0. ``lanes``: of the threads that hold the keys.
    """
    counts = _counted(space, bins, mask, lanes, KEYS, THREADS)
    each = tl.sum(counts, axis=0)
    reach = tl.cumsum(counts, axis=0) + (tl.cumsum(each) - each)[None, :]
    own = _own_bins(THREADS)
    beyond = reach - counts
    here = ((beyond < k) & ((reach >= k) | (own == 0))).to(tl.int32)
    if space is None:
        return tl.sum(own * here), tl.sum(reach * here), tl.sum(beyond * here)
    else:
        at = space + _RESULT
        _run(_STORE_THREE, "=r,r,r,r,r,r", [at + own * 0, own, reach, beyond, here])
        tl.debug_barrier()
        bin = _run(_LOAD, "=r,r", [at])
        return bin, _run(_LOAD, "=r,r", [at + 4]), _run(_LOAD, "=r,r", [at + 8])


@triton.jit
def sums_before(space, sums, WARPS: tl.constexpr):
    """Return for each warp the total of the sums [WARPS] of the warps before it, and of all."""
    if space is None:
        return tl.cumsum(sums) - sums, tl.sum(sums)
    else:
        warp = tl.arange(0, WARPS)
        tl.debug_barrier()
        _run(_STORE_ALL, "=r,r,r", [space + _SUMS + warp * 4, sums])
        tl.debug_barrier()
        before = sums * 0
        total = tl.full([], 0, tl.int32)
        for other in tl.static_range(WARPS):
            held = _run(_LOAD, "=r,r", [space + _SUMS + other * 4])
            before += tl.where(warp > other, held, 0)
            total += held
        return before, total


@triton.jit
def listed(
    space, places, keys, rows, mask, KEYS: tl.constexpr, LIST: tl.constexpr, THREADS: tl.constexpr
):
    """Return marked keys and rows by their places, each [LIST / THREADS, THREADS].

    Thread t has the places from t * LIST / THREADS on. What has no place is anything.
    """
    EACH: tl.constexpr = LIST // THREADS
    slot = tl.arange(0, THREADS)[None, :] * EACH + tl.arange(0, EACH)[:, None]
    if space is None:
        hit = tl.reshape(places, [KEYS])[:, None] == tl.reshape(slot, [LIST])[None, :]
        hit = (hit & tl.reshape(mask, [KEYS])[:, None]).to(tl.int64)
        few = tl.sum(tl.reshape(keys, [KEYS]).to(tl.int64)[:, None] * hit, axis=0).to(tl.uint32)
        names = tl.sum(tl.reshape(rows, [KEYS])[:, None] * hit, axis=0).to(tl.int32)
        return tl.reshape(few, [EACH, THREADS]), tl.reshape(names, [EACH, THREADS])
    else:
        at = space + (places + (places >> 5)) * 4
        _run(_STORE, "=r,r,r,r", [at + _KEYS, keys.to(tl.int32, bitcast=True), mask.to(tl.int32)])
        _run(_STORE, "=r,r,r,r", [at + _ROWS, rows, mask.to(tl.int32)])
        tl.debug_barrier()
        at = space + (slot + (slot >> 5)) * 4
        few = _run(_LOAD, "=r,r", [at + _KEYS]).to(tl.uint32, bitcast=True)
        return few, _run(_LOAD, "=r,r", [at + _ROWS])
