"""Sparse attention: decode and prefill at Flash's sizes, beside FlashMLA on the same bytes.

Every input set has queries and chosen rows of its own; rows lie scattered over a pool far larger
than the caches. Operations are 4 x heads x keys x width; bytes are each read row once, queries and
results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.attention_launch import Listed, Ring, Rows, Span, Visible, pool_of
from kvlease.kernels.gpu.decode_attention import decode_attention
from kvlease.kernels.gpu.prefill_attention import prefill_attention
from kvlease.services.bench.ceilings import Ceilings
from kvlease.services.bench.compare import compared
from kvlease.services.bench.figure import Figure, Skipped
from kvlease.services.bench.flash_mla import DecodeCase, PeerDecode, PeerPrefill, peer_pools
from kvlease.services.bench.graphs import GraphTimer, Work
from kvlease.services.bench.peers import FlashMLA, flash_mla

HEADS, WIDTH, ROPE, WINDOW, CHOSEN = 64, 512, 64, 128, 512
SETS = 8
SCALE = WIDTH**-0.5
_DECODE_US = {1: 10.0, 8: 10.0, 64: 40.0, 128: 58.0}
_HEAVY_US = {1: 20.0, 8: 40.0, 64: 234.0}
_PREFILL_ROWS, _PREFILL_US = 4096, 860.0
_POOL_ROWS = 1 << 18


def measure(ceilings: Ceilings) -> Iterator[Figure | Skipped]:
    """Yield the figures; some gigabytes of device memory for as long."""
    peer = flash_mla()
    if isinstance(peer, str):
        yield Skipped("kernels", peer)
        peer = None
    yield from _decode(ceilings)
    if peer is not None:
        yield from _same_bytes(ceilings, peer)
    yield from _heavy(ceilings)
    yield _prefill(ceilings, peer)


@frozen
class _Decode:
    """Our decode over input sets: query rows, and where each set's keys are."""

    sets: list[Rows]
    near: list[Ring] | list[Listed]
    far: list[Listed] | list[Visible]

    def __call__(self, i: int) -> object:
        """Launch one call."""
        place = i % len(self.sets)
        return decode_attention(self.sets[place], self.near[place], self.far[place])


