"""Indexer scores and top-k at Flash's sizes, beside DeepGEMM and torch.

Scores read every key once; a key is 132 bytes in fp8 (with its scale) and 256 in bf16, a score 4.
Top-k is exact, equal scores going to the lower position, and gives addresses through a page table;
`torch.topk` gives row numbers without either. Calls follow one another in a graph as in a step, so
each starts while the one in front ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.index_scores import IndexKeys, decode_scores, programs_each
from kvlease.kernels.gpu.topk import choose_rows
from kvlease.services.bench.ceilings import Ceilings
from kvlease.services.bench.compare import compared
from kvlease.services.bench.figure import Figure, Skipped
from kvlease.services.bench.flash_mla import error
from kvlease.services.bench.graphs import GraphTimer, Work, num_processors
from kvlease.services.bench.peers import DeepGEMM, deep_gemm

HEADS, WIDTH, PAGE, RATIO, TOPK = 64, 128, 64, 4, 512
_SCORES_US = {(8, 16_384): 8.2, (32, 16_384): 23.4, (64, 262_144): 581.0, (1, 262_144): None}
_TOPK_US = {8192: 7.0, 32_768: 12.0, 131_072: 18.0, 262_144: 25.0}
_BOTH_US = {(8, 16_384): 15.2, (1, 262_144): 28.1}
_TOPK_SETS = 4
"""Few: in a step, scores are read right after they were written."""
_MAX_SETS = 14
_SETS_NBYTES = 256 << 20
"""Keys of all input sets together: several times the second-level cache, so that none stays."""


def measure(ceilings: Ceilings) -> Iterator[Figure | Skipped]:
    """Yield the figures; some gigabytes of device memory for as long."""
    peer = deep_gemm()
    if isinstance(peer, str):
        yield Skipped("kernels", peer)
        peer = None
    for (batch, entries), target in _SCORES_US.items():
        yield _scores_fp8(ceilings, peer, batch, entries, target)
        yield _scores_bf16(ceilings, batch, entries)
        torch.cuda.empty_cache()
    for entries, target in _TOPK_US.items():
        yield _topk(ceilings, 8, entries, target)
    for (batch, entries), target in _BOTH_US.items():
        yield _both(ceilings, peer, batch, entries, target)


@frozen
class _Scores:
    """Our scores over input sets that share their keys, each with queries and pages of its own."""

    queries: list[Tensor]
    weights: Tensor
    keys: IndexKeys
    tables: list[Tensor]
    positions: Tensor
    out: Tensor
    programs: int

    def __call__(self, i: int) -> None:
        """Launch one call."""
        place = i % len(self.queries)
        decode_scores(
            self.queries[place], self.weights, self.keys, self.tables[place], self.positions,
            self.out, ratio=RATIO, programs=self.programs,
        )  # fmt: skip


def _pages(batch: int, entries: int) -> tuple[int, list[Tensor]]:
    """Return how many pages there are, and tables [B, P] int32 of sets that share none of them."""
    own = entries // PAGE
    num_sets = min(_MAX_SETS, -(-_SETS_NBYTES // (batch * entries * WIDTH)))
    total = num_sets * batch * own
    order = torch.randperm(total, device="cuda").to(torch.int32)
    return total, list(order.view(num_sets, batch, own))


def _setup(batch: int, entries: int, keys: IndexKeys, tables: list[Tensor]) -> _Scores:
    is_fp8 = keys.scales is not None
    kind = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
    queries = [torch.randn(batch, HEADS, WIDTH, device="cuda").to(kind) for _ in tables]
    return _Scores(
        queries,
        torch.randn(batch, HEADS, device="cuda"),
        keys,
        tables,
        torch.full((batch,), entries * RATIO - 1, dtype=torch.int32, device="cuda"),
        torch.empty(batch, entries, device="cuda"),
        programs_each(queries[0], keys) * num_processors(),
    )


def _scores_fp8(
    ceilings: Ceilings, peer: DeepGEMM | None, batch: int, entries: int, target: float | None
) -> Figure:
    total, tables = _pages(batch, entries)
    values = torch.randn(total, PAGE * WIDTH, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(total, PAGE, device="cuda") + 0.5
    memory = torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=1)
    work = _setup(batch, entries, IndexKeys.in_planes(memory, PAGE), tables)
    peers: dict[str, Work] = {}
    note = ""
    if peer is not None:
        theirs = _PeerScores(peer, memory, work, entries)
        peers["DeepGEMM"] = theirs.run
        note = theirs.check()
    floor = ceilings.floor_us(batch * entries * (WIDTH + 4 + 4))
    return compared(
        ("kernels", "index scores", f"{batch} x {entries:,} fp8 keys"),
        work,
        peers,
        floor_us=floor,
        target_us=target,
        timer=_timer(batch * entries),
        note=note,
    )


def _scores_bf16(ceilings: Ceilings, batch: int, entries: int) -> Figure:
    total, tables = _pages(batch, entries)
    keys = torch.randn(total, PAGE, WIDTH, dtype=torch.bfloat16, device="cuda")
    work = _setup(batch, entries, IndexKeys.in_rows(keys), tables)
    floor = ceilings.floor_us(batch * entries * (2 * WIDTH + 4))
    about = "kernels", "index scores", f"{batch} x {entries:,} bf16 keys"
    return compared(about, work, {}, floor_us=floor, timer=_timer(batch * entries))


def _timer(entries: int) -> GraphTimer:
    return GraphTimer() if entries < 1 << 20 else GraphTimer(calls=4, replays=15)


class _PeerScores:
    """DeepGEMM's paged logits over the same pages."""

    def __init__(self, peer: DeepGEMM, memory: Tensor, ours: _Scores, entries: int) -> None:
        self._peer, self._ours, self._entries = peer, ours, entries
        self._pages = memory.view(len(memory), PAGE, 1, WIDTH + 4)
        batch = len(ours.weights)
        self._lengths = torch.full((batch, 1), entries, dtype=torch.int32, device="cuda")
        self._plan = peer.get_paged_mqa_logits_metadata(self._lengths, PAGE, num_processors())

    def run(self, i: int) -> Tensor:
        """Launch one call, whose schedule all layers of a step share."""
        ours = self._ours
        place = i % len(ours.queries)
        return self._peer.fp8_paged_mqa_logits(
            ours.queries[place].unsqueeze(1), self._pages, ours.weights, self._lengths,
            ours.tables[place], self._plan, self._entries, False,
        )  # fmt: skip

    def check(self) -> str:
        """Compare both results; return how far they are apart as a note."""
        self._ours(0)
        theirs = self.run(0)[:, : self._entries]
        return f"apart by {error(self._ours.out, theirs.float()):.1e}"


