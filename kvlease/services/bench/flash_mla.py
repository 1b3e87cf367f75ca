"""FlashMLA's side of the comparison: its page layout, its calls, and what both must agree on.

A page of R rows holds R parts of 576 bytes (448 e4m3 channels, 64 bf16), then R parts of 8 bytes
(7 power-of-two scales), padded to a multiple of 576.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.formats import decode_rows, encode_rows
from kvlease.kernels.gpu.attention_launch import Pool, Rows, planar_pool
from kvlease.protocols.schema import RowFormat
from kvlease.services.bench.graphs import Work
from kvlease.services.bench.peers import FlashMLA

_DATA, _SCALES = 576, 8
_WINDOW_PAGE, _EXTRA_PAGE = 256, 64
_NUM_ROWS = 1 << 17


@frozen
class PeerPool:
    """Rows in the peer's pages: as our kernels name them, as the peer does, and as numbers."""

    pool: Pool
    pages: Tensor
    numbers: Tensor


@frozen
class PeerPools:
    """The two pools of one decode: window rows and the others."""

    window: PeerPool
    extra: PeerPool


def peer_pools(width: int, rope: int) -> PeerPools:
    """Make both pools with random rows."""
    return PeerPools(_pool(width, rope, _WINDOW_PAGE), _pool(width, rope, _EXTRA_PAGE))


def _pool(width: int, rope: int, page_rows: int) -> PeerPool:
    fmt = RowFormat("fp8_latent", width, rope)
    stored = encode_rows(torch.randn(_NUM_ROWS, width, device="cuda"), fmt)
    num_pages = _NUM_ROWS // page_rows
    stride = -(-page_rows * fmt.nbytes // _DATA) * _DATA
    memory = torch.zeros(num_pages, stride, dtype=torch.uint8, device="cuda")
    by_page = stored.view(num_pages, page_rows, fmt.nbytes)
    split = page_rows * _DATA
    memory[:, :split] = by_page[..., :_DATA].reshape(num_pages, -1)
    memory[:, split : split + page_rows * _SCALES] = by_page[..., _DATA:].reshape(num_pages, -1)
    shape = num_pages, page_rows, 1, fmt.nbytes
    pages = memory.as_strided(shape, (stride, fmt.nbytes, fmt.nbytes, 1))
    numbers = decode_rows(stored, fmt, torch.float32)
    return PeerPool(planar_pool(memory, page_rows, width, rope), pages, numbers)


@frozen
class DecodeCase:
    """One input set: queries, sinks, and the rows that each reads of both pools."""

    q: Tensor
    out: Tensor
    sinks: Tensor
    positions: Tensor
    window: Tensor
    extra: Tensor

    @staticmethod
    def random(
        batch: int, heads: int, width: int, window: int = 128, extra: int = 512
    ) -> DecodeCase:
        """Draw a set; window rows are neighbours, the others lie within 16,384 rows."""
        q = torch.randn(batch, heads, width, dtype=torch.bfloat16, device="cuda")
        first = torch.randint(0, _NUM_ROWS - window, (batch, 1), device="cuda")
        near = first + torch.arange(window, device="cuda")
        base = torch.randint(0, _NUM_ROWS - 16_384, (batch, 1), device="cuda")
        far = torch.stack([torch.randperm(16_384, device="cuda")[:extra] for _ in range(batch)])
        positions = torch.full((batch,), 65_535, dtype=torch.int32, device="cuda")
        sinks = torch.randn(heads, device="cuda")
        index = torch.int32
        return DecodeCase(
            q, torch.empty_like(q), sinks, positions, near.to(index), (base + far).to(index)
        )


class PeerDecode:
    """FlashMLA's decode over the cases, its schedule planned once for all calls."""

    def __init__(
        self, peer: FlashMLA, pools: PeerPools, cases: Sequence[DecodeCase], scale: float
    ) -> None:
        """Plan the schedule with the first case; every case has its sizes."""
        self._peer, self._pools, self._cases, self._scale = peer, pools, cases, scale
        self._outs = [torch.empty_like(case.q).unsqueeze(1) for case in cases]
        self._schedule: tuple[Tensor | None, Tensor | None] = (None, None)
        _, _, *schedule = self._call(0)
        self._schedule = schedule[0], schedule[1]

    def _call(self, i: int) -> tuple[Tensor, ...]:
        case, pools = self._cases[i % len(self._cases)], self._pools
        return self._peer.sparse_decode_fwd(
            case.q.unsqueeze(1), pools.window.pages, case.window.unsqueeze(1), None, case.sinks,
            *self._schedule, pools.extra.pages, case.extra.unsqueeze(1), None,
            case.q.shape[2], self._scale, self._outs[i % len(self._cases)],
        )  # fmt: skip

    def run(self, i: int) -> object:
        """Launch one call."""
        return self._call(i)

    def check(self, ours: Work) -> str:
        """Compare both with float32 arithmetic on the same rows; return the errors as a note."""
        case, pools = self._cases[0], self._pools
        near = pools.window.numbers[case.window.long()]
        far = pools.extra.numbers[case.extra.long()]
        wanted = attend(case.q, torch.cat([near, far], 1), case.sinks, self._scale)
        ours(0)
        self._call(0)
        return _errors(case.out, self._outs[0][:, 0], wanted)


class PeerPrefill:
    """FlashMLA's prefill over one buffer that holds the cache's rows and then the chunk's own."""

    def __init__(
        self,
        peer: FlashMLA,
        base: Tensor,
        near: Tensor,
        chosen: Tensor,
        own: Tensor,
        rows: Rows,
        scale: float,
    ) -> None:
        """Lay out its inputs: chosen [N, K] rows of ``base``, own [N] rows of ``near``."""
        cached = base.flatten(0, 1)
        window = own.unsqueeze(1) - torch.arange(127, -1, -1, device="cuda", dtype=torch.int32)
        self._kv = torch.cat([cached, near]).unsqueeze(1)
        self._index = torch.cat([window + len(cached), chosen], dim=1).to(torch.int32).unsqueeze(1)
        self._peer, self._rows, self._scale = peer, rows, scale
        self._out = torch.empty_like(rows.q)

    def run(self, _: int) -> object:
        """Launch one call."""
        return self._peer.sparse_prefill_fwd(
            self._rows.q, self._kv, self._index, self._scale, self._out.shape[2],
            self._rows.sinks, None, self._out,
        )  # fmt: skip

    def check(self, ours: Tensor) -> str:
        """Compare both with float32 arithmetic on some rows; return the errors as a note."""
        some = slice(0, 64)
        keys = self._kv[self._index[some, 0].long(), 0].float()
        wanted = attend(self._rows.q[some], keys, self._rows.sinks, self._scale)
        self.run(0)
        return (
            f"error {error(ours[some], wanted):.1e}, FlashMLA {error(self._out[some], wanted):.1e}"
        )


def attend(q: Tensor, keys: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Return attention in float32; q [N, H, D], keys [N, K, D], which are the values too."""
    logits = torch.einsum("nhd,nkd->nhk", q.float(), keys) * scale
    joined = torch.cat([logits, sinks.view(1, -1, 1).expand(len(q), -1, 1)], dim=2)
    return torch.einsum("nhk,nkd->nhd", joined.softmax(2)[..., :-1], keys)


def _errors(ours: Tensor, theirs: Tensor, wanted: Tensor) -> str:
    return f"error {error(ours, wanted):.1e}, FlashMLA {error(theirs, wanted):.1e}"


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error of a result."""
    apart = (found.float() - wanted).square().sum().item()
    return float((apart / wanted.square().sum().item()) ** 0.5)
