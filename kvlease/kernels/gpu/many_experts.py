# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportGeneralTypeIssues=false
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
_BLOCK = 2048
"""Slots that are sorted at once."""


@frozen
class Sorted:
    """Slots (a row and one of its experts, number row * wide + choice) in the order of experts.

    slots [N * wide] int32; counts [E] int32, how many each expert has.
    """

    slots: Tensor
    counts: Tensor


@triton.jit(do_not_specialize=["count"])
def _sort(chosen, slots, counts, count, BLOCK: tl.constexpr):
    """Write the slots of one expert, behind those of all experts before it."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, count, BLOCK):
        at = first + lanes
        before += (tl.load(chosen + at, mask=at < count, other=expert) < expert).to(tl.int32)
    begin = tl.sum(before)
    place = begin
    for first in range(0, count, BLOCK):
        at = first + lanes
        mine = (tl.load(chosen + at, mask=at < count, other=-1) == expert).to(tl.int32)
        tl.store(slots + place + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)
        place += tl.sum(mine)
    tl.store(counts + expert, place - begin)


def sort_slots(chosen: Tensor, num_experts: int) -> Sorted:
    """Return the slots of ``chosen`` [N, wide] int32 by expert, in one launch."""
    slots = torch.empty_like(chosen.view(-1))
    counts = chosen.new_empty((num_experts,))
    _sort[(num_experts,)](chosen, slots, counts, chosen.numel(), BLOCK=_BLOCK, num_warps=8)
    return Sorted(slots, counts)


@triton.jit
def _slots_of(slots, counts, tile, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr):
    """Return a tile's expert (E or more past the last one), its slots, and which lanes have one."""
    lanes = tl.arange(0, BE)
    sizes = tl.load(counts + lanes, mask=lanes < E, other=0)
    tiles = (sizes + BM - 1) // BM
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32))
    done = lanes < expert
    lane = (tile - tl.sum(tl.where(done, tiles, 0))) * BM + tl.arange(0, BM)
    real = lane < tl.sum(tl.where(lanes == expert, sizes, 0))
    mine = tl.load(slots + tl.sum(tl.where(done, sizes, 0)) + lane, mask=real, other=0)
    return expert, mine, real


@triton.jit
def _up(
    rows, slots, counts, shares, gate, up, out, limit, WIDE: tl.constexpr, E: tl.constexpr,
    BE: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write BN channels of the weighted hidden rows of one tile's slots, out [slots, F]."""
    expert, mine, real = _slots_of(slots, counts, tl.program_id(1), E, BE, BM)
    if expert < E:
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
    hidden, slots, counts, down, out, E: tl.constexpr, BE: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write BN channels of the outputs of one tile's slots, out [slots, D]."""
    expert, mine, real = _slots_of(slots, counts, tl.program_id(1), E, BE, BM)
    if expert < E:
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
    order = sort_slots(chosen, experts)
    inner = rows.new_empty((num_rows * wide, hidden))
    outer = rows.new_empty((num_rows, wide, width))
    # every expert may leave one tile unfilled
    tiles = triton.cdiv(chosen.numel(), tall) + experts
    block, step = min(128, triton.next_power_of_2(hidden)), min(64, triton.next_power_of_2(width))
    options = {"num_warps": 8 if tall > 16 else 4, "STAGES": 3, "BM": tall}
    options |= {"E": experts, "BE": triton.next_power_of_2(experts), "D": width, "F": hidden}
    _up[(triton.cdiv(hidden, block), tiles)](
        rows, order.slots, order.counts, shares, weights.gate, weights.up, inner, limit,
        WIDE=wide, BN=block, BK=step, **options,
    )  # fmt: skip
    block, step = min(128, triton.next_power_of_2(width)), min(64, triton.next_power_of_2(hidden))
    _down[(triton.cdiv(width, block), tiles)](
        inner, order.slots, order.counts, weights.down, outer, BN=block, BK=step, **options,
    )  # fmt: skip
    return outer.transpose(0, 1)