def _topk(ceilings: Ceilings, batch: int, entries: int, target: float) -> Figure:
    scores = [torch.randn(batch, entries, device="cuda") for _ in range(_TOPK_SETS)]
    positions = torch.full((batch,), entries * RATIO - 1, dtype=torch.int32, device="cuda")
    _, tables = _pages(batch, entries)
    out = torch.empty(batch, TOPK, dtype=torch.int32, device="cuda")

    def work(i: int) -> None:
        choose_rows(
            scores[i % _TOPK_SETS], positions, tables[0], out, ratio=RATIO, rows_per_page=PAGE
        )  # fmt: skip

    def by_torch(i: int) -> object:
        return torch.topk(scores[i % _TOPK_SETS], TOPK, dim=1)

    floor = ceilings.floor_us(batch * entries * 4)
    about = "kernels", "top-k 512, exact", f"{batch} x {entries:,}"
    peers: dict[str, Work] = {"torch.topk": by_torch}
    return compared(about, work, peers, floor_us=floor, target_us=target)


def _both(
    ceilings: Ceilings, peer: DeepGEMM | None, batch: int, entries: int, target: float
) -> Figure:
    """Time scores and the choice right behind them, which starts while they end."""
    total, tables = _pages(batch, entries)
    values = torch.randn(total, PAGE * WIDTH, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(total, PAGE, device="cuda") + 0.5
    memory = torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=1)
    scored = _setup(batch, entries, IndexKeys.in_planes(memory, PAGE), tables)
    out = torch.empty(batch, TOPK, dtype=torch.int32, device="cuda")

    def work(i: int) -> None:
        scored(i)
        choose_rows(
            scored.out, scored.positions, tables[i % len(tables)], out,
            ratio=RATIO, rows_per_page=PAGE,
        )  # fmt: skip

    peers: dict[str, Work] = {}
    if peer is not None:
        theirs = _PeerScores(peer, memory, scored, entries)
        peers["DeepGEMM, torch.topk"] = lambda i: theirs.run(i)[:, :entries].topk(TOPK, dim=1)
    floor = ceilings.floor_us(batch * entries * (WIDTH + 4 + 4))
    about = "kernels", "scores + top-k 512", f"{batch} x {entries:,} fp8 keys"
    return compared(about, work, peers, floor_us=floor, target_us=target)
