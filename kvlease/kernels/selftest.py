"""Proof at start-up that a row's bits do not depend on its batch on this machine.

Runs every kind of arithmetic the models use, on random rows, alone and among others, and compares
bits. It proves what it tries; shapes are those of the tiles, which every product is cut into.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from attrs import frozen
from torch import Tensor

from kvlease.errors import ConfigError
from kvlease.kernels.activations import clamped_swiglu, fold_softmax, sigmoid, softplus
from kvlease.kernels.attention import KeyBlock, sparse_attention
from kvlease.kernels.indexer import index_scores
from kvlease.kernels.linear import batched, linear
from kvlease.kernels.mhc import sinkhorn
from kvlease.kernels.norms import accumulate_dtype, rms_norm
from kvlease.kernels.placing import CPU
from kvlease.kernels.rope import RopeSpec, inverse_frequencies, rotate_trailing_, rotation
from kvlease.kernels.routing import choose_by_score, route
from kvlease.kernels.tiling import EXACT, Tiling, pad_rows

_MANY = 96
"""Rows of the large batch; the small ones are slices of it."""
_SLICES = (slice(0, 1), slice(5, 8), slice(40, 77))


@frozen
class ProbeGeometry:
    """Widths that the probe's products take: wide enough to make a library split its sums."""

    width: int = 512
    heads: int = 4
    head_dim: int = 64
    keys: int = 128
    index_heads: int = 16
    index_dim: int = 32
    norm_width: int = 512
    """How wide the widest norm is: the residual streams' together."""


@frozen
class InvarianceReport:
    """What was tried, and which kinds of arithmetic gave a row other bits in another batch.

    ``threads`` counts those of the CPU, and decides nothing on another device.
    """

    dtype: str
    threads: int
    tried: tuple[str, ...]
    varying: tuple[str, ...]
    device: str = "cpu"

    @property
    def is_invariant(self) -> bool:
        """Whether nothing varied."""
        return not self.varying


def row_invariance(
    dtype: torch.dtype,
    geometry: ProbeGeometry | None = None,
    tiling: Tiling = EXACT,
    device: torch.device = CPU,
) -> InvarianceReport:
    """Compare each row computed among 96 with the same row in smaller batches, bit for bit."""
    probes = _probes(dtype, geometry or ProbeGeometry(), tiling, device)
    varying = [
        name for name, (probe, rows) in probes.items() if not _is_stable(probe, rows, tiling)
    ]
    return InvarianceReport(
        str(dtype).removeprefix("torch."),
        torch.get_num_threads(),
        tuple(probes),
        tuple(varying),
        device.type,
    )


@lru_cache(maxsize=8)
def _cached_report(
    dtype: torch.dtype, threads: int, device: torch.device, norm_width: int
) -> InvarianceReport:
    return row_invariance(dtype, ProbeGeometry(norm_width=norm_width), device=device)


def require_row_invariance(
    dtype: torch.dtype, device: torch.device = CPU, norm_width: int = 512
) -> InvarianceReport:
    """Return the report; probes once per dtype, place and width of the widest norm.

    Raises:
        ConfigError: some arithmetic varies with the batch, so answers cannot be exact here.
    """
    # on the CPU a norm adds up its row in an order that only the row's own width decides
    width = 512 if device.type == "cpu" else norm_width
    report = _cached_report(dtype, torch.get_num_threads(), device, width)
    if not report.is_invariant:
        where, hint = f"{report.threads} threads", " or another OMP_NUM_THREADS"
        if report.device != "cpu":
            where, hint = f"device {report.device}", ""
        raise ConfigError(
            f"exact answers cannot be had here: {', '.join(report.varying)} in {report.dtype} with"
            f" {where} depend on the batch; use --no-exact{hint}"
        )
    return report


Probe = Callable[[list[Tensor]], Tensor]


def _is_stable(probe: Probe, rows: list[Tensor], tiling: Tiling) -> bool:
    together = probe([part.clone() for part in rows])
    for piece in _SLICES:
        count = piece.stop - piece.start
        alone = [pad_rows(part[piece].clone(), tiling.round_rows(count)) for part in rows]
        if not torch.equal(probe(alone)[:count], together[piece]):
            return False
    return True


def _probes(
    dtype: torch.dtype, g: ProbeGeometry, tiling: Tiling, device: torch.device
) -> dict[str, tuple[Probe, list[Tensor]]]:
    draw = torch.Generator().manual_seed(7)
    wide = accumulate_dtype(dtype)

    def rows(*shape: int) -> Tensor:
        return torch.randn((_MANY, *shape), generator=draw).to(device, wide)

    matrix = torch.randn((g.width, g.width), generator=draw).to(device, dtype)
    wide_matrix = matrix.to(wide)
    weight = torch.rand(g.width, generator=draw).to(device, wide)
    stream_weight = torch.rand(g.norm_width, generator=draw).to(device, wide)
    sinks = torch.randn(g.heads, generator=draw).to(device, wide)
    frequencies = inverse_frequencies(RopeSpec(g.head_dim // 4, 10000.0), wide, device)

    def attention(parts: list[Tensor]) -> Tensor:
        seen = torch.ones(parts[1].shape[:2], dtype=torch.bool, device=device)
        blocks = [KeyBlock(parts[1], seen), KeyBlock(parts[2], seen)]
        return sparse_attention(parts[0], sinks, blocks, g.head_dim**-0.5, tiling)

    def turned(parts: list[Tensor]) -> Tensor:
        turn = rotation((parts[0][:, 0, 0] * 1000).to(torch.int64).abs(), frequencies)
        return rotate_trailing_(parts[0].clone(), turn)

    hidden = rows(g.width)
    heads = rows(g.heads, g.head_dim)
    return {
        "linear": (lambda p: linear(p[0], matrix, tiling), [hidden.to(dtype)]),
        "wide linear": (lambda p: linear(p[0], wide_matrix, tiling), [hidden]),
        "norm": (lambda p: rms_norm(p[0], weight, 1e-6), [hidden]),
        "sigmoid": (lambda p: sigmoid(p[0]), [hidden]),
        "softplus": (lambda p: softplus(p[0]), [hidden]),
        "swiglu": (lambda p: clamped_swiglu(p[0], p[0], 10.0), [hidden]),
        "softmax": (lambda p: p[0].softmax(dim=-1), [hidden]),
        "pooling": (lambda p: fold_softmax(p[0], 1), [rows(8, g.head_dim)]),
        "rotation": (turned, [heads]),
        "sinkhorn": (lambda p: sinkhorn(p[0].softmax(dim=2), 4, 1e-6), [rows(4, 4)]),
        "mixing": (lambda p: batched(p[0], p[1], tiling), [rows(4, 4), rows(4, g.width)]),
        "stream norm": (lambda p: rms_norm(p[0], stream_weight, 1e-6), [rows(g.norm_width)]),
        "routing": (
            lambda p: route(sigmoid(p[0]), choose_by_score(p[0], weight[:8], 6), 1.5).weights,
            [rows(8)],
        ),
        "attention": (
            attention,
            [heads, rows(g.keys, g.head_dim), rows(g.keys, g.head_dim)],
        ),
        "index scores": (
            lambda p: index_scores(p[0], p[1], p[2], tiling),
            [rows(g.index_heads, g.index_dim), rows(g.index_heads), rows(g.keys, g.index_dim)],
        ),
    }