def _random_rows(count: int, position: int) -> Rows:
    """Return query rows, where their results go, and their positions."""
    q = torch.randn(count, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    sinks = torch.randn(HEADS, device="cuda")
    positions = torch.full((count,), position, dtype=torch.int32, device="cuda")
    return Rows(q, torch.empty_like(q), sinks, positions, SCALE)


def _random_ring(count: int) -> Ring:
    rows = torch.randn(count, WINDOW, WIDTH, dtype=torch.bfloat16, device="cuda")
    return Ring(rows, torch.arange(count, dtype=torch.int32, device="cuda"))


def _plain_rows(pages: int, page_rows: int) -> Tensor:
    return torch.randn(pages, page_rows, WIDTH, dtype=torch.bfloat16, device="cuda")


def chosen_rows(count: int, keys: int, total: int) -> Tensor:
    """Return [count, keys] int32 distinct rows of ``total``, ascending, random for each query."""
    picked = [torch.randperm(total, device="cuda")[:keys].sort().values for _ in range(count)]
    return torch.stack(picked).to(torch.int32)


def _floor_us(ceilings: Ceilings, rows: int, keys: int, row_nbytes: int) -> float:
    nbytes = rows * (keys * row_nbytes + 2 * HEADS * WIDTH * 2)
    return ceilings.floor_us(nbytes, 4.0 * rows * HEADS * keys * WIDTH)


def _decode(ceilings: Ceilings) -> Iterator[Figure]:
    """Decode with what the pool keeps: the window in a ring, the chosen rows in bf16."""
    pool = pool_of(_plain_rows(_POOL_ROWS // 64, 64), WIDTH, ROPE)
    for batch, target in _DECODE_US.items():
        sets = [_random_rows(batch, 65_535) for _ in range(SETS)]
        chosen = [Listed(pool, chosen_rows(batch, CHOSEN, _POOL_ROWS)) for _ in range(SETS)]
        work = _Decode(sets, [_random_ring(batch) for _ in range(SETS)], chosen)

        about = "kernels", "decode attention", f"B {batch}, 128+512 keys, bf16 rows"
        floor = _floor_us(ceilings, batch, WINDOW + CHOSEN, WIDTH * 2)
        yield compared(about, work, {}, floor_us=floor, target_us=target)


def _same_bytes(ceilings: Ceilings, peer: FlashMLA) -> Iterator[Figure]:
    """Decode over fp8 rows in the peer's own pages, window included."""
    pools = peer_pools(WIDTH, ROPE)
    for batch, target in _DECODE_US.items():
        cases = [DecodeCase.random(batch, HEADS, WIDTH) for _ in range(SETS)]
        theirs = PeerDecode(peer, pools, cases, SCALE)
        work = _Decode(
            [Rows(one.q, one.out, one.sinks, one.positions, SCALE) for one in cases],
            [Listed(pools.window.pool, one.window) for one in cases],
            [Listed(pools.extra.pool, one.extra) for one in cases],
        )

        about = "kernels", "decode attention", f"B {batch}, 128+512 keys, fp8 pages of the peer"
        floor = _floor_us(ceilings, batch, WINDOW + CHOSEN, 584)
        note = theirs.check(work)
        yield compared(
            about, work, {"FlashMLA": theirs.run}, floor_us=floor, target_us=target, note=note
        )


def _heavy(ceilings: Ceilings) -> Iterator[Figure]:
    """Decode of a heavily compressed layer: every row of the sequence, two in a page."""
    far, page_rows, ratio = 8192, 2, 128
    for batch, target in _HEAVY_US.items():
        pages = far // page_rows
        pool = pool_of(_plain_rows(max(batch, SETS) * pages, page_rows), WIDTH, ROPE)
        order = torch.randperm(len(pool.base), device="cuda").to(torch.int32)
        tables = [order.roll(i * pages)[: batch * pages].view(batch, pages) for i in range(SETS)]
        sets = [_random_rows(batch, far * ratio - 1) for _ in range(SETS)]
        seen = [Visible(pool, table, ratio) for table in tables]
        work = _Decode(sets, [_random_ring(batch) for _ in range(SETS)], seen)

        about = "kernels", "heavy attention", f"B {batch}, 128+8192 keys, bf16 rows"
        floor = _floor_us(ceilings, batch, WINDOW + far, WIDTH * 2)
        timer = GraphTimer(calls=10, replays=15)
        yield compared(about, work, {}, floor_us=floor, target_us=target, timer=timer)


def _prefill(ceilings: Ceilings, peer: FlashMLA | None) -> Figure:
    """Prefill of one chunk: rows before it by choice, the chunk's own window."""
    rows, keys = _PREFILL_ROWS, WINDOW + CHOSEN
    pool = pool_of(_plain_rows(16_384 // 64, 64), WIDTH, ROPE)
    near = torch.randn(WINDOW + rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    own = torch.arange(WINDOW, WINDOW + rows, dtype=torch.int32, device="cuda")
    query = _random_rows(rows, 0)
    query.positions.copy_(torch.arange(61_440, 61_440 + rows, device="cuda"))
    chosen = torch.randint(0, 15_360, (rows, CHOSEN), dtype=torch.int32, device="cuda")
    chosen = chosen.sort(dim=1).values

    def work(_: int) -> object:
        return prefill_attention(query, Span(near, own), Listed(pool, chosen))

    peers: dict[str, Work] = {}
    note = ""
    if peer is not None:
        theirs = PeerPrefill(peer, pool.base, near, chosen, own, query, SCALE)
        peers["FlashMLA"] = theirs.run
        note = theirs.check(cast("Tensor", work(0)))
    about = "kernels", "prefill attention", f"{rows} rows, {HEADS} heads, {keys} keys, bf16 rows"
    floor = _floor_us(ceilings, rows, keys, 0)
    timer = GraphTimer(calls=4, replays=10)
    return compared(
        about, work, peers, floor_us=floor, target_us=_PREFILL_US, timer=timer, note=note
    )
