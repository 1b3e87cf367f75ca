# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# Triton's language has no types: what a kernel does with them is checked by its tests.
"""A mixture of experts for many rows: rows sorted by expert, each expert on its own rows.

Nothing is counted on the host: the grid is as large as it could be needed, and programs past the
last tile end at once. Twin: ``kernels.moe``.
"""

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from kvlease.kernels.moe import ExpertWeights

_TALL = 128
"""Rows of one tile."""


@frozen
class Sorted:
    """Slots (a row and one of its experts) in the order of experts.

    slots [tiles * tall] int32: number of the slot (row * wide + choice), or the count of all slots
    where a tile is not full; experts [tiles] int32, or -1 past the last tile.
    """

    slots: Tensor
    experts: Tensor
    tall: int


def sort_slots(chosen: Tensor, num_experts: int, tall: int = _TALL) -> Sorted:
    """Return the slots of ``chosen`` [N, wide] int32 by expert, each expert's tiles padded."""
    count = chosen.numel()
    tiles = triton.cdiv(count, tall) + num_experts
    flat = chosen.flatten().long()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0)
    tile_ends = ((counts + tall - 1) // tall).cumsum(0)
    experts_in_order = flat[order]
    first = (ends - counts)[experts_in_order]
    first_tile = (tile_ends - (counts + tall - 1) // tall)[experts_in_order]
    lanes = torch.arange(count, device=chosen.device)
    slots = torch.full((tiles * tall,), count, dtype=torch.int32, device=chosen.device)
    slots.scatter_(0, first_tile * tall + lanes - first, order.int())
    numbers = torch.arange(tiles, device=chosen.device)
    experts = torch.searchsorted(tile_ends, numbers, right=True)
    experts = torch.where(experts < num_experts, experts, -1).int()
    return Sorted(slots, experts, tall)


@triton.jit
def _up(
    rows, slots, experts, shares, gate, up, out, count, limit, WIDE: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write BN channels of the weighted hidden rows of one tile's slots, out [slots, F]."""
    tile = tl.program_id(1)
    expert = tl.load(experts + tile)
    if expert >= 0:
        mine = tl.load(slots + tile * BM + tl.arange(0, BM))
        real = mine < count
        channels = tl.program_id(0) * BN + tl.arange(0, BN)
        deep = tl.arange(0, BK)
        first = tl.zeros((BM, BN), tl.float32)
        second = tl.zeros((BM, BN), tl.float32)
        inside = (channels < F)[:, None]
        at = (expert * F + channels).to(tl.int64)[:, None] * D + deep[None, :]
        vector = rows + (mine // WIDE).to(tl.int64)[:, None] * D + deep[None, :]
        for k in tl.range(0, D, BK, num_stages=STAGES):
            within = (deep + k < D)[None, :]
            x = tl.load(vector + k, mask=real[:, None] & within, other=0.0)
            a = tl.load(gate + at + k, mask=inside & within, other=0.0)
            first = tl.dot(x, a.T, first)
            b = tl.load(up + at + k, mask=inside & within, other=0.0)
            second = tl.dot(x, b.T, second)
        share = tl.load(shares + mine, mask=real, other=0.0)
        first = tl.minimum(first, limit)
        second = tl.minimum(tl.maximum(second, -limit), limit)
        hidden = first / (1.0 + tl.exp(-first)) * second * share[:, None]
        where = out + mine.to(tl.int64)[:, None] * F + channels[None, :]
        tl.store(where, hidden.to(tl.bfloat16), mask=real[:, None] & (channels < F)[None, :])


@triton.jit
def _down(
    hidden, slots, experts, down, out, count, E: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write BN channels of the outputs of one tile's slots, out [slots, D]."""
    tile = tl.program_id(1)
    expert = tl.load(experts + tile)
    if expert >= 0:
        mine = tl.load(slots + tile * BM + tl.arange(0, BM))
        real = mine < count
        channels = tl.program_id(0) * BN + tl.arange(0, BN)
        deep = tl.arange(0, BK)
        total = tl.zeros((BM, BN), tl.float32)
        inside = (channels < D)[:, None]
        at = channels.to(tl.int64)[:, None] * (E * F) + expert * F + deep[None, :]
        vector = hidden + mine.to(tl.int64)[:, None] * F + deep[None, :]
        for k in tl.range(0, F, BK, num_stages=STAGES):
            within = (deep + k < F)[None, :]
            x = tl.load(vector + k, mask=real[:, None] & within, other=0.0)
            w = tl.load(down + at + k, mask=inside & within, other=0.0)
            total = tl.dot(x, w.T, total)
        where = out + mine.to(tl.int64)[:, None] * D + channels[None, :]
        tl.store(where, total.to(tl.bfloat16), mask=real[:, None] & (channels < D)[None, :])


def mix_many(
    rows: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertWeights, limit: float
) -> Tensor:
    """Return each slot's weighted output, as parts to be added: [wide, N, D] bf16.

    Shapes: rows [N, D] bf16; chosen and shares [N, wide], int32 and float32.
    """
    (num_rows, width), wide = rows.shape, chosen.shape[1]
    experts, hidden = weights.num_experts, weights.width
    tall = _TALL if chosen.numel() >= 64 * experts else 16
    order = sort_slots(chosen, experts, tall)
    inner = rows.new_empty((num_rows * wide, hidden))
    outer = rows.new_empty((num_rows, wide, width))
    tiles = len(order.experts)
    block, step = min(128, triton.next_power_of_2(hidden)), min(64, triton.next_power_of_2(width))
    options = {"num_warps": 8 if tall > 16 else 4, "STAGES": 3}
    _up[(triton.cdiv(hidden, block), tiles)](
        rows, order.slots, order.experts, shares, weights.gate, weights.up, inner,
        chosen.numel(), limit, WIDE=wide, D=width, F=hidden, BM=tall, BN=block, BK=step, **options,
    )  # fmt: skip
    block, step = min(128, triton.next_power_of_2(width)), min(64, triton.next_power_of_2(hidden))
    _down[(triton.cdiv(width, block), tiles)](
        inner, order.slots, order.experts, weights.down, outer, chosen.numel(),
        E=experts, D=width, F=hidden, BM=tall, BN=block, BK=step, **options,
    )  # fmt: skip
    return outer.transpose(0, 1)
